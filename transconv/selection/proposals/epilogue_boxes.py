"""Proposals in which the producer fetches what the maps behind the sum read: a schedule of an explicit
kernel with ``behind=box``, and with as many of its stages as then fit shared memory."""

from __future__ import annotations

from collections.abc import Iterator

from transconv.compute import Compute, Read
from transconv.schedule import Schedule, k_steps, why_not, why_not_behind
from transconv.target import Target

FEWEST = 3  # stages that a longer sum needs: one is read, one is waited for, one is filled


def fetching(schedule: Schedule, compute: Compute, target: Target) -> Iterator[Schedule]:
    """The schedule with ``behind=box``, if that is legal with enough stages; one or none."""
    if schedule.via != "gluon" or schedule.behind == "box" or not any(
            isinstance(s, Read) for s in compute.after):
        return
    if schedule.merge == 1 and not schedule.pack and why_not_behind(
            schedule.with_words(behind="box"), compute, target):
        return  # whatever the other words are: this rule is the last one
    least = min(schedule.stages, FEWEST, max(2, k_steps(schedule, compute)))
    for stages in range(schedule.stages, least - 1, -1):
        made = schedule.with_words(behind="box", stages=stages)
        if (reason := why_not(made, compute, target)) is None:
            yield made
        if reason is None or "shared memory" not in reason:
            return


def also_fetching(schedules: Iterator[Schedule], compute: Compute, target: Target) -> Iterator[Schedule]:
    """The schedules, each with the one that fetches."""
    for schedule in schedules:
        yield schedule
        yield from fetching(schedule, compute, target)
