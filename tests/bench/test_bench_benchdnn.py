"""Whole lists of benchdnn are counted, a row for each, and a run goes on where it was stopped."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from bench import benchdnn
from transconv.tuning.table import read


def test_a_list_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One problem right, one refused with its reason; what the reasons say fits a cell."""
    lines = "mb1ic3ih4oc2oh2kh3\n--alg=WINO mb1ic4ih5oc4oh5kh3ph1\n"
    (tmp_path / "small").write_text(lines, encoding="utf-8")
    options = Namespace(
        lists=[tmp_path / "small"], options="--engine=numpy", each=100.0, out=str(tmp_path)
    )
    assert benchdnn.main(options) == 0
    (row,) = read(tmp_path / benchdnn.NAME)
    counted = {c: row[c] for c in ("list", "problems", "right", "refused", "skipped", "wrong")}
    assert counted == dict(zip(counted, ("small", "2", "1", "1", "0", "0"), strict=True))
    assert row["reasons"].startswith("1 Winograd")
    table = benchdnn.lists_table([row, row])
    assert "| small | 2 | 1 | 1 | 0 | 0 | 1 Winograd" in table and "| all | 4 | 2 | 2 |" in table
    monkeypatch.setattr(benchdnn, "totals", None)  # it has its row
    assert benchdnn.main(options) == 0
