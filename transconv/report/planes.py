"""Pictures of the elements of a tensor that a tile reads or stores: two dimensions as a plane, the others
as ranges; cells in the colours of their phases, what is outside of the tensor hatched.

A tile is the positions of every axis that the first program of a kernel handles. Everything is evaluated
from the coordinates and masks of the computation's views. An element has a phase where the coordinate
moves by more than one for each step of an axis of the result: stride phases."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from markupsafe import Markup

from transconv import ir
from transconv.compute import Compute, Value, axis_steps
from transconv.report import svg
from transconv.schedule import Schedule
from transconv.simplify import simplify

MOST_POINTS = 1 << 20  # points to evaluate; the rest is cut off, and the picture says so


@dataclass(frozen=True)
class TiledAxes:
    """Axes that are tiled together. ``at``: a row of positions for each point; ``first``: which of them
    the first step of the sum handles, all where the axes are not summed."""

    axes: tuple[str, ...]
    at: ir.Array
    first: ir.Array

    def onto(self, axes: Collection[str]) -> TiledAxes:
        """The same without the axes that are not needed, each point once; a point that any first step
        handles belongs to it."""
        kept = [i for i, a in enumerate(self.axes) if a in axes]
        at = self.at[:, kept]
        keys = np.ravel_multi_index(tuple(at.T), tuple(at.max(0) + 1))
        keys, index, inverse = np.unique(keys, return_index=True, return_inverse=True)
        first = np.bincount(inverse.ravel(), self.first, len(keys)) > 0
        return TiledAxes(tuple(self.axes[i] for i in kept), at[index], first)


@dataclass(frozen=True)
class AxisPoints:
    """Points over some axes: a column for each, and whether the first step of the sum handles it."""

    at: dict[str, ir.Array]
    first: ir.Array
    cut: bool = False

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class ProgramTile:
    """What one program handles: the product of its groups."""

    compute: Compute
    groups: tuple[TiledAxes, ...]
    cut: bool = False  # whether positions were left out

    def points(self, axes: Collection[str]) -> AxisPoints:
        """The tile's points over some axes, each once."""
        return _product([g.onto(axes) for g in self.groups if {*g.axes} & {*axes}], self.cut)

    def one(self) -> ProgramTile:
        """A single element of the result in the middle of the tile, with all of its sum."""
        groups = []
        for g in self.groups:
            if all(self.compute.kind(a) == "K" for a in g.axes):
                groups.append(g)
            else:
                middle = len(g.at) // 2 if len(g.at) < 3 else _middle(g)
                groups.append(TiledAxes(g.axes, g.at[middle : middle + 1], g.first[middle : middle + 1]))
        return ProgramTile(self.compute, tuple(groups), self.cut)


def first_tile(compute: Compute, schedule: Schedule) -> ProgramTile:
    """The tile of program 0, with every step of its sum."""
    groups, cut = [], False
    blocked = {a for b in schedule.blocks for a in b.axes}
    for axes, extent in [
        *((b.axes, b.extent) for b in schedule.blocks),
        *(((x.name,), 1) for x in compute.axes if x.name not in blocked),
    ]:
        axes = tuple(a for a in axes if a in compute.sizes)
        if not axes:
            continue
        sizes = [max(1, compute.size(a)) for a in axes]
        every = prod(sizes) if compute.kind(axes[0]) == "K" else min(extent, prod(sizes))
        count = min(every, MOST_POINTS)
        cut |= count < every
        at = np.stack(np.unravel_index(np.arange(count), sizes), axis=1)
        groups.append(TiledAxes(axes, at, np.arange(count) < extent))
    return ProgramTile(compute, tuple(groups), cut)


def _middle(g: TiledAxes) -> int:
    """The point nearest to the middle of the box that the points fill."""
    centre = (g.at.min(0) + g.at.max(0)) / 2
    return int(np.abs(g.at - centre).sum(1).argmin())


def _product(groups: list[TiledAxes], cut: bool) -> AxisPoints:
    while prod(len(g.at) for g in groups) > MOST_POINTS:
        i = max(range(len(groups)), key=lambda i: len(groups[i].at))
        half = groups[i]
        groups = [*groups]
        groups[i] = TiledAxes(half.axes, half.at[: len(half.at) // 2], half.first[: len(half.at) // 2])
        cut = True
    counts = [len(g.at) for g in groups]
    index = np.indices(counts).reshape(len(counts), -1) if groups else np.zeros((0, 1), int)
    columns: dict[str, ir.Array] = {}
    first = np.ones(index.shape[1], bool)
    for g, rows in zip(groups, index, strict=True):
        columns |= {a: g.at[rows, i] for i, a in enumerate(g.axes)}
        first &= g.first[rows]
    return AxisPoints(columns, first, cut)


def in_axes(e: ir.Expr, compute: Compute) -> ir.Expr | None:
    """An expression over axes alone, with lets replaced by their values; None if it reads a tensor."""
    values = {s.var: s.value for s in compute.steps if isinstance(s, Value)}
    axes = {x.var for x in compute.axes}
    for _ in range(len(values) + 1):
        if ir.free_vars(e) <= axes:
            return e
        e = ir.substitute(e, values)
    return None


def evaluated(e: ir.Expr, points: AxisPoints) -> ir.Array:
    """The values of an expression over axes, at every point."""
    run = ir.Evaluator(ir.Memory({}), {}, 1)
    run.env = {ir.Var(name): np.asarray(at, np.int64) for name, at in points.at.items()}
    return np.broadcast_to(run.compute(e), (len(points),))


SHOWN, LEAST = 60, 12  # elements along a side; of longer ones the touched part is drawn
UNTOUCHED, LATER, FIRST, FILLED = range(4)  # what a tile does with an element


@dataclass(frozen=True)
class TouchedRange:
    """The elements that a tile touches along one dimension; ``last`` < ``first`` where they depend on a
    tensor's values."""

    name: str
    size: int
    first: int
    last: int

    @property
    def text(self) -> str:
        if self.last < self.first:
            return f"{self.name}: decided by an index tensor, of {self.size}"
        every = self.first <= 0 and self.last >= self.size - 1
        span = f"{self.first}" if self.first == self.last else f"{self.first} to {self.last}"
        return (
            f"{self.name}: all {self.size}"
            if every and self.size > 1
            else (f"{self.name}: {span} of {self.size}")
        )


@dataclass(frozen=True)
class Plane:
    """A view over two of its dimensions (``_chosen``). ``state`` and ``phase`` cover rows ``top``.. and
    columns ``left``..; ``marked``: the elements for a single result; ``coords``: the coordinates' text.
    ``touched`` elements exist, ``outside`` ones do not, ``needed`` ones are marked; a cell stands for
    ``scale`` x ``scale`` elements."""

    view: ir.View
    stored: bool
    dims: tuple[str, str]
    sizes: tuple[int, int]
    top: int
    left: int
    state: ir.Array
    phase: ir.Array
    phases: tuple[int, int]
    marked: ir.Array
    coords: tuple[str, ...]
    ranges: tuple[TouchedRange, ...]
    hue: int
    cut: bool
    fill: float
    touched: int
    outside: int
    needed: int
    scale: int

    @property
    def partial(self) -> bool:
        """Whether not all of the plane is drawn."""
        height, width = self.state.shape
        return self.scale == 1 and (
            self.top > 0
            or self.left > 0
            or self.top + height < self.sizes[0]
            or self.left + width < self.sizes[1]
        )

    @property
    def legend(self) -> tuple[tuple[int, str], ...]:
        """The phases that are drawn, each with a sentence of its coordinates."""
        touched = np.isin(self.state, (LATER, FIRST))
        (ny, nx), (y, x) = self.phases, self.dims
        parts = [(y, ny), (x, nx)]
        return (
            tuple(
                (
                    int(p),
                    ", ".join(
                        f"{name} mod {n} = {at}"
                        for (name, n), at in zip(parts, divmod(int(p), nx), strict=True)
                        if n > 1
                    ),
                )
                for p in np.unique(self.phase[touched])
            )
            if (ny, nx) != (1, 1)
            else ()
        )

    @property
    def pads(self) -> bool:
        return bool((self.state == FILLED).any())


def plane_of(
    view: ir.View, compute: Compute, tile: ProgramTile, stored: bool = False, hue: int = 0
) -> Plane | None:
    """The plane of a view; None where every dimension depends on values of other tensors."""
    coords = [in_axes(d.coord, compute) for d in view.dims]
    known = [i for i, c in enumerate(coords) if c is not None]
    if not known:
        return None
    y, x = _chosen(view, compute, known)
    rows, columns, inside, first, cut = _elements(view, coords, (y, x), compute, tile)
    mine = _elements(view, coords, (y, x), compute, tile.one())
    sizes = (view.tensor.shape[y] if y is not None else 1, view.tensor.shape[x])
    steps = (_phases(view.dims[y], compute) if y is not None else 1, _phases(view.dims[x], compute))
    scale = _scale(rows, columns, sizes) if steps == (1, 1) else 1
    top, height = _window(rows // scale, -(-sizes[0] // scale), scale > 1)
    left, width = _window(columns // scale, -(-sizes[1] // scale), scale > 1)
    state, marked = np.zeros((height, width), np.int8), np.zeros((height, width), bool)
    for level, chosen in ((FILLED, ~inside), (LATER, inside), (FIRST, inside & first)):
        _put(state, rows[chosen] // scale - top, columns[chosen] // scale - left, level)
    _put(marked, mine[0][mine[2]] // scale - top, mine[1][mine[2]] // scale - left, True)
    phase = np.add.outer(
        (np.arange(height) + top) % steps[0] * steps[1], (np.arange(width) + left) % steps[1]
    )
    ranges = tuple(_range(view, i, coords[i], compute, tile) for i in range(len(coords)))
    names = view.tensor.dims
    return Plane(
        view,
        stored,
        (names[y] if y is not None else "", names[x]),
        sizes,
        top,
        left,
        state,
        phase if steps != (1, 1) else np.full_like(phase, hue),
        steps,
        marked,
        _written(view),
        ranges,
        hue,
        cut,
        compute.fill_of(view),
        _different(rows[inside], columns[inside]),
        _different(rows[~inside], columns[~inside]),
        _different(mine[0][mine[2]], mine[1][mine[2]]),
        scale,
    )


def _chosen(view: ir.View, compute: Compute, known: Sequence[int]) -> tuple[int | None, int]:
    """The two dimensions to draw: first those with computed coordinates, then those with axes that other
    views compute with, then the largest."""
    mixed = {
        a
        for v in compute.views()
        for d in v.dims
        if len(_moving(d, compute)) > 1
        for a in _moving(d, compute)
    }

    def score(i: int) -> tuple[int, int, int]:
        own, size = _moving(view.dims[i], compute), view.tensor.shape[i]
        plain = isinstance(view.dims[i].coord, ir.Var) or (len(own) == 1 and not compute.phase)
        rank = 1 if own else 0
        if size > 1 and not plain and (own or compute.phase):
            rank = 3
        elif size > 1 and own & mixed:
            rank = 2
        return rank, i if rank > 1 else min(size, 1 << 20), i

    found = sorted(sorted(known, key=score)[-2:])
    return (found[0], found[1]) if len(found) == 2 else (None, found[0])


def _moving(dim: ir.ViewDim, compute: Compute) -> frozenset[str]:
    """The axes of a coordinate that have more than one position."""
    return frozenset(a for a in compute.roots(dim.coord) if compute.size(a) > 1)


def _elements(
    view: ir.View,
    coords: Sequence[ir.Expr | None],
    dims: tuple[int | None, int],
    compute: Compute,
    tile: ProgramTile,
) -> tuple[ir.Array, ir.Array, ir.Array, ir.Array, bool]:
    """Row, column, whether the element exists, and whether the first step takes it: of every point."""
    asked = [d for d in dims if d is not None]
    axes = frozenset(a for d in asked for a in compute.roots(view.dims[d].coord))
    masks = [
        in_axes(d.mask, compute)
        for i, d in enumerate(view.dims)
        if i in asked or compute.roots(d.mask) <= axes
    ]
    axes |= {a for m in masks if m is not None for a in compute.roots(m)}
    points = tile.points(axes)
    exist = np.ones(len(points), bool)
    for mask in masks:
        if mask is not None:
            exist = exist & evaluated(mask, points).astype(bool)
    found = []
    for d in dims:
        e = coords[d] if d is not None else None
        found.append(np.zeros(len(points), np.int64) if e is None else evaluated(e, points))
    return found[0], found[1], exist, points.first, points.cut


def _different(rows: ir.Array, columns: ir.Array) -> int:
    """The number of different places."""
    return len(np.unique(rows * (1 << 32) + columns))


def _scale(rows: ir.Array, columns: ir.Array, sizes: tuple[int, int]) -> int:
    """How many elements a side of a cell stands for: more than one where a tile is large."""
    spans = [int(at.max() - at.min()) + 1 if len(at) else 1 for at in (rows, columns)]
    return 1 if max(spans) <= SHOWN // 2 or max(sizes) <= SHOWN else -(-max(sizes) // SHOWN)


def _window(at: ir.Array, size: int, whole: bool) -> tuple[int, int]:
    """The first cell that is drawn, and the number of cells; some lie outside the tensor."""
    first, last = (int(at.min()), int(at.max())) if len(at) else (0, 0)
    low, high = min(first, 0), max(last, size - 1)
    shown = min(SHOWN, max(LEAST, 2 * (last - first + 1)))
    if whole or high - low < shown:
        return low, high - low + 1
    return max(low, min(first - 2, high - shown + 1)), shown


def _put(into: ir.Array, rows: ir.Array, columns: ir.Array, value: int) -> None:
    drawn = (rows >= 0) & (rows < into.shape[0]) & (columns >= 0) & (columns < into.shape[1])
    into[rows[drawn], columns[drawn]] = value


def _phases(dim: ir.ViewDim, compute: Compute) -> int:
    """The change of the coordinate for a step of an axis that is no window's, at most 4."""
    if in_axes(dim.coord, compute) is None or (len(_moving(dim, compute)) < 2 and not compute.phase):
        return 1
    windows = {x.name for x in compute.axes if x.role == "window"}
    moved = [abs(s) for a, s in axis_steps(dim, compute).items() if a not in windows]
    return min(4, max([1, *moved]))


def _range(
    view: ir.View, i: int, coord: ir.Expr | None, compute: Compute, tile: ProgramTile
) -> TouchedRange:
    name, size = view.tensor.dims[i], view.tensor.shape[i]
    if coord is None:
        return TouchedRange(name, size, 0, -1)
    at = evaluated(coord, tile.points(compute.roots(coord)))
    return TouchedRange(name, size, max(0, int(at.min())), min(size - 1, int(at.max())))


def _written(view: ir.View) -> tuple[str, ...]:
    """The coordinates, ``name = expression`` where they are more than an axis of that name."""
    made = []
    for name, d in zip(view.tensor.dims, view.dims, strict=True):
        text = ir.readable(d.coord if isinstance(d.coord, ir.Var) else simplify(d.coord))
        made.append(text if text == name else f"{name} = {text}")
    return tuple(made)


def worth(plane: Plane) -> bool:
    """Whether there is more than one element to look at."""
    return prod(plane.sizes) > 1


SIDE = 320  # of the picture, at most
LEFT, ABOVE = 34, 22  # for labels
HUES = 8
MOST_MARKED = 64  # more outlined cells would hide the others


def draw(plane: Plane) -> Markup:
    """The picture of a plane with its labels."""
    height, width = plane.state.shape
    size = float(max(4.0, min(24.0, SIDE / max(height, width, 1))))
    inside = _inside(plane)
    parts = [
        svg.rect(
            LEFT + inside[1] * size,
            ABOVE + inside[0] * size,
            (inside[3] - inside[1]) * size,
            (inside[2] - inside[0]) * size,
            "ground",
        )
    ]
    gap = 1.0 if size >= 7 else 0.0
    for phase in np.unique(plane.phase):
        for level, kind in ((LATER, "later"), (FIRST, "first")):
            chosen = (plane.state == level) & (plane.phase == phase)
            parts.append(svg.cells(chosen, f"{kind} hue{int(phase) % HUES}", size, LEFT, ABOVE, gap))
    parts.append(svg.cells(plane.state == FILLED, "filled", size, LEFT, ABOVE, gap))
    if size >= 7:
        parts.append(_lines(inside, size))
    parts.append(
        svg.rect(
            LEFT + inside[1] * size,
            ABOVE + inside[0] * size,
            (inside[3] - inside[1]) * size,
            (inside[2] - inside[0]) * size,
            "edge",
        )
    )
    if plane.marked.sum() <= MOST_MARKED:
        parts.append(svg.cells(plane.marked, "marked", size, LEFT, ABOVE, gap or 0.6))
    parts += _labels(plane, size)
    return svg.drawing(
        LEFT + width * size + 12, ABOVE + height * size + 8, said(plane), *parts, kind="plane"
    )


def said(plane: Plane) -> str:
    """The picture in words."""
    verb = "stores" if plane.stored else "reads"
    text = f"The tile {verb} {plane.touched} of {plane.sizes[0]} x {plane.sizes[1]} elements of this plane"
    if plane.marked.sum() > MOST_MARKED:
        text += f", {plane.needed} of them for a single element of the result"
    if plane.pads:
        text += f"; {plane.outside} hatched ones lie outside of the tensor or of its mask"
    if plane.scale > 1:
        text += f". A cell stands for {plane.scale} x {plane.scale} elements"
    return text


def _inside(plane: Plane) -> tuple[int, int, int, int]:
    """The cells of the picture that are elements: top, left, bottom, right."""
    height, width = plane.state.shape
    rows, columns = (-(-n // plane.scale) for n in plane.sizes)
    return (
        max(0, -plane.top),
        max(0, -plane.left),
        min(height, rows - plane.top),
        min(width, columns - plane.left),
    )


def _lines(inside: tuple[int, int, int, int], size: float) -> Markup:
    top, left, bottom, right = inside
    path = "".join(
        f"M{LEFT + c * size:g} {ABOVE + top * size:g}V{ABOVE + bottom * size:g}"
        for c in range(left + 1, right)
    )
    path += "".join(
        f"M{LEFT + left * size:g} {ABOVE + r * size:g}H{LEFT + right * size:g}"
        for r in range(top + 1, bottom)
    )
    return svg.tag("path", d=path, class_="mesh") if path else Markup("")


def _labels(plane: Plane, size: float) -> list[Markup]:
    height, width = plane.state.shape
    top, left, bottom, right = _inside(plane)
    made = [svg.text(LEFT + width * size / 2, 11, plane.dims[1], "axis", "middle")]
    if plane.dims[0]:
        middle = ABOVE + height * size / 2
        made.append(
            svg.tag(
                "text",
                plane.dims[0],
                x=10,
                y=middle,
                class_="axis",
                text_anchor="middle",
                transform=f"rotate(-90 10 {middle:g})",
            )
        )
    for at in dict.fromkeys((left, right - 1)):
        number = (at + plane.left) * plane.scale
        made.append(svg.text(LEFT + (at + 0.5) * size, 20, str(number), "tick", "middle"))
    for at in dict.fromkeys((top, bottom - 1)) if plane.dims[0] else ():
        number = (at + plane.top) * plane.scale
        made.append(svg.text(LEFT - 4, ABOVE + (at + 0.5) * size + 3, str(number), "tick", "end"))
    return made
