"""A kernel that cannot be had: which of a graph's operations are torch's for it.

Also here: from which operation a value is.
"""

from __future__ import annotations

from torch import fx

from transconv.errors import TransconvError, Unsupported
from transconv.graph.fusion import fusion_cost
from transconv.graph.fusion.groups import FusionGroup
from transconv.graph.fusion.index_ir import Piece, RegionInput
from transconv.graph.fusion.plan import FusionPlan
from transconv.graph.regions.partition import Region


class RefusedKernel(Exception):
    """``kernel``: its name; ``nodes``: the operations that it computes, by their names; ``reason`` in one
    word, ``message`` in words."""

    def __init__(self, kernel: str, nodes: frozenset[str], reason: str, message: str) -> None:
        super().__init__(f"the kernel {kernel} is refused: {message}")
        self.kernel, self.nodes, self.reason, self.message = kernel, nodes, reason, message


def refusal(group: FusionGroup, plan: FusionPlan, region: Region, error: Exception,
            also: frozenset[str] = frozenset()) -> RefusedKernel:
    """Of the kernel of a group, for a reason; ``also``: what else is to blame."""
    memory = {p for p, by in plan.stored.items() if by.number != group.number}
    computed = {x for p in group.stores for x in fusion_cost.inside(p, memory)} - memory
    made_by = origins(region)
    computed |= {
        at.whole
        for p in group.stores
        if p not in made_by  # a copy of a part (see fusion/concat_views.py)
        and (at := plan.places.get(p)) is not None
    }
    nodes = frozenset(node.name for piece, node in made_by.items() if piece in computed)
    reason = error.reason if isinstance(error, Unsupported) else f"error:{type(error).__name__}"
    message = error.message or reason if isinstance(error, Unsupported) else str(error) if isinstance(
        error, TransconvError) else f"a bug: {type(error).__name__}: {error}"
    return RefusedKernel(group.name, nodes | also, reason, message)


def origins(region: Region) -> dict[Piece, fx.Node]:
    """The node whose row made a value: the first that has it."""
    found: dict[Piece, fx.Node] = {}
    for node in region.nodes:
        made = region.pieces[node]
        left = [p for p in (made if isinstance(made, tuple) else (made,)) if p is not None]
        while left:
            piece = left.pop()
            if piece not in found and not isinstance(piece, RegionInput):
                found[piece] = node
                left += piece.operands
    return found
