"""Aliases: values of a graph that are in the same memory, as torch says of its operations.

    split_with_sizes(x, ...), getitem    views of x                  by the operation's schema
    _unsafe_view(x, ...)                 x's memory by another name  by the traced values, which share it

The schema alone tells of a view whose base was replaced by another call of the same value, such as
``add(x, 0.5)`` by ``add(x, tensor)`` where numbers are symbols: the traced values share nothing any more.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from transconv.runtime import torch_internals


def base_of(node: fx.Node) -> fx.Node | None:
    """The node that another one may be a view of: its first operand, or that of the call of which it is
    one of several results."""
    made = call_of(node)
    first = made.args[0] if made.args else None
    return first if isinstance(first, fx.Node) else None


def call_of(node: fx.Node) -> fx.Node:
    """The call that makes a value, of which it may be one of several results."""
    made = node.args[0] if node.target is operator.getitem else node
    return made if isinstance(made, fx.Node) else node


def is_view(node: fx.Node) -> bool:
    """Whether a value is in the memory of its base. Of operations that are written as others, such as
    ``reshape``, the traced values tell whether it is a copy."""
    base, op = base_of(node), call_of(node).target
    own, whole = _storage(node), None if base is None else _storage(base)
    if own is None or whole is None:
        return False
    return own == whole or (
        isinstance(op, torch_internals.OpOverload) and bool(op.is_view and not op._can_decompose())
    )


def may_view(node: fx.Node) -> bool:
    """Whether a value may be in memory of something else: a schema says so, or there is none."""
    schema = getattr(call_of(node).target, "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def memory(node: fx.Node) -> int | None:
    """What the memory of a tensor is known by, which its views have too; None for other values."""
    while is_view(node) and (base := base_of(node)) is not None:
        node = base
    return _storage(node)


def readers(x: fx.Node) -> Iterator[fx.Node]:
    """What reads a value or a view of it."""
    left = [*x.users]
    while left:
        at = left.pop()
        yield at
        if at.op == "call_function" and may_view(at):
            left += [*at.users]


def _storage(node: fx.Node) -> int | None:
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor) and val.layout is torch.strided:
        return int(val.untyped_storage()._cdata)
    return None
