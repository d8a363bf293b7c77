"""Pieces by Triton's interpreter, with the whole's schedules: tiles, their statistics, long rows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import transconv
from tests.graph.test_pieces import compared, pieces, trains
from transconv.compute import Alone, AxisSpan, execute, parse
from transconv.errors import Unsupported
from transconv.graph.pieces.demands import Demand
from transconv.graph.pieces.piece_execution import HostLink, PartMemory, PieceRun
from transconv.graph.pieces.piece_passes import NO_RESULTS, KnownPasses, PiecePass, PiecePlan
from transconv.graph.pieces.piece_plan import _divided, planned
from transconv.graph.pieces.region_pieces import free_host_bytes
from transconv.graph.pieces.step_graph import Operand, Step, StepMemory, TensorPart, crossed, steps_of
from transconv.schedule import Schedule, why_not
from transconv.target import TARGETS, Target

nn = torch.nn
Tensor = torch.Tensor
STATISTICS = """compute convolution_bias_mean_var
    tensor X0 f32 [1, 3, {h}, {w}] strides({a},1,{b},3)
    tensor X1 f32 [8, 3, 3, 3]
    tensor X2 f32 [8]
    tensor Y0 f32 [1, 8, {h}, {w}] strides({c},1,{d},8)
    tensor Y1 f32 [1, 2]
    tensor Y2 f32 [1, 2]
    axes   oh={h} ow={w} oc=8 | kh=3 kw=3 ic=3
    read   x_1 = X0[0, ic, oh + kh - 1, ow + kw - 1]
    read   x_2 = X1[oc, ic, kh, kw]
    let    sum_3 = sum(x_1*x_2; kh kw ic)
    read   x_4 = X2[oc]
    let    bias_5 = sum_3 + x_4
    store  Y0[0, oc, oh, ow] = sum_3
    store  Y1[0, oc // 4] sum= bias_5
    store  Y2[0, oc // 4] squares= bias_5
"""


@pytest.fixture(autouse=True)
def rows_alike() -> Iterator[None]:
    """Products of a tile whose rows are alike, as matrix units have them: NumPy's library adds up the
    terms of a row by its place."""
    from triton.runtime import interpreter

    def create_dot(self: object, a: object, b: object, d: object, *_: object) -> object:
        made = np.einsum("...ij,...jk->...ik", a.data, b.data)  # type: ignore[attr-defined]
        return interpreter.TensorHandle(made + d.data, d.dtype.scalar)  # type: ignore[attr-defined]

    with patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        yield


def _memory(name: str, tensor: object, given: bool) -> StepMemory:
    strides = tensor.layout.strides()  # type: ignore[attr-defined]
    return StepMemory(name, tensor.shape, strides, torch.float32, given)  # type: ignore[attr-defined]


def _steps(h: int, w: int, columns: int, target: Target) -> tuple[list[Step], dict[str, StepMemory]]:
    """The steps of the statistics of a convolution, and its tensors."""
    compute = parse(STATISTICS.format(h=h, w=w, a=3 * h * w, b=3 * w, c=8 * h * w, d=8 * w))
    memories = {t.name: _memory(t.name, t, t.name[0] == "X") for t in compute.tensors}
    memories["X0"].digit = 3 * h * w
    memories["Y1"].handed = memories["Y2"].handed = True
    operands = {n: Operand(m) for n, m in memories.items()}
    steps = steps_of(Alone(compute), operands, target, False, "conv")
    for number, step in enumerate(steps):
        step.number, step.us = number, 1.0
        for operand in step.stored.values():
            operand.memory.makers.append(step)
    if columns > 1:
        crossed(steps, [memories["X0"]], "w", target)
    return steps, memories


def _planned(
    h: int, w: int, pieces: int, columns: int, target: Target
) -> tuple[PieceRun, dict[str, StepMemory]]:
    """What runs them in so many pieces at least, of so many columns."""
    steps, memories = _steps(h, w, columns, target)
    plan = _divided(steps, 0, 1, 0, KnownPasses([memories["Y1"], memories["Y2"]]))
    assert any(p.wanted.steps for p in plan.passes)  # tiles leave parts
    for p in plan.passes:
        if p.sample is not None:
            p.pieces = min(pieces, p.wanted.most)
            if columns > 1:
                assert p.crosses(plan.kept)
                p.columns = min(columns, p.wanted.across.most)
    return PieceRun(plan, target, torch.device("cpu")), memories


def _run(h: int, w: int, pieces: int, columns: int = 1) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The statistics of a convolution, in so many pieces at least of so many columns, and what it was
    given."""
    run, memories = _planned(h, w, pieces, columns, TARGETS["interpreter"])
    torch.manual_seed(0)
    given = {n: torch.randn(m.bytes // 4) for n, m in memories.items() if m.given}
    rooms = run({memories[n]: PartMemory(t, memories[n].all) for n, t in given.items()})
    return [rooms[memories[n]].tensor for n in ("Y1", "Y2")], given


@pytest.mark.parametrize(("h", "w"), [(1, 4), (3, 4), (5, 5), (24, 16), (64, 64)])
def test_what_takes_least_may_be_the_whole(h: int, w: int) -> None:
    """Parts of statistics are there longer in pieces: a refusal names the whole where that takes less."""
    steps, _ = _steps(h, w, 1, TARGETS["sm_90"])
    whole = planned(steps, 0, 1 << 60)
    for bound in (1, whole.peak - 1):
        least = planned(steps, 0, bound)
        assert least.peak <= whole.peak and planned(steps, 0, least.peak).peak == least.peak


@pytest.mark.slow
@pytest.mark.parametrize("columns", [1, 4])
def test_pieces_of_a_large_image_have_schedules(columns: int) -> None:
    run, _ = _planned(4096, 4096, 8, columns, TARGETS["sm_90"])
    run.arrange()  # lowers the kernels of all pieces
    assert len({id(one.launch) for _, done in run.tape for _, one in done if one is not None}) > 3


def test_a_piece_combines_what_nothing_reads_by_a_schedule_of_its_own() -> None:
    """The whole's twelve parts of tiles are added up in three; a piece has one."""
    whole, given = _run(24, 16, 1)
    run, memories = _planned(24, 16, 12, 1, TARGETS["interpreter"])
    step = next(s for s in run.plan.steps if s.left)
    combined = Schedule.parse("oc:2 | fma | a=gather b=gather | split_k=3 stages=1")
    main = step.parts[0]
    with patch.object(step, "choose", lambda c, _: main.schedule if c is main.compute else combined):
        rooms = run({memories[n]: PartMemory(t, memories[n].all) for n, t in given.items()})
    plans = [launch.plan for launch in run.made.values()]
    combines = f"{main.compute.name}_Y"
    made = [s.schedule for p in plans for s in p.steps if s.compute.name.startswith(combines)]
    assert made and combined not in made
    assert all(torch.equal(rooms[memories[n]].tensor, t) for n, t in zip(("Y1", "Y2"), whole, strict=True))


@pytest.mark.parametrize(("length", "turns"), [(4096, True), (1024, False), (300, False)])
def test_rows_that_a_tile_covers_have_no_turns(length: int, turns: bool) -> None:
    """A piece has fewer parts of tiles than the whole, whose schedule what combines them has."""
    combined = parse(
        f"compute combined\n axes n=8 | k={length}\n read x = X[n, k]\n let m = sum(x; k) / {length}\n"
        " let v = sum((x - m) * (x - m); k)\n store Y[n] = v"
    )
    plain, target = "k:1024 | fma | late=1 stages=1", TARGETS["sm_90"]
    schedule = Schedule.parse(f"{plain} turn=1")
    assert (why_not(schedule, combined, target) is None) == turns
    found = PieceRun(PiecePlan([], set(), [], {}, 0), target, torch.device("cpu")).fitting(
        combined, schedule
    )
    assert found == (schedule if turns else Schedule.parse(plain))
    assert why_not(found, combined, target) is None


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("h", "w", "columns"), [(24, 16, 1), (19, 7, 1), pytest.param(3, 1536, 2, marks=pytest.mark.slow)]
)
def test_statistics_of_pieces_are_those_of_the_whole(h: int, w: int, columns: int) -> None:
    whole, given = _run(h, w, 1)
    for count in (2, 5):
        made, _ = _run(h, w, count, columns)
        assert all(map(torch.equal, made, whole))
    text = STATISTICS.format(h=h, w=w, a=3 * h * w, b=3 * w, c=8 * h * w, d=8 * w)
    shapes = {"X0": (h, w, 3), "X1": (8, 3, 3, 3), "X2": (8,)}
    arrays = {n: t.double().numpy().reshape(shapes[n]) for n, t in given.items()}
    arrays["X0"] = arrays["X0"].transpose(2, 0, 1)[None]
    want = execute(parse(text), arrays)
    for name, own in zip(("Y1", "Y2"), whole, strict=True):
        np.testing.assert_allclose(own.numpy(), want[name].value.ravel(), rtol=1e-2)  # tf32


class Normed(nn.Module):
    """A residual block of decoders."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, wide), nn.Conv2d(wide, wide, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(nn.functional.silu(self.norm(x)))


@pytest.mark.slow
def test_a_norm_over_pieces_is_that_of_the_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), Normed(4), nn.Conv2d(4, 2, 1))
    compared(model, torch.randn(1, 2, 23, 4), 0.7)


@pytest.mark.slow
def test_a_norm_whose_input_waits_is_that_of_the_whole() -> None:
    torch.manual_seed(0)
    first, last = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)
    model, x = nn.Sequential(first, Normed(8), Normed(8), last), torch.randn(1, 2, 23, 8)
    with patch.object(Demand, "aside", lambda *_: 0):
        whole, one = pieces(model, x, 1 << 60, "h")
        beside = one.plans[0].beside
        bound = int(beside + (one.peak - beside) * 0.3)
        with pytest.raises(Unsupported, match="is too small: at least"):
            pieces(model, x, bound, "h")
        made, report = pieces(model, x, bound, "h", 1 << 40)
    assert torch.equal(made, whole) and report.pinned and report.peak <= bound


@pytest.mark.slow
def test_a_norm_over_pieces_of_two_axes_is_that_of_the_whole() -> None:
    torch.manual_seed(0)
    ends = nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 2, 3, padding=1)
    model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), Normed(8), *ends)
    with patch.object(Demand, "aside", lambda *_: 0):
        report = compared(model, torch.randn(1, 2, 7, 64), 0.5, "h")
    assert max(p.columns for p in report.plans[0].passes) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "shape"),
    [(lambda: nn.GroupNorm(2, 4), (1, 2, 64, 16)), (lambda: nn.BatchNorm2d(4), (16, 2, 16, 8))],
)
def test_a_training_step_with_norms_and_biases(
    norm: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    first = nn.Conv2d(2, 4, 3, padding=1, bias=False)
    trains(
        nn.Sequential(first, norm(), nn.SiLU(), nn.Conv2d(4, 4, 3, padding=1)), torch.randn(shape), 0.75
    )


@pytest.mark.slow
def test_one_call_has_gradients() -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(1, 2, 12, 5, 4), torch.randn(3, 2, 3, 3, 3), torch.randn(3)
    g = torch.randn(1, 3, 12, 5, 4)

    def step(f: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        given = [t.to(dtype, copy=True).requires_grad_() for t in (x, w, b)]
        made = f(*given, padding=1)
        return [made, *torch.autograd.grad(made, given, g.to(dtype))]

    conv = nn.functional.conv3d
    run = transconv.within(conv, "40 KB")
    made = step(run, torch.float32)
    for a, one, want in zip(
        made, step(transconv.within(conv, None), torch.float32), step(conv, torch.float64), strict=True
    ):
        assert torch.equal(a, one)
        torch.testing.assert_close(a, want.float(), rtol=1e-2, atol=1e-2)  # tf32
    assert len(run.report().plans) == 2 and run.report().peak <= 40_000


def _waiting() -> tuple[PieceRun, StepMemory]:
    """A tensor in the order of features, rows, columns, which waits in host memory, and what moves it."""
    m = StepMemory("x", (2, 3, 6, 5), (90, 30, 5, 1), torch.float32, digit=30, unit=5)
    plan = PiecePlan([], set(), [], {}, 0, waits={m: 0}, buffers=[1024])
    cpu = torch.device("cpu")
    return PieceRun(plan, TARGETS["interpreter"], cpu, link=HostLink(cpu)), m


def test_rows_of_each_feature_are_copied_to_host_memory_and_back() -> None:
    run, m = _waiting()
    assert run.link is not None
    run.link.enter(run.plan.buffers)
    whole = torch.randn(180)
    for first, last in ((0, 2), (2, 5), (5, 6)):
        part = TensorPart(AxisSpan(first * 5, last * 5))
        run.parts[m] = run.empty(m, part)
        rows = whole.view(6, 6, 5)[:, first:last]
        run.parts[m].view(m, part).view(6, -1, 5).copy_(rows)
        run.move(m, part, False)
    found = TensorPart(AxisSpan(5, 25))
    run.move(m, found, True)
    made, _ = run.moving[m, True]
    assert torch.equal(made.tensor.view(6, 4, 5), whole.view(6, 6, 5)[:, 1:5])


def test_tensors_that_wait_are_not_captured() -> None:
    run, _ = _waiting()
    run.tape.append((PiecePass(0, [], NO_RESULTS), []))
    with (
        patch("transconv.graph.pieces.piece_execution.is_capturing", lambda _: True),
        pytest.raises(Unsupported, match="outside of the graph, or have none wait") as e,
    ):
        run({})
    assert e.value.reason == "within:capture"


def test_host_memory_that_cannot_be_had_names_the_cure() -> None:
    link = HostLink(torch.device("cpu"))
    link.sides = [None]  # pinned memory, which torch has for accelerators alone
    with pytest.raises(Unsupported, match=r"64 bytes of pinned host memory .* \(host=0\)") as e:
        link.enter([64])
    assert e.value.reason == "within:host"


def test_free_host_memory_is_that_of_the_container(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    for folder in (tmp_path / "proc", group):
        folder.mkdir(parents=True)
    assert free_host_bytes(tmp_path) == 0
    (tmp_path / "proc/meminfo").write_text("MemTotal: 90 kB\nMemAvailable:  64 kB\n")
    assert free_host_bytes(tmp_path) == 65536
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5000\n")
    assert free_host_bytes(tmp_path) == 65536
    (group / "memory.max").write_text("9000\n")
    assert free_host_bytes(tmp_path) == 4000


def test_a_bound_that_is_too_small_says_the_least() -> None:
    run = transconv.within(nn.Conv2d(2, 4, 3), 100)
    with (
        torch.no_grad(),
        pytest.raises(Unsupported, match=r"memory='100' is too small: at least .* bytes") as e,
    ):
        run(torch.randn(1, 2, 16, 4))
    assert e.value.reason == "within:memory" and "convolution" in str(e.value)


def test_a_refusal_names_what_goes_over_a_whole_axis() -> None:
    """A softmax of rows does, a group norm does not: its sums of blocks do."""
    first, last = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)
    for middle, named in ((nn.Softmax(2), True), (nn.GroupNorm(2, 8), False)):
        run = transconv.within(nn.Sequential(first, middle, last), 3000, "h")
        with torch.no_grad(), pytest.raises(Unsupported, match="are needed along h") as e:
            run(torch.randn(1, 2, 32, 8))
        assert ("read all along h" in str(e.value)) is named, str(e.value)


def test_arguments_that_are_refused() -> None:
    with pytest.raises(ValueError, match="memory='8 apples'; expected bytes, a text such as \"8 GB\""):
        transconv.within(nn.Identity(), "8 apples")
    with pytest.raises(ValueError, match="host='-1'; expected bytes"):
        transconv.within(nn.Identity(), host="-1")
    with pytest.raises(ValueError, match="over='c'; expected one of n, d, h, w"):
        transconv.within(nn.Identity(), over="c")
    with pytest.raises(ValueError, match="ranks=2; expected a DeviceMesh of one dim, or None"):
        transconv.within(nn.Identity(), ranks=2)
    with pytest.raises(TypeError, match="expected a module or a function, got int"):
        transconv.within(3)  # type: ignore[arg-type]


def test_models_of_one_class_and_many_sizes() -> None:
    """torch compiles a code object eight times at most, and takes what it compiled for an equal bound."""
    models = [nn.Sequential(nn.SiLU()) for _ in range(2)]
    runs = [transconv.within(m, "1 MB") for m in models]
    with torch.no_grad():
        for run, model, rows in zip(runs, models, (1, 9), strict=True):
            for n in range(3, 3 + rows):
                x = torch.randn(1, 2, n, 5)
                torch.testing.assert_close(run(x), model(x))
            assert len(run.report().plans) == rows and run.report().peak > 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))])
def test_copies_find_pieces_of_their_own(copied: Callable[[Any], Any]) -> None:
    run, x = transconv.within(nn.Conv2d(2, 3, 3), "1 MB"), torch.randn(1, 2, 5, 6)
    with torch.no_grad():
        want = run(x)
        other = copied(run)
        next(run.parameters()).zero_()
        assert torch.equal(other(x), want) and len(other.report().plans) == 1
    assert [*run.state_dict()] == ["model.weight", "model.bias"]
