"""What the first kernel of a process waits for, begun before it: Triton's fingerprint of itself, and the
C code with which Triton talks to the driver, which a C compiler makes once for a cache."""

from __future__ import annotations

import threading
from contextlib import suppress

from transconv.backend_triton import fingerprint


def expect() -> None:
    """Begin both, in threads of their own. What fails there fails again, and is told, where it is
    needed."""
    for name, begin in (("fingerprint", fingerprint.remember), ("driver", _driver)):
        threading.Thread(target=begin, daemon=True, name=f"transconv-{name}").start()


def _driver() -> None:
    with suppress(Exception):
        from triton.runtime.driver import driver

        _ = driver.active.utils
