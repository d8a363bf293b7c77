"""Decides what computes a quantised convolution: one kernel, or torch in wider types.

torch's way has the same order of operations: exact sums of integers in f64 (of 8-bit floats in f32), then
the operations behind them in f32, and one rounding.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from transconv.calls.guard import ALIGNMENT
from transconv.calls.settings import settings
from transconv.compute import in_torch
from transconv.conv import Epilogue, Prop, without_zeros
from transconv.errors import Unsupported
from transconv.ir import chances, one_of_two
from transconv.torch_ops import arguments, shapes
from transconv.torch_ops.calls import lower_call, route, route_cache
from transconv.torch_ops.calls.call_attributes import CallAttributes
from transconv.torch_ops.calls.route import Route, Run
from transconv.torch_ops.calls.select_impl import compile_route, settle
from transconv.torch_ops.conversion import aten_convolutions
from transconv.torch_ops.quantized import qparam_checks, qparams, zero_point_sums
from transconv.torch_ops.quantized.qparams import QuantizedCall, QuantizedEpilogue

Tensor = torch.Tensor
Given = Mapping[str, Any]  # quantities by name


class QuantizedRoute(Route):
    """A forward route of quantised tensors."""

    __slots__ = ("knows", "made", "reads", "text")

    def __init__(
        self,
        params: arguments.Params,
        shape: arguments.Ints,
        call: QuantizedCall,
        words: QuantizedEpilogue,
    ) -> None:
        last = shapes.channels_last_result(call.input, call.weight)
        super().__init__(Prop.BWD_D if params.transposed else Prop.FWD, params, shape, last)
        self.text, self.reads = words.text, words.reads
        self.knows = any(r.argument == "input_zero_sums" for r in words.reads)
        self.made = call.quantities.output_dtype
        self.types = (call.input.dtype, call.weight.dtype, self.made)

    def operands(self, bias: Tensor | None, given: Given) -> list[Tensor]:
        """What the kernel reads beside input and weight, in its order."""
        return [r.number if r.number is not None
                else r.of(bias if r.argument == "bias" else given[r.argument])  # type: ignore[arg-type]
                for r in self.reads]

    def checked(self, w: Tensor, given: Given) -> Given:
        """The quantities with sums of the zero point that are right; TensorError if they are not."""
        if not self.knows:
            return given
        sums = given["input_zero_sums"]
        right = zero_point_sums.checked(w, given["input_zero_point"], sums, self.params)
        return given if right is sums else {**given, "input_zero_sums": right}

    def run(self, x: Tensor, w: Tensor, bias: Tensor | None, given: Given) -> Tensor:
        """A fresh result."""
        given = self.checked(w, given)
        read = self.operands(bias, given)
        start = self.start
        if start is not None and route.current_device() == self.device:
            return start(x, w, *read)
        self.calls += 1
        extra = self.named(read)
        if self.compiled is None:
            return self.by_torch(x, w, extra)
        y = x.new_empty_strided(self.shape, self.strides, dtype=self.made)
        self.launch({self.near: x, "wei": w, self.far: y, **extra})
        self.bind(x, self.made, self.near, "wei", *extra, self.far)
        return y

    def bound_to(self, names: Sequence[str]) -> tuple[Run | None, tuple[tuple[int, Tensor | None], ...]]:
        """The kernel's start function for input, weight and what ``operands`` makes, which is here picked
        from the tensors of these names, by their places. None where there is more to do in a call."""
        if self.start is None or any(r.casts for r in self.reads):
            return None, ()
        return self.start, tuple((names.index(r.argument) if r.number is None else -1, r.number)
                                 for r in self.reads)

    def named(self, read: list[Tensor]) -> dict[str, Tensor]:
        """The operands by the kernel's names, in its shapes."""
        return {r.name: t.view(r.shape) for r, t in zip(self.reads, read, strict=True)}

    def by_torch(self, x: Tensor, w: Tensor, extra: dict[str, Tensor]) -> Tensor:
        """What torch computes: a fresh result."""
        wide = torch.float32 if x.is_floating_point() and x.dtype is not torch.float64 else torch.float64
        epilogue = Epilogue.parse(self.text)
        whole = without_zeros({self.near: x, "wei": w, **extra}, epilogue.zeros)
        y = aten_convolutions.aten_forward(
            whole[self.near].to(wide), whole["wei"].to(wide), None, self.params
        )
        if epilogue.ops:
            computed = torch.float64 if torch.float64 in (x.dtype, w.dtype, self.made) else torch.float32
            y = in_torch(epilogue.function, {"acc": y.to(computed), **{
                o.name: extra[o.name].to(computed) for o in epilogue.operands}})
        made = _stored(y, self.made, extra["seed"] if epilogue.random else None)
        return shapes.with_result_strides(made, self.channels_last)


def _stored(y: Tensor, dtype: torch.dtype, seed: Tensor | None) -> Tensor:
    """Values in the type of the result: beyond its range the largest or smallest number. With a seed they
    are rounded at random."""
    held = lower_call.RESULTS[dtype]
    if seed is not None:
        places = torch.arange(y.numel(), device=y.device).view(y.shape)
        y = one_of_two(y.float().double(), chances(seed.flatten().long(), places), held, torch)
    if held.kind == "int":
        return y.double().round().clamp(*held.range).to(dtype)
    return (y if held.largest == float("inf") else y.clamp(*held.range)).to(dtype)


def _kind(t: Tensor | None) -> Hashable:
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device)


def key_of(req: CallAttributes, x: Tensor, w: Tensor, bias: Tensor | None,
           given: Given) -> tuple[Hashable, lower_call.Flags, bool]:
    """The key of a call, its flags and alignment: kinds of tensors, values of numbers."""
    flags = lower_call.flags(x.dtype)
    pointers = x.data_ptr() | w.data_ptr() | (0 if bias is None else bias.data_ptr())
    said: list[Hashable] = []
    for name, value in given.items():
        if isinstance(value, Tensor):
            pointers |= value.data_ptr()
            said.append((name, value.shape, value.stride(), value.dtype, value.device))
        else:
            said.append((name, value.__class__, value))
    aligned = not pointers & ALIGNMENT
    return (req, x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device,
            _kind(bias), *said, flags, aligned), flags, aligned


class QuantizedRouteMatch(NamedTuple):
    """The route of a call, whether it was known before, and what of its key is not in the tensors."""

    route: QuantizedRoute
    known: bool
    flags: lower_call.Flags
    aligned: bool


def find(
    req: CallAttributes, x: Tensor, w: Tensor, bias: Tensor | None, given: Given
) -> QuantizedRouteMatch:
    """The route of a call, found or made. Raises TensorError, TypeError and RuntimeError for arguments
    that do not fit, and Unsupported where torch may not compute."""
    key, flags, aligned = key_of(req, x, w, bias, given)
    try:
        known: QuantizedRoute | None = route_cache.find(key)
    except TypeError:  # a list, say, has no hash, and is no scale
        known = None
    if known is not None:
        return QuantizedRouteMatch(known, True, flags, aligned)
    made = decided(req, x, w, bias, given)
    given = made.checked(w, given)
    if not (why := _reasons(made, x, w)):
        try:
            extra = made.named(made.operands(bias, given))
            summed = lower_call.fast(flags) if given.get("use_fast_accum") else flags
            compile_route(made, x, w, None, made.text, aligned, summed, settings.mode, **extra)
        except Unsupported as error:
            settle(made, [error.reason], error.message)
    else:
        settle(made, why)
    return QuantizedRouteMatch(route_cache.keep(key, made, [made]), False, flags, aligned)


def _reasons(made: QuantizedRoute, x: Tensor, w: Tensor) -> list[str]:
    return (lower_call.reasons(x, w, qparam_checks.OPERANDS)
            or ([] if all(made.shape) else ["shape:empty"]))


def decided(
    req: CallAttributes, x: Tensor, w: Tensor, bias: Tensor | None, given: Given
) -> QuantizedRoute:
    """A new route of a call whose arguments fit, which has no kernel yet."""
    name = req.name or "transconv::quantized_convolution"
    q = qparams.Quantities.of(name, given)
    qparam_checks.check(name, req.ndims, x, w, bias, q)
    params = arguments.resolve(x.shape, w.shape, None if bias is None else bias.shape, req.stride,
                               req.padding, req.dilation, req.transposed, req.output_padding, req.groups,
                               two_sided=not req.name)
    shape = shapes.output_shape(x.shape, w.shape, params)
    strides = shapes.result_strides(shape, shapes.channels_last_result(x, w))
    call = QuantizedCall(name, x, w, bias, (x.shape[1], shape[1]), params.transposed, q, (shape, strides))
    return QuantizedRoute(params, shape, call, QuantizedEpilogue.of(call))


def alone(req: CallAttributes, x: Tensor, w: Tensor, bias: Tensor | None, given: Given) -> Tensor:
    """The result of torch for tensors that no kernel can read: fakes, and other classes."""
    made = decided(req, x, w, bias, given)
    return made.by_torch(x, w, made.named(made.operands(bias, given)))
