"""A bound holds for what libraries of torch take beside what is counted: known workspaces count, and calls
are measured, here by a counter that stands in for that of a GPU's allocator."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import combinations, pairwise
from random import Random
from unittest.mock import patch

import pytest
import torch
from torch import fx, nn

from tests.graph.meant import traced
from tests.graph.networks import Gated
from tests.graph.test_pieces import (
    F,
    LiveBytes,
    Tensor,
    Tupled,
    Wrapped,
    _plain,
    counted,
    least,
    meaning,
    pieces,
)
from transconv.errors import Unsupported
from transconv.graph.backend_options import MemoryBound
from transconv.graph.pieces import piece_plan, region_pieces
from transconv.graph.pieces.bounded_model import BoundReport
from transconv.graph.pieces.piece_passes import KnownPasses, memories
from transconv.graph.regions.torch_region import library_bytes, sums_bytes
from transconv.target import TARGETS

aten = torch.ops.aten


class Meter(LiveBytes):
    """Counts as a GPU's allocator. ``cumsum`` takes ``more`` bytes beside its result, which it ``stays``
    to have from its first call on, or gives back."""

    def __init__(self, held: list[Tensor], more: int, stays: bool) -> None:
        super().__init__(held)
        self.there = sum(t.untyped_storage().nbytes() for t in held)
        self.more, self.stays, self.peak = more, stays, 0

    def counters(self, _: torch.device) -> tuple[int, int]:
        live = sum(n for ref, n in self.known.values() if not ref.expired())
        self.peak = max(self.peak, self.there + live)
        return self.there + live, self.peak

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if func is aten.cumsum.default and self.stays:
            self.there, self.more = self.there + self.more, 0
        now, _ = self.counters(torch.device("cpu"))
        if func is aten.cumsum.default:
            self.peak = max(self.peak, now + self.more)
        return found


class Calls:
    """Calls of a model with a region of torch's between two of ours, within a bound."""

    def __init__(self, bound: int, more: int = 0, stays: bool = False) -> None:
        torch.manual_seed(0)
        a, b, c = _plain(2, 8, 3, padding=1), _plain(8, 8, 3, padding=1), _plain(8, 2, 3, padding=1)
        model = Wrapped(lambda x: c(F.relu(b(torch.cumsum(F.relu(a(x)), 1)))), a, b, c)
        self.x = torch.randn(1, 2, 64, 8)
        self.meter = Meter([self.x, *model.parameters()], more, stays)
        self.bound = MemoryBound(bound, str(bound), "")
        self.made = traced(Tupled(model), [self.x], within=self.bound)  # type: ignore[arg-type]

    def peaks(self) -> Iterator[tuple[Tensor, int]]:
        """Of each call its result and the bytes that it took at most."""
        while True:
            self.meter.peak = 0
            with patch.object(region_pieces, "counters", self.meter.counters), self.meter:
                (y,) = self.made(self.x)
            found = y.clone()
            del y
            yield found, self.meter.peak

    @property
    def report(self) -> BoundReport:
        return BoundReport(self.bound, tuple(self.bound.plans.values()))


@pytest.fixture
def whole(nothing_known: None) -> Iterator[int]:
    """The bytes that it takes whole; inside, launches are computed from their texts."""
    with meaning(), counted(False):
        calls = Calls(1 << 60)
        assert next(calls.peaks())[1] == calls.report.peak
        yield calls.report.peak


def test_a_bound_that_a_call_exceeded_is_kept_by_later_ones(whole: int) -> None:
    calls = Calls(whole, more := 3000, stays=True)
    peaks = calls.peaks()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        want, first = next(peaks)  # where results of kernels are looked at, and torch compiles
    with pytest.warns(UserWarning, match=r"took 4\d\.\d+ KB, 3 KB more than is counted"):
        _, second = next(peaks)
    assert first == second == whole + more
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            made, peak = next(peaks)
            assert torch.equal(made, want) and peak <= whole
    assert peak <= calls.report.peak <= whole
    made, peak = next(Calls(whole, more, stays=True).peaks())  # another process reads it on disk
    assert torch.equal(made, want) and peak <= whole


def test_a_region_of_torch_that_exceeds_a_bound_is_refused(whole: int) -> None:
    peaks = Calls(whole, 9000).peaks()
    assert next(peaks)[1] > whole
    with pytest.warns(UserWarning, match="while torch's cumsum ran"):
        next(peaks)
    with pytest.raises(Unsupported, match=r"torch's libraries take; .* while torch's cumsum run") as e:
        next(peaks)
    assert e.value.reason == "within:memory"


def test_what_others_took_before_is_no_measure(whole: int) -> None:
    calls = Calls(whole, 3000, stays=True)
    with warnings.catch_warnings(), patch.object(calls.meter, "peak", 0):
        warnings.simplefilter("error")
        for _ in range(region_pieces.LOOKS + 1):
            calls.meter.peak = 1 << 40
            with patch.object(region_pieces, "counters", calls.meter.counters), calls.meter:
                calls.made(calls.x)


WIDTHS = [(2, 12, 2), (2, 0, 2)]


@pytest.mark.parametrize("widths", WIDTHS)
def test_a_refusal_names_the_least_of_all_regions(widths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    pairs = [(_plain(2, n, 3, padding=1), _plain(n, 2, 3, padding=1)) for n in widths if n]

    def f(x: Tensor) -> Tensor:
        for a, b in pairs:
            x = torch.cumsum(b(F.relu(a(x))), 1)
            if 0 in widths and a is pairs[0][0]:  # what torch computes takes most
                x = torch.cumsum(x.repeat(1, 16, 1, 1), 1)[:, :2]
        return x

    model, x = Wrapped(f, *(c for pair in pairs for c in pair)), torch.randn(1, 2, 24, 8)
    with meaning():
        with pytest.raises(Unsupported) as e:
            pieces(model, x, 1)
        bound = least(e.value)
        made, report = pieces(model, x, bound)
        assert len(repr(report.bound)) < 100  # torch prints it in a warning
        torch.testing.assert_close(made, model(x), rtol=1e-4, atol=1e-5)
        assert 0.95 * bound < report.peak <= bound
        with pytest.raises(Unsupported):
            pieces(model, x, int(0.95 * bound))


@pytest.mark.slow
def test_plans_of_larger_bounds_and_the_least_of_all() -> None:
    torch.manual_seed(0)
    plan = patch.object(region_pieces, "planned", wraps=piece_plan.planned)
    with meaning(), plan as asked, pytest.raises(Unsupported):
        pieces(Gated(nn.Conv2d, 8, 1, 2).eval(), torch.randn(1, 2, 27, 9), 1, "h")
    steps, beside = asked.call_args.args[:2]
    known = KnownPasses([m for m in memories(steps) if m.handed])
    must, least = piece_plan._must(steps), 1 << 60
    free = [m for m in memories(steps) if m.digit and not m.given and m not in must]
    for kept in (s for n in range(len(free) + 1) for s in combinations(free, n)):
        made = piece_plan.laid_out(steps, {*must, *kept}, beside, 0, known)
        assert made is not None
        least = min(least, piece_plan.settled(made, known).peak)
    named = piece_plan.planned(steps, beside, 1).peak
    assert least <= named <= 1.02 * least
    drawn = Random(5)
    for host in (0, 1 << 40):
        bounds = sorted([named, *(drawn.randrange(beside, 3 * named) for _ in range(4))])
        plans = [piece_plan.planned(steps, beside, bound, host) for bound in bounds]
        within = [plan.peak <= bound for plan, bound in zip(plans, bounds, strict=True)]
        assert within == sorted(within) and within[bounds.index(named)], "a larger bound is refused"
        times = [plan.us for plan, fits in zip(plans, within, strict=True) if fits]
        assert all(b <= 1.05 * a for a, b in pairwise(times)), "a larger bound takes longer"


def _nodes(op: object, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[fx.Node]:
    graph = fx.Graph()
    given = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    for node, shape in zip(given, shapes, strict=True):
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    return [graph.call_function(op, tuple(given))]  # type: ignore[arg-type]


def test_the_workspace_of_products_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    products, sums = _nodes(aten.bmm.default, (1, 2, 3), (1, 3, 2)), _nodes(aten.cumsum.default, (2, 3))
    sizes = {
        "sm_80": 8519680,
        "sm_90": 32 << 20,
        "sm_100": 32 << 20,
        "gfx942": 128 << 20,
        "interpreter": 0,
    }
    for name, size in sizes.items():
        assert library_bytes(products, TARGETS[name]) == size
        assert library_bytes(sums, TARGETS[name]) == 0
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert library_bytes(products, TARGETS["sm_90"]) == 2 * 4096 * 1024 + 8 * 16 * 1024
    assert library_bytes(products, TARGETS["interpreter"]) == 0
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "none")  # as torch, which takes the default
    assert library_bytes(products, TARGETS["sm_90"]) == 32 << 20


def test_wide_heads_are_added_up_in_memory() -> None:
    op = aten._scaled_dot_product_efficient_attention.default

    def taken(wide: int, dtype: torch.dtype = torch.bfloat16, chip: str = "sm_90") -> int:
        shapes = [(2, 3, n, wide) for n in (50, 70, 70)]
        return sums_bytes(_nodes(op, *shapes, dtype=dtype), TARGETS[chip])

    assert taken(512) == 4 * 2 * 3 * 50 * 512
    assert taken(128) == taken(512, torch.float32) == taken(512, chip="gfx942") == 0
