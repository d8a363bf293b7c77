"""Layout: the positions of an array's elements in memory.

A layout is an ordered list of blocks (dimension, size, stride), outermost first. Every dimension has
at least one block, so offsets have one rule: split a coordinate by the sizes of its blocks, multiply the
digits by their strides, and add up.

Text forms of layouts, as (dimension, size, stride) triples: layout.py wraps them.

    4n2c7h7w32n32c          sizes and dims from outermost to innermost, gapless; ``+128``: offset
    8n@4096 64c@64          the same with the stride of each block (commas may replace the spaces)
    strides(4096,64,8,1)    one stride per dim of the given shape, ``+128``: offset
    nhwc  hwio  acdb        gapless, in this order
    axb                     the same, x stands for all dims that are not named
    nChw16c  NChw32n32c     a capital is a dim that is split: its inner blocks follow in order
    N(C/4)HW4               NChw-style spelling of nChw4c
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from transconv.ir.dtype import DType
from transconv.ir.expr import ZERO, Expr, Like, as_expr
from transconv.ir.node import Node, node
from transconv.ir.rules.names import why_not_text
from transconv.support import LayoutError, nearest

Triple = tuple[int, int, int]  # dimension, size, stride in elements
Parsed = tuple[int, list[Triple], int]  # number of dims, blocks, offset

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ACTIVATION = "ncdhw"
_WEIGHT = "goidhw"

_SIZED = re.compile(r"(?:\d+[a-z])+")
_EXPLICIT = re.compile(r"\d+[a-z]@-?\d+(?:[ ,]+\d+[a-z]@-?\d+)*")
_STRIDES = re.compile(r"strides\((-?\d+(?:,-?\d+)*)\)")
_TAG = re.compile(r"([A-Za-z]+)((?:\d+[a-z])*)")
_DIVIDED = re.compile(r"([A-Z]*)\(?([A-Z])/(\d+)\)?([A-Z]*?)(\d+)")
_OFFSET = re.compile(r"(.*?[^@\s])\s*([+-]\d+)")
_FORMS = (
    "a form such as nhwc, nChw16c, aBcd16b, axb, N(C/4)HW4, 4n2c7h7w32n32c, 8a@64 8b@8, or strides(64,8,1)"
)

ELSEWHERE = {"channels_last": "nhwc", "channels_first": "nchw", "contiguous": "nchw"}


def layout_text(blocks: Sequence[Triple], packed: bool, offset: int, letters: str) -> str:
    """Print blocks; strides are shown unless ``packed`` says that they follow from the sizes."""
    if packed:
        text = "".join(f"{size}{letters[dim]}" for dim, size, _ in blocks)
    else:
        text = " ".join(f"{size}{letters[dim]}@{stride}" for dim, size, stride in blocks)
    return (text or "scalar") + (f"{offset:+d}" if offset else "")


def layout_tag(blocks: Sequence[Triple], ndims: int, letters: str) -> str | None:
    """The tag of packed blocks, or None unless the outermost blocks of all dims come first."""
    outer, inner = blocks[:ndims], blocks[ndims:]
    if sorted(dim for dim, _, _ in outer) != list(range(ndims)):
        return None
    split = {dim for dim, _, _ in inner}
    names = [letters[dim].upper() if dim in split else letters[dim] for dim, _, _ in outer]
    return "".join(names) + "".join(f"{size}{letters[dim]}" for dim, size, _ in inner)


def parse_blocks(text: str, shape: Sequence[int] | None, letters: str | None) -> Parsed:
    """Read any of the forms. Raises LayoutError, with a message of one line."""
    if not text.isascii():
        raise LayoutError(f"layout '{text}': {why_not_text(text)}")
    body, offset = text.strip(), 0
    if found := _OFFSET.fullmatch(body):
        body, offset = found.group(1), int(found.group(2))
    if found := _STRIDES.fullmatch(body):
        ndims, blocks = _from_strides(text, [int(s) for s in found.group(1).split(",")], shape)
    elif body == "scalar":
        ndims, blocks = 0, []
    elif _SIZED.fullmatch(body) or _EXPLICIT.fullmatch(body):
        ndims, blocks = _from_sizes(text, body, letters)
    else:
        ndims, blocks = _from_tag(text, _undivided(text, body), shape, letters)
    if shape is not None:
        _check_covers(text, blocks, ndims, shape)
    return ndims, blocks, offset


def _from_strides(text: str, strides: list[int], shape: Sequence[int] | None) -> tuple[int, list[Triple]]:
    shape = _need_shape(text, shape)
    if len(strides) != len(shape):
        raise LayoutError(
            f"layout '{text}' has {len(strides)} strides; expected {len(shape)}, for shape {tuple(shape)}"
        )
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], -shape[d], d))
    return len(shape), [(d, int(shape[d]), strides[d]) for d in order]


def _from_sizes(text: str, body: str, letters: str | None) -> tuple[int, list[Triple]]:
    items = re.findall(r"(\d+)([a-z])(?:@(-?\d+))?", body)
    letters = letters or _guess(text, {letter for _, letter, _ in items})
    dims = [_dim(text, letter, letters) for _, letter, _ in items]
    missing = set(range(len(letters))) - set(dims)
    if missing:
        raise LayoutError(
            f"layout '{text}' has no block of {' '.join(letters[d] for d in sorted(missing))}; expected "
            f"every dim of {letters}"
        )
    sizes = [int(size) for size, _, _ in items]
    strides = [int(stride) for _, _, stride in items] if "@" in body else _packed(sizes)
    return len(letters), list(zip(dims, sizes, strides, strict=True))


def _undivided(text: str, body: str) -> str:
    """``N(C/4)HW4`` as ``nChw4c``; any other form unchanged."""
    found = _DIVIDED.fullmatch(body)
    if found is None:
        return body
    before, dim, size, after, inner = found.groups()
    if size != inner:
        raise LayoutError(
            f"layout '{text}' divides {dim} by {size} but ends in {inner}; "
            f"expected both to be the size of one block"
        )
    return f"{before.lower()}{dim}{after.lower()}{size}{dim.lower()}"


def _from_tag(
    text: str, body: str, shape: Sequence[int] | None, letters: str | None
) -> tuple[int, list[Triple]]:
    found = _TAG.fullmatch(body)
    if found is None:
        hint = nearest(text, (), ELSEWHERE)
        raise LayoutError(f"layout '{text}' is unreadable; expected {_FORMS}{hint}")
    shape = _need_shape(text, shape)
    letters = _letters_of_tag(text, body, letters, len(shape))
    outer = _expand(text, found.group(1), letters)
    dims = [_dim(text, name.lower(), letters) for name in outer]
    if sorted(dims) != list(range(len(shape))):
        raise LayoutError(
            f"layout '{text}' names the dims {' '.join(outer)}; "
            f"expected each of {' '.join(letters[: len(shape)])} once"
        )
    inner = [
        (_dim(text, letter, letters), int(size))
        for size, letter in re.findall(r"(\d+)([a-z])", found.group(2))
    ]
    capitals = {d for d, name in zip(dims, outer, strict=True) if name.isupper()}
    split = {d for d, _ in inner}
    for d in capitals ^ split:
        wanted = f"{letters[d]} with no block" if d in capitals else f"{letters[d].upper()}"
        raise LayoutError(
            f"layout '{text}' splits {letters[d]} in one place only; expected {wanted}, because capitals "
            f"are dims that have inner blocks{'' if inner else f'; did you mean {text.lower()}?'}"
        )
    if any(size < 1 for _, size in inner):
        raise LayoutError(f"layout '{text}' has a block of size 0; expected at least 1")
    return len(shape), _split(dims, inner, shape)


def _split(dims: list[int], inner: list[tuple[int, int]], shape: Sequence[int]) -> list[Triple]:
    per_dim = [1] * len(shape)
    for d, size in inner:
        per_dim[d] *= size
    order = [(d, -(-int(shape[d]) // per_dim[d])) for d in dims] + inner
    strides = _packed([size for _, size in order])
    return [(d, size, stride) for (d, size), stride in zip(order, strides, strict=True)]


def _letters_of_tag(text: str, body: str, letters: str | None, ndims: int) -> str:
    """The dimension letters of a tag: a, b, c ... if it uses those, else ``letters``, else a guess."""
    used = {c for c in body.lower() if c.isalpha()}
    alphabet = LETTERS[:ndims]
    if "x" in used or used == set(alphabet):
        return alphabet
    return letters or _guess(text, used)


def _guess(text: str, used: set[str]) -> str:
    for known in (LETTERS[: len(used)], _ACTIVATION, _WEIGHT):
        names = "".join(c for c in known if c in used)
        if len(names) == len(used) and (known[0] in names or "o" in names):
            return names
    raise LayoutError(
        f"layout '{text}' mixes the dims {' '.join(sorted(used))}; "
        f"expected letters of abcdef, of {_ACTIVATION}, or of {_WEIGHT}"
    )


def _expand(text: str, outer: str, letters: str) -> list[str]:
    """Replace the meta-letter x by all dims that the tag does not name, in order."""
    if outer.count("x") > 1:
        raise LayoutError(f"layout '{text}' has x twice; expected it once, for all unnamed dims")
    named = set(outer.lower())
    rest = "".join(c for c in letters if c not in named)
    return list(outer.replace("x", rest) if "x" in outer else outer)


def _dim(text: str, letter: str, letters: str) -> int:
    at = letters.find(letter)
    if at < 0:
        raise LayoutError(
            f"layout '{text}' has an unknown dim '{letter}'; expected one of {' '.join(letters)}"
        )
    return at


def _packed(sizes: Iterable[int]) -> list[int]:
    strides: list[int] = []
    step = 1
    for size in reversed(list(sizes)):
        strides.append(step)
        step *= max(1, size)
    return strides[::-1]


def _need_shape(text: str, shape: Sequence[int] | None) -> Sequence[int]:
    if shape is None:
        raise LayoutError(
            f"layout '{text}' has no sizes; expected a shape beside it, or a form such as 4n2c7h7w32n32c"
        )
    return shape


def _check_covers(text: str, blocks: list[Triple], ndims: int, shape: Sequence[int]) -> None:
    if ndims != len(shape):
        raise LayoutError(
            f"layout '{text}' has {ndims} dims; expected {len(shape)}, for shape {tuple(shape)}"
        )
    extents = [1] * ndims
    for d, size, _ in blocks:
        extents[d] *= size
    if any(extent < size for extent, size in zip(extents, shape, strict=True)):
        raise LayoutError(
            f"layout '{text}' holds {tuple(extents)} elements; expected at least the shape {tuple(shape)}"
        )


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
    that, and also ``nhwc``, ``nChw16c``, ``aBcd16b``, ``N(C/4)HW4`` and strides."""

    dtype: DType
    ndims: int
    blocks: tuple[LayoutBlock, ...]
    offset: int = 0

    @staticmethod
    def from_strides(
        dtype: DType, shape: Sequence[int], strides: Sequence[int], offset: int = 0
    ) -> Layout:
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
    def parse(
        text: str, dtype: DType, shape: Sequence[int] | None = None, letters: str | None = None
    ) -> Layout:
        """Read any text form. ``letters`` names the dimensions in order (``nchw``); without it the letters
        of the text decide between ``abcdef``, activations and weights. ``shape`` is needed where the text
        has no sizes; a blocked dimension is padded up to its block. Raises LayoutError, one line."""
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
                    found.append((*box[:i], slice(beyond, None), *box[i + 1 :]))
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

        return any(
            not stride
            or any(leads_back(at, n * stride) for n in range(1, min(size - 1, reach[at] // stride) + 1))
            for at, (stride, size) in enumerate(blocks)
        )

    def of_dim(self, dim: int) -> tuple[LayoutBlock, ...]:
        """The blocks of one dimension, outermost first."""
        return tuple(b for b in self.blocks if b.dim == dim)

    def strides(self) -> tuple[int, ...] | None:
        """One stride per dimension, or None for a blocked layout."""
        per_dim = [self.of_dim(d) for d in range(self.ndims)]
        if any(len(blocks) != 1 for blocks in per_dim):
            return None
        return tuple(blocks[0].stride for blocks in per_dim)

    def split(self, at: int, size: int) -> Layout:
        """The same positions, block ``at`` divided in two, of which the inner one has this size. Raises
        LayoutError unless the block is a multiple of it."""
        b = self.blocks[at]
        if size < 1 or b.size % size:
            raise LayoutError(f"layout '{self}': a block of {b.size} is divided by {size}, not a divisor")
        two = LayoutBlock(b.dim, b.size // size, b.stride * size), LayoutBlock(b.dim, size, b.stride)
        return replace(self, blocks=(*self.blocks[:at], *two, *self.blocks[at + 1 :]))

    def sub(self, start: Sequence[int], shape: Sequence[int]) -> Layout:
        """The layout of a box of this array, of a shape and from a coordinate on. Raises LayoutError for
        one that begins or ends within a block and does not lie in it alone."""
        starts, left, blocks, offset = [*start], [*shape], [], self.offset
        for place, b in reversed([*enumerate(self.blocks)]):
            at, size, most = starts[b.dim], left[b.dim], max(1, b.size)
            outermost = all(x.dim != b.dim for x in self.blocks[:place])
            whole = not outermost and at % most == size % most == 0
            first, extent = (0, b.size) if whole else (at if outermost else at % most, size)
            if first < 0 or first + extent > b.size:
                box = f"the box of {tuple(shape)} at {tuple(start)}"
                raise LayoutError(f"layout '{self}': {box} crosses a block of {b.size}")
            blocks.append(LayoutBlock(b.dim, extent, b.stride))
            offset += first * b.stride
            starts[b.dim], left[b.dim] = at // most, size // most if whole else 1
        return replace(self, blocks=tuple(reversed(blocks)), offset=offset)

    def reinterpret(self, dtype: DType) -> Layout:
        """The same memory as elements of a wider type, of which each is several neighbours, or of a
        narrower one: each element is several, which are neighbours in its dimension. Raises LayoutError
        where elements are no neighbours, or not as many as a multiple."""
        few, many = sorted((dtype.bits, self.dtype.bits))
        n, wide = many // few, dtype.bits > self.dtype.bits
        least = 1 + wide  # of a wide type several are one
        near = [i for i, b in enumerate(self.blocks) if b.stride == 1 and b.size >= least]
        if not near:
            raise LayoutError(f"layout '{self}': no two elements are neighbours")
        if not wide:
            blocks = [replace(b, stride=b.stride * n) for b in self.blocks]
            blocks.insert(near[-1] + 1, LayoutBlock(self.blocks[near[-1]].dim, n, 1))
            return Layout(dtype, self.ndims, tuple(blocks), self.offset * n)
        made = self.split(near[-1], n)
        kept = [b for i, b in enumerate(made.blocks) if i != near[-1] + 1]
        if any(b.stride % n for b in kept) or self.offset % n:
            raise LayoutError(f"layout '{self}': not all strides are multiples of {n} elements")
        blocks = [replace(b, stride=b.stride // n) for b in kept]
        return Layout(dtype, self.ndims, tuple(blocks), self.offset // n)

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
