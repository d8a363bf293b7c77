"""Which tensors stay whole, which are computed again, and in how many pieces each pass runs, so that all
of it stays within a bound.

A tensor that is kept whole is complete before anything reads it. So steps have levels: a step is one level
behind the kept tensors, and the statistics, that it reads. At each level the whole steps run first, then
one pass makes in pieces what is kept of that level; what the pass needs and nobody keeps, it computes
again from what is kept.

    level 0     conv1 -> statistics                       pieces: h is not kept
    level 1     moments; h again, norm, conv2, + x -> x'  pieces: x' is kept, in the place of x

Where all steps fit as they are, each runs whole. Otherwise all tensors are kept first that a later level
reads. While a pass exceeds the bound, the tensor is given up that lowers what exceeds it the most, in
doubt the one with the least time to compute it again; then tensors change places while that takes less.

What is in memory when is a list of acts, which the run carries out and the plan adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from transconv.compute import AxisSpan
from transconv.graph.pieces.demands import NOTHING, Demand, PassResults, demand, is_alone
from transconv.graph.pieces.step_graph import Step, StepMemory, TensorPart, undivided

TRIED = 64  # tensors at most that are given up or added
NO_RESULTS = PassResults((), ())
NO_PART = TensorPart(NOTHING)
GAIN = 0.999  # of the time: what is gained by a change is worth it


class MemoryAct(NamedTuple):
    """What happens to memory of a tensor, or a ``step`` that runs, in a ``piece`` or whole. ``kind``:

    whole   memory for all of it                    drop    goes
    part    memory for a span; what is there of it, of the piece before or in the whole, is copied
    tail    a span is kept for the next pieces      end     the part goes
    write   the part is written over the whole that another tensor had
    move    that other's memory is its own now

    ``parts``: the tensors that the piece has parts of."""

    kind: str
    memory: StepMemory | None = None
    span: TensorPart = NO_PART
    step: Step | None = None
    piece: Demand | None = None
    parts: Mapping[StepMemory, TensorPart] = MappingProxyType({})


@dataclass(slots=True)
class KnownPasses:
    """``demands``: of pieces of passes, the tensors that each sees, which of them were kept, and what it
    takes; ``cuts``: in how many pieces passes run, by all that decides it."""

    demands: dict[tuple[PassResults, int, int], list[tuple[set[StepMemory], set[StepMemory], Demand]]] = (
        field(default_factory=dict)
    )
    cuts: dict[Any, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class PiecePass:
    """What runs at a level: ``whole`` steps, then ``pieces`` pieces of what is ``wanted``, of each of
    ``columns`` of a second axis, one after another. ``over``: kept tensors that take the place of others
    that nothing reads behind the pass; ``sample``: a piece in the middle; ``peak``: bytes of all that is
    there at once; ``us``: microseconds."""

    level: int
    whole: list[Step]
    wanted: PassResults
    pieces: int = 1
    columns: int = 1
    over: dict[StepMemory, StepMemory] = field(default_factory=dict)
    sample: Demand | None = None
    peak: int = 0
    us: float = 0.0

    def demand(self, number: int, kept: set[StepMemory], known: KnownPasses) -> Demand:
        """What a piece takes without the one before; one that is ``known`` for the same tensors kept, of
        those that it sees."""
        found = known.demands.setdefault((self.wanted, number, self.pieces), [])
        for seen, own, made in found:
            if kept & seen == own:
                return made
        made = demand(kept, *self.wanted.piece(number, self.pieces))
        seen = {*made.regions, *made.reads}
        found.append((seen, kept & seen, made))
        return made

    def behind(self, number: int, kept: set[StepMemory], before: Demand | None) -> Demand:
        """What a piece takes behind another one."""
        have = before.parts(kept, {}) if before is not None else {}
        along = {m: part.along for m, part in have.items()}
        return demand(kept, *self.wanted.piece(number, self.pieces), along)

    def demands(self, kept: set[StepMemory]) -> list[Demand]:
        """What each piece takes."""
        found: list[Demand] = []
        for number in range(self.pieces if self.sample is not None else 0):
            found.append(self.behind(number, kept, found[-1] if found else None))
        if self.columns == 1:
            return found
        each = [self.column(number, kept) for number in range(self.columns)]
        return [replace(piece, column=column) for column in each for piece in found]

    def column(self, number: int, kept: set[StepMemory]) -> Demand:
        """What one of its columns takes along the second axis."""
        there = {m.across for m in kept if m.across is not None}
        return demand(there, *self.wanted.across.piece(number, self.columns))

    def crosses(self, kept: set[StepMemory]) -> bool:
        """Whether it may run in columns: all steps are cut along the second axis as well, with what they
        read and nobody keeps."""
        for step in self.sample.spans if self.sample is not None else ():
            if step.across is None:
                return False
            for name in step.across.needs_whole:
                memory = step.operands[name].memory
                if not memory.given and (memory not in kept or memory in self.wanted.memories):
                    return False
        return self.sample is not None

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
            found = sum(m.part_bytes(own.part(m, own.regions[m])) for m in each if m in own.regions)
            return found + sum(m.bytes for m in each if m not in own.regions)

        return max(steps, key=size).name


@dataclass(slots=True)
class PiecePlan:
    """``passes``: in their order; ``kept``: tensors that are whole; ``last``: the level behind which
    nothing reads a tensor; ``beside``: bytes that are there anyway; ``over``: the axis of the pieces, and
    a second one behind it, where they may be cut along two."""

    steps: Sequence[Step]
    kept: set[StepMemory]
    passes: list[PiecePass]
    last: dict[StepMemory, int]
    beside: int
    over: str = ""

    @property
    def axes(self) -> str:
        """The axes of the pieces, in words."""
        return " and ".join(self.over)

    @property
    def whole(self) -> bool:
        """Whether each step runs whole."""
        return all(p.sample is None for p in self.passes)

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
    whole = undivided(steps)
    plan = PiecePlan(whole, set(), [PiecePass(0, whole, NO_RESULTS)], {}, beside)
    plan.last = _last(plan)
    if settled(plan).peak <= bound:
        return plan
    found, known, far = list[PiecePlan](), KnownPasses(), False
    for goal in (bound, bound * 15 // 16, 0):
        if far and goal:
            continue
        plan = _searched(steps, beside, goal, known)
        far = plan.peak > goal  # its tensors take more in any number of pieces
        found.append(plan := settled(plan))
        for _ in range(0 if far else EXACT):  # the first or the last piece takes more than the middle
            if plan.peak <= bound or goal <= 0:
                break
            goal -= plan.peak - bound
            found.append(
                plan := settled(laid_out(steps, plan.kept, beside, goal, KnownPasses(known.demands)))
            )
        if plan.peak <= bound:
            return plan
        known.cuts = {k: cut for k, cut in known.cuts.items() if cut[3] > bound}  # the least of each
    return min(found, key=lambda p: p.peak)


def settled(plan: PiecePlan) -> PiecePlan:
    """The plan, with what each pass takes exactly."""
    held, alive = Held(plan), set[StepMemory]()
    for p in plan.passes:
        held.most = held.now
        for _, act in acts(plan, p, p.demands(plan.kept), alive):
            held.do(act)
        p.peak = held.most
        if p.sample is None:
            p.us = sum(s.us for s in p.whole)
    return plan


def _searched(steps: Sequence[Step], beside: int, bound: int, known: KnownPasses) -> PiecePlan:
    """The best plan found by changes of what is kept, with what a piece in the middle takes."""
    must = _must(steps)
    level = levels(steps, must)
    made: dict[StepMemory, int] = {}
    for s in steps:
        for o in s.stored.values():
            made[o.memory] = max(made.get(o.memory, 0), level[s])
    later = {o.memory for s in steps for o in s.read.values() if made.get(o.memory, level[s]) < level[s]}
    best = laid_out(steps, must | later, beside, bound, known)
    for _ in range(TRIED):
        over, found = best.exceeds(bound), None
        others = _others(best, must) if over[0] else _exchanged(best, must)
        for other in others:
            plan = laid_out(steps, other, beside, bound, known)
            key = *plan.exceeds(bound), plan.us
            better = key[:2] < over if over[0] else not key[0] and key[2] < GAIN * best.us
            if better and (found is None or key < found[0]):
                found = key, plan
        if found is None:
            break
        best = found[1]
    return best


MOST, IN_GRID = 256, 512  # pieces at most of a pass, along one axis and of two: each is planned alone
EXACT = 4  # times at most that a plan is cut finer
EXCHANGED = 6  # tensors at most for which others are given up


def _exchanged(plan: PiecePlan, must: Collection[StepMemory]) -> Iterator[set[StepMemory]]:
    """The tensors that are kept, with one that is computed several times, and perhaps without another."""
    share: dict[Step, float] = {}
    for p in plan.passes:
        for s in p.sample.spans if p.sample is not None else ():
            times = p.pieces * p.columns
            share[s] = share.get(s, 0.0) + p.sample.share(s) * times  # type: ignore[union-attr]
    often = sorted([s for s in share if share[s] > 1.2], key=lambda s: -s.us * (share[s] - 1))
    more = [m for m in dict.fromkeys(o.memory for s in often for o in s.stored.values()) if not m.given]
    more = [m for m in more if m not in plan.kept]
    less = [m for m in memories(plan.steps) if m in plan.kept and m not in must]
    for m in more:
        yield plan.kept | {m}
    for m in more[:EXCHANGED]:
        for other in less:
            yield plan.kept - {other} | {m}
    for other in less:
        yield plan.kept - {other}


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
    steps: Sequence[Step], kept: set[StepMemory], beside: int, bound: int, known: KnownPasses
) -> PiecePlan:
    """The passes in which some tensors are kept, each with the fewest pieces that stay within a bound."""
    level = levels(steps, kept)
    top = max(level.values(), default=0)
    own: list[list[Step]] = [[] for _ in range(top + 1)]
    for s in steps:
        own[level[s]].append(s)
    passes = []
    for n, group in enumerate(own):
        made = [o.memory for s in group if not s.whole for o in s.stored.values() if o.memory in kept]
        last_made = [m for m in dict.fromkeys(made) if max(level[s] for s in m.makers) == n]
        wanted = PassResults(tuple(last_made), tuple(s for s in group if s.left))
        passes.append(PiecePass(n, [s for s in group if s.whole], wanted))
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
    p: PiecePass, plan: PiecePlan, born: Mapping[StepMemory, int], bound: int, known: KnownPasses
) -> None:
    """Find the fewest pieces with which a pass stays within a bound; where none do, those of the grid that
    takes least; or else what has the least peak."""
    kept = plan.kept
    before = frozenset(m for m, n in born.items() if n < p.level <= plan.last[m])
    seen = {*p.sample.regions, *p.sample.reads} if p.sample is not None else set()
    going = frozenset(m for m, n in plan.last.items() if n == p.level)
    gone = frozenset(m for m, n in plan.last.items() if m.passed and n < p.level)
    key = p.wanted, tuple(p.whole), before, going, gone, frozenset(kept & seen)
    found = known.cuts.get(key)
    if found is None:
        over = _over(p, plan, born) if p.sample is not None else {}
        most = min(p.wanted.most, MOST) if seen else 1
        tries = [n for e in range(40) if (n := 1 << e) < most] + [most]
        for n in tries:
            for taken in ({}, over) if over else ({},):
                p.pieces, p.columns, p.over = n, 1, taken
                peak, sample = _middle(p, plan, before, gone, known)
                if found is None or peak < found[3]:
                    found = n, 1, taken, peak, sample
            if found is not None and found[3] <= bound:
                break
        assert found is not None
        if found[3] > bound and p.crosses(kept):
            found = _grid(p, plan, tries, found, bound, lambda: _middle(p, plan, before, gone, known))
        known.cuts[key] = found
    p.pieces, p.columns, p.over, p.peak, p.sample = found
    times = p.pieces * p.columns
    p.us = sum(s.us for s in p.whole) + (times * p.sample.us if p.sample is not None else 0.0)


Cut = tuple[int, int, dict[StepMemory, StepMemory], int, Demand | None]
"""How a pass is cut: pieces, columns, what is in place, the peak, a piece in the middle."""


def _grid(
    p: PiecePass,
    plan: PiecePlan,
    tries: Sequence[int],
    found: Cut,
    bound: int,
    middle: Callable[[], tuple[int, Demand | None]],
) -> Cut:
    """The grid of pieces within a bound that is estimated to take least; where none is, what has the least
    peak, ``found`` being that of one axis."""
    best, p.over = 0.0, {}
    most = p.wanted.across.most
    for columns in [n for e in range(1, 40) if (n := 1 << e) < most] + [most]:
        rows = [n for n in tries if n * columns <= IN_GRID]
        for n in (*rows[-1:], *rows):  # whether any do, and then the fewest
            p.pieces, p.columns = n, columns
            peak, sample = middle()
            if (peak > bound) == (n == rows[-1]):
                break
        if not rows:
            break
        assert sample is not None
        us = n * columns * sample.us
        if best and (peak > bound or us >= best):
            break
        if peak <= bound or peak < found[3]:
            best, found = us * (peak <= bound), (n, columns, {}, peak, sample)
    return found


def _middle(
    p: PiecePass,
    plan: PiecePlan,
    before: Collection[StepMemory],
    gone: Collection[StepMemory],
    known: KnownPasses,
) -> tuple[int, Demand | None]:
    """The peak of a pass, but for the edges of pieces, and a piece in the middle."""
    held, kept, alive = Held(plan), plan.kept, {*before}
    for m in (*before, *gone):
        held.do(MemoryAct("drop" if m in gone else "whole", m))
    if p.sample is None or p.pieces == 1:
        pieces = [] if p.sample is None else [p.demand(0, kept, known)]
    else:
        number = max(1, p.wanted.fullest(p.pieces))
        pieces = [p.demand(number - 1, kept, known)]
        pieces.append(p.behind(number, kept, pieces[0]))
    if p.columns > 1:
        column = p.column(p.wanted.across.fullest(p.columns), kept)
        pieces = [replace(piece, column=column) for piece in pieces]
    for number, act in acts(plan, p, pieces, alive, p.pieces * p.columns <= 2):
        most = held.most
        held.do(act)
        if number == 0 and p.pieces > 2:
            held.most = most  # of the piece before nothing counts
    return held.most, pieces[-1] if pieces else None


# -- what is in memory when ----------------------------------------------------------------------------


@dataclass(slots=True)
class Held:
    """Adds up bytes of what is in memory. ``most``: at most so far."""

    plan: PiecePlan
    now: int = 0
    most: int = 0
    known: dict[tuple[str, StepMemory], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = self.most = self.plan.beside

    def do(self, act: MemoryAct) -> None:
        """An act."""
        m, kind = act.memory, act.kind
        if m is None:
            assert act.step is not None
            aside = (
                act.step.workspace()
                if act.piece is None
                else act.piece.aside(act.step, self.plan.kept, act.parts)
            )
            self.most = max(self.most, self.now + aside)
        elif kind in ("whole", "drop"):
            self._enter("whole", m, m.bytes * (kind == "whole"))
            self.now -= m.bytes * (m.passed and kind == "drop")
        elif kind == "move":
            self.known["whole", m] = m.bytes
        elif kind == "end":
            self._enter("part", m, 0)
        elif kind != "write":
            self._enter(kind, m, m.part_bytes(act.span) if act.span.along.size else 0)
            if kind == "part" and ("whole", m) not in self.known:
                self._enter("tail", m, 0)

    def _enter(self, kind: str, m: StepMemory, count: int) -> None:
        self.now += count - self.known.pop((kind, m), 0)
        if count:
            self.known[kind, m] = count
        self.most = max(self.most, self.now)


def acts(
    plan: PiecePlan, p: PiecePass, pieces: Sequence[Demand], alive: set[StepMemory], ends: bool = True
) -> Iterator[tuple[int, MemoryAct]]:
    """What a pass does, each act with the number of its piece, -1 before the first. ``alive``: what is
    there, changed to what is there behind it; ``ends``: the last piece is the pass's last."""
    each = [(p.whole, None), *((d.order, d) for d in pieces)]
    parts = [{}, *(d.parts(plan.kept, p.over) for d in pieces)]
    touched = [[_touched(s, d, plan.kept) for s in steps] for steps, d in each]
    final = {m: i for i, own in enumerate(touched) for ms in own for m in ms if m not in parts[i]}
    going = {m for m, n in plan.last.items() if n == p.level and ends} - {*p.over.values()}
    for i, (steps, piece) in enumerate(each):
        last = {m: k for k, ms in enumerate(touched[i]) for m in ms}
        own, there = parts[i], set[StepMemory]()
        for k, step in enumerate(steps):
            for m in touched[i][k]:
                if m in own and m not in there:
                    there.add(m)
                    yield i - 1, MemoryAct("part", m, own[m])
                elif m not in own and m not in alive and not m.given:
                    alive.add(m)
                    yield i - 1, MemoryAct("whole", m)
            yield i - 1, MemoryAct("run", None, NO_PART, step, piece, own)
            for m in [m for m in touched[i][k] if last[m] == k]:
                if m not in own and m in going and final[m] == i:
                    alive.discard(m)
                    yield i - 1, MemoryAct("drop", m)
                elif m in own and m not in p.over:
                    if i < len(pieces) and (tail := pieces[i].taken(m)).size:
                        yield i - 1, MemoryAct("tail", m, pieces[i].part(m, tail))
                    yield i - 1, MemoryAct("end", m)
        for m, old in p.over.items() if piece is not None else ():
            if (made := piece.wanted.get(m)) is not None:  # type: ignore[union-attr]
                start = min([made.stop, *(d.reads[old].start for d in pieces[i:] if old in d.reads)])
                yield i - 1, MemoryAct("tail", old, TensorPart(AxisSpan(start, made.stop)))
                yield i - 1, MemoryAct("write", m, TensorPart(made))
                yield i - 1, MemoryAct("end", m)
    for m, old in p.over.items():
        alive -= {old}
        alive |= {m}
        yield len(pieces), MemoryAct("move", m)
    if ends:
        for m in [m for m in alive if plan.last.get(m, -1) <= p.level]:
            alive.discard(m)
            yield len(pieces), MemoryAct("drop", m)


def _touched(step: Step, piece: Demand | None, kept: Collection[StepMemory]) -> list[StepMemory]:
    """What a step reads and stores."""
    operands = step.read | step.stored
    if piece is None:
        return [*dict.fromkeys(o.memory for o in operands.values())]
    found = [o.memory for n, o in operands.items() if not is_alone(step, n, piece, kept)]
    found += step.spaces.values() if step in piece.left else ()
    return [*dict.fromkeys(found)]


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
