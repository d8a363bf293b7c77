"""The pass ``narrow``: chooses 32 or 64 bits for every index.

An index expression has 32 bits if all values in it, including intermediate ones, are proved to fit.
Otherwise its largest parts that fit are computed in 32 bits and cast to 64:

    n*4294967296 + h*8192 + w    ->    index64(n)*4294967296 + index64(h*8192 + w)

Where sizes are arguments, what cannot be proved may become a requirement (scalar/index_bounds.py).

Also here: how far indices reach, as expressions of sizes that are arguments.

    n_h = blk*8 + lane          blk < (N*H + 7)//8, lane < 8        n_h <= ((N*H + 7)//8 - 1)*8 + 7

Where all tensors have fewer than 2^31 elements by the requirements, an index that the last tiles may
carry beyond 32 bits becomes a requirement, too: a kernel then computes in 32 bits alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from transconv.ir import (
    ASSUME,
    Add,
    Arithmetic,
    BoxLoad,
    BoxStore,
    Cast,
    Compare,
    Const,
    Expr,
    FloorDiv,
    For,
    FuncCall,
    Kernel,
    Lane,
    Let,
    Load,
    Lt,
    Max,
    Min,
    Mod,
    Mul,
    Neg,
    Node,
    Select,
    Sizes,
    Spread,
    Stmt,
    Store,
    Sub,
    Tensor,
    Update,
    Values,
    Var,
    as_expr,
    find,
    free_vars,
    index,
    index64,
    maximum,
    substitute,
    value_at,
    walk,
)
from transconv.passes.scope import ScopedMutator
from transconv.simplify import Facts, facts_of, range_of, simplify

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


ENOUGH = 2**29  # elements of a tensor that requirements of indices must not exclude


class Reach:
    """The farthest value of each index of a kernel, and what is required of its sizes so that indices fit
    ``limit``. ``whole`` expands the lets of an expression, ``is_not_negative`` says whether it is known
    not to be negative."""

    def __init__(self, kernel: Kernel, limit: int, whole: Callable[[Expr], Expr],
                 is_not_negative: Callable[[Expr], bool]) -> None:
        assert isinstance(kernel.sizes, Sizes)
        self.sizes, self.limit = kernel.sizes, limit
        self.whole, self.is_not_negative = whole, is_not_negative
        self.facts: Facts = facts_of(kernel.sizes)
        self.names = frozenset(Var(n) for n in kernel.sizes.names)
        self.far: dict[Var, Expr] = {}
        self.named: dict[Node, Expr] = {}  # lets that are expressions of sizes
        self.farthest: dict[object, Expr] = {}  # of those that differ by numbers alone
        counts = [_elements(t) for t in kernel.params if t.extents and not t.planes]  # planes are boxes
        self.limited = all(self.is_within(n) for n in counts)
        self.probes = list(_probes(kernel.sizes, counts)) if self.limited else []

    def is_within(self, e: Expr) -> bool:
        """Whether a value is proved not to exceed the limit."""
        most = range_of(e, self.facts).hi
        return most is not None and most <= self.limit

    def learn(self, of: Let | For) -> None:
        """Note how far a let, or the variable of a loop, reaches."""
        end = of.value if isinstance(of, Let) else as_expr(of.stop - 1) if of.until is None else of.until
        if end.dtype.kind == "index" and (far := self.of(end)) is not None:
            self.far[of.var] = far
        if isinstance(of, Let) and end.dtype.kind == "index" and self._is_of_sizes(end):
            self.named[of.var] = self.of_sizes(end)

    def assume(self, condition: Expr) -> None:
        """Note how far the variable of a condition ``v < sizes`` reaches where it holds."""
        match condition:
            case Lt(Var() as v, end) if self._is_of_sizes(end) and self.is_not_negative(v):
                self.far[v] = self.of_sizes(end) - 1

    def fits(self, e: Expr) -> bool:
        """Whether all values in an expression fit, if the kernel requires it: then it does."""
        if not self.limited or any(v.dtype.bits == 64 for v in free_vars(e)):
            return False
        found = []
        for part in _tops(e):
            far = self.of(part)
            if far is None:
                return False
            found.append(simplify(far, self.facts))
        more = [far for far in found if not self.is_within(far)]
        if not all(value_at(far, at) <= self.limit for far in more for at in self.probes):
            return False
        for far in more:
            sum_of = self.facts.poly(far)
            other = self.farthest.get(sum_of.terms)
            if other is None or self.facts.poly(other).const < sum_of.const:
                self.farthest[sum_of.terms] = far
        return True

    @property
    def required(self) -> dict[Expr, None]:
        """What ``fits`` has relied on: of indices of neighbours the requirement of the farthest one."""
        return dict.fromkeys(far <= self.limit for far in self.farthest.values())

    def of(self, e: Expr) -> Expr | None:
        """The largest absolute value of an index, as an expression of sizes; None if it is not known."""
        match e:
            case Const(value):
                return as_expr(abs(int(value)))
            case Lane():
                return as_expr(e.extent - 1)
            case Var():
                return e if e in self.names else self.far.get(e)
            case Cast(x) | Spread(x) | Neg(x):
                return self.of(x)
            case Mod(a, b):
                if self._is_of_sizes(b):
                    return self.of_sizes(b) - 1
                return self.of(a) if self.is_not_negative(a) else None
            case FloorDiv(a, b):
                far = self.of(a)
                if far is None or not self._is_of_sizes(b):
                    return far
                return far // self.of_sizes(b) + (0 if self.is_not_negative(a) else 1)
            case Select(_, a, b) | Min(a, b) | Max(a, b):
                one, two = self.of(a), self.of(b)
                return None if one is None or two is None else maximum(one, two)
            case Add(a, b) | Sub(a, b) | Mul(a, b):
                one, two = self.of(a), self.of(b)
                if one is None or two is None:
                    return None
                return one * two if isinstance(e, Mul) else one + two
        return None

    def _is_of_sizes(self, e: Expr) -> bool:
        made = self.of_sizes(e)
        return free_vars(made) <= self.names and not find(made, Lane)

    def of_sizes(self, e: Expr) -> Expr:
        """The expression with the lets expanded, also those that an assumption is about."""
        return substitute(self.whole(e), self.named)


def required(kernel: Kernel, more: dict[Expr, None]) -> Kernel:
    """The kernel with more requirements."""
    if not more:
        return kernel
    assert isinstance(kernel.sizes, Sizes)
    return replace(kernel, sizes=replace(kernel.sizes, where=(*kernel.sizes.where, *more)))


def _tops(e: Expr) -> Iterator[Expr]:
    """The indices in an expression that are no terms or factors of larger ones."""
    inside = {c for n in walk(e) if isinstance(n, (Add, Sub, Mul)) for c in (n.a, n.b)}
    for n in walk(e):
        if isinstance(n, Expr) and n.dtype.kind == "index" and n not in inside:
            yield n


def _elements(tensor: Tensor) -> Expr:
    found = as_expr(1)
    for extent in tensor.extents:
        found = found * extent
    return found


def _probes(sizes: Sizes, counts: list[Expr]) -> Iterator[Values]:
    """Sizes of large tensors: the examples, some or all of them doubled as often as that is possible."""
    for grown in ({*sizes.names}, *({n} for n in sizes.names)):
        at = dict(sizes.like)
        while True:
            more = {n: 2 * at[n] if n in grown else at[n] for n in at}
            if sizes.why_not(more) or any(value_at(n, more) > ENOUGH for n in counts):
                break
            at = more
        yield at
