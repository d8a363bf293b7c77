"""A computation's steps with others behind them, of which none is made twice."""

from __future__ import annotations

from collections.abc import Collection

from transconv.compute.analysis.pointwise import MOST_NODES, nodes_of
from transconv.compute.compute import Compute
from transconv.compute.names import fresh, used
from transconv.compute.steps import Read, Reduction, Step, Value, Write
from transconv.ir import Cast, Expr, Var, f32, f64, free_vars

Axes = frozenset[str]


class Appended:
    """The steps of a computation without its stores, and those that are added. ``type``: of arithmetic;
    ``rooted``: the axes that each name depends on; ``behind``: the names that depend on the result of the
    computation's product."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.type = f64 if any(t.dtype is f64 for t in compute.tensors) else f32
        self.taken = {*compute.names.all, *(t.name for t in compute.tensors)}
        self.steps: list[Step] = [s for s in compute.steps if not isinstance(s, Write)]
        self.rooted: dict[Var, Axes] = dict(compute.names.rooted)
        self.named: dict[Expr, Var] = {}
        self.totals: dict[tuple[str, Expr, tuple[str, ...]], Var] = {}
        self.behind: set[Var] = set()
        for step in self.steps:
            self.follow(step)

    def total(self, name: str, value: Expr, axes: Collection[str], op: str = "sum") -> Expr:
        """A reduction, made once."""
        if not axes:
            return self.name(name, value)
        ordered = tuple(a for a in self.compute.sizes if a in axes)
        if (op, value, ordered) not in self.totals:
            made = Reduction(self.fresh(name), op, value, ordered)
            self.add(made)
            self.totals[op, value, ordered] = made.var
        return self.totals[op, value, ordered]

    def small(self, name: str, e: Expr) -> Expr:
        """An expression, as a name if it is long."""
        return e if nodes_of(e) <= MOST_NODES else self.name(name, e)

    def name(self, name: str, e: Expr) -> Expr:
        """The name of an expression, a new one unless it is short or has one."""
        if nodes_of(e) <= 2:
            return e
        if e not in self.named:
            made = Value(self.fresh(name), e)
            self.add(made)
            self.named[e] = made.var
        return self.named[e]

    def add(self, step: Read | Value | Reduction) -> None:
        """Put a step behind the others."""
        own = frozenset(a for v in used(step) for a in self.rooted.get(v, (v.name,)))
        self.rooted[step.var] = own - {*step.axes} if isinstance(step, Reduction) else own
        self.steps.append(step)
        self.follow(step)

    def follow(self, step: Step) -> None:
        """Note whether a step's value depends on a product's result."""
        product = self.compute.factors and step is self.compute.sum
        if not isinstance(step, Write) and (product or used(step) & self.behind):
            self.behind.add(step.var)

    def needed(self, names: Collection[Var]) -> list[Step]:
        """The steps that some names depend on, in order."""
        left = {*names}
        found: list[Step] = []
        for step in reversed(self.steps):
            if not isinstance(step, Write) and step.var in left:
                left |= used(step)
                found.append(step)
        return found[::-1]

    def roots(self, e: Expr) -> Axes:
        """The axes that an expression depends on."""
        return frozenset(a for v in free_vars(e) for a in self.rooted.get(v, (v.name,)))

    def number(self, e: Expr) -> Expr:
        """An expression in the type of arithmetic."""
        return e if e.dtype is self.type else Cast(e, self.type)

    def fresh(self, name: str) -> str:
        """A name that nothing has yet."""
        found = fresh(name, self.taken)
        self.taken.add(found)
        return found
