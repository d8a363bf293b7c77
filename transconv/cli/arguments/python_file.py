"""FILE:NAME on the command line: what a user's Python file defines."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType


def loaded(text: str) -> tuple[ModuleType, str]:
    """The module that a file is, and the name behind the colon. The file can import others of its folder.
    Raises ValueError where there is no file, and where running it fails, with its line."""
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        raise ValueError(f"{text!r} names no file; expected FILE:NAME")
    loader = SourceFileLoader(path.stem, str(path))  # whatever the file's name ends in
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # where dataclasses look for the types of their fields
    sys.path.append(str(path.parent.resolve()))
    try:
        loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{file}{_line(error, path)}: {type(error).__name__}: {error}") from error
    return module, name


def _line(error: Exception, path: Path) -> str:
    """The line of the file at which it failed."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f", line {error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""
