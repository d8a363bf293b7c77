"""``python -m bench start``: rows as they come, epochs over inputs of varying size, a time limit."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from bench import epochs, start
from transconv.tuning.table import read


def test_epochs_of_a_small_audio_model() -> None:
    found = epochs.measure("audio", True, "cpu", lambda model: model, lambda: None, 60.0)
    assert found["inputs"] == 2
    for column in ("epoch1_s", "later_s", "worst_ms", "later_worst_ms"):
        assert float(str(found[column])) > 0
    assert found.keys() <= set(start.COLUMNS)
    none_left = epochs.measure("audio", True, "cpu", lambda model: model, lambda: None, 0.0)
    assert "later_s" not in none_left and "epoch1_s" in none_left


def test_rows_are_written_as_they_come_and_not_measured_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def one(name: str, small: bool, side: str, start: str, place: str, limit: float) -> dict[str, object]:
        asked.append((side, start))
        assert limit <= 50
        return {"epoch1_s": 2.5} if side == "torch" else {"error": "TimeoutExpired"}

    monkeypatch.setattr(start, "one", one)
    options = Namespace(models="audio", small=True, limit=50, out=str(tmp_path))
    assert start.main(options) == 1 and asked == list(start.VARYING)
    (path,) = tmp_path.iterdir()
    assert [r["start"] for r in read(path)] == ["heuristics", "benchmark"]
    asked.clear()
    start.main(options)
    assert asked == [s for s in start.VARYING if s[0] == "transconv"], "rows that are there are kept"
    with pytest.raises(ValueError, match="nothing"):
        start.main(Namespace(**{**vars(options), "models": "nothing"}))
