"""Tail masks: no position beyond the end of an axis is read, written or summed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite

from transconv.ir import (
    ATOMIC_ADD,
    REDUCERS,
    Add,
    Cast,
    Const,
    Expr,
    ExprMutator,
    FuncCall,
    Le,
    Load,
    Lt,
    Max,
    Min,
    Mul,
    Neg,
    Node,
    Select,
    Store,
    Sub,
    Update,
    Var,
    all_of,
    conjuncts,
    find,
    free_vars,
    reducer_of,
    substitute,
)
from transconv.passes.lowering.loop_nest import Nest
from transconv.simplify import Facts, simplify


class Guard(ExprMutator):
    """Add the tail masks to every access that depends on a partly filled block. The positions of
    ``written`` axes are written out. Their loads need no tail mask if their own mask keeps them inside the
    tensor: results beyond the end are not stored, and the pass ``reuse`` can then share the load."""

    def __init__(self, tails: dict[Var, Expr], nest: Nest, written: set[Var]) -> None:
        super().__init__()
        self.tails, self.written = tails, written
        self.lets = nest.lets
        self.summed = {x.var for s in nest.sweeps for x in s.loops}

    def guarded(self, offset: Expr, mask: Expr, inside: frozenset[Var] = frozenset()) -> Expr:
        roots = roots_of(offset, self.lets) - inside
        needed = [m for v, m in self.tails.items() if v in roots]
        return all_of([p for m in needed for p in conjuncts(m)] + conjuncts(mask))

    def mutate_Load(self, at: Load) -> Node:
        inside = frozenset(v for v in self.written if self.keeps_inside(at, v))
        return replace(at, mask=self.guarded(at.offset, at.mask, inside))

    def keeps_inside(self, at: Load, axis: Var) -> bool:
        """Whether a load's own mask excludes positions beyond the end of an axis: it bounds a coordinate
        in the direction in which the axis moves it."""
        seen = {*find(at.offset, Expr)}
        for condition in conjuncts(at.mask):
            match condition:
                case Lt(coord, end) if coord in seen and axis not in roots_of(end, self.lets):
                    towards = 1
                case Le(Const(), coord) if coord in seen:
                    towards = -1
                case _:
                    continue
            if axis in roots_of(coord, self.lets) and self.step(coord, axis) * towards > 0:
                return True
        return False

    def step(self, coord: Expr, axis: Var) -> int:
        """The change of a coordinate from one position of an axis to the next; 0 if it is not constant."""
        while named := {v: self.lets[v] for v in free_vars(coord) if v in self.lets}:
            coord = substitute(coord, named)
        moved = simplify(substitute(coord, {axis: axis + 1}) - coord, Facts())
        return int(moved.value) if isinstance(moved, Const) else 0

    def mutate_Store(self, at: Store) -> Node:
        return Store(at.tensor, at.offset, self.mutate(at.value), self.guarded(at.offset, at.mask))

    def mutate_FuncCall(self, at: FuncCall) -> Node:
        if not at.func.leaves and at.func is not ATOMIC_ADD:
            return at
        tensor, offset, value, mask, *count = at.args
        assert isinstance(offset, Expr) and isinstance(value, Expr) and isinstance(mask, Expr)
        if at.func.leaves:  # all points count that are in the axes
            kept = roots_of(offset, self.lets) | {*self.tails} - self.summed
            ends = dict.fromkeys(p for v, m in self.tails.items() if v in kept for p in conjuncts(m))
            return FuncCall(at.func, (tensor, offset, value, all_of([*ends]), *count))
        return FuncCall(at.func, (tensor, offset, self.mutate(value), self.guarded(offset, mask)))

    def mutate_Update(self, at: Update) -> Node:
        """Positions beyond the end must not change the result. In a sum of products it is enough that they
        are loaded as 0; in other reductions the neutral element replaces their terms."""
        match at.value:
            case Add(old, term) | Mul(old, term) | Max(old, term) | Min(old, term) if old is at.var:
                op = type(at.value)
                reducer = REDUCERS[reducer_of(op)]
                lacking = [m for v, m in self.tails.items() if v in self.summed
                           and not vanishes(term, v, reducer.neutral, self.lets)]
                if lacking:
                    nothing = reducer.identity(term.dtype)
                    kept = Select(all_of([p for m in lacking for p in conjuncts(m)]), term, nothing)
                    return Update(at.var, op(old, kept))
        return at


# -- terms beyond the end of an axis -----------------------------------------------------------------


Lets = Mapping[Var, Expr]


def roots_of(e: Expr, lets: Lets) -> frozenset[Var]:
    """The loop variables that an expression depends on, directly or through lets."""
    found: set[Var] = set()
    for v in free_vars(e):
        found |= roots_of(lets[v], lets) if v in lets else {v}
    return frozenset(found)


def vanishes(term: Expr, axis: Var, nothing: float, lets: Lets) -> bool:
    """Whether a term equals ``nothing``, the neutral element, beyond the end of an axis, because it is
    loaded with that fill; in a sum, also if a factor of it is, and the others are finite."""
    if isinstance(term, Mul) and nothing == 0:
        return any(vanishes(x, axis, nothing, lets) and is_finite(y, axis, lets)
                   for x, y in ((term.a, term.b), (term.b, term.a)))
    value = term.x if isinstance(term, Cast) else term
    load = lets.get(value) if isinstance(value, Var) else None
    if isinstance(load, Select):  # between two loads
        return vanishes(load.yes, axis, nothing, lets) and vanishes(load.no, axis, nothing, lets)
    return isinstance(load, Load) and load.fill == nothing and axis in roots_of(load.offset, lets)


def is_finite(e: Expr, axis: Var, lets: Lets) -> bool:
    """Whether a value beyond the end of an axis is finite, if the elements of tensors are: it is loaded,
    moved, added and multiplied, or it is the same along the axis."""
    match e:
        case Const(value):
            return isfinite(value)
        case Load():
            return isfinite(e.fill)
        case Cast(x) | Neg(x):
            return is_finite(x, axis, lets)
        case Select(_, x, y) | Add(x, y) | Sub(x, y) | Mul(x, y) | Max(x, y) | Min(x, y):
            return is_finite(x, axis, lets) and is_finite(y, axis, lets)
        case Var() if e in lets:
            return is_finite(lets[e], axis, lets)
    return axis not in roots_of(e, lets)
