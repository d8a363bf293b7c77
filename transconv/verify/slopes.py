"""Compares the gradients of a computation with differences of its results, both in f64.

    <v, f(x + h u) - f(x - h u)> / 2h  =  <gradient, u>        along a random direction u of each tensor,
                                                               for random gradients v of the results

The texts of the derivative are executed by their meaning, so that kernels, which are compared with that,
are not asked. Where a result jumps or is not finite there is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from transconv.compute import Compute, differentiate, execute, parse, reaches
from transconv.ir import Array
from transconv.verify.computation import ComputationCase

STEP = 1e-6  # of a difference
NEAR = 1e-5  # of the sum of the absolute terms of a gradient

Arrays = dict[str, Array]


def wide(compute: Compute) -> Compute:
    """The computation with every float tensor in f64."""
    lines = []
    for line in str(compute).splitlines():
        words = line.split(maxsplit=3)
        floats = words[0] == "tensor" and words[2][0] in "fb" and words[2] != "boolean"
        lines.append(" ".join([*words[:2], "f64", words[3]]) if floats else line)
    return parse("\n".join(lines))


def wrong_slope(compute: Compute, seed: int = 0) -> str:
    """What is wrong with the gradients of a computation; empty if nothing is, or if it has none. Raises
    ComputeError for an operation without a derivative."""
    compute = wide(compute)
    reach = {name: of for name, of in reaches(compute).items() if of}
    of = tuple(sorted(frozenset().union(*reach.values())))
    if not of:
        return ""
    draw = np.random.default_rng(seed)
    derivative = differentiate(compute, of, tuple(reach))
    given: Arrays = {**ComputationCase(compute, "float", seed).given}
    results = _executed(compute, given)
    v = {name: draw.standard_normal(results[name].shape) for name in reach}
    known = given | results | {own: v[name] for name, own in derivative.given.items()}
    for text in derivative.computes:
        known |= _executed(wide(text), known)
    for name in of:
        gradient = known[derivative.of[name]] if name in derivative.of else np.zeros(given[name].shape)
        u = ComputationCase(compute, "float", seed + 1).given[name]
        ends = [_executed(compute, given | {name: given[name] + h * u}) for h in (STEP, -STEP)]
        slope = sum(float(np.nan_to_num(v[r] * (ends[0][r] - ends[1][r])).sum()) for r in v) / (2 * STEP)
        size = max(1.0, float(np.abs(gradient * u).sum()))
        whole = all(np.isfinite(e[r][~np.isnan(results[r])]).all() for e in ends for r in v)
        told = float((gradient * u).sum())
        if whole and not abs(slope - told) <= NEAR * size:
            return f"the slope along {name} is {slope:.6g} by differences, {told:.6g} by its gradient"
    return ""


def _executed(compute: Compute, given: Mapping[str, Array]) -> Arrays:
    stored = {w.view.tensor.name for w in compute.writes}
    read = {t.name: given[t.name] for t in compute.tensors if t.name not in stored}
    return {name: answer.value for name, answer in execute(compute, read).items()}
