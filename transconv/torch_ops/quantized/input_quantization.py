"""Schemes of quantisation, and the kernels that quantise inputs: the elements of a dense tensor in their
order in memory, beside kernels of convolutions, which also make floats of weights.

torch needs a kernel for each of the operations of a scheme, which here are the meaning, and
what computes where no kernel does, as far as ``transconv.config.fallback`` allows: tensors on a CPU,
traced calls. Tensors with gaps in memory are copied. A kind of call is compiled once; its kernel starts
without being asked again once a result of it was right.

A kernel of a convolution that reads ``input_zero_sums`` gives wrong results with those of another
weight or zero point. They are computed again and compared when these three tensors come together for
the first time, or one of them has been written to since, which its version counter tells. Inside a
capture of a CUDA graph, where the host cannot see a comparison's result, the graph computes the sums.

A scheme says how convolutions are quantised: the types, and the scales and zero points of ranges.

    int8               weights int8, inputs int8 with a scale and a zero point
    fp8                weights float8_e4m3fn, inputs float8_e4m3fn with a scale
    int8_weight_only   weights int8, inputs as they are (float16, bfloat16, float32)
    int4_weight_only   weights of 4 bits, inputs as they are (quantized/block_scales.py)
    mxfp8 mxfp4 nvfp4  weights of floats in blocks, inputs as they are (the same)
    mxfp4_mxfp8 ...    the same, and inputs in blocks of mxfp8 (quantized/block_inputs.py)

Weights are symmetric, with a scale for each output channel; those of int4_weight_only have one for every
``group`` of its input channels, or for all where that does not divide them, and those in blocks one for
every ``group`` of every tap."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
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
from transconv.ir import DTYPES, DType
from transconv.runtime import NEVER, Launch, PlanRequest, is_capturing
from transconv.support import Cache, TensorError, Unsupported
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import call_attributes, lower_call

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


def computed(
    what: str,
    key: tuple[Hashable, ...],
    names: tuple[str, ...],
    tensors: tuple[Tensor, ...],
    text: Callable[[], str],
    same: bool = False,
) -> bool:
    """Compute the text on the tensors of these names, dense and with elements, in the text as they lie in
    memory; the last one is the result. ``key``: tells the text; ``same``: whether equal calls must have
    equal bits. False where no kernel does, or none yet, and torch may compute ``what``: that is told as
    the policy says. Unsupported where it may not."""
    x = tensors[0]
    aligned = not reduce(or_, map(Tensor.data_ptr, tensors)) & ALIGNMENT
    key = (*key, *[same] * same, x.device, aligned)
    try:
        kernel = _kernels[key] if key in _kernels else _made(key, names, x.device, aligned, text, same)
        if isinstance(kernel, Unsupported):
            raise kernel
        kernel.start(tensors)
        return True
    except Unsupported as error:
        if error.reason not in (*PASSING, NEVER):  # the next call may find it
            _kernels[key] = error.with_traceback(None)
        stats.announce(error.reason, error.message, what)
        return False


def _made(
    key: Hashable,
    names: tuple[str, ...],
    device: torch.device,
    aligned: bool,
    text: Callable[[], str],
    same: bool,
) -> Launch:
    request = PlanRequest(Alone(parse(text())), lower_call.target_of(device), same, aligned)
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
    if not computed(
        WHAT, _key(x, zero, held), names, tensors, lambda: text(count, of, zero is not None, held)
    ):
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
        value = (
            f"nearest_small(min(max(q, {low} - f32(z)), {high} - f32(z))) + z"
            if zero
            else f"nearest_small({value})"
        )
    return "\n".join(
        [
            "compute quantise",
            f"    tensor x {of} [n={count}]",
            "    tensor scale f32 [one=1]",
            *["    tensor zero i32 [one=1]"] * zero,
            f"    tensor y {held} [n={count}]",
            f"    axes   n={count}",
            "    read   a = x[n]",
            "    read   s = scale[0]",
            *["    read   z = zero[0]"] * zero,
            "    let    r = 1/s",
            "    let    q = a*r",
            f"    store  y[n] = {held}({value})",
        ]
    )


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
        w, z, s = (
            t._version if isinstance(t, Tensor) and not t.is_inference() else 0
            for t in (weight, zero, sums)
        )
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
    if is_capturing(sums.device):
        return made
    if not torch.equal(made, sums):
        raise WrongSums(
            f"{name}: expected what the zero point adds to the sums of this weight; "
            f"{int((made != sums).sum())} of {made.numel()} differ. Was the weight or the "
            "zero point changed after they were made? None has them computed in every call"
        )
    _remember(weight, zero, sums)
    return sums


def _remember(weight: Tensor, zero: Zero, sums: Tensor) -> None:
    key = id(sums)

    def forget(gone: object) -> None:
        if (held := _compared.get(key)) is not None and held.sums is gone:
            _compared.pop(key, None)

    _compared.pop(key, None)
    _compared.keep(key, _Compared(weight, zero, sums, forget))


@dataclass(frozen=True)
class QuantizationScheme:
    """A way to quantise. ``input``: the type that inputs become, None if they stay; ``most``: the largest
    quantised weight; ``group``: input channels with one scale, of weights in blocks, else 0; ``scale``:
    the type that holds scales of weights, u8 the exponents of powers of two; ``weights``, ``inputs``: the
    kinds whose blocks weights and inputs become, of a kind of both."""

    name: str
    weight: DType
    input: DType | None
    most: float
    group: int = 0
    scale: DType = DTYPES["f32"]
    weights: str = ""
    inputs: str = ""
    dtype: torch.dtype = field(init=False)  # the weights'
    input_dtype: torch.dtype | None = field(init=False)  # of quantised inputs

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", getattr(torch, self.weight.torch))
        object.__setattr__(self, "input_dtype", self.input and getattr(torch, self.input.torch))

    def channels(self, weight: Tensor) -> int:
        """The input channels with one scale of a weight (oc, ic/groups, *k) in blocks."""
        filled = self.of_floats or weight.shape[1] % self.group == 0
        return self.group if filled else weight.shape[1]

    @property
    def form(self) -> str:
        """The kind whose blocks weights become."""
        return self.weights or self.name

    @property
    def element_bits(self) -> int:
        """The bits of an element of a weight."""
        return 8 if self.weight.kind == "float" or not self.group else 4

    @property
    def of_floats(self) -> bool:
        """Whether weights are blocks of floats, of which the last one may be filled up."""
        return self.scale.bits == 8

    def why_not(self, weight: Tensor, transposed: bool) -> str:
        """Why a weight has no form of this kind; empty if it has."""
        what = f"weights in blocks ({self.name})" if self.of_floats else "weights of 4 bits"
        if weight.dim() == 2 and not self.of_floats:
            made = ", ".join(k.name for k in KINDS.values() if k.of_floats)
            return f"linear layers have weights in blocks alone ({made}), not {self.name}"
        if self.group and transposed:
            return f"transposed convolutions have no {what}"
        if self.of_floats and 2 * weight.shape[1] < self.group:
            return f"{what} are for {self.group // 2} input channels and more, not {weight.shape[1]}"
        if self.of_floats and not bool(weight.isfinite().all()):
            return f"{what} are finite, and it has elements that are not"
        if self.group and not self.of_floats and self.channels(weight) % 2:
            return f"{what} are for even numbers of input channels, not {weight.shape[1]}"
        return ""

    def check_fast(self, fast: bool) -> None:
        """ValueError for ``use_fast_accum`` where nothing multiplies 8-bit floats."""
        if fast and not (self.input is not None and self.input.is_short):
            raise ValueError(f"use_fast_accum is for products of 8-bit floats (fp8), not for {self.name}")


_i8, _u8, _f8 = DTYPES["i8"], DTYPES["u8"], DTYPES["f8e4m3"]
KINDS = {
    k.name: k
    for k in (
        QuantizationScheme("int8", _i8, _i8, 127),
        QuantizationScheme("fp8", _f8, _f8, _f8.largest),
        QuantizationScheme("int8_weight_only", _i8, None, 127),
        QuantizationScheme("int4_weight_only", _u8, None, 7, 32),
        QuantizationScheme("mxfp8", _f8, None, _f8.largest, 32, _u8),
        QuantizationScheme("mxfp4", _u8, None, 6, 32, _u8),
        QuantizationScheme("nvfp4", _u8, None, 6, 16, _f8),
    )
}
KINDS |= {
    f"{w}_{x}": replace(KINDS[w], name=f"{w}_{x}", weights=w, inputs=x)
    for w, x in (("mxfp8", "mxfp8"), ("mxfp4", "mxfp8"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"))
}
"""The ways to quantise, by name."""


def kind_named(name: str) -> QuantizationScheme:
    """ValueError for an unknown one."""
    if name not in KINDS:
        raise ValueError(f"kind '{name}' is unknown; expected one of: {', '.join(KINDS)}")
    return KINDS[name]


def ranged(low: Tensor, high: Tensor, kind: QuantizationScheme) -> tuple[Tensor, Tensor | None]:
    """The scale () and the zero point (1,), if inputs have one, for numbers from ``low`` to ``high``: f32
    and s32. 0 has a number of its own."""
    low, high = low.float().clamp(max=0), high.float().clamp(min=0)
    tiny = torch.finfo(torch.float32).tiny
    if kind.input is None or kind.input.kind != "int":
        return (torch.maximum(-low, high) / kind.most).clamp(min=tiny), None
    least, most = kind.input.limits
    scale = ((high - low) / (most - least)).clamp(min=tiny)
    return scale, (least - (low / scale).round()).clamp(least, most).int().view(1)


def quantised(x: Tensor, scale: Tensor, zero: Tensor | None, held: DType) -> Tensor:
    """``x`` times the reciprocal of the scale in f32, with the zero point, rounded to nearest even and
    saturated."""
    made = x.float() * (1 / scale)
    if held.kind == "int":
        made = made.round() if zero is None else made.round() + zero
    return made.clamp(*held.range).to(getattr(torch, held.torch))


def quantised_weight(
    weight: Tensor, groups: int, transposed: bool, kind: QuantizationScheme
) -> tuple[Tensor, Tensor]:
    """A weight in the kind's type, with the strides that it has, and its scale for each output channel
    (oc,), f32."""
    wide = weight.detach().float()
    rows = wide
    if transposed:  # (ic, oc/groups, *k): the output channels of a group are the second dimension
        rows = wide.reshape(groups, -1, *wide.shape[1:]).transpose(1, 2).flatten(0, 1)
    scale = (rows.abs().flatten(1).amax(1) / kind.most).clamp(min=torch.finfo(torch.float32).tiny)
    along = scale.view(-1, *[1] * (weight.dim() - 1))
    if transposed:
        each = scale.view(groups, 1, -1).expand(groups, weight.shape[0] // groups, -1)
        along = each.reshape(*weight.shape[:2], *[1] * (weight.dim() - 2))
    return quantised(wide, along, None, kind.weight), scale


def of_input(
    name: str, kind: QuantizationScheme, scale: Any, zero: Any, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """The quantities of inputs as buffers. TensorError for ones that the kind does not have."""
    if scale is None or kind.input is None:
        if zero is not None or scale is not None:
            raise TensorError(
                f"{name}: input_zero_point: expected an input_scale beside it"
                if scale is None
                else f"{name}: input_scale: inputs of {kind.name} are not quantised"
            )
        return None, None
    held = torch.as_tensor(scale, dtype=torch.float32, device=device).reshape(-1)
    if held.numel() != 1 or not bool(held > 0):
        raise TensorError(f"{name}: input_scale: expected one scale above 0, got {scale!r}")
    if kind.input.kind != "int":
        if zero is not None:
            raise TensorError(
                f"{name}: input_zero_point: zero points are of integers, and inputs are {kind.input}"
            )
        return held.view(()), None
    point = torch.as_tensor(0 if zero is None else zero, device=device).reshape(-1)
    low, high = kind.input.limits
    if point.numel() != 1 or point.is_floating_point() or not low <= int(point) <= high:
        raise TensorError(
            f"{name}: input_zero_point: expected an integer from {low} to {high}, got {zero!r}"
        )
    return held.view(()), point.int()
