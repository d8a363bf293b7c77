"""The cache folders of a worker process that runs trials."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import time
import warnings
from typing import Any

from transconv import knobs

KEPT_COMPILED = 64  # trials after which a worker's compiled kernels are thrown away
TRIMMED = 8  # the same where workers have one cache


@functools.cache
def _worker() -> dict[str, Any]:
    """Set a worker up, once: one thread, and no garbage collection of the objects that exist already."""
    import torch

    torch.set_num_threads(1)
    gc.freeze()
    if torch.cuda.is_available() and not knobs.interpret():
        torch.cuda.set_device(os.getpid() % torch.cuda.device_count())
    return {"trials": 0}


def prepare(scratch: str, launchers: str = "") -> None:
    """Give the worker a cache folder of its own, and empty it from time to time: no trial needs a kernel
    again. ``launchers``: a folder in ``scratch`` for a cache of Triton that all workers have, where
    launchers stay: a C compiler makes one in more time than Triton takes for a small kernel, and kernels
    of as many arguments have the same (12 in 81 kernels)."""
    mine = _worker()
    warnings.filterwarnings("error", "tl.where with a non-boolean condition")  # it selects wrongly
    if scratch:
        folder = f"{scratch}/{os.getpid()}"
        if mine["trials"] % KEPT_COMPILED == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(f"{folder}/transconv", mode=0o700, exist_ok=True)
        triton = f"{scratch}/{launchers}" if launchers else f"{folder}/triton"
        os.makedirs(triton, exist_ok=True)
        if launchers and mine["trials"] % TRIMMED == 0:
            without_kernels(triton)
        knobs.adopt({"TRITON_CACHE_DIR": triton,
                     knobs.cache.name: f"{folder}/transconv"})
    mine["trials"] += 1


def without_kernels(folder: str, age_s: float = 10.0) -> None:
    """Remove compiled kernels from a cache of Triton, but for those that may still be written."""
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError):  # another worker removes it
            if time.time() - entry.stat().st_mtime > age_s and any(
                    name.endswith((".cubin", ".hsaco")) for name in os.listdir(entry.path)):
                shutil.rmtree(entry.path, ignore_errors=True)
