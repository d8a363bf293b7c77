"""The convolutions that a model calls, as torch's operator sees them: whichever module or function they
come from, after padding modes, autocast and parametrizations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from transconv.conv import ConvProblem, Prop
from transconv.errors import ProblemError
from transconv.torch_ops import shapes
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.calls.select_impl import like


@dataclass(frozen=True)
class CapturedTensor:
    """A tensor that a call or its backward computes; ``computes`` is ``result``, ``input gradient`` or
    ``weight gradient``."""

    computes: str
    problem: ConvProblem
    prop: Prop


@dataclass(frozen=True)
class CapturedCall:
    """One call: the module that made it (empty: the model itself), what it computes, and the type of its
    bias; ``why_not``: why no kernel computes it."""

    module: str
    parts: tuple[CapturedTensor, ...]
    bias: torch.dtype | None = None
    why_not: str = ""


def recorded(model: torch.nn.Module, inputs: Sequence[Any], backward: bool) -> list[CapturedCall]:
    """Run a model once and return its convolutions in order; with ``backward`` also the gradients of
    tensors that require one. Raises the model's errors."""
    recorder = _Recorder(backward)
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: recorder.inside.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: recorder.leave(), always_call=True))
    try:
        with torch.set_grad_enabled(backward), recorder:
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return recorder.calls


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, backward: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.backward = backward
        self.calls: list[CapturedCall] = []
        self.inside: list[str] = []

    def leave(self) -> None:
        self.inside.pop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.convolution.default:
            self.calls.append(_call(self.inside[-1] if self.inside else "", args, self.backward))
        return function(*args, **(kwargs or {}))


def _call(module: str, args: Sequence[Any], backward: bool) -> CapturedCall:
    x, w, b, stride, padding, dilation, transposed, output_padding, groups = args
    # The model may run on another device than its kernels will.
    why = [r for r in lower_call.reasons(x, w) if not r.startswith("device:")]
    if why:
        return CapturedCall(module, (), why_not="; ".join(why))
    rank = x.dim() - 2
    numbers = [tuple(n) * rank if len(n) == 1 else tuple(n)
               for n in (stride, padding, dilation, output_padding)]
    p = Params(numbers[0], numbers[1], numbers[2], transposed, numbers[3], groups)
    try:
        parts = tuple(_parts(x, w, p, (x.requires_grad, w.requires_grad) if backward else (False, False)))
    except ProblemError as error:
        return CapturedCall(module, (), why_not=str(error))
    return CapturedCall(module, parts, None if b is None else b.dtype)


def _parts(x: torch.Tensor, w: torch.Tensor, p: Params, wanted: tuple[bool, bool]) -> list[CapturedTensor]:
    """The computed tensors, each with the strides of torch's rule for results."""
    channels_last = shapes.channels_last_result(x, w)
    shape = shapes.output_shape(x.shape, w.shape, p)
    math = lower_call.flags(x.dtype).math

    def made(shape: Sequence[int]) -> lower_call.Like:
        return tuple(shape), shapes.result_strides(shape, channels_last)

    def problem(near: lower_call.Like, weight: lower_call.Like) -> ConvProblem:
        return lower_call.describe(x.dtype, near, weight, made(shape), p, math)

    forward, back = (Prop.BWD_D, Prop.FWD) if p.transposed else (Prop.FWD, Prop.BWD_D)
    parts = [CapturedTensor("result", problem(like(x), like(w)), forward)]
    if wanted[0]:
        parts.append(CapturedTensor("input gradient", problem(made(x.shape), like(w)), back))
    if wanted[1]:
        parts.append(CapturedTensor("weight gradient", problem(like(x), made(w.shape)), Prop.BWD_W))
    return parts
