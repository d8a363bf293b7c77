"""Legality of schedules: ``why_not`` returns None, or a sentence that says why not.

First the value of each word is checked, then the rules, in the order of ``ASKED``: a rule may rely on
those before it. Rules of single words are in word_rules.py; rules about blocks, about several words and
about parts of statistics (tiles/partial_results.py) are here, and those of the words ``a b c``, ``via``,
``consumers``, ``transposers`` and ``keep``: which TMA boxes are legal, and which warp-specialized kernels,
whose operands are always boxes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import prod
from operator import attrgetter

from transconv.compute import Compute, Write, axis_facts, why_not_any_size, why_not_lowered
from transconv.compute.analysis import statistics as stat
from transconv.ir import EXACT_TERMS, View, f32, multiplied_as
from transconv.schedule import counts
from transconv.schedule import word_rules as rules
from transconv.schedule.schedule import Block, Schedule
from transconv.schedule.tiles.box_dimensions import INTEGERS, ROW
from transconv.schedule.tiles.boxes import Box, box_of
from transconv.schedule.tiles.copy_kernels import Scheduled
from transconv.schedule.tiles.packing import ROW_ALIGN
from transconv.schedule.tiles.partial_results import (
    blocks_of_sides,
    is_mixed,
    is_within,
    why_not_red,
    why_not_row,
    why_not_turn,
)
from transconv.schedule.tiles.shared_memory import (
    behind_bytes,
    ends_short,
    exchanged_bytes,
    result_bytes,
    shared_bytes,
    transposed_bytes,
    why_not_behind,
)
from transconv.schedule.words import Rule, Value, Word, has_rows, registered_words, words
from transconv.support import is_direct, triton_version
from transconv.target import Target

IN_PARTS = 192  # registers of a thread for a sum in f32 and two parts of it


def why_not_a(c: Schedule, compute: Compute, target: Target) -> str | None:
    return _why_not_box("a", c.a, compute.a, c, compute, target)


def why_not_b(c: Schedule, compute: Compute, target: Target) -> str | None:
    return _why_not_box("b", c.b, compute.b, c, compute, target)


def why_not_c(c: Schedule, compute: Compute, target: Target) -> str | None:
    return _why_not_box("c", c.c, compute.c, c, compute, target)


def _why_not_box(
    name: str, way: str, view: View | None, c: Schedule, compute: Compute, target: Target
) -> str | None:
    if way == "gather":
        return None
    if reason := _any_box(c, compute, target):
        return reason
    if view is None:
        return None
    return (
        _why_not_tile(c.blocks, compute, name, c.via, c.order, c.swap, view, target, is_direct()) or None
    )


@counts.by_tile
def _why_not_tile(
    blocks: tuple[Block, ...],
    compute: Compute,
    name: str,
    via: str,
    order: str,
    swap: int,
    view: View,
    target: Target,
    steps: bool,
) -> str:
    """Why a tile of a view can be no box, whatever the other words are; empty if it can. ``steps``:
    whether boxes may take every so many-th position."""
    if reason := _why_not_any_box(name == "c", view, compute):
        return f"{name}=box: {reason}"
    found = box_of(view, Schedule(blocks, via=via, order=order), compute, stored=name == "c")
    if isinstance(found, str):
        return f"{name}=box: {found}"
    if found.tensor.every and not steps:
        return (
            f"{name}=box: it takes every so many-th position of {view.tensor.name}, Triton "
            f"{triton_version()} has no such descriptors"
        )
    if name == "c" and ends_short(found, view, axis_facts(compute)):
        return (
            f"c=box: rows of {view.tensor.name} end between multiples of {ROW_ALIGN} bytes, "
            "and TMA writes beyond them"
        )
    if name != "c" and _folded(found):
        return (
            f"{name}=box: the innermost side of the tile is spread over several dimensions "
            "of the box, the matrix unit reads rows of one"
        )
    if via == "tl" and name == ("b" if swap else "a") and _rank(found, target) > 2:
        return (
            f"{name}=box: a left operand of more than two dimensions goes through "
            "registers, where Triton 3.6 gets some sums wrong"
        )
    return ""


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
        return (
            f"split_k={c.split_k} divides a sum that ends at an argument, into parts whose last steps "
            "may be beyond it, and boxes have no mask"
        )
    if c.split_k > 1 and ends and c.programs:
        return (
            f"split_k={c.split_k} divides a sum that ends at an argument, into parts that may be empty, "
            f"after which the next one of a program (programs={c.programs}) would meet a full ring"
        )
    if c.split_k > 1 and counts.k_steps(c, compute) % c.split_k and c.via == "tl":
        return f"split_k={c.split_k} does not divide the {counts.k_steps(c, compute)} steps of the sum"
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
    left, right = (counts.tile(c, compute, kind) for kind in ("NM" if c.swap else "MN"))
    if c.warps not in (4, 8):
        return f"via=gluon: products are made by groups of 4 warps, at most two (warps={c.warps})"
    if counts.moves_sums(compute) and (reason := _why_not_parts(c, compute, left * right)):
        return reason
    if left % 64 or right < 16:
        return f"via=gluon: a product takes left sides in multiples of 64, this tile is {left}x{right}"
    if counts.tile(c, compute, "K") % 16:
        return "via=gluon: a product takes 16 steps of the sum at a time"
    if transposed_bytes(c, compute) and counts.tile(c, compute, "K") * dtype.bytes > ROW:
        return (
            f"via=gluon: {dtype} is transposed in rows of {ROW} bytes, {counts.tile(c, compute, 'K')} "
            "steps of the sum are more"
        )
    steps = counts.k_steps(c, compute)
    if (c.split_k - 1) * -(-steps // c.split_k) >= steps and not _ends_at_a_name(compute):
        return f"via=gluon: {steps} steps in {c.split_k} parts leave the last part empty"
    if c.stages < 2:
        return "via=gluon: a single buffer cannot be filled while it is read; stages must be 2 or more"
    return None


def _why_not_8_bits(c: Schedule, compute: Compute) -> str | None:
    """Why an explicit kernel cannot multiply these operands of 8 bits, of which the asynchronous unit
    takes 32 steps of the sum at a time."""
    if counts.tile(c, compute, "K") % 32:
        return "via=gluon: a product of 8-bit operands takes 32 steps of the sum at a time"
    if compute.acc.kind == "int" and (columns := counts.product_columns(c, compute)) > INTEGERS:
        return (
            f"via=gluon: Triton 3.6 has no product of integers with {columns} columns, {INTEGERS} at most"
        )
    return None


def most_sums(warps: int, transposed: bool = False) -> int:
    """The sums of a tile that an explicit kernel can move to f32: a thread holds each three times, whole
    and in the two parts that the matrix unit makes in turns. ``transposed``: beside warps that transpose,
    which leave eight others fewer registers."""
    return (IN_PARTS // 2 if transposed and warps > counts.WARP_GROUP else IN_PARTS) // 3 * 32 * warps


def _why_not_parts(c: Schedule, compute: Compute, sums: int) -> str | None:
    if counts.tile(c, compute, "K") > EXACT_TERMS:
        return (
            f"via=gluon: sums of 8-bit floats move to f32 after {EXACT_TERMS} products (math=ieee), "
            f"a step has {counts.tile(c, compute, 'K')}"
        )
    if sums > (most := most_sums(c.warps, transposed_bytes(c, compute) > 0)):
        return (
            f"via=gluon: sums of 8-bit floats that move to f32 (math=ieee) are held three times, "
            f"{c.warps} warps hold {most} so, the tile has {sums}"
        )
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
    tiles, steps = counts.programs(c, compute), counts.k_steps(c, compute)
    if not 0 < c.programs < tiles:
        return (
            f"consumers=2 take turns at the tiles of one program: say how many programs there are, "
            f"fewer than the {tiles} tiles (programs=132)"
        )
    if steps % c.split_k:
        return f"consumers=2: {steps} steps in {c.split_k} parts make sums of different lengths"
    return None


def why_not_transposers(c: Schedule, compute: Compute, target: Target) -> str | None:
    if c.transposers == 1:
        return None
    if not transposed_bytes(c, compute):
        return "transposers=2: this kernel transposes no operands in shared memory (via=gluon)"
    if c.warps != counts.WARP_GROUP:
        return f"transposers=2: two groups beside {c.warps} warps leave too few registers (warps=4)"
    return None


def why_not_kept(c: Schedule, compute: Compute, target: Target) -> str | None:
    if not c.keep:
        return None
    if c.via != "gluon" or c.programs < 1:
        return (
            f"keep={c.keep}: only a persistent explicit kernel (via=gluon programs=132) has tiles "
            "that share what is kept"
        )
    if c.split_k > 1 or c.reduce == "stream":
        return f"keep={c.keep}: each part of a split sum multiplies different boxes"
    if transposed_bytes(c, compute):
        return f"keep={c.keep}: this kernel transposes operands, which copies them at every step"
    kind = "M" if c.keep == "a" else "N"
    others = counts.tiles_along(c, compute, kind) * counts.tiles_along(c, compute, "B")
    if others > 1:
        return f"keep={c.keep}: tiles multiply {others} different pieces of it"
    if counts.k_steps(c, compute) < 2:
        return f"keep={c.keep}: a sum of one step has no loop in which to keep an operand"
    return None


FEWEST = 8  # values that a tile combines into a part, if there are as many


def why_not_partials(c: Schedule, compute: Compute, target: Target) -> str | None:
    """The rule of statistics: tiles must hold whole results, and those of products reduce something."""
    for w in compute.statistics:
        name = f"{w.view.tensor.name} {w.op}="
        if c.split_k > 1 or c.reduce == "stream":
            return f"{name} reduces whole results, a program has a part of the sum; expected split_k=1"
        if c.regs:
            return f"{name} reduces lanes, regs={c.regs} writes positions out"
        if compute.factors is not None and (reason := _why_not_smaller(w, c, compute)):
            return f"{name} {reason}"
    return None


def _why_not_smaller(write: Write, c: Schedule, compute: Compute) -> str | None:
    """The reason if tiles leave nearly as many parts as they have values."""
    kept = stat.kept(write) or {}
    groups = blocks_of_sides(compute, c)
    crossing = [next((b for b in blocks if not is_within(b, kept, compute)), None) for blocks in groups]
    combined = prod(
        b.extent for blocks, bad in zip(groups, crossing, strict=True) if bad is None for b in blocks
    )
    free = [x for x in compute.axes if x.name not in kept and compute.kind(x.name) != "K"]
    if combined >= min(FEWEST, prod(x.size for x in free)):
        return None
    for blocks, block in zip(groups, crossing, strict=True):
        if block is not None and is_mixed(blocks, kept):
            crossed = next(a for a in block.axes if a in kept)
            return (
                f"keeps {crossed}, and block {block} crosses its positions; expected a block within "
                f"one position of {crossed}"
            )
    return (
        f"has {combined} value{'s' * (combined > 1)} in a tile; expected larger blocks of "
        f"{' '.join(x.name for x in free)}"
    )


SPARE = 1024  # bytes of shared memory for reductions beside tiles


def why_not(schedule: Schedule, compute: Compute, target: Target) -> str | None:
    """None if the schedule is legal for the computation on the target, else the reason in a sentence."""
    if reason := why_not_said(schedule) or why_not_lowered(compute):
        return reason
    if compute.named and (reason := why_not_any_size(compute) or _why_not_sized(schedule, compute)):
        return reason
    if reason := rules.why_not_merge(schedule, compute, target):
        return reason
    made = Scheduled(compute, schedule, target)
    if schedule.pack and (reason := rules.why_not_pack(schedule, made.grouped, target)):
        return reason
    for rule in (*ASKED, *(w.why_not for w in registered_words() if w.why_not)):
        if reason := rule(schedule, made.main, target):
            return reason
    return None


def why_not_said(schedule: Schedule) -> str | None:
    """None if every word has a legal value and every block has names and a number, else the reason."""
    table = words()
    if reason := _why_not_values(table, *_values(table)(schedule)):
        return reason
    for b in schedule.blocks:
        if type(b.extent) is not int or not b.axes or not all(a.isidentifier() for a in b.axes):
            return f"{b!r} is no block; expected axes and an extent, such as n.h.w:128"
    return None


@lru_cache(maxsize=4096, typed=True)  # proposals differ in their blocks more often than in their words
def _why_not_values(table: tuple[Word, ...], *values: Value) -> str | None:
    """None if each word has a legal value, else the reason."""
    reasons = (w.refuses(v) for w, v in zip(table, values, strict=True) if v is not w.default)
    return next(filter(None, reasons), None)


FEW_WARPS = 4  # the most warps whose products Triton overlaps in a loop that ends at a run-time size


def of_any_size(schedule: Schedule) -> tuple[Schedule, ...]:
    """What comes nearest to a schedule that was found for given sizes, in kernels whose sizes are
    arguments: as it is, the words that need numbers at their defaults, for Triton, without copies, and
    without boxes."""
    plain = Schedule()
    most = replace(schedule, pack="")
    changed = replace(
        most,
        programs=plain.programs,
        via=plain.via,
        consumers=plain.consumers,
        keep=plain.keep,
        slide=plain.slide,
        behind=plain.behind,
        warps=schedule.warps * schedule.consumers,
        reduce=plain.reduce if schedule.reduce == "stream" else schedule.reduce,
    )
    packed = replace(changed, pack=schedule.pack)
    ways = (
        schedule,
        packed,
        most,
        changed,
        replace(changed, swap=1),
        replace(changed, a="gather"),
        replace(changed, a="gather", b="gather"),
        replace(changed, a="gather", b="gather", c="gather"),
    )
    return tuple(dict.fromkeys(ways))


def _why_not_sized(c: Schedule, compute: Compute) -> str | None:
    if has_rows(c.pack):
        return f"sizes that are arguments: pack={c.pack} makes rows of positions of a given number"
    if c.reduce == "stream":
        return "sizes that are arguments: reduce=stream deals out tiles of given sizes"
    if c.split_k > 1 and compute.c.tensor.extents:
        return (
            f"sizes that are arguments: the parts of split_k={c.split_k} would take as many bytes as "
            f"those of {compute.c.tensor.name} say; expected split_k=1"
        )
    if c.split_k > 1 and (
        c.reduce != "partials" or not any(x.extent is not None for x in compute.axes_of("K"))
    ):
        return (
            f"sizes that are arguments: split_k={c.split_k} divides a sum that ends at one, into "
            "parts that a second kernel adds (reduce=partials); expected split_k=1"
        )
    ends = [x.name for x in compute.axes_of("K") if x.extent is not None]
    if c.unroll and ends:
        return f"sizes that are arguments: unroll=1, but the sum over {ends[0]} ends at one"
    if c.unit == "mma" and c.via == "tl" and ends and c.warps > FEW_WARPS:
        return (
            f"sizes that are arguments: the sum over {ends[0]} ends at one, and Triton 3.6 makes the "
            f"matrix unit of {c.warps} warps wait in such a loop; expected at most {FEW_WARPS} warps"
        )
    return None


def _axes_exist(c: Schedule, compute: Compute, target: Target) -> str | None:
    known = [x.name for x in compute.axes]
    used = [a for b in c.blocks for a in b.axes]
    for a in used:
        if a not in known:
            return f"there is no axis '{a}' in {compute.name}; its axes are {' '.join(known)}"
        if used.count(a) > 1:
            return f"axis '{a}' is in two blocks"
    return None


def _blocks_are_pure(c: Schedule, compute: Compute, target: Target) -> str | None:
    for b in c.blocks:
        kinds = sorted({compute.kind(a) for a in b.axes})
        if len(kinds) > 1:
            return f"block {b} mixes axes of kinds {' and '.join(kinds)}"
        if b.extent < 1 or (b.extent & (b.extent - 1) and not c.in_registers(b)):
            return f"block {b}: an extent is a power of two"
    return None


def _fits(c: Schedule, compute: Compute, target: Target) -> str | None:
    extents = counts.sides(c, compute)
    m, n, k = extents["M"] * extents["B"], extents["N"], extents["K"]
    if c.unit == "fma":  # positions that are written out are multiplied one after another
        k = counts.lanes(c, compute, "K")
    if (m * n * k > 1 << 20 and c.unit == "fma") or max(m * n, m * k, k * n) > 1 << 20:
        return f"a tile of {m}x{n}x{k} has more than 2^20 elements"
    if target.backend == "interpreter":
        return None
    acc = m * n * (k if c.late else 1) * compute.acc.bytes // 4
    threads = c.warps * target.warp_size
    if acc > 224 * threads:
        return (
            f"the accumulator of {m}x{n} needs {acc // threads} registers per thread, "
            f"{c.warps} warps have 224 to give"
        )
    if c.unit == "mma" and compute.b is not None:
        need = shared_bytes(c, compute)
        held = m * n * compute.c.tensor.dtype.bytes if _reordered(c, compute) else 0
        need += c.consumers * max(held, result_bytes(c, compute))
        need += (fetched := behind_bytes(c, compute)) + exchanged_bytes(c, compute)
        if need > target.shared_bytes:
            twice = ", with what is transposed" if transposed_bytes(c, compute) else ""
            twice += f", {c.keep} kept," if c.keep else ""
            twice += f", and {fetched} bytes of what is read in the epilogue," if fetched else ""
            return (
                f"{c.stages} stages of {m}x{k} and {k}x{n}{twice} need {need} bytes of shared "
                f"memory, {target.name} has {target.shared_bytes}"
            )
    if (need := counts.ahead_bytes(c, compute)) + SPARE > target.shared_bytes and c.programs:
        return (
            f"{c.stages} stages of a tile need {need} bytes of shared memory, {target.name} has "
            f"{target.shared_bytes}"
        )
    if c.unit == "fma" and m * n * k > 256 * threads:
        return f"a tile of {m}x{n}x{k} multiplied element by element needs over 256 registers a thread"
    return None


def _reordered(c: Schedule, compute: Compute) -> bool:
    """Whether Triton needs shared memory beside the operands' to convert the result to the layout of its
    store. It does in persistent kernels, where the loads of the next tile occupy the operands' memory; no
    kernel with 16-bit results has exceeded the limit."""
    return c.via == "tl" and c.programs > 0 and compute.c.tensor.dtype.bits > 16


# The order of the rules. Those of registered words come last; those of `merge` and `pack` come first,
# because the others see the computation that these give.
ASKED: tuple[Rule, ...] = (
    _axes_exist,
    _blocks_are_pure,
    rules.why_not_order,
    rules.why_not_late,
    rules.why_not_regs,
    rules.why_not_matrix_unit,
    rules.why_not_subtiles,
    rules.why_not_scaled,
    rules.why_not_slide,
    _fits,
    rules.why_not_reduce,
    rules.why_not_split,
    rules.why_not_deal,
    rules.why_not_early,
    why_not_explicit,
    why_not_consumers,
    why_not_transposers,
    why_not_kept,
    why_not_a,
    why_not_b,
    why_not_c,
    why_not_behind,
    why_not_partials,
    rules.why_not_back,
    why_not_red,
    why_not_row,
    why_not_turn,
)


@lru_cache(maxsize=4)
def _values(table: tuple[Word, ...]) -> Callable[[Schedule], tuple[Value, ...]]:
    """A function that reads all words of a schedule at once, which is fast; proposals are many."""
    return attrgetter(*(w.name for w in table))
