"""Drawn expressions with facts: simplified, they have the same value everywhere and no more operations,
and simplify to themselves."""

from __future__ import annotations

from random import Random

import pytest

from tests.simplify.evaluate import points, value
from transconv import ir
from transconv.ir import Const, Expr, Lane, Var, conjuncts
from transconv.simplify import Facts, Range, simplify
from transconv.simplify.fixpoint import operations

DIVISORS = (-4, -1, 1, 2, 2, 3, 4, 4, 6, 8, 12)
NUMBERS = (-28, -9, -7, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 9, 16, 28)
COMPARED = (ir.Lt, ir.Le, ir.Eq, ir.Ne)


def _integer(rng: Random, atoms: list[Expr], depth: int) -> Expr:
    if depth == 0 or rng.randrange(6) == 0:
        return rng.choice(atoms) if rng.randrange(4) else Const(rng.choice(NUMBERS))
    x, y = (_integer(rng, atoms, depth - 1) for _ in range(2))
    match rng.randrange(13):
        case 0 | 1 | 2:
            return x + y
        case 3:
            return x - y
        case 4 | 5:
            return x * rng.choice(NUMBERS)
        case 6:
            return x * y
        case 7 | 8:
            return x // rng.choice(DIVISORS)
        case 9 | 10:
            return x % rng.choice(DIVISORS)
        case 11:
            return rng.choice((ir.minimum, ir.maximum))(x, y)
        case _:
            return ir.select(_condition(rng, atoms, 1), x, y)


def _condition(rng: Random, atoms: list[Expr], depth: int) -> Expr:
    if depth == 0 or rng.randrange(3) == 0:
        return rng.choice(COMPARED)(_integer(rng, atoms, 2), _integer(rng, atoms, rng.randrange(3)))
    x, y = (_condition(rng, atoms, depth - 1) for _ in range(2))
    return rng.choice((x & y, x & y, x | y, ~x))


def _check(seed: int) -> int:
    """Check one expression; by how many operations it became shorter."""
    rng = Random(seed)
    space: dict[Expr, Range] = {}
    for v in (Var("a"), Var("b"), Lane("m", 4, 0))[: rng.randint(1, 3)]:
        lo = rng.randint(-5, 4)
        space[v] = Range(0, 3) if isinstance(v, Lane) else Range(lo, lo + rng.randint(0, 4))
    known = _condition(rng, list(space), 1) if rng.randrange(3) == 0 else ir.TRUE
    multiple = rng.choice((1, 1, 1, 2, 4))
    facts = Facts(
        ranges={v: r for v, r in space.items() if isinstance(v, Var)},
        multiples={Var("a"): multiple} if multiple > 1 else {},
    )

    def given() -> Facts:  # anew, so that nothing is remembered
        return facts._copy().assume(known)

    e = (_condition if rng.randrange(2) else _integer)(rng, list(space), 3)
    made = simplify(e, given())
    assert operations(made) <= operations(e), f"{seed}: {e} became {made}"
    assert simplify(made, given()) is made, f"{seed}: {made} became {simplify(made, given())}"
    for at in points(space):
        if at[Var("a")] % multiple == 0 and all(value(c, at) for c in conjuncts(known)):
            assert value(made, at) == value(e, at), f"{seed}: {e} became {made}, wrong at {at}"
    return operations(e) - operations(made)


def test_drawn_expressions() -> None:
    assert sum(map(_check, range(300))) > 300


@pytest.mark.slow
def test_many_drawn_expressions() -> None:
    assert sum(map(_check, range(300, 20_300))) > 20_000
