"""Drawn expressions of the IR, of whole numbers, floats and conditions, of every operation with a sign."""

from __future__ import annotations

import random
from collections.abc import Sequence

from transconv import ir

WHOLE = (ir.Add, ir.Sub, ir.Mul, ir.FloorDiv, ir.Mod, ir.Min, ir.Max)
BITS = (ir.Shl, ir.Shr, ir.And, ir.Or, ir.Xor)
FLOATS = (ir.Add, ir.Sub, ir.Mul, ir.Div, ir.Min, ir.Max)
COMPARE = (ir.Lt, ir.Le, ir.Eq, ir.Ne)


class Draw:
    """Draws expressions. ``leaves``: variables and lanes; ``bits``: whether operations of bits are drawn;
    ``calls``: whether functions, selections and casts are."""

    def __init__(
        self, seed: int, leaves: Sequence[ir.Expr], bits: bool = True, calls: bool = True
    ) -> None:
        self.rng, self.bits, self.calls = random.Random(seed), bits, calls
        self.whole = [e for e in leaves if e.dtype.is_integer]
        self.floats = [e for e in leaves if e.dtype.kind == "float"]

    def of(self, kind: str, depth: int) -> ir.Expr:
        return {"whole": self.number, "float": self.real, "truth": self.truth}[kind](depth)

    def number(self, depth: int) -> ir.Expr:
        if depth <= 0 or self.rng.random() < 0.1:
            dtype = self.whole[0].dtype
            return self.rng.choice([*self.whole, ir.Const(self.rng.randint(-3, 5), dtype)])
        if self.rng.random() < 0.15:
            return ir.Neg(self.number(depth - 1))
        if self.calls and self.rng.random() < 0.1:
            return ir.Select(self.truth(depth - 1), self.number(depth - 1), self.number(depth - 1))
        op = self.rng.choice(WHOLE + BITS if self.bits else WHOLE)
        a, b = self.number(depth - 1), self.number(depth - 1)
        if op in (ir.FloorDiv, ir.Mod):
            b = ir.Const(self.rng.randint(1, 5), a.dtype)
        if op in (ir.Shl, ir.Shr):
            a, b = ir.Mod(a, ir.Const(64, a.dtype)), ir.Mod(b, ir.Const(4, b.dtype))
        return op(a, b)

    def real(self, depth: int) -> ir.Expr:
        if depth <= 0 or self.rng.random() < 0.1:
            value = self.rng.choice((-2.5, -1.0, 0.5, 3.0))
            return self.rng.choice([*self.floats, ir.Const(value, self.floats[0].dtype)])
        if self.rng.random() < 0.15:
            return ir.Neg(self.real(depth - 1))
        if self.calls and self.rng.random() < 0.15:
            return self.rng.choice(
                (
                    lambda: ir.Select(self.truth(depth - 1), self.real(depth - 1), self.real(depth - 1)),
                    lambda: ir.Call("abs", (self.real(depth - 1),)),
                )
            )()
        return self.rng.choice(FLOATS)(self.real(depth - 1), self.real(depth - 1))

    def truth(self, depth: int) -> ir.Expr:
        if depth <= 1 or self.rng.random() < 0.3:
            kind = (
                self.rng.choice((self.number, self.real))
                if self.whole and self.floats
                else (self.number if self.whole else self.real)
            )
            return self.rng.choice(COMPARE)(kind(depth - 1), kind(depth - 1))
        if self.rng.random() < 0.2:
            return ir.Not(self.truth(depth - 1))
        if self.rng.random() < 0.15:
            return self.rng.choice((ir.Eq, ir.Ne))(self.truth(depth - 1), self.truth(depth - 1))
        return self.rng.choice((ir.And, ir.Or))(self.truth(depth - 1), self.truth(depth - 1))
