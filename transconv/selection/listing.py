"""The shortlist of a kernel, kept on disk: one process estimates a thousand schedules, and later ones
read the first few of them.

A record's key is a digest of all that the choice depends on: the computation, the workload, the target,
its tuned rows, and this package's files. A schedule that is read back must be legal, like that of any row,
and its kernel is checked like any other.
"""

from __future__ import annotations

import functools
import hashlib
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
    """A schedule, the reason for its rank, and whether tuning found it."""

    schedule: Schedule
    why: str
    tuned: bool


def shortlist(count: int, compute: Compute, target: Target, workload: Workload) -> list[Listed]:
    """The first ``count`` schedules of ``choice.ranked``, from disk if they are there. Raises
    ScheduleError as that does."""
    workload = workload.about(compute)
    if compute.does != "compute" or not workload.group(machine(target)):
        return estimated(count, compute, target)
    key = "" if knobs.schedule() or registered_words() else _key(count, compute, target, workload)
    if key and (found := _read(DRAWER.get(key), compute, target)):
        return found
    made = [Listed(c.schedule, c.why, c.row is not None)
            for c in choice.ranked(compute, target, workload, enough=count)[:count]]
    if key:
        DRAWER.put(key, {"schedules": [{"schedule": str(k.schedule), "why": k.why, "tuned": k.tuned}
                                     for k in made],
                         "problem": workload.text, "direction": workload.direction})
    return made


def estimated(count: int, compute: Compute, target: Target) -> list[Listed]:
    """The first ``count`` schedules of a computation without tuned rows, by the estimate."""
    return [Listed(c.schedule, c.why, False) for c in choice.ranked(compute, target, most=count)]


def _read(content: Content | None, compute: Compute, target: Target) -> list[Listed]:
    """The list of a record; empty if one of its schedules is unreadable or not legal."""
    try:
        found = [Listed(Schedule.parse(c["schedule"]), str(c["why"]), c["tuned"] is True)
                 for c in (content or {})["schedules"]]
    except (KeyError, TypeError, ValueError, AttributeError):  # a ScheduleError is a ValueError
        return []
    return found if all(choice.believable(k.schedule, compute, target) for k in found) else []


def _key(count: int, compute: Compute, target: Target, workload: Workload) -> str:
    parts = (count, str(compute), workload.text, workload.direction, stamp(workload, target))
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def stamp(workload: Workload, target: Target) -> str:
    """A text of all that a choice depends on besides computation and workload: the target, the tuned rows
    of the workload's group, and this package's files."""
    groups = dict.fromkeys(w.group(machine(target)) for w in (workload, workload.innermost()) if w)
    rows = [sorted(map(astuple, store.rows_of(name))) for name in groups if name]
    return repr((__version__, _fields(target), rows, files_digest()))


def _fields(record: object) -> list[str]:
    """The values of a record's fields, with sets sorted, so that their text is reproducible."""
    assert is_dataclass(record)
    values = [getattr(record, f.name) for f in fields(record)]
    return [repr(sorted(map(str, v)) if isinstance(v, frozenset) else v) for v in values]


@functools.cache
def files_digest() -> str:
    """A digest of the package's source files, because another version may choose other schedules. It uses
    their content, not their dates, so that a cache can be moved to another machine."""
    root = Path(__file__).parents[1]
    seen = hashlib.blake2b(digest_size=16)
    for path in sorted(root.rglob("*.py")):
        data = path.read_bytes()
        seen.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode() + data)
    return seen.hexdigest()
