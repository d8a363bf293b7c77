"""Stage 3, how the views of an algorithm lie in memory: what the estimates and the tilings count with."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from transconv.algorithm import Algorithm
from transconv.ir import Const, Expr, View, ViewDim, free_vars, substitute
from transconv.simplify import simplify


@lru_cache(maxsize=512)
def axis_strides(view: View, alg: Algorithm) -> dict[str, int]:
    """How far apart in memory, in elements, neighbours along each axis are; ``""`` is the offset
    of the point where every axis is 0."""
    zero: dict[Expr, Expr] = {x.var: Const(0) for x in alg.axes}
    offset = view.offset()
    first = _value(substitute(offset, zero))
    found = {x.name: _value(substitute(offset, zero | {x.var: Const(1)})) - first for x in alg.axes}
    return found | {"": first}


def _value(e: Expr) -> int:
    e = simplify(e)
    assert isinstance(e, Const), e
    return int(e.value)


@lru_cache(maxsize=2048)
def axis_steps(seen: ViewDim, alg: Algorithm) -> dict[str, int]:
    """How far a coordinate moves per step of each axis that it mentions."""
    zero: dict[Expr, Expr] = {x.var: Const(0) for x in alg.axes}
    first = _value(substitute(seen.coord, zero))
    own = {v.name for v in free_vars(seen.coord)}
    return {x.name: _value(substitute(seen.coord, zero | {x.var: Const(1)})) - first
            for x in alg.axes if x.name in own}


def touched(view: View, alg: Algorithm) -> int:
    """Bytes of a tensor that the computation reads or writes at least once."""
    strides = axis_strides(view, alg)
    points = prod(x.size for x in alg.axes if strides[x.name])
    return min(points, prod(view.tensor.shape)) * view.tensor.dtype.bytes
