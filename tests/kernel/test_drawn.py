"""Drawn kernels give the same in the simulator and in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernel import drawn_items
from tests.kernel.drawn import source
from transconv.kernel import Group, KernelFunction

QUICK = 4


def made(text: str, seed: int, folder: Path) -> KernelFunction:
    path = folder / f"drawn_{seed}.py"
    path.write_text(text, "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: KernelFunction = module.drawn
    return found


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize("seed", [*range(QUICK), *(pytest.param(n, marks=pytest.mark.slow)
                                                   for n in range(QUICK, 120))])
def test_two_engines(seed: int, tmp_path: Path) -> None:
    agree(seed, tmp_path, "cpu")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize("seed", [2, 19, 29, *(pytest.param(n, marks=pytest.mark.slow)
                                               for n in range(30, 90))])
def test_work_items_in_two_engines(seed: int, tmp_path: Path) -> None:
    agree(seed, tmp_path, "cpu", drawn_items.source, 1)


def agree(seed: int, tmp_path: Path, device: str, drawn: Callable[[int], str] = source,
          least: int = 0) -> None:
    """A drawn kernel gives the same on a device as in the simulator. ``least``: sizes of arrays."""
    text = drawn(seed)
    function, draw = made(text, seed, tmp_path), np.random.default_rng(seed)
    rows, cols = (int(n) for n in draw.integers(1, 12, 2))
    group = Group((rows, cols), tuple(int(n) for n in draw.integers(1, 7, 2)))
    x, z = (draw.normal(size=draw.integers(least, 13, 2)).astype(np.float32) for _ in range(2))
    k = draw.integers(-9, 9, (rows, cols)).astype(np.int32)
    results = []
    for run, place in ((function.simulate, "cpu"), (function, device)):
        arrays = (x, z, k, np.full((3, rows, cols), -77, np.float32), np.full((rows, cols), -77, np.int32))
        given = [torch.tensor(a, device=place) for a in arrays]
        run(group, *given)
        results.append([t.cpu().numpy() for t in given[3:]])
    (y, s), (other_y, other_s) = results
    np.testing.assert_array_equal(s, other_s, err_msg=text)
    np.testing.assert_allclose(y, other_y, 2e-4, 2e-4, err_msg=text)
