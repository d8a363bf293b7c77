"""Convolutions of dequantised tensors, as PT2E writes them, become products of the integers themselves:

    dequantize(q), dequantize(w) -> convolution [-> relu] [-> quantize]
    ->  transconv::quantized_convolution(q, w, ...)

which sums exactly and has all of it in one kernel. Groups of few channels fill no matrix unit and stay
maps and products of floats. What is quantised is divided by its scale and rounded once, with the zero
point: where torch multiplies by 1/scale and rounds before it adds, halves may go to the other neighbour.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from transconv.runtime import torch_internals
from transconv.torch_ops.quantized.quantized_operator import QUANTITIES, operator

INTEGERS = (torch.int8, torch.uint8)
LEAST_CHANNELS = 16  # of a group, on both sides
OPERATORS = "quantized_decomposed."
aten = torch.ops.aten


class _Whole(NamedTuple):
    """Integers, and the real number that one of them is: ``scale*(value - zero)``, numbers or nodes."""

    value: fx.Node
    scale: Any
    zero: Any
    axis: int | None = None  # the dim of scales and zeros, if there is one for each of its positions


def joined(graph: fx.Graph) -> None:
    """Rewrite those that a kernel of integers computes, in place."""
    found = [(n, made) for n in graph.nodes
             if n.target is aten.convolution.default and (made := _integers(n)) is not None]
    for node, operands in found:
        _replace(graph, node, *operands)
    if found:
        graph.eliminate_dead_code()


def _dequantised(node: Any) -> _Whole | None:
    """The integers that a node makes real."""
    name = str(getattr(node, "target", ""))
    if not name.startswith(f"{OPERATORS}dequantize_per_"):
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
    if groups != 1 and (w.zero != 0 or transposed and w.axis is not None):
        return None
    shapes = [t.value.meta["val"].shape for t in (x, w)]
    if not all(isinstance(n, int) for shape in shapes for n in shape):
        return None
    inner, outer = shapes[1][1], shapes[1][0] // groups
    return (x, w) if min(inner, outer) >= LEAST_CHANNELS else None


def _replace(graph: fx.Graph, node: fx.Node, x: _Whole, w: _Whole) -> None:
    """The operator in the place of the convolution, or of what alone follows it."""
    given: dict[str, Any] = {"input_scale": x.scale, "input_zero_point": x.zero, "weight_scale": w.scale,
                             "weight_zero_point": w.zero}
    last, activation = node, ""
    if (after := _only(last)) is not None and after.target is aten.relu.default:
        last, activation = after, "relu"
    if (after := _only(last)) is not None and _is_quantised(after):
        last = after
        given |= {"output_scale": after.args[1], "output_zero_point": after.args[2]}
    values = [given.get(name, 1.0 if name == "output_scale" else 0) for name in QUANTITIES]
    nodes = [v if isinstance(v, fx.Node) else None for v in values]
    numbers = [0.0 if isinstance(v, fx.Node) else float(v) for v in values]
    dtype = last.meta["val"].dtype
    operands = (x.value, w.value, *node.args[2:], nodes, numbers, dtype, activation, False)
    with graph.inserting_before(last):
        made = graph.call_function(operator, operands)
    val = _value_of(made)
    if val is None or val.stride() != last.meta["val"].stride():
        graph.erase_node(made)
        return
    made.meta = dict(last.meta) | {"val": val}
    last.replace_all_uses_with(made)


def _only(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


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
            found: torch.Tensor = operator(*arguments)
    except (RuntimeError, TypeError, ValueError):
        return None
    return found
