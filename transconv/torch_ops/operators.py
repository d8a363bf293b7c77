"""The registered operators: their schemas, the numbers of a call as one text, and what registers a kernel.

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
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils import flop_counter

from transconv.calls import route_cache
from transconv.torch_ops import arguments, transforms
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls.call_attributes import CallAttributes, request
from transconv.torch_ops.conversion.aten_convolutions import dual

Tensor = torch.Tensor

# torch's border is untyped here.
_new_library: Any = torch.library.Library
register_fake: Any = torch.library.register_fake
register_flop_formula: Any = flop_counter.register_flop_formula

NUMBERS = ("SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, "
           "SymInt[] output_padding, SymInt groups")
SCHEMAS = {
    "fwd": "(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, str numbers) -> Tensor",
    "bwd_d": "(Tensor grad_output, Tensor input, Tensor weight, str numbers) -> Tensor",
    "bwd_w": "(Tensor grad_output, Tensor input, Tensor weight, str numbers) -> Tensor",
    "convolution": f"(Tensor input, Tensor weight, Tensor? bias, {NUMBERS}) -> Tensor",
    "convolution_backward": (f"(Tensor grad_output, Tensor input, Tensor weight, {NUMBERS}, "
                             "bool[3] output_mask) -> (Tensor, Tensor, Tensor)"),
    "fused_convolution": ("(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, str activation, "
                          f"{NUMBERS}) -> Tensor"),
    "traced_convolution": ("(Tensor input, Tensor weight, Tensor? bias, Tensor[] operands, str text, "
                           f"{NUMBERS}) -> Tensor"),
    "quantized_convolution": (
        f"(Tensor input, Tensor weight, Tensor? bias, {NUMBERS}, Tensor?[] tensors, float[] numbers, "
        "ScalarType output_dtype, str activation, bool use_fast_accum, Tensor? rounding_seed=None) "
        "-> Tensor"),
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


def implement(name: str, fake: Callable[..., Any], kernel: Callable[..., Any],
              composed: Callable[..., Any] | None = None, derivatives: Callable[..., Any] | None = None,
              flops: Callable[..., int] | None = None) -> None:
    """Register what an operator is without values, and what computes it; ``composed``: as torch's
    functions, which torch's transforms see; ``derivatives``: above the kernel, where autograd is not
    bypassed, as inference mode does; ``flops``: of the shapes."""
    register_fake(f"transconv::{name}", fake, lib=library)
    for key in ("CPU", "CUDA"):
        library.impl(name, kernel, key)
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
    words += [f"{name}={_times(got)}" for name, got, usual in (
        ("dilation", p.dilation, ones), ("output_padding", p.output_padding, zeros),
        ("groups", (p.groups,), (1,))) if got != usual]
    return " ".join([*words, *["transposed"] * p.transposed, *filter(None, [activation])])


def _times(sizes: Sequence[int]) -> str:
    return "x".join(str(int(size)) for size in sizes)


_LISTS = ("stride", "padding", "dilation", "output_padding", "groups")


@lru_cache(route_cache.LIMIT)
def read(text: str) -> Numbers:
    """Parse a text of ``spelled``. RuntimeError for any other text."""
    words = [word.partition("=") for word in text.split(" ")]
    flags = [name for name, equals, _ in words if not equals]
    lists = {name: tuple(int(size) for size in value.replace(":", "x").split("x"))
             for name, equals, value in words if equals and re.fullmatch(r"\d+([x:]\d+)*", value)}
    transposed = "transposed" in flags
    activation = flags[-1] if len(flags) > transposed else ""
    stride = lists.get("stride", ())
    n = len(stride)
    p = Params(stride, lists.get("padding", (0,) * n), lists.get("dilation", (1,) * n), transposed,
               lists.get("output_padding", (0,) * n), lists.get("groups", (1,))[0])
    if not stride or not set(lists) <= set(_LISTS) or spelled(p, activation) != text:
        raise RuntimeError(f"expected a text such as 'stride=1x1 padding=2x2 groups=3', got {text!r}")
    return Numbers(p, activation, request("", 0, *p))


def resolve(input: Tensor, weight: Tensor, bias: Tensor | None, numbers: Sequence[Any]) -> Params:
    """Check the tensors of a batched call against its numbers. RuntimeError as torch's, but a bias
    may be float32 where the other tensors have 16 bits."""
    stride, padding, dilation, transposed, output_padding, groups = numbers
    arguments.check_tensors(input, weight, bias, wide=True)
    return arguments.resolve(
        input.shape, weight.shape, None if bias is None else bias.shape, tuple(stride),
        tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups, two_sided=True)


def multiply_adds(input_shape: Sequence[int], weight_shape: Sequence[int],
                  result_shape: Sequence[int], transposed: bool) -> int:
    """Twice the products of one pass over the problem, which each of its three directions makes."""
    return int(flop_counter.conv_flop_count(list(input_shape), list(weight_shape),
                                            list(result_shape), transposed=transposed))
