"""Convolution modules with quantised weights, for inference.

Weights are integers or 8-bit floats with a scale for each output channel
(quantized/input_quantization.py). Inputs have the scale that calibration found, or one of their own in
every call. Results have the inputs' type, and no gradients. The modules are subclasses of torch's with the
weight as a buffer, so that the forward of a subclass that ends in `_conv_forward` or `super().forward`
goes on. In a folded model they take a residual, and results are quantised already for the convolutions
that read them:

    int8 -> conv + bias [+ residual] [-> activation] -> int8, or the type of the model's floats

Where inputs are floats, quantized/block_scales.py has the products.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, ClassVar

import torch

from transconv.calls import stats
from transconv.compute import OPS, named
from transconv.conv import zero_sums
from transconv.support import Unsupported
from transconv.torch_ops import arguments, modules
from transconv.torch_ops.arguments import autocast_dtype
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.calls.call_attributes import ConvFunction, is_plain
from transconv.torch_ops.modules import Convolves, ConvolvesTransposed
from transconv.torch_ops.quantized import (
    block_inputs,
    block_scales,
    input_quantization,
    quantized_functional,
)
from transconv.torch_ops.quantized.block_scales import BlockWeight
from transconv.torch_ops.quantized.input_quantization import (
    KINDS,
    QuantizationScheme,
    WrongSums,
    kind_named,
    of_input,
    quantise,
    quantised_weight,
    ranged,
)
from transconv.torch_ops.quantized.quantized_functional import FUNCTIONS

Tensor = torch.Tensor
is_dynamo_compiling = torch.compiler.is_dynamo_compiling

__all__ = [
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantConvTranspose1d",
    "QuantConvTranspose2d",
    "QuantConvTranspose3d",
    "QuantLinear",
]


BUFFERS = (
    "weight",
    "weight_scale",
    "weight_tensor_scale",
    "input_scale",
    "input_zero_point",
    "input_zero_sums",
    "output_scale",
    "output_zero_point",
)
"""What a quantised module keeps in types of its own, whatever the model is cast to."""


class Quantised:
    """Mixin: the state of a quantised convolution, and its call."""

    kind: str
    use_fast_accum: bool = False
    activation: str = ""
    real: torch.dtype = torch.float32  # of results of inputs that are quantised already

    def __init__(
        self: Any, *args: Any, kind: str = "int8", use_fast_accum: bool = False, **named: Any
    ) -> None:
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
        self.real, whole = real or given.dtype, None
        if kind.group:
            made = block_scales.quantised(given, kind, kind.channels(given))
            weight, scales, whole = made.elements, made.scale, made.tensor_scale
            scales = scales.view(torch.float8_e8m0fnu) if kind.scale.kind == "int" else scales
        else:
            weight, scales = quantised_weight(given, self.groups, self.transposed, kind)
        found = {
            "weight": weight,
            "weight_scale": scales,
            "weight_tensor_scale": whole,
            "input_scale": scale,
            "input_zero_point": zero,
            "input_zero_sums": self.sums_of(weight, zero),
        }
        for name in BUFFERS:
            self.register_buffer(name, found.get(name))
        if self.bias is not None:
            self._parameters["bias"] = torch.nn.Parameter(self.bias.detach(), requires_grad=False)

    @property
    def blocks(self: Any) -> BlockWeight:
        """The weight of a kind that has blocks."""
        held, channels = self._buffers, self.in_channels // self.groups
        return BlockWeight(KINDS[self.kind], channels, *(held[name] for name in BUFFERS[:3]))

    def sums_of(self: Any, weight: Tensor, zero: Tensor | None) -> Tensor | None:
        """What the zero point of inputs adds to every sum; None where each input has its own, or none."""
        if zero is None or self.transposed:
            return None
        sides = (
            self._reversed_padding_repeated_twice
            if self.padding_mode == "zeros"
            else (0,) * (2 * len(self.kernel_size))
        )
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
    def from_float(
        cls,
        module: torch.nn.Module,
        input_scale: float | Tensor | None = None,
        input_zero_point: int | Tensor | None = None,
        kind: str = "int8",
        use_fast_accum: bool = False,
    ) -> Any:
        """A quantised copy of a convolution module of torch's. Without ``input_scale`` each input has a
        scale of its own; ``input_zero_point`` is of int8 inputs, 0 by default. TypeError for another
        module, ValueError for an unknown kind, TensorError for quantities that do not fit it."""
        modules.expect_float(module, cls, OURS, "; transconv.quantize_ takes subclasses")
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
            raise Unsupported(
                "quantized:weight",
                f"the forward of {type(self).__name__} passes another "
                "weight than the module's, which is quantised",
            )
        if input.dim() == len(self.kernel_size) + 1:
            one: Tensor = self.convolve(input.unsqueeze(0), weight, bias, *numbers).squeeze(0)
            return one
        made: Tensor = self.computed(input, bias, numbers)
        return made

    def computed(
        self: Any,
        input: Tensor,
        bias: Tensor | None,
        numbers: tuple[Any, ...],
        residual: Tensor | None = None,
    ) -> Tensor:
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
        f: ConvFunction | None = FUNCTIONS.get((len(self.kernel_size), self.transposed))
        if kind.input is None or f is None:
            x = input.to(autocast_dtype(input) or input.dtype)
            if kind.inputs:
                more, word = given.keys() - {"activation"}, self.activation
                found = None if more else block_inputs.multiplied(x, self.blocks, bias, numbers, word)
                if found is not None:
                    return found
                x = block_inputs.rounded(x, kind, self.groups, len(self.kernel_size))
            if f is None:
                return block_scales.linear(x, self.blocks, bias)
            if kind.group:
                return convolved(f, x, self.blocks, bias, numbers, given)
            return of_bytes(f, x, held["weight"], held["weight_scale"], bias, numbers, given)
        whole = input.dtype is kind.input_dtype
        made = autocast_dtype(input) or (self.real if whole else input.dtype)
        scale, zero = held["input_scale"], held["input_zero_point"]
        if scale is None:
            why = "the scale of its input is found from all samples of a batch; calibrate the module"
            stats.refuse_invariant("form", f"{type(self).__name__}: {why}")
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
                self._buffers[name] = (
                    None if loaded is None else torch.empty_like(loaded, device=self.weight.device)
                )
        inherited: Any = super()
        inherited._load_from_state_dict(state, prefix, *rest)
        if self._buffers["input_zero_sums"] is not None:
            self.renewed_sums()

    def extra_repr(self: Any) -> str:
        inherited: Any = super()
        shown: str = inherited.extra_repr()
        own = (
            ""
            if KINDS[self.kind].input is None
            else (
                ", input_scale=of each input"
                if self.input_scale is None
                else f", input_scale={float(self.input_scale):.3g}"
            )
        )
        fast = ", use_fast_accum=True" if self.use_fast_accum else ""
        act = f", activation={self.activation}" if self.activation else ""
        return f"{shown}, kind={self.kind}{own}{fast}{act}"


def _called(
    f: ConvFunction,
    whole: bool,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    numbers: tuple[Any, ...],
    given: dict[str, Any],
) -> Tensor:
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


class QuantLinear(Quantised, torch.nn.Linear):
    """torch.nn.Linear with a weight in blocks of floats, "mxfp8", "mxfp4" or "nvfp4", or with inputs in
    blocks as well, such as "mxfp4_mxfp8"."""

    transposed = False  # as a convolution without positions
    groups = 1
    kernel_size = ()

    @property
    def in_channels(self) -> int:
        """The numbers of a row."""
        return self.in_features

    def __init__(self, *args: Any, kind: str = "mxfp8", **named: Any) -> None:
        """Arguments of torch's module, and the kind; weights and scales are for a state dict to load."""
        super().__init__(*args, kind=kind, **named)

    def forward(self, input: Tensor) -> Tensor:
        """The rows times the weight, in the input's type or that of autocast."""
        return self.computed(input, self.bias, ())


OURS: dict[type, type] = {
    getattr(torch.nn, name.removeprefix("Quant")): globals()[name] for name in __all__
}
"""The quantised class of each of torch's."""


Numbers = tuple[Any, ...]
Given = dict[str, Any]


def convolved(
    f: ConvFunction,
    input: Tensor,
    weight: BlockWeight,
    bias: Tensor | None,
    numbers: Numbers,
    given: Given,
) -> Tensor:
    """The convolution in the input's type, with other words of a quantised call. TensorError for scales
    that do not fit."""
    word = given.get("activation", "")
    if given.keys() <= {"activation"} and (word in OPS or not word):
        if (made := block_scales.multiplied(input, weight, bias, numbers, word)) is not None:
            return made
    given = {**given, "output_dtype": input.dtype}
    return quantized_functional.of_new_weight(f, input, weight.floats(input.dtype), bias, numbers, given)


def of_bytes(
    f: ConvFunction,
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    numbers: Numbers,
    given: Given,
) -> Tensor:
    """The convolution of int8 weights with a scale for each output channel."""
    given = {**given, "weight_scale": scale, "output_dtype": input.dtype}
    if is_written(f, input, weight, numbers):
        return quantized_functional.of_new_weight(f, input, weight.to(input.dtype), bias, numbers, given)
    made: Tensor = f.public(input, weight, bias, *numbers, **given)  # type: ignore[misc]
    return made


def is_written(f: ConvFunction, input: Tensor, weight: Tensor, numbers: Numbers) -> bool:
    """Whether a weight of bytes should be written as floats before the product."""
    if not input_quantization.served(input) or not is_plain(input) or input.dim() != f.ndims + 2:
        return False
    stride = arguments.ints(numbers[0], f.ndims) or (1,) * f.ndims
    positions = prod(input.shape[2:]) / (1 if f.transposed else prod(stride))
    moved = weight.numel() * (weight.element_size() + 2 * input.element_size())
    return block_scales.pays(
        moved, weight.numel() * input.shape[0] * positions, lower_call.target_of(input.device)
    )


class _Joined:
    """Mixin: ``forward(input, residual=None)``."""

    computed: ClassVar[Callable[..., Tensor]]

    def forward(self: Any, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """activation(conv(input) + residual), quantised where that is what its readers take. A residual
        of another shape or type is added as torch's addition would."""
        if residual is not None and input.dim() == residual.dim() == len(self.kernel_size) + 1:
            one: Tensor = self.forward(input.unsqueeze(0), residual.unsqueeze(0)).squeeze(0)
            return one
        input, padding = modules.padded(self, input)
        numbers = self.stride, padding, self.dilation, self.groups
        made: Tensor
        if residual is None:
            made = self.convolve(input, self.weight, self.bias, *numbers)
        elif input.dim() == len(self.kernel_size) + 2 and self._takes(input, residual, numbers):
            made = self.computed(input, self.bias, numbers, residual)
        else:
            made = self._apart(input, residual, numbers)
        return made

    def _takes(self: Any, input: Tensor, residual: Tensor, numbers: tuple[Any, ...]) -> bool:
        """Whether a residual has the shape and type of the result."""
        made = self.real if input.dtype is KINDS[self.kind].input_dtype else input.dtype
        logical = (self.out_channels, self.in_channels // self.groups, *self.kernel_size)
        return (
            residual.dtype is made
            and residual.device == input.device
            and not torch.is_autocast_enabled(input.device.type)
            and residual.shape == _shape(tuple(input.shape), logical, *numbers)
        )

    def _apart(self: Any, input: Tensor, residual: Tensor, numbers: tuple[Any, ...]) -> Tensor:
        """The same in steps."""
        word, scale, zero = self.activation, self.output_scale, self.output_zero_point
        plain = _plain(self)
        made = plain.convolve(input, plain.weight, plain.bias, *numbers) + residual
        made = named(OPS[word].torch)(made, **dict(OPS[word].options)) if word else made
        held = KINDS[self.kind].input
        return made if scale is None or held is None else quantise(made, scale, zero, held)


def _plain(module: Any) -> Any:
    """A module without what follows its sum."""
    made = object.__new__(type(module))
    made.__dict__ = {
        **module.__dict__,
        "activation": "",
        "_buffers": {**module._buffers, "output_scale": None, "output_zero_point": None},
    }
    return made


@lru_cache(maxsize=4096)
def _shape(
    input: tuple[int, ...], weight: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int
) -> tuple[int, ...]:
    padding = (padding,) if isinstance(padding, int) else padding
    return arguments.output_shape(
        input,
        weight,
        arguments.resolve(input, weight, None, stride, padding, dilation, False, (0,), groups),
    )


class FusedQuantConv1d(_Joined, QuantConv1d):
    """QuantConv1d whose forward takes a residual, and whose result may be quantised."""


class FusedQuantConv2d(_Joined, QuantConv2d):
    """QuantConv2d whose forward takes a residual, and whose result may be quantised."""


class FusedQuantConv3d(_Joined, QuantConv3d):
    """QuantConv3d whose forward takes a residual, and whose result may be quantised."""


FUSED: dict[type, type] = {
    kind: ours
    for ours in (FusedQuantConv1d, FusedQuantConv2d, FusedQuantConv3d)
    for kind in (ours, ours.__bases__[1])
}
"""The class that a quantised convolution becomes."""


def quantises_for(module: Any, readers: list[Any]) -> bool:
    """Have a module's results quantised as all modules that read them would quantise them; False where
    these differ, or quantise nothing."""
    first, kind = readers[0], KINDS[module.kind]
    if kind.input is None or first.input_scale is None:
        return False
    for reader in readers:
        if (
            reader.kind != module.kind
            or reader.padding_mode != "zeros"
            or not (
                _same(reader.input_scale, first.input_scale)
                and _same(reader.input_zero_point, first.input_zero_point)
            )
        ):
            return False
    module.output_scale, module.output_zero_point = first.input_scale, first.input_zero_point
    return True


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
