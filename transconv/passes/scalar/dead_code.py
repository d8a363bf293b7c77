"""Removes sums of nothing from a kernel whose masks are simplified; part of the pass ``simplify``.

    acc: f32[m:64, n:32] = 0                            acc: f32[m:64, n:32] = 0
    for step in 0..2:                                   store(C, .., acc)
        a = load(A, .., mask=False)            ->
        b = load(B, .., mask=kd < 7)
        acc = acc + a * b
    store(C, .., acc)

All window elements of a stride phase may lie in the padding. A load whose mask is never true gives its
fill value; if that is 0, its products are 0. Triton 3.6 fails on a loop of such loads in a persistent
kernel.
"""

from __future__ import annotations

from collections import Counter

from transconv.ir import (
    ASSUME,
    FALSE,
    Add,
    Cast,
    Expr,
    For,
    FuncCall,
    Kernel,
    Let,
    Load,
    Mul,
    Mutator,
    Node,
    Reduce,
    Spread,
    Stmt,
    Update,
    Var,
    find,
    statements,
    walk,
)


def drop_dead_sums(kernel: Kernel) -> Kernel:
    """Remove products whose operand is never loaded, then loops without a product, then lets that are no
    longer used."""
    lets = find(kernel, Let)
    read = {s.var for s in lets if not _never_read(s.value)}
    nothing = {s.var for s in lets} - read
    if not nothing:
        return kernel
    made = _Dead(nothing).rebuilt(kernel)
    mentions = Counter(at for at in walk(made) if isinstance(at, Var))  # a let mentions its variable once
    return _Unnamed({v for v in nothing if mentions[v] == 1}).rebuilt(made)


def _never_read(e: Expr) -> bool:
    return isinstance(e, Load) and e.mask is FALSE and e.fill == 0


class _Dead(Mutator):
    def __init__(self, nothing: set[Var]) -> None:
        self.nothing = nothing

    def is_zero(self, e: Node) -> bool:
        match e:
            case Var():
                return e in self.nothing
            case Cast(x) | Spread(x) | Reduce("sum", x):
                return self.is_zero(x)
            case Mul(a, b):
                return self.is_zero(a) or self.is_zero(b)
        return False

    def mutate_Update(self, at: Update) -> Stmt | None:
        match at.value:
            case Add(old, product) if old is at.var and self.is_zero(product):
                return None
        return at

    def mutate_FuncCall(self, at: FuncCall) -> Stmt | None:
        return None if at.func.multiplies and any(map(self.is_zero, at.args[1:])) else at

    def mutate_For(self, loop: For) -> Stmt | None:
        made: Stmt = self.generic(loop)
        if made is loop or not isinstance(made, For) or made.kind not in ("serial", "unroll"):
            return made
        return None if _only_names(made.body) else made


class _Unnamed(Mutator):
    def __init__(self, names: set[Var]) -> None:
        self.names = names

    def mutate_Let(self, let: Let) -> Stmt | None:
        return None if let.var in self.names else let


def _only_names(body: Stmt) -> bool:
    """Whether a block has no effect outside of it: it consists of lets and assumptions."""
    return all(isinstance(s, Let) or isinstance(s, FuncCall) and s.func is ASSUME
               for s in statements(body))
