"""The pass ``reuse``: loads once what is loaded twice.

    x_0_1 = w + 0 + 1 - 1                   x_0_1 = w
    a_0_1 = load(A, .. x_0_1)               a_0_1 = load(A, .. x_0_1)
    x_1_0 = w + 1 + 0 - 1            ->     acc_0 = acc_0 + a_0_1 * b_1
    a_1_0 = load(A, .. x_1_0)               acc_1 = acc_1 + a_0_1 * b_0
    acc_0 = acc_0 + a_0_1 * b_1
    acc_1 = acc_1 + a_1_0 * b_0

Positions and window elements that are written out (``regs=w.kw``) read the same elements: 8 positions of
a row and a window of 7 have 56 products, of 14 elements. Indices are equal if they simplify to the same
expression, loads if tensor, address and mask are equal. Loads of a tensor that the kernel stores to are
not shared. A constant index is replaced by its number.

Where sizes are arguments, few masks are proved to hold, and those of one address differ. An element that
was loaded under a weaker mask is then not loaded again:

    a_0_1 = load(A, .. x, x < W)                     a_0_1 = load(A, .. x, x < W)
    a_1_0 = load(A, .. x, x < W and w + 1 < W)  ->   a_1_0 = select(w + 1 < W, a_0_1, 0)
"""

from __future__ import annotations

from typing import Any

from transconv.ir import (
    Const,
    Expr,
    For,
    If,
    Kernel,
    Let,
    Load,
    Mutator,
    Node,
    Select,
    Sizes,
    Stmt,
    Store,
    Tensor,
    Var,
    all_of,
    conjuncts,
    find,
    substitute,
)
from transconv.passes.scope import ScopedMutator
from transconv.simplify import simplify


def reuse(kernel: Kernel) -> Kernel:
    """Merge equal indices and equal loads of one sequence and the sequences around it."""
    stored = frozenset(s.tensor for s in find(kernel, Store))
    made = _Reuse(stored, kernel.sizes).mutate(kernel)
    assert isinstance(made, Kernel)
    return made


class _Reuse(ScopedMutator):
    def __init__(self, stored: frozenset[Tensor], sizes: Sizes | None) -> None:
        super().__init__(sizes)
        self.stored = stored
        self.known: dict[Expr, Var] = {}
        self.loaded: dict[tuple[Tensor, Expr, float], tuple[Var, list[Expr]]] = {}
        self.implied: dict[tuple[Expr, Expr], bool] = {}
        self.names: dict[Node, Expr] = {}

    def mutate(self, at: Node) -> Any:
        if isinstance(at, Expr):
            return substitute(at, self.names)
        return super().mutate(at)

    def mutate_Let(self, let: Let) -> Stmt | None:
        value = substitute(let.value, self.names)
        key = self.key(value)
        if isinstance(key, Const):
            self.names[let.var] = key
            return None
        if key is not None and key in self.known:
            self.names[let.var] = self.known[key]
            return None
        if key is not None:
            self.known[key] = let.var
        if self.sized and isinstance(key, Load):
            value = self.under_a_weaker_mask(key, let.var)
            if isinstance(value, Var):
                self.names[let.var] = value
                return None
            if isinstance(value, Select):
                return Let(let.var, value)
        return let if value is let.value else Let(let.var, value, let.origin)

    def key(self, value: Expr) -> Expr | None:
        """A key that is equal for lets of equal values; None for lets that are not merged."""
        if isinstance(value, Load):
            return None if value.tensor in self.stored else value
        if value.dtype.kind != "index" or find(value, Load):
            return None
        key = simplify(self.affine(value), self.facts)
        return None if isinstance(key, Var) else key

    def under_a_weaker_mask(self, load: Load, name: Var) -> Expr:
        """The element as it was loaded before, selected by what the mask says beyond the mask of then; the
        load itself if there is none."""
        parts = list(conjuncts(load.mask))
        place = load.tensor, load.offset, load.fill
        if place not in self.loaded:
            self.loaded[place] = name, parts
            return load
        before, weaker = self.loaded[place]
        if not all(any(self.implies(p, w) for p in parts) for w in weaker):
            return load
        beyond = [p for p in parts if not any(self.implies(w, p) for w in weaker)]
        fill = Const(load.fill if load.dtype.kind == "float" else int(load.fill), load.dtype)
        return Select(all_of(beyond), before, fill) if beyond else before

    def implies(self, a: Expr, b: Expr) -> bool:
        found = self.implied.get((a, b))
        if found is None:
            found = self.implied[a, b] = super().implies(a, b)
        return found

    def inside(self, at: Stmt) -> Stmt:
        """Rewrite a block, then forget its variables: their names may be bound again after it."""
        before = dict(self.known), dict(self.names), dict(self.loaded), self.implied
        self.implied = {}
        made: Stmt = (
            ScopedMutator.mutate_For(self, at) if isinstance(at, For) else Mutator.generic(self, at)
        )
        self.known, self.names, self.loaded, self.implied = before
        return made

    def mutate_For(self, loop: For) -> Stmt:
        return self.inside(loop)

    def mutate_If(self, at: If) -> Stmt:
        return self.inside(at)
