"""The roles and strides of a computation's axes, which follow from its views, and its prologues.

A prologue is a name for each operand of a product that is computed before it is multiplied:

    let s = sum(relu(x)*w; k)      ->      let s_a = relu(x)
                                           let s_b = f32(w)          where the types are others
                                           let s = sum(s_a*s_b; k)

Only where that makes a product of matrices, which the matrix unit multiplies in the type of the factors:
``sum(bf16(relu(x))*w; k)`` of bf16 operands takes bf16, ``sum(relu(x)*w; k)`` is a product of f32."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod

from transconv.compute.compute import Compute
from transconv.compute.steps import Axis, Reduction, Step, Value, fresh, uncast
from transconv.ir import Cast, Const, Expr, Mul, Var, View, ViewDim, free_vars, substitute
from transconv.simplify import simplify


def with_roles(compute: Compute) -> Compute:
    """The computation with the role of every axis.

    A reduced axis that shares a coordinate with one that is not reduced is a window. In a product, M axes
    are positions, N axes and other K axes features, B axes batches. Without a product all axes are
    positions; but if nothing is reduced, the axis with the smallest stride in the result is a feature."""
    return replace(compute, axes=tuple(replace(x, role=_role(x, compute)) for x in compute.axes))


def _role(axis: Axis, compute: Compute) -> str:
    kind = compute.kind(axis.name)
    if kind == "K" and _slides(axis, compute):
        return "window"
    if compute.factors is not None:
        return {"B": "batch", "M": "position", "N": "feature", "K": "feature"}[kind]
    fastest = axis.name == _fastest(compute)
    return "feature" if compute.sum is None and fastest else "position"


def _slides(axis: Axis, compute: Compute) -> bool:
    return any(
        axis.name in seen and len(seen) > 1 and any(compute.kind(a) != "K" for a in seen)
        for r in compute.reads
        for d in r.view.dims
        for seen in [compute.roots(d.coord)]
    )


def _fastest(compute: Compute) -> str:
    strides = axis_strides(compute.c, compute)
    wide = [x for x in compute.axes if x.size > 1] or list(compute.axes)
    return min(wide, key=lambda x: strides[x.name] or 1 << 62).name


FAR = 1 << 20  # factor on strides of gathers; a power of two, so that it keeps their alignment


@lru_cache(maxsize=512)
def axis_strides(view: View, compute: Compute) -> dict[str, int]:
    """The stride of a view along each axis, in elements; ``""``: the offset of the point where every axis
    is 0. Along axes on which indices from a tensor depend (a gather), the stride is ``FAR`` times that of
    consecutive indices."""
    zero: dict[Expr, Expr] = {x.var: Const(0) for x in compute.axes}
    offset = substitute(view.offset(), compute.stand_ins)
    first = _value(substitute(offset, zero))
    found = {x.name: _value(substitute(offset, zero | {x.var: Const(1)})) - first for x in compute.axes}
    gathered = {a for v in compute.names.told(view) for a in compute.names.rooted[v]}
    found |= {a: step * FAR for a, step in found.items() if a in gathered}
    return found | {"": first}


def _value(e: Expr) -> int:
    e = simplify(e)
    assert isinstance(e, Const), e
    return int(e.value)


@lru_cache(maxsize=2048)
def axis_steps(seen: ViewDim, compute: Compute) -> dict[str, int]:
    """The change of a coordinate per step of each axis that it mentions."""
    zero: dict[Expr, Expr] = {x.var: Const(0) for x in compute.axes}
    coord = substitute(seen.coord, compute.stand_ins)
    first = _value(substitute(coord, zero))
    own = {v.name for v in free_vars(coord)}
    return {
        x.name: _value(substitute(coord, zero | {x.var: Const(1)})) - first
        for x in compute.axes
        if x.name in own
    }


def places(view: View, compute: Compute, written: Iterable[tuple[str, int]]) -> int:
    """The number of different elements of a view that one lane reads for positions that are written out: 8
    positions of a row and a window of 7 have 56 products, of 14 elements. ``written``: axes and
    extents."""
    strides = axis_strides(view, compute)
    found = {(0, 0)}
    for axis, extent in written:
        if step := strides[axis]:
            # In the last block of a sum, positions beyond the end have masks of their own and share no
            # load.
            rest = -compute.size(axis) % extent if compute.kind(axis) == "K" else 0
            own = [i if i >= extent - rest else 0 for i in range(extent)]
            found = {(at + step * i, max(mask, own[i])) for (at, mask), i in product(found, range(extent))}
    return len(found)


@lru_cache(maxsize=2048)
def touched(view: View, compute: Compute) -> int:
    """Bytes of a tensor that the computation reads or writes, each counted once."""
    strides = axis_strides(view, compute)
    points = prod(x.size for x in compute.axes if strides[x.name])
    return min(points, prod(view.tensor.shape)) * view.tensor.dtype.bytes


def with_prologues(compute: Compute) -> Compute:
    """The computation with named factors, if it is a sum of products with a prologue; otherwise
    unchanged."""
    total = compute.sum
    if total is None or total.op != "sum" or compute.factors or not isinstance(total.value, Mul):
        return compute
    sides = (total.value.a, total.value.b)
    if all(_name(e) is not None for e in sides) and len({_name(e) for e in sides}) < 2:
        return compute  # a square
    names = [fresh(f"{total.name}_{letter}", compute.names.all) for letter in "ab"]
    for wide in (False, True):
        made = _named(compute, total, sides, names, wide)
        if made.prologue:
            return made
    return compute


def _named(
    compute: Compute, total: Reduction, sides: tuple[Expr, Expr], names: list[str], wide: bool
) -> Compute:
    """``wide``: factors that are reads are cast to the type of arithmetic as well."""
    before: list[Step] = []
    factors: list[Expr] = []
    for e, name in zip(sides, names, strict=True):
        if not wide and _name(e) is not None:
            factors.append(e)
            continue
        value = Value(name, e)
        before.append(value)
        factors.append(
            value.var if value.var.type is total.value.dtype else Cast(value.var, total.value.dtype)
        )
    product = replace(total, value=Mul(factors[0], factors[1]))
    at = compute.steps.index(total)
    steps = (*compute.steps[:at], *before, product, *compute.steps[at + 1 :])
    return replace(compute, steps=steps)


def _name(e: Expr) -> Var | None:
    """The variable of a factor that is one, with or without a cast; else None."""
    inner = uncast(e)
    return inner if isinstance(inner, Var) else None
