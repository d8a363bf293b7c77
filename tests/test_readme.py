"""Every example of the README does what it says: commands and Python blocks are executed.

Recipes of the Makefile are only looked up (``make -n``): they build environments or run this suite.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(),
                    re.MULTILINE | re.DOTALL)
COMMANDS = [line.partition("  #")[0].strip() for kind, text in BLOCKS if kind == "sh"
            for line in re.sub(r"\\\n\s*", " ", text).splitlines()
            if line.strip() and line[0] != "#"]
PROGRAMS = [text for kind, text in BLOCKS if kind == "python"]
SLOW = ("demo",)


def execute(words: list[str], **environment: str) -> str:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False,
                          env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        assert execute(["make", "-n", *words[1:]])
    elif words[0] == "source":  # of the environment that `make install` makes
        assert words[1:] == [".venv/bin/activate"]
    elif words[:3] == ["python", "-m", "transconv"]:
        if words[3] in SLOW:
            pytest.skip("runs for minutes; tests/test_cli.py runs it on a small network")
        assert execute([sys.executable, *words[1:]])
    elif words[:2] == ["python", "-m"] and words[2].startswith("bench"):
        assert execute([sys.executable, *words[1:3], "--help"])
    elif words[:2] == ["python", "-m"] and words[2] == "pytest":
        assert execute([sys.executable, *words[1:], "--collect-only", "-q"])
    else:
        pytest.fail(f"no test knows how to run: {command}")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda text: text.strip().splitlines()[-1][:40])
def test_programs(program: str) -> None:
    execute([sys.executable, "-c", program])


def test_there_are_examples() -> None:
    assert len(COMMANDS) >= 8 and len(PROGRAMS) >= 1


def test_files_that_are_mentioned_exist() -> None:
    text = (ROOT / "README.md").read_text()
    paths = re.findall(r"`((?:transconv|tests|bench)/[\w./]+)`", text)
    assert len(paths) > 5
    assert [p for p in paths if not (ROOT / p).exists()] == []
