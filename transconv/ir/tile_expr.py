"""Expressions that remove or add lanes of a tile."""

from __future__ import annotations

from transconv.ir.dtype import DType
from transconv.ir.expr import Expr, Lane
from transconv.ir.node import node


@node
class Reduce(Expr):
    """The reduction ``op`` (see reductions.py) of ``x`` along a lane, which the result lacks."""

    op: str
    x: Expr
    lane: Lane

    @property
    def dtype(self) -> DType:
        return self.x.dtype


@node
class Spread(Expr):
    """``x`` with all of these lanes: repeated along those that it does not vary along."""

    x: Expr
    lanes: tuple[Lane, ...]

    @property
    def dtype(self) -> DType:
        return self.x.dtype
