"""In which order the values of a region lie in memory: torch's, but for images of convolutions.

    conv -> norm -> silu -> conv     each value that is stored between two kernels has its features last

Convolutions read and store boxes of features, and what stands between them is as fast in any order that
all have in common. So values that a convolution reads or makes, and those that maps, pads, windows and
concatenations connect with such ones, lie with features last, whatever torch says; what is handed out
keeps its order, but for what only the backward graph sees (regions/saved_tensors.py).

Also here: which maps write their result over an operand that nothing needs behind them.

    z = silu(y * scale + shift)      an element of y is read by the program that writes that of z

A map reads all elements of a tile before it writes them, and no two tiles have one in common.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import prod

from transconv.compute import Compute, Reduction, kernels
from transconv.conv import Prop
from transconv.functional.calls.compiled_launch import program
from transconv.graph.fusion.index_ir import (
    Mapped,
    MovedView,
    Piece,
    PiecewiseIndex,
    ProductSum,
    RegionInput,
)
from transconv.graph.regions.region_kernel import RegionKernel, SizedTensor
from transconv.graph.sizes import Length, like, packed
from transconv.ir import TRUE

ALIGNED = 16  # bytes of which the rows of boxes are multiples


def features_last(shape: Sequence[Length]) -> tuple[Length, ...]:
    """Dense strides with the second dim innermost, as boxes of a convolution like it."""
    inner = [prod(shape[d + 1:]) * shape[1] for d in range(2, len(shape))]
    return (prod(shape[1:]), 1, *inner)


def memory_of(piece: Piece) -> tuple[Length, ...]:
    """The strides in which a value is stored: torch's, where its elements have places of their own."""
    dense = tuple(prod(piece.shape[d + 1:]) for d in range(len(piece.shape)))
    if piece.strides is None:
        return dense
    return piece.strides if packed(piece.shape, piece.strides) is not None else dense


def aliased(piece: Piece) -> Piece:
    """What a value is a view of, in the same memory."""
    while isinstance(piece, MovedView) and piece.alias:
        piece = piece.of
    return piece


def images(order: Iterable[Piece]) -> set[Piece]:
    """Of values, operands first, those that are images of convolutions or connected with such ones."""
    pieces = [*order]
    near: dict[Piece, list[Piece]] = {}
    for piece in pieces:
        for x in piece.operands if isinstance(piece, (Mapped, MovedView, PiecewiseIndex)) else ():
            joined = isinstance(piece, PiecewiseIndex) and piece.along == 1
            if len(x.shape) == len(piece.shape) > 2 and (joined or x.shape[1] == piece.shape[1]):
                near.setdefault(x, []).append(piece)
                near.setdefault(piece, []).append(x)
    left = [x for p in pieces if isinstance(p, ProductSum) for x in _own(p)]
    found = {*left}
    while left:
        new = [x for x in near.get(left.pop(), ()) if x not in found]
        found |= {*new}
        left += new
    return {x for x in found if like(x.shape[1]) * x.dtype.itemsize % ALIGNED == 0}


def _own(product: ProductSum) -> Iterator[Piece]:
    """The images of a convolution."""
    if product.relation is None:
        return
    prop = product.relation[1]
    for name, factor in zip(prop.operands, product.factors, strict=True):
        if name != "wei":
            yield factor.of
    if prop is not Prop.BWD_W:
        yield product


def in_place(kernel: RegionKernel, done: Collection[Piece], memory: dict[Piece, SizedTensor],
             placed: Collection[Piece]) -> dict[int, int]:
    """Of results, by their places among what is stored, the places of the operands that they replace,
    among what is given. ``done``: what nothing needs behind the kernel; ``memory``: how that lies of it
    which kernels have stored; ``placed``: what lies in another value's memory."""
    if kernel.group.kind != "map" or kernel.sized is not None or not isinstance(kernel.asked, str):
        return {}
    found = program(kernel.asked)
    if len(kernels(found.compute)) != 1 or any(isinstance(s, Reduction) for s in found.compute.steps):
        return {}
    places: dict[int, int] = {}
    for i, into in enumerate(found.stored):
        for j, (x, piece) in enumerate(zip(found.given, kernel.given, strict=True)):
            own = memory.get(piece)
            if (own == kernel.memory[i] and piece in done and not isinstance(piece, RegionInput)
                    and piece not in placed and kernel.stored[i] not in placed
                    and j not in places.values() and _alike(found.compute, x, into)):
                places[i] = j
                break
    return places


def _alike(compute: Compute, read: str, stored: str) -> bool:
    """Whether a tensor is read where another one is stored, and nowhere else."""
    views = [*(r.view for r in compute.reads), *(w.view for w in compute.writes)]
    seen = [([d.coord for d in v.dims], v.mask()) for v in views if v.tensor.name in (read, stored)]
    return len(seen) == 2 and seen[0] == seen[1] and seen[0][1] is TRUE


def replacing(region: Sequence[RegionKernel], last: Sequence[Collection[Piece]],
              placed: Collection[Piece] = ()) -> list[dict[int, int]]:
    """``in_place`` of each kernel of a region."""
    memory: dict[Piece, SizedTensor] = {}
    found = []
    for kernel, done in zip(region, last, strict=True):
        found.append(in_place(kernel, done, memory, placed))
        memory |= zip(kernel.stored, kernel.memory, strict=True)
    return found
