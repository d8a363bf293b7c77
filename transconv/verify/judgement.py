"""The comparison of a result with the reference in f64, and what it allows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import inf

import torch

from transconv.compute import in_torch, with_error
from transconv.conv import ConvProblem, Epilogue, Prop
from transconv.verify import limits
from transconv.verify.data import FEW_BITS, most, terms
from transconv.verify.oracle import approximates, given_to, once_stored, pieces


@dataclass(slots=True)
class Judgement:
    """How a result compares. ``max_err``: largest absolute difference; ``of_bound``: largest share
    of the allowed error that was used; ``rms``: relative error in the 2-norm; ``neighbours``: share of
    elements that are not the answer rounded once; ``nonzero``: share of nonzero elements of the answer,
    of those that any product reaches; ``reason``: empty if right."""

    max_err: float = 0.0
    of_bound: float = 0.0
    rms: float = 0.0
    neighbours: float = 0.0
    nonzero: float = 0.0
    reason: str = ""

    @property
    def right(self) -> bool:
        return not self.reason

    @property
    def telling(self) -> bool:
        """Whether enough of the answer differs from zero: a kernel that stores zeros, or sums too
        little, would be right where all is zero."""
        return self.nonzero >= LEAST_NONZERO


LEAST_NONZERO = 0.3  # a ReLU leaves half of the elements; a smaller share shows little


def reached(p: ConvProblem, prop: Prop) -> float:
    """The share of the result's elements that a product contributes to; strides that are larger
    than the filter, and filters that reach into padding alone, leave others zero by right."""
    share = 1.0
    for x in range(p.ndims):
        found: tuple[set[int], set[int], set[int]] = (set(), set(), set())
        for k in range(p.k[x]):
            shift, s = k * p.dilation[x] - p.pad_lo[x], p.stride[x]
            first, last = max(0, -(shift // s)), min(p.o[x] - 1, (p.i[x] - 1 - shift) // s)
            if first <= last:
                found[2].add(k)
                found[0].update(range(first, last + 1))
                found[1].update(range(first * s + shift, last * s + shift + 1, s))
        mine, size = {Prop.FWD: (found[0], p.o[x]), Prop.BWD_D: (found[1], p.i[x]),
                      Prop.BWD_W: (found[2], p.k[x])}[prop]
        share *= len(mine) / size
    return share


def judge(p: ConvProblem, prop: Prop, a: torch.Tensor, b: torch.Tensor, got: torch.Tensor,
          mode: str, epilogue: str = "", extra: dict[str, torch.Tensor] | None = None,
          chain: int = 0) -> Judgement:
    """Compare a result with the answer. ``chain``: how many products the matrix unit adds to one
    accumulator.

    ``exact``: bit for bit after one rounding; where the epilogue rounds, or has a function that the
    hardware approximates, within its own error and one rounding. ``float``: each element within (n+4)
    eps_acc sum|a||b|, carried through the epilogue with the error of each of its operations, + 2 eps_out
    |y| (with an epilogue 3 eps_out (1 + |y|)), and half the smallest f16 where that rounds, and the whole
    within the limits of limits.py.
    """
    found = Judgement()
    result = getattr(p, prop.result).dtype
    parsed = Epilogue.parse(epilogue)
    whole = result.kind == "int"
    out, eps = 0.0 if whole else result.spacing, 2.0 ** -(23 if p.acc.bits == 32 else 52)
    nearest = 0.5 if whole else result.tiny
    exact = mode == "exact" and parsed.function.is_exact_of(_bits(p, prop))
    infinite = torch.finfo(got.dtype).max if result.range[1] == float("inf") else float("inf")
    share = limits.per_element(p, prop)
    wrong = seen = kept = other = 0
    error = size = before = moved = 0.0
    absolute = pieces(p, prop, a, b, absolute=True) if mode == "float" else itertools.repeat(None)
    for (at, want), magnitude in zip(pieces(p, prop, a, b), absolute, strict=False):
        have = got[at].double()
        before += float(want.square().sum())
        off = torch.zeros_like(want) if magnitude is None else share * magnitude[1]
        if parsed:
            values = given_to(parsed, want, at, extra or {})
            if mode == "float" and not parsed.function.jumps:
                moved += _moved(parsed, values)
            want, off = with_error(parsed.function, values, {"acc": off}, eps, not exact)
            if whole:  # an integer holds no NaN: 0 is stored instead
                want, off = (t.nan_to_num(nan=0.0, posinf=inf, neginf=-inf) for t in (want, off))
        once = once_stored(want, at, p, prop, parsed, extra or {})
        same = (have == once) | (have.isnan() & want.isnan())
        goal = once if exact or mode == "exact" and not whole else want.clamp(*result.range)
        gap = torch.where(same, 0.0, (have - goal).abs().nan_to_num(nan=float("inf")))
        if exact:
            bad = ~same
        else:
            scale = goal.abs().nan_to_num(nan=0.0, posinf=0.0)
            room = scale if mode == "exact" else 3 * (1 + scale) if epilogue else 2 * scale
            allowed = off + out * room + (nearest + 1e-30) * (mode == "float" or whole)
            over = scale + allowed > infinite  # infinity may be right as well
            bad = ~(same | (gap <= allowed) | over)
            gap = gap.where(~over, 0.0)
        if mode == "float":
            found.of_bound = max(found.of_bound, float((gap / allowed).nan_to_num(posinf=0.0).max())
                                 if not bad.any() else float("inf"))
            other += int((~same & (want != 0)).sum())
        wrong += int(bad.sum())
        seen += want.numel()
        kept += int((want != 0).sum())
        found.max_err = max(found.max_err, float(gap.max()))
        error += float(gap.square().sum())
        size += float(want.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).square().sum())
    # An empty answer is reached in full; an epilogue that reads a tensor reaches every element.
    by_products = seen * (reached(p, prop) if not parsed.operands else 1)
    found.nonzero = min(1.0, kept / by_products) if by_products else 1.0
    found.rms = (error / size) ** 0.5 if size else 0.0 if error == 0 else float("inf")
    found.neighbours = other / kept if kept else 0.0
    if wrong:
        found.reason = f"{wrong} of {seen} elements are wrong"
    elif mode == "float" and not parsed.function.jumps and not parsed.random:
        norm = limits.norm(p, prop, result, chain) * limits.steepened(moved, before, size)
        found.reason = _imprecise(found, norm,
                                  limits.neighbours(p, prop, result, chain), epilogue, kept)
    return found


def _bits(p: ConvProblem, prop: Prop) -> int:
    """The bits of sums of exact data, whose signs are random."""
    if p.acc.kind == "int":
        largest = 255 * (FEW_BITS if p.specs[prop.result].dtype.bits < 32 else 255)
    else:
        largest = max(most(p.specs[name].dtype) for name in prop.operands) ** 2
    return int(4 * largest * max(1, terms(p, prop)) ** 0.5).bit_length()


def _moved(epilogue: Epilogue, values: dict[str, torch.Tensor]) -> float:
    """The squares of what an epilogue makes of sums that are off by ``limits.STEP`` of their size."""
    acc = values["acc"]
    if not acc.numel():
        return 0.0
    step = limits.STEP * float(acc.square().mean()) ** 0.5
    function = epilogue.function
    apart = in_torch(function, {**values, "acc": acc + step}) - in_torch(function, values)
    return float(apart.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).square().sum())


def _imprecise(found: Judgement, norm: float, share: float, epilogue: str, kept: int) -> str:
    """What is wrong with float data as a whole; a function that hardware approximates has neighbours."""
    if not found.rms <= norm:
        return f"the error in the 2-norm is {found.rms:.2e}, expected at most {norm:.2e}"
    if not approximates(epilogue) and found.neighbours * kept > share * kept + limits.FEW:
        return (f"{found.neighbours:.0%} of the elements are not the answer rounded once, "
                f"expected at most {share:.0%}")
    return ""
