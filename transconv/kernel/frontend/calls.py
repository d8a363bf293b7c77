"""Calls in a kernel's source: functions of NumPy, methods of tiles, Python's own functions."""

from __future__ import annotations

import builtins
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from transconv.ir import DType, as_expr
from transconv.kernel import functions
from transconv.kernel.device_functions import DeviceFunction, atomic_ref, family_of
from transconv.kernel.frontend.reader import (
    ForItems,
    GroupScope,
    Lambda,
    SourceReader,
    is_static,
    sizes_of,
    view_of,
)
from transconv.kernel.source import Refusal, dtype_of
from transconv.kernel.tiles import arrays, rearrangements, tile_elements
from transconv.kernel.tiles.kernel_builder import apply, as_type, clip, named, power
from transconv.kernel.tiles.reductions import product, reduced
from transconv.kernel.tiles.values import (
    ArrayView,
    AtomicView,
    BoundMethod,
    IndexMap,
    Mapping,
    Tile,
    broadcast,
    create_mapping,
    described,
    lanes_along,
    tile_of,
)

STATIC = tuple(
    getattr(builtins, name)
    for name in (
        "len tuple list zip enumerate reversed sorted divmod isinstance int float "
        "bool round slice hasattr getattr str range min max abs sum any all"
    ).split()
)
SEQUENCES = (zip, enumerate, tuple, list, reversed, len)  # which look at no value
BUILTIN = (sum, max, min, any, all)  # which go through what they get element by element


def called(at: SourceReader, callee: Any, args: list[Any], words: dict[str, Any]) -> Any:
    """The result of a call."""
    if isinstance(callee, BoundMethod):
        return _method(at, callee, args, words)
    if (family := family_of(callee)) is not None:
        return at.dispatched(family, args, words)
    if isinstance(callee, (DeviceFunction, ForItems)):
        return at.inlined(callee, args, words)
    if isinstance(callee, IndexMap) and len(args) == 1 and not words:
        return arrays.laid_out(at.b, view_of(args[0]), callee)
    if isinstance(callee, Lambda) and not words:
        return at.of_lambda(callee, args)
    values = [*args, *words.values()]
    known = all(is_static(v) for v in values)
    if any(callee is f for f in SEQUENCES) and all(
        isinstance(v, (tuple, list)) or is_static(v) for v in values
    ):
        return _python(callee, args, words)
    if any(callee is f for f in STATIC) or _is_plain(callee):
        if known:
            return _python(callee, args, words)
        if not any(callee is f for f in (min, max, int, float)) and functions.function_of(callee) is None:
            at.b.known(values)
    if (row := functions.function_of(callee)) is not None:
        return _function(at, row.name, args, words)
    if any(callee is f for f in (min, max)) and len(args) > 1 and not words:
        return _extremum(at, "minimum" if callee is min else "maximum", args)
    if (reduction := functions.reduction_of(callee)) is not None and args:
        if callee is not reduction.numpy and callee in BUILTIN and len(tile_of(args[0]).own) != 1:
            raise Refusal(
                f"Python's {callee.__name__} of {args[0]}, which goes along the first dimension",
                "tiles of one dimension",
                f"np.{callee.__name__}(x, axis=0)",
            )
        return _taken(callee.__name__, 2, reduced, at.b, reduction, tile_of(args[0]), *args[1:], **words)
    for function, made in NAMED:
        if callee is function:
            return _taken(callee.__name__, 1, made, at, *args, **words)
    if isinstance(callee, (DType, type)) and len(args) == 1 and not words:
        return as_type(tile_of(args[0]), _scalar_type(callee))
    if callee is len and isinstance(args[0], (Tile, ArrayView)):
        return at.attribute(args[0], "shape")[0]
    name = getattr(callee, "__name__", described(callee))
    raise Refusal(
        f"a call of {name}",
        "functions of NumPy that docs/kernel_api.md lists, methods of tiles and of the group",
        "np.maximum(x, 0.0)",
    )


def _is_plain(callee: Any) -> bool:
    """A function of Python's math and operator modules, or a type of numbers."""
    home = getattr(callee, "__module__", "")
    return home in (math.__name__, operator.__name__, "_operator") or (
        isinstance(callee, type) and issubclass(callee, (np.number, np.bool_))
    )


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


def _extremum(at: SourceReader, name: str, args: list[Any]) -> Any:
    made = args[0]
    for other in args[1:]:
        made = named(at.b, name, made, other)
    return made


def _function(at: SourceReader, name: str, args: list[Any], words: dict[str, Any]) -> Any:
    out = words.pop("out", None)
    if words:
        raise Refusal(f"{name} with {', '.join(words)}=", "out=", f"np.{name}(x, out=y)")
    if name == "power" and len(args) == 2:
        made = power(at.b, *args)
    else:
        made = apply(at.b, functions.FUNCTIONS[name], args)
    return made if out is None else at.write_out(out, made)


# -- methods ---------------------------------------------------------------------------------------


def _method(at: SourceReader, callee: BoundMethod, args: list[Any], words: dict[str, Any]) -> Any:
    in_group = isinstance(callee.of, GroupScope)
    if in_group:
        at.of_group(callee.name)
    made = _taken(callee.name, 2, callee.function, at, callee.of, *args, **words)
    return at.each(made) if in_group else made


def _taken(name: str, ours: int, function: Callable[..., Any], *given: Any, **words: Any) -> Any:
    """The result of a function, the first parameters of which are ``ours``. Refuses other arguments."""
    try:
        return function(*given, **words)
    except TypeError as error:
        takes = [*inspect.signature(function).parameters][ours:]
        said = f"a call of {name} with other arguments than it takes"
        raise Refusal(said, f"{name}({', '.join(takes)})") from error


def _vec(at: SourceReader, x: Tile, shape: Any = None) -> Tile:
    shape = at.b.known(shape)
    if shape is not None:
        x = tile_elements.resized(at.b, x, sizes_of(shape))
    return Tile(x.shape, x.expr, x.mask, True, x.items)


def _transpose(at: SourceReader, x: Tile, *axes: Any) -> Tile:
    given = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
    return tile_elements.transposed(at.b, x, given or None)


def _reshape(at: SourceReader, x: Tile, *shape: Any) -> Tile:
    given = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    return rearrangements.reshaped(at.b, x, at.b.known(given))


def _reduction(row: functions.TileReduction) -> Callable[..., Tile]:
    return lambda at, x, axis=None, keepdims=False: reduced(at.b, row, x, axis, keepdims)


def _running(name: str) -> Callable[..., Tile]:
    return lambda at, x, axis=None: rearrangements.running(at.b, name, tile_of(x), axis)


TILE_METHODS: dict[str, Callable[..., Any]] = {
    **{name: _reduction(row) for name, row in functions.REDUCTIONS.items()},
    **{name: _running(name) for name in functions.RUNNING},
    "astype": lambda at, x, dtype: as_type(x, dtype_of(dtype)),
    "filled": lambda at, x, fill_value: tile_elements.without_mask(at.b, x, fill_value),
    "vec": _vec,
    "transpose": _transpose,
    "reshape": _reshape,
    "copy": lambda at, x: Tile(x.shape, x.expr, x.mask, items=x.items),
    "clip": lambda at, x, low=None, high=None: clip(at.b, x, low, high),
    "dot": lambda at, x, y: product(x, tile_of(y)),
}
"""The methods of a tile."""


# -- functions of NumPy that are no rows -----------------------------------------------------------


def _arange(at: SourceReader, *bounds: Any, dtype: Any = None) -> Tile:
    bounds = at.b.known(bounds)
    if not all(isinstance(n, int) for n in bounds):
        raise Refusal(
            "np.arange with bounds that are known at run time only",
            "numbers; add the start",
            "i + np.arange(16)",
        )
    made = range(*bounds)
    if not made:
        raise Refusal("an empty np.arange", "at least one element")
    (lane,) = lanes_along((len(made),))
    values = as_expr(made.start) if lane is None else lane * made.step + made.start
    tile = Tile((len(made),), values)
    return tile if dtype is None else as_type(tile, dtype_of(dtype))


def _like(value: Any) -> Callable[..., Tile]:
    def made(at: SourceReader, x: Any, dtype: Any = None) -> Tile:
        x = tile_of(x)
        kind = x.dtype if dtype is None else dtype_of(dtype)
        functions.held_number(value, kind)
        return Tile(x.shape, functions.cast(tile_of(value).expr, kind))

    return made


def mapping_of(at: SourceReader, function: Any) -> Mapping:
    """``create_mapping`` in a kernel."""
    if not isinstance(function, Lambda):
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


def _expand(at: SourceReader, x: Any, axis: int) -> Tile:
    x = tile_of(x)
    place = axis % (len(x.own) + 1)
    return rearrangements.reshaped(at.b, x, (*x.own[:place], 1, *x.own[place:]))


NAMED: tuple[tuple[Any, Callable[..., Any]], ...] = (
    (np.matmul, lambda at, a, b: product(tile_of(a), tile_of(b))),
    (np.dot, lambda at, a, b: product(tile_of(a), tile_of(b))),
    (np.clip, lambda at, x, low=None, high=None: clip(at.b, x, low, high)),
    (np.transpose, lambda at, x, axes=None: tile_elements.transposed(at.b, tile_of(x), axes)),
    (np.expand_dims, _expand),
    (
        np.broadcast_to,
        lambda at, x, shape: tile_elements.spread(tile_of(x), broadcast(at.b.known(tuple(shape)))),
    ),
    (np.reshape, lambda at, x, shape: _reshape(at, tile_of(x), shape)),
    (
        np.concatenate,
        lambda at, arrays, axis=0: rearrangements.concatenated(at.b, arrays, at.b.known(axis)),
    ),
    (np.sort, lambda at, x, axis=-1: rearrangements.ordered(at.b, tile_of(x), axis)),
    *((getattr(np, name), _running(name)) for name in functions.RUNNING),
    (np.stack, lambda at, arrays, axis=0: rearrangements.stacked(at.b, arrays, at.b.known(axis))),
    (create_mapping, mapping_of),
    (atomic_ref, lambda at, x: AtomicView(view_of(x))),
    (np.arange, _arange),
    (np.zeros_like, _like(0)),
    (np.ones_like, _like(1)),
    (np.full_like, lambda at, x, fill_value, dtype=None: _like(fill_value)(at, x, dtype)),
    (float, lambda at, x: as_type(tile_of(x), dtype_of("float32"))),
    (int, lambda at, x: as_type(tile_of(x), dtype_of("int32"))),
)
"""Functions of NumPy and Python with a meaning of their own for tiles."""
