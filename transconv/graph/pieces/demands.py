"""What a piece of some results takes: backward from them, the positions at which each step runs, and the
part that is needed of each tensor between.

    wanted          out[h 16..31]
    conv            at oh 16..31, reads y[h 15..32]     y[h 15..16] is there from the piece before
    norm, silu      at h 17..32, reads x[h 17..32]      x is kept whole: nothing before it runs again
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from types import MappingProxyType

from transconv.compute import AxisSpan, TensorWindow
from transconv.graph.pieces.step_graph import Step, StepMemory, TensorPart

NOTHING = AxisSpan(0, 0)
Memories = Collection[StepMemory]
Parts = Mapping[StepMemory, TensorPart]


@dataclass(frozen=True, slots=True)
class PassResults:
    """What a pass makes: tensors that are kept, and the statistics of steps."""

    memories: tuple[StepMemory, ...]
    steps: tuple[Step, ...]

    @property
    def across(self) -> PassResults:
        """The same along the second axis."""
        return PassResults(
            tuple(m.across for m in self.memories if m.across is not None),
            tuple(s.across for s in self.steps if s.across is not None),
        )

    @property
    def most(self) -> int:
        """The number of pieces that have something each."""
        return max(self.units)

    @property
    def units(self) -> list[int]:
        """Of each the number of pieces that have something of it."""
        own = [s.parts[0].compute.size(s.parts[0].axis) for s in self.steps]
        return [*(m.digit // m.unit for m in self.memories), *own]

    def fullest(self, pieces: int) -> int:
        """The number of a piece that has most: one in the middle, but where some have nothing."""
        if not (few := [n for n in self.units if n < pieces]):
            return pieces // 2

        def some(number: int) -> int:
            return sum(n * (number + 1) // pieces > n * number // pieces for n in few)

        near = range(pieces // 2, min(pieces, pieces // 2 + -(-pieces // min(few)) + 1))
        return max(near, key=some)

    def piece(self, number: int, pieces: int) -> tuple[dict[StepMemory, AxisSpan], dict[Step, AxisSpan]]:
        """One of so many pieces: elements of the digits of tensors, and positions of steps."""

        def cut(size: int) -> AxisSpan:
            return AxisSpan(size * number // pieces, size * (number + 1) // pieces)

        spans = {m: cut(m.digit // m.unit) for m in self.memories}
        wanted = {m: AxisSpan(s.start * m.unit, s.stop * m.unit) for m, s in spans.items() if s.size}
        own = {s: cut(s.parts[0].compute.size(s.parts[0].axis)) for s in self.steps}
        return wanted, {s: at for s, at in own.items() if at.size}


@dataclass(slots=True, eq=False)
class Demand:
    """``spans``: the positions of each part of each step that runs; ``regions``: the part of each tensor
    that is there, in elements of its digit; ``reads``: the part that is read of tensors that are whole;
    ``wanted``: what was asked for; ``left``: the steps whose statistics are kept; ``have``: the part of
    each tensor that the piece before made; ``column``: where pieces are those of a grid, what one of the
    second axis takes: the piece is at the positions of both."""

    wanted: Mapping[StepMemory, AxisSpan]
    left: Collection[Step]
    have: Mapping[StepMemory, AxisSpan]
    spans: dict[Step, tuple[AxisSpan, ...]] = field(default_factory=dict)
    regions: dict[StepMemory, AxisSpan] = field(default_factory=dict)
    reads: dict[StepMemory, AxisSpan] = field(default_factory=dict)
    column: Demand | None = None
    took: float | None = field(default=None, init=False)  # what ``us`` found

    @property
    def order(self) -> list[Step]:
        """The steps in the order in which they run."""
        found = [s for s in self.spans if self.column is None or s.across in self.column.spans]
        return sorted(found, key=lambda s: s.number)

    @property
    def us(self) -> float:
        """Microseconds of the steps, by the share that runs of each."""
        if self.took is None:
            self.took = sum(step.us * self.share(step) + LAUNCH_US for step in self.order)
        return self.took

    def share(self, step: Step) -> float:
        """The share that runs of a step."""
        whole = sum(p.compute.size(p.axis) for p in step.parts)
        own = sum(at.size for at in self.spans[step]) / whole
        return own if self.column is None or step.across is None else own * self.column.share(step.across)

    def part(self, memory: StepMemory, along: AxisSpan) -> TensorPart:
        """A part of a tensor: of its digit this, of the second one what is there in its column."""
        if self.column is None or memory.across is None:
            return TensorPart(along)
        return TensorPart(along, self.column.regions.get(memory.across, NOTHING))

    def taken(self, memory: StepMemory) -> AxisSpan:
        """The part of a tensor that it takes over from the piece before."""
        have, region = self.have.get(memory, NOTHING), self.regions.get(memory, NOTHING)
        inside = have.start <= region.start < have.stop
        return have.within(region) if inside else NOTHING

    def made(self, memory: StepMemory) -> AxisSpan:
        """The part of a tensor that it makes."""
        region, taken = self.regions.get(memory, NOTHING), self.taken(memory)
        return AxisSpan(taken.stop, region.stop) if taken.size else region

    def parts(self, kept: Memories, over: Mapping[StepMemory, StepMemory], waits: Memories = ()) -> Parts:
        """The tensors that it has parts of, of its own. ``over``: kept ones that take the place of others:
        of these and of those a piece has a copy, as of those that wait in host memory."""
        own = {*over, *(m for m in waits if m in self.wanted)}
        found = {m: self.part(m, r) for m, r in self.regions.items() if m not in kept or m in own}
        read = (*over.values(), *(m for m in waits if m not in own))
        return found | {m: TensorPart(self.reads[m]) for m in read if m in self.reads}

    def seen(self, step: Step, name: str) -> AxisSpan:
        """The span along the slot of a tensor that a step reads or stores."""
        found, stored = NOTHING, name in step.stored
        for part, at in zip(step.parts, self.spans[step], strict=True):
            found = found.around(step.seen(name, part, at, stored)) if at.size else found
        return found

    def windows(self, step: Step, name: str, parts: Parts) -> tuple[list[TensorWindow | None], int]:
        """How a step sees a tensor, along each axis of pieces, and how many elements it begins behind the
        beginning of the part that is there, or of the whole."""
        memory, (_, strides, _) = step.operands[name].memory, step.lie(name)
        part = parts.get(memory, memory.all)
        found: list[TensorWindow | None] = []
        for of, own in self.cutting(step, name):
            if of is None or own is None:
                found.append(None)
                continue
            (_, _, slot), seen = own.lie(name), of.seen(own, name)
            assert slot is not None
            lies = part if of is not self else TensorPart(part.along)
            found.append(TensorWindow(slot, seen, tuple(memory.at(s, lies) for s in strides)))
        return found, self.behind(step, name, part)

    def cutting(self, step: Step, name: str) -> list[tuple[Demand | None, Step | None]]:
        """Along each axis of pieces what cuts a tensor of a step, or nothing."""
        each = (self, step), (self.column, step.across)
        return [(of, s) if of and s and is_cut(s, name) else (None, None) for of, s in each]

    def behind(self, step: Step, name: str, part: TensorPart) -> int:
        """How many elements behind the beginning of a part that is there a step sees a tensor begin."""
        operand, (_, strides, _) = step.operands[name], step.lie(name)
        memory = operand.memory
        found = memory.at(operand.behind, part)
        found -= sum(memory.at(there.start, part) for _, there in memory.cuts(part))
        for of, own in self.cutting(step, name):
            if of is not None and own is not None:
                slot = own.lie(name)[2]
                assert slot is not None
                found += memory.at(of.seen(own, name).start * strides[slot], part)
        return found

    def aside(self, step: Step, kept: Memories, parts: Parts) -> int:
        """Bytes that a step needs while it runs: workspaces, results that nobody needs, and copies of what
        does not begin at a multiple of 16 bytes."""
        found = step.workspace(self.share(step), step in self.left)
        for name, operand in step.operands.items():
            memory, size = operand.memory, operand.memory.dtype.itemsize
            if name not in step.stored and name not in step.read:
                found += memory.bytes
            elif is_alone(step, name, self, kept):
                found += memory.part_bytes(self.part(memory, self.regions[memory]))
            elif self.cuts(step, name):
                if self.behind(step, name, parts.get(memory, memory.all)) * size % ALIGNMENT:
                    each = [w for w in self.windows(step, name, parts)[0] if w is not None]
                    own = {w.dim: w.span.size for w in each}
                    ends = [own.get(d, n) - 1 for d, n in enumerate(step.lie(name)[0])]
                    found += size * (1 + sum(n * s for n, s in zip(ends, each[-1].strides, strict=True)))
        return found

    def cuts(self, step: Step, name: str) -> bool:
        """Whether a step sees a part of a tensor."""
        return any(of is not None for of, _ in self.cutting(step, name))


def is_cut(step: Step, name: str) -> bool:
    """Whether a step in pieces sees a part of a tensor."""
    return name in step.stored or bool(step.operands[name].memory.digit and name not in step.needs_whole)


def is_alone(step: Step, name: str, of: Demand, kept: Memories) -> bool:
    """Whether what a step stores is there already, and made again for what else it stores."""
    memory = step.operands[name].memory
    return name in step.stored and memory in kept and memory not in of.wanted


ALIGNMENT = 16  # bytes
LAUNCH_US = 4.0  # of one launch, beside the time of its kernel


def demand(
    kept: Memories,
    wanted: Mapping[StepMemory, AxisSpan],
    left: Mapping[Step, AxisSpan],
    have: Mapping[StepMemory, AxisSpan] = MappingProxyType({}),
) -> Demand:
    """What it takes to make parts of tensors and the statistics of some positions. ``kept``: tensors that
    are whole in memory, unless they are wanted; ``have``: parts of others that are there."""
    found = Demand(wanted, tuple(left), have)
    found.regions.update(wanted)
    queue: list[tuple[int, int]] = []
    by_number: dict[int, Step] = {}

    def ask(step: Step) -> None:
        if step.number not in by_number:
            by_number[step.number] = step
            heappush(queue, (-step.number, step.number))

    for step in (*left, *(s for m in wanted for s in m.makers)):
        ask(step)
    while queue:
        step = by_number.pop(heappop(queue)[1])
        spans = tuple(_positions(step, found, left.get(step, NOTHING)))
        if spans == found.spans.get(step) or not any(at.size for at in spans):
            continue
        found.spans[step] = spans
        for name, operand in step.stored.items():
            if _grown(found.regions, operand.memory, _elements(found.seen(step, name), step.stride(name))):
                for maker in operand.memory.makers:
                    ask(maker)
        for name, operand in step.read.items():
            memory = operand.memory
            if not memory.digit or name in step.needs_whole:
                found.reads[memory] = AxisSpan(0, memory.digit)
                continue
            region = _elements(found.seen(step, name), step.stride(name))
            if memory.given or (memory in kept and memory not in wanted):
                _grown(found.reads, memory, region)
            elif _grown(found.regions, memory, region):
                for maker in memory.makers:
                    ask(maker)
    return found


def _elements(span: AxisSpan, stride: int) -> AxisSpan:
    return AxisSpan(span.start * stride, span.stop * stride)


def _grown(regions: dict[StepMemory, AxisSpan], memory: StepMemory, more: AxisSpan) -> bool:
    """Have a region hold more; whether it did not before."""
    before = regions.get(memory, NOTHING)
    after = before.around(more)
    if after != before:
        regions[memory] = after
    return after != before


def _positions(step: Step, of: Demand, left: AxisSpan) -> Sequence[AxisSpan]:
    """The positions at which the parts of a step run; with statistics, multiples of whole tiles."""
    found = []
    for part in step.parts:
        at = left
        for name, operand in step.stored.items():
            if (region := of.made(operand.memory)).size:
                stride = step.stride(name)
                wanted = AxisSpan(region.start // stride, -(-region.stop // stride))
                at = at.around(step.made_at(name, part, wanted))
        if left.size:
            size, grain = part.compute.size(part.axis), step.grain
            at = AxisSpan(at.start // grain * grain, min(size, -(-at.stop // grain) * grain))
        found.append(at)
    return found
