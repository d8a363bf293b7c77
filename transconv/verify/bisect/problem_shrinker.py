"""Replaces a problem too large to interpret by a smaller one of the same kind.

Sizes are halved, the axis with the most tiles first, while the schedule stays legal: the small problem
then has the same stages, masks and tails as the large one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from transconv.conv import ConvProblem, Descriptor, print_descriptor
from transconv.errors import TransconvError
from transconv.schedule import Schedule
from transconv.verify.bisect.replay import ReplayedDirection

PRODUCTS = 1 << 24  # multiplications that the interpreter does in seconds, at all stages together
SLOW = 4  # as long takes one that is not part of a matrix product


def products(question: ReplayedDirection) -> int:
    """The multiplications of all launches, those of lanes beyond the end of an axis included; what
    is multiplied element by element counts ``SLOW`` times."""
    total = 0
    for compute, schedule in question.steps():
        work = prod(x.size for x in compute.axes if schedule.block_of(x.name) is None)
        for block in schedule.blocks:
            work *= -(-prod(compute.size(a) for a in block.axes) // block.extent) * block.extent
        total += work * (SLOW if schedule.unit == "fma" else 1)
    return total


def shrunk(question: ReplayedDirection, limit: int = PRODUCTS) -> tuple[ReplayedDirection, str]:
    """A question with at most about ``limit`` products, and in words how it differs; the schedule is
    that of the large problem where it is legal. Raises what choosing a schedule raises."""
    schedules = [c for a, c in question.steps() if a.does == "compute"]
    if not schedules or products(question) <= limit:
        return question, ""
    at = replace(question, schedule=question.schedule or (
        schedules[0] if len({*schedules}) == 1 else None))
    work = _legal_work(at)
    if work is None:
        at = replace(question, schedule=None)
        work = products(at)
    kept = at.schedule is not None
    while work > limit:
        near = list(_halved(at, schedules[0]))
        tried = near if at.schedule is None else [*near, *(replace(q, schedule=None) for q in near)]
        for smaller in tried:
            less = _legal_work(smaller)
            if less is not None and less < work:
                at, work = smaller, less
                break
        else:
            break
    if at.problem == question.problem:
        return at, ""
    remark = f"shrunk to {at.problem}, a size for the interpreter"
    if kept and at.schedule is None:
        remark += f"; {schedules[0]} is not legal there, heuristics choose anew"
    return at, remark


def _legal_work(question: ReplayedDirection) -> int | None:
    """Its products; None where its schedule is not legal."""
    try:
        return products(question) or None
    except TransconvError:
        return None


def _halved(question: ReplayedDirection, schedule: Schedule) -> Iterator[ReplayedDirection]:
    """The problem with one axis halved, that with the most tiles first."""
    p = question.problem
    tiles = {a: b.extent for b in schedule.blocks if len(b.axes) == 1 for a in b.axes}

    def extent(*names: str) -> int:
        return max([tiles.get(n, 1) for n in names])

    sizes: list[tuple[float, str, int, int]] = [
        (p.mb / extent("mb"), "mb", p.mb, extent("mb")),
        (p.g / extent("g"), "g", p.g, extent("g")),
        (p.icg / extent("ic"), "ic", p.icg, extent("ic")),
        (p.ocg / extent("oc"), "oc", p.ocg, extent("oc"))]
    for x, n in enumerate(p.spatial):
        step = extent(f"o{n}", f"i{n}", f"q{n}")
        sizes.append((p.o[x] / step, f"o{x}", p.o[x], step))
    for _, what, size, step in sorted(sizes, key=lambda s: -s[0]):
        rounded = -(-(size // 2) // step) * step
        for new in dict.fromkeys((rounded, -(-size // 2))):
            if 1 <= new < size and (made := _resized(p, what, new)) is not None:
                yield replace(question, problem=made)


def _resized(p: ConvProblem, what: str, size: int) -> ConvProblem | None:
    """The problem with another size along one axis; the same padding, types and memory order."""
    mb, g, icg, ocg, i, o = p.mb, p.g, p.icg, p.ocg, list(p.i), list(p.o)
    if what == "mb":
        mb = size
    elif what == "g":
        g = size
    elif what == "ic":
        icg = size
    elif what == "oc":
        ocg = size
    else:
        x = int(what[1:])
        i[x] -= (o[x] - size) * p.stride[x]
        o[x] = size
    if min(i) < 1:
        return None
    shape = print_descriptor(Descriptor(mb, g, g * icg, g * ocg, tuple(i), tuple(o), p.k, p.stride,
                                        p.dilation, p.pad_lo, ""))
    words = [w for w in str(p).split() if w.startswith(("dt=", "tag=", "math="))]
    try:
        return ConvProblem.parse(" ".join([shape, *words]))
    except TransconvError:  # a layout of explicit strides has no other size
        return None
