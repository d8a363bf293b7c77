"""The emitted text of canonical problems, word for word. ``pytest --update-golden`` rewrites the
files; whoever does that reads their diff as code."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from transconv.backend_triton.emitters import triton
from transconv.backend_triton.emitters.gluon import GluonEmitter, turning_layout
from transconv.backend_triton.emitters.kernel_text import emit, grid_size, merged
from transconv.backend_triton.emitters.triton import ExprSpeller
from transconv.conv import ConvWorkload, Epilogue, compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.ir import (
    FALSE,
    TRUE,
    Const,
    Expr,
    Kernel,
    Lane,
    Not,
    Var,
    eq,
    f32,
    f64,
    minimum,
    select,
    value_at,
)
from transconv.runtime import header
from transconv.schedule.schedule import Schedule
from transconv.target.records import TARGETS

GOLDEN = Path(__file__).parents[1] / "golden"

# name: problem, direction, schedule, epilogue, which launch
CASES: dict[str, tuple[str, str, str, str, int]] = {
    "dense_nhwc": (
        "mb32ic64ih56oc64oh56kh3ph1 dt=bf16 tag=nhwc",
        "fwd",
        "mb.oh.ow:128 oc:64 ic:64 | mma | stages=3 warps=4",
        "bias+relu",
        0,
    ),
    "dense_boxes": (
        "mb32ic64ih56oc64oh56kh3ph1 dt=bf16 tag=nhwc",
        "fwd",
        "mb:2 oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box c=box swap=1 programs=132 stages=4 warps=4",
        "",
        0,
    ),
    "first_layer": (  # that of MLIR's convolution emitter, with its tile
        "mb128ic4ih224oc64oh112kh7sh2ph3 dt=f16 tag=nChw4c:oIhw4i:nchw",
        "fwd",
        "mb:1 oh:16 ow:16 oc:64 kw.ic:32 | mma | stages=3 warps=8",
        "",
        0,
    ),
    "pointwise_nchw": (
        "mb32ic256ih14oc64oh14kh1 dt=f16",
        "fwd",
        "mb.oh.ow:64 oc:64 ic:32 | mma | stages=4 warps=4",
        "",
        0,
    ),
    "stem_folded": (
        "mb16ic3ih224oc64oh112kh7sh2ph3 dt=f16 tag=nhwc",
        "fwd",
        "mb.oh.ow:128 oc:64 kw.ic:32 | mma | stages=3 warps=4",
        "",
        0,
    ),
    "stride_phase": (
        "mb32ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc",
        "bwd_d",
        "mb.qh.qw:128 ic:64 oc:64 | mma | stages=3 warps=4",
        "",
        3,
    ),
    "weight_gradient_split": (
        "mb32ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc",
        "bwd_w",
        "ic:64 oc:128 mb.oh.ow:64 | mma | split_k=8 stages=3 warps=4",
        "",
        0,
    ),
    "weight_gradient_sum": (
        "mb32ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc",
        "bwd_w",
        "ic:64 oc:128 mb.oh.ow:64 | mma | split_k=8 stages=3 warps=4",
        "",
        1,
    ),
    "depthwise": (
        "g96mb8ic96ih28oc96oh28kh3ph1 dt=f16 tag=nhwc",
        "fwd",
        "mb.oh.ow:32 g:32 | fma | unroll=1 stages=2 warps=4",
        "silu",
        0,
    ),
    "depthwise_sliding": (
        "g96mb8ic96ih28oc96oh28kh3ph1 dt=f16 tag=nhwc",
        "bwd_w",
        "kw:3 mb.oh:8 ow:4 g:32 | fma | regs=ow.kw late=1 split_k=16 stages=1",
        "",
        0,
    ),
    "volume_dilated": (
        "g2mb2ic16id8oc32od8kd3pd2dd1 tag=ncdhw",
        "fwd",
        "mb.od.oh.ow:64 oc:16 ic:16 | mma | swap=1 stages=3 warps=4",
        "",
        0,
    ),
    "beyond_32_bits": (
        "mb4096ic64ih128oc64oh128kh1 dt=f16",
        "fwd",
        "mb.oh.ow:128 oc:64 ic:32 | mma | stages=3 warps=4",
        "",
        0,
    ),
}


def lowered(name: str) -> tuple[list[tuple[str, Kernel]], tuple[str, ...]]:
    """The kernel after every pass, and what the header of its text says."""
    text, way, schedule, epilogue, launch = CASES[name]
    problem, prop, target = ConvProblem.parse(text), Prop(way), TARGETS["sm_90"]
    steps = compiler.plan_steps(problem, prop, target, Schedule.parse(schedule), Epilogue.parse(epilogue))
    compute, chosen = steps[launch]
    if launch:
        # The second kernel of a split sum has a schedule of its own.
        chosen = chosen if compute in computes(problem, prop) else Schedule.parse("oc:256 | fma")
    stages = compiler.lower(compute, chosen, target, name, problem.math)
    return stages, header(ConvWorkload(problem, prop), compute, chosen, target)


def emitted(name: str) -> str:
    stages, about = lowered(name)
    kernel = stages[-1][1]
    source = emit(kernel, about)
    return f"{source}\n# launched with {grid_size(kernel)} programs\n"


@pytest.mark.parametrize("name", list(CASES))
def test_emitted_text(name: str, request: pytest.FixtureRequest) -> None:
    path, now = GOLDEN / f"{name}.py", emitted(name)
    ast.parse(now)
    if request.config.getoption("--update-golden"):
        path.write_text(now)
    assert path.exists(), "no golden file; make it with --update-golden and read it"
    assert now == path.read_text(), f"{path.name} differs; --update-golden if that is meant"


@pytest.mark.every(3)
@pytest.mark.parametrize("name", list(CASES))
def test_the_kernel_of_every_stage_is_read_back(name: str) -> None:
    for stage, kernel in lowered(name)[0]:
        assert Kernel.parse(str(kernel)) is kernel, stage


@pytest.mark.every(5)
@pytest.mark.parametrize("width", [40, 60, 100])
@pytest.mark.parametrize("name", ["dense_boxes", "dense_nhwc", "depthwise_sliding", "explicit"])
def test_broken_lines_say_the_same(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        CASES,
        "explicit",
        (*CASES["dense_boxes"][:2], f"{CASES['dense_boxes'][2]} via=gluon", "bias+silu", 0),
    )
    monkeypatch.setattr(triton, "WIDTH", 1 << 20)
    whole = emitted(name)
    monkeypatch.setattr(triton, "WIDTH", width)
    broken = emitted(name)
    assert ast.dump(ast.parse(broken)) == ast.dump(ast.parse(whole))
    assert len(broken.splitlines()) > len(whole.splitlines())


def test_no_golden_file_is_left_over() -> None:
    assert {p.stem for p in GOLDEN.glob("*.py")} == set(CASES)


def test_notes_that_differ_in_numbers_are_one() -> None:
    notes = tuple(f"src: 0 <= ow_{i} is always true: ow_blk*4 in {i}..{i + 24}" for i in range(4))
    assert merged((notes[0], "dst: kept", *notes[1:])) == [f"{notes[0]} (and 3 more like it)", "dst: kept"]


def test_lanes_that_count_up_are_not_subtracted() -> None:
    """Triton 3.6 assumes for all lanes of a row what holds for the first lane of such a difference, also
    if it is written as the sum with a product with -1."""
    speller = ExprSpeller()
    m, k = Lane("m", 16, 1), Lane("k", 8, 2)
    step = Var("step")
    for e, text in (
        (m - k % 4, "m[:, None] + (~(k % 4) + 1)[None, :]"),
        (-(k % 4), "~(k % 4) + 1"),
        (m - step, "m - step"),
        (m * 2 - k * 3, "(m * 2)[:, None] - (k * 3)[None, :]"),
        (step - m, "step + ~m + 1"),
        (-step + m, "m - step"),
    ):
        assert speller.text(e) == text
    compiled = compiler.build(
        ConvProblem.parse("mb5ic3ih9oc8oh5kh7sh2ph3 dt=f64 tag=nchw"),
        Prop.BWD_D,
        TARGETS["sm_90"],
        Schedule.parse("qh.qw:2 ic:16 th.tw:8 | fma | a=gather b=gather | stages=3 warps=4"),
    )
    for step_ in compiled.steps:
        body = step_.source.split("gdc_wait()")[1]
        assert "(~tw + 1)[None, :]" in body and " - tw" not in body


def test_a_choice_between_two_numbers_is_of_64_bits_where_it_is_said() -> None:
    """Triton makes f32 of two numbers, and of one that is an operand of a minimum: 0.1 is then
    off by 1e-8, and so is a function of the choice."""
    speller = ExprSpeller()
    m, x = Lane("m", 16, 1), Var("x", f64)
    speller.scope[x] = (m,)
    number = "tl.full((), 0.1, tl.float64)"
    for dtype, text in ((f64, number), (f32, "0.1")):
        choice = select(m < 3, Const(0.1, dtype), Const(0.2, dtype))
        assert speller.text(choice) == f"tl.where(m < 3, {text}, 0.2)"
    assert speller.text(minimum(x, Const(0.1, f64))).startswith(f"tl.minimum(x, {number}, propagate_nan")


K = Var("k")


@pytest.mark.parametrize(
    "e",
    [
        Not(TRUE),
        Not(FALSE),
        Not(Not(TRUE)),
        Not(eq(Const(0), Const(0))),
        Not(K < 2),
        Not(K < 3) & (K < 9),
        Not(Not(K < 2)),
    ],
    ids=str,
)
def test_what_python_negates_stays_a_truth_value(e: Expr) -> None:
    """Where a counter is a number of Python, ``~`` would make -1 or -2 of its comparisons."""
    speller = ExprSpeller()
    speller.numbers.add(K)
    for k in range(4):
        found = eval(speller.text(e), {"k": k})
        assert type(found) is bool and found == value_at(e, {"k": k})


def test_tiles_are_negated_by_triton() -> None:
    speller, lane = ExprSpeller(), Lane("m", 8, 0)
    assert speller.text(Not(lane < 3)) == "~(m < 3)"


def test_what_is_known_of_how_lanes_count() -> None:
    """``counts`` against the values: "up" is one more at each lane, "again" the same from the start."""
    m, n, v = Lane("m", 32, 1), Lane("n", 4, 3), Var("v")
    speller = ExprSpeller()
    rows = {
        m: "up",
        m + v: "up",
        v + m: "up",
        m - v: "up",
        m % 8: "again",
        (m + v) % 8: "again",
        v - m: "",
        m + n: "",
        m * 2: "",
        m % v: "",
        m % 8 % 4: "",
        v: "",
    }
    assert {e: speller.counts(e) for e in rows} == rows


@pytest.mark.parametrize("warps", [1, 2, 4, 8])
@pytest.mark.parametrize("along", [0, 1])
def test_layouts_of_tiles_to_be_transposed(warps: int, along: int) -> None:
    """All lanes and warps have a place; a row has one thread where there are enough rows, and no element
    is held twice where there are enough elements."""
    for rows in (16, 32, 64, 128, 256):
        for length in (16, 32, 64, 128):
            lanes = [Lane("a", length, 1), Lane("b", rows, 3)]
            text = turning_layout(tuple(lanes if along == 0 else lanes[::-1]), along, warps)
            own, threads, groups = (
                one if along == 0 else one[::-1]
                for one in ast.literal_eval(text.removeprefix("gl.BlockedLayout(").rstrip(")"))[:3]
            )
            assert threads[0] * threads[1] == 32 and groups[0] * groups[1] == warps
            assert own[0] * threads[0] * groups[0] <= max(length, 32 * warps // rows)
            assert threads[1] * groups[1] == min(rows, 32 * warps, 32 * (rows // 32) or rows)


@pytest.mark.parametrize("along", [0, 1])
def test_steps_of_bytes_come_from_four_quarters(along: int) -> None:
    """The tile that is read is the same rows, with the steps of a word from four quarters of the sum."""
    lanes = (Lane("a", 32, 1), Lane("b", 64, 3))
    emitter = object.__new__(GluonEmitter)
    emitter.both, emitter.warps = True, 4
    text = emitter.loaded_across(lanes, along, 8)
    tile = np.arange(32 * 64).reshape(32, 64)
    found = eval(f"tile{text[text.index('.reshape') :]}".replace(".permute", ".transpose"), {"tile": tile})
    size = tile.shape[along]
    steps = np.arange(size).reshape(4, size // 4).T.flatten()
    assert np.array_equal(found, np.take(tile, steps, along))
