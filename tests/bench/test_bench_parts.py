"""``python -m bench parts``: a row for each kernel of a plan."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import pytest

from bench import parts


def test_each_kernel_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "expect_gpu", lambda command: None)
    asked = tmp_path / "plans.csv"
    plan = "mb2ic16ih4oc16oh4kh3ph1 dt=f32 tag=nchw,fwd,,mb.oh.ow:32 oc:16 ic:16 | mma |"
    asked.write_text(f"problem,direction,behind,schedule\n{plan} pack=a.b stages=2\n{plan} swap=2\n")
    options = argparse.Namespace(files=[asked], match="", calls=2, out=str(tmp_path))
    assert parts.main(options) == 1  # the second one is no schedule
    rows = list(csv.DictReader((tmp_path / "parts.csv").open(encoding="utf-8")))
    assert [r["kernel"] for r in rows[:3]] == ["pack_src", "pack_wei", "fwd"]
    assert len(rows) == 4 and "swap=2" in rows[3]["kernel"]
