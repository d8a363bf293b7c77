"""Keys of calls, and of layers, whose calls differ in their sizes alone; and the registry of a layer,
which has the plans for any size.

A key of a call holds all that its route depends on (calls/route_cache.py), that of a layer all but the
sizes. The tensors that a call and its backward compute each have a direction, and a registry of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from transconv.calls import size_policy
from transconv.calls.guard import ALIGNMENT
from transconv.conv import CompiledDirection, Epilogue, LayerRegistry, Prop
from transconv.ir import Layout
from transconv.support import ProblemError
from transconv.torch_ops import arguments
from transconv.torch_ops.arguments import Order, Params, order_of
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.calls.call_attributes import CallAttributes

if TYPE_CHECKING:
    from transconv.runtime import ChosenPlan


def layer_of(
    params: Params, types: lower_call.Types, weight: Sequence[int], device: torch.device
) -> Hashable:
    """What the calls of a layer of any size share, whatever they compute."""
    return params, types, tuple(weight), device


def like(tensor: torch.Tensor) -> lower_call.Like:
    return tuple(tensor.shape), tensor.stride()


def choose_plan(
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
    key = (
        prop,
        params,
        dtype,
        near[0][1],
        far[0][1],
        weight[0],
        orders,
        device,
        epilogue,
        bias,
        aligned,
        flags,
    )
    found = size_policy.registry_of(
        key,
        lambda: _registry(prop, params, dtype, tensors, orders, device, epilogue, bias, aligned, flags),
    )
    src = far[0] if params.transposed else near[0]
    with lower_call.or_unsupported(found.title):
        return found.choose((src[0], *src[2:]), mode), found


def _registry(
    prop: Prop,
    params: Params,
    dtype: lower_call.Types,
    tensors: Sequence[lower_call.Like],
    orders: tuple[Order, ...],
    device: torch.device,
    epilogue: str,
    bias: torch.dtype | None,
    aligned: bool,
    flags: lower_call.Flags,
) -> LayerRegistry:
    """The registry of a layer. Raises ProblemError where it has none."""
    if not params.symmetric and any(s > 1 for s in params.stride):
        raise ProblemError("two paddings of a dimension differ, and it has a stride")
    if None in orders:
        raise ProblemError("a tensor has gaps, or lies in another order than torch's")
    kinds = [lower_call.RESULTS[t] for t in lower_call.each(dtype)]
    dense = [
        (shape, Layout.dense(kind, shape, order).strides() or ())
        for kind, (shape, _), order in zip(kinds, tensors, orders, strict=True)
    ]
    bia = None if bias is None else lower_call.DTYPES[bias]
    problem = lower_call.describe(dtype, dense[0], dense[1], dense[2], params, flags.math)
    return LayerRegistry(
        problem,
        prop,
        lower_call.target_of(device),
        Epilogue.parse(epilogue, None if bia is kinds[-1] else bia),
        aligned,
        flags.deterministic,
    )


def call_key(
    kind: str, req: CallAttributes, what: Hashable, tensors: Sequence[torch.Tensor | None]
) -> tuple[Hashable, lower_call.Flags, bool]:
    """The key of a call of a kind, its input first, of which ``what`` is beside tensors and numbers; its
    flags and alignment."""
    some = [t for t in tensors if t is not None]
    flags, aligned = lower_call.flags(some[0].dtype), not any(t.data_ptr() & ALIGNMENT for t in some)
    return (
        (
            kind,
            req,
            what,
            flags,
            aligned,
            *(None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors),
        ),
        flags,
        aligned,
    )


COMPUTED = ("result", "input gradient", "weight gradient")


def directions(params: Params) -> tuple[Prop, Prop, Prop]:
    """Those of a call's result, and of the gradients of its input and weight."""
    forward, back = (Prop.BWD_D, Prop.FWD) if params.transposed else (Prop.FWD, Prop.BWD_D)
    return forward, back, Prop.BWD_W


def computed(
    x: torch.Tensor, w: torch.Tensor, params: Params
) -> list[tuple[str, Prop, tuple[lower_call.Like, lower_call.Like, lower_call.Like]]]:
    """The tensors that a call and its backward compute, each with its direction, and input, weight and
    result as its kernel sees them: what is computed has the strides of torch's rule for results."""
    last = arguments.channels_last_result(x, w)

    def made(shape: Sequence[int]) -> lower_call.Like:
        return tuple(shape), arguments.result_strides(shape, last)

    y = made(arguments.output_shape(x.shape, w.shape, params))
    tensors = ((like(x), like(w), y), (made(x.shape), like(w), y), (like(x), made(w.shape), y))
    return list(zip(COMPUTED, directions(params), tensors, strict=True))


def forward_key(
    req: CallAttributes, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
) -> tuple[Hashable, lower_call.Flags, bool]:
    """The key of a forward call, and its flags and alignment."""
    flags = lower_call.flags(x.dtype)
    if b is None:
        aligned = not (x.data_ptr() | w.data_ptr()) & ALIGNMENT
        return (
            (
                req,
                x.shape,
                x.stride(),
                x.dtype,
                x.device,
                w.shape,
                w.stride(),
                w.dtype,
                w.device,
                aligned,
                flags,
            ),
            flags,
            aligned,
        )
    aligned = not (x.data_ptr() | w.data_ptr() | b.data_ptr()) & ALIGNMENT
    return (
        (
            req,
            x.shape,
            x.stride(),
            x.dtype,
            x.device,
            w.shape,
            w.stride(),
            w.dtype,
            w.device,
            aligned,
            flags,
            b.shape,
            b.stride(),
            b.dtype,
            b.device,
        ),
        flags,
        aligned,
    )


def layer_key(
    req: CallAttributes,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    flags: lower_call.Flags,
    aligned: bool,
) -> Hashable:
    """What calls of a layer share."""
    return (
        req,
        x.shape[1],
        x.stride(1) == 1,
        x.dtype,
        x.device,
        w.shape,
        w.stride(),
        w.dtype,
        w.device,
        aligned,
        flags,
        b is not None and (b.shape, b.stride(), b.dtype, b.device),
    )


def gradients_key(
    params: Params,
    grad: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    key: lower_call.Sizes,
    mask: Sequence[bool],
    flags: lower_call.Flags,
    aligned: bool,
) -> Hashable:
    """What the gradients of a layer's calls share. ``key`` as for ``LayerEntry.backward``."""
    shape, strides, _, steps = key
    return (
        params,
        shape[1],
        strides[1] == 1,
        steps[1] == 1,
        x.dtype,
        x.device,
        grad.dtype,
        grad.device,
        w.shape,
        w.stride(),
        w.dtype,
        w.device,
        aligned,
        flags,
        *mask,
    )
