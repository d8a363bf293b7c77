"""Concatenations in joint graphs of forward and backward: sums and casts that are written as such, so that
what computes a part may store it where it stands.

    slice_scatter(0, a) + slice_scatter(0, b)    cat(a, b), if they share no element; select_scatter too
    cast(cat(a, b))                              cat(cast(a), cast(b)): the same numbers
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from transconv.graph.fusion.index_ir import holds
from transconv.graph.regions.function_graphs import replace_node

aten = torch.ops.aten
SUM = aten.add.Tensor
SCATTERS = (aten.select_scatter.default, aten.slice_scatter.default)
ZEROS = (aten.full.default, aten.new_zeros.default)
MOST_PARTS = 32  # of a concatenation, which kernels that read it choose from at each element
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def listed(cat: fx.Node) -> list[fx.Node]:
    """The parts of a concatenation."""
    found: Any = cat.args[0]
    return [*found]


def is_known(x: fx.Node) -> bool:
    """Whether a value is a tensor whose sizes and strides are numbers."""
    val = x.meta.get("val")
    return isinstance(val, torch.Tensor) and all(isinstance(n, int) for n in (*val.shape, *val.stride()))


def join_slices(graph: fx.Graph) -> None:
    """Write a sum of gradients of slices along one dim, of which no two share an element, as a
    concatenation: what computes a part may store it in place. Elements of no slice are zeros."""
    for node in reversed([*graph.nodes]):
        if node.target is not SUM or not node.users or not is_known(node):
            continue
        found = [_scattered(leaf) for leaf in _terms(node)]
        slices = sorted((s for s in found if s is not None), key=lambda s: s.first)
        ends = [0, *(s.last for s in slices)]
        if (
            not len(found) == len(slices) <= MOST_PARTS
            or len({s.dim for s in slices}) > 1
            or any(s.first < end for s, end in zip(slices, ends, strict=False))
        ):
            continue
        replace_node(node, aten.cat.default, (_parts(graph, node, slices), slices[0].dim))
    for node in reversed([*graph.nodes]):
        if node.target in (SUM, *SCATTERS, *ZEROS) and not node.users:
            graph.erase_node(node)


class ScatteredSlice(NamedTuple):
    """A tensor that is zeros but for a slice, elements ``first`` to ``last`` - 1 along ``dim``."""

    dim: int
    first: int
    last: int
    source: fx.Node
    without: bool  # whether ``source`` has no such dim


def _terms(whole: fx.Node) -> list[Any]:
    """The terms of a sum of tensors of one shape, whose partial sums have no other reader."""
    found: list[Any] = []
    left: list[Any] = [whole]
    while left:
        node = left.pop()
        if (
            isinstance(node, fx.Node)
            and node.target is SUM
            and not node.kwargs
            and (node is whole or len(node.users) == 1)
            and node.meta["val"].shape == whole.meta["val"].shape
        ):
            left += node.args
        else:
            found.append(node)
    return found


def _scattered(node: Any) -> ScatteredSlice | None:
    """What a term is, if it is a slice in a tensor of zeros."""
    if not isinstance(node, fx.Node) or node.target not in SCATTERS or not is_known(node):
        return None
    bound = dict(zip(("zeros", "source", "dim", "start", "end", "step"), node.args, strict=False))
    zeros, source, val = bound["zeros"], bound["source"], node.meta["val"]
    numbers = [bound.get(name, 0) for name in ("dim", "start", "end")]
    if (
        not isinstance(zeros, fx.Node)
        or zeros.target not in ZEROS
        or (zeros.target is aten.full.default and zeros.args[1] != 0)
        or not isinstance(source, fx.Node)
        or not is_known(source)
        or source.meta["val"].dtype is not val.dtype
        or bound.get("step", 1) != 1
        or any(not isinstance(n, int | None) for n in numbers)
        or node.kwargs
    ):
        return None
    dim = numbers[0] % val.ndim
    size, start = val.shape[dim], bound.get("start")
    if node.target is aten.select_scatter.default:
        return ScatteredSlice(dim, start % size, start % size + 1, source, True)
    first, last, _ = slice(start, bound.get("end")).indices(size)
    return ScatteredSlice(dim, first, last, source, False) if first < last else None


def _parts(graph: fx.Graph, node: fx.Node, slices: Sequence[ScatteredSlice]) -> list[fx.Node]:
    """The parts of a concatenation, with zeros in gaps."""
    val, made, at = node.meta["val"], list[fx.Node](), 0

    def zeros(until: int) -> None:
        shape = [*val.shape]
        shape[slices[0].dim] = until - at
        if until > at:
            options = {"dtype": val.dtype, "device": val.device, "pin_memory": False}
            made.append(graph.call_function(aten.full.default, (shape, 0), options))
            made[-1].meta["val"] = val.new_zeros(shape)

    with graph.inserting_before(node):
        for s in slices:
            zeros(s.first)
            made.append(s.source)
            if s.without:
                made[-1] = graph.call_function(aten.unsqueeze.default, (s.source, s.dim))
                made[-1].meta["val"] = s.source.meta["val"].unsqueeze(s.dim)
            at = s.last
        zeros(val.shape[slices[0].dim])
    return made


def parts_cast(graph: fx.Graph) -> None:
    """Write a cast of a concatenation as a concatenation of casts."""
    for node in [*graph.nodes]:
        cat = node.args[0] if node.target in CASTS and node.args else None
        if not isinstance(cat, fx.Node) or cat.target is not aten.cat.default or len(cat.users) > 1:
            continue
        dtype = node.meta["val"].dtype
        if {*node.kwargs} - {"dtype"} or not all(_narrows(x, cat, dtype) for x in listed(cat)):
            continue
        with graph.inserting_before(node):
            parts = [_cast(graph, x, dtype) for x in listed(cat)]
        replace_node(node, aten.cat.default, (parts, *cat.args[1:]))
        graph.erase_node(cat)


def _narrows(x: fx.Node, cat: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a part has the same numbers if it is cast at once: the concatenation holds all of it."""
    own, wide = x.meta["val"].dtype, cat.meta["val"].dtype
    return own is wide or (own is dtype and holds(wide, own))


def _cast(graph: fx.Graph, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A part in the narrower type: what it was widened from, where that has the type."""
    of = x.args[0] if x.target in CASTS else None
    if x.meta["val"].dtype is dtype:
        return x
    if isinstance(of, fx.Node) and of.meta["val"].dtype is dtype and holds(x.meta["val"].dtype, dtype):
        return of
    made = graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})
    made.meta["val"] = x.meta["val"].to(dtype)
    return made
