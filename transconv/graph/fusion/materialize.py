"""Which value is stored where another kernel needs one: it, or what it is made of.

    where -> mul -> sum       the sum is another kernel's: "where" is stored, and "mul" evaluated again
    sum -> expand -> sub      the sum is stored, not its copies

What moves fewer bytes is taken: those that are written and read, beside those that are read to evaluate a
value again. And what could be evaluated where it is read is written once where that costs less.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, NamedTuple

from transconv.graph.fusion import fusion_cost
from transconv.graph.fusion.index_ir import (
    ConstantValue,
    Counted,
    Mapped,
    MovedView,
    Piece,
    PiecewiseIndex,
    ProductSum,
    Reduced,
    RegionInput,
)
from transconv.graph.fusion.memory_order import aliased, features_last
from transconv.graph.sizes import like, same

if TYPE_CHECKING:
    from transconv.graph.fusion.groups import FusionGroup
    from transconv.graph.fusion.plan import Planner

STORED_DEARER = "is evaluated {:.3g} times: {:.3g} us, written and read once {:.3g} us"
COMPARED = "is compared with another value: evaluated again it may be rounded otherwise"
STORED_ANYWAY = "is handed out: read, not evaluated again"
SHARED = 0.5  # of reading what the same kernel stores: others behind it read that anyway
DEEPEST = 24  # operations that are evaluated again at most, one of the other


class MaterializeReason(NamedTuple):
    """Why a product's factors are written first. ``there``: what they were views of that was in memory
    already: then the factor itself is written; else what it is a view of, which another kernel may store
    as well."""

    reason: str
    there: frozenset[Piece] = frozenset()


def bases(piece: Piece, planner: Planner, only_views: bool) -> list[Piece]:
    """The values to store, so that a later kernel has a value that another one computes. ``only_views``:
    it, or what it is a view of, or a wider type of, in the same kernel."""
    found: dict[Piece, tuple[float, tuple[Piece, ...]]] = {}
    home = planner.home.get(piece)

    def cheapest(x: Piece, deep: int) -> tuple[float, tuple[Piece, ...]]:
        """Microseconds of moving it, and what is stored for it."""
        if x not in found:
            found[x] = _stored(x, planner, home)
            if deep < DEEPEST and not _is_there(x, planner) and _evaluates(x, planner, only_views):
                parts = [cheapest(o, deep + 1) for o in x.operands]
                work = fusion_cost.ahead(x)
                again = planner.rates.worked(work) + sum(us for us, _ in parts)
                if again < found[x][0] or again == found[x][0] and (isinstance(x, MovedView) or copies(x)):
                    found[x] = again, tuple(dict.fromkeys(b for _, own in parts for b in own))
        return found[x]
    return [*cheapest(piece, 0)[1]]


def _stored(x: Piece, planner: Planner, home: FusionGroup | None) -> tuple[float, tuple[Piece, ...]]:
    if isinstance(x, (ConstantValue, Counted)):
        return 0.0, ()
    if _is_there(x, planner):
        shared = home is not None and planner.plan.stored.get(x) is home
        return planner.rates.moved(x.bytes) * (SHARED if shared else 1.0), ()
    times = 1 if x in planner.outputs else 2  # written and read
    return planner.rates.moved(times * x.bytes), (x,)


def _is_there(x: Piece, planner: Planner) -> bool:
    return isinstance(x, (RegionInput, ConstantValue, Counted)) or x in planner.plan.stored


def _evaluates(x: Piece, planner: Planner, only_views: bool) -> bool:
    """Whether a kernel that has the operands of a value may evaluate it."""
    if only_views:
        home = planner.home.get(x)
        return home is not None and (viewed(x) or widens(x) or copies(x)) and (
            planner.home.get(x.operands[0]) is home)
    return isinstance(x, (Mapped, MovedView))


def viewed(piece: Piece) -> bool:
    """Whether a value is another one, seen from elsewhere, of which it has all elements."""
    return isinstance(piece, MovedView) and piece.back is not None


def widens(piece: Piece) -> bool:
    """Whether a value is cheap to compute from one of a narrower type, such as its cast."""
    return (isinstance(piece, Mapped) and len(piece.inputs) == 1 and piece.work <= 1.0
            and piece.inputs[0].dtype.itemsize < piece.dtype.itemsize
            and same(piece.inputs[0].shape, piece.shape))


def copies(piece: Piece) -> bool:
    """Whether a value is another one in memory of its own, which only what is handed out needs."""
    return isinstance(piece, Mapped) and not piece.work and len(piece.inputs) == 1 and (
        piece.inputs[0].dtype is piece.dtype and same(piece.inputs[0].shape, piece.shape))


def compared(piece: Mapped, planner: Planner) -> None:
    """Store what is compared for equality in another kernel: evaluated again it may be rounded otherwise
    than where it was reduced."""
    for x in piece.inputs:
        while isinstance(x, MovedView):
            x = x.of
        if not _is_there(x, planner):
            planner.keep(x, piece, COMPARED, itself=True)


# -- what is written once ----------------------------------------------------------------------------


def weigh(piece: Mapped, planner: Planner) -> None:
    """Store a map that several kernels would evaluate, where that costs less."""
    users = planner.users.get(piece, [])
    ends = sum(x.anchored or x in planner.outputs for x in users) + (piece in planner.outputs)
    if ends < 2:
        return
    rates, memory = planner.rates, planner.memory
    read = sum(x.bytes for x in fusion_cost.sources(piece, memory))
    own = fusion_cost.work(piece, memory) * like(piece.size)
    again = ends * (rates.moved(read) + rates.worked(own))
    once = rates.kernel(read + piece.bytes, own, None) + ends * rates.moved(piece.bytes)
    if once < again:
        planner.keep(piece, users[0], STORED_DEARER.format(ends, again, once), exact=True)


def weigh_windows(piece: Piece, user: Reduced, planner: Planner) -> None:
    """Store what windows that overlap would evaluate several times, where that costs less."""
    views = piece
    while isinstance(views, (MovedView, PiecewiseIndex)) and views not in planner.plan.stored:
        views = views.operands[0]
    if views is piece or views.size == 0 or views in planner.plan.stored or isinstance(
            views, (RegionInput, ConstantValue)):
        return
    _weigh_visits(views, user, like(piece.size) / like(views.size), 0.0, planner)


def step(product: ProductSum, stored: Container[Piece], reason: str) -> MaterializeReason:
    """One more step in which the factors of a product are written first, behind a plan that stores some
    values."""
    return MaterializeReason(
        reason, frozenset(x for f in product.factors if (x := seen(f.of, stored)) in stored)
    )


def seen(piece: Piece, stored: Container[Piece]) -> Piece:
    """What a value is a view of: what is stored, or what is computed."""
    while isinstance(piece, (MovedView, PiecewiseIndex)) and piece not in stored and not any(
            isinstance(x, Mapped) for x in piece.operands[1:]):
        piece = piece.operands[0]
    return piece


def weigh_factor(piece: ProductSum, side: int, planner: Planner) -> None:
    """Store a factor that is computed, where it would be evaluated too often."""
    stored = planner.plan.stored
    views = piece.factors[side].of
    if isinstance(views, PiecewiseIndex) and views in planner.outputs:
        planner.keep(views, piece, STORED_ANYWAY, itself=True)
    views = seen(views, stored)
    for reason, there in (r for part in (piece, *piece.others) for r in planner.apart.get(part, ())):
        written = views in there or isinstance(views, (RegionInput, ConstantValue))
        kept = piece.factors[side].of if written else views
        base = kept if piece.relation else aliased(kept)
        if base in stored or isinstance(base, (RegionInput, ConstantValue)):
            continue
        if piece.relation and kept not in planner.home and kept not in planner.outputs:
            kept.strides = features_last(kept.shape)  # nothing else says how it lies
        planner.keep(kept, piece, reason, itself=written)
    if views in stored or isinstance(views, (RegionInput, ConstantValue)):
        return
    if isinstance(views, Mapped) and fusion_cost.work(views, planner.memory) or not isinstance(
            views, (MovedView, PiecewiseIndex, Mapped)):
        _weigh_visits(views, piece, fusion_cost.visits(piece, side), planner.rates.late(piece), planner)


def _weigh_visits(piece: Piece, user: Piece, count: float, late: float, planner: Planner) -> None:
    if piece in planner.outputs:
        planner.keep(piece, user, STORED_ANYWAY, exact=True)
        return
    rates, memory = planner.rates, planner.memory
    read = sum(x.bytes for x in fusion_cost.sources(piece, memory))
    own = fusion_cost.work(piece, memory) * like(piece.size)
    again = rates.worked(own * count) + rates.moved(read) + late
    once = rates.kernel(read + piece.bytes, own, None) + rates.moved(piece.bytes)
    if once < again:
        planner.keep(piece, user, STORED_DEARER.format(count, again, once), exact=True)
