"""Modules that compute each row of their result from the same rows of their inputs: elementwise ones, and
those that a model's owner names, such as a norm of each pixel's channels. A rank computes its own rows, as
plain tensors: no rule of DTensor's is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from transconv.torch_ops.shapes import result_strides, suggests_channels_last

Tensor = torch.Tensor
_backward: Callable[..., Tensor] = torch.ops.aten.leaky_relu_backward.default


class _Leaky(torch.autograd.Function):
    """A leaky ReLU that keeps its result, which the next layer has too, and not its input: what in-place
    modules save."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.slope = slope
        made = F.leaky_relu(x, slope)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (made,) = ctx.saved_tensors
        return _backward(grad, made, ctx.slope, True), None


def elementwise(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module of single elements, on any placements of its input."""
    if getattr(module, "inplace", False):
        module.inplace = False  # autograd does not let a view of a DTensor change
    inner: Callable[..., Any] = module.forward
    if type(module) is nn.LeakyReLU and module.negative_slope > 0:
        def inner(input: Tensor) -> Tensor:
            made: Tensor = _Leaky.apply(input, module.negative_slope)
            return made

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        x = next((t for t in leaves if isinstance(t, DTensor)), None)
        if x is None:
            return inner(*args, **kwargs)
        x = lying(x, [p if isinstance(p, Shard) else Replicate() for p in x.placements])
        own = [x.to_local() if isinstance(t, DTensor) else t for t in leaves]
        args, kwargs = tree_unflatten(own, form)
        return DTensor.from_local(inner(*args, **kwargs), x.device_mesh, x.placements, shape=x.shape,
                                  stride=x.stride())

    return forward


def named(module: nn.Module, name: str, dealt: Callable[[Any], Any]) -> Callable[..., Any]:
    """The forward of a module that its model's owner says to compute row by row. ``dealt`` lays arguments
    as the plan has them. ValueError if a result has other rows than the rank's."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten(dealt((args, kwargs)))
        x = next((t for t in leaves if isinstance(t, DTensor)), None)
        if x is None:
            return inner(*args, **kwargs)
        module.forward = inner  # type: ignore[method-assign]
        try:
            args, kwargs = tree_unflatten([t.to_local() if isinstance(t, DTensor) else t for t in leaves],
                                          form)
            made = functional_call(module, _parameters(module, x.placements), args, kwargs)
        finally:
            module.forward = forward  # type: ignore[method-assign]
        found, form = tree_flatten(made)
        return tree_unflatten([_whole(t, x, name) if isinstance(t, Tensor) else t for t in found], form)

    return forward


def _parameters(module: nn.Module, places: Sequence[Placement]) -> Mapping[str, Any]:
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
    return DTensor.from_local(made, x.device_mesh, x.placements, shape=whole, stride=stride)


def lying(x: DTensor, places: Sequence[Placement]) -> DTensor:
    """The tensor with these placements, redistributed if it has others."""
    return x if tuple(x.placements) == tuple(places) else x.redistribute(x.device_mesh, places)
