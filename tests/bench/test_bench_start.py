"""``python -m bench start``: rows as they come, epochs over inputs of varying size, a time limit."""

from __future__ import annotations

import subprocess
import time
from argparse import Namespace
from pathlib import Path

import pytest

from bench import epochs, start
from bench.start_table import start_table
from transconv.tuning.table import read


def test_a_table_has_the_columns_of_its_model() -> None:
    common = {"cores": "8", "stopped": ""}
    rows = [
        {"model": "m", "side": "torch", "start": "cold", "import_s": "0.5", **common},
        {
            "model": "n",
            "side": "ours",
            "start": "warm",
            "epoch1_s": "2",
            "cores": "8",
            "stopped": "after 2 s",
        },
        {"model": "m", "side": "ours", "start": "cold", "import_s": "", **common},
    ]
    first, second = start_table(rows).split("**n**")
    assert first.split("\n") == [
        "**m**",
        "",
        "| side | start | import [s] | cores |",
        "|---|---|---|---|",
        "| torch | cold | 0.5 | 8 |",
        "| ours | cold | - | 8 |",
        "",
        "",
    ]
    assert "| side | start | first epoch [s] | cores |  |" in second and "| stopped after 2 s |" in second


def test_epochs_of_a_small_audio_model() -> None:
    found: dict[str, object] = {}

    def measured(left: float) -> dict[str, object]:
        found.clear()
        epochs.measure(
            "audio", True, "cpu", lambda model: model, True, lambda: None, lambda: left, found.update
        )
        return found

    assert measured(60.0)["inputs"] == 2
    for column in ("prepare_s", "epoch1_s", "later_s", "worst_ms", "later_worst_ms"):
        assert float(str(found[column])) > 0
    assert found.keys() <= set(start.COLUMNS)
    assert measured(0.0)["inputs"] == 1 and "later_s" not in found


def test_a_process_that_is_ended_leaves_what_it_had_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that it had started are ended; one that fails leaves its row, too."""
    script = tmp_path / "child.py"
    script.write_text(
        "import subprocess, sys, time\nprint('{\"step1_s\": 1.5}', flush=True)\n"
        "if sys.argv[4] == 'fails': sys.exit(3)\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))\ntime.sleep(60)\n"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(
        start.subprocess,
        "Popen",
        lambda words, **named: popen([words[0], str(script), *words[3:]], **named),
    )
    found = start.one("resnet50", True, "transconv", "fails", str(tmp_path), 20.0)
    assert found == {"step1_s": 1.5, "error": "the process ended with 3"}
    found = start.one("resnet50", True, "transconv", "cold", str(tmp_path), 2.0)
    assert found == {"step1_s": 1.5, "stopped": "after 2 s"}
    pid = int((tmp_path / "pid").read_text())
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            break
        time.sleep(0.1)
    else:
        pytest.fail("a process that it started goes on")


def test_rows_are_written_as_they_come_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    limits: list[float] = []

    def one(
        name: str, small: bool, side: str, start: str, place: str, limit: float, log: str
    ) -> dict[str, object]:
        asked.append((side, start))
        limits.append(limit)
        found: dict[str, object] = {"import_s": 1.0, "error": "the process ended with 1"}
        return {"epoch1_s": 2.5} if side == "torch" else found if start == "prepare" else {"error": "?"}

    monkeypatch.setattr(start, "one", one)
    options = Namespace(models="audio", starts="", small=True, limit=50, out=str(tmp_path), log=False)
    assert start.main(options) == 1 and asked == list(start.VARYING)
    (path,) = tmp_path.iterdir()
    assert [(r["start"], r["stopped"]) for r in read(path)] == [
        ("heuristics", ""),
        ("benchmark", ""),
        ("prepare", "the process ended with 1"),
    ]
    assert all(5 < limit < 30 for limit in limits[:-1]) and 40 < limits[-1] <= 50, "shares"
    asked.clear()
    start.main(options)
    assert asked == [s for s in start.VARYING if s[0] == "transconv"], "rows that are there are kept"
    asked.clear()
    start.main(Namespace(**{**vars(options), "starts": "prepared,background"}))
    assert asked == [("transconv", "prepared"), ("transconv", "background")]
    with pytest.raises(ValueError, match="lukewarm"):
        start.main(Namespace(**{**vars(options), "starts": "lukewarm"}))
    with pytest.raises(ValueError, match="nothing"):
        start.main(Namespace(**{**vars(options), "models": "nothing"}))
