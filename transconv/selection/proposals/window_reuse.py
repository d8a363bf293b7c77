"""Proposals in which steps of a sum share boxes: a schedule of an explicit kernel with ``slide=`` the
outermost axis of the window that allows it, and with as many of its stages as then fit shared memory."""

from __future__ import annotations

from collections.abc import Iterator

from transconv.compute import Compute
from transconv.schedule import Schedule, why_not
from transconv.target import Target

FEWEST = 3  # stages, each of several steps; with 2 they take 1.3 times the estimate (90 kernels, H200)
MOST = 4  # stages: enough for products that read shared memory while others land there


def sharing(schedule: Schedule, compute: Compute, target: Target) -> Iterator[Schedule]:
    """The schedule with ``slide=``, if that is legal with enough stages; one or none. Where a swapped
    result of 16 bits is not stored as a box, storing it takes a third of the time (256 positions of 64
    features, on an H100)."""
    if schedule.via != "gluon" or schedule.slide or schedule.split_k > 1 or schedule.keep:
        return
    if schedule.swap and schedule.c != "box" and compute.c.tensor.dtype.bits < 32:
        return
    summed = compute.axes_of("K")
    for axis in summed:
        if axis.role != "window" or axis.size < 2 or schedule.block_of(axis.name) is not None:
            continue
        order = ".".join([*(x.name for x in summed if x is not axis), axis.name])
        for stages in range(min(MOST, schedule.stages), FEWEST - 1, -1):
            made = schedule.with_words(order=order, slide=axis.name, stages=stages)
            if (reason := why_not(made, compute, target)) is None:
                yield made
                return
            if "shared memory" not in reason:
                break


def also_sharing(schedules: Iterator[Schedule], compute: Compute, target: Target) -> Iterator[Schedule]:
    """The schedules, each with the one whose steps share boxes."""
    for schedule in schedules:
        yield schedule
        yield from sharing(schedule, compute, target)
