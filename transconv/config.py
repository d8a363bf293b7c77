"""Stage 3. One line that says how an algorithm becomes a kernel: blocks and words.

    mb.oh.ow:128 oc:128 ic:64 | mma | a=gather b=gather | group_m=8 stages=3 warps=8

A block is an ordered group of fused axes and an extent, the piece of them that one program (or one
step of the sum) handles. Axes without a block are handled one by one: M, N and B axes by separate
programs, K axes by separate steps. ``Config.parse(str(c)) == c``; legality.py says which are legal.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from transconv.errors import ConfigError
from transconv.packing import letters


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
    keep      ``b``: all tiles of a program multiply the same boxes of B, which are fetched once and stay
              in shared memory, one buffer for each step of the sum (explicit kernels, ``programs``)
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
    keep: str = ""
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
            word = "unit" if token in CHOICES["unit"] else name
            if word in words:
                raise ConfigError(f"config '{text}': '{word}' is said twice; expected it once")
            if eq_sign and name in _DEFAULTS and name not in ("blocks", "unit"):
                words[name] = _word(name, value, text)
            elif colon and extent.isdigit() and all(a.isidentifier() for a in axes.split(".")):
                blocks.append(Block(tuple(axes.split(".")), int(extent)))
            elif token in CHOICES["unit"]:
                words["unit"] = token
            else:
                named = sorted({*_DEFAULTS} - {"blocks", "unit"})
                raise ConfigError(f"config '{text}': '{token}' is neither a block (mb.oh.ow:128), nor "
                                  f"mma or fma, nor one of {', '.join(named)}=...")
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
           "c": ("gather", "box"), "keep": ("", "a", "b"),
           "reduce": ("partials", "atomic", "stream"), "via": ("tl", "gluon")}
_DEFAULTS = {f.name: f.default for f in fields(Config)}


def _word(name: str, value: str, text: str) -> object:
    if name in CHOICES:
        if value not in CHOICES[name]:
            wanted = " or ".join(filter(None, CHOICES[name]))
            raise ConfigError(f"config '{text}': {name}={value}, expected {wanted}")
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
