"""Causal depthwise convolutions with a state, with the signatures of Dao-AILab's causal-conv1d:
causal_conv1d_fn and causal_conv1d_update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from transconv.compute import library
from transconv.functional.calls.dispatch import call
from transconv.functional.calls.symbolic_bind import Made, Numbers, Specs, as_first, as_tuple, expect
from transconv.functional.calls.torch_operators import declare
from transconv.torch_ops.fused.fused_route import ACTIVATIONS, refuse

Tensor = torch.Tensor
WHOLE = (torch.int32, torch.int64)


def _conv(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    x, w, b, state, index = given
    assert x is not None and w is not None
    return library.causal_window(x, w, b, state, index, made, library.FeatureParts.of(x, numbers))


def _of_parts(given: Specs, numbers: Numbers) -> Sequence[tuple[int, ...]]:
    ((n, c, t),) = as_first(given, numbers)
    expect(not numbers[1] or sum(numbers[1]) == c)
    return [(n, own, t) for own in numbers[1] or (c,)]


def _conv_by_torch(
    x: Tensor, w: Tensor, b: Tensor | None, state: Tensor | None, index: Tensor | None, *numbers: Any
) -> Any:
    activation, channels, norms, head, eps = numbers
    past = w.shape[1] - 1
    wide = F.pad(x, (past, 0)) if state is None else torch.cat([state.to(x.dtype), x], -1)
    wide = wide.to(torch.promote_types(x.dtype, w.dtype))
    if index is None:
        y = F.conv1d(wide, w.to(wide.dtype)[:, None], groups=w.shape[0])
    else:
        windows = wide.unfold(2, past + 1, 1)
        own = F.pad(index, (past, 0)).unfold(1, past + 1, 1) == index[..., None]
        y = torch.einsum("nctk,ck->nct", windows.masked_fill(~own[:, None], 0), w.to(wide.dtype))
    y = ACTIVATIONS[activation](y if b is None else y + b[:, None].to(y.dtype))
    y = y if index is None else y.masked_fill((index < 0)[:, None], 0)
    if not channels and not norms:
        return y.to(x.dtype)
    made = [*torch.split(y, channels or y.shape[1], 1)]
    inner = (1, 2) if x.stride(1) < x.stride(2) else (1, 1)  # as x lies
    for i, norm in enumerate(norms.split(",")):
        if norm:
            wide = made[i].reshape(x.shape[0], -1, head, x.shape[2])
            squares = wide.square().sum(2, keepdim=True) / (head if norm == "rms" else 1)
            made[i] = (wide * torch.rsqrt(squares + eps)).flatten(1, 2)
        dense = made[i].to(x.dtype).transpose(*inner).clone(memory_format=torch.contiguous_format)
        made[i] = dense.transpose(*inner)
    return tuple(made) if channels else made[0]


def _all(tensors: Any, numbers: Numbers, made: tuple[Tensor, ...]) -> Any:
    """All results: a tuple of parts, where there are several."""
    return made if numbers[1] or len(made) > 1 else made[0]


CONV = declare(
    "causal_conv1d_fn", _conv_by_torch, _conv, whole=(False,) * 4 + (True,), finish=_all, shapes=_of_parts
)


def _step(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    x, state, w, b, lengths, rows = given
    assert x is not None and state is not None and w is not None
    parts = library.FeatureParts.of(x, numbers)
    return library.causal_step(x, state, w, b, lengths, rows, made[:-1], made[-1], parts)


def _step_by_torch(x: Tensor, state: Tensor, w: Tensor, b: Tensor | None, *given: Any) -> Any:
    """The results and the state after them."""
    lengths, rows, *numbers = given
    size, past, steps = state.shape[2], w.shape[1] - 1, x.shape[2]
    kept = state if rows is None else state.index_select(0, rows)
    before = kept
    if lengths is not None:
        ring = torch.arange(size, device=x.device) + lengths[:, None].long()
        ring = (ring % size)[:, None].expand(-1, x.shape[1], -1)
        before = kept.gather(2, ring)
    wide = torch.cat([before.to(x.dtype), x], -1)
    y = as_tuple(_conv_by_torch(x, w, b, before[..., size - past :], None, *numbers))
    if lengths is None:
        return *y, wide[..., steps:].to(state.dtype).contiguous()
    return *y, kept.scatter(2, ring[..., :steps], x.to(state.dtype))


STEP = declare(
    "causal_conv1d_update", _step_by_torch, _step, whole=(False,) * 4 + (True, True), finish=_all
)


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    split: Sequence[int] | None = None,
    norm: str | Sequence[str | None] | None = None,
    head: int = 1,
    eps: float = 1e-6,
) -> Any:
    """The depthwise convolution of x (batch, dim, length) with weight (dim, width), each position with the
    ``width - 1`` before it, then bias (dim,) and ``activation``: None, ``"silu"``, ``"swish"``, or another
    name of ``transconv.compute.ACTIVATIONS``. Summed in f32, f64 in f64; the result has x's type.

    ``initial_states`` (batch, dim, width - 1): what is before x, else zeros. With ``return_final_states``
    also the last elements of these and x together, (batch, dim, width - 1), written to
    ``final_states_out`` if given: the initial states of the next piece. ``seq_idx`` (batch, length), i32
    or i64: the number of the sequence that a position is of; positions see their own sequence alone, and
    results where the number is negative are 0. ``cu_seqlens`` (sequences + 1,): x (1, dim, length) holds
    sequences one behind another, number i from ``cu_seqlens[i]`` up to ``cu_seqlens[i + 1]``, which is not
    of it; states then are (sequences, dim, width - 1).

    ``split``: the result is a tuple of tensors of so many channels each, dense ones that the kernel stores
    directly. ``norm``: behind the activation each position of a head, ``head`` neighbouring channels, is
    divided by its norm: ``"l2"``, ``sqrt(sum(y*y) + eps)``, ``"rms"``, ``sqrt(mean(y*y) + eps)``, or None;
    one for all parts, or one for each.

    Differentiable with respect to all floats. ValueError for shapes that do not fit and arguments that
    exclude one another, TypeError for what is no tensor of these types."""
    _check_operands("causal_conv1d_fn", x, weight, bias, dims=(3,))
    numbers = _numbers(x, activation, split, norm, head, eps)
    past, rows = weight.shape[1] - 1, x.shape[0]
    if cu_seqlens is not None:
        _check_whole("cu_seqlens", cu_seqlens, None)
        if seq_idx is not None:
            raise ValueError("causal_conv1d_fn: cu_seqlens and seq_idx say the same; expected one of them")
        if x.shape[0] != 1:
            lie = "causal_conv1d_fn: cu_seqlens: sequences lie in x (1, dim, length)"
            raise ValueError(f"{lie}, got {tuple(x.shape)}")
        rows = cu_seqlens.shape[0] - 1
    if seq_idx is not None:
        _check_whole("seq_idx", seq_idx, (x.shape[0], x.shape[2]))
        if initial_states is not None or return_final_states:
            raise ValueError(
                "causal_conv1d_fn: seq_idx does not say whose the states are; expected cu_seqlens, "
                "or no initial_states and return_final_states=False"
            )
    for name, t in (("initial_states", initial_states), ("final_states_out", final_states_out)):
        if t is not None and tuple(t.shape) != (rows, x.shape[1], past):
            shape = rows, x.shape[1], past
            raise ValueError(f"causal_conv1d_fn: {name}: expected shape {shape}, got {tuple(t.shape)}")
    if cu_seqlens is not None:
        y, final = _packed(x, weight, bias, initial_states, return_final_states, numbers, cu_seqlens)
    else:
        state = initial_states if past else None
        y = call(CONV, (x, weight, bias, state, seq_idx), numbers)
        final = _last_states(x, initial_states, past) if return_final_states else None
    if final is None:
        return y
    return y, final if final_states_out is None else final_states_out.copy_(final)


def _last_states(x: Tensor, state: Tensor | None, past: int) -> Tensor:
    """The last ``past`` elements of the state and x together."""
    missing = past - x.shape[2]
    if missing <= 0:
        return x[..., -missing:].clone()
    before = x.new_zeros(*x.shape[:2], missing) if state is None else state[..., -missing:].to(x.dtype)
    return torch.cat([before, x], -1)


def _packed(
    x: Tensor, w: Tensor, b: Tensor | None, states: Tensor | None, wants: bool, numbers: Any, ends: Tensor
) -> tuple[Any, Tensor | None]:
    """The result of sequences one behind another, and their last states. With states each sequence is
    copied behind its own, so that the mask of sequences is all that a kernel needs to know."""
    past, count, length = w.shape[1] - 1, ends.shape[0] - 1, x.shape[2]
    place = torch.arange(length, device=x.device)
    index = torch.bucketize(place, ends[1:].to(place.dtype), right=True)
    if not past or not (wants or states is not None):
        y: Any = call(CONV, (x, w, b, None, index.to(torch.int32)[None]), numbers)
        return y, x.new_empty(count, x.shape[1], 0) if wants else None
    sequences = torch.arange(count, device=x.device)
    place = place + (index + 1) * past
    begin = (ends[:-1].to(place.dtype) + sequences * past)[:, None] + torch.arange(past, device=x.device)
    before = x.new_zeros(count, x.shape[1], past) if states is None else states.to(x.dtype)
    wide = x.new_zeros(1, x.shape[1], length + count * past).index_copy(2, place, x)
    wide = wide.index_copy(2, begin.reshape(-1), before.transpose(0, 1).reshape(1, x.shape[1], -1))
    number = index.new_zeros(wide.shape[2]).index_copy(0, place, index)
    number = number.index_copy(0, begin.reshape(-1), sequences.repeat_interleave(past))
    y = call(CONV, (wide, w, b, None, number.to(torch.int32)[None]), numbers)
    final = None
    if wants:
        last = (ends[1:].to(place.dtype) + sequences * past)[:, None] + torch.arange(past, device=x.device)
        final = wide[0].index_select(1, last.reshape(-1)).reshape(x.shape[1], count, past).transpose(0, 1)
    made = tuple([t.index_select(2, place) for t in as_tuple(y)])
    return made if numbers[1] else made[0], final


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    split: Sequence[int] | None = None,
    norm: str | Sequence[str | None] | None = None,
    head: int = 1,
    eps: float = 1e-6,
) -> Any:
    """The next step of causal_conv1d_fn: x (batch, dim), or (batch, dim, length) of a few positions,
    behind ``conv_state`` (batch, dim, state length), which is changed in place. The state holds at least
    ``width - 1`` elements, the last one the latest.

    ``cache_seqlens`` (batch,), i32 or i64: the state is a ring, in which element l of a sequence is at
    ``l % state length``; so many elements came before x, which has at most as many positions as the ring.
    ``conv_state_indices`` (batch,): sample i has the state ``conv_state[conv_state_indices[i]]``; no two
    samples have the same. No number is read on the host, so that a step can be captured in a CUDA graph.
    There are no gradients. ``split``, ``norm``, ``head``, ``eps`` and errors as of causal_conv1d_fn."""
    _check_operands("causal_conv1d_update", x, weight, bias, dims=(2, 3))
    numbers = _numbers(x, activation, split, norm, head, eps)
    rows = None if conv_state_indices is not None else x.shape[0]
    fits = conv_state.dim() == 3 and conv_state.shape[1] == x.shape[1]
    if not fits or rows not in (None, conv_state.shape[0]):
        raise ValueError(
            f"causal_conv1d_update: conv_state: expected shape ({'rows' if rows is None else rows}, "
            f"{x.shape[1]}, state length), got {tuple(conv_state.shape)}"
        )
    steps = x.shape[2] if x.dim() == 3 else 1
    least = max(weight.shape[1] - 1, steps if cache_seqlens is not None else 1)
    if conv_state.shape[2] < least:
        raise ValueError(
            f"causal_conv1d_update: conv_state holds {conv_state.shape[2]} elements; expected at least "
            f"{least}, for a weight of width {weight.shape[1]} and {steps} positions"
        )
    for name, t in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        if t is not None:
            _check_whole(name, t, (x.shape[0],))
    with torch.no_grad():
        wide = x if x.dim() == 3 else x[..., None]
        given = (wide, conv_state, weight, bias, cache_seqlens, conv_state_indices)
        *y, after = call(STEP, given, numbers)
        if conv_state_indices is None:
            conv_state.copy_(after)
        else:
            conv_state.index_copy_(0, conv_state_indices.long(), after)
        made = tuple(y if x.dim() == 3 else [t[..., 0] for t in y])
        return made if split is not None else made[0]


def _numbers(x: Tensor, activation: str | None, *parts: Any) -> Numbers:
    """A checked activation, and parts."""
    name = "silu" if activation == "swish" else activation or ""
    if name not in ACTIVATIONS:
        refuse(activation)
    return name, *library.FeatureParts.numbers(x.shape[1], *parts)


def _check_operands(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, dims: tuple[int, ...]
) -> None:
    """TypeError and ValueError for operands that do not fit one another."""
    for said, t in (("x", x), ("weight", weight), *((("bias", bias),) if bias is not None else ())):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: {said}: expected a tensor, got {type(t).__name__}")
    if x.dim() not in dims:
        wanted = " or ".join(("(batch, dim)", "(batch, dim, length)")[d - 2] for d in dims)
        raise ValueError(f"{name}: x: expected {wanted}, got shape {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[0] != x.shape[1]:
        raise ValueError(
            f"{name}: weight: expected shape ({x.shape[1]}, width), got {tuple(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (x.shape[1],):
        raise ValueError(f"{name}: bias: expected shape ({x.shape[1]},), got {tuple(bias.shape)}")


def _check_whole(name: str, t: Any, shape: tuple[int, ...] | None) -> None:
    if not isinstance(t, Tensor) or t.dtype not in WHOLE:
        raise TypeError(
            f"{name}: expected a tensor of int32 or int64, got {getattr(t, 'dtype', type(t).__name__)}"
        )
    if (shape is None and t.dim() != 1) or (shape is not None and tuple(t.shape) != shape):
        raise ValueError(f"{name}: expected shape {shape or '(sequences + 1,)'}, got {tuple(t.shape)}")
