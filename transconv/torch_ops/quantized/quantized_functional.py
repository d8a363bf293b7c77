"""Convolutions of quantised tensors: integers and 8-bit floats with scales and zero points.

    real      = sum (input - input_zero_point) * (weight - weight_zero_point) * input_scale*weight_scale
                + bias, then the activation
    result    = real / output_scale + output_zero_point, rounded to nearest even and saturated

Padding is the zero point of the input (the real number 0), and so is what lies between the elements of
a transposed convolution's input. These functions have no gradients. What has no kernel is computed by
torch in wider types, as far as ``transconv.config.fallback`` allows. A kind of call that was seen
before is found by its key, like those of the other functions (calls/route_cache.py), and by its weight:
an entry is for one kind of call: the caller's numbers and quantities that are no tensors by identity,
the properties of all tensors by torch's guard. Calls whose input is quantised first have entries of
their own, which start both kernels.

``serve_torchao`` computes convolutions of torchao's 8-bit float tensors, too. torchao exchanges the weight
of a convolution for a ``Float8Tensor``: its bytes, their scale, and how the input is to be quantised.
Which function computes an operator of such a tensor is a table of its class, which others may write to
(``Float8Tensor.implements``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from transconv.calls.guard import CallCache, CallGuard, Part, StartableKernel, check_of, written
from transconv.runtime import torch_internals
from transconv.support import Unsupported
from transconv.torch_ops import arguments, functional
from transconv.torch_ops.calls import call_attributes, lower_call
from transconv.torch_ops.calls.call_attributes import ConvFunction
from transconv.torch_ops.calls.call_entries import NUMBERS, only_on, switches
from transconv.torch_ops.conversion import inference
from transconv.torch_ops.functional import Padding, Sizes
from transconv.torch_ops.quantized import input_quantization, qparams, quantized_route
from transconv.torch_ops.quantized.input_quantization import are_known, quantise

if TYPE_CHECKING:
    from transconv.torch_ops.calls.lower_call import Flags
    from transconv.torch_ops.calls.route import ConvCall

Tensor = torch.Tensor
Call = Callable[..., Tensor]


class Real(NamedTuple):
    """An input that is quantised first, and what starts the kernel that does it: a function of the input,
    its scale, its zero point if it has one, and the result."""

    input: Tensor
    begin: Callable[..., None] | None


CALLS, OF_REALS = CallCache(), CallCache()  # the latter: whose inputs are quantised first
find, find_real = CALLS.find, OF_REALS.find
inference.on_change(CALLS.drop)
inference.on_change(OF_REALS.drop)


def note(
    function: Any,
    general: Call,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    numbers: tuple[Any, ...],
    given: dict[str, Any],
    route: ConvCall,
    flags: Flags,
    aligned: bool,
    real: Real | None,
) -> None:
    """A call with a known route took the slow path: after a few, make an entry for its kind. ``x``: its
    input, quantised from ``real``, if that is given. A route that waits for a kernel is asked at each
    call."""
    if route.over is not None or any(isinstance(n, list) for n in numbers):
        return  # lists can change under their identity
    calls = CALLS if real is None else OF_REALS
    place = calls.due(id(weight))
    first = x if real is None else real.input
    tensors = [t for t in (first, weight, *given.values(), bias) if isinstance(t, Tensor)]
    if not place or any(t.requires_grad for t in tensors):
        return
    if real is not None and (real.begin is None or route.start is None or not aligned):
        return
    check = check_of(*tensors)
    if check is not None:
        found = CallGuard(check, switches(flags, x.dtype, route), aligned, only_on(route))
        others = calls.others(id(weight), place, general)
        made = entry(found, others, function, numbers, x, bias is not None, given, route, real)
        calls.keep(id(weight), made)


def entry(
    found: CallGuard,
    others: Call,
    function: Any,
    numbers: tuple[Any, ...],
    x: Tensor,
    biased: bool,
    given: dict[str, Any],
    route: ConvCall,
    real: Real | None,
) -> Call:
    """The entry of calls like one, with quantities ``given`` by name."""
    names = {"input": "x", "weight": "w", "bias": "b", **{n: f"v{at}" for at, n in enumerate(given)}}
    order = [
        "input",
        "weight",
        *(n for n, v in given.items() if isinstance(v, Tensor)),
        *["bias"] * biased,
    ]
    assert route.epilogue is not None
    start, picked = route.start, route.epilogue.picks
    fixed = {names[n]: v for n, v in given.items() if not isinstance(v, Tensor)}
    tests = [*found.tests([names[n] for n in order]), *(f"{v} is same_{v}" for v in fixed)]
    known = {f"same_{n}": function if at < 0 else numbers[at] for n, at in NUMBERS.items()} | {
        f"same_{v}": value for v, value in fixed.items()
    }
    if picked is not None and any(n == "input_zero_sums" for n, _ in picked):
        tests.append(f"are_known(w, {names['input_zero_point']}, {names['input_zero_sums']})")
    first, lines = "x", list[Part]()
    if real is not None and real.begin is not None:
        read = [names[n] for n in ("input_scale", "input_zero_point") if n in given]
        quantises = StartableKernel(
            real.begin, ("x", *read), ("y",), ((tuple(x.shape), x.stride(), x.dtype),)
        )
        first, lines = "y", [*quantises.lines(0)]
        known |= {"empty": torch_internals.quickest(), **quantises.known(0)}
    if start is None or picked is None:
        picked = ()
        lines.append(f"return run({first}, w, b, q)")
    else:
        operands = [names[n] if t is None else f"number{at}" for at, (n, t) in enumerate(picked)]
        lines.append(f"return start({', '.join([first, 'w', *operands])})")
    return written(
        "call(f, x, w, b, s, p, o, d, g, q)",
        [
            [*(f"{n} is same_{n}" for n in NUMBERS), f"b is {'not ' * biased}None", "tuple(q) == names"],
            f"[{', '.join(names[n] for n in given)}] = q.values()",
            tests,
            *lines,
        ],
        "return others(f, x, w, b, s, p, o, d, g, q)",
        {
            **known,
            **found.known(),
            "others": others,
            "names": tuple(given),
            "start": start,
            "run": route.forward,
            "are_known": are_known,
            **{f"number{at}": t for at, (_, t) in enumerate(picked) if t is not None},
        },
    )


# Compilers see one constant here, and only the slow path.
_compiling = torch.compiler.is_dynamo_compiling
_seen: Callable[[int, Callable[..., Tensor]], Callable[..., Tensor]] = find


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    **given: Any,
) -> Tensor:
    """The convolution of quantised tensors (mb, ic, iw) and (oc, ic/groups, kw); see ``conv2d``."""
    return _way(weight)(_CONV1D, input, weight, bias, stride, padding, 0, dilation, groups, given)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    **given: Any,
) -> Tensor:
    """The convolution of quantised tensors (mb, ic, ih, iw) and (oc, ic/groups, kh, kw): int8, uint8,
    float8_e4m3fn and float8_e5m2, both integers or both floats. ``bias`` (oc,) is in real numbers. Other
    arguments are torch.nn.functional.conv2d's, and by name those of ``Quantities``. Raises TypeError for
    an unknown name, TensorError and Unsupported, which name the argument, before anything runs."""
    return _way(weight)(_CONV2D, input, weight, bias, stride, padding, 0, dilation, groups, given)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    **given: Any,
) -> Tensor:
    """The convolution of quantised tensors (mb, ic, id, ih, iw) and (oc, ic/groups, kd, kh, kw); see
    ``conv2d``."""
    return _way(weight)(_CONV3D, input, weight, bias, stride, padding, 0, dilation, groups, given)


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    **given: Any,
) -> Tensor:
    """The transposed convolution of quantised tensors (mb, ic, iw) and (ic, oc/groups, kw); see
    ``conv2d``."""
    return _way(weight)(
        _CONV_TRANSPOSE1D, input, weight, bias, stride, padding, output_padding, dilation, groups, given
    )


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    **given: Any,
) -> Tensor:
    """The transposed convolution of quantised tensors (mb, ic, ih, iw) and (ic, oc/groups, kh, kw); see
    ``conv2d``."""
    return _way(weight)(
        _CONV_TRANSPOSE2D, input, weight, bias, stride, padding, output_padding, dilation, groups, given
    )


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    **given: Any,
) -> Tensor:
    """The transposed convolution of quantised tensors (mb, ic, id, ih, iw) and (ic, oc/groups, kd, kh,
    kw); see ``conv2d``."""
    return _way(weight)(
        _CONV_TRANSPOSE3D, input, weight, bias, stride, padding, output_padding, dilation, groups, given
    )


def _way(weight: Any) -> Callable[..., Tensor]:
    """The way of a call that was seen before, or the general one."""
    return _general if _compiling() else _seen(id(weight), _general)


def _general(
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
    again: bool = True,
    real: Real | None = None,
) -> Tensor:
    """``again``: whether other calls may have the same weight; ``real``: what was quantised."""
    if _compiling():
        return quantized_route.call(
            f, input, weight, bias, stride, padding, output_padding, dilation, groups, given
        )
    req = call_attributes.requested(f, stride, padding, output_padding, dilation, groups)
    if req is None:
        raise qparams.wrong_number(f, stride, padding, output_padding, dilation, groups)
    if not all(isinstance(t, Tensor) for t in (input, weight, input if bias is None else bias)):
        said = qparams.Quantities.of(f.name, given)
        qparams.check(f.name, f.ndims, input, weight, bias, said)
    if torch.is_grad_enabled():
        qparams.refuse_gradients(f.name, input, weight, bias)
    if not (call_attributes.is_plain(input) and call_attributes.is_plain(weight)) or input.is_meta:
        return quantized_route.alone(req, input, weight, bias, given)
    input, weight = arguments.spelled_out(input), arguments.spelled_out(weight)
    if (moved := arguments.in_any_batch(input, weight)) is not input:
        numbers = (stride, padding, output_padding, dilation, groups)
        return _general(f, moved, weight, bias, *numbers, given, False)
    found = quantized_route.find(req, input, weight, bias, given)
    route = found.route
    if found.known and again:
        numbers = (stride, padding, output_padding, dilation, groups)
        way = _of_reals if real else _general
        note(f, way, input, weight, bias, numbers, given, route, found.flags, found.aligned, real)
    route.lay_out(weight)
    return route.forward(input, weight, bias, given)


def of_reals(
    f: ConvFunction,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    numbers: tuple[Any, ...],
    given: dict[str, Any],
) -> Tensor:
    """A call whose input is quantised first, to the weight's type, with its ``input_scale`` and
    ``input_zero_point``; ``numbers`` in the order of the public function."""
    way = _of_reals if _compiling() else find_real(id(weight), _of_reals)
    return way(f, input, weight, bias, *f.taken(numbers), given)


def _of_reals(
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
    zero, held = given.get("input_zero_point"), lower_call.RESULTS[weight.dtype]
    whole = quantise(input, given["input_scale"], zero, held)
    real = None if _compiling() else Real(input, input_quantization.starter(input, zero, held))
    return _general(
        f, whole, weight, bias, stride, padding, output_padding, dilation, groups, given, real=real
    )


def of_new_weight(
    f: ConvFunction,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    numbers: tuple[Any, ...],
    given: dict[str, Any],
) -> Tensor:
    """A call whose weight was made for it alone: nothing is remembered of that. ``numbers`` in the order
    of the public function."""
    return _general(f, input, weight, bias, *f.taken(numbers), given, again=False)


def _function(name: str, public: Callable[..., Tensor]) -> ConvFunction:
    aten = getattr(torch.nn.functional, name)
    public.__signature__ = qparams.signature_of(public)  # type: ignore[attr-defined]
    said = f"transconv.quantized.{name}"
    return ConvFunction(said, int(name[-2]), "transpose" in name, aten, _general, public)


_CONV1D, _CONV2D, _CONV3D = (_function(f.__name__, f) for f in (conv1d, conv2d, conv3d))
_CONV_TRANSPOSE1D, _CONV_TRANSPOSE2D, _CONV_TRANSPOSE3D = (
    _function(f.__name__, f) for f in (conv_transpose1d, conv_transpose2d, conv_transpose3d)
)

FUNCTIONS = {
    (f.ndims, f.transposed): f
    for f in (_CONV1D, _CONV2D, _CONV3D, _CONV_TRANSPOSE1D, _CONV_TRANSPOSE2D, _CONV_TRANSPOSE3D)
}
"""The functions by their number of spatial dimensions, and whether they are transposed."""


_aten = torch.ops.aten
_OPERATORS: tuple[Any, ...] = (
    _aten.convolution.default,
    *(op.default for op in (_aten.conv1d, _aten.conv2d, _aten.conv3d)),
    _aten.conv_transpose1d.default,
    _aten.conv_transpose2d.input,
    _aten.conv_transpose3d.input,
)


def serve_torchao() -> None:
    """Let transconv compute the convolutions of torchao's ``Float8Tensor`` from now on.

    With this, ``torchao.quantize_(model, Float8DynamicActivationFloat8WeightConfig(PerTensor()), ...)``
    serves convolutions on every GPU of transconv's: of 1 to 3 dimensions, grouped, transposed and with a
    bias. The weight has one scale, or one for each output channel; its ``mm_config`` says whether sums
    stay in the matrix unit. A weight whose inputs are not quantised is widened. Such convolutions have no
    gradients. ImportError without torchao (``pip install "transconv[torchao]"``)."""
    try:
        from torchao.quantization import Float8Tensor
    except ImportError as error:
        raise ImportError(
            f'serve_torchao needs torchao 0.13 or later (pip install "transconv[torchao]"): {error}'
        ) from error
    Float8Tensor.implements(list(_OPERATORS))(_convolution)


def _convolution(
    operator: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Tensor:
    """One operator of a tensor of torchao's: what its class calls."""
    names = [argument.name for argument in operator._schema.arguments]
    call = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
    input, weight, bias = call["input"], call["weight"], call.get("bias")
    if not hasattr(weight, "qdata"):
        raise Unsupported(
            "a convolution of torchao's 8-bit floats: weight: expected a Float8Tensor "
            "beside an input of that class, got a plain tensor"
        )
    f = FUNCTIONS[weight.dim() - 2, call.get("transposed", "transpose" in operator.name())]
    usual = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
    numbers: Any = tuple(call.get(name, n) for name, n in usual.items())
    with torch.no_grad():
        if weight.act_quant_kwargs is None and not hasattr(input, "qdata"):
            return _widened(f, input, weight.dequantize(), bias, numbers)
        return _quantised(f, input, weight, bias, numbers)


def _quantised(
    f: call_attributes.ConvFunction,
    input: Any,
    weight: Any,
    bias: Tensor | None,
    numbers: tuple[Any, Any, Any, Any, Any],
) -> Tensor:
    result = input.dtype
    if not hasattr(input, "qdata"):
        how = weight.act_quant_kwargs
        bounds = how.hp_value_lb, how.hp_value_ub
        kept = how.float8_dtype, how.granularity, how.mm_config, *bounds, how.kernel_preference
        input = type(weight).from_hp(input, *kept)
    given = {
        "input_scale": _scale(f, "input", input, 1),
        "weight_scale": _scale(f, "weight", weight, 0 if not f.transposed else 1),
        "output_dtype": result,
        "use_fast_accum": bool(getattr(weight.mm_config, "use_fast_accum", False)),
    }
    x, w = input.qdata, weight.qdata
    plain = call_attributes.is_plain(x) and call_attributes.is_plain(w)
    compute = f.general if plain else quantized_route.call
    return compute(f, x, w, bias, *numbers, given)


def _scale(f: call_attributes.ConvFunction, name: str, tensor: Any, axis: int) -> Tensor:
    """The scale of all elements (1), or of the channels on ``axis`` (channels,), in 32-bit floats."""
    scale: Tensor = tensor.scale
    if scale.numel() != 1 and (name == "input" or scale.numel() != scale.shape[axis]):
        most = "one scale" if name == "input" else "one scale, or one for each output channel"
        raise Unsupported(
            f"{f.name} of torchao's Float8Tensor: {name}: expected {most}, got scales of "
            f"shape {tuple(scale.shape)}"
        )
    return scale.reshape(-1).float()


def _widened(
    f: call_attributes.ConvFunction,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    numbers: tuple[Any, ...],
) -> Tensor:
    """The convolution of a weight alone in 8 bits, in the input's type."""
    wide = getattr(functional, f.name.rpartition(".")[2])
    result: Tensor = wide(input, weight, bias, *f.ordered(*numbers))
    return result
