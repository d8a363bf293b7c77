"""The versions of the package and of the installed Triton, which is found without importing it."""

from __future__ import annotations

import functools
import re
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"

DIRECT = "3.6."
"""The release of Triton whose launch function is called, and whose descriptors are encoded, directly."""


def is_direct() -> bool:
    """Whether the installed Triton's kernels are started without its wrapper, with descriptors that are
    encoded here: other releases have other arguments."""
    return triton_version().startswith(DIRECT)


def has_wide_views() -> bool:
    """Whether the installed Triton takes a view of shared memory that is larger than what it is a view of,
    as steps that share boxes need (``slide=``): 3.8 and 3.9 refuse it."""
    release = [int(n) for n in re.findall(r"\d+", triton_version())[:2]]
    return release < [3, 8]


@functools.cache
def triton_version() -> str:
    """The version of the installed Triton; empty if there is none."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""
