"""Values of a kernel's expressions at points that facts allow: what shows an unsound rewrite of the
simplifier, and an index that overflows.

A witness (see ``simplify/fixpoint.py``) is shown every rewrite of a pass that is replayed, inner nodes
first, and computes both sides. So the first unsound step is found, not what later steps made of it. All
points are tried where they are few, else corners and random ones. Integers are unbounded for the
simplifier; here they are 64 bits wide, and points stay small.

Tensors of more than 2^31 elements are too large to interpret, but their indices need no tensors: every
index expression of the kernel is computed at corners and random points of the loops and lanes, once as it
is typed, each intermediate value wrapped around at the width of its node, once in 64 bits."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import transconv.simplify
from transconv import ir
from transconv.simplify import Facts, fixpoint, multiple_of, range_of, witnessed

_FOLDER = str(Path(transconv.simplify.__file__).parent)


class Unsound(Exception):
    """A rewrite that changes the value. ``rule``: the name of the rule, or of the analysis that
    told it something false; ``place``: the line that made the wrong expression."""

    def __init__(self, rule: str, before: str, after: str, at: str, facts: str, place: str = "") -> None:
        where = f" ({place})" if place else ""
        super().__init__(
            f"{rule}{where}: {before} became {after}, wrong at {at}"
            + (f", where {facts} holds" if facts else "")
        )
        self.rule, self.before, self.after, self.at, self.place = rule, before, after, at, place


@contextmanager
def audited(seed: int = 0) -> Iterator[Audit]:
    """Check every rewrite within ``with``; raises Unsound at the first that is wrong."""
    audit = Audit(np.random.default_rng(seed))
    with witnessed(audit.look):
        yield audit


def rule_of(rewrite: Callable[[], object], seed: int = 0) -> str:
    """The rule of the simplifier that makes a rewrite wrong, in words; empty if none does."""
    try:
        with audited(seed):
            rewrite()
    except Unsound as unsound:
        return str(unsound)
    except Exception:  # it fails by itself, which has been told
        return ""
    return ""


class Audit:
    """A witness that checks every rewrite. ``checked`` rewrites, and those ``skipped`` for want of a
    point."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.checked = self.skipped = 0
        self._seen: set[tuple[ir.Expr, ir.Expr, Facts]] = set()

    def look(self, rule: str, before: ir.Expr, after: ir.Expr, facts: Facts) -> None:
        """Raises Unsound."""
        key = before, after, facts
        if key in self._seen:
            return
        self._seen.add(key)
        points = AssignedPoints.draw((before, after), facts, self.random)
        if points is None:
            self.skipped += 1
            return
        old = points.value(before)
        if old is None:
            self.skipped += 1
            return
        self.checked += 1
        self._analyses(before, old, points, facts)
        new = old if after is before else points.value(after)
        if new is None:
            self.skipped += 1
        elif (wrong := points.differ(old, new)) is not None:
            raise Unsound(
                rule,
                f"`{ir.readable(before)}`",
                f"`{ir.readable(after)}`",
                f"{points.text(wrong)}: {_at(old, wrong)} became {_at(new, wrong)}",
                points.given(facts),
                _origin(before, after, facts) if rule != "settle" else "",
            )

    def _analyses(self, e: ir.Expr, values: ir.Array, points: AssignedPoints, facts: Facts) -> None:
        """What the simplifier believes of a value."""
        if not e.dtype.is_integer:
            return
        found, n = range_of(e, facts), multiple_of(e, facts)
        outside = (values < found.low) | (values > found.high)
        odd = (values % n != 0) if n else values != 0
        for bad, name, claim in (
            (outside, "range_of", f"{found.lo}..{found.hi}"),
            (odd, "multiple_of", f"a multiple of {n}"),
        ):
            if (wrong := points.first(bad)) is not None:
                raise Unsound(
                    name,
                    f"`{ir.readable(e)}`",
                    claim,
                    f"{points.text(wrong)}: it is {_at(values, wrong)}",
                    points.given(facts),
                )


def _at(values: ir.Array, where: int) -> str:
    return f"{values.flat[0] if values.size == 1 else values[where]:g}"


def _origin(before: ir.Expr, after: ir.Expr, facts: Facts) -> str:
    """The function and line of the simplifier that first returned the wrong expression: the rule
    is applied once more, traced."""
    found: list[str] = []

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_FOLDER):
            return None
        if event == "return" and value is after and not found:
            name = Path(frame.f_code.co_filename).name
            found.append(f"{frame.f_code.co_name}, simplify/{name}:{frame.f_lineno}")
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        fixpoint._step(before, facts)
    except Unsound:
        pass  # the witness observes this call
    finally:
        sys.settrace(earlier)
    return found[0] if found else ""


FEW = 1500  # points that are all tried
DRAWN = 256
TRIES = 20
FAR = 40  # how far an unbounded variable is from its bound

Values = dict[ir.Expr, ir.Array]


class _Values(ir.Evaluator):
    """Evaluates at many points at once; lanes are given like variables, memory is a made-up
    function of the address. ``invalid``: the points where a divisor is 0, which are not compared."""

    def __init__(self, at: Mapping[ir.Expr, ir.Array], count: int) -> None:
        super().__init__(ir.Memory({}), {}, 1)
        self.at = at
        self.invalid: ir.Array = np.zeros(count, np.bool_)

    def value(self, e: ir.Expr) -> ir.Array:
        found = self.at.get(e)
        return super().value(e) if found is None else found

    def forbid(self, bad: ir.Array, reason: str) -> None:
        self.invalid = self.invalid | bad

    def _Load(self, e: ir.Load) -> ir.Array:
        mixed = (self.value(e.offset) * 2654435761 >> 7) % 23 - 4
        return np.where(self.value(e.mask), mixed, 0)


@dataclass(slots=True)
class AssignedPoints:
    """Values of the variables and lanes of some expressions, all allowed by the facts."""

    at: Values
    rows: ir.Array
    valid: ir.Array

    @staticmethod
    def draw(
        exprs: tuple[ir.Expr, ...], facts: Facts, random: np.random.Generator
    ) -> AssignedPoints | None:
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
    def of(leaves: list[ir.Expr], rows: ir.Array) -> AssignedPoints:
        columns = {leaf: _typed(rows[:, i], leaf) for i, leaf in enumerate(leaves)}
        return AssignedPoints(columns, rows, np.ones(len(rows), np.bool_))

    def value(self, e: ir.Expr) -> ir.Array | None:
        """The value at every point; None for an expression that has a value only inside a kernel.
        Points where it is undefined are left out from then on."""
        evaluator = _Values(self.at, len(self.rows))
        try:
            with np.errstate(all="ignore"):
                found = evaluator.compute(e)
        except (ir.Fault, KeyError):
            return None
        self.valid = self.valid & ~evaluator.invalid
        return found

    def differ(self, old: ir.Array, new: ir.Array) -> int | None:
        """The first point where two values differ."""
        same = (old == new) | ((old != old) & (new != new))
        return self.first(~same)

    def first(self, bad: ir.Array) -> int | None:
        bad = bad & self.valid
        return int(np.argmax(bad)) if bad.any() else None

    def text(self, where: int) -> str:
        return ", ".join(f"{leaf}={v[where]:g}" for leaf, v in self.at.items()) or "every point"

    def given(self, facts: Facts) -> str:
        """The conditions among the facts that contain these variables."""
        mine = set(self.at)
        return " and ".join(ir.readable(c) for c in facts.true if mine & _leaves(c))


def _leaves(e: ir.Expr) -> set[ir.Expr]:
    return {*ir.find(e, ir.Var), *ir.find(e, ir.Lane)}


def _typed(column: ir.Array, leaf: ir.Expr) -> ir.Array:
    """Drawn integers as values of a leaf: integers 64 bits wide; floats also between integers,
    and NaN in the place of the smallest."""
    if leaf.dtype.kind == "bool":
        return column.astype(np.bool_)
    if leaf.dtype.kind == "float":
        halves = column / 4
        return np.where(column == column.min(), np.nan, halves) if len(column) > 1 else halves
    return column


Test = Callable[[AssignedPoints], ir.Array | None]


def _relevant(exprs: tuple[ir.Expr, ...], facts: Facts) -> tuple[list[ir.Expr], list[Test]]:
    """The leaves of some expressions and of all facts that bear on them, and these facts."""
    leaves = set().union(*map(_leaves, exprs))
    stated: list[tuple[set[ir.Expr], Test]] = [(_leaves(c), _holds(c)) for c in facts.true]
    stated += [
        (_leaves(e), _within(e, r.low, r.high))
        for e, r in facts.ranges.items()
        if not isinstance(e, (ir.Var, ir.Lane))
    ]
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


def _holds(condition: ir.Expr) -> Test:
    return lambda points: points.value(condition)


def _within(e: ir.Expr, low: float, high: float) -> Test:
    def test(points: AssignedPoints) -> ir.Array | None:
        found = points.value(e)
        return None if found is None else np.asarray((found >= low) & (found <= high))

    return test


def _divides(e: ir.Expr, n: int) -> Test:
    def test(points: AssignedPoints) -> ir.Array | None:
        found = points.value(e)
        return None if found is None else np.asarray(found % n == 0 if n else found == 0)

    return test


def _span(leaf: ir.Expr, facts: Facts) -> tuple[int, int]:
    """The values to try, at most ``FAR`` beyond the known bound."""
    if isinstance(leaf, ir.Lane):
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


def _column(lo: int, hi: int, random: np.random.Generator) -> ir.Array:
    """Random values, every third one near an end of the range."""
    drawn = random.integers(lo, hi, DRAWN, endpoint=True)
    near = random.integers(0, min(3, hi - lo), DRAWN, endpoint=True)
    kind = random.integers(0, 6, DRAWN)
    return np.where(kind == 0, lo + near, np.where(kind == 1, hi - near, drawn))


def _allowed(leaves: list[ir.Expr], rows: ir.Array, tests: list[Test]) -> AssignedPoints | None:
    """The points that pass all tests."""
    points = AssignedPoints.of(leaves, rows)
    keep = np.ones(len(rows), np.bool_)
    for test in tests:
        found = test(points)
        if found is not None:
            keep = keep & found.astype(np.bool_)
    keep = keep & points.valid
    return AssignedPoints.of(leaves, rows[keep]) if keep.any() else None


# -- indices that overflow ---------------------------------------------------------------------------

POINTS = 256


class _TypedValues(_Values):
    """Integers of less than 64 bits wrap around, in every step."""

    def __init__(self, at: Mapping[ir.Expr, ir.Array], wraps: bool) -> None:
        super().__init__(at, 1)
        self.wraps = wraps

    def value(self, e: ir.Expr) -> ir.Array:
        found = super().value(e)
        if self.wraps and e.dtype.is_integer and e.dtype.bits == 32:
            return found.astype(np.int64).astype(np.int32).astype(np.int64)
        return found.astype(np.int64) if e.dtype.is_integer else found


def overflow(kernel: ir.Kernel, seed: int = 0) -> str:
    """The first index that overflows, in words; empty if none does at the points that were tried."""
    return _Walk(np.random.default_rng(seed)).statements(kernel.body)


class _Walk:
    """Goes through a kernel in program order; ``known`` is what has a value at every point, as it
    is typed and in 64 bits."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.known: tuple[dict[ir.Expr, ir.Array], dict[ir.Expr, ir.Array]] = ({}, {})

    def draw(self, leaf: ir.Expr, stop: int, first: int = 0) -> None:
        last = max(first, stop - 1)
        drawn = self.random.integers(first, last + 1, POINTS)
        drawn[: POINTS // 4] = first
        drawn[POINTS // 4 : POINTS // 2] = last
        drawn = self.random.permutation(drawn)
        drawn[0], drawn[1] = last, first  # a point with all ends, and one at the start
        for values in self.known:
            values[leaf] = drawn

    def statements(self, s: ir.Stmt) -> str:
        """What is wrong with the accesses of a statement, in words."""
        match s:
            case ir.Seq(stmts):
                return next(filter(None, map(self.statements, stmts)), "")
            case ir.For():
                self.draw(s.var, s.stop, int(s.start.value) if isinstance(s.start, ir.Const) else 0)
                return self.statements(s.body)
            case ir.If():
                return self.statements(s.then) or (self.statements(s.other) if s.other else "")
            case ir.Let(var, value) if value.dtype.kind in ("index", "int", "bool") and not ir.find(
                value, ir.MemoryRead
            ):
                self.bind(var, value)  # an unread name may overflow
                return ""
            case ir.Alloc() | ir.Update():
                return ""
        return next(filter(None, map(self.differs, _indices(s))), "")

    def bind(self, var: ir.Var, value: ir.Expr) -> None:
        made = self.both(value)
        if made is not None:
            for values, found in zip(self.known, made, strict=True):
                values[var] = found

    def both(self, e: ir.Expr) -> tuple[ir.Array, ir.Array] | None:
        """Its values as typed and in 64 bits; None where it depends on what is not known."""
        for lane in ir.find(e, ir.Lane):
            if lane not in self.known[0]:
                self.draw(lane, lane.extent)
        if not all(v in self.known[0] for v in ir.free_vars(e)) or ir.find(e, ir.MemoryRead):
            return None
        try:
            with np.errstate(all="ignore"):
                typed, wide = (
                    _TypedValues(at, wraps).compute(e)
                    for at, wraps in zip(self.known, (True, False), strict=True)
                )
        except (ir.Fault, KeyError):
            return None
        return typed, wide

    def differs(self, access: tuple[str, ir.Expr, ir.Expr]) -> str:
        name, offset, mask = access
        made, masks = self.both(offset), self.both(mask)
        if made is None or masks is None:
            return ""
        bad = (made[0] != made[1]) & (masks[0] | masks[1]) | (masks[0] != masks[1])
        if not bad.any():
            return ""
        at = int(np.argmax(bad))
        what = mask if masks[0].flat[at % masks[0].size] != masks[1].flat[at % masks[1].size] else offset
        here = ", ".join(
            f"{v}={int(self.known[1][v].flat[at])}"
            for v in sorted({*ir.free_vars(what), *ir.find(what, ir.Lane)}, key=str)
        )
        values = made if what is offset else masks
        short, right = (int(v.flat[at % v.size]) for v in values)
        return (
            f"the index `{ir.readable(what)}` into {name} does not fit into its type: at {here} it "
            f"is {right}, and becomes {short}"
        )


def _indices(at: ir.Node) -> Iterator[tuple[str, ir.Expr, ir.Expr]]:
    """Tensor, offset and mask of every access of a statement."""
    for load in ir.find(at, ir.Load):
        yield load.tensor.name, load.offset, load.mask
    match at:
        case ir.Store(tensor, offset, _, mask):
            yield tensor.name, offset, mask
        case ir.FuncCall() if at.func.name == "atomic_add":
            into, where, _, condition = at.args
            assert isinstance(into, ir.Tensor)
            assert isinstance(where, ir.Expr) and isinstance(condition, ir.Expr)
            yield into.name, where, condition
