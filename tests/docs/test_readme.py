"""README.md as a reader uses it: commands and programs are executed as they stand, what it shows is made
anew and compared (``--update-golden`` rewrites it), its links lead somewhere.

Recipes of the Makefile are only looked up (``make -n``): they build environments or run this suite;
tests/cli/test_cli.py runs the demo on a small network, and tests/tuning/test_tune_session.py the command
that tunes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests import programs
from tests.shown import ROOT, blocks, cut

PAGE = ROOT / "README.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = blocks(TEXT)
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in BLOCKS
    if block.kind == "sh"
    for line in block.body.splitlines()
]
(TUNE,) = (c for c in COMMANDS if c.startswith("transconv tune "))
PROGRAMS = [b.body for b in BLOCKS if b.kind == "python"]
MOST_LINES = 150


def execute(words: list[str], folder: Path = ROOT) -> str:
    """What `python` prints for words in a reader's environment; only caches are the tests' own."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k == "TRANSCONV_CACHE" or not k.startswith(("TRANSCONV_", "TRITON_INTERPRET"))
    }
    done = programs.run(words, cwd=folder, env={**kept, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=[pytest.mark.slow] if c == TUNE else []) for c in COMMANDS]
)
def test_commands(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        assert subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, check=True).stdout
    else:
        assert words[0] == "transconv", f"no test knows how to run: {command}"
        assert execute(["-m", *words])


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the programs print: one after another in one process, each with names of its own, in an empty
    folder."""
    return execute(
        ["-c", f"for text in {PROGRAMS!r}: exec(text, {{}})"], tmp_path_factory.mktemp("reader")
    )


def test_programs(printed: str) -> None:
    for said in ("@triton.jit", "result (fwd)"):
        assert said in printed


def test_what_is_shown(request: pytest.FixtureRequest, printed: str) -> None:
    (block,) = (b for b in BLOCKS if b.rule)
    (head,) = block.heads
    now = block.whole.replace(block.body, head + cut(printed, block.rule))
    if request.config.getoption("--update-golden"):
        PAGE.write_text(TEXT.replace(block.whole, now), encoding="utf-8")
        return
    assert now == block.whole, "the README is stale; --update-golden if that is meant"


def test_it_is_short_and_has_its_parts() -> None:
    assert len(TEXT.splitlines()) <= MOST_LINES
    assert {"make demo", "make test"} <= set(COMMANDS) and len(COMMANDS) == 5
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert TEXT.count("<picture>") == 1 and "(prefers-color-scheme: dark)" in TEXT


def test_links_and_files_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)|(?:src|srcset)=\"([^\"]+)\"", TEXT)
    paths = [a or b for a, b in links] + re.findall(r"`((?:transconv|tests|bench|docs)/[\w./]+)`", TEXT)
    assert len(paths) > 12
    assert [p for p in paths if not (ROOT / p).exists()] == []
