"""transconv.config for people and for type checkers: the same switches, the same words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import transconv
from tests.shown import ROOT
from transconv.calls.settings import WORDS, Settings

WRONG = """
import transconv
transconv.config.fallbak = "warn"
transconv.config.fallback = "warm"
transconv.config.sizes = True
transconv.config.compile = "background"
transconv.config.steady = len(transconv.stats().native) > 0
"""


def test_the_declared_words_are_those_that_are_taken() -> None:
    hints = get_type_hints(Settings)
    assert {name: get_args(hints[name]) or (False, True) for name in WORDS} == WORDS
    assert hints["steady"] is bool and type(transconv.config) is Settings


@pytest.mark.slow
def test_a_type_checker_finds_wrong_words(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(WRONG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(file)],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    wrong = [
        line.partition(": error: ")[0].rpartition(":")[2]
        for line in done.stdout.splitlines()
        if ": error: " in line
    ]
    assert wrong == ["3", "4", "5"], done.stdout + done.stderr
