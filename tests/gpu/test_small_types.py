"""Trials of 8-bit types that were wrong on a GPU, or not compiled, are right there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import quotients
from tests.functional.test_computation import check_reductions_of_bytes
from tests.gpu import cases as c
from transconv.conv import ConvProblem, Prop
from transconv.verify.case import ProblemCase
from transconv.verify.fuzz.conv_trial import ConvTrial
from transconv.verify.fuzz.main_loop import corpus

pytestmark = pytest.mark.gpu


def test_what_failed_once(tmp_path: Path) -> None:
    """All of the corpus, in the workers of a fuzzer."""
    lines = [
        str(e.trial)
        for e in corpus()
        if isinstance(e.trial, ConvTrial) and any(t.bits == 8 for t in e.trial.problem.dtypes)
    ]
    assert len(lines) >= 8
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(lines))
    words = ["--n", "0", "--no-corpus", "--jobs", "2", "--shrink", "0", "--file", str(file)]
    made = subprocess.run(
        [sys.executable, "-m", "transconv", "fuzz", *words, *["--interpreter"] * (c.DEVICE == "cpu")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert made.returncode == 0, made.stdout + made.stderr


TWO = [
    ("mb2ic64ih8oc64oh8kh3ph1", "kh.kw.ic:128 oc:64 mb:2 oh:8 ow:8 | swap=1 split_k=1 stages=4"),
    ("mb3ic64ih16oc64oh16kh3ph1", "kh.kw.ic:128 oc:64 oh:8 ow:16 | swap=1 split_k=2 stages=3"),
    ("mb5ic128ih8oc128oh8kh3ph1", "ic:128 oc:128 oh:8 ow:8 | swap=1 programs=4 stages=3"),
    ("g8mb4ic64ih16oc64oh16kh3ph1", "kh.kw.ic:128 oc:64 mb:2 oh:8 ow:8 | merge=8 swap=1 stages=2"),
]


@pytest.mark.parametrize(("problem", "words"), TWO, ids=[t[0] for t in TWO])
def test_two_groups_of_warps_transpose(problem: str, words: str) -> None:
    blocks, _, rest = words.partition(" | ")
    schedule = f"{blocks} | mma | a=box b=box | {rest} warps=4 transposers=2 via=gluon"
    case = ProblemCase(ConvProblem.parse(f"{problem} dt=f8e4m3:bf16:f8e5m2 tag=nhwc"), Prop.BWD_W)
    plan = case.plan(schedule)
    assert "def odd_transposer" in plan.source
    for data in ("exact", "float"):
        assert (found := case.judge(plan, data)).right, f"{data}: {found.reason}"


def test_quotients_of_any_bits_are_rounded_once() -> None:
    """By the chip's own arithmetic, also by divisors that are not normal numbers."""
    large, wrong = quotients.wrong(1 << 22, 3, c.DEVICE)
    assert wrong == 0 and large > 1 << 21


def test_reductions_of_bytes() -> None:
    check_reductions_of_bytes(c.DEVICE)
