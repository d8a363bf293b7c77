"""Entries of calls whose kernels take sizes as arguments: one guard for all sizes of a layer.

The guard of torch's compiler sees all that it sees for other entries (calls/call_guards.py), but not the
sizes and strides of the input: these find the route. For new ones it is made from the layer
(calls/shape_cache.py); where that cannot be done, the call tries the next entry.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from transconv.torch_ops.calls import autograd, call_cache, lower_call, shape_cache
from transconv.torch_ops.calls.call_guards import Call, only_on
from transconv.torch_ops.calls.route import ALIGNMENT, Route, current_device

if TYPE_CHECKING:
    from transconv.torch_ops.calls.lower_call import Flags

Tensor = torch.Tensor

# Read at every call; each is a plain function in C.
_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._is_torch_function_mode_enabled
_deterministic = torch._C._get_deterministic_algorithms
_cudnn_deterministic = torch._C._get_cudnn_deterministic
_grad_enabled = torch.is_grad_enabled
_autocast_dtype = torch.get_autocast_dtype


def note(function: Any, given: Sequence[Tensor | None], used: Sequence[Tensor | None],
         numbers: tuple[Any, ...], route: Route, key: Hashable, flags: Flags, aligned: bool,
         cast: torch.dtype | None) -> None:
    """Make the entry of a layer, whose route for a new size was just made from another one: ``key`` is
    what its calls share. ``given``, ``used``, ``numbers`` and ``cast`` as in ``warm.note``, the first two
    without a residual."""
    x, w, b = given[:3]
    assert x is not None and w is not None
    if (
        _function_modes()
        or any(isinstance(n, list) for n in numbers)
        or not call_cache.due((id(w), "sizes"), 1)
    ):
        return  # after a few sizes: a weight that does not come back gets no entry
    check, layer = call_cache.guard(x, w, *() if b is None else (b,), free=1), shape_cache.find(key)
    if check is None or layer is None:
        return
    kind = (
        call_cache.onward,
        check,
        function,
        numbers,
        only_on(route),
        flags,
        aligned,
        b is not None,
        layer,
    )
    if cast is None:
        made = _entry(*kind, x.dtype is torch.float32)
    else:
        casts = tuple(a is not b for a, b in zip(given, used, strict=False))
        made = _autocast(*kind, cast, x.device.type, casts)
    call_cache.begin(w, made)


def _entry(others: Call, check: Callable[..., bool], function: Any, numbers: tuple[Any, ...],
           device: int | None, flags: Flags, aligned: bool, biased: bool, layer: shape_cache.LayerEntry,
           wide: bool) -> Call:
    stride, padding, output_padding, dilation, groups = numbers
    deterministic, tf32 = flags.deterministic, flags.math == "tf32"
    known, find, apply = layer.known.get, layer.forward, autograd.apply
    precise = lower_call.read_precision if wide else None

    def call(f: Any, x: Tensor, w: Tensor, b: Tensor | None, s: Any, p: Any, o: Any, d: Any,
             g: Any, r: Tensor | None = None) -> Tensor:
        if (p is padding and s is stride and g is groups and d is dilation and f is function
                and o is output_padding and (b is not None) is biased
                and (check(x, w) if b is None else check(x, w, b)) and not _modes()
                and not _function_modes() and forward_ad._current_level < 0
                and (_deterministic() or _cudnn_deterministic()) is deterministic
                and (precise is None or (precise("cuda", "conv") == "tf32") is tf32)
                and (not (x.data_ptr() | w.data_ptr() | (0 if b is None else b.data_ptr()))
                     & ALIGNMENT) is aligned
                and (device is None or device == current_device())):
            route = known((x.shape, x.stride())) or find(x, w)
            if route is not None and route.start is not None:
                if _grad_enabled() and (x.requires_grad or w.requires_grad
                                        or (b is not None and b.requires_grad)):
                    return apply(x, w, b, route)
                return route.start(x, w) if b is None else route.start(x, w, b)
        return others(f, x, w, b, s, p, o, d, g, r)

    return call


def _autocast(others: Call, check: Callable[..., bool], function: Any, numbers: tuple[Any, ...],
              device: int | None, flags: Flags, aligned: bool, biased: bool, layer: shape_cache.LayerEntry,
              cast: torch.dtype, kind: str, casts: tuple[bool, ...]) -> Call:
    """The same under autocast, whose state the guard covers; ``casts`` says which tensors are cast."""
    stride, padding, output_padding, dilation, groups = numbers
    deterministic, known, find = flags.deterministic, layer.known.get, layer.forward
    casts_x, casts_w, casts_b = casts

    def call(f: Any, x: Tensor, w: Tensor, b: Tensor | None, s: Any, p: Any, o: Any, d: Any,
             g: Any, r: Tensor | None = None) -> Tensor:
        if (p is padding and s is stride and g is groups and d is dilation and f is function
                and o is output_padding and (b is not None) is biased
                and (check(x, w) if b is None else check(x, w, b)) and not _modes()
                and not _function_modes() and forward_ad._current_level < 0
                and _autocast_dtype(kind) is cast
                and (_deterministic() or _cudnn_deterministic()) is deterministic
                and (not ((0 if casts_x else x.data_ptr()) | (0 if casts_w else w.data_ptr())
                          | (0 if casts_b or b is None else b.data_ptr())) & ALIGNMENT) is aligned
                and (device is None or device == current_device())):
            small = x.to(cast) if casts_x else x
            route = known((small.shape, small.stride())) or find(small, w)
            if route is not None and route.start is not None:
                small_w = w.to(cast) if casts_w else w
                small_b = b.to(cast) if b is not None and casts_b else b
                if _grad_enabled() and (x.requires_grad or w.requires_grad
                                        or (b is not None and b.requires_grad)):
                    if casts_w or casts_b:
                        return autograd.apply_cast(small, w, b, small_w, small_b, route)
                    return autograd.apply(small, w, b, route)
                return (route.start(small, small_w) if small_b is None else
                        route.start(small, small_w, small_b))
        return others(f, x, w, b, s, p, o, d, g, r)

    return call
