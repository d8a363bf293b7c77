"""Torch border, step 10. For inference: conv, batch norm, residual and activation in one call."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.nn.utils.fusion import fuse_conv_bn_weights

from transconv.torch_ops import fused_modules, modules
from transconv.torch_ops.writes import is_hooked, stays

_FUSED: dict[type, type] = {
    torch.nn.Conv1d: fused_modules.FusedConv1d, modules.Conv1d: fused_modules.FusedConv1d,
    torch.nn.Conv2d: fused_modules.FusedConv2d, modules.Conv2d: fused_modules.FusedConv2d,
    torch.nn.Conv3d: fused_modules.FusedConv3d, modules.Conv3d: fused_modules.FusedConv3d,
}
_NORMS = {1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d, 3: torch.nn.BatchNorm3d}
_MODULES: dict[type, str] = {
    torch.nn.ReLU: "relu", torch.nn.ReLU6: "relu6", torch.nn.Sigmoid: "sigmoid",
    torch.nn.Tanh: "tanh", torch.nn.SiLU: "silu", torch.nn.Hardswish: "hardswish",
}
_FUNCTIONS: dict[Any, str] = {
    torch.relu: "relu", torch.relu_: "relu", F.relu: "relu", F.relu6: "relu6",
    torch.sigmoid: "sigmoid", F.sigmoid: "sigmoid", torch.tanh: "tanh", F.tanh: "tanh",
    F.silu: "silu", F.hardswish: "hardswish",
    "relu": "relu", "relu_": "relu", "sigmoid": "sigmoid", "tanh": "tanh",
}
_ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: torch.nn.Module, name: str) -> bool:
        return type(m) in _FUSED or super().is_leaf_module(m, name)


def fold(model: torch.nn.Module) -> fx.GraphModule:
    """A copy of ``model`` for inference in which batch norms are folded into the weights of the
    convolutions before them, and a following addition and activation into the same call.

    The model must be in eval mode and traceable by torch.fx. Chains that are used more than once,
    whose parts have other users or hooks, whose weights are read elsewhere, or over which something
    is written in place are left as they are. RuntimeError in training mode; fx's own errors for
    control flow that depends on values.
    """
    if model.training:
        raise RuntimeError("fold needs a model in eval mode: batch norms keep their statistics "
                           "only there; call model.eval() first")
    model = copy.deepcopy(model)
    graph = _Tracer().trace(model)
    traced = fx.GraphModule(model, graph)
    uses = Counter(str(n.target) for n in graph.nodes if n.op == "call_module")
    for node in list(graph.nodes):
        if node.op == "call_module" and uses[str(node.target)] == 1:
            conv = traced.get_submodule(str(node.target))
            if (type(conv) in _FUSED and not is_hooked(conv) and len(node.args) == 1
                    and not node.kwargs):
                _fold_chain(traced, node, conv)
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

    norm = _norm_after(traced, node, conv)
    if norm and extends(norm):
        chain.append(norm)
    else:
        norm = None
    addition = _addition_after(chain[-1])
    residual: Any = None
    if addition and extends(addition):
        residual = next(a for a in addition.args if a is not chain[-1])
        chain.append(addition)
    activation = _activation_after(traced, chain[-1])
    if activation:
        last = next(iter(chain[-1].users))
        if extends(last) and (residual is None or stays(traced, residual, chain[-1], last, chain)):
            chain.append(last)
        else:
            activation = ""
    if len(chain) == 1:
        return
    made = _with_norm(conv, traced.get_submodule(str(norm.target))) if norm else _plain_copy(conv)
    made.activation = activation
    traced.set_submodule(str(node.target), made)
    with traced.graph.inserting_before(chain[-1]):
        args = (node.args[0],) if residual is None else (node.args[0], residual)
        new = traced.graph.call_module(str(node.target), args)
    chain[-1].replace_all_uses_with(new)
    for old in reversed(chain):
        traced.graph.erase_node(old)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _norm_after(traced: fx.GraphModule, node: fx.Node, conv: Any) -> fx.Node | None:
    user = _only_user(node)
    if user is None or user.op != "call_module":
        return None
    norm: Any = traced.get_submodule(str(user.target))
    good = (type(norm) is _NORMS[len(conv.kernel_size)] and not norm.training
            and norm.running_mean is not None and not is_hooked(norm)
            and not _is_read(traced, str(node.target)))
    return user if good else None


def _is_read(traced: fx.GraphModule, name: str) -> bool:
    """Whether parameters of a module are used beside its call."""
    return any(n.op == "get_attr" and str(n.target).rpartition(".")[0] == name
               for n in traced.graph.nodes)


def _addition_after(node: fx.Node) -> fx.Node | None:
    user = _only_user(node)
    if user is None or user.op not in ("call_function", "call_method"):
        return None
    fits = (user.target in _ADDITIONS and len(user.args) == 2 and not user.kwargs
            and all(isinstance(a, fx.Node) for a in user.args) and user.args[0] is not user.args[1])
    # In place into something else (`x += conv(y)`), the sum must stay visible through that tensor.
    in_place = user.target in (operator.iadd, "add_") and user.args[0] is not node
    return user if fits and not in_place else None


def _activation_after(traced: fx.GraphModule, node: fx.Node) -> str:
    user = _only_user(node)
    if user is None:
        return ""
    if user.op == "call_module":
        module: Any = traced.get_submodule(str(user.target))
        if is_hooked(module):
            return ""
        if type(module) is torch.nn.GELU:
            return "gelu_tanh" if module.approximate == "tanh" else "gelu"
        return _MODULES.get(type(module), "")
    if user.op in ("call_function", "call_method"):
        if user.target in (F.relu, F.relu6, F.silu, F.hardswish):
            return _FUNCTIONS[user.target]  # their only other argument is `inplace`
        return "" if user.kwargs or len(user.args) > 1 else _FUNCTIONS.get(user.target, "")
    return ""


def _plain_copy(conv: Any) -> Any:
    made: Any = copy.copy(conv)
    made.__class__ = _FUSED[type(conv)]
    made._parameters = dict(conv._parameters)
    return made


def _with_norm(conv: Any, norm: Any) -> Any:
    made = _plain_copy(conv)
    made.weight, made.bias = fuse_conv_bn_weights(
        conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight,
        norm.bias)
    return made
