"""Reductions and products of a plan: each joins a group, or begins one of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transconv.graph.fusion import epilogue_reductions, fusion_cost, materialize
from transconv.graph.fusion.groups import FusionGroup, behind, product_group, rows_group
from transconv.graph.fusion.index_ir import Index, Piece, ProductSum, Reduced
from transconv.graph.sizes import Length

if TYPE_CHECKING:
    from transconv.graph.fusion.plan import Planner


def reduce(piece: Reduced, planner: Planner) -> None:
    """Place a reduction: it leaves with the kernel of its operand, is one more of a group's rows, or
    begins a group of rows."""
    why = epilogue_reductions.left(piece, planner)
    if not why:
        return
    homes = [planner.home[x] for x in piece.inputs if x in planner.home]
    group = max(homes, key=lambda g: g.number) if homes else None
    if group is not None and _joins(piece, group, planner):
        return
    for x in piece.inputs:
        if x in planner.home:
            assert group is not None
            planner.keep(x, piece, why if group.kind == "product" else "another set of axes is reduced")
    reads = {t for x in piece.inputs for t in fusion_cost.sources(x, planner.memory)}
    for other in planner.plan.groups[::-1]:
        same = any(
            reads & fusion_cost.sources(x, planner.memory) for r in other.within for x in r.operands
        )
        if same and _joins(piece, other, planner):
            return
    for x in piece.inputs:
        materialize.weigh_windows(x, piece, planner)
    made = rows_group(len(planner.plan.groups), piece.inputs, piece.dims, _shapes_near(piece, planner))
    planner.plan.groups.append(made)
    for x in piece.inputs:
        planner.evaluates(made, x)
    _joined(piece, made, made.at[piece.inputs[0]], planner)


def _joins(piece: Reduced, group: FusionGroup, planner: Planner) -> bool:
    """Whether a reduction is one more of a group's rows."""
    shape = piece.inputs[0].shape
    if group.kind != "rows" or any(planner.needs(x) >= group.number for x in piece.inputs
                                   if x not in planner.home):
        return False
    places = [group.at[x] for x in piece.inputs if x in group.at] + group.positions(shape)[:1]
    for at in places:
        own = {v for d in piece.dims for v in group.axes_of(at, (d,))}
        rest = {v for d in range(len(shape)) if d not in piece.dims for v in group.axes_of(at, (d,))}
        straight = not piece.op.startswith("arg") or at in group.positions(shape)
        if own == group.reduced and not rest & own and straight and all(
                planner.fits(x, at, group, set()) for x in piece.inputs):
            _joined(piece, group, at, planner)
            return True
    return False


def _joined(piece: Reduced, group: FusionGroup, at: Index, planner: Planner) -> None:
    """Note a reduction as one of a group's, of elements at a position."""
    group.within[piece] = at
    group.at[piece] = behind(at, piece)
    group.evaluated[piece] = None
    planner.home[piece] = group


def _shapes_near(piece: Reduced, planner: Planner) -> list[tuple[Length, ...]]:
    """The shapes in which the elements that are reduced are seen before and behind it."""
    size = piece.inputs[0].size
    found: dict[Piece, None] = {}
    left: list[Piece] = [*piece.inputs]
    while left and len(found) < 256:
        at = left.pop()
        if at.size != size or at in found or isinstance(at, ProductSum):
            continue
        found[at] = None
        left += [*at.operands, *planner.users.get(at, [])]
    return list(dict.fromkeys(x.shape for x in found))


def multiply(piece: ProductSum, planner: Planner) -> None:
    """Begin the group of a product; what its factors are made of is stored where that is cheaper."""
    for side, factor in enumerate(piece.factors):
        x = factor.of
        if x in planner.home:
            planner.keep(x, piece, f"a product reads an element of {planner.home[x].name} many times, in "
                      "other tiles")
        else:
            materialize.weigh_factor(piece, side, planner)
    made = product_group(len(planner.plan.groups), piece)
    made.evaluated[piece] = None
    planner.home[piece] = made
    planner.plan.groups.append(made)
