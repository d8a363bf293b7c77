"""Records which kernels are compiled in Triton's cache, so that their launch compiles nothing.

A record names the folder of Triton's cache with a kernel's machine code; that the folder still exists is
checked. A kernel with a missing or stale record counts as not compiled; a wrong record costs time only.
With what else a record has, the kernel is read without Triton's front end (launch/binary_reload.py).
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transconv.backend_triton.launch import binary_reload
from transconv.backend_triton.offline import fake_tensors
from transconv.disk_cache import Cache, Drawer, fields
from transconv.target import triton_version

try:
    import fcntl
except ImportError:  # Windows: several processes may build the same
    fcntl = None  # type: ignore[assignment]

SCHEMA = 3
DRAWER = Drawer("compiled", SCHEMA, longest=1 << 14, lasting=False, sealed=True)

_there: Cache[str, bool] = Cache("compiled kernels")  # names of records that this process has found


def note(key: str, aligned: bool, kernel: Any, types: tuple[str, ...] = ()) -> None:
    """Record that Triton has compiled the kernel, for aligned tensors or for others. ``types``: torch's
    element type of each."""
    digest, name = getattr(kernel, "hash", None), name_of(key, aligned)
    if not key or not digest:
        return
    more = binary_reload.told(kernel)
    if not more and is_there(key, aligned):  # somebody watches Triton: what another process noted is more
        return
    _there[name] = True
    content = {**more, "triton": triton_version(), "folder": folder_of(digest),
               "function": str(kernel.name), "types": [*types]}
    if DRAWER.get(name) != content:
        DRAWER.put(name, content)


def again(key: str, function: str, aligned: bool, types: tuple[str, ...] = ()) -> Any:
    """The kernel of this key and name from Triton's cache; None where Triton has to find or compile it, as
    for tensors of other types than those of the record."""
    found = DRAWER.get(name_of(key, aligned)) if key else None
    if found is None or (found.get("triton"), found.get("types")) != (triton_version(), [*types]):
        return None
    try:
        digest = digest_of(str(found.get("folder")))
    except ValueError:
        return None
    return binary_reload.kernel(found, function, folder() / folder_of(digest), digest)


def is_there(key: str, aligned: bool) -> bool:
    """Whether Triton's cache has the kernel of this key, for aligned tensors or for others."""
    name = name_of(key, aligned)
    if not key or name in _there:
        return bool(key)
    found = DRAWER.get(name)
    if found is None or found.get("triton") != triton_version() or not lies_in(found):
        return False
    _there[name] = True
    return True


def name_of(key: str, aligned: bool) -> str:
    return key if aligned else f"{key}-unaligned"


def folder_of(digest: str) -> str:
    """The name of Triton's folder for a kernel, from its hash in hexadecimal digits."""
    return base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")


def digest_of(name: str) -> str:
    """The inverse of ``folder_of``. ValueError for what is no such name."""
    digest = base64.b32decode(name + "=" * (-len(name) % 8)).hex()
    if folder_of(digest) != name:
        raise ValueError(f"{name!r} is no folder of a kernel")
    return digest


def folder() -> Path:
    """Where Triton keeps machine code."""
    from triton import knobs as table

    return Path(table.cache.dir)


def lies_in(found: dict[str, Any]) -> bool:
    """Whether Triton's cache still has the kernel of a record; not of one whose names are none."""
    try:
        digest_of(fields.text(found.get("folder"), 64))
        name = fields.name(found.get("function"))
    except ValueError:
        return False
    return os.path.isfile(os.path.join(folder(), found["folder"], f"__grp__{name[:150]}.json"))


def build_start(kernel: Any, patient: bool) -> None:
    """Have Triton build the C function that starts the kernel, one for all kernels with arguments of the
    same types, into its cache: else the first launch waits for a C compiler. Where Triton cannot (for
    another backend, without a C compiler or the driver's library), the launch does. While another
    process builds it, who is ``patient`` waits for that, so that no launch has to."""
    with suppress(Exception):
        if kernel.metadata.target.backend == "cuda":
            _build(binary_reload.source_of(kernel), kernel.metadata, patient)


PLAIN = SimpleNamespace(num_ctas=1, launch_cooperative_grid=False, launch_pdl=False, tensordesc_meta=None,
                        global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
                        profile_scratch_align=1)  # what Triton tells of a kernel without boxes


def build_plain(count: int) -> None:
    """``build_start`` for kernels of so many tensors without boxes, whatever their types, before there is
    one; unless another process builds it."""
    with suppress(Exception):
        _build(binary_reload.TextSignature({f"x{at}": "*fp32" for at in range(count)}), PLAIN, False)


def _build(source: Any, metadata: Any, patient: bool) -> None:
    from triton.backends.nvidia.driver import CudaLauncher

    with _only_here(_started_like(source.signature.values()), patient) as alone:
        if alone:
            CudaLauncher(source, metadata)


def _started_like(types: Iterable[Any]) -> str:
    """A name for the argument types, as far as what starts a kernel depends on them: not on what a pointer
    or a descriptor points to, but on the number of a descriptor's dimensions."""
    told = [re.sub(r"^tensordesc<[^[]*\[([^]]*)\].*", lambda box: f"tensordesc {box[1].count(',')}",
                   "*" if str(t).startswith("*") else str(t)) for t in types]
    return hashlib.blake2b(" ".join(told).encode(), digest_size=16).hexdigest()


@contextmanager
def _only_here(name: str, patient: bool) -> Iterator[bool]:
    """Whether no other process is at this now, for which who is ``patient`` waits."""
    path = DRAWER.path(name)
    if path is None or fcntl is None:
        yield True
        return
    handle = os.open(path.with_suffix(".lock"),
                     os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if patient else fcntl.LOCK_NB))
        except OSError:
            yield False
            return
        yield True
    finally:
        os.close(handle)  # which unlocks


def forget() -> None:
    """Clear this process's memory of records."""
    _there.forget()


class _Chip:
    """The part of a driver's interface that Triton's front end calls, for a chip that may be absent."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def pretend(backend: str, arch: int | str, warp_size: int) -> None:
    """Have Triton compile for a chip in this process, under the cache keys of a process with that chip.
    Afterwards this process can launch nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    driver.set_active(_Chip(GPUTarget(backend, arch, warp_size)))
    with (
        suppress(Exception),
        fake_tensors.without_torch(),
    ):  # other releases look at arguments in other ways
        from triton.backends.compiler import BaseBackend
        from triton.runtime.jit import native_specialize_impl

        native_specialize_impl(BaseBackend, 1, False, True, True)  # the first one looks for torch
