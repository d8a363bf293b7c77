"""The words of a schedule: one table, a row for each, in the order in which they are printed.

The package's words are the rows of ``WORDS``; ``register_word`` adds others, in this process. ``words()``
has all of them. When the package's words are legal is said in legality.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from random import Random
from typing import Any

from transconv.compute import Compute
from transconv.ir import RowTable
from transconv.target import Target

Value = str | int
Schedule = Any  # schedule.py, which is made of these words
Rule = Callable[[Schedule, Compute, Target], "str | None"]
Draw = Callable[[Random, Schedule, Compute], Value]
Propose = Callable[[Schedule, Compute, Target], Iterable[Schedule]]
Price = Callable[[float, Schedule, Compute, Target], float]

ENDLESS = sys.maxsize
TEXT = re.compile(r"[\w.]*", re.ASCII)  # a text of one token


@dataclass(frozen=True)
class Such:
    """The values of a word: texts for which ``holds`` is true; ``says`` describes them in errors and
    documentation."""

    holds: Callable[[str], object]
    says: str

    def __contains__(self, value: object) -> bool:
        return isinstance(value, str) and bool(TEXT.fullmatch(value) and self.holds(value))


@dataclass(frozen=True, eq=False)
class Word:
    """One word. The parser, the printer, the rules, the fuzzer and the documentation read this row.

    default   the value of a schedule without the word; its type is the type of all values
    says      the meaning, in one sentence
    values    a tuple of all legal values, a ``range`` of numbers, or ``Such`` texts
    expects   the end of the error for other values; default: made from ``values``
    why_not   the rule of a registered word: None, or why a schedule with it is not legal. It gets the
              computation of the main kernel: groups merged, operands over their copies
    draw      what the fuzzer draws: values to pick from (none: it keeps the default), or a function;
              default: from ``values``
    together  words that decide whether this one is legal; the fuzzer draws them along with it
    always    whether the text form prints the default
    propose   schedules to try in addition to a legal one
    price     the estimated microseconds of a schedule with the word, from those without
    former    its name in texts from before it was renamed, which are read for one release; keys of what
              lies on disk go on being made with it
    """

    name: str
    default: Value
    says: str
    values: tuple[Value, ...] | range | Such
    expects: str = ""
    why_not: Rule | None = None
    draw: tuple[Value, ...] | Draw | None = None
    together: tuple[str, ...] = ()
    always: bool = False
    propose: Propose | None = None
    price: Price | None = None
    former: str = ""

    @cached_property
    def expected(self) -> str:
        """A description of the legal values."""
        if isinstance(self.values, Such):
            return self.values.says
        if isinstance(self.values, range):
            first, last = self.values.start, self.values.stop - 1
            to = "" if self.values.stop == ENDLESS else f" to {last}"
            return f"a whole number from {first}{to}"
        *most, last_one = [str(v) for v in self.values if v != ""]
        return f"{', '.join(most)} or {last_one}" if most else last_one

    @cached_property
    def kind(self) -> type:
        """The type of its values."""
        return type(self.default)

    def refuses(self, value: object) -> str | None:
        """None if the value is legal, else the reason in one line."""
        if value is self.default or (type(value) is self.kind and value in self.values):
            return None
        shown = value if type(value) is int or TEXT.fullmatch(str(value)) else repr(value)
        if type(value) is self.kind and self.expects:
            return f"{self.name}={shown}: {self.expects}"
        return f"{self.name}={shown}, expected {self.expected}"

    def read(self, text: str) -> Value:
        """The value of a text. Raises ValueError with the reason.

        ``refuses`` checks the range of numbers later, so that the text of an older version can be read,
        and is refused with a reason when it is used."""
        if self.kind is int:
            if not re.fullmatch("-?[0-9]+", text):
                raise ValueError(f"{self.name}={text}, expected a whole number")
            return int(text)
        if text not in self.values:
            raise ValueError(f"{self.name}={text}, expected {self.expected}")
        return text


UNITS = ("mma", "fma")
WAYS = ("gather", "box")
AXIS = Such(re.compile(r"\w*", re.ASCII).fullmatch, "an axis, such as kh")
AXES = Such(re.compile(r"(\w+(\.\w+)*)?", re.ASCII).fullmatch, "axes joined by dots, such as kh.kw.c")
PACKS = Such(
    re.compile(r"(a|b|c|a\.b|a\.c|b\.c|a\.b\.c|a\.b\.f16|a\.b\.rows|a\.frame|f16)?").fullmatch,
    "some of a.b.c, in this order, a.b.f16, a.b.rows, a.frame or f16",
)


WIDE = "f16"  # the last part of the value of ``pack`` where copies of 8-bit floats hold f16
IN_ROWS = "rows"  # the same where copies are rows of summed positions
FRAMED = "frame"  # the same where the copy has zeros around each image


def letters(pack: str) -> list[str]:
    """``a.c`` -> a, c; ``a.b.f16`` -> a, b."""
    return [x for x in pack.split(".") if x and x not in (WIDE, IN_ROWS, FRAMED)]


def widens(pack: str) -> bool:
    """Whether copies of 8-bit floats hold f16."""
    return WIDE in pack.split(".")


def in_registers(pack: str) -> bool:
    """Whether 8-bit floats become f16 in registers, without copies (tiles/packing.py)."""
    return pack == WIDE


def has_rows(pack: str) -> bool:
    """Whether copies are rows of summed positions."""
    return IN_ROWS in pack.split(".")


def is_framed(pack: str) -> bool:
    """Whether the copy has zeros around each image."""
    return FRAMED in pack.split(".")


def with_letter(pack: str, letter: str) -> str:
    """The value of ``pack=`` with another operand: ``a``, c -> ``a.c``."""
    return ".".join(sorted({*pack.split("."), letter} - {""}))


def without(pack: str, letter: str) -> str:
    """The value of ``pack=`` without an operand: ``a.c``, c -> ``a``."""
    return ".".join(x for x in pack.split(".") if x != letter)


def _some_order(rng: Random, schedule: Schedule, compute: Compute) -> Value:
    axes = [x.name for x in compute.axes_of("K")]
    return ".".join(rng.sample(axes, len(axes))) if rng.randrange(2) == 0 else ""


def _some_axis(rng: Random, schedule: Schedule, compute: Compute) -> Value:
    return rng.choice(["", "", *(x.name for x in compute.axes_of("K"))])


def _some_axes(rng: Random, schedule: Schedule, compute: Compute) -> Value:
    alone = [b.first for b in schedule.blocks if len(b.axes) == 1]
    return ".".join(rng.sample(alone, rng.randint(0, min(3, len(alone)))))


WORDS: tuple[Word, ...] = (
    Word("unit", "mma", "`mma` multiplies tiles on the matrix unit, `fma` element by element.", UNITS),
    Word(
        "a",
        "gather",
        "How operand A is loaded: one address per element (`gather`) or TMA boxes (`box`).",
        WAYS,
    ),
    Word("b", "gather", "How operand B is loaded.", WAYS),
    Word(
        "c",
        "gather",
        "How the result is stored. With `box` explicit kernels (`gluon`) store other "
        "results of the same tile in boxes as well, where they have one.",
        WAYS,
    ),
    Word(
        "behind",
        "gather",
        "How the epilogue reads what is as large as the result, such as a "
        "residual: one address per element, or TMA boxes that the producer fetches (`gluon`).",
        WAYS,
        draw=("box", "box", "gather"),
        together=("split_k", "reduce"),
    ),
    Word(
        "merge",
        1,
        "Treats this many adjacent groups as one group, whose operand B is block diagonal.",
        range(1, ENDLESS),
        "at least one group is seen as one",
        draw=(1, 2, 3, 4, 8, 16),
    ),
    Word(
        "pack",
        "",
        "Copies these operands first with features innermost (f32: the summed "
        "dimension), as TMA boxes need; `c` copies the result afterwards. Copies in `a.b.f16` hold 8-bit "
        "floats as f16; those in `a.b.rows` have rows of summed positions, once for each column of a "
        "window. The one in `a.frame` has zeros around each image and features in multiples of 16 bytes "
        "from window to window. `f16` copies nothing: 8-bit floats become f16 in registers.",
        PACKS,
        "each operand is copied once, and named in the order a.b.c",
    ),
    Word("swap", 0, "1 makes B the left operand of the product: acc[n, m] instead of acc[m, n].", (0, 1)),
    Word(
        "order",
        "",
        "The loop order of the summed axes, outermost first; default: the order of the computation.",
        AXES,
        draw=_some_order,
    ),
    Word(
        "group_m",
        8,
        "Programs are numbered in groups of this many row blocks, so that programs that "
        "run together share columns in the L2 cache.",
        range(1, ENDLESS),
        draw=(1, 2, 3, 8),
    ),
    Word(
        "back",
        0,
        "1 numbers the programs from the last one, whose elements the kernel before may have "
        "left in the L2 cache (`tl`).",
        (0, 1),
        "programs are numbered from the first (0) or the last (1)",
        draw=(0, 0, 0, 1),
    ),
    Word(
        "split_k",
        1,
        "Splits each sum among this many programs.",
        range(1, ENDLESS),
        "at least one program works on a sum",
        draw=(1, 1, 2, 3, 5),
    ),
    Word(
        "reduce",
        "partials",
        "How the parts of a split sum are added: `partials` adds f32 tiles in a "
        "second kernel, `atomic` uses atomic additions, `stream` splits all steps evenly (stream-K).",
        ("partials", "atomic", "stream"),
    ),
    Word(
        "deal",
        0,
        "1 deals the steps of a split sum out to its programs in turn, so that what is added to what "
        "does not depend on how many steps there are; 0 gives each program steps in a row.",
        (0, 1),
        "the steps of a split sum are in a row (0) or dealt out in turn (1)",
        draw=(0, 0, 1),
        together=("split_k", "reduce"),
    ),
    Word(
        "red",
        "",
        "What reduces a row: one thread (`lane`), the threads of a `warp` or of a `block`, or "
        "several programs (`split`); default: the tile decides.",
        ("", "lane", "warp", "block", "split"),
    ),
    Word(
        "row",
        "",
        "Whether a row that several sweeps read stays in registers (`held`) or is loaded in "
        "each (`again`); default: the tile decides.",
        ("", "held", "again"),
        draw=(),
    ),
    Word(
        "turn",
        0,
        "1 lets each sweep over a row that is loaded again begin where the last one ended, "
        "whose elements the caches still hold (`tl`).",
        (0, 1),
        "every sweep begins at the first step (0), or every other one at the last (1)",
        draw=(0, 0, 1),
    ),
    Word(
        "programs",
        0,
        "0 starts one program per tile; another number starts this many persistent "
        "programs, which share the tiles.",
        range(ENDLESS),
        draw=(0, 1, 2, 5, 132),
    ),
    Word("unroll", 0, "1 unrolls the loop over the steps of the sum.", (0, 1), draw=(0, 0, 1)),
    Word(
        "regs",
        "",
        "Unrolls the positions of these blocks into separate registers, and loads elements "
        "that they share only once (`fma`).",
        AXES,
        draw=_some_axes,
    ),
    Word(
        "subtiles",
        1,
        "Divides the columns of a tile into this many products for each step, which share the loaded rows "
        "and have an accumulator each (`mma`, `tl`).",
        (1, 2, 4, 8),
        draw=(),
    ),
    Word(
        "scaled",
        0,
        "1 gives the matrix unit elements of 8 and 4 bits with the scales of their blocks "
        "(`tl.dot_scaled`); 0 multiplies elements by scales first (`mma`, `tl`).",
        (0, 1),
        "the matrix unit takes the scales of blocks (1) or not (0)",
        draw=(),
    ),
    Word(
        "late",
        0,
        "1 keeps one partial sum per lane and reduces across lanes after the last step, or "
        "the last tile of a program that carries statistics; 0 at every step (`fma`).",
        (0, 1),
        "the lanes of a sum are added late (1) or at every step (0)",
    ),
    Word(
        "consumers",
        1,
        "2 runs two consumer warp groups in ping-pong: one multiplies while the other stores (`gluon`).",
        (1, 2),
        "tiles are worked at by one consumer, or by two in turns",
        together=("programs", "warps", "split_k"),
        former="teams",
    ),
    Word(
        "transposers",
        1,
        "2 runs two groups of warps that transpose operands in shared memory, at every "
        "other step each: one reads while the other writes (`gluon`).",
        (1, 2),
        "operands are transposed by one group of warps, or by two in turns",
        together=("warps",),
    ),
    Word(
        "keep",
        "",
        "This operand stays resident in shared memory for all tiles of a persistent program (`gluon`).",
        ("", "a", "b"),
        together=("programs", "split_k", "consumers"),
    ),
    Word(
        "slide",
        "",
        "The steps along this axis, the innermost of the sum, share the boxes of an "
        "operand that it moves by whole rows (`gluon`).",
        AXIS,
        draw=_some_axis,
        together=("order", "split_k", "keep"),
    ),
    Word(
        "stages",
        3,
        "Buffers of the software pipeline: the number of loop iterations in flight.",
        range(1, ENDLESS),
        draw=(1, 2, 3, 4),
        always=True,
    ),
    Word(
        "warps",
        4,
        "Warps per program; with `consumers=2`, per consumer.",
        (1, 2, 4, 8, 16, 32),
        "the number of warps is a power of two up to 32",
        draw=(1, 2, 4, 4, 8),
        always=True,
    ),
    Word(
        "via",
        "tl",
        "`tl` emits Triton, which manages shared memory and barriers; `gluon` emits a "
        "warp-specialized Gluon kernel that does so itself.",
        ("tl", "gluon"),
    ),
)
"""The package's own words, in the order in which they are printed."""
TABLE = RowTable(*WORDS)
"""All words by name, in the order in which the text form prints them."""
FORMER: dict[str, str] = TABLE.table(lambda w: w.name if w.former else None, key=attrgetter("former"))
"""The words of today by what older texts call them."""
PRICED: dict[str, Word] = TABLE.table(lambda w: w if w.price else None)
"""The words that correct the estimate."""
PROPOSING: dict[str, Word] = TABLE.table(lambda w: w if w.propose else None)
"""The words that propose schedules."""


def words() -> tuple[Word, ...]:
    """All words, in the order in which the text form prints them."""
    return tuple(TABLE.values())


def registered_words() -> tuple[Word, ...]:
    """The registered words."""
    return words()[len(WORDS) :]
