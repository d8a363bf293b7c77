"""The fast path of repeated calls: found by their weight, checked by one guard.

A layer calls with the same weight, the same numbers and mostly the same sizes. Its second call
leaves an entry under the identity of the weight: a function that asks one guard of torch's compiler
(type, dtype, device, sizes, strides, requires_grad and dispatch keys of all tensors, the thread's
modes included) and a few switches, and then runs the route. The identity only finds the entry; a reused
address does no harm, because everything that the route depends on is checked again.

A call that fails a check tries the next entry and at last the general way. Without that guard in torch
there are no entries, and calls only cost more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch

from transconv.torch_ops.arguments import means_more
from transconv.torch_ops.calls import call_guards
from transconv.torch_ops.calls.backward_routes import BackwardRoutes
from transconv.torch_ops.calls.call_guards import Call
from transconv.torch_ops.calls.route import Route
from transconv.torch_ops.calls.select_impl import PASSING
from transconv.torch_ops.conversion import prepacked_weights

if TYPE_CHECKING:
    from transconv.torch_ops.calls.lower_call import Flags

Tensor = torch.Tensor

CHAIN = 3  # entries under one weight: other sizes, training and inference
KINDS = 4096  # weights and kinds of gradients kept; beyond it all are dropped
PATIENCE = 2  # calls with a known route before an entry is made; doubles when entries had to go
MOST_PATIENCE = 1 << 12

_forward: dict[int, Call] = {}
_backward: set[Route] = set()  # routes with entries for their gradients
_visits: dict[Hashable, list[int]] = {}  # calls since the last entry, calls to wait for, entries

find = _forward.get


_function_modes = torch._C._is_torch_function_mode_enabled
guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


def guard(*tensors: Tensor, free: int = 0) -> Callable[..., bool] | None:
    """A function that says whether other tensors have the same properties as these; the first ``free``
    ones may have any sizes and strides, but as many channels. None for tensors whose memory no kernel may
    read as it is."""
    if any(means_more(t) for t in tensors):
        return None
    sizes: list[list[int | None]] = [[*t.shape] for t in tensors]
    strides: list[list[int | None]] = [[*t.stride()] for t in tensors]
    for at in range(free):
        strides[at] = [None] * len(strides[at])
        sizes[at] = [None, sizes[at][1], *strides[at][2:]]
    try:
        made = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes if free else None,
                                   dynamic_dims_strides=strides if free else None)
        check: Callable[..., bool] = made.check
        # A tensor that is passed twice gets no entry.
        return check if check(*tensors) else None
    except (AttributeError, TypeError, RuntimeError):
        return None


_forgetting: list[Callable[[], None]] = []
on_forget = _forgetting.append  # registers a function to call when routes are dropped


def forget() -> None:
    """Drop all entries."""
    for others in _forgetting:
        others()
    _forward.clear()
    for route in list(_backward):
        route.gradients.clear()
    _backward.clear()
    _visits.clear()


# A weight whose copies are to be made goes the general way.
def _without(weight: int) -> None:
    _forward.pop(weight, None)


prepacked_weights.on_change(_without)


def due(key: Hashable, chain: int) -> int:
    """Count a call that found no entry. 0: no entry is due; 1: the first, or a replacement of all; n: one
    before the n - 1 existing ones."""
    visits = _visits.get(key)
    if visits is None:
        if len(_visits) >= KINDS:
            forget()
        visits = _visits[key] = [0, PATIENCE, 0]
    visits[0] += 1
    if visits[0] < visits[1]:
        return 0
    visits[0] = 0
    if visits[2] >= chain:  # wait longer: sizes that do not repeat get no entries
        visits[1], visits[2] = min(2 * visits[1], MOST_PATIENCE), 0
    visits[2] += 1
    return visits[2]


def begin(weight: Tensor, entry: Call) -> None:
    """Make an entry the only one of its weight."""
    if len(_forward) >= KINDS:
        forget()
    _forward[id(weight)] = entry


def onward(f: Any, x: Any, w: Any, b: Any, s: Any, p: Any, o: Any, d: Any, g: Any,
            r: Any = None) -> Tensor:
    """The end of a chain of entries: the general way of the function that was called."""
    made: Tensor = f.general(f, x, w, b, s, p, o, d, g, *() if r is None else (r,))
    return made


def note(autograd: Callable[[Route, bool, torch.dtype | None], Call], function: Any,
         given: tuple[Any, ...], used: tuple[Any, ...], numbers: tuple[Any, ...], route: Route,
         flags: Flags, aligned: bool, cast: torch.dtype | None) -> None:
    """A call went the general way: after a few, make an entry for its kind.

    ``autograd(route, biased, cast)`` makes the differentiable call; ``given`` are input, weight,
    bias and residual, ``used`` what autocast made of them, and ``cast`` the type that it gives, None
    outside of it; ``numbers`` are stride, padding, output_padding, dilation and groups as the caller
    gave them. A residual under autocast is never remembered.
    """
    x, weight, bias, residual = given
    # Lists can change under their identity. A route that waits for a kernel is asked at each call.
    if (route.over is not None or _function_modes() or any(isinstance(n, list) for n in numbers)
            or (residual is not None and cast is not None)):
        return
    place = due(id(weight), CHAIN)
    adds_input = residual is x
    tensors = [t for t in (x, weight, bias, None if adds_input else residual) if t is not None]
    check = guard(*tensors) if place else None
    if check is None:
        return
    biased = bias is not None
    casts = tuple(a is not b for a, b in zip(given, used, strict=True))[:3]
    apply = (autograd(route, biased, cast if casts[1] or casts[2] else None)
             if any(t.requires_grad for t in tensors) else None)
    others = _forward.get(id(weight), onward) if place > 1 else onward
    switches = call_guards.Switches(flags, x.dtype, route)
    kind = (others, apply, check, function, numbers, route)
    if cast is not None:
        _forward[id(weight)] = call_guards.autocast(
            *kind, switches, aligned, cast, x.device.type, biased, casts)
        return
    if residual is not None:
        made = call_guards.adding(*kind, switches, aligned, biased, adds_input)
    else:
        made = (call_guards.biased if biased else call_guards.unbiased)(*kind, switches, aligned)
    _forward[id(weight)] = made


def note_backward(route: Route, wanted: tuple[bool, ...], grad: Tensor, x: Tensor, w: Tensor,
                  routes: BackwardRoutes, flags: Flags, aligned: bool) -> None:
    """Gradients went the general way: after a few, make an entry for their kind, one per forward
    route and wanted subset, or for all sizes of a layer."""
    layer = routes.layer
    cold = any(r.reason in PASSING or r.over is not None for r in routes.routes())
    if cold or not due((route if layer is None else layer, wanted), 1):
        return
    check = guard(grad, x, w, free=0 if layer is None else 2)
    if check is not None:
        _backward.add(route)
        switches = call_guards.Switches(flags, x.dtype, *routes.routes())
        route.gradients[wanted] = (
            call_guards.gradients(check, routes, switches, aligned) if layer is None else
            call_guards.gradients_of_layer(check, layer, routes, switches, aligned))
