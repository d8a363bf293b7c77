"""Tables that grow, reports made from them, and both commands run on tiny problems."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import check, environment, report, run_tables, runner, tables
from bench.__main__ import parser
from tests import programs
from transconv.runtime import timing
from transconv.runtime.timing import Call, Clock, Make, summary
from transconv.tuning.measure import ceilings
from transconv.tuning.table import CsvTable, read

ROOT = Path(__file__).parents[2]
TINY = 'ic8ih5oc16oh5kh3ph1n"dense"\ng4ic4ih5oc4oh3kh3sh2ph1n"depthwise"\n'


def row(layer: str, direction: str, ours: float, theirs: float, **more: object) -> dict[str, str]:
    made = {
        "layer": layer,
        "kind": "dense",
        "direction": direction,
        "prop": direction,
        "problem": f"ic{len(layer)}ih8oc8oh8kh3ph1 dt=bf16 tag=nhwc",
        "dtype": "bf16",
        "epilogue": "",
        "layout": "nhwc",
        "ours_us": ours,
        "cudnn_cl_us": theirs,
        "ratio": theirs / ours,
        "spread": 0.02,
        "verdict": "right",
        "roofline_us": 1.0,
        "tflops": 10.0,
        "device": "NVIDIA_H200",
        "torch": "2",
        "triton": "3",
        "commit": "abc",
        **more,
    }
    return {c: str(made.get(c, "")) for c in runner.COLUMNS}


ROWS = [
    row("a", "fwd", 10, 20),
    row("b", "fwd", 10, 5),
    row("c", "fwd", 100, 101),
    row("d", "fwd", 10, 40, verdict="wrong", reason="3 of 9 elements are wrong"),
    row("a", "bwd_w", 10, 10),
]


def test_summary_counts_only_right_rows() -> None:
    times, counts = (t.splitlines() for t in tables.summary_table(ROWS).split("\n\n"))
    assert times[2] == "| bf16 nhwc | dense | fwd | 1.00 | 0.50 | 2.00 | 5% |"
    assert counts[2] == "| bf16 nhwc | dense | fwd | 3 | 1 | 1 | 1 | 1 |"
    assert times[3].startswith("| bf16 nhwc | dense | bwd_w | 1.00 |")
    assert counts[3].startswith("| bf16 nhwc | dense | bwd_w | 1 | 0 |")
    assert len(times) == 4  # one kind of layer: no line for all


def test_a_wide_table_is_cut() -> None:
    head = [*"kabcdefghi"]
    rows = [["1", *"23456789", "-"], ["one", *"23456789", "not run"]]
    wide = tables.markdown(head, [[*row[:-1], "x"] for row in rows], keys=1, cuts=(5,))
    assert [t.splitlines()[2] for t in wide.split("\n\n")] == [
        "| 1 | 2 | 3 | 4 | 5 |",
        "| 1 | 6 | 7 | 8 | 9 | x |",
    ]
    assert tables.markdown(head, rows, keys=1, cuts=(5,)).splitlines()[3] == (
        "| one | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 |"
    ), "it is narrow without what was not run"


def test_geometric_mean() -> None:
    assert tables.geometric_mean([]) is None
    assert tables.geometric_mean([0.5, 2, 8]) == pytest.approx(2)


def test_layer_table() -> None:
    text = tables.layer_table(ROWS)
    assert ("| a | bf16 nhwc | 10.0 / 20.0 / -, **2.00** ±2% |  | 10.0 / 10.0 / -, ~1.00 ±2% |") in text
    assert "| d | bf16 nhwc | wrong: 3 of 9 elements are wrong |" in text


@pytest.mark.slow
def test_report_from_files(tmp_path: Path) -> None:
    table = CsvTable(tmp_path / "timing.csv", runner.COLUMNS, runner.KEY)
    for one in ROWS:
        table.add(one)
    assert parser_main("report", str(table.path), "--out", str(tmp_path)) == 0
    text = (tmp_path / "report.md").read_text()
    assert "| bf16 nhwc | dense | fwd | 3 |" in text
    assert text.startswith("Measured on NVIDIA_H200, torch 2, Triton 3, commit abc.")
    for picture in ("ratio.png", "roofline.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_times_of_a_cpu_stand_beside_onednn_and_make_no_ratios(tmp_path: Path) -> None:
    table = CsvTable(tmp_path / "timing.csv", runner.COLUMNS, runner.KEY)
    table.add(row("a", "fwd", 26580, 0, device="cpu", cudnn_cl_us="", onednn_cl_us=17, ratio=""))
    assert parser_main("report", str(tmp_path / "timing.csv"), "--out", str(tmp_path)) == 0
    text = (tmp_path / "report.md").read_text()
    assert "| a | fwd | bf16 nhwc | right | 17 | - | - |" in text
    assert "cuDNN" not in text and "geomean" not in text
    assert not (tmp_path / "ratio.png").exists()


def parser_main(*words: str) -> int:
    return report.main(parser().parse_args(words))


def test_table_grows_and_remembers(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    table = CsvTable(path, ("a", "b", "verdict"), ("a",))
    table.add({"a": 1, "b": 0.1234567, "verdict": "right", "other": 5})
    table.add({"a": 2, "verdict": "timeout"})
    again = CsvTable(path, ("a", "b", "new", "verdict"), ("a",))
    assert again.has({"a": 1}) and again.has({"a": "2"}) and not again.has({"a": 3})
    assert again.drop(["timeout"], "verdict") == 1
    assert read(path) == [{"a": "1", "b": "0.123457", "new": "", "verdict": "right"}]


def test_timing_of_samples() -> None:
    found = summary([5, 1, 2, 3, 4], "events")
    assert (found.us, found.p20, found.p80) == (3, 2, 4)
    assert found.spread == pytest.approx(1 / 3)


def test_clock_takes_calls_in_turn() -> None:
    order: list[str] = []
    clock = Clock("cpu", budget_ms=0.01)

    def call(name: str) -> Make:
        return lambda index: lambda: order.append(name)

    found = clock.compare({"a": call("a"), "b": call("b")}, 8, rounds=2)
    turns = "".join(order)[6:]
    assert order[:6] == [*"aaa", *"bbb"] and set(turns) == {"a", "b"}
    assert len(re.findall("a+|b+", turns)) == 4  # each is called for a while, twice in turn
    assert found["a"].method.startswith("host, threads=")


def test_ceilings() -> None:
    found = ceilings(Clock("cpu"), size=64, copied=1 << 16)
    assert 0 < found["gemm_tflops"] < 10 and 0 < found["copy_tbs"] < 10


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return programs.run(
        ["-m", "bench", *words],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "TRANSCONV_VERIFY": "0"},
    )


@pytest.mark.slow
def test_check_command_runs_kernels_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(TINY)
    words = [
        "check",
        str(tmp_path / "list"),
        "--dtypes",
        "f16",
        "--layouts",
        "nhwc",
        "--workers",
        "1",
        "--out",
        str(tmp_path),
        "--cache",
        str(tmp_path / "cache"),
        "--memory",
        "4",
    ]
    done = run(*words, "--props", "fwd,bwd_d")
    assert done.returncode == 0, done.stderr
    assert "4 of 4 tasks ran: 4 right" in done.stdout
    first = read(tmp_path / "check.csv")
    assert all(float(r["exact_err"]) == 0 and float(r["nonzero"]) > 0.3 for r in first)
    assert 0 < max(float(r["of_bound"]) for r in first) <= 1  # 0: every element is the answer rounded once
    again = run(*words)
    assert "6 rows, 4 done before" in again.stdout
    assert read(tmp_path / "check.csv")[:4] == first
    assert "| f16 | nhwc | bwd_w | 2 | 2 | 0 | 0 | 0 |" in run_tables.check_table(
        read(tmp_path / "check.csv")
    )


@pytest.mark.slow
def test_time_command_checks_our_kernels_and_times_torch(tmp_path: Path) -> None:
    """On a CPU: our kernels are interpreted, and compared with nothing; torch's times are
    oneDNN's."""
    (tmp_path / "list").write_text(TINY)
    done = run(
        "time",
        str(tmp_path / "list"),
        "--match",
        "dense",
        "--props",
        "fwd",
        "--workers",
        "1",
        "--epilogue",
        "bias+relu",
        "--budget-ms",
        "10",
        "--out",
        str(tmp_path),
        "--cache",
        str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stderr
    (one,) = read(tmp_path / "timing.csv")
    assert one["verdict"] == "right" and float(one["max_err"]) == 0 and one["dtype"] == "f32"
    assert all(float(one[c]) > 0 for c in ("ours_us", "onednn_cl_us", "onednn_nchw_us"))
    assert not one["ratio"] and not one["cudnn_cl_us"]
    assert one["why"] == "the heuristics estimate it to be fast"
    assert "| dense | fwd | f32 nhwc | right |" in done.stdout


def test_torch_compile_has_its_own_column() -> None:
    rows = [row("a", "fwd", 10, 20, inductor_us=30), row("b", "fwd", 10, 20)]
    lines = tables.summary_table(rows).splitlines()
    assert "| best | torch.compile / ours |" in lines[0] and "| 2.00 | 3.00 |" in lines[2]


@pytest.mark.slow
def test_a_row_waits_for_torch_compile_but_is_written_without_it(tmp_path: Path) -> None:
    options = parser().parse_args(["time", "x", "--baselines", "cl,inductor"])
    table = CsvTable(tmp_path / "timing.csv", runner.COLUMNS, runner.KEY)
    job = runner.Run(table, tmp_path, options)
    rows = [dict(row(name, "fwd", 1, 1), ours_us="", cudnn_cl_us="", ratio="") for name in ("a", "bb")]
    measured = {
        "verdict": "right",
        "reason": "",
        "ours": summary([10.0], "events"),
        "cl": summary([20.0], "events"),
    }
    for one, answer in zip(
        rows, ({"inductor": summary([30.0], "events")}, {"error": "timeout"}), strict=True
    ):
        first = job._first(one)
        assert list(job._take(first, {"compile_s": 1.0})) == []
        assert first.then is not None and first.then.then is not None
        assert list(job._take(first.then, measured)) == [] and not table.has(one)
        assert list(job._take(first.then.then, answer)) and table.has(one)
    assert [r["inductor_us"] for r in table.rows] == ["30", ""]
    assert all(float(r["ratio"]) == 2 for r in table.rows)


def test_a_failed_worker_is_a_verdict() -> None:
    assert check.verdict({"error": "timeout"}) == {"verdict": "timeout", "reason": "timeout"}
    assert check.verdict({"error": "ValueError: x\n y"}) == {
        "verdict": "failed",
        "reason": "ValueError: x y",
    }
    assert check.verdict({"verdict": "right"}) == {"verdict": "right", "reason": ""}


def test_summary_of_checks() -> None:
    rows = [
        {
            "dtype": "f16",
            "layout": "nhwc",
            "prop": "fwd",
            "problem": "p",
            "verdict": v,
            "reason": r,
            "exact_err": e,
            "nonzero": "0.2",
        }
        for v, r, e in (("right", "", "0"), ("refused", "Unsupported: x", ""), ("wrong", "bad", "7"))
    ]
    found = check.summary(rows, 5)
    assert found["verdicts"] == {"right": 1, "refused": 1, "wrong": 1}
    assert found["refusals"] == {"Unsupported: x": 1}
    assert found["not right"] == ["wrong: p fwd: bad"]
    assert found["worst"]["exact_err"][0] == 0
    assert check.describe(found)[0] == "3 of 5 tasks ran: 1 right, 1 refused, 1 wrong"


def test_models_and_calls_without_a_number_say_why() -> None:
    line = {
        "model": "net",
        "precision": "bf16",
        "layout": "nhwc",
        "what": "forward",
        "unit": "ms",
        "torch": "2",
        "transconv": "1",
        "ratio": "2",
        "error": "",
    }
    lost = {**line, "what": "compiled forward", "torch": "", "transconv": "", "error": "out of budget"}
    timed = line | {"what": "forward", "unit": "ms", "torch_gpu_ms": "3", "transconv_gpu_ms": "2"}
    assert run_tables.networks_table([timed]).splitlines()[2].endswith("| 3 → 2 (1.50) |")
    assert run_tables.networks_table([line, lost, {**line, "layout": "nchw"}]).splitlines()[2:] == [
        "| net | bf16 | nchw | 2 → 1 (2.00) | not run |",
        "| net | bf16 | nhwc | 2 → 1 (2.00) | out of budget |",
    ]
    calls = [
        {"case": "c", "mode": m, "side": s, "median_us": "4", "ratio": "1"}
        for m, s in (("grad", "torch"), ("grad", "transconv"), ("no grad", "torch"))
    ]
    assert run_tables.overhead_table(calls).splitlines()[2] == "| c | 4.0 → 4.0 (1.00) | not run |"


def test_a_call_that_waited_for_a_core_is_not_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of every row of calls takes 24 ms, all others 9 us."""
    now = [0.0]
    turns = {"ours": 0, "theirs": 0}

    def make(name: str) -> Callable[[int], Call]:
        def call() -> None:
            for other in turns.keys() - {name}:
                turns[other] = 0
            now[0] += 9e-6 if turns[name] else 24e-3
            turns[name] += 1

        return lambda index: call

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    found = timing.Clock("cpu", 120).compare({name: make(name) for name in turns}, 1000)
    assert [round(t.us) for t in found.values()] == [9, 9]


def test_calls_that_are_compared_are_timed_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of 27 us beside one of 24 us is captured, too; one of a millisecond, or beside long ones, is
    not; and where one cannot be captured, none is."""
    clock = timing.Clock("cpu", 1)
    monkeypatch.setattr(clock, "gpu", True)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(clock, "_host", lambda call, times: 0.0)
    monkeypatch.setattr(clock, "_events", lambda call, times: [call()] * times)

    def graph(make: Callable[[int], Call], footprint: int, us: float) -> Callable[[float], list[float]]:
        if us == 26.0:
            raise RuntimeError("this call cannot be captured")
        return lambda budget_ms: [us]

    monkeypatch.setattr(clock, "_graph", graph)

    def methods(*us: float) -> list[str]:
        made = clock.compare({str(n): (lambda index, n=n: lambda: n) for n in us}, 1000)
        assert [t.us for t in made.values()] == [*us]
        return [t.method for t in made.values()]

    assert methods(24.0, 27.0, 1000.0) == ["graph", "graph", "events"]
    assert methods(27.0, 1000.0) == ["events", "events"]
    assert methods(24.0, 26.0) == ["events", "events"]


def test_threads_are_those_that_may_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7}, raising=False)
    assert environment.threads() == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert environment.threads() == "2"
