"""Passes of pieces, and what is in memory when: a list of acts, which the run carries out and the plan
adds up."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from transconv.compute import AxisSpan
from transconv.graph.pieces.demands import LAUNCH_US, NOTHING, Demand, PassResults, demand, is_alone
from transconv.graph.pieces.step_graph import SHARE, Step, StepMemory, TensorPart

NO_RESULTS = PassResults((), ())
NO_PART = TensorPart(NOTHING)


class MemoryAct(NamedTuple):
    """What happens to memory of a tensor, or a ``step`` that runs, in a ``piece`` or whole. ``kind``:

    whole   memory for all of it                    drop    goes
    part    memory for a span; what is there of it, of the piece before or in the whole, is copied
    tail    a span is kept for the next pieces      end     the part goes
    write   the part is written over the whole that another tensor had
    move    that other's memory is its own now
    fetch   memory for a span, which a copy from host memory fills; it is a part when the copy has ended,
    arrive  which what follows waits for
    send    a span of the part begins to be copied to host memory; the part goes when the copy has ended,
    sent    which what follows waits for
    swap    what ranks made of it goes to those that have room for it; of a statistic of the ``step``;
            of what waits in host memory, by memory on the device for a span as large

    ``parts``: the tensors that the piece, or the rank, has parts of."""

    kind: str
    memory: StepMemory | None = None
    span: TensorPart = NO_PART
    step: Step | None = None
    piece: Demand | None = None
    parts: Mapping[StepMemory, TensorPart] = MappingProxyType({})


@dataclass(slots=True)
class KnownPasses:
    """``demands``: of pieces of passes, the tensors that each sees, which of them were kept, and what it
    takes; ``middles``: what passes take beyond what is there before them, but for the edges of pieces,
    and a piece in the middle, by what decides it; ``exact``: the same, exactly; ``cuts``: in how many
    pieces passes run, by all that decides it; ``handed``: the tensors that are results; ``ranks``: how
    many have pieces of a pass."""

    handed: Sequence[StepMemory]
    ranks: int = 1
    demands: dict[tuple[PassResults, int, int], list[tuple[set[StepMemory], set[StepMemory], Demand]]] = (
        field(default_factory=dict)
    )
    middles: dict[Any, tuple[int, Demand | None]] = field(default_factory=dict)
    exact: dict[Any, int] = field(default_factory=dict)
    cuts: dict[Any, tuple[Any, ...]] = field(default_factory=dict)

    def anew(self) -> KnownPasses:
        """The same for another bound."""
        return KnownPasses(self.handed, self.ranks, self.demands, self.middles, self.exact)


class PassStart(NamedTuple):
    """What decides how a pass is cut. ``there``: bytes that are there before it, and ``left`` those
    without inputs that nothing needs any more; ``alive``: the tensors it touches that are there;
    ``waits``: those that wait in host memory; ``key``: what decides what it takes beyond that, but for the
    number of pieces."""

    there: int
    left: int
    alive: frozenset[StepMemory]
    waits: frozenset[StepMemory]
    key: tuple[Any, ...]


@dataclass(slots=True, eq=False)
class PiecePass:
    """What runs at a level: ``whole`` steps, then ``pieces`` pieces of what is ``wanted``, of each of
    ``columns`` of a second axis, one after another. ``over``: kept tensors that take the place of others
    that nothing reads behind the pass; ``sample``: a piece in the middle; ``start``: what is there before
    it; ``peak``: bytes of all that is there at once; ``us``: microseconds; ``copies``: those of its copies
    to and from host memory, of which it waits for ``exposed``; ``ranks``: how many have as many pieces
    each, of which ``swapped`` are microseconds of their exchange."""

    level: int
    whole: list[Step]
    wanted: PassResults
    pieces: int = 1
    columns: int = 1
    over: dict[StepMemory, StepMemory] = field(default_factory=dict)
    sample: Demand | None = None
    start: PassStart | None = None
    peak: int = 0
    us: float = 0.0
    copies: float = 0.0
    exposed: float = 0.0
    ranks: int = 1
    swapped: float = 0.0

    @property
    def share(self) -> int:
        """The pieces of one rank."""
        return self.pieces // self.ranks

    @property
    def dealt(self) -> list[tuple[StepMemory, Step | None]]:
        """The tensors of which ranks make parts, those of a step's statistics with the step."""
        left = [(m, s) for s in self.wanted.steps for m in s.spaces.values()]
        return [*((m, None) for m in self.wanted.memories), *left]

    def owned(self, memory: StepMemory, step: Step | None) -> list[AxisSpan]:
        """What each rank makes of one of these: elements of its digit. Of a tile that two make, the later
        one has it."""
        if step is None:
            each = [self.wanted.piece(rank, self.ranks)[0] for rank in range(self.ranks)]
            return [wanted.get(memory, NOTHING) for wanted in each]
        left = next(step.left[name] for name, m in step.spaces.items() if m is memory)
        size = step.parts[0].compute.size(step.parts[0].axis)
        tiles = [size * rank // self.ranks // step.grain * step.grain for rank in range(self.ranks)]
        starts = [at // left.positions * left.parts * memory.strides[left.dim] for at in tiles]
        return [AxisSpan(*span) for span in zip(starts, [*starts[1:], memory.digit], strict=True)]

    @property
    def key(self) -> tuple[Any, ...]:
        """All that decides what it takes beyond what is there before it."""
        assert self.start is not None
        return *self.start.key, self.pieces, self.columns, tuple(self.over.items())

    def demand(self, number: int, kept: set[StepMemory], known: KnownPasses, pieces: int = 0) -> Demand:
        """What a piece, of its own ``pieces`` or of so many, takes without the one before; one that is
        ``known`` for the same tensors kept, of those that it sees."""
        pieces = pieces or self.pieces
        found = known.demands.setdefault((self.wanted, number, pieces), [])
        for place in range(len(found) - 1, -1, -1):  # what was used last is used again soon
            seen, own, made = found[place]
            if kept & seen == own:
                found.append(found.pop(place))
                return made
        made = demand(kept, *self.wanted.piece(number, pieces))
        seen = {*made.regions, *made.reads}
        found.append((seen, kept & seen, made))
        return made

    def all_of(self, rank: int, kept: set[StepMemory], known: KnownPasses) -> Demand | None:
        """What all pieces of a rank take together; None where it has none."""
        return None if self.sample is None else self.demand(rank, kept, known, self.ranks)

    def behind(self, number: int, kept: set[StepMemory], before: Demand | None) -> Demand:
        """What a piece takes behind another one."""
        have = before.parts(kept, {}) if before is not None else {}
        along = {m: part.along for m, part in have.items()}
        return demand(kept, *self.wanted.piece(number, self.pieces), along)

    def demands(self, kept: set[StepMemory], rank: int = 0) -> list[Demand]:
        """What each piece of a rank takes."""
        found: list[Demand] = []
        first = rank * self.share
        for number in range(first, first + self.share if self.sample is not None else 0):
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

    def timed(self, waits: Collection[StepMemory]) -> None:
        """Estimate its time. While a piece runs, the next one's parts come from host memory, and those of
        the one before leave, each way at the pace of the link."""
        self.us, self.copies, self.exposed = sum(s.us for s in self.whole), 0.0, 0.0
        if self.sample is None:
            return
        times, own = self.share * self.columns, self.sample
        up = sum(copied_us(m, own.reads[m]) for m in waits if m in own.reads)
        down = sum(copied_us(m, own.wanted[m]) for m in waits if m in own.wanted)
        self.copies = times * (up + down)
        if self.copies:
            paced = up + own.us + down + (times - 1) * max(up, own.us, down)
            self.exposed = paced - times * own.us
        self.us += times * own.us + self.exposed + self.swapped

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
    a second one behind it, where they may be cut along two; ``waits``: kept tensors that wait in pinned
    host memory between passes, each in one of the ``buffers`` there, of so many bytes; ``ranks``: how
    many run it, each its own pieces; ``rooms``: of each of them, what it has of the kept tensors of which
    it has a part."""

    steps: Sequence[Step]
    kept: set[StepMemory]
    passes: list[PiecePass]
    last: dict[StepMemory, int]
    beside: int
    over: str = ""
    waits: dict[StepMemory, int] = field(default_factory=dict)
    buffers: list[int] = field(default_factory=list)
    ranks: int = 1
    rooms: dict[int, dict[StepMemory, AxisSpan]] = field(default_factory=dict)

    def room(self, memory: StepMemory, rank: int) -> TensorPart:
        """What a rank has of a tensor that is kept."""
        span = self.rooms[rank].get(memory) if self.rooms else None
        return memory.all if span is None else TensorPart(span)

    def exchanged(
        self, memory: StepMemory, owned: Sequence[AxisSpan], rank: int
    ) -> tuple[list[tuple[int, TensorPart]], ...]:
        """The parts of a tensor, of which ranks have made what is ``owned``, that a rank sends to others,
        and those that it receives, each with the other's number."""
        room = [self.room(memory, r).along for r in range(self.ranks)]
        others = [r for r in range(self.ranks) if r != rank]
        sent = [(r, TensorPart(owned[rank].within(room[r]))) for r in others]
        received = [(r, TensorPart(owned[r].within(room[rank]))) for r in others]
        return tuple([(r, p) for r, p in side if p.along.size] for side in (sent, received))

    @property
    def text(self) -> str:
        """The plan in a line, for ranks to compare."""
        names = [m.name for s in self.steps for m in s.made if m in self.kept]
        cuts = [(p.pieces, p.columns, len(p.over), [s.name for s in p.whole]) for p in self.passes]
        own = [(str(p.compute), str(p.schedule)) for s in self.steps for p in s.parts]
        rooms = [sorted((m.name, *s) for m, s in self.rooms[r].items()) for r in range(len(self.rooms))]
        waits = [*((m.name, n) for m, n in self.waits.items()), *self.buffers]
        told = names, cuts, own, rooms, self.beside, waits
        digest = hashlib.blake2b(repr(told).encode(), digest_size=8)
        way = (
            f"along {self.axes}, {self.peak} bytes at most" if self.over else f"{self.peak} bytes at most"
        )
        return f"a plan of {len(self.passes)} passes {way} ({digest.hexdigest()})"

    @property
    def axes(self) -> str:
        """The axes of the pieces, in words."""
        return " and ".join(self.over)

    @property
    def doing(self) -> str:
        """What happens while the most is there, in words."""
        worst = max(self.passes, key=lambda p: p.peak)
        count = worst.pieces * worst.columns
        found = f"{worst.largest} runs, {'whole' if count == 1 else f'in {count} pieces'}"
        reads = [(s.name, s.operands[n].memory) for s in self.steps for n in s.needs_whole]
        large = [name for name, m in reads if m.digit and not _is_sums(m)]
        names = [*dict.fromkeys(large)]
        more = f" and {len(names) - 3} more" * (len(names) > 3)
        return found + f"; {', '.join(names[:3])}{more} read all along {self.axes}" * bool(names)

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
        """Microseconds of each step once, of those in pieces the share of a rank."""
        return sum(s.us / (1 if s.whole else self.ranks) for s in self.steps)

    def exceeds(self, bound: int) -> tuple[int, int]:
        """By how many bytes the passes exceed a bound: the worst one, and all together."""
        each = [max(0, p.peak - bound) for p in self.passes]
        return max(each, default=0), sum(each)


def _is_sums(memory: StepMemory) -> bool:
    """Whether a tensor has the sums of blocks."""
    return any(memory.bytes * SHARE <= m.bytes for s in memory.makers for m in s.given)


def enter_rooms(plan: PiecePlan, known: KnownPasses, rank: int) -> None:
    """Note what a rank has of the tensors that are kept: what it makes, and what all of its pieces read.
    Tensors that change places have room for both."""
    found: dict[StepMemory, AxisSpan] = {}
    for p in plan.passes:
        spans = [(m, m.all.along) for s in p.whole for m in (*s.given, *s.made)]
        if (own := p.all_of(rank, plan.kept, known)) is not None:
            spans += [*own.reads.items(), *((m, own.regions[m]) for m in own.wanted)]
            spans += [(m, NOTHING) for m in p.wanted.memories]
        for m, span in spans:
            found[m] = found.get(m, NOTHING).around(span)
    found |= {m: m.all.along for m in known.handed}
    pairs = [pair for p in plan.passes for pair in p.over.items()]
    for new, old in (*pairs, *pairs[::-1]):
        found[new] = found[old] = found[new].around(found[old])
    plan.rooms[rank] = {m: span for m, span in found.items() if not m.given and span.size < m.digit}


def copied_us(memory: StepMemory, along: AxisSpan) -> float:
    """Microseconds of the copies of a part between a device and host memory: one for each run of
    consecutive elements."""
    pairs = zip(memory.shape, memory.strides, strict=True)
    runs = prod(n for n, s in pairs if s >= memory.digit)
    return memory.link_us * along.size / memory.digit + runs * LAUNCH_US


def undivided(steps: Sequence[Step]) -> list[Step]:
    """The steps, each whole, with its statistics."""
    spaces = {m for s in steps for m in s.spaces.values()}
    return [s.joined for s in steps if not any(o.memory in spaces for o in s.operands.values())]


def memories(steps: Sequence[Step]) -> list[StepMemory]:
    """What steps read and store, in their order."""
    found: dict[StepMemory, None] = {}
    for s in steps:
        found |= dict.fromkeys((*s.given, *s.made, *s.spaces.values()))
    return [*found]


# -- what is in memory when ----------------------------------------------------------------------------


LEAVES = {"end": "part", "sent": "behind"}


@dataclass(slots=True)
class Held:
    """Adds up bytes of what a rank has in memory. ``most``: at most so far."""

    plan: PiecePlan
    rank: int = 0
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
            self._enter("whole", m, m.part_bytes(self.plan.room(m, self.rank)) * (kind == "whole"))
            self.now -= m.bytes * (m.passed and kind == "drop")
        elif kind == "move":
            self.known["whole", m] = m.part_bytes(self.plan.room(m, self.rank))
        elif kind in ("arrive", "send"):
            before, behind = ("ahead", "part") if kind == "arrive" else ("part", "behind")
            self.known[behind, m] = self.known.pop((before, m), 0)
        elif kind in LEAVES:
            self._enter(LEAVES[kind], m, 0)
        elif kind == "fetch":
            self._enter("ahead", m, m.part_bytes(act.span))
        elif kind == "swap":
            self.most = max(self.most, self.now + m.part_bytes(act.span) * bool(act.span.along.size))
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
    plan: PiecePlan,
    p: PiecePass,
    pieces: Sequence[Demand],
    alive: set[StepMemory],
    ends: bool = True,
    rank: int = 0,
) -> Iterator[tuple[int, MemoryAct]]:
    """What a pass does, each act with the number of its piece, -1 before the first. ``alive``: what is
    there, changed to what is there behind it; ``ends``: the last piece is the pass's last; ``rank``: whose
    pieces these are."""
    dealt = {m: TensorPart(span) for m, span in plan.rooms[rank].items()} if plan.rooms else {}
    each = [(p.whole, None), *((d.order, d) for d in pieces)]
    touched = [[_touched(s, d, plan.kept) for s in steps] for steps, d in each]
    parts: list[dict[StepMemory, TensorPart]] = [{}]
    for seen, d in zip(touched[1:], pieces, strict=True):
        some = {m: TensorPart(AxisSpan(0, m.unit)) for ms in seen for m in ms if m in plan.waits}
        parts.append({**some, **d.parts(plan.kept, p.over, plan.waits)})
    link = LinkActs(plan.waits, [*pieces, None], [*parts[1:], {}])
    final = {m: i for i, own in enumerate(touched) for ms in own for m in ms if m not in parts[i]}
    going = {m for m, n in plan.last.items() if n == p.level and ends} - {*p.over.values()}
    for i, (steps, piece) in enumerate(each):
        last = {m: k for k, ms in enumerate(touched[i]) for m in ms}
        own, there = parts[i], set[StepMemory]()
        all_parts = {**dealt, **own} if dealt else own
        for k, step in enumerate(steps):
            for m in touched[i][k]:
                if m in own and m not in there:
                    there.add(m)
                    for act in link.comes(m, i - 1) or [MemoryAct("part", m, own[m])]:
                        yield i - 1, act
                elif m not in own and m not in alive and not m.given:
                    alive.add(m)
                    yield i - 1, MemoryAct("whole", m)
            yield i - 1, MemoryAct("run", None, NO_PART, step, piece, all_parts)
            for m in [m for m in touched[i][k] if last[m] == k]:
                if m not in own and m in going and final[m] == i:
                    alive.discard(m)
                    yield i - 1, MemoryAct("drop", m)
                elif m in plan.waits and (acted := link.leaves(m, i - 1)):
                    yield from ((i - 1, act) for act in acted)
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
    yield from ((len(pieces), MemoryAct("sent", m)) for m in link.behind)
    for m, old in p.over.items():
        alive -= {old}
        alive |= {m}
        yield len(pieces), MemoryAct("move", m)
    for m, s in p.dealt if plan.ranks > 1 and ends else ():
        if plan.last[m] > p.level:
            if m not in alive and m not in plan.waits:
                alive.add(m)
                yield len(pieces), MemoryAct("whole", m)
            near = plan.exchanged(m, p.owned(m, s), rank) if m in plan.waits else ()
            size = sum(part.along.size for side in near for _, part in side)
            yield len(pieces), MemoryAct("swap", m, TensorPart(AxisSpan(0, size)), s)
    if ends:
        for m in [m for m in alive if plan.last.get(m, -1) <= p.level]:
            alive.discard(m)
            yield len(pieces), MemoryAct("drop", m)


@dataclass(slots=True)
class LinkActs:
    """What happens to parts of tensors that wait in host memory, while the ``pieces`` of a pass run that
    have these ``parts``. ``ahead``: what is on its way to the device; ``behind``: what leaves it."""

    waits: Collection[StepMemory]
    pieces: Sequence[Demand | None]
    parts: Sequence[Mapping[StepMemory, TensorPart]]
    ahead: set[StepMemory] = field(default_factory=set)
    behind: dict[StepMemory, None] = field(default_factory=dict)

    def comes(self, m: StepMemory, number: int) -> list[MemoryAct]:
        """Before a piece sees a tensor first: what it reads has arrived, and the next piece's is on the
        way. Nothing for what it makes, and for a tensor that does not wait."""
        piece, found = self.pieces[number], list[MemoryAct]()
        if m in self.waits and piece is not None and m not in piece.wanted:
            if m not in self.ahead:
                found.append(MemoryAct("fetch", m, self.parts[number][m]))
            found.append(MemoryAct("arrive", m))
            self.ahead.discard(m)
            if m in self.parts[number + 1]:
                found.append(MemoryAct("fetch", m, self.parts[number + 1][m]))
                self.ahead.add(m)
        return found

    def leaves(self, m: StepMemory, number: int) -> list[MemoryAct]:
        """When a piece has made a tensor: the part of the piece before has left, and its own begins to."""
        piece, found = self.pieces[number], list[MemoryAct]()
        if m in self.waits and piece is not None and m in piece.wanted:
            if m in self.behind:
                found.append(MemoryAct("sent", m))
            found.append(MemoryAct("send", m, TensorPart(piece.wanted[m])))
            self.behind[m] = None
        return found


def _touched(step: Step, piece: Demand | None, kept: Collection[StepMemory]) -> list[StepMemory]:
    """What a step reads and stores."""
    operands = step.read | step.stored
    if piece is None:
        return [*dict.fromkeys(o.memory for o in operands.values())]
    found = [o.memory for n, o in operands.items() if not is_alone(step, n, piece, kept)]
    found += step.spaces.values() if step in piece.left else ()
    return [*dict.fromkeys(found)]
