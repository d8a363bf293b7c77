"""What a piece of some results takes: backward from them, the positions at which each step runs, and the
part that is needed of each tensor between.

    wanted          out[h 16..31]
    conv            at oh 16..31, reads y[h 15..32]
    norm, silu      at h 15..32, reads x[h 15..32]      x is kept whole: nothing before it runs again
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from transconv.compute import AxisSpan
from transconv.graph.pieces.step_graph import Step, StepMemory

NOTHING = AxisSpan(0, 0)


@dataclass(frozen=True, slots=True)
class PassResults:
    """What a pass makes: tensors that are kept, and the statistics of steps."""

    memories: tuple[StepMemory, ...]
    steps: tuple[Step, ...]

    @property
    def most(self) -> int:
        """The number of pieces that have something each."""
        units = [m.digit // m.unit for m in self.memories]
        return max([*units, *(s.parts[0].compute.size(s.parts[0].axis) for s in self.steps)])

    def piece(self, number: int, pieces: int) -> tuple[dict[StepMemory, AxisSpan], dict[Step, AxisSpan]]:
        """One of so many pieces: elements of the digits of tensors, and positions of steps."""

        def cut(size: int) -> AxisSpan:
            return AxisSpan(size * number // pieces, size * (number + 1) // pieces)

        spans = {m: cut(m.digit // m.unit) for m in self.memories}
        wanted = {m: AxisSpan(s.start * m.unit, s.stop * m.unit) for m, s in spans.items() if s.size}
        own = {s: cut(s.parts[0].compute.size(s.parts[0].axis)) for s in self.steps}
        return wanted, {s: at for s, at in own.items() if at.size}


@dataclass(slots=True)
class Demand:
    """``spans``: the positions of each part of each step that runs; ``regions``: the part of each tensor
    that they make, in elements of its digit; ``reads``: the part that is read of tensors that are whole;
    ``wanted``: what was asked for; ``left``: the steps whose statistics are kept."""

    wanted: Mapping[StepMemory, AxisSpan]
    left: Collection[Step]
    spans: dict[Step, tuple[AxisSpan, ...]] = field(default_factory=dict)
    regions: dict[StepMemory, AxisSpan] = field(default_factory=dict)
    reads: dict[StepMemory, AxisSpan] = field(default_factory=dict)

    @property
    def order(self) -> list[Step]:
        """The steps in the order in which they run."""
        return sorted(self.spans, key=lambda s: s.number)

    @property
    def us(self) -> float:
        """Microseconds of the steps, by the share that runs of each."""
        found = 0.0
        for step, spans in self.spans.items():
            whole = sum(p.compute.size(p.axis) for p in step.parts)
            found += step.us * sum(at.size for at in spans) / whole + LAUNCH_US
        return found

    def peak(self, direct: Collection[StepMemory]) -> int:
        """Bytes of the parts that are there at once at most, but for those that lie in tensors that are
        kept whole (``direct``)."""
        order = self.order
        last = {o.memory: i for i, s in enumerate(order) for o in (*s.read.values(), *s.stored.values())}
        held, most, there = 0, 0, set[StepMemory]()
        for i, step in enumerate(order):
            for memory in {o.memory for o in step.stored.values()} - there:
                if memory not in direct:
                    there.add(memory)
                    held += part_bytes(memory, self.regions[memory])
            most = max(most, held)
            for memory in [m for m in there if last[m] == i and m not in self.wanted]:
                there.remove(memory)
                held -= part_bytes(memory, self.regions[memory])
        return most


LAUNCH_US = 4.0  # of one launch, beside the time of its kernel


def part_bytes(memory: StepMemory, region: AxisSpan) -> int:
    """Bytes of a part of a tensor."""
    return memory.room(region.size) * memory.dtype.itemsize


def demand(
    kept: Collection[StepMemory], wanted: Mapping[StepMemory, AxisSpan], left: Mapping[Step, AxisSpan]
) -> Demand:
    """What it takes to make parts of tensors and the statistics of some positions. ``kept``: tensors that
    are whole in memory, unless they are wanted."""
    found = Demand(wanted, tuple(left))
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
        spans = tuple(_positions(step, found.regions, left.get(step, NOTHING)))
        if spans == found.spans.get(step):
            continue
        found.spans[step] = spans
        for name, operand in step.stored.items():
            made = NOTHING
            for part, at in zip(step.parts, spans, strict=True):
                made = made.around(step.covered(name, part, at) if at.size else NOTHING)
            if _grown(found.regions, operand.memory, _elements(made, step.stride(name))):
                for maker in operand.memory.makers:
                    ask(maker)
        for name, operand in step.read.items():
            memory = operand.memory
            if not memory.digit or name in step.needs_whole:
                found.reads[memory] = AxisSpan(0, memory.digit)
                continue
            seen = NOTHING
            for part, at in zip(step.parts, spans, strict=True):
                seen = seen.around(step.seen(name, part, at) if at.size else NOTHING)
            region = _elements(seen, step.stride(name))
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


def _positions(step: Step, regions: Mapping[StepMemory, AxisSpan], left: AxisSpan) -> Sequence[AxisSpan]:
    """The positions at which the parts of a step run; with statistics, multiples of whole tiles."""
    found = []
    for part in step.parts:
        at = left
        for name, operand in step.stored.items():
            if (region := regions.get(operand.memory)) is not None:
                stride = step.stride(name)
                wanted = AxisSpan(region.start // stride, -(-region.stop // stride))
                at = at.around(step.made_at(name, part, wanted))
        if left.size:
            size, grain = part.compute.size(part.axis), step.grain
            at = AxisSpan(at.start // grain * grain, min(size, -(-at.stop // grain) * grain))
        found.append(at)
    return found
