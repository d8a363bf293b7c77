"""The legality rules of single schedule words: None, or a sentence that says why not.

words.py refers to them; legality.py has their order, first checks the value of each word, and
has the rules of boxes and explicit kernels.

Which schedules may have steps that share boxes (``slide=``, see tiles/boxes.py)."""

from __future__ import annotations

from functools import lru_cache
from math import inf, prod

from transconv.compute import Compute, Read, Reduction, block_factors, places
from transconv.ir import TRUE, Cast, f32, f64, walk
from transconv.schedule.counts import LONGEST, WARP_GROUP, by_tile, k_steps, lanes, tile
from transconv.schedule.schedule import Block, Schedule
from transconv.schedule.tiles import packing
from transconv.schedule.tiles.boxes import rows_of
from transconv.schedule.tiles.merging import why_not_merged
from transconv.schedule.tiles.partial_results import carried
from transconv.schedule.tiles.shared_memory import transposed_bytes
from transconv.schedule.words import has_rows, in_registers, is_framed, letters, widens
from transconv.support import has_wide_views, triton_release, triton_version
from transconv.target import BlockMma, Target

MOST_WRITTEN = 128  # more take too long to compile and too many registers
"""The most positions that ``regs`` may write out."""
MOST_LOADS = 256  # of a sum that is written out: LLVM takes 10 s for these, minutes for twice as many
"""The most steps of a sum that ``unroll`` writes out."""


def why_not_merge(c: Schedule, compute: Compute, target: Target) -> str | None:
    """Checked for the computation before merging."""
    if compute.statistics and c.merge > 1:
        return (
            f"merge={c.merge}: groups are merged in the result, which "
            f"{compute.statistics[0].view.tensor.name} reduces by group"
        )
    return why_not_merged(compute, c.merge)


def why_not_pack(c: Schedule, compute: Compute, target: Target) -> str | None:
    """Checked for the original tensors; later rules see the computation over the copies."""
    if in_registers(c.pack):
        reason = (
            "it is for the matrix unit"
            if c.unit != "mma"
            else packing.why_not_widened(compute) or _ragged(c, compute)
        )
        return None if reason is None else f"pack={c.pack}: {reason}"
    if is_framed(c.pack) and c.reduce == "stream":
        return f"pack={c.pack}: reduce=stream adds up whole tiles, of which some features are not stored"
    for letter in letters(c.pack):
        gathered = c.unit == "mma" and {"a": c.a, "b": c.b}.get(letter) == "gather"
        if reason := _why_not_letter(c.pack, letter, gathered, compute):
            return reason
    if "c" in letters(c.pack):
        if not compute.stores_all:
            return (
                f"pack=c: the copy has all elements of {compute.c.tensor.name}, and some of these are "
                "not stored"
            )
        if c.split_k > 1 and c.reduce == "atomic":
            return "pack=c: atomic sums meet in the result itself"
        if c.split_k == 1 and compute.reads_results:
            return "pack=c: the epilogue reads a residual that lies as the result does"
    return None


@lru_cache(maxsize=256)
def _why_not_letter(pack: str, letter: str, gathered: bool, compute: Compute) -> str | None:
    """Why an operand is not copied, whatever the other words are, or None."""
    view = packing.view_of(compute, letter)
    if view is None:
        return f"pack={letter}, but {compute.name} has no second operand"
    if compute.again:
        return f"pack={letter}: elements of a row are needed again, a copy serves one reading"
    if widens(pack) and not view.tensor.dtype.is_short:
        return f"pack={pack}: {view.tensor.name} holds {view.tensor.dtype}, no floats of 8 bits"
    reason = (
        packing.why_not_rows(view, compute)
        if has_rows(pack)
        else packing.why_not_framed(view, compute)
        if is_framed(pack)
        else packing.why_not_copied(compute, letter, gathered, widens(pack))
    )
    return f"pack={letter}: {reason}" if reason else None


def why_not_order(c: Schedule, compute: Compute, target: Target) -> str | None:
    """Relies on ``_blocks_are_pure``."""
    order = c.order.split(".") if c.order else []
    summed = [x.name for x in compute.axes_of("K")]
    if order and sorted(order) != sorted(summed):
        return f"order={c.order} must name every summed axis once: {'.'.join(summed)}"
    for b in c.blocks if order else ():
        at = [order.index(a) for a in b.axes if a in order]
        if at and at != list(range(at[0], at[0] + len(at))):
            return f"order={c.order} does not keep the axes of block {b} together"
    return None


def why_not_late(c: Schedule, compute: Compute, target: Target) -> str | None:
    """None if the sums of a schedule may be added late; else the reason."""
    if c.late and (c.unit != "fma" or (lanes(c, compute, "K") == 1 and not carried(compute, c))):
        return "late=1: only sums over lanes of a tile, element by element (unit fma), can wait"
    return None


def why_not_early(c: Schedule, compute: Compute, target: Target) -> str | None:
    """None if Triton compiles sums of lanes that are added at every step; else the reason."""
    if (
        not c.late
        and c.unit == "fma"
        and lanes(c, compute, "K") > 1
        and k_steps(c, compute) > 1
        and (lanes(c, compute, "M") * lanes(c, compute, "N") > 1)
        and (name := _used_twice(compute))
    ):
        return (
            f"late=0: Triton's pass OptimizeThreadLocality fails on a loop that adds up what it loads "
            f"if the sum, {name}, is used more than once; late=1 has another loop"
        )
    return None


@lru_cache(maxsize=256)
def _used_twice(compute: Compute) -> str:
    """The name of the first reduction of loaded elements whose result is used more than once, or empty. A
    value that several sweeps need is computed in each."""
    sweeps = compute.sweeps
    done = [s for sweep in sweeps.each for s in (*sweep.before, *sweep.steps)]
    values = [s.value for s in (*done, *sweeps.behind) if not isinstance(s, Read)]
    for made in (s for s in compute.steps if isinstance(s, Reduction)):
        e = made.value
        while isinstance(e, Cast) and e.x.dtype == e.type:
            e = e.x
        if any(e == r.var for r in compute.reads) and (
            sum(v is made.var for value in values for v in walk(value)) > 1
        ):
            return made.name
    return ""


def why_not_regs(c: Schedule, compute: Compute, target: Target) -> str | None:
    if not c.regs:
        return None
    if c.unit != "fma" or compute.b is None:
        return f"regs={c.regs}: only elementwise products (unit fma) can be unrolled into registers"
    if compute.prologue:
        return f"regs={c.regs}: {compute.prologue[0].name} is computed before it is multiplied"
    for axis in c.regs.split("."):
        if (block := c.block_of(axis)) is None or len(block.axes) > 1:
            return f"regs={c.regs}: there is no block of {axis or 'no axis'} alone to unroll"
        if block.extent > max(1, compute.size(axis)):
            return f"regs={c.regs}: block {block} has more positions than there are, {compute.size(axis)}"
    if len(set(c.regs.split("."))) < len(c.regs.split(".")):
        return f"regs={c.regs} names an axis twice"
    written = prod(extent for _, extent in c.written)
    if written > MOST_WRITTEN:
        return f"regs={c.regs}: {written} positions to unroll, at most {MOST_WRITTEN}"
    steps = -(-k_steps(c, compute) // c.split_k)
    if c.unroll and steps <= LONGEST:
        loads = steps * sum(places(v, compute, c.written) for v in (compute.a, compute.b))
        if loads > MOST_LOADS:
            return f"regs={c.regs} unroll=1: {loads} loads to write out, at most {MOST_LOADS}"
    return None


def why_not_subtiles(c: Schedule, compute: Compute, target: Target) -> str | None:
    if c.subtiles == 1:
        return None
    if c.unit != "mma" or c.via != "tl" or compute.prologue or compute.statistics:
        return f"subtiles={c.subtiles}: only plain products by the matrix unit in tl have them"
    if "box" in (c.a, c.b, c.c, c.behind):
        return f"subtiles={c.subtiles}: a box is a tile whole; expected a=gather b=gather c=gather"
    if (columns := tile(c, compute, "N") // c.subtiles) < (least := _least(compute, target)[1]):
        return f"subtiles={c.subtiles}: {columns} columns each, the matrix unit takes {least} or more"
    return None


def why_not_matrix_unit(c: Schedule, compute: Compute, target: Target) -> str | None:
    return None if c.unit != "mma" else _why_not_tile(c.blocks, compute, target, c.scaled) or None


@by_tile
def _why_not_tile(blocks: tuple[Block, ...], compute: Compute, target: Target, scaled: int) -> str:
    """Why the matrix unit multiplies no tile of these blocks, whatever the other words are; else empty."""
    c = Schedule(blocks)
    if "mma" not in target.features:
        return f"{target.name} has no matrix unit"
    if compute.b is None:
        return "a reduction has no second operand, the matrix unit multiplies two"
    if reason := _why_not_multiplied(compute, target):
        return reason
    for kind, least in zip("MNK", _least(compute, target), strict=True):
        if tile(c, compute, kind) < least:
            return (
                f"the {kind} side of the tile is {tile(c, compute, kind)}, the matrix unit "
                f"takes {least} or more" + (" of 8 bits" if least > 16 else "")
            )
    if tile(c, compute, "B") > 1:
        return "a tile for the matrix unit covers one group"
    if compute.prologue and not scaled and (reason := _uneven(c, compute)):
        return reason
    return _lanes_of_factors(c, compute) or ""


@lru_cache(maxsize=256)
def _why_not_multiplied(compute: Compute, target: Target) -> str | None:
    """The reason if the matrix unit multiplies the factors under no schedule."""
    left, right = (f.var.type for f in compute.factors or ())
    if target.lacks(left, right, compute.acc):
        return f"{target.name} multiplies {left} by {right} element by element (unit fma)"
    if left.memory is not right.memory and max(left.bits, right.bits) > 8:
        return f"the matrix unit multiplies two factors of one type, not {left} by {right} (unit fma does)"
    if compute.names.fills_of(compute.factors or ()) & {inf, -inf}:
        return "a masked factor is infinite: beyond the end of a sum, 0 times infinity is NaN"
    if compute.acc is f64:
        return "64-bit floats are multiplied element by element (unit fma)"
    if compute.acc.bits < 32:
        return f"the matrix unit adds in 32 bits, not in {compute.acc} (unit fma does)"
    return None


@lru_cache(maxsize=256)
def _least(compute: Compute, target: Target) -> tuple[int, int, int]:
    """The smallest sides M, N and K of a tile for the matrix unit."""
    return 16, 16, target.least_steps(*(f.var.type for f in compute.factors or ()))


def why_not_scaled(c: Schedule, compute: Compute, target: Target) -> str | None:
    """The rule of the word: None if the matrix unit multiplies a tile's elements with their scales."""
    if not c.scaled:
        return None
    if c.unit != "mma" or c.via != "tl" or c.subtiles > 1:
        return "scaled=1: tl has products in blocks, of whole tiles (mma, via=tl, subtiles=1)"
    factors = block_factors(compute)
    if isinstance(factors, str):
        return f"scaled=1: {factors}"
    reason = _why_not_in_blocks(c.blocks, compute, target, c.order, c.swap) or None
    if reason is None and ASYNCHRONOUS in target.features and c.warps < WARP_GROUP:
        return f"scaled=1: {WARP_GROUP} warps multiply blocks together, not {c.warps}"
    return reason


ASYNCHRONOUS = "tcgen05"  # the unit that takes scales of blocks and is issued by a group of warps


def block_mma(compute: Compute, target: Target, swap: int = 0) -> BlockMma | None:
    """The matrix instruction of a chip that multiplies a computation's factors in blocks, or None."""
    factors = block_factors(compute)
    if isinstance(factors, str):
        return None
    left, right = (8 // f.packed for f in (reversed(factors) if swap else factors))
    return target.block_mma((left, right), factors[0].scales, factors[0].size)


@by_tile
def _why_not_in_blocks(
    blocks: tuple[Block, ...], compute: Compute, target: Target, order: str, swap: int
) -> str:
    """``why_not_scaled`` for the words that it depends on, which many schedules share."""
    factors = block_factors(compute)
    assert not isinstance(factors, str)
    (left, right), (axis, size) = factors, (factors[0].axis, factors[0].size)
    what = f"{left.held} by {right.held} with scales of {left.scales} for {size}"
    if (unit := block_mma(compute, target, swap)) is None:
        return (
            f"scaled=1: the matrix unit of {target.name} does not multiply {what}; at best tl.dot_scaled "
            "makes 16-bit floats of both there, as scaled=0 does"
        )
    if (release := triton_release()) and release < target.blocks_since:
        since = ".".join(map(str, target.blocks_since))
        return (
            f"scaled=1: Triton {triton_version()} has no products in blocks on {target.name}, {since} has"
        )
    summed = [b for b in blocks if compute.kind(b.first) == "K" and b.extent > 1]
    along = max(summed, key=lambda b: _place(b.last, compute, order), default=None)
    if along is None or along.last != axis or along.extent % size:
        return (
            f"scaled=1: {size} neighbours along {axis} share a scale; expected a multiple of {size} of it "
            f"as the innermost block of the sum, such as {axis}:{max(size, unit.least[0][2])}"
        )
    if compute.size(axis) % (size if len(along.axes) > 1 else max(f.packed for f in factors)):
        return f"scaled=1: a block of {along} has elements of several rows of {axis}"
    tiles = [tile(Schedule(blocks), compute, kind) for kind in ("NMK" if swap else "MNK")]
    if not any(all(n >= least for n, least in zip(tiles, sides, strict=True)) for sides in unit.least):
        wanted = " or ".join("x".join(map(str, sides)) for sides in unit.least)
        return f"scaled=1: {what} take a tile of {wanted} or more (left, right, sum), not " + "x".join(
            map(str, tiles)
        )
    return ""


def _place(axis: str, compute: Compute, order: str) -> int:
    """Where an axis stands among those of the sum."""
    names = order.split(".") if order else [x.name for x in compute.axes_of("K")]
    return names.index(axis)


def _uneven(c: Schedule, compute: Compute) -> str | None:
    """The reason if a block of K does not divide the sum: beyond the end a factor is loaded as 0, but a
    value computed from it may be anything."""
    computed = compute.nonzero
    if computed and (reason := _ragged(c, compute)):
        return (
            f"{reason}: {computed[0].name}, which is computed before it is multiplied, would not be 0 "
            "beyond the end"
        )
    return None


def _ragged(c: Schedule, compute: Compute) -> str | None:
    """A block of K that does not divide the sum, in words."""
    for b in c.blocks:
        length = prod(compute.size(a) for a in b.axes) if compute.kind(b.first) == "K" else b.extent
        if length % b.extent:
            return f"block {b} does not divide {length}"
    return None


def _lanes_of_factors(c: Schedule, compute: Compute) -> str | None:
    """The reason if a factor does not vary along the summed lanes, as the matrix unit requires."""
    summed = [a for b in c.blocks if b.extent > 1 and compute.kind(b.first) == "K" for a in b.axes]
    for roots, view in zip(_roots(compute), (compute.a, compute.b), strict=False):
        if view is not None and not roots.intersection(summed):
            return (
                f"{view.tensor.name} is the same along {'.'.join(summed)}, the matrix unit wants both "
                "factors there"
            )
    return None


@lru_cache(maxsize=256)
def _roots(compute: Compute) -> tuple[frozenset[str], ...]:
    """The axes that each factor varies along."""
    return tuple(compute.roots(f.var) for f in compute.factors or ())


def why_not_reduce(c: Schedule, compute: Compute, target: Target) -> str | None:
    if c.reduce == "stream":
        return _stream(c, compute)
    if c.split_k > 1 and c.reduce == "atomic":
        if compute.c.tensor.dtype is not f32:
            return f"atomic sums are kept in f32, {compute.c.tensor.name} is {compute.c.tensor.dtype}"
        if compute.sum is not None and compute.sum.op != "sum":
            return f"reduce=atomic adds, {compute.sum.name} is {compute.sum.op}(...)"
        if not compute.stores_all:
            return (
                f"atomic sums set the whole result to 0 first, and some elements of "
                f"{compute.c.tensor.name} are not stored"
            )
        if compute.finishes:
            return f"the epilogue {compute.behind} needs the whole sum, atomic additions add parts of it"
    return None


def _stream(c: Schedule, compute: Compute) -> str | None:
    if c.via != "gluon":
        return "reduce=stream: only an explicit kernel (via=gluon) has sums of different lengths"
    if c.split_k > 1 or c.group_m != 1 or c.pack:
        return "reduce=stream assigns tiles to programs itself: it needs split_k=1 group_m=1 and no pack"
    if c.programs < 1:
        return "reduce=stream divides the steps among programs: set their number (programs=132)"
    return None


def why_not_back(c: Schedule, compute: Compute, target: Target) -> str | None:
    if c.back and (c.via != "tl" or c.programs):
        return "back=1 numbers programs of one tile each: it needs via=tl programs=0"
    return None


def why_not_split(c: Schedule, compute: Compute, target: Target) -> str | None:
    """Relies on the rule of ``reduce``."""
    steps = k_steps(c, compute)
    if compute.again and c.split_k > 1:
        return f"split_k={c.split_k}: elements of a row are needed again, by one that has all of them"
    if compute.sum is not None and not compute.adds_zeros and steps % c.split_k:
        return (
            f"split_k={c.split_k} does not divide the {steps} steps of {compute.sum.op}(...), and "
            "elements read beyond the last one would change it"
        )
    meet = c.reduce == "stream" or (c.split_k > 1 and c.reduce == "partials")
    if meet and (reason := compute.why_not_plain(compute.c)):
        return f"parts of sums have the layout of {compute.c.tensor.name}: {reason}"
    if meet and len(compute.writes) > 1 and compute.c.mask() is not TRUE:
        return (
            f"parts of sums lie as {compute.c.tensor.name} does, which has no place for some that are "
            f"stored in {compute.writes[1].view.tensor.name}"
        )
    ends = any(x.extent is not None for x in compute.axes_of("K"))  # at arguments, which may be larger
    if c.split_k > max(1, steps) and not ends:
        return f"split_k={c.split_k}, but the sum has only {steps} steps"
    return None


def why_not_deal(c: Schedule, compute: Compute, target: Target) -> str | None:
    """Relies on the rule of ``split_k``."""
    if c.deal and (c.split_k == 1 or c.reduce != "partials"):
        return "deal=1 deals out the steps of a split sum: it needs split_k=2 or more and reduce=partials"
    return None


MOST_STEPS = 8  # that share boxes; their products are written one after another
MOST_ROWS = 32  # boxes of a slot, each with a copy of its own


def why_not_slide(c: Schedule, compute: Compute, target: Target) -> str | None:
    """The rule of the word."""
    if not c.slide:
        return None
    if c.via != "gluon":
        return f"slide={c.slide}: only explicit kernels (via=gluon) have shared memory of their own"
    if not has_wide_views():
        return (
            f"slide={c.slide}: Triton {triton_version()} refuses views of shared memory larger than "
            "what they are views of; 3.7 takes them"
        )
    if c.slide not in compute.sizes or compute.kind(c.slide) != "K" or c.block_of(c.slide) is not None:
        return f"slide={c.slide} names no axis that the sum runs through one by one"
    if c.order.split(".")[-1] != c.slide:
        return f"slide={c.slide}: expected it as the innermost axis of the sum, at the end of order="
    size = compute.size(c.slide)
    if size == 1 and compute.phase:  # others have more steps, this one shares nothing
        return None
    if not 1 < size <= MOST_STEPS or compute.axis(c.slide).extent is not None:
        return f"slide={c.slide}: 2 to {MOST_STEPS} steps share boxes, not {size}"
    if c.split_k > 1 or c.keep or c.reduce == "stream":
        return f"slide={c.slide}: a program has whole sums, and fetches both operands at each step"
    if transposed_bytes(c, compute):
        return f"slide={c.slide}: boxes are shared where operands are multiplied as they lie"
    shared = [rows for v in (compute.a, compute.b) if (rows := rows_of(v, c, compute)[0])]
    if not shared:
        return f"slide={c.slide} moves no operand by whole rows of a box, over others of its rows"
    if max(shared) > MOST_ROWS:
        return f"slide={c.slide}: {max(shared)} rows are boxes of their own, at most {MOST_ROWS}"
    if len([x for x in compute.axes_of("K") if x.size > 1]) < 2:
        return f"slide={c.slide}: a sum of one step of shared boxes has no loop"
    return None
