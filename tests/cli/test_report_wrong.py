"""``transconv report-wrong``: a wrong function becomes a report with its smallest inputs."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import transconv
from tests.graph.meant import by_meaning
from transconv.__main__ import main
from transconv.calls import stats
from transconv.graph import backend, report
from transconv.graph.lowerings.table import ROWS, NodeCall

aten = torch.ops.aten
TEXT = """
import torch

dynamic = {dynamic}
calls = [(torch.randn(4, 3), 5), (torch.arange(1.0, 9.0).view(2, 4), 5)]


def computed(x, n):
    return (x.sin() - x * n, x + 1)
"""


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    stats.forget_warnings()


def swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sub take its operands in the other order."""
    right = ROWS[aten.sub.Tensor]

    def swapped(call: NodeCall) -> Any:
        return right(replace(call, args=(*call.args[1::-1], *call.args[2:])))

    monkeypatch.setitem(ROWS, aten.sub.Tensor, swapped)


@pytest.mark.every(2)
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_wrong_function(
    dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "wrong.py", tmp_path / "out.zip"
    file.write_text(TEXT.format(dynamic=dynamic))
    with by_meaning():
        assert main(["report-wrong", str(file), "--out", str(out)]) == 0
        assert capsys.readouterr().out == "right: computed is as torch computes it\n" and not out.exists()
        swap(monkeypatch)
        assert main(["report-wrong", str(file), "--out", str(out)]) == 1
    told = capsys.readouterr().out
    assert told.startswith("wrong: result 0: the largest error is") and str(out) in told
    with zipfile.ZipFile(out) as found:
        page, function = found.read("report.md").decode(), found.read("function.py").decode()
        (tmp_path / "tensors.pt").write_bytes(found.read("tensors.pt"))
    data = torch.load(tmp_path / "tensors.pt")
    assert function.startswith("def computed(x, n):") and function in page
    x, _n = data["calls"][-1]
    assert x.numel() <= 2 and len(data["calls"]) == 2
    torch.testing.assert_close(data["ours"][0], -data["torch"][0])
    for said in (f"torch {torch.__version__.partition('+')[0]}", "compute ", "tl.store(", "transconv "):
        assert said in page


def test_a_case_that_a_graph_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    transconv.config.cpu, transconv.config.fallback = "interpret", "warn"
    swap(monkeypatch)
    with by_meaning(), pytest.warns(stats.FallbackWarning) as told:
        run = torch.compile(
            lambda x: (x.exp() - x * 2).sum(1), backend=backend, dynamic=True, options={"rest": "eager"}
        )
        run(torch.randn(2, 3))
    said = str(told[0].message)
    (case,) = tmp_path.glob("wrong/*/case.py")
    assert f"report-wrong {case} " in said and "sub.Tensor" in said
    assert case.stat().st_mode & 0o077 == 0 and "compute " in case.with_name("kernel.txt").read_text()
    assert "differs" in str(report(run))
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    with by_meaning():
        assert main(["report-wrong", str(case)]) == 1
    assert "wrong_result.zip has the report" in capsys.readouterr().out
    with zipfile.ZipFile("wrong_result.zip") as found:
        assert "torch.ops.aten.sub.Tensor" in found.read("function.py").decode()


def test_problems_and_odd_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report-wrong", "mb1ic2ih4oc2oh4kh3ph1", "dt=f32"]) == 0
    assert capsys.readouterr().out == "fwd: right\nbwd_d: right\nbwd_w: right\n"
    (tmp_path / "empty.py").write_text("x = 1\n")
    for word in (str(tmp_path / "empty.py"), "none.py", "nothing"):
        assert main(["report-wrong", word]) == 2
        assert capsys.readouterr().err.count("\n") == 1
