"""The ablation of passes and schedule words: its variants, their rows and the tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import ablation, ablation_graphs, ablation_table, trials
from bench.__main__ import main
from transconv.conv import ConvWorkload
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.passes.pipeline import PIPELINE
from transconv.schedule.legality import why_not
from transconv.schedule.schedule import Schedule
from transconv.selection import choice
from transconv.target.records import TARGETS
from transconv.tuning.session import TuningJob, log_of, read_log
from transconv.tuning.table import read

SM90 = TARGETS["sm_90"]
DENSE = ConvProblem.parse("mb128ic64ih56oc64oh56kh3ph1 dt=bf16 tag=nhwc")
BOXES = "mb:4 oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box | c=box swap=1 programs=132 stages=4 warps=4"


def test_variants_switch_every_pass_and_change_one_word() -> None:
    base = Schedule.parse(BOXES)
    found = ablation.variants(TuningJob(ConvWorkload(DENSE, Prop.FWD)), base, SM90)
    passes = {v.name[1:]: v for v in found if v.what == "pass"}
    assert list(passes) == [p.name for p in PIPELINE if p.optional]
    assert all(
        passes[p.name].passes == f"{'-' if p.default else '+'}{p.name}" for p in PIPELINE if p.optional
    )
    words = {v.name: v for v in found if v.what == "word"}
    assert {
        "a=gather b=gather",
        "c=gather",
        "programs=0",
        "swap=0",
        "stages-1",
        "split_k=2",
        "unroll=1",
    } <= set(words)
    assert words["programs=0"].schedule.programs == 0 and not words["programs=0"].refused
    gathered = words["a=gather b=gather"]
    assert gathered.schedule.a == gathered.schedule.b == gathered.schedule.c == "gather"
    (compute,) = computes(DENSE, Prop.FWD)
    for v in words.values():
        assert (why_not(v.schedule, compute, SM90) is None) == (not v.refused), v
        assert v.schedule != base
    ranked = [c.schedule for c in choice.ranked(compute, SM90)]
    assert gathered.schedule in ranked  # with a tile that suits gathering


def row(variant: str, earns: float | str, what: str = "pass", **more: str) -> dict[str, str]:
    made = {
        "layer": "l",
        "direction": "fwd",
        "what": what,
        "variant": variant,
        "config": "c",
        "base": "a | b",
        "base_us": "10",
        "earns": str(earns),
        "spread": "0.02",
        "reason": "",
        "verdict": "right",
        "device": "d",
        "torch": "t",
        "triton": "3",
        "commit": "x",
        **more,
    }
    return {c: made.get(c, "") for c in ablation.COLUMNS}


def test_the_document_tells_what_is_nothing() -> None:
    rows = [
        row("-cse", 1.0, reason=ablation.SAME),
        row("-hoist", 1.5),
        row("-hoist", 1.01, direction="bwd_w"),
        row("programs=0", 0.9, "word"),
        row("swap=0", "", "word", verdict="refused", reason="a | b"),
        row("unroll=1", "", "word", verdict="wrong", reason="7 elements"),
    ]
    text = ablation_table.document(rows)
    assert "| `-hoist` | 1.500 | - | 1.010 | 1.01 | 1.50 | 0 | 1 | 1 | 0 | 0 |" in text
    assert "| `-cse` | 1.000 | - | - | 1.00 | 1.00 | 1 | 0 | 0 | 0 | 0 |" in text
    assert "| `swap=0` | - | - | - | - | - | 0 | 0 | 0 | 1 | 0 |" in text
    assert "| `unroll=1` | - | - | - | - | - | 0 | 0 | 0 | 0 | 1 wrong |" in text
    assert text.index("`-hoist`") < text.index("`-cse`")  # in the order of the pipeline
    assert "| l | fwd | 10.0 | `a / b` | `-hoist` 1.50, `programs=0` 0.90 |" in text
    assert "| l | bwd_w | 10.0 | `a / b` | nothing |" in text
    assert "Nothing was measured" in ablation_table.document([])


@pytest.mark.slow
def test_the_command_in_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")
    wanted = {"-lets", "-cse", "group_m=1"}
    (tmp_path / "list").write_text("mb1ic16ih4oc16oh4kh3ph1\n")
    words = [
        "ablation",
        str(tmp_path / "list"),
        "--dtype",
        "f16",
        "--props",
        "fwd",
        "--variants",
        "^(-lets|-cse|group_m=1)$",
        "--workers",
        "1",
        "--builders",
        "2",
        "--budget-ms",
        "1",
        "--out",
        str(tmp_path),
        "--cache",
        str(tmp_path / "cache"),
        "--docs",
        str(tmp_path / "docs" / "ablation.md"),
    ]
    assert main(words) == 0
    rows = read(tmp_path / "ablation.csv")
    assert {r["variant"] for r in rows} == wanted
    assert {r["verdict"] for r in rows} == {"right"}
    assert all(float(r["base_us"]) > 0 for r in rows if r["reason"] != ablation.SAME)
    text = (tmp_path / "docs" / "ablation.md").read_text()
    assert text == (tmp_path / "ablation.md").read_text() and "| `-lets` |" in text
    assert main(words) == 0 and read(tmp_path / "ablation.csv") == rows


# -- trials ----------------------------------------------------------------------------------------


def log(path: Path) -> list[dict[str, str]]:
    """Two problems, ten of the ranking and two around the best; the fourth of the ranking is 10%
    better than the first, an explored one 20%."""
    table = log_of(path)
    for batch in (128, 64):
        p = ConvProblem.parse(f"mb{batch}ic64ih56oc64oh56kh3ph1 dt=bf16 tag=nhwc")
        (compute,) = computes(p, Prop.FWD)
        ranked = [c.schedule for c in choice.ranked(compute, trials_target())]
        for i, schedule in enumerate(ranked[:12]):
            us = {3: 90.0, 10: 80.0}.get(i, 100.0 + i)
            table.add(
                {
                    "problem": str(p),
                    "direction": "fwd",
                    "layer_direction": "fwd",
                    "schedule": str(schedule),
                    "us": us,
                    "verdict": "right",
                    "origin": "neighbour" if i > 9 else "ranking",
                    "lower_s": 0.1 + i,
                    "triton_s": 1.0,
                    "device": "d",
                    "torch": "t",
                    "triton": "3",
                }
            )
        table.add(
            {
                "problem": str(p),
                "direction": "fwd",
                "layer_direction": "fwd",
                "schedule": str(ranked[20]),
                "us": 1.0,
                "verdict": "wrong",
            }
        )
    return read_log(path)


def trials_target() -> object:
    from dataclasses import replace

    return replace(SM90, bandwidth_gbs=4800)


def test_shares_of_the_best(tmp_path: Path) -> None:
    found = trials.collect(log(tmp_path / "log.csv"), trials_target())  # type: ignore[arg-type]
    assert [len(t.times) for t in found] == [12, 12]  # trials with wrong results do not count
    assert [found[0].share(n) for n in (1, 3, 4, 16)] == pytest.approx([0.8, 0.8, 80 / 90, 1.0])
    assert "| dense | fwd | 2 | 12 | 0.800 (0.80) | 0.889 (0.89) | 0.889 (0.89) | - |" in trials.shares(
        found
    )
    assert "1.125 times as fast" in trials.explored(found)
    assert "worst 0.80" in trials.left_out(found, trials_target())  # type: ignore[arg-type]


def test_trials_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log(tmp_path / "log.csv")
    assert main(["trials", str(tmp_path / "log.csv"), "--docs", str(tmp_path / "t.md")]) == 0
    text = capsys.readouterr().out
    assert (tmp_path / "t.md").read_text() in text
    assert "1.00 / 1.00 / 1.00 |" in text and "from `log.csv`" in text


def test_whole_models_are_beside_their_base() -> None:
    rows = [
        {"model": model, "variant": variant, "gpu_ms": ms}
        for model, variant, ms in (
            ("a", "as chosen", "2.0"),
            ("a", "-cse", "3.0"),
            ("b", "as chosen", "1.0"),
            ("b", "-cse", ""),
        )
    ]
    lines = [
        [c.strip() for c in line.strip("|").split("|")]
        for line in ablation_graphs.document(rows).splitlines()
    ]
    assert lines[0] == ["variant", "mean", "a", "b"] and lines[2][2:] == ["2.00", "1.00"]
    assert lines[3] == ["`-cse`", "1.500", "1.50", "-"]
    assert "**Whole models**" in (told := ablation_table.document([row("-cse", 1.0)], rows))
    assert "noise" not in told.split("**Whole models**")[1]
    idle = row("-cse", 1.0) | {"reason": "same text"}
    assert "(`-cse`) show the noise: up to 0.50" in ablation_table.document([idle], rows)
    assert ablation_graphs.over_base(rows, "-cse") == {"a": 1.5}
    assert ablation_graphs.variants(["unroll", "cse"]) == ["as chosen", "-unroll", "-cse"]
