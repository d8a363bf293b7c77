"""Zeros around an image, as the padding of the convolution that reads it.

    conv(pad(x, 2 before, 0 behind), padding=1)    ->    conv(x, padding=3 before, 1 behind)

Boxes have the zeros beyond an image for nothing; of a pad that is a view of its own they would not.
"""

from __future__ import annotations

from transconv.graph.fusion.index_ir import ConstantValue, Piece, PiecewiseIndex
from transconv.graph.sizes import SymbolicSize
from transconv.ir import Var, free_vars, value_at
from transconv.torch_ops.arguments import Params


def unpadded(x: Piece, p: Params) -> tuple[Piece, Params]:
    """What is padded, and a convolution's numbers with all zeros before and behind it."""
    before, behind = list(p.pad_lo), list(p.pad_hi)
    while (sides := _zeros(x)) and isinstance(x, PiecewiseIndex):
        before = [a + n for a, (n, _) in zip(before, sides, strict=True)]
        behind = [a + n for a, (_, n) in zip(behind, sides, strict=True)]
        x = x.parts[0].of
    both = before if before == behind else [*before, *behind]
    return x, p._replace(padding=tuple(both))


def _zeros(x: Piece) -> list[tuple[int, int]]:
    """How many zeros are before and behind each spatial dim of what a value pads; none if it is no pad, or
    one along other dims, or where sizes are names."""
    if not isinstance(x, PiecewiseIndex) or x.label != "pad" or len(x.parts) != 2:
        return []
    of, beyond = x.parts[0].of, x.parts[1].of
    if not isinstance(beyond, ConstantValue) or beyond.value != 0 or any(
            isinstance(n, SymbolicSize) for n in (*of.shape, *x.shape)):
        return []
    names = [Var(f"d{d}") for d in range(len(x.shape))]
    first = [value_at(e, {name.name: 0}) if free_vars(e) <= {name} else 1
             for name, e in zip(names, x.parts[0].move(tuple(names)), strict=True)]
    sides = [(-at, int(n) + at - int(m)) for at, n, m in zip(first, x.shape, of.shape, strict=True)]
    return sides[2:] if sides[:2] == [(0, 0)] * 2 and all(n >= 0 for s in sides for n in s) else []
