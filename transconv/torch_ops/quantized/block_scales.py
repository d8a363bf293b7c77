"""Weights of 8 and 4 bits with a scale for each block of input channels, and products with inputs that
are floats.

A kernel in front of the product writes the weight as floats, once in a call, or that of the product makes
floats in its registers, for every tile that reads them. Rates of the device tell which takes less time.
In memory the channels of a weight are innermost, two of 4 bits in a byte, the even one lower:

    int4_weight_only    8 + q; q is -8..7           scale[f, c // size], f32
    mxfp8               f8e4m3                      scale[f, k.., c // 32], a power of two
    mxfp4               f4e2m1                      scale[f, k.., c // 32], a power of two
    nvfp4               f4e2m1                      scale[f, k.., c // 16], f8e4m3, and one of the tensor
    weight[f, c, k..]   element * scale, rounded once to the type of the input

mxfp8 and mxfp4 are formats of OCP's *Microscaling Formats (MX) Specification* 1.0; the scale is the least
power of two by which no element of the block is too large. Blocks lie within one tap and one group of
channels; the last one is filled up with zeros. The scale of a tensor of nvfp4 is a power of two, too, so
that bf16 holds its weights, as those of the others, exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import frexp, prod
from typing import Any

import torch
import torch.nn.functional as F

from transconv.calls import stats
from transconv.calls.settings import settings
from transconv.ir import CALLS, DType, bf16
from transconv.support import TensorError
from transconv.target import Target
from transconv.torch_ops import arguments
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.calls.call_attributes import is_plain
from transconv.torch_ops.quantized import input_quantization
from transconv.torch_ops.quantized.input_quantization import QuantizationScheme

Tensor = torch.Tensor


F4E2M1: list[float] = CALLS["f4e2m1"].numpy(range(16)).tolist()


def _of_codes(code: Tensor) -> Tensor:
    """The floats of 4 bits with these codes."""
    return torch.tensor(F4E2M1, device=code.device)[code.int()]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What memory holds means. ``element``, ``scale``: in texts, of what is read; ``values``: of elements
    in torch."""

    element: str
    values: Callable[[Tensor], Tensor]
    scale: str = "{}"


FORMATS = {
    "int4_weight_only": BlockFormat("f32({} - 8)", lambda q: q.float() - 8),
    "mxfp8": BlockFormat("{}", Tensor.float, "f8e8m0({})"),
    "mxfp4": BlockFormat("f4e2m1({})", _of_codes, "f8e8m0({})"),
    "nvfp4": BlockFormat("f4e2m1({})", _of_codes),
}
"""The formats, by the names of their kinds."""


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight (oc, ic/groups, *k), or an image (n, c, *i), as it is held. ``elements``: (oc, *k,
    channels), of halves with half as many; ``scale``: (oc, *k, blocks), of int4 (oc, blocks);
    ``tensor_scale``: (1,), f32."""

    kind: QuantizationScheme
    channels: int
    elements: Tensor
    scale: Tensor
    tensor_scale: Tensor | None = None

    @property
    def halves(self) -> int:
        """The elements in a byte."""
        return 2 if self.elements.dtype is torch.uint8 else 1

    @property
    def padded(self) -> int:
        """The channels with those that fill up the last block."""
        return self.elements.shape[-1] * self.halves

    @property
    def logical(self) -> tuple[int, ...]:
        """The shape of the weight of torch's module."""
        return (len(self.elements), self.channels, *self.elements.shape[1:-1])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What kernels read of it, which have no powers of two."""
        held = self.scale.view(torch.uint8) if self.scale.dtype is torch.float8_e8m0fnu else self.scale
        whole = () if self.tensor_scale is None else (self.tensor_scale,)
        return (self.elements.contiguous(), held.contiguous(), *whole)

    @property
    def names(self) -> tuple[str, ...]:
        """Those of ``tensors`` in texts."""
        return ("W", "S", "G")[: 2 + (self.tensor_scale is not None)]

    def check(self) -> None:
        """TensorError for scales that are not those of the weight's channels."""
        rows, *taps, _ = self.elements.shape
        apart = () if self.kind.scale.bits == 32 else tuple(taps)
        *shape, blocks = self.scale.shape
        if tuple(shape) != (rows, *apart) or not blocks or self.padded % blocks:
            groups = ", ".join(map(str, (rows, *apart)))
            raise TensorError(
                f"weight_scale: expected the shape ({groups}, groups of {self.padded} input "
                f"channels), got {tuple(self.scale.shape)}"
            )

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The weight (oc, ic/groups, *k) by torch, rounded once."""
        held = self.elements
        if self.halves == 2:
            held = torch.stack([held & 15, held >> 4], -1).flatten(-2)
        real = powers(self.scale) if self.scale.dtype is torch.uint8 else self.scale.float()
        scale = real.repeat_interleave(self.padded // self.scale.shape[-1], -1)
        along = scale.view(len(scale), *[1] * (held.dim() - scale.dim()), *scale.shape[1:])
        made = FORMATS[self.kind.form].values(held) * along
        if self.tensor_scale is not None:
            made = made * self.tensor_scale
        return made[..., : self.channels].to(dtype).movedim(-1, 1)

    def floats(self, dtype: torch.dtype) -> Tensor:
        """``unpacked`` by one kernel where there is one, with channels innermost in memory."""
        self.check()
        if not input_quantization.served(self.elements):
            return self.unpacked(dtype)
        made = self.elements.new_empty((*self.elements.shape[:-1], self.channels), dtype=dtype)
        what = f"weights of {8 // self.halves} bits"
        key = (*self.key, dtype)
        tensors = (*self.tensors, made)
        if input_quantization.computed(
            what, key, (*self.names, "Y"), tensors, lambda: self.text(lower_call.DTYPES[dtype])
        ):
            return made.movedim(-1, 1)
        return self.unpacked(dtype)

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells texts."""
        return self.kind.name, self.logical, self.scale.shape, self.tensor_scale is None

    @property
    def declared(self) -> list[str]:
        """The tensors in texts, with all taps as one dimension."""
        rows, taps = len(self.elements), prod(self.logical[2:])
        apart = [] if self.scale.dim() == 2 else [taps]
        return [
            f"    tensor W {self.kind.weight} {[rows, taps, self.elements.shape[-1]]}",
            f"    tensor S {self.kind.scale} {[rows, *apart, self.scale.shape[-1]]}",
        ]

    def reads(self, tap: str, of: DType, apart: bool = False) -> list[str]:
        """The lines that compute the weight ``w`` of the row ``f``, a tap and the channel ``c``;
        ``apart``: without the scale of the tensor."""
        at = "f" if self.scale.dim() == 2 else f"f, {tap}"
        return self.lines("w", "WSG", (f"f, {tap}", at), of, apart)

    def lines(self, made: str, names: str, at: tuple[str, str], of: DType, apart: bool) -> list[str]:
        """The lines that compute an element times its scale along the channels ``c``, from the tensors of
        these names. ``at``: the coordinates of elements and scales before the channel."""
        form, size = FORMATS[self.kind.form], self.padded // self.scale.shape[-1]
        more = "" if made == "w" else made
        p, q, s, g = (f"{letter}{more}" for letter in "pqsg")
        whole, pairs = self.tensor_scale is not None, self.halves == 2
        held = f"{p} = {names[0]}[{at[0]}, c // 2]" if pairs else f"{q} = {names[0]}[{at[0]}, c]"
        value = f"{form.element.format(q)}*{form.scale.format(s)}{f'*{g}' * (whole and not apart)}"
        return [
            f"    read   {held}",
            f"    read   {s} = {names[1]}[{at[1]}, c // {size}]",
            *[f"    read   {g} = {names[2]}[0]"] * whole,
            *[f"    let    {q} = where(c % 2 == 0, {p} % 16, {p} // 16)"] * pairs,
            f"    let    {made} = {of}({value})",
        ]

    def text(self, of: DType) -> str:
        """The computation that writes the weight."""
        sizes = [len(self.elements), prod(self.logical[2:]), self.channels]
        return "\n".join(
            [
                "compute block_scales",
                *self.declared,
                f"    tensor Y {of} {sizes}",
                "    axes   " + " ".join(f"{a}={n}" for a, n in zip("ftc", sizes, strict=True)),
                *self.reads("t", of),
                "    store  Y[f, t, c] = w",
            ]
        )


def quantised(weight: Tensor, kind: QuantizationScheme, channels: int) -> BlockWeight:
    """A float weight (oc, ic/groups, *k) in blocks of so many channels; powers of two as their codes."""
    size, most = channels, kind.most
    rows = F.pad(weight.detach().float().movedim(1, -1), (0, -weight.shape[1] % size))
    each, whole = rows.reshape(*rows.shape[:-1], -1, size), None
    highest = each.abs().amax(-1)
    if kind.scale.bits == 32:
        tiny = torch.finfo(torch.float32).tiny
        scale = (highest.flatten(1, -2).amax(1) / most).clamp(min=tiny)
        along = scale.view(len(scale), *[1] * (each.dim() - 3), -1, 1)
        codes = ((each / along).round().clamp(-8, 7) + 8).to(torch.uint8)
        return BlockWeight(kind, weight.shape[1], _pairs(codes.flatten(-2)), scale.contiguous())
    if kind.scale.kind == "int":
        half, exponent = torch.frexp(highest)  # half * 2**exponent
        least, power = frexp(most)
        codes = torch.where(highest > 0, exponent - power + (half > least).int() + 127, 0).clamp(0, 254)
        scale = torch.where(highest.isfinite(), codes, 255).to(torch.uint8)
        near = each * powers(254 - codes).unsqueeze(-1)  # 2**-127 as a divisor might be taken for 0
    else:
        whole = scale_of_all(highest.amax(), kind)
        scale = (highest / (most * whole)).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
        near = each / (scale.float() * whole).unsqueeze(-1)
    near = near.clamp(-most, most).flatten(-2)
    made = _pairs(_code(near)) if kind.weight.kind == "int" else near.to(kind.dtype)
    return BlockWeight(kind, weight.shape[1], made.contiguous(), scale.contiguous(), whole)


def powers(codes: Tensor) -> Tensor:
    """The scales with these codes of f8e8m0."""
    made = torch.ldexp(torch.ones_like(codes, dtype=torch.float32), codes.int() - 127)
    return torch.where(codes == 255, torch.nan, made)


def scale_of_all(highest: Tensor, kind: QuantizationScheme) -> Tensor:
    """The scale (1,) of a tensor with this largest element: a power of two."""
    exponent = torch.frexp(highest.float() / (kind.most * 448)).exponent
    made = torch.ldexp(torch.ones(1, device=highest.device), exponent)
    return torch.where(highest.isfinite(), made, torch.nan)


def _code(x: Tensor) -> Tensor:
    """The codes of the nearest floats of 4 bits, halves to even ones, of numbers from -6 to 6."""
    size = x.abs()
    above = torch.where(size < 4, size.round() + 2, (size / 2).round() + 4)
    code = torch.where(size < 2, (2 * size).round(), above)
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def _pairs(codes: Tensor) -> Tensor:
    return (codes[..., ::2] | codes[..., 1::2] << 4).contiguous()


# -- products --------------------------------------------------------------------------------------

WHAT = "products with weights in blocks"


def linear(input: Tensor, weight: BlockWeight, bias: Tensor | None) -> Tensor:
    """The product of rows (..., ic) in the input's type. TensorError for rows that do not fit."""
    if not input.dim() or input.shape[-1] != weight.channels:
        raise TensorError(f"input: expected rows of {weight.channels} numbers, got {tuple(input.shape)}")
    rows = input.reshape(-1, weight.channels)
    if (made := multiplied(rows, weight, bias)) is not None:
        return made.view(*input.shape[:-1], len(weight.elements))
    stats.refuse_invariant("torch", f"torch computes {WHAT} of many rows")
    if not (input_quantization.served(input) or torch.compiler.is_dynamo_compiling()):
        stats.announce(f"device:{input.device.type}", what=WHAT)
    made = F.linear(rows, weight.floats(input.dtype), None if bias is None else bias.to(input.dtype))
    return made.view(*input.shape[:-1], len(weight.elements))


def multiplied(
    input: Tensor,
    weight: BlockWeight,
    bias: Tensor | None,
    numbers: tuple[Any, ...] = (1, 0, 1, 1),
    activation: str = "",
) -> Tensor | None:
    """The product, of the stride, padding, dilation and groups ``numbers``, by a kernel that makes floats
    of what it reads; None where the weight should be written first, or no kernel does it: of other types
    than 16-bit floats, groups, images whose channels are not innermost in memory, and in invariant mode,
    as the choice depends on the batch."""
    rank, of = weight.elements.dim() - 2, lower_call.DTYPES.get(input.dtype)
    image = input.movedim(1, -1)
    if (
        weight.kind.scale.bits == 32
        or of is None
        or of.bits != 16
        or numbers[3] != 1
        or settings.invariant
        or not (input_quantization.served(input) and is_plain(input) and input.numel())
        or input.dim() != rank + 2
        or input.shape[1] != weight.channels
        or not image.is_contiguous()
    ):
        return None
    shape, p = result_shape(tuple(input.shape), weight.logical, *numbers[:3])
    count = prod(weight.logical)
    target = lower_call.target_of(input.device)
    moved = weight.elements.nbytes + 2 * count * input.element_size()
    if pays(moved, count * prod(shape) // shape[1], target):
        return None
    weight.check()
    made = arguments.empty_result(input, shape, arguments.channels_last_result(input, input))
    bias = None if bias is None else bias.contiguous()
    key = ("product", *weight.key, input.dtype, tuple(image.shape), p, activation, made.stride())
    key = (*key, bias is not None and bias.dtype)
    names = ("X", *weight.names, *["B"] * (bias is not None), "Y")
    tensors = (image, *weight.tensors, *([] if bias is None else [bias]), made)

    def text() -> str:
        added = None if bias is None else lower_call.DTYPES[bias.dtype]
        return product_text(image, weight, added, p, made, activation)

    same = lower_call.flags(input.dtype).deterministic
    if not input_quantization.computed(WHAT, key, names, tensors, text, same):
        return None
    return made


def result_shape(
    input: tuple[int, ...], weight: tuple[int, ...], stride: Any, padding: Any, dilation: Any
) -> tuple[tuple[int, ...], Any]:
    """The shape of a result, and the numbers of its convolution, None without positions."""
    if len(weight) == 2:
        return (*input[:-1], weight[0]), None
    padding = (padding,) if isinstance(padding, int) else padding
    p = arguments.resolve(input, weight, None, stride, padding, dilation, False, (0,), 1)
    return arguments.output_shape(input, weight, p), p


def product_text(
    image: Tensor | BlockWeight,
    weight: BlockWeight,
    bias: DType | None,
    p: Any,
    made: Tensor,
    activation: str = "",
) -> str:
    """The computation of a result (n, f, *o), with f innermost or second, from an image (n, *i, c). If
    both have blocks, scales of tensors multiply the sum."""
    taps, tap = weight.logical[2:], "0"
    for i, size in enumerate(taps):
        tap = f"({tap})*{size} + k{i}"
    places = [f"o{i}*{p.stride[i]} + k{i}*{p.dilation[i]} - {p.pad_lo[i]}" for i in range(len(taps))]
    axes, last = ["n", *(f"o{i}" for i in range(len(taps))), "f"], made.movedim(1, -1).is_contiguous()
    axes = axes if last else ["n", "f", *axes[1:-1]]
    held = made.movedim(1, -1) if last else made
    summed = {**{f"k{i}": size for i, size in enumerate(taps)}, "c": weight.padded}
    rows, at = zip(axes, held.shape, strict=True), ", ".join(["n", *places])
    if isinstance(image, BlockWeight):
        x, w = image.lines("x", "XRH", (at, at), bf16, True), weight.reads(tap, bf16, True)
        tensors = [("X", image.kind.weight, image.elements), ("R", image.kind.scale, image.scale)]
        scales = [g for g, t in (("gx", image), ("g", weight)) if t.tensor_scale is not None]
    else:
        of = lower_call.DTYPES[image.dtype]
        x, w, scales = [f"    read   x = X[{at}, c]"], weight.reads(tap, of), []
        tensors = [("X", of, image)]
    total = "*".join(["total", *scales])
    return "\n".join(
        [
            "compute block_product",
            *(f"    tensor {name} {dtype} {[*t.shape]}" for name, dtype, t in tensors),
            *weight.declared,
            *([] if bias is None else [f"    tensor B {bias} {[made.shape[1]]}"]),
            f"    tensor Y {lower_call.DTYPES[made.dtype]} {[*held.shape]}",
            "    axes   " + " ".join(f"{a}={n}" for a, n in (*rows, *summed.items())),
            *x,
            *w,
            *([] if bias is None else ["    read   b = B[f]"]),
            f"    let    total = sum(x*w; {' '.join(summed)})",
            f"    store  Y[{', '.join(axes)}] = {activation}({total}{'' if bias is None else ' + b'})",
        ]
    )


def pays(moved: int, products: float, target: Target) -> bool:
    """Whether a kernel in front that moves so many bytes takes less time than conversions in so many
    multiply-adds."""
    return written_us(moved, target) < target.rates.issue.converted_late * multiplied_us(products, target)


def multiplied_us(products: float, target: Target) -> float:
    """Microseconds of so many multiply-adds at the chip's rate."""
    return 2 * products / (target.tflops * 1e6)


def written_us(moved: int, target: Target) -> float:
    """Microseconds of a kernel in front of another one that reads and writes so many bytes."""
    rates = target.rates.triton
    return rates.copy_us + moved / (target.bandwidth_gbs * 1e3 * rates.memory_share)
