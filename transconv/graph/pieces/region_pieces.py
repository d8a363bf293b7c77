"""A region of a graph within a bound: its kernels as steps, the plan of their pieces, its calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from transconv.compute import Alone, Workload
from transconv.functional.calls.compiled_launch import TensorMemory, deterministic, program
from transconv.graph.backend_options import MemoryBound
from transconv.graph.fusion.index_ir import Piece
from transconv.graph.pieces.piece_execution import PartMemory, PieceRun
from transconv.graph.pieces.piece_plan import planned, refuse_beyond
from transconv.graph.pieces.step_graph import Operand, Step, StepMemory, steps_of
from transconv.runtime import estimated
from transconv.support import TransconvError
from transconv.target import Target

if TYPE_CHECKING:
    from transconv.graph.regions.region_calls import BoundRegion, RegionLaunches

Tensor = torch.Tensor


@dataclass(slots=True)
class RegionPieces:
    """A region that runs within a bound. ``rates``: the chip that decides where there is none;
    ``outside``: bytes of what else is there while it runs."""

    launches: RegionLaunches
    bound: MemoryBound
    target: Target
    rates: Target
    outside: int = 0
    run: PieceRun | None = None
    given: list[StepMemory] = field(default_factory=list)
    results: dict[Piece, Operand] = field(default_factory=dict)

    def __call__(self, sizes: Mapping[str, int], given: list[Any]) -> list[Tensor]:
        bound = self.launches.bound(sizes)
        tensors = [given[place] for place, _, _ in self.launches.inputs]
        self.launches.arrange(bound, tensors)
        if self.run is None or self.run.plan.beside < self.beside(tensors):
            self.plan(bound, tensors)
        assert self.run is not None
        given.clear()
        rooms = {m: PartMemory(t, 0, m.digit) for m, t in zip(self.given, tensors, strict=True)}
        tensors.clear()
        with self.launches.here():
            rooms = self.run(rooms)
        made = []
        for handed, view in zip(self.launches.handed, bound.views, strict=True):
            operand = self.results[handed.piece]
            memory, room = operand.memory, rooms[operand.memory].tensor
            shape, strides, behind = view or (memory.shape, memory.strides, 0)
            made.append(room.as_strided(shape, strides, room.storage_offset() + operand.behind + behind))
        return made

    def see(self, values: Iterable[Any], tensors: Iterable[Any]) -> None:
        """Note what else is there: values that are not handed to it."""
        own = {t.untyped_storage().data_ptr() for t in tensors if isinstance(t, Tensor)}
        found = [v.untyped_storage() for v in values if isinstance(v, Tensor)]
        self.outside = sum({s.data_ptr(): s.nbytes() for s in found if s.data_ptr() not in own}.values())

    def beside(self, tensors: Sequence[Tensor]) -> int:
        """Bytes that are there whatever the kernels do: what is handed to them, and what is outside."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return self.outside + sum(storages.values())

    def plan(self, bound: BoundRegion, tensors: Sequence[Tensor]) -> None:
        """Find the pieces. Raises Unsupported where no number of them stays within the bound."""
        steps = self.steps(bound)
        found = planned(steps, self.beside(tensors), self.bound.bytes)
        refuse_beyond(found, self.bound)
        self.bound.plans[id(self)] = found
        self.run = PieceRun(found, self.target, self.launches.device)

    def steps(self, bound: BoundRegion) -> list[Step]:
        """The kernels as steps. Notes what is given, and which results are handed out."""
        known: dict[Piece, Operand] = {}
        for (_, node, handed), memory in zip(self.launches.inputs, bound.inputs, strict=True):
            known[handed] = Operand(_memory(node.name, memory, given=True))
        self.given = [o.memory for o in known.values()]
        asked = [
            Alone(program(s.asked).compute) if isinstance(s.asked, str) else s.asked for s in bound.starts
        ]
        named: list[list[str]] = []
        for work, kernel in zip(asked, self.launches.kernels, strict=True):
            stored = {*work.results}
            names = sorted([t.name for t in work.tensors], key=stored.__contains__)
            named.append(names)
            assert len(names) == len(kernel.given) + len(kernel.stored)
        weights = self.weights(asked, named)
        for piece, operand in known.items():
            if piece not in weights:
                self.bound.mark(operand.memory)
        found: list[Step] = []
        for work, names, kernel, start in zip(
            asked, named, self.launches.kernels, bound.starts, strict=True
        ):
            for piece, memory in zip(kernel.stored, start.memory, strict=True):
                known[piece] = self.stored(piece, memory, kernel.group.name, known)
            operands = dict(zip(names, [known[p] for p in (*kernel.given, *kernel.stored)], strict=True))
            found += steps_of(work, operands, self.target, deterministic(), kernel.group.name)
        found = _alike(found)
        for number, step in enumerate(found):
            step.number = number
            step.us = _microseconds(step.workload, self.rates)
            _enter(step)
        self.results = {h.piece: known[h.piece] for h in self.launches.handed}
        for result in self.results.values():
            result.memory.handed = True
        return found

    def weights(self, asked: Sequence[Workload], named: Sequence[Sequence[str]]) -> set[Piece]:
        """Those of the inputs that are second factors of products."""
        found: set[Piece] = set()
        for work, names, kernel in zip(asked, named, self.launches.kernels, strict=True):
            factors = {c.b.tensor.name for c in work.computations if c.b is not None}
            pairs = zip(names, (*kernel.given, *kernel.stored), strict=True)
            found |= {piece for name, piece in pairs if name in factors}
        return found

    def stored(
        self, piece: Piece, memory: TensorMemory, name: str, known: Mapping[Piece, Operand]
    ) -> Operand:
        """The memory of a result: its own, or a slice of a tensor that it has with others."""
        cut = self.launches.cut.get(piece)
        if cut is None:
            return Operand(_memory(name, memory))
        whole = known.get(cut.whole) or next(
            (Operand(known[p].memory) for p, _, _ in cut.parts if p in known), None
        )
        own = whole or Operand(_memory(name, cut.memory))
        if isinstance(known, dict):
            known.setdefault(cut.whole, own)
        behind = next((b for p, _, b in cut.parts if p is piece), 0)
        return Operand(own.memory, behind)


def _memory(name: str, memory: TensorMemory, given: bool = False) -> StepMemory:
    return StepMemory(name, memory.shape, memory.strides, memory.dtype, given)


def _microseconds(work: Workload, rates: Target) -> float:
    try:
        return estimated(work, rates)
    except TransconvError:
        return 0.0


def _alike(steps: Sequence[Step]) -> list[Step]:
    """The steps, where all that store one tensor run in pieces, or all whole."""
    found = [*steps]
    while True:
        whole = {o.memory for s in found if s.whole for o in s.stored.values()}
        wrong = next(
            (s for s in found if not s.whole and any(o.memory in whole for o in s.stored.values())), None
        )
        if wrong is None:
            return found
        spaces = {*wrong.spaces.values()}
        found = [
            wrong.joined if s is wrong else s
            for s in found
            if not any(o.memory in spaces for o in s.operands.values())
        ]


def _enter(step: Step) -> None:
    """Note in tensors what stores them, and how far apart its positions are along their digit."""
    for operand in step.stored.values():
        operand.memory.makers.append(step)
    if step.whole:
        return
    for name, operand in (step.read | step.stored).items():
        if name in step.stored or (operand.memory.digit and name not in step.needs_whole):
            operand.memory.unit = max(operand.memory.unit, step.stride(name))
