"""What ``group.`` offers inside of a kernel: one table of methods, which the simulator has too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transconv.ir import FALSE, as_expr, f32
from transconv.kernel.lanes import Shape
from transconv.kernel.refusals import Refusal
from transconv.kernel.tiles import filled
from transconv.kernel.values import ArrayView, Tile, described, dtype_of

if TYPE_CHECKING:
    from transconv.kernel.expressions import Expressions


class GroupScope:
    """The group of a kernel, while its source is read. ``ids``: its place among the groups."""

    def __init__(self, shape: Shape, work: tuple[Any, ...], ids: tuple[Tile, ...]) -> None:
        self.shape, self.work_shape, self.ids = shape, work, ids


def _shape(given: Any) -> Shape:
    """A shape that is known."""
    sizes = given if isinstance(given, (tuple, list)) else (given,)
    for n in sizes:
        if isinstance(n, Tile):
            raise Refusal("a shape that is known at run time only", "numbers, sizes of groups and arrays",
                          "group.zeros(shape=(16, X.shape[1]), dtype=np.float32)")
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise Refusal(f"{described(n)} as a size of a tile", "whole numbers from 1 on")
    return tuple(sizes)


def _view(x: Any) -> ArrayView:
    if not isinstance(x, ArrayView):
        raise Refusal(described(x), "an array of the call, or a slice of one",
                      "group.load(X[i:], shape=(16,))")
    return x


def _id(at: Expressions, group: GroupScope) -> Any:
    return group.ids


def _offset(at: Expressions, group: GroupScope) -> Any:
    return tuple(Tile((), i.expr * as_expr(n)) for i, n in zip(group.ids, group.shape, strict=True))


def _load(at: Expressions, group: GroupScope, array: Any, shape: Any = None) -> Tile:
    return at.load(_view(array), None if shape is None else _shape(at.b.known(shape)))


def _vload(at: Expressions, group: GroupScope, array: Any, shape: Any = None) -> Tile:
    return at.load(_view(array), None if shape is None else _shape(at.b.known(shape)), vector=True)


def _store(at: Expressions, group: GroupScope, array: Any, value: Any) -> None:
    at.store(_view(array), value)


def _full(vector: bool, value: Any = None) -> Callable[..., Tile]:
    def made(at: Expressions, group: GroupScope, shape: Any, dtype: Any = f32,
             fill_value: Any = None) -> Tile:
        if value is None and fill_value is None:
            raise Refusal("no fill_value", "a number",
                          "group.full(shape=(16,), dtype=np.float32, fill_value=1)")
        if value is not None and fill_value is not None:
            raise Refusal("a fill_value", "shape and dtype")
        return filled(_shape(at.b.known(shape)), fill_value if value is None else value, dtype_of(dtype),
                      vector)
    return made


def _empty(at: Expressions, group: GroupScope, shape: Any, dtype: Any = f32) -> Tile:
    zero = filled(_shape(at.b.known(shape)), 0, dtype_of(dtype))
    return Tile(zero.shape, zero.expr, (FALSE,))


METHODS: dict[str, Callable[..., Any]] = {
    "id": _id, "group_id": _id, "work_offset": _offset, "load": _load, "vload": _vload, "store": _store,
    "empty": _empty, "zeros": _full(False, 0), "ones": _full(False, 1), "full": _full(False),
    "vzeros": _full(True, 0), "vones": _full(True, 1), "vfull": _full(True),
}
"""The methods of a group, by name; each takes the reader of expressions, the group, and its arguments."""
ATTRIBUTES = ("shape", "work_shape")
"""What a group has beside methods: tuples of numbers."""
