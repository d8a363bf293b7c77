"""``atomic_ref(X)[i] += v``: additions to elements of an array that no other one comes between."""

from __future__ import annotations

from typing import Any

from transconv.errors import KernelError


def atomic_ref(array: Any) -> Any:
    """An array of which elements are added to: ``atomic_ref(H)[i] += 1``. Groups and items may add to the
    same elements. Sums of floats depend on the order, which is not the same in every run. For kernels;
    KernelError outside of them."""
    if hasattr(array, "atomic"):
        return array.atomic()
    raise KernelError("atomic_ref is for arrays inside of kernels; expected atomic_ref(X)[i] += value "
                      "there")
