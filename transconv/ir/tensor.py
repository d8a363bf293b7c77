"""Tensor and View: an array in memory, and the coordinates with which a computation accesses it.

A view does not exist in memory. It has one coordinate expression and one mask per dimension of the
tensor; an element whose mask is false is read as 0 and is never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transconv.ir.dtype import DType
from transconv.ir.expr import ONE, TRUE, Expr, as_expr
from transconv.ir.layout import Layout
from transconv.ir.node import Node, node
from transconv.ir.terms import all_of, sum_of
from transconv.ir.values import Values, value_at


@node
class Tensor(Node):
    """A named array. ``dims`` names the dimensions, ``shape`` their logical sizes; the layout may be
    padded beyond them (blocks of 16 hold 17 elements in 32 places). ``near``: the type that the
    copy engine rounds to what it fetches of it.

    A workspace says whose it is: ``copy_of`` names the tensor that it is a copy of (of another type, if it
    was rounded on the way), ``parts_of`` the tensor whose partial sums it holds. ``planes``: some
    dimension counts the interleaved planes of another one.

    ``extents``: of a tensor whose sizes are arguments, the size of each dimension as an expression of
    them; it is dense, in the order of the layout's blocks, and shape and layout are an example."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    layout: Layout
    near: DType | None = None
    copy_of: str = ""
    parts_of: str = ""
    planes: bool = False
    extents: tuple[Expr, ...] = ()

    @property
    def dtype(self) -> DType:
        """The type of the tensor's elements."""
        return self.layout.dtype

    def children(self) -> tuple[Node, ...]:
        """Without the extents: like a shape they are of its type, and no values that are computed."""
        return tuple(c for c in Node.children(self) if not isinstance(c, Expr))

    @property
    def bounds(self) -> tuple[Expr, ...]:
        """The size of each dimension, as an expression."""
        return self.extents or tuple(map(as_expr, self.shape))

    def at(self, values: Values) -> Tensor:
        """The tensor for given sizes."""
        if not self.extents:
            return self
        shape = tuple(value_at(e, values) for e in self.extents)
        layout = Layout.dense(self.dtype, shape, [b.dim for b in self.layout.blocks])
        return replace(self, shape=shape, layout=layout, extents=())

    def offset_of(self, coords: Sequence[Expr]) -> Expr:
        """The element offset of a coordinate: by the layout, or by strides that follow from extents."""
        if not self.extents:
            return self.layout.offset_of(coords)
        steps: list[Expr] = []
        stride: Expr = ONE
        for block in reversed(self.layout.blocks):
            steps.append(coords[block.dim] if stride is ONE else coords[block.dim] * stride)
            extent = self.extents[block.dim]
            stride = extent if stride is ONE else stride * extent
        return sum_of(steps[::-1])

    def __str__(self) -> str:
        sizes = " ".join(f"{d}={n}" for d, n in zip(self.dims, self.shape, strict=True))
        return f"{self.name}: {self.layout} [{sizes}]" + (f" fetched as {self.near}" if self.near else "")


@node
class ViewDim(Node):
    """One tensor dimension seen by a computation: where, and under which condition."""

    coord: Expr
    mask: Expr = TRUE


@node
class View(Node):
    """A virtual tensor: the underlying one, seen through a coordinate and a mask per dimension."""

    tensor: Tensor
    dims: tuple[ViewDim, ...]

    def offset(self) -> Expr:
        """The element offset in memory, from the layout and the coordinates."""
        return self.tensor.offset_of([d.coord for d in self.dims])

    def mask(self) -> Expr:
        """When the element exists; true when no dimension needs a condition."""
        return all_of([d.mask for d in self.dims])

    def __str__(self) -> str:
        names = self.tensor.dims
        coords = ", ".join(f"{n} = {d.coord}" for n, d in zip(names, self.dims, strict=True))
        mask = self.mask()
        return f"{self.tensor.name}[{coords}]" + ("" if mask is TRUE else f" where {mask}")
