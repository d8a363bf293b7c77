"""Stage 3a. In: an algorithm, and which of its tensors to copy. Out: the algorithm over the copies.

A box wants rows of channels. Where a tensor has none, a kernel of its own copies it first, and the
main kernel looks at the copy through the same view:

    pack=a      src[mb, ic, ih, iw]  -- pack_src -->  src_packed[mb, ih, iw, ic]  -- main -->  dst
    pack=a.c    ... main -->  dst_packed[mb, oh, ow, oc]  -- unpack_dst -->  dst[mb, oc, oh, ow]

The matrix unit reads operands of 32 bits along the sum only. What is summed over output channels of
weights, or over images, is then copied with those innermost:

    pack=b      wei[oc, kh, kw, ic]   -- pack_wei -->  wei_packed[ic, kh, kw, oc]  -- main -->  src
    pack=a.b    src[mb, ih, iw, ic]   -- pack_src -->  src_packed[ic, ih, iw, mb]  -- main -->  wei

A copy is an algorithm like any other, ``c = a`` with no second factor and nothing to sum, and goes
through the same pipeline. What will be multiplied as tf32 is rounded to it on the way, which may be reason
enough for a copy: else each element is rounded in registers whenever it is gathered. Rows of a copy
begin at multiples of 16 bytes, if they are not shorter; what lies between them is never read,
because a box knows how long a row is.

The filter of merged groups is copied with the zeros around its blocks, so that boxes can fetch it:

    wei[oc, ic % 4] where ic//4 == oc//4 % 16  -- pack_blocks16_wei -->  wei_packed16[oc, kh, kw, ic]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod

from transconv.algorithm import Algorithm, Axis
from transconv.ir import Layout, LayoutBlock, Tensor, Var, View, ViewDim, eq, free_vars
from transconv.merging import inner_channel

ROW_ALIGN = 16  # bytes
PACK, UNPACK, COPY = "pack_", "unpack_", "_packed"


CHANNELS = 1  # the dimension of every tensor that a copy has innermost, as a rule
IMAGES = 32  # fewer do not fill a row of shared memory


def row_of(tensor: Tensor) -> int:
    """The dimension that a copy has innermost: channels. A filter of one channel per group has as
    many output channels as its input has channels, and those are its rows."""
    return 0 if tensor.dims[0] == "oc" and tensor.shape[CHANNELS] == 1 else CHANNELS


def innermost(algorithm: Algorithm, letter: str) -> int:
    """The dimension that lies innermost in the copy of an operand: its channels, but of f32 for the
    matrix unit, which reads along the sum, the outer one of the first two if that is summed."""
    view = view_of(algorithm, letter)
    assert view is not None, f"{algorithm.name} has no operand {letter}"
    row = row_of(view.tensor) if diagonal(view, algorithm) == 1 else CHANNELS
    depthwise = all(x.size == 1 for x in algorithm.axes if x.role == "channel")
    if (letter == "c" or depthwise or algorithm.math == "ieee"
            or view.tensor.dtype.name != "f32"):
        return row
    summed = {x.var for x in algorithm.axes_of("K") if x.role == "channel" or x.size >= IMAGES}
    return 0 if summed & free_vars(view.dims[0].coord) else row


def copy_of(tensor: Tensor, inner: int | None = None, merge: int = 1) -> Tensor:
    """The workspace for a tensor: dimension ``inner`` innermost (default: ``row_of`` it), the others
    in their order (the outer one of the first two outermost), rows of 16 bytes and more padded to
    multiples of that. Same dimensions, shape and dtype; but a filter of merged groups has the channels of
    all of them."""
    inner = row_of(tensor) if inner is None else inner
    order = [inner, *range(len(tensor.shape) - 1, 1, -1), 1 - inner]
    shape = (tensor.shape[0], tensor.shape[1] * merge, *tensor.shape[2:])
    row = ROW_ALIGN // tensor.dtype.bytes
    row = row if shape[inner] >= row else 1
    blocks, step = [], 1
    for dim in order:
        blocks.append(LayoutBlock(dim, shape[dim], step))
        step *= -(-shape[dim] // row) * row if dim == inner else shape[dim]
    layout = Layout(tensor.dtype, len(shape), tuple(reversed(blocks)))
    name = f"{tensor.name}{COPY}{merge if merge > 1 else ''}"
    return Tensor(name, tensor.dims, shape, layout)


def operand_of(name: str) -> str:
    """The tensor that a workspace is a copy of; empty if it is none."""
    operand, packed, _ = name.partition(COPY)
    return operand if packed else ""


def letters(pack: str) -> list[str]:
    """``a.c`` -> a, c."""
    return pack.split(".") if pack else []


def with_letter(pack: str, letter: str) -> str:
    return ".".join(sorted({*letters(pack), letter}))


def without(pack: str, letter: str) -> str:
    return ".".join(x for x in letters(pack) if x != letter)


def workspaces(algorithm: Algorithm, pack: str, split: int) -> list[Tensor]:
    """The tensors that the copies are made in, or the main kernel writes to."""
    named = [x for x in letters(pack) if x != "c" or split == 1]
    return [_workspace(algorithm, x) for x in named]


def _workspace(algorithm: Algorithm, letter: str) -> Tensor:
    view = view_of(algorithm, letter)
    assert view is not None
    return copy_of(view.tensor, innermost(algorithm, letter), diagonal(view, algorithm))


def view_of(algorithm: Algorithm, letter: str) -> View | None:
    return {"a": algorithm.a, "b": algorithm.b, "c": algorithm.c}[letter]


def diagonal(view: View, algorithm: Algorithm) -> int:
    """How many blocks lie on the diagonal of what a view sees: 1 unless groups are merged in it."""
    return 1 if inner_channel(view, algorithm) is None else algorithm.merge


@lru_cache(maxsize=512)
def over_copies(algorithm: Algorithm, pack: str) -> Algorithm:
    """The algorithm whose views look at the copies of the tensors that ``pack`` names."""
    for letter in letters(pack):
        view = view_of(algorithm, letter)
        assert view is not None, f"{algorithm.name} has no operand {letter}"
        dims = view.dims
        if inner := inner_channel(view, algorithm):
            dims = (dims[0], ViewDim(inner.var), *dims[2:])
        over = View(_workspace(algorithm, letter), dims)
        algorithm = (replace(algorithm, a=over) if letter == "a" else
                     replace(algorithm, b=over) if letter == "b" else replace(algorithm, c=over))
    return algorithm


def copies(algorithm: Algorithm, pack: str, split: int = 1, unit: str = "mma") -> Iterator[Algorithm]:
    """The kernels that ``pack`` asks for beside the main one, those before it first.

    The parts of a split sum lie as the copy of C would; their sum goes to C itself, no kernel more.
    What the matrix ``unit`` multiplies as tf32 is rounded to it in its copy, for the unit would cut off
    what it does not take, twice as far from the number. Products element by element take all of it.
    """
    math = algorithm.math if unit == "mma" else "ieee"
    for letter in letters(pack):
        if letter == "c" and split > 1:
            continue
        view = view_of(algorithm, letter)
        assert view is not None
        tensor, copied = view.tensor, _workspace(algorithm, letter)
        if letter == "c":
            yield _copy(f"{UNPACK}{tensor.name}", copied, tensor, innermost(algorithm, letter), algorithm,
                        "ieee")
        elif diagonal(view, algorithm) > 1:
            yield _copy(f"{PACK}blocks{algorithm.merge}_{tensor.name}", tensor, copied,
                        innermost(algorithm, letter), algorithm, math, _in_blocks(view, algorithm))
        else:
            inner = innermost(algorithm, letter)
            yield _copy(f"{PACK}{tensor.name}", tensor, copied, inner, algorithm, math)


def _in_blocks(view: View, algorithm: Algorithm) -> ViewDim:
    """Which inner channel of a filter a point of its copy shows, and whether it is in a block."""
    oc, ic = (Var(n) for n in view.tensor.dims[:2])
    across = inner_channel(view, algorithm)
    along = next(x for x in algorithm.axes if x.role == "channel" and x is not across)
    each, rows = view.tensor.shape[1], along.size // algorithm.merge
    return ViewDim(ic % each, eq(ic // each, oc // rows % algorithm.merge))


def _copy(name: str, a: Tensor, c: Tensor, inner: int, algorithm: Algorithm, math: str,
          channel: ViewDim | None = None) -> Algorithm:
    """``c = a`` for all elements; the innermost dimension of the copy counts fastest, the other
    channels next where the original has them innermost. Neighbouring dimensions that are one run of
    memory in both tensors are one axis: an image's rows are. ``channel``: which channel of A goes to
    one of C, if not the same one. A copy that lies as the original does is one run from end to end."""
    whole = () if channel else _whole(a, c)
    runs = [whole] if whole else _runs(a, c, inner)
    fastest, channels = (0, 0) if whole else (runs.index((inner,)), runs.index((CHANNELS,)))
    order = [d for d in range(len(runs)) if d != fastest]
    if inner != CHANNELS and a.shape[CHANNELS] > 1 and rows_of_channels(a, CHANNELS) and not whole:
        order.append(order.pop(order.index(channels)))
    order.append(fastest)
    a, c = _merged(a, runs), _merged(c, runs)
    axes = tuple(Axis(c.dims[d], c.shape[d], "channel" if d == fastest else "pixel") for d in order)
    dims = tuple(ViewDim(Var(name)) for name in c.dims)
    seen = tuple(channel or x if d == channels else x for d, x in enumerate(dims))
    return Algorithm(name, axes, View(a, seen), None, View(c, dims), algorithm.acc,
                     math=math)


def _whole(a: Tensor, c: Tensor) -> tuple[int, ...]:
    """All dimensions, outermost first, if both tensors are the same run of memory without gaps."""
    strides = c.layout.strides()
    if strides is None or strides != a.layout.strides():
        return ()
    order = sorted(range(len(strides)), key=lambda d: (-strides[d], c.shape[d]))
    step = 1
    for dim in reversed(order):
        if c.shape[dim] != 1 and strides[dim] != step:
            return ()
        step *= c.shape[dim]
    return tuple(order)


def _runs(a: Tensor, c: Tensor, inner: int) -> list[tuple[int, ...]]:
    """Which dimensions become one. Those of size 1 join any neighbour but the channels."""
    apart = {inner, CHANNELS}
    runs: list[tuple[int, ...]] = []
    strides = [t.layout.strides() for t in (a, c)]
    for dim, size in enumerate(a.shape):
        before = runs[-1] if runs else (inner,)
        wide = [d for d in before if a.shape[d] != 1]
        if not apart.intersection(before) and dim not in apart and all(strides) and (
                size == 1 or not wide
                or all(s is not None and s[wide[-1]] == s[dim] * size for s in strides)):
            runs[-1] = (*before, dim)
        else:
            runs.append((dim,))
    return runs


def _merged(tensor: Tensor, runs: list[tuple[int, ...]]) -> Tensor:
    """The same memory with fewer dimensions."""
    if all(len(run) == 1 for run in runs):
        return tensor
    strides = tensor.layout.strides()
    assert strides is not None
    shape = tuple(prod(tensor.shape[d] for d in run) for run in runs)
    inner = [next((d for d in reversed(run) if tensor.shape[d] != 1), run[-1]) for run in runs]
    layout = Layout.from_strides(tensor.dtype, shape, [strides[d] for d in inner],
                                 tensor.layout.offset)
    return Tensor(tensor.name, tuple("_".join(tensor.dims[d] for d in run) for run in runs), shape,
                  layout)


def is_copy(algorithm: Algorithm) -> bool:
    """Whether an algorithm only moves elements."""
    return algorithm.b is None and not algorithm.axes_of("K") and not algorithm.epilogue


def rounds(copy: Algorithm) -> bool:
    """Whether a copy rounds its elements to tf32."""
    return copy.math == "tf32" and copy.a.tensor.dtype.name == "f32"


def wants_rounding(view: View, algorithm: Algorithm) -> bool:
    """Whether an operand for the matrix unit has to be rounded to tf32, and no copy has done it."""
    return (algorithm.math == "tf32" and view.tensor.dtype.name == "f32"
            and not operand_of(view.tensor.name))


def why_not_copied(algorithm: Algorithm, letter: str, gathered: bool = False) -> str | None:
    """None if a copy of an operand would lie in another way than it does, else the reason. A copy that
    the matrix unit's operand is ``gathered`` from may lie in the same way, if it is rounded."""
    view = view_of(algorithm, letter)
    assert view is not None
    name = view.tensor.name
    if 0 in view.tensor.shape:
        return f"{name} is empty"
    if diagonal(view, algorithm) > 1:
        stored = letter == "c"
        return f"only the blocks of {name} are stored, one element at a time" if stored else None
    inner = innermost(algorithm, letter)
    if rows_of_channels(view.tensor, inner) and not (gathered and wants_rounding(view, algorithm)):
        which = "channels" if inner == CHANNELS else f"summed {view.tensor.dims[inner]}"
        return (f"{name} already has its {which} innermost and rows that begin at multiples of "
                "16 bytes or are shorter")
    return None


def rows_of_channels(tensor: Tensor, inner: int | None = None) -> bool:
    """Whether a tensor already lies as a copy would: channels next to one another, everything else
    at multiples of 16 bytes if rows are not shorter."""
    strides = tensor.layout.strides()
    if strides is None:
        return False
    inner = row_of(tensor) if inner is None else inner
    others = [s for d, s in enumerate(strides) if d != inner and tensor.shape[d] > 1]
    short = tensor.shape[inner] * tensor.dtype.bytes < ROW_ALIGN
    return (strides[inner] == 1 or tensor.shape[inner] == 1) and (short or all(
        s * tensor.dtype.bytes % ROW_ALIGN == 0 for s in others))


def share(algorithm: Algorithm) -> float:
    """The part of the copies' cost that an algorithm has to bear: all of it, or, as one of several
    stride phases, what it owns of the result."""
    owned = prod(x.size for x in algorithm.axes if algorithm.kind(x.name) != "K")
    return min(1.0, owned / max(1, prod(algorithm.c.tensor.shape))) if algorithm.phase else 1.0
