"""Layout: the positions of an array's elements in memory.

A layout is an ordered list of blocks (dimension, size, stride), outermost first. Every dimension has
at least one block, so offsets have one rule: split a coordinate by the sizes of its blocks, multiply the
digits by their strides, and add up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from transconv.ir.dtype import DType
from transconv.ir.expr import ZERO, Expr, Like, as_expr
from transconv.ir.node import Node, node
from transconv.ir.text.layout_text import LETTERS, layout_tag, layout_text, parse_blocks


@node
class LayoutBlock(Node):
    """``size`` consecutive steps along dimension ``dim``, ``stride`` elements apart."""

    dim: int
    size: int
    stride: int


@node
class Layout(Node):
    """Blocks from outermost to innermost, the offset of the first element, and the element type.

    The sizes of a dimension's blocks multiply to its (padded) extent. Strides and offset count
    elements. ``str()`` prints sizes with a letter per dimension (``4a2b7c7d32a32b``); ``parse`` reads
    that, and also ``nhwc``, ``nChw16c``, ``aBcd16b``, ``N(C/4)HW4`` and strides.
    """

    dtype: DType
    ndims: int
    blocks: tuple[LayoutBlock, ...]
    offset: int = 0

    @staticmethod
    def from_strides(dtype: DType, shape: Sequence[int], strides: Sequence[int],
                     offset: int = 0) -> Layout:
        """The layout of an array with a stride per dimension, in elements as in torch; blocks are ordered
        by stride, largest first."""
        order = sorted(range(len(shape)), key=lambda d: (-strides[d], -shape[d], d))
        blocks = tuple(LayoutBlock(d, int(shape[d]), int(strides[d])) for d in order)
        return Layout(dtype, len(shape), blocks, offset)

    @staticmethod
    def dense(dtype: DType, shape: Sequence[int], order: Sequence[int] | None = None) -> Layout:
        """A layout without gaps, with dimensions in ``order``, outermost first (default: 0, 1, ...)."""
        order = tuple(range(len(shape))) if order is None else tuple(order)
        strides = [0] * len(shape)
        step = 1
        for d in reversed(order):
            strides[d] = step
            step *= max(1, int(shape[d]))
        blocks = tuple(LayoutBlock(d, int(shape[d]), strides[d]) for d in order)
        return Layout(dtype, len(shape), blocks)

    @staticmethod
    def parse(text: str, dtype: DType, shape: Sequence[int] | None = None,
              letters: str | None = None) -> Layout:
        """Read any text form. ``letters`` names the dimensions in order (``nchw``); without it the
        letters of the text decide between ``abcdef``, activations and weights. ``shape`` is needed
        where the text has no sizes; a blocked dimension is padded up to its block. Raises
        LayoutError, one line. See text/layout_text.py for the forms."""
        ndims, blocks, offset = parse_blocks(text, shape, letters)
        return Layout(dtype, ndims, tuple(LayoutBlock(*b) for b in blocks), offset)

    def text(self, letters: str = LETTERS) -> str:
        """The text form with these dimension letters; strides are shown (``8a@4096 64b@64``) only
        where blocks in order do not imply them, the offset (``+128``) only where it is not 0."""
        return layout_text(self._triples, self.is_packed, self.offset, letters)

    def tag(self, letters: str = LETTERS) -> str | None:
        """The text form without sizes (``nChw16c``), read back with a shape, if there is one."""
        if not self.is_packed or self.offset:
            return None
        return layout_tag(self._triples, self.ndims, letters)

    def __str__(self) -> str:
        return self.text()

    @property
    def _triples(self) -> tuple[tuple[int, int, int], ...]:
        return tuple((b.dim, b.size, b.stride) for b in self.blocks)

    @property
    def is_packed(self) -> bool:
        """Whether every stride is the product of the sizes after it: no gaps, in block order."""
        step = 1
        for b in reversed(self.blocks):
            if b.stride != step:
                return False
            step *= max(1, b.size)
        return True

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill one interval of memory, in any order, without overlap."""
        if any(b.size == 0 for b in self.blocks):
            return True
        step = 1
        for stride, size in sorted((b.stride, b.size) for b in self.blocks if b.size > 1):
            if stride != step:
                return False
            step *= size
        return True

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The stored shape of a logical shape: each size rounded up to a multiple of its inner blocks."""
        sizes = []
        for d, size in enumerate(shape):
            inner = math.prod(b.size for b in self.of_dim(d)[1:])
            sizes.append(-(-size // inner) * inner if inner else 0)
        return tuple(sizes)

    @property
    def extents(self) -> tuple[int, ...]:
        """The size of each dimension, padding included."""
        sizes = [1] * self.ndims
        for b in self.blocks:
            sizes[b.dim] *= b.size
        return tuple(sizes)

    def padding(self, shape: Sequence[int]) -> list[tuple[slice, ...]]:
        """The stored elements beyond a logical shape, as boxes: each a slice per block, in block order."""
        found = []
        for dim, size in enumerate(shape):
            at = [i for i, b in enumerate(self.blocks) if b.dim == dim]
            inner, rest = self.extents[dim], size
            box = [slice(None)] * len(self.blocks)
            # A coordinate is padding if its digits equal those of the size up to a block, and are greater
            # there: one box per block.
            for i in at:
                inner //= max(1, self.blocks[i].size)
                digit, rest = divmod(rest, max(1, inner))
                beyond = digit if i == at[-1] else digit + 1
                if beyond < self.blocks[i].size:
                    found.append((*box[:i], slice(beyond, None), *box[i + 1:]))
                box[i] = slice(digit, digit + 1)
        return found

    @property
    def span(self) -> int:
        """One more than the largest element offset; 0 for an empty array."""
        if any(b.size == 0 for b in self.blocks):
            return 0
        return self.offset + 1 + sum((b.size - 1) * b.stride for b in self.blocks)

    @property
    def overlaps(self) -> bool:
        """Whether two elements share an offset: whether steps along the blocks, not all 0, add up to 0."""
        if self.is_dense:
            return False
        blocks = sorted((abs(b.stride), b.size) for b in self.blocks if b.size > 1)
        reach = [0]  # the largest offset that steps along the blocks before can add up to
        for stride, size in blocks:
            reach.append(reach[-1] + (size - 1) * stride)

        @functools.cache
        def leads_back(count: int, away: int) -> bool:
            """Whether some steps along the first ``count`` blocks add up to ``-away`` elements."""
            if not count:
                return away == 0
            (stride, size), near = blocks[count - 1], reach[count - 1]
            least = max(1 - size, -((near + away) // stride)) if stride else 0
            most = min(size - 1, (near - away) // stride) if stride else 0
            return any(leads_back(count - 1, away + n * stride) for n in range(least, most + 1))

        return any(not stride or any(leads_back(at, n * stride)
                                     for n in range(1, min(size - 1, reach[at] // stride) + 1))
                   for at, (stride, size) in enumerate(blocks))

    def of_dim(self, dim: int) -> tuple[LayoutBlock, ...]:
        """The blocks of one dimension, outermost first."""
        return tuple(b for b in self.blocks if b.dim == dim)

    def strides(self) -> tuple[int, ...] | None:
        """One stride per dimension, or None for a blocked layout."""
        per_dim = [self.of_dim(d) for d in range(self.ndims)]
        if any(len(blocks) != 1 for blocks in per_dim):
            return None
        return tuple(blocks[0].stride for blocks in per_dim)

    def offset_of(self, coords: Sequence[Like]) -> Expr:
        """The offset of a coordinate (one entry per dimension), in elements."""
        total: Expr = as_expr(self.offset)
        for d, coord in enumerate(coords):
            inner = 1
            for b in reversed(self.of_dim(d)):
                at = as_expr(coord)
                outermost = b is self.of_dim(d)[0]
                at = at // inner if inner > 1 else at
                at = at if outermost else at % b.size
                inner *= b.size
                total = at * b.stride if total is ZERO else total + at * b.stride
        return total
