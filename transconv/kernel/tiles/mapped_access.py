"""Loads and stores by a mapping, in compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from transconv.ir import (
    Evaluator,
    Expr,
    Load,
    Memory,
    as_expr,
    find,
    free_vars,
    lanes_of,
    substitute,
)
from transconv.kernel.launch.size_arguments import Needed
from transconv.kernel.mappings import Mapping, colliding, create_mapping
from transconv.kernel.refusals import Refusal, WrongScope
from transconv.kernel.tiles import arrays, indexing
from transconv.kernel.tiles.lanes import Shape, lanes_along
from transconv.kernel.tiles.tile_shapes import without_mask
from transconv.kernel.tiles.values import ArrayView, Tile, tile_of
from transconv.simplify import range_of

if TYPE_CHECKING:
    from transconv.kernel.frontend.expressions import ExpressionEvaluator


def mapping_of(at: ExpressionEvaluator, function: Any) -> Mapping:
    """``create_mapping`` in a kernel."""
    if type(function).__name__ != "Lambda":
        return create_mapping(function)

    def of_places(*indices: Any) -> Any:
        made = at.of_lambda(function, [tile_of(i) for i in indices])
        return tuple(_index(m) for m in made) if isinstance(made, (tuple, list)) else _index(made)
    return Mapping(of_places, of_tiles=True)


def _index(value: Any) -> Any:
    tile = tile_of(value)
    if not tile.dtype.is_integer or tile.mask:
        raise Refusal(f"{tile} as an index of a mapping", "whole numbers")
    return tile.expr


def places(at: ExpressionEvaluator, view: ArrayView, mapping: Any, shape: Shape) -> list[Tile]:
    """The indices of a tile's elements in an array."""
    if not isinstance(mapping, Mapping):
        raise Refusal("mapping= of another kind", "create_mapping", "create_mapping(lambda i, j: (j, i))")
    if at.items:
        raise WrongScope(f"a mapping inside of {at.here.scope.value}", "the scope of the group")
    lanes = lanes_along(shape)
    indices: list[Expr] = [as_expr(0) if lane is None else lane for lane in lanes]
    made = mapping.places([Tile(shape, e) for e in indices] if mapping.of_tiles else indices)
    if len(made) != view.ndim:
        raise Refusal(f"a mapping that gives {len(made)} indices for {view}", "one for each dimension")
    found = []
    for e in (as_expr(m) for m in made):
        there = lanes_of(e, at.b.scope)
        found.append(Tile(tuple(n if x in there else 1 for n, x in zip(shape, lanes, strict=True)), e))
    return found


def load(at: ExpressionEvaluator, view: ArrayView, shape: Shape | None, mapping: Any, vector: bool,
         fill: Any = None) -> Tile:
    """``group.load(X, shape=, mapping=, fill=)``"""
    if shape is None:
        raise Refusal("a mapping without a shape", "shape=(...)",
                      "group.load(X, shape=(16, 16), mapping=m)")
    made = indexing.gathered(at.b, view, places(at, view, mapping, shape), at.stem, True)
    at.accessed(view)
    if fill is not None:
        arrays.filling(fill, view.tensor.dtype)
        made = without_mask(at.b, made, fill)
    return replace(made, shape=shape, vector=vector)


def store(at: ExpressionEvaluator, view: ArrayView, value: Any, mapping: Any) -> None:
    """``group.store(X, x, mapping=)``. Refuses mappings that bring two elements to one place."""
    at.check_written(view)
    tile = tile_of(value)
    found = places(at, view, mapping, tile.shape)
    for collision in _collisions(at, view, [t.expr for t in found], tile.shape):
        raise Refusal(f"a store to {view.tensor.name} by a mapping in which {collision}",
                      "mappings with a place for each element", "create_mapping(lambda i, j: (j, i))")
    wide = [replace(t, shape=tile.shape) for t in found]
    indexing.scattered(at.b, view, wide, tile, (), (), True)
    at.accessed(view, writes=True)


def _collisions(
    at: ExpressionEvaluator, view: ArrayView, exprs: list[Expr], shape: Shape
) -> Iterator[str]:
    """Elements that are in one place. Numbers that are known at run time only are tried at the ends of
    their ranges."""
    while spelled := {v: at.b.values[v] for e in exprs for v in free_vars(e) if v in at.b.values}:
        exprs = [substitute(e, spelled) for e in exprs]
    if any(find(e, Load) for e in exprs):
        raise Refusal("a store by a mapping that depends on values of an array", "indices, sizes and ids",
                      "X[rows, cols]")
    arguments = {*(at.b.sizes.names if at.b.sizes else ())}
    if needed := arguments & {v.name for e in exprs for v in free_vars(e)}:
        raise Needed(needed)
    names = sorted({v for e in exprs for v in free_vars(e)}, key=lambda v: v.name)
    ends = []
    for v in names:
        known = range_of(v, at.b.facts)
        low = 0 if known.lo is None else int(known.lo)
        ends.append(sorted({low, low + 1 if known.hi is None else int(known.hi)}))
    sizes = [n if isinstance(n, int) else None for n in arrays.sizes(at.b, view)]
    static = [n for n in sizes if n is not None]
    lanes = lanes_along(shape)
    axes = {lane: i for i, lane in enumerate(lanes) if lane is not None}
    for values in product(*ends):
        held = Evaluator(Memory({}), axes, len(shape))
        held.env = {v: np.full((1,) * len(shape), n, np.int64) for v, n in zip(names, values, strict=True)}
        part = tuple(slice(0, n) for n in shape)
        caps = tuple(1 if lane is None else lane.extent for lane in lanes)
        at_each = [np.broadcast_to(held.compute(e), caps)[part].ravel() for e in exprs]
        if found := colliding(at_each, shape, static if len(static) == len(sizes) else None):
            yield found
