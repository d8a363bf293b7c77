"""Entries of calls whose kernels take sizes as arguments: one guard for all sizes of a layer.

The guard of torch's compiler sees all that it sees for other entries (entries.py), but not the sizes and
strides of the input: these find the route. For new ones it is made from the layer (known_layers.py); where
that cannot be done, the call tries the next entry.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from transconv.torch_ops import autograd, execute, known_layers, warm
from transconv.torch_ops.arguments import means_more
from transconv.torch_ops.entries import Call, only_on
from transconv.torch_ops.route import ALIGNMENT, Route, current_device

if TYPE_CHECKING:
    from transconv.torch_ops.execute import Flags

Tensor = torch.Tensor

# Read at every call; each is a plain function in C.
_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._is_torch_function_mode_enabled
_deterministic = torch._C._get_deterministic_algorithms
_cudnn_deterministic = torch._C._get_cudnn_deterministic
_grad_enabled = torch.is_grad_enabled


def note(function: Any, x: Tensor, w: Tensor, b: Tensor | None, numbers: tuple[Any, ...], route: Route,
         key: Hashable, flags: Flags, aligned: bool) -> None:
    """Make the entry of a layer, whose route for a new size was just made from another one: ``key`` is
    what its calls share. ``numbers`` as in ``warm.note``."""
    if _function_modes() or any(isinstance(n, list) for n in numbers) or not warm.due((id(w), "sizes"), 1):
        return  # after a few sizes: a weight that does not come back gets no entry
    check, layer = _guard(x, w, *() if b is None else (b,)), known_layers.find(key)
    if check is not None and layer is not None:
        warm.begin(w, _entry(warm.onward, check, function, numbers, route, flags, aligned, b is not None,
                             x.dtype is torch.float32, layer))


def _guard(x: Tensor, *others: Tensor) -> Callable[..., bool] | None:
    """As ``warm.guard``, for any sizes and strides of the first tensor but its number of channels."""
    if any(means_more(t) for t in (x, *others)):
        return None
    free: list[int | None] = [None] * x.dim()
    sizes = [[None, x.shape[1], *free[2:]], *([*t.shape] for t in others)]
    strides = [free, *([*t.stride()] for t in others)]
    try:
        made = warm.guards.TensorGuards(x, *others, dynamic_dims_sizes=sizes,
                                        dynamic_dims_strides=strides)
        check: Callable[..., bool] = made.check
        return check if check(x, *others) else None
    except (AttributeError, TypeError, RuntimeError):
        return None


def _entry(others: Call, check: Callable[..., bool], function: Any, numbers: tuple[Any, ...], route: Route,
           flags: Flags, aligned: bool, biased: bool, wide: bool, layer: known_layers.Layer) -> Call:
    stride, padding, output_padding, dilation, groups = numbers
    deterministic, tf32 = flags.deterministic, flags.math == "tf32"
    device, known, find, apply = only_on(route), layer.known.get, layer.forward, autograd.apply
    precise = execute.read_precision if wide else None

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
