"""Bounds of sums by certificates: right whatever the multipliers are, exact where terms are independent,
and the same as at all points where these can be counted."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from tests.simplify.evaluate import points, value
from transconv.ir import Call, Const, Expr, Lane, Var, all_of, eq, f32, maximum, minimum
from transconv.simplify import (
    Facts,
    Range,
    greatest,
    is_inside,
    linear_bounds,
    linear_range,
    prove,
    range_of,
    simplify,
)
from transconv.simplify.presburger import range_at_points

pid, step, x, y = map(Var, ("pid", "step", "x", "y"))
m, k = Lane("m", 8, 1), Lane("k", 4, 2)
SPACE = {pid: Range(0, 5), step: Range(0, 2), y: Range(2, 3), m: Range(0, 7), k: Range(0, 3)}
FACTS = Facts(ranges={v: r for v, r in SPACE.items() if isinstance(v, Var)})


def atoms(rng: random.Random) -> list[Expr]:
    """Positions as kernels have them: fused axes and what divides them."""
    fused, c, d = pid * 8 + m, rng.choice([3, 4, 5, 6]), rng.choice([2, 3, 7])
    other = step * 4 + k
    return [
        pid,
        m,
        k,
        step,
        fused // c,
        fused % c,
        fused // c % d,
        other // d,
        other % d,
        minimum(other, 5),
        maximum(m - 3, 0),
        (pid % c * 8 + m) // d,
        (fused - k) // (y * y - y),
        (40 - fused) % (y * y - y),
    ]


def drawn(seed: int) -> tuple[Expr, list[Expr]]:
    """A sum, and conditions on some of its terms."""
    rng = random.Random(seed)
    known = atoms(rng)
    terms = rng.sample(known, rng.randint(2, 4))
    total: Expr = Const(rng.randint(-20, 20))
    for t in terms:
        total = total + t * rng.choice([-24, -7, -1, 1, 3, 8, 30])
    if seed % 2:  # sizes that were put in, such as 7 // 2, alone and as factors
        total = total + Const(7) // 2 * rng.choice([-5, 1, 9]) + pid * (Const(9) % 4 - Const(8) // 3)
    conditions: list[Expr] = []
    for _ in range(rng.randint(0, 3)):
        a, b = rng.sample(known, 2)
        edge = a * rng.choice([1, 1, 4]) + b - rng.randint(0, 4)
        conditions.append(rng.choice([edge >= 0, edge < rng.randint(1, 20), eq(a, rng.randint(0, 3))]))
    return total, conditions


def by_counting(total: Expr, conditions: list[Expr]) -> Range | None:
    held = [value(total, at) for at in points(SPACE) if all(value(c, at) for c in conditions)]
    return Range(min(held), max(held)) if held else None


@pytest.mark.parametrize("seed", range(40))
def test_bounds_hold_at_every_point(seed: int) -> None:
    total, conditions = drawn(seed)
    want = by_counting(total, conditions)
    facts = FACTS.knowing(conditions)
    counted = range_at_points(total, conditions, FACTS)
    assert counted == (want or Range(0, -1))
    if want is not None:
        found = linear_range(facts.poly(total), facts)
        assert found.low <= want.low and want.high <= found.high
        if not conditions and seed % 2:  # independent of anything else, corners are reached
            alone = pid * 9 - m * 2 + k
            assert linear_range(FACTS.poly(alone), FACTS) == by_counting(alone, [])


@pytest.mark.parametrize("seed", range(20))
def test_any_multipliers_give_a_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the floats find is not trusted."""
    rng = random.Random(seed)
    monkeypatch.setattr(
        linear_bounds,
        "_multipliers",
        lambda p, rows, boxes: [Fraction(rng.randint(0, 9), rng.randint(1, 4)) for _ in rows],
    )
    total, conditions = drawn(seed)
    want = by_counting(total, conditions)
    if want is not None:
        facts = FACTS.knowing(conditions)
        found = linear_range(facts.poly(total), facts)
        assert found.low <= want.low and want.high <= found.high


def test_a_fused_axis_is_put_together_again() -> None:
    """Of ``x`` and its digits only together the range is exact."""
    fused = pid * 8 + m
    spread = fused * 12 - fused % 6 * 5  # 12 a digit of six, 7 one of one
    facts = FACTS.knowing([fused < 42])
    assert linear_range(facts.poly(spread), facts) == by_counting(spread, [fused < 42]) == Range(0, 467)


N, C, H, W, n, h, w = map(Var, "NCHWnhw")
SIZES = [s >= 1 for s in (N, C, H, W)] + [s <= 2**31 - 1 for s in (N, C, H, W)]
INSIDE = [0 <= n, n < N, 0 <= h, h < H, 0 <= w, w < W]


def test_products_of_sizes() -> None:
    facts = Facts(true=SIZES).knowing(INSIDE)
    far = facts.poly(n * H * W + h * W + w) - facts.poly(N * H * W)
    assert greatest(far, facts, -1) == -1
    for left_out in (n < N, h < H, w < W):  # each of the bounds is needed
        facts = Facts(true=SIZES).knowing([c for c in INSIDE if c is not left_out])
        assert greatest(far, facts, -1) > -1


@pytest.mark.parametrize("wide", ["//", "quotient"])
def test_digits_by_sizes(wide: str) -> None:
    """A position split by sizes that are arguments, in both spellings of a division."""
    fused = x * 64 + Lane("m", 64, 1)

    def split(a: Expr, b: Expr) -> tuple[Expr, Expr]:
        if wide == "//":
            return a // b, a % b
        return Call("quotient", (a, b)), Call("remainder", (a, b))

    rows, column = split(fused, W)
    image, row = split(rows, H)
    at = image * (H * W * 8) + row * W + column + y * (H * W)
    known = [0 <= x, 0 <= y, y < 8, fused < N * H * W]
    facts = Facts(true=SIZES, ranges={y: Range(0, 7), x: Range(0, None)}).knowing(known)
    assert greatest(facts.poly(at) - facts.poly(N * H * W * 8), facts, -1) == -1
    loose = Facts(true=SIZES, ranges={y: Range(0, 7), x: Range(0, None)}).knowing(
        [0 <= x, 0 <= y, fused <= N * H * W]
    )
    assert greatest(loose.poly(at) - loose.poly(N * H * W * 8), loose, -1) > -1


def test_quotients_of_multiples() -> None:
    """A quotient by 2 of an even number from 1 on is 1 or more: a row of a gradient with a stride."""
    row = (h + 3 - step) // 2 - 1
    facts = Facts(true=SIZES, ranges={step: Range(0, 2), h: Range(0, None)})
    even = facts.knowing([eq((h + step + 1) % 2, 0), row < H])
    assert greatest(-facts.poly(row * W), even, 0) == 0
    assert greatest(-facts.poly(row * W), facts.knowing([row < H]), 0) > 0
    assert greatest(facts.poly(row * W - H * W), even, -1) == -1


HALF = Lane("half", 2, 1)
SMALL = {v: Range(0, 3) for v in (n, h, w, x, N, H, W)}


def drawn_offset(seed: int) -> tuple[Expr, list[Expr], list[Expr]]:
    """An offset into an array of three extents, these, and most of the conditions that bound it."""
    rng = random.Random(seed)
    fused, width = x * 2 + HALF, W + 1
    digits = [n, h * 2 + HALF, fused // width, fused % width, fused, w - 1, Const(0), Const(1)]
    extents = [rng.choice([N, H, W, width, Const(1), Const(2)]) for _ in range(3)]
    chosen = [rng.choice(digits) for _ in extents]
    at = (chosen[0] * extents[1] + chosen[1]) * extents[2] + chosen[2]
    known = []
    form = rng.choice(["apart", "window", "fused"])
    if form == "window":  # over an image, whose row and column lie together in memory
        up, left = rng.choice([-1, 0, 1]), rng.choice([-1, 0, 1])
        extents[1:], chosen[1:] = [H, width], [fused // width + up, fused % width + left]
        at = chosen[0] * H * width + up * width + left + fused
    if form == "fused":
        extents[1:], chosen[1:] = [H, width], []
        place = fused + rng.choice([-1, 0, 1])
        at, known = chosen[0] * H * width + place, [0 <= place, place < H * width]
    known += [c for d, e in zip(chosen, extents, strict=False) for c in (0 <= d, d < e)]
    return at, extents, [N >= 1, H >= 1, W >= 1, *(c for c in known if rng.random() < 0.8)]


def test_what_is_inside_is_so_at_every_point() -> None:
    """Of drawn arrays, also with extents of 1; for many there is a proof, and for many none can be."""
    told = {True: 0, False: 0}
    for seed in range(120):
        at, extents, known = drawn_offset(seed)
        facts = Facts(ranges=SMALL)
        where = facts.knowing(known)
        if found := is_inside(where.poly(at), [where.poly(e) for e in extents], where):
            for end in (at, extents[0] * extents[1] * extents[2] - 1 - at):
                least = range_at_points(end, known, facts)
                assert least is not None and least.low >= 0, seed
        told[found] += 1
    assert min(told.values()) > 20, told


def test_groups_of_variables_have_points_of_their_own() -> None:
    """Some 2**27 points of all variables are 2**14 of two groups."""
    a, b = Lane("a", 1 << 13, 1), Lane("b", 1 << 13, 2)
    facts = Facts(ranges={pid: Range(0, 1)})
    found = range_at_points(a // 3 * 5 + b % 7 - pid, [a % 3 < 1, b * b < 30, pid + b > 0], facts)
    assert found == Range(-1, (8190 // 3) * 5 + 5)  # b is 1 to 5, or 0 where pid is 1
    assert range_at_points(a, [a < 0], facts) == Range(0, -1)
    assert range_at_points(a, [Const(7) // 2 < 3], facts) == Range(0, -1)
    assert range_at_points(a, [Call("exp", (Const(1.0, f32),)) < 3.0], facts) is None
    assert range_at_points(x, [all_of([x < 3])], Facts()) is None  # there is no end to its points


@pytest.mark.parametrize("seed", range(30))
def test_facts_that_grow_say_what_new_ones_say(seed: int) -> None:
    """Results are kept while ranges are learned one by one, with questions between."""
    rng = random.Random(seed)
    total, _ = drawn(seed)
    asked = [c for s in range(seed, seed + 4) for c in drawn(s)[1]] + [total < rng.randint(-60, 60)]
    known, learned = Facts(), rng.sample([pid, step, y], 3)
    for v in learned:
        for c in rng.sample(asked, min(4, len(asked))):
            prove(c, known), simplify(c, known), range_of(total, known)
        known = known.with_range(v, SPACE[v].lo, SPACE[v].hi)
    new = Facts(ranges={v: SPACE[v] for v in learned})
    assert range_of(total, known) == range_of(total, new)
    for c in asked:
        assert prove(c, known) == prove(c, new) and simplify(c, known) is simplify(c, new), str(c)
