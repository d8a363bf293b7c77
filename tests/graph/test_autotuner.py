"""``mode="max-autotune"``: which kernels are timed, and that the next plans take what was found."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import transconv
from transconv.compute import Alone, Compute, parse
from transconv.functional.calls import compiled_launch
from transconv.graph import report, torch_compile
from transconv.runtime import PlanRequest, compiler
from transconv.selection import shortlist, tuning_db
from transconv.support import Cache, knobs
from transconv.target import TARGETS

SM90 = TARGETS["sm_90"]
SECOND = torch.device("cuda", 1)
TEXT = """compute product
    tensor A f16 [m={m}, k=64]
    tensor B f16 [k=64, n=64]
    axes   m={m} n=64 k=64
    read   a = A[m, k]
    read   b = B[k, n]
    let    s = sum(a*b; k)
    store  C[m, n] = relu(s)"""
LARGE, SMALL = (Alone(parse(TEXT.format(m=m))) for m in (1 << 18, 64))


@pytest.fixture(autouse=True)
def alone(nothing_known: None) -> None:
    """No rows and plans of other tests."""


def asked(*workloads: Alone) -> list[PlanRequest]:
    return [PlanRequest(w, SM90) for w in workloads]


def test_kernels_that_take_most_of_a_call_are_timed() -> None:
    found = torch_compile.costly(asked(SMALL, LARGE, LARGE), SM90)
    assert [(k.compute, k.times) for k in found] == [(LARGE.compute, 2)]
    every = torch_compile.costly(asked(*[SMALL] * 40, LARGE), SM90)
    assert {k.compute: k.times for k in every} == {LARGE.compute: 1, SMALL.compute: 40}


def test_the_next_plans_take_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    best, second = shortlist(2, LARGE.compute, SM90, LARGE)

    def tuned(computations: Sequence[Compute], device: torch.device, seconds: float) -> str:
        assert list(computations) == [LARGE.compute] and device is SECOND and seconds == 7
        tuning_db.remember([tuning_db.make(LARGE, SM90, str(second.schedule), 3.0, 8)])
        return ""

    monkeypatch.setattr(torch_compile, "_tuned", tuned)
    assert compiler.plan(LARGE, SM90, None, False, compiler.Plan).schedule == best.schedule
    monkeypatch.setattr(compiled_launch, "_launches", launches := Cache("launches"))
    launches["made"] = None  # by another graph of this process, with the schedule of before
    assert "1 of 1 kernels tuned" in torch_compile.autotune(asked(LARGE), SM90, SECOND, 7) and not launches
    assert compiler.plan(LARGE, SM90, None, False, compiler.Plan).schedule == second.schedule
    monkeypatch.setattr(torch_compile, "_tuned", lambda *_: pytest.fail("it is known"))
    assert "is tuned" in torch_compile.autotune(asked(LARGE), SM90, SECOND, 7)


def test_what_went_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compile, "_tuned", lambda *_: "tuning failed: no memory")
    said = torch_compile.autotune(asked(LARGE), SM90, SECOND, 7)
    assert "0 of 1 kernels tuned" in said and said.endswith("no memory")


@pytest.mark.parametrize(
    ("device", "variables", "seen"),
    [
        ("cuda:0", {}, "0"),
        ("cuda:1", {}, "1"),
        ("cuda:1", {"CUDA_VISIBLE_DEVICES": "5, 3"}, "3"),
        ("cuda:1", {"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-1a2b3c4d"}, "GPU-1a2b3c4d"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "5,3,7"}, "7"),
    ],
)
def test_trials_run_on_the_gpu_of_the_graph(
    monkeypatch: pytest.MonkeyPatch, device: str, variables: dict[str, str], seen: str
) -> None:
    """The process of the trials sees that GPU alone, as its first one."""
    handed: list[dict[str, str]] = []

    def run(words: list[str], env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        handed.append(env)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(subprocess, "run", run)
    torch_compile.autotune(asked(LARGE), SM90, torch.device(device), 7)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in handed] == [seen]


@pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
def test_the_mode_of_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transconv.config, "cpu", "interpret")
    run = torch.compile(torch.sin, backend="transconv", mode="max-autotune-no-cudagraphs")
    x = torch.linspace(-1, 1, 9)
    torch.testing.assert_close(run(x), x.sin())
    assert "nothing is timed without a GPU" in str(report(run))
    with pytest.raises(Exception, match="seconds, 0 or more"):
        torch.compile(torch.cos, backend="transconv", options={"tune": -1})(x)


@pytest.mark.slow
def test_trials_run_in_a_process(tmp_path: Path) -> None:
    """Without a GPU in Triton's interpreter, whose rows are for it alone."""
    assert torch_compile._tuned([SMALL.compute], torch.device("cpu"), 60) == ""
    assert any(r.problem == SMALL.text for r in tuning_db.all_of_user())
