"""``python -m bench parts``: a row for each kernel of a plan."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import pytest

from bench import parts, schedules


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


@pytest.mark.parametrize("command", [parts, schedules])
def test_rows_are_read_before_their_file_is_written(
    command: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of an earlier run may be what is asked for, and is kept if it is none."""
    monkeypatch.setattr(parts, "expect_gpu", lambda command: None)
    before = tmp_path / f"{command.__name__.split('.')[-1]}.csv"  # type: ignore[attr-defined]
    before.write_text("problem,us\nmb1ic1ih1oc1oh1kh1,2.0\n")
    options = argparse.Namespace(files=[before], match="", calls=1, out=str(tmp_path), workers=1)
    with pytest.raises(ValueError, match="there is no column direction"):
        command.main(options)  # type: ignore[attr-defined]
    assert before.read_text().endswith("2.0\n")
