"""Functions of sizes compute what their expressions say."""

from __future__ import annotations

import itertools
import random

import pytest

from transconv.ir import (
    Expr,
    Select,
    Var,
    as_expr,
    maximum,
    minimum,
    strictest,
    text_of,
    value_at,
    values_of,
)

NAMES = ("N", "H", "W")


def drawn(rng: random.Random, count: int) -> list[Expr]:
    """Expressions that are made of each other."""
    made: list[Expr] = [*map(Var, NAMES), as_expr(0), as_expr(1), as_expr(7)]
    for _ in range(count):
        a, b = rng.choice(made), rng.choice(made)
        more = as_expr(rng.randint(1, 9))
        made.append(
            rng.choice(
                [
                    a + b,
                    a - b,
                    a * more,
                    a // more,
                    a % more,
                    minimum(a, b),
                    maximum(a, b),
                    -a,
                    Select(a <= b, a // more, b),
                ]
            )
        )
    return made + [a <= b for a, b in itertools.pairwise(made)]


@pytest.mark.parametrize("seed", range(5))
def test_drawn_expressions(seed: int) -> None:
    rng = random.Random(seed)
    each = drawn(rng, 40)
    found = values_of(each, NAMES)
    for _ in range(20):
        sizes = {n: rng.randint(0, 50) for n in NAMES}
        assert found(*sizes.values()) == tuple(value_at(e, sizes) for e in each)


def test_what_occurs_twice_is_computed_once() -> None:
    n, h = Var("N"), Var("H")
    part = (n + 3) // 4 * h
    found = values_of([part <= 100, part + 1 <= 100, part], ("N", "H"))
    assert found.__code__.co_varnames == ("_0", "_1", "t0")
    assert found(5, 7) == (True, True, 14)


def test_sizes_outside_of_a_range_do_not_stop_the_others() -> None:
    h = Var("H")
    assert values_of([h >= 4, 9 // (h - 3) <= 9, 9 % (h - 3) <= 9], ("H",))(3)[0] is False


def test_of_conditions_on_one_expression_the_strictest_is_left() -> None:
    x, y = Var("X"), Var("Y")
    given = [x + 3 <= 9, y <= 4, x <= 5, x - 2 <= 9, x * y <= 7, y * 2 <= 8, as_expr(1) <= x]
    assert list(map(text_of, strictest(given))) == [
        "X <= 5",
        "Y <= 4",
        "(X * Y) <= 7",
        "(Y * 2) <= 8",
        "1 <= X",
    ]
    for n in range(-3, 12):
        at = {"X": n, "Y": 1}
        assert all(value_at(c, at) for c in given) == all(value_at(c, at) for c in strictest(given))
