"""examples/kernels and drawn kernels on a GPU: beside torch, and beside the simulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernel import drawn_items
from tests.kernel.test_drawn import agree
from tests.kernel.test_examples import EXAMPLES, check

pytestmark = pytest.mark.gpu
DRAWN = 100


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    check(name, "cuda")


@pytest.mark.parametrize("first", range(0, DRAWN, 20))
def test_drawn_kernels(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 20):
        agree(seed, tmp_path, "cuda")


def test_drawn_work_items(tmp_path: Path) -> None:
    for seed in range(30):
        agree(seed, tmp_path, "cuda", drawn_items.source, 1)
