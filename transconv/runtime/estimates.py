"""Beside the compiler. Microseconds of a workload by the estimate: of all its launches, with the schedules
that they would get.

Decisions of a graph compare hundreds of them, and each has a thousand schedules ranked. Processes make
them, and leave them on disk, where this process and later ones find them; a record's key is a digest of
all that the choice of schedules depends on.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from math import isfinite

from transconv.compute import Compute, Workload
from transconv.cost import estimate
from transconv.runtime.steps import plan_steps
from transconv.schedule import Schedule, registered_words
from transconv.selection import shortlist, stamp
from transconv.support import Content, Drawer, ScheduleError, TransconvError, knobs
from transconv.target import Target

SCHEMA = 1
DRAWER = Drawer("microseconds", SCHEMA, longest=1 << 12, lasting=False)
LONGEST = 1000  # characters of the reason why there is none


@lru_cache(maxsize=4096)
def estimated(workload: Workload, target: Target) -> float:
    """Of all launches of a workload. Raises ScheduleError where it has no plan."""
    key = _key(workload, target)
    found = _read(DRAWER.get(key)) if key else None
    if found is None:
        found = _made(workload, target)
        if key:
            DRAWER.put(key, {"us": found} if isinstance(found, float) else {"why": found[:LONGEST]})
    if isinstance(found, str):
        raise ScheduleError(found)
    return found


def is_estimated(workload: Workload, target: Target) -> bool:
    """Whether the estimate is there, or none is kept."""
    key = _key(workload, target)
    return not key or _read(DRAWER.get(key)) is not None


def _made(workload: Workload, target: Target) -> float | str:
    """The sum, or the reason why there is none."""
    def first(compute: Compute, target: Target) -> Schedule:
        return shortlist(1, compute, target, workload)[0].schedule
    try:
        return float(sum(estimate(s, c, target) for c, s in plan_steps(workload, target, choose=first)))
    except TransconvError as error:
        return str(error) or type(error).__name__


def _key(workload: Workload, target: Target) -> str:
    """The name of a record; empty if none is kept: other processes lack the user's schedule and words."""
    if knobs.schedule() or registered_words():
        return ""
    told = (type(workload).__name__, workload.text, workload.direction, workload.behind, workload.math,
            stamp(workload, target))
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def _read(content: Content | None) -> float | str | None:
    """What a record says; None if it is unreadable."""
    us, why = (content or {}).get("us"), (content or {}).get("why")
    if type(us) is float and isfinite(us):
        return us
    return why if isinstance(why, str) and why else None
