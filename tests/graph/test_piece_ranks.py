"""Models in pieces over several ranks: every bit of one process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.graph.meant import LateLink, traced
from tests.graph.networks import Gated
from tests.graph.rank_threads import on_ranks
from tests.graph.test_pieces import (
    GRIDS,
    MODELS,
    STEPS,
    LiveBytes,
    Tupled,
    apart,
    counted,
    least,
    meaning,
    pieces,
    trained,
)
from transconv.compute import AxisSpan
from transconv.distributed.halo import MeshRanks
from transconv.errors import Unsupported
from transconv.graph.backend_options import MemoryBound
from transconv.graph.pieces.bounded_model import BoundReport
from transconv.graph.pieces.demands import Demand
from transconv.graph.pieces.piece_execution import PieceRun
from transconv.graph.pieces.step_graph import StepMemory

Tensor = torch.Tensor
Made = Callable[[], nn.Module]
CONV = nn.Conv2d
TRACES = threading.Lock()  # torch traces one graph at a time, and has one state of what is drawn


def called(
    ranks: MeshRanks, model: nn.Module, x: Tensor, bound: int, over: str, step: bool, host: int = 0
) -> tuple[list[Tensor], BoundReport]:
    """The result of a rank within a bound, with the gradients of a ``step``, and its report. ``host``:
    bytes in which tensors may wait, and are copied late."""
    asked = MemoryBound(bound, str(bound), over, host, {x.device: LateLink()}, ranks=ranks)
    with torch.set_grad_enabled(step):
        given = x.detach().clone().requires_grad_(step)
        with TRACES:
            run = traced(Tupled(model), [given], within=asked)  # type: ignore[arg-type]
        (made,) = run(given)
        if step:  # as ``stepped``
            with TRACES:
                torch.manual_seed(1)
                g = torch.randn(made.shape)
            made.backward(g)
        gradients = [t.grad for t in (given, *model.parameters()) if t.grad is not None]
    found = [made.detach(), *gradients]
    return found, BoundReport(asked, tuple(asked.plans.values()))


def seeded(make: Made) -> nn.Module:
    """A model of its own, with the same weights each time."""
    torch.manual_seed(0)
    made = make()
    return copy.deepcopy(made) if isinstance(made, nn.Sequential) else made


def dealt(
    make: Made,
    shape: tuple[int, ...],
    over: str,
    share: float,
    ranks: int,
    step: bool = False,
    host: int = 0,
) -> list[BoundReport]:
    """Compare a model, or a training ``step``, over ranks, whose own tensors take this share of those of
    the whole at most, with the model in one piece. The report of each rank."""
    model, x = seeded(make).train(step), torch.randn(shape)
    with apart(), meaning(), patch.object(Demand, "aside", lambda *_: 0):
        if step:
            whole, one = trained(model, x, 1 << 60, over)
        else:
            made, one = pieces(model, x, 1 << 60, over)
            whole = [made]
        last = one.plans[-1]
        bound = int(last.beside + (last.peak - last.beside) * share)
        own = [seeded(make).train(step) for _ in range(ranks)]
        found, sent = on_ranks(ranks, lambda at: called(at, own[at.number], x, bound, over, step, host))
    for results, report in found:
        assert [torch.equal(a, b) for a, b in zip(results, whole, strict=True)] == [True] * len(whole)
        assert report.peak <= bound
        assert str(report) == str(found[0][1]), "ranks have other plans"
    assert any(p.ranks == ranks for p in found[0][1].plans) and sent
    return [report for _, report in found]


@pytest.mark.parametrize(("name", "ranks"), [("strided", 3), ("enlarged", 2)])
def test_pieces_over_ranks_are_the_whole(name: str, ranks: int) -> None:
    make, shape, over = MODELS[name]
    dealt(make, shape, over, 0.75, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_pieces_of_all_models_over_ranks(name: str, ranks: int) -> None:
    test_pieces_over_ranks_are_the_whole(name, ranks)


@pytest.mark.parametrize(
    "name", [n if n == "columns" else pytest.param(n, marks=pytest.mark.slow) for n in STEPS]
)
def test_a_training_step_over_ranks_is_that_of_the_whole(name: str) -> None:
    make, shape, over, share = STEPS[name]
    dealt(make, shape, over, share, 2, step=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDS)
def test_pieces_of_two_axes_over_ranks_are_the_whole(name: str) -> None:
    make, shape, over, share, _ = GRIDS[name]
    more = 1.0 if name == "rows" else 1.2  # a rank's first piece has nothing of one before
    reports = dealt(make, shape, over, more * share, 2)
    assert max(p.columns for plan in reports[0].plans for p in plan.passes) > 1


def _gated() -> nn.Module:
    return Gated(CONV, 8, 1, 2)


GATED = _gated, (1, 2, 27, 9), "h", 0.9, 2


def test_ranks_exchange_rows_that_they_read() -> None:
    """Of tensors that are kept a rank has its own rows and a few of its neighbour."""
    swap, halos = PieceRun.swap, list[tuple[int, ...]]()

    def noted(run: PieceRun, m: StepMemory, owned: list[AxisSpan]) -> None:
        room = run.plan.room(m, run.rank).along
        assert run.rooms[m].part.along == room
        if room.size < m.digit:
            row = m.digit // GATED[1][2]
            halos.append((owned[run.rank].start - room.start, room.stop - owned[run.rank].stop, row))
        swap(run, m, owned)

    with patch.object(PieceRun, "swap", noted):
        dealt(*GATED)
    assert len(halos) > 2
    for before, behind, row in halos:
        assert 0 <= before <= 2 * row and 0 <= behind <= 2 * row and before + behind


def test_a_halo_that_is_a_row_short_is_seen() -> None:
    """By the comparison that these tests make."""
    swap = PieceRun.swap

    def short(run: PieceRun, m: StepMemory, owned: list[AxisSpan]) -> None:
        rooms = run.plan.rooms[0]
        if (known := rooms.get(m)) is None or known.stop == owned[0].stop:
            return swap(run, m, owned)
        rooms[m] = known._replace(stop=known.stop - m.digit // GATED[1][2])
        swap(run, m, owned)
        rooms[m] = known

    with patch.object(PieceRun, "swap", short), pytest.raises(AssertionError, match="False"):
        dealt(*GATED)


@pytest.mark.slow
def test_tensors_that_take_the_place_of_others_over_ranks() -> None:
    (report, _) = dealt(lambda: Gated(CONV, 8, 1, 3), (1, 2, 41, 9), "h", 0.5, 2)
    assert any(p.over and p.share > 1 for p in report.plans[0].passes)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, "gated"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_takes_what_was_predicted(name: str, ranks: int) -> None:
    predicts(*MODELS.get(name, GATED[:3]), ranks)


def test_each_rank_of_pools_takes_what_was_predicted() -> None:
    predicts(*MODELS["pools"], 2)


def predicts(
    make: Made, shape: tuple[int, ...], over: str, ranks: int, host: int = 0
) -> list[BoundReport]:
    """Compare what each rank allocates within the least bound with what was predicted, and its result with
    that of one piece. The report of each."""
    models, x = [seeded(make).eval() for _ in range(ranks)], torch.randn(shape)

    def refused(own: MeshRanks) -> int:
        with pytest.raises(Unsupported) as e:
            called(own, models[own.number], x, 1, over, False, host)
        return least(e.value)

    def taken(own: MeshRanks) -> tuple[int, BoundReport]:
        link = LateLink()
        asked = MemoryBound(bound, str(bound), over, host, {x.device: link}, ranks=own)
        with TRACES:
            run = traced(Tupled(models[own.number]), [x], within=asked)  # type: ignore[arg-type]
        for _ in range(2):
            with torch.no_grad(), LiveBytes() as live:
                (made,) = run(x)
            assert torch.equal(made, whole)
        report = BoundReport(asked, (*asked.plans.values(),))
        assert sum(b.nbytes for b in link.buffers) == report.pinned
        return live.most + report.plans[0].beside, report

    with apart(), meaning(), counted(False):
        whole, _ = pieces(models[0], x, 1 << 60, over)
        (bound, *others), _ = on_ranks(ranks, refused)
        assert others == [bound] * (ranks - 1)
        found, _ = on_ranks(ranks, taken)
    most = [own for own, _ in found]
    assert max(most) <= found[0][1].peak <= bound and max(most) >= 0.97 * found[0][1].peak, found[0][1]
    return [report for _, report in found]


@pytest.mark.parametrize(("ranks", "rows"), [(2, 27), pytest.param(3, 64, marks=pytest.mark.slow)])
def test_tensors_of_ranks_that_wait_in_host_memory(ranks: int, rows: int) -> None:
    """Each rank pins the rows that it has, less than the whole; halos come to the device and go back."""
    reports = predicts(lambda: Gated(CONV, 8, 1, 2), (1, 2, rows, 10), "h", ranks, 1 << 40)
    plan = reports[0].plans[0]
    assert plan.waits and plan.ranks == ranks
    assert any(plan.room(m, r) != m.all for m in plan.waits for r in range(ranks))
    assert all(r.pinned < sum(1 << (m.bytes - 1).bit_length() for m in plan.waits) for r in reports)
    assert plan.text != replace(plan, waits={}).text, "ranks compare what waits"


@pytest.mark.slow
def test_a_training_step_over_ranks_whose_tensors_wait() -> None:
    reports = dealt(lambda: Gated(CONV, 8, 1, 1), (1, 2, 54, 9), "h", 0.5, 2, True, 1 << 40)
    assert all(report.plans[-1].waits for report in reports)
