"""Calls that come back: found by the function, its numbers and the first tensor's sizes, checked by one
guard of torch's compiler.

The guard sees type, dtype, device, sizes, strides, requires_grad and dispatch keys of all tensors, the
thread's modes included (autocast, transforms, inference), but not whether gradients are on. A call
that differs tries the next entry, and at last the general way. Without that guard in torch there are no
entries.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import Any

import torch
from torch.autograd import forward_ad

from transconv.functional.bound import Function, Numbers, as_tuple
from transconv.functional.derivatives import function_of
from transconv.functional.routes import Route
from transconv.torch_ops import stats, warm
from transconv.torch_ops.arguments import means_more
from transconv.torch_ops.route import ALIGNMENT

Tensor = torch.Tensor
Tensors = tuple[Tensor | None, ...]
Call = Callable[[Function, Tensors, Numbers], Any]

CHAIN = 4  # entries under one key: other strides and types, training and inference
KEYS = 4096  # beyond it all are dropped

_entries: dict[Hashable, tuple[int, Call]] = {}
_deterministic = torch._C._get_deterministic_algorithms
_grad_enabled = torch.is_grad_enabled
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


def find(f: Function, tensors: Tensors, numbers: Numbers) -> Call | None:
    """The entries of calls of this kind. TypeError and AttributeError for what has no hash or no sizes."""
    found = _entries.get((f, numbers, len(tensors), tensors[0].shape))  # type: ignore[union-attr]
    return None if found is None else found[1]


def forget() -> None:
    """Drop all entries."""
    _entries.clear()


warm.on_forget(forget)


def note(f: Function, tensors: Tensors, numbers: Numbers, route: Route, wanted: bool,
         onward: Call) -> None:
    """Make an entry for a call that found its route in the general way, ``onward``, before the others of
    its key. ``wanted``: gradients are needed."""
    given = [t for t in tensors if t is not None]
    run = route.bound_run()
    first = tensors[0]
    if run is None or first is None or any(map(means_more, given)):
        return
    key = (f, numbers, len(tensors), first.shape)
    with stats.lock:
        if len(_entries) >= KEYS:
            _entries.clear()
        depth, others = _entries.get(key, (0, onward))
        if depth < CHAIN and (check := _guard(given)) is not None:
            start = function_of(route) if wanted else run
            _entries[key] = depth + 1, _entry(others, check, tensors, numbers, start, f.finish)


def _guard(given: list[Tensor]) -> Callable[..., bool] | None:
    try:
        check: Callable[..., bool] = _guards.TensorGuards(
            *given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        # A tensor that is passed twice gets no entry.
        return check if check(*given) else None
    except (AttributeError, TypeError, RuntimeError):
        return None


def _entry(others: Call, check: Callable[..., bool], tensors: Tensors, numbers: Numbers,
           run: Callable[..., Any], finish: Callable[..., Any] | None) -> Call:
    """``numbers`` compare equal already; here True differs from 1."""
    types = [*map(type, numbers)]
    places = [i for i, t in enumerate(tensors) if t is not None]
    given = [t for t in tensors if t is not None]
    aligned, deterministic = not _bits(given) & ALIGNMENT, _deterministic()
    grads = _grad_enabled() if any(t.requires_grad for t in given) else None

    def alone(f: Function, tensors: Tensors, numbers: Numbers) -> Any:
        x, = tensors
        if (check(x) and forward_ad._current_level < 0 and _deterministic() is deterministic
                and (grads is None or _grad_enabled() is grads) and [*map(type, numbers)] == types
                and (not x.data_ptr() & ALIGNMENT) is aligned):  # type: ignore[union-attr]
            made = run(x)
            if finish is not None:
                return finish(tensors, numbers, as_tuple(made))
            return made if made.__class__ is Tensor else made[0]
        return others(f, tensors, numbers)

    missing = [i for i in range(len(tensors)) if i not in places]
    pick = itemgetter(*places) if missing and len(places) > 1 else None

    def several(f: Function, tensors: Tensors, numbers: Numbers) -> Any:
        given: Any = tensors if not missing else pick(tensors) if pick else (tensors[places[0]],)
        if (check(*given) and forward_ad._current_level < 0 and _deterministic() is deterministic
                and (grads is None or _grad_enabled() is grads) and [*map(type, numbers)] == types
                and all([tensors[i] is None for i in missing])
                and (not _bits(given) & ALIGNMENT) is aligned):
            made = run(*given)
            if finish is not None:
                return finish(tensors, numbers, as_tuple(made))
            return made if made.__class__ is Tensor else made[0]
        return others(f, tensors, numbers)

    return alone if len(tensors) == 1 else several


def _bits(given: Any) -> int:
    bits = 0
    for t in given:
        bits |= t.data_ptr()
    return bits
