"""Torch border, step 4c. Calls that come back: found by the weight they bring, checked by one guard.

A layer calls with the same weight, the same numbers and mostly the same sizes. Its second call
leaves an entry under the identity of the weight: a function that asks one guard of torch's compiler
(type, dtype, device, sizes, strides, requires_grad and dispatch keys of all tensors, the thread's
modes included) and a few switches, and then runs the route. Identity is only where to look: what an
address meant before does not matter, for everything that the route depends on is asked again.

Any doubt sends the call on, at last to the general way. Without that guard in torch nothing is
remembered here, and calls only cost more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from transconv.torch_ops.execute import read_precision
from transconv.torch_ops.route import BackwardRoutes, Route, current_device

if TYPE_CHECKING:
    from transconv.torch_ops.execute import Flags

Tensor = torch.Tensor
Call = Callable[..., Tensor]  # the arguments of dispatch()
Gradients = Callable[[Tensor, Tensor, Tensor], "tuple[Tensor | None, ...] | None"]

ALIGNMENT = 15  # pointers that share these zero bits may be read 16 bytes at a time
CHAIN = 3  # entries under one weight: other sizes, training and inference
KINDS = 4096  # weights and kinds of gradients known; beyond it all are forgotten
PATIENCE = 2  # calls with a known route before an entry is made; doubles when entries had to go
MOST_PATIENCE = 1 << 12
FIXED = (int, str, tuple)  # what cannot change under its identity, as lists can

_forward: dict[int, Call] = {}
_backward: dict[Route, dict[tuple[bool, ...], Gradients]] = {}
_visits: dict[Hashable, list[int]] = {}  # calls since the last entry, calls to wait for, entries

find = _forward.get


def gradients_of(route: Route) -> dict[tuple[bool, ...], Gradients]:
    """The entries of a forward route's gradients, by the wanted ones: None where the gradients are
    of another kind. Empty for good once everything was forgotten."""
    return _backward.setdefault(route, {})


# Read at every call; each is a plain function in C.
_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._is_torch_function_mode_enabled
_deterministic = torch._C._get_deterministic_algorithms
_cudnn_deterministic = torch._C._get_cudnn_deterministic
_grad_enabled = torch.is_grad_enabled
_autocast_dtype = torch.get_autocast_dtype
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


def _guard(*tensors: Tensor) -> Callable[..., bool] | None:
    """A function that says whether other tensors, here and now, look like these. None for negated
    views, whose memory no kernel may read as it is."""
    if any(t.is_neg() for t in tensors):
        return None
    try:
        made = _guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        check: Callable[..., bool] = made.check
        # One tensor in two roles is never recognised.
        return check if check(*tensors) else None
    except (AttributeError, TypeError, RuntimeError):
        return None


def forget() -> None:
    """Every call goes the general way again."""
    _forward.clear()
    for route, known in list(_backward.items()):
        known.clear()
        route.function = None
    _backward.clear()
    _visits.clear()


def _due(key: Hashable, chain: int) -> int:
    """Count a call that found no entry. 0: no entry is due; 1: the first, or all have to go; n: it
    goes in front of the n - 1 there are."""
    visits = _visits.get(key)
    if visits is None:
        if len(_visits) >= KINDS:
            forget()
        visits = _visits[key] = [0, PATIENCE, 0]
    visits[0] += 1
    if visits[0] < visits[1]:
        return 0
    visits[0] = 0
    if visits[2] >= chain:  # wait longer: sizes that never come back earn no entries
        visits[1], visits[2] = min(2 * visits[1], MOST_PATIENCE), 0
    visits[2] += 1
    return visits[2]


def note(general: Call, autograd: Callable[[Route, bool, torch.dtype | None], Call], function: Any,
         given: tuple[Any, ...], used: tuple[Any, ...], numbers: tuple[Any, ...], route: Route,
         flags: Flags, aligned: bool, cast: torch.dtype | None) -> None:
    """A call went the general way: after a few, make an entry for its kind.

    ``general`` is that way; ``autograd(route, biased, cast)`` makes the differentiable call;
    ``numbers`` are stride, padding, output_padding, dilation and groups as the caller gave them,
    ``given`` the tensors, ``used`` what autocast made of them, and ``cast`` the type that it gives,
    None outside of it.
    """
    if _function_modes() or not all(n.__class__ in FIXED for n in numbers):
        return
    weight, biased = id(given[1]), given[2] is not None
    place = _due(weight, CHAIN)
    tensors = given if biased else given[:2]
    check = _guard(*tensors) if place else None
    if check is not None:
        others = _forward.get(weight, general) if place > 1 else general
        differentiable = any(t.requires_grad for t in tensors)
        x, w, b = (a is not b for a, b in zip(given, used, strict=True))
        apply = autograd(route, biased, cast if w or b else None) if differentiable else None
        if cast is None:
            make = _biased if biased else _unbiased
            _forward[weight] = make(others, apply, check, function, numbers, route,
                                    _Switches(flags, given[0].dtype), aligned)
        else:
            _forward[weight] = _autocast(others, apply, check, function, numbers, route,
                                         flags.deterministic, aligned, cast, given[0].device.type,
                                         biased, (x, w, b))


class _Switches:
    """torch's numeric switches as they stood; float32 alone has a precision."""

    def __init__(self, flags: Flags, dtype: torch.dtype) -> None:
        self.deterministic, self.tf32 = flags.deterministic, flags.math == "tf32"
        self.precision = read_precision if dtype is torch.float32 else None


def _unbiased(others: Call, apply: Callable[..., Tensor] | None, check: Callable[..., bool],
              function: Any, numbers: tuple[Any, ...], route: Route, switches: _Switches,
              aligned: bool) -> Call:
    stride, padding, output_padding, dilation, groups = numbers
    deterministic, tf32 = switches.deterministic, switches.tf32
    precision, device = switches.precision, _only_on(route)
    run = route.start or route.forward

    def call(f: Any, x: Tensor, w: Tensor, b: Tensor | None, s: Any, p: Any, o: Any, d: Any,
             g: Any) -> Tensor:
        if (p is padding and s is stride and g is groups and d is dilation and f is function
                and o is output_padding and b is None and check(x, w) and not _modes()
                and not _function_modes() and forward_ad._current_level < 0
                and (_deterministic() or _cudnn_deterministic()) is deterministic
                and (precision is None or (precision("cuda", "conv") == "tf32") is tf32)
                and (not (x.data_ptr() | w.data_ptr()) & ALIGNMENT) is aligned
                and (device is None or device == current_device())):
            if apply is not None and _grad_enabled():
                return apply(x, w)
            return run(x, w)
        return others(f, x, w, b, s, p, o, d, g)

    return call


def _biased(others: Call, apply: Callable[..., Tensor] | None, check: Callable[..., bool],
            function: Any, numbers: tuple[Any, ...], route: Route, switches: _Switches,
            aligned: bool) -> Call:
    stride, padding, output_padding, dilation, groups = numbers
    deterministic, tf32 = switches.deterministic, switches.tf32
    precision, device = switches.precision, _only_on(route)
    run = route.start or route.forward

    def call(f: Any, x: Tensor, w: Tensor, b: Tensor | None, s: Any, p: Any, o: Any, d: Any,
             g: Any) -> Tensor:
        if (p is padding and s is stride and g is groups and d is dilation and f is function
                and o is output_padding and check(x, w, b) and not _modes()
                and not _function_modes() and forward_ad._current_level < 0
                and (_deterministic() or _cudnn_deterministic()) is deterministic
                and (precision is None or (precision("cuda", "conv") == "tf32") is tf32)
                and b is not None
                and (not (x.data_ptr() | w.data_ptr() | b.data_ptr()) & ALIGNMENT) is aligned
                and (device is None or device == current_device())):
            if apply is not None and _grad_enabled():
                return apply(x, w, b)
            return run(x, w, b)
        return others(f, x, w, b, s, p, o, d, g)

    return call


def _autocast(others: Call, apply: Callable[..., Tensor] | None, check: Callable[..., bool],
              function: Any, numbers: tuple[Any, ...], route: Route, deterministic: bool,
              aligned: bool, cast: torch.dtype, kind: str, biased: bool,
              casts: tuple[bool, bool, bool]) -> Call:
    """For calls with and without bias, of which ``casts`` says what is cast. That autocast is on,
    the guard sees; a cast tensor is an aligned one."""
    stride, padding, output_padding, dilation, groups = numbers
    device = _only_on(route)
    casts_x, casts_w, casts_b = casts

    def call(f: Any, x: Tensor, w: Tensor, b: Tensor | None, s: Any, p: Any, o: Any, d: Any,
             g: Any) -> Tensor:
        if (p is padding and s is stride and g is groups and d is dilation and f is function
                and o is output_padding and (b is not None) is biased
                and (check(x, w) if b is None else check(x, w, b))
                and not _modes() and not _function_modes() and forward_ad._current_level < 0
                and _autocast_dtype(kind) is cast
                and (_deterministic() or _cudnn_deterministic()) is deterministic
                and (not ((0 if casts_x else x.data_ptr()) | (0 if casts_w else w.data_ptr())
                          | (0 if casts_b or b is None else b.data_ptr())) & ALIGNMENT) is aligned
                and (device is None or device == current_device())):
            if casts_x:
                x = x.to(cast)
            if apply is not None and _grad_enabled():
                return apply(x, w) if b is None else apply(x, w, b)
            return route.forward(x, w.to(cast), None if b is None else b.to(cast))
        return others(f, x, w, b, s, p, o, d, g)

    return call


def _only_on(*routes: Route | None) -> int | None:
    """The device that has to be the current one; None where there is no other."""
    bound = [r.device for r in routes if r is not None and r.start is not None]
    return bound[0] if bound and torch.cuda.device_count() > 1 else None


def note_backward(route: Route, wanted: tuple[bool, ...], grad: Tensor, x: Tensor, w: Tensor,
                  routes: BackwardRoutes, flags: Flags, aligned: bool) -> None:
    """Gradients went the general way: after a few, make an entry for their kind, one per forward
    route and wanted subset. What it returns is None where the gradients are of another kind."""
    cold = any(r.reason == "capture:cold" for r in routes.aten)
    check = None if cold or not _due((route, wanted), 1) else _guard(grad, x, w)
    if check is None:
        return
    switches = _Switches(flags, x.dtype)
    deterministic, tf32 = switches.deterministic, switches.tf32
    precision, device = switches.precision, _only_on(routes.data, routes.weight)
    run = routes.bound()

    def gradients(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor | None, ...] | None:
        if (check(grad, x, w) and not _grad_enabled() and not _modes()
                and forward_ad._current_level < 0
                and (_deterministic() or _cudnn_deterministic()) is deterministic
                and (precision is None or (precision("cuda", "conv") == "tf32") is tf32)
                and (not (grad.data_ptr() | x.data_ptr() | w.data_ptr()) & ALIGNMENT) is aligned
                and (device is None or device == current_device())):
            return run(grad, x, w)
        return None

    gradients_of(route)[wanted] = gradients
