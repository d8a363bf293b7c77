"""Routes for new sizes of layers that are known.

The general way (decide.py) decides a call at one size. Calls of the same layer at other sizes differ in
their shapes alone: the registry that answers them and what starts its plans are kept under a key without
sizes. A new size then costs this look-up, the choice among the plans, and a route. Where something is open
(a plan that has not run yet, a size that none takes, shapes that do not fit), the general way decides.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from transconv.torch_ops import execute, shapes
from transconv.torch_ops.any_size import LIMIT, Order, order_of
from transconv.torch_ops.arguments import Ints, Params
from transconv.torch_ops.requests import Request
from transconv.torch_ops.route import BackwardRoutes, Begin, Route

if TYPE_CHECKING:
    from transconv.conv import Compiled
    from transconv.runtime import Kernels

_layers: dict[Hashable, tuple[_Layer | None, ...]] = {}
_lock = threading.Lock()


class _Layer:
    """One direction of a layer: the route of one size, from which those of other sizes are made.
    ``names``: the plans' names of a call's tensors, the result last; ``dtype``: that of the result."""

    __slots__ = ("begins", "device", "dtype", "like", "names")

    def __init__(self, like: Route, device: torch.device, dtype: torch.dtype, *names: str) -> None:
        self.like, self.device, self.dtype, self.names = like, device, dtype, names
        self.begins: dict[Kernels[Compiled], Begin] = {}

    def route(self, src: Sequence[int], shape: Ints) -> Route | None:
        """The route whose problem's src has this shape, and whose result has the other; None if a plan is
        missing or has not run yet."""
        like, sizes = self.like, (src[0], *src[2:])
        assert like.registry is not None
        best = like.registry.fastest(sizes)
        if best is None:
            return None
        begin = self.begins.get(best)
        if begin is None:
            begin = self._begin(best)
            if begin is None:
                return None
        return like.resized(shape, best.plan, begin(sizes), self.device.index, len(self.names), self.dtype)

    def _begin(self, best: Kernels[Compiled]) -> Begin | None:
        aligned = self.like.aligned
        if not execute.is_loaded(best.plan, self.device, aligned):
            return None
        begin = best.plan.starter_at(self.device.index, aligned, self.names)
        if begin is not None:
            self.begins[best] = begin
        return begin


def forward_key(req: Request, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None,
                flags: execute.Flags, aligned: bool) -> Hashable:
    """What calls of a layer share; None where the input has gaps."""
    order, channels_last = _lying(x, w)
    return order and (
        order, channels_last, req, x.shape[1:2], x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device,
        aligned, flags, b is not None and (b.shape, b.stride(), b.dtype, b.device))


def _lying(x: torch.Tensor, w: torch.Tensor) -> tuple[Order, bool]:
    channels_last = shapes.channels_last_result(x, w)
    return order_of(x.shape, x.stride(), channels_last), channels_last


def lies_so(key: Any, x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether the input lies in memory as ``forward_key`` found the layer's."""
    return bool(_lying(x, w) == key[:2])


def forward(key: Hashable, x: torch.Tensor, w: torch.Tensor) -> Route | None:
    """The route of a forward call, if its layer is known."""
    (layer,) = _layers.get(key, (None,))
    if layer is None:
        return None
    params = layer.like.params
    shape = shapes.output_shape(x.shape, w.shape, params)
    return layer.route(shape if params.transposed else x.shape, shape)


def note_forward(key: Hashable, route: Route, x: torch.Tensor, biased: bool) -> None:
    """Keep the layer of a route that the general way made."""
    if key is not None and _serves(route) and not (route.adds_bias or route.copies_bias):
        _keep(key, _Layer(route, x.device, x.dtype, route.near, "wei", *["bia"] * biased, route.far))


def backward_key(params: Params, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor,
                 mask: Sequence[bool], flags: execute.Flags, aligned: bool) -> Hashable:
    """What the gradients of a layer's calls share; None where a tensor has gaps."""
    channels_last = shapes.channels_last_result(x, w)
    orders = (order_of(x.shape, x.stride(), channels_last),
              order_of(grad.shape, grad.stride(), channels_last))
    return None if None in orders else (
        params, orders, channels_last, x.shape[1:2], x.dtype, x.device, grad.dtype, grad.device, w.shape,
        w.stride(), w.dtype, w.device, aligned, flags, *mask)


def backward(key: Hashable, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor,
             wants_bias: bool) -> BackwardRoutes | None:
    """The routes of the gradients, if the layer is known."""
    layers = _layers.get(key)
    if layers is None:
        return None
    some = next(layer for layer in layers if layer is not None).like
    params, made = some.params, list[Route | None]()
    if grad.shape != shapes.output_shape(x.shape, w.shape, params):
        return None
    src = grad.shape if params.transposed else x.shape
    for layer, wanted in zip(layers, (x, w), strict=True):
        route = None if layer is None else layer.route(src, tuple(wanted.shape))
        if layer is not None and route is None:
            return None
        made.append(route)
    return BackwardRoutes(params, some.channels_last, made[0], made[1], wants_bias, grad.dim())


def note_backward(key: Hashable, routes: BackwardRoutes, x: torch.Tensor) -> None:
    """Keep the layer of routes that the general way made."""
    data, weight = routes.data, routes.weight
    found = [r for r in (data, weight) if r is not None]
    if key is None or not found or routes.aten or not all(map(_serves, found)):
        return
    _keep(key, None if data is None else _Layer(data, x.device, x.dtype, "wei", data.far, data.near),
          None if weight is None else _Layer(weight, x.device, x.dtype, weight.near, weight.far, "wei"))


def forget() -> None:
    """Drop all layers."""
    with _lock:
        _layers.clear()


def _serves(route: Route) -> bool:
    """Whether a route's registry answers for other sizes; one that waits for a better kernel does not."""
    return route.registry is not None and not route.stands_in and route.types is None


def _keep(key: Hashable, *layers: _Layer | None) -> None:
    with _lock:
        if len(_layers) >= LIMIT:
            _layers.clear()
        _layers[key] = layers
