"""The reductions of ``Reduce``: one row each, with its neutral element, its meaning in NumPy, the node
that combines two values, and its spelling. All of them propagate NaN, as in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from transconv.ir.dtype import DType
from transconv.ir.expr import Add, Const, Expr, Max, Min, Mul

_HELPER = '''
@{{jit}}
def {name}_of(a, b):
    """{says}"""
    return {body}
'''


@dataclass(frozen=True, slots=True)
class Reducer:
    """A reduction. ``neutral``: its initial value; ``helper``: the source of a function that combines
    two values, where the languages have no reduction of this name that propagates NaN."""

    neutral: float
    numpy: Callable[..., Any]
    node: Callable[[Expr, Expr], Expr]  # the class of a node
    helper: str = ""

    def identity(self, dtype: DType) -> Const:
        """The neutral element as a constant of a type; integers have their limits for infinities."""
        if dtype.kind == "float":
            return Const(self.neutral, dtype)
        least, most = dtype.limits
        return Const(int(min(max(self.neutral, least), most)), dtype)


def _helper(name: str, says: str, body: str) -> str:
    return _HELPER.format(name=name, says=says, body=body)


REDUCERS = {
    "sum": Reducer(0.0, np.sum, Add),
    "prod": Reducer(1.0, np.prod, Mul, _helper("prod", "The product of two values.", "a * b")),
    "max": Reducer(float("-inf"), np.max, Max, _helper(
        "max", "The greater of two values, NaN if one is.",
        "{tl}.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)")),
    "min": Reducer(float("inf"), np.min, Min, _helper(
        "min", "The lesser of two values, NaN if one is.",
        "{tl}.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)")),
}
"""The reductions, by name."""


def reducer_of(node: type[Expr]) -> str:
    """The name of the reduction that combines values by this node class; StopIteration if none does."""
    return next(name for name, row in REDUCERS.items() if row.node is node)
