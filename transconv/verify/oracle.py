"""The reference result in f64, and its comparison with a kernel's result.

It shares nothing with the kernels nor with cuDNN, and runs on any device: for every tap of the
filter the points that it joins are cut out of the tensors with slices and multiplied. Results come
in pieces of the batch, so that the f64 copies of large tensors never exist as a whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch

from transconv.compute import is_exact, table
from transconv.conv import ConvProblem, Prop
from transconv.verify import limits

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
            x, y = x.abs(), y.abs()
        made = convolve(p, prop, x, y)
        if prop is not Prop.BWD_W:
            yield at, made
        else:
            total = made if total is None else total + made
    if prop is Prop.BWD_W:
        empty = torch.zeros(p.shapes["wei"], dtype=torch.float64, device=a.device)
        yield slice(0, p.oc), empty if total is None else total


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


LEAST_NONZERO = 0.3  # a ReLU leaves half; what is below says little


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


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = table(
    lambda op: op.function() if op.activation else None)


def after(want: torch.Tensor, at: slice, epilogue: str,
          extra: dict[str, torch.Tensor]) -> torch.Tensor:
    """The epilogue applied to a piece of the answer."""
    for word in filter(None, epilogue.split("+")):
        if word == "bias":
            want = want + extra["bia"].double().view(-1, *[1] * (want.ndim - 2))
        elif word == "res":
            want = want + extra["res"][at].double()
        else:
            want = ACTIVATIONS[word](want)
    return want


def approximates(epilogue: str) -> bool:
    """Whether hardware gives its functions only to some bits."""
    return not is_exact(tuple(filter(None, epilogue.split("+"))))


def judge(p: ConvProblem, prop: Prop, a: torch.Tensor, b: torch.Tensor, got: torch.Tensor,
          mode: str, epilogue: str = "", extra: dict[str, torch.Tensor] | None = None,
          chain: int = 0) -> Judgement:
    """Compare a result with the answer. ``chain``: how many products the matrix unit adds to one
    accumulator.

    ``exact``: bit for bit after one rounding; where the epilogue has a function that the hardware
    approximates, within 32 eps_acc (1 + |y|) of it and one rounding. ``float``: each element within
    (n+4) eps_acc sum|a||b| + 2 eps_out |y| (with an epilogue 3 eps_out (1 + |y|)), and half the
    smallest f16 where that rounds, and the whole within the limits of limits.py.
    """
    found = Judgement()
    result = getattr(p, prop.result).dtype
    acc = limits.per_element(p, prop)
    out = result.spacing
    approximate = approximates(epilogue) * 32 * 2.0 ** (-23 if p.acc.bits == 32 else -52)
    wrong = seen = kept = other = 0
    error = size = before = 0.0
    absolute = pieces(p, prop, a, b, absolute=True) if mode == "float" else itertools.repeat(None)
    for (at, want), magnitude in zip(pieces(p, prop, a, b), absolute, strict=False):
        have = got[at].double()
        before += float(want.square().sum())
        want = after(want, at, epilogue, extra or {})
        if mode == "exact":
            near = approximate * (1 + want.abs())
            want = want.to(got.dtype).double()
        gap = (have - want).abs().nan_to_num(nan=float("inf"))
        if mode == "exact":
            bad = ~(gap <= near + out * want.abs()) if approximate else have != want
        else:
            assert magnitude is not None
            room = 3 * (1 + want.abs()) if epilogue else 2 * want.abs()
            allowed = acc * magnitude[1] + out * room + result.tiny + 1e-30
            share = gap / allowed
            found.of_bound = max(found.of_bound, float(share.max()))
            bad = ~(share <= 1)
            once = want.to(got.dtype).double()
            odd = (have != once) & (want != 0)
            other += int(odd.sum())
        wrong += int(bad.sum())
        seen += want.numel()
        kept += int((want != 0).sum())
        found.max_err = max(found.max_err, float(gap.max()))
        error += float(gap.square().sum())
        size += float(want.square().sum())
    # Of nothing, everything is told; a bias or a residual reaches every element.
    by_products = seen * (reached(p, prop) if not {"bias", "res"} & set(epilogue.split("+")) else 1)
    found.nonzero = min(1.0, kept / by_products) if by_products else 1.0
    found.rms = (error / size) ** 0.5 if size else 0.0 if error == 0 else float("inf")
    found.neighbours = other / kept if kept else 0.0
    if wrong:
        found.reason = f"{wrong} of {seen} elements are wrong"
    elif mode == "float":
        norm = limits.norm(p, prop, result, chain) * limits.flattened(epilogue, before, size)
        found.reason = _imprecise(found, norm,
                                  limits.neighbours(p, prop, result, chain), epilogue, kept)
    return found


def _imprecise(found: Judgement, norm: float, share: float, epilogue: str, kept: int) -> str:
    """What is wrong with float data as a whole; a function that hardware approximates has neighbours."""
    if not found.rms <= norm:
        return f"the error in the 2-norm is {found.rms:.2e}, expected at most {norm:.2e}"
    if not approximates(epilogue) and found.neighbours * kept > share * kept + limits.FEW:
        return (f"{found.neighbours:.0%} of the elements are not the answer rounded once, "
                f"expected at most {share:.0%}")
    return ""
