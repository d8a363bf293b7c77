"""Element-wise operations at extreme values on a GPU, where approximations, flushed numbers and casts are
the chip's: texts, graphs and epilogues beside torch on it, kernels in Python beside NumPy."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transconv
from tests import extremes
from tests.gpu import cases as c
from tests.graph.test_extremes import FLOATS, WHOLE
from tests.kernel.test_extremes import TYPES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", extremes.OF_TEXTS, ids=str)
def test_texts(dtype: torch.dtype) -> None:
    assert extremes.of_texts(dtype, c.DEVICE) == []


@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE], ids=str)
def test_graphs_of_one_tensor(dtype: torch.dtype) -> None:
    transconv.config.fallback = "error"
    assert extremes.of_graphs([dtype], c.DEVICE) == []


@pytest.mark.parametrize("types", [*itertools.product((*FLOATS, *WHOLE), repeat=2)], ids=str)
def test_graphs_of_two_tensors(types: tuple[torch.dtype, torch.dtype]) -> None:
    transconv.config.fallback = "error"
    assert extremes.of_graphs(types, c.DEVICE) == []


def test_epilogues() -> None:
    transconv.config.fallback = "error"
    assert extremes.of_epilogues(c.DEVICE) == []


@pytest.mark.parametrize("dtype", TYPES)
def test_kernels_in_python(dtype: Any, tmp_path: Path) -> None:
    assert extremes.of_kernels(np.dtype(dtype), c.DEVICE, tmp_path) == []
