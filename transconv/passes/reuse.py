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
"""

from __future__ import annotations

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
    Stmt,
    Store,
    Tensor,
    Var,
    find,
    substitute,
)
from transconv.passes.simplification import Scope
from transconv.simplify import simplify


def reuse(kernel: Kernel) -> Kernel:
    """Merge equal indices and equal loads of one sequence and the sequences around it."""
    stored = frozenset(s.tensor for s in find(kernel, Store))
    made = _Reuse(stored).mutate(kernel)
    assert isinstance(made, Kernel)
    return made


class _Reuse(Scope):
    def __init__(self, stored: frozenset[Tensor]) -> None:
        super().__init__()
        self.stored = stored
        self.known: dict[Expr, Var] = {}
        self.names: dict[Node, Expr] = {}

    def mutate(self, at: Node) -> Node | None:
        if isinstance(at, Expr):
            return substitute(at, self.names)
        return super().mutate(at)  # type: ignore[no-any-return]

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
        return let if value is let.value else Let(let.var, value, let.origin)

    def key(self, value: Expr) -> Expr | None:
        """A key that is equal for lets of equal values; None for lets that are not merged."""
        if isinstance(value, Load):
            return None if value.tensor in self.stored else value
        if value.dtype.kind != "index" or find(value, Load):
            return None
        key = simplify(self.affine(value), self.facts)
        return None if isinstance(key, Var) else key

    def inside(self, at: Stmt) -> Stmt:
        """Rewrite a block, then forget its variables: their names may be bound again after it."""
        before = dict(self.known), dict(self.names)
        made: Stmt = Scope.mutate_For(self, at) if isinstance(at, For) else Mutator.generic(self, at)
        self.known, self.names = before
        return made

    def mutate_For(self, loop: For) -> Stmt:
        return self.inside(loop)

    def mutate_If(self, at: If) -> Stmt:
        return self.inside(at)
