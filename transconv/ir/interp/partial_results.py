"""The meaning of ``partial`` before tiles are vectors: all that points leave in one place, reduced."""

from __future__ import annotations

import numpy as np

from transconv.ir.interp.memory import Array


class Left:
    """What points have left in the elements of a buffer by an operation, in f64."""

    def __init__(self, op: str, span: int) -> None:
        self.op = op
        self.count, self.sum, self.squares = (np.zeros(span) for _ in range(3))
        self.extreme = np.full(span, -np.inf if op == "max" else np.inf)

    def add(self, offsets: Array, values: Array) -> Array:
        """Add values, and return what is in their elements then."""
        np.add.at(self.count, offsets, 1.0)
        np.add.at(self.sum, offsets, values)
        np.add.at(self.squares, offsets, values.astype(np.float64) ** 2)
        if self.op in ("max", "min"):
            (np.maximum if self.op == "max" else np.minimum).at(self.extreme, offsets, values)
        found = {"sum": self.sum, "squares": self.squares - self.sum**2 / np.maximum(self.count, 1.0)}
        return np.asarray(found.get(self.op, self.extreme)[offsets])
