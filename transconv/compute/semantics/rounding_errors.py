"""The rounding error of evaluating an expression, operation by operation.

    x*0.5*(1 + erf(x*c))     1 + erf is off by half a unit in the last place of 1, also where it is 1e-6

Each operation rounds its own result. What becomes of that in the rest of the expression is found by
evaluating the rest with the result moved: cancellations count, and errors that an expression is written to
cancel do not (``log(u)/(u - 1)`` hardly changes with u).

    p - p,  p = x*x          fma(x, x, -p): one of both is not rounded, the difference is not 0

Compilers make one instruction of a product and the sum that it is added to. So where a product that is
used several times is added, its rounding there is none of the others'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

import numpy as np

from transconv.ir import (
    CALLS,
    Add,
    Array,
    Call,
    Cast,
    Const,
    Div,
    DType,
    Eq,
    Evaluator,
    Expr,
    Mul,
    Ne,
    Sub,
)

DIVISION = 4.0
"""Half units in the last place by which a quotient of f32 may be off: chips approximate it."""


def own(e: Expr, exact: Callable[[Expr], Expr], at: Evaluator, products: Collection[Expr] = ()) -> Array:
    """The error of an expression from the roundings of its own operations; ``at`` has the values of its
    variables, ``exact`` gives an expression in f64. ``products``: the variables that are products."""
    rounds = {x: _half_units(x) for x in _parts(e) if x.dtype.kind == "float" and _is_off(x)}
    if not rounds:
        return np.zeros((1,) * at.rank)
    wide = {part: exact(part) for part in (e, *rounds)}
    whole = wide[e]
    values = at.parts(whole)
    moves: dict[Expr, Array] = {}
    shared = _used_again(e, products)
    for part, units in rounds.items():
        off = _rounding(part, wide[part], units, values, at)
        if isinstance(part, (Add, Sub)):
            for x in part.children():
                off = off + (part.dtype.spacing / 2 * _size(values[exact(x)]) if x in shared else 0.0)
        moves[wide[part]] = np.maximum(off, moves.get(wide[part], 0.0))
    total = np.zeros_like(values[whole], np.float64)
    for part, off in moves.items():
        total = total + (off if part is whole else moved(whole, part, off, values, at))
    return total


def _used_again(e: Expr, products: Collection[Expr]) -> set[Expr]:
    """The products that an expression uses more than once."""
    uses = Counter(x for part in _parts(e) for x in part.children() if isinstance(x, Expr))
    return {x for x, n in uses.items() if n > 1 and (isinstance(x, Mul) or x in products)}


def _size(value: Array) -> Array:
    return np.where(np.isfinite(value), np.abs(value), 0.0)


def apart(one: Array, other: Array) -> Array:
    """The distance of values: 0 for equal infinities and two NaN, infinity if only one is NaN or
    infinite, 1 for unlike truths."""
    if one.dtype.kind == "b":
        one, other = one.astype(np.float64), other.astype(np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    off = np.where(same, 0.0, np.abs(one - other))
    return np.asarray(np.where(np.isnan(off), np.inf, off))


def moved(whole: Expr, part: Expr, off: Array, values: Mapping[Expr, Array], at: Evaluator) -> Array:
    """How far an expression moves if a part of it is off; ``values``: those of its parts."""
    with_it = _above(whole, part)
    known = {x: v for x, v in values.items() if x not in with_it}
    sides = [apart(at.compute(whole, {**known, part: values[part] + way}), values[whole])
             for way in (off, -off)]
    return np.maximum(*sides)


def equalities(e: Expr) -> list[Eq | Ne]:
    """The comparisons of floats by equality in an expression. Moving what is compared makes equal values
    unlike, but never hits the one number at which unlike values are equal."""
    return [x for x in _parts(e) if isinstance(x, (Eq, Ne)) and x.a.dtype.kind == "float"]


def turned(whole: Expr, equality: Eq | Ne, off: Array, at: Evaluator) -> Array:
    """How far an expression moves if values that are within ``off`` of one another, and compared by an
    ``equality`` in it, are equal once they are rounded."""
    values = at.parts(whole)
    near = np.abs(values[equality.a] - values[equality.b]) <= off
    truth = np.where(near, isinstance(equality, Eq), values[equality])
    with_it = _above(whole, equality)
    known = {x: v for x, v in values.items() if x not in with_it}
    return apart(np.asarray(at.compute(whole, {**known, equality: truth})), values[whole])


def _rounding(part: Expr, wide: Expr, units: float, values: Mapping[Expr, Array], at: Evaluator) -> Array:
    """How far the result of one operation may be off by its own rounding."""
    value, half = values[wide], part.dtype.spacing / 2
    off = units * (half * _size(value) + part.dtype.tiny)
    if isinstance(part, Call) and isinstance(wide, Call):
        callee, smallest = CALLS[part.name], part.dtype.tiny / half
        off = off + smallest * (units > 0)  # functions give 0 for numbers with fewer digits
        size = np.abs(values[wide.args[0]])
        taken = callee.inside * half * size + np.where(callee.flushes & (size < smallest), size, 0.0)
        if taken.any():
            off = off + moved(wide, wide.args[0], taken, values, at)
    return np.asarray(off)


def _is_off(part: Expr) -> bool:
    """Whether the result of an operation may be off by its own doing."""
    return _half_units(part) > 0 or isinstance(part, Call) and CALLS[part.name].flushes


def _half_units(part: Expr) -> float:
    """By how many half units in the last place the result of an operation may be off."""
    match part:
        case Const(value, type):
            return 0.0 if _holds(type, float(value)) else 1.0
        case Mul(a, b):
            return 0.0 if _is_power_of_two(a) or _is_power_of_two(b) else 1.0
        case Add() | Sub():
            return 1.0
        case Div():
            return DIVISION
        case Cast(x, type):
            return 0.0 if x.dtype.kind == "float" and x.dtype.digits <= type.digits else 1.0
        case Call(name):
            return CALLS[name].off
    return 0.0


def _is_power_of_two(e: Expr) -> bool:
    return isinstance(e, Const) and abs(np.frexp(float(e.value))[0]) == 0.5


def _holds(type: DType, value: float) -> bool:
    """Whether a type has a number."""
    return not np.isfinite(value) or float(np.frexp(value)[0] * 2.0**type.digits).is_integer()


def _parts(e: Expr) -> list[Expr]:
    """An expression and its parts, each once, operands first."""
    found: dict[Expr, None] = {}
    todo = [(e, False)]
    while todo:
        part, seen = todo.pop()
        if seen:
            found[part] = None
        elif part not in found:
            todo.append((part, True))
            todo += [(x, False) for x in part.children() if isinstance(x, Expr)]
    return [*found]


def _above(whole: Expr, part: Expr) -> set[Expr]:
    """The parts of an expression that contain another, and that one."""
    found = {part}
    for x in _parts(whole):
        if any(y in found for y in x.children()):
            found.add(x)
    return found
