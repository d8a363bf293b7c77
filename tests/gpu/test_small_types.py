"""Trials of 8-bit types that were wrong on a GPU, or not compiled, are right there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import quotients
from tests.gpu import cases as c
from transconv.verify.corpus import corpus
from transconv.verify.fuzz_trial import Trial

pytestmark = pytest.mark.gpu


def test_what_failed_once(tmp_path: Path) -> None:
    """All of the corpus, in the workers of a fuzzer."""
    lines = [str(e.trial) for e in corpus() if isinstance(e.trial, Trial)
             and any(t.bits == 8 for t in e.trial.problem.dtypes)]
    assert len(lines) >= 8
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(lines))
    words = ["--n", "0", "--no-corpus", "--jobs", "2", "--shrink", "0", "--file", str(file)]
    made = subprocess.run([sys.executable, "-m", "transconv", "fuzz", *words,
                           *["--interpreter"] * (c.DEVICE == "cpu")], capture_output=True, text=True,
                          timeout=300)
    assert made.returncode == 0, made.stdout + made.stderr


def test_quotients_of_any_bits_are_rounded_once() -> None:
    """By the chip's own arithmetic, also by divisors that are not normal numbers."""
    large, wrong = quotients.wrong(1 << 22, 3, c.DEVICE)
    assert wrong == 0 and large > 1 << 21
