"""Drawn computations: after every pass their kernels store what their steps mean."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verify import planted
from transconv.__main__ import main
from transconv.compute import parse
from transconv.verify import fuzz_compute
from transconv.verify.fuzz_compute import ComputeTrial, draw_trial, fuzz_computes

ROOT = Path(__file__).parents[2]


def test_trials(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m transconv fuzz --computes` runs more."""
    assert fuzz_computes(20, 3) == 0, capsys.readouterr().out


def test_what_is_drawn() -> None:
    """Every kind, and everything that a text can say about where an element lies."""
    texts = [draw_trial("kinds", n).text for n in range(60)]
    assert all(parse(t) for t in texts)
    whole = "\n".join(texts)
    for said in ("compute product", "compute chain", "compute rows", "reduced_max", "reduced_min",
                 "reduced_prod", "reduced_sum", " else ", " where ", " // ", "strides(", "f16", "bf16",
                 "f32", "store D", "math=ieee", "k0 k1)"):
        assert said in whole, said


def test_a_trial_is_the_same_in_another_process() -> None:
    code = ("from transconv.verify.fuzz_compute import draw_trial;"
            "print([draw_trial('tests', n) for n in range(6)])")
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
                          check=True, env={**os.environ, "PYTHONHASHSEED": "7"}).stdout
    assert told.strip() == str([draw_trial("tests", n) for n in range(6)])


def test_a_bug_is_found_and_repeated(capsys: pytest.CaptureFixture[str],
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    trial = ComputeTrial("compute rows\n axes m=21 k=37\n read x = X[m, k]\n store Y[m] = sum(x; k)",
                         "sm_90", "m:8 k:16 | fma")
    monkeypatch.setattr(fuzz_compute, "draw_trial", lambda seed, number: trial)
    assert main(["fuzz", "--computes", "1"]) == 0
    bug = next(b for b in planted.PASSES if b.what == "the last program is not started")
    with planted.planted_pass(bug):
        assert main(["fuzz", "--computes", "1"]) == 1
        told = capsys.readouterr().out
        assert "0: after gridwise: Y[16] is nan" in told and trial.text in told
        line = told[told.index("python -m transconv check"):told.rindex("1 computations")]
        assert main(shlex.split(line)[3:]) == 1
    assert "WRONG  after gridwise" in capsys.readouterr().out


def test_what_is_behind_a_sum_may_make_its_error_larger() -> None:
    """An operation that is steeper than 1, of a product of tf32 that is nearly all there is."""
    text = ("compute product\n tensor X f32 [64, 1]\n tensor W f32 [1, 48]\n axes m=64 n=48 k=1\n"
            "read x = X[m, k]\n read w = W[k, n]\n let s = sum(x*w; k)\n"
            "store C[m, n] = hardswish(s)*2 - s")
    assert ComputeTrial(text, "sm_90", "m:16 n:16 k:16 | mma | stages=2 warps=2").problem() == ""
