"""Files that a user names: read up to a size limit, written whole.

Unlike the cache, these may be anywhere and belong to any user; errors are raised.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from transconv.disk_cache.files import words

LONGEST = 1 << 28


def read_named(path: Path, expected: str, longest: int = LONGEST) -> str:
    """The text of a file. Raises ValueError for one that is no text or is too long (``expected`` says
    what it should be), OSError."""
    with path.open("rb") as file:
        data = file.read(longest + 1)
    if len(data) > longest:
        raise ValueError(f"{path} has more than {longest} bytes; expected {expected}")
    if b"\0" in data:
        raise ValueError(f"{path}: this is no text; expected {expected}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: this is no text; expected {expected}") from error


def replace_named(path: Path, text: str) -> None:
    """Write a file, and the folders that it lies in, so that it is never half there. A pipe or a device
    is written to as it is. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # a link stays, its target is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name[:100]}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        with suppress(OSError):
            fresh.chmod(path.stat().st_mode & 0o777)
        fresh.replace(path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise


def why_unwritable(path: Path) -> str:
    """Why a file cannot be made or replaced, or empty. Nothing is left behind."""
    try:
        if path.is_dir():
            return "it is a folder"
        if path.exists() and not os.access(path, os.W_OK):
            return "it is not ours to write"
        if path.exists() and not path.is_file():
            return ""
        within = path.resolve().parent
        while not within.exists():
            within = within.parent
        if not within.is_dir():
            return f"{within} is no folder"
        with tempfile.TemporaryFile(dir=within):
            return ""
    except (OSError, RuntimeError, ValueError) as error:
        return words(error) if isinstance(error, OSError) else str(error)
