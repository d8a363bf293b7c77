"""Convolution modules that train in 8-bit floats, with delayed scales for whole tensors.

    forward    result          = input (e4m3) * weight (e4m3)
    backward   input's gradient  = gradient (e5m2) * weight (e4m3)
               weight's gradient = input (e4m3) * gradient (e5m2), in f32

A tensor is divided by its scale before it is rounded. The scale is of the largest absolute value of the
last ``HISTORY`` steps, so that no kernel waits for another that looks for it; what is beyond saturates. In
the first step it is the tensor's own. Parameters stay as they are, in f32 or bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch

from transconv.calls import stats
from transconv.ir import DTYPES, DType
from transconv.support import TensorError
from transconv.torch_ops import arguments, modules
from transconv.torch_ops.arguments import Params, autocast_dtype
from transconv.torch_ops.modules import Convolves
from transconv.torch_ops.quantized import quantized_functional
from transconv.torch_ops.quantized.input_quantization import quantise
from transconv.torch_ops.quantized.quantized_route import weight_gradient

Tensor = torch.Tensor

__all__ = ["Float8Conv1d", "Float8Conv2d", "Float8Conv3d"]

HISTORY = 16
TYPES = (DTYPES["f8e4m3"], DTYPES["f8e4m3"], DTYPES["f8e5m2"])
INPUT, WEIGHT, GRADIENT = range(3)
"""The rows of a module's history, and of ``TYPES``: the types that tensors become."""
TRANSPOSED = {
    1: quantized_functional.conv_transpose1d,
    2: quantized_functional.conv_transpose2d,
    3: quantized_functional.conv_transpose3d,
}


class _Small(NamedTuple):
    """A tensor of 8-bit floats, and its scale ()."""

    value: Tensor
    scale: Tensor


class _Float8(Convolves):
    """Mixin: the history of the largest values, and the call."""

    function: ClassVar[Callable[..., Tensor]]
    amax_history: Tensor

    def __init__(self: Any, *args: Any, use_fast_accum: bool = True, **named: Any) -> None:
        """Arguments of torch's module; ``use_fast_accum`` is that of transconv.quantized.conv2d, for the
        result. Sums of gradients move to f32."""
        super().__init__(*args, **named)
        self.begin(use_fast_accum)

    def begin(self: Any, use_fast_accum: bool = True) -> None:
        """Start with an empty history."""
        self.use_fast_accum = use_fast_accum
        self.register_buffer("amax_history", torch.zeros(3, HISTORY, device=self.weight.device))

    @classmethod
    def from_float(cls, module: torch.nn.Module, use_fast_accum: bool = True) -> Any:
        """A convolution module of torch's as one of this class, with the same parameters: in place.
        TypeError for another module."""
        modules.expect_float(module, cls, OURS)
        made: Any = module
        made.__class__ = cls
        made.begin(use_fast_accum)
        return made

    def convolve(
        self: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
    ) -> Tensor:
        """The convolution of a batch or of one image."""
        if input.dim() == len(self.kernel_size) + 1:
            one: Tensor = self.convolve(
                input.unsqueeze(0), weight, bias, stride, padding, dilation, groups
            ).squeeze(0)
            return one
        if not input.is_floating_point() or input.dtype is torch.float64:
            raise TensorError(
                f"{type(self).__name__}: input: expected float16, bfloat16 or float32, got "
                f"{str(input.dtype).removeprefix('torch.')}"
            )
        none = (0,) * len(self.kernel_size)
        params = arguments.resolve_call(
            input, weight, bias, stride, padding or none, dilation, False, none, groups
        )
        if params.pad_lo != params.pad_hi:  # "same" of an even filter
            sides = [
                n for lo_hi in zip(params.pad_lo[::-1], params.pad_hi[::-1], strict=True) for n in lo_hi
            ]
            made: Tensor = self.convolve(
                torch.nn.functional.pad(input, sides), weight, bias, stride, 0, dilation, groups
            )
        else:
            made = _Convolution.apply(  # type: ignore[no-untyped-call]
                input, weight, bias, self, params, autocast_dtype(input) or input.dtype
            )
        return made

    def small(self: Any, tensor: Tensor, row: int) -> _Small:
        """A tensor in its type of 8 bits. In training the history takes its largest value."""
        why = "its scales are found from all samples of a batch"
        stats.refuse_invariant("form", f"{type(self).__name__}: {why}")
        held: DType = TYPES[row]
        history = self.amax_history[row]
        with torch.no_grad():
            largest = torch.linalg.vector_norm(tensor.detach(), torch.inf, dtype=torch.float32)
            known = history.amax()
            scale = (torch.where(known > 0, known, largest) / held.largest).clamp(min=TINY)
            if self.training:
                history.copy_(torch.cat((largest.view(1), history[:-1])))
            return _Small(quantise(tensor.detach(), scale, None, held), scale)

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        """Casts of a model are for its parameters: the history stays in f32."""
        kept = self.amax_history
        inherited: Any = super()
        inherited._apply(fn, recurse)
        if self.amax_history.dtype is not kept.dtype:
            self.amax_history = kept.to(self.amax_history.device)
        return self


TINY = torch.finfo(torch.float32).tiny


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        module: Any,
        params: Params,
        dtype: torch.dtype,
    ) -> Tensor:
        x, w = module.small(input, INPUT), module.small(weight, WEIGHT)
        ctx.save_for_backward(*x, *w)
        ctx.module, ctx.params, ctx.sizes = module, params, input.shape
        ctx.given = input.dtype, weight.dtype
        ctx.bias = None if bias is None else bias.dtype
        made: Tensor = module.function(
            x.value,
            w.value,
            bias,
            params.stride,
            params.pad_lo,
            params.dilation,
            params.groups,
            input_scale=x.scale,
            weight_scale=w.scale,
            output_dtype=dtype,
            use_fast_accum=module.use_fast_accum,
        )
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        saved, p = ctx.saved_tensors, ctx.params
        x, w = _Small(*saved[:2]), _Small(*saved[2:])
        g = ctx.module.small(gradient, GRADIENT)
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            extra = _left_over(ctx.sizes, g.value.shape, w.value.shape, p)
            of_input = TRANSPOSED[len(p.stride)](
                g.value,
                w.value,
                None,
                p.stride,
                p.pad_lo,
                extra,
                p.groups,
                p.dilation,
                input_scale=g.scale,
                weight_scale=w.scale,
                output_dtype=ctx.given[0],
            )
        if ctx.needs_input_grad[1]:
            sums = weight_gradient(x.value, g.value, w.value, p, False)
            of_weight = (sums * (x.scale * g.scale)).to(ctx.given[1])
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum((0, *range(2, gradient.dim())), dtype=torch.float32).to(ctx.bias)
        return of_input, of_weight, of_bias, None, None, None


def _left_over(sizes: Any, made: Any, taps: Any, p: Params) -> list[int]:
    """What a transposed convolution's result lacks at its ends: rows that no stride reached."""
    plain = arguments.transposed_sizes(made[2:], taps[2:], p)
    return [i - n for i, n in zip(sizes[2:], plain, strict=True)]


class Float8Conv1d(_Float8, torch.nn.Conv1d):
    """torch.nn.Conv1d, trained in 8-bit floats."""

    function = staticmethod(quantized_functional.conv1d)


class Float8Conv2d(_Float8, torch.nn.Conv2d):
    """torch.nn.Conv2d, trained in 8-bit floats."""

    function = staticmethod(quantized_functional.conv2d)


class Float8Conv3d(_Float8, torch.nn.Conv3d):
    """torch.nn.Conv3d, trained in 8-bit floats."""

    function = staticmethod(quantized_functional.conv3d)


OURS: dict[type, type] = {
    getattr(torch.nn, name.removeprefix("Float8")): globals()[name] for name in __all__
}
"""The class for 8-bit floats of each of torch's."""
