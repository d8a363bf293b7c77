"""Pieces in another type, and what was there before they were cast to a wider one."""

from __future__ import annotations

from dataclasses import replace

import torch

from transconv.graph.fusion.index_ir import TYPES, Indexed, Mapped, MovedView, Piece
from transconv.graph.lowerings.table import NotOurs, computed, is_small, kind, mapped, number


def cast(x: Piece, dtype: torch.dtype) -> Piece:
    """The piece in another type. Raises NotOurs for floats as whole numbers, and as floats of 8 bits,
    unless they are clamped to what that type holds: how others are converted differs between machines."""
    if {dtype, x.dtype} - TYPES.keys():
        computed(dtype)
        computed(x.dtype)
    bounded = kind(x.dtype) == "float" and (kind(dtype) == "int" or is_small(dtype))
    if bounded and not _within(x, TYPES[dtype].range):
        raise NotOurs("a float is cast to a whole number" if kind(dtype) == "int" else
                      f"a float that is not clamped is cast to {TYPES[dtype].name}")
    if is_small(dtype) and not bounded:
        raise NotOurs(f"{str(x.dtype).removeprefix('torch.')} is cast to {TYPES[dtype].name}")
    name = TYPES[dtype].name
    if bounded and is_small(dtype) and isinstance(x, Mapped) and x.nearest is not None and (
            x.range is not None and all(float(n).is_integer() for n in x.range)):
        return _bytes(x.range, *x.nearest, dtype)
    if kind(dtype) == "bool":
        return mapped("{} != 0".format, x, dtype=dtype, label="cast") if kind(x.dtype) != "bool" else x
    made = mapped(f"{name}({{}})".format, x, dtype=dtype, label="cast")
    made.widened = kind(x.dtype) == kind(dtype) == "float" and x.dtype.itemsize < dtype.itemsize
    return made


def _bytes(range_: tuple[float, float], of: Piece, added: Piece | None, dtype: torch.dtype) -> Mapped:
    """The nearest whole numbers of values, and an integer, between two whole numbers, as integers of 8
    bits: of operations of integers behind one addition, which takes less time than conversions."""
    low, high = (number(float(n)) for n in range_)
    text = f"nearest_small(min(max({{}}, {low}), {high}))"
    given = (of,) if added is None else (of, added)
    if added is not None:
        text = f"nearest_small(min(max({{0}}, {low} - f32({{1}})), {high} - f32({{1}}))) + {{1}}"
    return mapped(f"{TYPES[dtype].name}({text})".format, *given, dtype=dtype, label="quantize", work=4)


def _within(x: Piece, most: tuple[float, float]) -> bool:
    """Whether a value is known to be between two numbers."""
    return isinstance(x, Mapped) and x.range is not None and (
        most[0] <= x.range[0] <= x.range[1] <= most[1])


def from_before(x: Piece, dtype: torch.dtype) -> Piece | None:
    """What was cast to a wider type, if the piece is that or a view of it, and ``dtype`` is the type from
    before: torch's upsampling casts an image, moves its elements, and casts them back."""
    if isinstance(x, Mapped) and x.widened and x.inputs[0].dtype is dtype:
        return x.inputs[0]
    if isinstance(x, (MovedView, Indexed)) and (found := from_before(x.of, dtype)) is not None:
        return anew(x, found)
    return None


def anew(view: MovedView | Indexed, of: Piece) -> Piece:
    """The view of another piece, or of the same one as a result of its own, of which torch tells how it
    lies."""
    made = replace(view, of=of, dtype=of.dtype, strides=None, values=None)
    if isinstance(made, MovedView):
        made.alias = False
    return made
