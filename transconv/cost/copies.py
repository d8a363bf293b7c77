"""What the copies of a schedule with the word ``pack`` take, before and after its main kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import gcd, prod
from typing import cast

from transconv.compute import Compute, touched
from transconv.cost.fetches import ASYNC, in_rows
from transconv.cost.issue import ACCESS
from transconv.cost.symbolic_cost import Number, larger
from transconv.ir import ONE, Expr, value_at
from transconv.schedule import Schedule, Scheduled, share
from transconv.target import Constants, Target

STRAY_NS = 1.0  # to store a lane's one or two bytes beside those of others (x3d_m_dw3_54 on an H100)
UNEVEN_NS = 3.0  # to store a few bytes of a row whose length no longer access divides (4 copies, H100)


def copied(compute: Compute, schedule: Schedule, target: Target) -> float:
    """Microseconds of the copies of a schedule; where sizes are arguments, for the examples."""
    grouped = Scheduled(compute, schedule, target).grouped
    return _beside(grouped, schedule.pack, schedule.split_k > 1, target)


@lru_cache(maxsize=512)
def _beside(compute: Compute, pack: str, split: bool, target: Target) -> float:
    counts, us = copied_at(compute, Schedule(pack=pack, split_k=1 + split), target)
    like = compute.named.like if compute.named else {}
    return cast(float, us(*[value_at(n, like) for n in counts]))


def copied_at(compute: Compute, schedule: Schedule,
              target: Target) -> tuple[tuple[Expr, ...], Callable[..., Number]]:
    """The elements of those copies whose sizes are arguments, as expressions of these; and of their values
    the microseconds of all copies, times the computation's share of them."""
    grouped = Scheduled(compute, schedule, target).grouped
    return _copied_at(grouped, schedule.pack, schedule.split_k > 1, schedule.unit, target)


@lru_cache(maxsize=512)  # many schedules of a computation have the same copies
def _copied_at(compute: Compute, pack: str, split: bool, unit: str,
               target: Target) -> tuple[tuple[Expr, ...], Callable[..., Number]]:
    made = Scheduled(compute, Schedule(pack=pack, split_k=1 + split, unit=unit), target)
    part, each = share(compute), made.copies
    sized = [c for c in each if c.named is not None]
    fixed = sum(cast(float, copying(c, target)) for c in each if c.named is None)

    def us(*counts: Number) -> Number:
        total: Number = fixed
        for copy, elements in zip(sized, counts, strict=True):
            total = total + copying(copy, target, elements=elements)
        return total * part

    return tuple(prod(c.c.tensor.extents, start=ONE) for c in sized), us


def copying(copy: Compute, target: Target, constants: Constants | None = None,
            elements: Number | None = None) -> Number:
    """Microseconds of a copy into another order: bytes read and written, and its launch. Rows of bytes
    that begin anywhere are stored one or two bytes at a time; those of odd lengths in runs that divide the
    length. ``elements``: how many there are, if not those of the copy's examples."""
    constants = constants or target.rates.triton
    a, c = copy.a.tensor, copy.c.tensor
    moved: Number
    if elements is None:
        moved, elements = sum(touched(v, copy) for v in (copy.a, copy.c)), prod(c.shape)
    else:
        moved = elements * (a.dtype.bytes + c.dtype.bytes)
    us = moved / (target.bandwidth_gbs * 1e3 * constants.memory_share)
    if a.dtype.bits == 8 and (each := in_rows(copy)) < ASYNC:
        us = larger(us, elements / each * STRAY_NS / target.sms / 1e3)
    if a.dtype.bits == 8 and (each := gcd(copy.axes[-1].size, ACCESS)) < ACCESS:
        us = larger(us, elements / each * UNEVEN_NS / target.sms / 1e3)
    return constants.copy_us + us
