"""Affine inverses: coordinates solved for axes, as functions of the position in a tensor that is read.

    X[i*2 + k], k in 0..1     ->     i = p // 2, k = p % 2          digits of a mixed-radix number
    X[i + k]                  ->     i = p - k, where that is a position; all k have their turn

One coordinate is inverted for one axis. Candidates follow from the expression, node by node:

    x[i*2 + 1]              element p is read at       i = (p - 1) // 2     if (p - 1) % 2 == 0
    x[i // 3]                                          i = p*3 + turn       for 3 turns
    x[reflect(i - 2, 8)]                               i = p + 2, 2 - p, 16 - p, if in the range of i

Because sizes are numbers, all positions are then enumerated: this drops candidates that are not needed,
finds the condition of each, and proves that no position is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate
from math import prod

import numpy as np

from transconv import ir
from transconv.compute.compute import Compute
from transconv.compute.expressions import facts_of_axes
from transconv.compute.steps import Axis, fresh
from transconv.ir import all_of, eq, free_vars, ne, select, substitute
from transconv.simplify import Facts, simplify

MOST_MATCHED = 256  # the largest axis all of whose positions are compared if there is no closed form


class Solved:
    """The axes of a computation as functions of the position in an operand: ``places`` has an axis for
    each dimension of the operand, ``turns`` axes over the results of one element, ``values`` the
    expression of each axis, ``positions`` those that may be outside of their axis. ``done``: whether all
    are solved."""

    def __init__(self, compute: Compute, view: ir.View) -> None:
        self.compute = compute
        self.values: dict[ir.Expr, ir.Expr] = {}
        self.positions: list[tuple[ir.Expr, Axis]] = []
        self.conditions: list[ir.Expr] = []
        self.turns: list[Axis] = []
        self.taken = set(compute.names.all)
        coords = [d.coord for d in view.dims]
        mentioned = [v for c in coords for v in free_vars(c)]
        self.places = [
            self.place(i, c, n, mentioned.count(c))  # type: ignore[arg-type]
            for i, (c, n) in enumerate(zip(coords, view.tensor.shape, strict=True))
        ]
        left = [(c, p) for c, p in zip(coords, self.places, strict=True) if c is not p.var]
        self.done = all(self.solve(*one) for one in sorted(left, key=lambda x: len(self.unknown(x[0]))))
        for x in compute.axes:
            if x.var not in self.values and x.name not in {a.name for a in (*self.places, *self.turns)}:
                self.turns.append(x)

    def place(self, dim: int, coord: ir.Expr, size: int, count: int) -> Axis:
        """The axis of a dimension: the computation's axis that is its coordinate, or a new one."""
        if isinstance(coord, ir.Var) and count == 1 and self.compute.size(coord.name) == size:
            return Axis(coord.name, size, "")
        name = fresh(f"p{dim}", self.taken)
        self.taken.add(name)
        return Axis(name, size, "")

    def unknown(self, coord: ir.Expr) -> list[Axis]:
        named = {p.name for p in self.places} | {x.name for x in self.turns}
        free = free_vars(substitute(coord, self.values))
        return [x for x in self.compute.axes if x.var in free and x.name not in named]

    def solve(self, coord: ir.Expr, place: Axis) -> bool:
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
        turn = ir.Var(fresh(f"{axis.name}_turn", self.taken))
        self.taken.add(turn.name)
        if solved.turns > 1:
            self.turns.append(Axis(turn.name, solved.turns, ""))
        named: dict[ir.Expr, ir.Expr] = {TURN: turn if solved.turns > 1 else ir.ZERO}
        self.values[axis.var] = substitute(solved.position, named)
        self.positions.append((self.values[axis.var], axis))
        self.conditions.append(substitute(solved.condition, named))
        return True

    def digits(self, found: dict[Axis, ir.Expr]) -> None:
        """Add the solutions of several axes, which need no turns any more."""
        known: dict[ir.Expr, ir.Expr] = {x.var: e for x, e in found.items()}
        self.turns = [x for x in self.turns if x not in found]
        self.values = {v: substitute(e, known) for v, e in self.values.items()} | known
        self.positions = [(substitute(e, known), x) for e, x in self.positions]
        self.positions += [(e, x) for x, e in found.items()]
        self.conditions = [substitute(c, known) for c in self.conditions]

    def facts(self) -> Facts:
        return facts_of_axes({x.name: x.size for x in (*self.compute.axes, *self.places, *self.turns)})


def _digits(coord: ir.Expr, axes: list[Axis], place: ir.Var) -> dict[Axis, ir.Expr] | None:
    """Axes of which a coordinate is a mixed-radix number, each as its digit of ``place``; None if it is
    not."""
    steps: dict[Axis, int] = {}
    for x in axes:
        ahead = simplify(substitute(coord, {x.var: x.var + 1}) - coord)
        if not isinstance(ahead, ir.Const) or ahead.value <= 0:
            return None
        steps[x] = int(ahead.value)
    order = sorted(axes, key=lambda x: -steps[x])
    reach = [sum(steps[y] * (y.size - 1) for y in order[i + 1 :]) for i in range(len(order))]
    if any(steps[x] <= r for x, r in zip(order, reach, strict=True)):
        return None
    zero: dict[ir.Expr, ir.Expr] = {x.var: ir.ZERO for x in axes}
    rest = simplify(place - substitute(coord, zero))
    found: dict[Axis, ir.Expr] = {}
    for x in order:
        found[x] = simplify(rest // steps[x]) if steps[x] > 1 else rest
        rest = rest % steps[x]
    return found


MOST_COUNTED = 1 << 22  # the most elements and positions that are enumerated
WRITTEN = 16  # the most candidates of a second set of turns, which are listed one by one
TURN = ir.Var("turn_")


@dataclass(frozen=True, slots=True)
class Inverse:
    """An axis solved for: its ``position``, valid if ``condition`` holds, for each value of ``TURN`` in
    0..turns."""

    position: ir.Expr
    condition: ir.Expr
    turns: int


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A possible position for each value of ``TURN`` in 0..turns, and its condition."""

    position: ir.Expr
    turns: int = 1
    condition: ir.Expr = ir.TRUE


def inverse(coord: ir.Expr, axis: Axis, place: ir.Var, sizes: Mapping[ir.Var, int]) -> Inverse | None:
    """The positions of an axis at which a coordinate equals ``place``; ``sizes``: of the place and of the
    other variables in the coordinate. None if no closed form is found."""
    others = [v for v in sorted(free_vars(coord), key=str) if v is not axis.var]
    if any(v not in sizes for v in others):
        return None
    grid = _Grid(coord, axis, (place, sizes[place]), [(v, sizes[v]) for v in others])
    if _is_plain(coord, axis.var):
        found = grid.candidates(coord, place, 1)
        return Inverse(grid.simple(found[0].position), ir.TRUE, 1) if found else None
    if (axis.size + sizes[place]) * prod(sizes[v] for v in others) > MOST_COUNTED:
        return None
    found = grid.candidates(coord, place, 1)
    return None if found is None else grid.chosen(found)


def _is_plain(coord: ir.Expr, axis: ir.Var) -> bool:
    """Whether a coordinate is its axis plus a constant, so that nothing needs to be enumerated."""
    ahead = simplify(substitute(coord, {axis: axis + 1}) - coord)
    return free_vars(coord) == {axis} and ahead is ir.Const(1)


class _Grid:
    """A coordinate, enumerated over all positions and places."""

    def __init__(
        self, coord: ir.Expr, axis: Axis, place: tuple[ir.Var, int], others: list[tuple[ir.Var, int]]
    ) -> None:
        self.coord, self.axis, self.place, self.others = coord, axis, place, others
        self.facts = facts_of_axes({axis.name: axis.size} | {v.name: n for v, n in (place, *others)})

    def candidates(self, e: ir.Expr, to: ir.Expr, turns: int) -> list[_Candidate] | None:
        """Candidates for ``e == to``, where ``to`` depends on ``TURN`` in 0..turns; None for an expression
        without a rule."""
        at = self.axis.var
        if at not in free_vars(e):
            return []
        match e:
            case ir.Var():
                return [_Candidate(to, turns)]
            case ir.Cast(x):
                return self.candidates(x, to, turns)
            case ir.Neg(x):
                return self.candidates(x, -to, turns)
            case ir.Add(u, v) if at not in free_vars(v):
                return self.candidates(u, to - v, turns)
            case ir.Add(u, v) if at not in free_vars(u):
                return self.candidates(v, to - u, turns)
            case ir.Sub(u, v) if at not in free_vars(v):
                return self.candidates(u, to + v, turns)
            case ir.Sub(u, v) if at not in free_vars(u):
                return self.candidates(v, u - to, turns)
            case ir.Mul(u, ir.Const(by)) | ir.Mul(ir.Const(by), u) if by:
                n = int(by)
                found = self.candidates(u, to // n if n > 0 else -to // -n, turns)
                whole = eq(to % abs(n), 0) if abs(n) > 1 else ir.TRUE
                return found and [replace(c, condition=all_of([c.condition, whole])) for c in found]
            case ir.FloorDiv(u, ir.Const(by)):
                n = int(by)
                return self.spread(u, to * n, 1, n, turns)
            case ir.Mod(u, ir.Const(by)):
                n, reached = int(by), self.over(u)
                low, high = int(reached.min()) // n, int(reached.max()) // n
                return self.spread(u, to + low * n, n, high - low + 1, turns)
            case ir.Min(u, v) | ir.Max(u, v) | ir.Select(_, u, v):
                found = _joined(self.candidates(x, to, turns) for x in (u, v))
                return found and found + self.still(e, u, v)
        return None

    def spread(
        self, u: ir.Expr, to: ir.Expr, step: int, count: int, turns: int
    ) -> list[_Candidate] | None:
        """Candidates for ``u`` equal to one of ``count`` numbers from ``to`` on, ``step`` apart."""
        if count == 1:
            return self.candidates(u, to, turns)
        if turns == 1:
            return self.candidates(u, to + TURN * step, count)
        if count > WRITTEN:
            return None
        return _joined(self.candidates(u, to + i * step, turns) for i in range(count))

    def still(self, e: ir.Expr, u: ir.Expr, v: ir.Expr) -> list[_Candidate]:
        """Candidates at which ``e`` equals that of ``u`` and ``v`` which does not depend on the axis: runs
        of consecutive positions."""
        still = [x for x in (u, v) if self.axis.var not in free_vars(x)]
        if not still or self.others:
            return []  # if positions are missing, ``chosen`` finds out
        moving = v if still[0] is u else u
        held = (self.over(e) == self.over(still[0])) & (self.over(e) != self.over(moving))
        ends = np.flatnonzero(np.diff(np.concatenate(([0], held.astype(np.int8), [0]))))
        return [
            _Candidate(ir.Const(int(a)) + TURN if b - a > 1 else ir.Const(int(a)), int(b - a))
            for a, b in zip(ends[::2], ends[1::2], strict=True)
        ]

    # -- enumeration -----------------------------------------------------------------------------

    def over(self, e: ir.Expr) -> ir.Array:
        """The values of an expression for all values of the other variables and all positions, in this
        order of axes."""
        return _computed(e, [*self.others, (self.axis.var, self.axis.size)])

    def chosen(self, found: list[_Candidate]) -> Inverse | None:
        """The needed candidates, with their conditions, as one Inverse; None if positions are missing."""
        kept: list[_Candidate] = []
        seen: list[ir.Array] = []
        for c in found:
            names = [*self.others, self.place, (TURN, c.turns)]
            position, own = _computed(c.position, names), _computed(c.condition, names).astype(bool)
            seen_there = substitute(self.coord, {self.axis.var: c.position})
            inside = own & (position >= 0) & (position < self.axis.size)
            right = inside & (_computed(seen_there, names) == _computed(self.place[0], names))
            conditions = [c.condition]
            if (inside & ~right).any():
                conditions.append(eq(seen_there, self.place[0]))
            for other, before in zip(kept, seen, strict=True):
                twice = right & (position[..., :, None] == before[..., None, :]).any(-1)
                if twice.any() and c.turns == other.turns == 1:
                    conditions.append(ne(c.position, other.position))
                    right &= ~twice
                elif twice.any():
                    return None
            if right.any():
                facts = self.facts.with_range(TURN, 0, c.turns - 1)
                kept.append(
                    _Candidate(
                        simplify(c.position, facts),
                        c.turns,
                        all_of([simplify(e, facts) for e in conditions]),
                    )
                )
                seen.append(np.where(right, position, -1))
        there = self.over(self.coord)
        count = int(((there >= 0) & (there < self.place[1])).sum())
        return _together(kept) if kept and sum(int((s >= 0).sum()) for s in seen) == count else None

    def simple(self, e: ir.Expr) -> ir.Expr:
        return simplify(e, self.facts)


def _computed(e: ir.Expr, names: Sequence[tuple[ir.Var, int]]) -> ir.Array:
    """The values of an expression for all values of some variables, an axis for each."""
    at = ir.Evaluator(ir.Memory({}), {}, len(names))
    for i, (v, n) in enumerate(names):
        at.env[v] = at.along(i, np.arange(n, dtype=np.int64))
    return np.asarray(np.broadcast_to(at.compute(e), [n for _, n in names]))


def _joined(parts: Iterable[list[_Candidate] | None]) -> list[_Candidate] | None:
    """The concatenated lists; None if one is None."""
    found: list[_Candidate] = []
    for part in parts:
        if part is None:
            return None
        found += part
    return found


def _together(kept: list[_Candidate]) -> Inverse:
    """Several candidates as one, whose turns are numbered one after another."""
    if len(kept) == 1:
        return Inverse(kept[0].position, kept[0].condition, kept[0].turns)
    position, conditions = kept[-1].position, []
    ends = list(accumulate(c.turns for c in kept))
    for i, (c, end) in reversed(list(enumerate(zip(kept, ends, strict=True)))):
        moved: dict[ir.Expr, ir.Expr] = {TURN: TURN - (end - c.turns)}
        own = substitute(c.position, moved)
        position = own if i == len(kept) - 1 else select(TURN < end, own, position)
        if c.condition is not ir.TRUE:
            other = ([TURN < end - c.turns] if i else []) + ([TURN >= end] if c is not kept[-1] else [])
            conditions.append(reduce(ir.Or, other, substitute(c.condition, moved)))
    return Inverse(position, all_of(conditions[::-1]), ends[-1])
