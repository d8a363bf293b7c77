"""Runs a region in pieces, as its plan says: each step of a piece is a launch of its own, of the whole's
schedule over parts of the tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
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
from transconv.graph.backend_options import RankGroup
from transconv.graph.pieces.demands import ALIGNMENT, Demand, is_alone
from transconv.graph.pieces.piece_passes import MemoryAct, PiecePass, PiecePlan, acts
from transconv.graph.pieces.step_graph import Part, Step, StepMemory, TensorPart
from transconv.runtime import BatchCompile, Launch, build_scheduled, is_capturing
from transconv.schedule import Schedule, programs, why_not
from transconv.selection import choice, fitted
from transconv.support import ScheduleError, TransconvError, Unsupported
from transconv.target import Target
from transconv.torch_ops.conversion import inference

Tensor = torch.Tensor


class PartMemory(NamedTuple):
    """Memory of a tensor, or of a part of it."""

    tensor: Tensor
    part: TensorPart

    def at(self, offset: int) -> Tensor:
        """What lies from an address on."""
        return self.tensor.as_strided((1,), (1,), self.tensor.storage_offset() + offset)

    def view(self, memory: StepMemory, part: TensorPart) -> Tensor:
        """A part of what is there."""
        cuts, pairs = memory.cuts(part), zip(memory.shape, memory.strides, strict=True)
        lies = [(n, memory.at(s, self.part)) for n, s in pairs if n > 1 and s >= cuts[0][0]]
        for (_, span), unit in zip(cuts, [*(digit for digit, _ in cuts[1:]), 1], strict=True):
            lies.append((span.size // unit, memory.at(unit, self.part)))
        behind = sum(memory.at(span.start, self.part) for _, span in cuts)
        behind -= sum(memory.at(span.start, self.part) for _, span in memory.cuts(self.part))
        shape, strides = ([p[i] for p in lies] for i in (0, 1))
        return self.tensor.as_strided(shape, strides, self.tensor.storage_offset() + behind)

    def runs(self, memory: StepMemory, part: TensorPart) -> list[Tensor]:
        """The runs of consecutive elements of a part along one axis."""
        view = self.view(memory, part)
        return [view[at] for at in product(*map(range, view.shape[:-1]))]


Pairs = list[tuple[Tensor, Tensor]]


class HostLink:
    """Copies between a device and pinned host memory, beside its kernels, and the ``buffers`` there. A
    copy begins behind all that the current stream was given before, and ends before what the stream is
    given behind ``end``: from there on memory may be freed, and a buffer written over. Copies of one
    direction follow each other. On CPUs they are done at once."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.buffers = device, list[Tensor]()
        self.cuda: Any = torch.cuda if device.type == "cuda" else None
        self.sides = [self.cuda.Stream(device) for _ in range(2)] if self.cuda else []
        self.left: Any = None

    def enter(self, sizes: Sequence[int]) -> None:
        """Before a call: buffers of so many bytes, whose copies of the call before have ended. Raises
        Unsupported where they cannot be had."""
        self.buffers += [torch.empty(0)] * (len(sizes) - len(self.buffers))
        for number, size in enumerate(sizes):
            if self.buffers[number].nbytes < size:
                self.buffers[number] = self.made(size)
        self.end(self.left)

    def made(self, size: int) -> Tensor:
        """A buffer, which calls with and without gradients write to."""
        try:
            with torch.inference_mode(False):
                return torch.empty(size, dtype=torch.uint8, pin_memory=bool(self.sides))
        except RuntimeError as error:
            raise Unsupported(
                "within:host",
                f"{size} bytes of pinned host memory cannot be had ({str(error).splitlines()[0]}); bound "
                "it by host=, or have no tensors wait there (host=0)",
            ) from error

    def room(self, number: int, memory: StepMemory, part: TensorPart) -> PartMemory:
        """The beginning of a buffer, as a part of a tensor."""
        return PartMemory(self.buffers[number][: memory.part_bytes(part)].view(memory.dtype), part)

    def begin(self, pairs: Pairs, up: bool) -> Any:
        """Begin copies to the first ones from the second ones; ``up``: to the device. The end's event."""
        if not self.sides:
            for into, given in pairs:
                into.copy_(given)
            return None
        side = self.sides[up]
        side.wait_stream(self.cuda.current_stream(self.device))
        with self.cuda.stream(side):
            for into, given in pairs:
                into.copy_(given, non_blocking=True)
        return side.record_event()

    def end(self, copy: Any) -> None:
        """Have what the current stream is given from now on begin behind copies."""
        if copy is not None:
            self.cuda.current_stream(self.device).wait_event(copy)

    def leave(self) -> None:
        """Behind a call: all copies end, of a call that failed as well."""
        for side in self.sides:
            self.cuda.current_stream(self.device).wait_stream(side)
        if self.sides:
            self.left = self.cuda.current_stream(self.device).record_event()


class LeftPlace(NamedTuple):
    """Where parts of statistics are in the whole's: from which on along which dims, and where one dim has
    rows of ``columns``, of which a piece has some (``own``), these dims are two."""

    places: list[tuple[int, int]]
    rows: int = 0
    columns: int = 0
    own: int = 0

    def copy(self, whole: Tensor, parts: Tensor) -> None:
        """Put parts there."""
        if self.own:
            whole, parts = (
                t.view(*t.shape[: self.rows], -1, n, *t.shape[self.rows + 1 :])
                for t, n in ((whole, self.columns), (parts, self.own))
            )
        for dim, place in self.places:
            whole = whole.narrow(dim, place, parts.shape[dim])
        whole.copy_(parts)


class Launched(NamedTuple):
    """A launch of a step: its tensors, each with its memory and how many elements behind the beginning of
    the part it lies; ``alone``: of those that nobody needs behind it, the part; ``left``: of each
    workspace the memory of the whole's, and where in it the parts of this piece are."""

    launch: Launch
    tensors: list[tuple[StepMemory, int]]
    alone: dict[StepMemory, TensorPart]
    left: list[tuple[str, StepMemory, LeftPlace]]


@dataclass(slots=True)
class PieceRun:
    """Runs a plan on a device. ``made``: launches by workload; ``tape``: of each pass what it does, and
    what it launches; ``seen``: the launches of statistics whose first result was looked at; ``rooms``,
    ``parts``, ``tails``: the memory of a call, of whole tensors, of those of a piece, and what the next
    ones need; ``link``: copies to and from host memory; ``ranks``: those that run it, each its pieces;
    ``moving``: parts on their way, with the end."""

    plan: PiecePlan
    target: Target
    device: torch.device
    made: dict[tuple[Workload, tuple[Schedule, ...]], Launch] = field(default_factory=dict)
    tape: list[tuple[PiecePass, list[tuple[MemoryAct, Launched | None]]]] = field(default_factory=list)
    seen: set[Launch] = field(default_factory=set)
    rooms: dict[StepMemory, PartMemory] = field(default_factory=dict)
    parts: dict[StepMemory, PartMemory] = field(default_factory=dict)
    tails: dict[StepMemory, PartMemory] = field(default_factory=dict)
    link: HostLink | None = None
    ranks: RankGroup | None = None
    moving: dict[tuple[StepMemory, bool], tuple[PartMemory, Any]] = field(default_factory=dict)

    def __call__(self, rooms: dict[StepMemory, PartMemory]) -> dict[StepMemory, PartMemory]:
        """``rooms``: of what is given; returned are those of the results."""
        if not self.tape:
            self.arranged()
        if self.link is not None and is_capturing(self.device):
            raise Unsupported(
                "within:capture",
                "tensors wait in pinned host memory, which no CUDA graph may hold; call the model "
                "outside of the graph, or have none wait (host=0)",
            )
        self.rooms = rooms
        try:
            if self.link is not None:
                self.link.enter(self.plan.buffers)
            for p, done in self.tape:
                for act, launched in done:
                    self.do(act, launched, p)
                self.tails.clear()
            return {m: room for m, room in self.rooms.items() if m.handed or m.given}
        finally:
            if self.link is not None:
                self.link.leave()
            self.rooms, self.parts, self.tails, self.moving = {}, {}, {}, {}

    @property
    def rank(self) -> int:
        """Whose pieces it runs."""
        return self.ranks.number if self.ranks is not None and self.plan.ranks > 1 else 0

    def arranged(self) -> None:
        """``arrange``. RuntimeError on all ranks where one cannot run its pieces, and others can."""
        failed = None
        try:
            self.arrange()
        except TransconvError as error:
            failed = error
        if self.ranks is not None and self.plan.ranks > 1:
            self.ranks.compare("kernels of its pieces" if failed is None else str(failed))
        if failed is not None:
            raise failed

    def arrange(self) -> None:
        """Find what is done, and the launches, whose kernels processes compile side by side."""
        alive: set[StepMemory] = set()
        for p in self.plan.passes:
            found: list[tuple[MemoryAct, Launched | None]] = []
            pieces = p.demands(self.plan.kept, self.rank)
            for _, act in acts(self.plan, p, pieces, alive, rank=self.rank):
                launched = None
                if act.step is not None:
                    launched = self.whole(act.step) if act.piece is None else self.launched(act)
                found.append((act, launched))
            self.tape.append((p, found))
        if batch := BatchCompile.of_made(launch.plan for launch in self.made.values()):
            batch.wait()

    def do(self, act: MemoryAct, launched: Launched | None, p: PiecePass) -> None:
        """One of the acts of a pass."""
        m, kind = act.memory, act.kind
        if m is None:
            assert launched is not None
            self.start(launched)
        elif kind == "whole":
            self.rooms[m] = self.empty(m, self.plan.room(m, self.rank))
        elif kind == "drop":
            del self.rooms[m]
        elif kind == "part":
            self.parts[m] = self.gathered(m, act.span)
            if m not in self.rooms:
                self.tails.pop(m, None)
        elif kind == "tail" and not act.span.along.size:
            self.tails.pop(m, None)
        elif kind == "tail":
            self.tails[m] = self.gathered(m, act.span)
        elif kind == "end":
            del self.parts[m]
        elif kind in ("fetch", "send"):
            self.move(m, act.span, kind == "fetch")
        elif kind in ("arrive", "sent"):
            assert self.link is not None
            made, copy = self.moving.pop((m, kind == "arrive"))
            self.link.end(copy)
            if kind == "arrive":
                self.parts[m] = made
        elif kind == "write":
            self.rooms[p.over[m]].view(m, act.span).copy_(self.parts[m].view(m, act.span))
        elif kind == "swap":
            self.swap(m, p.owned(m, act.step))
        else:
            self.rooms[m] = self.rooms.pop(p.over[m])

    def swap(self, memory: StepMemory, owned: Sequence[AxisSpan]) -> None:
        """Send what other ranks have room for of what this one owns of a tensor, and receive what it has
        room for: each run of consecutive elements from where it is to where it belongs, without copies. Of
        a tensor that waits in host memory these parts come to the device first, and go back."""
        assert self.ranks is not None
        far = self.waiting(memory) if memory in self.plan.waits else None
        sides, copies = list[list[tuple[int, Tensor]]](), list[Pairs]()
        for parts in self.plan.exchanged(memory, owned, self.rank):
            there = [(r, p, self.empty(memory, p) if far else self.rooms[memory]) for r, p in parts]
            sides.append([(r, run) for r, p, near in there for run in near.runs(memory, p)])
            away = [run for _, p, _ in there for run in far.runs(memory, p)] if far else []
            copies.append([*zip((run for _, run in sides[-1]), away, strict=False)])
        if copies[0] and self.link is not None:
            self.link.end(self.link.begin(copies[0], True))
        self.ranks.exchange(*sides)
        if copies[1] and self.link is not None:
            self.link.end(self.link.begin([(into, near) for near, into in copies[1]], False))

    def waiting(self, memory: StepMemory) -> PartMemory:
        """What this rank has in host memory of a tensor that waits."""
        assert self.link is not None
        return self.link.room(self.plan.waits[memory], memory, self.plan.room(memory, self.rank))

    def move(self, memory: StepMemory, span: TensorPart, up: bool) -> None:
        """Begin the copies of a part from host memory, or to it."""
        assert self.link is not None
        made = self.empty(memory, span) if up else self.parts.pop(memory)
        near, far = made.runs(memory, span), self.waiting(memory).runs(memory, span)
        pairs = [*zip(near, far, strict=True)] if up else [*zip(far, near, strict=True)]
        self.moving[memory, up] = made, self.link.begin(pairs, up)

    def empty(self, memory: StepMemory, part: TensorPart) -> PartMemory:
        """Memory for a part of a tensor."""
        count = memory.part_bytes(part) // memory.dtype.itemsize
        return PartMemory(torch.empty(count, dtype=memory.dtype, device=self.device), part)

    def gathered(self, memory: StepMemory, part: TensorPart) -> PartMemory:
        """Memory for a part of a tensor, with what is there of it: in the part of this piece, or else in
        what the pieces before have left, and behind that in the whole."""
        made, span, done = self.empty(memory, part), part.along, part.along.start
        whole = self.rooms.get(memory)
        held = self.tails.get(memory) or (self.parts.get(memory) if whole is None else None)
        if held is not None:
            own = part._replace(along=held.part.along.within(span))
            made.view(memory, own).copy_(held.view(memory, own))
            done = max(done, own.along.stop)
        if whole is not None and done < span.stop:
            rest = part._replace(along=AxisSpan(done, span.stop))
            made.view(memory, rest).copy_(whole.view(memory, rest))
        return made

    def memory(self, memory: StepMemory) -> PartMemory:
        """What a launch sees of a tensor."""
        return self.parts.get(memory) or self.rooms[memory]

    def start(self, one: Launched) -> None:
        """Start a launch, and keep what it leaves of statistics."""
        operands = one.launch.operands()
        tensors, back = [], []
        alone = {m: self.empty(m, part) for m, part in one.alone.items()}
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
            for name, memory, place in one.left:
                parts = views[name].view(one.launch.plan.workspaces[name].shape)
                place.copy(self.rooms[memory].tensor.view(memory.shape), parts)
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
        keeps, each = step in demand.left, [(step, demand)]
        if demand.column is not None and step.across is not None:
            each.append((step.across, demand.column))
        places: dict[str, tuple[StepMemory, int]] = {}
        windows: dict[str, list[TensorWindow | None]] = {}
        alone: dict[StepMemory, TensorPart] = {}
        for name, operand in step.operands.items():
            memory, offset = operand.memory, operand.behind
            if name not in step.stored and name not in step.read:  # a statistic of the piece alone
                memory, offset = replace(memory), 0
                alone[memory] = memory.all
            elif is_alone(step, name, demand, self.plan.kept):
                region = {memory: demand.part(memory, demand.regions[memory])}
                windows[name], offset = demand.windows(step, name, region)
                memory = replace(memory)
                alone[memory] = region[operand.memory]
            elif demand.cuts(step, name):
                windows[name], offset = demand.windows(step, name, act.parts)
            places[name] = memory, offset
        mains = []
        for i, part in enumerate(step.parts):
            cuts = [(s.parts[i].axis, of.spans[s][i]) for s, of in each]
            if all(at.size for _, at in cuts):
                mains.append((self.computed(step, part, cuts, windows, keeps), part.schedule))
        launch = self.launch(step, mains)
        left = [(n, step.spaces[n], self.place(n, each)) for n in step.left if keeps]
        own = [places[name] for name in launch.names]
        return Launched(launch, own, {m: r for m, r in alone.items() if any(m is o for o, _ in own)}, left)

    def place(self, name: str, each: Sequence[tuple[Step, Demand]]) -> LeftPlace:
        """Where the parts of a statistic of a piece are in the whole's: along each axis of pieces."""
        places = []
        for step, of in each:
            left = step.left[name]
            places.append((left.dim, of.spans[step][0].start // left.positions * left.parts))
        if len(each) == 1 or places[0][0] != places[1][0]:
            return LeftPlace(places)
        (step, of), dim = each[1], places[0][0]
        left, part = step.left[name], step.parts[0]
        columns = part.compute.size(part.axis) // left.positions * left.parts
        own = of.spans[step][0].size // left.positions * left.parts
        return LeftPlace([(dim, places[0][1] // columns), (dim + 1, places[1][1])], dim, columns, own)

    def computed(
        self,
        step: Step,
        part: Part,
        cuts: Sequence[tuple[str, AxisSpan]],
        windows: Mapping[str, Sequence[TensorWindow | None]],
        keeps: bool,
    ) -> Compute:
        """The computation of a part of a step for some positions of axes; ``keeps``: with its
        statistics."""
        compute = part.compute if keeps else without_statistics(part.compute, step.along)
        for number, (axis, at) in enumerate(cuts):
            own = {t.name: windows[t.name][number] for t in compute.tensors if t.name in windows}
            compute = restricted(compute, axis, at, {n: w for n, w in own.items() if w is not None})
        return compute

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
                plan = build_scheduled(workload, self.target, own, partial(self.chosen, step))
                found = Launch(plan, True)
            except ScheduleError as error:
                raise Unsupported("within:schedule", f"{step.name} in pieces: {error}") from error
            self.made[key] = found
        return found

    def chosen(self, step: Step, compute: Compute, target: Target) -> Schedule:
        """The schedule of what combines sums in a piece: that of the whole, or a legal one for what
        nothing reads, a statistic of the piece alone, whose parts of tiles are what it leaves."""
        found = self.fitting(compute, step.choose(compute, target))
        read = {*step.stored}.intersection(w.view.tensor.name for w in compute.writes)
        if step.left and not step.along and not read and why_not(found, compute, target) is not None:
            return choice.default(compute, target)
        return found

    def fitting(self, compute: Compute, schedule: Schedule) -> Schedule:
        """The schedule as a piece can have it: with words that change no sum, and tiles no larger than the
        piece, where sums have the same blocks. The schedule itself where none is legal."""
        summed = {x.name for x in compute.axes_of("K")}
        plain, tiles = Schedule(), programs(schedule, compute)
        words: list[dict[str, Any]] = [{}, {"behind": plain.behind}]
        words += [{**w, "programs": max(1, tiles // 2)} for w in words[:2]]
        words += [{**w, "programs": plain.programs, "consumers": plain.consumers} for w in words[:2]]
        words += [{**w, "turn": plain.turn} for w in words]
        for made in (schedule, fitted(schedule, compute, self.target)):
            blocks = [b for b in made.blocks if summed & {*b.axes}]
            if blocks != [b for b in schedule.blocks if summed & {*b.axes}]:
                continue
            for changed in words:
                found = replace(made, **changed)
                if why_not(found, compute, self.target) is None:
                    return found
        return schedule
