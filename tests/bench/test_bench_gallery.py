"""examples/gallery: every script is short, and its model runs by kernels of ours as torch runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bench.__main__
from bench import gallery
from bench.environment import ROOT
from bench.gallery_measures import Trial, read
from tests.torch_ops.conftest import fresh as fresh
from transconv.tuning.table import read as read_table

LONGEST = 30  # lines of a script
QUICK = ("patch_embedding", "long_filters")


def test_scripts_are_short_and_name_a_thread() -> None:
    assert len(gallery.SCRIPTS) >= 10
    for name in gallery.SCRIPTS:
        lines = (ROOT / "examples" / "gallery" / f"{name}.py").read_text().splitlines()
        assert len(lines) <= LONGEST, name
        shown = read(name)
        assert shown.thread.startswith("https://github.com/") and shown.reported
        assert shown.thread.removeprefix("https://") in lines[0], name


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in gallery.SCRIPTS]
)
def test_results_are_torchs(name: str, fresh: None) -> None:
    row = Trial(read(name), "cpu", True).prepared()
    assert row["kernels"] > 0
    # 8-bit convolutions round to a 127th of the largest element, layer after layer.
    assert row["ours_difference"] < (0.3 if name == "eight_bit_decode" else 1e-4)
    assert row["eager_difference"] == 0.0
    torch._dynamo.reset()


@pytest.mark.slow
def test_the_command_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gallery", "--out", str(tmp_path), "--only", "long_filters", "--device", "cpu"]
    assert bench.__main__.main(words) == 0
    (row,) = read_table(tmp_path / "gallery.csv")
    assert row["name"] == "long_filters" and float(row["ours_ms"]) > 0 and row["commit"]
    capsys.readouterr()
    assert bench.__main__.main(words) == 0 and not capsys.readouterr().out
    made = gallery.gallery_table([row])
    assert made.count("not measured") > 10 and "| `long_filters` | " in made


def test_what_has_no_row_is_not_measured() -> None:
    assert gallery.gallery_table([]).count("not measured") == 4 * len(gallery.SCRIPTS)
