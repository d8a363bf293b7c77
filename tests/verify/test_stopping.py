"""Long commands that are stopped: the results so far are printed and written, and workers end without
a message."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from transconv.support import knobs
from transconv.verify import machine

ROOT = Path(__file__).parents[2]
PROBLEMS = [f"mb1ic{c}ih{size}oc8oh{size}kh3ph1" for c in range(8, 48) for size in range(5, 12)]
COMMANDS = {
    "check": ["--dir=FWD_D", "--json=out.json", "--workers=0", *PROBLEMS],
    "check with workers": ["--dir=FWD_D", "--json=out.json", "--workers=2", *PROBLEMS],
    "fuzz": ["--interpreter", "--n", "100000", "--jobs", "2", "--json", "out.json", "--share", "0"],
    "tune": ["mb1ic8ih5oc8oh5kh3ph1", "--db", "out.csv", "--trials", "50", "--jobs", "1"],
}


def stopped(folder: Path, name: str, number: signal.Signals) -> tuple[int, str, str]:
    """Exit code, output and errors of a command that all its processes are told to stop once it has
    answered something, as a terminal does."""
    variables = {"TRANSCONV_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "transconv", name.split()[0], *COMMANDS[name]],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=knobs.child_environment(variables, str(ROOT)),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # a background job ignores it
    try:
        _await(process, folder, name)
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=60)
        assert _gone(process.pid)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def _gone(group: int) -> bool:
    """Whether all processes of a group end by themselves; nobody may have reaped them yet."""

    def alive() -> list[str]:
        found = [
            p.read_text().rpartition(")")[2].split()
            for p in Path("/proc").glob("[0-9]*/stat")
            if p.exists()
        ]
        return [state for state, _, of, *_ in found if int(of) == group and state != "Z"]

    for _ in range(50):
        if not alive():
            return True
        _pause()
    return False


def _await(process: subprocess.Popen[str], folder: Path, name: str) -> None:
    """Read until there is an answer; tune's are in its log."""
    assert process.stdout is not None
    if name == "fuzz":
        return _await_child(process)
    process.stdout.readline()
    if name == "tune":
        process.stdout.readline()
        for _ in range(600):
            log = folder / "out.trials.csv"
            if log.exists() and log.read_text().count("\n") > 1:
                return None
            _pause()
    return None


def _await_child(process: subprocess.Popen[str]) -> None:
    for _ in range(600):
        if len(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()) > 1:
            _pause()
            return
        _pause()


def _pause() -> None:
    time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at the children of a process")
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("check", signal.SIGINT),
        ("fuzz", signal.SIGINT),
        pytest.param("check", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("check with workers", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("check with workers", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("fuzz", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("tune", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("tune", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_command_tells_and_keeps_what_was_done(
    tmp_path: Path, name: str, number: signal.Signals
) -> None:
    code, out, err = stopped(tmp_path, name, number)
    assert code == 128 + number, err
    assert "Traceback" not in out + err
    assert "stopped" in out
    if name == "tune":
        assert "1 of 3 are kept in out.csv" in out
        for path in (tmp_path / "out.csv", tmp_path / "out.trials.csv"):
            rows = list(csv.DictReader(path.open()))
            assert rows and all(None not in row and None not in row.values() for row in rows)
        return
    told = json.loads((tmp_path / "out.json").read_text())
    if name == "fuzz":
        assert f"go on with --seed 0 --first {told['next']}" in out
    else:
        assert told["stopped"] and told["asked"] == len(PROBLEMS)
        assert 0 < len(told["results"]) < len(PROBLEMS)
        assert out.splitlines()[-1].startswith(f"tests:{len(told['results'])} ")


def test_sigterm_is_raised_where_the_work_is_and_only_there() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(machine.Terminated) as stop, machine.terminable():
        os.kill(os.getpid(), signal.SIGTERM)
        _pause()
    assert machine.code(stop.value) == 143 and machine.code(KeyboardInterrupt()) == 130
    assert signal.getsignal(signal.SIGTERM) is before
