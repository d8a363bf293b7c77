"""The conditions of masks beside their truth tables: drawn conditions, evaluated at every element."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from transconv.ir import (
    FALSE,
    TRUE,
    Const,
    Expr,
    Lane,
    Or,
    Renamed,
    Var,
    all_of,
    as_expr,
    substitute,
    value_at,
)
from transconv.kernel.tiles.values import at_first, either, is_leaf, joined, mentions, proved, whole
from transconv.simplify import Facts
from transconv.simplify.ranges import Range

ROW, COL = Lane("row4", 4, 30), Lane("col4", 4, 32)
N, K, HELD = Var("n"), Var("k"), Var("held")
ELEMENTS = [*itertools.product(range(4), range(4))]


def true(e: Expr, row: int, col: int, n: int, k: int = 0) -> bool:
    at = substitute(e, {ROW: Const(row), COL: Const(col)})
    return bool(value_at(at, {"n": n, "k": k, "held": 2}))


def drawn(rng: random.Random, lanes: Sequence[Expr] = (ROW, COL)) -> Expr:
    """A condition of an element: an upper or a lower bound, or an alternative."""
    x, y = rng.choice(lanes), rng.choice([*lanes, N, as_expr(1)])
    sum_ = rng.choice([x, x + y, x * 2 + y, x + N, x * 2, N * 2 + x])
    made: Expr = rng.choice(
        [
            sum_ < rng.randint(1, 7),
            sum_ < N,
            as_expr(rng.randint(0, 3)) <= sum_,
            (x < 2) | (y < N),
            as_expr(5) < x - y,
            N < 3,
        ]
    )
    return made


def test_both_and_either_are_what_they_say() -> None:
    rng = random.Random(3)
    for _ in range(70):
        pool = [drawn(rng) for _ in range(4)]
        a, b = (tuple(rng.sample(pool, rng.randint(0, 3))) for _ in "ab")
        a, b = (rng.choice([m, m, m, m, (FALSE,), (*m[:1], FALSE)]) for m in (a, b))
        if rng.random() < 0.3:  # of which one makes the other superfluous
            b = (*b, Or(pool[0], pool[1]))
            a = (*a, pool[rng.randint(0, 1)])
        if any(isinstance(p, Or) and p.a is p.b for p in (*a, *b)):
            continue
        for (row, col), n in itertools.product(ELEMENTS, (0, 2)):
            holds_a, holds_b = (all(true(p, row, col, n) for p in m) for m in (a, b))
            assert true(whole(joined(a, b)), row, col, n) == (holds_a and holds_b), (a, b)
            assert true(whole(either(a, b)), row, col, n) == (holds_a or holds_b), (a, b)
            assert true(whole(a), row, col, n) == holds_a


def test_no_condition_is_there_twice_or_follows_from_another() -> None:
    a, b, c = ROW < N, COL < N, as_expr(1) <= ROW
    assert joined((a, b), (b, a), (TRUE,)) == (a, b)
    assert joined((a,), (Or(a, c), Or(c, b))) == (a, Or(c, b)) and joined((c, Or(a, c))) == (c,)
    assert joined((a,), (FALSE,), (b,)) == (FALSE,) and joined() == ()
    assert either((a, b), (b, a)) in ((a, b), (b, a)) and either((a, b), (b,)) == (b,)
    assert either((a,), ()) == () and either((FALSE,), (a, b)) == (a, b) == either((a, b), (FALSE,))
    assert either((a, b), (b, c)) == (b, Or(a, c)) and whole(()) is TRUE


def test_what_is_proved_goes_and_what_never_holds_is_all_that_is_left() -> None:
    facts = Facts({N: Range(2, 3)})
    assert proved((ROW < 4, COL < N), Facts()) == (COL < N,)
    assert proved((COL < N, ROW < 5, N < 2), facts) == (FALSE,)
    assert proved((COL < N, N < 4, as_expr(2) <= N), facts) == (COL < N,)
    rng = random.Random(5)
    for _ in range(40):
        mask = [drawn(rng) for _ in range(rng.randint(1, 3))]
        kept = proved(mask, facts)
        for (row, col), n in itertools.product(ELEMENTS, (2, 3)):
            assert true(whole(kept), row, col, n) == all(true(p, row, col, n) for p in mask)


def test_whether_an_element_is_active_along_lanes() -> None:
    """Where an answer is read off the conditions it is that of looking at each element; it is read off all
    that bound sums of lanes above."""
    rng = random.Random(9)
    answered = 0
    for _ in range(150):
        mask = [drawn(rng) for _ in range(rng.randint(1, 3))]
        lanes = rng.choice([(ROW,), (COL,), (ROW, COL)])
        found = at_first(mask, lanes, {})
        if found is None:
            continue
        answered += 1
        assert not any(mentions(p, lanes, {}) for p in found)
        for (row, col), n in itertools.product(ELEMENTS, (0, 3)):
            places = [
                (r, c) for r, c in ELEMENTS if (ROW in lanes or r == row) and (COL in lanes or c == col)
            ]
            active = any(all(true(p, r, c, n) for p in mask) for r, c in places)
            assert true(all_of(found) if found else TRUE, row, col, n) == active, (mask, lanes)
    assert answered > 20
    for part in (ROW < N, ROW + COL < 3, ROW * 2 + N < 7, COL * 3 + 1 < N, HELD * 2 + ROW < 4):
        assert at_first([part], [ROW], {}) == (substitute(part, {ROW: as_expr(0)}),)
    for part in (
        as_expr(1) <= ROW,
        as_expr(3) < ROW + COL,
        N - ROW < 3,
        ROW * -1 < N,
        (ROW < 2) | (COL < 1),
    ):
        assert at_first([part], [ROW], {}) is None
    assert at_first([ROW < HELD], [ROW], {HELD: (COL,)}) is None  # it is another number in each column
    assert at_first([ROW < N, FALSE], [ROW], {}) == (FALSE,) and at_first([], [ROW], {}) == ()


def test_what_varies_along_lanes() -> None:
    assert mentions(ROW + N < 3, [ROW], {}) and mentions(ROW + COL < 3, [COL, ROW], {})
    assert not mentions(ROW + N < 3, [COL], {}) and not mentions(N < 3, [ROW, COL], {})
    assert mentions(HELD < 3, [COL], {HELD: (COL,)}) and not mentions(HELD < 3, [ROW], {HELD: (COL,)})


def test_names_numbers_and_places_cost_nothing_to_repeat() -> None:
    assert all(map(is_leaf, (N, Const(3), ROW, Renamed(N, (ROW,), (COL,)))))
    assert not any(map(is_leaf, (N + 1, ROW * 2, Renamed(ROW + 1, (ROW,), (COL,)))))
