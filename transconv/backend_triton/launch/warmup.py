"""What the first kernel of a process waits for, begun before it: Triton's fingerprint of itself, and the
C code with which Triton talks to the driver and starts kernels, which a C compiler makes once for a
cache."""

from __future__ import annotations

import importlib
import threading
from contextlib import suppress

from transconv.backend_triton.launch import compile_records, fingerprint

USUAL = (3, 2, 4)  # tensors of a kernel without boxes: a convolution, an addition of parts, with a bias


def expect() -> None:
    """Begin both, in threads of their own. What fails there fails again, and is told, where it is
    needed."""
    threading.Thread(target=_expected, daemon=True, name="transconv-triton").start()


def _expected() -> None:
    # Triton's modules import one another: two threads that import them would meet them half made.
    with suppress(Exception):
        importlib.import_module("triton.compiler")
        threading.Thread(target=_driver, daemon=True, name="transconv-driver").start()
        fingerprint.remember()


def _driver() -> None:
    with suppress(Exception):
        from triton.runtime.driver import driver

        _ = driver.active.utils
    for count in USUAL:
        compile_records.build_plain(count)
