"""The fastest allocation of an empty tensor on the current GPU.

It is the function that torch's compiled code calls, which takes a third of the time of the public one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

Empty = Callable[[Sequence[int], Sequence[int], Any], Any]


@cache
def quickest() -> Empty:
    """A function of shape, strides and dtype that makes an uninitialised tensor on the current CUDA
    device; the public one if this version of torch does not have the fast one."""
    import torch

    lean = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    found: Empty | None = getattr(lean, "_empty_strided_cuda", None)
    if found is not None:
        return found
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype,
                                                             device="cuda")
