"""Expressions that read memory: element by element, or in boxes that TMA loads."""

from __future__ import annotations

from transconv.ir.dtype import DType
from transconv.ir.expr import Expr
from transconv.ir.node import node
from transconv.ir.tensor import Tensor
from transconv.ir.terms import all_of


class MemoryRead(Expr):
    """Base of the expressions that read memory."""

    __slots__ = ()
    tensor: Tensor


@node
class Load(MemoryRead):
    """``tensor.data[offset]`` where ``mask`` holds, else ``fill``. The offset counts elements."""

    tensor: Tensor
    offset: Expr
    mask: Expr
    fill: float = 0.0

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype


@node
class BoxLoad(MemoryRead):
    """The part of a tensor that a copy engine fetches in one piece.

    One entry per dimension: ``corner`` is where the box begins (the same for all lanes), ``within`` the
    position of each lane relative to the corner, in steps of ``tensor.every``, ``extents`` the size of the
    box. Elements outside the tensor are 0; the others are rounded to ``tensor.near`` if that is set.
    """

    tensor: Tensor
    corner: tuple[Expr, ...]
    within: tuple[Expr, ...]
    extents: tuple[int, ...]

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    def as_load(self) -> Load:
        """The equivalent masked load."""
        offset, inside = box_address(self.tensor, self.corner, self.within)
        return Load(self.tensor, offset, inside)


def box_address(tensor: Tensor, corner: tuple[Expr, ...],
                within: tuple[Expr, ...]) -> tuple[Expr, Expr]:
    """The offset of each element of a box, and the condition that it is inside the tensor."""
    steps = tensor.every or [1] * len(corner)
    coords = [a + (b if n == 1 else b * n) for a, b, n in zip(corner, within, steps, strict=True)]
    inside = [(c >= 0) & (c < n) for c, n in zip(coords, tensor.bounds, strict=True)]
    return tensor.offset_of(coords), all_of(inside)
