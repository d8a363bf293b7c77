"""The pass ``narrow``: chooses 32 or 64 bits for every index.

An index expression has 32 bits if all values in it, including intermediate ones, are proved to fit.
Otherwise its largest parts that fit are computed in 32 bits and cast to 64:

    n*4294967296 + h*8192 + w    ->    index64(n)*4294967296 + index64(h*8192 + w)

Where sizes are arguments, what cannot be proved may become a requirement. How far indices reach are then
expressions of sizes:

    n_h = blk*8 + lane          blk < (N*H + 7)//8, lane < 8        n_h <= ((N*H + 7)//8 - 1)*8 + 7

Where all tensors have fewer than 2^31 elements by the requirements, an index that the last tiles may
carry beyond 32 bits becomes a requirement, too: a kernel then computes in 32 bits alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import TypeVar

from transconv import ir
from transconv.passes.scope import ScopedMutator
from transconv.simplify import Facts, facts_of, range_of, simplify

LIMIT = 2**31 - 1
ENOUGH = 2**29  # elements of a tensor that requirements of indices must not exclude
B = TypeVar("B", ir.BoxLoad, ir.BoxStore)


def narrow(kernel: ir.Kernel) -> ir.Kernel:
    """Insert casts to index64 where a 32-bit index could overflow."""
    pass_ = _Narrow(kernel)
    body = pass_.mutate(kernel.body)
    return replace(required(kernel, pass_.reach.required if pass_.reach else {}), body=body)


class _Narrow(ScopedMutator):
    def __init__(self, kernel: ir.Kernel) -> None:
        super().__init__(kernel.sizes)
        self.wide: dict[ir.Node, ir.Expr] = {}
        self.reach = Reach(kernel, LIMIT, self.whole, self.is_not_negative) if kernel.sizes else None

    def fits(self, e: ir.Expr) -> bool:
        """Whether every value in the expression is proved to fit into 32 bits."""
        if isinstance(e, ir.Load):
            return self.fits(e.offset)
        if e.dtype is ir.index:  # other integers keep the type of their tensor
            found = range_of(self.whole(e), self.facts)
            if found.lo is None or found.hi is None or found.lo < -LIMIT - 1 or found.hi > LIMIT:
                return False
        return all(self.fits(c) for c in e.children() if isinstance(c, ir.Expr))

    def is_not_negative(self, e: ir.Expr) -> bool:
        """Whether a value is known not to be negative."""
        low = range_of(self.whole(e), self.facts).lo
        return low is not None and low >= 0

    def index(self, e: ir.Expr) -> ir.Expr:
        e = ir.substitute(e, self.wide)
        return e if self.fits(e) or (self.reach and self.reach.fits(e)) else self.widen(e)

    def widen(self, e: ir.Expr) -> ir.Expr:
        """The same value in 64 bits."""
        kind = e.dtype.kind
        if kind == "index":
            if isinstance(e, ir.Const):
                return ir.Const(e.value, ir.index64)
            if isinstance(e, ir.Cast) and e.type is ir.index:  # an integer of a tensor, used as an address
                return ir.Cast(e.x, ir.index64)
            if isinstance(e, (ir.Var, ir.Lane)) or self.fits(e):
                return e if e.dtype is ir.index64 else ir.Cast(e, ir.index64)
            if isinstance(e, ir.Select):
                return ir.Select(self.index(e.cond), self.widen(e.yes), self.widen(e.no))
        if kind not in ("float", "int") and isinstance(e, (ir.Arithmetic, ir.Compare)):
            return type(e)(self.widen(e.a), self.widen(e.b))
        # Else only indices inside of it may need 64 bits.
        changes: dict[ir.Node, ir.Expr] = {
            c: self.index(c) for c in e.children() if isinstance(c, ir.Expr)
        }
        return ir.substitute(e, changes)

    bound = index

    def mutate_For(self, loop: ir.For) -> ir.Stmt:
        """Tiles are counted in 32 bits, also where their number is computed in 64."""
        if self.reach:
            self.reach.learn(loop)
        made = super().mutate_For(loop)
        if (
            isinstance(made, ir.For)
            and made.programs
            and made.until is not None
            and made.stop <= LIMIT
            and made.until.dtype is ir.index64
        ):
            made = replace(made, until=ir.Cast(made.until, ir.index))
        return made

    def mutate_Let(self, let: ir.Let) -> ir.Stmt:
        if isinstance(let.value, ir.BoxLoad):
            return ir.Let(let.var, self.box(let.value), let.origin)
        if isinstance(let.value, ir.Load):
            load = let.value
            narrow = replace(load, offset=self.index(load.offset), mask=self.index(load.mask))
            return ir.Let(let.var, narrow, let.origin)
        if self.reach:
            self.reach.learn(let)
        value = self.index(let.value)
        if value.dtype is ir.index64 and let.var.type is ir.index:
            var = ir.Var(let.var.name, ir.index64)
            self.wide[let.var] = var
            return ir.Let(var, value, let.origin)
        return let if value is let.value else ir.Let(let.var, value, let.origin)

    def box(self, at: B) -> B:
        """A coordinate counts along one dimension, so it fits, also if it is computed in 64 bits."""
        if not self.wide:
            return at
        seen = [ir.substitute(c, self.wide) for c in at.corner]
        wide = {*self.wide.values()}
        return replace(
            at,
            corner=tuple(ir.Cast(self.widen(c), ir.index) if ir.free_vars(c) & wide else c for c in seen),
        )

    def mutate_BoxStore(self, at: ir.BoxStore) -> ir.Stmt:
        return replace(self.box(at), value=ir.substitute(at.value, self.wide))

    def mutate_Store(self, at: ir.Store) -> ir.Stmt:
        value = ir.substitute(at.value, self.wide)
        return ir.Store(at.tensor, self.index(at.offset), value, self.index(at.mask))

    def mutate_Update(self, at: ir.Update) -> ir.Stmt:
        return ir.Update(at.var, ir.substitute(at.value, self.wide))

    def mutate_FuncCall(self, at: ir.FuncCall) -> ir.Stmt:
        if self.reach and at.func is ir.ASSUME and isinstance(at.args[0], ir.Expr):
            self.reach.assume(at.args[0])
        return ir.FuncCall(
            at.func,
            tuple(
                self.index(a) if isinstance(a, ir.Expr) and a.dtype.kind != "float" else a for a in at.args
            ),
        )


class Reach:
    """The farthest value of each index of a kernel, and what is required of its sizes so that indices fit
    ``limit``. ``whole`` expands the lets of an expression, ``is_not_negative`` says whether it is known
    not to be negative."""

    def __init__(
        self,
        kernel: ir.Kernel,
        limit: int,
        whole: Callable[[ir.Expr], ir.Expr],
        is_not_negative: Callable[[ir.Expr], bool],
    ) -> None:
        assert isinstance(kernel.sizes, ir.Sizes)
        self.sizes, self.limit = kernel.sizes, limit
        self.whole, self.is_not_negative = whole, is_not_negative
        self.facts: Facts = facts_of(kernel.sizes)
        self.names = frozenset(ir.Var(n) for n in kernel.sizes.names)
        self.far: dict[ir.Var, ir.Expr] = {}
        self.named: dict[ir.Node, ir.Expr] = {}  # lets that are expressions of sizes
        self.farthest: dict[object, ir.Expr] = {}  # of those that differ by numbers alone
        memory = [t for t in kernel.params if t.extents and not t.planes]  # planes are boxes
        counts = [t.room if t.pitches else prod(t.extents, start=ir.as_expr(1)) for t in memory]
        self.limited = all(self.is_within(n) for n in counts)
        self.probes = list(_probes(kernel.sizes, counts)) if self.limited else []

    def is_within(self, e: ir.Expr) -> bool:
        """Whether a value is proved not to exceed the limit."""
        most = range_of(e, self.facts).hi
        return most is not None and most <= self.limit

    def learn(self, of: ir.Let | ir.For) -> None:
        """Note how far a let, or the variable of a loop, reaches."""
        if isinstance(of, ir.Let):
            end = of.value
        else:
            end = ir.as_expr(of.stop - 1) if of.until is None else of.until
        if end.dtype.kind == "index" and (far := self.of(end)) is not None:
            self.far[of.var] = far
        if isinstance(of, ir.Let) and end.dtype.kind == "index" and self._is_of_sizes(end):
            self.named[of.var] = self.of_sizes(end)

    def assume(self, condition: ir.Expr) -> None:
        """Note how far the variable of a condition ``v < sizes`` reaches where it holds."""
        match condition:
            case ir.Lt(ir.Var() as v, end) if self._is_of_sizes(end) and self.is_not_negative(v):
                self.far[v] = self.of_sizes(end) - 1

    def fits(self, e: ir.Expr) -> bool:
        """Whether all values in an expression fit, if the kernel requires it: then it does."""
        if not self.limited or any(v.dtype.bits == 64 for v in ir.free_vars(e)):
            return False
        found = []
        for part in _tops(e):
            far = self.of(part)
            if far is None:
                return False
            found.append(simplify(far, self.facts))
        more = [far for far in found if not self.is_within(far)]
        if not all(ir.value_at(far, at) <= self.limit for far in more for at in self.probes):
            return False
        for far in more:
            sum_of = self.facts.poly(far)
            other = self.farthest.get(sum_of.terms)
            if other is None or self.facts.poly(other).const < sum_of.const:
                self.farthest[sum_of.terms] = far
        return True

    @property
    def required(self) -> dict[ir.Expr, None]:
        """What ``fits`` has relied on: of indices of neighbours the requirement of the farthest one."""
        return dict.fromkeys(far <= self.limit for far in self.farthest.values())

    def of(self, e: ir.Expr) -> ir.Expr | None:
        """The largest absolute value of an index, as an expression of sizes; None if it is not known."""
        match e:
            case ir.Const(value):
                return ir.as_expr(abs(int(value)))
            case ir.Lane():
                return ir.as_expr(e.extent - 1)
            case ir.Var():
                return e if e in self.names else self.far.get(e)
            case ir.Cast(x) | ir.Spread(x) | ir.Neg(x):
                return self.of(x)
            case ir.Mod(a, b):
                if self._is_of_sizes(b):
                    return self.of_sizes(b) - 1
                return self.of(a) if self.is_not_negative(a) else None
            case ir.FloorDiv(a, b):
                far = self.of(a)
                if far is None or not self._is_of_sizes(b):
                    return far
                return far // self.of_sizes(b) + (0 if self.is_not_negative(a) else 1)
            case ir.Select(_, a, b) | ir.Min(a, b) | ir.Max(a, b):
                one, two = self.of(a), self.of(b)
                return None if one is None or two is None else ir.maximum(one, two)
            case ir.Add(a, b) | ir.Sub(a, b) | ir.Mul(a, b):
                one, two = self.of(a), self.of(b)
                if one is None or two is None:
                    return None
                return one * two if isinstance(e, ir.Mul) else one + two
        return None

    def _is_of_sizes(self, e: ir.Expr) -> bool:
        made = self.of_sizes(e)
        return ir.free_vars(made) <= self.names and not ir.find(made, ir.Lane)

    def of_sizes(self, e: ir.Expr) -> ir.Expr:
        """The expression with the lets expanded, also those that an assumption is about."""
        return ir.substitute(self.whole(e), self.named)


def required(kernel: ir.Kernel, more: dict[ir.Expr, None]) -> ir.Kernel:
    """The kernel with more requirements."""
    if not more:
        return kernel
    assert isinstance(kernel.sizes, ir.Sizes)
    return replace(kernel, sizes=replace(kernel.sizes, where=(*kernel.sizes.where, *more)))


def _tops(e: ir.Expr) -> Iterator[ir.Expr]:
    """The indices in an expression that are no terms or factors of larger ones."""
    inside = {c for n in ir.walk(e) if isinstance(n, (ir.Add, ir.Sub, ir.Mul)) for c in (n.a, n.b)}
    for n in ir.walk(e):
        if isinstance(n, ir.Expr) and n.dtype.kind == "index" and n not in inside:
            yield n


def _probes(sizes: ir.Sizes, counts: list[ir.Expr]) -> Iterator[ir.Values]:
    """Sizes of large tensors: the examples, some or all of them doubled as often as that is possible."""
    for grown in ({*sizes.names}, *({n} for n in sizes.names)):
        at = dict(sizes.like)
        while True:
            more = {n: 2 * at[n] if n in grown else at[n] for n in at}
            if sizes.why_not(more) or any(ir.value_at(n, more) > ENOUGH for n in counts):
                break
            at = more
        yield at
