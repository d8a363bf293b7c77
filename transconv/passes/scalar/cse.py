"""Passes that leave of equal values one. ``cse`` computes a repeated index expression once:

    a = load(A, m // 56 * 64 + k)             m_div = m // 56
    b = load(R, m // 56 * 32 + k)     ->      a = load(A, m_div * 64 + k)
                                                b = load(R, m_div * 32 + k)

Only divisions and remainders get names, because sums and products are cheap. Lets of equal values are
merged. Where sizes are arguments, each division takes some twenty instructions, one after another; one by
a product then uses what is there:

    b = p // W % H                            p_div = p // W
    a = p // (H*W)                    ->      b = p_div % H
                                              a = p_div // H

``reuse`` loads once what is loaded twice:

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

``lets`` removes unused names and names of names:

    let a_blk = pid // 4                    let a_blk = pid // 4
    let split = 0                   ->      let ow = (a_blk * 128) + m
    let ow_at = (a_blk * 128) + m
    let ow = ow_at
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, TypeVar

from transconv.ir import (
    ASSUME,
    ZERO,
    Alloc,
    BoxLoad,
    BoxStore,
    Const,
    Expr,
    FloorDiv,
    For,
    FuncCall,
    If,
    Kernel,
    Let,
    Load,
    MemoryRead,
    Mod,
    Mul,
    Mutator,
    Node,
    Select,
    Seq,
    Sizes,
    Stmt,
    Store,
    Tensor,
    Var,
    all_of,
    bound_vars,
    conjuncts,
    find,
    free_vars,
    rewrite,
    seq,
    substitute,
    updated,
    walk,
)
from transconv.passes.scope import ScopedMutator, VariableNames
from transconv.simplify import facts_of, range_of, simplify

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


def optimise_lets(kernel: Kernel) -> Kernel:
    """Remove unused lets and inline those that only rename a variable, a constant or a lane."""
    while True:
        uses = Counter(v for v in _mentions(kernel))
        made = _Lets(uses, _held(kernel)).mutate(kernel)
        assert isinstance(made, Kernel)
        if made is kernel:
            return kernel
        kernel = made


def _mentions(kernel: Kernel) -> list[Var]:
    """Every mention of a variable in a value, an offset or an argument (bindings do not count).

    A mention in an ``assume`` does not count: the assumption is removed with the variable.
    """
    found: list[Var] = []
    for at in walk(kernel):
        if isinstance(at, FuncCall) and at.func is ASSUME:
            continue
        if isinstance(at, Stmt):
            for child in at.children():
                if isinstance(child, Expr):
                    found += free_vars(child)
        if isinstance(at, Let):
            found.remove(at.var)
    return found


def _held(kernel: Kernel) -> frozenset[Var]:
    """The names of allocated variables that change while the name may still be read: it holds the value
    from before."""
    held: set[Var] = set()

    def visit(s: Stmt, names: dict[Var, Var]) -> None:
        """``names``: those bound so far, each with the variable that it names."""
        inner = dict(names)
        for part in (c for c in s.children() if isinstance(c, Stmt)):
            visit(part, inner)
            if isinstance(part, Let) and isinstance(part.value, Var):
                inner[part.var] = part.value
            else:
                held.update(name for name, var in inner.items() if var in updated(part))

    visit(kernel, {})
    return frozenset(held)


class _Lets(Mutator):
    def __init__(self, uses: Counter[Var], held: frozenset[Var]) -> None:
        self.uses, self.held = uses, held
        self.values: dict[Node, Expr] = {}

    def mutate(self, at: Node) -> Any:
        if isinstance(at, Expr):
            return substitute(at, self.values)
        return super().mutate(at)

    def mutate_Let(self, let: Let) -> Stmt | None:
        value = substitute(let.value, self.values)
        simple = isinstance(value, (Var, Const)) and value.dtype is let.var.dtype and (
            let.var not in self.held)
        if simple:
            self.values[let.var] = value
            return None
        if not self.uses[let.var]:
            return None
        return let if value is let.value else Let(let.var, value, let.origin)

    def mutate_FuncCall(self, call: FuncCall) -> Stmt | None:
        if call.func is ASSUME:
            condition = substitute(call.args[0], self.values)
            assert isinstance(condition, Expr)
            if not free_vars(condition) or not all(self.uses[v] for v in free_vars(condition)):
                return None
        return self.generic(call)
