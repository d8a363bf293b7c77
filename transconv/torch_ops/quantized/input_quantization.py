"""Inputs quantised by one kernel: the elements of a dense tensor in their order in memory; and the
kernels of such texts beside those of convolutions, which also make floats of weights.

torch needs a kernel for each of the operations (quantized/schemes.py), which here are the meaning, and
what computes where no kernel does, as far as ``transconv.config.fallback`` allows: tensors on a CPU,
traced calls. Tensors with gaps in memory are copied. A kind of call is compiled once; its kernel starts
without being asked again once a result of it was right.

A kernel of a convolution that reads ``input_zero_sums`` gives wrong results with those of another
weight or zero point. They are computed again and compared when these three tensors come together for
the first time, or one of them has been written to since, which its version counter tells. Inside a
capture of a CUDA graph, where the host cannot see a comparison's result, the graph computes the sums.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import reduce
from operator import or_
from typing import Any

import torch

from transconv.calls import stats
from transconv.calls.guard import ALIGNMENT
from transconv.calls.route_cache import PASSING
from transconv.calls.settings import settings
from transconv.compute import Alone, parse
from transconv.conv import zero_sums, zero_sums_shape
from transconv.ir import DType
from transconv.runtime import NEVER, Launch, PlanRequest
from transconv.support import Cache, TensorError, Unsupported
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import call_attributes, lower_call
from transconv.torch_ops.quantized.schemes import quantised

Tensor = torch.Tensor

LIMIT = 1024  # kinds of calls kept


def served(x: Tensor) -> bool:
    """Whether kernels compute on a tensor's device, and now: compilers see torch's operations."""
    return (x.is_cuda or settings.cpu == "interpret") and not torch.compiler.is_dynamo_compiling()


_kernels: Cache[Hashable, Launch | Unsupported] = Cache("helper kernels", LIMIT)


def begun(key: tuple[Hashable, ...], x: Tensor) -> Callable[..., None] | None:
    """What starts the kernel of ``computed`` on aligned tensors, the first like ``x``, on its device as
    the current one; None if it has not run there."""
    kernel = _kernels.get((*key, x.device, True))
    return kernel.begin if isinstance(kernel, Launch) else None


settings.on_change(_kernels.forget)


def computed(what: str, key: tuple[Hashable, ...], names: tuple[str, ...], tensors: tuple[Tensor, ...],
             text: Callable[[], str]) -> bool:
    """Compute the text on the tensors of these names, dense and with elements, in the text as they lie in
    memory; the last one is the result. ``key``: tells the text, whose tensors have one dimension. False
    where no kernel does, or none yet, and torch may compute ``what``: that is told as the policy says.
    Unsupported where it may not."""
    x = tensors[0]
    aligned = not reduce(or_, map(Tensor.data_ptr, tensors)) & ALIGNMENT
    key = (*key, x.device, aligned)
    try:
        kernel = _kernels[key] if key in _kernels else _made(key, names, x.device, aligned, text)
        if isinstance(kernel, Unsupported):
            raise kernel
        kernel.start(tensors)
        return True
    except Unsupported as error:
        if error.reason not in (*PASSING, NEVER):  # the next call may find it
            _kernels[key] = error.with_traceback(None)
        stats.announce(error.reason, error.message, what)
        return False


def _made(key: Hashable, names: tuple[str, ...], device: torch.device, aligned: bool,
          text: Callable[[], str]) -> Launch:
    request = PlanRequest(Alone(parse(text())), lower_call.target_of(device), False, aligned)
    made = Launch.requested(request, device, settings.mode, names)
    _kernels.keep(key, made)
    return made


WHAT = "the quantising of inputs"
WITH_ZERO, SYMMETRIC = ("x", "scale", "zero", "y"), ("x", "scale", "y")  # the tensors of the text


def quantise(x: Tensor, scale: Tensor, zero: Tensor | None, held: DType) -> Tensor:
    """``quantized_kinds.quantised`` of a tensor and a scale () for all of it, f32; ``zero``: (1,), s32."""
    if not served(x) or not call_attributes.is_plain(x) or not x.numel():
        return quantised(x, scale, zero, held)
    of = lower_call.DTYPES.get(x.dtype)
    if of is None or of.bits == 64:
        stats.announce(f"dtype:{str(x.dtype).removeprefix('torch.')}", what=WHAT)
        return quantised(x, scale, zero, held)
    y = torch.empty_like(x, dtype=getattr(torch, held.torch), memory_format=torch.preserve_format)
    if x.stride() != y.stride():  # there are gaps
        x = torch.empty_like(x).copy_(x)
    names, tensors = (SYMMETRIC, (x, scale, y)) if zero is None else (WITH_ZERO, (x, scale, zero, y))
    count = x.numel()
    if not computed(WHAT, _key(x, zero, held), names, tensors,
                          lambda: text(count, of, zero is not None, held)):
        return quantised(x, scale, zero, held)
    return y


def starter(x: Tensor, zero: Tensor | None, held: DType) -> Callable[..., None] | None:
    """What starts the kernel for aligned tensors like these: a function of the tensor, the scale, the zero
    point unless that is None, and the result, which lies as the tensor does; None if none has run."""
    return begun(_key(x, zero, held), x) if _takes(x) else None


def _key(x: Tensor, zero: Tensor | None, held: DType) -> tuple[Hashable, ...]:
    return x.dtype, x.numel(), held, zero is None


def _takes(x: Tensor) -> bool:
    """Whether a kernel may read a tensor in the order of its memory."""
    return (
        served(x)
        and call_attributes.is_plain(x)
        and x.numel() > 0
        and (
            x.is_contiguous()
            or any(
                x.dim() == dims and x.is_contiguous(memory_format=layout)
                for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d))
            )
        )
    )


def text(count: int, of: DType, zero: bool, held: DType) -> str:
    """The computation, whose elements are those in memory."""
    low, high = (f"{n:g}.0" for n in held.range)
    value = f"min(max(q, {low}), {high})"
    if held.kind == "int":  # the zero point is whole: it is added behind the rounding
        value = (f"nearest_small(min(max(q, {low} - f32(z)), {high} - f32(z))) + z" if zero else
                 f"nearest_small({value})")
    return "\n".join([
        "compute quantise",
        f"    tensor x {of} [n={count}]", "    tensor scale f32 [one=1]",
        *["    tensor zero i32 [one=1]"] * zero, f"    tensor y {held} [n={count}]",
        f"    axes   n={count}", "    read   a = x[n]", "    read   s = scale[0]",
        *["    read   z = zero[0]"] * zero, "    let    r = 1/s", "    let    q = a*r",
        f"    store  y[n] = {held}({value})"])


Zero = Tensor | float

SUMS_KEPT = 4096


class WrongSums(TensorError):
    """``input_zero_sums`` that are not those of the weight and the zero point."""


class _Compared:
    """Three tensors whose values agreed, as they were then."""

    __slots__ = ("sums", "versions", "weight", "zero")

    def __init__(self, weight: Tensor, zero: Zero, sums: Tensor, forget: Any) -> None:
        self.sums, self.weight = weakref.ref(sums, forget), weakref.ref(weight)
        self.zero: Any = weakref.ref(zero) if isinstance(zero, Tensor) else zero
        self.versions = _versions(weight, zero, sums)


_compared: Cache[int, _Compared] = Cache("compared sums", SUMS_KEPT)


def _versions(weight: Tensor, zero: Zero, sums: Tensor) -> tuple[int, int, int]:
    """Those made in inference mode have no counter."""
    try:
        return weight._version, zero._version if isinstance(zero, Tensor) else 0, sums._version
    except RuntimeError:
        w, z, s = (t._version if isinstance(t, Tensor) and not t.is_inference() else 0
                   for t in (weight, zero, sums))
        return w, z, s


def are_known(weight: Tensor, zero: Zero, sums: Tensor) -> bool:
    """Whether the three were compared as they are."""
    held = _compared.get(id(sums))
    if held is None or held.sums() is not sums or held.weight() is not weight:
        return False
    if isinstance(zero, Tensor):
        same = isinstance(held.zero, weakref.ref) and held.zero() is zero
    else:
        same = bool(held.zero == zero)
    return same and held.versions == _versions(weight, zero, sums)


def checked(weight: Tensor, zero: Zero, sums: Tensor, p: Params) -> Tensor:
    """The sums; in a capture, if they were not compared before it, those that the graph computes.
    WrongSums if they are others, or of another shape."""
    if are_known(weight, zero, sums):
        return sums
    name, shape = "input_zero_sums", zero_sums_shape(len(weight), p.pad_lo, p.pad_hi)
    if tuple(sums.shape) != shape:
        raise WrongSums(f"{name}: expected the shape {shape} of these paddings, got {tuple(sums.shape)}")
    whole = zero if isinstance(zero, Tensor) else torch.tensor(zero, device=weight.device)
    made = zero_sums(weight, whole, p.pad_lo, p.pad_hi, p.dilation)
    if made is None:
        raise WrongSums(f"{name}: expected None: windows reach beyond the input in too many ways")
    if lower_call.capturing(sums.device):
        return made
    if not torch.equal(made, sums):
        raise WrongSums(f"{name}: expected what the zero point adds to the sums of this weight; "
                        f"{int((made != sums).sum())} of {made.numel()} differ. Was the weight or the "
                        "zero point changed after they were made? None has them computed in every call")
    _remember(weight, zero, sums)
    return sums


def _remember(weight: Tensor, zero: Zero, sums: Tensor) -> None:
    key = id(sums)

    def forget(gone: object) -> None:
        if (held := _compared.get(key)) is not None and held.sums is gone:
            _compared.pop(key, None)

    _compared.pop(key, None)
    _compared.keep(key, _Compared(weight, zero, sums, forget))
