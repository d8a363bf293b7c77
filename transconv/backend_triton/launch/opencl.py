"""Kernels executed on a CPU through OpenCL: compiled by Triton's release for Intel GPUs to the SPIR-V
that their driver gets, without the matrix unit. Triton's interpreter runs a kernel's text with NumPy;
here it is compiled, and executed by lanes.

A child process compiles and executes (opencl_child.py): that Triton shares no process with another one,
and what a wrong address breaks is the child. Tensors travel in a file that it maps, whole storages of
them, so that what is written beside a tensor comes back, too."""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from transconv.backend_triton.offline_compilation import Child
from transconv.ir import DTYPES
from transconv.support import Unsupported, knobs

LANES = 16  # of a warp, as on the chips whose SPIR-V it is
LIMIT_S = 240.0  # seconds for one kernel, compilers included
PAGE = 4096
LIBRARIES = Path(sys.prefix, "lib")


@lru_cache(maxsize=1)
def child() -> Child:
    """The process that executes."""
    folder = knobs.opencl()
    assert folder is not None
    driver = LIBRARIES / "libintelocl.so"
    named = (
        {"OCL_ICD_FILENAMES": str(driver), "LD_LIBRARY_PATH": str(LIBRARIES)} if driver.exists() else {}
    )
    return Child(
        "transconv.backend_triton.opencl_child",
        {"TRITON_CACHE_DIR": "{folder}/cache", "TMPDIR": "{folder}", "TRITON_INTERPRET": None, **named},
        (str(folder.absolute()),),
    )


def execute(
    source: str,
    function: str,
    types: Sequence[str],
    tensors: Sequence[Any],
    sizes: Sequence[int],
    options: dict[str, Any],
    programs: int,
) -> dict[str, Any]:
    """Execute a kernel on tensors and numbers; the seconds that it took. ``types``: torch's of each;
    ``sizes`` follow them. Raises Unsupported where it is not compiled or not in time."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if type(t) is not float
    }
    begins, end = {}, PAGE
    for address, storage in storages.items():
        begins[address] = end + address % PAGE
        end = (begins[address] + storage.nbytes() + 2 * PAGE - 1) // PAGE * PAGE
    job = {
        "source": source,
        "function": function,
        "params": [(_named(t), "", ()) for t in types],
        "numbers": sum(type(t) is float for t in tensors),
        "sizes": len(sizes),
        "explicit": False,
        "aligned": not any(t.data_ptr() % 16 for t in tensors if type(t) is not float),
        "backend": "xpu",
        "arch": "pvc",
        "warp_size": LANES,
        "dots": False,
        **options,
        "programs": programs,
        "arguments": [
            ("float", t)
            if type(t) is float
            else begins[t.untyped_storage().data_ptr()] + t.storage_offset() * t.element_size()
            for t in tensors
        ]
        + [("int", n) for n in sizes],
    }
    with tempfile.NamedTemporaryFile(prefix="transconv-memory-") as file:
        file.truncate(end)
        for address, storage in storages.items():
            file.seek(begins[address])
            file.write(ctypes.string_at(address, storage.nbytes()))
        file.flush()
        answer = child().ask(job | {"file": file.name}, LIMIT_S)
        if "reason" in answer:
            raise Unsupported("opencl:failed", f"{function}: {answer['reason']}\n{answer['log'][-2000:]}")
        for address, storage in storages.items():
            file.seek(begins[address])
            ctypes.memmove(address, file.read(storage.nbytes()), storage.nbytes())
    return answer


def _named(torch_name: str) -> str:
    """Triton's name of torch's element type in signatures."""
    return next(t.signature for t in DTYPES.values() if t.torch == torch_name)
