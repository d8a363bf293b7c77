"""Runs a region in pieces, as its plan says: each step of a piece is a launch of its own, of the whole's
schedule over parts of the tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

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
from transconv.graph.pieces.demands import ALIGNMENT, is_alone, is_cut
from transconv.graph.pieces.piece_plan import MemoryAct, PiecePass, PiecePlan, acts
from transconv.graph.pieces.step_graph import Part, Step, StepMemory
from transconv.runtime import Launch, build_scheduled
from transconv.schedule import Schedule, programs, why_not
from transconv.selection import fitted
from transconv.support import ScheduleError, Unsupported
from transconv.target import Target
from transconv.torch_ops.conversion import inference

Tensor = torch.Tensor


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
    the part it lies; ``alone``: of those that nobody needs behind it, the part; ``left``: of each
    workspace, the memory of the whole's, the dim of it that pieces divide, and where the parts of this
    piece are."""

    launch: Launch
    tensors: list[tuple[StepMemory, int]]
    alone: dict[StepMemory, AxisSpan | None]
    left: list[tuple[str, StepMemory, int, int]]


@dataclass(slots=True)
class PieceRun:
    """Runs a plan on a device. ``made``: launches by workload; ``tape``: of each pass what it does, and
    what it launches; ``seen``: the launches of statistics whose first result was looked at; ``rooms``,
    ``parts``, ``tails``: the memory of a call, of whole tensors, of those of a piece, and what the next
    ones need."""

    plan: PiecePlan
    target: Target
    device: torch.device
    made: dict[tuple[Workload, tuple[Schedule, ...]], Launch] = field(default_factory=dict)
    tape: list[tuple[PiecePass, list[tuple[MemoryAct, Launched | None]]]] = field(default_factory=list)
    seen: set[Launch] = field(default_factory=set)
    rooms: dict[StepMemory, PartMemory] = field(default_factory=dict)
    parts: dict[StepMemory, PartMemory] = field(default_factory=dict)
    tails: dict[StepMemory, PartMemory] = field(default_factory=dict)

    def __call__(self, rooms: dict[StepMemory, PartMemory]) -> dict[StepMemory, PartMemory]:
        """``rooms``: of what is given; returned are those of the results."""
        if not self.tape:
            self.arrange()
        self.rooms = rooms
        try:
            for p, done in self.tape:
                for act, launched in done:
                    self.do(act, launched, p)
                self.tails.clear()
            return {m: room for m, room in self.rooms.items() if m.handed or m.given}
        finally:
            self.rooms, self.parts, self.tails = {}, {}, {}

    def arrange(self) -> None:
        """Find what is done, and the launches."""
        alive: set[StepMemory] = set()
        for p in self.plan.passes:
            found: list[tuple[MemoryAct, Launched | None]] = []
            for _, act in acts(self.plan, p, p.demands(self.plan.kept), alive):
                launched = None
                if act.step is not None:
                    launched = self.whole(act.step) if act.piece is None else self.launched(act)
                found.append((act, launched))
            self.tape.append((p, found))

    def do(self, act: MemoryAct, launched: Launched | None, p: PiecePass) -> None:
        """One of the acts of a pass."""
        m, kind = act.memory, act.kind
        if m is None:
            assert launched is not None
            self.start(launched)
        elif kind == "whole":
            self.rooms[m] = self.empty(m, AxisSpan(0, m.digit))
        elif kind == "drop":
            del self.rooms[m]
        elif kind == "part":
            self.parts[m] = self.gathered(m, act.span)
            if m not in self.rooms:
                self.tails.pop(m, None)
        elif kind == "tail" and not act.span.size:
            self.tails.pop(m, None)
        elif kind == "tail":
            self.tails[m] = self.gathered(m, act.span)
        elif kind == "end":
            del self.parts[m]
        elif kind == "write":
            self.rooms[p.over[m]].view(m, act.span).copy_(self.parts[m].view(m, act.span))
        else:
            self.rooms[m] = self.rooms.pop(p.over[m])

    def empty(self, memory: StepMemory, region: AxisSpan) -> PartMemory:
        """Memory for a part of a tensor."""
        made = torch.empty(memory.room(region.size), dtype=memory.dtype, device=self.device)
        return PartMemory(made, region.start, region.size)

    def gathered(self, memory: StepMemory, span: AxisSpan) -> PartMemory:
        """Memory for a part of a tensor, with what is there of it: in the part of this piece, or else in
        what the pieces before have left, and behind that in the whole."""
        made, done = self.empty(memory, span), span.start
        whole = self.rooms.get(memory)
        held = self.tails.get(memory) or (self.parts.get(memory) if whole is None else None)
        if held is not None:
            own = AxisSpan(held.start, held.start + held.length).within(span)
            made.view(memory, own).copy_(held.view(memory, own))
            done = max(done, own.stop)
        if whole is not None and done < span.stop:
            rest = AxisSpan(done, span.stop)
            made.view(memory, rest).copy_(whole.view(memory, rest))
        return made

    def memory(self, memory: StepMemory) -> PartMemory:
        """What a launch sees of a tensor."""
        return self.parts.get(memory) or self.rooms[memory]

    def start(self, one: Launched) -> None:
        """Start a launch, and keep what it leaves of statistics."""
        operands = one.launch.operands()
        tensors, back = [], []
        alone = {m: self.empty(m, region or AxisSpan(0, m.digit)) for m, region in one.alone.items()}
        results = {*one.launch.plan.workload.results}
        for (memory, behind), operand in zip(one.tensors, operands, strict=True):
            given = (alone.get(memory) or self.memory(memory)).at(behind)
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
                whole = self.rooms[memory].tensor.view(memory.shape)
                whole.narrow(dim, place, space.shape[dim]).copy_(parts)
        for view, near in back:
            view.copy_(near)

    # -- launches ----------------------------------------------------------------------------------

    def whole(self, step: Step) -> Launched:
        """The launch of a step over whole tensors."""
        launch = self.launch(step, [(p.compute, p.schedule) for p in step.parts])
        tensors = [(step.operands[n].memory, step.operands[n].behind) for n in launch.names]
        return Launched(launch, tensors, {}, [])

    def launched(self, act: MemoryAct) -> Launched:
        """The launch of a step for a piece."""
        step, demand = act.step, act.piece
        assert step is not None and demand is not None
        spans, keeps = demand.spans[step], step in demand.left
        parts = [(part, at) for part, at in zip(step.parts, spans, strict=True) if at.size]
        places: dict[str, tuple[StepMemory, int]] = {}
        windows: dict[str, TensorWindow] = {}
        alone: dict[StepMemory, AxisSpan | None] = {}
        for name, operand in step.operands.items():
            memory, offset = operand.memory, operand.behind
            if name not in step.stored and name not in step.read:  # a statistic of the piece alone
                memory, offset = replace(memory), 0
                alone[memory] = None
            elif is_alone(step, name, demand, self.plan.kept):
                region = {memory: demand.regions[memory]}
                windows[name], offset = demand.window(step, name, region)
                memory = replace(memory)
                alone[memory] = region[operand.memory]
            elif is_cut(step, name):
                windows[name], offset = demand.window(step, name, act.parts)
            places[name] = memory, offset
        mains = [(self.computed(step, part, at, windows, keeps), part.schedule) for part, at in parts]
        launch = self.launch(step, mains)
        left = [
            (name, step.spaces[name], x.dim, parts[0][1].start // x.positions * x.parts)
            for name, x in step.left.items()
            if keeps
        ]
        own = [places[name] for name in launch.names]
        return Launched(launch, own, {m: r for m, r in alone.items() if any(m is o for o, _ in own)}, left)

    def computed(
        self, step: Step, part: Part, at: AxisSpan, windows: Mapping[str, TensorWindow], keeps: bool
    ) -> Compute:
        """The computation of a part of a step for some positions; ``keeps``: with its statistics."""
        compute = part.compute if keeps else without_statistics(part.compute, step.along)
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
                plan = build_scheduled(
                    workload, self.target, own, lambda c, target: self.fitting(c, step.choose(c, target))
                )
                found = Launch(plan, True)
            except ScheduleError as error:
                raise Unsupported("within:schedule", f"{step.name} in pieces: {error}") from error
            self.made[key] = found
        return found

    def fitting(self, compute: Compute, schedule: Schedule) -> Schedule:
        """The schedule as a piece can have it: with words that change no sum, and tiles no larger than the
        piece, where sums have the same blocks. The schedule itself where none is legal."""
        summed = {x.name for x in compute.axes_of("K")}
        plain, tiles = Schedule(), programs(schedule, compute)
        words: list[dict[str, Any]] = [{}, {"behind": plain.behind}, {"turn": plain.turn}]
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
