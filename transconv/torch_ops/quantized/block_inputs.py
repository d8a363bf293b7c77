"""Inputs in blocks: 32 or 16 neighbouring channels share a scale, as those of weights do
(quantized/block_scales.py), and products of both by a matrix unit that takes the scales.

One kernel finds the largest element of each block, its scale and the elements:

    top    = max(|x|) of a block                  32 channels, of nvfp4 16
    scale  = the least power of two by which no element is too large
    nvfp4:   f8e4m3(top/(6*g)), with a power of two g of the whole tensor, which takes a pass of its own
    E      = x/scale, rounded to nearest, ties to even codes

A block with an element that is not finite has the scale NaN, in nvfp4 the whole tensor. A chip whose
matrix unit takes no scales multiplies floats: ``rounded`` makes them, of the same values."""

from __future__ import annotations

from typing import Any

import torch

from transconv.calls import stats
from transconv.calls.settings import settings
from transconv.ir import DType
from transconv.support import triton_release
from transconv.target import Target
from transconv.torch_ops import arguments
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.calls.call_attributes import is_plain
from transconv.torch_ops.quantized import block_scales, input_quantization
from transconv.torch_ops.quantized.block_scales import BlockWeight
from transconv.torch_ops.quantized.input_quantization import KINDS, QuantizationScheme

Tensor = torch.Tensor
WHAT, PRODUCTS = "the quantising of inputs in blocks", "products of inputs and weights in blocks"


def rounded(input: Tensor, kind: QuantizationScheme, groups: int, rank: int) -> Tensor:
    """An input (n, c, *i), or rows (..., c), as the floats that its blocks mean, in its own type. Blocks
    lie within one group of channels."""
    channels = -1 if rank == 0 else input.dim() - rank - 1
    image = input.movedim(channels, -1)
    rows = image.reshape(-1, image.shape[-1] // groups)
    made = blocks_of(rows, KINDS[kind.inputs]).floats(input.dtype)
    return made.reshape(image.shape).movedim(-1, channels)


def blocks_of(rows: Tensor, kind: QuantizationScheme) -> BlockWeight:
    """An image (n, *i, c), or rows of one, in blocks of channels: by a kernel where there is one."""
    if kind.scale.kind != "int":
        stats.refuse_invariant("form", f"inputs in blocks of {kind.name} have a scale of the whole batch")
    of, plain = lower_call.DTYPES.get(rows.dtype), input_quantization.served(rows) and is_plain(rows)
    if of is not None and of.bits < 64 and plain and rows.numel():
        if (made := _by_kernel(rows.contiguous(), of, kind)) is not None:
            return made
    return block_scales.quantised(rows.movedim(-1, 1), kind, kind.group)


def _by_kernel(rows: Tensor, of: DType, kind: QuantizationScheme) -> BlockWeight | None:
    """``blocks_of``, or None where no kernel does it."""
    channels, size, powers = rows.shape[-1], kind.group, kind.scale.kind == "int"
    blocks, around = -(-channels // size), rows.shape[:-1]
    elements = rows.new_empty((*around, blocks * size * kind.element_bits // 8), dtype=kind.dtype)
    scale = rows.new_empty((*around, blocks), dtype=torch.uint8 if powers else torch.float8_e4m3fn)
    whole = None
    if not powers:
        low, high = rows.aminmax()
        whole = block_scales.scale_of_all(torch.maximum(-low, high), kind)
    count = rows.numel() // channels
    key = ("blocks", kind.name, rows.dtype, count, channels)
    tensors = (rows, *([] if whole is None else [whole]), scale, elements)
    names = ("X", *["G"] * (whole is not None), "R", "E")
    if not input_quantization.computed(WHAT, key, names, tensors, lambda: text(count, channels, of, kind)):
        return None
    return BlockWeight(kind, channels, elements, scale, whole)


def text(count: int, channels: int, of: DType, kind: QuantizationScheme) -> str:
    """The computation of the blocks of so many rows."""
    size, most, powers = kind.group, f"{kind.most:g}.0", kind.scale.kind == "int"
    each = 8 // kind.element_bits  # elements of a byte, or of a step
    blocks, lanes = -(-channels // size), range(each)
    top = "abs(x0)" if each == 1 else "max(abs(x0), abs(x1))"
    near = "x{0}*up" if powers else "x{0}/along"
    return "\n".join(
        [
            "compute to_blocks",
            f"    tensor X {of} {[count, channels]}",
            *["    tensor G f32 [1]"] * (not powers),
            f"    tensor R {kind.scale} {[count, blocks]}",
            f"    tensor E {kind.weight} {[count, blocks * size // each]}",
            f"    axes   r={count} b={blocks} | i={size // each}",
            *(f"    read   x{n} = X[r, b*{size} + {each}*i + {n}]" for n in lanes),
            f"    let    top = max({top}; i)",
            *(_powers(kind.most) if powers else _fractions(most)),
            "    store  R[r, b] = held",
            *(f"    let    y{n} = min(max({near.format(n)}, -{most}), {most})" for n in lanes),
            *(line for n in lanes if each == 2 for line in _code(n)),
            f"    store  E[r, b*{size // each} + i] = "
            + ("u8(c0 + 16*c1)" if each == 2 else "f8e4m3(y0)"),
        ]
    )


def _powers(most: float) -> list[str]:
    """The code of a power of two, ``held``, and its reciprocal."""
    power = int(most).bit_length() - 1
    return [
        "    let    k = exponent(top)",
        f"    let    less = k - {power}",
        f"    let    least = where(top > {most:g}.0*f8e8m0(max(less, 0)), less + 1, less)",
        "    let    code = where(k == 255, 255, max(least, 0))",
        "    let    held = u8(code)",
        "    let    up = f8e8m0(max(254 - code, 0))",
    ]


def _fractions(most: str) -> list[str]:
    """The scale ``held``, in f8e4m3, and that of its elements."""
    return [
        "    read   g = G[0]",
        f"    let    held = f8e4m3(min(max(top/({most}*g), 0.001953125), 448.0))",
        "    let    along = f32(held)*g",
    ]


def _code(n: int) -> list[str]:
    """The code of the nearest float of 4 bits of ``y``, from -6 to 6."""
    return [
        f"    let    a{n} = abs(y{n})",
        f"    let    far{n} = where(a{n} < 4.0, nearest_small(a{n}) + 2, nearest_small(a{n}*0.5) + 4)",
        f"    let    c{n} = where(a{n} < 2.0, nearest_small(2.0*a{n}), far{n}) + where(y{n} < 0.0, 8, 0)",
    ]


# -- products --------------------------------------------------------------------------------------


def takes_blocks(target: Target, input: QuantizationScheme, weight: QuantizationScheme) -> bool:
    """Whether the matrix unit of a chip multiplies inputs and weights in these blocks."""
    bits = input.element_bits, weight.element_bits
    scales = "f8e8m0" if weight.scale.kind == "int" else weight.scale.name
    known = target.block_mma(bits, scales, weight.group) is not None
    return known and not () < triton_release() < target.blocks_since


def multiplied(
    input: Tensor, weight: BlockWeight, bias: Tensor | None, numbers: tuple[Any, ...], activation: str = ""
) -> Tensor | None:
    """The product of an input (n, c, *i), or of rows (..., c), which become blocks; None where no kernel
    does it: groups, types that no kernel reads, and chips whose matrix unit takes no scales."""
    rank, kind = weight.elements.dim() - 2, KINDS[weight.kind.inputs]
    stride, padding, dilation, groups = numbers or (1, 0, 1, 1)
    of = lower_call.DTYPES.get(input.dtype)
    if (
        groups != 1
        or of is None
        or of.bits == 64
        or settings.invariant
        or not (input_quantization.served(input) and is_plain(input) and input.numel())
        or input.shape[-1 if rank == 0 else 1] != weight.channels
        or not takes_blocks(lower_call.target_of(input.device), kind, weight.kind)
    ):
        return None
    weight.check()
    given = input.reshape(-1, weight.channels) if rank == 0 else input
    image = blocks_of(given.movedim(1, -1), kind)
    shape, p = block_scales.result_shape(tuple(given.shape), weight.logical, stride, padding, dilation)
    made = arguments.empty_result(given, shape, arguments.channels_last_result(given, given))
    bias = None if bias is None else bias.contiguous()
    key = ("blocks by blocks", *weight.key, *image.key, made.dtype, p, activation, made.stride())
    key = (*key, bias is not None and bias.dtype)
    halves = ("X", "R", "H")[: len(image.tensors)]
    names = (*halves, *weight.names, *["B"] * (bias is not None), "Y")
    tensors = (*image.tensors, *weight.tensors, *([] if bias is None else [bias]), made)

    def told() -> str:
        added = None if bias is None else lower_call.DTYPES[bias.dtype]
        return block_scales.product_text(image, weight, added, p, made, activation)

    same = lower_call.flags(input.dtype).deterministic
    if not input_quantization.computed(PRODUCTS, key, names, tensors, told, same):
        stats.refuse_invariant("torch", f"torch computes {PRODUCTS}")
        return None
    return made if rank else made.view(*input.shape[:-1], len(weight.elements))
