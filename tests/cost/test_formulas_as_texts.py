"""The model's formulas on texts give the text of the number that they give on numbers, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable

from transconv.cost import Lines, Number
from transconv.cost.symbolic_cost import kept, larger, smaller
from transconv.ir import Var, function_of, i32


def formula(x: Number, y: Number) -> Number:
    rounds = kept(-(-x // 7))
    together = smaller(3, larger(rounds, 1.0))
    return 1 / larger(y, 2) + rounds / together * (y - 0.5) + (2 - 0.1 * larger(rounds, rounds)) + 3 * x


def test_texts_compute_what_numbers_do() -> None:
    lines = Lines()

    def result(texts: list[str]) -> tuple[list[tuple[str, str]], str]:
        total = formula(*map(lines.number, texts))
        return lines.named, lines.name(total)

    made: Callable[..., float] = function_of([Var("X", i32), Var("Y", i32)], ("X", "Y"), result)
    rng = random.Random(1)
    for _ in range(200):
        x, y = rng.randint(1, 99), rng.randint(1, 9)
        assert made(x, y) == formula(x, y), (x, y)
    texts = [text for _, text in lines.named]
    assert len(texts) == len({*texts}), "what is kept is computed once"
