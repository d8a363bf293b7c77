"""Tensor and View: what lies in memory, and how a computation looks at it.

A view does not exist in memory. It has one coordinate expression and one mask per dimension of the
tensor; an element whose mask is false is read as 0 and is never written.
"""

from __future__ import annotations

from transconv.ir.dtype import DType
from transconv.ir.expr import TRUE, Expr
from transconv.ir.layout import Layout
from transconv.ir.node import Node, node
from transconv.ir.terms import all_of


@node
class Tensor(Node):
    """A named array. ``dims`` names the dimensions, ``shape`` their logical sizes; the layout may be
    padded beyond them (blocks of 16 hold 17 elements in 32 places). ``near``: the type that the
    copy engine rounds to what it fetches of it.

    A workspace says whose it is: ``copy_of`` names the tensor that it is a copy of (of another type, if it
    was rounded on the way), ``parts_of`` the tensor whose partial sums it holds. ``planes``: some
    dimension counts the interleaved planes of another one."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    layout: Layout
    near: DType | None = None
    copy_of: str = ""
    parts_of: str = ""
    planes: bool = False

    @property
    def dtype(self) -> DType:
        return self.layout.dtype

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
        return self.tensor.layout.offset_of([d.coord for d in self.dims])

    def mask(self) -> Expr:
        """When the element exists; true when no dimension needs a condition."""
        return all_of([d.mask for d in self.dims])

    def __str__(self) -> str:
        names = self.tensor.dims
        coords = ", ".join(f"{n} = {d.coord}" for n, d in zip(names, self.dims, strict=True))
        mask = self.mask()
        return f"{self.tensor.name}[{coords}]" + ("" if mask is TRUE else f" where {mask}")
