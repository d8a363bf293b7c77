"""The version of the installed Triton, found without importing it."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version


@functools.cache
def triton_version() -> str:
    """The version of the installed Triton; empty if there is none."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""
