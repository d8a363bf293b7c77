"""Views in a computation's text: coordinates, their masks, and sizes of tensors that no line declares."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from transconv.compute.coordinates import as_written
from transconv.compute.text.expressions import ComputeScope, expression
from transconv.errors import ComputeError
from transconv.ir import (
    TRUE,
    And,
    Const,
    DType,
    Expr,
    FloorDiv,
    Layout,
    Mod,
    Sizes,
    Tensor,
    Var,
    View,
    ViewDim,
    conjuncts,
    find,
    free_vars,
    i32,
    index,
    readable,
)
from transconv.simplify import Facts, facts_of, prove, range_of, simplify

SEEN = re.compile(r"\s*(\w+)\s*\[(.*)\]\s*(?:where\s+(.*))?", re.DOTALL)


def coordinates_of(text: str, scope: ComputeScope) -> tuple[str, list[Expr], Expr]:
    """``tensor[coordinates] where condition``: name, coordinates, condition. Raises ComputeError."""
    found = SEEN.fullmatch(text)
    if found is None:
        raise ComputeError(f"'{text.strip()}'; expected tensor[coordinates]")
    whole = replace(scope, whole=index)
    coords = [expression(part, whole) for part in _parts(found[2]) if found[2].strip()]
    for coord in coords:
        _checked(coord)
    return found[1], coords, expression(found[3], whole) if found[3] else TRUE


def _checked(coord: Expr) -> None:
    """Raise ComputeError for a coordinate that is not an integer, or that divides by other than a positive
    number."""
    if coord.dtype.kind != "index" or any(e.dtype.kind == "float" for e in find(coord, Expr)):
        raise ComputeError(f"coordinate {readable(coord)} is {coord.dtype}; expected whole numbers, of "
                           "axes and of elements of tensors of i32 or i64")
    for e in (*find(coord, FloorDiv), *find(coord, Mod)):
        by = simplify(e.b)
        if not isinstance(by, Const) or by.value <= 0:
            raise ComputeError(f"{readable(e)} in a coordinate divides by {readable(e.b)}; expected a "
                               "number above 0")


def _parts(text: str) -> list[str]:
    """The texts between commas that are not inside parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def facts_of_scope(scope: ComputeScope) -> Facts:
    """The ranges of the axes of a text."""
    return facts_of_axes(scope.axes, scope.extents, scope.named)


def facts_of_axes(axes: Mapping[str, int], extents: Mapping[str, Expr], named: Sizes | None) -> Facts:
    """The ranges of axes, for all values of sizes that are arguments."""
    facts = facts_of(named)
    for name, size in axes.items():
        if (extent := extents.get(name)) is None:
            facts = facts.with_range(Var(name), 0, max(0, size - 1))
        else:
            facts = facts.with_range(Var(name), 0, None).assume(Var(name) < extent)
    return facts


def sized(name: str, coords: list[Expr], scope: ComputeScope, dtype: DType) -> Tensor:
    """A dense tensor of the smallest shape that contains all coordinates. Raises ComputeError if it is not
    bounded."""
    facts = facts_of_scope(scope)
    shape = []
    extents: list[Expr] = []
    for coord in coords:
        if isinstance(coord, Var) and coord.name in scope.extents:
            extents.append(scope.extents[coord.name])
            shape.append(scope.axes[coord.name])
            continue
        if free_vars(coord) & {Var(a) for a in scope.extents}:
            raise ComputeError(f"the size of {name} along {readable(as_written(coord))} is not told; "
                               f"expected a line such as: tensor {name} f32 [N, 64]")
        most = range_of(simplify(coord, facts), facts).hi
        if most is None or most >= i32.limits[1]:  # the index is an element of a tensor
            raise ComputeError(f"the size of {name} along {readable(as_written(coord))} is not "
                               f"known; expected a line such as: tensor {name} f32 [32, 64]")
        shape.append(most + 1)
        extents.append(Const(most + 1))
    dims = tuple(f"{name}_{i}" for i in range(len(shape)))
    sized = any(not isinstance(e, Const) for e in extents)
    return Tensor(name, dims, tuple(shape), Layout.dense(dtype, shape),
                  extents=tuple(extents) if sized else ())


def conditions(view: View) -> list[Expr]:
    """The conditions of a view's mask other than that its coordinates are inside the tensor. One that says
    this once more is among them: it tells that indices may be outside."""
    inside = [c for d, n in zip(view.dims, view.tensor.bounds, strict=True)
              for c in (d.coord >= 0, d.coord < n)]  # some twice, on a diagonal
    found: list[Expr] = []
    for c in (c for d in view.dims for c in conjuncts(d.mask)):
        if c in inside:
            inside.remove(c)
        else:
            found.append(c)
    return found


def viewed(tensor: Tensor, coords: list[Expr], condition: Expr, scope: ComputeScope) -> View:
    """The view, with a mask along each dimension in which it may be outside its tensor. Raises
    ComputeError for a wrong number of coordinates."""
    if len(coords) != len(tensor.shape):
        raise ComputeError(f"{tensor.name} has {len(tensor.shape)} dimensions, {len(coords)} "
                           "coordinates are given; expected one for each")
    return masked(tensor, coords, condition, facts_of_scope(scope))


def masked(tensor: Tensor, coords: list[Expr], condition: Expr, facts: Facts) -> View:
    """The view under a condition, with a mask along each dimension in which the facts do not prove that it
    is inside its tensor."""
    dims = []
    for i, (coord, size) in enumerate(zip(coords, tensor.bounds, strict=True)):
        inside = (coord >= 0) & (coord < size)
        mask = TRUE if prove(inside, facts) else inside
        if i == 0 and condition is not TRUE:
            mask = condition if mask is TRUE else And(mask, condition)  # also one like the mask
        dims.append(ViewDim(coord, mask))
    return View(tensor, tuple(dims))
