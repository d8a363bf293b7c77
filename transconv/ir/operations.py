"""Expressions without a Python operator: selections, casts and calls."""

from __future__ import annotations

from transconv.ir.dtype import DType, promote
from transconv.ir.expr import Expr
from transconv.ir.functions.calls import CALLS
from transconv.ir.node import node


@node
class Select(Expr):
    """``yes`` where ``cond`` holds, else ``no``."""

    cond: Expr
    yes: Expr
    no: Expr

    @property
    def dtype(self) -> DType:
        return promote(self.yes.dtype, self.no.dtype)


@node
class Cast(Expr):
    """``x`` in another type: a float is rounded to nearest, and truncated to an integer."""

    x: Expr
    type: DType

    @property
    def dtype(self) -> DType:
        return self.type


@node
class Call(Expr):
    """A pure function of its arguments, by name (``exp``, ``tanh``, ``fma`` ...)."""

    name: str
    args: tuple[Expr, ...]

    @property
    def dtype(self) -> DType:
        callee = CALLS.get(self.name)
        return self.taken if callee is None or callee.result is None else callee.result

    @property
    def taken(self) -> DType:
        """The one type that the arguments are converted to."""
        kind = self.args[0].dtype
        for a in self.args[1:]:
            kind = promote(kind, a.dtype)
        return kind
