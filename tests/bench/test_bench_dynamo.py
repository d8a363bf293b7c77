"""``python -m bench dynamo``: which models are run, what is counted, and a script in its processes."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import pytest

from bench import dynamo
from bench.dynamo_table import dynamo_table, lost, models_table
from transconv.tuning.table import read

COMMON = """
import csv, sys, time
def speedup_experiment(args, words):
    write(words, ["dev", "name", "batch_size", "speedup", "abs_latency"], 2.0, 5.0)
def write(words, head, *values):
    with open(words[words.index("--output") + 1], "w") as file:
        csv.writer(file).writerows([head, ["cpu", words[words.index("--only") + 1], 2, *values]])
"""
SUITE = """
import sys, torch, common, transformers
def huggingface_main():
    words = sys.argv[1:]
    model = transformers.AutoConfig.from_pretrained("t5-small")
    name = "inductor" if "--inductor" in words else words[-1].split("=")[1]
    if "--performance" in words:
        return common.speedup_experiment(None, words)
    want = model(torch.ones(3, 4))
    torch._dynamo.reset()
    if name == "inductor":
        name = "eager"
    right = torch.allclose(torch.compile(model, backend=name)(torch.ones(3, 4)), want)
    print("it ran by", name)
    common.write(words, ["dev", "name", "batch_size", "accuracy"], "pass" if right else "fail_accuracy")
"""
MODELS = """
import torch
class T5Config(torch.nn.Linear):
    def __init__(self): super().__init__(4, 5)
class AutoConfig: pass
"""


def run(out: Path, folder: Path, *words: str) -> int:
    parser = ArgumentParser()
    parser.add_argument("--out", default=str(out))
    dynamo.arguments(parser)
    asked = parser.parse_args(["--device", "cpu", "--pytorch", str(folder), "--dtype", "float32", *words])
    return dynamo.main(asked)


def runner(folder: Path) -> Path:
    """A folder with a runner of one suite, whose models are two of its list of four."""
    for name, text in {
        "common.py": COMMON,
        "huggingface.py": SUITE,
        "transformers.py": MODELS,
        "huggingface_models_list.txt": "T5Small,8\\nReformer,4\\nmeta-llama/Llama-3.2-1B,8\\nBert,2\\n",
        "huggingface.yaml": "skip:\\n  all:\\n    - Reformer\\n",
    }.items():
        (folder / name).write_text(text.replace("\\n", "\n") if "list" in name or "yaml" in name else text)
    return folder


def test_models_of_a_list(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    assert dynamo.listed(runner(tmp_path), "huggingface") == ["T5Small", "Bert"]
    with pytest.raises(ValueError, match=r"--models: resnet50 in no list of huggingface"):
        run(tmp_path / "out", tmp_path, "--suites", "huggingface", "--models", "resnet50")
    with pytest.raises(ValueError, match=r"no common\.py; expected benchmarks/dynamo of PyTorch"):
        run(tmp_path / "out", tmp_path / "elsewhere")


@pytest.mark.slow
def test_a_script_in_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    words = ("--suites", "huggingface", "--models", "T5Small", "--together", "2")
    assert run(tmp_path / "out", runner(tmp_path), *words) == 0
    rows = {(r["mode"], r["side"]): r for r in read(tmp_path / "out" / "dynamo.csv")}
    assert len(rows) == 4 and rows["accuracy", "inductor"]["status"] == "pass"
    ours = rows["accuracy", "transconv"]
    assert (ours["status"], ours["ours"], ours["regions"], ours["note"]) == ("pass", "1", "0", "")
    assert rows["performance", "transconv"]["speedup"] == "2.0"
    logs = tmp_path / "out" / "dynamo_logs"
    assert any("it ran by transconv" in log.read_text() for log in logs.glob("*.log"))
    capsys.readouterr()
    assert run(tmp_path / "out", tmp_path, *words) == 0, "a repeated run skips what it has"
    assert capsys.readouterr().out.startswith("| suite")


def row(side: str, mode: str, **more: str) -> dict[str, str]:
    empty = dict.fromkeys(dynamo.COLUMNS, "")
    about = {"suite": "timm", "model": "resnet", "phase": "inference", "dtype": "amp"}
    return empty | about | {"side": side, "mode": mode} | more


def test_what_is_counted() -> None:
    rows = [
        row("transconv", "accuracy", status="fail_accuracy"),
        row("inductor", "accuracy", status="pass"),
        row("transconv", "accuracy", model="vit", status="pass"),
        row("inductor", "accuracy", model="vit", error="timeout"),
        row("transconv", "accuracy", model="broken", status="eager_1st_run_fail"),
        row("inductor", "accuracy", model="broken", status="eager_1st_run_fail"),
        row("transconv", "performance", model="vit", status="timed", speedup="4", compile_s="-1"),
        row("inductor", "performance", model="vit", status="timed", speedup="2", compile_s="8"),
        row("transconv", "performance", model="fast", status="timed", speedup="9"),
    ]
    assert [r["model"] for r in lost(rows)] == ["resnet"]
    totals = dynamo_table(rows).splitlines()[-1]
    assert totals == "| timm | inference amp | 1 of 2 / 1 of 2 | 1 | 4.00 / 2.00 | - / 8.00 | - / - |"
    first, *_, last = models_table(rows).splitlines()[2:]
    assert first == "| vit | timm | inference amp | pass | timeout | 4.00 | 2.00 | 2.00 |"
    assert last == "| fast | timm | inference amp | not run | not run | 9.00 | - | - |"
