"""What ``group.`` offers inside of a kernel: one table of methods, which the simulator has too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transconv.ir import FALSE, as_expr, f32
from transconv.kernel.refusals import Refusal
from transconv.kernel.tiles.lanes import Shape
from transconv.kernel.tiles.tile_shapes import filled
from transconv.kernel.tiles.values import ArrayView, Tile, described, dtype_of

if TYPE_CHECKING:
    from transconv.kernel.frontend.expressions import ExpressionEvaluator


class GroupScope:
    """The group of a kernel, while its source is read. ``ids``: its place among the groups;
    ``subgroup_size``: the work-items of its sub-groups."""

    def __init__(self, shape: Shape, work: tuple[Any, ...], ids: tuple[Tile, ...],
                 subgroup_size: int = 32) -> None:
        self.shape, self.work_shape, self.ids = shape, work, ids
        self.subgroup_size = subgroup_size


def sizes_of(given: Any) -> Shape:
    """A shape that is known. Refuses others."""
    sizes = given if isinstance(given, (tuple, list)) else (given,)
    for n in sizes:
        if isinstance(n, Tile):
            raise Refusal("a shape that is known at run time only", "numbers, sizes of groups and arrays",
                          "group.zeros(shape=(16, X.shape[1]), dtype=np.float32)")
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise Refusal(f"{described(n)} as a size of a tile", "whole numbers from 1 on")
    return tuple(sizes)


def view_of(x: Any) -> ArrayView:
    """An array, or a part of one. Refuses others."""
    if not isinstance(x, ArrayView):
        raise Refusal(described(x), "an array of the call, or a slice of one",
                      "group.load(X[i:], shape=(16,))")
    return x


def _id(at: ExpressionEvaluator, group: GroupScope) -> Any:
    return group.ids


def _offset(at: ExpressionEvaluator, group: GroupScope) -> Any:
    return tuple(Tile((), i.expr * as_expr(n)) for i, n in zip(group.ids, group.shape, strict=True))


def _load(at: ExpressionEvaluator, group: GroupScope, array: Any, shape: Any = None, mapping: Any = None,
          fill: Any = None, vector: bool = False) -> Tile:
    known = None if shape is None else sizes_of(at.b.known(shape))
    if mapping is not None:
        from transconv.kernel.tiles import mapped_access

        return mapped_access.load(at, view_of(array), known, mapping, vector, fill)
    return at.load(view_of(array), known, vector, fill)


def _vload(at: ExpressionEvaluator, group: GroupScope, array: Any, shape: Any = None, mapping: Any = None,
           fill: Any = None) -> Tile:
    return _load(at, group, array, shape, mapping, fill, True)


def _store(
    at: ExpressionEvaluator, group: GroupScope, array: Any, value: Any, mapping: Any = None
) -> None:
    if mapping is not None:
        from transconv.kernel.tiles import mapped_access

        mapped_access.store(at, view_of(array), value, mapping)
        return
    if isinstance(value, ArrayView) and at.items:
        value = at.load(value, None)
    at.store(view_of(array), value)


def _full(vector: bool, value: Any = None) -> Callable[..., Tile]:
    def made(at: ExpressionEvaluator, group: GroupScope, *sizes: Any, shape: Any = None, dtype: Any = None,
             fill_value: Any = None) -> Tile:
        shape, dtype, fill_value = spread_out(sizes, shape, dtype, fill_value)
        if value is None and fill_value is None:
            raise Refusal("no fill_value", "a number",
                          "group.full(shape=(16,), dtype=np.float32, fill_value=1)")
        if value is not None and fill_value is not None:
            raise Refusal("a fill_value", "shape and dtype")
        return filled(sizes_of(at.b.known(shape)), fill_value if value is None else value, dtype_of(dtype),
                      vector)
    return made


def spread_out(given: tuple[Any, ...], shape: Any, dtype: Any, fill_value: Any) -> tuple[Any, Any, Any]:
    """Shape, type and value of ``zeros(4, 8)``, ``zeros((4, 8), np.float32)``, ``zeros(shape=(4, 8))``."""
    count = next((i for i, n in enumerate(given) if not isinstance(n, int) or isinstance(n, bool)),
                 len(given))
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
        raise Refusal("a tile without a shape, or with more arguments", "shape, dtype and a fill value",
                      "group.zeros(shape=(16, 16), dtype=np.float32)")
    return shape, f32 if dtype is None else dtype, fill_value


def _empty(
    at: ExpressionEvaluator, group: GroupScope, *sizes: Any, shape: Any = None, dtype: Any = None
) -> Tile:
    shape, dtype, _ = spread_out(at.b.known(sizes), shape, dtype, None)
    zero = filled(sizes_of(at.b.known(shape)), 0, dtype_of(dtype))
    return Tile(zero.shape, zero.expr, (FALSE,))


METHODS: dict[str, Callable[..., Any]] = {
    "id": _id, "group_id": _id, "work_offset": _offset, "load": _load, "vload": _vload, "store": _store,
    "empty": _empty, "zeros": _full(False, 0), "ones": _full(False, 1), "full": _full(False),
    "vzeros": _full(True, 0), "vones": _full(True, 1), "vfull": _full(True),
}
"""The methods of a group, by name; each takes the reader of expressions, the group, and its arguments."""
ATTRIBUTES = ("shape", "work_shape")
"""What a group has beside methods: tuples of numbers."""
