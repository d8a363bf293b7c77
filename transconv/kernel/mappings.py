"""Views from Python functions: where the elements of a tile are in an array.

    rows = create_mapping(lambda m, k: (m // W, m % W + k // C, k % C))
    a = group.load(X[y:], shape=(32, 64), mapping=rows)     a[m, k]: X[y + m // W, m % W + k // C, k % C]
    Z = index_map((H, W), lambda i, j: j * H + i)(X)        Z[i, j]: X[j * H + i]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from transconv.kernel.refusals import Refusal
from transconv.support import KernelError

MOST = 1 << 26  # elements of a layout that is checked


@dataclass(frozen=True, slots=True, eq=False)
class Mapping:
    """Where the elements of a tile are: from their indices to those of an array. ``of_tiles``: the
    function is read in a kernel, and takes each index as a tile of the whole shape."""

    function: Callable[..., Any]
    of_tiles: bool = False

    def places(self, indices: Any) -> tuple[Any, ...]:
        """The indices of the array, of those of a tile. Refuses what the function cannot compute."""
        try:
            made = self.function(*indices)
        except TypeError as error:
            raise Refusal(f"a mapping that fails ({error})",
                          f"a function of {len(indices)} indices, those of the shape",
                          "create_mapping(lambda i, j: (j, i))") from None
        return tuple(made) if isinstance(made, (tuple, list)) else (made,)

    def collision(self, shape: Sequence[int], sizes: Sequence[int] | None = None) -> str:
        """As ``colliding``, for numbers alone."""
        if prod(shape) > MOST:
            raise Refusal(f"a mapping of {prod(shape)} elements", f"up to {MOST}, which are checked")
        indices = np.indices(tuple(shape)).reshape(len(shape), -1)
        at = [np.broadcast_to(np.asarray(p), indices.shape[1:]) for p in self.places(indices)]
        return colliding(at, shape, sizes)


def colliding(at: Sequence[Any], shape: Sequence[int], sizes: Sequence[int] | None = None) -> str:
    """Two elements of a tile that are in one place, in words; empty if there are none. ``at``: for each
    dimension of the array the places of the tile's elements, in the order of their indices; ``sizes``: of
    the array, elements outside of which are in no place."""
    inside, flat = np.ones(prod(shape), bool), np.zeros(prod(shape), np.int64)
    limits = [int(p.max(initial=0)) + 1 for p in at] if sizes is None else sizes
    for p, n in zip(at, limits, strict=True):
        inside &= (p >= 0) & (p < n)
        flat = flat * n + p
    there = np.flatnonzero(inside)
    order = np.argsort(flat[there], kind="stable")
    places = flat[there][order]
    same = np.flatnonzero(places[1:] == places[:-1])
    if not len(same):
        return ""
    first, second = (tuple(int(i) for i in np.unravel_index(int(there[order[same[0] + k]]), tuple(shape)))
                     for k in (0, 1))
    return f"{first} and {second} are one element"


def create_mapping(function: Callable[..., Any]) -> Mapping:
    """A view for ``group.load(X, shape=, mapping=)`` and ``group.store(Y, y, mapping=)``. ``function``: of
    an element's indices in the tile, gives those in the array: a number, or one for each dimension, by
    ``+ - * // %``. An element outside of the array is inactive. Stores are refused where two elements of a
    tile are one of the array. Raises KernelError for what is no function."""
    if not callable(function):
        raise KernelError(f"create_mapping({function!r}); expected a function of indices")
    return Mapping(function)


@dataclass(frozen=True, slots=True, eq=False)
class IndexMap:
    """A layout: where the elements of an array of a shape are in memory of one dimension. Called with an
    array of one dimension it gives one of this shape."""

    shape: tuple[int, ...]
    mapping: Mapping
    storage_size: int
    collision: str

    def __call__(self, array: Any) -> Any:
        if hasattr(array, "laid_out"):
            return array.laid_out(self)
        raise KernelError("a layout is for arrays inside of kernels; expected layout(X) there")


def index_map(shape: Sequence[int], offset: Callable[..., Any],
              storage_size: int | None = None) -> IndexMap:
    """A layout from a Python function. ``offset``: of an element's indices, gives its place in memory, by
    ``+ - * // %``. ``storage_size``: the elements of that memory, by default what the places need. Whether
    two elements are in one place is checked; then stores are refused. Raises KernelError for places
    outside of the memory."""
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    if not sizes or any(not isinstance(n, int) or n < 1 for n in sizes) or not callable(offset):
        raise KernelError(f"index_map({shape!r}, {offset!r}); expected sizes from 1 on, and a function of "
                          "indices")
    mapping = create_mapping(offset)
    try:
        found = [np.asarray(p) for p in mapping.places(np.indices(sizes).reshape(len(sizes), -1))]
        collision = mapping.collision(sizes)
    except Refusal as refusal:
        raise KernelError(f"index_map: found {refusal.found}; allowed: {refusal.allowed}") from None
    if len(found) != 1 or found[0].dtype.kind not in "iu":
        raise KernelError("index_map: found a function that gives no whole number; allowed: the place in "
                          "memory")
    least, most = int(found[0].min()), int(found[0].max())
    held = most + 1 if storage_size is None else storage_size
    if least < 0 or most >= held:
        raise KernelError(f"index_map: found the place {least if least < 0 else most}; allowed: 0 to "
                          f"{held - 1}, the memory of storage_size={held}")
    return IndexMap(sizes, mapping, held, collision)
