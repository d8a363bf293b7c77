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
from transconv.verify.oracle import given_to, once_stored, pieces


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
    judging = _Judging(p, prop, mode, Epilogue.parse(epilogue), extra or {}, got.dtype)
    absolute = pieces(p, prop, a, b, absolute=True) if mode == "float" else itertools.repeat(None)
    for (at, want), magnitude in zip(pieces(p, prop, a, b), absolute, strict=False):
        judging.compare(at, want, None if magnitude is None else magnitude[1], got[at].double())
    return judging.concluded(chain)


class _Judging:
    """Compares a result with the answer piece by piece, and adds up what it finds. ``dtype``: the result's
    in torch."""

    def __init__(self, p: ConvProblem, prop: Prop, mode: str, epilogue: Epilogue,
                 extra: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        self.p, self.prop, self.epilogue, self.extra = p, prop, epilogue, extra
        self.floats, self.result = mode == "float", p.specs[prop.result].dtype
        self.whole = self.result.kind == "int"
        self.exact = not self.floats and epilogue.function.is_exact_of(_bits(p, prop))
        self.infinite = torch.finfo(dtype).max if self.result.range[1] == inf else inf
        self.share = limits.per_element(p, prop)
        self.found = Judgement()
        self.wrong = self.seen = self.kept = self.other = 0
        self.error = self.size = self.before = self.moved = 0.0

    def compare(self, at: slice, want: torch.Tensor, magnitude: torch.Tensor | None,
                have: torch.Tensor) -> None:
        """A piece of the sums, and of float data the sums of absolute products."""
        self.before += float(want.square().sum())
        off = torch.zeros_like(want) if magnitude is None else self.share * magnitude
        if self.epilogue:
            want, off = self.behind(at, want, off)
        once = once_stored(want, at, self.p, self.prop, self.epilogue, self.extra)
        same = (have == once) | (have.isnan() & want.isnan())
        goal = once if self.exact or not self.floats and not self.whole else want.clamp(*self.result.range)
        gap = torch.where(same, 0.0, (have - goal).abs().nan_to_num(nan=inf))
        bad = ~same
        if not self.exact:
            allowed, over = self.allowed(goal, off)
            bad = ~(same | (gap <= allowed) | over)
            gap = gap.where(~over, 0.0)
            if self.floats:
                used = float((gap / allowed).nan_to_num(posinf=0.0).max()) if not bad.any() else inf
                self.found.of_bound = max(self.found.of_bound, used)
                self.other += int((~same & (want != 0)).sum())
        self.wrong += int(bad.sum())
        self.seen += want.numel()
        self.kept += int((want != 0).sum())
        self.found.max_err = max(self.found.max_err, float(gap.max()))
        self.error += float(gap.square().sum())
        self.size += float(want.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).square().sum())

    def behind(self, at: slice, want: torch.Tensor,
               off: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums of a piece behind the epilogue, and how far off they may be."""
        values = given_to(self.epilogue, want, at, self.extra)
        if self.floats and not self.epilogue.function.jumps:
            self.moved += _moved(self.epilogue, values)
        eps = 2.0 ** -(23 if self.p.acc.bits == 32 else 52)
        want, off = with_error(self.epilogue.function, values, {"acc": off}, eps, not self.exact)
        if self.whole:  # an integer holds no NaN: 0 is stored instead
            want, off = (t.nan_to_num(nan=0.0, posinf=inf, neginf=-inf) for t in (want, off))
        return want, off

    def allowed(self, goal: torch.Tensor, off: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The allowed difference of each element, and where infinity may be right as well."""
        out = 0.0 if self.whole else self.result.spacing
        nearest = 0.5 if self.whole else self.result.tiny
        scale = goal.abs().nan_to_num(nan=0.0, posinf=0.0)
        room = scale if not self.floats else 3 * (1 + scale) if self.epilogue else 2 * scale
        allowed = off + out * room + (nearest + 1e-30) * (self.floats or self.whole)
        return allowed, scale + allowed > self.infinite

    def concluded(self, chain: int) -> Judgement:
        """The judgement of all pieces."""
        found, p, prop, function = self.found, self.p, self.prop, self.epilogue.function
        # An empty answer is reached in full; an epilogue that reads a tensor reaches every element.
        by_products = self.seen * (reached(p, prop) if not self.epilogue.operands else 1)
        found.nonzero = min(1.0, self.kept / by_products) if by_products else 1.0
        found.rms = (self.error / self.size) ** 0.5 if self.size else 0.0 if self.error == 0 else inf
        found.neighbours = self.other / self.kept if self.kept else 0.0
        if self.wrong:
            found.reason = f"{self.wrong} of {self.seen} elements are wrong"
        elif self.floats and not function.jumps and not self.epilogue.random:
            steeper = limits.steepened(self.moved, self.before, self.size)
            found.reason = _imprecise(found, limits.norm(p, prop, self.result, chain) * steeper,
                                      limits.neighbours(p, prop, self.result, chain), function.is_exact,
                                      self.kept)
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


def _imprecise(found: Judgement, norm: float, share: float, exact: bool, kept: int) -> str:
    """What is wrong with float data as a whole; a function that hardware approximates has neighbours."""
    if not found.rms <= norm:
        return f"the error in the 2-norm is {found.rms:.2e}, expected at most {norm:.2e}"
    if exact and found.neighbours * kept > share * kept + limits.FEW:
        return (f"{found.neighbours:.0%} of the elements are not the answer rounded once, "
                f"expected at most {share:.0%}")
    return ""
