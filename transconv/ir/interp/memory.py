"""The interpreter's memory: a flat array per tensor, and a record of the writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transconv.ir.tensor import Tensor

Array: TypeAlias = NDArray[Any]
"""A NumPy array of any type."""

_STORED, _ADDED = 1, 2


class InterpError(RuntimeError):
    """A kernel did something that is undefined on a GPU, such as an access out of bounds."""


class Memory:
    """Flat arrays by tensor name, written in place, with a record of every write.

    ``buffers[name]`` is 1-D, has ``tensor.layout.span`` elements and the type
    ``tensor.dtype.numpy`` (a bf16 tensor is a float32 array of bf16 values). Within one launch an
    element is stored at most once, or only added to. Kernels that run on the same memory belong to
    one launch until ``new_launch`` is called. Which elements were ever written (``check_written``) is
    kept across launches.
    """

    def __init__(self, buffers: Mapping[str, Array]) -> None:
        self.buffers = dict(buffers)
        self.covered = {n: np.zeros(len(b), np.bool_) for n, b in self.buffers.items()}
        self._writer = {n: np.zeros(len(b), np.uint8) for n, b in self.buffers.items()}
        self._stamp: dict[str, NDArray[np.int64]] = {}

    def new_launch(self) -> None:
        """Allow elements to be written again; ``check_written`` still counts earlier writes."""
        for writer in self._writer.values():
            writer[:] = 0

    def ends_elsewhere(self, tensor: Tensor) -> bool:
        """Whether the buffer of a tensor is shorter or longer than its layout. That is legal for a view
        as interleaved planes, some of which may lack the last row."""
        data = self.buffers.get(tensor.name)
        return data is not None and data.ndim == 1 and data.size != tensor.layout.span

    def why_not(self, tensor: Tensor) -> str | None:
        """Why the buffer of a tensor cannot serve as one, or None."""
        data = self.buffers.get(tensor.name)
        if data is None:
            return f"no buffer is given for the tensor {tensor.name}"
        if data.shape != (tensor.layout.span,):
            return (f"the buffer of {tensor.name} has shape {data.shape}, "
                    f"its layout spans {tensor.layout.span} elements")
        if data.dtype != np.dtype(tensor.dtype.numpy):
            return (f"the buffer of {tensor.name} is {data.dtype}, "
                    f"{tensor.dtype} is held in {tensor.dtype.numpy}")
        return None

    def claim(self, tensor: Tensor, offsets: Array, atomic: bool) -> tuple[int, str] | None:
        """Record writes to offsets (int64 of shape (n,)), each by another program or lane. Returns None,
        or the position of the first write that conflicts with another one, and why."""
        writer = self._writer[tensor.name]
        before = writer[offsets]
        conflict = before == _STORED if atomic else before != 0
        if conflict.any():
            at = int(np.argmax(conflict))
            both = atomic or before[at] == _ADDED
            return at, "is both stored and added to" if both else "is written twice"
        if not atomic:
            stamp = self._stamp.setdefault(tensor.name, np.zeros(len(writer), np.int64))
            order = np.arange(len(offsets))
            stamp[offsets] = order
            repeated = stamp[offsets] != order
            if repeated.any():
                # Each offset keeps the stamp of its last write, so earlier writes of it are ``repeated``.
                twin = offsets == offsets[int(np.argmax(repeated))]
                return int(np.flatnonzero(twin)[1]), "is written twice"
        writer[offsets] = _ADDED if atomic else _STORED
        self.covered[tensor.name][offsets] = True
        return None

    def check_written(self, tensor: Tensor) -> None:
        """Raise InterpError with the first coordinate within the logical shape that was never written.
        Padding of the layout and elements beyond the end of the buffer do not count."""
        covered, offsets = self.covered[tensor.name], offsets_of(tensor)
        there = offsets < covered.size
        written = ~there | covered[np.where(there, offsets, 0)]
        if written.all():
            return
        where = np.unravel_index(int(np.argmin(written)), written.shape)
        coords = ", ".join(f"{d}={int(x)}" for d, x in zip(tensor.dims, where, strict=True))
        missing = written.size - int(np.count_nonzero(written))
        raise InterpError(f"{tensor.name}[{coords}] is never written "
                          f"(nor are {missing - 1} more of {written.size} elements)")


def offsets_of(tensor: Tensor) -> NDArray[np.int64]:
    """The element offset of every coordinate, an array of the tensor's logical shape."""
    total = np.full((1,) * len(tensor.shape), tensor.layout.offset, np.int64)
    for d, size in enumerate(tensor.shape):
        coord = np.arange(size, dtype=np.int64)
        along = np.zeros(size, np.int64)
        blocks = tensor.layout.of_dim(d)
        for i, block in reversed(list(enumerate(blocks))):
            along += (coord if i == 0 else coord % block.size) * block.stride
            coord = coord // block.size if block.size else coord
        total = total + along.reshape([-1 if x == d else 1 for x in range(len(tensor.shape))])
    return np.broadcast_to(total, tensor.shape)
