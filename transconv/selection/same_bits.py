"""Schedules whose sums are grouped alike in every call, where the same bits are asked for.

Atomic additions come in another order at every run. Where sums end at a size that is an argument, such as
weight gradients at the number of samples, two more things would have the grouping depend on that size:

    split_k=4           each part is a quarter of the steps     deal=1: a part is every fourth step
    order=h.n.w         between two steps of a sample are       order=n.h.w: those of further samples
                        those of others                         come behind the ones before

Then a further sample adds to the sums of those before it and changes no grouping of theirs.

Where the number of samples is the one size that is an argument, there is a schedule for few samples and
one for many (``in_bands``). Tiles of other axes, warps and stages change no bits of a product, boxes none
of 16 bits. So a grouping is chosen by estimates for all examples, and for each the best of its schedules:

    1 sample       h:16 w:8 f:64 c:64 | mma | ...              one grouping: 64 of c at once
    128 samples    n:32 w:4 f:256 c:64 | mma | ...
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf, log, prod
from typing import NamedTuple

from transconv.compute import Compute, Workload, for_batches, in_bands
from transconv.cost import estimate, is_small
from transconv.schedule import Schedule, Word, registered_words, why_not
from transconv.selection.candidates import KEPT, Listed, shortlist
from transconv.selection.candidates import forget as forget_lists
from transconv.selection.choice import COUNT, SLACK, Choice, at_several, lasts, ranked, tuned
from transconv.selection.tuning_db import machine, rows_of
from transconv.support import ScheduleError
from transconv.target import Target

TAKEN = 3  # schedules of a grouping that are tried for another number of samples


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


def with_same_bits(count: int, compute: Compute, target: Target, workload: Workload) -> list[Listed]:
    """The first ``count`` candidates that are grouped alike in every call; where the number of samples is
    the one size that is an argument, in every plan that is made for an example of it. Raises ScheduleError
    as ``shortlist``."""
    bands, words = _bands(compute, workload), registered_words()
    if len(bands) > 1:
        own, group = _Band(compute, workload, _lead(compute, workload)), _common(bands, target, words)
        choices = _spared(_within(group, own, bands, target, words), group, own, target)[:count]
        return [Listed(c.schedule, c.why, c.row is not None, c.is_close) for c in choices]
    found: dict[Schedule, Listed] = {}
    for listed in _for_all(count, compute, target, workload):
        schedule = _steady(listed.schedule, compute, target)
        if schedule is not None:
            found.setdefault(schedule, replace(listed, schedule=schedule))
    return [*found.values()]


def _for_all(count: int, compute: Compute, target: Target, workload: Workload) -> list[Listed]:
    """The shortlist of a computation that has one plan; where the number of samples is an argument, of
    those for few and for many, too, that first which takes the smallest multiple of the best ones' time,
    by their estimates, in the geometric mean."""
    each = for_batches(compute)
    if len(each) == 1:
        return shortlist(count, compute, target, workload)
    most = max(count, KEPT)
    found = {k.schedule: k for c in (*each, compute) for k in shortlist(most, c, target, workload)}
    legal = [s for s in found if why_not(s, compute, target) is None]
    price = dict.fromkeys(legal, 0.0)
    for c in each:
        us = {s: estimate(s, c, target) for s in legal}
        price = {s: price[s] + log(us[s] / min(us.values())) for s in legal}
    return [found[s] for s in sorted(legal, key=lambda s: (not found[s].tuned, price[s]))][:count]


def _steady(schedule: Schedule, compute: Compute, target: Target) -> Schedule | None:
    made = grouped_alike(schedule, compute)
    return made if made in (None, schedule) or why_not(made, compute, target) is None else None


# -- several plans with one grouping -----------------------------------------------------------------


class _Band(NamedTuple):
    """A computation for an example of the number of its samples, its workload, and the computation by
    which groupings are told: the longest of stride phases, which then may be one launch."""

    compute: Compute
    workload: Workload
    lead: Compute


Groups = dict[Hashable, list[Choice]]


def grouping(schedule: Schedule, compute: Compute) -> Hashable:
    """What decides the bits of a product's sums: the terms of a step, the order of steps, the parts, the
    unit and its instruction. Without a matrix unit the order of terms that are added one after another,
    else all of the schedule may; nothing if there are no terms, as in a stride phase that no position of a
    window has."""
    if not _terms(compute):
        return ()
    if schedule.unit != "mma" or compute.b is None:
        return chain(schedule, compute) or schedule
    order = [a for a in schedule.order.split(".") if a] or [x.name for x in compute.axes_of("K")]
    blocks = {a: b for b in schedule.blocks if b.extent > 1 for a in b.axes}
    loops = tuple(blocks.get(a, a) for a in order if a not in blocks or blocks[a].first == a)
    parts = (schedule.split_k, schedule.deal, schedule.merge)
    return (loops, *parts, is_small(schedule, compute), conversion(schedule, compute))


def chain(schedule: Schedule, compute: Compute) -> tuple[str, ...]:
    """The summed axes of a product whose terms are added one after another in registers, the slowest
    first: those of loops, then those whose positions are written out, of which the last is the slowest.
    Empty where terms are added in lanes or parts, where positions are written out in several steps, and
    where products are rounded, which those of 16 bits are not within the range of f32."""
    exact = compute.factors is not None and all(f.var.type.bits == 16 for f in compute.factors)
    own = [x.name for x in compute.axes_of("K") if x.size > 1 or x.extent is not None]
    blocks = {a: b for a in own if (b := schedule.block_of(a)) and b.extent > 1}
    whole = all(schedule.in_registers(b) and b.extent == compute.size(a) for a, b in blocks.items())
    parts = schedule.split_k > 1 or schedule.merge > 1 or schedule.late
    if schedule.unit != "fma" or not exact or not whole or parts:
        return ()
    order = [a for a in schedule.order.split(".") if a in own] or own
    return (*(a for a in order if a not in blocks), *(a for a in reversed(order) if a in blocks))


def conversion(schedule: Schedule, compute: Compute) -> str:
    """The words that decide as what the matrix unit takes operands, of 16 bits none: f32 is rounded to
    tf32 in copies and registers and cut in boxes, 8 bits may become f16."""
    if compute.a.tensor.dtype.bits == 16:
        return ""
    return " ".join(f"{word}={getattr(schedule, word)}" for word in ("via", "pack", "a", "b", "swap"))


def _bands(compute: Compute, workload: Workload) -> tuple[_Band, ...]:
    """The computation, or all stride phases, for each example of the number of samples."""
    each = [workload.with_batch(number) for number in in_bands(compute)]
    own = [c.part for c in workload.computations if c.phase and _terms(c)]
    parts = own if compute.phase and compute.part in own else [compute.part]
    return tuple(
        _Band(c, of, _lead(c, of))
        for of in each
        for c in of.computations
        if c.part in parts and _stored(c) == _stored(compute)
    )


def _stored(compute: Compute) -> list[str]:
    """The tensors that a computation stores, by which it is found among others."""
    return [w.view.tensor.name for w in compute.writes]


def _lead(compute: Compute, workload: Workload) -> Compute:
    phases = [c for c in workload.computations if c.phase]
    return max(phases, key=_terms) if compute.phase and _terms(compute) else compute


def _terms(compute: Compute) -> int:
    return prod(x.size for x in compute.axes_of("K"))


@lru_cache(maxsize=64)
def _grouped(band: _Band, target: Target, words: tuple[Word, ...]) -> Groups:
    """The choices for an example by their grouping, the first choice's first: what was measured for so
    many samples, if it is no worse for others, then by the estimates for several numbers."""
    compute, found = band.compute, dict[Schedule, Choice]()
    of_any = ranked(compute, target, band.workload)
    for choice in (*_measured(band, of_any, target), *of_any):
        schedule = _steady(choice.schedule, compute, target)
        if schedule is not None and schedule not in found:
            us = estimate(schedule, compute, target)
            found[schedule] = replace(choice, schedule=schedule, us=us)
    first = [s for s, c in found.items() if c.row is not None]
    rest = [s for s in found if s not in first]
    groups: Groups = {}
    for schedule in (*first, *at_several(rest, compute, target, COUNT)):  # half is the example's
        groups.setdefault(grouping(schedule, band.lead), []).append(found[schedule])
    return groups


def _measured(band: _Band, choices: list[Choice], target: Target) -> list[Choice]:
    """What tuning found for an example as a number."""
    compute, about = band.compute, band.workload.about(band.compute)
    assert compute.named is not None
    group = about.group(machine(target))
    rows, exact = rows_of(group) if group else [], compute.at(**compute.named.like)
    return [
        c
        for c in tuned(choices, exact, target, about, rows)
        if why_not(c.schedule, compute, target) is None
        and lasts(c.schedule, choices[0].schedule, compute, target)
    ]


def _within(
    group: Hashable, band: _Band, bands: Sequence[_Band], target: Target, words: tuple[Word, ...]
) -> list[Choice]:
    """The choices for an example that have a grouping: its own, else those for others, best first."""
    if own := _grouped(band, target, words).get(group):
        return own
    found = {}
    for other in bands:
        for choice in _grouped(other, target, words).get(group, ())[:TAKEN]:
            if why_not(choice.schedule, band.compute, target) is None:
                us = estimate(choice.schedule, band.compute, target)
                found[choice.schedule] = Choice(choice.schedule, us)
    return sorted(found.values(), key=lambda c: c.us)


def _spared(found: list[Choice], group: Hashable, band: _Band, target: Target) -> list[Choice]:
    """The choices, and the first ones with other warps and fewer buffers, the best first, which add up
    alike: where a kernel spills or is not right, another one is taken."""
    more: dict[Schedule, Choice] = {}
    for schedule in (c.schedule for c in found[:TAKEN]):
        warps, stages = schedule.warps, schedule.stages
        for words in ({"warps": 2 * warps}, {"warps": warps // 2}, {"stages": stages - 1}, {"stages": 1}):
            made = schedule.with_words(**words)
            if (
                min(made.warps, made.stages) > 0
                and grouping(made, band.lead) == group
                and all(made != c.schedule for c in found)
                and why_not(made, band.compute, target) is None
            ):
                more[made] = Choice(made, estimate(made, band.compute, target))
    return [*found, *sorted(more.values(), key=lambda c: c.us)]


@lru_cache(maxsize=256)
def _common(bands: tuple[_Band, ...], target: Target, words: tuple[Word, ...]) -> Hashable:
    """The grouping for all examples: that whose first schedules take the smallest multiple of the time of
    the first choices, by their estimates, in the geometric mean. Raises ScheduleError if there is none."""
    first = [next(iter(_grouped(band, target, words).values()))[0] for band in bands]

    def price(group: Hashable, all_of: bool) -> float:
        """Without ``all_of`` the least that it may be: other examples' schedules are not looked at."""
        total = 0.0
        for band, best in zip(bands, first, strict=True):
            known = _grouped(band, target, words).get(group)
            if not known and not all_of:
                continue
            chosen = next(iter(known or _within(group, band, bands, target, words)), None)
            if chosen is None:
                return inf
            measured = best.row is not None and chosen.row is None
            total += log(max(SLACK if measured else 1.0, chosen.us / best.us))
        return total

    groups = dict.fromkeys(g for band in bands for g in _grouped(band, target, words))
    least, found = inf, None
    for bound, group in sorted(((price(g, False), g) for g in groups), key=lambda pair: pair[0]):
        if bound >= least:
            break
        if (own := price(group, True)) < least:
            least, found = own, group
    if found is None:
        raise ScheduleError(f"no schedules of {bands[0].compute.name} add up alike for all batches")
    return found


def forget() -> None:
    """Clear the lists in memory."""
    forget_lists()
    _grouped.cache_clear()
    _common.cache_clear()
