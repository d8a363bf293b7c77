"""Rows of quantised graphs, as torch's PT2E writes them: numbers as integers with a scale and a zero
point, and back. They are maps, so that they are fused with what stands before and behind them; the
products between them are those of floats.

    quantize    i8(min(max(round(x * (1/scale)) + zero, least), most))
    dequantize  (f32(q) - zero) * scale
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from transconv.graph.fusion.index_ir import TYPES, Piece
from transconv.graph.lowerings.elementwise import cast
from transconv.graph.lowerings.table import (
    NodeCall,
    NotOurs,
    expanded,
    kind,
    mapped,
    number,
    reshaped,
    row,
)

with suppress(ImportError):  # where torch defines these operators
    import torch.ao.quantization.fx._decomposed

OPERATORS = "quantized_decomposed::"


@row(f"{OPERATORS}quantize_per_tensor", f"{OPERATORS}quantize_per_tensor.tensor")
def _quantize(call: NodeCall) -> Piece:
    x, scale, zero, least, most = call.args[:5]
    if isinstance(scale, Piece):
        return _quantized(call, x, (scale, zero), least, most)
    _check(call, x.dtype, call.dtype)
    text = f"min(max(round({{}}*{number(1 / scale)}) + {number(zero)}, {number(least)}), {number(most)})"
    return mapped(f"{TYPES[call.dtype].name}({text})".format, x, dtype=call.dtype, label="quantize",
                  work=4)


@row(f"{OPERATORS}quantize_per_channel")
def _quantize_channels(call: NodeCall) -> Piece:
    x, scales, zeros, axis, least, most = call.args[:6]
    return _quantized(call, x, _along(call, axis, scales, zeros), least, most)


def _quantized(call: NodeCall, x: Piece, quantities: Sequence[Piece], least: int, most: int) -> Piece:
    _check(call, x.dtype, call.dtype)
    text = f"min(max(round({{}}*(1/{{}})) + {{}}, {number(least)}), {number(most)})"
    return mapped(f"{TYPES[call.dtype].name}({text})".format, x, *_spread(call, quantities),
                  dtype=call.dtype, label="quantize", work=5)


@row(f"{OPERATORS}dequantize_per_tensor", f"{OPERATORS}dequantize_per_tensor.tensor")
def _dequantize(call: NodeCall) -> Piece:
    x, scale, zero = call.args[:3]
    if isinstance(scale, Piece):
        return _dequantized(call, x, (scale, zero))
    _check(call, call.dtype, x.dtype)
    text = f"(f32({{}}) - {number(zero)})*{number(scale)}" if zero else f"f32({{}})*{number(scale)}"
    return mapped(text.format, x, dtype=call.dtype, label="dequantize", work=2)


@row(f"{OPERATORS}dequantize_per_channel")
def _dequantize_channels(call: NodeCall) -> Piece:
    x, scales, zeros, axis = call.args[:4]
    return _dequantized(call, x, _along(call, axis, scales, zeros))


def _dequantized(call: NodeCall, x: Piece, quantities: Sequence[Piece]) -> Piece:
    _check(call, call.dtype, x.dtype)
    scale, *zero = _spread(call, quantities)
    text = "(f32({}) - {})*{}" if zero else "f32({})*{}"
    return mapped(text.format, x, *zero, scale, dtype=call.dtype, label="dequantize", work=2)


def _check(call: NodeCall, real: torch.dtype, whole: torch.dtype) -> None:
    """Raises NotOurs for types that no text has."""
    if kind(real) != "float" or real not in TYPES:
        raise NotOurs(f"{str(real).removeprefix('torch.')} is not computed with")
    if kind(whole) != "int" or whole not in TYPES or TYPES[whole].bits > 8:
        raise NotOurs(f"{call.name} of {str(whole).removeprefix('torch.')}")


def _along(call: NodeCall, axis: int, *quantities: Any) -> list[Piece]:
    """One value for each channel, along the axis of the channels."""
    shape = [1] * len(call.shape)
    return [reshaped(q, [*shape[:axis], q.shape[0], *shape[axis + 1:]])
            for q in quantities if q is not None]


def _spread(call: NodeCall, quantities: Sequence[Piece]) -> list[Piece]:
    """The quantities in f32, in the shape of the result."""
    rank = len(call.shape)
    made = []
    for q in quantities:
        wide = q if kind(q.dtype) == "float" else cast(q, torch.float32)
        whole = wide if len(wide.shape) == rank else reshaped(wide, [1] * rank)
        made.append(expanded(whole, call.shape))
    return made
