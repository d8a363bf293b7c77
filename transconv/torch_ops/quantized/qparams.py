"""The scales and zero points of a quantised call: their checks, and the words of an epilogue for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from transconv.conv import Epilogue, why_not_multiplied
from transconv.ir import DTYPES as ROWS
from transconv.ir import SHORT, DType
from transconv.support import ScheduleError, TensorError, Unsupported
from transconv.torch_ops import arguments
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.calls.call_attributes import ConvFunction

Tensor = torch.Tensor
Number = float | Tensor

OPERANDS = ROWS.table(
    lambda t: t if t.operand and (t.bits == 8 or t.kind == "float") else None,
    key=lambda t: getattr(torch, t.torch),
)
"""The element types of inputs and weights, by torch's types."""


def check(name: str, ndims: int, input: Any, weight: Any, bias: Any, q: Quantities) -> None:
    """TensorError for arguments that are wrong whatever the shapes are."""
    for what, t in (("input", input), ("weight", weight)):
        if not isinstance(t, Tensor) or t.dtype not in OPERANDS:
            raise TensorError(
                f"{name}: {what}: expected a tensor of {names(OPERANDS)}, got "
                f"{getattr(t, 'dtype', type(t).__name__)}"
            )
        if t.dim() != ndims + 2:
            raise TensorError(f"{name}: {what}: expected {ndims + 2} dimensions, got {t.dim()}")
    if not input.dtype.is_floating_point and weight.dtype.is_floating_point:
        raise TensorError(f"{name}: weight: expected integers, as the input, got {weight.dtype}")
    if reason := why_not_multiplied(OPERANDS[input.dtype], OPERANDS[weight.dtype]):
        raise TensorError(f"{name}: weight: {reason}")
    if q.output_dtype not in lower_call.RESULTS:
        raise TensorError(
            f"{name}: output_dtype: expected one of {names(lower_call.RESULTS)}, got {q.output_dtype}"
        )
    if not isinstance(q.use_fast_accum, bool):
        raise TensorError(f"{name}: use_fast_accum: expected True or False, got {q.use_fast_accum!r}")
    if q.use_fast_accum and not (OPERANDS[input.dtype].is_short and OPERANDS[weight.dtype].is_short):
        raise TensorError(
            f"{name}: use_fast_accum: it is for products of 8-bit floats, got {input.dtype} "
            f"and {weight.dtype}"
        )
    _check_seed(name, q.rounding_seed, q.output_dtype)
    if bias is not None and (not isinstance(bias, Tensor) or not bias.dtype.is_floating_point):
        raise TensorError(
            f"{name}: bias: expected floats, in real numbers, got "
            f"{getattr(bias, 'dtype', type(bias).__name__)}"
        )
    others = {"weight": weight, "bias": bias} | {f: getattr(q, f) for f in q.__slots__}
    for what, t in others.items():
        if isinstance(t, Tensor) and t.device != input.device:
            raise TensorError(
                f"{name}: {what}: expected a tensor on {input.device}, where the input is, "
                f"got one on {t.device}"
            )
    if q.residual is not None and (
        not isinstance(q.residual, Tensor) or q.residual.dtype not in lower_call.DTYPES
    ):
        raise TensorError(
            f"{name}: residual: expected floats in the shape of the result, got "
            f"{getattr(q.residual, 'dtype', type(q.residual).__name__)}"
        )
    sums = q.input_zero_sums
    if sums is not None and (
        not isinstance(sums, Tensor)
        or sums.dtype is not torch.int32
        or sums.dim() != 1 + 2 * ndims
        or len(sums) != len(weight)
    ):
        raise TensorError(
            f"{name}: input_zero_sums: expected None or an int32 tensor of {len(weight)} "
            f"features and {2 * ndims} dimensions more, got {getattr(sums, 'shape', sums)}"
        )
    if not isinstance(q.activation, str):
        raise TensorError(f"{name}: activation: expected words of an epilogue, got {q.activation!r}")
    for what in ("input_scale", "weight_scale", "output_scale"):
        _check_scale(name, what, getattr(q, what))


def _check_seed(name: str, seed: Any, made: torch.dtype) -> None:
    if seed is None:
        return
    if not isinstance(seed, Tensor) or seed.is_floating_point() or seed.numel() != 1:
        said = f"{seed.dtype} of shape {tuple(seed.shape)}" if isinstance(seed, Tensor) else repr(seed)
        raise TensorError(f"{name}: rounding_seed: expected an integer tensor of one element, got {said}")
    if lower_call.RESULTS[made] not in SHORT:
        raise TensorError(
            f"{name}: rounding_seed: it is for results of {' '.join(map(str, SHORT))}; "
            f"output_dtype is {made}"
        )


def wrong_number(
    f: ConvFunction, stride: Any, padding: Any, output_padding: Any, dilation: Any, groups: Any
) -> TensorError:
    """The error of the first of these that is neither an integer nor one for each dimension."""
    for what, value in (
        ("stride", stride),
        ("padding", padding),
        ("output_padding", output_padding),
        ("dilation", dilation),
    ):
        worded = what == "padding" and isinstance(value, str) and not f.transposed
        if arguments.ints(value, f.ndims) is None and not worded:
            return TensorError(
                f"{f.name}: {what}: expected an integer, or {f.ndims} of them, got {value!r}"
            )
    return TensorError(f"{f.name}: groups: expected an integer, got {groups!r}")


def refuse_gradients(name: str, *tensors: Any) -> None:
    """Unsupported where a gradient would be asked for."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        raise Unsupported("quantized:gradient", f"{name} has no gradients; call it under torch.no_grad()")


def check_shape(name: str, what: str, given: Tensor, channels: int) -> None:
    if given.numel() not in (1, channels) or given.dim() > 1:
        also = f", or the shape ({channels},)" if channels > 1 else ""
        raise TensorError(f"{name}: {what}: expected one number{also}, got {tuple(given.shape)}")


def _check_number(name: str, what: str, given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TensorError(f"{name}: {what}: expected a number or a tensor, got {type(given).__name__}")


LEAST_SCALE, LARGEST_SCALE = 2.0**-149, torch.finfo(torch.float32).max


def _check_scale(name: str, what: str, given: Number) -> None:
    if isinstance(given, Tensor):
        if not given.is_floating_point():
            raise TensorError(f"{name}: {what}: expected floats, got {given.dtype}")
        return
    _check_number(name, what, given)
    if not LEAST_SCALE <= given <= LARGEST_SCALE:
        raise TensorError(f"{name}: {what}: expected a scale above 0 that f32 holds, got {given:g}")


def check_zero(name: str, what: str, given: Number, holds: DType) -> None:
    if isinstance(given, Tensor):
        if given.is_floating_point() or given.is_complex() or given.dtype is torch.bool:
            raise TensorError(f"{name}: {what}: expected integers, got {given.dtype}")
    else:
        _check_number(name, what, given)
        if given == 0:
            return
    if holds.kind != "int":
        raise TensorError(f"{name}: {what}: zero points are of integers, and this tensor is {holds}")
    low, high = holds.limits
    if not isinstance(given, Tensor) and (given != given // 1 or not low <= given <= high):
        raise TensorError(
            f"{name}: {what}: expected an integer from {low} to {high}, the range of "
            f"{holds}, got {given:g}"
        )


def activation(name: str, words: str) -> str:
    try:
        made = Epilogue.parse(words)
    except ScheduleError as error:
        raise TensorError(f"{name}: activation: {error}") from error
    if made.operands or made.zeros:
        raise TensorError(f"{name}: activation: expected functions of one value, got '{words}'")
    return words


def names(types: dict[torch.dtype, DType]) -> str:
    """The types, as a list of words."""
    return " ".join(str(t).removeprefix("torch.") for t in types)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantities:
    """Scales and zero points, each a number or a tensor on the input's device. All may be one number;
    ``weight_scale``, ``weight_zero_point``, ``output_scale`` and ``output_zero_point`` also one for each
    output channel (oc,), and ``input_zero_point`` one for each input channel (ic,). ``output_dtype``: of
    the result, by default float32. ``activation``: words of an epilogue before the result is quantised,
    such as "relu"; None is none, as ``fused_conv2d`` has it. ``use_fast_accum``, as of torch's scaled
    products: sums of products of 8-bit floats stay in the matrix unit, where Hopper keeps some 13 bits of
    them; without it they move to f32 after every 128 products. ``residual``: a tensor of floats with the
    result's shape, added in real numbers before the activation. ``input_zero_sums``: what the input's zero
    point adds to the sums, if it is known, of int8 tensors (see conv/compensation.py): kernels read it
    instead of computing it in every call. ``rounding_seed``: an integer tensor of one element; results in
    8-bit and 16-bit floats are rounded up or down at random then, by this seed and their place alone."""

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
                raise TypeError(
                    f"{name}: it has no argument '{word}'; expected one of {' '.join(cls.__slots__)}"
                )
        said: dict[str, Any] = {n: v for n, v in given.items() if n != "activation" or v is not None}
        return cls(**said)


def signature_of(public: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function of quantised tensors, with ``Quantities`` by name for ``**given``."""
    own, more = inspect.signature(public), inspect.signature(Quantities).parameters.values()
    kept = [*own.parameters.values()][:-1]
    return own.replace(parameters=[*kept, *(p.replace(kind=p.KEYWORD_ONLY) for p in more)])


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
            return torch.empty_strided(
                self.shape, self.strides, dtype=self.dtype, device=given.device
            ).copy_(given.detach())
        return given.detach().to(self.dtype).contiguous() if self.casts else given


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


class QuantizedEpilogue:
    """The epilogue of a call, in oneDNN's order: its text, and what it reads in the order of kernels.
    Raises TensorError, which names the argument."""

    def __init__(self, call: QuantizedCall) -> None:
        self.call = call
        self.words: list[str] = []
        self.reads: list[Reads] = []
        q, (data, along, other) = call.quantities, ("src", "per_ic", "per_oc")
        if call.transposed:
            data, along, other = ("dst", "per_oc", "per_ic")
        inner, outer = call.channels
        zeros = [
            self.zero(f"{data}_zero", "input_zero_point", call.input.dtype, inner),
            self.zero("wei_zero", "weight_zero_point", call.weight.dtype, outer),
        ]
        ahead = [
            f"zero:{n}{':' + word if r.shape[0] > 1 else ''}"
            for n, word, r in zip((data, "wei"), (along, other), zeros, strict=True)
            if r is not None
        ]
        if (
            (sums := q.input_zero_sums) is not None
            and ahead[:1] == ["zero:src"]
            and (call.input.dtype is call.weight.dtype is torch.int8)
        ):
            ahead[0] += f":known:{'x'.join(map(str, sums.shape[1:]))}"
            zeros.append(
                Reads(
                    "src_zero_table",
                    "input_zero_sums",
                    torch.int32,
                    tuple(sums.shape),
                    None,
                    not sums.is_contiguous(),
                )
            )
        scales = [
            n
            for n, channels in (("input_scale", 1), ("weight_scale", outer))
            if self.read("", n, torch.float32, channels) is not None
        ]
        self.scale(scales, outer)
        if call.bias is not None:
            self.add("add", "bias", call.bias.dtype, outer)
        if q.residual is not None:
            self.residual(q.residual)
        if q.activation:
            self.words.append(activation(call.name, q.activation))
        if mask := self.append("output_scale", torch.float32, outer):
            self.words.append(f"fn(f32:{mask}|acc*(1/arg0))")
        held = lower_call.RESULTS[q.output_dtype]
        check_zero(call.name, "output_zero_point", q.output_zero_point, held)
        self.add("add", "output_zero_point", torch.int32, outer)
        if (seed := self.read("seed", "rounding_seed", torch.int32, 1)) is not None:
            self.reads.append(seed)
            self.words.append("stochastic")
        self.text = "+".join([*ahead, *self.words])
        self.reads += [z for z in zeros if z is not None]

    def residual(self, given: Tensor) -> None:
        """The word that adds a tensor of the result's shape, which is read as the result lies."""
        shape, strides = self.call.made
        if given.shape != shape:
            raise TensorError(
                f"{self.call.name}: residual: expected the result's shape, {shape}, got "
                f"{tuple(given.shape)}"
            )
        name = f"arg{len(self.reads)}"
        casts = any(a != b for a, b, n in zip(given.stride(), strides, shape, strict=True) if n > 1)
        self.reads.append(Reads(name, "residual", given.dtype, shape, None, casts, strides))
        self.words += [f"add:{ROWS_OF[given.dtype]}:per_tensor"]

    def zero(self, name: str, argument: str, held: torch.dtype, channels: int) -> Reads | None:
        given = getattr(self.call.quantities, argument)
        check_zero(self.call.name, argument, given, ROWS_OF[held])
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
        check_shape(call.name, argument, given, channels)
        casts = given.dtype is not dtype or not given.is_contiguous()
        return Reads(name, argument, dtype, _spread(given.numel(), call), None, casts)


_USUAL = Quantities()
ROWS_OF = {getattr(torch, t.torch): t for t in ROWS.values() if t.torch and not t.within}


def _spread(count: int, call: QuantizedCall) -> tuple[int, ...]:
    """The shape of one value for each channel of the result."""
    return (1, count, *[1] * (call.input.dim() - 2))


def _count(reads: Reads) -> int:
    return reads.shape[1]
