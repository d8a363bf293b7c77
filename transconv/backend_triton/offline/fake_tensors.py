"""Stand-ins for tensors, from which Triton compiles a kernel in a process that never imports torch.

Triton's front end reads of a tensor the name of its element type and whether its address is a multiple of
16. Importing torch takes a second or more, as long as several kernels take to compile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transconv.ir import DTYPES


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
