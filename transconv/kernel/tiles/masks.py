"""Masks: conditions that travel with a tile. They are proved away where facts allow it.

    f(a, b)      active where both are
    reduction    active where an element is active: ``row < m & col < n`` over col is ``row < m & 0 < n``
    t[..] = v    active where t was, or where v is written
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transconv.ir import (
    FALSE,
    TRUE,
    ZERO,
    Add,
    Const,
    Expr,
    Lane,
    Lt,
    Mul,
    Or,
    Var,
    all_of,
    free_vars,
    lanes_of,
    substitute,
)
from transconv.kernel.tiles.lanes import Scope
from transconv.kernel.tiles.values import Mask
from transconv.simplify import Facts, simplify


def joined(*masks: Iterable[Expr]) -> Mask:
    """The mask of what needs all of these; ``a`` makes ``a or b`` superfluous."""
    parts = dict.fromkeys(p for m in masks for p in m if p is not TRUE)
    if FALSE in parts:
        return (FALSE,)
    return tuple(p for p in parts if not (isinstance(p, Or) and (p.a in parts or p.b in parts)))


def whole(mask: Mask) -> Expr:
    """A mask as one condition."""
    return all_of(mask) if mask else TRUE


def proved(mask: Iterable[Expr], facts: Facts) -> Mask:
    """The mask without conditions that always hold; (False,) if one never does."""
    kept = []
    for part in mask:
        found = simplify(part, facts)
        if found is FALSE:
            return (FALSE,)
        if found is not TRUE:
            kept.append(part)
    return joined(kept)


def either(a: Mask, b: Mask) -> Mask:
    """Where one of two masks holds."""
    if not a or not b:
        return ()
    common = [p for p in a if p in b]
    rest_a, rest_b = ([p for p in m if p not in common] for m in (a, b))
    if not rest_a or not rest_b:
        return tuple(common)
    if FALSE in (rest_a[0], rest_b[0]):
        return tuple(common) + tuple(rest_b if rest_a[0] is FALSE else rest_a)
    return (*common, Or(all_of(rest_a), all_of(rest_b)))


def at_first(mask: Sequence[Expr], lanes: Iterable[Lane], scope: Scope) -> Mask | None:
    """Whether the conditions hold anywhere along lanes, as conditions without these; None if that cannot
    be read off them, because one is no upper bound."""
    found: list[Expr] = []
    wanted = set(lanes)
    for part in mask:
        if part is FALSE:
            return (FALSE,)
        varies = any(scope.get(v) for v in free_vars(part))
        if varies or not (isinstance(part, Lt) and _grows(part.a) and not lanes_of(part.b)):
            return None
        found.append(substitute(part, dict.fromkeys(wanted, ZERO)))
    return tuple(found)


def _grows(e: Expr) -> bool:
    """Whether an expression grows with each of its lanes."""
    match e:
        case Lane() | Const():
            return True
        case Var():
            return e.dtype.kind == "index"
        case Add(a, b):
            return _grows(a) and _grows(b)
        case Mul(a, Const(value)):
            return value > 0 and _grows(a)
    return not lanes_of(e)


def mentions(e: Expr, lanes: Iterable[Lane], scope: Scope) -> bool:
    """Whether an expression varies along one of these lanes."""
    return bool({*lanes_of(e, scope)} & {*lanes})
