"""Gradients that gather, of pools and pads: kernels of ours, for given sizes and for any."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.graph.meant import by_meaning, compare
from transconv.graph import KernelRow, backend, report

Tensor = torch.Tensor

CASES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {  # whether sizes are names
    "max pool": (lambda x: F.max_pool2d(x.sin(), 3, 2, 1), True),
    "max pool with gaps": (lambda x: F.max_pool2d(x, 2, 1, 0, 2), False),
    "average pool": (lambda x: F.avg_pool2d(x, 3, 2, 1).sin(), False),
    "average pool 3d": (lambda x: F.avg_pool3d(x[:, None], (1, 2, 2)).sin(), True),
    "replicate": (lambda x: F.pad(x, (1, 2, 2, 0), mode="replicate").exp(), True),
    "replicate 3d": (lambda x: F.pad(x[:, None], (0, 2, 1, 1, 2, 0), mode="replicate").exp(), False),
    "reflect": (lambda x: F.pad(x, (1, 2, 2, 0), mode="reflect").exp(), False),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    f, named = CASES[name]
    run = torch.compile(f, backend=backend, options={"rest": "eager"}, dynamic=named)
    with by_meaning():
        for shape in ((2, 3, 7, 8), (3, 2, 9, 5)) if named else ((2, 3, 7, 8),):
            compare(f, run, [torch.randn(shape, dtype=torch.float64, requires_grad=True)], 1e-9)
    rows = [row for graph in report(run).graphs for row in graph.rows]
    assert len(rows) >= 2 and all(isinstance(row, KernelRow) and not row.numbers for row in rows)
