"""What an epilogue reads, fetched by the producer, on a GPU: bit by bit the exact answer for
drawn sizes whose tiles end at borders, by one program a tile, persistent ones, two consumers, and parts of
sums."""

from __future__ import annotations

from random import Random

import pytest

from tests.passes.test_operands_behind_sums import GATED, MASKED, RESIDUAL, layer
from transconv.compute import parse
from transconv.runtime import build_compute
from transconv.schedule import Schedule, why_not
from transconv.target import detect
from transconv.verify.computation import ComputationCase

GLUON = "mma | a=box b=box via=gluon"
MOMENTS = "    store  M[n, o//8] sum= y\n"
WAYS = (
    "c=box",
    "c=box programs=3",
    "c=box programs=3 consumers=2",
    "c=box programs=7 swap=1 consumers=2",
    "c=box programs=5 swap=1",
    "programs=4 consumers=2",
    "split_k=2",
)
BEHIND = (RESIDUAL, GATED, GATED + MOMENTS, MASKED)
OFTEN = ("swap=1 consumers=2 stages=3", "stages=2", "swap=1 stages=4")
TYPES = ("f16 f16 f16", "bf16 bf16 bf16", "f32 f16 f16", "f16 f32 f32")


def drawn(way: str, seed: int) -> tuple[str, Schedule]:
    """A layer and its schedule: 64 or 128 rows and columns, sizes that they do not divide."""
    rng = Random(f"{way} {seed}")
    behind, types = rng.choice(BEHIND), rng.choice(TYPES)
    types = "f16 boolean f16" if behind is MASKED else types
    n, o, h, w = rng.randint(1, 3), 8 * rng.randint(8, 24), rng.randint(5, 20), rng.randint(9, 24)
    body, store = behind.partition(MOMENTS)[:2]
    text = layer(n, 16 * rng.randint(2, 5), o, h, w, body, types=types, kernel=rng.choice((1, 3))) + store
    tile = rng.choice(("h:4 w:16 o:64", "h:8 w:16 o:64", "h:4 w:16 o:128", "h:8 w:16 o:128"))
    word = "gather" if "split_k" in way else "box"
    schedule = Schedule.parse(f"{tile} c:16 | {GLUON} {way} behind={word} stages={rng.choice((2, 3, 4))}")
    return text, schedule


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_it_is_exact_to_the_last_bit(way: str) -> None:
    launched = 0
    for seed in range(4):
        text, schedule = drawn(way, seed)
        compute = parse(text)
        if why_not(schedule, compute, detect()) is None:
            plan = build_compute(compute, detect(), schedule)
            assert ComputationCase(compute).launched(plan, "cuda").problem == "", (text, str(schedule))
            launched += 1
    assert launched >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("words", OFTEN)
def test_many_tiles_again_and_again(words: str) -> None:
    """132 programs with some ten tiles of one or two steps each: what a race would break now and then."""
    compute = parse(layer(4, 32, 256, 96, 96, GATED, kernel=1))
    case, target = ComputationCase(compute), detect()
    schedule = Schedule.parse(f"h:4 w:16 o:128 c:16 | {GLUON} c=box behind=box programs=132 {words}")
    plan = build_compute(compute, target, schedule)
    for _ in range(5):
        assert case.launched(plan, "cuda").problem == ""
