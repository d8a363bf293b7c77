"""Quotients in f32 of which numbers of few bits are made, rounded to nearest; part of the pass ``naive``.

    store y[n] = i8(round(a / s))            ->        store y[n] = i8(round(divided(a, s)))

The languages' own division may be off in the last place. Where an integer or a float of 8 bits is made of
the quotient, or of what reduces quotients, that decides between two neighbours: of 1.5 comes 2, and of the
float below it 1.
"""

from __future__ import annotations

from dataclasses import replace

from transconv.compute import Compute, Read, Reduction, Step, Value, Write
from transconv.ir import Cast, DType, Expr, ExprMutator, Var, divided, free_vars


def nearest_quotients(compute: Compute) -> Compute:
    """The computation with calls of ``divided`` on the way to such numbers: in what is cast and stored,
    and in the values that it names."""
    marking = _Marking()
    steps = [marking.step(s) for s in reversed(compute.steps)]
    return replace(compute, steps=tuple(reversed(steps))) if marking.names else compute


def _is_coarse(dtype: DType) -> bool:
    return dtype.kind == "int" or dtype.is_short


class _Marking(ExprMutator):
    """``names``: of values that become numbers of few bits."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[Var] = set()

    def step(self, at: Step) -> Step:
        if isinstance(at, Read):
            return at
        whole = (_is_coarse(at.view.tensor.dtype) if isinstance(at, Write) else
                 isinstance(at, (Value, Reduction)) and at.var in self.names)
        value = self.made(at.value) if whole else self.mutate(at.value)
        return at if value is at.value else replace(at, value=value)

    def made(self, x: Expr) -> Expr:
        self.names |= free_vars(x)
        return divided(x)

    def mutate_Cast(self, at: Cast) -> Expr:
        coarse = at.x.dtype.kind == "float" and _is_coarse(at.dtype)
        x = self.made(at.x) if coarse else self.mutate(at.x)
        return at if x is at.x else Cast(x, at.dtype)
