"""The routes of convolutions: found in the cache, or made once for each kind of call (select_impl.py)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from transconv.calls import route_cache
from transconv.calls.guard import ALIGNMENT
from transconv.calls.settings import settings
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import lower_call, shape_cache
from transconv.torch_ops.calls.backward_routes import BackwardRoutes
from transconv.torch_ops.calls.call_attributes import CallAttributes
from transconv.torch_ops.calls.select_impl import make_backward, make_forward


def forward_key(req: CallAttributes, x: torch.Tensor, w: torch.Tensor,
                b: torch.Tensor | None) -> tuple[Hashable, lower_call.Flags, bool]:
    """The key of a forward call, and its flags and alignment."""
    flags = lower_call.flags(x.dtype)
    if b is None:
        aligned = not (x.data_ptr() | w.data_ptr()) & ALIGNMENT
        return (req, x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype,
                w.device, aligned, flags), flags, aligned
    aligned = not (x.data_ptr() | w.data_ptr() | b.data_ptr()) & ALIGNMENT
    return (req, x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device,
            aligned, flags, b.shape, b.stride(), b.dtype, b.device), flags, aligned


def add_forward(key: Hashable, req: CallAttributes, x: torch.Tensor, w: torch.Tensor,
                b: torch.Tensor | None, flags: lower_call.Flags, aligned: bool, mode: str) -> Any:
    """Make the route of a batched forward call; RuntimeError as torch's if the call is wrong."""
    return add_sized(key, req, x, w, b, flags, aligned, mode)[0]


def add_sized(key: Hashable, req: CallAttributes, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None,
              flags: lower_call.Flags, aligned: bool, mode: str) -> tuple[Any, Hashable]:
    """``add_forward``, and the key of the layer if the route was made from that of another size."""
    layer = shape_cache.forward_key(req, x, w, b, flags, aligned) if settings.sizes != "exact" else None
    known = shape_cache.find(layer)
    route = None if known is None else known.forward(x, w)
    if route is not None:
        return route_cache.keep(key, route), layer
    route = make_forward(req.resolve(x, w, b), x, w, b, flags, aligned, mode)
    shape_cache.note_forward(layer, route, x, b is not None)
    return route_cache.keep(key, route), None


def forward_route(req: CallAttributes, x: torch.Tensor, w: torch.Tensor,
                  b: torch.Tensor | None, mode: str) -> Any:
    """The route of a batched forward call, found or made."""
    key, flags, aligned = forward_key(req, x, w, b)
    return route_cache.find(key) or add_forward(key, req, x, w, b, flags, aligned, mode)


def backward(params: Params, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor,
             mask: Sequence[bool], mode: str) -> tuple[torch.Tensor | None, ...]:
    """Gradients of input, weight and bias of a checked call; None where ``mask`` is False."""
    found, _, _ = backward_routes(params, grad, x, w, mask, mode)
    return found.run(grad, x, w)


def backward_routes(params: Params, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor,
                    mask: Sequence[bool], mode: str) -> tuple[BackwardRoutes, lower_call.Flags, bool]:
    """The routes of the gradients, found or made, and what of their key is not in the tensors."""
    flags = lower_call.flags(x.dtype)
    aligned = not (grad.data_ptr() | x.data_ptr() | w.data_ptr()) & ALIGNMENT
    layer, sizes = None, (x.shape, x.stride(), grad.shape, grad.stride())
    if settings.sizes != "exact":
        layer = shape_cache.backward_key(params, grad, x, w, sizes, mask, flags, aligned)
        known = shape_cache.find(layer)
        if known is not None and (found := known.backward(grad, x, w, sizes)) is not None:
            return found, flags, aligned
    key = (params, sizes, grad.dtype, grad.device, x.dtype, x.device, w.shape, w.stride(), w.dtype,
           w.device, aligned, flags, *mask)
    routes = route_cache.routes.get(key) or route_cache.find(key)
    if routes is None:
        routes = make_backward(params, grad, x, w, mask, flags, aligned, mode)
        shape_cache.note_backward(layer, routes, x)
        routes = route_cache.keep(key, routes)
    return routes, flags, aligned
