"""Dispatches a call of a public function: tracing, subclasses, autocast, autograd.

Plain eager tensors take the fast path: one lookup, one launch. Other calls are passed on:
`__torch_function__` to its handler, functorch transforms and dual numbers to aten, so that no
derivative is dropped; compilers, tracers, dispatch modes and fake tensors get the registered operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from transconv.calls import route_cache, stats
from transconv.calls.guard import means_more
from transconv.calls.settings import settings
from transconv.calls.size_policy import policy
from transconv.runtime import torch_internals
from transconv.torch_ops import arguments, library, shapes, tensor_subclasses
from transconv.torch_ops.arguments import Params, autocast, autocast_dtype, traced_autocast
from transconv.torch_ops.calls import autograd, call_entries, lower_call, precompile, select_impl
from transconv.torch_ops.calls.call_attributes import CallAttributes, request
from transconv.torch_ops.calls.select_impl import layer_of
from transconv.torch_ops.conversion import aten_convolutions

Tensor = torch.Tensor

_Parameter = torch.nn.Parameter
handle: Any = handle_torch_function
FakeTensor: Any = torch_internals.FakeTensor
FunctionalTensor: Any = torch_internals.FunctionalTensor
_any_autocast: Callable[[], bool] = torch_internals.any_autocast
_transforms: Callable[[], bool] = torch_internals.transforms
_modes: Callable[[], int] = torch_internals.dispatch_modes
_tracing: Callable[[], Any] = torch_internals.tracing_state


@dataclass(eq=False, slots=True)
class ConvFunction:
    """One public function: its name, its rank, torch's function of that name, the function for new kinds
    of calls, and ours."""

    name: str
    ndims: int
    transposed: bool
    aten: Callable[..., Tensor]
    general: Callable[..., Tensor]
    public: Callable[..., Tensor] | None = None


_requests: dict[Any, CallAttributes] = {}


def _hand_over(f: ConvFunction, input: Any, weight: Any, bias: Any, stride: Any, padding: Any,
               output_padding: Any, dilation: Any, groups: Any) -> Tensor:
    """torch's own function, with unchanged arguments."""
    if f.transposed:
        return f.aten(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return f.aten(input, weight, bias, stride, padding, dilation, groups)


def dispatch(f: ConvFunction, input: Any, weight: Any, bias: Any, stride: Any, padding: Any,
             output_padding: Any, dilation: Any, groups: Any) -> Tensor:
    """Pass one call on to its implementation. The cheapest tests come first."""
    rest = (stride, padding, output_padding, dilation, groups)
    if torch.compiler.is_compiling():
        return _compiled(f, input, weight, bias, *rest)
    if has_torch_function((input, weight, bias)):
        order = ((stride, padding, output_padding, groups, dilation) if f.transposed
                 else (stride, padding, dilation, groups))
        seen: Tensor = handle(f.public, (input, weight, bias), input, weight, bias, *order)
        return seen
    if _transforms():
        _note_transform("transform:functorch", input)
        return _hand_over(f, input, weight, bias, *rest)
    if forward_ad._current_level >= 0:
        _note_transform("transform:forward_ad", input)
        return _hand_over(f, input, weight, bias, *rest)
    if not (is_plain(input) and is_plain(weight) and (bias is None or is_plain(bias))):
        return _unusual(f, input, weight, bias, *rest)
    if (input.is_neg() or weight.is_neg() or input._is_zerotensor()
            or weight._is_zerotensor() or (bias is not None and means_more(bias))):
        input, weight = arguments.spelled_out(input), arguments.spelled_out(weight)
        bias = None if bias is None else arguments.spelled_out(bias)
    given, cast = (input, weight, bias, None), None
    if _any_autocast():
        cast = autocast_dtype(input)
        input, weight, bias = autocast(input, weight, bias)
    if _modes() or _tracing() or input.is_meta:
        return _operator(f, input, weight, bias, *rest)

    req = requested(f, stride, padding, output_padding, dilation, groups)
    if req is None:
        return _odd_form(f, input, weight, bias, *rest)
    key, flags, aligned = select_impl.forward_key(req, input, weight, bias)
    route = route_cache.find(key)
    if route is None:
        if input.dtype.is_complex:
            stats.handed_over(f"dtype:{str(input.dtype).removeprefix('torch.')}")
            return _hand_over(f, input, weight, bias, *rest)  # in real parts, by torch
        check_bias(f, input, bias, padding)
        if is_bias_left_to_torch(f, input, bias, padding):
            return _mixed_types(f, input, weight, bias, *rest)
        if not arguments.batched(f.name, f.ndims, input.shape):
            return dispatch(f, input.unsqueeze(0), weight, bias, *rest).squeeze(0)
        if settings.varies and _is_copied(req, input, weight, bias):
            dense = shapes.with_result_strides(input, shapes.channels_last_result(input, weight))
            return dispatch(f, dense, weight, bias, *rest)
        precompile.layers(given[1], input, weight, flags, settings.mode)
        route, layer = select_impl.add_sized(key, req, input, weight, bias, flags, aligned, settings.mode)
        if layer is not None:
            call_entries.note_layer((autograd.apply, autograd.apply_cast), f, given,
                                    (input, weight, bias, None), rest, route, layer, flags, aligned, cast)
    else:
        if not route.trains:
            select_impl.trained(route, input, weight, flags, aligned, settings.mode)
        call_entries.note(autograd.function_of, f, given, (input, weight, bias, None), rest, route, flags,
                          aligned, cast)
    if (route.over is not None and route.compiled is None and route.asks_own
            and input.device.type not in aten_convolutions.replaced):
        route.calls += 1  # torch's own call, with its gradients, costs the least until the kernel is there
        return _hand_over(f, *given[:3], *rest)
    route.lay_out(weight)
    if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad
                                    or (bias is not None and bias.requires_grad)):
        if weight is given[1] and bias is given[2]:
            return autograd.apply(input, weight, bias, route)
        return autograd.apply_cast(input, *given[1:3], weight, bias, route)
    result: Tensor = route.forward(input, weight, bias)
    return result


def _is_copied(req: CallAttributes, x: Tensor, w: Tensor, b: Tensor | None) -> bool:
    """Whether kernels for any size are to answer a call through a copy of an input with gaps: at a size
    that is not the layer's first one."""
    if not x.numel() or not shapes.has_gaps(x, shapes.channels_last_result(x, w)):
        return False
    params = req.resolve(x, w, b)
    src = shapes.output_shape(x.shape, w.shape, params) if params.transposed else x.shape
    return policy.is_further(layer_of(params, x.dtype, w.shape, x.device), (src[0], *src[2:]))


def _note_transform(reason: str, input: Any) -> None:
    """Count a call that goes to aten because of a transform, unless `enable` replaced aten's kernel."""
    if getattr(getattr(input, "device", None), "type", "") not in aten_convolutions.replaced:
        stats.handed_over(reason)


def is_plain(tensor: Any) -> bool:
    """A tensor of torch's own, whose elements lie in strided memory."""
    return ((tensor.__class__ is Tensor or tensor.__class__ is _Parameter)
            and tensor.layout is torch.strided and not tensor.is_nested)


def is_known(tensor: Tensor) -> bool:
    """Plain tensors and the fakes of compilers, as opposed to other subclasses."""
    return is_plain(tensor) or isinstance(tensor, (FakeTensor, FunctionalTensor))


def _unusual(f: ConvFunction, *call: Any) -> Tensor:
    """Tensors of other classes and layouts: fakes go to the operators, others to torch."""
    tensors = call[:2] if call[2] is None else call[:3]
    if any(not isinstance(t, Tensor) for t in tensors):
        return _hand_over(f, *call)  # a TypeError, in torch's words
    if all(is_known(t) for t in tensors) or any(tensor_subclasses.served(t) for t in tensors):
        return _operator(f, *autocast(*call[:3]), *call[3:])
    odd = next(t for t in tensors if not is_known(t))
    if type(odd) in (Tensor, _Parameter):
        stats.handed_over(f"layout:{lower_call.layout_name(odd)}")
    else:
        stats.handed_over(f"subclass:{type(odd).__name__}")
    return _hand_over(f, *call)


def _odd_form(f: ConvFunction, input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """Numbers in a form that only torch's parser decides about: its error or its result."""
    made = _hand_over(f, input, weight, bias, *rest)
    odd = next(v for v in rest if not isinstance(v, str) and arguments.ints(v, f.ndims) is None)
    stats.handed_over(f"form:{type(odd).__name__}")
    return made


def requested(f: ConvFunction, stride: Any, padding: Any, output_padding: Any, dilation: Any,
              groups: Any) -> CallAttributes | None:
    """The request of these arguments, or None for a form that only torch's parser decides about."""
    key = (f, stride, padding, output_padding, dilation, groups)
    try:
        found = _requests.get(key)
    except TypeError:  # a list has no hash
        found = None
    # 1.0 and True equal 1 but are no sizes: equal keys do not imply equal arguments.
    if found is not None and _integral(stride) and _integral(padding) and _integral(
            output_padding) and _integral(dilation) and groups.__class__ is int:
        return found
    parsed = parse(f, stride, padding, output_padding, dilation, groups)
    if parsed is None:
        return None
    stride_, padding_, output_padding_, dilation_, groups_ = parsed
    found = request(f.name, f.ndims, stride_, padding_, dilation_, f.transposed, output_padding_,
                    groups_)
    try:
        if len(_requests) > route_cache.LIMIT:
            _requests.clear()
        _requests[key] = found
    except TypeError:
        pass
    return found


_only_int = frozenset((int,)).issuperset


def _integral(value: Any) -> bool:
    """For a value that equals a legal one: whether it is made of ints."""
    kind = value.__class__
    return kind is int or kind is str or (kind is tuple and _only_int(map(type, value)))


def parse(f: ConvFunction, stride: Any, padding: Any, output_padding: Any, dilation: Any,
          groups: Any) -> tuple[Any, Any, Any, Any, int] | None:
    """The same as torch's parser converts them; None where one has a form that is left to torch."""
    n = f.ndims
    parsed = (arguments.ints(stride, n),
              str.__str__(padding) if isinstance(padding, str) and not f.transposed
              else arguments.ints(padding, n),
              arguments.ints(output_padding, n), arguments.ints(dilation, n),
              arguments.integer(groups))
    return None if None in parsed else parsed  # type: ignore[return-value]


def check_bias(f: ConvFunction, input: Tensor, bias: Tensor | None, padding: Any) -> None:
    kept = arguments.is_wide(bias, input) and autocast_dtype(input) is not None
    if not f.transposed and not isinstance(padding, str) and not kept:
        arguments.check_bias_dtype(input, bias)


def is_bias_left_to_torch(f: ConvFunction, input: Tensor, bias: Tensor | None, padding: Any) -> bool:
    """Whether a bias has another type where torch looks at it no sooner than its kernels do: those of
    GPUs add it, those of the CPU refuse it."""
    return (bias is not None and bias.dtype != input.dtype and bias.device == input.device
            and (f.transposed or isinstance(padding, str))
            and not (arguments.is_wide(bias, input) and autocast_dtype(input) is not None))


def _mixed_types(f: ConvFunction, input: Tensor, weight: Tensor, bias: Tensor | None,
                 *rest: Any) -> Tensor:
    made = _hand_over(f, input, weight, bias, *rest)
    if not torch.compiler.is_compiling():
        stats.handed_over("dtype:bias")
    return made


def check_types(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """RuntimeError for a float32 bias outside autocast, which the operators accept."""
    arguments.check_tensors(input, weight, bias, wide=autocast_dtype(input) is not None)


# -- the ways that end in the registered operators -------------------------------------------------


def _operator(f: ConvFunction, input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any,
              padding: Any, output_padding: Any, dilation: Any, groups: Any) -> Tensor:
    rest = (stride, padding, output_padding, dilation, groups)
    parsed = parse(f, *rest)
    if parsed is None or input.dtype.is_complex:
        return _hand_over(f, input, weight, bias, *rest)
    stride, padding, output_padding, dilation, groups = parsed
    if _tracing():
        # Sizes are traced values here: leave looking at them to the operator, and "same" to torch.
        if padding == "same" or len(padding) > f.ndims or input.dim() != f.ndims + 2:
            return _hand_over(f, input, weight, bias, *rest)
        numbers = (stride, (0,) if padding == "valid" else padding, dilation, f.transposed)
        check_types(input, weight, bias)
        return library.call(input, weight, bias, *numbers, output_padding, groups)
    check_bias(f, input, bias, padding)
    # Traced on the CPU, the refusal would only come when the graph runs.
    if input.device.type != "cpu" and is_bias_left_to_torch(f, input, bias, padding):
        return _mixed_types(f, input, weight, bias, *rest)
    is_batched = arguments.batched(f.name, f.ndims, input.shape)
    x = input if is_batched else input.unsqueeze(0)
    p: Params = arguments.resolve(
        x.shape, weight.shape, None if bias is None else bias.shape, stride, padding, dilation,
        f.transposed, output_padding, groups)
    check_types(x, weight, bias)
    y = library.called(x, weight, bias, *p)
    return y if is_batched else y.squeeze(0)


def _compiled(f: ConvFunction, input: Any, weight: Any, bias: Any, *rest: Any) -> Tensor:
    """Inside torch.compile or export: no graph break on this way."""
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if (_transforms() or forward_ad._current_level >= 0
            or not all(isinstance(t, Tensor) for t in tensors)):
        return _hand_over(f, input, weight, bias, *rest)
    return _operator(f, *traced_autocast(input, weight, bias), *rest)
