"""Where the boxes of a pile land in shared memory, and where the matrix unit looks for their elements.

The interpreter knows the boxes of a slot by their numbers, and cannot tell. A box lands in columns of
128 bytes (64, 32): all its rows of the first, then all of the next, its 16-byte units swizzled by the
address. The operand is read in the same way, as one tile with the rows of all that lie below each other.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest

from tests.schedule.test_piles import ALL, IDS, planned
from tests.stages import launches_of
from transconv.conv.conv_problem import Prop
from transconv.ir import Const, Expr, FuncCall, Kernel, Lane, Put, SlotTile, SmemRing, find
from transconv.schedule.tiles import box_dimensions

Array = np.ndarray[Any, Any]
OPERATIONS = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorDiv": np.floor_divide,
    "Mod": np.mod,
}


def value(e: Expr, at: dict[Lane, Array]) -> Array:
    """An index over lanes, at every position of a tile."""
    if isinstance(e, Const):
        return np.full_like(next(iter(at.values())), e.value)
    if isinstance(e, Lane):
        return at[e]
    return np.asarray(OPERATIONS[type(e).__name__](*(value(x, at) for x in e.children())))


def addresses(
    rows: int, row: Array, column: Array, columns: int, size: int, begin: Array | int = 0
) -> Array:
    """The bytes of elements in a tile of so many rows and columns; an element has ``size`` bytes."""
    wide = min(128, columns * size)
    number, inside = np.divmod(column * size, wide)
    plain = begin + number * rows * wide + row * wide + inside
    return np.asarray(plain ^ (plain >> 7) % (wide // 16) << 4)


def elsewhere(piece: SlotTile) -> int:
    """How many elements of a pile are not where the matrix unit reads them."""
    ring: SmemRing = piece.buffer
    down, across = dict.fromkeys(x for w in piece.within for x in find(w, Lane))
    row, column = np.meshgrid(np.arange(down.extent), np.arange(across.extent), indexing="ij")
    at = {down: row, across: column}
    *outer, inner = (value(w, at) for w in piece.within)
    within = np.ravel_multi_index(outer, ring.extents[:-1])
    rows, wide, size = prod(ring.extents[:-1]), ring.extents[-1], ring.type.bytes
    landed = addresses(rows, within, inner, wide, size, value(piece.member, at) * ring.box_bytes)
    # A tile's columns are as wide as a box's: rows of up to 128 bytes.
    looked = addresses(rows * (ring.members if ring.below else 1), row, column, wide, size)
    assert {down.extent * across.extent * size} == {ring.members * ring.box_bytes}
    return int(np.count_nonzero(landed != looked))


def piles(kernel: Kernel) -> list[SlotTile]:
    read = [a for s in find(kernel, FuncCall) for a in s.args if isinstance(a, SlotTile)]
    read += [s.value for s in find(kernel, Put) if isinstance(s.value, SlotTile)]
    return [p for p in dict.fromkeys(read) if p.buffer.members > 1]


def kernels(text: str, prop: Prop, blocks: str, words: str, dtype: str) -> list[Kernel]:
    _, _, steps = planned(text, prop, blocks, words, dtype)
    mains = [s for s in steps if s[1].via == "gluon"]
    return [launch[-1][1] for launch in launches_of(mains)]


@pytest.mark.parametrize(("text", "prop", "blocks", "words", "dtype"), ALL, ids=IDS)
def test_boxes_land_where_the_matrix_unit_looks(
    text: str, prop: Prop, blocks: str, words: str, dtype: str
) -> None:
    found = [p for k in kernels(text, prop, blocks, words, dtype) for p in piles(k)]
    assert bool(found) == ("." in blocks)  # one tap is one box
    for piece in found:
        assert elsewhere(piece) == 0, piece
        assert piece.buffer.box_bytes % (8 * min(128, piece.buffer.extents[-1] * piece.dtype.bytes)) == 0


def test_long_rows_below_one_another_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A box with rows of 256 bytes has its second columns where the next box's first ones belong."""
    monkeypatch.setattr(box_dimensions, "ROW", 256)
    (kernel,) = kernels(
        "mb2ic32ih4iw128oc64oh4ow128kh3kw1ph1pw0", Prop.BWD_W, "kh.ic:64 oc:64 ow:128", "", "f16"
    )
    (piece,) = piles(kernel)
    assert (piece.buffer.members, piece.buffer.below) == (2, True)
    assert elsewhere(piece) == 64 * 128 // 2
