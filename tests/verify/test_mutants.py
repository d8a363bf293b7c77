"""The tool of `make mutants` leaves parts out, one at a time, and runs the tests that should fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import programs
from tests.shown import ROOT
from tests.verify.mutants import SUBJECTS, Subject, mutants


def key(a: int, b: int, flag: bool) -> tuple[object, ...]:
    """The function that is mutated here."""
    return f"<{a}>", b, (flag and a > b)


def test_what_is_left_out() -> None:
    made, honest, found = mutants(key), key.__code__, []
    try:
        for _, code in made:
            key.__code__ = code
            found.append(key(1, 2, True))
    finally:
        key.__code__ = honest
    assert key(1, 2, True) == ("<1>", 2, False)
    assert found == [
        (2, False),
        ("<1>", False),
        ("<1>", 2),
        ("<>", 2, False),
        ("<1>", 2, False),
        ("<1>", 2, True),
    ]
    assert made[1][0] == f"key:{honest.co_firstlineno + 2} without b"


FORKED = """
from tests.verify.mutants import killed, mutants
from transconv.runtime import check_records
left = {name.split(" without ")[1]: code for name, code in mutants(check_records.digest)}
print(*(killed(check_records.digest, left[part], [TEST]) for part in ("{machine}", "{source}")))
"""


@pytest.mark.slow
def test_a_mutant_is_killed_by_a_test_that_minds(tmp_path: Path) -> None:
    """In a process of its own: a fork of this one, which has threads, may wait for ever."""
    test = tmp_path / "test_it.py"
    test.write_text(
        "from transconv.runtime.check_records import digest\n"
        "def test_it():\n    assert digest('a', 'b') != digest('a', 'c')\n"
    )
    alone = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = programs.run(["-c", f"TEST = {str(test)!r}{FORKED}"], cwd=ROOT, env=alone, timeout=100)
    assert done.stdout.splitlines()[-1:] == ["True False"], done.stdout + done.stderr


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.function)
def test_every_subject_is_there(subject: Subject) -> None:
    assert mutants(subject.found)
    assert all(Path(name.partition("::")[0]).is_file() for name in subject.tests)
