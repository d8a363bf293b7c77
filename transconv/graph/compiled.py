"""A graph that was compiled: its regions, each a list of launches or a graph of torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import fx

from transconv.compute import Alone, Compute
from transconv.errors import ScheduleError, Unsupported
from transconv.functional.launches import Memory, aligned, launch, program, refused
from transconv.functional.operators import as_wanted
from transconv.graph.groups import Group
from transconv.graph.partition import Region
from transconv.graph.pieces import Piece, Seen, Source
from transconv.graph.plan import Plan, planned
from transconv.graph.price import Price
from transconv.graph.text import Writer, Written
from transconv.selection import shortlist
from transconv.target import Target
from transconv.torch_ops import stats
from transconv.torch_ops.decide import PASSING

Tensor = torch.Tensor
Torch = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True, eq=False, slots=True)
class Kernel:
    """A launch: the text, what it reads and stores in the order of its tensors, the group behind it."""

    group: Group
    written: Written
    memory: tuple[Memory, ...]  # of what is stored


@dataclass(frozen=True, slots=True)
class Handed:
    """A result of a region: a tensor, or another view of its memory: sizes, strides, and how many elements
    it begins behind it."""

    piece: Piece
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None


@dataclass(slots=True)
class Launches:
    """A region of ours: called with its inputs, it returns its outputs. ``torch``: the same by torch."""

    device: torch.device
    plan: Plan
    kernels: list[Kernel]
    inputs: list[tuple[fx.Node, Source]]
    handed: list[Handed]
    torch: Torch
    last: list[list[Piece]] = field(default_factory=list)  # what no later launch needs
    by_torch: bool = False

    def __call__(self, *given: Tensor) -> Sequence[Tensor]:
        if not self.by_torch:
            try:
                return self.launched(given)
            except Unsupported as error:
                self.by_torch = error.reason not in PASSING
                stats.announce(error.reason, error.message, "this part of a graph")
                stats.add(False, error.reason, 1)
        return self.torch(*given)

    def launched(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        """By kernels. Raises Unsupported."""
        device = self.device
        if why := refused(given, [True] * len(given)) if given else "":
            raise Unsupported(why)
        values: dict[Piece, Tensor] = {}
        for (node, piece), t in zip(self.inputs, given, strict=True):
            wanted = Memory(piece.shape, piece.strides or (), piece.dtype)
            values[piece] = as_wanted(node.name, t, wanted)
        for kernel, done in zip(self.kernels, self.last, strict=True):
            read = [values[p] for p in kernel.written.given]
            made = [values[p] if p in values else  # the other parts of it are there
                    torch.empty_strided(m.shape, m.strides, dtype=m.dtype, device=device)
                    for p, m in zip(kernel.written.stored, kernel.memory, strict=True)]
            launch(kernel.written.text, device, aligned([*read, *made]), "now").start([*read, *made])
            values.update(zip(kernel.written.stored, made, strict=True))
            for unused in done:
                del values[unused]
        stats.add(True, "graph", len(self.kernels))
        return [_viewed(values[h.piece], h.view) for h in self.handed]


def _viewed(t: Tensor, view: tuple[tuple[int, ...], tuple[int, ...], int] | None) -> Tensor:
    return t if view is None else t.as_strided(view[0], view[1], t.storage_offset() + view[2])


def launches(region: Region, device: torch.device, target: Target, rates: Price,
             by_torch: Torch) -> Launches:
    """The launches of a region on a device, which is a target, decided by rates of one. Raises
    ComputeError where a text cannot be read, which is a bug."""
    handed = [_handed(node, region) for node in region.outputs]
    ends = [h.piece for h in handed if not isinstance(h.piece, Source)]
    apart: set[Piece] = set()
    while True:
        plan = planned(ends, rates, apart)
        kernels = [_kernel(part, plan) for group in plan.groups if group.stores
                   for part in (group, *group.siblings)]
        computes = {k: program(k.written.text).compute for k in kernels}
        refused = {k.group.product for k, c in computes.items()
                   if k.group.product and not _schedules(c, target)}
        if not refused - apart:
            break
        apart |= {p for p in refused if p is not None}
    inputs = [(x, region.pieces[x]) for x in region.inputs]
    found = Launches(device, plan, kernels, inputs, handed, by_torch)
    found.last = _last(found)
    return found


def memory_of(piece: Piece) -> tuple[int, ...]:
    """The strides in which a value is stored: torch's, where its elements have places of their own."""
    dense = tuple(prod(piece.shape[d + 1:]) for d in range(len(piece.shape)))
    if piece.strides is None:
        return dense
    order = sorted((s, n) for s, n in zip(piece.strides, piece.shape, strict=True) if n > 1)
    step = 1
    for s, n in order:
        if s != step:
            return dense
        step *= n
    return piece.strides


def _kernel(group: Group, plan: Plan) -> Kernel:
    def strides(piece: Piece) -> tuple[int, ...] | None:
        if isinstance(piece, Source):
            return piece.strides
        held = plan.stored.get(piece)
        return None if held is None or held.number >= group.number else memory_of(piece)

    for piece in group.stores:
        group.strides[piece] = memory_of(piece)
    written = Writer(group, strides).written()
    return Kernel(group, written, tuple(
        Memory(p.shape, group.strides[p], p.dtype) for p in written.stored))


def _schedules(compute: Compute, target: Target) -> bool:
    """Whether a product whose factors are computed has a schedule: not every one has."""
    try:
        return not compute.prologue or bool(shortlist(1, compute, target, Alone(compute)))
    except ScheduleError:
        return False


def _handed(node: fx.Node, region: Region) -> Handed:
    """How a node's tensor comes from a piece in memory: through views that are the same memory."""
    piece: Piece = region.pieces[node]
    val = node.meta["val"]
    at = node
    while isinstance(piece, Seen) and piece.alias and isinstance(at.args[0], fx.Node):
        at, piece = at.args[0], piece.of
    if at is node:
        return Handed(piece, None)
    base = at.meta["val"]
    if not isinstance(piece, Source) and memory_of(piece) != tuple(base.stride()):
        return Handed(region.pieces[node], None)
    behind = val.storage_offset() - base.storage_offset()
    return Handed(piece, (tuple(val.shape), tuple(val.stride()), behind))


def _last(found: Launches) -> list[list[Piece]]:
    """Of each launch, the tensors that nothing needs behind it."""
    held = {h.piece for h in found.handed}
    seen = {*held}
    done: list[list[Piece]] = []
    for kernel in reversed(found.kernels):
        own = [p for p in dict.fromkeys((*kernel.written.given, *kernel.written.stored)) if p not in seen]
        seen |= {*own}
        done.append(own)
    return done[::-1]
