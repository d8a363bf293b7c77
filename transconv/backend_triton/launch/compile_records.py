"""Kernels that Triton has compiled, in its cache: a launch compiles nothing and waits for nothing.

A record names the folder of Triton's cache with a kernel's machine code; that the folder still exists is
checked. A kernel with a missing or stale record counts as not compiled; a wrong record costs time only.
Triton finds a kernel by a key for which it reads its own files, and parses the kernel's text; where a
record names the folder, the kernel is read from there. Whatever differs from the time of the record has
None for an answer, and Triton decides: its version, variables that change what it compiles, its hooks, the
rules for known miscompiles, the chip. Damaged machine code is compiled anew.

Triton names what it has compiled by a hash of its own files, some hundred megabytes, which takes each
process about half a second before its first kernel. The hash is kept in the cache beside the sizes and
times of change of those files, and computed again when one of them differs. That, and the C code with
which Triton talks to the driver and starts kernels, is begun before the first kernel of a process."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transconv.backend_triton.launch import jit_module
from transconv.support import Cache, Content, Drawer, knobs, lasting, records, soon_turns, triton_version
from transconv.support import files as keep

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
    more = told(kernel)
    if not more and is_there(key, aligned):  # somebody watches Triton: what another process noted is more
        return
    _there[name] = True
    content = {
        **more,
        "triton": triton_version(),
        "folder": folder_of(digest),
        "function": str(kernel.name),
        "types": [*types],
    }
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
    return kernel(found, function, folder() / folder_of(digest), digest)


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
        digest_of(records.text(found.get("folder"), 64))
        name = records.name(found.get("function"))
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
            _build(source_of(kernel), kernel.metadata, patient)


PLAIN = SimpleNamespace(
    num_ctas=1,
    launch_cooperative_grid=False,
    launch_pdl=False,
    tensordesc_meta=None,
    global_scratch_size=0,
    global_scratch_align=1,
    profile_scratch_size=0,
    profile_scratch_align=1,
)  # what Triton tells of a kernel without boxes


def build_plain(count: int) -> None:
    """``build_start`` for kernels of so many tensors without boxes, whatever their types, before there is
    one; unless another process builds it."""
    with suppress(Exception):
        _build(TextSignature({f"x{at}": "*fp32" for at in range(count)}), PLAIN, False)


def _build(source: Any, metadata: Any, patient: bool) -> None:
    from triton.backends.nvidia.driver import CudaLauncher

    with _only_here(_started_like(source.signature.values()), patient) as alone:
        if alone:
            CudaLauncher(source, metadata)


def _started_like(types: Iterable[Any]) -> str:
    """A name for the argument types, as far as what starts a kernel depends on them: not on what a pointer
    or a descriptor points to, but on the number of a descriptor's dimensions."""
    told = [
        re.sub(
            r"^tensordesc<[^[]*\[([^]]*)\].*",
            lambda box: f"tensordesc {box[1].count(',')}",
            "*" if str(t).startswith("*") else str(t),
        )
        for t in types
    ]
    return hashlib.blake2b(" ".join(told).encode(), digest_size=16).hexdigest()


@contextmanager
def _only_here(name: str, patient: bool) -> Iterator[bool]:
    """Whether no other process is at this now, for which who is ``patient`` waits."""
    path = DRAWER.path(name)
    if path is None or fcntl is None:
        yield True
        return
    handle = os.open(
        path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
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
    with suppress(Exception), jit_module.without_torch():  # other releases look at arguments in other ways
        from triton.backends.compiler import BaseBackend
        from triton.runtime.jit import native_specialize_impl

        native_specialize_impl(BaseBackend, 1, False, True, True)  # the first one looks for torch


KNOWN = "3.6."  # the releases of Triton whose kernels are made here
RULES = ("machine_code.py", "miscompiles.py")  # what a kernel was read for when it was compiled
CODE = "cubin"
HOOKS = {
    "compilation": ("always_compile", "override", "dump_ir", "instrumentation_mode", "listener"),
    "runtime": (
        "debug",
        "override_arch",
        "jit_cache_hook",
        "jit_post_compile_hook",
        "add_stages_inspection_hook",
    ),
}


@dataclass(frozen=True, slots=True)
class TextSignature:
    """What a launch has to know of a kernel's text: the type of each argument by name."""

    signature: dict[str, str]
    constants: dict[Any, Any] = field(default_factory=dict)


def told(kernel: Any) -> Content:
    """What a record must have for a kernel to be read again; empty for one that Triton must make."""
    try:
        source = source_of(kernel)
        if source.constants or kernel.metadata.target.backend != "cuda" or _is_watched():
            return {}
        return {
            "signature": [[str(n), str(t)] for n, t in source.signature.items()],
            "code": _digest(kernel.asm[CODE]),
            **_around(),
        }
    except (ImportError, AttributeError, KeyError):  # another release of Triton
        return {}


def source_of(kernel: Any) -> Any:
    """What Triton's kernel was made of: of what it holds the one with a signature. AttributeError for a
    kernel without one."""
    found = next((v for v in vars(kernel).values() if hasattr(v, "signature")), None)
    if found is None:
        raise AttributeError("signature")
    return found


def kernel(found: Content | None, function: str, folder: Path, digest: str) -> Any:
    """The kernel ``function`` of a record, from its ``folder`` in Triton's cache; None where Triton has to
    decide. ``digest``: Triton's, in hexadecimal digits."""
    if not found or not found.get("signature") or found["function"] != function:
        return None
    try:
        from triton.compiler.compiler import CompiledKernel
        from triton.runtime.driver import driver

        if _is_watched() or any(found.get(name) != now for name, now in _around().items()):
            return None
        name = function[:150]
        group = {f"{name}.{kind}": str(folder / f"{name}.{kind}") for kind in ("json", CODE)}
        about = json.loads(Path(group[f"{name}.json"]).read_text())
        chip = driver.active.get_current_target()
        target = {"backend": chip.backend, "arch": chip.arch, "warp_size": chip.warp_size}
        if (about["hash"], about["name"], about["target"]) != (digest, function, target):
            return None
        made = CompiledKernel(TextSignature({n: t for n, t in found["signature"]}), group, digest)
    except (ImportError, OSError, AttributeError, KeyError, TypeError, ValueError):
        return None
    if _digest(made.kernel) == found.get("code"):
        return made
    keep.tell(group[f"{name}.{CODE}"], "the machine code is not what was compiled; it is compiled anew")
    with suppress(OSError):  # without this list Triton does not find it
        (folder / f"__grp__{name}.json").unlink()
    return None


def _digest(code: bytes) -> str:
    return hashlib.blake2b(code, digest_size=16).hexdigest()


def _around() -> Content:
    """What kernels depend on besides their texts, as far as it may change between two processes."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    return {
        "rules": _rules(),
        "library": _library(),
        "variables": {**get_cache_invalidating_env_vars(), **knobs.given("TRITON_PTXAS")},
    }


def _is_watched() -> bool:
    """Whether somebody watches or changes what Triton compiles, or its release is not known here."""
    import triton

    return not triton.__version__.startswith(KNOWN) or any(
        getattr(getattr(triton.knobs, group), name, None)
        for group, names in HOOKS.items()
        for name in names
    )


@lru_cache(maxsize=1)
def _rules() -> str:
    seen = hashlib.blake2b(digest_size=16)
    for name in RULES:
        seen.update((Path(__file__).parents[1] / name).read_bytes())
    return seen.hexdigest()


@lru_cache(maxsize=1)
def _library() -> int:
    """The size of Triton's compiler: two builds of one version differ in it."""
    from triton._C import libtriton

    return os.stat(libtriton.__file__).st_size


FINGERPRINTS = Drawer("triton", 2, longest=1 << 18, lasting=False, sealed=True)
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
        found = (FINGERPRINTS.get(name) or {}).get("key")
        if isinstance(found, str) and found:
            module.triton_key = lambda: found
        else:
            FINGERPRINTS.put(name, {"key": compute()})


def _state(folder: Path) -> str:
    """A name for the present state of Triton's files: where they are, their sizes and times of change."""
    told = [str(folder)]
    for part in PARTS:
        place = folder / part
        told += (
            [_about(place)]
            if place.is_file()
            else [
                _about(Path(at, name))
                for at, _, names in sorted(os.walk(place))
                if "__pycache__" not in at
                for name in sorted(names)
                if name.endswith((".py", ".so", ".pyd"))
            ]
        )
    return hashlib.blake2b("\n".join(told).encode(), digest_size=16).hexdigest()


def _about(file: Path) -> str:
    found = file.stat()
    return f"{file} {found.st_size} {found.st_mtime_ns} {found.st_ino}"


USUAL = (3, 2, 4)  # tensors of a kernel without boxes: a convolution, an addition of parts, with a bias


def expect() -> None:
    """Begin both, in threads of their own. What fails there fails again, and is told, where it is
    needed."""
    threading.Thread(target=_expected, daemon=True, name="transconv-triton").start()


def _expected() -> None:
    # Triton's modules import one another: two threads that import them would meet them half made.
    with suppress(Exception), soon_turns:
        with lasting():
            importlib.import_module("triton.compiler")
        threading.Thread(target=_driver, daemon=True, name="transconv-driver").start()
        remember()


def _driver() -> None:
    with suppress(Exception), soon_turns:
        from triton.runtime.driver import driver

        _ = driver.active.utils
    for count in USUAL:
        build_plain(count)
