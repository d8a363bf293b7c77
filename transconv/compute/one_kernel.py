"""Whether one kernel can compute a computation."""

from __future__ import annotations

from functools import lru_cache

from transconv.compute.analysis.statistics import why_not_reduced
from transconv.compute.analysis.store_conflicts import why_not_stored
from transconv.compute.compute import Compute
from transconv.compute.steps import Reduction


@lru_cache(maxsize=1024)
def why_not_lowered(compute: Compute) -> str | None:
    """None if one kernel can compute this, else the reason."""
    for step in compute.steps:
        if isinstance(step, Reduction) and {*step.axes} != {*compute.reduced}:
            other = next(a for a in compute.reduced if a not in step.axes)
            return (f"{step.name} is reduced over {' '.join(step.axes)}, another one over {other}; one "
                    "kernel reduces over the same axes")
    inside = {s for sweep in compute.sweeps.each for s in sweep.steps}
    for x in compute.axes:
        if x.size == 1 and x.extent is None:
            continue  # one position, whatever the coordinates say
        for write in compute.writes:
            if x.name in compute.reduced and write not in inside or write in compute.statistics:
                continue
            if not any(x.name in compute.roots(d.coord) for d in write.view.dims):
                said = "has one value for each" if x.name in compute.reduced else "is not reduced"
                return (f"{write.view.tensor.name} has one place for all of {x.name}, which {said}; "
                        f"expected {x.name} in its coordinates")
    return why_not_stored(compute) or why_not_reduced(compute)
