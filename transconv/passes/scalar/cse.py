"""The pass ``cse``: computes a repeated index expression once.

    a = load(A, m // 56 * 64 + k)             m_div = m // 56
    b = load(R, m // 56 * 32 + k)     ->      a = load(A, m_div * 64 + k)
                                                b = load(R, m_div * 32 + k)

Only divisions and remainders get names, because sums and products are cheap. Lets of equal values are
merged. Where sizes are arguments, each division takes some twenty instructions, one after another; one by
a product then uses what is there:

    b = p // W % H                            p_div = p // W
    a = p // (H*W)                    ->      b = p_div % H
                                              a = p_div // H
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, TypeVar

from transconv.ir import (
    ZERO,
    Alloc,
    BoxLoad,
    BoxStore,
    Const,
    Expr,
    FloorDiv,
    For,
    Kernel,
    Let,
    MemoryRead,
    Mod,
    Mul,
    Mutator,
    Node,
    Seq,
    Stmt,
    Var,
    bound_vars,
    find,
    free_vars,
    rewrite,
    seq,
    substitute,
    updated,
)
from transconv.passes.scope import VariableNames
from transconv.simplify import facts_of, range_of

Box = TypeVar("Box", BoxLoad, BoxStore)


def cse(kernel: Kernel) -> Kernel:
    """Name repeated divisions within a sequence, and merge lets that bind the same value."""
    made = _Cse(VariableNames(kernel)).mutate(_one_by_one(kernel))
    assert isinstance(made, Kernel)
    return made


def _one_by_one(kernel: Kernel) -> Kernel:
    """The kernel with divisions by products of sizes as divisions of quotients that it computes anyway."""
    if kernel.sizes is None:
        return kernel
    facts = facts_of(kernel.sizes)
    there = {(e.a, e.b) for e in find(kernel, FloorDiv)}

    def divided(e: Expr) -> Expr:
        if not isinstance(e, FloorDiv) or not isinstance(e.b, Mul):
            return e
        for by, rest in ((e.b.b, e.b.a), (e.b.a, e.b.b)):
            if (e.a, by) in there and all((range_of(x, facts).lo or 0) > 0 for x in (by, rest)):
                return divided(FloorDiv(FloorDiv(e.a, by), rest))
        return e

    return rewrite(kernel, divided)


class _Cse(Mutator):
    def __init__(self, names: VariableNames) -> None:
        self.names = names
        self.known: dict[Node, Expr] = {}

    def mutate(self, at: Node) -> Any:
        if isinstance(at, Expr):
            return substitute(at, self.known)
        return super().mutate(at)

    def mutate_Seq(self, at: Seq) -> Stmt:
        before = dict(self.known)
        made: list[Stmt | None] = []
        repeated = self.repeated(at)
        for s in at.stmts:
            for e in [e for e in repeated if e not in self.known and _inside(e, s)]:
                var = Var(self.fresh(e), e.dtype)
                made.append(Let(var, substitute(e, self.known)))
                self.known[e] = var
            made.append(self.mutate(s))
            self.forget(s)
        self.known = before
        result = seq(*made)
        return at if isinstance(result, Seq) and result.stmts == at.stmts else result

    def mutate_BoxStore(self, at: BoxStore) -> Stmt:
        return replace(self.box(at), value=substitute(at.value, self.known))

    def box(self, at: Box) -> Box:
        """Divisions in ``within`` are not named, because no code computes it: it describes the box. Only
        variables of merged lets are replaced there."""
        merged: dict[Node, Expr] = {v: e for v, e in self.known.items() if isinstance(v, Var)}
        return replace(at, corner=tuple(substitute(c, self.known) for c in at.corner),
                       within=tuple(substitute(w, merged) for w in at.within))

    def mutate_Let(self, let: Let) -> Stmt | None:
        if isinstance(let.value, BoxLoad):
            return Let(let.var, self.box(let.value), let.origin)
        value = substitute(let.value, self.known)
        if let.value in self.known and not isinstance(let.value, MemoryRead):
            self.known[let.var] = self.known[let.value]
            return None
        if not isinstance(value, (Var, Const)) and not find(value, MemoryRead):
            self.known[let.value] = let.var
        return let if value is let.value else Let(let.var, value, let.origin)

    def mutate_Alloc(self, at: Alloc) -> Stmt:
        return at  # its lanes are part of its type

    def mutate_For(self, loop: For) -> Stmt | None:
        before = dict(self.known)
        self.forget(loop)
        made = self.generic(loop)
        self.known = before
        return made

    def forget(self, s: Stmt) -> None:
        """Drop the values that mention what a statement assigns: they have another value behind it."""
        if changed := updated(s):
            self.known = {e: name for e, name in self.known.items()
                          if not isinstance(e, Expr) or not free_vars(e) & changed}

    def repeated(self, at: Seq) -> list[Expr]:
        """Divisions that more than one statement of the sequence contains and that no let names."""
        counts: Counter[Expr] = Counter()
        named = {s.value for s in at.stmts if isinstance(s, Let)}
        inside = {v for s in at.stmts for v in bound_vars(s)}
        for s in at.stmts:
            moved: list[BoxLoad | BoxStore] = [*find(s, BoxLoad), *find(s, BoxStore)]
            inside_boxes = {w for x in moved for w in x.within}
            spelled = substitute(s, dict.fromkeys(inside_boxes, ZERO))
            counts.update(list(dict.fromkeys(e for kind in (FloorDiv, Mod)
                                             for e in find(spelled, kind))))
        own = {s.var for s in at.stmts if isinstance(s, Let)}
        return [e for e, n in counts.items()
                if n > 1 and e not in named and not find_vars(e) & (inside - own)]

    def fresh(self, e: Expr) -> str:
        """A new name for a division: ``m_div``, ``m_mod``."""
        stem = "_".join(v.name for v in find(e, Var)) or "value"
        return self.names.fresh(f"{stem}_{'div' if isinstance(e, FloorDiv) else 'mod'}")


def find_vars(e: Expr) -> set[Var]:
    return set(find(e, Var))


def _inside(e: Expr, s: Stmt) -> bool:
    return any(x is e for x in find(s, type(e)))
