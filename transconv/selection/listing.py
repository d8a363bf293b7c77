"""The database. The shortlist of a kernel, kept on disk: one process estimates a thousand schedules,
others read the few that came first.

A record stands under a digest of all that the choice depends on: the computation, the workload, the
target, the tuned rows that have a say, and this package's own files. What is read back is held against the
rules of the chip like any row, and its kernel is checked like any other.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, is_dataclass
from pathlib import Path

from transconv import knobs
from transconv.compute import Compute, Workload
from transconv.disk_cache import Content, Drawer
from transconv.schedule import Schedule, registered_words
from transconv.selection import choice, store
from transconv.selection.rows import machine
from transconv.target import Target
from transconv.version import __version__

SCHEMA = 2
DRAWER = Drawer("shortlists", SCHEMA, longest=1 << 16)


@dataclass(frozen=True, slots=True)
class Listed:
    """A schedule, why it stands where it stands, and whether tuning found it."""

    schedule: Schedule
    why: str
    tuned: bool


def shortlist(count: int, compute: Compute, target: Target, workload: Workload) -> list[Listed]:
    """The most promising schedules, as ``choice.ranked`` has them. Raises ScheduleError as it does."""
    if not workload.group(machine(target)):
        return estimated(count, compute, target)
    key = "" if knobs.schedule() or registered_words() else _key(count, compute, target, workload)
    if key and (found := _read(DRAWER.get(key), compute, target)):
        return found
    made = [Listed(c.schedule, c.why, c.row is not None)
            for c in choice.ranked(compute, target, workload)[:count]]
    if key:
        DRAWER.put(key, {"schedules": [{"schedule": str(k.schedule), "why": k.why, "tuned": k.tuned}
                                     for k in made],
                         "problem": workload.text, "prop": workload.direction})
    return made


def estimated(count: int, compute: Compute, target: Target) -> list[Listed]:
    """The most promising schedules of a computation that no rows speak of."""
    return [Listed(c.schedule, c.why, False) for c in choice.ranked(compute, target)[:count]]


def _read(content: Content | None, compute: Compute, target: Target) -> list[Listed]:
    """The list of a record; none where one makes no sense."""
    try:
        found = [Listed(Schedule.parse(c["schedule"]), str(c["why"]), c["tuned"] is True)
                 for c in (content or {})["schedules"]]
    except (KeyError, TypeError, ValueError, AttributeError):  # a ScheduleError is a ValueError
        return []
    return found if all(choice.believable(k.schedule, compute, target) for k in found) else []


def _key(count: int, compute: Compute, target: Target, workload: Workload) -> str:
    groups = dict.fromkeys(w.group(machine(target)) for w in (workload, workload.innermost()) if w)
    rows = [sorted(map(astuple, store.rows_of(name))) for name in groups]
    told = (__version__, count, str(compute), workload.text, workload.direction, _told(target),
            rows, _files())
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def _told(record: object) -> list[str]:
    """The fields of a record, sets in order."""
    assert is_dataclass(record)
    values = [getattr(record, f.name) for f in fields(record)]
    return [repr(sorted(map(str, v)) if isinstance(v, frozenset) else v) for v in values]


@functools.cache
def _files() -> Sequence[tuple[str, int, int]]:
    """The files that choose: another version of them may choose otherwise."""
    root = Path(__file__).parents[1]
    return [(str(p.relative_to(root)), p.stat().st_size, p.stat().st_mtime_ns)
            for p in sorted(root.rglob("*.py"))]
