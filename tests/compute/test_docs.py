"""docs/computations.md: every program runs, every command is one, and the public names are those."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest

import transconv
from transconv.__main__ import main

TEXT = (Path(__file__).parents[2] / "docs" / "computations.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
PROGRAMS = [body for kind, body in BLOCKS if kind == "python"]
COMMANDS = [line for kind, body in BLOCKS if kind == "sh" for line in body.splitlines()]


@pytest.mark.every(2)
@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_programs(program: str) -> None:
    exec(compile(program, "docs/computations.md", "exec"), {"__name__": "__main__"})


@pytest.mark.every(4)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "compute p\n axes m=3\n store Y[m] = q"], "store 'Y[m] = q': 'q' is not known"),
        (
            ["show", "compute p\n axes m=3\n read x = X[m]\n store Y[m] = x", "--schedule", "z:4"],
            "there is no axis 'z' in p",
        ),
        (["check", "compute p\n foo"], "line 2: 'foo' is unknown"),
    ],
)
def test_bad_input_is_told_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    told = capsys.readouterr().err
    assert said in told and len(told.strip().splitlines()) == 1


def test_public_functions_show_their_parameters() -> None:
    """No ``**given``, but where it is what a model or a user's function takes."""
    passes = {"certify", "prepare", "export", "verify", "Kernel", "KernelFunction"}
    for home in (transconv, *(getattr(transconv, n) for n in transconv.__all__)):
        for name in getattr(home, "__all__", ()) if inspect.ismodule(home) else ():
            made = getattr(home, name)
            if name in passes or not inspect.isroutine(made):
                continue
            kinds = {p.kind for p in inspect.signature(made).parameters.values()}
            assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, name


def test_public_names() -> None:
    assert dir(transconv) == sorted({*transconv.__all__}), "each name once"
    for name in ("Compute", "Schedule", "Target", "Kernel", "compile", "lower"):
        assert name in dir(transconv) and getattr(transconv, name)
