"""The tool of mutation testing: what it changes in a text, which tests it asks, and that they decide."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType

import pytest

pytest.importorskip("mutmut")

from tests.mutation.covering import ROOMS, Covering, Places
from tests.mutation.operators import WEIGHTS, Source
from tests.mutation.trials import changed_code

TEXT = '''"""A file."""
LIMITS = {"least": 1, "most": 9}


def clipped(a: int, b: int = 2, *, far: bool = False) -> tuple[int, int]:
    """The two, within limits."""
    assert a >= 0, "a is negative"
    if a > LIMITS["most"] and not far:
        raise ValueError("far" + "away")
    c = a - (b - 1)
    return max(c, 1), min(b, 5)


def halves(a: list[int]) -> list[int]:
    return [x // 2 for x in a if x % 2 == 0]
'''


def changed() -> dict[str, set[str]]:
    """The changed lines of all mutants, by operator."""
    source, found = Source("file.py", TEXT), dict[str, set[str]]()
    for site in source.sites:
        mutant = source.mutant(site)
        if mutant is not None:
            found.setdefault(site.operator, set()).add(mutant.after)
    return found


def test_what_is_changed() -> None:
    found = changed()
    assert found.keys() <= WEIGHTS.keys()
    assert found["brackets dropped"] == {"c = a - b - 1"}
    assert "c = a + (b - 1)" in found["mutmut: other operator"]
    assert 'if a >= LIMITS["most"] and not far:' in found["mutmut: other operator"]
    assert {"c = a", "c = (b - 1)"} <= found["operand dropped"]
    assert "if not far:" in found["operand dropped"]
    assert "c = (b - 1) - a" in found["operands swapped"]
    assert found["min for max"] == {"return min(c, 1), min(b, 5)", "return max(c, 1), max(b, 5)"}
    assert {"return max(c, 1),", "return min(b, 5),"} <= {
        line.replace(", ,", ",").rstrip() for line in found["element dropped"]
    }
    assert "return [x // 2 for x in a if True]" in found["condition changed"]
    assert 'LIMITS = {"least": 1, "most": 10}' in found["mutmut: other number"]


def test_what_people_read_stays() -> None:
    lines = {line for each in changed().values() for line in each}
    assert not [line for line in lines if "A file" in line or "The two" in line]
    assert not [line for line in lines if "assert" in line or "away" in line]
    assert not [line for line in lines if line.startswith("def ") and ": str" in line]


def test_every_mutant_is_another_program() -> None:
    source = Source("file.py", TEXT)
    honest = compile(TEXT, "file.py", "exec")
    made = [m for site in source.sites if (m := source.mutant(site)) is not None]
    assert len({m.text for m in made}) > 40
    assert all(compile(m.text, "file.py", "exec") != honest for m in made)
    for m in made:
        assert TEXT.splitlines()[m.line - 1] != (m.text.splitlines() + [""] * 9)[m.line - 1]


def test_code_of_functions_is_replaced_and_that_of_tables_is_not() -> None:
    room: dict[str, FunctionType] = {}
    honest = compile(TEXT, "file.py", "exec")
    exec(honest, room)
    assert room["clipped"](7, 3) == (5, 3)
    new = compile(TEXT.replace("a - (b - 1)", "a - b - 1"), "file.py", "exec")
    ((old, code),) = changed_code(honest, new)
    assert old == room["clipped"].__code__
    room["clipped"].__code__ = code
    assert room["clipped"](7, 3) == (3, 3)
    with pytest.raises(ValueError, match="not inside"):
        list(changed_code(honest, compile(TEXT.replace("9", "8"), "file.py", "exec")))


def test_lines_that_moved_are_looked_up_where_they_were() -> None:
    moved = TEXT.replace("LIMITS =", "\n\nLIMITS =").replace("    return m", "    c += 0\n    return m")
    places = Places(TEXT, moved)
    assert places.recorded(12) == [10] and places.recorded(14) == [11]
    assert places.recorded(13) == [10]  # a new line has the tests of the one before
    assert places.in_function(12) and not places.in_function(4)


def test_cheap_tests_of_different_functions_come_first() -> None:
    covering = object.__new__(Covering)
    covering.seconds = {"f::a[1]": 0.1, "f::a[2]": 0.2, "f::a[3]": 0.3, "f::b": 0.4, "f::c": 9.0}
    covering.usual = {"f::a": 0.3}
    covering.size = dict.fromkeys(covering.seconds, 3)
    assert covering.ordered([*covering.seconds, "f::a[0]"]) == [
        "f::a[1]",
        "f::b",
        "f::a[2]",
        "f::a[3]",
        "f::c",
        "f::a[0]",
    ]


def test_files_that_are_drawn_often_exist() -> None:
    from tests.mutation import __main__ as command

    package = Path(__file__).parents[2] / "transconv"
    assert not [name for name in command.OFTEN if not (package / name).is_file()]
    assert not [room for room in ROOMS if not (package / room).is_dir()]
