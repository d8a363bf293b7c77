"""Concatenations whose parts are stored where they stand in them.

    a = conv(x)    b = conv(y)    z = conv(cat(a, b))

The kernels of a and b store into slices of one tensor, so that no kernel copies them, and the one of z
reads a plain tensor, in boxes. What is no kernel's own result, such as a tensor that was handed in, is
copied to its slice. A concatenation that begins another one is a slice of it: in a network in which each
layer reads all results before it, they are parts of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from transconv.functional.calls.compiled_launch import TensorMemory
from transconv.graph.fusion.groups import FusionGroup, map_group
from transconv.graph.fusion.index_ir import MovedView, Piece, PiecewiseIndex, RegionInput
from transconv.graph.fusion.memory_order import ALIGNED, features_last, memory_of
from transconv.graph.sizes import Length, like

if TYPE_CHECKING:
    from transconv.graph.fusion.plan import FusionPlan, Planner

RUN = 64  # bytes: two sectors of memory
IN_PLACE = "is stored where it stands in the concatenation"


@dataclass(frozen=True, slots=True)
class ConcatOffset:
    """Where a value lies: in the memory of a concatenation, so many elements behind its beginning."""

    whole: PiecewiseIndex
    behind: int


class Slices(NamedTuple):
    """Memory that several values have together: of which value, how it lies, and which others have slices
    of it, with their sizes and how many elements behind its beginning they begin."""

    whole: Piece
    memory: TensorMemory
    parts: tuple[tuple[Piece, tuple[int, ...], int], ...]


def slices(plan: FusionPlan) -> dict[Piece, Slices]:
    """What has memory with others, by each of these."""
    by_whole: dict[Piece, list[tuple[Piece, tuple[int, ...], int]]] = {}
    for piece, at in plan.places.items():
        by_whole.setdefault(at.whole, []).append((piece, _numbers(piece.shape), at.behind))
    made = {w: Slices(w, TensorMemory(_numbers(w.shape), _numbers(memory_of(w)), w.dtype), tuple(parts))
            for w, parts in by_whole.items()}
    return {piece: made[at.whole] for piece, at in plan.places.items()}


def place(planner: Planner) -> None:
    """Change a plan so that concatenations are stored by parts: those that are stored, and those of which
    all parts are."""
    found = [p for p in planner.order if isinstance(p, PiecewiseIndex) and p.along is not None
             and all(isinstance(n, int) for n in p.shape)]
    for piece in sorted(found, key=lambda p: -p.bytes):
        if not _slice(piece, planner):
            _whole(piece, planner)


def _numbers(sizes: Iterable[Length]) -> tuple[int, ...]:
    return tuple(n for n in sizes if isinstance(n, int))


def _starts(piece: PiecewiseIndex) -> list[int]:
    """Where the parts begin along the dim."""
    assert piece.along is not None
    starts = [0]
    for part in piece.parts:
        length = part.of.shape[piece.along]
        assert isinstance(length, int)
        starts.append(starts[-1] + length)
    return starts[:-1]


# -- a tensor for all parts --------------------------------------------------------------------------


def _whole(piece: PiecewiseIndex, planner: Planner) -> None:
    """Have the parts of a concatenation stored in it, and copied where no kernel stores them."""
    plan, own = planner.plan, planner.plan.stored.get(piece)
    strides = _strides(piece, planner)
    lies = [ConcatOffset(piece, start * strides[piece.along or 0]) for start in _starts(piece)]
    places = {p.of: at for p, at in reversed([*zip(piece.parts, lies, strict=True)])
              if _may_lie(p.of, at.behind, strides, piece, planner)}
    if not places or own is None and len(places) < len(piece.parts) or own and own.kind != "map":
        return
    piece.strides = strides
    plan.places |= places
    for x in places:
        plan.note(x, piece, IN_PLACE)
    if own is None:
        plan.stored[piece] = max((plan.stored[x] for x in places), key=lambda g: g.number)
        return
    own.stores.remove(piece)
    for part, at in reversed([*zip(piece.parts, lies, strict=True)]):
        if places.get(part.of) != at:
            _copy(part.of, at, own, planner)


def _copy(part: Piece, at: ConcatOffset, own: FusionGroup, planner: Planner) -> None:
    """Store a part behind a group, by a kernel of its own."""
    plan = planner.plan
    copy = MovedView(shape=part.shape, dtype=part.dtype, label=at.whole.label, of=part, move=tuple)
    group = map_group(own.number, copy.shape)
    group.stores, group.at[copy] = [copy], group.positions(copy.shape)[0]
    plan.groups.insert(plan.groups.index(own) + 1, planner.evaluates(group, copy))
    plan.places[copy], plan.stored[copy] = at, group


def _strides(piece: PiecewiseIndex, planner: Planner) -> tuple[int, ...]:
    """How a concatenation lies: as torch has it where it is handed out, else with features last if it is
    an image of a convolution."""
    if piece not in planner.fixed and any(x in planner.images for x in (piece, *piece.operands)):
        return _numbers(features_last(piece.shape))
    return _numbers(memory_of(piece))


def _may_lie(
    part: Piece, behind: int, strides: tuple[int, ...], piece: PiecewiseIndex, planner: Planner
) -> bool:
    """Whether the kernel that stores a value may store it so many elements behind the beginning of a
    tensor: it is needed nowhere else in an order of its own, boxes may begin there, and what is stored in
    one piece is as long as what memory moves at once."""
    group = planner.plan.stored.get(part)
    if (
        group is None
        or part not in group.stores
        or part in group.statistics
        or isinstance(part, RegionInput)
    ):
        return False
    if part in planner.outputs or part in planner.plan.places or part.dtype is not piece.dtype:
        return False
    size = part.dtype.itemsize
    mine = memory_of(part)
    wide = [d for d, n in enumerate(part.shape) if n != 1]
    order = [sorted(wide, key=lambda d: -like(own[d])) for own in (strides, mine)]
    steps = [n for n in (behind, *(strides[d] for d in wide)) if n != 1]
    assert piece.along is not None
    run = strides[piece.along] * like(part.shape[piece.along]) * size
    return order[0] == order[1] and run >= RUN and all(n * size % ALIGNED == 0 for n in steps)


# -- a part of such a tensor -------------------------------------------------------------------------


def _slice(piece: PiecewiseIndex, planner: Planner) -> bool:
    """Whether all parts of a concatenation stand in another one as they do in it; it is then a slice."""
    plan, own = planner.plan, planner.plan.stored.get(piece)
    first = plan.places.get(piece.parts[0].of)
    if first is None or first.whole.along != piece.along or piece in planner.outputs or (
            own and own.kind != "map"):
        return False
    step = _numbers(memory_of(first.whole))[piece.along or 0]
    for part, start in zip(piece.parts, _starts(piece), strict=True):
        if plan.places.get(part.of) != ConcatOffset(first.whole, first.behind + start * step):
            return False
    if own is not None:
        own.stores.remove(piece)
    plan.stored[piece] = max((plan.stored[p.of] for p in piece.parts), key=lambda g: g.number)
    plan.places[piece] = first
    return True
