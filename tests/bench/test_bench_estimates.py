"""``python -m bench estimates``, and what it tells of the estimates now."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from bench import estimates, schedules
from bench.__main__ import main
from bench.environment import ROOT
from bench.trials import target_of
from transconv.compute import Alone, parse
from transconv.selection import shortlist
from transconv.tuning.session import read_log

GRAPHS = ROOT / "bench" / "results" / "h200_graph_trials.csv"
PRODUCT = "compute p | tensor X f16 [512, 64] | tensor W f16 [128, 64] | tensor Y f16 [512, 128] | "
PRODUCT += "axes m=512 n=128 , k=64 | read x = X[m, k] | read w = W[n, k] | let s = sum(x*w; k) | "
PRODUCT += "store Y[m, n] = s"
TILES = ("m:64 n:64 k:32", "m:64 n:64 k:64", "m:16 n:16 k:16")


def log(path: Path, times: tuple[float, ...]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(("problem", "direction", "schedule", "us", "verdict"))
        for tile, us in zip(TILES, times, strict=True):
            lines.writerow(
                (
                    PRODUCT.replace(" | ", "\n    ").replace(" ,", " |"),
                    "",
                    f"{tile} | mma | stages=3 warps=4",
                    us,
                    "right",
                )
            )
    return path


def test_choices_and_their_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log(tmp_path / "log.csv", (6.0, 3.0, 12.0))
    rows = read_log(path)
    (found,) = estimates.problems(rows, target_of(rows))
    order = sorted(found.timed, key=lambda t: t.estimated)
    assert found.first is order[0] and found.best.us == 3.0
    assert found.regret == found.first.us / 3.0
    times = [t.us for t in order]
    assert found.agreement == pytest.approx(
        1 - 6 * sum((i - sorted(times).index(us)) ** 2 for i, us in enumerate(times)) / (3 * (3**2 - 1))
    )
    assert main(["estimates", str(path), "--verbose"]) == 0
    text = capsys.readouterr().out
    assert "| gathers by Triton | 3 |" in text and "1 problems" in text
    assert main(["estimates", str(path), "--half", str(1 - estimates.half_of(found.name))]) == 0
    assert "no problem has two schedules" in capsys.readouterr().out


def test_changed_choices_are_asked_for(tmp_path: Path) -> None:
    """A product whose log puts a tile of 16 by 16 first: then, and now."""
    path = log(tmp_path / "log.csv", (6.0, 3.0, 12.0))
    lines = (
        path.read_text(encoding="utf-8").replace(",verdict", ",verdict,rank").replace(",right", ",right,1")
    )
    path.write_text(lines.replace("12.0,right,1", "12.0,right,0"), encoding="utf-8")
    assert main(["estimates", str(path), "--changed", str(tmp_path / "asked.csv")]) == 0
    then, now = schedules.read(tmp_path / "asked.csv")
    assert then["schedule"].startswith(TILES[2]) and then["problem"] == now["problem"]
    rows = read_log(path)
    compute = parse(then["problem"])
    (listed,) = shortlist(1, compute, target_of(rows), Alone(compute))
    assert now["schedule"] == str(listed.schedule)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "maps.csv").write_text("case,us\na,1\n", encoding="utf-8")
    assert main(["estimates", str(tmp_path / "maps.csv")]) != 0


def test_estimates_of_graphs_are_near_what_was_timed() -> None:
    """Of eight schedules each of 45 kernels of graphs on an H200. (Those of an image of three features,
    split into patches, were timed when their elements were loaded one by one; those of GELU, when it took
    a third more instructions.)"""
    former = ("kh=16", "gelu")
    rows = [r for r in read_log(GRAPHS) if not any(word in r["problem"] for word in former)]
    found = [*estimates.problems(rows, target_of(rows))]
    off = sorted(abs(t.off) for p in found for t in p.timed)
    assert len(off) == 357 and off[len(off) // 2] < 0.17 and sum(x > 0.7 for x in off) <= 8
    regrets = [p.regret for p in found]
    assert estimates.geometric_mean(regrets) < 1.1 and sum(r > 1.5 for r in regrets) <= 2
    assert sum(p.agreement for p in found) / len(found) > 0.28
