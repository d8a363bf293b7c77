"""``python -m bench graphs``: rows that resume, every model in its small size, the table of rows."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import transconv
from bench import graphs
from bench.graph_measures import Row, work
from bench.graph_models import MODELS
from bench.graph_table import graphs_table
from tests.torch_ops.conftest import fresh as fresh
from transconv.tuning.table import read


def run(out: Path, *words: str) -> int:
    parser = ArgumentParser()
    parser.add_argument("--out", default=str(out))
    graphs.arguments(parser)
    return graphs.main(parser.parse_args(["--quick", "--device", "cpu", "--seconds", "0.1", *words]))


@pytest.mark.slow
def test_rows_are_appended_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--models", "vae_block", "--sides", "eager", "--layouts", "nhwc")
    assert run(tmp_path, *words) == 0
    (row,) = read(tmp_path / "graphs.csv")
    assert float(row["ms"]) > 0 and float(row["rmse"]) < 1e-5 and not row["error"]
    capsys.readouterr()
    assert run(tmp_path, *words) == 0
    assert "1 rows, 1 done before" in capsys.readouterr().out
    assert len(read(tmp_path / "graphs.csv")) == 1


def measure(*given: str, **more: object) -> Row:
    """Both steps of a row."""
    names = dict(zip(("model", "side", "layout", "device"), given, strict=True)) | more
    return {k: v for step in ("prepare", "time") for k, v in work(step, **names).items()}  # type: ignore[arg-type]


@pytest.fixture
def switches() -> Iterator[None]:
    """The environment variables that a measurement sets."""
    before = torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = False, before


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["vae_block", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "vae_block")]
)
def test_models_by_our_kernels(name: str, fresh: None, switches: None, tmp_path: Path) -> None:
    if name == "efficientnet_v2_s":
        pytest.importorskip("torchvision")
    transconv.config.fallback = "warn"
    row = measure(name, "transconv", "nhwc", "cpu", quick=True, seconds=0.0, steps=1, pages=str(tmp_path))
    assert "<table" in (tmp_path / f"{name}_nhwc.html").read_text()
    most = 4 if name == "convnext_t" else 1  # sums of columns that are read again, together by their width
    assert row["rmse"] < 1e-5 and row["ours"] and row["copies"] <= most, row["note"]


@pytest.mark.slow
def test_a_loss_is_a_number_for_each_step(switches: None) -> None:
    row = measure("unet2d_groups", "eager", "nchw", "cpu", quick=True, seconds=0.0, steps=3)
    assert len(row["losses"].split()) == 3


def test_group_norms_take_the_place_of_batch_norms() -> None:
    kinds = {type(m) for m in MODELS["unet2d_groups"].built(quick=True).modules()}
    assert nn.GroupNorm in kinds and nn.BatchNorm2d not in kinds


def test_the_table() -> None:
    def row(side: str, layout: str, ms: str, **more: str) -> dict[str, str]:
        about = {"model": "m", "side": side, "layout": layout, "ms": ms}
        return {**dict.fromkeys(graphs.COLUMNS, ""), **about, **more}

    made = graphs_table(
        [
            row("eager", "nhwc", "9", peak_mb="100", rmse="0.5", kernels="40", losses="2 1"),
            row("eager", "nchw", "8", peak_mb="200", rmse="0.5", kernels="30", losses="2 1"),
            row("inductor", "nhwc", "4", losses="2 1.1"),
            row("max-autotune", "nhwc", "", error="timeout"),
            row("cudagraphs", "nhwc", "1.5"),
            row("transconv", "nhwc", "2", peak_mb="100", rmse="0.25", kernels="10", losses="2 1"),
        ]
    )
    times, others = made.split("\n\n")
    assert times.splitlines()[2] == (
        "| m | 8 (nchw) | 4 (nhwc) | timeout | 2 (nhwc) | 1.5 (nhwc) | 2.00 |"
    )
    assert others.splitlines()[2] == "| m | 30 → 10 | - → - | 0.50 | 0.50 | 1.0e-01 / 0.0e+00 |"
    assert "reduce-overhead" not in made, "no model was run with it"
