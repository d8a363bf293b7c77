"""Where a library is missing, ``doctor`` says so, and every other verb ends with one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

HIDDEN = "import sys; sys.modules[{!r}] = None; from transconv.__main__ import main; sys.exit(main({!r}))"


def run(library: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDDEN.format(library, list(words))],
        text=True,
        capture_output=True,
        timeout=120,
    )


@pytest.mark.slow
def test_doctor_runs_without_a_library() -> None:
    told = run("numpy", "doctor")
    assert told.returncode == 1 and "Traceback" not in told.stdout + told.stderr
    (line,) = [x for x in told.stdout.splitlines() if x.startswith("bad  numpy ")]
    assert "pip install 'numpy" in line


@pytest.mark.parametrize("library", ["numpy", "tqdm"])
def test_other_verbs_say_what_is_missing(library: str) -> None:
    told = run(library, "show", "mb1ic8ih6oc8oh6kh3ph1")
    assert told.returncode == 2 and told.stderr.count("\n") == 1
    assert library in told.stderr and "doctor" in told.stderr
