"""Inputs that a graph writes to: running statistics, caches.

AOTAutograd writes them at a graph's end, ``copy_(input, value)``. The values become results, and all
inputs are written by one call behind the graph: a launch for each takes the host longer than the kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from transconv.runtime import torch_internals

Tensor = torch.Tensor
_foreach_copy: Any = torch_internals.foreach_copy


def taken(graph: fx.Graph) -> list[int]:
    """Take the copies at a graph's end out of it. Their values become its last results, and the places of
    the inputs, in the same order, are returned. A copy whose result is used stays, one of a view of
    another input, and what is before it."""
    nodes = [*graph.nodes]
    given: list[Any] = [n for n in nodes if n.op == "placeholder"]
    copies: list[fx.Node] = []
    for node in reversed(nodes[:-1]):
        if not _is_copy(node, given) or any(node.args[0] is c.args[0] for c in copies):
            break
        copies.insert(0, node)
    results: Any = nodes[-1].args[0]
    nodes[-1].args = ((*results, *(c.args[1] for c in copies)),)
    places = [given.index(c.args[0]) for c in copies]
    for node in copies:
        graph.erase_node(node)
    return places


def _is_copy(node: fx.Node, given: Sequence[Any]) -> bool:
    """Whether a node writes to an input a value of its type and shape, in memory of its own."""
    if node.target is not torch.ops.aten.copy_.default or node.users or len(node.args) != 2:
        return False
    into, value = node.args
    if not isinstance(into, fx.Node) or not isinstance(value, fx.Node) or into not in given or (
            _is_view(value)):
        return False
    one, other = into.meta["val"], value.meta["val"]
    return bool(one.dtype is other.dtype and one.shape == other.shape and one.device == other.device)


def _is_view(value: fx.Node) -> bool:
    """Whether a value may be in memory of something else."""
    made = value.args[0] if value.target is operator.getitem else value
    schema = getattr(getattr(made, "target", None), "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def write(inputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write values to inputs, of each type by one launch or a few."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for into, value in zip(inputs, values, strict=True):
        own, new = by_type.setdefault(into.dtype, ([], []))
        own.append(into)
        new.append(value)
    with torch.no_grad():
        for own, new in by_type.values():
            _foreach_copy(own, new)
