"""Modules that compute each row of their result from the same rows of their inputs: elementwise ones, and
those that a model's owner names, such as a norm of each pixel's channels. A rank computes its own rows, as
plain tensors: no rule of DTensor's is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from transconv.distributed.placing import dealt
from transconv.torch_ops.shapes import result_strides, suggests_channels_last

Tensor = torch.Tensor
_aten = torch.ops.aten


class Activation(NamedTuple):
    """An activation and its gradient, of the result's gradient and what is kept: the input or, with
    ``of_result``, the result, which the next layer keeps too."""

    made: Callable[[Any], Any]
    gradient: Callable[[Any, Any], Any]
    of_result: bool


def _activation(module: Any) -> Activation | None:
    """That of a module whose gradient is known here; of others autograd keeps what torch's need."""
    if type(module) is nn.LeakyReLU and module.negative_slope > 0:
        slope = module.negative_slope
        return Activation(lambda x: F.leaky_relu(x, slope),
                          lambda grad, y: _aten.leaky_relu_backward(grad, y, slope, True), True)
    if type(module) is nn.ReLU:
        return Activation(F.relu, lambda grad, y: _aten.threshold_backward(grad, y, 0), True)
    if type(module) is nn.SiLU:
        return Activation(F.silu, _aten.silu_backward, False)
    return None


class _Activated(torch.autograd.Function):
    """An activation of a rank's own part. One function between DTensors: a change to plain tensors and
    back again costs the host four."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, activation: Activation) -> DTensor:
        made = _like(x, activation.made(x.to_local()))
        ctx.activation = activation
        ctx.save_for_backward(made if activation.of_result else x)
        return made

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, None]:
        (kept,), (made, gradient, of_result) = ctx.saved_tensors, ctx.activation
        if torch.is_grad_enabled():  # it is differentiated again: by DTensor's rules
            found = (gradient(grad, kept) if of_result else
                     torch.autograd.grad(made(kept), kept, grad, create_graph=True)[0])
            return found, None
        return _like(kept, gradient(lying(grad, kept.placements).to_local(), kept.to_local())), None


def _like(x: DTensor, local: Tensor) -> DTensor:
    return dealt(local, x.device_mesh, x.placements, x.shape, x.stride())


def elementwise(module: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of a module of single elements, on any placements of its input. ``inner``: its own."""
    leaves, form = tree_flatten((args, kwargs))
    x = next((t for t in leaves if isinstance(t, DTensor)), None)
    if x is None:
        return inner(*args, **kwargs)
    x = lying(x, [p if isinstance(p, Shard) else Replicate() for p in x.placements])
    activation = _activation(module)
    if activation is not None:
        return _activated(x, activation)
    own = [x.to_local() if isinstance(t, DTensor) else t for t in leaves]
    args, kwargs = tree_unflatten(own, form)
    return _like(x, inner(*args, **kwargs))


_activated: Callable[..., DTensor] = _Activated.apply


def named(module: Any, name: str, inner: Callable[..., Any], dealt: Callable[[Any], Any], *args: Any,
          **kwargs: Any) -> Any:
    """The forward of a module that its model's owner says to compute row by row. ``inner``: its own;
    ``dealt`` lays arguments as the plan has them. ValueError if a result has other rows than the rank."""
    leaves, form = tree_flatten(dealt((args, kwargs)))
    x = next((t for t in leaves if isinstance(t, DTensor)), None)
    if x is None:
        return inner(*args, **kwargs)
    args, kwargs = tree_unflatten([t.to_local() if isinstance(t, DTensor) else t for t in leaves], form)
    own, module.forward = module.forward, inner
    try:
        made = functional_call(module, _parameters(module, x.placements), args, kwargs)
    finally:
        module.forward = own
    found, form = tree_flatten(made)
    return tree_unflatten([_whole(t, x, name) if isinstance(t, Tensor) else t for t in found], form)


def _parameters(module: nn.Module, places: Sequence[Placement]) -> dict[str, Any]:
    """Plain parameters and buffers; the gradients of the ranks are parts of sums."""
    parts = [Partial() if p.is_shard() else Replicate() for p in places]
    return {name: p.to_local(grad_placements=parts) if isinstance(p, DTensor) else p
            for name, p in (*module.named_parameters(), *module.named_buffers())}


def _whole(made: Tensor, x: DTensor, name: str) -> DTensor:
    """The tensor of which every rank has computed its rows."""
    local, shape = x.to_local(), list(made.shape)
    for place in x.placements:
        if isinstance(place, Shard):
            at = place.dim if place.dim < 2 else place.dim - x.dim()  # spatial axes are the last ones
            if made.dim() < x.dim() or made.shape[at] != local.shape[place.dim]:
                raise ValueError(f"'{name}' was said to compute row by row, but makes {list(made.shape)} "
                                 f"of a rank's {list(local.shape)}, of which dim {place.dim} is split")
            shape[at] = x.shape[place.dim]
    whole, last = torch.Size(shape), suggests_channels_last(x.shape, x.stride())
    stride = x.stride() if whole == x.shape else result_strides(whole, last and len(whole) > 2)
    return dealt(made, x.device_mesh, x.placements, whole, stride)


def lying(x: DTensor, places: Sequence[Placement]) -> DTensor:
    """The tensor with these placements, redistributed if it has others."""
    return x if tuple(x.placements) == tuple(places) else x.redistribute(x.device_mesh, places)
