"""Runs a region in pieces, as its plan says: each step of a piece is a launch of its own, of the whole's
schedule over parts of the tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from transconv.compute import (
    Alone,
    AxisSpan,
    Compute,
    TensorWindow,
    Workload,
    restricted,
    without_statistics,
)
from transconv.conv import Surrounded
from transconv.graph.pieces.step_graph import Operand, Part, Step, StepMemory
from transconv.ir import Tensor as Declared
from transconv.runtime import Launch, build_scheduled
from transconv.schedule import Schedule, programs, why_not
from transconv.selection import fitted
from transconv.support import ScheduleError, Unsupported
from transconv.target import Target
from transconv.torch_ops.conversion import inference

if TYPE_CHECKING:
    from transconv.graph.pieces.demands import Demand
    from transconv.graph.pieces.piece_plan import PiecePass, PiecePlan

Tensor = torch.Tensor
ALIGNMENT = 16  # bytes


class PartMemory(NamedTuple):
    """Memory of a tensor, or of a part of its digit: from ``start`` on, ``length`` elements."""

    tensor: Tensor
    start: int
    length: int

    def at(self, offset: int) -> Tensor:
        """What lies from an address on."""
        return self.tensor.as_strided((1,), (1,), self.tensor.storage_offset() + offset)

    def view(self, memory: StepMemory, span: AxisSpan) -> Tensor:
        """Some elements of the digit, for all positions outside of it."""
        pairs = [(n, s) for n, s in zip(memory.shape, memory.strides, strict=True) if n > 1]
        outer = [(n, memory.at(s, self.length)) for n, s in pairs if not memory.digit or s >= memory.digit]
        shape, strides = ([p[i] for p in outer] for i in (0, 1))
        behind = self.tensor.storage_offset() + span.start - self.start
        return self.tensor.as_strided([*shape, span.size], [*strides, 1], behind)


class Launched(NamedTuple):
    """A launch of a step: its tensors, each with its memory and how many elements behind the beginning of
    the part it lies; ``fresh``: the parts that it makes; ``left``: of each workspace, the memory of the
    whole's, the dim of it that pieces divide, and where the parts of this piece are."""

    launch: Launch
    tensors: list[tuple[StepMemory, int]]
    fresh: dict[StepMemory, AxisSpan | None]
    left: list[tuple[str, StepMemory, int, int]]


@dataclass(slots=True)
class PieceRun:
    """Runs a plan on a device. ``made``: launches by workload; ``programs``: those of each
    piece; ``seen``: those of statistics whose first result was looked at."""

    plan: PiecePlan
    target: Target
    device: torch.device
    made: dict[tuple[Workload, tuple[Schedule, ...]], Launch] = field(default_factory=dict)
    programs: dict[tuple[int, int], tuple[Demand, list[Launched]]] = field(default_factory=dict)
    seen: set[Launch] = field(default_factory=set)

    def __call__(self, rooms: dict[StepMemory, PartMemory]) -> dict[StepMemory, PartMemory]:
        """``rooms``: of what is given; all that is kept at the end is entered."""
        for p in self.plan.passes:
            for step in p.whole:
                for operand in step.stored.values():
                    rooms.setdefault(operand.memory, self.empty(operand.memory))
                self.start(self.whole(step), rooms)
            self.run_pass(p, rooms)
            for memory in [m for m in rooms if not m.given and self.plan.last.get(m, -1) <= p.level]:
                del rooms[memory]
        return rooms

    def empty(self, memory: StepMemory, region: AxisSpan | None = None) -> PartMemory:
        """Memory for a tensor, or a part of it."""
        start, length = (0, memory.digit) if region is None else (region.start, region.size)
        made = torch.empty(memory.room(length), dtype=memory.dtype, device=self.device)
        return PartMemory(made, start, length)

    def run_pass(self, p: PiecePass, rooms: dict[StepMemory, PartMemory]) -> None:
        """Make all that a pass keeps."""
        if p.sample is None:
            return
        for memory in p.wanted.memories:
            if memory not in p.over:
                rooms.setdefault(memory, self.empty(memory))
        for step in p.wanted.steps:
            for space in step.spaces.values():
                rooms[space] = self.empty(space)
        carried = {old: Carried(old, rooms[old]) for old in p.over.values()}
        for number in range(p.pieces):
            demand, launches = self.program(p, number)
            own = dict(rooms)
            for old, carry in carried.items():
                if old in demand.reads:
                    own[old] = carry.read(demand.reads[old], self.empty(old, demand.reads[old]))
            self.run_piece(launches, demand, own)
            behind = self.program(p, number + 1)[0] if number + 1 < p.pieces else None
            for memory, old in p.over.items():
                if (made := demand.wanted.get(memory)) is not None:
                    carried[old].write(memory, own[memory], made, behind, self)
        for memory, old in p.over.items():
            rooms[memory] = rooms[old]

    def run_piece(
        self, launches: Sequence[Launched], demand: Demand, rooms: dict[StepMemory, PartMemory]
    ) -> None:
        """Launch the steps of a piece; its parts go when nothing needs them any more."""
        last = {m: i for i, one in enumerate(launches) for m, _ in one.tensors}
        made: set[StepMemory] = set()
        for i, one in enumerate(launches):
            for memory, region in one.fresh.items():
                if memory not in rooms:
                    rooms[memory] = self.empty(memory, region)
                    made.add(memory)
            self.start(one, rooms)
            for memory in {m for m, _ in one.tensors if last[m] == i and m in made} - {*demand.wanted}:
                del rooms[memory]

    def start(self, one: Launched, rooms: Mapping[StepMemory, PartMemory]) -> None:
        """Start a launch, and keep what it leaves of statistics."""
        operands = one.launch.operands()
        tensors, back = [], []
        results = {*one.launch.plan.workload.results}
        for (memory, behind), operand in zip(one.tensors, operands, strict=True):
            given = rooms[memory].at(behind)
            if given.data_ptr() % ALIGNMENT:
                shape, strides = operand.shape, operand.strides or ()
                view = given.as_strided(shape, strides, given.storage_offset())
                near = torch.empty_strided(shape, strides, dtype=view.dtype, device=view.device)
                if operand.name in results:
                    back.append((view, near))
                given = near.copy_(view)
            tensors.append(given)
        if not one.left:
            one.launch.start_prepacked(tensors, inference)
        elif one.launch not in self.seen:  # its first result is looked at
            one.launch.start(tensors)
            self.seen.add(one.launch)
        if one.left:
            views = one.launch.views(tensors)
            one.launch.plan.run(views)
            for name, memory, dim, place in one.left:
                space = one.launch.plan.workspaces[name]
                parts = views[name].view(space.shape)
                whole = rooms[memory].tensor.view(memory.shape)
                whole.narrow(dim, place, space.shape[dim]).copy_(parts)
        for view, near in back:
            view.copy_(near)

    # -- launches ----------------------------------------------------------------------------------

    def program(self, p: PiecePass, number: int) -> tuple[Demand, list[Launched]]:
        """What a piece needs, and its launches."""
        key = p.level, number
        if key not in self.programs:
            demand = p.demand(number, self.plan.kept)
            self.programs[key] = demand, [self.launched(s, demand, p) for s in demand.order]
        return self.programs[key]

    def whole(self, step: Step) -> Launched:
        """The launch of a step over whole tensors."""
        launch = self.launch(step, [(p.compute, p.schedule) for p in step.parts])
        tensors = [(step.operands[n].memory, step.operands[n].behind) for n in launch.names]
        return Launched(launch, tensors, {}, [])

    def launched(self, step: Step, demand: Demand, p: PiecePass) -> Launched:
        """The launch of a step for a piece."""
        spans, keeps = demand.spans[step], step in demand.left
        parts = [(part, at) for part, at in zip(step.parts, spans, strict=True) if at.size]
        places: dict[str, tuple[StepMemory, int]] = {}
        windows: dict[str, TensorWindow] = {}
        fresh: dict[StepMemory, AxisSpan | None] = {}
        for name, operand in step.operands.items():
            memory, stored, read = operand.memory, name in step.stored, name in step.read
            places[name] = memory, operand.behind
            if not stored and not read:  # a statistic of the piece alone
                memory = replace(memory)
                places[name], fresh[memory] = (memory, 0), None
            elif stored or (memory.digit and name not in step.needs_whole):
                region = self.part_of(memory, demand, p, stored)
                if stored and memory in self.plan.kept and memory not in demand.wanted:
                    memory = replace(memory)  # is there: made again for what else the step stores
                if stored and region is not None:
                    fresh[memory] = region
                seen = AxisSpan(0, 0)
                for part, at in parts:
                    seen = seen.around((step.covered if stored else step.seen)(name, part, at))
                declared = next(t for part, _ in parts for t in part.compute.tensors if t.name == name)
                windows[name], offset = _window(
                    operand, declared, seen, region or AxisSpan(0, memory.digit)
                )
                places[name] = memory, offset
        mains = [(self.computed(part, at, windows, keeps), part.schedule) for part, at in parts]
        launch = self.launch(step, mains)
        left = [
            (name, step.spaces[name], x.dim, parts[0][1].start // x.positions * x.parts)
            for name, x in step.left.items()
            if keeps
        ]
        own = [places[name] for name in launch.names]
        return Launched(launch, own, {m: r for m, r in fresh.items() if any(m is o for o, _ in own)}, left)

    def part_of(self, memory: StepMemory, demand: Demand, p: PiecePass, stored: bool) -> AxisSpan | None:
        """The part of a tensor that a piece has in memory of its own; None where it is a part of what is
        kept, or given."""
        if memory in p.over.values() and not stored:
            return demand.reads[memory]
        if memory in demand.wanted:
            return demand.regions[memory] if memory in p.over else None
        between = stored or (memory not in self.plan.kept and not memory.given)
        return demand.regions[memory] if between else None

    def computed(
        self, part: Part, at: AxisSpan, windows: Mapping[str, TensorWindow], keeps: bool
    ) -> Compute:
        """The computation of a part of a step for some positions; ``keeps``: with its statistics."""
        compute = part.compute if keeps else without_statistics(part.compute)
        own = {t.name: windows[t.name] for t in compute.tensors if t.name in windows}
        return restricted(compute, part.axis, at, own)

    def launch(self, step: Step, mains: Sequence[tuple[Compute, Schedule]]) -> Launch:
        """What starts computations with these schedules. Raises Unsupported where one is not legal."""
        workload: Workload
        if isinstance(step.workload, Surrounded):
            workload = replace(step.workload, parts=tuple(c for c, _ in mains))
        else:
            workload = Alone(mains[0][0])
        key = workload, tuple(s for _, s in mains)
        if (found := self.made.get(key)) is None:
            try:
                own = [(c, self.fitting(c, s)) for c, s in mains]
                found = Launch(build_scheduled(workload, self.target, own, step.choose), True)
            except ScheduleError as error:
                raise Unsupported("within:schedule", f"{step.name} in pieces: {error}") from error
            self.made[key] = found
        return found

    def fitting(self, compute: Compute, schedule: Schedule) -> Schedule:
        """The schedule as a piece can have it: with words that change no sum, and tiles no larger than the
        piece, where sums have the same blocks. The schedule itself where none is legal."""
        summed = {x.name for x in compute.axes_of("K")}
        plain, tiles = Schedule(), programs(schedule, compute)
        words: list[dict[str, Any]] = [{}, {"behind": plain.behind}]
        words += [{**w, "programs": max(1, tiles // 2)} for w in words[:2]]
        words += [{**w, "programs": plain.programs, "consumers": plain.consumers} for w in words[:2]]
        for made in (schedule, fitted(schedule, compute, self.target)):
            blocks = [b for b in made.blocks if summed & {*b.axes}]
            if blocks != [b for b in schedule.blocks if summed & {*b.axes}]:
                continue
            for changed in words:
                found = replace(made, **changed)
                if why_not(found, compute, self.target) is None:
                    return found
        return schedule


def _window(
    operand: Operand, declared: Declared, span: AxisSpan, region: AxisSpan
) -> tuple[TensorWindow, int]:
    """How a step sees a span of a tensor of which a region is in memory, and how many elements behind the
    region's beginning the span begins."""
    memory, slot = operand.memory, operand.slot(declared)
    strides = declared.layout.strides()
    assert slot is not None and strides is not None
    lying = tuple(memory.at(s, region.size) for s in strides)
    behind = memory.at(operand.behind, region.size) + span.start * strides[slot] - region.start
    return TensorWindow(slot, span, lying), behind


@dataclass(slots=True)
class Carried:
    """A tensor whose place another one takes, piece by piece: what later pieces read of it is kept aside
    before it is written over. ``written``: elements of the digit that are."""

    memory: StepMemory
    room: PartMemory
    aside: PartMemory | None = None
    written: int = 0

    def read(self, span: AxisSpan, into: PartMemory) -> PartMemory:
        """A part of the tensor as it was."""
        if self.aside is not None and span.start < self.written:
            own = AxisSpan(span.start, min(span.stop, self.written))
            into.view(self.memory, own).copy_(self.aside.view(self.memory, own))
        rest = AxisSpan(max(span.start, self.written), span.stop)
        if rest.size > 0:
            into.view(self.memory, rest).copy_(self.room.view(self.memory, rest))
        return into

    def write(
        self, memory: StepMemory, made: PartMemory, span: AxisSpan, behind: Demand | None, by: PieceRun
    ) -> None:
        """Write a part of the other tensor over it. ``behind``: what the next piece needs."""
        reads = behind.reads.get(self.memory) if behind is not None else None
        if reads is not None and reads.start < span.stop:
            kept = AxisSpan(reads.start, span.stop)
            self.aside = self.read(kept, by.empty(self.memory, kept))
        else:
            self.aside = None
        self.room.view(memory, span).copy_(made.view(memory, span))
        self.written = span.stop


def given_rooms(memories: Collection[StepMemory], tensors: Sequence[Any]) -> dict[StepMemory, PartMemory]:
    """The memory of what is handed to a region."""
    return {m: PartMemory(t, 0, m.digit) for m, t in zip(memories, tensors, strict=True)}
