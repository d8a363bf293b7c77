"""Calls in a kernel's source: functions of NumPy, methods of tiles and of the group, Python's own."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from transconv.ir import DType, as_expr
from transconv.kernel.device_functions import DeviceFunction, atomic_ref, family_of
from transconv.kernel.frontend import scopes
from transconv.kernel.frontend.group_scope import METHODS, GroupScope, sizes_of, view_of
from transconv.kernel.frontend.scopes import ForItems, Item
from transconv.kernel.functions import FUNCTIONS, cast, function_of, held_number
from transconv.kernel.mappings import IndexMap, create_mapping
from transconv.kernel.refusals import Refusal
from transconv.kernel.tiles import arrays, mapped_access, tile_elements, tile_shapes
from transconv.kernel.tiles.elementwise import apply, as_type, clip, named, power
from transconv.kernel.tiles.lanes import broadcast, lanes_along
from transconv.kernel.tiles.products import product
from transconv.kernel.tiles.reductions import REDUCTIONS, reduced, reduction_of
from transconv.kernel.tiles.values import (
    ArrayView,
    AtomicView,
    BoundMethod,
    Tile,
    described,
    dtype_of,
    tile_of,
)

if TYPE_CHECKING:
    from transconv.kernel.frontend.expressions import ExpressionEvaluator

STATIC = (len, tuple, list, zip, enumerate, reversed, sorted, divmod, isinstance, int, float, bool, round,
          slice, hasattr, getattr, str, range, min, max, abs, sum, any, all)


SEQUENCES = (zip, enumerate, tuple, list, reversed, len)  # which look at no value
BUILTIN = (sum, max, min, any, all)  # which go through what they get element by element


def called(at: ExpressionEvaluator, callee: Any, args: list[Any], words: dict[str, Any]) -> Any:
    """The result of a call."""
    if isinstance(callee, BoundMethod):
        return _method(at, callee, args, words)
    if (family := family_of(callee)) is not None:
        return at.dispatched(family, args, words)
    if isinstance(callee, (DeviceFunction, ForItems)):
        return at.inlined(callee, args, words)
    if isinstance(callee, IndexMap) and len(args) == 1 and not words:
        return arrays.laid_out(at.b, view_of(args[0]), callee)
    if type(callee).__name__ == "Lambda" and not words:
        return at.of_lambda(callee, args)
    values = [*args, *words.values()]
    known = all(is_static(v) for v in values)
    if any(callee is f for f in SEQUENCES) and all(
            isinstance(v, (tuple, list)) or is_static(v) for v in values):
        return _python(callee, args, words)
    if any(callee is f for f in STATIC) or _is_plain(callee):
        if known:
            return _python(callee, args, words)
        if not any(callee is f for f in (min, max, int, float)) and function_of(callee) is None:
            at.b.known(values)
    if (row := function_of(callee)) is not None:
        return _function(at, row.name, args, words)
    if any(callee is f for f in (min, max)) and len(args) > 1 and not words:
        return _extremum(at, "minimum" if callee is min else "maximum", args)
    if (reduction := reduction_of(callee)) is not None and args:
        if callee is not reduction.numpy and callee in BUILTIN and len(tile_of(args[0]).own) != 1:
            raise Refusal(f"Python's {callee.__name__} of {args[0]}, which goes along the first dimension",
                          "tiles of one dimension", f"np.{callee.__name__}(x, axis=0)")
        return reduced(at.b, reduction, tile_of(args[0]), *args[1:], **words)
    for function, made in NAMED:
        if callee is function:
            return made(at, *args, **words)
    if isinstance(callee, (DType, type)) and len(args) == 1 and not words:
        return as_type(tile_of(args[0]), _scalar_type(callee))
    if callee is len and isinstance(args[0], (Tile, ArrayView)):
        return at.attribute(args[0], "shape")[0]
    name = getattr(callee, "__name__", described(callee))
    raise Refusal(f"a call of {name}", "functions of NumPy that docs/kernel_api.md lists, methods of "
                  "tiles and of the group", "np.maximum(x, 0.0)")


def is_static(value: Any) -> bool:
    """Whether a value is known while the source is read."""
    if isinstance(value, (tuple, list)):
        return all(is_static(v) for v in value)
    if isinstance(value, slice):
        return is_static((value.start, value.stop, value.step))
    return not isinstance(value, (Tile, ArrayView, AtomicView, GroupScope, BoundMethod, Item, ForItems))


def _is_plain(callee: Any) -> bool:
    """A function of Python's math and operator modules, or a type of numbers."""
    home = getattr(callee, "__module__", "")
    return home in (math.__name__, operator.__name__, "_operator") or (
        isinstance(callee, type) and issubclass(callee, (np.number, np.bool_)))


def _python(callee: Any, args: list[Any], words: dict[str, Any]) -> Any:
    try:
        made = callee(*args, **words)
    except Exception as error:
        raise Refusal(f"a call of {callee.__name__} that Python refuses: {error}") from None
    if isinstance(made, (np.number, np.bool_)):
        return made.item()
    return list(made) if isinstance(made, (zip, enumerate, reversed)) else made


def _scalar_type(callee: Any) -> DType:
    plain = {int: "int32", float: "float32"}.get(callee)
    return dtype_of(plain or callee)


def _extremum(at: ExpressionEvaluator, name: str, args: list[Any]) -> Any:
    made = args[0]
    for other in args[1:]:
        made = named(at.b, name, made, other)
    return made


def _function(at: ExpressionEvaluator, name: str, args: list[Any], words: dict[str, Any]) -> Any:
    out = words.pop("out", None)
    if words:
        raise Refusal(f"{name} with {', '.join(words)}=", "out=", f"np.{name}(x, out=y)")
    if name == "power" and len(args) == 2:
        made = power(at.b, *args)
    else:
        made = apply(at.b, FUNCTIONS[name], args)
    return made if out is None else at.write_out(out, made)


# -- methods ---------------------------------------------------------------------------------------


def _method(at: ExpressionEvaluator, callee: BoundMethod, args: list[Any], words: dict[str, Any]) -> Any:
    of = callee.of
    try:
        if isinstance(of, Item):
            return scopes.METHODS[of.scope][callee.name](of, *args, **words)
        if isinstance(of, GroupScope):
            at.of_group(callee.name)
            return at.each(METHODS[callee.name](at, of, *args, **words))
        if callee.name in REDUCTIONS:
            return reduced(at.b, REDUCTIONS[callee.name], of, *args, **words)
        return TILE_METHODS[callee.name](at, of, *args, **words)
    except TypeError as error:
        raise Refusal(f"a call of {callee.name} with other arguments than it takes ({error})") from None


def _vec(at: ExpressionEvaluator, x: Tile, shape: Any = None) -> Tile:
    shape = at.b.known(shape)
    if shape is not None:
        x = tile_elements.resized(at.b, x, sizes_of(shape))
    return Tile(x.shape, x.expr, x.mask, True, x.items)


def _transpose(at: ExpressionEvaluator, x: Tile, *axes: Any) -> Tile:
    given = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
    return tile_shapes.transposed(at.b, x, given or None)


def _reshape(at: ExpressionEvaluator, x: Tile, *shape: Any) -> Tile:
    given = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    return tile_shapes.reshaped(at.b, x, tuple(at.b.known(given)))


TILE_METHODS: dict[str, Callable[..., Any]] = {
    "astype": lambda at, x, dtype: as_type(x, dtype_of(dtype)),
    "filled": lambda at, x, fill_value: tile_shapes.without_mask(at.b, x, fill_value),
    "vec": _vec, "transpose": _transpose, "reshape": _reshape,
    "copy": lambda at, x: Tile(x.shape, x.expr, x.mask, items=x.items),
    "clip": lambda at, x, low=None, high=None: clip(at.b, x, low, high),
    "dot": lambda at, x, y: product(x, tile_of(y)),
}
"""The methods of a tile beside its reductions."""


# -- functions of NumPy that are no rows -----------------------------------------------------------


def _arange(at: ExpressionEvaluator, *bounds: Any, dtype: Any = None) -> Tile:
    bounds = at.b.known(bounds)
    if not all(isinstance(n, int) for n in bounds):
        raise Refusal("np.arange with bounds that are known at run time only", "numbers; add the start",
                      "i + np.arange(16)")
    made = range(*bounds)
    if not made:
        raise Refusal("an empty np.arange", "at least one element")
    (lane,) = lanes_along((len(made),))
    values = as_expr(made.start) if lane is None else lane * made.step + made.start
    tile = Tile((len(made),), values)
    return tile if dtype is None else as_type(tile, dtype_of(dtype))


def _like(value: Any) -> Callable[..., Tile]:
    def made(at: ExpressionEvaluator, x: Any, dtype: Any = None) -> Tile:
        x = tile_of(x)
        kind = x.dtype if dtype is None else dtype_of(dtype)
        held_number(value, kind)
        return Tile(x.shape, cast(tile_of(value).expr, kind))
    return made


def _full_like(at: ExpressionEvaluator, x: Any, fill_value: Any, dtype: Any = None) -> Tile:
    return _like(fill_value)(at, x, dtype)


def _expand(at: ExpressionEvaluator, x: Any, axis: int) -> Tile:
    x = tile_of(x)
    place = axis % (len(x.shape) + 1)
    return tile_shapes.reshaped(at.b, x, (*x.shape[:place], 1, *x.shape[place:]))


NAMED: tuple[tuple[Any, Callable[..., Any]], ...] = (
    (np.matmul, lambda at, a, b: product(tile_of(a), tile_of(b))),
    (np.dot, lambda at, a, b: product(tile_of(a), tile_of(b))),
    (np.clip, lambda at, x, low=None, high=None: clip(at.b, x, low, high)),
    (np.transpose, lambda at, x, axes=None: tile_shapes.transposed(at.b, tile_of(x), axes)),
    (np.expand_dims, _expand),
    (
        np.broadcast_to,
        lambda at, x, shape: tile_shapes.spread(tile_of(x), broadcast(at.b.known(tuple(shape)))),
    ),
    (np.reshape, lambda at, x, shape: tile_shapes.reshaped(at.b, tile_of(x), at.b.known(tuple(shape)))),
    (np.stack, lambda at, arrays, axis=0: tile_shapes.stacked(at.b, arrays, at.b.known(axis))),
    (create_mapping, lambda at, function: mapped_access.mapping_of(at, function)),
    (atomic_ref, lambda at, x: AtomicView(view_of(x))),
    (np.arange, _arange),
    (np.zeros_like, _like(0)),
    (np.ones_like, _like(1)),
    (np.full_like, _full_like),
    (float, lambda at, x: as_type(tile_of(x), dtype_of("float32"))),
    (int, lambda at, x: as_type(tile_of(x), dtype_of("int32"))),
)
"""Functions of NumPy and Python with a meaning of their own for tiles."""

