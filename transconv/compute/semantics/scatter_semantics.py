"""The meaning of stores that share places: what all points leave in one place, in NumPy."""

from __future__ import annotations

import numpy as np

from transconv.ir import Array

NEEDS = {"add": ("sum", "size", "off"), "sum": ("count", "sum", "size", "off"),
         "max": ("count", "off_most"), "min": ("count", "off_most"),
         "squares": ("count", "sum", "size", "squares", "off_squares")}


class Gathered:
    """What points leave in the places of a tensor by an operation. Points come in pieces; of each place
    there are as far as needed the ``count`` of points, ``sum``, sum of ``squares``, ``extreme`` and
    ``size``, the sum of absolute values, and of the values' errors the sum, sum of squares and maximum."""

    def __init__(self, op: str, shape: tuple[int, ...]) -> None:
        self.op = op
        # With one dim more: of a tensor without dims each point would otherwise be every point's place.
        self.every = {name: np.zeros((1, *shape)) for name in NEEDS[op]}
        self.most = np.full((1, *shape), -np.inf if op == "max" else np.inf)

    def add(self, where: tuple[Array, ...], value: Array, error: Array) -> None:
        """Add points, each to its place."""
        error = np.broadcast_to(error, value.shape)
        where = (np.zeros(value.shape, np.int64), *where)
        if self.op in ("max", "min"):
            (np.maximum if self.op == "max" else np.minimum).at(self.most, where, value)
        for name, into in self.every.items():
            match name:
                case "count":
                    np.add.at(into, where, 1.0)
                case "sum":
                    np.add.at(into, where, value)
                case "squares":
                    np.add.at(into, where, value * value)
                case "size":
                    np.add.at(into, where, np.where(np.isfinite(value), np.abs(value), 0.0))
                case "off":
                    np.add.at(into, where, error)
                case "off_squares":
                    np.add.at(into, where, error * error)
                case "off_most":
                    np.maximum.at(into, where, error)

    @property
    def held(self) -> dict[str, Array]:
        """What is known of each place."""
        return {name: found[0] for name, found in self.every.items()}

    def value(self) -> Array:
        """The reduction of each place; NaN where there are no points, of what is added 0."""
        if self.op == "add":
            return self.held["sum"]
        count = self.held["count"]
        found = self.held["sum"] if self.op == "sum" else self.most[0]
        if self.op == "squares":
            found = self.held["squares"] - self.held["sum"] ** 2 / np.maximum(count, 1.0)
        return np.where(count > 0, found, np.nan)

    def error(self, share: float) -> Array:
        """The error of each place; ``share``: that of a sum, as a fraction of its absolute terms."""
        if self.op in ("max", "min"):
            return self.held["off_most"]
        if self.op != "squares":
            return share * self.held["size"] + self.held["off"]
        count = np.maximum(self.held["count"], 1.0)
        mean = share * self.held["size"] / count  # its error; a deviation has this and its value's
        apart = 2 * (self.held["off_squares"] + count * mean * mean)
        found = np.maximum(np.nan_to_num(self.value()), 0.0)
        return np.asarray(2 * np.sqrt(found * apart) + apart + share * found)
