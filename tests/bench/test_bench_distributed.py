"""``python -m bench distributed``: a row by processes with gloo; rows that resume; the table."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import distributed, distributed_watching
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.conversion import aten_convolutions
from transconv.tuning.table import read


def run(out: Path, *words: str) -> int:
    parser = ArgumentParser()
    parser.add_argument("--out", default=str(out))
    distributed.arguments(parser)
    return distributed.main(parser.parse_args(["--small", "--device", "cpu", "--seconds", "0.1", *words]))


@pytest.mark.slow
def test_small_networks_equal_one_process(tmp_path: Path) -> None:
    words = ("--models", "unet3d,wan,weather", "--cache", str(tmp_path / "cache"))
    assert run(tmp_path, *words) == 0
    rows = read(tmp_path / "cpu_distributed.csv")
    assert [(r["model"], r["side"], r["ranks"]) for r in rows] == [
        (m, *of)
        for m in ("unet3d", "wan", "weather")
        for of in (("plain", "1"), ("sharded", "2"), ("captured", "2"))
    ]
    for row in (r for r in rows if r["ranks"] == "2"):
        assert float(row["ms"]) > 0 and float(row["rmse"]) < 1e-5, row
        assert not row["gradient_rmse"] or float(row["gradient_rmse"]) < 1e-4, row


def test_rows_resume_and_failures_are_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def measured(row: dict[str, str], _options: Any, _device: str) -> dict[str, Any]:
        asked.append(row["model"] + row["side"][0] + row["ranks"])
        if row["model"] == "volume" and row["ranks"] == "1":
            return {"error": "out of memory: 90 GB"}
        ms = 30.0 / int(row["ranks"])
        return {"ms": ms, "host_ms": 1.0, "peak_mb": 600 / int(row["ranks"]), "error": ""}

    monkeypatch.setattr(distributed, "measured", measured)
    assert run(tmp_path, "--models", "unet3d,volume") == 0
    out = capsys.readouterr().out
    assert "| unet3d | 2 | eager | 30 | 15 | 2.00 | 600 → 300 | 0.50 |" in out
    assert "| unet3d | 2 | recorded | 30 | 15 | 2.00 |" in out
    assert "out of memory" in out.splitlines()[-1]
    assert run(tmp_path, "--models", "unet3d,volume") == 0
    assert asked == [f"{m}{of}" for m in ("unet3d", "volume") for of in ("p1", "s2", "c2")]


@pytest.mark.parametrize("transposed", [False, True])
def test_results_that_nothing_computed_look_like_torchs(transposed: bool) -> None:
    x, bias = torch.randn(2, 4, 9, 7).to(memory_format=torch.channels_last), torch.randn(6)
    w = torch.randn(*((4, 6) if transposed else (6, 4)), 3, 2)
    p = Params(
        (2, 1),
        (1, 0) if transposed else (1, 0, 0, 1),
        (1, 1),
        transposed,
        (1, 0)[: 2 * transposed] or (0, 0),
        1,
    )

    def answers() -> list[torch.Tensor]:
        y = aten_convolutions.aten_forward(x, w, bias, p)
        return [
            y,
            *(t for t in aten_convolutions.aten_backward(y, x, w, p, (True, True, True)) if t is not None),
        ]

    def looks(t: torch.Tensor) -> Any:
        return t.shape, t.dtype

    with distributed_watching.nothing_computed():
        empty = answers()
    assert list(map(looks, empty)) == list(map(looks, answers())) and len(empty) == 4
    assert aten_convolutions.aten_forward.__module__ == "transconv.torch_ops.conversion.aten_convolutions"


def test_a_row_that_takes_too_long(tmp_path: Path) -> None:
    words = ("--models", "unet3d", "--limit", "0.5", "--cache", str(tmp_path / "cache"))
    assert run(tmp_path, *words) == 1
    assert all(r["error"].startswith("timeout") for r in read(tmp_path / "cpu_distributed.csv"))


def test_all_processes_of_a_row_end() -> None:
    """Those of a session of their own, and those that ignore SIGTERM."""
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); "
        "time.sleep(60)"
    )
    script = (
        "import subprocess, sys, signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
        f"child = subprocess.Popen([sys.executable, '-c', {deaf!r}], stdout=subprocess.PIPE, "
        "start_new_session=True)\n"
        "child.stdout.readline(); print(child.pid, flush=True); child.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert distributed.descendants(process.pid) == [child]
    distributed._end(process)
    assert process.returncode == 1
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the child lives")
