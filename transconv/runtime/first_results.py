"""Beside the compiler. The first result of a plan, made before a call asks for it."""

from __future__ import annotations

from typing import Any, TypeVar

from transconv.ir import Sizes
from transconv.runtime import trust
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
    return trust.run(plan, {w.name: w.filled(device, at) for at, w in enumerate(wanted)})


def _small(sizes: Sizes) -> dict[str, int]:
    """Sizes for which the kernel does little; the examples where these are not allowed."""
    found = {s.name: max(s.least, min(s.like, SIDE)) for s in sizes.each}
    return sizes.like if sizes.why_not(found) else found
