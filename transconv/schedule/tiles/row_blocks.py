"""How a schedule divides the rows that are reduced, and whether they stay in registers.

    red=lane     one thread reduces a row
    red=warp     threads of one warp share a row and combine their results by shuffles
    red=block    threads of several warps share a row and combine their results in shared memory
    red=split    several programs share a row and combine their results in memory (see ``reduce=``)

    row=held     a tile covers the row: its elements are loaded once for all sweeps
    row=again    it does not: every sweep loads them again

Both follow from the blocks, the warps and ``split_k``; a schedule whose words contradict them is illegal.
Triton lays out the threads of a program along the innermost block first, each with 16 bytes of it, then
along the next one.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from transconv.compute import Compute, axis_strides, touched
from transconv.schedule.counts import k_steps, tile
from transconv.schedule.schedule import Block, Schedule
from transconv.target import Target

VECTOR = 16  # bytes that a thread loads at once
NOWHERE = 1 << 40  # the stride along a block that the tensor does not vary along

MEANS = {"lane": "a thread has pieces of a row to itself",
         "warp": "threads of one warp share a row",
         "block": "threads of several warps share a row",
         "split": "several programs share a row"}
EXPECTED = {"lane": "no block of what is reduced, or one of 16 bytes",
            "warp": "a smaller block of what is reduced, or fewer warps",
            "block": "a larger block of what is reduced, and more warps",
            "split": "split_k=2 or more, and a smaller block of what is reduced"}


def divided(c: Schedule, compute: Compute, target: Target) -> str:
    """How rows are divided: ``lane``, ``warp``, ``block`` or ``split``; empty if nothing is reduced, and
    for products."""
    if not compute.streams or compute.sum is None:
        return ""
    if c.split_k > 1:
        return "split"
    return within(c.blocks, c.warps, tile(c, compute, "K"), compute, target.warp_size)


def within(blocks: tuple[Block, ...], warps: int, length: int, compute: Compute, warp: int) -> str:
    """How the threads of one program divide rows, if a tile has ``length`` elements of each: ``lane``,
    ``warp`` or ``block``. ``warp``: threads of a warp."""
    strides, size, reduced = _read_most(compute)
    threads = warps * warp
    inner = min(blocks, key=lambda b: abs(strides[b.last]) or NOWHERE, default=None)
    if inner is None:
        return "lane"
    along = min(threads, max(1, inner.extent * size // VECTOR))
    if inner.first in reduced:
        sharing, reach = along, along
    else:
        sharing = min(threads // along, length)
        reach = along * sharing
    return "lane" if sharing <= 1 else "warp" if reach <= warp else "block"


@lru_cache(maxsize=256)
def _read_most(compute: Compute) -> tuple[dict[str, int], int, frozenset[str]]:
    """The strides and the element's bytes of the largest input, and the reduced axes."""
    view = max((r.view for r in compute.reads), key=lambda v: touched(v, compute),
               default=compute.c)
    reduced = frozenset(x.name for x in compute.axes_of("K"))
    return axis_strides(view, compute), view.tensor.dtype.bytes, reduced


def kept(c: Schedule, compute: Compute) -> str:
    """``held`` or ``again``; empty if there is only one sweep."""
    if len(compute.sweeps.each) < 2:
        return ""
    return "held" if k_steps(c, compute) == 1 else "again"


def told(c: Schedule, compute: Compute, target: Target) -> str:
    """The values of ``red`` and ``row`` that a schedule implies, as text: ``red=warp row=held``; empty if
    nothing is reduced."""
    found = {"red": divided(c, compute, target), "row": kept(c, compute)}
    return " ".join(f"{word}={value}" for word, value in found.items() if value)


def why_not_red(c: Schedule, compute: Compute, target: Target) -> str | None:
    """Relies on the rule of ``split_k``."""
    if not c.red:
        return None
    found = divided(c, compute, target)
    if not found:
        why = "reduces nothing" if compute.sum is None else "is a product, whose sum split_k divides"
        return f"red={c.red}: {compute.name} {why}"
    if found != c.red:
        blocks = " ".join(map(str, c.blocks)) or "one element a step"
        return (f"red={c.red}: with {blocks} warps={c.warps} split_k={c.split_k} {MEANS[found]} "
                f"(red={found}); expected {EXPECTED[c.red]}")
    return None


def why_not_row(c: Schedule, compute: Compute, target: Target) -> str | None:
    if not c.row:
        return None
    found = kept(c, compute)
    if not found:
        return f"row={c.row}: {compute.name} needs every element of a row in one sweep alone"
    if found == c.row:
        return None
    axes = compute.axes_of("K")
    length = prod(x.size for x in axes)
    block = f"{'.'.join(x.name for x in axes)}:{1 << max(0, length - 1).bit_length()}"
    if c.row == "held":
        return (f"row=held: a tile has {tile(c, compute, 'K')} of the {length} elements of a row; "
                f"expected a tile that covers it, such as {block}")
    return (f"row=again: the tile covers the row of {length} elements, which is loaded once; expected "
            f"one that does not, smaller than {block}")


def why_not_turn(c: Schedule, compute: Compute, target: Target) -> str | None:
    if not c.turn:
        return None
    found = kept(c, compute)
    if found == "again" and c.via == "tl":
        return None
    why = {"": f"{compute.name} needs every element of a row in one sweep alone",
           "held": "the tile covers the row, which is loaded once",
           "again": "an explicit kernel (via=gluon) has one sweep"}[found]
    return f"turn=1: {why}; expected several sweeps over rows longer than the tile (row=again)"
