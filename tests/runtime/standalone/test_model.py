"""Kernels for a model: every convolution that it calls, each distinct problem once, who uses which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import transconv
from tests.runtime.standalone.alone import load
from transconv.errors import ScheduleError, Unsupported


class Net(nn.Module):
    """Padding by reflection, two layers of one problem, a transposed one, and a function's call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")
        self.middle = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 4, 1, bias=False))
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(self.up(self.middle(self.first(x))), torch.ones(1, 2, 1, 1))


class Whole(nn.Module):
    """A convolution of integers, for which there is no kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, torch.ones(2, 2, 1, 1, dtype=x.dtype))


def test_every_call_has_its_kernels(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    made = transconv.export(Net(), torch.randn(1, 2, 4, 4), directory=folder, backward=True)
    uses = [(u.module, sorted(u.kernels)) for u in made.uses]
    every = ["input gradient", "result", "weight gradient"]
    assert uses == [
        ("first", ["result", "weight gradient"]),
        ("middle.0", every),
        ("middle.1", every),
        ("up", every),
        ("", ["input gradient", "result"]),
    ]
    assert made.uses[1].kernels == made.uses[2].kernels and len(made.kernels) == 10 and not made.left
    index = json.loads((folder / "index.json").read_text())
    assert {k["file"] for k in index["kernels"].values()} == {p.name for p in folder.glob("*.py")}
    assert index["kernels"][made.uses[0].kernels["result"]]["epilogue"] == "bias"
    assert index["uses"][3]["module"] == "up"
    page = (folder / "README.md").read_text()
    assert "| `middle.1` | weight gradient | [conv_bwd_w_" in page and "| the model | result |" in page
    assert {load(str(path)).main() for path in folder.glob("*.py")} == {0}


def test_a_model_without_memory_and_a_chip(tmp_path: Path) -> None:
    with torch.device("meta"):
        model, x = nn.Conv2d(8, 8, 3, dtype=torch.float16), torch.randn(2, 8, 6, 6, dtype=torch.float16)
    made = transconv.export(model, x, directory=tmp_path / "kernels", target="sm_90")
    (kernel,) = made.kernels.values()
    assert kernel["tensors"]["dst"]["shape"] == [2, 8, 4, 4]
    assert "1 kernels for 1 calls" in str(made)


def test_what_is_refused(tmp_path: Path) -> None:
    x = torch.randn(1, 2, 4, 4)
    with pytest.raises(Unsupported, match="no convolution of the model can be exported: it called none"):
        transconv.export(nn.ReLU(), x, directory=tmp_path / "none")
    with pytest.raises(Unsupported, match="can be exported: dtype:int64"):
        transconv.export(Whole(), x.long(), directory=tmp_path / "none")
    with pytest.raises(ScheduleError, match="target 'sm_1' is unknown"):
        transconv.export(nn.Conv2d(2, 2, 1), x, directory=tmp_path / "none", target="sm_1")
    with pytest.raises(Unsupported, match="no machine code is made ahead of time for interpreter"):
        transconv.export(
            nn.Conv2d(2, 2, 1), x, directory=tmp_path / "none", target="interpreter", aot=True
        )
    with pytest.raises(RuntimeError, match="expected input"):
        transconv.export(nn.Conv2d(3, 2, 1), x, directory=tmp_path / "none")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty"):
        transconv.export(nn.Conv2d(2, 2, 1), x, directory=tmp_path / "full")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full"]


def test_hooks_go_when_the_model_fails(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(3, 2, 1))
    with pytest.raises(RuntimeError):
        transconv.export(model, torch.randn(1, 2, 4, 4), directory=tmp_path / "none")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
