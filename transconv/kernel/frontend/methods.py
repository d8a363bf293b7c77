"""Methods of groups and items in a kernel, as the simulator has them: loads, stores, memory, ids."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np

from transconv import ir
from transconv.kernel.device_functions import Scope
from transconv.kernel.frontend.reader import ForItems, GroupScope, Item, SourceReader, sizes_of, view_of
from transconv.kernel.launch.arguments import Needed
from transconv.kernel.source import Refusal, WrongScope, dtype_of
from transconv.kernel.tiles import arrays
from transconv.kernel.tiles.tile_elements import filled, without_mask
from transconv.kernel.tiles.values import (
    ArrayView,
    Shape,
    Tile,
    colliding,
    lanes_along,
    mapped_places,
    tile_of,
)
from transconv.simplify import range_of

# -- groups ----------------------------------------------------------------------------------------


def _id(at: SourceReader, group: GroupScope) -> Any:
    return group.ids


def _offset(at: SourceReader, group: GroupScope) -> Any:
    return tuple(Tile((), i.expr * ir.as_expr(n)) for i, n in zip(group.ids, group.shape, strict=True))


def _load(
    at: SourceReader,
    group: GroupScope,
    array: Any,
    shape: Any = None,
    mapping: Any = None,
    fill: Any = None,
    vector: bool = False,
) -> Tile:
    known = None if shape is None else sizes_of(at.b.known(shape))
    if mapping is not None:
        return load_mapped(at, view_of(array), known, mapping, vector, fill)
    return at.load(view_of(array), known, vector, fill)


def _vload(
    at: SourceReader,
    group: GroupScope,
    array: Any,
    shape: Any = None,
    mapping: Any = None,
    fill: Any = None,
) -> Tile:
    return _load(at, group, array, shape, mapping, fill, True)


def _store(at: SourceReader, group: GroupScope, array: Any, value: Any, mapping: Any = None) -> None:
    if mapping is not None:
        store_mapped(at, view_of(array), value, mapping)
        return
    if isinstance(value, ArrayView) and at.items:
        value = at.load(value, None)
    at.store(view_of(array), value)


def _full(vector: bool, value: Any = None) -> Callable[..., Tile]:
    def made(
        at: SourceReader,
        group: GroupScope,
        *sizes: Any,
        shape: Any = None,
        dtype: Any = None,
        fill_value: Any = None,
    ) -> Tile:
        shape, dtype, fill = spread_out(sizes, shape, dtype, fill_value, value)
        return filled(sizes_of(at.b.known(shape)), fill, dtype_of(dtype), vector)

    return made


def spread_out(
    given: tuple[Any, ...], shape: Any, dtype: Any, fill_value: Any, value: Any
) -> tuple[Any, Any, Any]:
    """Shape, type and value of ``zeros(4, 8)``, ``zeros((4, 8), np.float32)``, ``zeros(shape=(4, 8))``.
    ``value``: that of all elements; None: an argument."""
    count = next(
        (i for i, n in enumerate(given) if not isinstance(n, int) or isinstance(n, bool)), len(given)
    )
    rest = list(given)
    if shape is None and count > 1:
        shape, rest = given[:count], rest[count:]
    elif shape is None and rest:
        shape = rest.pop(0)
    if dtype is None and rest:
        dtype = rest.pop(0)
    if fill_value is None and rest:
        fill_value = rest.pop(0)
    if rest or shape is None:
        raise Refusal(
            "a tile without a shape, or with more arguments",
            "shape, dtype and a fill value",
            "group.zeros(shape=(16, 16), dtype=np.float32)",
        )
    if value is None and fill_value is None:
        raise Refusal(
            "no fill_value", "a number", "group.full(shape=(16,), dtype=np.float32, fill_value=1)"
        )
    if value is not None and fill_value is not None:
        raise Refusal("a fill_value", "shape and dtype")
    return shape, ir.f32 if dtype is None else dtype, fill_value if value is None else value


def _empty(at: SourceReader, group: GroupScope, *sizes: Any, shape: Any = None, dtype: Any = None) -> Tile:
    return replace(
        _full(False, 0)(at, group, *at.b.known(sizes), shape=shape, dtype=dtype), mask=(ir.FALSE,)
    )


METHODS: dict[str, Callable[..., Any]] = {
    "id": _id,
    "group_id": _id,
    "work_offset": _offset,
    "load": _load,
    "vload": _vload,
    "store": _store,
    "empty": _empty,
    "zeros": _full(False, 0),
    "ones": _full(False, 1),
    "full": _full(False),
    "vzeros": _full(True, 0),
    "vones": _full(True, 1),
    "vfull": _full(True),
}
"""The methods of a group, by name; each takes the reader of expressions, the group, and its arguments."""
ATTRIBUTES = ("shape", "work_shape")
"""What a group has beside methods: tuples of numbers."""


# -- items -----------------------------------------------------------------------------------------


def for_items(node: ast.FunctionDef, kind: str, group: GroupScope) -> ForItems:
    """What ``@group.workitems`` and ``@group.subgroups`` make of a function."""
    if kind == "workitems":
        return ForItems(node, Item(group, Scope.WorkItem, group.shape))
    count = -(-prod(group.shape) // group.subgroup_size)
    return ForItems(node, Item(group, Scope.SubGroup, (count,), group.subgroup_size))


def _local(item: Item) -> tuple[Tile, ...]:
    rank = len(item.shape)
    found = []
    for at, (lane, size) in enumerate(zip(lanes_along(item.shape), item.shape, strict=True)):
        shape = tuple(size if i == at else 1 for i in range(rank))
        found.append(Tile(shape, ir.as_expr(0) if lane is None else lane, items=rank))
    return tuple(found)


def _global(item: Item) -> tuple[Tile, ...]:
    found = []
    for local, place, size in zip(_local(item), item.group.ids, item.group.shape, strict=True):
        found.append(Tile(local.shape, place.expr * size + local.expr, items=local.items))
    return tuple(found)


ITEM_METHODS: dict[Scope, dict[str, Callable[[SourceReader, Item], Any]]] = {
    Scope.WorkItem: {
        "global_id": lambda at, item: _global(item),
        "local_id": lambda at, item: _local(item),
        "group_id": lambda at, item: item.group.ids,
    },
    Scope.SubGroup: {
        "subgroup_id": lambda at, item: _local(item)[0],
        "size": lambda at, item: item.size,
        "group_id": lambda at, item: item.group.ids,
    },
}
"""The methods of a work-item (its place in the work, in its group, and that of its group) and of a
sub-group (its place among those of its group, its work-items), by name."""


# -- mappings --------------------------------------------------------------------------------------


def places(at: SourceReader, view: ArrayView, mapping: Any, shape: Shape) -> list[Tile]:
    """The indices of a tile's elements in an array."""
    if at.items:
        raise WrongScope(f"a mapping inside of {at.here.scope.value}", "the scope of the group")
    lanes = lanes_along(shape)
    indices: list[ir.Expr] = [ir.as_expr(0) if lane is None else lane for lane in lanes]
    made = mapped_places(
        mapping, lambda m: [Tile(shape, e) for e in indices] if m.of_tiles else indices, view.ndim
    )
    found = []
    for e in (ir.as_expr(m) for m in made):
        there = ir.lanes_of(e, at.b.scope)
        found.append(Tile(tuple(n if x in there else 1 for n, x in zip(shape, lanes, strict=True)), e))
    return found


def load_mapped(
    at: SourceReader, view: ArrayView, shape: Shape | None, mapping: Any, vector: bool, fill: Any = None
) -> Tile:
    """``group.load(X, shape=, mapping=, fill=)``"""
    if shape is None:
        raise Refusal(
            "a mapping without a shape", "shape=(...)", "group.load(X, shape=(16, 16), mapping=m)"
        )
    made = arrays.gathered(at.b, view, places(at, view, mapping, shape), at.stem, True)
    at.accessed(view)
    if fill is not None:
        arrays.filling(fill, view.tensor.dtype)
        made = without_mask(at.b, made, fill)
    return replace(made, shape=shape, vector=vector)


def store_mapped(at: SourceReader, view: ArrayView, value: Any, mapping: Any) -> None:
    """``group.store(X, x, mapping=)``. Refuses mappings that bring two elements to one place."""
    at.check_written(view)
    tile = tile_of(value)
    found = places(at, view, mapping, tile.shape)
    for collision in _collisions(at, view, [t.expr for t in found], tile.shape):
        raise Refusal(
            f"a store to {view.tensor.name} by a mapping in which {collision}",
            "mappings with a place for each element",
            "create_mapping(lambda i, j: (j, i))",
        )
    wide = [replace(t, shape=tile.shape) for t in found]
    arrays.scattered(at.b, view, wide, tile, (), (), True)
    at.accessed(view, writes=True)


def _collisions(at: SourceReader, view: ArrayView, exprs: list[ir.Expr], shape: Shape) -> Iterator[str]:
    """Elements that are in one place. Numbers that are known at run time only are tried at the ends of
    their ranges."""
    while spelled := {v: at.b.values[v] for e in exprs for v in ir.free_vars(e) if v in at.b.values}:
        exprs = [ir.substitute(e, spelled) for e in exprs]
    if any(ir.find(e, ir.Load) for e in exprs):
        raise Refusal(
            "a store by a mapping that depends on values of an array",
            "indices, sizes and ids",
            "X[rows, cols]",
        )
    arguments = {*(at.b.sizes.names if at.b.sizes else ())}
    if needed := arguments & {v.name for e in exprs for v in ir.free_vars(e)}:
        raise Needed(needed)
    names = sorted({v for e in exprs for v in ir.free_vars(e)}, key=lambda v: v.name)
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
        held = ir.Evaluator(ir.Memory({}), axes, len(shape))
        held.env = {v: np.full((1,) * len(shape), n, np.int64) for v, n in zip(names, values, strict=True)}
        part = tuple(slice(0, n) for n in shape)
        caps = tuple(1 if lane is None else lane.extent for lane in lanes)
        at_each = [np.broadcast_to(held.compute(e), caps)[part].ravel() for e in exprs]
        if found := colliding(at_each, shape, static if len(static) == len(sizes) else None):
            yield found
