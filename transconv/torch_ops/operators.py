"""The operators that compiled graphs contain: they compute at once and have no derivatives.

    transconv::fwd     activation(convolution + bias + residual)
    transconv::bwd_d   the gradient of the input
    transconv::bwd_w   the gradient of the weight

Derivatives in Python cost torch's dispatcher more than a launch, and each list of numbers a good
part of one, at every call of a compiled graph. So the differentiable operators (library.py,
fused/fused_functional.py) turn into these three while a graph is traced: no derivatives, and the numbers
in one text, such as ``stride=2x2 padding=1x1 groups=4 relu``. torch keeps compiled graphs on disk, longer
than we keep a version: after a release, an operator's schema never changes; what needs another gets
another name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.utils import flop_counter

from transconv.calls import route_cache
from transconv.compute import OPS
from transconv.torch_ops import arguments, shapes, transforms
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import select_impl
from transconv.torch_ops.calls.call_attributes import CallAttributes, request
from transconv.torch_ops.conversion import aten_convolutions
from transconv.torch_ops.fused import fused_route

Tensor = torch.Tensor

# torch's border is untyped here.
_new_library: Any = torch.library.Library
register_fake: Any = torch.library.register_fake
register_flop_formula: Any = flop_counter.register_flop_formula

# The operators live as long as this object: it must stay at module scope.
library: Any = _new_library("transconv", "DEF")
library.define("fwd(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, str numbers) "
               "-> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
for _name in ("bwd_d", "bwd_w"):
    library.define(f"{_name}(Tensor grad_output, Tensor input, Tensor weight, str numbers) "
                   "-> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

fwd: Callable[..., Tensor] = torch.ops.transconv.fwd.default
bwd_d: Callable[..., Tensor] = torch.ops.transconv.bwd_d.default
bwd_w: Callable[..., Tensor] = torch.ops.transconv.bwd_w.default


# -- a call's numbers in one text ------------------------------------------------------------------


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


# -- kernels ---------------------------------------------------------------------------------------
# Compiled graphs wait for their kernels: a first result by torch would be timed, captured and kept.


def _fwd(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
         numbers: str) -> Tensor:
    if forward_ad._current_level >= 0:
        transforms.refuse_tangents("transconv::fwd", (input, weight, bias, residual))
    _, activation, req = read(numbers)
    if residual is None and not activation:
        route = select_impl.forward_route(req, input, weight, bias, "now")
        made: Tensor = route.forward(input, weight, bias)
        return made
    tensors = (input, weight, bias, residual)
    return fused_route.find(req, tensors, activation, "now").route.forward(*tensors)


def _bwd_d(grad: Tensor, input: Tensor, weight: Tensor, numbers: str) -> Tensor:
    if forward_ad._current_level >= 0:
        transforms.refuse_tangents("transconv::bwd_d", (grad, input, weight))
    made = select_impl.backward(read(numbers).params, grad, input, weight, (True, False, False),
                           "now")[0]
    assert made is not None
    return made


def _bwd_w(grad: Tensor, input: Tensor, weight: Tensor, numbers: str) -> Tensor:
    if forward_ad._current_level >= 0:
        transforms.refuse_tangents("transconv::bwd_w", (grad, input, weight))
    made = select_impl.backward(read(numbers).params, grad, input, weight, (False, True, False),
                           "now")[1]
    assert made is not None
    return made


for _key in ("CPU", "CUDA"):
    library.impl("fwd", _fwd, _key)
    library.impl("bwd_d", _bwd_d, _key)
    library.impl("bwd_w", _bwd_w, _key)


# -- torch's transforms ----------------------------------------------------------------------------


def composed(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
             activation: str, p: Params) -> Tensor:
    """A checked call as torch's functions."""
    fused_route.check(input, weight, residual, activation, p)
    y = aten_convolutions.aten_forward(input, weight, bias, p, dual=True)
    total: Tensor = y if residual is None else y + residual
    return OPS[activation].function()(total) if activation else total


def _composed_fwd(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
                  numbers: str) -> Tensor:
    given, activation, _ = read(numbers)
    return composed(input, weight, bias, residual, activation, resolve(input, weight, bias, given))


def _composed_gradient(at: int) -> Callable[..., Tensor]:
    def gradient(grad: Tensor, input: Tensor, weight: Tensor, numbers: str) -> Tensor:
        p = resolve(input, weight, None, read(numbers).params)
        shapes.check_grad(grad, input, weight, p)
        mask = tuple(i == at for i in range(3))
        found = aten_convolutions.aten_backward(grad, input, weight, p, mask, dual=True)[at]
        assert found is not None
        return found
    return gradient


transforms.compose(library, "fwd", _composed_fwd)
transforms.compose(library, "bwd_d", _composed_gradient(0))
transforms.compose(library, "bwd_w", _composed_gradient(1))


# -- fakes -----------------------------------------------------------------------------------------


def fake_fwd(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
             activation: str, p: Params) -> Tensor:
    """The result of a checked call, without values."""
    fused_route.check(input, weight, residual, activation, p)
    return shapes.empty_result(input, shapes.output_shape(input.shape, weight.shape, p),
                               shapes.channels_last_result(input, weight))


def _fake_fwd(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
              numbers: str) -> Tensor:
    given, activation, _ = read(numbers)
    return fake_fwd(input, weight, bias, residual, activation,
                    resolve(input, weight, bias, given))


def _fake_gradient(like: Tensor, grad: Tensor, input: Tensor, weight: Tensor,
                   numbers: str) -> Tensor:
    shapes.check_grad(grad, input, weight,
                      resolve(input, weight, None, read(numbers).params))
    return shapes.empty_result(like, like.shape, shapes.channels_last_result(input, weight))


def resolve(input: Tensor, weight: Tensor, bias: Tensor | None, numbers: Sequence[Any]) -> Params:
    """Check the tensors of a batched call against its numbers. RuntimeError as torch's, but a bias
    may be float32 where the other tensors have 16 bits."""
    stride, padding, dilation, transposed, output_padding, groups = numbers
    arguments.check_tensors(input, weight, bias, wide=True)
    return arguments.resolve(
        input.shape, weight.shape, None if bias is None else bias.shape, tuple(stride),
        tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups, two_sided=True)


register_fake("transconv::fwd", _fake_fwd, lib=library)
register_fake("transconv::bwd_d", lambda g, x, w, n: _fake_gradient(x, g, x, w, n), lib=library)
register_fake("transconv::bwd_w", lambda g, x, w, n: _fake_gradient(w, g, x, w, n), lib=library)


# -- FLOPs -----------------------------------------------------------------------------------------


def multiply_adds(input_shape: Sequence[int], weight_shape: Sequence[int],
                  result_shape: Sequence[int], transposed: bool) -> int:
    """Twice the products of one pass over the problem, which each of its three directions makes."""
    return int(flop_counter.conv_flop_count(list(input_shape), list(weight_shape),
                                            list(result_shape), transposed=transposed))


def _fwd_flops(input_shape: Sequence[int], weight_shape: Sequence[int], _bias: Any, _residual: Any,
               numbers: str, out_shape: Sequence[int], **_: Any) -> int:
    return multiply_adds(input_shape, weight_shape, out_shape, read(numbers).params.transposed)


def _gradient_flops(grad_shape: Sequence[int], input_shape: Sequence[int],
                    weight_shape: Sequence[int], numbers: str, **_: Any) -> int:
    return multiply_adds(input_shape, weight_shape, grad_shape, read(numbers).params.transposed)


register_flop_formula(torch.ops.transconv.fwd)(_fwd_flops)
register_flop_formula([torch.ops.transconv.bwd_d, torch.ops.transconv.bwd_w])(_gradient_flops)
