"""The candidates for a kernel: a shortlist, kept in memory and on disk. One process estimates a thousand
schedules, and later ones read the first few of them.

A record's key is a digest of all that the choice depends on: the computation but for the names of its
tensors and values, the target, this package's files, and the tuned rows, with the workload where there are
any. Equal computations of a graph are thus ranked once. A schedule that is read back must be legal, like
that of any row, and its kernel is checked like any other.

Schedules that say only ``red=`` or ``row=`` are completed by a tile that satisfies these words.

    red=block row=held           ->   n:4 k:4096 | fma | red=block row=held stages=1 warps=8
    k:1024 | fma | red=split     ->   k:1024 | fma | split_k=16 red=split

A schedule with blocks keeps them, and gets at most a ``split_k``. One without blocks gets the tile with
the best estimate among those that satisfy its words.

A computation without a product has one kernel, or several with its rows split into parts, if there are too
few rows to fill the chip, or if registers do not hold a row, and the estimate says that several are
faster."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log, prod
from operator import attrgetter

from transconv.compute import (
    Compute,
    Workload,
    axis_strides,
    for_batches,
    kernels,
    parted,
    touched,
    why_not_lowered,
    with_examples,
)
from transconv.cost import estimate
from transconv.schedule import Schedule, Word, k_steps, programs, registered_words, why_not, words
from transconv.selection import choice, transfer, tuning_db
from transconv.selection.proposals import heuristics
from transconv.selection.proposals.maps import even, maps, with_whole_rows
from transconv.selection.tuning_db import COLUMNS, files_digest, machine, told_by, unnamed
from transconv.support import Cache, Content, Drawer, ScheduleError, __version__, knobs, triton_version
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
    made = [
        Listed(c.schedule, c.why, c.row is not None, c.is_close)
        for c in choice.ranked(compute, target, workload, enough=count)[:count]
    ]
    if key:
        _listed.keep(key, made)
        DRAWER.put(
            key,
            {
                "schedules": [
                    {"schedule": str(k.schedule), "why": k.why, "tuned": k.tuned, "close": k.close}
                    for k in made
                ],
                "problem": workload.text,
                "direction": workload.direction,
            },
        )
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
def _estimated(
    count: int, compute: Compute, target: Target, table: tuple[Word, ...]
) -> tuple[Listed, ...]:
    made = choice.ranked(compute, target, most=count, enough=count)[:count]
    return tuple(Listed(c.schedule, c.why, False) for c in made)


def _read(content: Content | None, compute: Compute, target: Target) -> list[Listed]:
    """The list of a record; empty if one of its schedules is unreadable or not legal."""
    try:
        found = [
            Listed(Schedule.parse(c["schedule"]), str(c["why"]), c["tuned"] is True, c["close"] is True)
            for c in (content or {})["schedules"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError):  # a ScheduleError is a ValueError
        return []
    return found if all(transfer.believable(k.schedule, compute, target) for k in found) else []


def _key(count: int, compute: Compute, target: Target, workload: Workload) -> str:
    name = (workload.named(compute.name) or compute).name  # by which another workload's winner is found
    about = (name, workload.text, workload.direction, workload.kind, sorted(workload.lacks))
    rows = [sorted(map(VALUES, tuning_db.rows_of(name))) for name in _groups(workload, target)]
    parts = (
        count,
        unnamed(compute),
        about if any(rows) else "",
        __version__,
        told_by(target),
        rows,
        files_digest(),
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def stamp(workload: Workload, target: Target) -> str:
    """A text of all that a plan's choices depend on besides the workload: the target, the user's tuned
    rows of its groups, and this package's files, which hold its own rows. It is made in the thread of a
    call that waits for no kernel: the package's rows take too long to parse there."""
    rows = [tuning_db.users_rows(name) for name in _groups(workload, target)]
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


FEW = 2  # rows per multiprocessor with which one kernel is fast enough, if registers hold a row
HELD = 32768
"""The most elements of a row that registers hold."""
ALONG = 4096  # elements of a part, if rows are contiguous
ACROSS = (128, 1024)  # elements of a part, at least and at most, if rows have a stride
BESIDE = 64  # the fewest rows of a program, if rows have a stride
FILL = 16 * BESIDE  # parts that keep a multiprocessor busy
UNTIMED = 1.3  # by how much sweeps in alternating directions must be faster than parts: no trial has them
SHORT = 64  # innermost reduced axes with fewer elements are left to the second kernel


@lru_cache(maxsize=256)
def spread(compute: Compute, target: Target, asked: bool = False) -> tuple[Compute, ...]:
    """The computation alone, or the computations of several kernels with rows in parts: if the estimate
    says that these are faster, or, if ``asked`` for (``red=split``), whenever it is possible. Where the
    number of samples is an argument, it is said for all of them: parts are those of one sample, and the
    estimates are for the fewest and for the most."""
    each = for_batches(compute) if compute.named is not None else [compute]
    sums_names = any(x.extent is not None for x in compute.axes_of("K"))
    if compute.statistics or sums_names or (compute.named is not None and len(each) < 2):
        return (compute,)  # the number of parts would depend on sizes or on tiles
    if not compute.again or not compute.streams:
        return (compute,)
    few = each[0]
    if not asked:
        rows, row = (prod(x.size for x in few.axes_of(kind)) for kind in "MK")
        if not _along(few):
            rows //= BESIDE
        if target.backend == "interpreter" or (row <= HELD and rows >= FEW * target.sms):
            return (compute,)
    made = _in_parts(few, target)
    if made is None or any(why_not_lowered(k) for k in made):
        return (compute,)
    if not asked:
        try:
            ends = each[:: max(1, len(each) - 1)]  # of few samples and of the most
            if sum(log(_price_of_parts(c, made, target)) for c in ends) >= 0:
                return (compute,)
        except ScheduleError:
            return (compute,)
    return tuple(_like(k, compute) for k in made)


def _price_of_parts(compute: Compute, made: tuple[Compute, ...], target: Target) -> float:
    """The time of the kernels of parts over that of one kernel, by their estimates."""
    one = heuristics.default(compute, target)
    whole = estimate(one, compute, target) * (UNTIMED if one.turn else 1)
    parts = [_like(k, compute) for k in made]
    return sum(estimate(heuristics.default(k, target), k, target) for k in parts) / whole


def _like(kernel: Compute, compute: Compute) -> Compute:
    """A kernel of a computation, with the examples of its sizes."""
    return kernel if compute.named is None else with_examples(kernel, compute.named.like)


def _along(compute: Compute) -> bool:
    """Whether the largest input is contiguous along a reduced axis."""
    view = max((r.view for r in compute.reads), key=lambda v: touched(v, compute))
    gap = axis_strides(view, compute)
    return any(abs(gap[x.name]) == 1 for x in compute.axes_of("K") if x.size > 1)


def _in_parts(compute: Compute, target: Target) -> tuple[Compute, ...] | None:
    """The computations of the kernels, with parts that are close together in memory; None if no suitable
    length of a part divides the axes."""
    view = max((r.view for r in compute.reads), key=lambda v: touched(v, compute))
    gap = {a: abs(s) for a, s in axis_strides(view, compute).items()}
    summed = sorted((x for x in compute.axes_of("K") if x.size > 1), key=lambda x: -gap[x.name])
    free = [gap[x.name] for x in compute.axes_of("M") if x.size > 1 and gap[x.name]]
    inside = [x for x in summed if any(s > gap[x.name] for s in free)]
    late = inside if prod(x.size for x in inside) < SHORT and len(inside) < len(summed) else []
    left = [x for x in summed if x not in late]
    if not left:
        return None
    across = prod(x.size for x in compute.axes) // (FILL * target.sms)
    wanted = ALONG if any(gap[x.name] == 1 for x in left) else max(ACROSS[0], min(ACROSS[1], across))
    while len(left) > 1 and prod(x.size for x in left[1:]) >= wanted:
        late, left = [*late, left[0]], left[1:]
    beside = prod(x.size for x in left[1:])
    most = left[0].size if len(late) else left[0].size // 2
    within = next((n for n in range(min(wanted // beside, most), 0, -1) if left[0].size % n == 0), 0)
    if within * beside < wanted // 4:
        return None
    return kernels(parted(compute, left[0].name, within, tuple(x.name for x in late)))
