"""Decides whether a kernel or torch computes a call: the checks, the compiler, the fallback policy.

In: a checked call. Out: a ConvCall whose kernel gave one checked result, or that goes to torch for a
reason. Runs once for each kind of call: ``forward_route`` and ``backward_routes`` find what
was made.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from transconv.calls import route_cache
from transconv.calls.guard import ALIGNMENT
from transconv.calls.route_cache import PASSING
from transconv.calls.settings import settings
from transconv.conv import Prop
from transconv.support import Unsupported
from transconv.torch_ops import arguments
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import lower_call, precompile
from transconv.torch_ops.calls.call_attributes import CallAttributes
from transconv.torch_ops.calls.precompile import gradients
from transconv.torch_ops.calls.route import BackwardRoutes, ConvCall, LayerDirection, LayerEntry, Sizes
from transconv.torch_ops.calls.route_kernel import compile_route, like, refused
from transconv.torch_ops.conversion import aten_convolutions


def call_key(kind: str, req: CallAttributes, what: Hashable, tensors: Sequence[torch.Tensor | None]
             ) -> tuple[Hashable, lower_call.Flags, bool]:
    """The key of a call of a kind, its input first, of which ``what`` is beside tensors and numbers; its
    flags and alignment."""
    some = [t for t in tensors if t is not None]
    flags, aligned = lower_call.flags(some[0].dtype), not any(t.data_ptr() & ALIGNMENT for t in some)
    return (kind, req, what, flags, aligned, *(
        None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors)), flags, aligned


COMPUTED = ("result", "input gradient", "weight gradient")


def directions(params: Params) -> tuple[Prop, Prop, Prop]:
    """Those of a call's result, and of the gradients of its input and weight."""
    forward, back = (Prop.BWD_D, Prop.FWD) if params.transposed else (Prop.FWD, Prop.BWD_D)
    return forward, back, Prop.BWD_W


def computed(x: torch.Tensor, w: torch.Tensor, params: Params
             ) -> list[tuple[str, Prop, tuple[lower_call.Like, lower_call.Like, lower_call.Like]]]:
    """The tensors that a call and its backward compute, each with its direction, and input, weight and
    result as its kernel sees them: what is computed has the strides of torch's rule for results."""
    last = arguments.channels_last_result(x, w)

    def made(shape: Sequence[int]) -> lower_call.Like:
        return tuple(shape), arguments.result_strides(shape, last)

    y = made(arguments.output_shape(x.shape, w.shape, params))
    tensors = ((like(x), like(w), y), (made(x.shape), like(w), y), (like(x), made(w.shape), y))
    return list(zip(COMPUTED, directions(params), tensors, strict=True))


def make_forward(params: Params, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None,
                 flags: lower_call.Flags, aligned: bool, mode: str) -> ConvCall:
    """Decide who computes a checked forward call, and have its gradients compiled meanwhile."""
    route = ConvCall(Prop.BWD_D if params.transposed else Prop.FWD, params,
                  arguments.output_shape(x.shape, w.shape, params), arguments.channels_last_result(x, w))
    trained(route, x, w, flags, aligned, mode)
    if all(route.shape) and aten_convolutions.takes_whole(x, w):
        route.whole = True
        return route
    why = lower_call.reasons(x, w) or ([] if all(route.shape) else ["shape:empty"])
    if why:
        route.settle(why)
        return route
    route.copies = b is not None and not b.is_contiguous()
    try:
        if b is not None:
            try:
                compile_route(route, x, w, None, "bias", aligned, flags, mode, bia=b.contiguous())
                return route
            except Unsupported as error:
                if error.reason in PASSING:
                    raise
                route.adds_bias = True
        compile_route(route, x, w, None, "", aligned, flags, mode)
    except Unsupported as error:
        refused(route, error, x)
        if route.over is not None and route.asks_own:
            precompile.meanwhile(params, x, w, flags, aligned)
    return route


def make_backward(
    params: Params,
    grad: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    mask: Sequence[bool],
    flags: lower_call.Flags,
    aligned: bool,
    mode: str,
) -> BackwardRoutes:
    """Decide who computes which gradient. RuntimeError where the tensors do not fit."""
    arguments.check_tensors(x, w, None)
    arguments.check_shapes(x.shape, w.shape, None, params)
    arguments.check_grad(grad, x, w, params)
    channels_last = arguments.channels_last_result(x, w)
    made: list[ConvCall | None] = [None, None]
    why = lower_call.reasons(x, w) or ([] if grad.numel() else ["shape:empty"])
    data_direction = Prop.FWD if params.transposed else Prop.BWD_D
    for at, (direction, wanted) in enumerate(((data_direction, x), (Prop.BWD_W, w))):
        if not mask[at]:
            continue
        route = made[at] = ConvCall(direction, params, tuple(wanted.shape), channels_last)
        if why:
            route.settle(why)
            continue
        near, weight = (None, w) if at == 0 else (x, None)
        try:
            compile_route(route, near, weight, grad, "", aligned, flags, mode)
        except Unsupported as error:
            refused(route, error, x)
    return BackwardRoutes(params, channels_last, made[0], made[1], mask[2], grad.dim())


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
    layer = layer_key(req, x, w, b, flags, aligned) if settings.sizes != "exact" else None
    known = route_cache.find_layer(layer)
    route = None if known is None else known.forward(x, w)
    if route is not None:
        return route_cache.keep(key, route), layer
    route = make_forward(req.resolve(x, w, b), x, w, b, flags, aligned, mode)
    note_layer(layer, route, x, b is not None)
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
        layer = gradients_key(params, grad, x, w, sizes, mask, flags, aligned)
        known = route_cache.find_layer(layer)
        if known is not None and (found := known.backward(grad, x, w, sizes)) is not None:
            return found, flags, aligned
    key = (params, sizes, grad.dtype, grad.device, x.dtype, x.device, w.shape, w.stride(), w.dtype,
           w.device, aligned, flags, *mask)
    routes = route_cache.routes.get(key) or route_cache.find(key)
    if routes is None:
        routes = make_backward(params, grad, x, w, mask, flags, aligned, mode)
        note_gradients(layer, routes, x)
        routes = route_cache.keep(key, routes)
    return routes, flags, aligned


def trained(route: ConvCall, x: torch.Tensor, w: torch.Tensor, flags: lower_call.Flags, aligned: bool,
            mode: str) -> None:
    """``gradients`` of a forward route's first call in training, which may be a later one."""
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        route.trains = True
        gradients(route.params, x, w, flags, aligned, mode)


def layer_key(req: CallAttributes, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None,
                flags: lower_call.Flags, aligned: bool) -> Hashable:
    """What calls of a layer share."""
    return (req, x.shape[1], x.stride(1) == 1, x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device,
            aligned, flags, b is not None and (b.shape, b.stride(), b.dtype, b.device))


def gradients_key(params: Params, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, key: Sizes,
                 mask: Sequence[bool], flags: lower_call.Flags, aligned: bool) -> Hashable:
    """What the gradients of a layer's calls share. ``key`` as for ``LayerEntry.backward``."""
    shape, strides, _, steps = key
    return (params, shape[1], strides[1] == 1, steps[1] == 1, x.dtype, x.device, grad.dtype, grad.device,
            w.shape, w.stride(), w.dtype, w.device, aligned, flags, *mask)


def note_layer(key: Hashable, route: ConvCall, x: torch.Tensor, biased: bool) -> None:
    """Keep the layer of a route that the general way made."""
    if key is not None and _serves(route) and not (route.adds_bias or route.copies):
        data = LayerDirection(route, x.device, x.dtype, route.near, "wei", *["bia"] * biased, route.far)
        route_cache.keep_layer(key, LayerEntry(x, data))


def note_gradients(key: Hashable, routes: BackwardRoutes, x: torch.Tensor) -> None:
    """Keep the layer of routes that the general way made."""
    data, weight = routes.data, routes.weight
    found = [r for r in (data, weight) if r is not None]
    if key is None or not found or routes.aten or not all(map(_serves, found)):
        return
    route_cache.keep_layer(key, LayerEntry(
        x, None if data is None else LayerDirection(data, x.device, x.dtype, "wei", data.far, data.near),
        None if weight is None else LayerDirection(weight, x.device, x.dtype, weight.near, weight.far,
                                                   "wei"),
        routes))


def _serves(route: ConvCall) -> bool:
    """Whether a route's registry answers for other sizes; one that waits for a better kernel does not."""
    if route.registry is None or route.types is not None:
        return False
    return route.over is None or (route.choice is not None and not route.choice.own
                                  and route.registry.is_settled())
