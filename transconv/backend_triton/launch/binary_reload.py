"""Stage 11a for a kernel that another process compiled: its machine code, without Triton's front end.

Triton finds a kernel in its cache by a key for which it reads its own files, and parses the kernel's text.
Where a record (launch/compile_records.py) names the folder, the kernel is read from there. Whatever
differs from the time of the record has None for an answer, and Triton decides: its version, variables that
change what it compiles, its hooks, the rules for known miscompiles, the chip. Damaged machine code is
compiled anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from transconv import knobs
from transconv.disk_cache import Content
from transconv.disk_cache import files as keep

KNOWN = "3.6."  # the releases of Triton whose kernels are made here
RULES = (
    "miscompiles/signs.py",
    "miscompiles/box_branches.py",
    "miscompiles/dropped_products.py",
    "offline/machine_code.py",
    "miscompiles/narrowed_stores.py",
    "miscompiles/reordered_sums.py",
    "miscompiles/fp8_constants.py",
)  # what a kernel was read for when it was compiled
CODE = "cubin"
HOOKS = {"compilation": ("always_compile", "override", "dump_ir", "instrumentation_mode", "listener"),
         "runtime": ("debug", "override_arch", "jit_cache_hook", "jit_post_compile_hook",
                     "add_stages_inspection_hook")}


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
        return {"signature": [[str(n), str(t)] for n, t in source.signature.items()],
                "code": _digest(kernel.asm[CODE]), **_around()}
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

    return {"rules": _rules(), "library": _library(),
            "variables": {**get_cache_invalidating_env_vars(), **knobs.given("TRITON_PTXAS")}}


def _is_watched() -> bool:
    """Whether somebody watches or changes what Triton compiles, or its release is not known here."""
    import triton

    return not triton.__version__.startswith(KNOWN) or any(
        getattr(getattr(triton.knobs, group), name, None) for group, names in HOOKS.items()
        for name in names)


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
