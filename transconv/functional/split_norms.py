"""The parts of a norm whose rows are in several places, as functions of tensors: library/parts.py.

Images are f16, bf16, f32 or f64; their moments and factors are f32, of f64 images f64.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from transconv.compute import library
from transconv.errors import Unsupported
from transconv.functional.calls.dispatch import call
from transconv.functional.calls.symbolic_bind import Made, Numbers, PublicFunction, Specs
from transconv.functional.calls.torch_operators import declare

Tensor = torch.Tensor


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x


def _each(t: Tensor, like: Tensor) -> Tensor:
    return t.reshape(*t.shape, *[1] * (like.dim() - 2))


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    x = _wide(x)
    mean = x.flatten(2).mean(2)
    return mean, (x - _each(mean, x)).square().flatten(2).sum(2)


def _sums(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    g = _wide(g)
    return (g * _wide(x)).flatten(2).sum(2), g.flatten(2).sum(2)


def _scaled(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (_wide(x) * _each(a, x) + _each(b, x)).to(x.dtype)


def _mixed(g: Tensor, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (_wide(g) * _each(a, x) + _wide(x) * _each(b, x) + _each(c, x)).to(x.dtype)


def _formula(name: str) -> Any:
    def formula(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
        x = given[0]
        assert x is not None
        if saves:
            raise Unsupported("gradient:parts", "a part of a norm has no gradient of its own")
        if any(t is not None and len(t.shape) == len(x.shape) and len(x.shape) > 2 and t != x
               for t in given):
            raise Unsupported("layout:two", "two images that lie differently")
        of = getattr(library, name)
        found: library.LibraryFormula = of(x, made[0]) if len(made) == 1 else of(x)
        return found
    return formula


def _both(tensors: Any, numbers: Numbers, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results


MOMENTS = declare(PublicFunction("moments", _moments, _formula("moments"), finish=_both))
SUMS = declare(PublicFunction("sums", _sums, _formula("sums"), finish=_both))
SCALED = declare(PublicFunction("scaled", _scaled, _formula("scaled")))
MIXED = declare(PublicFunction("mixed", _mixed, _formula("mixed")))


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of each image and feature of x [n, c, ...] the mean, and the sum of squared deviations from it."""
    return cast(tuple[Tensor, Tensor], call(MOMENTS, (x,), ()))


def sums(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of each image and feature the sum of g*x, and that of g."""
    return cast(tuple[Tensor, Tensor], call(SUMS, (_as(g, x), x), ()))


def scaled(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a*x + b with a and b [n, c], in the type and layout of x."""
    return call(SCALED, (x, a, b), ())


def mixed(g: Tensor, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a*g + b*x + c with a, b and c [n, c], in the type and layout of x."""
    return call(MIXED, (_as(g, x), x, a, b, c), ())


def _as(g: Tensor, x: Tensor) -> Tensor:
    """A gradient that lies as its tensor."""
    if g.stride() == x.stride() and g.dtype is x.dtype:
        return g
    return torch.empty_like(x).copy_(g)
