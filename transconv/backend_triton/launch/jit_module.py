"""From emitted source text to a Triton JIT function.

The text is executed from memory. Its lines are registered under the path of the readable copy, so
tracebacks, profilers and compile errors point there; the copy itself is never read back.
"""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

from transconv.support import executed, records
from transconv.support import files as keep

LONGEST = 1 << 20  # bytes of a copy that is compared


def load(source: str, function: str, path: Path | None = None) -> Any:
    """Execute a module's text and return its JIT function of the given name."""
    name = str(path) if path is not None else f"<transconv:{function}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    return executed(source, {"__name__": f"transconv_generated.{function}"}, name)[function]


def write(source: str, name: str) -> Path | None:
    """Write a readable copy of a kernel to the cache; None when that failed. Raises ValueError for a name
    that can be no kernel's, as a path."""
    if not records.is_name(name):
        raise ValueError(f"{name!r} is no name of a kernel")
    folder = keep.folder()
    if folder is None:
        return None
    path = folder / f"{name}.py"
    if keep.read_text(path, max(len(source) * 4, LONGEST)) == source or keep.keep_text(
            path, source, lasting=False):
        return path
    return None
