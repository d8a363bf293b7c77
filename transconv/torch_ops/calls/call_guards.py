"""Cached entries of calls: the guard that a repeated call must pass, and what it then runs.

An entry (calls/call_cache.py) is one function for one kind of call: a guard of torch's compiler that sees
type, dtype, device, sizes, strides, requires_grad and dispatch keys of all tensors, the thread's modes
included; the caller's numbers by identity; the settings. A call that differs tries the next entry. The
function that was called (a Function, by identity) says whether there is a residual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from transconv.torch_ops.calls.backward_routes import BackwardRoutes
from transconv.torch_ops.calls.lower_call import read_precision
from transconv.torch_ops.calls.route import ALIGNMENT, Gradients, Route, current_device

if TYPE_CHECKING:
    from transconv.torch_ops.calls.lower_call import Flags
    from transconv.torch_ops.calls.shape_cache import LayerEntry

Tensor = torch.Tensor
Call = Callable[..., Tensor]  # the arguments of dispatch(), and a residual if the function adds one

# Read at every call; each is a plain function in C.
_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._is_torch_function_mode_enabled
_deterministic = torch._C._get_deterministic_algorithms
_cudnn_deterministic = torch._C._get_cudnn_deterministic
_grad_enabled = torch.is_grad_enabled
_autocast_dtype = torch.get_autocast_dtype


class Switches:
    """torch's numeric switches at the time of the entry; None for those that do not affect the kernels of
    ``routes``, which are then not read at every call. Where torch computes, all are read."""

    def __init__(self, flags: Flags, dtype: torch.dtype, *routes: Route) -> None:
        plans = [r.compiled for r in routes]
        obeyed = frozenset[str]().union(*(p.obeys for p in plans if p is not None))
        torchs = None in plans
        self.deterministic = (flags.deterministic if torchs or "deterministic" in obeyed else None)
        self.tf32 = flags.math == "tf32"
        self.precision = (read_precision if dtype is torch.float32
                          and (torchs or "precision" in obeyed) else None)

    def same(self) -> bool:
        """Whether they are as they were."""
        return ((self.deterministic is None
                 or (_deterministic() or _cudnn_deterministic()) is self.deterministic)
                and (self.precision is None or (self.precision("cuda", "conv") == "tf32") is self.tf32))


def only_on(*routes: Route | None) -> int | None:
    """The device that must be the current one; None where there is only one."""
    bound = [r.device for r in routes if r is not None and r.start is not None]
    return bound[0] if bound and torch.cuda.device_count() > 1 else None


def unbiased(others: Call, apply: Callable[..., Tensor] | None, check: Callable[..., bool],
             function: Any, numbers: tuple[Any, ...], route: Route, switches: Switches,
             aligned: bool) -> Call:
    stride, padding, output_padding, dilation, groups = numbers
    deterministic, tf32 = switches.deterministic, switches.tf32
    precision, device = switches.precision, only_on(route)
    run = route.bound()

    def call(f: Any, x: Tensor, w: Tensor, b: Tensor | None, s: Any, p: Any, o: Any, d: Any,
             g: Any, r: Tensor | None = None) -> Tensor:
        if (p is padding and s is stride and g is groups and d is dilation and f is function
                and o is output_padding and b is None and check(x, w) and not _modes()
                and not _function_modes() and forward_ad._current_level < 0
                and (deterministic is None
                     or (_deterministic() or _cudnn_deterministic()) is deterministic)
                and (precision is None or (precision("cuda", "conv") == "tf32") is tf32)
                and (not (x.data_ptr() | w.data_ptr()) & ALIGNMENT) is aligned
                and (device is None or device == current_device())):
            if apply is not None and _grad_enabled():
                return apply(x, w)
            return run(x, w)
        return others(f, x, w, b, s, p, o, d, g, r)

    return call


def biased(others: Call, apply: Callable[..., Tensor] | None, check: Callable[..., bool],
           function: Any, numbers: tuple[Any, ...], route: Route, switches: Switches,
           aligned: bool) -> Call:
    stride, padding, output_padding, dilation, groups = numbers
    deterministic, tf32 = switches.deterministic, switches.tf32
    precision, device = switches.precision, only_on(route)
    run = route.bound()

    def call(f: Any, x: Tensor, w: Tensor, b: Tensor | None, s: Any, p: Any, o: Any, d: Any,
             g: Any, r: Tensor | None = None) -> Tensor:
        if (p is padding and s is stride and g is groups and d is dilation and f is function
                and o is output_padding and check(x, w, b) and not _modes()
                and not _function_modes() and forward_ad._current_level < 0
                and (deterministic is None
                     or (_deterministic() or _cudnn_deterministic()) is deterministic)
                and (precision is None or (precision("cuda", "conv") == "tf32") is tf32)
                and b is not None
                and (not (x.data_ptr() | w.data_ptr() | b.data_ptr()) & ALIGNMENT) is aligned
                and (device is None or device == current_device())):
            if apply is not None and _grad_enabled():
                return apply(x, w, b)
            return run(x, w, b)
        return others(f, x, w, b, s, p, o, d, g, r)

    return call


def adding(others: Call, apply: Callable[..., Tensor] | None, check: Callable[..., bool],
           function: Any, numbers: tuple[Any, ...], route: Route, switches: Switches,
           aligned: bool, biased: bool, adds_input: bool) -> Call:
    """For functions that add a residual, with and without bias. The input is often the residual too:
    as the guard takes no tensor twice, ``adds_input`` says so."""
    stride, padding, output_padding, dilation, groups = numbers
    deterministic, tf32 = switches.deterministic, switches.tf32
    precision, device = switches.precision, only_on(route)
    run = route.bound()
    distinct = 3 + biased - adds_input

    def call(f: Any, x: Tensor, w: Tensor, b: Tensor | None, s: Any, p: Any, o: Any, d: Any,
             g: Any, r: Tensor | None = None) -> Tensor:
        given = (x, w, r) if b is None else (x, w, b, r)
        if (p is padding and s is stride and g is groups and d is dilation and f is function
                and o is output_padding and (b is not None) is biased and (r is x) is adds_input
                and check(*given[:distinct]) and not _modes()
                and not _function_modes() and forward_ad._current_level < 0
                and (deterministic is None
                     or (_deterministic() or _cudnn_deterministic()) is deterministic)
                and (precision is None or (precision("cuda", "conv") == "tf32") is tf32)
                and r is not None
                and (not (x.data_ptr() | w.data_ptr() | (0 if b is None else b.data_ptr())
                          | r.data_ptr()) & ALIGNMENT) is aligned
                and (device is None or device == current_device())):
            if apply is not None and _grad_enabled():
                return apply(*given)
            return run(*given)
        return others(f, x, w, b, s, p, o, d, g, r)

    return call


def autocast(others: Call, apply: Callable[..., Tensor] | None, check: Callable[..., bool],
             function: Any, numbers: tuple[Any, ...], route: Route, switches: Switches,
             aligned: bool, cast: torch.dtype, kind: str, biased: bool,
             casts: tuple[bool, ...]) -> Call:
    """For functions without residual, with and without bias; ``casts`` says which are cast. The
    guard covers the state of autocast; a cast tensor is aligned."""
    stride, padding, output_padding, dilation, groups = numbers
    deterministic = switches.deterministic
    device, forward = only_on(route), route.forward
    casts_x, casts_w, casts_b = casts

    def call(f: Any, x: Tensor, w: Tensor, b: Tensor | None, s: Any, p: Any, o: Any, d: Any,
             g: Any, r: Tensor | None = None) -> Tensor:
        if (p is padding and s is stride and g is groups and d is dilation and f is function
                and o is output_padding and (b is not None) is biased
                and (check(x, w) if b is None else check(x, w, b))
                and not _modes() and not _function_modes() and forward_ad._current_level < 0
                and _autocast_dtype(kind) is cast
                and (deterministic is None
                     or (_deterministic() or _cudnn_deterministic()) is deterministic)
                and (not ((0 if casts_x else x.data_ptr()) | (0 if casts_w else w.data_ptr())
                          | (0 if casts_b or b is None else b.data_ptr())) & ALIGNMENT) is aligned
                and (device is None or device == current_device())):
            if casts_x:
                x = x.to(cast)
            if apply is not None and _grad_enabled():
                return apply(x, w) if b is None else apply(x, w, b)
            return forward(x, w.to(cast)) if b is None else forward(x, w.to(cast), b.to(cast))
        return others(f, x, w, b, s, p, o, d, g, r)

    return call


def gradients(check: Callable[..., bool], routes: BackwardRoutes, switches: Switches,
              aligned: bool) -> Gradients:
    """For gradients of a result; None where they are of another kind."""
    deterministic, tf32 = switches.deterministic, switches.tf32
    precision, device = switches.precision, only_on(routes.data, routes.weight)
    run = routes.bound()

    def call(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor | None, ...] | None:
        if (check(grad, x, w) and not _grad_enabled() and not _modes()
                and forward_ad._current_level < 0
                and (deterministic is None
                     or (_deterministic() or _cudnn_deterministic()) is deterministic)
                and (precision is None or (precision("cuda", "conv") == "tf32") is tf32)
                and (not (grad.data_ptr() | x.data_ptr() | w.data_ptr()) & ALIGNMENT) is aligned
                and (device is None or device == current_device())):
            return run(grad, x, w)
        return None

    return call


def gradients_of_layer(
    check: Callable[..., bool], layer: LayerEntry, some: BackwardRoutes, switches: Switches, aligned: bool
) -> Gradients:
    """``gradients`` of results of any size of a layer, ``some`` of which run on the device."""
    same, device = switches.same, only_on(some.data, some.weight)
    known, find = layer.known.get, layer.backward

    def call(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor | None, ...] | None:
        if (check(grad, x, w) and not _grad_enabled() and not _modes() and forward_ad._current_level < 0
                and same() and (not (grad.data_ptr() | x.data_ptr() | w.data_ptr()) & ALIGNMENT) is aligned
                and (device is None or device == current_device())):
            key = x.shape, x.stride(), grad.shape, grad.stride()
            routes = known(key) or find(grad, x, w, key)
            return None if routes is None else routes.run(grad, x, w)
        return None

    return call
