"""The axes of a computation, told by the position in a tensor that it reads: coordinates solved for axes.

    X[i*2 + k], k in 0..1     ->     i = p // 2, k = p % 2
    X[i + k]                  ->     i = p - k, where that is a position; all k have their turn

One coordinate is inverted for one axis (autodiff/view_inverse.py), or is a mixed-radix number whose digits
are several.
"""

from __future__ import annotations

from transconv.compute.autodiff.view_inverse import TURN, inverse
from transconv.compute.compute import Compute
from transconv.compute.names import fresh
from transconv.compute.steps import Axis
from transconv.ir import ZERO, Const, Expr, Var, View, eq, free_vars, substitute
from transconv.simplify import Facts, simplify

MOST_MATCHED = 256  # the largest axis all of whose positions are compared if there is no closed form


class Solved:
    """The axes of a computation as functions of the position in an operand: ``places`` has an axis for
    each dimension of the operand, ``turns`` axes over the results of one element, ``values`` the
    expression of each axis, ``positions`` those that may be outside of their axis. ``done``: whether all
    are solved."""

    def __init__(self, compute: Compute, view: View) -> None:
        self.compute = compute
        self.values: dict[Expr, Expr] = {}
        self.positions: list[tuple[Expr, Axis]] = []
        self.conditions: list[Expr] = []
        self.turns: list[Axis] = []
        self.taken = set(compute.names.all)
        coords = [d.coord for d in view.dims]
        mentioned = [v for c in coords for v in free_vars(c)]
        self.places = [self.place(i, c, n, mentioned.count(c))  # type: ignore[arg-type]
                       for i, (c, n) in enumerate(zip(coords, view.tensor.shape, strict=True))]
        left = [(c, p) for c, p in zip(coords, self.places, strict=True) if c is not p.var]
        self.done = all(self.solve(*one) for one in sorted(left, key=lambda x: len(self.unknown(x[0]))))
        for x in compute.axes:
            if x.var not in self.values and x.name not in {a.name for a in (*self.places, *self.turns)}:
                self.turns.append(x)

    def place(self, dim: int, coord: Expr, size: int, count: int) -> Axis:
        """The axis of a dimension: the computation's axis that is its coordinate, or a new one."""
        if isinstance(coord, Var) and count == 1 and self.compute.size(coord.name) == size:
            return Axis(coord.name, size, "")
        name = fresh(f"p{dim}", self.taken)
        self.taken.add(name)
        return Axis(name, size, "")

    def unknown(self, coord: Expr) -> list[Axis]:
        named = {p.name for p in self.places} | {x.name for x in self.turns}
        free = free_vars(substitute(coord, self.values))
        return [x for x in self.compute.axes if x.var in free and x.name not in named]

    def solve(self, coord: Expr, place: Axis) -> bool:
        """Solve one coordinate for its unknown axes. Returns whether that is possible."""
        left = self.unknown(coord)
        coord = simplify(substitute(coord, self.values), self.facts())
        counted = [x for x in self.turns if x.var in free_vars(coord)]
        if len(left) + len(counted) > 1 or not left:
            if (found := _digits(coord, [*left, *counted], place.var)) is not None:
                self.digits(found)
                self.conditions.append(eq(substitute(coord, self.values), place.var))
                return True
        if not left:
            self.conditions.append(eq(coord, place.var))
            return True
        axis = max(left, key=lambda x: x.size)
        self.turns += [x for x in left if x is not axis]
        sizes = {x.var: x.size for x in (*self.places, *self.turns)}
        solved = inverse(coord, axis, place.var, sizes)
        if solved is None:
            if axis.size > MOST_MATCHED:
                return False
            self.turns.append(axis)
            self.conditions.append(eq(coord, place.var))
            return True
        turn = Var(fresh(f"{axis.name}_turn", self.taken))
        self.taken.add(turn.name)
        if solved.turns > 1:
            self.turns.append(Axis(turn.name, solved.turns, ""))
        named: dict[Expr, Expr] = {TURN: turn if solved.turns > 1 else ZERO}
        self.values[axis.var] = substitute(solved.position, named)
        self.positions.append((self.values[axis.var], axis))
        self.conditions.append(substitute(solved.condition, named))
        return True

    def digits(self, found: dict[Axis, Expr]) -> None:
        """Add the solutions of several axes, which need no turns any more."""
        known: dict[Expr, Expr] = {x.var: e for x, e in found.items()}
        self.turns = [x for x in self.turns if x not in found]
        self.values = {v: substitute(e, known) for v, e in self.values.items()} | known
        self.positions = [(substitute(e, known), x) for e, x in self.positions]
        self.positions += [(e, x) for x, e in found.items()]
        self.conditions = [substitute(c, known) for c in self.conditions]

    def facts(self) -> Facts:
        facts = Facts()
        for x in (*self.compute.axes, *self.places, *self.turns):
            facts = facts.with_range(x.var, 0, max(0, x.size - 1))
        return facts


def _digits(coord: Expr, axes: list[Axis], place: Var) -> dict[Axis, Expr] | None:
    """Axes of which a coordinate is a mixed-radix number, each as its digit of ``place``; None if it is
    not."""
    steps: dict[Axis, int] = {}
    for x in axes:
        ahead = simplify(substitute(coord, {x.var: x.var + 1}) - coord)
        if not isinstance(ahead, Const) or ahead.value <= 0:
            return None
        steps[x] = int(ahead.value)
    order = sorted(axes, key=lambda x: -steps[x])
    reach = [sum(steps[y] * (y.size - 1) for y in order[i + 1:]) for i in range(len(order))]
    if any(steps[x] <= r for x, r in zip(order, reach, strict=True)):
        return None
    zero: dict[Expr, Expr] = {x.var: ZERO for x in axes}
    rest = simplify(place - substitute(coord, zero))
    found: dict[Axis, Expr] = {}
    for x in order:
        found[x] = simplify(rest // steps[x]) if steps[x] > 1 else rest
        rest = rest % steps[x]
    return found
