"""The route of quantised convolutions: one kernel, or torch in wider types.

torch's way has the same order of operations: exact sums of integers in f64 (of 8-bit floats in f32), then
the operations of the epilogue in f32, and one rounding. Compilers see the operator in the place of a call.
``weight_gradient`` is that of a weight in 32 bits, from an input and a result's gradient of fewer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from transconv.calls import route_cache
from transconv.calls.guard import ALIGNMENT
from transconv.calls.settings import settings
from transconv.compute import in_torch
from transconv.conv import Epilogue, Prop, without_zeros
from transconv.ir import chances, one_of_two
from transconv.support import Unsupported
from transconv.torch_ops import arguments, operators, transforms
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import call_attributes, lower_call
from transconv.torch_ops.calls.call_attributes import CallAttributes, ConvFunction, request
from transconv.torch_ops.calls.route import ConvCall, RouteEpilogue, RouteMatch
from transconv.torch_ops.calls.select_impl import compile_route, refused
from transconv.torch_ops.conversion import aten_convolutions
from transconv.torch_ops.quantized import input_quantization, qparams, quantized_route
from transconv.torch_ops.quantized.qparams import QuantizedCall, QuantizedEpilogue, Reads

Tensor = torch.Tensor
Given = Mapping[str, Any]  # quantities by name


def _epilogue(params: arguments.Params, channels_last: bool, call: QuantizedCall) -> RouteEpilogue:
    """What follows the sums of a call: its operands are the bias and quantities by name."""
    said, made = QuantizedEpilogue(call), call.quantities.output_dtype
    text, each = said.text, tuple(said.reads)  # without the call's tensors
    knows = any(r.argument == "input_zero_sums" for r in each)

    def reads(w: Tensor, bias: Tensor | None, given: Given) -> list[Tensor]:
        if knows:
            given = _checked(w, given, params)
        return _operands(each, bias, given)

    def computed(x: Tensor, w: Tensor, bias: Tensor | None, given: Given, is_fake: bool = False) -> Tensor:
        read = _operands(each, bias, given) if is_fake else reads(w, bias, given)
        extra = {r.name: t.view(r.shape) for r, t in zip(each, read, strict=True)}
        return arguments.with_result_strides(_by_torch(text, made, params, x, w, extra), channels_last)

    picks = None if any(r.casts for r in each) else tuple((r.argument, r.number) for r in each)
    return RouteEpilogue(
        text, tuple(r.name for r in each), reads, computed, [r.shape for r in each], picks=picks
    )


def _operands(each: Sequence[Reads], bias: Tensor | None, given: Given) -> list[Tensor]:
    """What the kernel reads beside input and weight, in its order."""
    return [
        r.number if r.number is not None else r.of(bias if r.argument == "bias" else given[r.argument])  # type: ignore[arg-type]
        for r in each
    ]


def _checked(w: Tensor, given: Given, params: arguments.Params) -> Given:
    """The quantities with sums of the zero point that are right; TensorError if they are not."""
    sums = given["input_zero_sums"]
    right = input_quantization.checked(w, given["input_zero_point"], sums, params)
    return given if right is sums else {**given, "input_zero_sums": right}


def _by_torch(
    text: str, made: torch.dtype, params: arguments.Params, x: Tensor, w: Tensor, extra: dict[str, Tensor]
) -> Tensor:
    """What torch computes: a fresh result."""
    wide = torch.float32 if x.is_floating_point() and x.dtype is not torch.float64 else torch.float64
    epilogue, near = Epilogue.parse(text), "dst" if params.transposed else "src"
    whole = without_zeros({near: x, "wei": w, **extra}, epilogue.zeros)
    y = aten_convolutions.aten_forward(whole[near].to(wide), whole["wei"].to(wide), None, params)
    if epilogue.ops:
        computed = torch.float64 if torch.float64 in (x.dtype, w.dtype, made) else torch.float32
        y = in_torch(
            epilogue.function,
            {"acc": y.to(computed), **{o.name: extra[o.name].to(computed) for o in epilogue.operands}},
        )
    return _stored(y, made, extra["seed"] if epilogue.random else None)


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


def key_of(
    req: CallAttributes, x: Tensor, w: Tensor, bias: Tensor | None, given: Given
) -> tuple[Hashable, lower_call.Flags, bool]:
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
            _kind(bias),
            *said,
            flags,
            aligned,
        ),
        flags,
        aligned,
    )


def find(req: CallAttributes, x: Tensor, w: Tensor, bias: Tensor | None, given: Given) -> RouteMatch:
    """The route of a call, found or made. Raises TensorError, TypeError and RuntimeError for arguments
    that do not fit, and Unsupported where torch may not compute."""
    key, flags, aligned = key_of(req, x, w, bias, given)
    try:
        known: ConvCall | None = route_cache.find(key)
    except TypeError:  # a list, say, has no hash, and is no scale
        known = None
    if known is not None:
        return RouteMatch(known, True, flags, aligned)
    made = decided(req, x, w, bias, given)
    behind = made.epilogue
    assert behind is not None
    read = behind.reads(w, bias, given)  # right or wrong, whoever computes
    why = lower_call.reasons(x, w, qparams.OPERANDS) or ([] if all(made.shape) else ["shape:empty"])
    if not why:
        try:
            summed = lower_call.fast(flags) if given.get("use_fast_accum") else flags
            compile_route(
                made, x, w, None, behind.words, aligned, summed, settings.mode, **behind.named(read)
            )
        except Unsupported as error:
            refused(made, error, x)
    else:
        made.settle(why)
    return RouteMatch(route_cache.keep(key, made), False, flags, aligned)


def decided(req: CallAttributes, x: Tensor, w: Tensor, bias: Tensor | None, given: Given) -> ConvCall:
    """A new route of a call whose arguments fit, which has no kernel yet."""
    name = req.name or "transconv::quantized_convolution"
    q = qparams.Quantities.of(name, given)
    qparams.check(name, req.ndims, x, w, bias, q)
    params = req.params(x, w, bias)
    shape = arguments.output_shape(x.shape, w.shape, params)
    strides = arguments.result_strides(shape, arguments.channels_last_result(x, w))
    call = QuantizedCall(name, x, w, bias, (x.shape[1], shape[1]), params.transposed, q, (shape, strides))
    last = arguments.channels_last_result(x, w)
    made = ConvCall(
        Prop.BWD_D if params.transposed else Prop.FWD, params, shape, last, _epilogue(params, last, call)
    )
    made.types = (x.dtype, w.dtype, q.output_dtype)
    return made


def alone(req: CallAttributes, x: Tensor, w: Tensor, bias: Tensor | None, given: Given) -> Tensor:
    """The result of torch for tensors that no kernel can read: fakes, and other classes."""
    made = decided(req, x, w, bias, given)
    assert made.epilogue is not None
    return made.epilogue.computed(x, w, bias, given, is_fake=True)


NAME = "transconv::quantized_convolution"
WORDS = ("output_dtype", "activation", "use_fast_accum", "rounding_seed")
NEVER_NUMBERS = ("residual", "input_zero_sums")
QUANTITIES = tuple(f for f in qparams.Quantities.__slots__ if f not in WORDS)


def call(
    f: ConvFunction,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    output_padding: Any,
    dilation: Any,
    groups: Any,
    given: dict[str, Any],
) -> Tensor:
    """A call that is traced, as the operator."""
    q = qparams.Quantities.of(f.name, given)
    qparams.check(f.name, f.ndims, input, weight, bias, q)
    parsed = call_attributes.parse(f, stride, padding, output_padding, dilation, groups)
    if parsed is None:
        raise qparams.wrong_number(f, stride, padding, output_padding, dilation, groups)
    p = arguments.resolve_call(
        input, weight, bias, parsed[0], parsed[1], parsed[3], f.transposed, parsed[2], parsed[4]
    )
    values = [getattr(q, n) for n in QUANTITIES]
    return operators.quantized_convolution(
        input,
        weight,
        bias,
        *p,
        [v if isinstance(v, Tensor) else None for v in values],
        [float(v) if isinstance(v, (int, float)) else 0.0 for v in values],
        q.output_dtype,
        q.activation,
        q.use_fast_accum,
        q.rounding_seed,
    )


def _given(
    tensors: Sequence[Tensor | None],
    numbers: Sequence[float],
    output_dtype: torch.dtype,
    activation: str,
    use_fast_accum: bool,
    rounding_seed: Tensor | None = None,
) -> dict[str, Any]:
    values = dict(
        zip(
            QUANTITIES,
            (n if t is None else t for t, n in zip(tensors, numbers, strict=True)),
            strict=False,
        )
    )  # graphs that torch kept may have fewer
    values = {n: v for n, v in values.items() if n not in NEVER_NUMBERS or isinstance(v, Tensor)}
    return {
        **values,
        "output_dtype": output_dtype,
        "activation": activation,
        "use_fast_accum": use_fast_accum,
        "rounding_seed": rounding_seed,
    }


def _forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    *said: Any,
) -> Tensor:
    req = request("", len(stride), stride, padding, dilation, transposed, output_padding, groups)
    given = _given(*said)
    transforms.refuse_tangents(NAME, [input, weight, bias, *given.values()])
    input = arguments.in_any_batch(input, weight)
    return quantized_route.find(req, input, weight, bias, given).route.forward(input, weight, bias, given)


def _fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    *said: Any,
) -> Tensor:
    req = request("", len(stride), stride, padding, dilation, transposed, output_padding, groups)
    return quantized_route.alone(req, input, weight, bias, _given(*said))


operators.implement("quantized_convolution", _fake, _forward)


def _of_leaves(form: Any, *leaves: Any) -> tuple[Tensor, ...]:
    return (operators.quantized_convolution(*tree_unflatten([*leaves], form)),)


RULES = transforms.Rules(NAME, _of_leaves, None, None, transforms.looped(_of_leaves))
"""One example after the other; there are no derivatives."""


def _transformed(*given: Any, rounding_seed: Tensor | None = None) -> Tensor:
    leaves, form = tree_flatten((*given, rounding_seed) if rounding_seed is not None else given)
    return transforms.transformed(RULES, form, *leaves)[0]


operators.library.impl("quantized_convolution", _transformed, transforms.FRONT)


def weight_gradient(x: Tensor, grad: Tensor, weight: Tensor, params: Params, fast: bool) -> Tensor:
    """The sums of products, without scales, f32, in the shape of ``weight``. ``fast``: whether they stay
    in the matrix unit."""
    flags = lower_call.fast(lower_call.flags(x.dtype)) if fast else lower_call.flags(x.dtype)
    aligned = not (x.data_ptr() | grad.data_ptr()) & ALIGNMENT
    key: Hashable = (
        "weight_gradient",
        params,
        *((t.shape, t.stride(), t.dtype, t.device) for t in (x, grad, weight)),
        flags,
        aligned,
    )
    route: Any = route_cache.find(key)
    if route is None:
        route = route_cache.keep(key, _decided(x, grad, weight, params, flags, aligned))
    if route.compiled is None:
        route.calls += 1
        wide = aten_convolutions.aten_backward(
            grad.float(), x.float(), weight.float(), params, (False, True, False)
        )
        assert wide[1] is not None
        return wide[1]
    made_like = torch.empty(0, dtype=torch.float32, device=x.device)
    result: Tensor = route.gradient(made_like, x, None, grad)
    return result


def _decided(
    x: Tensor, grad: Tensor, weight: Tensor, params: Params, flags: lower_call.Flags, aligned: bool
) -> ConvCall:
    route = ConvCall(Prop.BWD_W, params, tuple(weight.shape), arguments.channels_last_result(x, weight))
    route.types = (x.dtype, torch.float32, grad.dtype)
    why = lower_call.reasons(x, weight, qparams.OPERANDS) or ([] if grad.numel() else ["shape:empty"])
    if why:
        route.settle(why)
        return route
    try:
        compile_route(route, x, None, grad, "", aligned, flags, settings.mode)
    except Unsupported as error:
        refused(route, error, x)
    return route
