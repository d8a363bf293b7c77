"""Why a condition holds, in words: the facts that a proof rests on, with numbers."""

from __future__ import annotations

from collections.abc import Iterable

from transconv.ir import Const, Eq, Expr, Lane, Le, Lt, Mod, Not, Var, find, free_vars, readable
from transconv.simplify.facts import Facts
from transconv.simplify.fixpoint import simplify
from transconv.simplify.ranges import range_of


def reason(condition: Expr, facts: Facts) -> str:
    """The facts that decide a condition, such as ``qh - th + 1 in 0..28 by qh in 0..27, th in 0..1``, or
    ``qh*2 - th*2 is a multiple of 2`` for a test of divisibility."""
    match condition:
        case Eq(Mod(x, Const(n)), Const(0)):
            short = simplify(x, facts)
            multiple = f"is a multiple of {n}"
            return f"{readable(short)} {multiple}" if short is not x else multiple
        case Le(a, b) | Lt(a, b) | Eq(a, b):
            side, other = (b, a) if isinstance(a, Const) else (a, b)
            short = simplify(side, facts)
            found = range_of(short, facts)
            used = ranges([short, other], facts)
            if isinstance(short, (Var, Lane, Const)) or None in (found.lo, found.hi):
                return used or f"{readable(side)} is {readable(short)}"
            return f"{readable(short)} in {found.lo}..{found.hi}" + (f" by {used}" if used else "")
        case Not(x):
            return reason(x, facts)
    return ranges([condition], facts)


def ranges(parts: Iterable[Expr], facts: Facts) -> str:
    """``qh in 0..27, th in 0..1`` for the variables of the expressions whose ranges are finite."""
    leaves: set[Var | Lane] = set()
    for e in parts:
        leaves |= set(free_vars(e)) | set(find(e, Lane))
    known = [(v, range_of(v, facts)) for v in sorted(leaves, key=lambda v: v.name)]
    return ", ".join(f"{v.name} in {r.lo}..{r.hi}" if r.lo != r.hi else f"{v.name} = {r.lo}"
                     for v, r in known if r.lo is not None and r.hi is not None)


