"""The choice of schedules for a computation on a target: candidates in order, each with its reason.

The heuristics propose and estimate; the database moves to the front what was measured: the schedule
tuned for this very workload, else the one tuned for the likest one, clipped to this one's sizes.
A neighbour corrects the estimate by as much as the estimate was wrong at the neighbour: where the
schedule that won there was estimated to be 1.2 times as slow as the first, its like may be here too.
Where nothing was tuned for tensors that lie as these do, the schedule of the same workload with features
innermost is tried over copies of them (``pack``). With ``TRANSCONV_SCHEDULE`` the user decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import prod

from transconv import knobs
from transconv.compute import Compute, Workload
from transconv.cost import estimate
from transconv.errors import ScheduleError
from transconv.schedule import Schedule, Scheduled, k_steps, needed, tile, why_not, why_not_copied
from transconv.selection import heuristics, nearest, store
from transconv.selection.chains import too_long
from transconv.selection.rows import Row, machine
from transconv.target import Target

# A tuned schedule is ignored if its estimate exceeds the best estimate by more than this factor:
# the first for a row of the same workload, the second for another's. `python -m bench trials` measures how
# good the nearest tuned problem's schedule is for problems left out of a log (docs/trials.md).
EXACT_FACTOR, NEAR_FACTOR = 4.0, 2.0
SLACK = 1.05  # two estimates that differ by less are equal
OTHER_ORDER = 0.5  # the distance to the same workload with another order in memory
MOST_UNROLLED, MOST_STAGES, MOST_WAVES = 64, 8, 8  # nothing beyond is worth compiling


@dataclass(frozen=True, slots=True)
class Choice:
    """A legal schedule. ``us``: its estimate; ``row``: where tuning found it (None: nowhere);
    ``away``: the distance from the row's workload to this one (0: the same)."""

    schedule: Schedule
    us: float
    row: Row | None = None
    away: float = 0.0

    @property
    def source(self) -> str:
        """``tuned``, ``near`` or ``estimate``."""
        return "estimate" if self.row is None else "near" if self.away else "tuned"

    @property
    def why(self) -> str:
        """Why it stands where it stands, in a sentence."""
        if self.row is None:
            return "the heuristics estimate it to be fast"
        measured = f"{self.row.us:.4g} us, the fastest of {self.row.tried} tried"
        if not self.away:
            return f"tuned for this problem on {self.row.machine}: {measured}"
        return (f"like the schedule tuned for {self.row.problem} {self.row.direction}"
                f"{' ' + self.row.kind if self.row.kind else ''} on {self.row.machine} "
                f"({measured}; distance {self.away:.2g})")


def ranked(compute: Compute, target: Target, workload: Workload | None = None,
           most: int = heuristics.MOST) -> list[Choice]:
    """At most so many legal schedules, the most promising first. Without a workload, and for one that no
    rows speak of, the estimate alone ranks. Raises ScheduleError when nothing is legal, or what
    TRANSCONV_SCHEDULE says is not; text that is no schedule counts as not set."""
    proposed = heuristics.candidates(compute, target, most)
    choices = [Choice(c, estimate(c, compute, target)) for c in proposed]
    about = None if workload is None or compute.does != "compute" else workload.about(compute)
    if about is None or not (rows := about.group(machine(target))):
        return choices
    if about.by_user and (given := _given()) is not None:
        return [Choice(fitted(given, compute, target), 0.0)]
    first = _tuned(choices, compute, target, about, store.rows_of(rows))
    return [*first, *(c for c in choices if all(c.schedule != f.schedule for f in first))]


def _given() -> Schedule | None:
    try:
        return schedule_of_user()
    except ScheduleError as error:
        knobs.ignore(str(error))
        return None


def schedule_of_user() -> Schedule | None:
    """What TRANSCONV_SCHEDULE says, if it is set. Raises ScheduleError naming the variable."""
    name, text = knobs.schedule.given
    try:
        return Schedule.parse(text) if text else None
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from error


def default(compute: Compute, target: Target, workload: Workload | None = None) -> Schedule:
    """The schedule that is used by default."""
    return ranked(compute, target, workload)[0].schedule


def _tuned(choices: Sequence[Choice], compute: Compute, target: Target, workload: Workload,
           rows: Sequence[Row]) -> list[Choice]:
    """What the database puts before the best estimate, if anything."""
    for away, row, other in nearest.nearest(workload, rows):
        try:
            schedule = Schedule.parse(row.schedule)
        except ValueError:  # a ScheduleError is one
            continue
        if away:
            made = of_neighbour(schedule, row, away, other, choices, compute, target)
        else:
            schedule = fitted(schedule, compute, target)
            found = [schedule] if believable(schedule, compute, target) else []
            made = _cheap(found, EXACT_FACTOR, row, away, choices, compute, target)
        if made:
            return made
    return _over_copies(choices, compute, target, workload)


def _over_copies(choices: Sequence[Choice], compute: Compute, target: Target,
                 workload: Workload) -> list[Choice]:
    """What was tuned for the same workload with features innermost, over copies that lie so; the result
    too is a copy's, or is stored as it lies."""
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
            schedule = fitted(Schedule.parse(row.schedule), compute, target)
        except ValueError:
            continue
        found = [replace(schedule, pack=pack, c=c) for pack in packs if pack
                 for c in dict.fromkeys((schedule.c, "gather"))]
        legal = [c for c in found if believable(c, compute, target)]
        if made := _cheap(legal, SLACK, row, away + OTHER_ORDER, choices, compute, target):
            return made
    return []


def of_neighbour(schedule: Schedule, row: Row, away: float, other: Workload,
                 choices: Sequence[Choice], compute: Compute, target: Target) -> list[Choice]:
    """The best of the schedules that are for this computation what the winner of another workload is for
    that, if the estimate does not speak against it louder than it did there."""
    found = relatives(schedule, choices, compute, target)
    factor = surprise(schedule, compute, target, other) if found else 0.0
    return _cheap(found, min(NEAR_FACTOR, SLACK * factor), row, away, choices, compute, target)


def _cheap(found: Sequence[Schedule], factor: float, row: Row, away: float,
           choices: Sequence[Choice], compute: Compute, target: Target) -> list[Choice]:
    """Of some schedules the one with the best estimate, if that is within a factor of the best."""
    made = [Choice(c, estimate(c, compute, target), row, away) for c in found]
    made = [c for c in made if c.us <= factor * choices[0].us
            and not too_long(c.schedule, compute, target)]
    return sorted(made, key=lambda c: c.us)[:1]


def surprise(winner: Schedule, compute: Compute, target: Target, other: Workload) -> float:
    """How many times as long as the best estimate the winner of another workload was estimated to
    take there; 0 if it is no schedule for that workload."""
    there = other.named(compute.name)
    if there is None or any(x.size == 0 for x in there.axes):
        return 0.0
    winner = fitted(winner, there, target)
    try:
        first = heuristics.default(there, target)
    except ScheduleError:
        return 0.0
    if not believable(winner, there, target):
        return 0.0
    return max(1.0, estimate(winner, there, target) / estimate(first, there, target))


def fitted(schedule: Schedule, compute: Compute, target: Target) -> Schedule:
    """A schedule for all stride phases splits the sum of a short phase no further than it goes, and
    writes out no more positions than the phase has."""
    known = {x.name for x in compute.axes}
    if not compute.phase or not all(a in known for b in schedule.blocks for a in b.axes):
        return schedule
    blocks = tuple(replace(b, extent=min(b.extent, max(1, compute.size(b.axes[0]))))
                   if schedule.in_registers(b) else b for b in schedule.blocks)
    schedule = replace(schedule, blocks=blocks)
    steps = k_steps(schedule, Scheduled(compute, schedule, target).grouped)
    return replace(schedule, split_k=min(schedule.split_k, max(1, steps)))


def believable(schedule: Schedule, compute: Compute, target: Target) -> bool:
    """Legal, and with words that could come from tuning: whoever writes to a database must not be
    able to make us compile for minutes."""
    if why_not(schedule, compute, target) is not None:
        return False
    grouped = Scheduled(compute, schedule, target).grouped
    unrolled = k_steps(schedule, grouped) if schedule.unroll else 0
    return (unrolled <= MOST_UNROLLED and 1 <= schedule.stages <= MOST_STAGES
            and 1 <= schedule.group_m <= 1024 and schedule.programs <= MOST_WAVES * target.sms
            and len(schedule.blocks) <= len(compute.axes))


def relatives(schedule: Schedule, choices: Sequence[Choice], compute: Compute,
              target: Target) -> list[Schedule]:
    """Schedules for this computation that are what another workload's schedule is for that one: itself
    with its blocks clipped, and those of the choices with the same words and sizes of the tile."""
    known = {x.name for x in compute.axes}
    if not all(a in known for b in schedule.blocks for a in b.axes):
        return []
    sizes = [prod(compute.size(a) for a in b.axes) for b in schedule.blocks]
    blocks = tuple(replace(b, extent=min(b.extent, max(1, size) if schedule.in_registers(b) else
                                         _room(size, schedule.unit)))
                   for b, size in zip(schedule.blocks, sizes, strict=True))
    clipped = replace(schedule, blocks=blocks)
    if schedule.programs:
        dealt = schedule.via == "gluon" and schedule.reduce != "stream"
        grouped = Scheduled(compute, clipped, target).grouped
        clipped = replace(clipped, programs=needed(clipped, grouped, target) if dealt else target.sms)
    family = _family(clipped, compute)
    found = [c.schedule for c in choices if _family(c.schedule, compute) == family]
    return [*found, *([clipped] if believable(clipped, compute, target) else [])]


def _room(size: int, unit: str) -> int:
    """The extent that holds so many positions: a power of two, not under what a unit takes."""
    least = 16 if unit == "mma" else 1
    return max(least, 1 << max(0, size - 1).bit_length())


def _family(schedule: Schedule, compute: Compute) -> tuple[object, ...]:
    """All words, and the extents of the tile; not how a kind's blocks share its extent."""
    words = tuple(getattr(schedule, f.name) for f in fields(schedule)
                  if f.name not in ("blocks", "split_k", "merge", "programs"))
    extents = (tile(schedule, compute, kind) for kind in "BMNK")
    return (*words, schedule.split_k > 1, schedule.merge > 1, schedule.programs > 0, *extents)
