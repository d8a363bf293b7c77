"""Two results of a product that leave as boxes, on a GPU: exact to the last bit, for drawn sizes whose
tiles end at borders, and again and again where a race would show."""

from __future__ import annotations

from random import Random

import pytest

from tests.passes.test_operands_behind_sums import RESIDUAL, layer
from tests.schedule.test_result_boxes import BYTES, GLUON
from transconv.compute import parse
from transconv.runtime import build_compute
from transconv.schedule import Schedule, result_boxes, why_not
from transconv.target import detect
from transconv.verify.computation import ComputationCase

WAYS = (
    "",
    "behind=box",
    "programs=3",
    "behind=box programs=3",
    "behind=box programs=3 consumers=2",
    "programs=7 swap=1 consumers=2",
    "behind=box programs=5 swap=1",
)


def two(n: int, c: int, o: int, h: int, w: int, first: bool) -> str:
    """A 1x1 layer with bytes as a second result, in front of the sum's or behind it."""
    text = layer(n, c, o, h, w, RESIDUAL, kernel=1, types="bf16 bf16 bf16")
    text = text.replace("    axes", f"    tensor Q i8 [n={n}, o={o}, h={h}, w={w}] acdb\n    axes")
    at = text.index("    store") if first else len(text)
    return text[:at] + BYTES + text[at:]


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_it_is_exact_to_the_last_bit(way: str) -> None:
    launched = 0
    for seed in range(4):
        rng = Random(f"{way} {seed}")
        text = two(
            rng.randint(1, 3),
            16 * rng.randint(1, 5),
            16 * rng.randint(4, 12),
            rng.randint(5, 20),
            rng.randint(9, 24),
            rng.random() < 0.5,
        )
        tile = rng.choice(("h:4 w:16 o:64", "h:8 w:16 o:64", "h:4 w:16 o:128", "h:8 w:16 o:128"))
        schedule = Schedule.parse(f"{tile} c:16 | {GLUON} {way} stages={rng.choice((2, 3, 4))}")
        compute = parse(text)
        if why_not(schedule, compute, detect()) is None:
            assert len(result_boxes(schedule, compute)) == 2
            plan = build_compute(compute, detect(), schedule)
            assert ComputationCase(compute).launched(plan, "cuda").problem == "", (text, str(schedule))
            launched += 1
    assert launched >= 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "words",
    [
        "behind=box swap=1 consumers=2 stages=3",
        "behind=box stages=2",
        "swap=1 consumers=2 stages=4",
        "behind=gather stages=3",
    ],
)
def test_many_tiles_again_and_again(words: str) -> None:
    """132 programs with some ten tiles of one or two steps each."""
    compute = parse(two(4, 32, 256, 96, 96, True))
    case, target = ComputationCase(compute), detect()
    schedule = Schedule.parse(f"h:4 w:16 o:128 c:16 | {GLUON} programs=132 {words}")
    plan = build_compute(compute, target, schedule)
    for _ in range(5):
        assert case.launched(plan, "cuda").problem == ""
