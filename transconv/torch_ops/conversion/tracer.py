"""torch.fx's trace of a model, with the writes that fx itself loses.

    y = x
    y += conv(x)        fx writes an addition with a result of its own, and x keeps its value;
    return relu(y) + x  here it is an addition in place, which x shows

What no graph can hold is refused: a write to an attribute of a tensor or of the model, random numbers that
are drawn while the model is traced, an autocast inside of it, and hooks of the model itself.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from transconv.disk_cache import fields
from transconv.torch_ops.conversion.mutation_analysis import is_hooked

IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
            "ilshift", "irshift", "imatmul")
OWN = ("node", "tracer", "_node", "attr", "root")  # what fx keeps in a proxy
DEVICES = ("cpu", "cuda")


class Writable(fx.Proxy):
    """A proxy whose operators in place are operators in place of the graph."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in OWN:
            raise RuntimeError(f"the model writes to the attribute {name} of a tensor, which torch.fx "
                               "loses; expected a model whose forward writes to none")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> WritableAttribute:
        return WritableAttribute(self, name)


class WritableAttribute(Writable, fx.proxy.Attribute):
    """An attribute of such a proxy."""


def _in_place(name: str) -> Any:
    target = getattr(operator, name)

    def operation(self: Writable, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (self, other), {})
    return operation


for _name in IN_PLACE:
    setattr(Writable, f"__{_name}__", _in_place(_name))


class WriteTracer(fx.Tracer):
    """fx's tracer, with ``Writable`` proxies."""

    cast: tuple[bool, ...] = ()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A proxy of a node."""
        return Writable(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node. Raises RuntimeError inside of an autocast that the model enters itself."""
        if self.cast and self.cast != _casts():
            raise RuntimeError("the model enters or leaves an autocast, which torch.fx loses; expected "
                               "one around the call of the model")
        return super().create_node(*args, **kwargs)

    def traced(self, model: torch.nn.Module) -> fx.GraphModule:
        """The model as a graph. Raises RuntimeError for what that would lose, ValueError for names that
        are code in the text of the graph, and fx's errors."""
        if is_hooked(model):
            raise RuntimeError("the model has hooks or a forward of its own, which torch.fx loses; "
                               "expected them on modules inside of it, or none")
        self.cast = _casts()
        held, drawn = dict(_held(model)), _drawn()
        graph = self.trace(model)
        if (name := next((n for n, value in _held(model) if not _same(held.get(n), value)), "")):
            raise RuntimeError(f"the model writes to its {name}, which torch.fx loses; expected a model "
                               "whose forward leaves it as it is")
        if not _same(drawn, _drawn()):
            raise RuntimeError("the model draws random numbers, which torch.fx would draw once for all "
                               "calls; expected none, or ones like a tensor that is given")
        refuse_code(graph)
        return fx.GraphModule(model, graph)


def refuse_code(graph: fx.Graph) -> None:
    """Raises ValueError for names that Python would read as something else: fx writes those of modules,
    parameters and buffers into the text of its function, and executes it."""
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr", "call_method") and (
                odd := next((part for part in str(node.target).split(".") if not _is_plain(part)), None)):
            raise ValueError(f"the name {odd!r:.200} of a module, a parameter or a method means something "
                             "else in the text that torch.fx executes; expected no quotes, backslashes, "
                             "control characters and keywords; give it another name")


def _is_plain(part: str) -> bool:
    """Whether a part of a name is itself in a text of Python: a word, or what may stand in quotes."""
    if part.isidentifier():
        return fields.is_name(part)
    return part.isprintable() and not {*part} & {'"', "'", "\\"}


def _casts() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(device) for device in DEVICES)


def _drawn() -> list[Any]:
    """Where random numbers begin."""
    return [torch.get_rng_state().tolist()]


def _held(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """All that modules hold, by name; what is written to in place is seen by its version."""
    for name, module in model.named_modules():
        dot = f"{name}." if name else ""
        tensors = {**module._parameters, **module._buffers}
        for own, t in tensors.items():
            yield f"{dot}{own}", [t, -1 if t is None or t.is_inference() else t._version]
        for own, value in vars(module).items():
            if own not in NN and not own.startswith("_tensor_constant"):
                yield f"{dot}{own}", [*value.items()] if isinstance(value, dict) else (
                    [*value] if isinstance(value, (list, tuple, set)) else [value])


NN = frozenset(vars(torch.nn.Module()))  # what torch keeps in each


def _same(one: Any, other: Any) -> bool:
    """Whether two lists have the same objects, or equal numbers and words."""
    return isinstance(one, list) and len(one) == len(other) and all(
        a is b or isinstance(a, (bool, int, float, str)) and type(a) is type(b) and a == b
        or isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and _same([*a], [*b])
        for a, b in zip(one, other, strict=True))
