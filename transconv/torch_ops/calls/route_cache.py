"""The cache of routes: one dictionary from the properties of a call to what runs it.

A key holds shapes, strides, dtypes, devices, the numbers of the convolution, pointer alignment and
torch's numeric switches. Its value is a Route, made once by the checks, the compiler and the
fallback policy (calls/select_impl.py), and run with nothing more to decide. Calls that come back with the
same weight are found faster still (calls/call_entries.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from transconv.calls import call_cache, stats
from transconv.calls.guard import ALIGNMENT
from transconv.calls.settings import settings
from transconv.runtime import expect
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import dynamic_sizes, lower_call, shape_cache
from transconv.torch_ops.calls.backward_routes import BackwardRoutes
from transconv.torch_ops.calls.call_attributes import CallAttributes
from transconv.torch_ops.calls.route import Route
from transconv.torch_ops.calls.select_impl import PASSING, make_backward, make_forward

LIMIT = 4096  # routes kept; beyond it the oldest quarter goes


_routes: dict[Hashable, Any] = {}
# Those whose kernels are not there yet, each with what says that they may be.
_waiting: dict[Hashable, tuple[Any, tuple[Callable[[], bool], ...]]] = {}


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


def find(key: Hashable) -> Any:
    """The route under a key, or None."""
    found = _routes.get(key)
    return _waits(key) if found is None and _waiting else found


def _waits(key: Hashable) -> Any:
    """The route under a key that waits for a kernel; None if there is none, or the wait is over."""
    found = _waiting.get(key)
    if found is None:
        return None
    if any([over() for over in found[1]]) or _is_on_time():  # each of them may count its calls
        with stats.lock:
            gone = _waiting.pop(key, None)
        if gone is not None:
            _count(gone[0])
        return None
    return found[0]


def _is_on_time() -> bool:
    """Whether calls wait for kernels here, where they did not wait before: on another stream."""
    return settings.compile == "auto" and settings.mode == "now"


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
        return keep(key, route, [route]), layer
    route = make_forward(req.resolve(x, w, b), x, w, b, flags, aligned, mode)
    shape_cache.note_forward(layer, route, x, b is not None)
    return keep(key, route, [route]), None


def forward_route(req: CallAttributes, x: torch.Tensor, w: torch.Tensor,
                  b: torch.Tensor | None, mode: str) -> Any:
    """The route of a batched forward call, found or made."""
    key, flags, aligned = forward_key(req, x, w, b)
    return find(key) or add_forward(key, req, x, w, b, flags, aligned, mode)


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
    routes = _routes.get(key) or (_waits(key) if _waiting else None)
    if routes is None:
        routes = make_backward(params, grad, x, w, mask, flags, aligned, mode)
        shape_cache.note_backward(layer, routes, x)
        routes = _kept(key, routes)
    return routes, flags, aligned


def _kept(key: Hashable, routes: BackwardRoutes) -> BackwardRoutes:
    kept: BackwardRoutes = keep(key, routes, routes.routes())
    return kept


def keep(key: Hashable, value: Any, routes: Sequence[Any]) -> Any:
    """Sets the entry of a key to ``value``, made of ``routes``, unless another came first."""
    waits = [r.over for r in routes if r.over is not None or r.reason in PASSING]
    if None in waits:
        for r in routes:
            stats.add(not r.reason, r.reason or r.does, 1)
        return value  # a kernel may be ready later
    if waits:
        with stats.lock:
            if len(_waiting) >= LIMIT:
                dropped = [v for v, _ in _waiting.values()]
                _waiting.clear()
            else:
                dropped = []
            _waiting[key] = value, tuple(waits)
        for item in dropped:
            _count(item)
        return value
    with stats.lock:
        value = _routes.setdefault(key, value)
        old = list(_routes)[: LIMIT // 4] if len(_routes) > LIMIT else []
        dropped = [_routes.pop(k) for k in old]
    if dropped:
        call_cache.forget()
    for item in dropped:
        _count(item)
    return value


def _of(item: Route | BackwardRoutes) -> list[Route]:
    return [item] if isinstance(item, Route) else item.routes()


def _count(item: Route | BackwardRoutes) -> None:
    for route in _of(item):
        route.count()


def forget(layers: bool = True) -> None:
    """Drop every route; counts stay. Compiled kernels stay with the compiler. ``layers``: also what calls
    of any size share."""
    if layers:
        dynamic_sizes.forget()
    shape_cache.forget()
    with stats.lock:
        dropped = [*_routes.values(), *(v for v, _ in _waiting.values())]
        _routes.clear()
        _waiting.clear()
    if dropped:
        call_cache.forget()
    for item in dropped:
        _count(item)


def counted(reset: bool = False) -> stats.Stats:
    """Who computed how many results: see Stats."""
    with stats.lock:
        items = [*_routes.values(), *(v for v, _ in _waiting.values())]
    for item in items:
        _count(item)
    shape_cache.count()
    return stats.totals(reset)


def _expect() -> None:
    """The first call in the background is not to wait for what it can be told before."""
    if settings.compile == "background":
        expect()


settings.on_change(forget)
settings.on_change(_expect)
_expect()  # the environment may have said so
