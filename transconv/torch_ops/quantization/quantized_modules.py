"""Convolution modules with quantised weights, for inference.

Weights are integers or 8-bit floats with a scale for each output channel (quantization/schemes.py). Inputs
have the scale that calibration found, or one of their own in every call. Results have the inputs' type,
and no gradients. The modules are subclasses of torch's with the weight as a buffer, so that the forward of
a subclass that ends in `_conv_forward` or `super().forward` goes on.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from transconv.conv import zero_sums
from transconv.errors import Unsupported
from transconv.torch_ops.autocast import autocast_dtype
from transconv.torch_ops.calls.dispatch import ConvFunction
from transconv.torch_ops.conversion import module_swap
from transconv.torch_ops.modules import Convolves, ConvolvesTransposed
from transconv.torch_ops.quantization import int4_weights, integer_weights
from transconv.torch_ops.quantization.schemes import (
    KINDS,
    QuantizationScheme,
    kind_named,
    of_input,
    quantised_weight,
    ranged,
)
from transconv.torch_ops.quantized import quantized_functional
from transconv.torch_ops.quantized.quantized_functional import FUNCTIONS
from transconv.torch_ops.quantized.zero_point_sums import WrongSums

Tensor = torch.Tensor
is_dynamo_compiling = torch.compiler.is_dynamo_compiling

__all__ = ["QuantConv1d", "QuantConv2d", "QuantConv3d", "QuantConvTranspose1d", "QuantConvTranspose2d",
           "QuantConvTranspose3d"]


BUFFERS = ("weight", "weight_scale", "input_scale", "input_zero_point", "input_zero_sums", "output_scale",
           "output_zero_point")
"""What a quantised module keeps in types of its own, whatever the model is cast to."""


class Quantised:
    """Mixin: the state of a quantised convolution, and its call."""

    kind: str
    use_fast_accum: bool = False
    activation: str = ""
    real: torch.dtype = torch.float32  # of results of inputs that are quantised already

    def __init__(self: Any, *args: Any, kind: str = "int8", use_fast_accum: bool = False,
                 **named: Any) -> None:
        """Arguments of torch's module, and the kind; weights and scales are for a state dict to load.
        ``use_fast_accum`` is that of transconv.quantized.conv2d, for kind "fp8"."""
        super().__init__(*args, **named)
        self.quantise(kind_named(kind), fast=use_fast_accum)

    def quantise(
        self: Any,
        kind: QuantizationScheme,
        scale: Tensor | None = None,
        zero: Tensor | None = None,
        fast: bool = False,
        activation: str = "",
        real: torch.dtype | None = None,
    ) -> None:
        """Replace the float weight by quantised buffers, in place. ``scale``, ``zero``: of inputs; None:
        of each input its own. ``activation``: of results, a word of an epilogue; ``real``: the type that
        the weight had. ValueError for fast sums of other kinds than 8-bit floats, and for weights
        that the kind has no form of."""
        kind.check_fast(fast)
        if why := kind.why_not(self._parameters["weight"], self.transposed):
            raise ValueError(f"{type(self).__name__}: {why}")
        self.kind, self.use_fast_accum, self.activation = kind.name, fast, activation
        given = self._parameters.pop("weight")
        self.real = real or given.dtype
        weight, scales = (int4_weights.packed(given, kind.channels(given)) if kind.group else
                          quantised_weight(given, self.groups, self.transposed, kind))
        found = {"weight": weight, "weight_scale": scales, "input_scale": scale, "input_zero_point": zero,
                 "input_zero_sums": self.sums_of(weight, zero)}
        for name in BUFFERS:
            self.register_buffer(name, found.get(name))
        if self.bias is not None:
            self._parameters["bias"] = torch.nn.Parameter(self.bias.detach(), requires_grad=False)

    def sums_of(self: Any, weight: Tensor, zero: Tensor | None) -> Tensor | None:
        """What the zero point of inputs adds to every sum; None where each input has its own, or none."""
        if zero is None or self.transposed:
            return None
        sides = self._reversed_padding_repeated_twice if self.padding_mode == "zeros" else (
            0,) * (2 * len(self.kernel_size))
        return zero_sums(weight, zero, sides[-2::-2], sides[::-2], self.dilation)

    def renewed_sums(self: Any) -> Tensor | None:
        """``input_zero_sums`` of the weight and the zero point as they are, in place, after one was
        written to. Calls do it themselves; kernels of a compiled model read the buffer as it is."""
        held = self._buffers
        sums: Tensor | None = held["input_zero_sums"]
        made: Tensor | None = self.sums_of(held["weight"], held["input_zero_point"])
        if sums is not None and made is not None and sums.shape == made.shape:
            return sums.copy_(made)
        held["input_zero_sums"] = made
        return made

    @classmethod
    def from_float(cls, module: torch.nn.Module, input_scale: float | Tensor | None = None,
                   input_zero_point: int | Tensor | None = None, kind: str = "int8",
                   use_fast_accum: bool = False) -> Any:
        """A quantised copy of a convolution module of torch's. Without ``input_scale`` each input has a
        scale of its own; ``input_zero_point`` is of int8 inputs, 0 by default. TypeError for another
        module, ValueError for an unknown kind, TensorError for quantities that do not fit it."""
        theirs = next(c for c, ours in OURS.items() if ours is cls)
        if type(module) is not theirs and module_swap.restored(type(module)) is not theirs:
            raise TypeError(f"{cls.__name__}.from_float: expected a torch.nn.{theirs.__name__}, got "
                            f"{type(module).__name__}; transconv.quantize_ takes subclasses")
        made: Any = copy.copy(module)
        made.__class__ = cls
        made._parameters, made._buffers = dict(made._parameters), dict(made._buffers)
        how = kind_named(kind)
        quantities = of_input(cls.__name__, how, input_scale, input_zero_point, made.weight.device)
        made.quantise(how, *quantities, use_fast_accum)
        return made

    def convolve(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
        """The quantised call of these numbers, which are those of ``function``."""
        if weight is not self._buffers["weight"]:
            raise Unsupported("quantized:weight", f"the forward of {type(self).__name__} passes another "
                              "weight than the module's, which is quantised")
        if input.dim() == len(self.kernel_size) + 1:
            one: Tensor = self.convolve(input.unsqueeze(0), weight, bias, *numbers).squeeze(0)
            return one
        made: Tensor = self.computed(input, bias, numbers)
        return made

    def computed(self: Any, input: Tensor, bias: Tensor | None, numbers: tuple[Any, ...],
                 residual: Tensor | None = None) -> Tensor:
        """The call for a batch of inputs, which may be quantised already."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                computed: Tensor = self.computed(input, bias, numbers, residual)
                return computed
        kind = KINDS[self.kind]
        held = self._buffers  # found in a fifth of the time of attributes
        given: dict[str, Any] = {"activation": self.activation} if self.activation else {}
        if residual is not None:
            given["residual"] = residual
        f: ConvFunction = FUNCTIONS[len(self.kernel_size), self.transposed]
        if kind.input is None:
            of = integer_weights.of_four_bits if kind.group else integer_weights.of_bytes
            x = input.to(autocast_dtype(input) or input.dtype)
            return of(f, x, held["weight"], held["weight_scale"], bias, numbers, given)
        whole = input.dtype is kind.input_dtype
        made = autocast_dtype(input) or (self.real if whole else input.dtype)
        scale, zero = held["input_scale"], held["input_zero_point"]
        if scale is None:
            low, high = input.aminmax() if input.numel() else (input.new_zeros(()),) * 2
            scale, zero = ranged(low, high, kind)
        elif zero is not None and (sums := held.get("input_zero_sums")) is not None:
            given["input_zero_sums"] = sums
        given["input_scale"], given["weight_scale"] = scale, held["weight_scale"]
        if zero is not None:
            given["input_zero_point"] = zero
        if self.use_fast_accum:
            given["use_fast_accum"] = True
        if (out := held.get("output_scale")) is not None:
            given["output_scale"], made = out, kind.input_dtype
            if (point := held.get("output_zero_point")) is not None:
                given["output_zero_point"] = point
        given["output_dtype"] = made
        if is_dynamo_compiling():
            return _called(f, whole, input, held["weight"], bias, numbers, given)
        try:
            return _called(f, whole, input, held["weight"], bias, numbers, given)
        except WrongSums:
            given["input_zero_sums"] = self.renewed_sums()
            return _called(f, whole, input, held["weight"], bias, numbers, given)

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        """Casts of a model are for its float parameters: of the buffers only the device changes."""
        kept = {n: t for n in BUFFERS if (t := self._buffers.get(n)) is not None}
        inherited: Any = super()
        inherited._apply(fn, recurse)
        for name, was in kept.items():
            now = self._buffers[name]
            if now.dtype != was.dtype:
                self._buffers[name] = was.to(now.device)
        self.real = fn(torch.empty(0, dtype=self.real, device=self.weight.device)).dtype
        return self

    def _load_from_state_dict(self: Any, state: Any, prefix: str, *rest: Any) -> None:
        """A state dict says whether inputs have one scale."""
        for name in BUFFERS[2:]:
            loaded = state.get(prefix + name)
            if (loaded is None) != (self._buffers[name] is None):
                self._buffers[name] = None if loaded is None else torch.empty_like(
                    loaded, device=self.weight.device)
        inherited: Any = super()
        inherited._load_from_state_dict(state, prefix, *rest)
        if self._buffers["input_zero_sums"] is not None:
            self.renewed_sums()

    def extra_repr(self: Any) -> str:
        inherited: Any = super()
        shown: str = inherited.extra_repr()
        own = "" if KINDS[self.kind].input is None else (
            ", input_scale=of each input" if self.input_scale is None else
            f", input_scale={float(self.input_scale):.3g}")
        fast = ", use_fast_accum=True" if self.use_fast_accum else ""
        act = f", activation={self.activation}" if self.activation else ""
        return f"{shown}, kind={self.kind}{own}{fast}{act}"


def _called(f: ConvFunction, whole: bool, input: Tensor, weight: Tensor, bias: Tensor | None,
            numbers: tuple[Any, ...], given: dict[str, Any]) -> Tensor:
    """The call; an input that is not of the quantised type (``whole``) is quantised first."""
    if not whole:
        return quantized_functional.of_reals(f, input, weight, bias, numbers, given)
    made: Tensor = f.public(input, weight, bias, *numbers, **given)  # type: ignore[misc]
    return made


class QuantConv1d(Quantised, Convolves, torch.nn.Conv1d):
    """torch.nn.Conv1d, quantised: computed by transconv.quantized.conv1d."""


class QuantConv2d(Quantised, Convolves, torch.nn.Conv2d):
    """torch.nn.Conv2d, quantised: computed by transconv.quantized.conv2d."""


class QuantConv3d(Quantised, Convolves, torch.nn.Conv3d):
    """torch.nn.Conv3d, quantised: computed by transconv.quantized.conv3d."""


class QuantConvTranspose1d(Quantised, ConvolvesTransposed, torch.nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d, quantised: computed by transconv.quantized.conv_transpose1d."""


class QuantConvTranspose2d(Quantised, ConvolvesTransposed, torch.nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d, quantised: computed by transconv.quantized.conv_transpose2d."""


class QuantConvTranspose3d(Quantised, ConvolvesTransposed, torch.nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d, quantised: computed by transconv.quantized.conv_transpose3d."""


OURS: dict[type, type] = {getattr(torch.nn, name.removeprefix("Quant")): globals()[name]
                          for name in __all__}
"""The quantised class of each of torch's."""
