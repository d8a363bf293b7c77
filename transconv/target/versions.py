"""The version of the installed Triton, found without importing it."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version

DIRECT = "3.6."
"""The release of Triton whose launch function is called, and whose descriptors are encoded, directly."""


def is_direct() -> bool:
    """Whether the installed Triton's kernels are started without its wrapper, with descriptors that are
    encoded here: other releases have other arguments."""
    return triton_version().startswith(DIRECT)


@functools.cache
def triton_version() -> str:
    """The version of the installed Triton; empty if there is none."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""
