"""Products that are written in a sum, ``x + a * b`` or ``(a * b).sum()``, which is rounded once.

A compiled kernel sees the source; in the simulator a product notes the instruction of Python that made it.
It is written in the sum if the same function is executing, and has stored nothing to a name since.
"""

from __future__ import annotations

import dis
import sys
from bisect import bisect
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

import numpy as np

from transconv.ir import f32, multiply_add
from transconv.kernel.functions import TileFunction
from transconv.kernel.simulator.numerics import MaskedValues, Products, applied, converted
from transconv.kernel.simulator.races import is_users

SUMS = ("add", "subtract")


@dataclass(frozen=True, slots=True)
class Spot:
    """An instruction of a call of the user's function."""

    call: int
    code: CodeType
    at: int

    def is_in(self, later: Spot) -> bool:
        """Whether nothing was stored between this instruction and a later one of the same call."""
        if (self.call, self.code) != (later.call, later.code) or later.at <= self.at:
            return False
        stores = _stores(self.code)
        return bisect(stores, self.at) == bisect(stores, later.at)


def spot() -> Spot:
    """The user's instruction that is executed."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return Spot(id(frame), frame.f_code, frame.f_lasti)


@lru_cache(maxsize=256)
def _stores(code: CodeType) -> list[int]:
    """The places of the instructions of a function that give a value a name."""
    return [i.offset for i in dis.get_instructions(code) if i.opname.startswith("STORE")]


@dataclass(frozen=True, slots=True)
class SplitProduct:
    """The factors of a product of float32, and where it is written."""

    factors: Products
    where: Spot

    def here(self) -> Products | None:
        """The factors, if the product is written in the sum that is computed now."""
        return self.factors if self.where.is_in(spot()) else None


def written(factors: Products | None) -> SplitProduct | None:
    """What a product of float32 notes; None for what is none."""
    return None if factors is None else SplitProduct(factors, spot())


def summed(row: TileFunction, parts: list[MaskedValues], products: list[Products | None]) -> MaskedValues:
    """A row applied to operands of which some are products that are written there; of two that are added
    or subtracted the second is not rounded."""
    if row.name not in SUMS or not any(products):
        return applied(row, parts)
    made = applied(row, parts)  # its type, and where it is active
    if made.dtype is not f32:
        return made
    at = 1 if products[1] is not None else 0
    product, other = products[at], converted(parts[1 - at], f32)
    assert product is not None
    x, y, added = (np.asarray(p.data) for p in (product.x, product.y, other))
    if row.name == "subtract":
        x, added = (-x, added) if at == 1 else (x, -added)
    return MaskedValues(multiply_add(x, y, added), made.active, f32, vector=made.vector)
