"""A result compared with the reference in f64: what a rounding may take of each element and of the whole.

Sums of integers are never rounded, so float data are needed to find roundings that should not be
there. A single element shows little, because one rounding too many is as large as the necessary one.
Two numbers over all elements show it: the error in the 2-norm, and the share of elements that are not
the answer rounded once.

The reference shares no code with the kernels or cuDNN, and runs on any device: for every tap of the filter
the points that it joins are cut out of the tensors with slices and multiplied. Results come in pieces of
the batch, so that the f64 copies of large tensors never exist as a whole. Each piece is computed a second
time by torch.nn.functional and its gradients, which know nothing of this package; the two must agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf, prod

import torch

from transconv.compute import SHORT, in_torch, with_error
from transconv.conv import ConvProblem, Epilogue, Prop
from transconv.ir import EXACT_TERMS, DType, chances, f32, one_of_two
from transconv.verify.data import FEW_BITS, most, terms, torch_dtype


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
        mine, size = {
            Prop.FWD: (found[0], p.o[x]),
            Prop.BWD_D: (found[1], p.i[x]),
            Prop.BWD_W: (found[2], p.k[x]),
        }[prop]
        share *= len(mine) / size
    return share


def judge(
    p: ConvProblem,
    prop: Prop,
    a: torch.Tensor,
    b: torch.Tensor,
    got: torch.Tensor,
    mode: str,
    epilogue: str = "",
    extra: dict[str, torch.Tensor] | None = None,
    chain: int = 0,
) -> Judgement:
    """Compare a result with the answer. ``chain``: how many products the matrix unit adds to one
    accumulator.

    ``exact``: bit for bit after one rounding; where the epilogue rounds, or has a function that the
    hardware approximates, within its own error and one rounding. ``float``: each element within (n+4)
    eps_acc sum|a||b|, carried through the epilogue with the error of each of its operations, + 2 eps_out
    |y| (with an epilogue 3 eps_out (1 + |y|)), and half the smallest f16 where that rounds, and the whole
    within the limits of judgement.py."""
    judging = _Judging(p, prop, mode, Epilogue.parse(epilogue), extra or {}, got.dtype)
    absolute = pieces(p, prop, a, b, absolute=True) if mode == "float" else itertools.repeat(None)
    for (at, want), magnitude in zip(pieces(p, prop, a, b), absolute, strict=False):
        judging.compare(at, want, None if magnitude is None else magnitude[1], got[at].double())
    return judging.concluded(chain)


class _Judging:
    """Compares a result with the answer piece by piece, and adds up what it finds. ``dtype``: the result's
    in torch."""

    def __init__(
        self,
        p: ConvProblem,
        prop: Prop,
        mode: str,
        epilogue: Epilogue,
        extra: dict[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        self.p, self.prop, self.epilogue, self.extra = p, prop, epilogue, extra
        self.floats, self.result = mode == "float", p.specs[prop.result].dtype
        self.whole = self.result.kind == "int"
        self.exact = not self.floats and epilogue.function.is_exact_of(_bits(p, prop))
        self.infinite = torch.finfo(dtype).max if self.result.range[1] == inf else inf
        self.share = per_element(p, prop)
        self.found = Judgement()
        self.wrong = self.seen = self.kept = self.other = 0
        self.error = self.size = self.before = self.moved = 0.0

    def compare(
        self, at: slice, want: torch.Tensor, magnitude: torch.Tensor | None, have: torch.Tensor
    ) -> None:
        """A piece of the sums, and of float data the sums of absolute products."""
        self.before += float(want.square().sum())
        off = torch.zeros_like(want) if magnitude is None else self.share * magnitude
        if self.epilogue:
            want, off = self.behind(at, want, off)
        once = once_stored(want, at, self.p, self.prop, self.epilogue, self.extra)
        same = (have == once) | (have.isnan() & want.isnan())
        saturates = not self.exact and (self.floats or self.whole)
        goal = want.clamp(*self.result.range) if saturates else once
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

    def behind(
        self, at: slice, want: torch.Tensor, off: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums of a piece after the epilogue, and how far off they may be."""
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
            steeper = steepened(self.moved, self.before, self.size)
            found.reason = _imprecise(
                found,
                norm(p, prop, self.result, chain) * steeper,
                neighbours(p, prop, self.result, chain),
                function.is_exact,
                self.kept,
            )
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
    step = STEP * float(acc.square().mean()) ** 0.5
    function = epilogue.function
    apart = in_torch(function, {**values, "acc": acc + step}) - in_torch(function, values)
    return float(apart.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).square().sum())


def _imprecise(found: Judgement, norm: float, share: float, exact: bool, kept: int) -> str:
    """What is wrong with float data as a whole; a function that hardware approximates has neighbours."""
    if not found.rms <= norm:
        return f"the error in the 2-norm is {found.rms:.2e}, expected at most {norm:.2e}"
    if exact and found.neighbours * kept > share * kept + FEW:
        return (
            f"{found.neighbours:.0%} of the elements are not the answer rounded once, "
            f"expected at most {share:.0%}"
        )
    return ""


# Both operands of a product are rounded to tf32, which may take 2^-11 of each.
TF32 = 2.0**-10
# In the 2-norm rounded operands come to 0.29 of that (2.9e-4) and operands that are cut to 0.77 of it.
NEAREST_TF32 = TF32 / 2
# Numbers in a result and in each operand from which on a 2-norm is that of a distribution.
MANY = 256
# Where a sum lies close to the middle of two numbers, its own error decides: so many elements may
# be neighbours of the answer. Rounded twice are a fifth of them or more.
NEIGHBOURS = 0.1
STEP = 2.0**-10  # by which sums are moved to see how steep an epilogue is
WHOLE = 0.5  # of a result
SLACK = 1.5  # errors are not as even as that
FEW = 2  # elements that may be, in the smallest results


def is_tf32(p: ConvProblem, prop: Prop) -> bool:
    """Whether operands are rounded to tf32."""
    operands = [p.specs[name].dtype for name in prop.operands]
    return p.math == "tf32" and f32 in operands and p.acc is f32


def per_element(p: ConvProblem, prop: Prop) -> float:
    """The share of the sum of absolute products that an element may be off before it is stored."""
    if is_tf32(p, prop):
        return TF32
    if p.acc.kind == "int":
        return 0.0
    if chain := short_chain(p, prop):
        return SHORT * chain
    return (terms(p, prop) + 4) * 2.0 ** -(23 if p.acc.bits == 32 else 52)


def short_chain(p: ConvProblem, prop: Prop) -> float:
    """The steps of 32 terms of 8-bit floats in one accumulator of some 13 bits; 0 for other products."""
    if any(p.specs[n].dtype.bits > 8 or p.specs[n].dtype.kind != "float" for n in prop.operands):
        return 0.0
    count = terms(p, prop)
    return max(1.0, (min(count, EXACT_TERMS) if p.math == "ieee" else count) / 32)


def drift(p: ConvProblem, prop: Prop, chain: int) -> float:
    """How far sums in the accumulator are off, relative to them: a random walk of as many roundings as
    terms, and what the matrix unit cuts off in a ``chain`` of additions, which is between 2^-26 and 2^-25
    each (transconv/selection/proposals/tile_shapes.py)."""
    if p.acc.bits != 32:
        return float(terms(p, prop) ** 0.5 * 2.0**-52)
    if short := short_chain(p, prop):
        return float(short**0.5 * SHORT / 2)
    return float(terms(p, prop) ** 0.5 * 2.0**-23 + chain * 2.0**-25)


def norm(p: ConvProblem, prop: Prop, result: DType, chain: int = 0) -> float:
    """The largest relative error in the 2-norm."""
    if result.kind == "int":  # its rounding is no share of a number
        return inf
    if result.digits >= p.acc.digits and min(_numbers(p, name) for name in p.specs) < MANY:
        return inf  # one sum that comes to nothing decides
    own = max(2.0**-result.digits, 2e-6 if result.digits <= 24 else 1e-14)
    return max(own, is_tf32(p, prop) * NEAREST_TF32) + drift(p, prop, chain)


def steepened(moved: float, before: float, after: float) -> float:
    """How many times as large the relative error of a result may be as that of its sums, by sums of
    squares: ``before`` of the sums, ``after`` of what the epilogue makes of them, ``moved`` of how far it
    is off if they are off by ``STEP``. What flattens sums, as tanh does, leaves the small ones, whose
    errors are as large. Infinite where the result is off by as much as it is: a few sums nearer to a pole
    than ``STEP`` are most of it then, as of 1/x, and how far they may be off is said of each element."""
    if not (after and before):
        return 1.0
    apart = (moved / after) ** 0.5
    return inf if apart > WHOLE else max(1.0, SLACK * apart / STEP)


def neighbours(p: ConvProblem, prop: Prop, result: DType, chain: int = 0) -> float:
    """The largest share of elements that are not the answer rounded once: 1 where what is rounded
    before the sum, or the sum itself, is as wide as the result."""
    if result.digits >= p.acc.digits or is_tf32(p, prop):
        return 1.0
    return NEIGHBOURS + drift(p, prop, chain) * 2.0**result.digits


def _numbers(p: ConvProblem, name: str) -> int:
    """How many numbers a tensor holds: of dimensions that are expanded one."""
    strides = p.specs[name].layout.strides() or (1,) * (p.ndims + 2)
    return prod(n for n, s in zip(p.shapes[name], strides, strict=True) if s)


CONVOLUTIONS: dict[int, Callable[..., torch.Tensor]] = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
MOST_PRODUCTS = 1 << 34  # that torch computes in f64 in a second on a GPU
PIECE = 1 << 26  # elements of a piece of the batch, both tensors together


def weight(p: ConvProblem) -> float:
    """An upper estimate of the GPU memory that a check needs, in bytes."""
    image = p.ic * prod(p.i) + p.oc * prod(p.o)
    piece = min(p.mb * image, max(PIECE, image))
    # Filling takes several times the tensors, comparing six f64 copies of a piece.
    return 10.0 * p.bytes_moved() + 6 * 8 * piece + 2**29


def tap_slices(p: ConvProblem) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...], tuple[slice, ...]]]:
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


class AnswersDiffer(RuntimeError):
    """The slices and torch's own convolution give two answers: one of them is wrong."""


def answered_by(p: ConvProblem) -> tuple[str, ...]:
    """What computes the answers of a problem. Torch takes no tensor without elements."""
    least = min(*(n for shape in p.shapes.values() for n in shape))
    torch_too = p.ndims in CONVOLUTIONS and least > 0 and p.macs_padded <= MOST_PRODUCTS
    return ("slices", "torch") if torch_too else ("slices",)


def told_answers(names: Iterable[str]) -> str:
    """The same in words."""
    said = {"slices": "sums over slices in f64", "torch": "torch.nn.functional in f64"}
    return " and ".join(said[name] for name in names)


def convolve_in_torch(p: ConvProblem, prop: Prop, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The same as ``convolve`` by torch's function and its gradients, in f64."""
    around = [n for lo, hi in zip(p.pad_lo[::-1], p.pad_hi[::-1], strict=True) for n in (lo, hi)]
    src, wei, flow = {Prop.FWD: (a, b, None), Prop.BWD_D: (None, b, a), Prop.BWD_W: (a, None, b)}[prop]

    def operand(given: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
        if given is not None:
            return given.detach().double().reshape(shape)
        return torch.zeros(shape, dtype=torch.float64, device=a.device, requires_grad=True)

    x, w = operand(src, (a.shape[0], p.ic, *p.i)), operand(wei, (p.oc, p.icg, *p.k))
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        pad = torch.nn.functional.pad
        padded = pad(pad(x, [max(0, n) for n in around]), [min(0, n) for n in around])
        made = CONVOLUTIONS[p.ndims](padded, w, None, p.stride, 0, p.dilation, p.g)
        if flow is None:
            return made
        return torch.autograd.grad(made, w if prop is Prop.BWD_W else x, flow.detach().double())[0]


def agree(p: ConvProblem, prop: Prop, a: torch.Tensor, b: torch.Tensor, made: torch.Tensor) -> None:
    """Raise AnswersDiffer where torch's answer is not ``made``: equal but for the order of additions."""
    if not made.numel() or "torch" not in answered_by(p):
        return
    other = convolve_in_torch(p, prop, a, b)
    terms = p.macs_padded / max(1, prod(p.shapes[prop.result]))
    most = float(a.double().abs().amax() * b.double().abs().amax()) * (terms + 1) * 2.0**-50
    wrong = int(((made - other).abs() > most).sum()) if made.shape == other.shape else made.numel()
    if wrong:
        raise AnswersDiffer(
            f"{wrong} of {made.numel()} elements of the answer are not those of "
            f"torch.nn.functional.conv{p.ndims}d in f64"
        )


def _input(t: torch.Tensor, p: ConvProblem, depthwise: bool) -> torch.Tensor:
    if depthwise or p.g != t.shape[1]:
        return _grouped(t, p.g)
    # One channel a group on this side only: the group axis must stay in front.
    return t.double().movedim(1, 0).unsqueeze(-1).contiguous()


def pieces(
    p: ConvProblem, prop: Prop, a: torch.Tensor, b: torch.Tensor, size: int = PIECE, absolute: bool = False
) -> Iterator[tuple[slice, torch.Tensor]]:
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
        if not absolute:
            agree(p, prop, x, y, made)
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


def once_stored(
    want: torch.Tensor,
    at: slice,
    p: ConvProblem,
    prop: Prop,
    epilogue: Epilogue,
    extra: dict[str, torch.Tensor],
) -> torch.Tensor:
    """A piece of the values after an epilogue, as the result holds it."""
    result = p.specs[prop.result].dtype
    if not epilogue.random:
        return stored(want, result, p.acc)
    first = (at.start or 0) * prod(p.shapes[prop.result][1:])
    return stored_at_random(want, result, extra["seed"], first)


def stored_at_random(want: torch.Tensor, result: DType, seed: torch.Tensor, first: int) -> torch.Tensor:
    """f64 values as a result that is rounded at random holds them. ``first``: the number of the first
    element, counted in the whole result."""
    at = torch.arange(want.numel(), device=want.device).view(want.shape) + first
    made: torch.Tensor = one_of_two(
        want.float().double(), chances(seed.flatten()[0].long(), at), result, torch
    )
    return made.clamp(*result.range).to(torch_dtype(result)).double()


def given_to(
    epilogue: Epilogue, want: torch.Tensor, at: slice, extra: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The arguments of an epilogue's function for a piece of the answer."""
    found = epilogue.in_torch(want, extra)
    return {n: t[at] if n not in ("acc", "bia") and t.shape[0] > 1 else t for n, t in found.items()}


def after(want: torch.Tensor, at: slice, epilogue: str, extra: dict[str, torch.Tensor]) -> torch.Tensor:
    """The epilogue applied to a piece of the answer."""
    parsed = Epilogue.parse(epilogue)
    return in_torch(parsed.function, given_to(parsed, want, at, extra)) if parsed else want


def approximates(epilogue: str) -> bool:
    """Whether kernels compute its functions only to some bits."""
    return not Epilogue.parse(epilogue).function.is_exact
