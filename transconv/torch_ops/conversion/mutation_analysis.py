"""Which values the nodes of a traced graph write to, so that no call is moved across a write."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from torch import fx

from transconv.runtime import torch_internals

# Functions that return new memory.
_FRESH = (torch.nn.modules.conv._ConvNd, torch.nn.modules.batchnorm._BatchNorm, torch.nn.Linear)
_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
             operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor,
             operator.ilshift, operator.irshift, operator.imatmul, operator.setitem)
_KNOWN = ("torch", "_operator", "operator", "builtins", "math", "transconv")


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether code may see or change inputs or outputs: a hook, or a forward that was given to
    the module alone, as those of `accelerate` do."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
                or module._backward_pre_hooks or not _OWN.isdisjoint(vars(module)))


_OWN = {"forward", "_conv_forward", "_call_impl"}


def stays(traced: fx.GraphModule, value: fx.Node, first: fx.Node, last: fx.Node,
          chain: list[fx.Node]) -> bool:
    """Whether ``value`` is unchanged at ``last`` since ``first``, an earlier node. Nodes of
    ``chain`` write to their own results alone."""
    at = first.next
    while at is not last:
        if at not in chain and _may_write(traced, at, value):
            return False
        at = at.next
    return True


def _may_write(traced: fx.GraphModule, node: fx.Node, value: fx.Node) -> bool:
    written = _written(traced, node)
    return written is None or any(_may_share(traced, w, value) for w in written)


def _may_share(traced: fx.GraphModule, written: Any, value: fx.Node) -> bool:
    """Whether two nodes may share memory: new memory is shared only with views of it."""
    while isinstance(written, fx.Node) and written.op == "call_module":
        module = traced.get_submodule(str(written.target))
        if isinstance(module, _FRESH) and not is_hooked(module):
            return written in _made_of(value)
        if not getattr(module, "inplace", False):
            return True
        written = written.args[0] if written.args else None
    return True


def _made_of(value: fx.Node) -> set[fx.Node]:
    found, new = {value}, [value]
    while new:
        for node in new.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                new.append(node)
    return found


def _written(traced: fx.GraphModule, node: fx.Node) -> list[Any] | None:
    """The values that a node writes to; None if unknown."""
    first = next(iter((*node.args, *node.kwargs.values())), None)
    if node.op == "call_module":
        module = traced.get_submodule(str(node.target))
        if is_hooked(module) or not type(module).__module__.startswith(("torch.", "transconv.")):
            return None
        return [first] if getattr(module, "inplace", False) else []
    if node.op == "call_method":
        name = str(node.target)
        in_place = name.endswith("_") and not name.endswith("__") or name in ("__setitem__", "__iadd__")
        return [first] if in_place else []
    return _written_by_function(node, first) if node.op == "call_function" else []


def _written_by_function(node: fx.Node, first: Any) -> list[Any] | None:
    target: Any = node.target
    if isinstance(target, torch_internals.OpOverload):
        return None if target._schema.is_mutable else []
    if str(getattr(target, "__module__", None) or "torch").partition(".")[0] not in _KNOWN:
        return None
    name = getattr(target, "__name__", "")
    out = node.kwargs.get("out")
    if target in _IN_PLACE or name.endswith("_") and not name.endswith("__") or _inplace(node):
        return [first, out]
    return [] if out is None else [out]


def _inplace(node: fx.Node) -> bool:
    """Whether `inplace` is set, by keyword or by position."""
    target: Any = node.target
    try:
        given = inspect.signature(target).bind_partial(*node.args, **node.kwargs)
    except (TypeError, ValueError):  # of a function in C
        return bool(node.kwargs.get("inplace"))
    return bool(given.arguments.get("inplace"))
