"""`python -m bench computations`: every text is compared with what torch computes in its place."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from bench import computations
from bench.__main__ import main
from transconv.compute import parse
from transconv.verify.computation import ComputationCase


@pytest.mark.every(2)
@pytest.mark.parametrize("name", computations.INSTEAD)
def test_torch_computes_the_same(name: str) -> None:
    case = ComputationCase(parse((computations.FOLDER / f"{name}.txt").read_text()), "float")
    tensors = case.tensors("cpu")
    made = computations.INSTEAD[name](tensors)
    results = made if isinstance(made, tuple) else (made,)
    for result, answer in zip(results, case.answers.values(), strict=True):
        torch.testing.assert_close(result.double(), torch.from_numpy(answer.value), rtol=1e-2, atol=1e-1)


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    assert main(["computations", "--match", "max_pool", "--out", str(tmp_path)]) == 0
    (row,) = csv.DictReader((tmp_path / "computations.csv").open())
    assert row["exact"] == row["float"] == "right" and row["compute"] == "max_pool"
