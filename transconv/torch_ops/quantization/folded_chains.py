"""What ``quantize_`` folds into convolutions, in place: batch norms in eval mode, modules of activations.

    conv -> norm -> relu    a convolution with the norm in its weight, then relu, in one call

A module is folded where torch.fx traces the model, and finds that it is called once, with the result of
the convolution, which nothing else needs. An identity takes its place, and the model's own code goes on.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from transconv.torch_ops.conversion.fold import (
    FUSED,
    FoldTracer,
    activation_after,
    norm_after,
    norm_folded,
    only_user,
)
from transconv.torch_ops.conversion.mutation_analysis import is_hooked, stays

log = logging.getLogger("transconv.quantize")


@dataclass(frozen=True, slots=True)
class Chain:
    """What follows a convolution: names of modules, and the word of the activation."""

    norm: str = ""
    activation: str = ""
    word: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the modules that are folded."""
        return tuple(filter(None, (self.norm, self.activation)))


def chains(model: torch.nn.Module, found: Mapping[str, torch.nn.Module]) -> dict[str, Chain]:
    """What follows each of some convolutions of a model, by their names; those that nothing follows, and
    all where the model is in training mode or cannot be traced, are left out."""
    if model.training or not found:
        return {}
    try:
        traced = FoldTracer().traced(model)
    except Exception as error:  # what a model's code raises on proxies is not known
        log.debug("nothing is folded: torch.fx cannot trace the model: %s", error)
        return {}
    return _found(model, traced, {id(m): name for name, m in found.items()})


def _found(model: torch.nn.Module, traced: fx.GraphModule, names: Mapping[int, str]) -> dict[str, Chain]:
    calls = Counter(id(traced.get_submodule(str(n.target))) for n in traced.graph.nodes
                    if n.op == "call_module")
    once = {key for key, count in calls.items() if count == 1}
    made: dict[str, Chain] = {}
    for node in traced.graph.nodes:
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            continue
        conv = traced.get_submodule(str(node.target))
        if id(conv) not in names or id(conv) not in once or type(conv) not in FUSED or is_hooked(conv):
            continue
        if (chain := _chain(traced, node, conv, once)).names:
            made[names[id(conv)]] = chain
    return made


def _chain(traced: fx.GraphModule, node: fx.Node, conv: Any, once: set[int]) -> Chain:
    norm = norm_after(traced, node, conv)
    if norm is not None and id(traced.get_submodule(str(norm.target))) not in once:
        return Chain()
    last = node if norm is None else norm
    word, user = activation_after(traced, last), only_user(last)
    if not (word and user is not None and user.op == "call_module" and id(
            traced.get_submodule(str(user.target))) in once):
        word = ""
    chain = [n for n in (node, norm, user if word else None) if n is not None]
    read: Any = node.args[0]
    if not stays(traced, read, node, chain[-1], chain):
        return Chain()
    return Chain("" if norm is None else str(norm.target), str(user.target) if word and user else "", word)


def with_norm(conv: Any, norm: Any) -> None:
    """Fold a norm into the weight and bias of a convolution, in f32, in place."""
    bias = None if conv.bias is None else conv.bias.detach().float()
    made, added = norm_folded(conv, conv.weight.detach().float(), bias, copy.deepcopy(norm).float())
    conv._parameters["weight"] = made
    conv._parameters["bias"] = torch.nn.Parameter(added.detach(), requires_grad=False)


def replaced(model: torch.nn.Module, chain: Chain) -> None:
    """Put identities in the place of what was folded."""
    for name in chain.names:
        model.set_submodule(name, torch.nn.Identity())
