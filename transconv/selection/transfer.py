"""The transfer of schedules from one computation to another: its axes, its sizes, its stride phase; and
the tuned rows whose workloads are nearest, with distances.

In: a schedule of a database's row, or of a user. Out: those that correspond to it here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from math import prod

from transconv.compute import Compute, Workload
from transconv.schedule import Schedule, Scheduled, k_steps, needed, of_any_size, tile, why_not
from transconv.selection.tuning_db import TuningRecord
from transconv.support import ScheduleError
from transconv.target import Target

MOST_UNROLLED, MOST_STAGES, MOST_WAVES = 64, 8, 8  # limits of words in rows of the database


def fitted(schedule: Schedule, compute: Compute, target: Target) -> Schedule:
    """The schedule clipped to a stride phase, which may be smaller than others: it splits a sum into no
    more parts than it has steps, and writes out no more positions than there are."""
    known = {x.name for x in compute.axes}
    if not compute.phase or not all(a in known for b in schedule.blocks for a in b.axes):
        return schedule
    blocks = tuple(
        replace(b, extent=min(b.extent, max(1, compute.size(b.first)))) if schedule.in_registers(b) else b
        for b in schedule.blocks
    )
    schedule = replace(schedule, blocks=blocks)
    steps = k_steps(schedule, Scheduled(compute, schedule, target).grouped)
    return replace(schedule, split_k=min(schedule.split_k, max(1, steps)))


def believable(schedule: Schedule, compute: Compute, target: Target) -> bool:
    """Whether a schedule is legal and its words are within limits, so that a bad row of a database cannot
    cause minutes of compilation."""
    if why_not(schedule, compute, target) is not None:
        return False
    grouped = Scheduled(compute, schedule, target).grouped
    unrolled = k_steps(schedule, grouped) if schedule.unroll else 0
    return (
        unrolled <= MOST_UNROLLED
        and 1 <= schedule.stages <= MOST_STAGES
        and 1 <= schedule.group_m <= 1024
        and schedule.programs <= MOST_WAVES * target.sms
        and len(schedule.blocks) <= len(compute.axes)
    )


def relatives(
    schedule: Schedule, proposed: Sequence[Schedule], compute: Compute, target: Target
) -> list[Schedule]:
    """Schedules for this computation that correspond to another workload's schedule: that schedule with
    its blocks clipped, and those ``proposed`` that have the same words and extents of the tile."""
    ways = of_any_size(schedule) if compute.named else (schedule,)
    return [s for way in ways for s in _alike(way, proposed, compute, target)]


def _alike(
    schedule: Schedule, proposed: Sequence[Schedule], compute: Compute, target: Target
) -> list[Schedule]:
    """``relatives`` of a schedule whose words are those of this computation."""
    known = {x.name for x in compute.axes}
    if not all(a in known for b in schedule.blocks for a in b.axes):
        return []
    sizes = [prod(compute.size(a) for a in b.axes) for b in schedule.blocks]
    if compute.named and any(
        b.extent > _room(size, "")
        for b, size in zip(schedule.blocks, sizes, strict=True)
        if not schedule.in_registers(b)
    ):
        return []  # most of such a tile would be empty, for all sizes that are as small
    blocks = tuple(
        replace(
            b,
            extent=min(b.extent, max(1, size) if schedule.in_registers(b) else _room(size, schedule.unit)),
        )
        for b, size in zip(schedule.blocks, sizes, strict=True)
    )
    clipped = replace(schedule, blocks=blocks)
    if schedule.programs:
        dealt = schedule.via == "gluon" and schedule.reduce != "stream"
        grouped = Scheduled(compute, clipped, target).grouped
        clipped = replace(clipped, programs=needed(clipped, grouped, target) if dealt else target.sms)
    family = _family(clipped, compute)
    found = [s for s in proposed if _family(s, compute) == family]
    return [*found, *([clipped] if believable(clipped, compute, target) else [])]


def _room(size: int, unit: str) -> int:
    """The smallest power of two that holds ``size`` positions, at least the minimum of the unit."""
    least = 16 if unit == "mma" else 1
    return max(least, 1 << max(0, size - 1).bit_length())


def _family(schedule: Schedule, compute: Compute) -> tuple[object, ...]:
    """The words and the extents of the tile along each kind; schedules that agree in these are
    relatives."""
    words = tuple(
        getattr(schedule, f.name)
        for f in fields(schedule)
        if f.name not in ("blocks", "split_k", "merge", "programs", "behind")
    )
    extents = (tile(schedule, compute, kind) for kind in "BMNK")
    return (*words, schedule.split_k > 1, schedule.merge > 1, schedule.programs > 0, *extents)


def without_axes(schedule: Schedule, gone: frozenset[str]) -> Schedule:
    """The schedule for a computation without some axes of one position: they leave its blocks. Raises
    ScheduleError for a block of several positions of such axes alone: its tile would be a smaller one."""
    blocks = [replace(b, axes=tuple(a for a in b.axes if a not in gone)) for b in schedule.blocks]
    if any(b.extent > 1 and not b.axes for b in blocks):
        raise ScheduleError(f"{schedule}: it has several positions of {' '.join(sorted(gone))}")
    return replace(schedule, blocks=tuple(b for b in blocks if b.axes)) if gone else schedule


FARTHEST = 6.0  # rows at a greater distance are ignored
OTHER_KIND = 0.5  # the distance to what does something else to its sums


def nearest(
    workload: Workload, rows: Iterable[TuningRecord], most: int = 3
) -> list[tuple[float, TuningRecord, Workload]]:
    """The rows about the likest workloads, nearest first: (distance, row, its workload); a distance
    of 0 is this very text and kind.
    ``rows`` are of one group (see ``Workload.group``); those that are not readable are passed over."""
    found: list[tuple[float, TuningRecord, Workload]] = []
    for row in rows:
        other = workload.like(row.problem)
        away = None if other is None else workload.distance(other)
        if other is None or away is None:
            continue
        away += OTHER_KIND if row.kind != workload.kind else 0.0
        if away <= FARTHEST:
            found.append((away, row, other))
    return sorted(found, key=lambda x: (x[0], x[1].us))[:most]
