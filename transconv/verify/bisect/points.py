"""Points that satisfy given facts, and the values of expressions there.

All points are tried where they are few, else corners and random ones. Integers are unbounded for the
simplifier; here they are 64 bits wide, and points stay small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from transconv.ir import Array, Evaluator, Expr, Fault, Lane, Load, Memory, Var, find, readable
from transconv.simplify import Facts

FEW = 1500  # points that are all tried
DRAWN = 256
TRIES = 20
FAR = 40  # how far an unbounded variable is from its bound

Values = dict[Expr, Array]


class _Values(Evaluator):
    """Evaluates at many points at once; lanes are given like variables, memory is a made-up
    function of the address. ``invalid``: the points where a divisor is 0, which are not compared."""

    def __init__(self, at: Mapping[Expr, Array], count: int) -> None:
        super().__init__(Memory({}), {}, 1)
        self.at = at
        self.invalid: Array = np.zeros(count, np.bool_)

    def value(self, e: Expr) -> Array:
        found = self.at.get(e)
        return super().value(e) if found is None else found

    def forbid(self, bad: Array, reason: str) -> None:
        self.invalid = self.invalid | bad

    def _Load(self, e: Load) -> Array:
        mixed = (self.value(e.offset) * 2654435761 >> 7) % 23 - 4
        return np.where(self.value(e.mask), mixed, 0)


@dataclass(slots=True)
class AssignedPoints:
    """Values of the variables and lanes of some expressions, all allowed by the facts."""

    at: Values
    rows: Array
    valid: Array

    @staticmethod
    def draw(exprs: tuple[Expr, ...], facts: Facts, random: np.random.Generator) -> AssignedPoints | None:
        """None where no point was found that the facts allow."""
        leaves, conditions = _relevant(exprs, facts)
        spans = [_span(leaf, facts) for leaf in leaves]
        if math.prod(hi - lo + 1 for lo, hi in spans) <= FEW:
            rows = np.array(list(product(*(range(lo, hi + 1) for lo, hi in spans))), np.int64)
            return _allowed(leaves, rows.reshape(len(rows), len(leaves)), conditions)
        kept = np.zeros((0, len(leaves)), np.int64)
        for _ in range(TRIES):
            rows = np.stack([_column(lo, hi, random) for lo, hi in spans], 1)
            found = _allowed(leaves, rows, conditions)
            if found is not None:
                kept = np.concatenate([kept, found.rows])
            if len(kept) >= DRAWN // 4:
                break
        return AssignedPoints.of(leaves, kept) if len(kept) else None

    @staticmethod
    def of(leaves: list[Expr], rows: Array) -> AssignedPoints:
        columns = {leaf: _typed(rows[:, i], leaf) for i, leaf in enumerate(leaves)}
        return AssignedPoints(columns, rows, np.ones(len(rows), np.bool_))

    def value(self, e: Expr) -> Array | None:
        """The value at every point; None for an expression that has a value only inside a kernel.
        Points where it is undefined are left out from then on."""
        evaluator = _Values(self.at, len(self.rows))
        try:
            with np.errstate(all="ignore"):
                found = evaluator.compute(e)
        except (Fault, KeyError):
            return None
        self.valid = self.valid & ~evaluator.invalid
        return found

    def differ(self, old: Array, new: Array) -> int | None:
        """The first point where two values differ."""
        same = (old == new) | ((old != old) & (new != new))
        return self.first(~same)

    def first(self, bad: Array) -> int | None:
        bad = bad & self.valid
        return int(np.argmax(bad)) if bad.any() else None

    def text(self, where: int) -> str:
        return ", ".join(f"{leaf}={v[where]:g}" for leaf, v in self.at.items()) or "every point"

    def given(self, facts: Facts) -> str:
        """The conditions among the facts that contain these variables."""
        mine = set(self.at)
        return " and ".join(readable(c) for c in facts.true if mine & _leaves(c))


def _leaves(e: Expr) -> set[Expr]:
    return {*find(e, Var), *find(e, Lane)}


def _typed(column: Array, leaf: Expr) -> Array:
    """Drawn whole numbers as values of a leaf: integers 64 bits wide; floats also between whole
    numbers, and NaN in the place of the smallest."""
    if leaf.dtype.kind == "bool":
        return column.astype(np.bool_)
    if leaf.dtype.kind == "float":
        halves = column / 4
        return np.where(column == column.min(), np.nan, halves) if len(column) > 1 else halves
    return column


Test = Callable[[AssignedPoints], Array | None]


def _relevant(exprs: tuple[Expr, ...], facts: Facts) -> tuple[list[Expr], list[Test]]:
    """The leaves of some expressions and of all facts that bear on them, and these facts."""
    leaves = set().union(*map(_leaves, exprs))
    stated: list[tuple[set[Expr], Test]] = [(_leaves(c), _holds(c)) for c in facts.true]
    stated += [(_leaves(e), _within(e, r.low, r.high)) for e, r in facts.ranges.items()
               if not isinstance(e, (Var, Lane))]
    stated += [(_leaves(e), _divides(e, n)) for e, n in facts.multiples.items()]
    used: list[Test] = []
    waiting = stated
    while True:
        near = [(mine, test) for mine, test in waiting if mine & leaves or not mine]
        if not near:
            return sorted(leaves, key=str), used
        waiting = [entry for entry in waiting if entry not in near]
        for mine, test in near:
            leaves |= mine
            used.append(test)


def _holds(condition: Expr) -> Test:
    return lambda points: points.value(condition)


def _within(e: Expr, low: float, high: float) -> Test:
    def test(points: AssignedPoints) -> Array | None:
        found = points.value(e)
        return None if found is None else np.asarray((found >= low) & (found <= high))
    return test


def _divides(e: Expr, n: int) -> Test:
    def test(points: AssignedPoints) -> Array | None:
        found = points.value(e)
        return None if found is None else np.asarray(found % n == 0 if n else found == 0)
    return test


def _span(leaf: Expr, facts: Facts) -> tuple[int, int]:
    """The values to try, at most ``FAR`` beyond the known bound."""
    if isinstance(leaf, Lane):
        return 0, leaf.extent - 1
    if leaf.dtype.kind == "bool":
        return 0, 1
    stated = facts.stated_range(leaf)
    lo, hi = stated.lo, stated.hi
    if leaf.dtype.bits == 8:
        return -128 if lo is None else lo, 127 if hi is None else hi
    if lo is None:
        lo = -FAR if hi is None else hi - FAR
    if hi is None:
        hi = lo + 2 * FAR
    return lo, max(lo, hi)


def _column(lo: int, hi: int, random: np.random.Generator) -> Array:
    """Random values, every third one near an end of the range."""
    drawn = random.integers(lo, hi, DRAWN, endpoint=True)
    near = random.integers(0, min(3, hi - lo), DRAWN, endpoint=True)
    kind = random.integers(0, 6, DRAWN)
    return np.where(kind == 0, lo + near, np.where(kind == 1, hi - near, drawn))


def _allowed(leaves: list[Expr], rows: Array, tests: list[Test]) -> AssignedPoints | None:
    """The points that pass all tests."""
    points = AssignedPoints.of(leaves, rows)
    keep = np.ones(len(rows), np.bool_)
    for test in tests:
        found = test(points)
        if found is not None:
            keep = keep & found.astype(np.bool_)
    keep = keep & points.valid
    return AssignedPoints.of(leaves, rows[keep]) if keep.any() else None
