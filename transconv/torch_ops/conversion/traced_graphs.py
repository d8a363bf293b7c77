"""Models as graphs of torch.fx: with the writes that fx itself loses, which nodes write to what, and what
follows a convolution.

    y = x
    y += conv(x)        fx writes an addition with a result of its own, and x keeps its value;
    return relu(y) + x  here it is an addition in place, which x shows

What no graph can hold is refused: a write to an attribute of a tensor or of the model, random numbers that
are drawn while the model is traced, an autocast inside of it, and hooks of the model itself."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.nn.utils.fusion import fuse_conv_bn_weights

from transconv.compute import OPS, named
from transconv.runtime import torch_internals
from transconv.support import records

# Functions that return new memory.
_FRESH = (torch.nn.modules.conv._ConvNd, torch.nn.modules.batchnorm._BatchNorm, torch.nn.Linear)
IN_PLACE = tuple(
    "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul".split()
)
_IN_PLACE = (*(getattr(operator, name) for name in IN_PLACE), operator.setitem)
_KNOWN = ("torch", "_operator", "operator", "builtins", "math", "transconv")


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether code may see or change inputs or outputs: a hook, or a forward that was given to
    the module alone, as those of `accelerate` do."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or not _OWN.isdisjoint(vars(module))
    )


_OWN = {"forward", "_conv_forward", "_call_impl"}


def stays(
    traced: fx.GraphModule, value: fx.Node, first: fx.Node, last: fx.Node, chain: list[fx.Node]
) -> bool:
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
        in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__")
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
    if target in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or _inplace(node):
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


OWN = ("node", "tracer", "_node", "attr", "root")  # what fx keeps in a proxy
DEVICES = ("cpu", "cuda")


class Writable(fx.Proxy):
    """A proxy whose operators in place are operators in place of the graph."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in OWN:
            raise RuntimeError(
                f"the model writes to the attribute {name} of a tensor, which torch.fx "
                "loses; expected a model whose forward writes to none"
            )
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
            raise RuntimeError(
                "the model enters or leaves an autocast, which torch.fx loses; expected "
                "one around the call of the model"
            )
        return super().create_node(*args, **kwargs)

    def traced(self, model: torch.nn.Module) -> fx.GraphModule:
        """The model as a graph. Raises RuntimeError for what that would lose, ValueError for names that
        are code in the text of the graph, and fx's errors."""
        if is_hooked(model):
            raise RuntimeError(
                "the model has hooks or a forward of its own, which torch.fx loses; "
                "expected them on modules inside of it, or none"
            )
        self.cast = _casts()
        held, drawn = dict(_held(model)), _drawn()
        graph = self.trace(model)
        if name := next((n for n, value in _held(model) if not _same(held.get(n), value)), ""):
            raise RuntimeError(
                f"the model writes to its {name}, which torch.fx loses; expected a model "
                "whose forward leaves it as it is"
            )
        if not _same(drawn, _drawn()):
            raise RuntimeError(
                "the model draws random numbers, which torch.fx would draw once for all "
                "calls; expected none, or ones like a tensor that is given"
            )
        refuse_code(graph)
        for node in graph.nodes:
            node.type = None  # no use of an annotation, and one that is a text cannot be pickled
        return fx.GraphModule(model, graph)


def refuse_code(graph: fx.Graph) -> None:
    """Raises ValueError for names that Python would read as something else: fx writes those of modules,
    parameters and buffers into the text of its function, and executes it."""
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr", "call_method") and (
            odd := next((part for part in str(node.target).split(".") if not _is_plain(part)), None)
        ):
            raise ValueError(
                f"the name {odd!r:.200} of a module, a parameter or a method means something "
                "else in the text that torch.fx executes; expected no quotes, backslashes, "
                "control characters and keywords; give it another name"
            )


def _is_plain(part: str) -> bool:
    """Whether a part of a name is itself in a text of Python: a word, or what may stand in quotes."""
    if part.isidentifier():
        return records.is_name(part)
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
                yield (
                    f"{dot}{own}",
                    [*value.items()]
                    if isinstance(value, dict)
                    else ([*value] if isinstance(value, (list, tuple, set)) else [value]),
                )


NN = frozenset(vars(torch.nn.Module()))  # what torch keeps in each


def _same(one: Any, other: Any) -> bool:
    """Whether two lists have the same objects, or equal numbers and words."""
    return (
        isinstance(one, list)
        and len(one) == len(other)
        and all(
            a is b
            or (isinstance(a, (bool, int, float, str)) and type(a) is type(b) and a == b)
            or (isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and _same([*a], [*b]))
            for a, b in zip(one, other, strict=True)
        )
    )


_NORMS = {1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d, 3: torch.nn.BatchNorm3d}


class ChainTracer(WriteTracer):
    """Ends at modules of some classes, and at activations. By default at all, as in the text of a graph,
    which is traced again where a pickled one is loaded."""

    def __init__(self, ends: Callable[[type], bool] = callable) -> None:
        super().__init__()
        self.ends = ends

    def is_leaf_module(self, m: torch.nn.Module, name: str) -> bool:
        return self.ends(type(m)) or bool(_spelled(type(m), m)) or super().is_leaf_module(m, name)


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def norm_after(traced: fx.GraphModule, node: fx.Node, conv: Any) -> fx.Node | None:
    user = only_user(node)
    if user is None or user.op != "call_module":
        return None
    norm: Any = traced.get_submodule(str(user.target))
    good = (
        type(norm) is _NORMS.get(len(conv.kernel_size))
        and not norm.training
        and norm.running_mean is not None
        and not is_hooked(norm)
        and not _is_read(traced, str(node.target))
    )
    return user if good else None


def _is_read(traced: fx.GraphModule, name: str) -> bool:
    """Whether parameters of a module are read outside its call."""
    return any(n.op == "get_attr" and str(n.target).rpartition(".")[0] == name for n in traced.graph.nodes)


def activation_after(traced: fx.GraphModule, node: fx.Node) -> str:
    user = only_user(node)
    if user is None:
        return ""
    if user.op == "call_module":
        module: Any = traced.get_submodule(str(user.target))
        return "" if is_hooked(module) else _spelled(type(module), module)
    if user.op == "call_function":
        return (_spelled(user.target) if _takes_one(user) else "") or _with_options(user)
    if user.op == "call_method":
        return _spelled(f".{user.target}") if _takes_one(user) else ""
    return ""


def _takes_one(user: fx.Node) -> bool:
    """Whether a call has one operand, and no argument beside ``inplace``."""
    if len(user.args) == 1 and not {*user.kwargs} - {"inplace"}:
        return True
    return (
        callable(user.target)
        and inspect.isfunction(user.target)
        and ([*inspect.signature(user.target).parameters][1:] == ["inplace"])
    )


def _with_options(user: fx.Node) -> str:
    """The activation that a call of a function with options is (gelu's ``approximate``); without a word
    it is the function's first row."""
    rows = [op for op in OPS.values() if op.activation and op.options and user.target is named(op.torch)]
    if len(user.args) != 1 or not rows:
        return ""
    return next((op.name for op in rows if dict(user.kwargs or op.options) == dict(op.options)), "")


def _spelled(target: Any, module: Any = None) -> str:
    """The activation that a function, ``.method`` or type of module is; one of several rows of a
    module is the one whose options it has."""
    for op in OPS.values():
        if op.activation:
            names = op.spelled if op.options else (op.torch, *op.spelled)
            if any(target == (n if str(n).startswith(".") else named(n)) for n in names) and (
                module is None or all(getattr(module, k) == v for k, v in op.options)
            ):
                return op.name
    return ""


def norm_folded(conv: Any, weight: Any, bias: Any, norm: Any) -> tuple[torch.nn.Parameter, Any]:
    """A weight and a bias of a convolution with a batch norm folded into them, in their types. The output
    channels of a group are the second dim of a transposed one's weight, where torch's own function ignores
    groups."""
    held = weight.detach()
    if conv.transposed:  # ic/g, g*(oc/g), *k
        held = held.unflatten(0, (conv.groups, -1)).transpose(0, 1).flatten(1, 2)
    made, added = fuse_conv_bn_weights(
        torch.nn.Parameter(held),
        bias,
        norm.running_mean,
        norm.running_var,
        norm.eps,
        norm.weight,
        norm.bias,
        transpose=conv.transposed,
    )
    folded: Any = made.detach()
    if conv.transposed:
        folded = folded.unflatten(1, (conv.groups, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return torch.nn.Parameter(folded, weight.requires_grad), added
