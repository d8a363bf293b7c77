"""Calls whose kernels take batch and image sizes as arguments: a call's layer, and its plan for a size.

A layer is the part of a call without the sizes: filter, numbers, channels, types, memory orders, switches.
Its registry (conv/registry.py) is made once; a new size then costs a look-up, the check of requirements,
and an estimate for each kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from transconv import knobs
from transconv.conv import Prop
from transconv.errors import ProblemError, Unsupported
from transconv.ir import Layout
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import lower_call

if TYPE_CHECKING:
    from transconv.conv import CompiledDirection, LayerRegistry
    from transconv.runtime import ChosenPlan, PlanRequest

LIMIT = 1024  # layers kept; beyond it all are dropped

Order = tuple[int, ...] | None

_layers: dict[Hashable, LayerRegistry | str] = {}
_lock = threading.Lock()


def chosen(
    prop: Prop,
    params: Params,
    dtype: lower_call.Types,
    tensors: Sequence[lower_call.Like],
    channels_last: bool,
    device: torch.device,
    epilogue: str,
    bias: torch.dtype | None,
    aligned: bool,
    flags: lower_call.Flags,
    mode: str,
) -> tuple[ChosenPlan[CompiledDirection], LayerRegistry]:
    """The plan for the sizes of a call, and its registry. ``tensors``: input, weight and result of the
    layer, each as shape and strides; ``dtype``: of all three, or of each. Unsupported, with a reason,
    where there is no plan, or none yet."""
    near, weight, far = tensors
    orders = tuple([order_of(*t, channels_last) for t in tensors])
    key = (prop, params, dtype, near[0][1], far[0][1], weight[0], orders, device, epilogue, bias, aligned,
           flags)
    found = _layers.get(key)
    if found is None:
        found = _made(prop, params, dtype, tensors, orders, device, epilogue, bias, aligned, flags)
        with _lock:
            if len(_layers) >= LIMIT:
                _layers.clear()
            found = _layers.setdefault(key, found)
    if isinstance(found, str):
        raise Unsupported("sizes:refused", found)
    src = far[0] if params.transposed else near[0]
    with lower_call.or_unsupported(found.title):
        return found.choose((src[0], *src[2:]), mode), found


def complete(questions: Container[PlanRequest]) -> None:
    """Have the registries that asked nothing but these find all their plans, which are compiled."""
    for registry in list(_layers.values()):
        if not isinstance(registry, str) and all(q in questions for q in registry.questions):
            registry.complete()


def forget() -> None:
    """Drop the registries of all layers."""
    with _lock:
        _layers.clear()


def _made(prop: Prop, params: Params, dtype: lower_call.Types, tensors: Sequence[lower_call.Like],
          orders: tuple[Order, ...], device: torch.device, epilogue: str, bias: torch.dtype | None,
          aligned: bool, flags: lower_call.Flags) -> LayerRegistry | str:
    """The registry of a layer, or why it has none."""
    from transconv.conv import Epilogue, LayerRegistry

    if knobs.schedule():
        return "TRANSCONV_SCHEDULE names a schedule, for given sizes"
    if not params.symmetric and any(s > 1 for s in params.stride):
        return "two paddings of a dimension differ, and it has a stride"
    if None in orders:
        return "a tensor has gaps, or lies in another order than torch's"
    kinds = [lower_call.RESULTS[t] for t in lower_call.each(dtype)]
    dense = [(shape, Layout.dense(kind, shape, order).strides() or ())
             for kind, (shape, _), order in zip(kinds, tensors, orders, strict=True)]
    bia = None if bias is None else lower_call.DTYPES[bias]
    try:
        problem = lower_call.describe(dtype, dense[0], dense[1], dense[2], params, flags.math)
        return LayerRegistry(problem, prop, lower_call.target_of(device),
                        Epilogue.parse(epilogue, None if bia is kinds[-1] else bia), aligned,
                        flags.deterministic)
    except ProblemError as error:
        return str(error)


def has_gaps(t: torch.Tensor, channels_last: bool) -> bool:
    """Whether a tensor lies so that kernels for any size do not take it: with gaps, expanded, or with its
    dims in another order than torch's."""
    return order_of(t.shape, t.stride(), channels_last) is None


def order_of(shape: Sequence[int], strides: Sequence[int], channels_last: bool) -> Order:
    """The dims of a dense tensor, outermost first, as torch lays tensors out: contiguous or channels last,
    in this order of preference or the other; None for any other tensor."""
    rank = len(shape)
    ways: tuple[tuple[int, ...], ...] = ((*range(rank),), (0, *range(2, rank), 1))
    for order in reversed(ways) if channels_last else ways:
        step = 1
        for dim in reversed(order):
            size = shape[dim]
            if size != 1:
                if strides[dim] != step:
                    break
                step *= size
        else:
            return order
    return None
