"""What an epilogue reads, fetched by the producer (``behind=box``): right after every pass and in
any order of the roles, with the barriers that it needs, and refused in a sentence where it cannot be."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.stages import SM90
from transconv import ir
from transconv.backend_triton.emitters import gluon
from transconv.backend_triton.launch import bound_start
from transconv.compute import Compute, Read, Write, parse
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.cost import estimate
from transconv.ir.interp.evaluate import InterpError, Memory
from transconv.ir.interp.kernel import run
from transconv.passes import pipeline
from transconv.passes.lowering.launch_fusion import together
from transconv.runtime import build_compute
from transconv.schedule import Schedule, told_behind, why_not
from transconv.verify.computation import ComputationCase, after_every_pass

GLUON = "mma | a=box b=box via=gluon behind=box"
RESIDUAL = "    read   r = R[n, o, h, w]\n    let    y = s + f32(r)\n"
GATED = (
    "    read   r = R[n, o, h, w]\n    read   g = G[n, o, h, w]\n    read   b = B[o]\n"
    "    let    y = where(f32(g) > 0.0, s + f32(r) + f32(b), 0.0)\n"
)
MASKED = (
    "    read   r = R[n, o, h, w]\n    read   g = G[n, o, h, w]\n"
    "    let    y = where(g, s + f32(r), 0.0)\n"
)


def layer(
    n: int,
    c: int,
    o: int,
    h: int,
    w: int,
    behind: str = RESIDUAL,
    order: str = "acdb",
    types: str = "f16 f16 f16",
    kernel: int = 3,
) -> str:
    """A convolution with what follows its sum; ``types``: those of R, G and Y."""
    of_r, of_g, of_y = types.split()
    shape = f"[n={n}, o={o}, h={h}, w={w}] {order}"
    read = [
        f"    tensor {name} {dtype} {shape}\n"
        for name, dtype in (("R", of_r), ("G", of_g))
        if f"{name}[" in behind
    ]
    vector = f"    tensor B f16 [o={o}]\n" if "B[" in behind else ""
    pad = kernel // 2
    return (
        f"compute conv\n    tensor X f16 [n={n}, c={c}, h={h}, w={w}] acdb\n"
        f"    tensor W f16 [o={o}, c={c}, kh={kernel}, kw={kernel}] acdb\n{''.join(read)}{vector}"
        f"    tensor Y {of_y} {shape}\n"
        f"    axes   n={n} h={h} w={w} o={o} | kh={kernel} kw={kernel} c={c}\n"
        f"    read   x = X[n, c, h + kh - {pad}, w + kw - {pad}]\n    read   k = W[o, c, kh, kw]\n"
        f"    let    s = sum(x*k; kh kw c)\n{behind}    store  Y[n, o, h, w] = y\n"
    )


CASES = {
    "one tile": (layer(2, 16, 64, 8, 8), f"h:4 w:8 o:64 c:16 | {GLUON} c=box swap=1 stages=2"),
    "persistent": (layer(2, 16, 72, 7, 9), f"h:4 w:8 o:64 c:16 | {GLUON} c=box swap=1 programs=3"),
    "in turns": (
        layer(3, 16, 72, 9, 9, GATED),
        f"h:4 w:8 o:64 c:16 | {GLUON} c=box swap=1 programs=2 consumers=2",
    ),
    "one step": (
        layer(3, 16, 40, 9, 9, GATED, kernel=1),
        f"h:8 w:8 o:16 c:16 | {GLUON} c=box programs=3 consumers=2 stages=4",
    ),
    "another type": (
        layer(3, 16, 40, 9, 9, types="f32 f16 f16"),
        f"h:8 w:8 o:16 c:16 | {GLUON} c=box programs=4",
    ),
    "stored apart": (layer(3, 16, 40, 9, 9, GATED), f"h:8 w:8 o:16 c:16 | {GLUON} programs=5 consumers=2"),
    "truth values": (
        layer(3, 16, 48, 9, 9, MASKED, types="f16 boolean f16"),
        f"h:8 w:8 o:16 c:16 | {GLUON} c=box programs=5 consumers=2",
    ),
    "positions innermost": (
        layer(2, 16, 64, 8, 16, order="abcd"),
        f"h:4 w:16 o:64 c:16 | {GLUON} c=box programs=3",
    ),
}


def kernel(text: str, schedule: str) -> ir.Kernel:
    return pipeline.lower(parse(text), Schedule.parse(schedule), SM90, "conv", "ieee")[-1][1]


def fetched(made: ir.Kernel) -> dict[str, str]:
    """The buffers that tensors are fetched to."""
    return {f.tensor.name: f.piece.buffer.name for f in ir.find(made, ir.Fetch)}


def of_any_size(text: str) -> str:
    """The same with names for the sizes of images and their number."""
    for axis, size, name in (("n", 2, "N"), ("h", 7, "H"), ("w", 9, "V")):
        for before in " [":
            text = text.replace(f"{before}{axis}={size}", f"{before}{axis}={name}")
    return text.replace("conv\n", "conv\n    sizes  N=2 in 1..64, H=7 in 1..512, V=9 in 1..512\n", 1)


def test_truth_values_are_moved_as_bytes() -> None:
    made = kernel(*CASES["truth values"])
    ((gate, extents),) = {
        (f.tensor, f.piece.buffer.extents) for f in ir.find(made, ir.Fetch) if f.tensor.name == "G"
    }
    assert ".load(sums) != 0" in gluon.emit(made)
    for describe in (bound_start.describe_explicit, bound_start.describe):
        made_of = torch.empty(3 * 9 * 9 * 48, dtype=torch.bool, device="meta")
        assert describe(made_of, gate, extents).base.dtype is torch.uint8


@pytest.mark.slow
def test_sizes_that_are_arguments() -> None:
    text, schedule = CASES["persistent"]
    compute = parse(of_any_size(text))
    plan = build_compute(compute, SM90, Schedule.parse(f"{schedule} consumers=2"))
    found = after_every_pass(compute, plan, {"N": 1, "H": 5, "V": 9})
    assert not [(stage, judged.problem) for stage, judged in found if judged.problem]


@pytest.mark.slow
def test_stride_phases_in_one_launch() -> None:
    """The gradient of the input, to which another is added: consumers go on taking turns."""
    problem = ConvProblem.parse("mb14ic16ih8oc32oh4kh3sh2ph1 dt=f16 tag=axb")
    schedule = Schedule.parse(f"mb:4 qh:4 qw:4 ic:16 oc:16 | {GLUON} c=box programs=2 consumers=2")
    made = [
        pipeline.lower(_with_another(c), schedule, SM90, "conv", "ieee")[-1][1]
        for c in computes(problem, Prop.BWD_D)
    ]
    whole = together(made)
    assert whole is not None and len(made) == 4
    draw, span = np.random.default_rng(0), problem.src.layout.span
    given = {
        "wei": draw.integers(-2, 3, problem.wei.layout.span),
        "R": draw.integers(-9, 9, span),
        "dst": draw.integers(-2, 3, problem.dst.layout.span),
    }
    answers = []
    for factor in (1, 0):
        memory = Memory(
            {n: (x * (factor if n == "R" else 1)).astype(np.float16) for n, x in given.items()}
            | {"src": np.full(span, np.nan, np.float16)}
        )
        run(whole, memory, seed=1)
        answers.append(memory.buffers["src"].astype(np.float64))
    assert (answers[0] - answers[1] == given["R"]).all() and np.abs(answers[1]).max() > 9


def _with_another(compute: Compute) -> Compute:
    """The computation of a phase, with the elements of R added to it."""
    *steps, store = compute.steps
    assert isinstance(store, Write) and isinstance(store.value, ir.Cast)
    other = Read("r", ir.View(replace(compute.c.tensor, name="R"), compute.c.dims))
    value = replace(store.value, x=store.value.x + ir.Cast(other.var, ir.f32))
    return replace(compute, steps=(*steps, other, replace(store, value=value)))


@pytest.mark.every(12)
@pytest.mark.parametrize("name", CASES)
def test_every_pass_gives_the_answer(name: str) -> None:
    text, schedule = CASES[name]
    compute = parse(text)
    found = after_every_pass(compute, build_compute(compute, SM90, Schedule.parse(schedule)))
    assert not [(stage, judged.problem) for stage, judged in found if judged.problem]
    assert found[-1][0] == "roles"


def test_the_result_takes_the_place_of_the_first_that_is_alike() -> None:
    assert fetched(kernel(*CASES["in turns"])) == {
        "X": "X_ring",
        "W": "W_ring",
        "R": "Y_tile",
        "G": "G_tile",
    }
    assert fetched(kernel(*CASES["another type"]))["R"] == "R_tile"
    assert fetched(kernel(*CASES["stored apart"]))["R"] == "R_tile"


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["in turns", "stored apart", "one step"])
def test_only_vectors_are_still_loaded(name: str) -> None:
    made = kernel(*CASES[name])
    assert {x.tensor.name for x in ir.find(made, ir.Load)} == {"B"}
    barriers = {b.name: b.slots for b in ir.find(made, ir.Barrier)}
    assert barriers["brought"] == barriers["emptied"] == 2


class Without(ir.Mutator):
    """A kernel without the calls that a test takes away."""

    def __init__(self, func: str, barrier: str = "") -> None:
        self.func, self.barrier = func, barrier

    def mutate_FuncCall(self, at: ir.FuncCall) -> ir.Stmt | None:
        named = at.args[0].name if at.args and isinstance(at.args[0], ir.Barrier) else ""
        return None if at.func.name == self.func and named == self.barrier else at


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "func", "barrier", "says"),
    [
        ("one step", "wait", "emptied", "is written"),
        ("one step", "wait", "brought", "is used|is written"),
        ("one step", "send_wait", "", "is written"),
        ("one step", "fence", "", "fenced"),
    ],
)
def test_the_interpreter_finds_what_is_missing(name: str, func: str, barrier: str, says: str) -> None:
    text, schedule = CASES[name]
    made = Without(func, barrier).mutate(kernel(text, schedule))
    case = ComputationCase(parse(text))
    with pytest.raises(InterpError, match=says):
        for _ in range(3):
            case.interpreted(made)


def reason(text: str, schedule: str) -> str:
    return why_not(Schedule.parse(schedule), parse(text), SM90) or ""


@pytest.mark.parametrize(
    ("behind", "change", "says"),
    [
        (RESIDUAL, "split_k=3 c=gather", "no tile has its whole sum"),
        (RESIDUAL, "via=tl", "only explicit kernels"),
        ("    let    y = max(s, 0.0)\n", "", "nothing is read in the epilogue"),
        ("    read   b = B[o]\n    let    y = s + f32(b)\n", "", "no dimension moves along block h:4"),
        (
            RESIDUAL.replace("let", "read   q = R[n, o, h, w]\n    let").replace("(r)", "(r*q)"),
            "",
            "R is read or stored elsewhere, too",
        ),
        (RESIDUAL.replace("h, w", "h, -w + 7"), "", "a box steps by 1"),
        (RESIDUAL.replace("h, w]", "h + 1, w] else 1"), "", "a box is 0 outside of R, 1 is asked for"),
    ],
)
def test_why_not(behind: str, change: str, says: str) -> None:
    schedule = Schedule.parse(f"h:4 w:8 o:64 c:16 | {GLUON} c=box swap=1")
    changed = schedule.with_words(
        **{w.split("=")[0]: Schedule.parse(w).word(w.split("=")[0]) for w in change.split()}
    )
    assert says in (why_not(changed, parse(layer(2, 16, 64, 8, 8, behind)), SM90) or "")


def test_tiles_of_their_own_take_shared_memory() -> None:
    """Three operands of 128 x 128 for two consumers; the first takes that of the result."""
    text = layer(1, 64, 128, 128, 128, GATED)
    schedule = f"w:128 o:128 c:64 | {GLUON} c=box swap=1 programs=64 consumers=2 stages="
    assert not reason(text, schedule + "3")
    assert "65536 bytes of what is read in the epilogue" in reason(text, schedule + "4")
    assert not reason(text, (schedule + "5").replace("behind=box", "behind=gather"))


def test_a_vector_is_told_apart() -> None:
    compute = parse(CASES["in turns"][0])
    told = told_behind(Schedule.parse(CASES["in turns"][1]), compute)
    assert {v.tensor.name: x if isinstance(x, str) else x.extents for v, x in told.items()} == {
        "R": (1, 4, 8, 64),
        "G": (1, 4, 8, 64),
        "B": "B: no dimension moves along block h:4",
    }


MEASURED = Path(__file__).parents[2] / "bench" / "results" / "h200_behind.csv"


def measured() -> dict[tuple[str, str], tuple[Compute, dict[str, tuple[float, Schedule]]]]:
    """Times on an H200, by layer and tile: of the consumers' loads (``gather``) and of boxes."""
    found: dict[tuple[str, str], tuple[Compute, dict[str, tuple[float, Schedule]]]] = {}
    with MEASURED.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            network, _, sizes = row["layer"].partition("_")
            way, tile = row["variant"][:-1], row["variant"][-1]
            if way in ("gather", "box") and "moments" not in sizes:
                features, size = sizes.split("x")
                c, *wide = map(int, features.split("-"))
                out = wide[0] if wide else c
                h, resnet = int(size), network == "resnet"
                text = layer(
                    64 if resnet else 1,
                    c,
                    out,
                    h,
                    h,
                    GATED if resnet else RESIDUAL,
                    kernel=1 if resnet else 3,
                )
                seen = found.setdefault((row["layer"], tile), (parse(text), {}))
                seen[1][way] = float(row["us"]), Schedule.parse(row["schedule"])
    return found


def test_the_estimate_knows_where_fetching_was_faster() -> None:
    """By a tenth or more in half of the recorded pairs; elsewhere the estimate need not tell."""
    faster = 0
    for (name, tile), (compute, ways) in measured().items():
        (loaded, gather), (fetched, box) = ways["gather"], ways["box"]
        if loaded > 1.1 * fetched:
            faster += 1
            assert estimate(gather, compute, SM90) > 1.04 * estimate(box, compute, SM90), (name, tile)
    assert faster >= 7
