"""Stage 11a. In: emitted text. Out: a Triton JIT function.

The text is executed from memory. Its lines are registered under the path of the readable copy, so
tracebacks, profilers and compile errors point there; the copy itself is never read back.
"""

from __future__ import annotations

import linecache
import os
import tempfile
from pathlib import Path
from typing import Any

from transconv import knobs


def load(source: str, function: str, path: Path | None = None) -> Any:
    """Execute a module's text and return its JIT function of the given name."""
    name = str(path) if path is not None else f"<transconv:{function}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    namespace: dict[str, Any] = {"__name__": f"transconv_generated.{function}"}
    exec(compile(source, name, "exec"), namespace)
    return namespace[function]


def cache_directory(*inside: str) -> Path | None:
    """The folder for readable copies, or a folder inside of it; None when it cannot be trusted.

    It must belong to the user and be writable by nobody else; it is made with mode 0700.
    """
    folder = knobs.cache()
    for name in ("", *inside):
        folder = folder / name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
        except OSError:
            return None
        foreign = hasattr(os, "geteuid") and status.st_uid != os.geteuid()
        if foreign or status.st_mode & 0o022:
            return None
    return folder


def replace_text(path: Path, text: str) -> None:
    """Write a file so that readers see all of the old text or all of the new. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem[:80]}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write(source: str, name: str) -> Path | None:
    """Leave a readable copy of a kernel in the cache; None when there is no trusted folder."""
    folder = cache_directory()
    if folder is None:
        return None
    path = folder / f"{name}.py"
    try:
        if path.exists() and not path.is_symlink() and path.read_text() == source:
            return path
        replace_text(path, source)
    except OSError:
        return None
    return path
