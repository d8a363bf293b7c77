"""Every public name says what it is: functions, classes, their public methods, and constants."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.docs.names import ROOMS, exported, ours, room, silent_class
from tests.shown import ROOT


@functools.cache
def made_in() -> dict[str, list[Path]]:
    """The files of the package where a line begins with each name, or with ``def`` and the name."""
    found = defaultdict(list)
    for path in (ROOT / "transconv").rglob("*.py"):
        for names in {*re.findall(r"^(?:def )?(\w+(?:, \w+)*)", path.read_text("utf-8"), re.MULTILINE)}:
            for name in names.split(", "):
                found[name].append(path)
    return found


def says(name: str) -> bool:
    """Whether a text stands below a constant, or in a function that a decorator has made another thing."""
    for path in made_in()[name]:
        for one, below in itertools.pairwise(ast.parse(path.read_text("utf-8")).body):
            if isinstance(one, ast.FunctionDef) and one.name == name and ast.get_docstring(one):
                return True
            if isinstance(one, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr):
                names = {n.id for n in ast.walk(one) if isinstance(n, ast.Name)}
                if name in names and isinstance(below.value, ast.Constant):
                    return True
    return False


@pytest.mark.parametrize("module", ROOMS)
def test_every_public_name_has_a_docstring(module: str) -> None:
    made = room(module)
    silent = []
    assert (made.__doc__ or "").strip()
    for name in exported(made):
        value = getattr(made, name)
        if name == "__version__" or inspect.ismodule(value):
            continue
        if inspect.isclass(value) and ours(value):
            silent += silent_class(value)
        elif inspect.isroutine(value) or (callable(value) and hasattr(value, "__wrapped__")):
            silent += [] if inspect.getdoc(value) else [name]
        elif module != "transconv" and not says(name):
            silent.append(name)
    assert not silent, f"{module}: {' '.join(dict.fromkeys(silent))}"


class Silent:
    def method(self) -> None:
        pass

    @property
    def told(self) -> int:
        """One."""
        return 1


Silent.method.__module__ = "transconv.somewhere"


def test_a_name_without_one_is_found() -> None:
    assert [*silent_class(Silent)] == ["Silent", "Silent.method"]
