"""The rules, one line each: an expression and the text of what it becomes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simplify.evaluate import value
from tests.simplify.names import (
    FACTS,
    a,
    b,
    big,
    flag,
    fx,
    fy,
    i,
    ih,
    kh,
    lane8,
    m,
    oh,
    q,
    s8,
    src,
    t,
    x,
    y,
    z,
)
from transconv.ir import (
    FALSE,
    TRUE,
    Add,
    Call,
    Cast,
    Const,
    Expr,
    Lane,
    Load,
    Neg,
    Reduce,
    Var,
    eq,
    f32,
    i8,
    index,
    index64,
    maximum,
    minimum,
    ne,
    select,
)
from transconv.simplify import Facts, simplify
from transconv.simplify.fixpoint import operations

CASES: list[tuple[Expr, str]] = [
    # sums
    (2 * (a + b) - a, "(a + (b * 2))"),
    (x - x, "0"),
    (maximum(x, -x) >= 0, "True"),
    (maximum(x, -1 - x) >= 0, "True"),
    (minimum(x, 14 - x) <= 7, "True"),
    (minimum(x, 13 - x) < 7, "True"),
    (x + x, "(x * 2)"),
    (x + 0, "x"),
    (0 + x, "x"),
    (x * 1, "x"),
    (x * 0, "0"),
    (x - 0, "x"),
    (0 - x, "-x"),
    (Neg(-x), "x"),
    (-(x - y), "(y - x)"),
    (3 + x, "(x + 3)"),
    (5 - x, "(5 - x)"),
    (-x - y, "(-x - y)"),
    (-x * 2 - y - 3, "(((x * -2) - y) - 3)"),
    (y - x * 2, "(y - (x * 2))"),
    (x * -2 + y, "(y - (x * 2))"),
    (x * 2 * 3, "(x * 6)"),
    (3 * (x + 1) - 3, "(x * 3)"),
    ((x + y) * (x - y), "((x * x) - (y * y))"),
    (x * y - y * x, "0"),
    ((x + 1) * (x + 1), "((x + 1) * (x + 1))"),  # three operations, the sum of its terms has four
    ((x + 1) * (x + 1) - x * x, "((x * 2) + 1)"),
    (x * (y * 4 + 2) * 2, "(((x * y) * 8) + (x * 4))"),
    ((x * 4 + 3) - x * 4, "3"),
    (Const(3) * 4 + 5, "17"),
    (x - (y - (x - y)), "((x * 2) - (y * 2))"),
    # division
    (x // 1, "x"),
    (Const(0) // x, "0"),
    ((x * y + x) // (y + 1), "x"),
    ((x * y + x + 5) // (y + 1), "(x + (5 // (y + 1)))"),
    ((x * x - y * y) // (x - y), "(x + y)"),
    ((x * x - y * y + 3) % (x + y), "(3 % (x + y))"),
    ((x + y) // (x + y), "1"),
    (x // (x + y), "(x // (x + y))"),
    (Const(-7) // 2, "-4"),
    ((x * 4) // 4, "x"),
    ((x * 8) // 4, "(x * 2)"),
    ((x * 4 + y) // 4, "(x + (y // 4))"),
    ((x + 9) // 4, "((x + 9) // 4)"),
    ((x + 9) // 4 - 2, "((x + 1) // 4)"),
    ((x - 1) // 4, "((x - 1) // 4)"),
    ((x - 1) // 4 + 1, "((x + 3) // 4)"),
    (x // -4, "(x // -4)"),
    (-x // -4, "(x // 4)"),
    ((x * 6) // 4, "((x * 3) // 2)"),
    ((x * 4 + 3) // 2, "((x * 2) + 1)"),
    ((i * 8 + lane8) // 8, "i"),
    ((i * 16 + lane8) // 32, "(i // 2)"),
    ((x * 16 + kh) // 8, "(x * 2)"),
    (kh // 3, "0"),
    ((kh + 3) // 3, "1"),
    ((kh - 3) // 3, "-1"),
    (kh // 2, "(kh // 2)"),
    (x // 4 // 3, "(x // 12)"),
    ((x // 4 + 2) // 3, "((x + 8) // 12)"),
    ((x % 12) // 4, "((x // 4) % 3)"),
    ((x % 10) // 4, "((x % 10) // 4)"),
    ((s8 + x) // 8, "((s8 + x) // 8)"),
    ((s8 + x) // 8 - s8 // 8, "(x // 8)"),
    (s8 // 8 * 8, "s8"),
    ((s8 * 3) // 4, "((s8 // 4) * 3)"),
    ((q * 2 + 2 - t * 2) // 2, "((q - t) + 1)"),
    (m // 784, "(((m_blk * 128) + m[0:128]) // 784)"),
    (m // 28 % 28, "((((m_blk * 128) + m[0:128]) // 28) % 28)"),
    ((m * 2) // 64, "((m_blk * 4) + (m[0:128] // 32))"),
    (x // x, "1"),
    ((x * y + z) // y, "(x + (z // y))"),
    (kh // (i + 3), "0"),
    # remainder
    (x % 1, "0"),
    (Const(0) % x, "0"),
    (Const(-7) % 4, "1"),
    (x % -4, "(x % -4)"),
    (-(x % -4), "(-x % 4)"),
    ((x * 4) % 4, "0"),
    ((x * 8 + y) % 4, "(y % 4)"),
    ((x + 9) % 4, "((x + 1) % 4)"),
    ((x - 1) % 4, "((x + 3) % 4)"),
    ((x * 5) % 4, "(x % 4)"),
    ((x * 6) % 4, "((x % 2) * 2)"),
    ((x * 6 + 3) % 4, "(((x * 6) + 3) % 4)"),
    (((x * 6 + 3) % 4 - 1) // 2, "((x + 1) % 2)"),
    ((i * 8 + lane8) % 16, "(((i % 2) * 8) + lane8[0:8])"),
    (kh % 3, "kh"),
    ((kh + 3) % 3, "kh"),
    ((kh - 3) % 3, "kh"),
    (x % 12 % 4, "(x % 4)"),
    (x % 4 % 12, "(x % 4)"),
    ((x % 8 + y) % 4, "((x + y) % 4)"),
    ((x % 8 * 2) % 4, "((x % 2) * 2)"),
    (s8 % 4, "0"),
    ((s8 + x) % 8, "(x % 8)"),
    (m % 28, "(((m_blk * 128) + m[0:128]) % 28)"),
    (x % x, "0"),
    ((x * y + z) % y, "(z % y)"),
    (kh % (i + 3), "kh"),
    # both
    (x // 4 * 4 + x % 4, "x"),
    (x % 4 + x // 4 * 4 + y, "(y + x)"),
    (x // 4 * 64 + x % 4 * 16, "(x * 16)"),
    (x - x // 4 * 4, "(x % 4)"),
    (x - x % 4, "((x // 4) * 4)"),
    (m // 784 * 784 + m // 28 % 28 * 28 + m % 28, "((m_blk * 128) + m[0:128])"),
    (x // 28 % 28 * 28 + x % 28, "(x % 784)"),
    (x // 28 - x // 784 * 28, "((x // 28) % 28)"),
    (x // 4 * 4 + y % 4, "(((x // 4) * 4) + (y % 4))"),
    ((x + 5) // 4 * 4 + (x + 5) % 4, "(x + 5)"),
    ((x // 8 * 8 + x % 8) // 8, "(x // 8)"),
    # minmax
    (minimum(x, x), "x"),
    (minimum(x, x + 1), "x"),
    (maximum(x, x + 1), "(x + 1)"),
    (minimum(kh, 5), "kh"),
    (minimum(kh, 2), "kh"),
    (maximum(kh, 0), "kh"),
    (minimum(5, x), "min(x, 5)"),
    (minimum(minimum(x, 9), 4), "min(x, 4)"),
    (maximum(maximum(x, 4), 9), "max(x, 9)"),
    (minimum(minimum(x, y), x), "min(x, y)"),
    (minimum(x * 2 - x, y), "min(x, y)"),
    # select
    (select(TRUE, x, y), "x"),
    (select(FALSE, x, y), "y"),
    (select(x < y, z, z), "z"),
    (select(x < y, TRUE, FALSE), "(x < y)"),
    (select(x < y, FALSE, TRUE), "(y <= x)"),
    (select(~flag, x, y), "select(flag, y, x)"),
    (select(kh < 3, x + 0, y), "x"),
    # cast
    (Cast(x, index), "x"),
    (Cast(Const(3), index64), "3:index64"),
    (Cast(Const(3), f32), "3.0"),
    (Cast(Cast(x, index64), index), "x"),
    (Cast(x + x, index64), "index64(x * 2)"),
    (Cast(kh // 3, index64) + big, "big"),
    # compare
    (x < x, "False"),
    (x <= x, "True"),
    (x < x + 1, "True"),
    (0 <= oh + kh - 1, "(1 <= (oh + kh))"),
    (oh + kh - 1 >= 0, "(1 <= (oh + kh))"),
    (oh + kh - 1 < 56, "((oh + kh) < 57)"),
    (oh + kh - 1 <= 55, "((oh + kh) < 57)"),
    (x + 3 < y + 3, "(x < y)"),
    (x < y + 1, "(x <= y)"),
    (x <= y - 1, "(x < y)"),
    (x - y < 4, "((x - y) < 4)"),
    (-x < 3, "(-2 <= x)"),
    (3 - x <= 0, "(3 <= x)"),
    (x * 4 < 10, "(x < 3)"),
    (10 <= x * 4, "(3 <= x)"),
    (x * 4 - y * 4 <= 7, "((x - y) < 2)"),
    (i * 8 + lane8 < 32, "(i < 4)"),
    (m < 3200, "True"),
    (m < 1024, "(m_blk < 8)"),
    (m < 3000, "(((m_blk * 128) + m[0:128]) < 3000)"),
    (kh < 3, "True"),
    (kh < 0, "False"),
    (x // 4 < 3, "(x < 12)"),
    (3 <= x // 4, "(12 <= x)"),
    (x // 4 <= 3, "(x < 16)"),
    (0 <= -(x // 4), "(x < 4)"),
    (m // 28 % 28 * 2 + kh - 1 >= 0, "(1 <= ((((((m_blk * 128) + m[0:128]) // 28) % 28) * 2) + kh))"),
    ((x < y) & (y < x), "False"),
    # equal
    (eq(x, x), "True"),
    (ne(x, x), "False"),
    (eq(x + 1, y + 1), "(x == y)"),
    (eq(x, 3), "(x == 3)"),
    (eq(3, x), "(x == 3)"),
    (eq(x * 4, 8), "(x == 2)"),
    (eq(x * 4, 6), "False"),
    (eq(x * 4 + y * 6, 7), "False"),
    (eq(-x, 3), "(x == -3)"),
    (ne(x + 1, 4), "(x != 3)"),
    (ne(x * 2, 3), "True"),
    (eq(kh, 3), "False"),
    (eq(kh * 0, 0), "True"),
    (eq((q * 2 + 1 + 1 - t * 2 * 1) % 2, 0), "True"),
    (eq((q * 2 + 1 - t * 2) % 2, 0), "False"),
    (eq((ih + 1 - kh * 1) % 2, 0), "((((ih + kh) + 1) % 2) == 0)"),
    (eq(x * 4 % 8, 4), "((x % 2) == 1)"),
    (eq(x * 4 % 8, 2), "False"),
    (eq(s8 % 4, 0), "True"),
    (eq(x % 4, 4), "False"),
    (eq(x // 4, 2), "((x // 4) == 2)"),
    (eq(i // 4, 0), "(i < 4)"),
    (eq(i // 4, 1), "(4 <= i)"),
    (eq(s8 // 8, 3), "(s8 == 24)"),
    (eq(flag, TRUE), "flag"),
    (eq(flag, FALSE), "~flag"),
    (ne(flag, flag), "False"),
    # not
    (~TRUE, "False"),
    (~~flag, "flag"),
    (~(x < y), "(y <= x)"),
    (~(x <= 4), "(5 <= x)"),
    (~eq(x, y), "(x != y)"),
    (~ne(x, 3), "(x == 3)"),
    (~(fx < fy), "~(fx < fy)"),
    # and
    (TRUE & flag, "flag"),
    (FALSE & flag, "False"),
    (flag & flag, "flag"),
    (flag & ~flag, "False"),
    ((x < 5) & (x < 7), "(x < 5)"),
    ((x < 7) & (x < 5), "(x < 5)"),
    ((x < 5) & (5 <= x), "False"),
    ((0 <= x) & eq(x, 3), "(x == 3)"),
    ((x < 5) & ne(x, 9), "(x < 5)"),
    ((0 <= oh + kh - 1) & (oh + kh - 1 < 57), "(1 <= (oh + kh))"),
    ((x < 5) & ((x < 5) | flag), "(x < 5)"),
    ((x < 3) & (y < 4) & (x + y < 7), "((x < 3) & (y < 4))"),
    ((kh < 3) & (x < 3), "(x < 3)"),
    ((0 <= x) & (x < 4) & eq(x // 4, 0), "((0 <= x) & (x < 4))"),
    ((0 <= x) & (x < 1), "(x == 0)"),
    ((x <= 4) & (4 <= x), "(x == 4)"),
    ((3 < x) & (x < 5), "(x == 4)"),
    ((x < 1) & (y < 4) & (0 <= x), "((x == 0) & (y < 4))"),
    ((0 <= x) & (x < 1) & (2 <= y) & (y <= 2), "((x == 0) & (y == 2))"),
    ((0 <= x * 2 + y - 1) & (x * 2 + y - 1 < 1), "(((x * 2) + y) == 1)"),
    ((0 <= x * 2 - 1) & (x * 2 - 1 < 2), "(x == 1)"),
    ((0 <= (x - 8) // 4) & ((x - 8) // 4 < 1), "((8 <= x) & (x < 12))"),
    ((x < y) & (y < x + 2), "((y - x) == 1)"),
    ((0 <= x + big) & (x + big < 1), "((x + big) == 0)"),
    ((0 <= x) & (x < 2), "((0 <= x) & (x < 2))"),
    ((0 <= x) & (y < 1), "((0 <= x) & (y < 1))"),
    # or
    (TRUE | flag, "True"),
    (FALSE | flag, "flag"),
    (flag | flag, "flag"),
    (flag | ~flag, "True"),
    ((x < 5) | (x < 7), "(x < 7)"),
    ((x < 5) | (5 <= x), "True"),
    (flag | (flag & (x < 5)), "flag"),
    ((x < 5) | eq(x, 2), "(x < 5)"),
    # bits
    (flag ^ flag, "False"),
    (flag ^ TRUE, "~flag"),
    (flag ^ FALSE, "flag"),
    (x ^ x, "0"),
    (Const(6) & 3, "2"),
    (Const(6) | 3, "7"),
    (x << 0, "x"),
    (Const(3) << 2, "12"),
    (Const(-5) >> 1, "-3"),
    # float
    (fx + 0.0, "(fx + 0.0)"),
    (fx * 1.0, "(fx * 1.0)"),
    (fx + fy + fx, "((fx + fy) + fx)"),
    (fx * Cast(x - x, f32), "(fx * 0.0)"),
    (select(kh < 3, fx, fy), "fx"),
    (Call("exp", (fx * Cast(x + x, f32),)), "exp(fx * f32(x * 2))"),
    (Load(src, x * 2 - x, (kh < 3) & (x < 5)), "load(src, x, mask=x < 5)"),
    (
        Reduce("sum", Load(src, lane8 * 2 - lane8, TRUE), lane8),
        "sum(load(src, lane8[0:8]), over=lane8[0:8])",
    ),
]


@pytest.mark.parametrize(("e", "expected"), CASES, ids=[str(e) for e, _ in CASES])
def test_rule(e: Expr, expected: str) -> None:
    made = simplify(e, FACTS)
    assert str(made) == expected
    assert made.dtype is e.dtype


def test_there_are_enough_rules() -> None:
    assert len({str(e) for e, _ in CASES}) >= 150


@pytest.mark.parametrize(("groups", "each"), [(2, 116), (3, 40), (4, 60), (8, 17)])
def test_shuffles_one_after_another_stay_short(groups: int, each: int) -> None:
    """A channel shuffle reads ``a * groups + b`` from ``b * each + a``; a network has many of them."""
    channel = Var("c")
    count = groups * each
    facts = Facts().with_range(channel, 0, count - 1)
    at: Expr = channel
    want = np.arange(count)
    for done in range(9):
        at = simplify((at % groups) * each + at // groups, facts)
        want = want % groups * each + want // groups
        found = [value(at, {channel: n}) for n in range(count)]
        assert found == want.tolist()
        assert operations(at) <= 3 * (done + 1) + 1
    assert groups != 2 or operations(at) == 10


def test_seed_example() -> None:
    a, b = Var("a"), Var("b")
    c = 2 * (a + b) - a
    assert str(simplify(c)) == "(a + (b * 2))"


def test_type_is_kept_when_the_wide_operand_vanishes() -> None:
    e = big * 0 + x
    assert str(simplify(e)) == "index64(x)"
    assert simplify(e).dtype is index64


def test_constants_of_wide_sums_are_wide() -> None:
    # x * 100 in 32 bits could overflow where (big + x) * 100 in 64 does not.
    made = simplify((big + x) * 100 + 0 * x)
    assert str(made) == "((big * 100:index64) + (x * 100:index64))"
    assert isinstance(made, Add)
    assert all(term.dtype is index64 for term in (made.a, made.b))


def test_eight_bit_arithmetic_is_left_alone() -> None:
    p, q = Var("p", i8), Var("q", i8)
    assert str(simplify(p + q - q)) == "((p + q) - q)"
    # Widened before it is added, each is a value like any other.
    assert str(simplify(Cast(p, index) + Cast(q, index) - Cast(q, index))) == "index(p)"


def test_a_lane_of_one_stays_in_a_sum() -> None:
    lane = Lane("n", 1, 2)
    assert str(simplify(x + lane)) == "(x + n[0:1])"
    assert simplify(lane < 1) is TRUE
