"""Calls that come back: found by the function, its numbers and the first tensor's sizes, checked by one
guard of torch's compiler.

The guard sees type, dtype, device, sizes, strides, requires_grad and dispatch keys of all tensors, the
thread's modes included (autocast, transforms, inference), but not whether gradients are on. A call
that differs tries the next entry, and at last the general way. Without that guard in torch there are no
entries.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from transconv.functional.calls import call_codegen
from transconv.functional.calls.derivatives import function_of
from transconv.functional.calls.route_cache import FunctionRoute
from transconv.functional.calls.symbolic_bind import Numbers, PublicFunction
from transconv.torch_ops import stats
from transconv.torch_ops.calls import call_cache

Tensor = torch.Tensor
Tensors = tuple[Tensor | None, ...]
Call = Callable[[PublicFunction, Tensors, Numbers], Any]

CHAIN = 4  # entries under one key: other strides and types, training and inference
KEYS = 4096  # beyond it all are dropped

_entries: dict[Hashable, tuple[int, Call]] = {}
_grad_enabled = torch.is_grad_enabled


def find(f: PublicFunction, tensors: Tensors, numbers: Numbers) -> Call | None:
    """The entries of calls of this kind. TypeError and AttributeError for what has no hash or no sizes."""
    found = _entries.get((f, numbers, len(tensors), tensors[0].shape))  # type: ignore[union-attr]
    return None if found is None else found[1]


def forget() -> None:
    """Drop all entries."""
    _entries.clear()


call_cache.on_forget(forget)


def note(f: PublicFunction, tensors: Tensors, numbers: Numbers, route: FunctionRoute, wanted: bool,
         onward: Call) -> None:
    """Make an entry for a call that found its route in the general way, ``onward``, before the others of
    its key. ``wanted``: gradients are needed."""
    given = [t for t in tensors if t is not None]
    run = function_of(route) if wanted else route.written(False)
    bound, first = route.bound, tensors[0]
    if run is None or bound is None or first is None:
        return
    key = (f, numbers, len(tensors), first.shape)
    with stats.lock:
        if len(_entries) >= KEYS:
            _entries.clear()
        depth, others = _entries.get(key, (0, onward))
        if depth < CHAIN and (check := call_cache.guard(*given)) is not None:
            grads = _grad_enabled() if any(t.requires_grad for t in given) else None
            _entries[key] = depth + 1, call_codegen.entry(
                route, run, others, check, [t is not None for t in tensors], [*map(type, numbers)], grads,
                route.aligned, route.only_on, f.finish, len(bound.results))
