"""The scales and zero points of a quantised call, and the words of an epilogue for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from transconv.errors import TensorError
from transconv.ir import DTYPES as ROWS
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.quantized import qparam_checks
from transconv.torch_ops.quantized.qparam_checks import Number

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantities:
    """Scales and zero points, each a number or a tensor on the input's device. All may be one number;
    ``weight_scale``, ``weight_zero_point``, ``output_scale`` and ``output_zero_point`` also one for each
    output channel (oc,), and ``input_zero_point`` one for each input channel (ic,). ``output_dtype``: of
    the result, by default float32. ``activation``: words of an epilogue before the result is quantised,
    such as "relu"; None is none, as ``fused_conv2d`` has it.
    ``use_fast_accum``, as of torch's scaled products: sums of products of 8-bit floats stay in the matrix
    unit, where Hopper keeps some 13 bits of them; without it they move to f32 after every 128 products.
    ``residual``: a tensor of floats with the result's shape, added in real numbers before the activation.
    ``input_zero_sums``: what the input's zero point adds to the sums, if it is known, of int8 tensors (see
    conv/quantization/compensation_sums.py): kernels read it instead of computing it in every call.
    ``rounding_seed``: an integer tensor of one element; results in 8-bit and 16-bit floats are rounded up
    or down at random then, by this seed and their place alone."""

    input_scale: Number = 1.0
    weight_scale: Number = 1.0
    output_scale: Number = 1.0
    input_zero_point: Number = 0
    weight_zero_point: Number = 0
    output_zero_point: Number = 0
    residual: Tensor | None = None
    input_zero_sums: Tensor | None = None
    output_dtype: torch.dtype = torch.float32
    activation: str = ""
    use_fast_accum: bool = False
    rounding_seed: Tensor | None = None

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any]) -> Quantities:
        """Those of a call of the function ``name``. TypeError for an argument that none has."""
        for word in given:
            if word not in cls.__slots__:
                raise TypeError(f"{name}: it has no argument '{word}'; expected one of "
                                f"{' '.join(cls.__slots__)}")
        said: dict[str, Any] = {n: v for n, v in given.items() if n != "activation" or v is not None}
        return cls(**said)


class Reads(NamedTuple):
    """A tensor that a kernel reads beside the operands: its name there, the argument that it is (one of
    Quantities' or the bias), and the type and shape that the kernel reads. ``number``: what the argument
    is, if no tensor; ``casts``: whether it has to be copied in every call; ``strides``: of a residual."""

    name: str
    argument: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    number: Tensor | None
    casts: bool
    strides: tuple[int, ...] | None = None

    def of(self, given: Tensor) -> Tensor:
        """What the kernel is given for the argument."""
        if self.number is not None:
            return self.number
        if self.casts and self.strides is not None:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype,
                                       device=given.device).copy_(given.detach())
        return given.detach().to(self.dtype).contiguous() if self.casts else given


@dataclass(slots=True)
class QuantizedEpilogue:
    """The epilogue of a call: its text, and what it reads in the order of kernels."""

    text: str
    reads: tuple[Reads, ...]

    @staticmethod
    def of(call: QuantizedCall) -> QuantizedEpilogue:
        """In oneDNN's order. Raises TensorError, which names the argument."""
        return _Writer(call).written()


class QuantizedCall(NamedTuple):
    """A call whose shapes fit. ``name``: of the function; ``channels``: of the input and of the result;
    ``made``: the result's shape and strides."""

    name: str
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    channels: tuple[int, int]
    transposed: bool
    quantities: Quantities
    made: tuple[tuple[int, ...], tuple[int, ...]]


class _Writer:
    def __init__(self, call: QuantizedCall) -> None:
        self.call = call
        self.words: list[str] = []
        self.reads: list[Reads] = []

    def written(self) -> QuantizedEpilogue:
        call, q = self.call, self.call.quantities
        data, along, other = ("src", "per_ic", "per_oc")
        if call.transposed:
            data, along, other = ("dst", "per_oc", "per_ic")
        inner, outer = call.channels
        zeros = [self.zero(f"{data}_zero", "input_zero_point", call.input.dtype, inner),
                 self.zero("wei_zero", "weight_zero_point", call.weight.dtype, outer)]
        ahead = [f"zero:{n}{':' + word if r.shape[0] > 1 else ''}"
                 for n, word, r in zip((data, "wei"), (along, other), zeros, strict=True) if r is not None]
        if (sums := q.input_zero_sums) is not None and ahead[:1] == ["zero:src"] and (
                call.input.dtype is call.weight.dtype is torch.int8):
            ahead[0] += f":known:{'x'.join(map(str, sums.shape[1:]))}"
            zeros.append(Reads("src_zero_table", "input_zero_sums", torch.int32, tuple(sums.shape), None,
                               not sums.is_contiguous()))
        scales = [n for n, channels in (("input_scale", 1), ("weight_scale", outer))
                  if self.read("", n, torch.float32, channels) is not None]
        self.scale(scales, outer)
        if call.bias is not None:
            self.add("add", "bias", call.bias.dtype, outer)
        if q.residual is not None:
            self.residual(q.residual)
        if q.activation:
            self.words.append(qparam_checks.activation(call.name, q.activation))
        if mask := self.append("output_scale", torch.float32, outer):
            self.words.append(f"fn(f32:{mask}|acc*(1/arg0))")
        held = lower_call.RESULTS[q.output_dtype]
        qparam_checks.check_zero(call.name, "output_zero_point", q.output_zero_point, held)
        self.add("add", "output_zero_point", torch.int32, outer)
        if (seed := self.read("seed", "rounding_seed", torch.int32, 1)) is not None:
            self.reads.append(seed)
            self.words.append("stochastic")
        return QuantizedEpilogue(
            "+".join([*ahead, *self.words]), (*self.reads, *(z for z in zeros if z is not None))
        )

    def residual(self, given: Tensor) -> None:
        """The word that adds a tensor of the result's shape, which is read as the result lies."""
        shape, strides = self.call.made
        if given.shape != shape:
            raise TensorError(f"{self.call.name}: residual: expected the result's shape, {shape}, got "
                              f"{tuple(given.shape)}")
        name = f"arg{len(self.reads)}"
        casts = any(a != b for a, b, n in zip(given.stride(), strides, shape, strict=True) if n > 1)
        self.reads.append(Reads(name, "residual", given.dtype, shape, None, casts, strides))
        self.words += [f"add:{ROWS_OF[given.dtype]}:per_tensor"]

    def zero(self, name: str, argument: str, held: torch.dtype, channels: int) -> Reads | None:
        given = getattr(self.call.quantities, argument)
        qparam_checks.check_zero(self.call.name, argument, given, ROWS_OF[held])
        found = self.read(name, argument, torch.int32, channels)
        return found and found._replace(shape=(max(1, _count(found)),))

    def scale(self, names: Sequence[str], outer: int) -> None:
        """One factor is a word; of two the product is computed first."""
        if len(names) < 2:
            for name in names:
                self.add("mul", name, torch.float32, outer)
            return
        first, second = (self.append(n, torch.float32, outer) for n in names)
        self.words.append(f"fn(f32:{first},f32:{second}|acc*(arg0*arg1))")

    def add(self, word: str, argument: str, dtype: torch.dtype, channels: int) -> None:
        """The word with its argument; nothing for a number that changes nothing."""
        mask = self.append(argument, dtype, channels)
        if mask:
            self.words.append(f"{word}:{ROWS_OF[dtype]}:{mask}")

    def append(self, argument: str, dtype: torch.dtype, channels: int) -> str:
        """Read the argument behind the others; the mask of a tensor of the result."""
        found = self.read(f"arg{len(self.reads)}", argument, dtype, channels)
        if found is None:
            return ""
        self.reads.append(found)
        return "per_oc" if _count(found) > 1 else "common"

    def read(self, name: str, argument: str, dtype: torch.dtype, channels: int) -> Reads | None:
        """None for a number that changes nothing."""
        call = self.call
        given: Any = call.bias if argument == "bias" else getattr(call.quantities, argument)
        if not isinstance(given, Tensor):
            if given == getattr(_USUAL, argument):
                return None
            made = torch.full((1,), given, dtype=dtype, device=call.input.device)
            return Reads(name, argument, dtype, _spread(1, call), made, False)
        qparam_checks.check_shape(call.name, argument, given, channels)
        casts = given.dtype is not dtype or not given.is_contiguous()
        return Reads(name, argument, dtype, _spread(given.numel(), call), None, casts)


_USUAL = Quantities()
ROWS_OF = {getattr(torch, t.torch): t for t in ROWS.values() if t.torch and not t.within}


def _spread(count: int, call: QuantizedCall) -> tuple[int, ...]:
    """The shape of one value for each channel of the result."""
    return (1, count, *[1] * (call.input.dim() - 2))


def _count(reads: Reads) -> int:
    return reads.shape[1]
