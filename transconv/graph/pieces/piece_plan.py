"""Which tensors stay whole, which are computed again, and in how many pieces each pass runs, so that all
of it stays within a bound.

A tensor that is kept whole is complete before anything reads it. So steps have levels: a step is one level
behind the kept tensors, and the statistics, that it reads. At each level the whole steps run first, then
one pass makes in pieces what is kept of that level; what the pass needs and nobody keeps, it computes
again from what is kept.

    level 0     conv1 -> statistics                       pieces: h is not kept
    level 1     moments; h again, norm, conv2, + x -> x'  pieces: x' is kept, in the place of x

First all tensors are kept that a later level reads. While a pass exceeds the bound, the tensor is given up
that lowers what exceeds it the most, in doubt the one with the least time to compute it again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from transconv.graph.backend_options import MemoryBound
from transconv.graph.pieces.demands import Demand, PassResults, demand, part_bytes
from transconv.graph.pieces.step_graph import Step, StepMemory
from transconv.support import Unsupported

TRIED = 64  # tensors at most that are given up or added


KnownDemands = dict[tuple[PassResults, int, int], list[tuple[set[StepMemory], set[StepMemory], Demand]]]
"""Of pieces of passes: the tensors that each sees, which of them were kept, and what it takes."""


@dataclass(slots=True)
class PiecePass:
    """What runs at a level: ``whole`` steps, then ``pieces`` pieces of what is ``wanted``. ``over``: kept
    tensors that take the place of others that nothing reads behind the pass; ``sample``: a piece in the
    middle; ``peak``: bytes of all that is there at once; ``us``: microseconds."""

    level: int
    whole: list[Step]
    wanted: PassResults
    pieces: int = 1
    over: dict[StepMemory, StepMemory] = field(default_factory=dict)
    sample: Demand | None = None
    peak: int = 0
    us: float = 0.0

    def demand(self, number: int, kept: set[StepMemory], known: KnownDemands | None = None) -> Demand:
        """What a piece takes; one that is ``known`` for the same tensors kept, of those that it sees."""
        found = [] if known is None else known.setdefault((self.wanted, number, self.pieces), [])
        for seen, own, made in found:
            if kept & seen == own:
                return made
        made = demand(kept, *self.wanted.piece(number, self.pieces))
        seen = {*made.regions, *made.reads}
        found.append((seen, kept & seen, made))
        return made

    @property
    def largest(self) -> str:
        """The operation that takes most of it."""
        steps = self.sample.order if self.sample is not None else self.whole
        if not steps:
            return "what is kept"

        def size(step: Step) -> int:
            each = {o.memory for o in (*step.read.values(), *step.stored.values())}
            if self.sample is None:
                return sum(m.bytes for m in each)
            own = self.sample
            found = sum(part_bytes(m, own.regions[m]) for m in each if m in own.regions)
            return found + sum(m.bytes for m in each if m not in own.regions)

        return max(steps, key=size).name


@dataclass(slots=True)
class PiecePlan:
    """``passes``: in their order; ``kept``: tensors that are whole; ``last``: the level behind which
    nothing reads a tensor; ``beside``: bytes that are there anyway."""

    steps: Sequence[Step]
    kept: set[StepMemory]
    passes: list[PiecePass]
    last: dict[StepMemory, int]
    beside: int

    @property
    def peak(self) -> int:
        """Bytes of all that is there at once at most."""
        return max((p.peak for p in self.passes), default=self.beside)

    @property
    def us(self) -> float:
        """Microseconds of all passes."""
        return sum(p.us for p in self.passes)

    @property
    def once(self) -> float:
        """Microseconds of each step once."""
        return sum(s.us for s in self.steps)

    def exceeds(self, bound: int) -> tuple[int, int]:
        """By how many bytes the passes exceed a bound: the worst one, and all together."""
        each = [max(0, p.peak - bound) for p in self.passes]
        return max(each, default=0), sum(each)


def memories(steps: Sequence[Step]) -> list[StepMemory]:
    """What steps read and store, in their order."""
    found: dict[StepMemory, None] = {}
    for s in steps:
        found |= dict.fromkeys(o.memory for o in (*s.read.values(), *s.stored.values()))
        found |= dict.fromkeys(s.spaces.values())
    return [*found]


def _must(steps: Sequence[Step]) -> set[StepMemory]:
    """The tensors that are kept whole whatever the bound is."""
    found = {m for m in memories(steps) if m.handed or (not m.given and not m.digit)}
    for s in steps:
        found |= {o.memory for n, o in s.read.items() if s.whole or n in s.needs_whole}
        found |= {o.memory for o in s.stored.values() if s.whole}
    return {m for m in found if not m.given}


def levels(steps: Sequence[Step], kept: Collection[StepMemory]) -> dict[Step, int]:
    """The level of each step."""
    ready: dict[StepMemory, int] = {}
    found: dict[Step, int] = {}
    for step in steps:
        own = max((ready.get(o.memory, 0) for o in step.read.values()), default=0)
        found[step] = own
        for o in step.stored.values():
            later = not step.whole and o.memory in kept
            ready[o.memory] = max(ready.get(o.memory, 0), own + later)
        for space in step.spaces.values():
            ready[space] = own + 1
    return found


def planned(steps: Sequence[Step], beside: int, bound: int) -> PiecePlan:
    """The plan within a bound, or the one that exceeds it least. ``beside``: bytes that are there whatever
    the steps do."""
    must = _must(steps)
    level = levels(steps, must)
    made: dict[StepMemory, int] = {}
    for s in steps:
        for o in s.stored.values():
            made[o.memory] = max(made.get(o.memory, 0), level[s])
    later = {o.memory for s in steps for o in s.read.values() if made.get(o.memory, level[s]) < level[s]}
    known: KnownDemands = {}
    best = laid_out(steps, must | later, beside, bound, known)
    for _ in range(TRIED):
        over = best.exceeds(bound)
        if not over[0]:
            break
        found = None
        for other in _others(best, must):
            plan = laid_out(steps, other, beside, bound, known)
            key = *plan.exceeds(bound), plan.us
            if key[:2] < over and (found is None or key < found[0]):
                found = key, plan
        if found is None:
            break
        best = found[1]
    return best


def _others(plan: PiecePlan, must: Collection[StepMemory]) -> Iterator[set[StepMemory]]:
    """The tensors that are kept, without one that is there in the pass that exceeds a bound the most, or
    with one that is made on the way there."""
    worst, born = max(plan.passes, key=lambda p: p.peak), _born(plan)
    for m in born:
        if m in plan.kept and m not in must and born[m] <= worst.level <= plan.last[m]:
            yield plan.kept - {m}
    if worst.sample is not None:
        for m in worst.sample.regions:
            if m not in plan.kept and m not in worst.sample.wanted:
                yield plan.kept | {m}


def laid_out(
    steps: Sequence[Step], kept: set[StepMemory], beside: int, bound: int, known: KnownDemands
) -> PiecePlan:
    """The passes in which some tensors are kept, each with the fewest pieces that stay within a bound."""
    level = levels(steps, kept)
    top = max(level.values(), default=0)
    passes = []
    for n in range(top + 1):
        own = [s for s in steps if level[s] == n]
        made = [o.memory for s in own if not s.whole for o in s.stored.values() if o.memory in kept]
        last_made = [m for m in dict.fromkeys(made) if max(level[s] for s in m.makers) == n]
        wanted = PassResults(tuple(last_made), tuple(s for s in own if s.left))
        passes.append(PiecePass(n, [s for s in own if s.whole], wanted))
    plan = PiecePlan(steps, kept, passes, {}, beside)
    for p in passes:
        if p.wanted.memories or p.wanted.steps:
            p.sample = p.demand(0, kept, known)
    plan.last = _last(plan)
    born = _born(plan)
    for p in passes:
        _cut(p, plan, born, bound, known)
    return plan


def _last(plan: PiecePlan) -> dict[StepMemory, int]:
    """The level behind which nothing reads a tensor."""
    found: dict[StepMemory, int] = {}
    for p in plan.passes:
        seen = [o.memory for s in p.whole for o in (*s.read.values(), *s.stored.values())]
        seen += [*p.wanted.memories]
        seen += [m for s in p.wanted.steps for m in s.spaces.values()]
        seen += [*p.sample.reads] if p.sample is not None else []
        found |= dict.fromkeys(seen, p.level)
    end = len(plan.passes)
    return found | {m: end for m in memories(plan.steps) if m.handed}


def _cut(
    p: PiecePass, plan: PiecePlan, born: Mapping[StepMemory, int], bound: int, known: KnownDemands
) -> None:
    """Find the fewest pieces with which a pass stays within a bound, or else the number with the least
    peak."""
    held = plan.beside
    for memory, level in born.items():
        if level <= p.level <= plan.last[memory]:
            held += memory.bytes
    p.peak = held
    if p.sample is None:
        return
    wanted = p.wanted
    direct = {*wanted.memories}
    kept = plan.kept
    over = _over(p, plan, born)
    least, pieces = inf, 1
    tries = [n for e in range(40) if (n := 1 << e) < wanted.most] + [wanted.most]
    for n in tries:
        for taken in ({}, over) if over else ({},):
            p.pieces, p.over = n, taken
            sample = p.demand(n // 2, kept, known)
            peak = held + sample.peak(direct - taken.keys()) - sum(m.bytes for m in taken)
            for old in taken.values():
                peak += 2 * part_bytes(old, sample.reads[old]) if old in sample.reads else 0
            if peak < least:
                least, pieces, best, p.sample = peak, n, taken, sample
            if least <= bound:
                break
        if least <= bound:
            break
    p.pieces, p.over, p.peak = pieces, best, int(least)
    p.us = sum(s.us for s in p.whole) + pieces * p.sample.us


def _born(plan: PiecePlan) -> dict[StepMemory, int]:
    """The level at which a tensor is there first."""
    found: dict[StepMemory, int] = {}
    for p in plan.passes:
        made = [o.memory for s in p.whole for o in s.stored.values()]
        made += [*p.wanted.memories, *(m for s in p.wanted.steps for m in s.spaces.values())]
        for m in made:
            found.setdefault(m, p.level)
    return found


def _over(p: PiecePass, plan: PiecePlan, born: Mapping[StepMemory, int]) -> dict[StepMemory, StepMemory]:
    """Tensors of a pass that may take the place of others that nothing reads behind it."""
    assert p.sample is not None
    kept = {m for q in plan.passes for m in q.wanted.memories}
    free = [
        m
        for m in born
        if m in kept
        and born[m] < p.level
        and plan.last.get(m) == p.level
        and not m.handed
        and m in p.sample.reads
        and all(n not in s.needs_whole for s in p.sample.spans for n, o in s.read.items() if o.memory is m)
    ]
    found: dict[StepMemory, StepMemory] = {}
    for m in p.wanted.memories:
        old = next((f for f in free if _alike(f, m) and f not in found.values()), None)
        if old is not None:
            found[m] = old
    return found


def _alike(a: StepMemory, b: StepMemory) -> bool:
    """Whether two tensors lie alike."""
    strides = (tuple(s for n, s in zip(m.shape, m.strides, strict=True) if n > 1) for m in (a, b))
    return (
        a.dtype is b.dtype and a.digit == b.digit and a.bytes == b.bytes and next(strides) == next(strides)
    )


def refuse_beyond(plan: PiecePlan, bound: MemoryBound) -> None:
    """Raise Unsupported for a plan that exceeds a bound, with the least that would do, and why."""
    if plan.peak <= bound.bytes:
        return
    worst = max(plan.passes, key=lambda p: p.peak)
    raise Unsupported(
        "within:memory",
        f"memory={bound.told!r} is too small: at least {size_text(plan.peak)} are needed, of which "
        f"{size_text(plan.beside)} are weights and other tensors that the caller holds; the most is there "
        f"while {worst.largest} runs",
    )


def size_text(count: int) -> str:
    """A number of bytes, in words."""
    value, words = float(count), ("bytes", "KB", "MB", "GB", "TB")
    for word in words:
        if value < 1000 or word == words[-1]:
            return f"{value:.4g} {word}"
        value /= 1000
    raise AssertionError
