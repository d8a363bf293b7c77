"""Products whose operands are computed before they are multiplied, and results that read nothing."""

from __future__ import annotations

import numpy as np
import pytest

import transconv
from transconv.__main__ import main
from transconv.backend_triton import Resources, compile_offline
from transconv.compute import execute, parse
from transconv.errors import ScheduleError, TensorError
from transconv.runtime import build_compute, job_of
from transconv.schedule import Schedule, tile
from transconv.selection.candidates import estimated
from transconv.selection.proposals import heuristics
from transconv.target import Target
from transconv.verify.computation import after_every_pass

SM90 = Target.parse("sm_90")
HEAD = """compute product
    tensor X {t} [40, 64]
    tensor S {t} [64]
    tensor W {t} [24, 64]
    axes   m=40 n=24 | k=64
    read   x = X[m, k]
    read   s = S[k]
    read   w = W[n, k]
"""
TYPED = HEAD.format(t="bf16") + " let r = bf16(relu(x*s))\n store Y[m, n] = sum(r*w; k)"
WIDE = HEAD.format(t="f16") + " store Y[m, n] = sum(relu(x - s)*w; k)"
SINGLE = HEAD.format(t="f32") + " store Y[m, n] = sum(relu(x)*tanh(w + s); k)"
BOTH = HEAD.format(t="f32").replace(" | k=64", " | k=60").replace("64", "60") + (
    " let a = exp(x)\n let b = w*s\n store Y[m, n] = sum(a*b; k)"
)
WIDENED = HEAD.format(t="f16").replace("X f16", "X i8") + (
    " let a = f16(x)*s\n store Y[m, n] = sum(a*w; k)"
)
TILE = "m:16 n:16 k:{k} | mma"


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("text", "k"),
    [(TYPED, 32), (WIDE, 32), (SINGLE, 16), (BOTH, 4)],
    ids=["typed", "wide", "single", "both"],
)
def test_the_matrix_unit_takes_what_was_computed(text: str, k: int) -> None:
    """Where the tile's blocks divide the sum: beyond its end a value could be anything."""
    made = parse(text)
    assert made.prologue and str(parse(str(made))) == str(made)
    assert {made.kind(a) for a in "mnk"} == {"M", "N", "K"}
    schedule = Schedule.parse(TILE.format(k=k)) if k >= 16 else Schedule.parse("m:8 n:8 k:4 | fma")
    plan = build_compute(made, SM90, schedule)
    assert ("tl.dot(" in plan.source) == (k >= 16)
    assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(made, plan) if j.problem] == []


def test_the_best_schedule_uses_the_matrix_unit() -> None:
    plan = transconv.compile(TYPED.replace("40", "512").replace("24", "256"), "sm_90")
    assert plan.schedule.unit == "mma" and "tl.dot(" in plan.source


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "text",
    [
        TYPED,
        BOTH.replace("60", "64")
        .replace("f32", "f16")
        .replace("exp(x)", "f16(exp(x))")
        .replace("w*s", "f16(w*s)"),
        WIDENED,
    ],
    ids=["left", "both", "widened"],
)
def test_a_product_of_computed_factors_is_compiled_right(text: str) -> None:
    """A left side in registers would be overwritten while several products of a step read it: such kernels
    are refused, so the proposals have none."""
    large = parse(text.replace("64", "512").replace("40", "32768").replace("24", "512"))
    found = [x.schedule for x in estimated(60, large, SM90)]
    assert all(s.swap == 1 or s.stages == 1 for s in found[:8]), [*map(str, found)]
    assert all(
        s.swap == 1 or s.stages == 1 or tile(s, large, "M") < 64 or tile(s, large, "K") <= 16
        for s in found
    ), [*map(str, found)]
    plan = build_compute(large, SM90, found[0])
    (made,) = compile_offline([job_of(plan.steps[0], SM90)])
    assert isinstance(made, Resources) and not made.flaw and "HGMMA" in made.words, made


def test_what_mma_sync_multiplies_stays_on_its_side() -> None:
    """Few warps or rows: both sides are in registers anyway."""
    large = parse(
        (HEAD.format(t="f32") + " store Y[m, n] = sum(relu(x*s)*w; k)")
        .replace("24", "512")
        .replace("64", "512")
        .replace("40", "4096")
    )
    small = [
        s
        for s in heuristics.proposals(large, SM90)
        if s.unit == "mma"
        and s.via == "tl"
        and (s.warps < 4 or max(tile(s, large, side) for side in "MN") < 64)
    ]
    assert {s.warps for s in small} == {2, 4} and not any(s.swap for s in small), [*map(str, small)]


@pytest.mark.parametrize("first", ["b", "a"])
def test_what_is_read_first_is_added_to_sums_in_parts(first: str) -> None:
    """By the second kernel, whose own reads have other names."""
    bias = (
        f" read {first} = B[n]\n let r = f16(relu(x*s))\n let y = sum(r*w; k)\n"
        f" store Y[m, n] = y + {first}"
    )
    made = parse(HEAD.format(t="f16").replace("    axes", "    tensor B f16 [24]\n    axes") + bias)
    plan = build_compute(made, SM90, Schedule.parse("m:16 n:16 k:32 | mma | split_k=2"))
    assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(made, plan) if j.problem] == []


def test_what_only_looks_like_a_product_is_a_reduction() -> None:
    """Both factors vary along every stored axis, so there is no matrix product."""
    head = "axes n=8 | k=32\n read x = X[n, k]\n"
    norm = f"compute norm\n {head} read g = G[k]\n store Y[n] = sum(exp(x)*g; k)"
    square = f"compute square\n {head} let d = x + 1\n store Y[n] = sum(d*d; k)"
    for text in (norm, square):
        made = parse(text)
        assert made.factors is None and made.streams and not made.prologue


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("m:16 n:16 k:64 | mma | a=box", "r is computed from it before it is multiplied"),
        ("m:16 n:16 k:32 | mma | pack=a", "r is computed from it before it is multiplied"),
        ("m:16 n:16 k:128 | mma", "block k:128 does not divide 64: r, which is computed before"),
        ("m:16 n:1 k:64 | fma | regs=n", "regs=n: r is computed before it is multiplied"),
    ],
)
def test_what_is_refused(schedule: str, said: str) -> None:
    with pytest.raises(ScheduleError) as refusal:
        transconv.compile(TYPED, "sm_90", schedule)
    assert said in str(refusal.value)


# -- nothing is read -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("axes n=40\n store Y[n] = f32(n)", np.arange(40.0)),
        ("tensor Y i64 [40]\n axes n=40\n store Y[n] = n*3", np.arange(40) * 3),
        ("axes q=5 k=6\n store Y[q, k] = where(k <= q, 0, -inf)", np.where(np.tri(5, 6), 0.0, -np.inf)),
        ("axes n=4 | k=9\n store Y[n] = sum(f32(k*n); k)", np.arange(4) * 36.0),
    ],
)
def test_results_that_read_nothing(text: str, want: np.ndarray) -> None:
    made = parse(f"compute iota\n {text}")
    assert np.array_equal(execute(made, {})["Y"].value, want)
    plan = build_compute(made, SM90)
    assert [j.problem for _, j in after_every_pass(made, plan) if j.problem] == []


def test_a_function_of_nothing_says_what_it_lacks() -> None:
    with pytest.raises(TensorError, match="iota reads no tensor"):
        transconv.computation("compute iota\n axes n=4\n store Y[n] = f32(n)")()


def test_a_mask_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "compute iota\n axes n=4\n store Y[n] = f32(n)", "--target", "sm_90"]) == 0
    assert "tl.store(Y + n" in capsys.readouterr().out


# -- gathers ---------------------------------------------------------------------------------------


def test_gathered_rows_are_no_neighbours() -> None:
    """The estimate counts a memory segment for each of them."""
    from transconv.cost.fetches import fetch

    text = """compute rows
        tensor X f32 [4096, 4]
        tensor I i64 [4096]
        axes n=4096 k=4
        {index}
        read x = X[{at}, k]
        store Y[n, k] = x"""
    plain = parse(text.format(index="read j = I[n]", at="n"))
    gathered = parse(text.format(index="read j = I[n]", at="j"))
    schedule = Schedule.parse("n.k:512 | fma")
    moved = [fetch(c.reads[1].view, schedule, c, "gather") for c in (plain, gathered)]
    assert moved[0].bytes == 512 * 4 and moved[1].bytes == 512 // 4 * 32
    assert (moved[0].row, moved[1].row) == (512 * 4, 32)
