"""Facts: what ranges, divisors and assumed conditions let the analyses say."""

from __future__ import annotations

from random import Random

import pytest

from tests.simplify.evaluate import points, value
from transconv.ir import (
    FALSE,
    TRUE,
    Cast,
    Const,
    Expr,
    Lane,
    Layout,
    Load,
    Tensor,
    Var,
    boolean,
    eq,
    f32,
    i8,
    ne,
    select,
)
from transconv.simplify import Facts, Range, multiple_of, prove, range_of, simplify

x, y, z = Var("x"), Var("y"), Var("z")
oh, kh, ih, iw = Var("oh"), Var("kh"), Var("ih"), Var("iw")
flag = Var("flag", boolean)
small = Facts(ranges={x: Range(-3, 5), y: Range(0, 7)})


@pytest.mark.parametrize(
    ("e", "expected"),
    [
        (Const(4), Range(4, 4)),
        (z, Range(None, None)),
        (Lane("m", 16, 0), Range(0, 15)),
        (x + y, Range(-3, 12)),
        (x - y, Range(-10, 5)),
        (x * -2, Range(-10, 6)),
        (x * y, Range(-21, 35)),
        (x * x, Range(0, 25)),
        (z * z, Range(0, None)),
        (-x, Range(-5, 3)),
        (x // 2, Range(-2, 2)),
        (x // (y + 1), Range(-3, 5)),
        (x % 4, Range(0, 3)),
        (y % 8, Range(0, 7)),
        ((y + 8) % 8, Range(0, 7)),
        (z % 5, Range(0, 4)),
        ((z * 4 + 1) % 8, Range(1, 5)),
        (z - z, Range(0, 0)),
        ((z * 4 + 3) - z * 4, Range(3, 3)),
        ((z + x) - z, Range(-3, 5)),
        (select(z < 0, x, y), Range(-3, 7)),
        (x << 2, Range(-12, 20)),
        (x >> 1, Range(-2, 2)),
        (Cast(z < 3, i8), Range(0, 1)),
        (Cast(y, i8), Range(0, 7)),
        (Cast(y * 100, i8), Range(-128, 127)),
        (Cast(Var("f", f32), i8), Range(-128, 127)),
        (y & 3, Range(0, 3)),
        (y | 8, Range(0, 15)),
    ],
    ids=str,
)
def test_range(e: Expr, expected: Range) -> None:
    assert range_of(e, small) == expected


@pytest.mark.parametrize(
    ("e", "expected"),
    [
        (Const(0), 0),
        (Const(-6), 6),
        (z - z, 0),
        (z, 1),
        (z * 12, 12),
        (z * 12 + 8, 4),
        (x * 8, 32),
        (x // 2, 2),
        (x // 8, 1),
        (x % 6, 2),
        (x * 3 % 8, 4),
        (select(flag, x, z * 6), 2),
        (z << 3, 8),
    ],
    ids=str,
)
def test_multiple(e: Expr, expected: int) -> None:
    assert multiple_of(e, Facts(multiples={x: 4})) == expected


def test_facts_are_immutable() -> None:
    before = Facts(ranges={x: Range(0, 9)})
    after = before.with_range(x, 3, None).with_multiple(x, 2).assume(y < 4)
    assert range_of(x, before) == Range(0, 9)
    assert range_of(x, after) == Range(3, 9)
    assert (multiple_of(x, before), multiple_of(x, after)) == (1, 2)
    assert not prove(y < 4, before)
    assert prove(y < 4, after)
    with pytest.raises(TypeError):
        after.ranges[x] = Range(0, 0)  # type: ignore[index]


def test_range_of_one_value_is_a_constant() -> None:
    assert str(simplify(z * x + 1, Facts(ranges={x: Range(3, 3)}))) == "((z * 3) + 1)"


def test_range_of_a_sum() -> None:
    facts = Facts().with_range(x + y, 0, 10)
    assert prove(x + y + 1 > 0, facts)
    assert prove(y + x <= 10, facts)
    assert not prove(x + y <= 9, facts)


def test_assumed_mask_bounds_its_variable() -> None:
    facts = Facts().assume((0 <= x) & (x < 5))
    assert range_of(x, facts) == Range(0, 4)
    assert simplify(x // 5, facts) is Const(0)


def test_assumed_mask_bounds_similar_sums() -> None:
    facts = Facts(ranges={oh: Range(0, 60), kh: Range(0, 2)}).assume(
        (0 <= oh * 2 + kh - 3) & (oh * 2 + kh - 3 < 112)
    )
    assert prove(3 <= kh + oh * 2, facts)
    assert prove(oh * 4 + kh * 2 - 6 >= 0, facts)
    assert prove(oh * 2 + kh < 116, facts)
    assert not prove(oh * 2 + kh < 114, facts)
    assert range_of(oh * 2 + kh - 3, facts) == Range(0, 111)


def test_several_masks_bound_an_offset() -> None:
    facts = Facts().assume((0 <= ih - kh) & (ih - kh < 56) & (0 <= iw - x) & (iw - x < 56))
    offset = ((ih - kh) * 56 + (iw - x)) * 64
    assert range_of(offset, facts) == Range(0, 56 * 56 * 64 - 64)
    assert prove(0 <= offset, facts)


def test_assumed_remainder_makes_division_exact() -> None:
    t = ih + 1 - kh
    facts = Facts().assume(eq(t % 2, 0))
    assert multiple_of(t, facts) == 2
    assert prove(eq((kh - ih - 1) % 2, 0), facts)
    assert prove(eq((t + 4) % 2, 0), facts)
    assert simplify((t + 1) % 2, facts) is Const(1)
    assert not prove(eq(t % 4, 0), facts)


def test_assumed_remainder_other_than_zero() -> None:
    facts = Facts().assume(eq(x % 4, 3))
    assert simplify((x + 1) % 4, facts) is Const(0)
    assert simplify(x % 2, facts) is Const(1)


def test_assumed_remainder_says_nothing_of_other_divisors() -> None:
    facts = Facts().assume(eq(x % 3, 0))
    assert str(simplify(x % 2, facts)) == "(x % 2)"
    assert multiple_of(x, facts) == 3


@pytest.mark.parametrize("seed", range(40))
def test_drawn_remainders_narrow_ranges(seed: int) -> None:
    """Each range holds what is met at all points, and ends there if a variable's own rest is known."""
    rng = Random(seed)
    ranges: dict[Expr, Range] = {}
    for v in (x, y):
        low = rng.randint(-9, 9)
        ranges[v] = Range(low, low + rng.randint(0, 12))
    n, sign, other, rest = (
        rng.randint(2, 7),
        rng.choice([-1, 1]),
        rng.choice([0, 0, 1, 2]),
        rng.randint(0, 6),
    )
    total = x * sign + y * other
    facts = Facts(ranges).assume(eq(total % n, rest % n))
    met = [at for at in points(ranges) if (value(total, at) - rest) % n == 0]
    for e in (x, total, total + rng.randint(-5, 5), x * rng.randint(2, 5) + y, total // 3, x // n, x * x):
        seen = {value(e, at) for at in met}
        assert all(one in range_of(e, facts) for one in seen), (e, facts)
        if met and not other and e is x:
            assert range_of(e, facts) == Range(min(seen), max(seen)), facts


def test_assumed_inequality() -> None:
    facts = Facts(ranges={y: Range(0, 7)}).assume(ne(y, 0))
    assert range_of(y, facts) == Range(1, 7)
    assert simplify(eq(x, z), Facts().assume(ne(x, z))) is FALSE


def test_assumed_truth_of_a_variable() -> None:
    assert simplify(flag, Facts().assume(flag)) is TRUE
    assert simplify(flag, Facts().assume(~flag)) is FALSE
    assert simplify(flag & (x < 3), Facts(true=(flag,))) is simplify(x < 3)


def test_assumed_disjunction_is_recognised() -> None:
    cond = (x < 0) | flag
    assert prove(cond, Facts().assume(cond))
    assert not prove(flag, Facts().assume(cond))


def test_bound_of_one_variable_by_another() -> None:
    facts = Facts(ranges={y: Range(0, 7)}).assume(x < y)
    assert range_of(x, facts).hi == 6
    assert prove(x <= y + 3, facts)
    assert prove(ne(x, y), facts)
    assert not prove(x < y - 1, facts)


def test_a_masked_load_keeps_its_own_mask() -> None:
    src = Tensor("src", ("w",), (8,), Layout.dense(f32, (8,)))
    # Both sides of a conjunction are computed, so the load keeps its own mask.
    guarded = (x < 8) & (Load(src, x, x < 8) < 1.0)
    assert str(simplify(guarded)) == "((x < 8) & (load(src, x, mask=x < 8) < 1.0))"


def test_contradicting_facts_do_not_fail() -> None:
    facts = Facts(ranges={x: Range(0, 3)}).assume(5 <= x)
    assert simplify(x // 4 + x % 4, facts).dtype is x.dtype
    range_of(x * x - y, facts)


def test_what_is_not_known_is_not_proved() -> None:
    assert not prove(x < 5)
    assert not prove(5 <= x)
    assert not prove(eq(x % 2, 0))
    assert not prove(flag)


def test_facts_read_as_ranges_conditions_and_divisors() -> None:
    x, y = Var("x"), Var("y")
    known = Facts({x: Range(0, 7)}).assume(y < x).with_multiple(y, 4)
    said = repr(known)
    assert "0<=x<=7" in said and str(simplify(y < x, known)) and "y" in said.split(";")[1] and "4" in said


def test_a_quotient_that_equals_a_number_is_a_bound_where_one_end_is_known() -> None:
    x = Var("x")
    at_least, below = Facts({x: Range(8, 100)}), Facts({x: Range(0, 11)})
    assert simplify(eq(x // 4, 2), at_least) == (x < 12)
    assert simplify(eq(x // 4, 2), below) == (8 <= x)
    assert simplify(eq(x // 4, 2), Facts({x: Range(0, 100)}).with_multiple(x, 4)) == eq(x, 8)


def test_facts_that_live_as_long_as_the_process_forget() -> None:
    known = Facts({x: Range(0, 7)})
    assert simplify(x // 8 + y, known) is y
    known.forget_if_large(len(known.simple))
    assert known.simple
    known.forget_if_large(len(known.simple) - 1)
    assert not known.simple and simplify(x // 8 + y, known) is y
