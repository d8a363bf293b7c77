"""The second tier of proofs: which rule decides what, and that no verdict is wrong at any point."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.simplify.evaluate import points, value
from tests.simplify.test_soundness import THOROUGH, _conditions, _facts, _spaces
from transconv.ir import Const, Expr, Lane, Var, eq, minimum
from transconv.simplify import Facts, Range, Verdict, decide, presburger, prove, simplify
from transconv.simplify.polynomial import expand
from transconv.simplify.presburger import truths_at_points
from transconv.verify.bisect.sampled_values import Unsound, audited

pid, step, turn, x, y, z = map(Var, ("pid", "step", "turn", "x", "y", "z"))
u, v, w = map(Var, "uvw")
n, k = Lane("n", 16, 2), Lane("k", 32, 1)
NEAR = Facts(ranges={pid: Range(0, 5), step: Range(0, 2), turn: Range(0, 1)})

# What is known besides, the condition, its truth and the rule.
DECIDED: list[tuple[list[Expr], Expr, bool, str]] = [
    # a bound of a quotient is one of what is divided
    ([eq(n // 4, pid // 3)], n < 8, True, "bounds"),
    ([0 <= n // 2 - step + 1, n // 2 - step + 1 < 2], n < 6, True, "bounds"),
    ([eq((step * 16 + k) // 17, pid // 2)], step * 16 + k < 51, True, "bounds"),
    ([eq(n // 4, pid // 3)], n >= 8, False, "bounds"),
    ([(pid // 4) * 32 + turn * 16 + k < 33], (pid // 4) * 2 + turn < 3, True, "bounds"),
    ([(k % 2) * 2 + ((pid % 2) * 11 + n) // 12 < 1], (pid % 2) * 11 + n < 12, True, "bounds"),
    ([minimum(x, y) >= 4], x >= 3, True, "bounds"),
    # two inequalities together
    ([x + y * 2 <= z, z <= x + 5], y < 3, True, "combined"),
    ([x + y * 2 <= z, z <= x + 5], y > 2, False, "combined"),
    # equations without a solution in integers
    ([eq(x + y, u * 2), eq(y + z, v * 2)], eq(x - z, w * 2 + 1), False, "equations"),
    # signs of factors
    ([], x * x - x * y * 2 + y * y < 0, False, "factors"),
    ([x >= 2, y >= 1], x * y * 2 - y * 3 + x * 2 - 3 <= 0, False, "factors"),
    # every remainder by a period
    ([], eq((x * x + x) % 2, 0), True, "cases"),
    ([], eq((x * x * x - x) % 3, 0), True, "cases"),
    ([], eq((x * x) % 4, 3), False, "cases"),
    ([], eq((x % 2) * (x % 2), x % 2), True, "cases"),
]


@pytest.mark.parametrize(("known", "condition", "truth", "rule"), DECIDED, ids=lambda v: str(v)[:60])
def test_what_the_rules_leave_is_decided(
    known: list[Expr], condition: Expr, truth: bool, rule: str
) -> None:
    facts = NEAR
    for cond in known:
        facts = facts.assume(cond)
    short = simplify(condition, facts)
    assert not isinstance(short, Const), "a rewriting rule decides it"
    assert decide(short, facts) == Verdict(truth, rule)
    assert prove(condition, facts) == truth
    space = (
        {e: Range(-3, 3) for e in (x, y, z, u, v, w)}
        | dict(NEAR.ranges)
        | {e: Range(0, e.extent - 1) for e in (n, k)}
    )
    own = {e: r for e, r in space.items() if any(e in _leaves(c) for c in (condition, *known))}
    held = [bool(value(condition, at)) for at in points(own) if all(value(c, at) for c in known)]
    assert all(t is truth for t in held)


def _leaves(e: Expr) -> set[Expr]:
    return {e} | {leaf for child in e.children() for leaf in _leaves(child)}  # type: ignore[arg-type]


@pytest.mark.parametrize("condition", [n < 8, eq(x % 2, 0), x * y >= 0, eq(n // 4, pid // 3)], ids=str)
def test_what_both_truths_have_is_left(condition: Expr) -> None:
    assert truths_at_points(condition, NEAR) == {True, False}
    assert decide(condition, NEAR) is None


def test_a_wrong_verdict_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    meant = presburger._meaning
    monkeypatch.setattr(presburger, "_meaning", lambda e, facts: [p - 8 for p in meant(e, facts)])
    monkeypatch.setattr(presburger, "truths_at_points", lambda condition, facts: set())
    with pytest.raises(Unsound, match="bounds"), audited():
        prove(minimum(x, y) + 8 <= x, Facts(ranges={x: Range(0, 9), y: Range(0, 9)}))


def test_steps_are_a_budget() -> None:
    facts = NEAR.assume(eq(n // 4, pid // 3))
    assert decide(n < 8, facts, steps=1) is None
    assert decide(n < 8, NEAR.assume(eq(n // 4, pid // 3))) == Verdict(True, "bounds")


def test_bounds_that_climb_for_ever_end() -> None:
    """Facts that contradict one another raise both variables by 1 in each round."""
    far = Facts().with_range(x, 0, 10**9).with_range(y, 0, 10**9).knowing([x < y, y < x + 1])
    near = Facts().with_range(x, 0, 30).with_range(y, 0, 30).knowing([x < y, y < x + 1])
    assert decide(x >= 10**8, far) is None
    assert decide(x >= 5, near) is not None


@THOROUGH
@given(_spaces().flatmap(lambda s: st.tuples(st.just(s), _conditions(list(s)))))
def test_no_verdict_is_wrong(case: tuple[dict[Expr, Range], Expr]) -> None:
    space, condition = case
    facts = _facts(space)
    verdict = decide(simplify(condition, facts), facts)
    if verdict is not None:
        for at in points(space):
            assert bool(value(condition, at)) == verdict.truth, (str(condition), verdict)


@THOROUGH
@given(_spaces().flatmap(lambda s: st.tuples(st.just(s), _conditions(list(s)), _conditions(list(s)))))
def test_no_verdict_under_a_condition_is_wrong(case: tuple[dict[Expr, Range], Expr, Expr]) -> None:
    space, known, condition = case
    facts = _facts(space).assume(known)
    verdict = decide(simplify(condition, facts), facts)
    for at in points(space) if verdict is not None else ():
        if value(known, at):
            assert bool(value(condition, at)) == verdict.truth, (str(known), str(condition), verdict)


@THOROUGH
@given(st.lists(st.lists(st.integers(-4, 4), min_size=3, max_size=3), min_size=2, max_size=3))
def test_equations_without_a_solution_have_none(rows: list[list[int]]) -> None:
    """A solution within a box shows that there is one; without one in integers there is none there."""
    equations = [p for a, b, c in rows if (p := expand(x * a + y * b + c)).terms]
    assume(len(equations) > 1)
    if not presburger._has_integer_solution(equations):
        for at in product(range(-12, 13), repeat=2):
            assert any(a * at[0] + b * at[1] + c for a, b, c in rows if a or b)
