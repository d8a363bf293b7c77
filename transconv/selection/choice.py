"""The choice of schedules for a computation on a target: candidates in order, each with its reason.

The heuristics propose schedules and rank them by their estimates. The database puts a measured schedule
first: the one tuned for this workload, else the one tuned for the nearest workload, clipped to the sizes
of this one; where sizes are arguments, without the words that need numbers. A neighbour's schedule may be
estimated to be slower than the best by the factor by which the estimate was wrong for the neighbour: 1.2,
if the schedule that won there was estimated to take 1.2 times the best estimate. If nothing was tuned for
these layouts, the schedule of the same workload with features innermost is tried over copies (``pack``).
``TRANSCONV_SCHEDULE`` overrides all of this.

Where sizes are arguments, schedules are ranked by their estimates for several sizes. Tiles that fit the
sizes of an example leave no lane idle there; for most other sizes they do, each tile for others. So the
example's best schedules with each tile are ranked again, by the mean over sizes around it:

    MB=8 IH=56 IW=56    at    MB=5 IH=91 IW=34    MB=13 IH=58 IW=77    ...

A choice is told in words: the reason, the parts of its estimate, and refused schedules.

    tuned      tuned for this problem on sm_90x132: 20.4 us, the fastest of 16 tried
    estimate   24.1 us: 784 tiles on 132 multiprocessors are 5.94 waves, 1% of the last one idle;
               9 steps of 256x64x64; 14.8 GFLOP in 7.5 us at the matrix rate; 51.5 MB in 15.5 us
    refused    34 proposals: 4 stages of 256x64 and 64x256 need ... bytes of shared memory
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, isfinite, lcm, log, prod, sqrt
from textwrap import wrap
from typing import cast

from transconv.compute import Compute, Workload
from transconv.cost import AtSizes, count, estimate, spills
from transconv.ir import Const, Mod, Sizes, find, free_vars, values_of
from transconv.schedule import (
    Box,
    Schedule,
    Scheduled,
    Word,
    in_place,
    registered_words,
    told_behind,
    why_not,
    why_not_copied,
)
from transconv.selection import transfer, tuning_db
from transconv.selection.proposals import heuristics
from transconv.selection.proposals.tile_shapes import too_long
from transconv.selection.proposals.warp_specialization import also_fetching
from transconv.selection.transfer import believable, fitted, relatives, without_axes
from transconv.selection.tuning_db import TuningRecord, files_digest, machine, told_by, unnamed
from transconv.support import Drawer, ScheduleError, __version__, knobs
from transconv.target import Target

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
        return (
            f"like the schedule tuned for {self.row.problem} {self.row.direction}"
            f"{' ' + self.row.kind if self.row.kind else ''} on {self.row.machine} "
            f"({measured}; distance {self.away:.2g})"
        )


def ranked(
    compute: Compute,
    target: Target,
    workload: Workload | None = None,
    most: int = heuristics.MOST,
    enough: int = heuristics.MOST,
) -> list[Choice]:
    """At most ``most`` legal schedules, the most promising first. Without a workload, and for one without
    tuned rows near it, the estimate alone ranks them, and little more than ``enough`` are returned: among
    the first ``enough`` are some of other kinds than the first. Raises ScheduleError if none is legal, or
    if that of TRANSCONV_SCHEDULE is not; text that is not a schedule is ignored with a warning."""
    about = None if workload is None or compute.does != "compute" else workload.about(compute)
    group = about.group(machine(target)) if about is not None else ""
    chosen_by_user = about is not None and group and about.by_user and not compute.named
    if chosen_by_user and (given := _given()) is not None:
        return [Choice(fitted(given, compute, target), 0.0)]
    rows = tuning_db.rows_of(group) if group else []
    twin = about.innermost() if about is not None and group else None
    spoken = about is not None and bool(
        (rows and transfer.nearest(about, rows, 1))
        or (twin is not None and tuning_db.rows_of(twin.group(machine(target))))
    )
    few = most if spoken or compute.named else min(most, enough)
    proposed = at_several(heuristics.candidates(compute, target, few), compute, target)
    choices = [Choice(c, estimate(c, compute, target)) for c in proposed]
    if about is None or not spoken:
        return _varied(choices, enough)
    first = [
        f
        for f in tuned(choices, compute, target, about, rows)
        if lasts(f.schedule, choices[0].schedule, compute, target)
    ]
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
    kept = head[: enough - len(spares)]
    return [*kept, *spares, *(c for c in choices[len(kept) :] if c not in spares)]


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
    return ranked(compute, target, workload, enough=1)[0].schedule


def tuned(
    choices: Sequence[Choice],
    compute: Compute,
    target: Target,
    workload: Workload,
    rows: Sequence[TuningRecord],
) -> list[Choice]:
    """The choices that the database's ``rows`` put before the best estimate: one or none."""
    for away, row, other in transfer.nearest(workload, rows):
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


def _over_copies(
    choices: Sequence[Choice], compute: Compute, target: Target, workload: Workload
) -> list[Choice]:
    """The schedule tuned for the same workload with features innermost, over copies with that layout. The
    result is either copied as well, or stored to its own layout."""
    twin = workload.innermost()
    if twin is None:
        return []
    apart = [
        letter
        for letter, view in (("a", compute.a), ("b", compute.b), ("c", compute.c))
        if view is not None and not why_not_copied(compute, letter)
    ]
    packs = dict.fromkeys((".".join(apart), ".".join(x for x in apart if x != "c")))
    rows = tuning_db.rows_of(twin.group(machine(target)))
    for away, row, other in transfer.nearest(twin, rows):
        if other != twin:
            continue
        try:
            given = without_axes(Schedule.parse(row.schedule), workload.lacks)
            schedule = fitted(given, compute, target)
        except ValueError:
            continue
        found = [
            replace(schedule, pack=pack, c=c)
            for pack in packs
            if pack
            for c in dict.fromkeys((schedule.c, "gather"))
        ]
        legal = [c for c in found if believable(c, compute, target)]
        if made := _cheap(legal, SLACK, row, away + OTHER_ORDER, choices, compute, target):
            return made
    return []


def of_neighbour(
    schedule: Schedule,
    here: Schedule,
    row: TuningRecord,
    away: float,
    other: Workload,
    choices: Sequence[Choice],
    compute: Compute,
    target: Target,
) -> list[Choice]:
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


def _cheap(
    found: Sequence[Schedule],
    factor: float,
    row: TuningRecord,
    away: float,
    choices: Sequence[Choice],
    compute: Compute,
    target: Target,
) -> list[Choice]:
    """The schedule with the best estimate, if that is at most ``factor`` times the best of all choices. A
    row may be older than the word ``behind``, or of a computation that reads nothing there."""
    found = [*dict.fromkeys(also_fetching(iter(found), compute, target))]
    made = [Choice(c, estimate(c, compute, target), row, away) for c in found]
    made = [
        c for c in made if c.us <= factor * choices[0].us and not too_long(c.schedule, compute, target)
    ]
    made.sort(key=lambda c: c.us)
    shapes = [
        c.schedule for c in made if replace(c.schedule, blocks=made[0].schedule.blocks) == made[0].schedule
    ]  # where sizes are arguments, others than the example have a say
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


def _there(
    winner: Schedule, compute: Compute, target: Target, other: Workload
) -> tuple[Compute, Schedule] | None:
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


MOST = 96  # schedules that are ranked again
OF_TILE = 3  # of these, with one tile
COUNT = 8  # sizes
REACH = 2.0  # the largest factor between a size and the example's
WORSE = 1.09  # the factor by which a schedule may be slower at other sizes than at the example
GOLDEN = (sqrt(5) - 1) / 2  # its multiples spread evenly


def at_several(
    schedules: list[Schedule], compute: Compute, target: Target, own: int = 0
) -> list[Schedule]:
    """Schedules, of which the first few with each tile come first, in the order of their estimates for
    several sizes, among which the example counts ``own`` times. Those of another kind than the first
    (whose registers or chains are too long) stay behind. Unchanged where no sizes are arguments, and for
    computations without a product."""
    if compute.named is None or compute.b is None or target.backend == "interpreter" or not schedules:
        return schedules
    sizes = [*around(compute.named), *[tuple(compute.named.like.values())] * own]
    kind = _kind(schedules[0], compute, target)
    tiles: Counter[object] = Counter()
    again: dict[Schedule, None] = {}
    for schedule in schedules if sizes else ():
        tiles[schedule.blocks] += 1
        if (
            tiles[schedule.blocks] <= OF_TILE
            and len(again) < MOST
            and _kind(schedule, compute, target) == kind
        ):
            again[schedule] = None
    mean = dict(zip(again, _means(again, compute, target, sizes), strict=True))
    return [*sorted(mean, key=mean.__getitem__), *(s for s in schedules if s not in mean)]


def lasts(schedule: Schedule, best: Schedule, compute: Compute, target: Target) -> bool:
    """Whether a schedule is hardly slower beside the best one at several sizes than at the example, by
    their estimates: a tile may fit the example's images alone."""
    if compute.named is None or compute.b is None or target.backend == "interpreter":
        return True
    if not (sizes := [*around(compute.named)]):
        return True
    mean, least = _means((schedule, best), compute, target, sizes)
    here = estimate(schedule, compute, target) / estimate(best, compute, target)
    return mean - least <= log(max(1.0, here) * WORSE)


def around(sizes: Sizes) -> Iterator[tuple[int, ...]]:
    """Sizes that meet the requirements, none of them further than ``REACH`` from the example's."""
    divisors = {m: int(m.b.value) for r in sizes.where for m in find(r, Mod) if isinstance(m.b, Const)}
    share = lcm(*divisors.values())
    shared = {v.name for m in divisors for v in free_vars(m)}
    for turn in range(1, COUNT + 1):
        drawn = {}
        for place, (name, like) in enumerate(sizes.like.items(), 1):
            part = turn * GOLDEN * place % 1
            n = max(1, round(like * REACH ** (2 * part - 1)))
            drawn[name] = -(-n // share) * share if name in shared else n
        if not sizes.why_not(drawn):
            yield tuple(drawn.values())


def _kind(schedule: Schedule, compute: Compute, target: Target) -> tuple[bool, bool]:
    return too_long(schedule, compute, target), bool(spills(schedule, compute, target))


def _means(
    schedules: Iterable[Schedule], compute: Compute, target: Target, sizes: list[tuple[int, ...]]
) -> list[float]:
    """The mean of the logarithms of the estimates of each schedule. Their counts, most of which they
    share, are one function of the sizes."""
    assert compute.named is not None
    each = [AtSizes(s, compute, target) for s in schedules]
    counts = [*dict.fromkeys(count for at in each for count in at.counts)]
    values = values_of(counts, compute.named.names)
    known = [dict(zip(counts, values(*drawn), strict=True)) for drawn in sizes]
    us = [[cast(float, at.us(*map(at_size.__getitem__, at.counts))) for at_size in known] for at in each]
    return [sum(map(log, found)) / len(found) for found in us]


WIDTH = 88
TOLD = 4  # reasons of refusals


def given(schedule: Schedule, choices: list[Choice], compute: Compute, target: Target) -> list[str]:
    """Lines about a schedule that is not the first choice, because the caller set it or stride phases
    share it, and about the first choice."""
    first = choices[0]
    by = "by the caller, or together with the other stride phases" if compute.phase else ("by the caller")
    return [
        *behind(schedule, compute, target),
        f"chosen     {by}",
        *_wrapped("estimate", parts(schedule, compute, target)),
        *_wrapped("without", f"{first.schedule}: {first.why}"),
    ]


def reasons(choice: Choice, choices: list[Choice], compute: Compute, target: Target) -> list[str]:
    """Lines that give the reason for the first choice, its estimate, and the next best schedule."""
    lines = [*behind(choice.schedule, compute, target), *_wrapped("chosen", choice.why)]
    if choice.row is not None:
        first = next((c for c in choices if c.row is None), None)
        if first is not None:
            lines += _wrapped("", f"the estimate alone would take {first.schedule}")
    lines += _wrapped("estimate", parts(choice.schedule, compute, target))
    second = [c for c in choices if c.row is None and c.schedule != choice.schedule][:1]
    for other in second:
        unit = "" if target.backend == "interpreter" else " us"
        lines += _wrapped("next best", f"{other.us:.4g}{unit}: {other.schedule}")
    return lines


def behind(schedule: Schedule, compute: Compute, target: Target) -> list[str]:
    """Lines about what the epilogue of an explicit kernel reads: what is fetched and why other
    elements are loaded; none if nothing can be a box there."""
    seen = Scheduled(compute, schedule, target).main
    told = told_behind(schedule, seen) if schedule.via == "gluon" else {}
    if not any(isinstance(found, Box) for found in told.values()):
        return []
    if schedule.behind == "gather":
        reason = why_not(replace(schedule, behind="box"), compute, target)
        return _wrapped("behind", f"the consumers load it; {reason or 'behind=box would fetch it'}")
    kept = in_place(schedule, seen)
    return _wrapped(
        "behind",
        "; ".join(
            f"{view.tensor.name} is " + _taken(found, view.tensor.name, view is kept)
            for view, found in told.items()
        ),
    )


def _taken(found: Box | str, name: str, kept: bool) -> str:
    """How one of them comes to the consumers."""
    if isinstance(found, str):
        return f"loaded: {found.removeprefix(f'{name}: ')}"
    own = f"{prod(found.extents) * found.tensor.dtype.bytes} bytes of its own"
    return f"fetched to {'where the result will be' if kept else own}"


def parts(schedule: Schedule, compute: Compute, target: Target) -> str:
    """The parts of a schedule's estimate: waves, the idle fraction of the last one, steps, floating point
    operations and bytes, each with the time that it would take alone."""
    total = estimate(schedule, compute, target)
    w = count(schedule, compute, target)
    if target.backend == "interpreter":
        return (
            f"{total:.4g} units of an interpreted step; {_counted(w.tiles, 'program')} of "
            f"{_counted(w.steps, 'step')}"
        )
    slots = schedule.programs or target.sms
    waves = w.tiles / slots
    idle = (ceil(waves) * slots - w.tiles) / slots
    flops = 2 * prod(x.size for x in Scheduled(compute, schedule, target).grouped.axes)
    peak = target.tflops * 1e6 * 16 / max(16, w.bits)  # operations a microsecond
    moved = w.traffic + w.partial
    text = (
        f"{total:.4g} us: {_counted(w.tiles, 'tile')} on {slots} "
        f"{'programs' if schedule.programs else 'multiprocessors'} "
        f"{'is' if w.tiles == 1 else 'are'} {waves:.3g} waves, "
        f"{idle:.0%} of the last one idle; "
        f"{'two consumers take turns at them; ' if schedule.consumers > 1 else ''}"
        f"{_counted(w.steps, 'step')} of {w.m * w.group}x{w.n}x{w.k}; "
        f"{flops / 1e9:.3g} GFLOP, {flops / peak:.3g} us at the matrix unit's rate"
        f"{_wasted(schedule)}; "
        f"{moved / 1e6:.3g} MB, {moved / target.bandwidth_gbs / 1e3:.3g} us at the memory's"
    )
    return text + (f", {w.partial / 1e6:.3g} MB of them parts of sums" if w.partial else "")


def _wasted(schedule: Schedule) -> str:
    return f", {schedule.merge} times the products of groups one by one" if schedule.merge > 1 else ""


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def refusals(compute: Compute, target: Target) -> list[str]:
    """Lines about the proposals that are not legal, counted by reason; the numbers are those of one of
    them."""
    found: Counter[str] = Counter()
    example: dict[str, str] = {}
    for schedule in dict.fromkeys(heuristics.proposals(compute, target)):
        if reason := why_not(schedule, compute, target):
            name = re.sub(r"\d+", "#", reason)
            found[name] += 1
            example.setdefault(name, reason)
    lines = []
    for name, n in found.most_common(TOLD):
        lines += _wrapped("refused", f"{_counted(n, 'proposal')}, such as: {example[name]}")
    if len(found) > TOLD:
        lines.append(
            f"           and {sum(n for _, n in found.most_common()[TOLD:])} more for "
            f"{len(found) - TOLD} other reasons"
        )
    return lines


def _wrapped(head: str, text: str) -> list[str]:
    """Text in lines of at most ``WIDTH``, under a heading of ten characters."""
    lines = wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    return [f"{head:<10} {lines[0]}", *(f"{'':<10} {x}" for x in lines[1:])]
