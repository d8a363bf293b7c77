"""Triton JIT functions of emitted texts.

The text is executed from memory. Its lines are registered under the path of the readable copy, so
tracebacks, profilers and compile errors point there; the copy itself is never read back.

A process that never imports torch compiles from stand-ins for tensors: Triton's front end reads of a
tensor the name of its element type and whether its address is a multiple of 16. Importing torch takes a
second or more, as long as several kernels take to compile."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from transconv.ir import DTYPES
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
        path, source, lasting=False
    ):
        return path
    return None


@dataclass(frozen=True, slots=True)
class _TorchElement:
    """What Triton reads of an element type of torch; one object for each, as it keeps them."""

    name: str
    itemsize: int
    is_floating_point: bool

    def __str__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True, slots=True)
class Absent:
    """A tensor that is nowhere, at an address that is a multiple of 16."""

    dtype: _TorchElement

    def data_ptr(self) -> int:
        return 0


@lru_cache(maxsize=256)
def tensor(dtype: str) -> Absent:
    """The stand-in for tensors of torch's element type of this name."""
    row = next(t for t in DTYPES.values() if t.torch == dtype)
    return Absent(_TorchElement(dtype, row.bytes, row.kind == "float"))


@contextmanager
def without_torch() -> Iterator[None]:
    """Within ``with``, torch is not imported where it has not been."""
    missing: dict[str, Any] = {"torch": None} if "torch" not in sys.modules else {}
    sys.modules.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]
