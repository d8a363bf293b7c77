"""Steps that are divided evenly among programs (``reduce=stream``): the arithmetic of the division against
one that gives out steps one by one, and kernels of drawn sizes after every pass."""

from __future__ import annotations

import random

import pytest

from transconv.compute import Compute, parse
from transconv.ir import as_expr, value_at
from transconv.passes.lowering.split_k import Deal
from transconv.runtime import Plan, build_compute
from transconv.schedule import Schedule, why_not
from transconv.target import Target
from transconv.verify.computation import after_every_pass


def test_the_division_is_that_of_steps_given_out_one_by_one() -> None:
    rng = random.Random(7)
    sizes = [(1, 1, 1), (72, 98, 132), (4, 4, 16), (3, 5, 15), (5, 3, 5), (1, 7, 132)]
    for tiles, steps, programs in sizes + [
        (rng.randint(1, 12), rng.randint(1, 12), rng.randint(1, 16)) for _ in range(300)
    ]:
        dealt = Deal(tiles, steps, programs)
        units = [(tile, step) for tile in range(tiles) for step in range(steps)]
        size = next(n for n in range(1, len(units) + 1) if n * programs >= len(units))
        shares = [units[i : i + size] for i in range(0, len(units), size)]
        assert (dealt.chunk, dealt.shares) == (size, len(shares)) and len(shares) <= programs
        of_tile = [
            [p for p, share in enumerate(shares) if any(t == tile for t, _ in share)]
            for tile in range(tiles)
        ]
        assert [(dealt.first_of(t), dealt.last_of(t)) for t in range(tiles)] == [
            (p[0], p[-1]) for p in of_tile
        ]
        assert [value_at(as_expr(dealt.more(as_expr(t))), {}) for t in range(tiles)] == [
            len(p) - 1 for p in of_tile
        ]
        assert dealt.parts == max(map(len, of_tile)) and dealt.fewest == min(map(len, of_tile))
        assert dealt.segments == max(len({t for t, _ in share}) for share in shares)


SM90 = Target.parse("sm_90")
PRODUCT = """compute product
    tensor A f16 [{b}, {m}, {k}]
    tensor B f16 [{b}, {n}, {k}]
    axes   b={b} m={m} n={n} | k={k}
    read   x = A[b, m, k]
    read   y = B[b, n, k]
    store  Y[b, m, n] = relu(sum(x*y; k)) + 1
"""


def drawn(seed: int) -> tuple[Compute, Plan]:
    """A product and its kernels: ragged tiles, tiles of several programs or of one, several batches."""
    rng = random.Random(seed)
    while True:
        sizes = {
            "b": rng.choice([1, 1, 2, 3]),
            "m": rng.choice([64, 100, 128]),
            "n": rng.choice([16, 32, 24]),
            "k": rng.choice([16, 32, 64, 80, 40]),
        }
        a, b, m = rng.choice(["box", "gather"]), rng.choice(["box", "gather"]), rng.choice([64, 64, 128])
        made, programs = parse(PRODUCT.format(**sizes)), rng.choice([2, 3, 4, 5, 7, 11, 16])
        schedule = Schedule.parse(
            f"b:1 m:{m} n:16 k:16 | mma | a={a} b={b} via=gluon reduce=stream "
            f"group_m=1 programs={programs}"
        )
        if why_not(schedule, made, SM90) is None:
            return made, build_compute(made, SM90, schedule)


@pytest.mark.every(28)
@pytest.mark.parametrize("seed", range(56))
def test_kernels_of_drawn_sizes_are_right_after_every_pass(seed: int) -> None:
    made, plan = drawn(seed)
    assert len(plan.steps) == 2
    assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(made, plan) if j.problem] == []


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("k", "rest"),
    [
        (80, "mma | split_k=3 deal=1 stages=2"),
        (64, "mma | split_k=2 deal=1 stages=1"),
        (40, "fma | split_k=2 deal=1 late=1 stages=1"),
        (80, "mma | a=box b=box via=gluon split_k=3 deal=1 stages=2"),
    ],
)
def test_steps_that_are_dealt_out_in_turn(k: int, rest: str) -> None:
    made = parse(PRODUCT.format(b=2, m=64, n=24, k=k))
    plan = build_compute(made, SM90, Schedule.parse(f"b:1 m:64 n:16 k:16 | {rest}"))
    assert len(plan.steps) == 2
    assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(made, plan) if j.problem] == []
