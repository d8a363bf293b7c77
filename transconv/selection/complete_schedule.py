"""Schedules that say only ``red=`` or ``row=``: fills in a tile that satisfies these words.

    red=block row=held           ->   n:4 k:4096 | fma | red=block row=held stages=1 warps=8
    k:1024 | fma | red=split     ->   k:1024 | fma | split_k=16 red=split

A schedule with blocks keeps them, and gets at most a ``split_k``. One without blocks gets the tile with
the best estimate among those that satisfy its words.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from transconv.compute import Compute
from transconv.cost import estimate
from transconv.errors import ScheduleError
from transconv.schedule import Schedule, k_steps, programs, why_not, words
from transconv.selection.proposals import heuristics
from transconv.selection.proposals.maps import even, maps, with_whole_rows
from transconv.target import Target

PARTS = 64  # the most programs that share a row
BROUGHT = ("unit", "warps", "stages")  # words that come with the tile


def completed(schedule: Schedule, compute: Compute, target: Target) -> Schedule:
    """The schedule, completed to satisfy ``red=`` and ``row=``; without these it is returned unchanged.
    Raises ScheduleError if no tile of the computation satisfies them."""
    if not (schedule.red or schedule.row) or not compute.streams:
        return schedule
    if schedule.blocks:
        return _shared(schedule, compute, target)
    if compute.sum is None:  # one of several kernels, which reduces nothing
        return heuristics.default(compute, target)
    us = {c: estimate(c, compute, target) for c in dict.fromkeys(_asked(schedule, compute, target))}
    ranked = even(sorted(us, key=lambda c: us[c]), us, compute, target) if us else []
    found = next((c for c in ranked if why_not(c, compute, target) is None), None)
    if found is None:
        near = sorted(ranked, key=lambda c: schedule.red == "split" and c.split_k == 1)
        reason = why_not(near[0], compute, target) if near else "it has no tile that does it"
        said = " ".join(f"{n}={schedule.word(n)}" for n in ("red", "row") if schedule.word(n))
        raise ScheduleError(f"{said} for {compute.name} on {target.name}: {reason}")
    return found


def _asked(schedule: Schedule, compute: Compute, target: Target) -> Iterator[Schedule]:
    """The proposals for maps, with the words of a schedule that has no blocks."""
    said = {w.name: schedule.word(w.name) for w in words() if schedule.word(w.name) != w.default}
    for brought in BROUGHT:
        said.pop(brought, None)
    for proposed in itertools.chain(maps(compute, target), with_whole_rows(compute)):
        if schedule.red != "split" and proposed.split_k > 1:
            continue
        yield _shared(proposed.with_words(**said), compute, target)


def _shared(schedule: Schedule, compute: Compute, target: Target) -> Schedule:
    """With ``red=split``, the schedule with as many programs a row as keep the multiprocessors busy, at
    least two."""
    if schedule.red != "split" or schedule.split_k > 1:
        return schedule
    steps = k_steps(schedule, compute)
    wanted = max(2, min(PARTS, 2 * target.sms // programs(schedule, compute)))
    even = [n for n in range(2, steps + 1) if steps % n == 0]
    near = [n for n in even if n <= wanted]
    return replace(schedule, split_k=near[-1] if near else even[0] if even else 1)
