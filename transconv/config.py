"""Stage 3. One line that says how an algorithm becomes a kernel: blocks and words.

    mb.oh.ow:128 oc:128 ic:64 | mma | a=gather b=gather | group_m=8 stages=3 warps=8

A block is an ordered group of fused axes and an extent, the piece of them that one program (or one
step of the sum) handles. Axes without a block are handled one by one: M, N and B axes by separate
programs, K axes by separate steps. ``Config.parse(str(c)) == c``; legality is answered in words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import prod

from transconv.algorithm import Algorithm
from transconv.boxes import ROW, Box, box_of, turned
from transconv.errors import ConfigError
from transconv.ir import View
from transconv.merging import merged, why_not_merged
from transconv.packing import ROW_ALIGN, letters, operand_of, over_copies, view_of, why_not_copied
from transconv.strides import places
from transconv.target import Target


@dataclass(frozen=True, slots=True)
class Block:
    """Fused axes, outermost first, and how many consecutive positions of them form a tile."""

    axes: tuple[str, ...]
    extent: int

    def __str__(self) -> str:
        return f"{'.'.join(self.axes)}:{self.extent}"


@dataclass(frozen=True, slots=True)
class Config:
    """Blocks and words.

    unit      ``mma`` multiplies tiles on the matrix unit, ``fma`` element by element
    a, b, c   how an operand is fetched and the result stored: ``gather`` computes one address per
              element, ``box`` has the copy engine move rectangular pieces
    merge     so many neighbouring groups are seen as one, whose filter is zero off its diagonal (see
              merging.py): few channels fill the matrix unit, more products are made than needed
    pack      ``a.c`` copies A before and C after by kernels of their own: the main kernel sees them
              with channels innermost, f32 with the channels or images that are summed, and a filter
              of merged groups with its zeros (see packing.py)
    swap      take B as the left operand: acc[n, m] instead of acc[m, n]
    order     the K axes from the outermost loop to the innermost (default: the algorithm's order)
    group_m   programs that share columns run next to each other in groups of this many row blocks
    split_k   so many programs share one sum; ``reduce`` says how they meet: ``partials`` stores
              f32 tiles and adds them in a second kernel (same bits every run), ``atomic`` adds in place,
              ``stream`` deals the steps of all tiles out to ``programs`` evenly, and tiles that several
              worked at meet as ``partials`` do
    programs  0 starts one program per tile; otherwise so many programs work through the tiles
    unroll    1 writes the steps of the sum out instead of looping
    regs      ``regs=ow.kw``: positions of these blocks are no lanes of the tile, each is written out and
              has registers of its own. What several of them load is loaded once: the taps of a row
              slide over pixels that stay in registers
    late      1 keeps a sum per lane of the summed block and adds the lanes once, after the last step,
              instead of at every step (unit fma)
    teams     2: two groups of ``warps`` take turns at the tiles of a program, so that one multiplies
              while the other stores (explicit kernels that are given several tiles each)
    stages    loop iterations whose loads are in flight; warps   warps per program (of each team)
    via       ``tl`` leaves shared memory and waits to Triton; ``gluon`` has them written out, one more
              warp fetches boxes while the others multiply straight from shared memory; f32 boxes
              that do not lie along the sum are turned on the way by four warps more (see roles.py)
    """

    blocks: tuple[Block, ...] = ()
    unit: str = "mma"
    a: str = "gather"
    b: str = "gather"
    c: str = "gather"
    merge: int = 1
    pack: str = ""
    swap: int = 0
    order: str = ""
    group_m: int = 8
    split_k: int = 1
    reduce: str = "partials"
    programs: int = 0
    unroll: int = 0
    regs: str = ""
    late: int = 0
    teams: int = 1
    stages: int = 3
    warps: int = 4
    via: str = "tl"

    def __str__(self) -> str:
        words = {f.name: getattr(self, f.name) for f in fields(self)}
        shown = {"stages", "warps"}
        tail = [f"{n}={v}" for n, v in words.items() if n not in ("blocks", "unit", "a", "b")
                and (n in shown or v != _DEFAULTS[n])]
        blocks = " ".join(map(str, self.blocks))
        return f"{blocks} | {self.unit} | a={self.a} b={self.b} | {' '.join(tail)}".strip()

    @staticmethod
    def parse(text: str) -> Config:
        """Read the one-line form; words may be left out (their defaults hold) and come in any order."""
        blocks: list[Block] = []
        words: dict[str, object] = {}
        for token in text.replace("|", " ").split():
            name, eq_sign, value = token.partition("=")
            axes, colon, extent = token.partition(":")
            if eq_sign and name in _DEFAULTS and name not in ("blocks", "unit"):
                words[name] = _word(name, value, text)
            elif colon and extent.isdigit() and all(a.isidentifier() for a in axes.split(".")):
                blocks.append(Block(tuple(axes.split(".")), int(extent)))
            elif token in CHOICES["unit"]:
                words["unit"] = token
            else:
                raise ConfigError(f"config '{text}': '{token}' is neither a block (mb.oh.ow:128), nor "
                                  f"mma or fma, nor one of {', '.join(sorted(_DEFAULTS))}=...")
        return Config(tuple(blocks), **words)  # type: ignore[arg-type]

    @property
    def unpacks(self) -> bool:
        """Whether a last kernel copies the result to where it belongs."""
        return "c" in letters(self.pack) and self.split_k == 1

    def in_registers(self, block: Block) -> bool:
        """Whether the positions of a block are written out and are no lanes."""
        return len(block.axes) == 1 and block.axes[0] in self.regs.split(".")

    @property
    def written(self) -> list[tuple[str, int]]:
        """The axes whose positions are written out, and how many of each."""
        return [(b.axes[0], b.extent) for b in self.blocks if self.in_registers(b)]

    def block_of(self, axis: str) -> Block | None:
        return next((b for b in self.blocks if axis in b.axes), None)


CHOICES = {"unit": ("mma", "fma"), "a": ("gather", "box"), "b": ("gather", "box"),
           "c": ("gather", "box"), "reduce": ("partials", "atomic", "stream"), "via": ("tl", "gluon")}
_DEFAULTS = {f.name: f.default for f in fields(Config)}


def _word(name: str, value: str, text: str) -> object:
    if name in CHOICES:
        if value not in CHOICES[name]:
            raise ConfigError(f"config '{text}': {name}={value}, expected {' or '.join(CHOICES[name])}")
        return value
    if name in ("order", "regs"):
        return value
    if name == "pack":
        named = value.split(".")
        if value and (sorted(set(named)) != named or not set(named) <= set("abc")):
            raise ConfigError(f"config '{text}': pack={value}, expected some of a.b.c, in this order")
        return value
    if not value.isdigit():
        raise ConfigError(f"config '{text}': {name}={value}, expected a whole number")
    return int(value)


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


def main_of(algorithm: Algorithm, config: Config) -> Algorithm:
    """The algorithm of the main kernel: groups merged, over the copies."""
    algorithm = merged(algorithm, config.merge)
    return over_copies(algorithm, config.pack) if config.pack else algorithm


def _packs(c: Config, alg: Algorithm) -> str | None:
    """About the tensors as they are; the rules below see the algorithm over the copies."""
    if letters(c.pack) != sorted(set(letters(c.pack))):
        return f"pack={c.pack}: each operand is copied once, and named in the order a.b.c"
    for letter in letters(c.pack):
        view = view_of(alg, letter)
        if view is None:
            return f"pack={letter}, but {alg.name} has no second operand"
        if reason := why_not_copied(alg, letter):
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


def tile(c: Config, alg: Algorithm, kind: str) -> int:
    """The extent of the tile along a kind: the product of its blocks."""
    return prod((b.extent for b in c.blocks if alg.kind(b.axes[0]) == kind), start=1)


def lanes(c: Config, alg: Algorithm, kind: str) -> int:
    """The same without the blocks that are written out."""
    return prod((b.extent for b in c.blocks if alg.kind(b.axes[0]) == kind and not c.in_registers(b)),
                start=1)


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
        per_stage = m * k * alg.a.tensor.dtype.bytes + k * n * alg.b.tensor.dtype.bytes
        per_stage += turned_bytes(c, alg)
        need = per_stage * max(1, c.stages)
        held = c.c == "box" or _reordered(c, alg)
        need += c.teams * m * n * alg.c.tensor.dtype.bytes if held else 0
        if need > target.shared_bytes:
            twice = ", with what is turned" if turned_bytes(c, alg) else ""
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


def _boxes(c: Config, alg: Algorithm, target: Target) -> str | None:
    words = (("a", c.a, alg.a), ("b", c.b, alg.b), ("c", c.c, alg.c))
    if all(word == "gather" for _, word, _ in words):
        return None
    if "box" not in target.features:
        return f"{target.name} has no copy engine for boxes"
    if c.unit != "mma":
        return "boxes feed the matrix unit, element by element there is nothing to gain"
    if c.split_k > 1 and k_steps(c, alg) % c.split_k and c.via == "tl":
        return f"split_k={c.split_k} does not divide the {k_steps(c, alg)} steps of the sum"
    if c.split_k > 1 and c.c == "box":
        return "parts of a sum are stored element by element (c=gather)"
    for name, word, view in words:
        if word == "box" and view is not None:
            found = box_of(view, c, alg, stored=name == "c")
            if isinstance(found, str):
                return f"{name}=box: {found}"
            if name == "c" and _cut_short(found, view):
                return (f"c=box: rows of {view.tensor.name} end between multiples of {ROW_ALIGN} bytes, "
                        "and the copy engine writes beyond them")
            if name != "c" and _folded(found, alg):
                return (f"{name}=box: the innermost side of the tile is spread over several dimensions "
                        "of the box, the matrix unit reads rows of one")
            if c.via == "tl" and name == ("b" if c.swap else "a") and (
                    sum(e > 1 for e in found.extents) > 2):
                return (f"{name}=box: a left operand of more than two dimensions goes through "
                        "registers, where Triton 3.6 gets some sums wrong")
    return None


def _cut_short(box: Box, view: View) -> bool:
    """Whether a box that is stored ends within 16 bytes that belong to others (seen on an H200); after
    a row of a copy nothing lies that anybody reads."""
    return not operand_of(view.tensor.name) and bool(
        box.tensor.shape[-1] * view.tensor.dtype.bytes % ROW_ALIGN)


def _folded(box: Box, alg: Algorithm) -> bool:
    """Whether the side of the tile that lies innermost runs through more than one dimension of the
    box, with the other side outside of it: shared memory then has it in the wrong order."""
    kinds = [alg.kind(v.name.partition("_")[0]) for v, extent in zip(
        box.moving, box.extents, strict=True) if v is not None and extent > 1]
    return len(set(kinds)) > 1 and kinds.count(kinds[-1]) > 1 and kinds[-2] == kinds[-1]


def _explicit(c: Config, alg: Algorithm, target: Target) -> str | None:
    if c.via == "tl":
        return None
    if not {"box", "wgmma"} <= target.features and target.backend != "interpreter":
        return f"via=gluon: {target.name} has no asynchronous matrix unit fed from boxes (wgmma)"
    if c.unit != "mma" or c.a != "box" or c.b != "box":
        return "via=gluon: explicit kernels multiply boxes (mma, a=box b=box)"
    dtype = alg.a.tensor.dtype
    if dtype.bits != 16 and dtype.name != "f32":
        return f"via=gluon: the asynchronous matrix unit does not take {dtype}"
    if dtype.name == "f32" and alg.math != "tf32":
        return f"via=gluon: the asynchronous matrix unit multiplies f32 as tf32 alone, not {alg.math}"
    if c.unroll:
        return "via=gluon: the steps of an explicit kernel are a loop (unroll=0)"
    left, right = (tile(c, alg, kind) for kind in ("NM" if c.swap else "MN"))
    if c.warps not in (4, 8):
        return f"via=gluon: products are made by groups of 4 warps, at most two (warps={c.warps})"
    if left % 64 or right < 16:
        return f"via=gluon: a product takes left sides in multiples of 64, this tile is {left}x{right}"
    if tile(c, alg, "K") % 16:
        return "via=gluon: a product takes 16 steps of the sum at a time"
    if turned_bytes(c, alg) and tile(c, alg, "K") * dtype.bytes > ROW:
        return (f"via=gluon: {dtype} is turned in rows of {ROW} bytes, {tile(c, alg, 'K')} steps of "
                "the sum are more")
    steps = k_steps(c, alg)
    if (c.split_k - 1) * -(-steps // c.split_k) >= steps:
        return f"via=gluon: {steps} steps in {c.split_k} parts leave the last part nothing to do"
    if c.stages < 2:
        return "via=gluon: one slot cannot be filled while it is read, stages is at least 2"
    return None


def _teams(c: Config, alg: Algorithm, target: Target) -> str | None:
    if c.teams == 1:
        return None
    if c.teams != 2:
        return f"teams={c.teams}: tiles are worked at by one team, or by two in turns"
    if c.via != "gluon":
        return "teams=2: only in an explicit kernel (via=gluon) do warps have roles"
    if c.warps != 4:
        return f"teams=2: a team is one group of 4 warps (warps={c.warps})"
    if turned_bytes(c, alg):
        return "teams=2: operands are turned on the way here, which leaves no registers for two teams"
    if c.reduce == "stream":
        return "teams=2: reduce=stream leaves a program one tile or two, and no turns to take"
    tiles, steps = programs(c, alg), k_steps(c, alg)
    if not 0 < c.programs < tiles:
        return (f"teams=2 take turns at the tiles of one program: say how many programs there are, "
                f"fewer than the {tiles} tiles (programs=132)")
    if steps % c.split_k:
        return f"teams=2: {steps} steps in {c.split_k} parts make sums of different lengths"
    return None


def programs(config: Config, alg: Algorithm) -> int:
    """How many programs the kernel has, each with a tile; persistent ones deal them out."""
    alg, found = merged(alg, config.merge), config.split_k
    for kind in "BMN":
        for b in config.blocks:
            if alg.kind(b.axes[0]) == kind:
                found *= -(-prod(alg.size(a) for a in b.axes) // b.extent)
        found *= prod(x.size for x in alg.axes_of(kind) if config.block_of(x.name) is None)
    return max(1, found)


def turned_bytes(c: Config, alg: Algorithm) -> int:
    """The bytes of a step's tiles that an explicit kernel writes to shared memory once more."""
    k = tile(c, alg, "K")
    return sum(tile(c, alg, kind) * k * view.tensor.dtype.bytes
               for kind, view in (("M", alg.a), ("N", alg.b))
               if view is not None and turned(view, c, alg))


def k_steps(c: Config, alg: Algorithm) -> int:
    """The number of steps of the sum: blocks of K axes, and K axes without a block one by one."""
    alg = merged(alg, c.merge)
    steps = 1
    for b in c.blocks:
        if alg.kind(b.axes[0]) == "K":
            steps *= -(-prod(alg.size(a) for a in b.axes) // b.extent)
    return steps * prod(x.size for x in alg.axes_of("K") if c.block_of(x.name) is None)


RULES: tuple[Rule, ...] = (_axes_exist, _blocks_are_pure, _registers, _matrix_unit, _fits, _split,
                           _explicit, _teams, _boxes)
