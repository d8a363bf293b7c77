"""The choice of schedules for a computation on a target: candidates in order, each with its reason.

The heuristics propose schedules and rank them by their estimates. The database puts a measured schedule
first: the one tuned for this workload, else the one tuned for the nearest workload, clipped to the sizes
of this one; where sizes are arguments, without the words that need numbers. A neighbour's schedule may be
estimated to be slower than the best by the factor by which the estimate was wrong for the neighbour: 1.2,
if the schedule that won there was estimated to take 1.2 times the best estimate. If nothing was tuned for
these layouts, the schedule of the same workload with features innermost is tried over copies (``pack``).
``TRANSCONV_SCHEDULE`` overrides all of this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isfinite

from transconv import knobs
from transconv.compute import Compute, Workload
from transconv.cost import estimate
from transconv.disk_cache import Drawer
from transconv.errors import ScheduleError
from transconv.schedule import Schedule, Word, registered_words, why_not_copied
from transconv.selection.multi_size_ranking import at_several, lasts
from transconv.selection.proposals import heuristics
from transconv.selection.proposals.accumulation_chains import too_long
from transconv.selection.proposals.epilogue_boxes import also_fetching
from transconv.selection.tuning_db import nearest, store
from transconv.selection.tuning_db.keys import files_digest, told_by, unnamed
from transconv.selection.tuning_db.record import TuningRecord, machine
from transconv.selection.tuning_db.transfer import believable, fitted, relatives, without_axes
from transconv.target import Target
from transconv.version import __version__

DRAWER = Drawer("estimates", 1, longest=1 << 10, lasting=False)

# A tuned schedule is ignored if its estimate exceeds the best estimate by more than this factor:
# the first for a row of the same workload, the second for another's. `python -m bench trials` measures how
# good the nearest tuned problem's schedule is for problems left out of a log (docs/trials.md).
EXACT_FACTOR, NEAR_FACTOR = 4.0, 2.0
SLACK = 1.05  # estimates that differ by a smaller factor count as equal
CLOSE = 1.0  # a smaller distance: one size differs by less than a factor of two
OTHER_ORDER = 0.5  # the distance to the same workload with another order in memory


@dataclass(frozen=True, slots=True)
class Choice:
    """A legal schedule. ``us``: its estimate in microseconds; ``row``: the tuned row that it comes from,
    or None; ``away``: the distance from the row's workload to this one (0: the same)."""

    schedule: Schedule
    us: float
    row: TuningRecord | None = None
    away: float = 0.0

    @property
    def source(self) -> str:
        """``tuned``, ``near`` or ``estimate``."""
        return "estimate" if self.row is None else "near" if self.away else "tuned"

    @property
    def is_close(self) -> bool:
        """Whether it was measured, for this problem or one that is close."""
        return self.row is not None and self.away < CLOSE

    @property
    def why(self) -> str:
        """The reason for its rank, in a sentence."""
        if self.row is None:
            return "the heuristics estimate it to be fast"
        measured = f"{self.row.us:.4g} us, the fastest of {self.row.tried} tried"
        if not self.away:
            return f"tuned for this problem on {self.row.machine}: {measured}"
        return (f"like the schedule tuned for {self.row.problem} {self.row.direction}"
                f"{' ' + self.row.kind if self.row.kind else ''} on {self.row.machine} "
                f"({measured}; distance {self.away:.2g})")


def ranked(compute: Compute, target: Target, workload: Workload | None = None,
           most: int = heuristics.MOST, enough: int = heuristics.MOST) -> list[Choice]:
    """At most ``most`` legal schedules, the most promising first. Without a workload, and for one without
    tuned rows near it, the estimate alone ranks them, and little more than ``enough`` are returned: among
    the first ``enough`` are some of other kinds than the first. Raises ScheduleError if none is legal, or
    if that of TRANSCONV_SCHEDULE is not; text that is not a schedule is ignored with a warning."""
    about = None if workload is None or compute.does != "compute" else workload.about(compute)
    group = about.group(machine(target)) if about is not None else ""
    chosen_by_user = about is not None and group and about.by_user and not compute.named
    if chosen_by_user and (given := _given()) is not None:
        return [Choice(fitted(given, compute, target), 0.0)]
    rows = store.rows_of(group) if group else []
    twin = about.innermost() if about is not None and group else None
    spoken = about is not None and bool(rows and nearest.nearest(about, rows, 1) or twin is not None
                                        and store.rows_of(twin.group(machine(target))))
    few = most if spoken or compute.named else min(most, enough)
    proposed = at_several(heuristics.candidates(compute, target, few), compute, target)
    choices = [Choice(c, estimate(c, compute, target)) for c in proposed]
    if about is None or not spoken:
        return _varied(choices, enough)
    first = [f for f in _tuned(choices, compute, target, about, rows)
             if lasts(f.schedule, choices[0].schedule, compute, target)]
    return _varied([*first, *(c for c in choices if all(c.schedule != f.schedule for f in first))], enough)


def _varied(choices: list[Choice], enough: int) -> list[Choice]:
    """The choices, with the best of other kinds than the first one's as the last of those that are
    enough."""
    if len(choices) <= enough or enough <= len(heuristics.KINDS):
        return choices
    head, rest, first = choices[:enough], choices[enough:], choices[0].schedule
    spares: list[Choice] = []
    for is_other in heuristics.KINDS:
        if not any(is_other(c.schedule, first) for c in (*head, *spares)):
            spares += [c for c in rest if is_other(c.schedule, first)][:1]
    kept = head[:enough - len(spares)]
    return [*kept, *spares, *(c for c in choices[len(kept):] if c not in spares)]


def _given() -> Schedule | None:
    try:
        return schedule_of_user()
    except ScheduleError as error:
        knobs.ignore(str(error))
        return None


def schedule_of_user() -> Schedule | None:
    """The schedule in TRANSCONV_SCHEDULE, or None. Raises ScheduleError naming the variable."""
    name, text = knobs.schedule.given
    try:
        return Schedule.parse(text) if text else None
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from error


def default(compute: Compute, target: Target, workload: Workload | None = None) -> Schedule:
    """The schedule with the highest rank. Raises ScheduleError as ``ranked`` does."""
    return ranked(compute, target, workload)[0].schedule


def _tuned(choices: Sequence[Choice], compute: Compute, target: Target, workload: Workload,
           rows: Sequence[TuningRecord]) -> list[Choice]:
    """The choices that the database puts before the best estimate: one or none."""
    for away, row, other in nearest.nearest(workload, rows):
        try:
            schedule = Schedule.parse(row.schedule)
            here = without_axes(schedule, workload.lacks)
        except ValueError:  # a ScheduleError is one
            continue
        if away:
            made = of_neighbour(schedule, here, row, away, other, choices, compute, target)
        else:
            schedule = fitted(here, compute, target)
            found = [schedule] if believable(schedule, compute, target) else []
            made = _cheap(found, EXACT_FACTOR, row, away, choices, compute, target)
        if made:
            return made
    return _over_copies(choices, compute, target, workload)


def _over_copies(choices: Sequence[Choice], compute: Compute, target: Target,
                 workload: Workload) -> list[Choice]:
    """The schedule tuned for the same workload with features innermost, over copies with that layout. The
    result is either copied as well, or stored to its own layout."""
    twin = workload.innermost()
    if twin is None:
        return []
    apart = [letter for letter, view in (("a", compute.a), ("b", compute.b), ("c", compute.c))
             if view is not None and not why_not_copied(compute, letter)]
    packs = dict.fromkeys((".".join(apart), ".".join(x for x in apart if x != "c")))
    rows = store.rows_of(twin.group(machine(target)))
    for away, row, other in nearest.nearest(twin, rows):
        if other != twin:
            continue
        try:
            given = without_axes(Schedule.parse(row.schedule), workload.lacks)
            schedule = fitted(given, compute, target)
        except ValueError:
            continue
        found = [replace(schedule, pack=pack, c=c) for pack in packs if pack
                 for c in dict.fromkeys((schedule.c, "gather"))]
        legal = [c for c in found if believable(c, compute, target)]
        if made := _cheap(legal, SLACK, row, away + OTHER_ORDER, choices, compute, target):
            return made
    return []


def of_neighbour(schedule: Schedule, here: Schedule, row: TuningRecord, away: float, other: Workload,
                 choices: Sequence[Choice], compute: Compute, target: Target) -> list[Choice]:
    """The best of the ``relatives`` of another workload's winner, if its estimate exceeds the best one by
    no larger factor than the winner's did for the other workload. ``here``: the winner with the axes that
    the computation has."""
    found = relatives(here, [c.schedule for c in choices], compute, target)
    made = _cheap(found, NEAR_FACTOR, row, away, choices, compute, target)
    if not made:
        return []
    slow = made[0].us / choices[0].us if choices[0].us else 1.0
    if slow <= SLACK:  # whatever the factor is: all schedules of the other workload need not be ranked
        return made if _there(schedule, compute, target, other) else []
    return made if slow <= SLACK * surprise(schedule, compute, target, other) else []


def _cheap(found: Sequence[Schedule], factor: float, row: TuningRecord, away: float,
           choices: Sequence[Choice], compute: Compute, target: Target) -> list[Choice]:
    """The schedule with the best estimate, if that is at most ``factor`` times the best of all choices. A
    row may be older than the word ``behind``, or of a computation that reads nothing there."""
    found = [*dict.fromkeys(also_fetching(iter(found), compute, target))]
    made = [Choice(c, estimate(c, compute, target), row, away) for c in found]
    made = [c for c in made if c.us <= factor * choices[0].us
            and not too_long(c.schedule, compute, target)]
    made.sort(key=lambda c: c.us)
    shapes = [c.schedule for c in made if replace(c.schedule, blocks=made[0].schedule.blocks)
              == made[0].schedule]  # where sizes are arguments, others than the example have a say
    best = at_several(shapes, compute, target)[:1]
    return [c for c in made if c.schedule in best]


def surprise(winner: Schedule, compute: Compute, target: Target, other: Workload) -> float:
    """The estimate of another workload's winner relative to the best estimate for that workload, at least
    1; 0 if it is not a legal schedule there."""
    found = _there(winner, compute, target, other)
    if found is None:
        return 0.0
    there, winner = found
    best = _best(there, target, registered_words())
    return max(1.0, estimate(winner, there, target) / best) if best else 0.0


def _there(winner: Schedule, compute: Compute, target: Target,
           other: Workload) -> tuple[Compute, Schedule] | None:
    """The computation of another workload that has the name of this one, and its winner; None if that is
    not a legal schedule there."""
    there = other.named(compute.name)
    if there is None or any(x.size == 0 for x in there.axes):
        return None
    winner = fitted(winner, there, target)
    return (there, winner) if believable(winner, there, target) else None


@lru_cache(maxsize=256)
def _best(compute: Compute, target: Target, others: tuple[Word, ...]) -> float:
    """The best estimate for a computation, 0 if no schedule is legal; ``others``: the registered words.
    Layers have the same neighbours, and other processes meet them, too: it is kept on disk."""
    told = (__version__, unnamed(compute), told_by(target), files_digest())
    key = "" if others else hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()
    known = (DRAWER.get(key) if key else None) or {}
    if type(us := known.get("us")) is float and isfinite(us):
        return us
    try:
        us = estimate(heuristics.default(compute, target), compute, target)
    except ScheduleError:
        us = 0.0
    if key:
        DRAWER.put(key, {"us": float(us)})
    return us
