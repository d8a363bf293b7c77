"""Expressions that remove or add lanes of a tile."""

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
