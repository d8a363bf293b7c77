"""Every return of every rule of the simplifier, spoiled in turn, is found and blamed by name."""

from __future__ import annotations

import pytest

from tests.simplify.names import FACTS, a, b, big, flag, fx, fy, i, ih, kh, oh, q, s8, t, x, y, z
from tests.simplify.test_rules import CASES
from tests.verify.planted_rules import MODULES, Mutant, culprits, mutants, planted, watched
from transconv.ir import (
    Call,
    Cast,
    Const,
    Expr,
    FloorDiv,
    Le,
    Mod,
    Mul,
    Not,
    Var,
    eq,
    i8,
    index,
    index64,
    maximum,
    minimum,
    select,
)
from transconv.simplify import Facts, Range, simplify
from transconv.verify.bisect.sampled_values import Unsound, audited

p8, q8 = Var("p8", i8), Var("q8", i8)
# What the golden rules do not reach, or not where it matters.
MORE: list[Expr] = [
    Cast(Cast(x, i8), index),
    Cast(flag, index) // 2,
    Cast(p8, index) + Cast(q8, index),
    Cast(Cast(i * 100, i8), index) + x,
    Cast(s8, index64) % 8,
    Mod(p8, Const(-3, i8)),
    FloorDiv(p8, Const(-3, i8)),
    Mul(p8, Const(1, i8)),
    p8 + q8 - q8,
    Mod(big, Const(1)),
    Const(0) // big,
    big * 0 + x,
    fx < fy,
    ~(fx < fy),
    ~(fx <= fy),
    eq(fx, fy),
    Not(Le(Const(5), x)),
    Not(Le(x, y)),
    Const(5) ^ Const(3),
    x & x,
    x & 0,
    x | 0,
    (i & oh) // 8,
    (i | q) // 16,
    (x & y) // 4,
    i // q,
    i // (q + 1),
    i % (q + 1),
    i % (q + 8),
    (i + q) % (kh - 5),
    (i - 5) // (kh + 1),
    i // maximum(y, 1),
    x // maximum(y, 1),
    i // (-q - 1),
    i * (x * x),
    maximum(minimum(x, y), i) // 3,
    (i * 8) // (t * 8 + 8),
    (x * 16 + q) % 8,
    select(flag, i, q) // 16,
    select(flag, s8, s8 * 3) % 8,
    (s8 % 12) % 4,
    Call("quotient", (i, q + 1)) < 5,
    Call("quotient", (i, q + 1)) // 64,
    Call("remainder", (i, q + 1)) < 5,
    Call("remainder", (i, q + 1)) // 64,
]
WIDE = FACTS
NEAR = Facts(
    multiples={s8: 8},
    ranges={
        **FACTS.ranges,
        a: Range(-3, 4),
        b: Range(-5, 2),
        x: Range(-7, 9),
        y: Range(0, 6),
        z: Range(-4, 0),
        ih: Range(0, 9),
        s8: Range(-32, 32),
    },
)
GIVEN = FACTS.assume(eq((x + y) % 4, 0)).assume(x * 3 < y)
UNDER_CONDITIONS: list[Expr] = [
    (x + y) % 2,
    (x + y) % 4,
    (-x - y) % 4,
    (x + y + 3) % 4,
    (x + 5 * y) % 4,
    (x + 2 * y) % 4,
    (x + y) // 4 * 4,
    (x + y - 4 * z) % 4,
    x * 3 < y + 1,
    (x * 6 - y * 2) < 0,
    eq(x * 3, y),
    minimum(x * 3, y),
    eq(x + y, 3),
    Cast(p8, index) * 3 < y,
]
CORPUS = [(e, facts) for facts in (WIDE, NEAR) for e in (*(case for case, _ in CASES), *MORE)] + [
    (e, facts) for facts in (GIVEN, GIVEN.with_range(y, 0, 9)) for e in UNDER_CONDITIONS
]

# Returns that no expression here leads to, and why.
OUT_OF_REACH = {
    "division._bound": "`compare` has decided conditions without variables before",
    "ranges._of_tree": "the range of a float: nobody asks",
}


def run(number: int) -> None:
    """Simplify an entry of the corpus, watched; raises Unsound."""
    e, facts = CORPUS[number]
    facts._forget()
    with audited():
        simplify(e, facts)


@pytest.fixture(scope="module")
def reached() -> dict[tuple[str, int], list[int]]:
    """The entries of the corpus that reach each return."""
    found: dict[tuple[str, int], list[int]] = {}
    now: set[tuple[str, int]] = set()
    with watched(now):
        for number in range(len(CORPUS)):
            now.clear()
            run(number)
            for place in now:
                found.setdefault(place, []).append(number)
    return found


def test_the_rules_are_sound() -> None:
    checked = skipped = 0
    for e, facts in CORPUS:
        facts._forget()
        with audited(seed=1) as audit:
            simplify(e, facts)
        checked, skipped = checked + audit.checked, skipped + audit.skipped
    assert checked > 2000 and skipped < checked / 50


@pytest.mark.every(2)
@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_a_spoiled_return_is_found_and_named(
    mutant: Mutant, reached: dict[tuple[str, int], list[int]]
) -> None:
    entries = reached.get(mutant.place, [])
    if not entries:
        assert f"{mutant.module.__name__.rpartition('.')[2]}.{mutant.function}" in OUT_OF_REACH
        return
    with planted(mutant):
        for number in entries:
            try:
                run(number)
            except Unsound as unsound:
                assert unsound.rule in culprits(mutant), str(unsound)
                assert unsound.before in str(unsound) and unsound.at
                return
    pytest.fail(f"survived {len(entries)} expressions, such as {CORPUS[entries[0]][0]}")


def test_the_line_is_named(reached: dict[tuple[str, int], list[int]]) -> None:
    """Where a rule itself returned the wrong expression, its line is told."""
    found = 0
    direct = [m for m in mutants(MODULES[:1]) if m.function in ("choose", "extreme", "exclusive")]
    for mutant in direct:
        with planted(mutant):
            for number in reached[mutant.place]:
                try:
                    run(number)
                except Unsound as unsound:
                    assert unsound.place == f"{mutant.function}, simplify/fixpoint.py:{mutant.line}"
                    found += 1
                    break
    assert found == len(direct) > 8
