"""``certify``: what it prints, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from transconv.__main__ import main

PROBLEM = "mb2ic4ih6oc8oh6kh3ph1"
MODEL = """
import torch
def good():
    return torch.nn.Linear(8, 4).eval(), torch.randn(3, 8)
def bad():
    return (lambda x: torch.cumsum(x, 1) * 2), torch.randn(3, 8)
"""


def test_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", PROBLEM, "--prop", "bwd_w", "--target", "sm_90"]) == 0
    told = capsys.readouterr().out
    assert "proved   bwd_w grouping: no MB in over mb oh ow" in told and "the proof holds" in told


@pytest.mark.slow
def test_a_planted_split(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = "ic:16 oc:16 mb.oh.ow:16 | mma | split_k=3 stages=1"
    words = [
        "certify",
        "mb2ic16ih6oc16oh6kh3ph1",
        "--prop",
        "bwd_w",
        "--schedule",
        schedule,
        "--drawn",
        "1",
    ]
    assert main([*words, "--device", "cpu", "--target", "interpreter"]) == 1
    told = capsys.readouterr().out
    assert "REFUSED  bwd_w grouping: MB decides part" in told and "REFUSED  bwd_w drawn: 1 batches" in told


def test_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.txt"
    file.write_text("compute rows\n axes m=4 | k=9\n read x = X[m, k]\n store Y[m] = sum(x; k)\n")
    assert main(["certify", str(file), "--drawn", "1", "--device", "cpu"]) == 0
    assert "no BATCH in over k" in capsys.readouterr().out


def test_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    assert main(["certify", f"{file}:good", "--device", "cpu", "--drawn", "1"]) == 0
    assert "no bit differs" in capsys.readouterr().out
    assert main(["certify", f"{file}:bad", "--device", "cpu"]) == 1
    assert "torch would compute cumsum" in capsys.readouterr().out


def test_drawn_calls(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--drawn", "2", "--device", "cpu"]) == 0
    assert "2 of 2 have the same bits in every batch" in capsys.readouterr().out


def test_nothing_to_certify(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify"]) == 2
    assert "expected a problem, a file, FILE:NAME, or --drawn N" in capsys.readouterr().err
