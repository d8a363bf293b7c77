"""Which maps write their result over an operand that nothing needs behind them.

    z = silu(y * scale + shift)      an element of y is read by the program that writes that of z

A map reads all elements of a tile before it writes them, and no two tiles have one in common.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transconv.compute import Compute, Reduction, kernels
from transconv.functional.calls.compiled_launch import program
from transconv.graph.fusion.index_ir import Piece, RegionInput
from transconv.graph.regions.region_kernel import RegionKernel, SizedTensor
from transconv.ir import TRUE


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
