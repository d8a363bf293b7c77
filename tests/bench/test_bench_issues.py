"""``python -m bench issues``: torch accepts every case, wrong results are found, a side that hangs or
crashes leaves the other side's row, and the tables show all of it."""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench import issue_sides, issues, pages, report
from bench.__main__ import main
from bench.issue_cases import CASES, IssueCase
from bench.issue_table import cases_table, issues_table
from transconv.support import knobs
from transconv.verify.machine import Task

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "issues.md"
BY_NAME = {c.name: c for c in CASES}
interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """torch's own test tools, which other files import, freeze the switches that a measurement sets."""
    with getattr(torch.backends, "__allow_nonbracketed_mutation")():
        yield


def test_there_are_many_threads_and_each_is_named_once() -> None:
    assert len({c.issue for c in CASES}) >= 15 and len(BY_NAME) == len(CASES)
    for case in CASES:
        assert re.fullmatch(r"https://github.com/[\w-]+/[\w-]+/issues/\d+", case.url)
        assert case.matter.endswith(".") and "|" not in case.matter


@pytest.mark.every(4)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cases_are_calls_that_torch_takes(case: IssueCase) -> None:
    small = case.shrunk()
    for c in (case, small):
        shape = c.shape()
        assert len(shape) == len(c.x) == len(c.w)
        for layout in c.layouts:
            if (problem := c.problem(layout)) is not None:
                assert str(problem) and problem.shapes["wei"] == c.w
                assert problem.shapes["src" if not c.transposed else "dst"] == c.x
                assert problem.shapes["dst" if not c.transposed else "src"] == shape
    assert small.bytes() < 1 << 17 and prod(small.w) < 1 << 13
    assert (small.issue, small.dtype, small.direction) == (case.issue, case.dtype, case.direction)
    assert small.options.keys() == case.options.keys()


@interpreted
@pytest.mark.parametrize("name", ["pytorch#41382 fwd", "pytorch#22741 bwd_w", "pytorch#19599 fwd"])
def test_ours_and_torch_are_right(name: str) -> None:
    found = issue_sides.measure(name, True, ["ours.nchw", "torch.nchw"])
    assert not found["left"] and {s["verdict"] for s in found["sides"].values()} == {"right"}
    ours = found["sides"]["ours.nchw"]
    assert ours["err"] < 1e-3 and bool(ours["reason"]) == (name == "pytorch#19599 fwd")
    assert "|" in ours["schedule"] or ours["reason"] == "computed by torch"


def test_wrong_and_raising_sides_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(*given: Any, **options: Any) -> torch.Tensor:
        made = F.conv2d(*given, **options)
        made[..., -1] *= 1.5
        return made

    case = "pytorch#18631 fwd"
    monkeypatch.setitem(issue_sides.HOMES, "torch", SimpleNamespace(conv2d=off))
    side = issue_sides.measure(case, True, ["torch.nhwc"])["sides"]["torch.nhwc"]
    assert side["verdict"] == "wrong" and "of the largest element" in side["reason"]

    def full(*given: Any, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 161 GiB.\nmore")

    monkeypatch.setitem(issue_sides.HOMES, "torch", SimpleNamespace(conv2d=full))
    found = issue_sides.measure(case, True, ["torch.nchw", "torch.nhwc"])
    assert not found["left"] and "fatal" not in found
    assert found["sides"]["torch.nchw"]["verdict"] == "raises"
    assert found["sides"]["torch.nchw"]["reason"].endswith("allocate 161 GiB.")

    def fault(*given: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(issue_sides.HOMES, "torch", SimpleNamespace(conv2d=fault))
    found = issue_sides.measure(case, True, ["torch.nchw", "torch.nhwc"])
    assert found["fatal"] and found["left"] == ["torch.nhwc"]


def test_a_nan_is_wrong() -> None:
    case = BY_NAME["pytorch#18631 fwd"].shrunk()
    x, w = issue_sides.operands(case, "nchw", "cpu")
    y = F.conv2d(x, w, **case.options)
    assert issue_sides.error(case, "nchw", [x, w], None, [y]) < 1e-6
    assert issue_sides.error(case, "nchw", [x, w], None, [y.fill_(float("nan"))]) == float("inf")
    assert issue_sides.error(case, "nchw", [x, w], None, [y[..., 1:]]) == float("inf")


# -- tasks and rows --------------------------------------------------------------------------------


def run_of(case: IssueCase, on_cpu: bool = False) -> issues.Run:
    options = argparse.Namespace(small=False, limit=45, compile_limit=40, workers=1, cache="")
    return issues.Run([case], options, on_cpu)


def test_what_crashes_costs_its_own_side() -> None:
    case = BY_NAME["pytorch#117736 fwd"]
    run = run_of(case)
    first = run.first(case)
    chain = []
    task: Task | None = first
    while task is not None:
        chain.append(task.group)
        task = task.then
    assert chain == ["compile", "compile", "measure"]  # both memory orders, then all sides
    assert run_of(case, on_cpu=True).first(case).group == "measure"

    all_sides = issues.sides_of(case)
    again = list(run.after(case, run.measuring(case, all_sides), {"error": "crash"}))
    assert [t.payload["sides"] for t in again] == [[s] for s in all_sides]
    assert not run.found[case.name]
    assert not list(run.after(case, again[0], {"error": "timeout"}))
    assert run.found[case.name] == {"ours.nchw": {"verdict": "timeout", "reason": "timeout"}}
    (left,) = run.after(
        case,
        again[1],
        {
            "sides": {"ours.nhwc": {"verdict": "raises", "reason": "x"}},
            "left": ["torch.nchw"],
            "fatal": True,
        },
    )
    assert left.payload["sides"] == ["torch.nchw"]
    assert not list(run.after(case, left, {"error": "out of budget"}))
    assert len(run.found[case.name]) == 2


def side(verdict: str, us: float = 0.0, **more: Any) -> dict[str, Any]:
    timed = {"us": us, "spread": 0.01, "peak_mb": 100.0, "err": 1e-3} if us else {}
    return {"verdict": verdict, "reason": "" if verdict == "right" else f"{verdict}!", **timed, **more}


def test_the_faster_right_order_counts() -> None:
    case = BY_NAME["pytorch#117736 fwd"]
    sides = {
        "ours.nchw": side("right", 30.0),
        "ours.nhwc": side("right", 20.0, schedule="oc:64 | mma"),
        "torch.nchw": side("wrong"),
        "torch.nhwc": side("right", 50.0),
    }
    made = issues.row(case, sides)
    assert (made["our_us"], made["our_layout"], made["our_verdict"]) == (20.0, "nhwc", "right")
    assert made["torch_verdict"] == "right in nhwc, wrong in nchw" and made["torch_reason"] == "wrong!"
    assert made["ratio"] == 2.5 and made["schedule"] == "oc:64 | mma"
    lost = issues.row(case, {s: side("raises") for s in sides})
    assert "ratio" not in lost and lost["our_verdict"] == "raises"


def test_tables_and_report(tmp_path: Path) -> None:
    case = BY_NAME["pytorch#117736 fwd"]
    sides = {
        "ours.nchw": side("right", 30.0),
        "ours.nhwc": side("right", 20.0),
        "torch.nchw": side("raises"),
        "torch.nhwc": side("raises"),
    }
    other = {**sides, "torch.nchw": side("right", 40.0), "torch.nhwc": side("right", 60.0)}
    about = {"small": 0, "device": "NVIDIA_H200", "torch": "2.11", "triton": "3.6", "commit": "abc"}
    path = tmp_path / f"{issues.short('NVIDIA_H200')}_issues.csv"
    table = issues.CsvTable(path, issues.COLUMNS, issues.KEY)
    for made in (issues.row(case, sides), issues.row(BY_NAME["pytorch#18631 fwd"], other)):
        table.add(made | about)
    lines = issues_table(table.rows).splitlines()
    assert lines[2].endswith("fwd | 20 us (nhwc) | raises | - | 1e-03 / - | 100 / - |")
    assert lines[3].endswith("fwd | 20 us (nhwc) | 40 us (nchw) | 2.00 | 1e-03 / 1e-03 | 100 / 100 |")
    assert lines[4].startswith("| geometric mean of 1 | ") and "| 2.00 |" in lines[4]
    assert "ours right, torch raises" in issues.line(table.rows[0])
    assert report.kind_of(table.rows[0]) == "issues"

    assert main(["report", str(path), "--out", str(tmp_path)]) == 0
    assert "| 20 us (nhwc) | raises |" in (tmp_path / "report.md").read_text()


def block(name: str) -> str:
    found = re.search(f"<!-- table:{name} -->\n(.*?)<!-- end:{name} -->", PAGE.read_text(), re.DOTALL)
    assert found, name
    return found.group(1).strip()


def test_the_page(request: pytest.FixtureRequest) -> None:
    """``pytest tests/bench/test_bench_issues.py --update-golden`` rewrites the list of cases."""
    if request.config.getoption("--update-golden"):
        PAGE.write_text(pages.fill_markers(PAGE.read_text(), {"cases": cases_table()}))
    assert block("cases") == cases_table(), "the list is stale; --update-golden if that is meant"


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.slow
@interpreted
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "issues",
        "--small",
        "--only",
        "pytorch#44109",
        "--out",
        str(tmp_path),
        "--cache",
        str(tmp_path),
    ]
    assert main(words) == 0
    (row,) = csv.DictReader((tmp_path / "cpu_issues.csv").open())
    assert row["our_verdict"] == row["torch_verdict"] == "right" and row["small"] == "1"
    assert row["url"].endswith("/pytorch/pytorch/issues/44109") and not row["our_us"]
    assert "ours right, torch right" in capsys.readouterr().out
    assert main(words) == 0  # nothing is left to do
    assert "1 cases, 1 done before" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")
def test_without_a_gpu_only_small_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["issues", "--out", str(tmp_path)]) == 2
    assert "--small has the cases" in capsys.readouterr().err
