"""Splits a plan in two: the copies of one tensor, which depend on nothing else, and the rest.

A tensor that does not change between calls needs to be copied into another order only once. The copies run
on request, and the rest of the plan takes their results as additional tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from transconv.ir import Tensor
from transconv.runtime.operands import torch_type
from transconv.runtime.plans import Plan, PlanStep

Kind = TypeVar("Kind", bound=Plan)


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a tensor. ``name``: its name in the plan; ``key``: equal for equal copies of equal
    tensors, also in different plans."""

    name: str
    key: str
    tensor: Tensor
    step: PlanStep

    def make(self, of: Any) -> Any:
        """The copy of a torch tensor, made on its device and the current stream, with zeros in gaps."""
        made = of.new_zeros(self.tensor.layout.span, dtype=torch_type(self.tensor))
        self.step.launcher.start([made if p == self.name else of for p in self.step.params])
        return made


@dataclass(frozen=True, slots=True, eq=False)
class WeightPrepack(Generic[Kind]):
    """``rest``: the launches of the plan after ``copies``, which are additional tensors, by their
    names."""

    copies: tuple[Copy, ...]
    rest: Kind


def apart(plan: Kind, name: str) -> WeightPrepack[Kind] | None:
    """A plan split into the copies of its tensor ``name`` and the rest; None if it does not copy it."""
    found: list[Copy] = []
    steps: list[PlanStep] = []
    cleared: Tensor | None = None  # cleared by a copy that is taken out, and so by the first launch left
    for step in plan.steps:
        given = not step.launcher.sizes  # others may have other sizes at each call
        if step.does == "pack" and given and len(step.params) == 2 and name in step.params:
            made = next(p for p in step.params if p != name)
            found.append(Copy(made, step.digest, plan.workspaces[made], step))
            cleared = cleared or step.zero
        else:
            steps.append(step)
    if not found or not steps or (cleared and steps[0].zero):
        return None
    if cleared:
        steps[0] = replace(steps[0], zero=cleared)
    copied = {c.name for c in found}
    spaces = {n: t for n, t in plan.workspaces.items() if n not in copied}
    return WeightPrepack(tuple(found), replace(plan, steps=tuple(steps), workspaces=spaces))
