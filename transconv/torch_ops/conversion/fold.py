"""``fold``: fuses convolution, batch norm, residual and activation of a model for inference."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

from transconv.torch_ops import arguments, modules
from transconv.torch_ops.conversion.traced_graphs import (
    ChainTracer,
    activation_after,
    is_hooked,
    norm_after,
    norm_folded,
    only_user,
    stays,
)
from transconv.torch_ops.fused import fused_functional
from transconv.torch_ops.quantized import quantized_modules
from transconv.torch_ops.quantized.quantized_modules import Quantised

FUSED: dict[type, type] = {  # transposed layers have no kernel that adds or activates
    **modules.CONVOLUTIONS,
    torch.nn.Conv1d: fused_functional.FusedConv1d,
    modules.Conv1d: fused_functional.FusedConv1d,
    torch.nn.Conv2d: fused_functional.FusedConv2d,
    modules.Conv2d: fused_functional.FusedConv2d,
    torch.nn.Conv3d: fused_functional.FusedConv3d,
    modules.Conv3d: fused_functional.FusedConv3d,
    **quantized_modules.FUSED,
}
_ACTIVATES = (fused_functional.Activates, *quantized_modules.FUSED.values())
_ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")


def fold(model: torch.nn.Module) -> fx.GraphModule:
    """A copy of ``model`` for inference in which batch norms are folded into the weights of the
    convolutions before them, and a following addition and activation into the same call.

    The model must be in eval mode and traceable by torch.fx. Chains that are used more than once,
    whose parts have other users or hooks, whose weights are read elsewhere, or over which something
    is written in place are left as they are. RuntimeError in training mode, and for what the graph would
    lose: writes to attributes of tensors and modules, random numbers, an autocast inside, hooks of the
    model itself. ValueError for a name of a module, a parameter or a buffer that means something else in
    Python; fx's own errors for control flow that depends on values; TypeError for what is no module."""
    arguments.expect_module(model, "fold")
    if model.training:
        raise RuntimeError(
            "fold needs a model in eval mode: batch norms keep their statistics "
            "only there; call model.eval() first"
        )
    model = copy.deepcopy(model)
    traced = ChainTracer(lambda kind: kind in FUSED or issubclass(kind, Quantised)).traced(model)
    graph = traced.graph
    _without_identities(traced)
    uses = Counter(str(n.target) for n in graph.nodes if n.op == "call_module")
    for node in list(graph.nodes):
        if node.op == "call_module" and uses[str(node.target)] == 1:
            conv = traced.get_submodule(str(node.target))
            if type(conv) in FUSED and not is_hooked(conv) and len(node.args) == 1 and not node.kwargs:
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

    quantised = type(conv) in quantized_modules.FUSED
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


def _addition_after(node: fx.Node) -> fx.Node | None:
    user = only_user(node)
    if user is None or user.op not in ("call_function", "call_method"):
        return None
    fits = (
        user.target in _ADDITIONS
        and len(user.args) == 2
        and not user.kwargs
        and all(isinstance(a, fx.Node) for a in user.args)
        and user.args[0] is not user.args[1]
    )
    # In place into something else (`x += conv(y)`), the sum must stay visible through that tensor.
    in_place = user.target in (operator.iadd, "add_") and user.args[0] is not node
    return user if fits and not in_place else None


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
        if (
            type(made) in quantized_modules.FUSED
            and readers
            and all(
                type(m) in quantized_modules.FUSED
                and u.args[0] is node
                and node not in u.args[1:]
                and not is_hooked(m)
                for u, m in readers
            )
        ):
            quantized_modules.quantises_for(made, [m for _, m in readers])


def _module(traced: fx.GraphModule, node: fx.Node) -> Any:
    return traced.get_submodule(str(node.target)) if node.op == "call_module" else None


def _with_norm(conv: Any, norm: Any) -> Any:
    made = _plain_copy(conv)
    made.weight, made.bias = norm_folded(conv, conv.weight, conv.bias, norm)
    return made
