"""Replaces a workload too large to interpret by a smaller one of the same kind.

Sizes are halved, the axis with the most tiles first, while the schedule stays legal: the small workload
then has the same stages, masks and tails as the large one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from transconv.compute import Alone
from transconv.conv import ConvProblem, ConvWorkload
from transconv.errors import ComputeError, TransconvError
from transconv.schedule import Schedule
from transconv.verify.bisect.subject import BisectSubject
from transconv.verify.fuzz.compute_trial import ComputeTrial, smaller
from transconv.verify.fuzz.shrinker import resized

PRODUCTS = 1 << 24  # multiplications that the interpreter does in seconds, at all stages together
SLOW = 4  # as long takes one that is not part of a matrix product


def products(subject: BisectSubject) -> int:
    """The multiplications of all launches, those of lanes beyond the end of an axis included; what
    is multiplied element by element counts ``SLOW`` times."""
    total = 0
    for compute, schedule in subject.steps():
        compute = compute.at(**subject.sizes)
        work = prod(x.size for x in compute.axes if schedule.block_of(x.name) is None)
        for block in schedule.blocks:
            work *= -(-prod(compute.size(a) for a in block.axes) // block.extent) * block.extent
        total += work * (SLOW if schedule.unit == "fma" else 1)
    return total


def shrunk(subject: BisectSubject, limit: int = PRODUCTS) -> tuple[BisectSubject, str]:
    """A subject with at most about ``limit`` products, and in words how it differs; the schedule is
    that of the large workload where it is legal. Raises what choosing a schedule raises, ComputeError for
    a computation that cannot be made small."""
    schedules = [s for c, s in subject.steps() if c.does == "compute"]
    if subject.sizes or not schedules or products(subject) <= limit:
        return subject, ""
    at = replace(subject, schedule=subject.schedule or (
        schedules[0] if len({*schedules}) == 1 else None))
    work = _legal_work(at)
    if work is None:
        at = replace(subject, schedule=None)
        work = products(at)
    kept = at.schedule is not None
    while work > limit:
        near = list(_halved(at, schedules[0]))
        tried = near if at.schedule is None else [*near, *(replace(q, schedule=None) for q in near)]
        for small in tried:
            less = _legal_work(small)
            if less is not None and less < work:
                at, work = small, less
                break
        else:
            break
    if work > limit and isinstance(at.workload, Alone):
        raise ComputeError(f"{at.workload.title} has {work} products, and none that is smaller has a "
                           f"schedule; expected at most {limit}, smaller axes, or a --limit")
    if at.workload == subject.workload:
        return at, ""
    remark = f"shrunk to {_sizes(at)}, a size for the interpreter"
    if kept and at.schedule is None:
        remark += f"; {schedules[0]} is not legal there, heuristics choose anew"
    return at, remark


def _sizes(subject: BisectSubject) -> str:
    if isinstance(subject.workload, Alone):
        return " ".join(f"{x.name}={x.size}" for x in subject.workload.compute.axes)
    return str(subject.workload)


def _legal_work(subject: BisectSubject) -> int | None:
    """Its products; None where its schedule is not legal."""
    try:
        return products(subject) or None
    except TransconvError:
        return None


def _halved(subject: BisectSubject, schedule: Schedule) -> Iterator[BisectSubject]:
    """The workload with one axis halved, that with the most tiles, or the longest, first."""
    workload = subject.workload
    if isinstance(workload, Alone):
        trial = ComputeTrial(str(workload.compute), subject.target.name, str(subject.schedule or ""))
        yield from (replace(subject, workload=Alone(t.compute)) for t in smaller(trial))
        return
    assert isinstance(workload, ConvWorkload)
    p = workload.problem
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
            for made in _resized(p, what, new) if 1 <= new < size else ():
                yield replace(subject, workload=replace(workload, problem=made))


def _resized(p: ConvProblem, what: str, size: int) -> Iterator[ConvProblem]:
    """The problem with another size along one axis; the same padding, types and memory order."""
    if what == "g":
        return resized(p, g=size, ic=size * p.icg, oc=size * p.ocg)
    if what in ("mb", "ic", "oc"):
        return resized(p, **{what: size if what == "mb" else p.g * size})
    x, i, o = int(what[1:]), list(p.i), list(p.o)
    i[x] -= (o[x] - size) * p.stride[x]
    o[x] = size
    return resized(p, i=tuple(i), o=tuple(o)) if min(i) > 0 else iter(())
