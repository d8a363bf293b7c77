"""Shapes of index and mask expressions with every small constant, at every point of a space."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from tests.simplify.evaluate import points, value
from transconv.ir import Expr, Var, eq, maximum, minimum, ne
from transconv.simplify import Facts, Range, multiple_of, range_of, simplify

x, y = Var("x"), Var("y")
SPACE: dict[Expr, Range] = {x: Range(-3, 4), y: Range(0, 3)}
POINTS = list(points(SPACE))
BOUNDED = Facts(ranges=SPACE)
Shape = Callable[[int, int, int], Expr]  # of a coefficient, a divisor and a constant

INTEGERS: dict[str, Shape] = {
    "div": lambda k, c, n: (x * k + y + n) // c,
    "mod": lambda k, c, n: (x * k + y + n) % c,
    "div common": lambda k, c, n: (x * (k * 2) + y + n) // (c * 2),
    "mod common": lambda k, c, n: (x * (k * 4) + y + n) % (c * 4),
    "div div": lambda k, c, n: (x // c + n) // abs(k),
    "mod div": lambda k, c, n: (x * k + n) % (c * 2) // c,
    "mod mod": lambda k, c, n: (x % (c * 2) * k + y + n) % c,
    "recombine": lambda k, c, n: (x + n) // c * (c * k) + (x + n) % c * k,
    "recombine rest": lambda k, c, n: (x * k + n) - (x * k + n) // c * c,
    "digits": lambda k, c, n: (x + n) // c % abs(k) * c + (x + n) % c,
    "div by name": lambda k, c, n: (x * k + n) // (y + c),
    "mod by name": lambda k, c, n: (x * k + n) % (y * c + c),
    "constant by name": lambda k, c, n: n % (y + c) + k // (y * c + 1),
    "min": lambda k, c, n: minimum(x * k + n, y * c),
    "max": lambda k, c, n: maximum(x * k, (y + n) // c),
}
CONDITIONS: dict[str, Shape] = {
    "lower": lambda k, c, n: n <= x * k + y,
    "upper": lambda k, c, n: x * k + y * c < n,
    "upper fine": lambda k, c, n: x * (k * 4) + y < n * c,
    "div below": lambda k, c, n: (x * k + y) // c < n,
    "div above": lambda k, c, n: (x * k + y) // c >= n,
    "div equal": lambda k, c, n: eq((x * k + n) // c, 1),
    "mod equal": lambda k, c, n: eq((x * k + n) % c, 0),
    "mod unequal": lambda k, c, n: ne((x * k + y) % c, n),
    "linear equal": lambda k, c, n: eq(x * k, y * c + n),
    "two bounds": lambda k, c, n: (n <= x * k) & (x * k < n + c),
    "one value": lambda k, c, n: (n <= x * k + y) & (x * k + y < n + 1),
    "one value of remainders": lambda k, c, n: (n - 1 < (x + k) % c + y) & ((x + k) % c + y <= n),
    "either bound": lambda k, c, n: (x * k < n) | (n + 1 <= x * k + y),
    "stride mask": lambda k, c, n: eq((x + n) % c, 0) & (0 <= (x + n) // c) & ((x + n) // c < 2),
}
CONSTANTS = list(product([-4, -2, -1, 1, 2, 3, 6], [2, 3, 4], [-3, -1, 0, 1, 2, 5]))
BOTH = {**INTEGERS, **CONDITIONS}


@pytest.mark.every(6)
@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize("facts", [Facts(), BOUNDED], ids=["no facts", "bounded"])
def test_value_range_and_divisor(shape: str, facts: Facts) -> None:
    for constants in CONSTANTS:
        _check(BOTH[shape](*constants), facts, POINTS)


@pytest.mark.every(4)
@pytest.mark.parametrize("shape", ["div", "mod", "mod common", "div above", "linear equal"])
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("step", [11, pytest.param(5, marks=pytest.mark.slow)])
def test_under_an_assumption(shape: str, condition: str, step: int) -> None:
    """Of every step-th choice of constants: no step divides the number of choices of one of them."""
    for k, c, n in CONSTANTS[::step]:
        known = CONDITIONS[condition](k, c, n)
        facts = BOUNDED.assume(known)
        inside = [at for at in POINTS if value(known, at)]
        for e in (x, y, x + y, BOTH[shape](n - 4, c, k), BOTH[shape](k, c, n)):
            _check(e, facts, inside)


@pytest.mark.every(6)
@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_with_a_known_divisor(shape: str, n: int) -> None:
    facts = BOUNDED.with_multiple(x, n)
    inside = [at for at in POINTS if at[x] % n == 0]
    for constants in CONSTANTS[::2]:
        _check(BOTH[shape](*constants), facts, inside)


def _check(e: Expr, facts: Facts, inside: list[dict[Expr, int]]) -> None:
    made, r, n = simplify(e, facts), range_of(e, facts), multiple_of(e, facts)
    for at in inside:
        here = value(e, at)
        assert value(made, at) == here, f"{e} became {made}, wrong at {at}, {facts}"
        assert here in r, f"{e} is {here} at {at}, not in {r}, {facts}"
        if e.dtype.kind == "int":
            assert here % n == 0 if n else here == 0, f"{e} is {here}, no multiple of {n}"
