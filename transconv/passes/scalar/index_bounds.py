"""How far indices reach, as expressions of sizes that are arguments.

    n_h = blk*8 + lane          blk < (N*H + 7)//8, lane < 8        n_h <= ((N*H + 7)//8 - 1)*8 + 7

Where all tensors have fewer than 2^31 elements by the requirements, an index that the last tiles may
carry beyond 32 bits becomes a requirement, too: a kernel then computes in 32 bits alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from transconv.ir import (
    Add,
    Cast,
    Const,
    Expr,
    FloorDiv,
    For,
    Kernel,
    Lane,
    Let,
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
    Sub,
    Tensor,
    Values,
    Var,
    as_expr,
    find,
    free_vars,
    maximum,
    substitute,
    value_at,
    walk,
)
from transconv.simplify import Facts, facts_of, range_of, simplify

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
