"""Tensor and View: an array in memory, and the coordinates with which a computation accesses it.

A view does not exist in memory. It has one coordinate expression and one mask per dimension of the
tensor; an element whose mask is false is read as 0 and is never written.

Expressions that read memory: element by element, or in boxes that TMA loads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from transconv.ir.dtype import DType
from transconv.ir.expr import ONE, TRUE, Expr, as_expr
from transconv.ir.functions.size_values import Values, value_at
from transconv.ir.layout import Layout
from transconv.ir.node import Node, node
from transconv.ir.operations import all_of, sum_of


@node
class Tensor(Node):
    """A named array. ``dims`` names the dimensions, ``shape`` are their logical sizes. The layout may be
    padded: blocks of 16 store 17 elements in 32 places. ``near``: the type that the copy engine rounds
    elements to, or None.

    Workspaces: ``copy_of`` names the tensor that this is a copy of (of another type, if the copy is
    rounded), ``parts_of`` the tensor whose partial sums this holds. ``planes``: a view in which one
    dimension numbers the interleaved planes of another, or elements of windows that may overlap.

    ``extents``: if sizes are arguments, the size of each dimension as an expression of them. Such a tensor
    is dense, in the order of the layout's blocks, unless ``pitches`` has the stride of each dimension, as
    of a view as planes or of a slice; its shape and layout are those of the example. ``number``: there is
    one element, which is an argument itself, not its address.

    ``every``: if the copy engine takes every so many-th position of some dimension, the step along each;
    empty if all are 1. Positions within boxes of such a tensor are counted in steps."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    layout: Layout
    near: DType | None = None
    copy_of: str = ""
    parts_of: str = ""
    planes: bool = False
    extents: tuple[Expr, ...] = ()
    pitches: tuple[Expr, ...] = ()
    number: bool = False
    every: tuple[int, ...] = ()

    @property
    def dtype(self) -> DType:
        """The type of the tensor's elements."""
        return self.layout.dtype

    def children(self) -> tuple[Node, ...]:
        """Without extents and pitches: they are part of the tensor's type, not values of the kernel."""
        return tuple(c for c in Node.children(self) if not isinstance(c, Expr))

    @property
    def bounds(self) -> tuple[Expr, ...]:
        """The size of each dimension, as an expression."""
        return self.extents or tuple(map(as_expr, self.shape))

    @property
    def steps(self) -> tuple[Expr, ...]:
        """The stride of each dimension, in elements, as an expression of sizes that are arguments."""
        if self.pitches:
            return self.pitches
        found: dict[int, Expr] = {}
        stride: Expr = ONE
        for block in reversed(self.layout.blocks):
            found[block.dim] = stride
            stride = stride * self.extents[block.dim]
        return tuple(found[d] for d in range(len(self.shape)))

    @property
    def far(self) -> Expr:
        """The longest stride, in elements, as an expression of sizes that are arguments."""
        if self.pitches:
            return self.pitches[self.layout.blocks[0].dim]
        found: Expr = ONE
        for block in self.layout.blocks[1:]:
            found = found * self.extents[block.dim]
        return found

    @property
    def room(self) -> Expr:
        """How many elements of memory it takes, as an expression of sizes that are arguments."""
        if not self.extents:
            return as_expr(self.layout.span)
        if self.pitches and not self.copy_of:
            return sum_of([(n - 1) * s for n, s in zip(self.extents, self.pitches, strict=True)]) + 1
        return self.extents[self.layout.blocks[0].dim] * self.far

    def at(self, values: Values) -> Tensor:
        """The tensor for given sizes, with numbers instead of extents."""
        if not self.extents:
            return self
        shape = tuple(value_at(e, values) for e in self.extents)
        layout = Layout.dense(self.dtype, shape, [b.dim for b in self.layout.blocks])
        if self.pitches:
            layout = replace(
                layout,
                blocks=tuple(
                    replace(b, stride=value_at(self.pitches[b.dim], values)) for b in layout.blocks
                ),
            )
        return replace(self, shape=shape, layout=layout, extents=(), pitches=())

    def offset_of(self, coords: Sequence[Expr]) -> Expr:
        """The offset of a coordinate in elements: by the layout, or by the strides of the extents."""
        if not self.extents:
            return self.layout.offset_of(coords)
        if self.pitches:
            return sum_of([c * s for c, s in zip(coords, self.pitches, strict=True)])
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
    """A view's coordinate along one dimension of the tensor, and the condition under which it exists."""

    coord: Expr
    mask: Expr = TRUE


@node
class View(Node):
    """A tensor seen through a coordinate and a mask per dimension."""

    tensor: Tensor
    dims: tuple[ViewDim, ...]

    def offset(self) -> Expr:
        """The offset of the element in memory, in elements."""
        return self.tensor.offset_of([d.coord for d in self.dims])

    def mask(self) -> Expr:
        """The condition under which the element exists; TRUE if no dimension has one."""
        return all_of([d.mask for d in self.dims])

    def __str__(self) -> str:
        names = self.tensor.dims
        coords = ", ".join(f"{n} = {d.coord}" for n, d in zip(names, self.dims, strict=True))
        mask = self.mask()
        return f"{self.tensor.name}[{coords}]" + ("" if mask is TRUE else f" where {mask}")


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
    box. Elements outside the tensor are 0; the others are rounded to ``tensor.near`` if that is set."""

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


@functools.lru_cache(maxsize=256)  # asked for after each pass, and at each copy that is interpreted
def box_address(tensor: Tensor, corner: tuple[Expr, ...], within: tuple[Expr, ...]) -> tuple[Expr, Expr]:
    """The offset of each element of a box, and the condition that it is inside the tensor."""
    steps = tensor.every or [1] * len(corner)
    coords = [a + (b if n == 1 else b * n) for a, b, n in zip(corner, within, steps, strict=True)]
    inside = [(c >= 0) & (c < n) for c, n in zip(coords, tensor.bounds, strict=True)]
    return tensor.offset_of(coords), all_of(inside)
