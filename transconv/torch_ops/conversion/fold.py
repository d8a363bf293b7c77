"""``fold``: fuses convolution, batch norm, residual and activation of a model for inference.

Also here: torch.fx's trace of a model, with the writes that fx itself loses.

    y = x
    y += conv(x)        fx writes an addition with a result of its own, and x keeps its value;
    return relu(y) + x  here it is an addition in place, which x shows

What no graph can hold is refused: a write to an attribute of a tensor or of the model, random numbers that
are drawn while the model is traced, an autocast inside of it, and hooks of the model itself.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.nn.utils.fusion import fuse_conv_bn_weights

from transconv.compute import OPS, named
from transconv.support import records
from transconv.torch_ops import modules
from transconv.torch_ops.conversion import module_swap
from transconv.torch_ops.conversion.mutation_analysis import is_hooked, stays
from transconv.torch_ops.fused import fused_functional
from transconv.torch_ops.quantization.quantized_modules import Quantised
from transconv.torch_ops.quantized import quantized_epilogue

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
                yield f"{dot}{own}", [*value.items()] if isinstance(value, dict) else (
                    [*value] if isinstance(value, (list, tuple, set)) else [value])


NN = frozenset(vars(torch.nn.Module()))  # what torch keeps in each


def _same(one: Any, other: Any) -> bool:
    """Whether two lists have the same objects, or equal numbers and words."""
    return isinstance(one, list) and len(one) == len(other) and all(
        a is b or isinstance(a, (bool, int, float, str)) and type(a) is type(b) and a == b
        or isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and _same([*a], [*b])
        for a, b in zip(one, other, strict=True))


FUSED: dict[type, type] = {  # transposed layers have no kernel that adds or activates
    **{kind: ours for ours in (modules.ConvTranspose1d, modules.ConvTranspose2d,
                               modules.ConvTranspose3d) for kind in (ours, ours.__bases__[1])},
    torch.nn.Conv1d: fused_functional.FusedConv1d, modules.Conv1d: fused_functional.FusedConv1d,
    torch.nn.Conv2d: fused_functional.FusedConv2d, modules.Conv2d: fused_functional.FusedConv2d,
    torch.nn.Conv3d: fused_functional.FusedConv3d, modules.Conv3d: fused_functional.FusedConv3d,
    **quantized_epilogue.FUSED,
}
_ACTIVATES = (fused_functional.Activates, *quantized_epilogue.FUSED.values())
_NORMS = {1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d, 3: torch.nn.BatchNorm3d}
_ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")


class FoldTracer(WriteTracer):
    """Ends at layers that have fused forms, and at activations."""

    def is_leaf_module(self, m: torch.nn.Module, name: str) -> bool:
        ours = type(m) in FUSED or issubclass(type(m), Quantised)
        return ours or bool(_spelled(type(m), m)) or super().is_leaf_module(m, name)


def fold(model: torch.nn.Module) -> fx.GraphModule:
    """A copy of ``model`` for inference in which batch norms are folded into the weights of the
    convolutions before them, and a following addition and activation into the same call.

    The model must be in eval mode and traceable by torch.fx. Chains that are used more than once,
    whose parts have other users or hooks, whose weights are read elsewhere, or over which something
    is written in place are left as they are. RuntimeError in training mode, and for what the graph would
    lose: writes to attributes of tensors and modules, random numbers, an autocast inside, hooks of the
    model itself. ValueError for a name of a module, a parameter or a buffer that means something else in
    Python; fx's own errors for control flow that depends on values; TypeError for what is no module.
    """
    module_swap.expect_module(model, "fold")
    if model.training:
        raise RuntimeError("fold needs a model in eval mode: batch norms keep their statistics "
                           "only there; call model.eval() first")
    model = copy.deepcopy(model)
    traced = FoldTracer().traced(model)
    graph = traced.graph
    _without_identities(traced)
    uses = Counter(str(n.target) for n in graph.nodes if n.op == "call_module")
    for node in list(graph.nodes):
        if node.op == "call_module" and uses[str(node.target)] == 1:
            conv = traced.get_submodule(str(node.target))
            if (type(conv) in FUSED and not is_hooked(conv) and len(node.args) == 1
                    and not node.kwargs):
                _fold_chain(traced, node, conv)
    _quantise_results(traced)
    traced.delete_all_unused_submodules()
    graph.lint()
    traced.recompile()
    return traced


def _fold_chain(traced: fx.GraphModule, node: fx.Node, conv: Any) -> None:
    """Replace node, norm, addition, activation, as many as there are, by one call at the last's
    place: what the addition takes besides is computed by then."""
    chain = [node]
    read: Any = node.args[0]

    def extends(last: fx.Node | None) -> bool:
        return last is not None and stays(traced, read, node, last, chain)

    quantised = type(conv) in quantized_epilogue.FUSED
    norm = None if quantised else norm_after(traced, node, conv)
    if norm and extends(norm):
        chain.append(norm)
    else:
        norm = None
    activates = issubclass(FUSED[type(conv)], _ACTIVATES) and not (quantised and conv.activation)
    addition = _addition_after(chain[-1]) if activates else None
    residual: Any = None
    if addition and extends(addition):
        residual = next(a for a in addition.args if a is not chain[-1])
        chain.append(addition)
    activation = activation_after(traced, chain[-1]) if activates else ""
    if activation:
        last = next(iter(chain[-1].users))
        if extends(last) and (residual is None or stays(traced, residual, chain[-1], last, chain)):
            chain.append(last)
        else:
            activation = ""
    if len(chain) == 1 and not quantised:
        return
    made = _with_norm(conv, traced.get_submodule(str(norm.target))) if norm else _plain_copy(conv)
    if activates and (activation or not quantised):
        made.activation = activation
    traced.set_submodule(str(node.target), made)
    with traced.graph.inserting_before(chain[-1]):
        args = (node.args[0],) if residual is None else (node.args[0], residual)
        new = traced.graph.call_module(str(node.target), args)
    chain[-1].replace_all_uses_with(new)
    for old in reversed(chain):
        traced.graph.erase_node(old)


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def norm_after(traced: fx.GraphModule, node: fx.Node, conv: Any) -> fx.Node | None:
    user = only_user(node)
    if user is None or user.op != "call_module":
        return None
    norm: Any = traced.get_submodule(str(user.target))
    good = (type(norm) is _NORMS.get(len(conv.kernel_size)) and not norm.training
            and norm.running_mean is not None and not is_hooked(norm)
            and not _is_read(traced, str(node.target)))
    return user if good else None


def _is_read(traced: fx.GraphModule, name: str) -> bool:
    """Whether parameters of a module are read outside its call."""
    return any(n.op == "get_attr" and str(n.target).rpartition(".")[0] == name
               for n in traced.graph.nodes)


def _addition_after(node: fx.Node) -> fx.Node | None:
    user = only_user(node)
    if user is None or user.op not in ("call_function", "call_method"):
        return None
    fits = (user.target in _ADDITIONS and len(user.args) == 2 and not user.kwargs
            and all(isinstance(a, fx.Node) for a in user.args) and user.args[0] is not user.args[1])
    # In place into something else (`x += conv(y)`), the sum must stay visible through that tensor.
    in_place = user.target in (operator.iadd, "add_") and user.args[0] is not node
    return user if fits and not in_place else None


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
    return callable(user.target) and inspect.isfunction(user.target) and (
        [*inspect.signature(user.target).parameters][1:] == ["inplace"])


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
                    module is None or all(getattr(module, k) == v for k, v in op.options)):
                return op.name
    return ""


def _plain_copy(conv: Any) -> Any:
    made: Any = copy.copy(conv)
    made.__class__ = FUSED[type(conv)]
    made._parameters, made._buffers = dict(conv._parameters), dict(conv._buffers)
    return made


def _without_identities(traced: fx.GraphModule) -> None:
    """Leave out modules that do nothing, such as those in the place of what quantize_ folded."""
    for node in [n for n in traced.graph.nodes if n.op == "call_module"]:
        module = traced.get_submodule(str(node.target))
        if type(module) is torch.nn.Identity and not is_hooked(module) and len(node.args) == 1:
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)


def _quantise_results(traced: fx.GraphModule) -> None:
    """Have quantised convolutions store what those that alone read their results would make of them."""
    for node in traced.graph.nodes:
        made = _module(traced, node)
        readers = [(u, _module(traced, u)) for u in node.users]
        if type(made) in quantized_epilogue.FUSED and readers and all(
                type(m) in quantized_epilogue.FUSED and u.args[0] is node and node not in u.args[1:]
                and not is_hooked(m) for u, m in readers):
            quantized_epilogue.quantises_for(made, [m for _, m in readers])


def _module(traced: fx.GraphModule, node: fx.Node) -> Any:
    return traced.get_submodule(str(node.target)) if node.op == "call_module" else None


def _with_norm(conv: Any, norm: Any) -> Any:
    made = _plain_copy(conv)
    made.weight, made.bias = norm_folded(conv, conv.weight, conv.bias, norm)
    return made


def norm_folded(conv: Any, weight: Any, bias: Any, norm: Any) -> tuple[torch.nn.Parameter, Any]:
    """A weight and a bias of a convolution with a batch norm folded into them, in their types. The output
    channels of a group are the second dim of a transposed one's weight, where torch's own function ignores
    groups."""
    held = weight.detach()
    if conv.transposed:  # ic/g, g*(oc/g), *k
        held = held.unflatten(0, (conv.groups, -1)).transpose(0, 1).flatten(1, 2)
    made, added = fuse_conv_bn_weights(
        torch.nn.Parameter(held), bias, norm.running_mean, norm.running_var, norm.eps, norm.weight,
        norm.bias, transpose=conv.transposed)
    folded: Any = made.detach()
    if conv.transposed:
        folded = folded.unflatten(1, (conv.groups, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return torch.nn.Parameter(folded, weight.requires_grad), added
