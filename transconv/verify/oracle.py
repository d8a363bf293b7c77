"""The reference result in f64, and its comparison with a kernel's result.

It shares no code with the kernels or cuDNN, and runs on any device: for every tap of the
filter the points that it joins are cut out of the tensors with slices and multiplied. Results come
in pieces of the batch, so that the f64 copies of large tensors never exist as a whole.

Each piece is computed a second time by torch.nn.functional and its gradients, which know nothing of this
package; the two must agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from math import inf, prod

import torch

from transconv.compute import in_torch
from transconv.conv import ConvProblem, Epilogue, Prop
from transconv.ir import DType, chances, one_of_two
from transconv.verify.data import torch_dtype

CONVOLUTIONS: dict[int, Callable[..., torch.Tensor]] = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
MOST_PRODUCTS = 1 << 34  # that torch computes in f64 in a second on a GPU
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
        raise AnswersDiffer(f"{wrong} of {made.numel()} elements of the answer are not those of "
                            f"torch.nn.functional.conv{p.ndims}d in f64")


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


