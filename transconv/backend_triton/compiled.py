"""Beside the launcher. Which kernels lie compiled in Triton's cache, so that a launch need not compile.

A record says in which folder of Triton's cache a kernel's machine code is; whether it still lies there
is looked up. A record that is missing or stale means that the kernel counts as not compiled: nothing is
run because of one.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

from transconv.disk_cache import Drawer
from transconv.target import triton_version

SCHEMA = 1
DRAWER = Drawer("compiled", SCHEMA, longest=1 << 12)

_there: set[str] = set()  # found by this process


def note(key: str, aligned: bool, kernel: Any) -> None:
    """Remember what Triton has compiled for tensors so aligned."""
    digest = getattr(kernel, "hash", None)
    if not key or not digest or is_there(key, aligned):
        return
    _there.add(name_of(key, aligned))
    DRAWER.put(name_of(key, aligned), {"triton": triton_version(), "folder": folder_of(digest),
                                       "function": str(kernel.name)})


def is_there(key: str, aligned: bool) -> bool:
    """Whether Triton has the kernel of this key, for tensors so aligned."""
    name = name_of(key, aligned)
    if not key or name in _there:
        return bool(key)
    found = DRAWER.get(name)
    if found is None or found.get("triton") != triton_version() or not lies_in(found):
        return False
    _there.add(name)
    return True


def name_of(key: str, aligned: bool) -> str:
    return key if aligned else f"{key}-unaligned"


def folder_of(digest: str) -> str:
    """What Triton calls the folder of a kernel, by its hash in hexadecimal digits."""
    return base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")


def folder() -> Path:
    """Where Triton keeps machine code."""
    from triton import knobs as table

    return Path(table.cache.dir)


def lies_in(found: dict[str, Any]) -> bool:
    """Whether Triton still has what a record speaks of."""
    place = os.path.join(folder(), str(found.get("folder")))
    return os.path.isfile(os.path.join(place, f"__grp__{str(found.get('function'))[:150]}.json"))


def forget() -> None:
    """Look everything up again."""
    _there.clear()


class _Chip:
    """What Triton's front end asks of a driver, for a chip that need not be there."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def pretend(backend: str, arch: int | str, warp_size: int) -> None:
    """Have Triton compile for a chip in this process, which then can launch nothing: under the keys that
    a process with such a chip looks for."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    driver.set_active(_Chip(GPUTarget(backend, arch, warp_size)))
