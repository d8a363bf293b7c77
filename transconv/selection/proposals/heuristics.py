"""Proposed schedules: the legal schedules of a computation on a target, best estimate first.

Candidates are built from the roles of the axes (positions, windows, features), ranked by one estimate of
their time (see ``transconv.cost``) and filtered by ``why_not``. There are no special cases for shapes: the
estimate decides which tile a shape gets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from transconv.compute import Compute
from transconv.cost import estimate, of_phases, spills
from transconv.ir import f32
from transconv.schedule import (
    PROPOSING,
    Schedule,
    Scheduled,
    Word,
    is_copy,
    programs,
    registered_words,
    why_not,
    within_places,
)
from transconv.selection.proposals.maps import copy_tiles, even, maps
from transconv.selection.proposals.products import FEW_FEATURES, products
from transconv.selection.proposals.tile_shapes import fusable, tilings, too_long
from transconv.support import ScheduleError
from transconv.target import Target

__all__ = ["candidates", "default", "estimate", "fusable", "of_phases", "programs", "proposals", "tilings"]

MOST = 200  # candidates that are checked and tuned
KINDS: tuple[Callable[[Schedule, Schedule], bool], ...] = (
    lambda other, first: other.via != first.via,
    lambda other, first: "box" not in (other.a, other.b, other.c),
)
"""Schedules of other kinds than a first one: a mistake of a compiler may rule out all kernels of one."""
ROWS = (64, 32)  # features of merged groups that the copy engine and the matrix unit handle well


def candidates(compute: Compute, target: Target, most: int = MOST) -> list[Schedule]:
    """Legal schedules, best estimate first; of equal ones, the one proposed first. At most ``most``, and,
    of more than a few, behind them the best of ``KINDS`` that they lack, or all where kernels are
    interpreted. Raises ScheduleError if none is legal."""
    several, interpreted = most > len(KINDS), target.backend == "interpreter"
    found = list(itertools.islice(_legal(compute, target), None if several and interpreted else most))
    if several and not interpreted and len(found) == most:
        found += _spares(found, compute, target)
    if not found:
        raise _none(compute, target)
    return found


def _spares(found: list[Schedule], compute: Compute, target: Target) -> Iterator[Schedule]:
    """The best schedules of kinds that are not among some."""
    seen, ranked = _ranked(compute, target, registered_words())
    for is_other in KINDS:
        if not any(is_other(s, found[0]) for s in found):
            yield from itertools.islice(
                (c for c in ranked if is_other(c, found[0]) and why_not(c, seen, target) is None), 1
            )


def default(compute: Compute, target: Target) -> Schedule:
    """The legal schedule with the best estimate. Raises ScheduleError if none is legal."""
    return _default(compute, target, registered_words())


@lru_cache(maxsize=512)
def _default(compute: Compute, target: Target, table: tuple[Word, ...]) -> Schedule:
    for schedule in _legal(compute, target):
        return schedule
    raise _none(compute, target)


def _none(compute: Compute, target: Target) -> ScheduleError:
    return ScheduleError(f"no schedule is legal for {compute.name} on {target.name}")


def _legal(compute: Compute, target: Target) -> Iterator[Schedule]:
    seen, ranked = _ranked(compute, target, registered_words())
    if seen.named:  # others are not ranked
        return iter(ranked)
    return (c for c in ranked if why_not(c, seen, target) is None)


@lru_cache(maxsize=32)  # parts of rows are estimated before they are chosen, and then asked again
def _ranked(
    compute: Compute, target: Target, table: tuple[Word, ...]
) -> tuple[Compute, tuple[Schedule, ...]]:
    """The proposals, best estimate first, and the computation that they are for."""
    if any(x.size == 0 for x in compute.axes_of("K")):  # a sum over nothing has no steps
        compute = replace(
            compute,
            axes=tuple(replace(x, size=1) if compute.kind(x.name) == "K" else x for x in compute.axes),
        )
    found = list(proposals(compute, target))
    if compute.statistics:
        found += [within_places(c, compute) for c in found]
    proposed = _with_words(dict.fromkeys(found), compute, target)
    if compute.named:  # others may have no estimate
        proposed = dict.fromkeys(c for c in proposed if why_not(c, compute, target) is None)
    interpreted = target.backend == "interpreter"
    us = {c: estimate(c, compute, target) for c in proposed}
    ranked = sorted(
        us,
        key=lambda c: (
            too_long(c, compute, target),
            spills(c, compute, target),
            us[c],
            str(c) if interpreted else "",
        ),
    )
    if compute.streams and not interpreted:
        ranked = even(ranked, us, compute, target)
    return compute, tuple(ranked)


def _with_words(schedules: dict[Schedule, None], compute: Compute, target: Target) -> dict[Schedule, None]:
    """The schedules, and those that ``Word.propose`` of any word adds to the legal ones."""
    for word in PROPOSING.values():
        for schedule in list(schedules):
            if word.propose is not None and why_not(schedule, compute, target) is None:
                schedules |= dict.fromkeys(word.propose(schedule, compute, target))
    return schedules


def proposals(compute: Compute, target: Target) -> Iterator[Schedule]:
    """Proposals, legal or not, some of them twice. For groups of few features, also with merged groups."""
    if is_copy(compute):
        yield from copy_tiles(compute, target)
        return
    if compute.streams and target.backend != "interpreter":
        yield from maps(compute, target)
        return
    yield from products(compute, target)
    for merge in merges(compute):
        for schedule in products(Scheduled(compute, Schedule(merge=merge), target).grouped, target):
            if schedule.unit == "mma":
                yield schedule.with_words(merge=merge)


def merges(compute: Compute) -> list[int]:
    """Values of ``merge`` to propose: as many groups as fill a row of ``ROWS`` features on the wider side
    of B. None for groups of one feature, which are no matrix products, and none for f32 in full precision,
    which is multiplied element by element, so that the zeros would cost as much as other products."""
    if compute.b is None or (compute.a.tensor.dtype is f32 and compute.math == "ieee"):
        return []
    features = [x.size for x in compute.axes if x.role == "feature"]
    groups = next((x.size for x in compute.axes if x.role == "batch"), 1)
    found = []
    for row in ROWS if 1 < max(features, default=1) else ():
        fitting = [m for m in range(2, groups + 1) if groups % m == 0 and m * max(features) <= row]
        if fitting and fitting[-1] * min(features) >= FEW_FEATURES:
            found.append(fitting[-1])
    return [*dict.fromkeys(found)]
