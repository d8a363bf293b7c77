"""Beside the compiler. The first result of a plan, made before a call asks for it; for which sizes results
are first ones, where sizes are arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from transconv.ir import Sizes
from transconv.runtime import first_run_check
from transconv.runtime.operands import Wanted
from transconv.runtime.plans import Plan

Made = TypeVar("Made", bound=Plan)

SIDE = 32  # the longest of a size that is an argument, where the requirements allow it


def first_result(plan: Made, device: Any) -> Made:
    """Run a plan once on small integers, and return the plan that made the result: kernels are then loaded
    on ``device``, and checked if they are new to this machine (``trust``). Raises as ``trust.run``, and
    torch's error if there is no memory."""
    if plan.required is not None and plan.sizes is None:
        plan = plan.at(_small(plan.required.sizes))
    if plan.required is not None and plan.sizes is not None:
        wanted = plan.required.wanted(plan.sizes)
    else:
        wanted = tuple(map(Wanted.of, plan.workload.tensors))
    return first_run_check.run(plan, {w.name: w.filled(device, at) for at, w in enumerate(wanted)})


class FirstSizes:
    """Of kernels for any sizes, those whose results are compared: the first ones, ``FURTHER`` more, and
    then those in which a size has another number of bits, or other factors of 2: they cross the edge of a
    tile or need another mask. At most ``MOST``. ``seen``: what was compared, in that order."""

    FURTHER, MOST = 4, 16

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []
        self.met: set[tuple[int, int, int]] = set()

    def due(self, sizes: tuple[int, ...]) -> bool:
        """Whether a result of these sizes is compared."""
        if sizes in self.seen or len(self.seen) >= self.MOST:
            return False
        return len(self.seen) <= self.FURTHER or not _edges(sizes) <= self.met

    def done(self, sizes: tuple[int, ...]) -> None:
        """That it was."""
        self.seen.append(sizes)
        self.met |= _edges(sizes)


def _edges(sizes: Sequence[int]) -> set[tuple[int, int, int]]:
    """How many bits each size has, by its place, and how often 2 divides it, as far as masks tell."""
    return {(i, max(0, n - 1).bit_length(), min(n & -n, 128)) for i, n in enumerate(sizes)}


def _small(sizes: Sizes) -> dict[str, int]:
    """Sizes for which the kernel does little; the examples where these are not allowed."""
    found = {s.name: max(s.least, min(s.like, SIDE)) for s in sizes.each}
    return sizes.like if sizes.why_not(found) else found
