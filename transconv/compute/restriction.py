"""Restriction of a computation to some positions of an axis: of each tensor the interval that they read,
and the computation of these positions alone.

    compute rows                                    positions 16 to 31 of oh:
        tensor X f32 [ic=4, ih=64, iw=64]               tensor X f32 [ic=4, ih=18, iw=64]     rows 15 to 32
        tensor W f32 [oc=8, ic=4, kh=3, kw=3]           tensor W f32 [oc=8, ic=4, kh=3, kw=3]
        tensor Y f32 [oc=8, oh=64, ow=64]               tensor Y f32 [oc=8, oh=16, ow=64]     rows 16 to 31
        axes   oh=64 ow=64 oc=8 | kh=3 kw=3 ic=4        axes   oh=16 ow=64 oc=8 | kh=3 kw=3 ic=4
        read   x = X[ic, oh+kh-1, ow+kw-1]              read   x = X[ic, oh+kh, ow+kw-1]
        ...                                             ...

The interval is the range of the coordinate over these positions and all of the other axes. What lies
outside of the whole tensor is no part of it, and is outside of the part, too: each element is computed
from the same values in the same order as in the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from transconv.compute.batch import with_notes
from transconv.compute.compute import Compute
from transconv.compute.parser import parse
from transconv.compute.steps import Read, Write, conditions, needed, used
from transconv.ir import Const, Expr, Layout, Tensor, Var, View, ViewDim, all_of, substitute
from transconv.simplify import Facts, range_of, simplify

AxisSizes = tuple[tuple[str, int], ...]
"""The axes of a computation with their sizes."""


class AxisSpan(NamedTuple):
    """The positions from ``start`` up to ``stop``, which is not one of them."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many positions there are."""
        return self.stop - self.start

    def within(self, other: AxisSpan) -> AxisSpan:
        """The positions of both; with size 0 if there are none."""
        start = max(self.start, other.start)
        return AxisSpan(start, max(start, min(self.stop, other.stop)))

    def seen_from(self, first: int) -> AxisSpan:
        """The same positions, counted from ``first``."""
        return AxisSpan(self.start - first, self.stop - first)

    def around(self, other: AxisSpan) -> AxisSpan:
        """The shortest span with both; one of size 0 counts nothing."""
        if not self.size or not other.size:
            return self if self.size else other
        return AxisSpan(min(self.start, other.start), max(self.stop, other.stop))


def span_of(coord: Expr, sizes: AxisSizes, axis: str, at: AxisSpan) -> AxisSpan | None:
    """The span of a coordinate over some positions of an axis and all of the others; None if it is not
    known."""
    by, first = _shifted(coord, sizes, axis)
    if first is None or not at.size:
        return _span(coord, sizes, axis, at)
    return AxisSpan(first.start + by * at.start, first.stop + by * (at.stop - 1))


@lru_cache(maxsize=1 << 12)
def _shifted(coord: Expr, sizes: AxisSizes, axis: str) -> tuple[int, AxisSpan | None]:
    """The pace of a coordinate, and its span at the first position of an axis, where those at others are
    this one, shifted; None where they may be others."""
    size, by = dict(sizes).get(axis, 0), pace(coord, sizes, axis)
    first = _span(coord, sizes, axis, AxisSpan(0, 1)) if size and by else None
    if first is not None:
        for at in (AxisSpan(0, size), AxisSpan(size - 1, size)):
            shifted = AxisSpan(first.start + by * at.start, first.stop + by * (at.stop - 1))
            if shifted != _span(coord, sizes, axis, at):
                return by, None
    return by, first


@lru_cache(maxsize=1 << 14)
def _span(coord: Expr, sizes: AxisSizes, axis: str, at: AxisSpan) -> AxisSpan | None:
    facts = Facts()
    for name, n in sizes:
        lo, hi = (at.start, at.stop - 1) if name == axis else (0, n - 1)
        facts = facts.with_range(Var(name), lo, hi)
    found = range_of(coord, facts)
    return None if found.lo is None or found.hi is None else AxisSpan(found.lo, found.hi + 1)


@lru_cache(maxsize=1 << 12)
def pace(coord: Expr, sizes: AxisSizes, axis: str) -> int:
    """By how much a coordinate grows with each position of an axis; 0 where that is not always the same,
    or no growth."""
    facts = Facts()
    for name, n in sizes:
        facts = facts.with_range(Var(name), 0, n - 1)
    by = simplify(substitute(coord, {Var(axis): Var(axis) + 1}) - coord, facts)
    return max(0, int(by.value)) if isinstance(by, Const) else 0


@lru_cache(maxsize=1 << 14)
def positions(coord: Expr, sizes: AxisSizes, axis: str, wanted: AxisSpan) -> AxisSpan:
    """The positions of an axis at which a coordinate that grows with it may be one of those wanted."""
    size = dict(sizes)[axis]

    def ends(x: int) -> AxisSpan:
        found = span_of(coord, sizes, axis, AxisSpan(x, x + 1))
        assert found is not None
        return found

    if by := pace(coord, sizes, axis):
        first = ends(0)
        start = -((first.stop - 1 - wanted.start) // by)
        stop = (wanted.stop - 1 - first.start) // by + 1
        return AxisSpan(max(0, start), max(0, min(size, stop)))
    start = _first(size, lambda x: ends(x).stop > wanted.start)
    return AxisSpan(start, _first(size, lambda x: ends(x).start >= wanted.stop))


def _first(size: int, holds: object) -> int:
    """The first position from which on something holds."""
    lo, hi = 0, size
    while lo < hi:
        at = (lo + hi) // 2
        lo, hi = (lo, at) if holds(at) else (at + 1, hi)  # type: ignore[operator]
    return lo


class TensorWindow(NamedTuple):
    """The part of a tensor that a piece sees: the span along a dim, and the strides with which it lies."""

    dim: int
    span: AxisSpan
    strides: tuple[int, ...]


def restricted(compute: Compute, axis: str, at: AxisSpan, windows: Mapping[str, TensorWindow]) -> Compute:
    """The computation of some positions of an axis, over parts of its tensors, which hold what these read
    and store. ``windows``: of each tensor that is given in part."""
    return _restricted(compute, axis, at, tuple(windows.items()))


@lru_cache(maxsize=1 << 12)
def _restricted(
    compute: Compute, axis: str, at: AxisSpan, windows: Sequence[tuple[str, TensorWindow]]
) -> Compute:
    x, own = Var(axis), dict(windows)
    moved: dict[Expr, Expr] = {x: x + at.start} if at.start else {}
    axes = tuple(replace(a, size=at.size) if a.name == axis else a for a in compute.axes)
    facts = Facts()
    for a in axes:  # one position of an axis stays a coordinate, as schedules have it
        facts = facts.with_range(a.var, 0, max(1, a.size - 1))
    tensors = {t: _part(t, own[t.name]) if t.name in own else t for t in compute.tensors}

    def seen(view: View) -> View:
        name, where = view.tensor.name, all_of([substitute(c, moved) for c in conditions(view)])
        dims = []
        for d, dim in enumerate(view.dims):
            behind = own[name].span.start if name in own and own[name].dim == d else 0
            coord = simplify(substitute(dim.coord, moved) - behind, facts)
            dims.append(ViewDim(coord, simplify(where, facts)) if d == 0 else ViewDim(coord))
        return View(tensors[view.tensor], tuple(dims))

    steps = []
    for step in compute.steps:
        if isinstance(step, (Read, Write)):
            if step not in compute.statistics or step.view.tensor.name in own:  # a part has its own places
                step = replace(step, view=seen(step.view))
        steps.append(
            step if isinstance(step, Read) else replace(step, value=substitute(step.value, moved))
        )
    made = replace(compute, axes=axes, steps=tuple(steps))
    return with_notes(parse(str(made)), compute)


def _part(tensor: Tensor, window: TensorWindow) -> Tensor:
    shape = tuple(window.span.size if d == window.dim else n for d, n in enumerate(tensor.shape))
    return replace(tensor, shape=shape, layout=Layout.from_strides(tensor.dtype, shape, window.strides))


@lru_cache(maxsize=1 << 10)
def without_statistics(compute: Compute, kept: frozenset[str] = frozenset()) -> Compute:
    """The computation without the stores that reduce, but for those into tensors of these names, and
    without what only they need."""
    gone = {w for w in compute.statistics if w.view.tensor.name not in kept}
    if not gone:
        return compute
    writes = [w for w in compute.writes if w not in gone]
    steps = {*writes, *needed(compute.steps, (v for w in writes for v in used(w)))}
    return replace(compute, steps=tuple(s for s in compute.steps if s in steps))
