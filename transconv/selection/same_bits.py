"""Schedules whose sums are grouped alike in every call, where the same bits are asked for.

Atomic additions come in another order at every run. Where sums end at a size that is an argument, such as
weight gradients at the number of samples, two more things would have the grouping depend on that size:

    split_k=4           each part is a quarter of the steps     deal=1: a part is every fourth step
    order=h.n.w         between two steps of a sample are       order=n.h.w: those of further samples
                        those of others                         come behind the ones before

Then a further sample adds to the sums of those before it and changes no grouping of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from transconv.compute import Compute
from transconv.schedule import Schedule, why_not
from transconv.selection.candidates import Listed
from transconv.target import Target


def grouped_alike(schedule: Schedule, compute: Compute) -> Schedule | None:
    """The schedule with its sums grouped alike in every call; None if it says otherwise."""
    if schedule.varies:
        return None
    summed = [x.name for x in compute.axes_of("K")]
    ends = {x.name for x in compute.axes_of("K") if x.extent is not None}
    if not ends:
        return schedule
    first = summed[0]  # samples lie along the first dims
    if first in ends:
        order = schedule.order.split(".") if schedule.order else summed
        if any(first in b.axes[1:] for b in schedule.blocks):
            return None
        if order[0] != first:
            schedule = replace(schedule, order=".".join([first, *(a for a in order if a != first)]))
    return replace(schedule, deal=1) if schedule.split_k > 1 else schedule


def with_same_bits(listed: Iterable[Listed], compute: Compute, target: Target) -> Iterator[Listed]:
    """Those of some candidates that are grouped alike in every call, in their order."""
    seen = set[Schedule]()
    for found in listed:
        schedule = grouped_alike(found.schedule, compute)
        if schedule is None or schedule in seen:
            continue
        seen.add(schedule)
        if schedule == found.schedule or why_not(schedule, compute, target) is None:
            yield replace(found, schedule=schedule)
