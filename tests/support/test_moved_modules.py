"""Modules that moved are found by the names that they had, for one release."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import transconv
from transconv.support import MovedModules, versions

ROOT = Path(__file__).parents[2]
FINDER = MovedModules(transconv._MOVED)


@pytest.fixture(autouse=True)
def as_before():
    """No module stays under an old name."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if FINDER.moved_to(name):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *transconv._MOVED.items(),
        ("transconv.disk_cache.records", "transconv.support.records"),
        ("transconv.standalone.files", "transconv.runtime.standalone.files"),
    ],
)
def test_the_names_of_a_module_are_found_where_it_was(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is {new} now"):
        found = importlib.import_module(old)
    meant = importlib.import_module(new)
    public = [n for n in dir(meant) if not n.startswith("_")]
    assert public
    assert public == [n for n in dir(found) if not n.startswith("_")]
    assert all(getattr(found, n) is getattr(meant, n) for n in public)


def test_names_that_change_do_so_under_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(DeprecationWarning, match="transconv.version is"):
        found = importlib.import_module("transconv.version")
    monkeypatch.setattr(versions, "DIRECT", "9.9.")
    assert found.DIRECT == "9.9."
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        found.nothing  # noqa: B018


def test_modules_that_never_were_are_not_found() -> None:
    for name in ("transconv.disk", "transconv.disk_cache.nothing", "transconv.knobs.nothing", "knobs"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    assert FINDER.moved_to("transconv.knobs") == "transconv.support.knobs"
    assert FINDER.moved_to("transconv.support.knobs") is None


def test_no_module_has_an_old_name_and_old_names_are_gone() -> None:
    """A row for a module that is there would never be used."""
    assert not [
        old
        for old in transconv._MOVED
        if (ROOT / old.replace(".", "/")).exists() or (ROOT / f"{old.replace('.', '/')}.py").exists()
    ]
    assert all(find_spec(new) for new in transconv._MOVED.values())


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_warning_names_the_line_that_imports(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(
        "import os\n\nfrom transconv.disk_cache.records import Drawer\nprint(Drawer.__module__)\n"
    )
    said = run(f"import runpy; runpy.run_path({str(file)!r})")
    assert "transconv.support.records" in said
    assert f"{file}:3: DeprecationWarning: transconv.disk_cache is transconv.support now" in said
    assert f"{file}:3: DeprecationWarning: transconv.disk_cache.records is" in said


def test_nothing_is_warned_about_or_imported_that_is_not_asked_for() -> None:
    said = run(
        "import transconv, sys; print([m for m in sys.modules if m in "
        "('transconv.knobs', 'transconv.runtime', 'torch')])"
    )
    assert said.strip() == "[]"
