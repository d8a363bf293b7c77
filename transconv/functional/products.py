"""Products of matrices with the signatures of torch, and an activation: linear, matmul, bmm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from transconv.compute import library
from transconv.functional.calls.dispatch import call
from transconv.functional.calls.symbolic_bind import Made, Numbers, PublicFunction, Specs
from transconv.functional.calls.torch_operators import declare
from transconv.support import Unsupported
from transconv.torch_ops.calls.lower_call import read_precision
from transconv.torch_ops.fused.fused_route import ACTIVATIONS, refuse

Tensor = torch.Tensor


def _of_one_type(given: Specs) -> None:
    """Unsupported for operands of different types: torch's error then, which meta tensors do not raise."""
    if len(found := {str(t.dtype) for t in given if t is not None}) > 1:
        raise Unsupported("dtype:mixed", f"operands are {' and '.join(sorted(found))}")


def _linear(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    _of_one_type(given)
    x, w, b = given
    assert x is not None and w is not None
    return library.linear(x, w, b, numbers[0], _math(numbers[1]), saves, made[0])


def _matmul(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    _of_one_type(given)
    x, w = given
    assert x is not None and w is not None
    return library.matmul(x, w, numbers[0], _math(numbers[1]), saves, made[0])


def _then(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch's product and then the activation; ``math`` is for kernels."""

    def whole(*given: Any, **out: Any) -> Tensor:
        *tensors, activation, _ = given
        made = ACTIVATIONS[activation](product(*tensors, **out))
        return out["out"].copy_(made) if activation and out else made

    return whole


LINEAR = declare(PublicFunction("linear", _then(F.linear), _linear, autocast="low", linear=True))
MATMUL = declare(PublicFunction("matmul", _then(torch.matmul), _matmul, autocast="low", linear=True))
BMM = declare(PublicFunction("bmm", _then(torch.bmm), _matmul, autocast="low", linear=True))


def _numbers(input: Tensor, activation: str | None) -> tuple[str, str]:
    if (activation or "") not in ACTIVATIONS:
        refuse(activation)
    if torch.compiler.is_compiling():
        return activation or "", "now"
    return activation or "", _math("now") if getattr(input, "dtype", None) is torch.float32 else "ieee"


def _math(word: str) -> str:
    """How f32 is multiplied: ``now``, as graphs have it, stands for torch's current switch."""
    if word != "now":
        return word
    return "tf32" if read_precision("cuda", "matmul") == "tf32" else "ieee"


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """torch.nn.functional.linear of input (..., k), weight (n, k) and bias (n,), then an activation,
    by its name in ``transconv.compute.ACTIVATIONS``. Summed in f32, f64 in f64; f32 is rounded to tf32
    where torch's precision of products says so; with ``out`` torch computes. Raises what torch raises,
    with the operands named; RuntimeError for an activation that is unknown."""
    return call(LINEAR, (input, weight, bias), _numbers(input, activation), out)


def matmul(
    input: Tensor, other: Tensor, activation: str | None = None, *, out: Tensor | None = None
) -> Tensor:
    """torch.matmul of (..., m, k) and (..., k, n), whose leading dims broadcast, or of vectors. As
    linear."""
    return call(MATMUL, (input, other), _numbers(input, activation), out)


def bmm(
    input: Tensor, mat2: Tensor, activation: str | None = None, *, out: Tensor | None = None
) -> Tensor:
    """torch.bmm of (b, m, k) and (b, k, n). As linear."""
    return call(BMM, (input, mat2), _numbers(input, activation), out)
