"""Which schedules are legal: ``why_not`` returns None, or a sentence that says why not.

First the value of each word is checked, then the rules, in the order of ``ASKED``: a rule may rely on
those before it. Rules of single words are in word_rules.py and box_rules.py; rules about blocks,
about several words and about parts of statistics (tiles/partial_results.py) are here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import prod
from operator import attrgetter

from transconv.compute import Compute, Write, why_not_any_size, why_not_lowered
from transconv.compute.analysis import statistics as stat
from transconv.schedule import box_rules as boxes
from transconv.schedule import word_rules as rules
from transconv.schedule.counts import ahead_bytes, lanes, sides
from transconv.schedule.schedule import Schedule
from transconv.schedule.tiles.copy_kernels import Scheduled
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
    exchanged_bytes,
    result_bytes,
    shared_bytes,
    transposed_bytes,
    why_not_behind,
)
from transconv.schedule.words import Rule, Value, Word, has_rows, registered, words
from transconv.target import Target

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
    combined = prod(b.extent for blocks, bad in zip(groups, crossing, strict=True) if bad is None
                    for b in blocks)
    free = [x for x in compute.axes if x.name not in kept and compute.kind(x.name) != "K"]
    if combined >= min(FEWEST, prod(x.size for x in free)):
        return None
    for blocks, block in zip(groups, crossing, strict=True):
        if block is not None and is_mixed(blocks, kept):
            crossed = next(a for a in block.axes if a in kept)
            return (f"keeps {crossed}, and block {block} crosses its positions; expected a block within "
                    f"one position of {crossed}")
    return (f"has {combined} value{'s' * (combined > 1)} in a tile; expected larger blocks of "
            f"{' '.join(x.name for x in free)}")


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
    for rule in (*ASKED, *(w.why_not for w in registered() if w.why_not)):
        if reason := rule(schedule, made.main, target):
            return reason
    return None


def why_not_said(schedule: Schedule) -> str | None:
    """None if every word has a legal value and every block has names and a number, else the reason."""
    table = words()
    for word, value in zip(table, _values(table)(schedule), strict=True):
        if value is not word.default and (reason := word.refuses(value)):
            return reason
    for b in schedule.blocks:
        if type(b.extent) is not int or not b.axes or not all(a.isidentifier() for a in b.axes):
            return f"{b!r} is no block; expected axes and an extent, such as n.h.w:128"
    return None


FEW_WARPS = 4  # the most warps whose products Triton overlaps in a loop that ends at a run-time size


def of_any_size(schedule: Schedule) -> tuple[Schedule, ...]:
    """What comes nearest to a schedule that was found for given sizes, in kernels whose sizes are
    arguments: as it is, the words that need numbers at their defaults, for Triton, without copies, and
    without boxes."""
    plain = Schedule()
    most = replace(schedule, pack="")
    changed = replace(most, programs=plain.programs, via=plain.via, consumers=plain.consumers,
                      keep=plain.keep, slide=plain.slide, behind=plain.behind,
                      warps=schedule.warps * schedule.consumers,
                      reduce=plain.reduce if schedule.reduce == "stream" else schedule.reduce)
    packed = replace(changed, pack=schedule.pack)
    ways = (schedule, packed, most, changed, replace(changed, swap=1), replace(changed, a="gather"),
            replace(changed, a="gather", b="gather"), replace(changed, a="gather", b="gather", c="gather"))
    return tuple(dict.fromkeys(ways))


def _why_not_sized(c: Schedule, compute: Compute) -> str | None:
    if has_rows(c.pack):
        return f"sizes that are arguments: pack={c.pack} makes rows of positions of a given number"
    if c.reduce == "stream":
        return "sizes that are arguments: reduce=stream deals out tiles of given sizes"
    if c.split_k > 1 and compute.c.tensor.extents:
        return (f"sizes that are arguments: the parts of split_k={c.split_k} would take as many bytes as "
                f"those of {compute.c.tensor.name} say; expected split_k=1")
    if c.split_k > 1 and (c.reduce != "partials" or not any(
            x.extent is not None for x in compute.axes_of("K"))):
        return (f"sizes that are arguments: split_k={c.split_k} divides a sum that ends at one, into "
                "parts that a second kernel adds (reduce=partials); expected split_k=1")
    ends = [x.name for x in compute.axes_of("K") if x.extent is not None]
    if c.unroll and ends:
        return f"sizes that are arguments: unroll=1, but the sum over {ends[0]} ends at one"
    if c.unit == "mma" and c.via == "tl" and ends and c.warps > FEW_WARPS:
        return (f"sizes that are arguments: the sum over {ends[0]} ends at one, and Triton 3.6 makes the "
                f"matrix unit of {c.warps} warps wait in such a loop; expected at most {FEW_WARPS} warps")
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
        if b.extent < 1 or b.extent & (b.extent - 1) and not c.in_registers(b):
            return f"block {b}: an extent is a power of two"
    return None


def _fits(c: Schedule, compute: Compute, target: Target) -> str | None:
    extents = sides(c, compute)
    m, n, k = extents["M"] * extents["B"], extents["N"], extents["K"]
    if c.unit == "fma":  # positions that are written out are multiplied one after another
        k = lanes(c, compute, "K")
    if m * n * k > 1 << 20 and c.unit == "fma" or max(m * n, m * k, k * n) > 1 << 20:
        return f"a tile of {m}x{n}x{k} has more than 2^20 elements"
    if target.backend == "interpreter":
        return None
    acc = m * n * (k if c.late else 1) * compute.acc.bytes // 4
    threads = c.warps * target.warp_size
    if acc > 224 * threads:
        return (f"the accumulator of {m}x{n} needs {acc // threads} registers per thread, "
                f"{c.warps} warps have 224 to give")
    if c.unit == "mma" and compute.b is not None:
        need = shared_bytes(c, compute)
        held = m * n * compute.c.tensor.dtype.bytes if _reordered(c, compute) else 0
        need += c.consumers * max(held, result_bytes(c, compute))
        need += (fetched := behind_bytes(c, compute)) + exchanged_bytes(c, compute)
        if need > target.shared_bytes:
            twice = ", with what is transposed" if transposed_bytes(c, compute) else ""
            twice += f", {c.keep} kept," if c.keep else ""
            twice += f", and {fetched} bytes of what is read behind the sum," if fetched else ""
            return (f"{c.stages} stages of {m}x{k} and {k}x{n}{twice} need {need} bytes of shared "
                    f"memory, {target.name} has {target.shared_bytes}")
    if (need := ahead_bytes(c, compute)) + SPARE > target.shared_bytes and c.programs:
        return (f"{c.stages} stages of a tile need {need} bytes of shared memory, {target.name} has "
                f"{target.shared_bytes}")
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
    _axes_exist, _blocks_are_pure, rules.why_not_order, rules.why_not_late, rules.why_not_regs,
    rules.why_not_matrix_unit, rules.why_not_slide, _fits, rules.why_not_reduce, rules.why_not_split,
    rules.why_not_early, boxes.why_not_explicit, boxes.why_not_consumers, boxes.why_not_transposers,
    boxes.why_not_kept, boxes.why_not_a, boxes.why_not_b, boxes.why_not_c, why_not_behind,
    why_not_partials, rules.why_not_back, why_not_red, why_not_row, why_not_turn)


@lru_cache(maxsize=4)
def _values(table: tuple[Word, ...]) -> Callable[[Schedule], tuple[Value, ...]]:
    """A function that reads all words of a schedule at once, which is fast; proposals are many."""
    return attrgetter(*(w.name for w in table))
