"""The search: the next schedules to try, from the measurements so far, up to a bounded number.

Best estimates first; the last part of the trials explores around the best schedule found: its neighbours,
which differ in one word, in the blocks of one kind of axes, or in one extent, in the order of their
estimates. The values of a word are those in the proposals, so a new word needs no change here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, inf
from typing import Any

from transconv.compute import Compute
from transconv.schedule import Block, Schedule
from transconv.selection import believable, fitted
from transconv.selection.proposals import heuristics
from transconv.support import ScheduleError
from transconv.target import Target

EXPLORED = 0.4  # share of the trials that explore
WAVES = 2  # of exploring trials: the second starts from the best of the first
FACTOR = 3.0  # neighbours whose estimate is this many times the best are not compiled
NUMBERS = {"stages": (-1, 1), "warps": (0.5, 2), "split_k": (0.5, 2), "group_m": (0.5, 2)}


@dataclass(frozen=True, slots=True)
class ScheduleTrial:
    """A schedule to measure; ``rank`` in the order of estimates (-1: not among the proposals);
    ``origin``: ``database``, ``ranking``, ``spread`` or ``neighbour``."""

    schedule: Schedule
    estimate: float
    rank: int
    origin: str


class Search:
    """The trials of one workload. ``phases``: its computations, which share a schedule;
    ``seeds``: schedules to try in any case; ``explore``: ``near`` the best, or ``spread`` over the
    ranking, to fit the estimate's rates."""

    def __init__(
        self,
        phases: Sequence[Compute],
        target: Target,
        trials: int,
        seeds: Sequence[Schedule] = (),
        explore: str = "near",
    ) -> None:
        self.phases, self.target, self.trials = tuple(phases), target, trials
        self.ranking = ranking(self.phases, target)
        self.ranks = {c: i for i, c in enumerate(self.ranking)}
        self.explore = explore
        self.asked: set[Schedule] = set()
        self.waiting: set[Schedule] = set()
        self.times: dict[Schedule, float] = {}
        self.seeds = [c for c in dict.fromkeys(seeds) if self.legal(c)]
        self.wave = 0

    def legal(self, schedule: Schedule) -> bool:
        return all(believable(fitted(schedule, a, self.target), a, self.target) for a in self.phases)

    def guess(self, schedule: Schedule) -> float:
        return heuristics.of_phases(
            [fitted(schedule, a, self.target) for a in self.phases], self.phases, self.target
        )

    @property
    def best(self) -> Schedule | None:
        """The fastest schedule that was right."""
        right = [c for c, us in self.times.items() if us < inf]
        return min(right, key=lambda c: self.times[c], default=None)

    def tell(self, schedule: Schedule, us: float | None) -> None:
        """Record a trial's result: microseconds; None for a schedule that is refused, wrong or hangs."""
        self.waiting.discard(schedule)
        self.asked.add(schedule)
        self.times[schedule] = inf if us is None else us

    def next(self) -> list[ScheduleTrial]:
        """Trials to run at the same time; none while some are under way, and none when all is done."""
        left = self.trials - len(self.asked)
        if self.waiting or left <= 0:
            return []
        first = max(1, ceil(self.trials * (1 - EXPLORED)))
        if len(self.asked) < first:
            made = list(itertools.islice(self._first(), first - len(self.asked)))
        elif self.explore == "spread":
            made = self._spread(left)
        else:
            self.wave += 1
            count = left if self.wave >= WAVES else ceil(left / WAVES)
            made = list(itertools.islice(self._around(), count))
        self.asked |= {t.schedule for t in made}
        self.waiting |= {t.schedule for t in made}
        return made

    def _trial(self, schedule: Schedule, origin: str) -> ScheduleTrial:
        return ScheduleTrial(schedule, self.guess(schedule), self.ranks.get(schedule, -1), origin)

    def _first(self) -> Iterator[ScheduleTrial]:
        for c in dict.fromkeys((*self.seeds, *self.ranking)):
            if c not in self.asked:
                yield self._trial(c, "database" if c in self.seeds else "ranking")

    def _around(self) -> Iterator[ScheduleTrial]:
        best = self.best
        near = neighbours(best, self) if best is not None else []
        for c in near:
            if c not in self.asked:
                yield self._trial(c, "neighbour")
        known = {*near}
        yield from (t for t in self._first() if t.schedule not in known)

    def _spread(self, count: int) -> list[ScheduleTrial]:
        """Schedules from the whole ranking, closer together near its top."""
        rest = [c for c in self.ranking if c not in self.asked]
        at = sorted({int(len(rest) * ((i + 1) / (count + 1)) ** 2) for i in range(count)})
        return [self._trial(rest[i], "spread") for i in at if i < len(rest)]


def ranking(phases: Sequence[Compute], target: Target) -> list[Schedule]:
    """The candidates of the first phase that are legal for all, by the sum of their estimates."""
    found = heuristics.candidates(phases[0], target)
    if len(phases) == 1:
        return found
    sums: dict[Schedule, float] = {}
    for schedule in found:
        each = [fitted(schedule, a, target) for a in phases]
        if all(believable(c, a, target) for c, a in zip(each, phases, strict=True)):
            sums[schedule] = heuristics.of_phases(each, phases, target)
    if not sums:
        raise ScheduleError(
            f"no schedule is legal for all {len(phases)} stride phases of {phases[0].name}"
        )
    return sorted(sums, key=lambda c: sums[c])


def neighbours(schedule: Schedule, search: Search) -> list[Schedule]:
    """Legal schedules one change away, best estimate first."""
    limit = FACTOR * search.guess(schedule)
    found: dict[Schedule, float] = {}
    for other in dict.fromkeys(_changed(schedule, search)):
        if other != schedule and other not in found and search.legal(other):
            guess = search.guess(other)
            if guess <= limit:
                found[other] = guess
    return sorted(found, key=lambda c: found[c])


def _changed(schedule: Schedule, search: Search) -> Iterator[Schedule]:
    compute = search.phases[0]
    mine = _by_kind(schedule, compute)
    words = [f.name for f in fields(schedule) if f.name != "blocks"]
    for kind, blocks in dict.fromkeys(
        x for other in search.ranking for x in _by_kind(other, compute).items()
    ):
        if blocks != mine[kind]:
            changed = {**mine, kind: blocks}
            yield replace(schedule, blocks=tuple(b for k in "BMNK" for b in changed[k]))
    for word in words:
        for value in dict.fromkeys(getattr(other, word) for other in search.ranking):
            yield _with_word(schedule, word, value)
    for i, block in enumerate(schedule.blocks):
        for extent in (block.extent * 2, block.extent // 2):
            yield _with_extent(schedule, {i: extent})
        for j, other_block in enumerate(schedule.blocks):
            if i != j and compute.kind(block.first) == compute.kind(other_block.first):
                yield _with_extent(schedule, {i: block.extent * 2, j: other_block.extent // 2})
    for word, steps in NUMBERS.items():
        for step in steps:
            now: int = getattr(schedule, word)
            new = int(now + step if word == "stages" else now * step)
            if new >= 1:
                yield _with_word(schedule, word, new)


def _with_word(schedule: Schedule, word: str, value: Any) -> Schedule:
    return replace(schedule, **{word: value})


def _by_kind(schedule: Schedule, compute: Compute) -> dict[str, tuple[Block, ...]]:
    return {kind: tuple(b for b in schedule.blocks if compute.kind(b.first) == kind) for kind in "BMNK"}


def _with_extent(schedule: Schedule, extents: dict[int, int]) -> Schedule:
    blocks = tuple(replace(b, extent=extents.get(i, b.extent)) for i, b in enumerate(schedule.blocks))
    return replace(schedule, blocks=tuple(b for b in blocks if b.extent >= 1))
