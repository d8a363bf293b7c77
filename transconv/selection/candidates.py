"""The shortlist of a kernel, kept in memory and on disk: one process estimates a thousand schedules, and
later ones read the first few of them.

A record's key is a digest of all that the choice depends on: the computation but for the names of its
tensors and values, the target, this package's files, and the tuned rows, with the workload where there are
any. Equal computations of a graph are thus ranked once. A schedule that is read back must be legal, like
that of any row, and its kernel is checked like any other.

Also here: schedules that say only ``red=`` or ``row=``: fills in a tile that satisfies these words.

    red=block row=held           ->   n:4 k:4096 | fma | red=block row=held stages=1 warps=8
    k:1024 | fma | red=split     ->   k:1024 | fma | split_k=16 red=split

A schedule with blocks keeps them, and gets at most a ``split_k``. One without blocks gets the tile with
the best estimate among those that satisfy its words.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

from transconv.compute import Compute, Workload
from transconv.cost import estimate
from transconv.schedule import Schedule, Word, k_steps, programs, registered_words, why_not, words
from transconv.selection import choice
from transconv.selection.proposals import heuristics
from transconv.selection.proposals.maps import even, maps, with_whole_rows
from transconv.selection.tuning_db import store, transfer
from transconv.selection.tuning_db.record import COLUMNS, files_digest, machine, told_by, unnamed
from transconv.support import (
    Cache,
    Content,
    Drawer,
    ScheduleError,
    __version__,
    knobs,
    triton_version,
)
from transconv.target import Target

SCHEMA = 4
KEPT = 8  # schedules of a record: whoever asks for fewer ranks as many
LIMIT = 4096  # lists in memory
DRAWER = Drawer("shortlists", SCHEMA, longest=1 << 16, lasting=False)


@dataclass(frozen=True, slots=True)
class Listed:
    """A schedule, the reason for its rank, whether tuning found it, and whether that was for this problem
    or one that is close."""

    schedule: Schedule
    why: str
    tuned: bool
    close: bool = False


def shortlist(count: int, compute: Compute, target: Target, workload: Workload) -> list[Listed]:
    """The first ``count`` schedules of ``choice.ranked``, from disk if they are there. Raises
    ScheduleError as that does."""
    workload = workload.about(compute)
    if _is_alone(compute, target, workload):
        return estimated(count, compute, target)
    count, asked = max(count, KEPT), count
    key = "" if knobs.schedule() or registered_words() else _key(count, compute, target, workload)
    if key and (found := _listed.get(key) or _read(DRAWER.get(key), compute, target)):
        return _listed.keep(key, found)[:asked]
    made = [Listed(c.schedule, c.why, c.row is not None, c.is_close)
            for c in choice.ranked(compute, target, workload, enough=count)[:count]]
    if key:
        _listed.keep(key, made)
        DRAWER.put(key, {"schedules": [{"schedule": str(k.schedule), "why": k.why, "tuned": k.tuned,
                                      "close": k.close}
                                     for k in made],
                         "problem": workload.text, "direction": workload.direction})
    return made[:asked]


def _is_alone(compute: Compute, target: Target, workload: Workload) -> bool:
    """Whether the estimate alone ranks schedules, which takes no time worth keeping."""
    return compute.does != "compute" or not workload.group(machine(target))


_listed: Cache[str, list[Listed]] = Cache("shortlists", LIMIT)


def forget() -> None:
    """Clear the lists in memory."""
    _listed.forget()
    _estimated.cache_clear()


def estimated(count: int, compute: Compute, target: Target) -> list[Listed]:
    """The first ``count`` schedules of a computation without tuned rows, by the estimate."""
    return list(_estimated(count, compute, target, registered_words()))


@functools.lru_cache(maxsize=1024)
def _estimated(count: int, compute: Compute, target: Target,
               table: tuple[Word, ...]) -> tuple[Listed, ...]:
    made = choice.ranked(compute, target, most=count, enough=count)[:count]
    return tuple(Listed(c.schedule, c.why, False) for c in made)


def _read(content: Content | None, compute: Compute, target: Target) -> list[Listed]:
    """The list of a record; empty if one of its schedules is unreadable or not legal."""
    try:
        found = [Listed(Schedule.parse(c["schedule"]), str(c["why"]), c["tuned"] is True,
                        c["close"] is True)
                 for c in (content or {})["schedules"]]
    except (KeyError, TypeError, ValueError, AttributeError):  # a ScheduleError is a ValueError
        return []
    return found if all(transfer.believable(k.schedule, compute, target) for k in found) else []


def _key(count: int, compute: Compute, target: Target, workload: Workload) -> str:
    about = (compute.name, workload.text, workload.direction, workload.kind, sorted(workload.lacks))
    rows = [sorted(map(VALUES, store.rows_of(name))) for name in _groups(workload, target)]
    parts = (count, unnamed(compute), about if any(rows) else "", __version__, told_by(target),
             rows, files_digest())
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def stamp(workload: Workload, target: Target) -> str:
    """A text of all that a plan's choices depend on besides the workload: the target, the user's tuned
    rows of its groups, and this package's files, which hold its own rows. It is made in the thread of a
    call that waits for no kernel: the package's rows take too long to parse there."""
    rows = [store.users_rows(name) for name in _groups(workload, target)]
    told = [found if found is None else sorted(map(VALUES, found)) for found in rows]
    return repr((__version__, triton_version(), told_by(target), told, files_digest()))


def _groups(workload: Workload, target: Target) -> list[str]:
    """The groups whose tuned rows a choice for a workload may consider."""
    groups = dict.fromkeys(w.group(machine(target)) for w in (workload, workload.innermost()) if w)
    return [name for name in groups if name]


VALUES = attrgetter(*COLUMNS)


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
