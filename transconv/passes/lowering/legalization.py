"""The pass ``final``: rewrites what the target language spells differently.

Floor division. The IR rounds down; Triton, like C, rounds towards zero, which differs if one side is
negative. A numerator that may be negative is shifted by a multiple of the divisor, if its type holds the
sum. For a divisor that may be negative what is rounded towards zero is corrected; neither side changes its
sign, as the least number of a type has no opposite:

    (x - 1) // 4   with x >= 0   ->   (x - 1 + 4) // 4 - 1
    x // -4                      ->   select(x % -4 > 0, x // -4 - 1, x // -4)
    x % -4                       ->   select(x % -4 > 0, x % -4 - 4, x % -4)

A division of such numbers is spelled as one of unsigned numbers where the divisor is a size that is an
argument.

Two bounds that leave one value. The LLVM of Triton 3.6 folds such a mask of remainders to false, so an
equality replaces them, also if the pass ``simplify`` is switched off:

    (0 <= x) & (x < 1)   ->   x == 0

16-bit and 8-bit arithmetic. A target without it (Triton's interpreter computes bf16 on raw bits) gets
operands cast to f32 as soon as they are loaded or rounded; products of such floats are exact in f32. What
a product in blocks takes stays what it is. f64 becomes bf16 by way of f32 there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transconv import ir
from transconv.passes.scope import ScopedMutator
from transconv.simplify import Range, one_value, range_of

FARTHEST = 1 << 24  # a numerator below -FARTHEST is not shifted, because the sum could overflow 32 bits


def final(kernel: ir.Kernel, upcast16: bool = False) -> ir.Kernel:
    """Make every division one that may round down or towards zero, turn bounds that leave one value
    into equalities, and with ``upcast16`` cast 16-bit operands to f32."""
    calls = [s for s in ir.find(kernel, ir.FuncCall) if s.func.takes_scales]
    taken = {v for s in calls for e in s.args[1:] for v in ir.find(e, ir.Var)}
    body = _Final(upcast16, kernel.sizes, taken).mutate(kernel.body)
    assert isinstance(body, ir.Stmt)
    return replace(kernel, body=body)


class _Final(ScopedMutator):
    def __init__(self, upcast16: bool, sizes: ir.Sizes | None, taken: set[ir.Var]) -> None:
        super().__init__(sizes)
        self.upcast16, self.taken = upcast16, taken
        self.cast: dict[ir.Node, ir.Expr] = {}

    def mutate(self, at: ir.Node) -> Any:
        if isinstance(at, ir.Expr):
            return _Spelled(self, self.cast).mutate(at)
        return super().mutate(at)

    def told(self, before: ir.Stmt, after: ir.Stmt | None) -> ir.Stmt | None:
        """What was there: of a division that is spelled as a call, no range is known."""
        return before

    def mutate_Let(self, let: ir.Let) -> ir.Stmt:
        value = self.mutate(let.value)
        assert isinstance(value, ir.Expr)
        short = value.dtype.kind == "float" and value.dtype.bits <= 16
        if self.upcast16 and short and let.var not in self.taken:
            wide = ir.Var(let.var.name, ir.f32)
            self.cast[let.var] = wide
            return ir.Let(wide, ir.Cast(value, ir.f32), let.origin)
        return let if value is let.value else ir.Let(let.var, value, let.origin)

    def mutate_Alloc(self, at: ir.Alloc) -> ir.Stmt:
        init = self.mutate(at.init)
        assert isinstance(init, ir.Expr)
        return replace(at, init=init)

    def mutate_Store(self, at: ir.Store) -> ir.Stmt:
        offset, value, mask = (self.mutate(e) for e in (at.offset, at.value, at.mask))
        return ir.Store(at.tensor, offset, value, mask)

    def mutate_Update(self, at: ir.Update) -> ir.Stmt:
        return ir.Update(at.var, self.mutate(at.value))

    def mutate_FuncCall(self, at: ir.FuncCall) -> ir.Stmt:
        args = [self.mutate(a) if isinstance(a, ir.Expr) else a for a in at.args]
        return ir.FuncCall(at.func, tuple(args))


class _Spelled(ir.ExprMutator):
    def __init__(self, scope: _Final, cast: dict[ir.Node, ir.Expr]) -> None:
        super().__init__()
        self.scope = scope
        self.done.update(cast)

    def interval(self, e: ir.Expr) -> Range:
        return range_of(self.scope.whole(e), self.scope.facts)

    def mutate_Cast(self, at: ir.Cast) -> ir.Expr:
        made = self.generic(at)
        if self.scope.upcast16 and at.type is ir.bf16 and made.x.dtype is ir.f64:
            return ir.Cast(ir.Cast(made.x, ir.f32), ir.bf16)
        return made

    def mutate_And(self, at: ir.And) -> ir.Expr:
        return one_value(self.generic(at))

    def mutate_FloorDiv(self, at: ir.FloorDiv) -> ir.Expr:
        return self.division(at, self.quotient, self.quotient_by_any)

    def mutate_Mod(self, at: ir.Mod) -> ir.Expr:
        return self.division(at, self.remainder, self.remainder_by_any)

    def division(
        self,
        at: ir.FloorDiv | ir.Mod,
        positive: Callable[[ir.Expr, ir.Expr], ir.Expr],
        of_any: Callable[[ir.Expr, ir.Expr], ir.Expr],
    ) -> ir.Expr:
        """``positive(a, b)`` for a divisor that is not negative, else ``of_any(a, b)``."""
        if not at.dtype.is_integer:
            return self.generic(at)
        low = self.interval(at.b).lo
        made = (of_any if low is None or low < 0 else positive)(at.a, at.b)
        return made if made.dtype is at.dtype else ir.Cast(made, at.dtype)

    def quotient(self, a: ir.Expr, b: ir.Expr) -> ir.Expr:
        """``a // b`` where ``b`` is positive."""
        low, x, by = self.interval(a).lo, self.mutate(a), self.mutate(b)
        if low is not None and low >= 0:
            return ir.Call("quotient", (x, by)) if _unknown(x, by) else ir.FloorDiv(x, by)
        if isinstance(by, ir.Const) and (shift := self.shift(a, int(by.value))) is not None:
            return ir.FloorDiv(_plus(x, shift * int(by.value)), by) - shift
        last = ir.Const(-1, x.dtype)
        return ir.Select(x < 0, last - ir.FloorDiv(last - x, by), ir.FloorDiv(x, by))

    def remainder(self, a: ir.Expr, b: ir.Expr) -> ir.Expr:
        """``a % b`` where ``b`` is positive. Remainders are taken of numbers that are not negative: the
        emitter may keep only the bits that these have."""
        low, x, by = self.interval(a).lo, self.mutate(a), self.mutate(b)
        if low is not None and low >= 0:
            return ir.Call("remainder", (x, by)) if _unknown(x, by) else ir.Mod(x, by)
        if isinstance(by, ir.Const) and (shift := self.shift(a, int(by.value))) is not None:
            return ir.Mod(_plus(x, shift * int(by.value)), by)
        last = ir.Const(-1, x.dtype)
        most = ir.Const(int(by.value) - 1, by.dtype) if isinstance(by, ir.Const) else by + last
        return ir.Select(x < 0, most - ir.Mod(last - x, by), ir.Mod(x, by))

    def shift(self, a: ir.Expr, by: int) -> int | None:
        """How many divisors make ``a`` a number that is not negative, or None where the sum could be
        beyond its type."""
        known, most = self.interval(a), a.dtype.limits[1]
        if known.lo is None or known.lo < -FARTHEST:
            return None
        shift = -(known.lo // by)
        return shift if known.hi is None or known.hi + shift * by <= most else None

    def quotient_by_any(self, a: ir.Expr, b: ir.Expr) -> ir.Expr:
        """``a // b`` where ``b`` may be negative: one less than that towards zero where a rest is left
        that has not the divisor's sign."""
        x, by = self.mutate(a), self.mutate(b)
        made = ir.FloorDiv(x, by)
        return ir.Select(_apart(ir.Mod(x, by), by), made - 1, made)

    def remainder_by_any(self, a: ir.Expr, b: ir.Expr) -> ir.Expr:
        """``a % b`` where ``b`` may be negative."""
        x, by = self.mutate(a), self.mutate(b)
        rest = ir.Mod(x, by)
        return ir.Select(_apart(rest, by), rest + by, rest)


def _apart(rest: ir.Expr, by: ir.Expr) -> ir.Expr:
    """Whether a rest has the other sign than its divisor. Rounded down, none has."""
    if isinstance(by, ir.Const):
        return rest > 0
    return ir.ne(rest, ir.Const(0, rest.dtype)) & ir.ne(rest < 0, by < 0)


def _plus(x: ir.Expr, n: int) -> ir.Expr:
    """``x + n``, with one constant: ``kh - 1 + 2`` is ``kh + 1``."""
    match x:
        case ir.Add(a, ir.Const(int(c))) | ir.Sub(a, ir.Const(int(c))) if x.dtype.kind == "index":
            more = n + (c if isinstance(x, ir.Add) else -c)
            number = ir.Const(abs(more), x.b.dtype)
            return a if more == 0 else a + number if more > 0 else a - number
    return x + n


def _unknown(a: ir.Expr, b: ir.Expr) -> bool:
    """Whether neither is a number, and both have 32 bits."""
    constant = isinstance(a, ir.Const) or isinstance(b, ir.Const)
    return not constant and a.dtype.bits == b.dtype.bits == 32
