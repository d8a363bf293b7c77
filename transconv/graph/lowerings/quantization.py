"""Quantised graphs: rows of quantisation as torch's PT2E writes it, and of quantised convolutions.

    quantize    i8(min(max(round(x * (1/scale)) + zero, least), most))
    dequantize  (f32(q) - zero) * scale

These are maps, so that they are fused with what stands before and behind them; the products between them
are those of floats, but convolutions of dequantised tensors become products of the integers themselves:

    dequantize(q), dequantize(w) -> convolution [-> relu] [-> quantize]
    ->  transconv::quantized_convolution(q, w, ...)

which sums exactly and has all of it in one kernel. Groups of few channels fill no matrix unit and stay
maps and products of floats. Behind the sum (integers in s32, floats in f32) stand maps:

    sum [- what the input's zero point adds] * (input_scale*weight_scale) [+ bias] [+ residual]
    [activation] [* (1/output_scale)] [+ zero point], rounded once

What is quantised is divided by its scale and rounded once, with the zero point: where torch multiplies by
1/scale and rounds before it adds, halves may go to the other neighbour."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import fx

from transconv.compute import OPS
from transconv.conv import zero_sums_shape
from transconv.graph.fusion.index_ir import TYPES, MovedView, Piece
from transconv.graph.lowerings.products import convolved, params
from transconv.graph.lowerings.table import (
    NodeCall,
    NotOurs,
    cast,
    expanded,
    is_small,
    kind,
    mapped,
    number,
    reshaped,
    row,
)
from transconv.graph.sizes import Index, Length, SymbolicSize
from transconv.ir import maximum
from transconv.runtime import torch_internals
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.conversion.traced_graphs import only_user
from transconv.torch_ops.operators import quantized_convolution
from transconv.torch_ops.quantized.quantized_route import QUANTITIES

with suppress(ImportError):  # where torch defines these operators
    import torch.ao.quantization.fx._decomposed

OPERATORS = "quantized_decomposed::"


@row(*(f"{OPERATORS}quantize_per_{kind_}" for kind_ in ("tensor", "tensor.tensor", "channel")))
def _quantize(call: NodeCall) -> Piece:
    x, scale, zero, *rest = call.args
    axis = rest.pop(0) if "channel" in call.name else 0
    _check(call, x.dtype, call.dtype)
    given = [x]
    inverse = (
        f"(1/{_operand(scale, call.shape, axis, given)})"
        if isinstance(scale, Piece)
        else (number(1 / scale))
    )
    least, most = map(number, rest[:2])
    text = f"min(max(round({{0}}*{inverse}) + {_operand(zero, call.shape, axis, given)}, {least}), {most})"
    return mapped(
        f"{TYPES[call.dtype].name}({text})".format,
        *given,
        dtype=call.dtype,
        label="quantize",
        work=4 if len(given) == 1 else 5,
    )


@row(*(f"{OPERATORS}dequantize_per_{kind_}" for kind_ in ("tensor", "tensor.tensor", "channel")))
def _dequantize(call: NodeCall) -> Piece:
    x, scale, zero = call.args[:3]
    axis = call.args[3] if "channel" in call.name else 0
    _check(call, call.dtype, x.dtype)
    given = [x]
    moved = isinstance(zero, Piece) or zero
    text = f"(f32({{0}}) - {_operand(zero, call.shape, axis, given)})" if moved else "f32({0})"
    text += f"*{_operand(scale, call.shape, axis, given)}"
    return mapped(text.format, *given, dtype=call.dtype, label="dequantize", work=2)


def _check(call: NodeCall, real: torch.dtype, whole: torch.dtype) -> None:
    """Raises NotOurs for types that no text has."""
    if kind(real) != "float" or real not in TYPES:
        raise NotOurs(f"{str(real).removeprefix('torch.')} is not computed with")
    if kind(whole) != "int" or whole not in TYPES or TYPES[whole].bits > 8:
        raise NotOurs(f"{call.name} of {str(whole).removeprefix('torch.')}")


def _operand(q: Any, shape: Sequence[Length], axis: int, given: list[Piece]) -> str:
    """A quantity in a text: a number, or the place of an operand that is added to those ``given``, one
    number or one for each position along an axis of the shape, in f32."""
    if not isinstance(q, Piece):
        return number(q)
    wide = q if kind(q.dtype) == "float" else cast(q, torch.float32)
    sizes = [wide.size if d == axis else 1 for d in range(len(shape))]
    given.append(expanded(reshaped(wide, sizes), shape))
    return f"{{{len(given) - 1}}}"


# -- convolutions -------------------------------------------------------------------------------------


NARROW = (torch.bfloat16, torch.float16, torch.float32)


class _Said(NamedTuple):
    """The quantities of a call, each a piece or a number, and the rest of its words."""

    quantities: dict[str, Any]
    made: torch.dtype
    activation: str
    fast: bool


@row("transconv::quantized_convolution")
def _convolution(call: NodeCall) -> Piece:
    x, w, bias, *rest = call.args
    said, p = _said(rest[6:]), params(rest)
    if x.dtype is torch.uint8 or w.dtype is torch.uint8:
        raise NotOurs("it has a kernel of its own: elements of u8 are multiplied as s8")
    if said.quantities["weight_zero_point"] != 0:
        raise NotOurs("it has a kernel of its own: zero points of weights are subtracted")
    if kind(w.dtype) == "int" and kind(x.dtype) == "float":
        w = cast(w, x.dtype)
    summed = torch.int32 if kind(x.dtype) == "int" else torch.float32
    fast = "tf32" if said.fast else None
    total: Piece = convolved(call.shape, x, w, p, summed, fast)
    if said.quantities["input_zero_point"] != 0:
        total = _without_zeros(total, said.quantities["input_zero_sums"], x, w, p)
    return _finished(call, total, bias, said)


def _said(given: list[Any]) -> _Said:
    """Raises NotOurs."""
    tensors, numbers, made, activation, fast, *seed = given
    if seed and seed[0] is not None:
        raise NotOurs("it has a kernel of its own: a result is rounded at random")
    if activation and (activation not in OPS or OPS[activation].arity != 1):
        raise NotOurs(f"it has a kernel of its own, with {activation}")
    found = {n: v if t is None else t for n, t, v in zip(QUANTITIES, tensors, numbers, strict=True)}
    return _Said(found, made, activation, fast)


def _without_zeros(total: Piece, sums: Any, x: Piece, w: Piece, p: Params) -> Piece:
    """The sum without what the zero point of the input adds (conv/compensation.py)."""
    if not isinstance(sums, Piece) or p.transposed:
        raise NotOurs("it has a kernel of its own: no input_zero_sums tell what the zero point adds")
    if any(isinstance(n, SymbolicSize) for n in x.shape[2:]):
        raise NotOurs("it has a kernel of its own: zero points beside sizes that are names")
    if sums.shape != zero_sums_shape(int(total.shape[1]), p.pad_lo, p.pad_hi):
        raise NotOurs(f"it has a kernel of its own: input_zero_sums have the shape {sums.shape}")
    ends = zip(p.stride, p.pad_lo, p.dilation, w.shape[2:], x.shape[2:], strict=True)
    axes = [(s, low, (k - 1) * d - low - (n - 1)) for s, low, d, k, n in ends]

    def move(at: Index) -> Index:
        places = [
            (maximum(low - e * s, 0), maximum(e * s + high, 0))
            for e, (s, low, high) in zip(at[2:], axes, strict=True)
        ]
        own = [e if n != 1 else e * 0 for e, n in zip(chain(*places), sums.shape[1:], strict=True)]
        return at[1], *own

    seen = MovedView(shape=total.shape, dtype=sums.dtype, of=sums, move=move, label="expand")
    return mapped("{} - {}".format, total, seen, dtype=total.dtype, label="zero point")


def _finished(call: NodeCall, total: Piece, bias: Piece | None, said: _Said) -> Piece:
    """What stands in the epilogue."""
    q = said.quantities
    value = (
        mapped("f32({})".format, total, dtype=torch.float32, label="cast")
        if (total.dtype is torch.int32)
        else total
    )

    def apply(text: str, *quantities: Any, label: str) -> None:
        nonlocal value
        given = [value]
        said = [
            _operand(q if isinstance(q, Piece) else float(q), call.shape, 1, given) for q in quantities
        ]
        value = mapped(text.format("{0}", *said).format, *given, dtype=torch.float32, label=label)

    apply("{}*({}*{})", q["input_scale"], q["weight_scale"], label="dequantize")
    if bias is not None:
        apply("{} + {}", bias, label="bias")
    if isinstance(q["residual"], Piece):
        value = mapped("{} + {}".format, value, q["residual"], dtype=torch.float32, label="add")
    if said.activation:
        value = mapped(
            f"{said.activation}({{}})".format, value, dtype=torch.float32, label=said.activation
        )
    if q["output_scale"] != 1:
        apply("{}*(1/{})", q["output_scale"], label="requantize")
    if q["output_zero_point"] != 0:
        apply("{} + {}", q["output_zero_point"], label="zero point")
    return _stored(value, said.made)


def _stored(value: Piece, dtype: torch.dtype) -> Piece:
    """Rounded once; beyond the range of the type its largest and smallest number."""
    if dtype is torch.float32:
        return value
    if dtype in NARROW:
        return cast(value, dtype)
    if not is_small(dtype):
        raise NotOurs(f"it has a kernel of its own, with results in {str(dtype).removeprefix('torch.')}")
    held = TYPES[dtype]
    low, high = (number(n) for n in held.range)
    text = f"min(max({{}}, {low}), {high})"
    text = f"{held.name}({f'nearest_small({text})' if held.kind == 'int' else text})"
    return mapped(text.format, value, dtype=dtype, label="quantize", work=3)


INTEGERS = (torch.int8, torch.uint8)
LEAST_CHANNELS = 16  # of a group, on both sides
DEQUANTIZERS = "quantized_decomposed."
aten = torch.ops.aten


class _Whole(NamedTuple):
    """Integers, and the real number that one of them is: ``scale*(value - zero)``, numbers or nodes."""

    value: fx.Node
    scale: Any
    zero: Any
    axis: int | None = None  # the dim of scales and zeros, if there is one for each of its positions


def joined(graph: fx.Graph) -> None:
    """Rewrite those that a kernel of integers computes, in place."""
    found = [
        (n, made)
        for n in graph.nodes
        if n.target is aten.convolution.default and (made := _integers(n)) is not None
    ]
    for node, operands in found:
        _replace(graph, node, *operands)
    if found:
        graph.eliminate_dead_code()


def _dequantised(node: Any) -> _Whole | None:
    """The integers that a node makes real."""
    name = str(getattr(node, "target", ""))
    if not name.startswith(f"{DEQUANTIZERS}dequantize_per_"):
        return None
    value, scale, zero, *rest = node.args
    if value.meta["val"].dtype not in INTEGERS:
        return None
    return _Whole(value, scale, 0 if zero is None else zero, rest[0] if "channel" in name else None)


def _integers(node: fx.Node) -> tuple[_Whole, _Whole] | None:
    """The two operands of a convolution as integers, if one kernel multiplies them."""
    x, w = (_dequantised(a) for a in node.args[:2])
    transposed, groups = node.args[6], node.args[8]
    if x is None or w is None or x.axis is not None or w.axis not in (None, int(bool(transposed))):
        return None
    if groups != 1 and (w.zero != 0 or (transposed and w.axis is not None)):
        return None
    shapes = [t.value.meta["val"].shape for t in (x, w)]
    if not all(isinstance(n, int) for shape in shapes for n in shape):
        return None
    inner, outer = shapes[1][1], shapes[1][0] // groups
    return (x, w) if min(inner, outer) >= LEAST_CHANNELS else None


def _replace(graph: fx.Graph, node: fx.Node, x: _Whole, w: _Whole) -> None:
    """The operator in the place of the convolution, or of what alone follows it."""
    given: dict[str, Any] = {
        "input_scale": x.scale,
        "input_zero_point": x.zero,
        "weight_scale": w.scale,
        "weight_zero_point": w.zero,
    }
    last, activation = node, ""
    if (after := only_user(last)) is not None and after.target is aten.relu.default:
        last, activation = after, "relu"
    if (after := only_user(last)) is not None and _is_quantised(after):
        last = after
        given |= {"output_scale": after.args[1], "output_zero_point": after.args[2]}
    values = [given.get(name, 1.0 if name == "output_scale" else 0) for name in QUANTITIES]
    nodes = [v if isinstance(v, fx.Node) else None for v in values]
    numbers = [0.0 if isinstance(v, fx.Node) else float(v) for v in values]
    dtype = last.meta["val"].dtype
    operands = (x.value, w.value, *node.args[2:], nodes, numbers, dtype, activation, False)
    with graph.inserting_before(last):
        made = graph.call_function(quantized_convolution, operands)
    val = _value_of(made)
    if val is None or val.stride() != last.meta["val"].stride():
        graph.erase_node(made)
        return
    made.meta = dict(last.meta) | {"val": val}
    last.replace_all_uses_with(made)


def _is_quantised(node: fx.Node) -> bool:
    """Whether a node makes integers of the whole range of their type, with numbers that are known."""
    if node.target is not torch.ops.quantized_decomposed.quantize_per_tensor.default:
        return False
    _, _, _, least, most, dtype = node.args
    if not isinstance(dtype, torch.dtype) or dtype not in INTEGERS:
        return False
    held = torch.iinfo(dtype)
    return (least, most) == (held.min, held.max)


def _value_of(node: fx.Node) -> torch.Tensor | None:
    """What the operator makes of tensors without memory; None where it refuses them."""
    arguments = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    mode = torch_internals.detect_fake_mode([t for t in arguments if isinstance(t, torch.Tensor)])
    if mode is None:
        return None
    try:
        with mode:
            found: torch.Tensor = quantized_convolution(*arguments)
    except (RuntimeError, TypeError, ValueError):
        return None
    return found
