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

Where that does not do, or computes much again, kept tensors may also wait in pinned host memory from the
pass that makes them on. Then the change is made that costs the least time for each byte that it saves.

Of several ranks each runs as many pieces of a pass, neighbours, and has of a kept tensor what it makes and
what its pieces read. Behind a pass the ranks exchange what they lack. One plan is for all of them: it is
looked for with what a rank in the middle has, and then added up for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from transconv.graph.pieces.demands import LAUNCH_US, Demand, PassResults
from transconv.graph.pieces.piece_passes import (
    NO_RESULTS,
    Held,
    KnownPasses,
    PassStart,
    PiecePass,
    PiecePlan,
    acts,
    enter_rooms,
    memories,
    undivided,
)
from transconv.graph.pieces.step_graph import Step, StepMemory

TRIED = 64  # tensors at most that are given up or added
GAIN = 0.999  # of the time: what is gained by a change is worth it
AGAIN = 1.1  # of the time of each step once: what else is possible is looked at
WORTH = 0.95  # of the time: what is gained by waits in host memory, whose link's rate is not measured


def _must(steps: Sequence[Step]) -> set[StepMemory]:
    """The tensors that are kept whole whatever the bound is."""
    found = {m for m in memories(steps) if m.handed or (not m.given and not m.digit)}
    for s in steps:
        found |= {o.memory for n, o in s.read.items() if s.whole or n in s.needs_whole}
        found |= {*s.made} if s.whole else set()
    return {m for m in found if not m.given}


def levels(steps: Sequence[Step], kept: Collection[StepMemory]) -> dict[Step, int]:
    """The level of each step."""
    ready: dict[StepMemory, int] = {}
    found: dict[Step, int] = {}
    for step in steps:
        own = max([ready.get(m, 0) for m in step.given], default=0)
        found[step] = own
        for m in step.made:
            ready[m] = max(ready.get(m, 0), own + (not step.whole and m in kept))
        for space in step.spaces.values():
            ready[space] = own + 1
    return found


def planned(steps: Sequence[Step], beside: int, bound: int, host: int = 0, ranks: int = 1) -> PiecePlan:
    """The plan within a bound, or the one that exceeds it least; of ``ranks`` the one that takes less, of
    one where each runs every step whole, and one in pieces. ``beside``: bytes that are there whatever the
    steps do; ``host``: those of pinned host memory in which tensors may wait."""
    each = undivided(steps)
    whole = PiecePlan(each, set(), [PiecePass(0, each, NO_RESULTS)], {}, beside)
    known = KnownPasses([m for m in memories(steps) if m.handed], ranks)
    whole.last = _last(whole, known)
    _enter_starts(whole, _born(whole), known, 0)
    if settled(whole, known).peak <= bound and ranks == 1:
        return whole
    found = whole, _divided(steps, beside, bound, host, known)
    return min(found, key=lambda p: (max(0, p.peak - bound), p.us))


def _divided(steps: Sequence[Step], beside: int, bound: int, host: int, known: KnownPasses) -> PiecePlan:
    """The same, of plans that are not whole."""
    must = _must(steps)
    level, made = levels(steps, must), dict[StepMemory, int]()
    for s in steps:
        made |= {m: max(made.get(m, 0), level[s]) for m in s.made}
    later = {m for s in steps for m in s.given if made.get(m, level[s]) < level[s]}
    goals, first, search = (bound, bound * 15 // 16), must | later, partial(_within, steps, beside, bound)
    plan = search(goals, 0, first, known)
    if plan.peak <= bound:
        if not host or plan.us <= AGAIN * plan.once:
            return plan
        other = search(goals, host, plan.kept, known)
        return other if other.peak <= bound and other.us < WORTH * plan.us else plan
    if host and (plan := search(goals, host, first, known.anew())).peak <= bound:
        return plan
    found = list[PiecePlan]()
    for least in _least(search, first, host, known):
        if least.peak <= bound and not least.waits:
            plan = search(goals, 0, least.kept, known.anew())
            return plan if plan.peak <= bound else least
        found.append(least)
        if least.peak <= bound:
            break
    return min(found, key=lambda p: p.peak)


def _least(
    search: Callable[..., PiecePlan], first: set[StepMemory], host: int, known: KnownPasses
) -> Iterator[PiecePlan]:
    """Plans that take least, whatever the bound is: where one is within it, some are within each larger
    one. What would wait in a host memory without end is in the way: it is computed again instead."""
    yield search((0,), 0, first, known.anew())
    free = search((0,), 1 << 62, first, known.anew())
    yield search((0,), 0, free.kept - {*free.waits}, known.anew())
    if host:
        yield search((0,), host, first, known.anew())


def _within(
    steps: Sequence[Step],
    beside: int,
    bound: int,
    goals: Sequence[int],
    host: int,
    first: set[StepMemory],
    known: KnownPasses,
) -> PiecePlan:
    """The same, where tensors may wait if ``host`` memory has room; of plans within these ``goals``,
    looked for from the one on that keeps the ``first`` tensors, one after the other."""
    found, far = list[PiecePlan](), False
    for goal in goals:
        if far and goal:
            continue
        plan = _searched(steps, beside, goal, known, host, first)
        far = plan.peak > goal  # its tensors take more in any number of pieces
        found.append(plan := settled(plan, known))
        for _ in range(0 if far else EXACT):  # the first or the last piece takes more than the middle
            if plan.peak <= bound or goal <= 0:
                break
            goal -= plan.peak - bound
            finer = laid_out(steps, plan.kept, beside, goal, known.anew(), plan.waits)
            assert finer is not None
            found.append(plan := settled(finer, known))
        if plan.peak <= bound:
            return plan
        known.cuts = {k: cut for k, cut in known.cuts.items() if cut[3] > bound}  # the least of each
    return min(found, key=lambda p: p.peak)


def settled(plan: PiecePlan, known: KnownPasses) -> PiecePlan:
    """The plan, with what each pass takes exactly."""
    dealt = [*range(plan.ranks)] if plan.ranks > 1 else []
    for rank in dealt:
        enter_rooms(plan, known, rank)
    for rank in range(plan.ranks):
        if dealt:
            _enter_starts(plan, _born(plan), known, rank)
        for p in plan.passes:
            assert p.start is not None
            if (found := known.exact.get(key := (rank, *p.key))) is None:
                found = known.exact[key] = _taken(p, plan, p.demands(plan.kept, rank), rank)
            p.peak = max(p.peak if rank else 0, p.start.left + found)
            p.timed(plan.waits)
    return plan


def _searched(
    steps: Sequence[Step], beside: int, bound: int, known: KnownPasses, host: int, first: set[StepMemory]
) -> PiecePlan:
    """The best plan found by changes of what is kept, and what waits in host memory, with what a piece in
    the middle takes."""
    must, best, tried = _must(steps), laid_out(steps, first, beside, bound, known), 0
    assert best is not None
    priced = host > 0 and bound > 0
    for _ in range(TRIED):
        found: tuple[tuple[float, ...], PiecePlan] | None = None
        worst = max(best.passes, key=lambda p: p.peak)
        far = worst.peak > bound
        if tried > EXCHANGES:
            break
        for kept, waits in _others(best, must) if far else _exchanged(best, must):
            if waits and not host:
                continue
            below = inf if far else found[1].us if found is not None else GAIN * best.us
            most = bound if not far else worst.peak if found is None or priced else found[1].peak
            tried += not far
            plan = laid_out(steps, kept, beside, bound, known, waits, below, max(most, bound), worst.level)
            if plan is None:
                continue
            key = _gain(plan, best, bound, priced)
            if key and sum(plan.buffers) <= host and (found is None or key < found[0]):
                found = key, plan
        if found is None:
            break
        best = found[1]
    return best


def _gain(plan: PiecePlan, best: PiecePlan, bound: int, priced: bool) -> tuple[float, ...]:
    """What orders plans that are better than the ``best`` one so far; empty for others. ``priced``: by the
    time that a byte less beyond the bound costs, otherwise by these bytes."""
    over, left = best.exceeds(bound), plan.exceeds(bound)
    if not over[0]:
        return (plan.us,) if not left[0] and plan.us < GAIN * best.us else ()
    saved = over[1] - left[1]
    if left >= over:
        return ()
    return ((plan.us - best.us) / saved if saved > 0 else inf, *left) if priced else (*left, plan.us)


MOST, IN_GRID = 256, 512  # pieces at most of a pass, along one axis and of two: each is planned alone
EDGES = 0.98  # of the time of a pass in one piece: several take more, but a middle one may have less
EXACT = 4  # times at most that a plan is cut finer
EXCHANGES = 2048  # plans within a bound, behind which none that takes less time is looked for
EXCHANGED = 6  # tensors at most for which others are given up


Places = tuple[set[StepMemory], set[StepMemory]]
"""The tensors that are kept, and those of them that wait in host memory."""


def _exchanged(plan: PiecePlan, must: Collection[StepMemory]) -> Iterator[Places]:
    """The places of tensors, where one is kept that is computed several times, and perhaps another is not;
    or one is on the device that waits elsewhere."""
    waits = {*plan.waits}
    share: dict[Step, float] = {}
    for p in plan.passes:
        for s in p.sample.spans if p.sample is not None else ():
            times = p.pieces * p.columns
            share[s] = share.get(s, 0.0) + p.sample.share(s) * times  # type: ignore[union-attr]
    often = sorted([s for s in share if share[s] > 1.2], key=lambda s: -s.us * (share[s] - 1))
    more = [m for m in dict.fromkeys(m for s in often for m in s.made) if not m.given]
    more = [m for m in more if m not in plan.kept]
    less = [m for m in memories(plan.steps) if m in plan.kept and m not in must]
    for m in more:
        yield plan.kept | {m}, waits
    for m in more[:EXCHANGED]:
        for other in less:
            yield plan.kept - {other} | {m}, waits - {other}
    for other in less:
        yield plan.kept - {other}, waits - {other}
    for m in more[:EXCHANGED]:
        if m.link_us:
            yield plan.kept | {m}, waits | {m}
    for m in plan.waits:
        yield plan.kept, waits - {m}


def _others(plan: PiecePlan, must: Collection[StepMemory]) -> Iterator[Places]:
    """The places of tensors, where one that is there in the pass that exceeds a bound the most is not
    kept, or waits in host memory, or where one is kept that is made on the way there."""
    worst, born, waits = max(plan.passes, key=lambda p: p.peak), _born(plan), {*plan.waits}
    there = [m for m in born if m in plan.kept and born[m] <= worst.level <= plan.last[m]]
    for m in there:
        if m not in must:
            yield plan.kept - {m}, waits - {m}
    for m in there:
        if m not in must and m not in waits and m.digit and m.link_us:
            yield plan.kept, waits | {m}
    if worst.sample is not None:
        for m in worst.sample.regions:
            if m not in plan.kept and m not in worst.sample.wanted:
                yield plan.kept | {m}, waits


def laid_out(
    steps: Sequence[Step],
    kept: set[StepMemory],
    beside: int,
    bound: int,
    known: KnownPasses,
    waits: Collection[StepMemory] = (),
    below: float = inf,
    most: float = inf,
    near: int = 0,
) -> PiecePlan | None:
    """The passes in which some tensors are kept, and some of these wait in host memory, each with the
    fewest pieces that stay within a bound, or more where these hide copies. None, as soon as it is known,
    for a plan that takes no less time than ``below``, or more than ``most`` bytes, as may be known first
    ``near`` a level."""
    level = levels(steps, kept)
    top = max(level.values(), default=0)
    own: list[list[Step]] = [[] for _ in range(top + 1)]
    for s in steps:
        own[level[s]].append(s)
    passes = []
    for n, group in enumerate(own):
        made = [m for s in group if not s.whole for m in s.made if m in kept]
        last_made = [m for m in dict.fromkeys(made) if max(level[s] for s in m.makers) == n]
        wanted = PassResults(tuple(last_made), tuple(s for s in group if s.left))
        whole = [s for s in group if s.whole]
        passes.append(PiecePass(n, whole, wanted, known.ranks, ranks=known.ranks))
    plan = PiecePlan(steps, kept, passes, {}, beside, ranks=known.ranks)
    for p in passes:
        if p.wanted.memories or p.wanted.steps:
            p.sample = p.demand(p.wanted.fullest(known.ranks), kept, known)
        if below < inf:
            p.timed(())
    if below < inf and EDGES * plan.us >= below:
        return None
    plan.last = _last(plan, known)
    born = _born(plan)
    in_pieces = {m for p in passes for m in p.wanted.memories}
    middle = known.ranks // 2
    for rank in range(known.ranks) if waits else (middle,):
        if known.ranks > 1:
            enter_rooms(plan, known, rank)
    _enter_buffers(plan, [m for m in born if m in waits], born)
    if known.ranks > 1:
        for p in passes:
            p.swapped = _swapped_us(p, plan, middle)
    _enter_starts(plan, born, known, middle)
    if any(p.start is not None and p.start.there > most for p in passes):
        return None
    for p in sorted(passes, key=lambda p: abs(p.level - near)):
        over = _over(p, plan, born, in_pieces) if p.sample is not None else {}
        _cut(p, plan, over, bound, known)
        if p.peak > most:
            return None
    return plan


def _enter_buffers(plan: PiecePlan, waits: Sequence[StepMemory], born: Mapping[StepMemory, int]) -> None:
    """Find a buffer of host memory for each tensor that waits, or for what one of the ranks has of it, the
    most that one has: one that nothing needs any more, the largest first, or a new one. torch takes pinned
    memory in powers of two."""
    until = list[int]()
    for m in waits:
        most = max(m.part_bytes(plan.room(m, rank)) for rank in range(plan.ranks))
        size = 1 << (most - 1).bit_length()
        free = [i for i, level in enumerate(until) if level < born[m]]
        place = max(free, key=lambda i: plan.buffers[i], default=len(until))
        if place == len(until):
            until.append(0)
            plan.buffers.append(0)
        plan.waits[m], until[place] = place, plan.last[m]
        plan.buffers[place] = max(plan.buffers[place], size)


def _last(plan: PiecePlan, known: KnownPasses) -> dict[StepMemory, int]:
    """The level behind which nothing reads a tensor."""
    found: dict[StepMemory, int] = {}
    for p in plan.passes:
        seen = [m for s in p.whole for m in (*s.given, *s.made)]
        seen += [*p.wanted.memories]
        seen += [m for s in p.wanted.steps for m in s.spaces.values()]
        seen += [*p.demand(0, plan.kept, known, 1).reads] if p.sample is not None else []
        found |= dict.fromkeys(seen, p.level)
    end = len(plan.passes)
    return found | dict.fromkeys(known.handed, end)


def _swapped_us(p: PiecePass, plan: PiecePlan, rank: int) -> float:
    """Microseconds of the exchange behind a pass, by the pace of the link to host memory: that between
    ranks is no slower. What waits there comes from it first, and goes back."""
    found = 0.0
    for m, step in p.dealt:
        if plan.last[m] > p.level:
            size = plan.room(m, rank).along.size - p.owned(m, step)[rank].size
            us = m.link_us * size / (m.digit or 1) * (step is None) + LAUNCH_US
            found += us * (3 if m in plan.waits else 1)
    return found


def _enter_starts(plan: PiecePlan, born: Mapping[StepMemory, int], known: KnownPasses, rank: int) -> None:
    """Note in passes what is there before each, on a rank."""
    count = len(plan.passes)
    more, passed = [0] * (count + 2), [0] * (count + 2)
    for m, n in born.items():
        if m not in plan.waits and n < plan.last[m]:
            size = m.part_bytes(plan.room(m, rank))
            more[n + 1] += size
            more[min(plan.last[m], count) + 1] -= size
    for m, n in plan.last.items():
        if m.passed:
            passed[n + 1] += m.bytes
    there, gone = plan.beside, 0
    for p in plan.passes:
        there, gone = there + more[p.level], gone + passed[p.level]
        own = p.all_of(rank, plan.kept, known)
        seen = {*own.regions, *own.reads} if own is not None else set[StepMemory]()
        touched = {m for s in p.whole for m in (*s.given, *s.made)} | seen
        touched |= {m for s in p.wanted.steps for m in s.spaces.values()}
        waits = frozenset(m for m in seen if m in plan.waits)
        alive = frozenset(
            m for m in touched if born.get(m, count) < p.level <= plan.last[m] and m not in plan.waits
        )
        going = frozenset(m for m in touched if plan.last.get(m) == p.level)
        rooms = frozenset((m, s) for m, s in plan.rooms.get(rank, {}).items() if m in touched)
        key = p.wanted, tuple(p.whole), alive, going, frozenset(plan.kept & seen), waits, rooms
        p.start = PassStart(there, there - gone, alive, waits, key)


def _cut(p: PiecePass, plan: PiecePlan, over: InPlace, bound: int, known: KnownPasses) -> None:
    """Find the fewest pieces with which a pass stays within a bound; where none do, those of the grid that
    takes least; or else what has the least peak. ``over``: what may take the place of what."""
    assert p.start is not None
    key = p.start.there, p.start.left, p.start.key, tuple(over.items())
    found = known.cuts.get(key)
    if found is None:
        most = -(-min(p.wanted.most, MOST * p.ranks) // p.ranks) if p.sample is not None else 1
        tries = [n * p.ranks for n in (*(1 << e for e in range(most.bit_length()) if 1 << e < most), most)]
        for n in tries:
            for taken in ({}, over) if over else ({},):
                p.pieces, p.columns, p.over = n, 1, taken
                peak, sample = _middle(p, plan, known)
                if found is None or peak < found[3]:
                    found = n, 1, taken, peak, sample
            if found is not None and found[3] <= bound:
                break
        assert found is not None
        waits, middle = p.start.waits, partial(_middle, p, plan, known)
        if found[3] > bound and not waits and p.crosses(plan.kept):
            found = _grid(p, tries, found, bound, middle)
        if found[3] <= bound and waits:
            found = _overlapped(p, plan, tries, found, bound, middle)
        known.cuts[key] = found
    p.pieces, p.columns, p.over, p.peak, p.sample = found
    p.timed(plan.waits)


def _overlapped(
    p: PiecePass,
    plan: PiecePlan,
    tries: Sequence[int],
    found: Cut,
    bound: int,
    middle: Callable[[], tuple[int, Demand | None]],
) -> Cut:
    """As many pieces as are estimated to take least, of more than those ``found``: the first piece waits
    for its copies, and so does the end for those of the last one."""
    best = 0.0
    for n in tries[tries.index(found[0]) :]:
        p.pieces, p.columns, p.over = n, 1, found[2]
        peak, p.sample = middle()
        p.timed(plan.waits)
        if best and (peak > bound or p.us >= GAIN * best):
            break
        best, found = p.us, (n, 1, found[2], peak, p.sample)
    return found


InPlace = dict[StepMemory, StepMemory]
"""Tensors by those that take their place."""
Cut = tuple[int, int, InPlace, int, Demand | None]
"""How a pass is cut: pieces, columns, what is in place, the peak, a piece in the middle."""


def _grid(
    p: PiecePass,
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
        rows = [n for n in tries if n * columns <= IN_GRID * p.ranks]
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


def _middle(p: PiecePass, plan: PiecePlan, known: KnownPasses) -> tuple[int, Demand | None]:
    """The peak of a pass, but for the edges of pieces, and a piece in the middle."""
    assert p.start is not None
    if (found := known.middles.get(key := p.key)) is None:
        pieces = _near_middle(p, plan, known)
        found = _taken(p, plan, pieces, plan.ranks // 2, True), pieces[:2][-1] if pieces else None
        known.middles[key] = found
    return max(p.start.there, p.start.left + found[0]), found[1]


def _near_middle(p: PiecePass, plan: PiecePlan, known: KnownPasses) -> list[Demand]:
    """A piece in the middle behind the one before it, and before the next one where that has parts on
    their way; all that there is of few."""
    kept = plan.kept
    if p.sample is None or p.share == 1:
        pieces = [] if p.sample is None else [p.demand(p.wanted.fullest(p.pieces), kept, known)]
    else:
        number = max(1, p.wanted.fullest(p.pieces))
        number += number % p.share == 0  # behind another one of its rank
        pieces = [p.demand(number - 1, kept, known)]
        pieces.append(p.behind(number, kept, pieces[0]))
        if number + 1 < p.pieces and any(
            m in pieces[1].regions or m in pieces[1].reads for m in plan.waits
        ):
            pieces.append(p.behind(number + 1, kept, pieces[1]))
    if p.columns > 1:
        column = p.column(p.wanted.across.fullest(p.columns), kept)
        pieces = [replace(piece, column=column) for piece in pieces]
    return pieces


def _taken(
    p: PiecePass, plan: PiecePlan, pieces: Sequence[Demand], rank: int, middle: bool = False
) -> int:
    """Bytes that a pass takes at most on a rank beyond what is there before it; ``middle``: of the second
    of these pieces alone, where there are more."""
    assert p.start is not None
    there = {("whole", m): m.part_bytes(plan.room(m, rank)) for m in p.start.alive}
    held = Held(plan, rank, known=there)
    held.now, held.most = 0, -plan.beside if middle else 0
    ends = not middle or p.share * p.columns <= 2
    for number, act in acts(plan, p, pieces, {*p.start.alive}, ends, rank):
        if middle and number > 1:
            break
        most = held.most
        held.do(act)
        if middle and number == 0 and p.share > 2:
            held.most = most  # of the piece before nothing counts
    return held.most


def _born(plan: PiecePlan) -> dict[StepMemory, int]:
    """The level at which a tensor is there first."""
    found: dict[StepMemory, int] = {}
    for p in plan.passes:
        made = [m for s in p.whole for m in s.made]
        made += [*p.wanted.memories, *(m for s in p.wanted.steps for m in s.spaces.values())]
        for m in made:
            found.setdefault(m, p.level)
    return found


def _over(
    p: PiecePass, plan: PiecePlan, born: Mapping[StepMemory, int], kept: Collection[StepMemory]
) -> InPlace:
    """Tensors of a pass that may take the place of others that are ``kept`` and that nothing reads behind
    it."""
    assert p.sample is not None
    own = {
        m
        for m in p.sample.reads
        if m in kept
        and born.get(m, p.level) < p.level
        and plan.last.get(m) == p.level
        and not m.handed
        and m not in plan.waits
        and all(n not in s.needs_whole for s in p.sample.spans for n, o in s.read.items() if o.memory is m)
    }
    free = [m for m in born if m in own] if own else []
    found: InPlace = {}
    for m in [m for m in p.wanted.memories if m not in plan.waits]:
        fits = [f for f in free if plan.room(f, plan.ranks // 2) == plan.room(m, plan.ranks // 2)]
        old = next((f for f in fits if _alike(f, m) and f not in found.values()), None)
        if old is not None:
            found[m] = old
    return found


def _alike(a: StepMemory, b: StepMemory) -> bool:
    """Whether two tensors lie alike."""
    strides = (tuple(s for n, s in zip(m.shape, m.strides, strict=True) if n > 1) for m in (a, b))
    return (
        a.dtype is b.dtype and a.digit == b.digit and a.bytes == b.bytes and next(strides) == next(strides)
    )
