"""``python -m bench index-operations``: what the simplifier leaves of addresses and masks.

The kernels are those of the golden texts (``tests/golden``) and of drawn problems and schedules. A row has
the masks' conditions, index operations, divisions and nodes of one kernel; ``removable``: how many of the
conditions hold, or fail, at every point where the others about their variables hold, by evaluating every
point; ``unknown``: how many have more points than are evaluated. A row is written for each ``--side``, and
problems are read from the rows that are there, so that two versions of the source are compared over the
same schedules.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from transconv import ir
from transconv.cli.arguments import ranges
from transconv.conv import ConvProblem, Prop, compiler
from transconv.conv.relation import computes
from transconv.errors import TransconvError
from transconv.ir import Const, Expr, FloorDiv, Kernel, Lane, Load, Mod, Store, Var, conjuncts, find, walk
from transconv.passes.scope import ScopedMutator
from transconv.schedule import Schedule
from transconv.simplify import Facts, range_of
from transconv.target import TARGETS
from transconv.tuning.table import CsvTable
from transconv.verify.fuzz import conv_problems, legal_schedules

COLUMNS = (
    "problem",
    "direction",
    "launch",
    "schedule",
    "target",
    "side",
    "masks",
    "removable",
    "unknown",
    "operations",
    "divisions",
    "nodes",
)
KEY = ("problem", "direction", "launch", "schedule", "target", "side")
NAME = "index_operations.csv"
POINTS = 2_000_000
MEANING: dict[type[Expr], Any] = {
    ir.Add: np.add,
    ir.Sub: np.subtract,
    ir.Mul: np.multiply,
    ir.FloorDiv: np.floor_divide,
    ir.Mod: np.mod,
    ir.Min: np.minimum,
    ir.Max: np.maximum,
    ir.Lt: np.less,
    ir.Le: np.less_equal,
    ir.Eq: np.equal,
    ir.Ne: np.not_equal,
    ir.And: np.logical_and,
    ir.Or: np.logical_or,
}


def arguments(to: argparse.ArgumentParser) -> None:
    to.add_argument("--n", type=ranges.at_least(0), default=500, help="drawn problems (default: 500)")
    to.add_argument("--side", default="after", help="a name for this version of the source")


def main(options: argparse.Namespace) -> int:
    """Add the rows of one side, and print the sums of all."""
    table = CsvTable(Path(options.out) / NAME, COLUMNS, KEY)
    texts = list(dict.fromkeys(tuple(row[c] for c in KEY[:-1]) for row in table.rows))
    for text in texts or [*_golden(), *_drawn(options.n)]:
        row = dict(zip(KEY, (*text, options.side), strict=True))
        if not table.has(row) and (found := _counted(*text)) is not None:
            table.add(row | found)
    for line in summary(table.rows):
        print(line)
    return 0


def summary(rows: list[dict[str, str]]) -> Iterator[str]:
    """The sums of each side's columns over the kernels that all sides have, and how many problems lose a
    mask or a division from the first to the last."""
    sides = list(dict.fromkeys(r["side"] for r in rows))
    by = {side: {tuple(r[c] for c in KEY[:-1]): r for r in rows if r["side"] == side} for side in sides}
    common = [key for key in by[sides[0]] if all(key in by[side] for side in sides)]
    for side in sides:
        total = {c: sum(int(by[side][key][c]) for key in common) for c in COLUMNS[6:]}
        yield f"{side}: {len(common)} kernels, " + ", ".join(f"{n} {c}" for c, n in total.items())
    for column in ("masks", "divisions", "operations"):
        fewer = {
            key[0] for key in common if int(by[sides[-1]][key][column]) < int(by[sides[0]][key][column])
        }
        more = {
            key[0] for key in common if int(by[sides[-1]][key][column]) > int(by[sides[0]][key][column])
        }
        yield f"fewer {column} from {sides[0]} to {sides[-1]}: {len(fewer)} problems; more: {len(more)}"


Text = tuple[str, ...]


def _golden() -> list[Text]:
    """The problems, directions, launches, schedules and targets of the golden texts."""
    from tests.backend_triton.test_emit import CASES

    return [
        (problem, way, str(launch), schedule, "sm_90")
        for problem, way, schedule, _, launch in CASES.values()
    ]


def _drawn(count: int) -> Iterator[Text]:
    for seed in range(count):
        rng = Random(seed)
        prop, target = rng.choice(list(Prop)), rng.choice(["sm_80", "sm_90"])
        problem = conv_problems.drawn(rng, prop)
        schedule = legal_schedules.schedule(rng, list(computes(problem, prop)), TARGETS[target])
        if schedule is not None:
            for launch in range(len(list(computes(problem, prop)))):
                yield str(problem), prop.value, str(launch), str(schedule), target


def _counted(problem: str, way: str, launch: str, schedule: str, target: str) -> dict[str, int] | None:
    """What one kernel has; None if this launch has another schedule, or the schedule does not suit it."""
    made = ConvProblem.parse(problem)
    steps = list(computes(made, Prop(way)))
    if int(launch) >= len(steps):
        return None
    try:
        stages = dict(
            compiler.lower(steps[int(launch)], Schedule.parse(schedule), TARGETS[target], "k", made.math)
        )
    except TransconvError:
        return None
    census = _Census(stages["simplify"])
    last = _index_expressions(list(stages.values())[-1])
    nodes = [n for e in last for n in walk(e)]
    return {
        "masks": census.masks,
        "removable": census.removable,
        "unknown": census.unknown,
        "operations": sum(not isinstance(n, (Const, Var, Lane)) for n in nodes),
        "divisions": sum(isinstance(n, (FloorDiv, Mod)) for n in nodes),
        "nodes": len(nodes),
    }


def _index_expressions(kernel: Kernel) -> list[Expr]:
    """The addresses, masks and index values of a kernel."""
    found: list[Expr] = []
    for at in walk(kernel.body):
        match at:
            case Load() | Store():
                found += [at.offset, at.mask]
            case ir.BoxLoad() | ir.BoxStore():
                found += at.corner
    return found + [
        let.value
        for let in find(kernel.body, ir.Let)
        if let.value.dtype.kind in ("index", "bool") and not find(let.value, Load)
    ]


class _Census(ScopedMutator):
    """The masks of a kernel, over loop variables and lanes, counted."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel.sizes)
        self.masks = self.removable = self.unknown = 0
        self.mutate(kernel.body)

    def mutate(self, at: Any) -> Any:
        if isinstance(at, (Load, Store)):
            self.look(conjuncts(at.mask))
        return super().mutate(at)

    def look(self, mask: list[Expr]) -> None:
        parts = [self.whole(part) for part in mask if not isinstance(part, Const)]
        self.masks += len(parts)
        kept = list(parts)
        for part in reversed(parts):
            others = [o for o in kept if o is not part] + list(self.facts.true)
            found = needless(part, others, self.facts)
            self.unknown += found is None
            if found:
                self.removable += 1
                kept.remove(part)


def needless(part: Expr, others: list[Expr], facts: Facts) -> bool | None:
    """Whether a condition is true, or false, at every point where those of the others hold that have a
    variable of it; None if there are too many points, or values that are no positions."""
    own = {n for n in walk(part) if isinstance(n, (Var, Lane))}
    for near in ([], [o for o in others if own & set(walk(o))]):
        found = _always(part, near, facts)
        if found is not False:
            return found
    return False


def _always(part: Expr, others: list[Expr], facts: Facts) -> bool | None:
    at = _grid([part, *others], facts)
    if at is None:
        return None
    try:
        held = np.asarray(True)
        for other in others:
            held = held & _value(other, at)
        truth = _value(part, at)
    except TypeError:
        return None
    return bool((truth | ~held).all() or not (truth & held).any())


def _grid(expressions: list[Expr], facts: Facts) -> dict[Expr, Any] | None:
    leaves = list(dict.fromkeys(n for e in expressions for n in walk(e) if isinstance(n, (Var, Lane))))
    at: dict[Expr, Any] = {}
    points = 1
    for i, v in enumerate(leaves):
        r = range_of(v, facts)
        if r.lo is None or r.hi is None or (points := points * (r.hi - r.lo + 1)) > POINTS:
            return None
        shape = [1] * len(leaves)
        shape[i] = -1
        at[v] = np.arange(r.lo, r.hi + 1).reshape(shape)
    return at


def _value(e: Expr, at: Mapping[Expr, Any]) -> Any:
    match e:
        case Const(value):
            return np.asarray(value)
        case Var() | Lane():
            return at[e]
        case ir.Neg(x):
            return -_value(x, at)
        case ir.Not(x):
            return ~_value(x, at)
        case ir.Select(cond, yes, no):
            return np.where(_value(cond, at), _value(yes, at), _value(no, at))
        case ir.Cast(x):
            return _value(x, at)
        case ir.Binary() if type(e) in MEANING:
            return MEANING[type(e)](_value(e.a, at), _value(e.b, at))
    raise TypeError(f"{type(e).__name__} has no value at a point")
