"""Views in a computation's text: coordinates, their masks, and sizes of tensors that no line declares."""

from __future__ import annotations

import re

from transconv.compute.expressions import Scope, expression
from transconv.errors import ComputeError
from transconv.ir import TRUE, DType, Expr, Layout, Tensor, Var, View, ViewDim, all_of
from transconv.simplify import Facts, prove, range_of, simplify

SEEN = re.compile(r"\s*(\w+)\s*\[(.*)\]\s*(?:where\s+(.*))?", re.DOTALL)


def coordinates_of(text: str, scope: Scope) -> tuple[str, list[Expr], Expr]:
    """``tensor[coordinates] where condition``: name, coordinates, condition. Raises ComputeError."""
    found = SEEN.fullmatch(text)
    if found is None:
        raise ComputeError(f"'{text.strip()}'; expected tensor[coordinates]")
    coords = [expression(part, scope) for part in _parts(found[2])]
    for coord in coords:
        if coord.dtype.kind != "index":
            raise ComputeError(f"coordinate {coord} is {coord.dtype}; expected whole numbers")
    return found[1], coords, expression(found[3], scope) if found[3] else TRUE


def _parts(text: str) -> list[str]:
    """The coordinates between commas that are not inside of parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _facts(scope: Scope) -> Facts:
    facts = Facts()
    for name, size in scope.axes.items():
        facts = facts.with_range(Var(name), 0, max(0, size - 1))
    return facts


def sized(name: str, coords: list[Expr], scope: Scope, dtype: DType) -> Tensor:
    """A dense tensor as large as its coordinates reach."""
    facts = _facts(scope)
    shape = []
    for coord in coords:
        most = range_of(simplify(coord, facts), facts).high
        if most is None:
            raise ComputeError(f"the size of {name} along {coord} is not known; expected a line such "
                               f"as: tensor {name} f32 [32, 64]")
        shape.append(int(most) + 1)
    dims = tuple(f"{name}_{i}" for i in range(len(shape)))
    return Tensor(name, dims, tuple(shape), Layout.dense(dtype, shape))


def viewed(tensor: Tensor, coords: list[Expr], condition: Expr, scope: Scope) -> View:
    """The view, masked wherever it may leave its tensor."""
    if len(coords) != len(tensor.shape):
        raise ComputeError(f"{tensor.name} has {len(tensor.shape)} dimensions, {len(coords)} "
                           "coordinates are given; expected one for each")
    facts = _facts(scope)
    dims = []
    for i, (coord, size) in enumerate(zip(coords, tensor.shape, strict=True)):
        inside = (coord >= 0) & (coord < size)
        mask = TRUE if prove(inside, facts) else inside
        dims.append(ViewDim(coord, all_of([mask, condition]) if i == 0 else mask))
    return View(tensor, tuple(dims))
