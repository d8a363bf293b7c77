"""Triton's fingerprint of itself, remembered between processes.

Triton names what it has compiled by a hash of its own files, some hundred megabytes, which takes each
process about half a second before its first kernel. The hash is kept in the cache beside the sizes and
times of change of those files, and computed again when one of them differs.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from pathlib import Path
from typing import Any

from transconv.disk_cache import Drawer

DRAWER = Drawer("triton", 2, longest=1 << 18, lasting=False, sealed=True)
PARTS = ("runtime/cache.py", "compiler", "backends", "language", "_C")  # what the hash is of

_lock = threading.Lock()


@functools.cache
def remember() -> None:
    """Have Triton use the remembered fingerprint in this process; compute and remember it if there is
    none. Does nothing for a Triton that computes none in the known way."""
    with _lock:
        from triton.runtime import cache

        module: Any = cache
        compute = getattr(module, "triton_key", None)
        if compute is None or not hasattr(compute, "cache_info") or compute.cache_info().currsize:
            return
        name = _state(Path(module.__file__).parents[1])
        found = (DRAWER.get(name) or {}).get("key")
        if isinstance(found, str) and found:
            module.triton_key = lambda: found
        else:
            DRAWER.put(name, {"key": compute()})


def _state(folder: Path) -> str:
    """A name for the present state of Triton's files: where they are, their sizes and times of change."""
    told = [str(folder)]
    for part in PARTS:
        place = folder / part
        told += [_about(place)] if place.is_file() else [
            _about(Path(at, name)) for at, _, names in sorted(os.walk(place)) if "__pycache__" not in at
            for name in sorted(names) if name.endswith((".py", ".so", ".pyd"))]
    return hashlib.blake2b("\n".join(told).encode(), digest_size=16).hexdigest()


def _about(file: Path) -> str:
    found = file.stat()
    return f"{file} {found.st_size} {found.st_mtime_ns} {found.st_ino}"
