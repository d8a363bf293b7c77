"""The pass ``simplify``: shorter index arithmetic and fewer masks, with the facts used in each proof.

The pass walks the kernel in program order and gathers facts: the ranges of loops and lanes, those of the
values of lets, and conditions of ``assume``. Affine lets (``y = h*2 + kh``) are expanded in addresses, so
that an address is one polynomial, which later passes can split; lets that divide (``h = m // 28 % 28``)
keep their names. A mask condition that always holds is dropped, and a note of the kernel gives the reason;
so are sums of elements that are never loaded (``drop_dead_sums``):

    acc: f32[m:64, n:32] = 0                            acc: f32[m:64, n:32] = 0
    for step in 0..2:                                   store(C, .., acc)
        a = load(A, .., mask=False)            ->
        b = load(B, .., mask=kd < 7)
        acc = acc + a * b
    store(C, .., acc)

All window elements of a stride phase may lie in the padding. A load whose mask is never true gives its
fill value; if that is 0, its products are 0. Triton 3.6 fails on a loop of such loads in a persistent
kernel."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TypeVar

from transconv import ir
from transconv.passes.scope import NOT_AFFINE, ScopedMutator, divides
from transconv.simplify import Verdict, decide, one_value, reason, simplify, truths_at_points


def _follows_in_memory(lane: ir.Lane, address: ir.Expr) -> bool:
    """Whether the elements of a lane follow one another in memory."""
    return simplify(ir.substitute(address, {lane: lane + 1}) - address) is ir.Const(1)


MOVED_BITS = 128  # that a lane loads or stores at once, at most
SHORTEST = 4  # elements of a run between two turns of its mask, so that the compiler had better see it


def _is_multiple(e: ir.Expr, of: int) -> bool:
    return isinstance(e, ir.Const) and int(e.value) % of == 0


def _shortest_cut(mask: ir.Expr, lanes: set[ir.Lane]) -> int:
    """Elements between two turns of a mask along lanes, by the numbers that it divides them by; no fewer
    than ``SHORTEST`` if it divides none."""
    divided = [n for n in ir.walk(mask) if isinstance(n, ir.FloorDiv) and lanes & {*ir.find(n.a, ir.Lane)}]
    return min((int(n.b.value) for n in divided if isinstance(n.b, ir.Const)), default=SHORTEST)


def simplify_kernel(kernel: ir.Kernel) -> ir.Kernel:
    """Simplify every index and mask of a kernel."""
    pass_ = _Simplify(kernel.sizes)
    body = pass_.mutate(kernel.body)
    notes = [
        line
        for note in dict.fromkeys(pass_.notes)
        for line in textwrap.wrap(note, NOTE_WIDTH, subsequent_indent="    ")
    ]
    return drop_dead_sums(replace(kernel, body=body, notes=(*kernel.notes, *notes)))


def _by(verdict: Verdict) -> str:
    """The rule of a verdict, in words; nothing for the rewriting rules."""
    return "" if verdict.rule == "simplify" else f" by {verdict.rule}"


NOTE_WIDTH = 96  # characters after the comment sign


B = TypeVar("B", ir.BoxLoad, ir.BoxStore)


class _Simplify(ScopedMutator):
    def __init__(self, sizes: ir.Sizes | None) -> None:
        super().__init__(sizes)
        self.notes: list[str] = []

    def bound(self, e: ir.Expr) -> ir.Expr:
        return simplify(self.affine(e), self.facts)

    def index(self, e: ir.Expr) -> ir.Expr:
        """The address over loop variables and lanes if all divisions cancel (the tile is contiguous in
        memory), else with the names of lets that divide."""
        whole = simplify(self.whole(e), self.facts)
        if not divides(whole):
            return whole
        return simplify(self.affine(e), self.facts)

    def along_lanes(self, at: ir.Load | ir.Store, mask: ir.Expr) -> ir.Expr:
        """The address of what is loaded or stored under a mask, without the names of lets that have lanes,
        of all or of one axis, if their divisions cancel and these lanes then follow one another in memory.
        The compiler moves elements one by one in runs that it does not see; it sees those between
        multiples of what a lane moves at once, except of bytes. Runs that the mask cuts into pieces of few
        elements, as the columns of three features at the edge of an image, are left as they are: their
        lanes would be dealt to a warp, each of which then has a row's address for every row of the tile
        (on sm_90 223 registers of a stem, not 125)."""
        named, each = self.index(at.offset), MOVED_BITS // at.tensor.dtype.bits
        lets = [self.whole(self.defs[v]) for v in ir.free_vars(named) if v in self.defs]
        cuts = [n for e in lets for n in ir.walk(e) if isinstance(n, ir.FloorDiv | ir.Mod)]
        parts = [n.b for n in cuts if ir.find(n, ir.Lane)]
        if not parts or (each < MOVED_BITS // 8 and all(_is_multiple(b, each) for b in parts)):
            return named
        lanes = dict.fromkeys(x for e in lets for x in ir.find(e, ir.Lane))
        if _shortest_cut(self.whole(mask), {*lanes}) < SHORTEST:
            return named
        for some in ({*lanes}, *({x} for x in lanes)):
            along = simplify(self._expand(at.offset, {}, partial(self._is_along, some)), self.facts)
            divided = {x for n in ir.walk(along) if isinstance(n, NOT_AFFINE) for x in ir.find(n, ir.Lane)}
            if not divided & some and any(
                _follows_in_memory(x, along) and not _follows_in_memory(x, named) for x in some
            ):
                return along
        return named

    def _is_along(self, some: set[ir.Lane], value: ir.Expr) -> bool:
        """Whether a let is expanded: it does not divide, or has no other lanes than ``some``, and any."""
        lanes = {*ir.find(self.whole(value), ir.Lane)}
        return not divides(value) or bool(lanes and lanes <= some)

    def mask(self, mask: ir.Expr, tensor: str) -> ir.Expr:
        kept: list[ir.Expr] = []
        notes: list[str] = []
        for part in ir.conjuncts(mask):
            verdict = decide(simplify(self.whole(part), self.facts), self.facts)
            if verdict is None:
                kept.append(part)
                continue
            truth = f"{'always' if verdict.truth else 'never'} true{_by(verdict)}: {self.why(part)}"
            if not verdict.truth:
                self.notes.append(f"{tensor}: {ir.readable(part)} is {truth}")
                return ir.FALSE
            notes.append(f"{tensor}: {ir.readable(part)} is {truth}")
        self.notes += notes
        kept = self.independent(ir.conjuncts(one_value(ir.all_of(kept), self.facts)), tensor)
        return simplify(ir.all_of(kept), self.facts)

    def independent(self, parts: list[ir.Expr], tensor: str) -> list[ir.Expr]:
        """The conditions without those that hold where the others hold, as that a fused axis is within its
        first dimension where it is within all of them; FALSE alone if one holds nowhere there."""
        wholes = {part: simplify(self.whole(part), self.facts) for part in parts}
        kept = list(wholes)
        for part in reversed(list(wholes)):
            others = [other for other in kept if other is not part]
            given = [wholes[other] for other in others]
            if len(truths_at_points(wholes[part], self.facts, given)) == 2:
                continue  # nothing can be proved
            facts = self.facts.knowing(given)
            verdict = decide(simplify(wholes[part], facts), facts)
            if verdict is None:
                continue
            if not verdict.truth:
                self.notes.append(f"{tensor}: {ir.readable(ir.all_of(parts))} is never true{_by(verdict)}")
                return [ir.FALSE]
            kept = others
            if verdict.rule != "simplify":
                rest = ir.readable(ir.all_of(others))
                self.notes.append(f"{tensor}: {ir.readable(part)} holds where {rest} does,{_by(verdict)}")
        return kept

    def why(self, condition: ir.Expr) -> str:
        """The facts that decide a condition, over the names of lets if those suffice."""
        near = self.affine(condition)
        decided = isinstance(simplify(near, self.facts), ir.Const)
        far = near if decided else self.whole(condition)
        return reason(far, self.facts)

    def mutate_Let(self, let: ir.Let) -> ir.Stmt:
        if isinstance(let.value, ir.Load):
            return ir.Let(let.var, self.load(let.value), let.origin)
        if isinstance(let.value, ir.BoxLoad):
            return ir.Let(let.var, self.box(let.value), let.origin)
        if let.value.dtype.kind == "float":
            return let
        return ir.Let(let.var, simplify(let.value, self.facts), let.origin)

    def load(self, at: ir.Load) -> ir.Load:
        mask = self.mask(at.mask, at.tensor.name)
        return replace(at, offset=self.along_lanes(at, mask), mask=mask)

    def box(self, at: B) -> B:
        """Simplify the corner; expand ``within`` to an expression of lanes alone."""
        corner = tuple(simplify(self.affine(c), self.facts) for c in at.corner)
        within = tuple(simplify(self.whole(w), self.facts) for w in at.within)
        return replace(at, corner=corner, within=within)

    def mutate_BoxStore(self, at: ir.BoxStore) -> ir.Stmt:
        return self.box(at)

    def mutate_Store(self, at: ir.Store) -> ir.Stmt:
        mask = self.mask(at.mask, at.tensor.name)
        return ir.Store(at.tensor, self.along_lanes(at, mask), at.value, mask)

    def mutate_FuncCall(self, at: ir.FuncCall) -> ir.Stmt:
        if at.func is not ir.ATOMIC_ADD:
            return at
        tensor, offset, value, mask = at.args
        assert isinstance(tensor, ir.Tensor)
        assert isinstance(offset, ir.Expr) and isinstance(mask, ir.Expr)
        return ir.FuncCall(at.func, (tensor, self.index(offset), value, self.mask(mask, tensor.name)))

    def mutate_Update(self, at: ir.Update) -> ir.Node:
        return self.loads(at)

    def mutate_Alloc(self, at: ir.Alloc) -> ir.Node:
        return at

    def mutate_If(self, at: ir.If) -> ir.Stmt | None:
        cond = simplify(self.whole(at.cond), self.facts)
        if cond is ir.TRUE:
            made: ir.Stmt | None = self.mutate(at.then)
            return made
        other = self.mutate(at.other) if at.other is not None else None
        return ir.If(at.cond, self.mutate(at.then), other)

    def loads(self, at: ir.Node) -> ir.Node:
        """Simplify the loads inside a statement."""
        return ir.substitute(at, {x: self.load(x) for x in ir.find(at, ir.Load)})


def drop_dead_sums(kernel: ir.Kernel) -> ir.Kernel:
    """Remove products whose operand is never loaded, then loops without a product, then lets that are no
    longer used."""
    lets = ir.find(kernel, ir.Let)
    read = {
        s.var
        for s in lets
        if not (isinstance(s.value, ir.Load) and s.value.mask is ir.FALSE and s.value.fill == 0)
    }
    nothing = {s.var for s in lets} - read  # by no let that binds them
    if not nothing:
        return kernel
    made = _Dead(nothing).rebuilt(kernel)
    # A let mentions its variable once.
    mentions = Counter(at for at in ir.walk(made) if isinstance(at, ir.Var))
    return _Unnamed({v for v in nothing if mentions[v] == 1}).rebuilt(made)


class _Dead(ir.Mutator):
    def __init__(self, nothing: set[ir.Var]) -> None:
        self.nothing = nothing

    def is_zero(self, e: ir.Node) -> bool:
        match e:
            case ir.Var():
                return e in self.nothing
            case ir.Cast(x) | ir.Spread(x) | ir.Reduce("sum", x):
                return self.is_zero(x)
            case ir.Mul(a, b):
                return self.is_zero(a) or self.is_zero(b)
        return False

    def mutate_Update(self, at: ir.Update) -> ir.Stmt | None:
        match at.value:
            case ir.Add(old, product) if old is at.var and self.is_zero(product):
                return None
        return at

    def mutate_FuncCall(self, at: ir.FuncCall) -> ir.Stmt | None:
        return None if at.func.multiplies and any(map(self.is_zero, at.args[1:3])) else at

    def mutate_For(self, loop: ir.For) -> ir.Stmt | None:
        made: ir.Stmt = self.generic(loop)
        if made is loop or not isinstance(made, ir.For) or made.kind not in ("serial", "unroll"):
            return made
        return None if _only_names(made.body) else made


class _Unnamed(ir.Mutator):
    def __init__(self, names: set[ir.Var]) -> None:
        self.names = names

    def mutate_Let(self, let: ir.Let) -> ir.Stmt | None:
        return None if let.var in self.names else let


def _only_names(body: ir.Stmt) -> bool:
    """Whether a block has no effect outside of it: it consists of lets and assumptions."""
    return all(
        isinstance(s, ir.Let) or (isinstance(s, ir.FuncCall) and s.func is ir.ASSUME)
        for s in ir.statements(body)
    )
