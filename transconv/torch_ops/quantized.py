"""Convolutions of quantised tensors: integers and 8-bit floats with scales and zero points.

    real      = sum (input - input_zero_point) * (weight - weight_zero_point) * input_scale*weight_scale
                + bias, then the activation
    result    = real / output_scale + output_zero_point, rounded to nearest even and saturated

Padding is the zero point of the input (the real number 0). These functions have no gradients and no other
implementation: what has no kernel raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from transconv.conv import ConvProblem, ConvWorkload, Epilogue, Prop, TensorSpec
from transconv.errors import TensorError, Unsupported
from transconv.ir import DTYPES as ROWS
from transconv.ir import DType, Layout
from transconv.torch_ops import arguments, execute, shapes

Tensor = torch.Tensor
Number = float | Tensor

OPERANDS = ROWS.table(lambda t: t if t.operand and (t.bits == 8 or t.kind == "float") else None,
                      key=lambda t: getattr(torch, t.torch))
"""The element types of inputs and weights, by torch's types."""
RESULTS = ROWS.table(lambda t: t if t.result else None, key=lambda t: getattr(torch, t.torch))
"""The element types of results, by torch's types."""


def conv1d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
           dilation: Any = 1, groups: int = 1, **quantities: Any) -> Tensor:
    """The convolution of quantised tensors (mb, ic, iw) and (oc, ic/groups, kw); see ``conv2d``."""
    return _conv(1, input, weight, bias, (stride, padding, dilation, groups), Quantities(**quantities))


def conv2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
           dilation: Any = 1, groups: int = 1, **quantities: Any) -> Tensor:
    """The convolution of quantised tensors (mb, ic, ih, iw) and (oc, ic/groups, kh, kw): int8, uint8,
    float8_e4m3fn and float8_e5m2, both integers or both floats. ``bias`` (oc,) is in real numbers. Other
    arguments are torch.nn.functional.conv2d's, and by name those of ``Quantities``. Raises TypeError for
    an unknown name, TensorError and Unsupported, which name the argument, before anything runs."""
    return _conv(2, input, weight, bias, (stride, padding, dilation, groups), Quantities(**quantities))


def conv3d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
           dilation: Any = 1, groups: int = 1, **quantities: Any) -> Tensor:
    """The convolution of quantised tensors (mb, ic, id, ih, iw) and (oc, ic/groups, kd, kh, kw); see
    ``conv2d``."""
    return _conv(3, input, weight, bias, (stride, padding, dilation, groups), Quantities(**quantities))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantities:
    """Scales and zero points, each a number or a tensor on the input's device. All may be one number;
    ``weight_scale``, ``output_scale`` and ``output_zero_point`` also one for each output channel (oc,),
    and ``input_zero_point`` one for each input channel (ic,). ``output_dtype``: of the result, by default
    float32. ``activation``: words of an epilogue before the result is quantised, such as "relu"."""

    input_scale: Number = 1.0
    weight_scale: Number = 1.0
    output_scale: Number = 1.0
    input_zero_point: Number = 0
    weight_zero_point: Number = 0
    output_zero_point: Number = 0
    output_dtype: torch.dtype = torch.float32
    activation: str = ""


@dataclass(slots=True)
class _Words:
    """The words of an epilogue, and the values of what they read, in their order."""

    text: list[str] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def add(self, op: str, value: Tensor | None, dtype: DType) -> None:
        """``op`` with a value, or with one for each channel; nothing for None."""
        if value is not None:
            self.text.append(f"{op}:{dtype}:{'per_oc' if value.numel() > 1 else 'common'}")
            self.values.append(value.to(getattr(torch, dtype.torch)))


def _conv(ndims: int, input: Tensor, weight: Tensor, bias: Tensor | None, numbers: tuple[Any, ...],
          q: Quantities) -> Tensor:
    name = f"transconv.quantized.conv{ndims}d"
    _check_operands(name, ndims, input, weight, bias, q)
    problem, shape, last = _problem(ndims, input, weight, bias, numbers, q)
    words, extra = _epilogue(name, problem, bias, q, input.device)
    plan = execute.planned(problem, Prop.FWD, input.device, words, aligned=_aligned(input, weight),
                           deterministic=False)
    result = torch.empty_strided(shape, shapes.result_strides(shape, last), dtype=q.output_dtype,
                                 device=input.device)
    plan = execute.proven(plan, _aligned(input, weight), lambda: torch.empty_like(result), src=input,
                          wei=weight, **extra)
    execute.launch(plan, input, weight, result, **extra)
    return result


def _aligned(*tensors: Tensor) -> bool:
    return all(t.data_ptr() % 16 == 0 for t in tensors)


def _ints(what: str, given: Any, ndims: int) -> tuple[int, ...]:
    if (found := arguments.ints(given, ndims)) is None:
        raise TensorError(f"{what}: expected an integer, or {ndims} of them, got {given!r}")
    return found


def _problem(ndims: int, input: Tensor, weight: Tensor, bias: Tensor | None, numbers: tuple[Any, ...],
             q: Quantities) -> tuple[ConvProblem, tuple[int, ...], bool]:
    """The problem of a call, the shape of its result, and whether that is channels_last."""
    stride, padding, dilation, groups = numbers
    padded = padding if isinstance(padding, str) else _ints("padding", padding, ndims)
    params = arguments.resolve(input.shape, weight.shape, None if bias is None else bias.shape,
                               _ints("stride", stride, ndims), padded, _ints("dilation", dilation, ndims),
                               False, (0,), groups)
    shape = shapes.output_shape(input.shape, weight.shape, params)
    last = shapes.channels_last_result(input, weight)
    dst = Layout.from_strides(RESULTS[q.output_dtype], shape, shapes.result_strides(shape, last))
    src, wei = (TensorSpec(OPERANDS[t.dtype], Layout.from_strides(OPERANDS[t.dtype], t.shape, t.stride()))
                for t in (input, weight))
    made = ConvProblem(
        mb=shape[0], g=groups, ic=input.shape[1], oc=shape[1], i=tuple(input.shape[2:]), o=shape[2:],
        k=tuple(weight.shape[2:]), stride=params.stride, dilation=params.dilation, pad_lo=params.pad_lo,
        src=src, wei=wei, dst=TensorSpec(dst.dtype, dst),
        math=execute.flags(input.dtype).math)
    return made, shape, last


def _epilogue(name: str, p: ConvProblem, bias: Tensor | None, q: Quantities,
              device: torch.device) -> tuple[str, dict[str, Tensor]]:
    """The epilogue of a call, and the tensors that it reads."""
    src_zero = _value(name, "input_zero_point", q, 0, p.ic, p.src.dtype, device)
    wei_zero = _value(name, "weight_zero_point", q, 0, 1, p.wei.dtype, device)
    f32, i32 = ROWS["f32"], ROWS["i32"]
    ahead = [f"zero:src{':per_ic' if src_zero.numel() > 1 else ''}"] if src_zero is not None else []
    ahead += ["zero:wei"] if wei_zero is not None else []
    words = _Words()
    scales = [_value(name, what, q, 1.0, n, None, device)
              for what, n in (("input_scale", 1), ("weight_scale", p.oc))]
    known = [s.float() for s in scales if s is not None]
    words.add("mul", known[0] * known[1] if len(known) > 1 else known[0] if known else None, f32)
    words.add("add", None if bias is None else bias.view(-1), f32)
    words.text += [q.activation] * bool(q.activation)
    words.add("div", _value(name, "output_scale", q, 1.0, p.oc, None, device), f32)
    zero = _value(name, "output_zero_point", q, 0, p.oc, p.dst.dtype, device)
    words.add("add", zero, i32)
    text = "+".join([*ahead, *words.text])
    zeros = [z.int().view(-1) for z in (src_zero, wei_zero) if z is not None]
    operands = ConvWorkload(p, Prop.FWD, Epilogue.parse(text)).tensors[len(p.specs):]
    values = [*words.values, *zeros]
    return text, {t.name: v.reshape(t.shape).contiguous() for t, v in zip(operands, values, strict=True)}


def _value(name: str, what: str, q: Quantities, usual: float, channels: int, holds: DType | None,
           device: torch.device) -> Tensor | None:
    """A scale or a zero point as a tensor of one dimension; None for a number that changes nothing.
    ``holds``: the type that a zero point is one of."""
    given: Number = getattr(q, what)
    if not isinstance(given, Tensor):
        if isinstance(given, bool) or not isinstance(given, (int, float)):
            raise TensorError(f"{name}: {what}: expected a number or a tensor, got {type(given).__name__}")
        if given == usual:
            return None
        _check_zero(name, what, given, holds)
        if holds is None and not given > 0:
            raise TensorError(f"{name}: {what}: expected a scale above 0, got {given:g}")
        return torch.tensor([given], dtype=torch.int32 if holds else torch.float32, device=device)
    if given.numel() not in (1, channels) or given.dim() > 1:
        raise TensorError(f"{name}: {what}: expected one number, or the shape ({channels},), got "
                          f"{tuple(given.shape)}")
    if holds and given.is_floating_point():
        raise TensorError(f"{name}: {what}: expected integers, got {given.dtype}")
    if holds and holds.kind != "int":
        raise TensorError(f"{name}: {what}: zero points are of integers, and this tensor is {holds}")
    return given.detach().view(-1)


def _check_zero(name: str, what: str, given: float, holds: DType | None) -> None:
    if holds is None:
        return
    if holds.kind != "int":
        raise TensorError(f"{name}: {what}: zero points are of integers, and this tensor is {holds}")
    low, high = holds.limits
    if given != int(given) or not low <= given <= high:
        raise TensorError(f"{name}: {what}: expected an integer from {low} to {high}, the range of "
                          f"{holds}, got {given:g}")


def _check_operands(name: str, ndims: int, input: Tensor, weight: Tensor, bias: Tensor | None,
                    q: Quantities) -> None:
    for what, t in (("input", input), ("weight", weight)):
        if not isinstance(t, Tensor) or t.dtype not in OPERANDS:
            raise TensorError(f"{name}: {what}: expected a tensor of {_names(OPERANDS)}, got "
                              f"{getattr(t, 'dtype', type(t).__name__)}")
        if t.dim() != ndims + 2:
            raise TensorError(f"{name}: {what}: expected {ndims + 2} dimensions, got {t.dim()}")
    if input.dtype.is_floating_point != weight.dtype.is_floating_point:
        kind = "floats" if input.dtype.is_floating_point else "integers"
        raise TensorError(f"{name}: weight: expected {kind}, as the input, got {weight.dtype}")
    if q.output_dtype not in RESULTS:
        raise TensorError(f"{name}: output_dtype: expected one of {_names(RESULTS)}, got {q.output_dtype}")
    if bias is not None and not bias.dtype.is_floating_point:
        raise TensorError(f"{name}: bias: expected floats, in real numbers, got {bias.dtype}")
    others: Sequence[Any] = (weight, bias, *(getattr(q, f) for f in Quantities.__slots__))
    for t in others:
        if isinstance(t, Tensor) and t.device != input.device:
            raise TensorError(f"{name}: expected all tensors on {input.device}, where the input is, got "
                              f"one on {t.device}")
    if any(isinstance(t, Tensor) and t.requires_grad for t in (input, weight, bias)) and (
            torch.is_grad_enabled()):
        raise Unsupported("quantized:gradient", f"{name} has no gradients; call it under torch.no_grad()")


def _names(types: dict[torch.dtype, DType]) -> str:
    return " ".join(str(t).removeprefix("torch.") for t in types)
