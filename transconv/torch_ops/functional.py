"""The six public convolution functions, with the signatures of torch.nn.functional, and where their calls
go.

A call that was seen before is found by its weight (calls/call_entries.py). Of others, plain eager tensors
take the fast path: one lookup, one launch. The rest is passed on: `__torch_function__` to its handler,
functorch transforms and dual numbers to aten, so that no derivative is dropped; compilers, tracers,
dispatch modes and fake tensors to the registered operators.

Eager calls bypass the operators in autograd, too: functions of their own launch the same kernels in a
fraction of the host time. A backward pass that is itself differentiated, compiled or traced uses the
operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from transconv.calls import route_cache, stats
from transconv.calls.autograd import Gradients, class_of, forward_of, start_backward
from transconv.calls.guard import is_batched, means_more
from transconv.calls.settings import settings
from transconv.calls.size_policy import policy
from transconv.runtime import torch_internals
from transconv.torch_ops import arguments, operators, tensor_subclasses
from transconv.torch_ops.arguments import Params, autocast, autocast_dtype, spelled_out, traced_autocast
from transconv.torch_ops.calls import call_entries, layer_keys, lower_call, precompile, select_impl
from transconv.torch_ops.calls.call_attributes import (
    CallAttributes,
    ConvFunction,
    _Parameter,
    check_bias,
    check_types,
    is_bias_left_to_torch,
    is_known,
    is_plain,
    parse,
    requested,
)
from transconv.torch_ops.calls.layer_keys import layer_of
from transconv.torch_ops.calls.route import ConvCall
from transconv.torch_ops.conversion import aten_convolutions

Tensor = torch.Tensor
Sizes = int | Sequence[int]
Padding = Sizes | str  # "same" or "valid", too

READ_OFTEN = 16
"""How often each element of a gradient is read, from where on a copy of it costs less than what a kernel
loses that cannot read many of them at once."""

# Compilers see one constant here, and only the slow path.
_compiling = torch.compiler.is_dynamo_compiling
_seen = call_entries.find
handle: Any = handle_torch_function
_any_autocast: Callable[[], bool] = torch_internals.any_autocast
_modes: Callable[[], int] = torch_internals.dispatch_modes
_tracing: Callable[[], Any] = torch_internals.tracing_state
_transforms: Callable[[], bool] = torch_internals.transforms


class ConvolutionFunction(torch.autograd.Function):
    """``apply(input, weight, bias, route)``, for calls that have no function of their own
    (``function_of``): a class for each new size would cost more than its call."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, route: ConvCall) -> Tensor:
        ctx.to_save = (input, weight)  # as save_for_backward does
        ctx.route = route
        return route.forward(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        input, weight = ctx.saved_tensors
        wanted, route = ctx.needs_input_grad[:3], ctx.route
        entry = None if _compiling() else route.gradients.get(wanted)
        found = entry and entry(grad, input, weight)
        return *(found or gradients(route, wanted, grad, input, weight, wanted)), None


class CastConvolutionFunction(torch.autograd.Function):
    """The autograd function of calls under autocast whose casts are made: ``apply(input, weight, bias,
    cast weight, cast bias, route)``. Weight and bias are as the caller gave them, their casts carry no
    history: autograd's engine casts the gradients back, and a call costs one node instead of three."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cast: Tensor,
        cast_bias: Tensor | None,
        route: ConvCall,
    ) -> Tensor:
        ctx.save_for_backward(input, cast, weight)
        ctx.route = route
        return route.forward(input, cast, cast_bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        input, cast, weight = ctx.saved_tensors
        wanted, route = ctx.needs_input_grad[:3], ctx.route
        entry = None if _compiling() else route.gradients.get(wanted)
        found = entry and entry(grad, input, cast)
        found = found or gradients(route, wanted, grad, input, _history(cast, weight), wanted)
        return *found, None, None, None


def _history(cast: Tensor, weight: Tensor) -> Tensor:
    """The cast of a weight; made anew where its own derivatives are recorded."""
    return weight.to(cast.dtype) if torch.is_grad_enabled() else cast


for _kind in (ConvolutionFunction, CastConvolutionFunction):
    start_backward(_kind, _kind.backward)
# Function.apply also looks for functorch transforms; the callers here have checked that.
apply: Callable[..., Tensor] = super(torch.autograd.Function, ConvolutionFunction).apply
apply_cast: Callable[..., Tensor] = super(torch.autograd.Function, CastConvolutionFunction).apply


def gradients(
    route: ConvCall,
    wanted: tuple[bool, ...],
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    mask: tuple[bool, ...],
) -> Gradients:
    """Gradients of input, weight and bias by the slow path; None where ``mask`` is False. Recorded as
    the ``wanted`` of the route."""
    params = route.params
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or _modes()
        or _transforms()
        or is_batched(grad)
    ):
        found = operators.convolution_backward(grad, input, weight, *params, mask)
        return tuple(t if on else None for t, on in zip(found, mask, strict=True))
    if forward_ad._current_level >= 0:  # the gradient may be a dual number
        stats.handed_over("transform:forward_ad")
        return aten_convolutions.aten_backward(grad, input, weight, params, mask, dual=True)
    copies = settings.varies or settings.invariant
    grad = _dense(spelled_out(grad), input, weight) if copies else spelled_out(grad)
    grad = arguments.in_any_place(grad)
    made, flags, aligned, key = select_impl.backward_routes(
        params, grad, input, weight, mask, settings.mode
    )
    call_entries.note_backward(route, wanted, grad, input, weight, made, flags, aligned, key)
    return made.run(grad, input, weight)


def _dense(grad: Tensor, input: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a result; a copy if it is expanded or has gaps, and a kernel of its own would be
    slower than the copy and a kernel that other calls use: where its elements are read often. In invariant
    mode there are no others."""
    last = arguments.channels_last_result(input, weight)
    is_read_often = settings.invariant or weight.numel() >= READ_OFTEN * grad.shape[1]
    if not is_read_often or not arguments.has_gaps(grad, last):
        return grad
    return arguments.with_result_strides(grad, last)


def function_of(
    route: ConvCall,
    biased: bool,
    cast: torch.dtype | None = None,
    through: Callable[..., Tensor] | None = None,
    bound: bool = True,
) -> Callable[..., Tensor]:
    """``apply`` of an autograd function for one route, of the tensors that it takes in their order: input,
    weight, a bias if ``biased``, and a residual where its epilogue reads one. With ``cast`` it casts
    weight and bias to this type, as CastConvolutionFunction has them cast. ``through``: the gradient of
    the sums from that of the result, and from the result, which is then saved; ``bound``: for the device
    that ``route.start`` is for."""
    made = route.functions.get((cast, bound))
    if made is None:
        behind = route.epilogue
        keeps = behind is not None and bool(behind.activation)
        operands = ["x", "w", *["b"] * biased, *["r"] * (behind is not None and "res" in behind.names)]
        run = route.bound() if bound and cast is None else route.of_given()
        forward = (
            forward_of(run, operands, ("x", "w", *["made"] * keeps))
            if cast is None
            else forward_of(run, operands, ("x", "cast_w", "w"), ("w", *["b"] * biased), cast)
        )
        name = "ConvolutionFunction" if behind is None else "FusedFunction"
        backward = (
            _backward(route, biased) if through is None else _backward_through(route, biased, through)
        )
        made = route.functions[cast, bound] = class_of(forward, backward, name)
    return made


def _backward(route: ConvCall, biased: bool) -> Callable[..., Gradients]:
    known = route.gradients

    def backward(ctx: Any, grad: Tensor) -> Gradients:
        saved = ctx.saved_tensors  # input, the weight as it was used, and the weight before its cast
        wanted = ctx.needs_input_grad
        if not _compiling():
            entry = known.get(wanted)
            if entry is not None:
                found = entry(grad, saved[0], saved[1])
                if found is not None:
                    return found
        weight = saved[1] if len(saved) == 2 else _history(saved[1], saved[2])
        # Further returned values are None, which autograd allows.
        return gradients(route, wanted, grad, saved[0], weight, wanted if biased else (*wanted, False))

    return backward


def _backward_through(
    route: ConvCall, biased: bool, through: Callable[..., Tensor]
) -> Callable[..., Gradients]:
    known = route.gradients

    def backward(ctx: Any, grad: Tensor) -> Gradients:
        input, weight, *kept = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        mask = (wanted[0], wanted[1], biased and wanted[2])
        of_sums = through(grad, *kept)
        entry = None if _compiling() else known.get(mask)
        found = None if entry is None else entry(of_sums, input, weight)
        if found is None:
            found = (
                (None, None, None)
                if not any(mask)
                else gradients(route, mask, of_sums, input, weight, mask)
            )
        # What is returned beyond the arguments has to be None.
        return *found[: 2 + biased], of_sums if wanted[-1] and len(wanted) == 3 + biased else None

    return backward


def _hand_over(f: ConvFunction, input: Any, weight: Any, bias: Any, *numbers: Any) -> Tensor:
    """torch's own function, with unchanged arguments."""
    return f.aten(input, weight, bias, *f.ordered(*numbers))


def dispatch(f: ConvFunction, input: Any, weight: Any, bias: Any, *numbers: Any) -> Tensor:
    """Pass one call on to its implementation. The cheapest tests come first. ``numbers``: stride, padding,
    output padding, dilation and groups."""
    if torch.compiler.is_compiling():
        return _compiled(f, input, weight, bias, *numbers)
    if has_torch_function((input, weight, bias)):
        seen: Tensor = handle(f.public, (input, weight, bias), input, weight, bias, *f.ordered(*numbers))
        return seen
    if _transforms():
        _note_transform("transform:functorch", input)
        return _hand_over(f, input, weight, bias, *numbers)
    if forward_ad._current_level >= 0:
        _note_transform("transform:forward_ad", input)
        return _hand_over(f, input, weight, bias, *numbers)
    if not (is_plain(input) and is_plain(weight) and (bias is None or is_plain(bias))):
        return _unusual(f, input, weight, bias, *numbers)
    if (
        input.is_neg()
        or weight.is_neg()
        or input._is_zerotensor()
        or weight._is_zerotensor()
        or (bias is not None and means_more(bias))
    ):
        input, weight = arguments.spelled_out(input), arguments.spelled_out(weight)
        bias = None if bias is None else arguments.spelled_out(bias)
    given, cast = (input, weight, bias, None), None
    if _any_autocast():
        cast = autocast_dtype(input)
        input, weight, bias = autocast(input, weight, bias)
    if _modes() or _tracing() or input.is_meta:
        return _operator(f, input, weight, bias, *numbers)

    req, padding = requested(f, *numbers), numbers[1]
    if req is None:
        return _odd_form(f, input, weight, bias, *numbers)
    key, flags, aligned = layer_keys.forward_key(req, input, weight, bias)
    route = route_cache.find(key)
    met = route is not None
    if route is None:
        if input.dtype.is_complex:
            stats.handed_over(f"dtype:{str(input.dtype).removeprefix('torch.')}")
            return _hand_over(f, input, weight, bias, *numbers)  # in real parts, by torch
        check_bias(f, input, bias, padding)
        if is_bias_left_to_torch(f, input, bias, padding):
            return _mixed_types(f, input, weight, bias, *numbers)
        if not arguments.batched(f.name, f.ndims, input.shape):
            return dispatch(f, input.unsqueeze(0), weight, bias, *numbers).squeeze(0)
        if (moved := arguments.in_any_batch(input, weight)) is not input:
            return dispatch(f, moved, weight, bias, *numbers)
        if settings.varies and _is_copied(req, input, weight, bias):
            dense = arguments.with_result_strides(input, arguments.channels_last_result(input, weight))
            return dispatch(f, dense, weight, bias, *numbers)
        precompile.layers(given[1], input, weight, flags, settings.mode)
        route, layer = select_impl.add_sized(key, req, input, weight, bias, flags, aligned, settings.mode)
        if layer is not None:
            call_entries.note_layer(
                (apply, apply_cast),
                f,
                given,
                (input, weight, bias, None),
                numbers,
                route,
                layer,
                flags,
                aligned,
                cast,
            )
    else:
        if not route.trains:
            select_impl.trained(route, input, weight, flags, aligned, settings.mode)
        call = f, given, (input, weight, bias, None), numbers, route
        if not call_entries.note_by_key((apply, apply_cast), *call, key, flags, aligned, cast):
            call_entries.note(function_of, *call, flags, aligned, cast)
    if (
        route.over is not None
        and route.compiled is None
        and (met or route.asks_own)  # the gradients of a first call ask for kernels of any size
        and input.device.type not in aten_convolutions.replacement.devices
    ):
        route.calls += 1  # torch's own call, with its gradients, costs the least until the kernel is there
        return _hand_over(f, *given[:3], *numbers)
    route.lay_out(weight)
    if torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        if weight is given[1] and bias is given[2]:
            return apply(input, weight, bias, route)
        return apply_cast(input, *given[1:3], weight, bias, route)
    result: Tensor = route.forward(input, weight, bias)
    return result


def _is_copied(req: CallAttributes, x: Tensor, w: Tensor, b: Tensor | None) -> bool:
    """Whether kernels for any size are to answer a call through a copy of an input with gaps: at a size
    that is not the layer's first one."""
    if not x.numel() or not arguments.has_gaps(x, arguments.channels_last_result(x, w)):
        return False
    params = req.resolve(x, w, b)
    src = arguments.output_shape(x.shape, w.shape, params) if params.transposed else x.shape
    return policy.is_further(layer_of(params, x.dtype, w.shape, x.device), (src[0], *src[2:]))


def _note_transform(reason: str, input: Any) -> None:
    """Count a call that goes to aten because of a transform, unless `enable` replaced aten's kernel."""
    if getattr(getattr(input, "device", None), "type", "") not in aten_convolutions.replacement.devices:
        stats.handed_over(reason)


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


def _odd_form(
    f: ConvFunction, input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any
) -> Tensor:
    """Numbers in a form that only torch's parser decides about: its error or its result."""
    made = _hand_over(f, input, weight, bias, *numbers)
    odd = next(v for v in numbers if not isinstance(v, str) and arguments.ints(v, f.ndims) is None)
    stats.handed_over(f"form:{type(odd).__name__}")
    return made


def _mixed_types(
    f: ConvFunction, input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any
) -> Tensor:
    made = _hand_over(f, input, weight, bias, *numbers)
    if not torch.compiler.is_compiling():
        stats.handed_over("dtype:bias")
    return made


# -- the ways that end in the registered operators -------------------------------------------------


def _operator(
    f: ConvFunction, input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any
) -> Tensor:
    parsed = parse(f, *numbers)
    if parsed is None or input.dtype.is_complex:
        return _hand_over(f, input, weight, bias, *numbers)
    stride, padding, output_padding, dilation, groups = parsed
    if _tracing():
        # Sizes are traced values here: leave looking at them to the operator, and "same" to torch.
        if padding == "same" or len(padding) > f.ndims or input.dim() != f.ndims + 2:
            return _hand_over(f, input, weight, bias, *numbers)
        check_types(input, weight, bias)
        padding = (0,) if padding == "valid" else padding
        return operators.convolution(
            input, weight, bias, stride, padding, dilation, f.transposed, output_padding, groups
        )
    check_bias(f, input, bias, padding)
    # Traced on the CPU, the refusal would only come when the graph runs.
    if input.device.type != "cpu" and is_bias_left_to_torch(f, input, bias, padding):
        return _mixed_types(f, input, weight, bias, *numbers)
    is_batched = arguments.batched(f.name, f.ndims, input.shape)
    x = input if is_batched else input.unsqueeze(0)
    p: Params = arguments.resolve_call(
        x, weight, bias, stride, padding, dilation, f.transposed, output_padding, groups
    )
    check_types(x, weight, bias)
    y = operators.called(x, weight, bias, *p)
    return y if is_batched else y.squeeze(0)


def _compiled(f: ConvFunction, input: Any, weight: Any, bias: Any, *numbers: Any) -> Tensor:
    """Inside torch.compile or export: no graph break on this way."""
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if _transforms() or forward_ad._current_level >= 0 or not all(isinstance(t, Tensor) for t in tensors):
        return _hand_over(f, input, weight, bias, *numbers)
    return _operator(f, *traced_autocast(input, weight, bias), *numbers)


CONV1D = ConvFunction("conv1d", 1, False, F.conv1d, dispatch)
CONV2D = ConvFunction("conv2d", 2, False, F.conv2d, dispatch)
CONV3D = ConvFunction("conv3d", 3, False, F.conv3d, dispatch)
CONV_TRANSPOSE1D = ConvFunction("conv_transpose1d", 1, True, F.conv_transpose1d, dispatch)
CONV_TRANSPOSE2D = ConvFunction("conv_transpose2d", 2, True, F.conv_transpose2d, dispatch)
CONV_TRANSPOSE3D = ConvFunction("conv_transpose3d", 3, True, F.conv_transpose3d, dispatch)


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """torch.nn.functional.conv1d. input (mb, ic, iw) or (ic, iw), weight (oc, ic/groups, kw), bias
    (oc,); result (mb, oc, ow). f16, bf16, f32 and f64 have generated kernels, the rest is torch's.
    Raises what torch raises: TypeError for forms, RuntimeError for sizes, types and devices."""
    call = dispatch if _compiling() else _seen(id(weight), dispatch)
    return call(CONV1D, input, weight, bias, stride, padding, 0, dilation, groups)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """torch.nn.functional.conv2d. input (mb, ic, ih, iw) or (ic, ih, iw), weight
    (oc, ic/groups, kh, kw), bias (oc,); result (mb, oc, oh, ow), channels_last if input or weight
    is. f16, bf16, f32 and f64 have generated kernels, the rest is torch's. Raises what torch
    raises: TypeError for forms, RuntimeError for sizes, types and devices."""
    call = dispatch if _compiling() else _seen(id(weight), dispatch)
    return call(CONV2D, input, weight, bias, stride, padding, 0, dilation, groups)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """torch.nn.functional.conv3d. input (mb, ic, id, ih, iw) or without mb, weight
    (oc, ic/groups, kd, kh, kw), bias (oc,); result (mb, oc, od, oh, ow), channels_last_3d if input
    or weight is. Dtypes and errors as conv2d."""
    call = dispatch if _compiling() else _seen(id(weight), dispatch)
    return call(CONV3D, input, weight, bias, stride, padding, 0, dilation, groups)


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    """torch.nn.functional.conv_transpose1d. input (mb, ic, iw) or (ic, iw), weight (ic, oc/groups, kw),
    bias (oc,); result (mb, oc, ow) with ow = (iw - 1)*stride - 2*padding + dilation*(kw - 1) +
    output_padding + 1. Dtypes and errors as conv1d."""
    call = dispatch if _compiling() else _seen(id(weight), dispatch)
    return call(CONV_TRANSPOSE1D, input, weight, bias, stride, padding, output_padding, dilation, groups)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    """torch.nn.functional.conv_transpose2d. input (mb, ic, ih, iw) or (ic, ih, iw), weight (ic, oc/groups,
    kh, kw), bias (oc,); sizes as conv_transpose1d, layout, dtypes and errors as conv2d."""
    call = dispatch if _compiling() else _seen(id(weight), dispatch)
    return call(CONV_TRANSPOSE2D, input, weight, bias, stride, padding, output_padding, dilation, groups)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    """torch.nn.functional.conv_transpose3d. input (mb, ic, id, ih, iw) or without mb, weight (ic,
    oc/groups, kd, kh, kw), bias (oc,); sizes as conv_transpose1d, layout, dtypes and errors as conv3d."""
    call = dispatch if _compiling() else _seen(id(weight), dispatch)
    return call(CONV_TRANSPOSE3D, input, weight, bias, stride, padding, output_padding, dilation, groups)


FUNCTIONS = {
    (f.ndims, f.transposed): f
    for f in (CONV1D, CONV2D, CONV3D, CONV_TRANSPOSE1D, CONV_TRANSPOSE2D, CONV_TRANSPOSE3D)
}
"""The functions by their number of spatial dimensions, and whether they are transposed."""
for _function in FUNCTIONS.values():  # handlers of `__torch_function__` get these names
    _function.public = globals()[_function.name]
