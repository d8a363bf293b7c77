"""The programs of docs/distributed.md print what the page shows; docs/scaling.md is current."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from docs.site import scaling
from tests.shown import ROOT, Block, blocks

PAGE = blocks((ROOT / "docs" / "distributed.md").read_text("utf-8"))
PROGRAMS = [pair for pair in pairwise(PAGE) if pair[0].kind == "python"]  # with what each prints


@pytest.mark.slow
@pytest.mark.parametrize(("program", "shown"), PROGRAMS, ids=["sharded", "captured", "in pieces"])
def test_the_programs(program: Block, shown: Block, tmp_path: Path) -> None:
    """By their commands; test_sharded.py runs the first in processes that it has."""
    name = program.body.splitlines()[0].removeprefix("# ")
    (tmp_path / name).write_text(program.body, "utf-8")
    command, *lines = shown.body.splitlines()
    assert command.startswith("$ torchrun ") and command.endswith(name), command
    words = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *command.split()[2:]]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    printed = re.findall(
        r"rank \d: .*?(?:same: (?:True|False)|has none)", done.stdout
    )  # ranks may write into one line
    assert sorted(printed) == lines, done.stderr[-2000:]


@pytest.mark.slow
def test_the_tables_are_current() -> None:
    text = scaling.PAGE.read_text("utf-8")
    assert scaling.page(text) == text, "python -m docs.site.scaling"


def test_what_a_rank_receives() -> None:
    """A 3x3 kernel on two ranks: a row of the input, one of the gradient; 8 channels, 16 columns."""
    line = scaling.SpatialAxis(16, 16, 3, 1, 1, 1)
    problem = scaling.ConvProblem.make(1, 8, 8, (16, 16), 3, pad=1)
    assert [s.receives for s in scaling.along(line, 2)] == [(1, 1)]
    assert scaling.cost(problem, (2, 1)) == scaling.Cost(3 * 8 * 16 * 9 * 8 * 8, 2 * 8 * 16 * 2)
    # With columns split too, the row that comes first is half as long, the column has a corner more.
    assert scaling.cost(problem, (2, 2)).received == 2 * 8 * (8 + 9) * 2
