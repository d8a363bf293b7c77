"""Expressions that remove, add or rename lanes of a tile."""

from __future__ import annotations

from transconv.ir.dtype import DType
from transconv.ir.expr import Expr, Lane
from transconv.ir.node import node


@node
class Reduce(Expr):
    """The reduction ``op``, a key of ``REDUCERS``, of ``x`` along a lane; the result lacks that lane."""

    op: str
    x: Expr
    lane: Lane

    @property
    def dtype(self) -> DType:
        return self.x.dtype


@node
class Spread(Expr):
    """``x`` broadcast to all of these lanes."""

    x: Expr
    lanes: tuple[Lane, ...]

    @property
    def dtype(self) -> DType:
        return self.x.dtype


@node
class Renamed(Expr):
    """``x`` along other lanes: what varies along ``old[i]`` varies along ``new[i]``, of the same extent.
    Lanes of ``x`` that are not in ``old`` stay. All change at once, so that two lanes can be exchanged."""

    x: Expr
    old: tuple[Lane, ...]
    new: tuple[Lane, ...]

    @property
    def dtype(self) -> DType:
        return self.x.dtype

    def of(self, lane: Lane) -> Lane:
        """What becomes of a lane of ``x``."""
        return dict(zip(self.old, self.new, strict=True)).get(lane, lane)
