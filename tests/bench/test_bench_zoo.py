"""``python -m bench zoo``: models of libraries, a few at a time, compiled and compared, then timed."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import zoo, zoo_measures
from bench.zoo_kernels import spread
from bench.zoo_models import ZOO, Tensor, arranged, results, without_chance
from bench.zoo_table import zoo_table
from tests.torch_ops.conftest import fresh as fresh
from transconv.tuning.table import read


def run(out: Path, *words: str) -> int:
    parser = ArgumentParser()
    parser.add_argument("--out", default=str(out))
    zoo.arguments(parser)
    return zoo.main(parser.parse_args(["--device", "cpu", *words]))


@pytest.mark.slow
def test_models_in_waves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(zoo, "WORK", "tests.bench.zoo_work:work")
    words = ("--models", "resnet50,alexnet,vgg16_bn", "--together", "2")
    assert run(tmp_path, *words) == 1
    rows = {r["model"]: r for r in read(tmp_path / "zoo.csv")}
    assert [*rows] == ["alexnet", "resnet50", "vgg16_bn"] and "planted" in rows["alexnet"]["error"]
    assert rows["vgg16_bn"]["transconv_ms"] == "1" and rows["vgg16_bn"]["verdict"] == "right"
    said = capsys.readouterr().out
    assert said.index("resnet50") < said.index("transconv 1.000 ms") < said.index("vgg16_bn")
    assert run(tmp_path, *words) == 1 and len(read(tmp_path / "zoo.csv")) == 3


class Small:
    """A model of the list in a size for Triton's interpreter, of several results."""

    def built(self, _: str) -> nn.Module:
        torch.manual_seed(0)
        return Two().eval()

    def batch(self, images: int) -> tuple[Tensor, ...]:
        return (torch.randn(images, 3, 6, 6, generator=torch.Generator().manual_seed(1)),)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = torch.relu(self.norm(self.conv(x)))
        return {"out": y, "mean": y.mean((2, 3))}


def test_a_model_is_compared_and_timed(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(zoo_measures.ZOO, "small", Small())
    given = {"model": "small", "device": "cpu", "images": 2, "sides": ("eager", "transconv")}
    found = zoo_measures.work(step="prepare", **given)
    assert found["verdict"] == "right" and found["regions"] == 0 and 0 < found["transconv_rmse"] < 1e-3
    timed = zoo_measures.work(step="time", **given)
    assert timed["fatal"] and timed["transconv_ms"] > 0 and timed["eager_ms"] > 0
    assert zoo_measures.verdict(0.02, 0.01) == "wrong"


def test_gradients_are_compared_and_kernels_listed(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(zoo_measures.ZOO, "small", Small())
    given = {
        "model": "small",
        "device": "cpu",
        "images": 2,
        "sides": ("eager", "transconv"),
        "phase": "training",
        "kernels": True,
    }
    found = zoo_measures.work(step="prepare", **given)
    assert found["verdict"] == "right" and found["regions"] == 0
    rows = zoo_measures.work(step="time", **given)["rows"]
    assert {r["phase"] for r in rows} == {"forward", "backward"} and all(r["us"] is None for r in rows)
    assert all(r["whole"].startswith("compute ") and r["limit_us"] > 0 for r in rows)
    timed = [{"us": "30", "estimate_us": "10"}, {"us": "12", "estimate_us": "10"}, {"us": "9"}]
    assert "2 kernels: the median" in spread(timed) and "1 are off by more than 2x" in spread(timed)


def test_dropout_leaves_nothing_out() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Conv2d(3, 3, 1))
    made = without_chance(model)
    assert made.training and torch.equal(made[0](torch.ones(9)), torch.ones(9))


def test_the_table() -> None:
    def row(model: str, **more: str) -> dict[str, str]:
        return {**dict.fromkeys(zoo.COLUMNS, ""), "model": model, "verdict": "right", **more}

    made = zoo_table(
        [
            row(
                "a",
                inductor_ms="4",
                transconv_ms="2",
                inductor_gpu_ms="3",
                transconv_gpu_ms="2",
                transconv_rmse="0.1",
                eager_rmse="0.2",
                regions="0",
            ),
            row("b", error="timeout"),
            row("c", inductor_ms="1", transconv_ms="2", regions="1"),
        ]
    )
    lines = [[c.strip() for c in text.split("|")[1:-1]] for text in made.splitlines()[2:]]
    assert [cells[0] for cells in lines] == ["c", "a", "b", "geometric mean"]
    assert lines[1][1:8] == ["right", "0.50", "-", "4", "2", "2.00", "1.50"]
    assert lines[2][1] == "timeout" and lines[3][6] == "1.00"


def test_the_list() -> None:
    """Issue: forty models or more, each with a batch of its own."""
    libraries = {m.library for m in ZOO.values()}
    assert len(ZOO) >= 40 and libraries >= {"torchvision", "timm", "transformers", "diffusers", "monai"}
    made = results({"out": torch.zeros(1), "aux": (torch.ones(2), torch.ones(3))})
    assert [t.numel() for t in made] == [1, 2, 3]
    assert arranged(torch.zeros(2, 3, 4, 4)).is_contiguous(memory_format=torch.channels_last)
