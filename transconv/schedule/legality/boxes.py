"""Which TMA boxes are legal, and which warp-specialized kernels, whose operands are always boxes: None,
or a sentence that says why not. The rules of the words ``a b c``, ``via``, ``consumers``, ``transposers``
and ``keep``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from transconv.compute import Compute, axis_facts
from transconv.ir import EXACT_TERMS, View, f32, multiplied_as
from transconv.schedule.counts import (
    WARP_GROUP,
    k_steps,
    moves_sums,
    product_columns,
    programs,
    tile,
    tiles_along,
    transposed_bytes,
)
from transconv.schedule.legality.box_dimensions import INTEGERS, ROW
from transconv.schedule.tiles.boxes import Box, box_of
from transconv.schedule.tiles.packing import ROW_ALIGN
from transconv.schedule.tiles.result_boxes import ends_short
from transconv.support import is_direct, triton_version
from transconv.target import Target

if TYPE_CHECKING:
    from transconv.schedule.schedule import Schedule

IN_PARTS = 192  # registers of a thread for a sum in f32 and two parts of it


def why_not_a(c: Schedule, compute: Compute, target: Target) -> str | None:
    return _why_not_box("a", c.a, compute.a, c, compute, target)


def why_not_b(c: Schedule, compute: Compute, target: Target) -> str | None:
    return _why_not_box("b", c.b, compute.b, c, compute, target)


def why_not_c(c: Schedule, compute: Compute, target: Target) -> str | None:
    return _why_not_box("c", c.c, compute.c, c, compute, target)


def _why_not_box(name: str, way: str, view: View | None, c: Schedule, compute: Compute,
                 target: Target) -> str | None:
    if way == "gather":
        return None
    if reason := _any_box(c, compute, target):
        return reason
    if view is None:
        return None
    if reason := _why_not_any_box(name == "c", view, compute):
        return f"{name}=box: {reason}"
    found = box_of(view, c, compute, stored=name == "c")
    if isinstance(found, str):
        return f"{name}=box: {found}"
    if found.tensor.every and not is_direct():
        return (f"{name}=box: it takes every so many-th position of {view.tensor.name}, Triton "
                f"{triton_version()} has no such descriptors")
    if name == "c" and ends_short(found, view, axis_facts(compute)):
        return (f"c=box: rows of {view.tensor.name} end between multiples of {ROW_ALIGN} bytes, "
                "and TMA writes beyond them")
    if name != "c" and _folded(found):
        return (f"{name}=box: the innermost side of the tile is spread over several dimensions "
                "of the box, the matrix unit reads rows of one")
    if c.via == "tl" and name == ("b" if c.swap else "a") and _rank(found, target) > 2:
        return (f"{name}=box: a left operand of more than two dimensions goes through "
                "registers, where Triton 3.6 gets some sums wrong")
    return None


@lru_cache(maxsize=256)
def _why_not_any_box(stored: bool, view: View, compute: Compute) -> str | None:
    """Why a view can be no box under any schedule, or None."""
    if reason := compute.why_not_plain(view):
        return reason
    if stored:
        return None
    if any(r.view.tensor is view.tensor and r.view is not view for r in compute.reads):
        return f"{view.tensor.name} is read elsewhere, too, where no box reaches it"
    if fill := compute.fill_of(view):
        return f"a box is 0 outside of {view.tensor.name}, {fill:g} is asked for"
    return None


def _any_box(c: Schedule, compute: Compute, target: Target) -> str | None:
    """Why no operand or result can be a box, or None."""
    if "box" not in target.features:
        return f"{target.name} has no copy engine for boxes"
    if c.unit != "mma":
        return "boxes are for the matrix unit (unit mma), elementwise products gain nothing from them"
    ends = _ends_at_a_name(compute)
    if c.split_k > 1 and ends and c.via == "tl":
        return (f"split_k={c.split_k} divides a sum that ends at an argument, into parts whose last steps "
                "may be beyond it, and boxes have no mask")
    if c.split_k > 1 and ends and c.programs:
        return (f"split_k={c.split_k} divides a sum that ends at an argument, into parts that may be "
                f"empty, after which the next one of a program (programs={c.programs}) would meet a full "
                "ring")
    if c.split_k > 1 and k_steps(c, compute) % c.split_k and c.via == "tl":
        return f"split_k={c.split_k} does not divide the {k_steps(c, compute)} steps of the sum"
    if c.split_k > 1 and c.c == "box":
        return "parts of a sum are stored element by element (c=gather)"
    return None


def _ends_at_a_name(compute: Compute) -> bool:
    """Whether the number of the sum's steps is known at the call."""
    return any(x.extent is not None for x in compute.axes_of("K"))


def _rank(box: Box, target: Target) -> int:
    """The rank of a box as Triton sees it. With ``wgmma``, dimensions of extent 1 count: with them a left
    operand goes through registers, and the loads of the next step overwrite these while asynchronous
    products still read them."""
    return len(box.extents) if "wgmma" in target.features else sum(e > 1 for e in box.extents)


def _folded(box: Box) -> bool:
    """Whether the innermost side of the tile runs through several dimensions of the box, and the other
    side is outside of them: shared memory then has the wrong order."""
    kinds = [kind for kind, extent in zip(box.kinds, box.extents, strict=True) if kind and extent > 1]
    return len(set(kinds)) > 1 and kinds.count(kinds[-1]) > 1 and kinds[-2] == kinds[-1]


def why_not_explicit(c: Schedule, compute: Compute, target: Target) -> str | None:
    if c.via == "tl":
        return None
    if target.backend == "interpreter":
        return "via=gluon: Triton's interpreter cannot run Gluon"
    if not {"box", "wgmma"} <= target.features:
        return f"via=gluon: {target.name} has no asynchronous matrix unit fed from boxes (wgmma)"
    if c.unit != "mma" or c.a != "box" or c.b != "box":
        return "via=gluon: explicit kernels multiply boxes (mma, a=box b=box)"
    dtype = compute.a.tensor.dtype
    if dtype.bits == 8 and (reason := _why_not_8_bits(c, compute)):
        return reason
    if dtype.bits > 16 and dtype.memory is not f32:
        return f"via=gluon: the asynchronous matrix unit does not take {dtype}"
    if dtype is f32 and multiplied_as(dtype, compute.math) is dtype:
        return f"via=gluon: the asynchronous matrix unit multiplies f32 as tf32 alone, not {compute.math}"
    if c.unroll:
        return "via=gluon: the steps of an explicit kernel are a loop (unroll=0)"
    left, right = (tile(c, compute, kind) for kind in ("NM" if c.swap else "MN"))
    if c.warps not in (4, 8):
        return f"via=gluon: products are made by groups of 4 warps, at most two (warps={c.warps})"
    if moves_sums(compute) and (reason := _why_not_parts(c, compute, left * right)):
        return reason
    if left % 64 or right < 16:
        return f"via=gluon: a product takes left sides in multiples of 64, this tile is {left}x{right}"
    if tile(c, compute, "K") % 16:
        return "via=gluon: a product takes 16 steps of the sum at a time"
    if transposed_bytes(c, compute) and tile(c, compute, "K") * dtype.bytes > ROW:
        return (f"via=gluon: {dtype} is transposed in rows of {ROW} bytes, {tile(c, compute, 'K')} steps "
                "of the sum are more")
    steps = k_steps(c, compute)
    if (c.split_k - 1) * -(-steps // c.split_k) >= steps and not _ends_at_a_name(compute):
        return f"via=gluon: {steps} steps in {c.split_k} parts leave the last part empty"
    if c.stages < 2:
        return "via=gluon: a single buffer cannot be filled while it is read; stages must be 2 or more"
    return None


def _why_not_8_bits(c: Schedule, compute: Compute) -> str | None:
    """Why an explicit kernel cannot multiply these operands of 8 bits, of which the asynchronous unit
    takes 32 steps of the sum at a time."""
    if tile(c, compute, "K") % 32:
        return "via=gluon: a product of 8-bit operands takes 32 steps of the sum at a time"
    if compute.acc.kind == "int" and (columns := product_columns(c, compute)) > INTEGERS:
        return (f"via=gluon: Triton 3.6 has no product of integers with {columns} columns, "
                f"{INTEGERS} at most")
    return None


def most_sums(warps: int, transposed: bool = False) -> int:
    """The sums of a tile that an explicit kernel can move to f32: a thread holds each three times, whole
    and in the two parts that the matrix unit makes in turns. ``transposed``: beside warps that transpose,
    which leave eight others fewer registers."""
    return (IN_PARTS // 2 if transposed and warps > WARP_GROUP else IN_PARTS) // 3 * 32 * warps


def _why_not_parts(c: Schedule, compute: Compute, sums: int) -> str | None:
    if tile(c, compute, "K") > EXACT_TERMS:
        return (f"via=gluon: sums of 8-bit floats move to f32 after {EXACT_TERMS} products (math=ieee), "
                f"a step has {tile(c, compute, 'K')}")
    if sums > (most := most_sums(c.warps, transposed_bytes(c, compute) > 0)):
        return (f"via=gluon: sums of 8-bit floats that move to f32 (math=ieee) are held three times, "
                f"{c.warps} warps hold {most} so, the tile has {sums}")
    return None


def why_not_consumers(c: Schedule, compute: Compute, target: Target) -> str | None:
    if c.consumers == 1:
        return None
    if c.via != "gluon":
        return "consumers=2: only kernels with via=gluon have consumer warp groups"
    if c.warps != 4:
        return f"consumers=2: each consumer warp group has 4 warps (warps={c.warps})"
    if transposed_bytes(c, compute):
        return "consumers=2: this kernel transposes operands, which leaves two groups too few registers"
    if c.reduce == "stream":
        return "consumers=2: with reduce=stream a program has one tile or two, too few to alternate"
    tiles, steps = programs(c, compute), k_steps(c, compute)
    if not 0 < c.programs < tiles:
        return (f"consumers=2 take turns at the tiles of one program: say how many programs there are, "
                f"fewer than the {tiles} tiles (programs=132)")
    if steps % c.split_k:
        return f"consumers=2: {steps} steps in {c.split_k} parts make sums of different lengths"
    return None


def why_not_transposers(c: Schedule, compute: Compute, target: Target) -> str | None:
    if c.transposers == 1:
        return None
    if not transposed_bytes(c, compute):
        return "transposers=2: this kernel transposes no operands in shared memory (via=gluon)"
    if c.warps != WARP_GROUP:
        return f"transposers=2: two groups beside {c.warps} warps leave too few registers (warps=4)"
    return None


def why_not_kept(c: Schedule, compute: Compute, target: Target) -> str | None:
    if not c.keep:
        return None
    if c.via != "gluon" or c.programs < 1:
        return f"keep={c.keep}: only a persistent explicit kernel (via=gluon programs=132) has tiles " \
               "that share what is kept"
    if c.split_k > 1 or c.reduce == "stream":
        return f"keep={c.keep}: each part of a split sum multiplies different boxes"
    if transposed_bytes(c, compute):
        return f"keep={c.keep}: this kernel transposes operands, which copies them at every step"
    kind = "M" if c.keep == "a" else "N"
    others = tiles_along(c, compute, kind) * tiles_along(c, compute, "B")
    if others > 1:
        return f"keep={c.keep}: tiles multiply {others} different pieces of it"
    if k_steps(c, compute) < 2:
        return f"keep={c.keep}: a sum of one step has no loop in which to keep an operand"
    return None
