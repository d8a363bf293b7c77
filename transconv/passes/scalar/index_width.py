"""The pass ``narrow``: chooses 32 or 64 bits for every index.

An index expression has 32 bits if all values in it, including intermediate ones, are proved to fit.
Otherwise its largest parts that fit are computed in 32 bits and cast to 64:

    n*4294967296 + h*8192 + w    ->    index64(n)*4294967296 + index64(h*8192 + w)

Where sizes are arguments, what cannot be proved may become a requirement (scalar/index_bounds.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from transconv.ir import (
    ASSUME,
    Arithmetic,
    BoxLoad,
    BoxStore,
    Cast,
    Compare,
    Const,
    Expr,
    For,
    FuncCall,
    Kernel,
    Lane,
    Let,
    Load,
    Node,
    Select,
    Stmt,
    Store,
    Update,
    Var,
    free_vars,
    index,
    index64,
    substitute,
)
from transconv.passes.scalar.index_bounds import Reach, required
from transconv.passes.scope import ScopedMutator
from transconv.simplify import range_of

LIMIT = 2**31 - 1
B = TypeVar("B", BoxLoad, BoxStore)


def narrow(kernel: Kernel) -> Kernel:
    """Insert casts to index64 where a 32-bit index could overflow."""
    pass_ = _Narrow(kernel)
    body = pass_.mutate(kernel.body)
    return replace(required(kernel, pass_.reach.required if pass_.reach else {}), body=body)


class _Narrow(ScopedMutator):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel.sizes)
        self.wide: dict[Node, Expr] = {}
        self.reach = Reach(kernel, LIMIT, self.whole, self.is_not_negative) if kernel.sizes else None

    def fits(self, e: Expr) -> bool:
        """Whether every value in the expression is proved to fit into 32 bits."""
        if isinstance(e, (Load,)):
            return self.fits(e.offset)
        if e.dtype is index:  # other integers keep the type of their tensor
            found = range_of(self.whole(e), self.facts)
            if found.lo is None or found.hi is None or found.lo < -LIMIT - 1 or found.hi > LIMIT:
                return False
        return all(self.fits(c) for c in e.children() if isinstance(c, Expr))

    def is_not_negative(self, e: Expr) -> bool:
        """Whether a value is known not to be negative."""
        low = range_of(self.whole(e), self.facts).lo
        return low is not None and low >= 0

    def index(self, e: Expr) -> Expr:
        e = substitute(e, self.wide)
        return e if self.fits(e) or self.reach and self.reach.fits(e) else self.widen(e)

    def widen(self, e: Expr) -> Expr:
        """The same value in 64 bits."""
        if e.dtype.kind in ("float", "int"):  # indices inside may need 64 bits, the value itself does not
            own: dict[Node, Expr] = {c: self.index(c) for c in e.children() if isinstance(c, Expr)}
            return substitute(e, own)
        if isinstance(e, Const):
            return Const(e.value, index64)
        if isinstance(e, Cast) and e.type is index:  # an integer of a tensor, used as an address
            return Cast(e.x, index64)
        if isinstance(e, (Var, Lane)) or self.fits(e):
            return e if e.dtype is index64 else Cast(e, index64)
        if isinstance(e, (Arithmetic, Compare)):
            return type(e)(self.widen(e.a), self.widen(e.b))  # type: ignore[call-arg]
        if isinstance(e, Select):
            return Select(self.index(e.cond), self.widen(e.yes), self.widen(e.no))
        changes: dict[Node, Expr] = {c: self.index(c) for c in e.children() if isinstance(c, Expr)}
        return substitute(e, changes)

    def bound(self, e: Expr) -> Expr:
        return self.index(e)

    def mutate_For(self, loop: For) -> Stmt:
        """Tiles are counted in 32 bits, also where their number is computed in 64."""
        if self.reach:
            self.reach.learn(loop)
        made = super().mutate_For(loop)
        if isinstance(made, For) and made.programs and made.until is not None and made.stop <= LIMIT and (
                made.until.dtype is index64):
            made = replace(made, until=Cast(made.until, index))
        return made

    def mutate_Let(self, let: Let) -> Stmt:
        if isinstance(let.value, BoxLoad):
            return Let(let.var, self.box(let.value), let.origin)
        if isinstance(let.value, Load):
            load = let.value
            narrow = replace(load, offset=self.index(load.offset), mask=self.index(load.mask))
            return Let(let.var, narrow, let.origin)
        if self.reach:
            self.reach.learn(let)
        value = self.index(let.value)
        if value.dtype is index64 and let.var.type is index:
            var = Var(let.var.name, index64)
            self.wide[let.var] = var
            return Let(var, value, let.origin)
        return let if value is let.value else Let(let.var, value, let.origin)

    def box(self, at: B) -> B:
        """A coordinate counts along one dimension, so it fits, also if it is computed in 64 bits."""
        if not self.wide:
            return at
        seen = [substitute(c, self.wide) for c in at.corner]
        wide = {*self.wide.values()}
        return replace(at, corner=tuple(Cast(self.widen(c), index) if free_vars(c) & wide else c
                                        for c in seen))

    def mutate_BoxStore(self, at: BoxStore) -> Stmt:
        return replace(self.box(at), value=substitute(at.value, self.wide))

    def mutate_Store(self, at: Store) -> Stmt:
        value = substitute(at.value, self.wide)
        return Store(at.tensor, self.index(at.offset), value, self.index(at.mask))

    def mutate_Update(self, at: Update) -> Stmt:
        return Update(at.var, substitute(at.value, self.wide))

    def mutate_FuncCall(self, at: FuncCall) -> Stmt:
        if self.reach and at.func is ASSUME and isinstance(at.args[0], Expr):
            self.reach.assume(at.args[0])
        return FuncCall(at.func, tuple(self.index(a) if isinstance(a, Expr) and a.dtype.kind != "float"
                                       else a for a in at.args))
