"""Arrays of a call: slicing by NumPy's rules, loads and stores with bounds.

A slice does not read. ``load`` makes a tile of the wanted shape, in which elements outside of the slice
are inactive; ``store`` writes active elements that are inside of the destination. Elements at places
that tiles tell (``x[i, j]``) are read, written, and added to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transconv import ir
from transconv.kernel.functions import cast, held_number
from transconv.kernel.source import Refusal, WrongScope, is_number, named
from transconv.kernel.tiles.kernel_builder import Building, aligned, deepened, position
from transconv.kernel.tiles.values import (
    ArrayView,
    DimSlice,
    IndexMap,
    Mask,
    Shape,
    Tile,
    broadcast,
    described,
    each_dimension,
    ends,
    joined,
    lanes_along,
    own_lanes,
    tile_of,
)
from transconv.simplify import prove, range_of, simplify


def whole(tensor: ir.Tensor) -> ArrayView:
    """An array of the call."""
    return ArrayView(tensor, tuple(DimSlice(d, ir.ZERO, n) for d, n in enumerate(tensor.bounds)))


def number_of(size: ir.Expr) -> int | Tile:
    """A size as a number; one that is an argument is known at run time only."""
    return int(size.value) if isinstance(size, ir.Const) else Tile((), size)


def laid_out(b: Building, view: ArrayView, layout: IndexMap) -> ArrayView:
    """An array of one dimension as one with a layout."""
    (along,) = view.along if view.ndim == 1 else (None,)
    if along is None or view.layout is not None or along.start is not ir.ZERO or along.step != 1:
        raise Refusal(f"a layout of {view}", "an array of the call that has one dimension", "layout(X)")
    size = simplify(size_along(along), b.facts)
    held = b.known(number_of(size))
    if isinstance(held, int) and held < layout.storage_size:
        raise Refusal(f"a layout of {layout.storage_size} elements for an array of {held}", "as many")
    wide = tuple(DimSlice(d, ir.ZERO, ir.as_expr(n)) for d, n in enumerate(layout.shape))
    return ArrayView(view.tensor, wide, layout=layout)


def size_along(along: DimSlice | None) -> ir.Expr:
    """The size of a dimension."""
    if along is None:
        return ir.as_expr(1)
    sure(along)
    reach = along.stop - along.start
    return simplify(reach if along.step == 1 else (reach + (along.step - 1)) // along.step)


def sure(along: DimSlice) -> None:
    """Refuse a slice that begins at a place or counts from the end, which only the values tell."""
    if along.unsure:
        raise Refusal(
            "a slice whose start may be below 0 at run time, where NumPy counts from the end",
            "starts from 0 on; a load with fill=, for which such places are before the array",
            "group.load(X[i - 1:], shape=(16,), fill=0.0)",
        )


def decided(b: Building, view: ArrayView, within: Mask) -> ArrayView:
    """A view of which conditions of items may tell that no start is below 0 where they hold. Elsewhere it
    counts from the end: those items read something, too."""
    if not within or not any(a is not None and a.unsure for a in view.along):
        return view
    facts = b.facts.assume(ir.all_of(within))

    def told(along: DimSlice | None) -> DimSlice | None:
        if along is None or along.place is None:
            return along
        low = range_of(along.place - along.least, facts).lo
        return replace(along, unsure=along.unsure and (low is None or low < 0))

    return replace(view, along=tuple(map(told, view.along)))


def sizes(b: Building, view: ArrayView) -> tuple[Any, ...]:
    """The sizes of a view: numbers, or tiles where they are known at run time only."""
    found: list[Any] = []
    for along in view.along:
        size = simplify(ir.Max(size_along(along), ir.ZERO), b.facts)
        each = view.items if ir.lanes_of(size, b.scope) else ()
        found.append(number_of(size) if not each else Tile(each, size, items=len(each)))
    return tuple(found)


# -- slicing ---------------------------------------------------------------------------------------


def sliced(b: Building, view: ArrayView, items: Sequence[Any], each: Shape = ()) -> ArrayView:
    """``view[items]`` for slices, integers, None and an ellipsis. ``each``: the shape of the items,
    along which bounds and numbers may vary."""
    items = each_dimension(items, view.ndim)
    each = each or view.items
    made: list[DimSlice | None] = []
    at, masks, rest = dict(view.at), [view.mask], list(view.along)
    for item in items:
        if item is None:
            made.append(None)
            continue
        along = rest.pop(0)
        if isinstance(item, slice):
            made.append(_part(b, along, item, len(each)))
        elif along is None:
            if item != 0:
                raise Refusal(f"index {item} in a dimension of one element", "0")
        else:
            at[along.dim], mask = _element(b, along, item, len(each))
            masks.append(mask)
    return ArrayView(view.tensor, (*made, *rest), at, joined(*masks), each, view.layout)


def _element(b: Building, along: DimSlice, item: Any, each: int) -> tuple[ir.Expr, Mask]:
    """The place of an index in its dimension, and where it exists. Negative ones count from the end."""
    size, place = size_along(along), position(item, each=each)
    if isinstance(place, ir.Const) and isinstance(size, ir.Const):
        if not -size.value <= place.value < size.value:
            raise Refusal(
                f"index {item} in a dimension of {size.value} elements",
                f"{-size.value} to {size.value - 1}",
            )
    if isinstance(place, ir.Const):
        there_is = Tile((), (place < size) if place.value >= 0 else (place >= -size))
        if b.is_of_sizes(there_is) and not b.holds(there_is):
            b.known(Tile((), size))
    there: list[ir.Expr] = [place < size]
    if not b.is_not_negative(place):
        there.append(place >= -size)
        place = simplify(ir.select(place < 0, place + size, place), b.facts)
    start = along.start + place * along.step if along.step != 1 else along.start + place
    return simplify(start, b.facts), b.proved(tuple(there))


def _part(b: Building, along: DimSlice | None, item: slice, each: int) -> DimSlice | None:
    """A slice of a dimension."""
    if item == slice(None):
        return along
    if along is None:
        raise Refusal("a slice of a dimension of one element that None made", "`:`")
    step = 1 if item.step is None else b.known(item.step)
    if not isinstance(step, int) or step < 1:
        raise Refusal("a slice with another step than a positive whole number", "x[a:b:2]")
    size = size_along(along)
    raw = ir.ZERO if item.start is None else position(item.start, "a bound of a slice", each)
    start, unsure = _bound(b, raw, size)
    stop = size
    if item.stop is not None:
        stop, either = _bound(b, position(item.stop, "a bound of a slice", each), size)
        if either:
            raise Refusal(
                "a slice whose end may be below 0 at run time, where NumPy counts from the end",
                "ends from 0 on",
                "X[:max(i - 2, 0)]",
            )
    first, last, place = (
        plus(along.start, n * along.step if along.step != 1 else n) for n in (start, stop, raw)
    )
    last = simplify(ir.Min(last, along.stop), b.facts)
    return DimSlice(
        along.dim,
        simplify(first, b.facts),
        last,
        along.step * step,
        None if raw is start else simplify(place, b.facts),
        along.start,
        unsure,
    )


def plus(a: ir.Expr, b: ir.Expr) -> ir.Expr:
    """The sum, without a term that is 0."""
    return b if a is ir.ZERO else a if b is ir.ZERO else a + b


def _bound(b: Building, at: ir.Expr, size: ir.Expr) -> tuple[ir.Expr, bool]:
    """A bound of a slice, and whether it is a number of ids, counters and sizes of which nothing tells if
    it is negative: such count from the end, as in NumPy. So do values, of which nothing is asked."""
    if b.is_not_negative(at):
        return at, False
    negative = Tile((), at < 0)
    if b.is_of_sizes(negative) and not b.holds(negative):
        return at, False
    behind = ir.Max(at + size, ir.ZERO)
    if b.is_of_sizes(negative) or prove(at < 0, b.facts):
        return simplify(behind, b.facts), False
    of_values = any(v.dtype.kind != "index" for v in ir.free_vars(at)) or bool(ir.find(at, ir.Load))
    return simplify(ir.select(at < 0, behind, at), b.facts), not of_values


# -- access ----------------------------------------------------------------------------------------


def _accessed(
    b: Building, view: ArrayView, shape: Shape, padded: bool = False
) -> tuple[Shape, ir.Expr, Mask]:
    """The dimensions of items, the offsets of a tile's elements, and where these exist. Items along which
    nothing varies have one element in common. ``padded``: a start below the array is before it."""
    deep = len(shape)
    coords: list[ir.Expr] = [
        lifted(b, view.at.get(d, ir.ZERO), view.items, deep) for d in range(view.dims)
    ]
    there = [lifted(b, m, view.items, deep) for m in view.mask]
    inside: list[ir.Expr] = []
    for along, lane in zip(view.along, lanes_along((*view.items, *shape))[len(view.items) :], strict=True):
        if along is None:
            inside += [] if lane is None else [lane < 1]
            continue
        before = along.place if padded else None
        if not padded:
            sure(along)
        place = lifted(b, along.start if before is None else before, view.items, deep)
        if lane is not None:
            far = lane if along.step == 1 else lane * along.step
            place = far if place is ir.ZERO else place + far
            b.divides(along.start)
            b.divides(along.stop)
        coords[along.dim] = place
        if before is not None:
            inside.append(place >= lifted(b, along.least, view.items, deep))
        inside += [place < lifted(b, stop, view.items, deep) for stop in stops(along.stop)]
    offset = offset_of(b, view, coords)
    found = {x for e in (offset, *there, *inside) for x in ir.lanes_of(e, b.scope)}
    lanes = lanes_along((*view.items, *shape))
    each = tuple(n if lane in found else 1 for n, lane in zip(view.items, lanes, strict=False))
    return each, offset, b.inside(view.tensor.name, (*there, *ends((*each, *shape)), *inside))


def lifted(b: Building, e: ir.Expr, items: Shape, deep: int) -> ir.Expr:
    """An expression along the lanes of items, where their values have ``deep`` dimensions."""
    if not items or not deep:
        return e
    behind = lanes_along((*items, *(1 for _ in range(deep))))
    pairs = zip(lanes_along(items), behind, strict=False)
    lanes = {x: y for x, y in pairs if x is not None and y is not None}
    return b.move(e, lanes)


def offset_of(b: Building, view: ArrayView, coords: Sequence[ir.Expr]) -> ir.Expr:
    """The offset of elements, with the lanes along which it varies and no others."""
    places = coords if view.layout is None else view.layout.mapping.places(coords)
    return simplify(view.tensor.offset_of([ir.as_expr(p) for p in places]), b.facts)


def stops(stop: ir.Expr) -> list[ir.Expr]:
    """The ends of which the least is one."""
    return [*stops(stop.a), *stops(stop.b)] if isinstance(stop, ir.Min) else [stop]


def default(view: ArrayView) -> str:
    """A name for what is loaded and gets no name of its own."""
    return f"{view.tensor.name}_tile".lower()


def load(
    b: Building, view: ArrayView, shape: Shape | None, stem: str, vector: bool = False, fill: Any = None
) -> Tile:
    """The elements of a view as a tile of a shape, by default its own. ``fill``: a number for elements
    outside, which are then active; starts of slices below the array are before it."""
    shape = static_shape(b, view) if shape is None else shape
    if len(shape) != view.ndim:
        raise Refusal(
            f"the shape {shape} for an array of {view.ndim} dimensions",
            f"{view.ndim} sizes",
            "group.load(X[i:], shape=(16, X.shape[1]))",
        )
    each, offset, inside = _accessed(b, view, shape, fill is not None)
    number = 0.0 if fill is None else filling(fill, view.tensor.dtype)
    value = b.let(stem or default(view), ir.Load(view.tensor, offset, ir.all_of(inside), number))
    if not number:
        b.zero_unless[value] = frozenset(inside)
    out = {*ends((*each, *shape))} if fill is None else {*inside}
    return Tile((*each, *shape), value, tuple(m for m in inside if m not in out), vector, len(each))


def filling(fill: Any, dtype: ir.DType) -> float:
    """The number of ``fill=``. Refuses what is none, or none of the type."""
    if not is_number(fill):
        raise Refusal(
            f"fill={described(fill)}",
            "a number that Python knows; x.filled for others",
            "group.load(X[i - 1:], shape=(16,), fill=0.0)",
        )
    held_number(fill, dtype)
    if isinstance(fill, float) and dtype.kind != "float":
        raise Refusal(f"fill={fill} for elements of {named(dtype)}", "a whole number", "fill=0")
    return ir.held_constant(float(fill) if dtype.kind == "float" else int(fill), dtype)


def static_shape(b: Building, view: ArrayView) -> Shape:
    """The sizes of a view, all of which have to be known."""
    found = tuple(b.known(n) for n in sizes(b, view))
    if any(not isinstance(n, int) for n in found):
        raise Refusal(
            "an array whose size is known at run time only, without a shape",
            "shape=(...)",
            "group.load(X[i:], shape=(16, X.shape[1]))",
        )
    return found


def store(b: Building, view: ArrayView, value: Any, where: Mask = ()) -> None:
    """Write the active elements of a value that are inside of a view, where conditions of items hold."""
    shape, offset, out, e = written(b, view, value, where)
    every = lanes_along((*view.items, *shape[len(view.items) :]))
    for n, m, lane in zip(view.items, shape, every, strict=False):
        if n != m and not any(lane in ir.lanes_of(part, b.scope) for part in out):
            raise WrongScope(
                f"a store of all {'sub-groups' if len(view.items) == 1 else 'items'} to one place",
                "places of their own",
                "group.store(Y[sg.subgroup_id() * 16:], y)",
            )
    if ir.FALSE not in out:  # else nothing is active
        b.add(ir.Store(view.tensor, offset, e, ir.all_of(out)))


def written(b: Building, view: ArrayView, value: Any, where: Mask) -> tuple[Shape, ir.Expr, Mask, ir.Expr]:
    """The shape, the offsets and the mask of what is written to a view, and the values."""
    held_number(value, view.tensor.dtype)
    tile = tile_of(value)
    if len(tile.own) != view.ndim:
        fits = "a value of as many dimensions"
        raise Refusal(f"{tile} stored to {view}", fits, "group.store(Y[i:], y)")
    each, offset, inside = _accessed(b, view, tile.own)
    where = tuple(lifted(b, m, view.items, view.ndim) for m in where)
    asked = {x for m in where for x in ir.lanes_of(m, b.scope)}
    beyond = [m for m in ends((*view.items, *tile.own)) if asked & {*ir.lanes_of(m, b.scope)}]
    out = b.proved(joined(inside, tile.mask, where, beyond))
    return (*each, *tile.own), offset, out, cast(tile.expr, view.tensor.dtype)


def element(b: Building, view: ArrayView, stem: str) -> Tile:
    """The element of a view without dimensions."""
    offset = offset_of(b, view, [view.at[d] for d in range(view.dims)])
    return Tile(
        (), b.let(stem or default(view), ir.Load(view.tensor, offset, ir.all_of(view.mask))), view.mask
    )


def _places(
    b: Building, view: ArrayView, items: Sequence[Any], mapped: bool = False
) -> tuple[Shape, int, ir.Expr, Mask]:
    """The elements of ``view[items]`` where tiles are indices of the first dimensions: their shape, how
    many of its dimensions are work-items, their offsets, and where they exist. Indices below 0 count from
    the end, as in NumPy; ``mapped``: they are those of a mapping, and outside."""
    items = each_dimension(items, view.ndim)
    count = sum(not (isinstance(x, slice) and x == slice(None)) for x in items)
    tiles = aligned(b, [tile_of(x) for x in items[:count]])
    behind = [_known(b, along) for along in view.along[count:]]
    each = broadcast(*(t.shape for t in tiles))
    shape = (*each, *behind)
    coords: list[ir.Expr] = [view.at.get(d, ir.ZERO) for d in range(view.dims)]
    masks: list[Mask] = [view.mask]
    for along, tile in zip(view.along, tiles, strict=False):
        if not tile.dtype.is_integer:
            raise Refusal(f"{tile} as an index", "whole numbers")
        if along is None:
            raise Refusal("an index of a dimension that None made", "dimensions of the array")
        of = (*(None for _ in range(len(each) - len(tile.shape))), *range(len(tile.shape)))
        wide = tuple(1 if i is None else tile.shape[i] for i in of)
        at = b.placed(tile, (*wide, *(1 for _ in behind)), (*of, *(None for _ in behind)))
        sure(along)
        place, there = cast(at.expr, ir.index), []
        if not mapped and not b.is_not_negative(place):
            size = size_along(along)
            there = [place >= -size]
            place = ir.select(place < 0, place + size, place)
        elif mapped:
            there = [place >= 0]
        coords[along.dim] = plus(along.start, place * along.step if along.step != 1 else place)
        masks.append((*at.mask, *there, *(coords[along.dim] < stop for stop in stops(along.stop))))
    for along, lane in zip(view.along[count:], lanes_along(shape)[len(each) :], strict=True):
        assert along is not None
        sure(along)
        far = ir.ZERO if lane is None else lane if along.step == 1 else lane * along.step
        coords[along.dim] = plus(along.start, far)
    mask = b.inside(view.tensor.name, joined(*masks))
    return shape, max(t.items for t in tiles), offset_of(b, view, coords), mask


def _known(b: Building, along: DimSlice | None) -> int:
    """The size of a dimension behind those with indices."""
    size = None if along is None else simplify(size_along(along), b.facts)
    b.known(None if size is None else Tile((), size))
    if not isinstance(size, ir.Const) or size.value < 1:
        raise Refusal(
            "a dimension behind an index whose size is not known, or 0", "whole dimensions", "X[i]"
        )
    return int(size.value)


def gathered(b: Building, view: ArrayView, items: Sequence[Any], stem: str, mapped: bool = False) -> Tile:
    """``view[items]`` where tiles are indices of the first dimensions: the elements at these places, one
    for each of the tiles' elements; inactive where a place is outside of the array."""
    shape, work, offset, mask = _places(b, view, items, mapped)
    value = b.let(
        stem or default(view), ir.Load(view.tensor, offset, ir.all_of(joined(mask, ends(shape))))
    )
    b.zero_unless[value] = frozenset((*mask, *ends(shape)))
    return Tile(shape, value, mask, items=work)


def scattered(
    b: Building,
    view: ArrayView,
    items: Sequence[Any],
    value: Any,
    where: Mask,
    each: Shape,
    mapped: bool = False,
) -> None:
    """``view[items] = value`` where tiles are indices, for the active elements of the value where a
    condition of the items holds and that are inside of the array. ``each``: the shape of the items."""
    _, offset, out, e = scattered_places(b, view, items, value, where, each, mapped)
    b.add(ir.Store(view.tensor, offset, e, ir.all_of(out)))


def scattered_places(
    b: Building,
    view: ArrayView,
    items: Sequence[Any],
    value: Any,
    where: Mask,
    each: Shape,
    mapped: bool = False,
) -> tuple[Shape, ir.Expr, Mask, ir.Expr]:
    """The shape, the offsets and the mask of what is written to ``view[items]``, and the values."""
    held_number(value, view.tensor.dtype)
    shape, rank, offset, mask = _places(b, view, items, mapped)
    tile = deepened(b, tile_of(value), len(shape) - rank)
    if broadcast(tile.shape, shape) != shape:
        raise Refusal(f"{tile} stored to elements of shape {shape}", "a value for each element")
    where = tuple(lifted(b, m, each, len(shape) - rank) for m in where)
    out = b.proved(joined(mask, tile.mask, where, ends(shape)))
    return shape, offset, out, cast(tile.expr, view.tensor.dtype)


def added(
    b: Building, view: ArrayView, items: Sequence[Any], value: Any, where: Mask, each: Shape
) -> None:
    """Add the active elements of a value to those of ``view[items]`` in one step each, where a condition
    of the items, whose shape is ``each``, holds. Each item adds, also where all add to one element."""
    items = each_dimension(items, view.ndim)
    if any(isinstance(i, Tile) and (i.own or (i.shape and not each)) for i in items):
        shape, offset, out, e = scattered_places(b, view, items, value, where, each)
    else:
        part = sliced(b, view, items, each)
        tile = tile_of(value)
        if each and not tile.items:  # each item has it
            tile = Tile((*each, *tile.shape), tile.expr, tile.mask, items=len(each))
        shape, offset, out, e = written(b, replace(part, items=each), tile, where)
        shape = (*each, *shape[len(each) :])
    if ir.FALSE in out:
        return
    lanes = own_lanes(shape)
    out = joined(out, ends(shape))
    if lanes:  # also where they vary so: simplified they may not, but there are as many additions
        offset, e = ir.Spread(offset, lanes), ir.Spread(e, lanes)
    b.add(ir.FuncCall(ir.ATOMIC_ADD, (view.tensor, offset, e, ir.all_of(out))))
