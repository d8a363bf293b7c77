"""A region of a graph and its kernels: the texts of each, its tensors, and why it may be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from transconv.calls.settings import settings
from transconv.compute import Alone, Workload
from transconv.conv import Surrounded
from transconv.functional.calls.compiled_launch import TensorMemory, deterministic, program
from transconv.graph.fusion.groups import FusionGroup, FusionPlan
from transconv.graph.fusion.index_ir import Piece, RegionInput, ingredients
from transconv.graph.fusion.sized_text import SizedText
from transconv.graph.sizes import Length
from transconv.support import TransconvError, Unsupported


class SizedTensor(NamedTuple):
    """A tensor whose sizes may be names."""

    shape: tuple[Length, ...]
    strides: tuple[Length, ...]
    dtype: torch.dtype

    def at(self, value: Callable[[Length], int]) -> TensorMemory:
        """With numbers."""
        return TensorMemory(
            tuple([value(n) for n in self.shape]), tuple([value(n) for n in self.strides]), self.dtype
        )


@dataclass(eq=False, slots=True)
class Region:
    """Nodes in their order; ``ours``: they have pieces. ``reasons``: of torch's nodes, by their names."""

    ours: bool
    nodes: list[fx.Node] = field(default_factory=list)
    pieces: dict[fx.Node, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True, eq=False, slots=True)
class RegionKernel:
    """A launch: its text, or one for each part of its result; what it reads and stores in the order of its
    tensors; the group behind it. ``asked``: the text, or the workload of which the texts are parts.
    ``sized``: where sizes are names."""

    group: FusionGroup
    texts: tuple[str, ...]
    given: tuple[Piece, ...]
    stored: tuple[Piece, ...]
    memory: tuple[SizedTensor, ...]  # of what is stored
    asked: str | Surrounded
    sized: SizedText | None = None

    @property
    def workload(self) -> Workload:
        """What is computed."""
        return Alone(program(self.asked).compute) if isinstance(self.asked, str) else self.asked


View = tuple[tuple[Length, ...], tuple[Length, ...], Length]
"""Of another tensor's memory: sizes, strides, and how many elements it begins behind it."""


@dataclass(frozen=True, slots=True)
class Handed:
    """A result of a region: a tensor, or another view of its memory."""

    piece: Piece
    view: View | None


@dataclass(slots=True)
class RegionPlan:
    """The kernels of a region of ours, in the order in which they run. ``inputs``: its tensors, each with
    its place among the inputs; ``last``: of each launch, what no later one needs; ``over``: which results
    replace operands (see ``in_place``); ``lying``: strides of results that are not torch's, by the names
    of their nodes."""

    device: torch.device
    region: Region
    plan: FusionPlan
    kernels: list[RegionKernel]
    inputs: list[tuple[int, fx.Node, RegionInput]]
    handed: list[Handed]
    last: list[list[Piece]]
    over: list[dict[int, int]]
    lying: dict[str, tuple[Length, ...]]

    @property
    def peak(self) -> int:
        """Bytes of what its kernels store that are held at once at most."""
        held = most = 0
        inputs = {piece for _, _, piece in self.inputs}
        cut: set[Piece] = set()  # tensors that hold several values, and are there
        places = self.plan.places
        for kernel, done, over in zip(self.kernels, self.last, self.over, strict=True):
            new = {places[p].whole for p in kernel.stored if p in places} - cut
            cut |= new
            held += sum(p.bytes for p in new)
            held += sum(p.bytes for i, p in enumerate(kernel.stored) if i not in over and p not in places)
            most = max(most, held)
            held += sum(kernel.stored[i].bytes for i in over)  # in the place of operands, which go
            held -= sum(p.bytes for p in done if p not in inputs and p not in places)
        return most


# -- refusals -----------------------------------------------------------------------------------------


class RefusedKernel(Exception):
    """A kernel that was refused. ``kernel``: its name; ``nodes``: the operations that it computes, by
    their names; ``reason`` in one word, ``message`` in words."""

    def __init__(self, kernel: str, nodes: frozenset[str], reason: str, message: str) -> None:
        super().__init__(f"the kernel {kernel} is refused: {message}")
        self.kernel, self.nodes, self.reason, self.message = kernel, nodes, reason, message


def refusal(
    group: FusionGroup,
    plan: FusionPlan,
    region: Region,
    error: Exception,
    also: frozenset[str] = frozenset(),
) -> RefusedKernel:
    """Of the kernel of a group, for a reason; ``also``: what else is to blame."""
    memory = {p for p, by in plan.stored.items() if by.number != group.number}
    computed = {x for p in group.stores for x in ingredients(p, memory)} - memory
    made_by = origins(region)
    computed |= {
        at.whole
        for p in group.stores
        if p not in made_by  # a copy of a part (fusion/plan.py)
        and (at := plan.places.get(p)) is not None
    }
    nodes = frozenset(node.name for piece, node in made_by.items() if piece in computed)
    reason = error.reason if isinstance(error, Unsupported) else f"error:{type(error).__name__}"
    message = (
        error.message or reason
        if isinstance(error, Unsupported)
        else str(error)
        if isinstance(error, TransconvError)
        else f"a bug: {type(error).__name__}: {error}"
    )
    return RefusedKernel(group.name, nodes | also, reason, message)


def compile_mode(same: bool = False) -> str:
    """``compile`` as a graph obeys it. By default calls wait, as torch.compile has them: meanwhile torch
    would compute the graph in steps that take several times as long. They wait also where the same bits
    are asked for, as by a graph in invariant mode (``same``)."""
    mode, waits = settings.mode, same or settings.compile == "auto" or deterministic()
    return "now" if mode == "background" and waits else mode


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
