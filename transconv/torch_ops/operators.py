"""Torch border, step 5a. The operators that compiled graphs hold: computed at once, no derivatives.

    transconv::fwd     activation(convolution + bias + residual)
    transconv::bwd_d   the gradient of the input
    transconv::bwd_w   the gradient of the weight

Derivatives in Python cost torch's dispatcher more than a launch, and each list of numbers a good
part of one, at every call of a compiled graph. So the differentiable operators (library.py, fused.py)
turn into these three while a graph is traced: no derivatives, one list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import flop_counter

from transconv.torch_ops import arguments, fused_route, routes, shapes
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.requests import Request, request

Tensor = torch.Tensor

# torch's border is untyped here.
_new_library: Any = torch.library.Library
register_fake: Any = torch.library.register_fake
register_flop_formula: Any = flop_counter.register_flop_formula

# The operators live as long as this object: it must stay at module scope.
library: Any = _new_library("transconv", "DEF")
library.define("fwd(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, str activation, "
               "SymInt[] numbers) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
for _name in ("bwd_d", "bwd_w"):
    library.define(f"{_name}(Tensor grad_output, Tensor input, Tensor weight, SymInt[] numbers) "
                   "-> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

fwd: Callable[..., Tensor] = torch.ops.transconv.fwd.default
bwd_d: Callable[..., Tensor] = torch.ops.transconv.bwd_d.default
bwd_w: Callable[..., Tensor] = torch.ops.transconv.bwd_w.default


# -- a call's numbers in one list ------------------------------------------------------------------


def flat(p: Params) -> list[int]:
    """stride, low padding, high padding, dilation, output padding (an entry per spatial dim each),
    1 if transposed, groups."""
    return [*p.stride, *p.pad_lo, *p.pad_hi, *p.dilation, *p.output_padding, int(p.transposed),
            p.groups]


def params_of(numbers: Sequence[int]) -> Params:
    """What ``flat`` was made from. RuntimeError if the list has another length."""
    n, rest = divmod(len(numbers) - 2, 5)
    if rest or n < 1:
        raise RuntimeError(f"expected 5 numbers per spatial dim and 2 more, got {len(numbers)}")
    stride, low, high, dilation, output_padding = (
        tuple(numbers[i * n:(i + 1) * n]) for i in range(5))
    return Params(stride, low if low == high else (*low, *high), dilation, bool(numbers[-2]),
                  output_padding, numbers[-1])


_requests: dict[tuple[int, ...], tuple[Request, Params]] = {}


def _request(numbers: list[int]) -> tuple[Request, Params]:
    key = tuple(numbers)
    found = _requests.get(key)
    if found is None:
        if len(_requests) >= routes.LIMIT:
            _requests.clear()
        p = params_of(numbers)
        found = _requests[key] = request("", 0, *p), p
    return found


# -- kernels ---------------------------------------------------------------------------------------


def _fwd(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
         activation: str, numbers: list[int]) -> Tensor:
    req, _ = _request(numbers)
    if residual is None and not activation:
        made: Tensor = routes.forward_route(req, input, weight, bias).forward(input, weight, bias)
        return made
    tensors = (input, weight, bias, residual)
    return fused_route.find(req, tensors, activation).route.forward(*tensors)


def _bwd_d(grad: Tensor, input: Tensor, weight: Tensor, numbers: list[int]) -> Tensor:
    made = routes.backward(_request(numbers)[1], grad, input, weight, (True, False, False))[0]
    assert made is not None
    return made


def _bwd_w(grad: Tensor, input: Tensor, weight: Tensor, numbers: list[int]) -> Tensor:
    made = routes.backward(_request(numbers)[1], grad, input, weight, (False, True, False))[1]
    assert made is not None
    return made


for _key in ("CPU", "CUDA"):
    library.impl("fwd", _fwd, _key)
    library.impl("bwd_d", _bwd_d, _key)
    library.impl("bwd_w", _bwd_w, _key)


# -- fakes -----------------------------------------------------------------------------------------


def fake_fwd(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
             activation: str, p: Params) -> Tensor:
    """The result of a checked call, without values."""
    fused_route.check(input, weight, residual, activation, p)
    return shapes.empty_result(input, shapes.output_shape(input.shape, weight.shape, p),
                               shapes.channels_last_result(input, weight))


def _fake_fwd(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
              activation: str, numbers: Sequence[int]) -> Tensor:
    p = resolve(input, weight, bias, params_of(numbers))
    return fake_fwd(input, weight, bias, residual, activation, p)


def _fake_gradient(like: Tensor, grad: Tensor, input: Tensor, weight: Tensor,
                   numbers: Sequence[int]) -> Tensor:
    shapes.check_grad(grad, input.shape, weight.shape,
                      resolve(input, weight, None, params_of(numbers)))
    return shapes.empty_result(like, like.shape, shapes.channels_last_result(input, weight))


def resolve(input: Tensor, weight: Tensor, bias: Tensor | None, numbers: Sequence[Any]) -> Params:
    """Check the tensors of a batched call against its numbers. RuntimeError as torch's."""
    stride, padding, dilation, transposed, output_padding, groups = numbers
    arguments.check_tensors(input, weight, bias)
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
               _activation: str, numbers: Sequence[int], out_shape: Sequence[int], **_: Any) -> int:
    return multiply_adds(input_shape, weight_shape, out_shape, bool(numbers[-2]))


def _gradient_flops(grad_shape: Sequence[int], input_shape: Sequence[int],
                    weight_shape: Sequence[int], numbers: Sequence[int], **_: Any) -> int:
    return multiply_adds(input_shape, weight_shape, grad_shape, bool(numbers[-2]))


register_flop_formula(torch.ops.transconv.fwd)(_fwd_flops)
register_flop_formula([torch.ops.transconv.bwd_d, torch.ops.transconv.bwd_w])(_gradient_flops)
