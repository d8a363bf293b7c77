"""Drawn computations: after every pass their kernels store what their steps mean."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests import programs
from tests.verify import planted
from transconv.__main__ import main
from transconv.compute import END, OPS, Reduction, parse
from transconv.errors import ProblemError
from transconv.runtime import Plan
from transconv.schedule import Schedule
from transconv.schedule.words import TABLE
from transconv.target.records import TARGETS
from transconv.verify import any_size
from transconv.verify.computation import ComputationCase, wide
from transconv.verify.fuzz import compute_texts, legal_schedules
from transconv.verify.fuzz.compute_trial import ComputeTrial, draw_trial
from transconv.verify.fuzz.main_loop import repeated, trial_of, work
from transconv.verify.fuzz.trial import shrink

ROOT = Path(__file__).parents[2]


@cache
def drawn() -> list[ComputeTrial]:
    return [draw_trial("u", n) for n in range(60)]


@pytest.mark.parametrize("numbers", [range(6), pytest.param(range(6, 10), marks=pytest.mark.slow)])
def test_trials(numbers: range) -> None:
    """`transconv fuzz --computes` runs more."""
    bad = [row for n in numbers if (row := work("3", n, kind="computes"))["status"] != "passed"]
    assert not bad, "\n".join(f"{r['reason']}\n{repeated(r)}" for r in bad)


@pytest.mark.slow
def test_boxes_behind_a_sum_are_drawn() -> None:
    """What the producer fetches, of one residual in twenty on this chip."""

    def schedule(seed: int) -> Schedule | None:
        rng = Random(seed)
        compute = parse(compute_texts._residual(compute_texts.TextPage(rng)))
        return legal_schedules.schedule(rng, [compute], TARGETS["sm_90"])

    assert any((s := schedule(n)) is not None and s.behind == "box" for n in range(120))


@pytest.mark.slow
def test_everything_is_drawn() -> None:
    """Every kind, every word of rows, and everything that a text can say about where an element lies."""
    seen: dict[str, set[str]] = {}
    for trial in drawn():
        for name, word in trial.facts.items():
            seen.setdefault(name, set()).add(word)
    sized = [any_size.drawn_text(Random(n)) for n in range(30)]
    whole = "\n".join((*(t.text for t in drawn()), *sized))
    for said in (
        "compute product",
        "compute chain",
        "compute rows",
        "reduced_max",
        "reduced_min",
        "reduced_prod",
        "reduced_sum",
        " else ",
        " where ",
        " // ",
        "strides(",
        "f16",
        "bf16",
        "compute statistics",
        "compute residual",
        " squares= ",
        "f32",
        "store D",
        "math=ieee",
        "k0 k1)",
        "argmax(",
        "argmin(",
        " += ",
        "_gradient",
        "compute long",
        "any_chain",
        "any_reduced_",
        "any_mean",
        "any_rows",
        "any_product",
    ):
        assert said in whole, said
    for name in ("red", "row"):
        assert set(TABLE[name].values) <= seen[name], name
    assert {"partials", "atomic"} <= seen["reduce"] and len(seen["split_k"]) > 1
    for name in ("sizes", "stores", "places", "kernels"):
        assert len(seen[name]) == 2, name
    assert seen["factors"] == {"none", "read", "computed"}
    assert any("red=" in t.schedule and ":" not in t.schedule for t in drawn())  # selection finds the tile


def test_every_function_that_makes_a_number_may_be_drawn() -> None:
    assert {*compute_texts.EXACT} == {n for n, op in OPS.items() if op.exact and op.arity < 3} - {
        "lt",
        "le",
        "gt",
        "ge",
        "eq",
        "ne",
    }
    rounded = {*compute_texts.DRAWN} - {*compute_texts.EXACT}
    assert {*compute_texts.DRAWN} > {*compute_texts.EXACT} and {"gelu", "sigmoid", "tanh"} <= rounded


def test_slopes_are_judged_in_f64() -> None:
    """Every float tensor; positions and whole numbers keep their types."""
    narrow = parse(
        "compute rows\n tensor I i64 [4]\n tensor X bf16 [9, 5]\n tensor W f8e4m3 [5]\n"
        " tensor Y f32 [4, 5]\n axes m=4 k=5\n read i = I[m]\n read x = X[i, k]\n"
        " read w = W[k]\n store Y[m, k] = x * w"
    )
    made = wide(narrow)
    assert {t.name: str(t.dtype) for t in made.tensors} == {"I": "i64", "X": "f64", "W": "f64", "Y": "f64"}
    assert [t.shape for t in made.tensors] == [t.shape for t in narrow.tensors]
    assert wide(made) == made


def test_lines_read_back() -> None:
    for trial in drawn()[:10]:
        again = trial_of(str(trial))
        assert isinstance(again, ComputeTrial) and again.compute == trial.compute
        assert (again.target, again.schedule) == (trial.target, trial.schedule)
    with pytest.raises(ProblemError, match="begins with compute"):
        ComputeTrial.parse("--speed=3 compute c")


@pytest.mark.slow
def test_a_trial_is_the_same_in_another_process() -> None:
    code = (
        "from transconv.verify.fuzz.compute_trial import draw_trial;"
        "print([draw_trial('tests', n) for n in range(6)])"
    )
    told = programs.run(["-c", code], cwd=ROOT, check=True).stdout
    assert told.strip() == str([draw_trial("tests", n) for n in range(6)])


TEXT = "compute rows\n axes m=21 k=37\n read x = X[m, k]\n store Y[m] = sum(x; k)"


def test_a_bug_is_found_and_attributed(capsys: pytest.CaptureFixture[str]) -> None:
    """The printed line repeats the failure, and bisection of the same words names the stage."""
    trial = ComputeTrial(TEXT, "sm_90", "m:8 k:16 | fma")
    assert work(line=str(trial))["status"] == "passed"
    bug = next(b for b in planted.PASSES if b.what == "the last program is not started")
    with planted.planted_pass(bug):
        row = work(line=str(trial))
        assert row["status"] == "failed" and "after gridwise: Y[16] is nan" in row["reason"]
        assert trial.text.replace("\n", " ;;") in repeated(row)
        words = ["bisect", TEXT, "--target", "sm_90", "--schedule", trial.schedule, "--parts", "ir"]
        assert main(words) == 1
        assert "WRONG in stage gridwise" in capsys.readouterr().out


def test_shrinking_keeps_what_fails() -> None:
    """Shrinking leaves the one condition that fails, a maximum over a few elements, and removes the
    rest."""
    text = (
        f"{TEXT}\n read y = Y2[k, 20 - m] where m < 9\n let t = max(x - y*2; k)\n store Z[m] = relu(t) + 1"
    ).replace("compute rows", "compute rows math=ieee")
    trial = ComputeTrial(
        text.replace(" read x", " tensor X f16 [30, 40]\n read x"),
        "sm_90",
        "m:8 k:16 | fma | late=1 warps=2",
    )

    def fails(tried: Sequence[ComputeTrial]) -> int | None:
        return next(
            (
                n
                for n, t in enumerate(tried)
                if t.compute.size("k") >= 3
                and any(isinstance(s, Reduction) and s.op == "max" for s in t.compute.steps)
            ),
            None,
        )

    simple, asked = shrink(trial, fails, most=1000)
    assert simple.schedule == "" and asked < 1000
    lines = [line.strip() for line in simple.text.split(END)]
    assert lines[:2] == ["compute rows", "axes m=1 k=3"] and len(lines) <= 5 + ("y" in simple.text)
    assert "tensor" not in simple.text and "where" not in simple.text


def test_simpler_trials_are_trials() -> None:
    for trial in drawn()[:3]:
        found = list(itertools.islice(trial.simpler(), 12))
        assert found and all(parse(t.text) and t != trial for t in found)


def test_sizes_that_are_arguments_become_numbers() -> None:
    trial = next(t for t in drawn() if t.compute.named)
    assert trial.compute.named is not None
    names = trial.compute.named.names
    assert any(t.compute.named is None or len(t.compute.named.names) < len(names) for t in trial.simpler())


def test_what_is_behind_a_sum_may_make_its_error_larger() -> None:
    """An operation that is steeper than 1, of a product of tf32 that is nearly all there is."""
    text = (
        "compute product\n tensor X f32 [64, 1]\n tensor W f32 [1, 48]\n axes m=64 n=48 k=1\n"
        "read x = X[m, k]\n read w = W[k, n]\n let s = sum(x*w; k)\n"
        "store C[m, n] = hardswish(s)*2 - s"
    )
    assert ComputeTrial(text, "sm_90", "m:16 n:16 k:16 | mma | stages=2 warps=2").problem() == ""


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("what", "reason"),
    [("before", "wrote outside of Y"), ("between", "wrote outside of Y"), ("operand", "changed X")],
)
def test_what_is_written_beside_results_is_seen(
    what: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the result and between its elements, and in an operand."""
    case = ComputationCase(parse(TEXT.replace(" axes", " tensor Y f32 [21] strides(2)\n axes")))
    honest = Plan.run

    def run(plan: Plan, tensors: dict[str, Any]) -> None:
        honest(plan, tensors)
        name, at = {"before": ("Y", -1), "between": ("Y", 1), "operand": ("X", 0)}[what]
        held = tensors[name]
        held.as_strided((1,), (1,), held.storage_offset() + at).fill_(7.0)

    plan = case.plan("m:8 k:16 | fma")
    assert case.launched(plan, case.where).problem == ""
    monkeypatch.setattr(Plan, "run", run)
    assert case.launched(plan, case.where).problem == reason
