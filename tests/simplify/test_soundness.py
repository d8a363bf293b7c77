"""Proof by exhaustion: whatever the simplifier says is checked at every point of small ranges."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.simplify.evaluate import points, value
from transconv import ir
from transconv.ir import Const, Expr, Lane, Var
from transconv.simplify import Facts, Range, multiple_of, prove, range_of, simplify

THOROUGH = settings(
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
ATOMS = [Var("a"), Var("b"), Var("c"), Lane("m", 4, 0)]
LARGE = st.sampled_from([-28, -16, -9, -7, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 9, 12, 16, 28])
DIVISORS = st.sampled_from([1, 2, 3, 4, 6, 8, 12])


def _integers(atoms: list[Expr]) -> st.SearchStrategy[Expr]:
    leaves = st.sampled_from(atoms) | LARGE.map(Const)

    def grow(x: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        pair = st.tuples(x, x)
        by_constant = st.tuples(x, DIVISORS.map(Const))
        return st.one_of(
            pair.map(lambda p: p[0] + p[1]),
            pair.map(lambda p: p[0] - p[1]),
            st.tuples(x, LARGE).map(lambda p: p[0] * p[1]),
            pair.map(lambda p: p[0] * p[1]),
            by_constant.map(lambda p: p[0] // p[1]),
            by_constant.map(lambda p: p[0] % p[1]),
            pair.map(lambda p: ir.minimum(*p)),
            pair.map(lambda p: ir.maximum(*p)),
            x.map(lambda e: -e),
            st.tuples(x, x, x).map(lambda p: ir.select(p[0] < p[1], p[1], p[2])),
            st.tuples(x, st.integers(0, 3)).map(lambda p: p[0] << p[1]),
            st.tuples(x, st.integers(0, 3)).map(lambda p: p[0] >> p[1]),
        )

    return st.recursive(leaves, grow, max_leaves=9)


def _conditions(atoms: list[Expr]) -> st.SearchStrategy[Expr]:
    x = _integers(atoms)
    comparison = st.tuples(st.sampled_from([ir.Lt, ir.Le, ir.Eq, ir.Ne]), x, x).map(
        lambda p: p[0](p[1], p[2])
    )
    # Comparisons of a sum or a quotient with a constant: what masks look like.
    mask = st.tuples(
        st.sampled_from([ir.Lt, ir.Le, ir.Eq, ir.Ne]),
        _sums(atoms),
        DIVISORS,
        LARGE,
        st.sampled_from(["", "//", "%"]),
    ).map(_mask)

    def grow(c: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        pair = st.tuples(c, c)
        return st.one_of(
            pair.map(lambda p: p[0] & p[1]),
            pair.map(lambda p: p[0] | p[1]),
            pair.map(lambda p: p[0] ^ p[1]),
            c.map(lambda e: ~e),
        )

    return st.recursive(comparison | mask, grow, max_leaves=4)


def _sums(atoms: list[Expr]) -> st.SearchStrategy[Expr]:
    return st.lists(st.tuples(st.sampled_from(atoms), LARGE), min_size=1, max_size=4).map(
        lambda terms: ir.sum_of([e * k for e, k in terms])
    )


def _mask(parts: tuple[Callable[[Expr, Expr], Expr], Expr, int, int, str]) -> Expr:
    kind, x, divisor, limit, op = parts
    x = x if op == "" else x // divisor if op == "//" else x % divisor
    return kind(x, Const(limit))


@st.composite
def _spaces(draw: st.DrawFn) -> dict[Expr, Range]:
    """Ranges for two to four atoms, at most about 600 points."""
    space: dict[Expr, Range] = {}
    for at in ATOMS[: draw(st.integers(2, 4))]:
        lo = draw(st.integers(-7, 5))
        space[at] = Range(0, 3) if isinstance(at, Lane) else Range(lo, lo + draw(st.integers(0, 4)))
    return space


@st.composite
def _cases(draw: st.DrawFn) -> tuple[dict[Expr, Range], Expr]:
    space = draw(_spaces())
    return space, draw(st.one_of(_integers(list(space)), _conditions(list(space))))


def _facts(space: dict[Expr, Range]) -> Facts:
    return Facts(ranges={e: r for e, r in space.items() if isinstance(e, Var)})


@THOROUGH
@given(_cases())
def test_simplified_equals_original_at_every_point(case: tuple[dict[Expr, Range], Expr]) -> None:
    space, e = case
    made = simplify(e, _facts(space))
    assert made.dtype is e.dtype
    for at in points(space):
        assert value(made, at) == value(e, at), f"{e} became {made}, wrong at {at}"


@THOROUGH
@given(_cases())
def test_simplified_is_a_fixpoint(case: tuple[dict[Expr, Range], Expr]) -> None:
    space, e = case
    made = simplify(e, _facts(space))
    # Facts that remember nothing, so that the rules must run again.
    assert simplify(made, _facts(space)) is made


@pytest.mark.slow
@THOROUGH
@given(_cases())
def test_without_facts_it_holds_everywhere(case: tuple[dict[Expr, Range], Expr]) -> None:
    space, e = case
    made = simplify(e)
    for at in points(space):
        assert value(made, at) == value(e, at), f"{e} became {made}, wrong at {at}"


@THOROUGH
@given(_cases())
def test_ranges_and_divisors_hold(case: tuple[dict[Expr, Range], Expr]) -> None:
    space, e = case
    facts = _facts(space)
    r, n = range_of(e, facts), multiple_of(e, facts)
    for at in points(space):
        here = value(e, at)
        assert here in r, f"{e} is {here} at {at}, not in {r}"
        assert here % n == 0 if n else here == 0, f"{e} is {here} at {at}, no multiple of {n}"


@st.composite
def _given_conditions(draw: st.DrawFn) -> tuple[dict[Expr, Range], Expr, Expr]:
    space = draw(_spaces())
    conditions = _conditions(list(space))
    return space, draw(conditions), draw(conditions | _integers(list(space)))


@THOROUGH
@given(_given_conditions())
def test_assumptions_are_used_soundly(case: tuple[dict[Expr, Range], Expr, Expr]) -> None:
    space, given_cond, e = case
    facts = _facts(space).assume(given_cond)
    made, r, n = simplify(e, facts), range_of(e, facts), multiple_of(e, facts)
    inside = [at for at in points(space) if value(given_cond, at)]
    assume(inside)
    for at in inside:
        here = value(e, at)
        assert value(made, at) == here, f"{e} became {made} under {given_cond}, wrong at {at}"
        assert here in r
        assert here % n == 0 if n else here == 0


@THOROUGH
@given(_spaces().flatmap(lambda s: st.tuples(st.just(s), _conditions(list(s)))))
def test_proofs_hold(case: tuple[dict[Expr, Range], Expr]) -> None:
    space, cond = case
    facts = _facts(space)
    truths = [bool(value(cond, at)) for at in points(space)]
    if prove(cond, facts):
        assert all(truths)
    if prove(~cond, facts):
        assert not any(truths)
    assert prove(cond, facts.assume(cond)) or not any(truths)


@pytest.mark.slow
@THOROUGH
@given(_spaces(), st.integers(2, 6), st.data())
def test_stated_divisors_are_used_soundly(space: dict[Expr, Range], n: int, data: st.DataObject) -> None:
    a = ATOMS[0]
    e = data.draw(_integers(list(space)) | _conditions(list(space)))
    facts = _facts(space).with_multiple(a, n)
    made = simplify(e, facts)
    for at in points(space):
        if at[a] % n == 0:
            assert value(made, at) == value(e, at), f"{e} became {made}, wrong at {at}"
