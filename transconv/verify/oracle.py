"""The reference result in f64, and its comparison with a kernel's result.

It shares no code with the kernels or cuDNN, and runs on any device: for every tap of the
filter the points that it joins are cut out of the tensors with slices and multiplied. Results come
in pieces of the batch, so that the f64 copies of large tensors never exist as a whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, prod

import torch

from transconv.compute import in_torch, with_error
from transconv.conv import ConvProblem, Epilogue, Prop
from transconv.ir import DType, chances, one_of_two
from transconv.verify import limits
from transconv.verify.data import FEW_BITS, most, terms, torch_dtype

PIECE = 1 << 26  # elements of a piece of the batch, both tensors together


def tap_slices(p: ConvProblem) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...],
                                                 tuple[slice, ...]]]:
    """Every tap that meets the input: (tap, output points it reaches, input points it reads)."""
    for tap in itertools.product(*map(range, p.k)):
        outs, ins = [], []
        for x, k in enumerate(tap):
            shift, s = k * p.dilation[x] - p.pad_lo[x], p.stride[x]
            first = max(0, -(shift // s))
            count = min(p.o[x] - 1, (p.i[x] - 1 - shift) // s) - first + 1
            if count <= 0:
                break
            start = first * s + shift
            outs.append(slice(first, first + count))
            ins.append(slice(start, start + (count - 1) * s + 1, s))
        else:
            yield tap, tuple(outs), tuple(ins)


def _grouped(t: torch.Tensor, g: int) -> torch.Tensor:
    """(n, c, *points) -> (g, n, *points, c/g) in f64; without channels in groups of one."""
    n, c = t.shape[:2]
    if c == g:
        return t.double().movedim(1, -1).contiguous().unsqueeze(0)  # (1, n, *points, g)
    split = t.double().reshape(n, g, c // g, *t.shape[2:])
    return split.movedim(1, 0).movedim(2, -1).contiguous()


def _ungrouped(t: torch.Tensor, g: int, depthwise: bool) -> torch.Tensor:
    """Back to (n, c, *points)."""
    if depthwise:
        return t[0].movedim(-1, 1)
    back = t.movedim(-1, 2).movedim(0, 1)  # (n, g, c/g, *points)
    return back.reshape(back.shape[0], g * back.shape[2], *back.shape[3:])


def convolve(p: ConvProblem, prop: Prop, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One direction in f64, from its operands in logical shape (see ``Prop.operands``)."""
    depthwise = p.icg == p.ocg == 1 and p.g > 1
    outer = (1,) if depthwise else (p.g,)
    device = a.device
    n = a.shape[0]
    wide = (p.g, p.g) if depthwise else (p.icg, p.ocg)

    def zeros(points: tuple[int, ...], channels: int) -> torch.Tensor:
        return torch.zeros((*outer, n, *points, channels), dtype=torch.float64, device=device)

    def weights(w: torch.Tensor) -> torch.Tensor:
        return w.double().reshape(p.g, p.ocg, p.icg, *p.k)

    if prop is Prop.FWD:
        src, wei, dst = _input(a, p, depthwise), weights(b), zeros(p.o, wide[1])
    elif prop is Prop.BWD_D:
        src, wei, dst = zeros(p.i, wide[0]), weights(b), _input(a, p, depthwise)
    else:
        src, dst = _input(a, p, depthwise), _input(b, p, depthwise)
        wei = torch.zeros((p.g, p.ocg, p.icg, *p.k), dtype=torch.float64, device=device)
    for tap, outs, ins in tap_slices(p):
        here: tuple[slice | int, ...] = (slice(None), slice(None), slice(None), *tap)
        s_at, d_at = (slice(None), slice(None), *ins), (slice(None), slice(None), *outs)
        if prop is Prop.BWD_W:
            x, y = src[s_at].reshape(*outer, -1, wide[0]), dst[d_at].reshape(*outer, -1, wide[1])
            if depthwise:
                wei[here] = (x * y).sum(1).reshape(p.g, 1, 1)
            else:
                wei[here] = (x.mT @ y).mT
        elif depthwise:
            w = wei[here].reshape(p.g)
            if prop is Prop.FWD:
                dst[d_at] += src[s_at] * w
            else:
                src[s_at] += dst[d_at] * w
        elif prop is Prop.FWD:
            part = src[s_at].reshape(p.g, -1, p.icg) @ wei[here].mT
            dst[d_at] += part.reshape(dst[d_at].shape)
        else:
            part = dst[d_at].reshape(p.g, -1, p.ocg) @ wei[here]
            src[s_at] += part.reshape(src[s_at].shape)
    if prop is Prop.BWD_W:
        return wei.reshape(p.oc, p.icg, *p.k)
    return _ungrouped(dst if prop is Prop.FWD else src, p.g, depthwise)


def _input(t: torch.Tensor, p: ConvProblem, depthwise: bool) -> torch.Tensor:
    if depthwise or p.g != t.shape[1]:
        return _grouped(t, p.g)
    # One channel a group on this side only: the group axis must stay in front.
    return t.double().movedim(1, 0).unsqueeze(-1).contiguous()


def pieces(p: ConvProblem, prop: Prop, a: torch.Tensor, b: torch.Tensor, size: int = PIECE,
           absolute: bool = False) -> Iterator[tuple[slice, torch.Tensor]]:
    """The answer piece by piece along its first dimension; the weight gradient in one. With
    ``absolute`` the sums of absolute products."""
    image = p.ic * prod(p.i) + p.oc * prod(p.o)
    step = max(1, size // max(1, image))
    total: torch.Tensor | None = None
    for start in range(0, p.mb, step):
        at = slice(start, min(p.mb, start + step))
        x, y = a[at], b[at] if prop is Prop.BWD_W else b
        if absolute:
            x, y = (t.double().abs() if t.itemsize == 1 else t.abs() for t in (x, y))
        made = convolve(p, prop, x, y)
        if prop is not Prop.BWD_W:
            yield at, made
        else:
            total = made if total is None else total + made
    if prop is Prop.BWD_W:
        empty = torch.zeros(p.shapes["wei"], dtype=torch.float64, device=a.device)
        yield slice(0, p.oc), empty if total is None else total


def stored(want: torch.Tensor, result: DType, acc: DType) -> torch.Tensor:
    """f64 values as a result of a type holds them, in f64: rounded once (sums of integers are f32 before
    they become shorter floats), in the range of integers and of 8-bit floats. NaN is 0 as an integer."""
    if result.kind == "int":
        return want.nan_to_num(nan=0.0, posinf=inf, neginf=-inf).round().clamp(*result.range)
    if acc.kind == "int" and result.bits < 32:
        want = want.float()
    return want.clamp(*result.range).to(torch_dtype(result)).double()


def once_stored(want: torch.Tensor, at: slice, p: ConvProblem, prop: Prop, epilogue: Epilogue,
                extra: dict[str, torch.Tensor]) -> torch.Tensor:
    """A piece of the values behind an epilogue, as the result holds it."""
    result = p.specs[prop.result].dtype
    if not epilogue.random:
        return stored(want, result, p.acc)
    first = (at.start or 0) * prod(p.shapes[prop.result][1:])
    return stored_at_random(want, result, extra["seed"], first)


def stored_at_random(want: torch.Tensor, result: DType, seed: torch.Tensor, first: int) -> torch.Tensor:
    """f64 values as a result that is rounded at random holds them. ``first``: the number of the first
    element, counted in the whole result."""
    at = torch.arange(want.numel(), device=want.device).view(want.shape) + first
    made: torch.Tensor = one_of_two(want.float().double(), chances(seed.flatten()[0].long(), at), result,
                                    torch)
    return made.clamp(*result.range).to(torch_dtype(result)).double()


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


def given_to(epilogue: Epilogue, want: torch.Tensor, at: slice,
             extra: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The arguments of an epilogue's function for a piece of the answer."""
    found = epilogue.in_torch(want, extra)
    return {n: t[at] if n not in ("acc", "bia") and t.shape[0] > 1 else t for n, t in found.items()}


def after(want: torch.Tensor, at: slice, epilogue: str,
          extra: dict[str, torch.Tensor]) -> torch.Tensor:
    """The epilogue applied to a piece of the answer."""
    parsed = Epilogue.parse(epilogue)
    return in_torch(parsed.function, given_to(parsed, want, at, extra)) if parsed else want


def approximates(epilogue: str) -> bool:
    """Whether kernels compute its functions only to some bits."""
    return not Epilogue.parse(epilogue).function.is_exact


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
