"""Which names and results of a computation depend on its tensors in a way that has a derivative."""

from __future__ import annotations

from collections.abc import Collection

from transconv.compute.autodiff.partial_derivatives import flows_from
from transconv.compute.compute import Compute
from transconv.compute.steps import Read, Write
from transconv.ir import Var


def reached(compute: Compute, of: Collection[str]) -> set[Var]:
    """The names whose values depend on floats of some tensors, other than by conditions."""
    found: set[Var] = set()
    for step in compute.steps:
        if isinstance(step, Read):
            found |= {step.var} if step.view.tensor.name in of and step.var.type.kind == "float" else set()
        elif not isinstance(step, Write) and flows_from(step.value) & found:
            found.add(step.var)
    return found


def reaches(compute: Compute) -> dict[str, frozenset[str]]:
    """For each stored tensor, those that it depends on in a way that has a derivative, or that is refused
    when one is asked for. Whole numbers, conditions and places of extremes have none."""
    found: dict[str, set[str]] = {w.view.tensor.name: set() for w in compute.writes}
    for name in {r.view.tensor.name for r in compute.reads}:
        moving = reached(compute, (name,))
        for w in compute.writes:
            if w.view.tensor.dtype.kind == "float" and flows_from(w.value) & moving:
                found[w.view.tensor.name].add(name)
    return {name: frozenset(tensors) for name, tensors in found.items()}
