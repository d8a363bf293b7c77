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

Indices are equal if they simplify to the same expression, loads if tensor, address and mask are equal.
Loads of a tensor that the kernel stores to are not shared. A constant index is replaced by its number.

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

from transconv import ir
from transconv.passes.scope import ScopedMutator, VariableNames
from transconv.simplify import facts_of, range_of, simplify

Box = TypeVar("Box", ir.BoxLoad, ir.BoxStore)


def cse(kernel: ir.Kernel) -> ir.Kernel:
    """Name repeated divisions within a sequence, and merge lets that bind the same value."""
    return _Cse(VariableNames(kernel)).rebuilt(_one_by_one(kernel))


def _one_by_one(kernel: ir.Kernel) -> ir.Kernel:
    """The kernel with divisions by products of sizes as divisions of quotients that it computes anyway."""
    if kernel.sizes is None:
        return kernel
    facts = facts_of(kernel.sizes)
    there = {(e.a, e.b) for e in ir.find(kernel, ir.FloorDiv)}

    def divided(e: ir.Expr) -> ir.Expr:
        if not isinstance(e, ir.FloorDiv) or not isinstance(e.b, ir.Mul):
            return e
        for by, rest in ((e.b.b, e.b.a), (e.b.a, e.b.b)):
            if (e.a, by) in there and all((range_of(x, facts).lo or 0) > 0 for x in (by, rest)):
                return divided(ir.FloorDiv(ir.FloorDiv(e.a, by), rest))
        return e

    return ir.rewrite(kernel, divided)


class _Cse(ir.Mutator):
    def __init__(self, names: VariableNames) -> None:
        self.names = names
        self.known: dict[ir.Node, ir.Expr] = {}

    def mutate(self, at: ir.Node) -> Any:
        if isinstance(at, ir.Expr):
            return ir.substitute(at, self.known)
        return super().mutate(at)

    def mutate_Seq(self, at: ir.Seq) -> ir.Stmt:
        before = dict(self.known)
        made: list[ir.Stmt | None] = []
        repeated = self.repeated(at)
        for s in at.stmts:
            for e in [e for e in repeated if e not in self.known and _inside(e, s)]:
                var = ir.Var(self.fresh(e), e.dtype)
                made.append(ir.Let(var, ir.substitute(e, self.known)))
                self.known[e] = var
            made.append(self.mutate(s))
            self.forget(s)
        self.known = before
        result = ir.seq(*made)
        return at if isinstance(result, ir.Seq) and result.stmts == at.stmts else result

    def mutate_BoxStore(self, at: ir.BoxStore) -> ir.Stmt:
        return replace(self.box(at), value=ir.substitute(at.value, self.known))

    def box(self, at: Box) -> Box:
        """Divisions in ``within`` are not named, because no code computes it: it describes the box. Only
        variables of merged lets are replaced there."""
        merged: dict[ir.Node, ir.Expr] = {v: e for v, e in self.known.items() if isinstance(v, ir.Var)}
        return replace(
            at,
            corner=tuple(ir.substitute(c, self.known) for c in at.corner),
            within=tuple(ir.substitute(w, merged) for w in at.within),
        )

    def mutate_Let(self, let: ir.Let) -> ir.Stmt | None:
        if isinstance(let.value, ir.BoxLoad):
            return ir.Let(let.var, self.box(let.value), let.origin)
        value = ir.substitute(let.value, self.known)
        if let.value in self.known and not isinstance(let.value, ir.MemoryRead):
            self.known[let.var] = self.known[let.value]
            return None
        if not isinstance(value, (ir.Var, ir.Const)) and not ir.find(value, ir.MemoryRead):
            self.known[let.value] = let.var
        return let if value is let.value else ir.Let(let.var, value, let.origin)

    def mutate_Alloc(self, at: ir.Alloc) -> ir.Stmt:
        return at  # its lanes are part of its type

    def mutate_For(self, loop: ir.For) -> ir.Stmt | None:
        before = dict(self.known)
        self.forget(loop)
        made = self.generic(loop)
        self.known = before
        return made

    def forget(self, s: ir.Stmt) -> None:
        """Drop the values that mention what a statement assigns: they have another value behind it."""
        if changed := ir.updated(s):
            self.known = {
                e: name
                for e, name in self.known.items()
                if not isinstance(e, ir.Expr) or not ir.free_vars(e) & changed
            }

    def repeated(self, at: ir.Seq) -> list[ir.Expr]:
        """Divisions that more than one statement of the sequence contains and that no let names."""
        counts: Counter[ir.Expr] = Counter()
        named = {s.value for s in at.stmts if isinstance(s, ir.Let)}
        inside = {v for s in at.stmts for v in ir.bound_vars(s)}
        for s in at.stmts:
            moved: list[ir.BoxLoad | ir.BoxStore] = [*ir.find(s, ir.BoxLoad), *ir.find(s, ir.BoxStore)]
            inside_boxes = {w for x in moved for w in x.within}
            spelled = ir.substitute(s, dict.fromkeys(inside_boxes, ir.ZERO))
            counts.update(
                list(dict.fromkeys(e for kind in (ir.FloorDiv, ir.Mod) for e in ir.find(spelled, kind)))
            )
        own = {s.var for s in at.stmts if isinstance(s, ir.Let)}
        return [
            e
            for e, n in counts.items()
            if n > 1 and e not in named and not ir.free_vars(e) & (inside - own)
        ]

    def fresh(self, e: ir.Expr) -> str:
        """A new name for a division: ``m_div``, ``m_mod``."""
        stem = "_".join(v.name for v in ir.find(e, ir.Var)) or "value"
        return self.names.fresh(f"{stem}_{'div' if isinstance(e, ir.FloorDiv) else 'mod'}")


def _inside(e: ir.Expr, s: ir.Stmt) -> bool:
    return any(x is e for x in ir.find(s, type(e)))


def reuse(kernel: ir.Kernel) -> ir.Kernel:
    """Merge equal indices and equal loads of one sequence and the sequences around it."""
    stored = frozenset(s.tensor for s in ir.find(kernel, ir.Store))
    return _Reuse(stored, kernel.sizes).rebuilt(kernel)


class _Reuse(ScopedMutator):
    def __init__(self, stored: frozenset[ir.Tensor], sizes: ir.Sizes | None) -> None:
        super().__init__(sizes)
        self.stored = stored
        self.known: dict[ir.Expr, ir.Var] = {}
        self.loaded: dict[tuple[ir.Tensor, ir.Expr, float], tuple[ir.Var, list[ir.Expr]]] = {}
        self.implied: dict[tuple[ir.Expr, ir.Expr], bool] = {}
        self.names: dict[ir.Node, ir.Expr] = {}

    def mutate(self, at: ir.Node) -> Any:
        if isinstance(at, ir.Expr):
            return ir.substitute(at, self.names)
        return super().mutate(at)

    def mutate_Let(self, let: ir.Let) -> ir.Stmt | None:
        value = ir.substitute(let.value, self.names)
        key = self.key(value)
        if isinstance(key, ir.Const):
            self.names[let.var] = key
            return None
        if key is not None and key in self.known:
            self.names[let.var] = self.known[key]
            return None
        if key is not None:
            self.known[key] = let.var
        if self.sized and isinstance(key, ir.Load):
            value = self.under_a_weaker_mask(key, let.var)
            if isinstance(value, ir.Var):
                self.names[let.var] = value
                return None
            if isinstance(value, ir.Select):
                return ir.Let(let.var, value)
        return let if value is let.value else ir.Let(let.var, value, let.origin)

    def key(self, value: ir.Expr) -> ir.Expr | None:
        """A key that is equal for lets of equal values; None for lets that are not merged."""
        if isinstance(value, ir.Load):
            return None if value.tensor in self.stored else value
        if value.dtype.kind != "index" or ir.find(value, ir.Load):
            return None
        key = simplify(self.affine(value), self.facts)
        return None if isinstance(key, ir.Var) else key

    def under_a_weaker_mask(self, load: ir.Load, name: ir.Var) -> ir.Expr:
        """The element as it was loaded before, selected by what the mask says beyond the mask of then; the
        load itself if there is none."""
        parts = list(ir.conjuncts(load.mask))
        place = load.tensor, load.offset, load.fill
        if place not in self.loaded:
            self.loaded[place] = name, parts
            return load
        before, weaker = self.loaded[place]
        if not all(any(self.implies(p, w) for p in parts) for w in weaker):
            return load
        beyond = [p for p in parts if not any(self.implies(w, p) for w in weaker)]
        fill = ir.Const(load.fill if load.dtype.kind == "float" else int(load.fill), load.dtype)
        return ir.Select(ir.all_of(beyond), before, fill) if beyond else before

    def implies(self, a: ir.Expr, b: ir.Expr) -> bool:
        found = self.implied.get((a, b))
        if found is None:
            found = self.implied[a, b] = super().implies(a, b)
        return found

    def inside(self, at: ir.Stmt) -> ir.Stmt:
        """Rewrite a block, then forget its variables: their names may be bound again after it."""
        before = dict(self.known), dict(self.names), dict(self.loaded), self.implied
        self.implied = {}
        made: ir.Stmt = (
            ScopedMutator.mutate_For(self, at) if isinstance(at, ir.For) else ir.Mutator.generic(self, at)
        )
        self.known, self.names, self.loaded, self.implied = before
        return made

    def mutate_For(self, loop: ir.For) -> ir.Stmt:
        return self.inside(loop)

    def mutate_If(self, at: ir.If) -> ir.Stmt:
        return self.inside(at)


def optimise_lets(kernel: ir.Kernel) -> ir.Kernel:
    """Remove unused lets and inline those that only rename a variable, a constant or a lane."""
    while True:
        uses = Counter(v for v in _mentions(kernel))
        made = _Lets(uses, _held(kernel)).rebuilt(kernel)
        if made is kernel:
            return kernel
        kernel = made


def _mentions(kernel: ir.Kernel) -> list[ir.Var]:
    """Every mention of a variable in a value, an offset or an argument (bindings do not count).

    A mention in an ``assume`` does not count: the assumption is removed with the variable."""
    found: list[ir.Var] = []
    for at in ir.walk(kernel):
        if isinstance(at, ir.FuncCall) and at.func is ir.ASSUME:
            continue
        if isinstance(at, ir.Stmt):
            for child in at.children():
                if isinstance(child, ir.Expr):
                    found += ir.free_vars(child)
        if isinstance(at, ir.Let):
            found.remove(at.var)
    return found


def _held(kernel: ir.Kernel) -> frozenset[ir.Var]:
    """The names of allocated variables that change while the name may still be read: it holds the value
    from before."""
    held: set[ir.Var] = set()

    def visit(s: ir.Stmt, names: dict[ir.Var, ir.Var]) -> None:
        """``names``: those bound so far, each with the variable that it names."""
        inner = dict(names)
        for part in (c for c in s.children() if isinstance(c, ir.Stmt)):
            visit(part, inner)
            if isinstance(part, ir.Let) and isinstance(part.value, ir.Var):
                inner[part.var] = part.value
            else:
                held.update(name for name, var in inner.items() if var in ir.updated(part))

    visit(kernel, {})
    return frozenset(held)


class _Lets(ir.Mutator):
    def __init__(self, uses: Counter[ir.Var], held: frozenset[ir.Var]) -> None:
        self.uses, self.held = uses, held
        self.values: dict[ir.Node, ir.Expr] = {}

    def mutate(self, at: ir.Node) -> Any:
        if isinstance(at, ir.Expr):
            return ir.substitute(at, self.values)
        return super().mutate(at)

    def mutate_Let(self, let: ir.Let) -> ir.Stmt | None:
        value = ir.substitute(let.value, self.values)
        simple = (
            isinstance(value, (ir.Var, ir.Const))
            and value.dtype is let.var.dtype
            and (let.var not in self.held)
        )
        if simple:
            self.values[let.var] = value
            return None
        if not self.uses[let.var]:
            return None
        return let if value is let.value else ir.Let(let.var, value, let.origin)

    def mutate_FuncCall(self, call: ir.FuncCall) -> ir.Stmt | None:
        if call.func is ir.ASSUME:
            condition = ir.substitute(call.args[0], self.values)
            assert isinstance(condition, ir.Expr)
            if not ir.free_vars(condition) or not all(self.uses[v] for v in ir.free_vars(condition)):
                return None
        return self.generic(call)
