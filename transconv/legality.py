"""Stage 3. Which configs are legal: None, or a sentence that says why not.

One rule for each thing that a config says, in the order in which they are asked: a later one may rely
on what those before it let through. Rules about boxes and explicit kernels are in legality_boxes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from transconv.algorithm import Algorithm
from transconv.config import Config
from transconv.counts import k_steps, lanes, shared_bytes, tile, turned_bytes
from transconv.legality_boxes import (
    why_not_boxes,
    why_not_explicit,
    why_not_kept,
    why_not_teams,
)
from transconv.merging import merged, why_not_merged
from transconv.packing import letters, over_copies, view_of, why_not_copied
from transconv.strides import places
from transconv.target import Target

Rule = Callable[[Config, Algorithm, Target], "str | None"]


def why_not(config: Config, algorithm: Algorithm, target: Target) -> str | None:
    """None if the config is legal for the algorithm on the target, else the reason in a sentence."""
    if reason := why_not_merged(algorithm, config.merge):
        return reason
    algorithm = merged(algorithm, config.merge)
    if config.pack:
        if reason := _packs(config, algorithm):
            return reason
        algorithm = over_copies(algorithm, config.pack)
    for rule in RULES:
        if reason := rule(config, algorithm, target):
            return reason
    return None


def _packs(c: Config, alg: Algorithm) -> str | None:
    """About the tensors as they are; the rules below see the algorithm over the copies."""
    if letters(c.pack) != sorted(set(letters(c.pack))):
        return f"pack={c.pack}: each operand is copied once, and named in the order a.b.c"
    for letter in letters(c.pack):
        view = view_of(alg, letter)
        if view is None:
            return f"pack={letter}, but {alg.name} has no second operand"
        gathered = c.unit == "mma" and {"a": c.a, "b": c.b}.get(letter) == "gather"
        if reason := why_not_copied(alg, letter, gathered):
            return f"pack={letter}: {reason}"
    if "c" in letters(c.pack):
        if c.split_k > 1 and c.reduce == "atomic":
            return "pack=c: atomic sums meet in the result itself"
        if c.split_k == 1 and "res" in alg.epilogue.ops:
            return "pack=c: the epilogue reads a residual that lies as the result does"
    return None


def _axes_exist(c: Config, alg: Algorithm, target: Target) -> str | None:
    known = [x.name for x in alg.axes]
    used = [a for b in c.blocks for a in b.axes]
    for a in used:
        if a not in known:
            return f"there is no axis '{a}' in {alg.name}; its axes are {' '.join(known)}"
        if used.count(a) > 1:
            return f"axis '{a}' is in two blocks"
    order = c.order.split(".") if c.order else []
    summed = [x.name for x in alg.axes_of("K")]
    if order and sorted(order) != sorted(summed):
        return f"order={c.order} must name every summed axis once: {'.'.join(summed)}"
    return None


def _blocks_are_pure(c: Config, alg: Algorithm, target: Target) -> str | None:
    for b in c.blocks:
        kinds = sorted({alg.kind(a) for a in b.axes})
        if len(kinds) > 1:
            return f"block {b} mixes axes of kinds {' and '.join(kinds)}"
        if b.extent < 1 or b.extent & (b.extent - 1) and not c.in_registers(b):
            return f"block {b}: an extent is a power of two"
        if kinds == ["K"] and c.order:
            names = c.order.split(".")
            at = [names.index(a) for a in b.axes]
            if at != list(range(at[0], at[0] + len(at))):
                return f"order={c.order} does not keep the axes of block {b} together"
    return None


MOST_WRITTEN = 128  # positions written out: more take compilers too long, and registers are few
MOST_LOADS = 256  # of a sum written out: LLVM takes 10 s for so many, minutes for twice as many
LONGEST = 64  # steps: with more, a sum stays a loop


def _registers(c: Config, alg: Algorithm, target: Target) -> str | None:
    if c.late not in (0, 1):
        return f"late={c.late}: the lanes of a sum are added late (1) or at every step (0)"
    if c.late and (c.unit != "fma" or lanes(c, alg, "K") == 1):
        return "late=1: only sums over lanes of a tile, element by element (unit fma), can wait"
    if not c.regs:
        return None
    if c.unit != "fma" or alg.b is None:
        return f"regs={c.regs}: what is written out are products element by element (unit fma)"
    for axis in c.regs.split("."):
        if (block := c.block_of(axis)) is None or len(block.axes) > 1:
            return f"regs={c.regs}: there is no block of {axis or 'no axis'} alone to write out"
        if block.extent > max(1, alg.size(axis)):
            return f"regs={c.regs}: block {block} has more positions than there are, {alg.size(axis)}"
    if len(set(c.regs.split("."))) < len(c.regs.split(".")):
        return f"regs={c.regs} names an axis twice"
    written = prod(extent for _, extent in c.written)
    if written > MOST_WRITTEN:
        return f"regs={c.regs}: {written} positions to write out, at most {MOST_WRITTEN}"
    steps = -(-k_steps(c, alg) // c.split_k)
    if c.unroll and steps <= LONGEST:
        loads = steps * sum(places(v, alg, c.written) for v in (alg.a, alg.b))
        if loads > MOST_LOADS:
            return f"regs={c.regs} unroll=1: {loads} loads to write out, at most {MOST_LOADS}"
    return None


def _matrix_unit(c: Config, alg: Algorithm, target: Target) -> str | None:
    if c.unit != "mma":
        return None
    if "mma" not in target.features:
        return f"{target.name} has no matrix unit"
    if alg.b is None:
        return "a reduction has no second operand, the matrix unit multiplies two"
    if alg.acc.name == "f64":
        return "64-bit floats are multiplied element by element (unit fma)"
    for kind in "MNK":
        if tile(c, alg, kind) < 16:
            return f"the {kind} side of the tile is {tile(c, alg, kind)}, the matrix unit takes 16 or more"
    if tile(c, alg, "B") > 1:
        return "a tile for the matrix unit covers one group"
    return None


def _fits(c: Config, alg: Algorithm, target: Target) -> str | None:
    m, n, k = (tile(c, alg, kind) for kind in "MNK")
    m *= tile(c, alg, "B")
    if c.unit == "fma":  # what is written out is multiplied one after another
        k = lanes(c, alg, "K")
    if m * n * k > 1 << 20 and c.unit == "fma" or max(m * n, m * k, k * n) > 1 << 20:
        return f"a tile of {m}x{n}x{k} has more than 2^20 elements"
    if target.backend == "interpreter":
        return None
    if not 1 <= c.warps <= 32 or c.warps & (c.warps - 1):
        return f"warps={c.warps}: the number of warps is a power of two up to 32"
    acc = m * n * (k if c.late else 1) * alg.acc.bytes // 4
    threads = c.warps * target.warp_size
    if acc > 224 * threads:
        return (f"the accumulator of {m}x{n} needs {acc // threads} registers per thread, "
                f"{c.warps} warps have 224 to give")
    if c.unit == "mma" and alg.b is not None:
        need = shared_bytes(c, alg)
        held = c.c == "box" or _reordered(c, alg)
        need += c.teams * m * n * alg.c.tensor.dtype.bytes if held else 0
        if need > target.shared_bytes:
            twice = ", with what is turned" if turned_bytes(c, alg) else ""
            twice += f", {c.keep} kept," if c.keep else ""
            return (f"{c.stages} stages of {m}x{k} and {k}x{n}{twice} need {need} bytes of shared "
                    f"memory, {target.name} has {target.shared_bytes}")
    if c.unit == "fma" and m * n * k > 256 * threads:
        return f"a tile of {m}x{n}x{k} multiplied element by element needs over 256 registers a thread"
    return None


def _reordered(c: Config, alg: Algorithm) -> bool:
    """Whether Triton keeps room beside the operands' to bring a result into the order of its stores:
    the loads of a program's next tile are under way by then. (Results of 16 bits have had room.)"""
    return c.via == "tl" and c.programs > 0 and alg.c.tensor.dtype.bits > 16


def _split(c: Config, alg: Algorithm, target: Target) -> str | None:
    if c.split_k < 1:
        return f"split_k={c.split_k}: at least one program works on a sum"
    if c.reduce == "stream":
        return _stream(c, alg)
    if c.split_k == 1:
        return None
    if c.reduce == "atomic":
        if alg.c.tensor.dtype.name != "f32":
            return f"atomic sums are kept in f32, {alg.c.tensor.name} is {alg.c.tensor.dtype}"
        if alg.epilogue:
            return f"the epilogue {alg.epilogue} needs the whole sum, atomic parts never see it"
    steps = k_steps(c, alg)
    if c.split_k > max(1, steps):
        return f"split_k={c.split_k}, but the sum has only {steps} steps"
    return None


def _stream(c: Config, alg: Algorithm) -> str | None:
    if c.via != "gluon":
        return "reduce=stream: only an explicit kernel (via=gluon) has sums of different lengths"
    if c.split_k > 1 or c.group_m != 1 or c.pack:
        return "reduce=stream numbers the tiles one by one and deals them out itself: split_k=1 " \
               "group_m=1 and no pack"
    if c.programs < 1:
        return "reduce=stream deals the steps out to programs: say how many (programs=132)"
    return None


RULES: tuple[Rule, ...] = (_axes_exist, _blocks_are_pure, _registers, _matrix_unit, _fits, _split,
                           why_not_explicit, why_not_teams, why_not_kept, why_not_boxes)
