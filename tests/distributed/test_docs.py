"""The program of docs/distributed.md on two processes prints what the page shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.shown import ROOT, blocks


def test_the_program(tmp_path: Path) -> None:
    program, shown = blocks((ROOT / "docs" / "distributed.md").read_text("utf-8"))[:2]
    (tmp_path / "sharded.py").write_text(program.body, "utf-8")
    command, *lines = shown.body.splitlines()
    assert command.startswith("$ torchrun "), command
    words = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *command.split()[2:]]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert sorted(line for line in done.stdout.splitlines() if line) == lines, done.stderr[-2000:]
