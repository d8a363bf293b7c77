"""The registered operators: their schemas, the numbers of a call as one text, what registers a kernel, and
the derivatives.

    transconv::convolution             one operator for 1d, 2d, 3d, transposed or not
    transconv::convolution_backward    its gradients, any subset
    transconv::fused_convolution       activation(convolution + bias + residual)
    transconv::traced_convolution      f(convolution + bias, *operands)
    transconv::quantized_convolution   of integers and floats of 8 bits, with scales and zero points
    transconv::fwd                     activation(convolution + bias + residual)
    transconv::bwd_d, transconv::bwd_w the gradient of the input, of the weight

Compiled graphs contain the last three, which compute at once and have no derivatives. Derivatives in
Python cost torch's dispatcher more than a launch, and each list of numbers a good part of one, at every
call of a compiled graph. So the differentiable operators turn into these three while a graph is traced:
no derivatives, and the numbers in one text, such as ``stride=2x2 padding=1x1 groups=4 relu``. torch keeps
compiled graphs on disk, longer than we keep a version: after a release, an operator's schema never
changes; what needs another gets another name. A quantity of ``quantized_convolution`` is a tensor, or
where there is None a number; both in the order of ``quantized_route.QUANTITIES``.

``transconv::convolution`` and ``transconv::convolution_backward`` are differentiable any number of times:
their derivatives are made of the two themselves. Below autograd they turn into those of compiled graphs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils import flop_counter

from transconv.calls import route_cache
from transconv.torch_ops import arguments, tensor_subclasses, transforms
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls.call_attributes import CallAttributes, request
from transconv.torch_ops.calls.lower_call import bias_gradient
from transconv.torch_ops.conversion import aten_convolutions
from transconv.torch_ops.conversion.aten_convolutions import dual

Tensor = torch.Tensor

# torch's border is untyped here.
_new_library: Any = torch.library.Library
register_fake: Any = torch.library.register_fake
register_flop_formula: Any = flop_counter.register_flop_formula

NUMBERS = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, "
    "SymInt[] output_padding, SymInt groups"
)
SCHEMAS = {
    "fwd": "(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, str numbers) -> Tensor",
    "bwd_d": "(Tensor grad_output, Tensor input, Tensor weight, str numbers) -> Tensor",
    "bwd_w": "(Tensor grad_output, Tensor input, Tensor weight, str numbers) -> Tensor",
    "convolution": f"(Tensor input, Tensor weight, Tensor? bias, {NUMBERS}) -> Tensor",
    "convolution_backward": (
        f"(Tensor grad_output, Tensor input, Tensor weight, {NUMBERS}, "
        "bool[3] output_mask) -> (Tensor, Tensor, Tensor)"
    ),
    "fused_convolution": (
        "(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, str activation, "
        f"{NUMBERS}) -> Tensor"
    ),
    "traced_convolution": (
        f"(Tensor input, Tensor weight, Tensor? bias, Tensor[] operands, str text, {NUMBERS}) -> Tensor"
    ),
    "quantized_convolution": (
        f"(Tensor input, Tensor weight, Tensor? bias, {NUMBERS}, Tensor?[] tensors, float[] numbers, "
        "ScalarType output_dtype, str activation, bool use_fast_accum, Tensor? rounding_seed=None) "
        "-> Tensor"
    ),
}
# The operators live as long as this object: it must stay at module scope.
library: Any = _new_library("transconv", "DEF")
for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))

fwd: Callable[..., Tensor] = torch.ops.transconv.fwd.default
bwd_d: Callable[..., Tensor] = torch.ops.transconv.bwd_d.default
bwd_w: Callable[..., Tensor] = torch.ops.transconv.bwd_w.default
convolution: Callable[..., Tensor] = torch.ops.transconv.convolution.default
convolution_backward: Callable[..., tuple[Tensor, ...]] = torch.ops.transconv.convolution_backward.default
fused_convolution: Callable[..., Tensor] = torch.ops.transconv.fused_convolution.default
traced_convolution: Callable[..., Tensor] = torch.ops.transconv.traced_convolution.default
quantized_convolution: Callable[..., Tensor] = torch.ops.transconv.quantized_convolution.default


def implement(
    name: str,
    fake: Callable[..., Any],
    kernel: Callable[..., Any],
    composed: Callable[..., Any] | None = None,
    derivatives: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
) -> None:
    """Register what an operator is without values, and what computes it; ``composed``: as torch's
    functions, which torch's transforms see; ``derivatives``: above the kernel, where autograd is not
    bypassed, as inference mode does; ``flops``: of the shapes. Within ``aten()`` an operator is torch's
    functions too: what a graph's first results are held against are no kernels of ours."""
    register_fake(f"transconv::{name}", fake, lib=library)

    def computed(*given: Any, **named: Any) -> Any:
        if composed is not None and aten_convolutions.by_torch.on:
            return composed(*given, **named)
        return kernel(*given, **named)

    for key in ("CPU", "CUDA"):
        library.impl(name, computed, key)
    if derivatives is not None:
        library.impl(name, derivatives, "Autograd")
    if composed is not None:
        transforms.compose(library, name, composed)
    if flops is not None:
        register_flop_formula(getattr(torch.ops.transconv, name))(flops)


def differentiated(*given: Any) -> bool:
    """Whether derivatives with respect to a tensor among these may be needed."""
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in given)


def with_derivatives(kind: Any, composed: Callable[..., Any]) -> Callable[..., Any]:
    """A call of an autograd function where derivatives are needed, else of its forward alone; of dual
    numbers ``composed``."""
    apply, forward = kind.apply, kind.forward

    def call(input: Tensor, *rest: Any) -> Any:
        if dual(input):
            return composed(input, *rest)
        return (apply if differentiated(input, *rest) else forward)(input, *rest)

    return call


# -- a call's numbers ------------------------------------------------------------------------------


class Numbers(NamedTuple):
    """The parsed text of an operator."""

    params: Params
    activation: str
    request: CallAttributes


def spelled(p: Params, activation: str = "") -> str:
    """The text: ``stride``, then what is not at its default. Symbolic sizes become numbers."""
    ones, zeros = (1,) * len(p.stride), (0,) * len(p.stride)
    words = [f"stride={_times(p.stride)}"]
    if p.padding != zeros:
        sides = (p.pad_lo,) if p.symmetric else (p.pad_lo, p.pad_hi)
        words.append(f"padding={':'.join(map(_times, sides))}")
    words += [
        f"{name}={_times(got)}"
        for name, got, usual in (
            ("dilation", p.dilation, ones),
            ("output_padding", p.output_padding, zeros),
            ("groups", (p.groups,), (1,)),
        )
        if got != usual
    ]
    return " ".join([*words, *["transposed"] * p.transposed, *filter(None, [activation])])


def _times(sizes: Sequence[int]) -> str:
    return "x".join(str(int(size)) for size in sizes)


_LISTS = ("stride", "padding", "dilation", "output_padding", "groups")


@lru_cache(route_cache.LIMIT)
def read(text: str) -> Numbers:
    """Parse a text of ``spelled``. RuntimeError for any other text."""
    words = [word.partition("=") for word in text.split(" ")]
    flags = [name for name, equals, _ in words if not equals]
    lists = {
        name: tuple(int(size) for size in value.replace(":", "x").split("x"))
        for name, equals, value in words
        if equals and re.fullmatch(r"\d+([x:]\d+)*", value)
    }
    transposed = "transposed" in flags
    activation = flags[-1] if len(flags) > transposed else ""
    stride = lists.get("stride", ())
    n = len(stride)
    p = Params(
        stride,
        lists.get("padding", (0,) * n),
        lists.get("dilation", (1,) * n),
        transposed,
        lists.get("output_padding", (0,) * n),
        lists.get("groups", (1,))[0],
    )
    if not stride or not set(lists) <= set(_LISTS) or spelled(p, activation) != text:
        raise RuntimeError(f"expected a text such as 'stride=1x1 padding=2x2 groups=3', got {text!r}")
    return Numbers(p, activation, request("", 0, *p))


def resolve(input: Tensor, weight: Tensor, bias: Tensor | None, numbers: Sequence[Any]) -> Params:
    """Check the tensors of a batched call against its numbers. RuntimeError as torch's, but a bias
    may be float32 where the other tensors have 16 bits."""
    stride, padding, dilation, transposed, output_padding, groups = numbers
    arguments.check_tensors(input, weight, bias, wide=True)
    given = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding))
    return arguments.resolve_call(input, weight, bias, *given, groups, two_sided=True)


def multiply_adds(
    input_shape: Sequence[int], weight_shape: Sequence[int], result_shape: Sequence[int], transposed: bool
) -> int:
    """Twice the products of one pass over the problem, which each of its three directions makes."""
    return int(
        flop_counter.conv_flop_count(
            list(input_shape), list(weight_shape), list(result_shape), transposed=transposed
        )
    )


# -- fakes -----------------------------------------------------------------------------------------


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    return arguments.fake_result(input, weight, resolve(input, weight, bias, numbers))


def _checked(
    grad: Tensor, input: Tensor, weight: Tensor, numbers: Sequence[Any]
) -> tuple[Params, Sequence[bool]]:
    """The numbers of a call of the gradients' operator, whose tensors fit, and which ones are wanted."""
    *given, mask = numbers
    if len(mask) != 3:
        raise RuntimeError(f"output_mask: expected 3 flags, got {len(mask)}")
    p = resolve(input, weight, None, given)
    arguments.check_grad(grad, input, weight, p)
    return p, mask


def _fake_backward(grad: Tensor, input: Tensor, weight: Tensor, *numbers: Any) -> tuple[Tensor, ...]:
    p, mask = _checked(grad, input, weight, numbers)
    channels_last = arguments.channels_last_result(input, weight)
    wanted = [(input, input.shape), (weight, weight.shape)]
    found = [
        arguments.empty_result(like, shape, channels_last) if on else grad.new_empty(0)
        for (like, shape), on in zip(wanted, mask, strict=False)
    ]
    return *found, arguments.bias_gradient(grad, weight, p) if mask[2] else grad.new_empty(0)


# -- derivatives -----------------------------------------------------------------------------------


class Convolution(torch.autograd.Function):
    """``apply(input, weight, bias, *numbers)``, the numbers as the operator takes them."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
        if (of_class := tensor_subclasses.at_once(input)) is not None:
            made: Tensor = of_class.forward(input, weight, bias, *numbers)
            return made
        p = resolve(input, weight, bias, numbers)
        return fwd(input, weight, bias, None, spelled(p))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, _bias, *numbers = inputs
        ctx.save_for_backward(input, weight)
        ctx.numbers = numbers

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:3])
        of_class = None if torch.is_grad_enabled() else tensor_subclasses.at_once(grad)
        backward = of_class.backward if of_class else convolution_backward
        found = backward(grad, input, weight, *ctx.numbers, mask)
        return *(t if on else None for t, on in zip(found, mask, strict=True)), *[None] * 6


class ConvolutionBackward(torch.autograd.Function):
    """``apply(grad_output, input, weight, *numbers, mask)``. The gradients are linear in grad_output
    and in one of input, weight each. For cotangents a, b, c of (dx, dw, db):

        grad_output:  conv(a, w) + conv(x, b) + c      input:  the dx of (grad, weight=b)
                                                       weight: the dw of (grad, input=a)
    """

    @staticmethod
    def forward(grad: Tensor, input: Tensor, weight: Tensor, *numbers: Any) -> tuple[Tensor, ...]:
        p, mask = _checked(grad, input, weight, numbers)
        if (of_class := tensor_subclasses.ServedClass.of.get(type(grad))) is not None:
            found = of_class.backward(grad, input, weight, *numbers)
            return tuple(grad.new_empty(0) if t is None else t for t in found)
        text = spelled(p)
        made = (
            bwd_d(grad, input, weight, text) if mask[0] else None,
            bwd_w(grad, input, weight, text) if mask[1] else None,
            bias_gradient(grad, weight, p) if mask[2] else None,
        )
        return tuple(grad.new_empty(0) if t is None else t for t in made)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        grad, input, weight, *numbers, mask = inputs
        ctx.save_for_backward(grad, input, weight)
        ctx.numbers = numbers
        ctx.mask = mask
        # A cotangent that is not needed stays None instead of becoming a tensor of zeros.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, input, weight = ctx.saved_tensors
        a, b, c = (t if on else None for t, on in zip(cotangents, ctx.mask, strict=True))
        for_grad: Tensor | None = None
        if ctx.needs_input_grad[0]:
            terms = []
            if a is not None:
                terms.append(convolution(a, weight, None, *ctx.numbers))
            if b is not None:
                terms.append(convolution(input, b, None, *ctx.numbers))
            if c is not None:
                terms.append(c.view(1, -1, *[1] * (grad.dim() - 2)).expand_as(grad))
            for_grad = sum(terms[1:], terms[0]) if terms else None
        for_input = for_weight = None
        if ctx.needs_input_grad[1] and b is not None:
            for_input = convolution_backward(grad, input, b, *ctx.numbers, [True, False, False])[0]
        if ctx.needs_input_grad[2] and a is not None:
            for_weight = convolution_backward(grad, a, weight, *ctx.numbers, [False, True, False])[1]
        return for_grad, for_input, for_weight, *[None] * 7


class _AtOnce(torch.autograd.Function):
    """``Convolution`` for tensors of a served class: in one function, whose arguments torch takes as they
    are."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
        Convolution.setup_context(ctx, (input, weight, bias, *numbers), input)
        return Convolution.forward(input, weight, bias, *numbers)

    backward = Convolution.backward


_apply_at_once: Any = _AtOnce.apply


def called(input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    """The operator's result. Tensors of a class that is served, and that no transform is for, do not go
    through torch's dispatcher, which costs the host more than a launch."""
    if tensor_subclasses.at_once(input) is None:
        return convolution(input, weight, bias, *numbers)
    run = _apply_at_once if differentiated(input, weight, bias) else Convolution.forward
    made: Tensor = run(input, weight, bias, *numbers)
    return made


def composed(input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    """The operator as torch's, whose transforms have rules for its derivatives."""
    p = resolve(input, weight, bias, numbers)
    return aten_convolutions.aten_forward(input, weight, bias, p, dual=True)


def composed_backward(grad: Tensor, input: Tensor, weight: Tensor, *numbers: Any) -> tuple[Tensor, ...]:
    """The gradients' operator as torch's."""
    p, mask = _checked(grad, input, weight, numbers)
    made_by_torch = aten_convolutions.aten_backward(grad, input, weight, p, mask, dual=True)
    return tuple(grad.new_empty(0) if t is None else t for t in made_by_torch)


# -- FLOPs -----------------------------------------------------------------------------------------


def _flops(
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    _bias: Any,
    *numbers: Any,
    out_shape: Sequence[int],
    **_: Any,
) -> int:
    return multiply_adds(input_shape, weight_shape, out_shape, numbers[3])


def _backward_flops(
    grad_shape: Sequence[int],
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    *numbers: Any,
    **_: Any,
) -> int:
    *given, mask = numbers
    each = multiply_adds(input_shape, weight_shape, grad_shape, given[3])
    return sum(map(bool, mask[:2])) * each


implement(
    "convolution", _fake, Convolution.forward, composed, with_derivatives(Convolution, composed), _flops
)
implement(
    "convolution_backward",
    _fake_backward,
    ConvolutionBackward.forward,
    composed_backward,
    with_derivatives(ConvolutionBackward, composed_backward),
    _backward_flops,
)
