"""Schedule: one line of tile sizes and words that says how a computation becomes a kernel.

    n.h.w:128 co:128 ci:64 | mma | a=gather b=gather | group_m=8 stages=3 warps=8

A block is an ordered group of fused axes and an extent: how many of their positions one program (or one
step of the sum) handles. Axes without a block have extent 1: M, N and B positions are separate programs, K
positions separate steps. ``Schedule.parse(str(c)) == c``. words.py, and ``transconv words``,
give the meaning and the values of each word; legality.py says which schedules are legal."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from transconv.ir import why_not_text
from transconv.schedule.words import FORMER, TABLE, TEXT, UNITS, WORDS, Value, Word, letters
from transconv.support import ScheduleError, nearest


class _Hashed:
    """A value that remembers its hash: caches and tables ask for it several times."""

    __slots__ = ("_hash",)
    _hash: int


@dataclass(frozen=True, slots=True)
class Block(_Hashed):
    """Fused axes, outermost first, and the number of consecutive positions in a tile."""

    axes: tuple[str, ...]
    extent: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", found := hash((self.axes, self.extent)))
            return found

    @property
    def first(self) -> str:
        """The outermost axis, to whose kind all of them belong."""
        return self.axes[0]

    @property
    def last(self) -> str:
        """The innermost axis, along which neighbouring lanes lie."""
        return self.axes[-1]

    def __str__(self) -> str:
        return f"{'.'.join(self.axes)}:{self.extent}"


_DEFAULTS: dict[str, Any] = {w.name: w.default for w in WORDS}


@dataclass(frozen=True, slots=True)
class Schedule(_Hashed):
    """Blocks and words. The words of ``WORDS`` have a field here, so that ``schedule.stages`` has a type.
    Registered words are in ``more`` unless they have their default; read them by ``schedule.word(name)``.
    """

    blocks: tuple[Block, ...] = ()
    unit: str = _DEFAULTS["unit"]
    a: str = _DEFAULTS["a"]
    b: str = _DEFAULTS["b"]
    c: str = _DEFAULTS["c"]
    behind: str = _DEFAULTS["behind"]
    merge: int = _DEFAULTS["merge"]
    pack: str = _DEFAULTS["pack"]
    swap: int = _DEFAULTS["swap"]
    order: str = _DEFAULTS["order"]
    group_m: int = _DEFAULTS["group_m"]
    back: int = _DEFAULTS["back"]
    split_k: int = _DEFAULTS["split_k"]
    reduce: str = _DEFAULTS["reduce"]
    deal: int = _DEFAULTS["deal"]
    red: str = _DEFAULTS["red"]
    row: str = _DEFAULTS["row"]
    turn: int = _DEFAULTS["turn"]
    programs: int = _DEFAULTS["programs"]
    unroll: int = _DEFAULTS["unroll"]
    regs: str = _DEFAULTS["regs"]
    subtiles: int = _DEFAULTS["subtiles"]
    scaled: int = _DEFAULTS["scaled"]
    late: int = _DEFAULTS["late"]
    consumers: int = _DEFAULTS["consumers"]
    transposers: int = _DEFAULTS["transposers"]
    keep: str = _DEFAULTS["keep"]
    slide: str = _DEFAULTS["slide"]
    stages: int = _DEFAULTS["stages"]
    warps: int = _DEFAULTS["warps"]
    via: str = _DEFAULTS["via"]
    more: tuple[tuple[str, Value], ...] = ()

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", found := hash(_values(self)))
            return found

    def __str__(self) -> str:
        return self._text({})

    @property
    def key(self) -> str:
        """The text with words that were renamed under their former names, as keys on disk have it."""
        return self._text({name: former for former, name in FORMER.items()})

    def _text(self, called: dict[str, str]) -> str:
        tail = []
        for word in TABLE.values():
            value = self.word(word.name)
            if word.name not in _HEAD and (word.always or value != word.default):
                tail.append(f"{called.get(word.name, word.name)}={value}")
        blocks = " ".join(map(str, self.blocks))
        return f"{blocks} | {self.unit} | a={self.a} b={self.b} | {' '.join(tail)}".strip()

    @staticmethod
    def parse(text: str) -> Schedule:
        """Read the one-line form. Words may be left out, for their default, and come in any order. Raises
        ScheduleError."""
        if not text.isascii():
            raise ScheduleError(f"schedule '{text}': {why_not_text(text)}")
        blocks: list[Block] = []
        said: dict[str, Value] = {}
        for token in text.replace("|", " ").split():
            name, eq_sign, value = token.partition("=")
            name = name if name in TABLE else FORMER.get(name, name)
            unit = token in TABLE["unit"].values
            if (word := "unit" if unit else name) in said:
                raise ScheduleError(f"schedule '{text}': '{word}' is said twice; expected it once")
            if unit:
                said["unit"] = token
            elif eq_sign and name in TABLE and name != "unit":
                try:
                    said[name] = TABLE[name].read(value)
                except ValueError as error:
                    raise ScheduleError(f"schedule '{text}': {error}") from None
            elif block := _block(token):
                blocks.append(block)
            else:
                named = sorted({*TABLE} - {"unit"})
                raise ScheduleError(
                    f"schedule '{text}': '{token}' is neither a block (n.h.w:128), nor "
                    f"mma or fma, nor one of {', '.join(named)}=..."
                    f"{nearest(token.partition('=')[0], [*named, 'mma', 'fma'])}"
                )
        own: dict[str, Any] = {n: v for n, v in said.items() if n in _FIELDS}
        made = Schedule(tuple(blocks), **own)
        return made.with_words(**said) if len(own) < len(said) else made

    def word(self, name: str) -> Value:
        """The value of a word, including registered ones. Raises ScheduleError for an unknown word."""
        if name in _FIELDS:
            value: Value = getattr(self, name)
            return value
        if name not in TABLE:
            raise ScheduleError(
                f"there is no word '{name}'; expected one of {', '.join(TABLE)}{nearest(name, TABLE)}"
            )
        return dict(self.more).get(name, TABLE[name].default)

    def with_words(self, **changes: Any) -> Schedule:
        """``dataclasses.replace`` for words, including registered ones; proposals are many, and this is
        faster."""
        more = {n: v for n, v in changes.items() if n not in _PUTS}
        if more:
            changes = {n: v for n, v in changes.items() if n not in more}
            for name in more:
                self.word(name)  # raises if there is no such word
            kept = {**dict(self.more), **more}
            changes["more"] = tuple(sorted((n, v) for n, v in kept.items() if v != TABLE[n].default))
        made = object.__new__(Schedule)
        for put, value in zip(_PUTS.values(), _values(self), strict=True):
            put(made, value)
        for name, value in changes.items():
            _PUTS[name](made, value)
        return made

    if not TYPE_CHECKING:  # so that mypy finds misspelled words

        def __getattr__(self, name: str) -> Value:
            if name != "_hash" and name in TABLE and name not in _FIELDS:
                return self.word(name)
            raise AttributeError(f"a schedule has no word '{name}'")

    @property
    def unpacks(self) -> bool:
        """Whether a last kernel copies the result from a workspace."""
        return "c" in letters(self.pack) and self.split_k == 1

    @property
    def varies(self) -> bool:
        """Whether the bits of a sum may differ from run to run."""
        return self.split_k > 1 and self.reduce == "atomic"

    def in_registers(self, block: Block) -> bool:
        """Whether the word ``regs`` writes out the positions of a block, so that they are no lanes."""
        return bool(self.regs) and len(block.axes) == 1 and block.first in self.regs.split(".")

    @property
    def written(self) -> list[tuple[str, int]]:
        """The axes whose positions are written out, and their number of positions."""
        return [(b.first, b.extent) for b in self.blocks if self.in_registers(b)]

    def block_of(self, axis: str) -> Block | None:
        """The block that an axis is in, or None."""
        return next((b for b in self.blocks if axis in b.axes), None)


_PUTS: dict[str, Callable[[Schedule, Any], None]] = {
    f.name: Schedule.__dict__[f.name].__set__ for f in fields(Schedule)
}  # write a field of a new schedule
_values = attrgetter(*_PUTS)
_FIELDS = frozenset(_PUTS) - {"blocks", "more"}
_HEAD = ("unit", "a", "b")  # printed before the other words


def register_word(word: Word) -> None:
    """Add a word to the table, in this process. The parser, printer, rules and fuzzer then use it; passes
    read it by ``schedule.word(name)``. Raises ScheduleError for a name that is taken, or values that the
    text form cannot have."""
    if not re.fullmatch(r"[a-z]\w*", word.name, re.ASCII) or hasattr(Schedule, word.name):
        raise ScheduleError(
            f"a word '{word.name}' cannot be registered; expected a name of letters "
            "that no word and no attribute of a schedule has"
        )
    if word.name in TABLE or word.name in UNITS:
        raise ScheduleError(f"there is a word '{word.name}' already; expected a name of its own")
    listed = word.values if isinstance(word.values, tuple) else ()
    if word.default not in word.values or not all(
        type(v) is word.kind and (word.kind is int or TEXT.fullmatch(str(v))) for v in listed
    ):
        raise ScheduleError(
            f"the values of '{word.name}' are {word.expected}; expected numbers, or texts "
            f"of letters, digits and dots, with the default {word.default!r} among them"
        )
    TABLE.add(word)


def unregister_word(name: str) -> None:
    """Remove a registered word. Does nothing if there is none of this name."""
    if name in TABLE and name not in _FIELDS:
        TABLE.remove(name)


def _block(token: str) -> Block | None:
    axes, colon, extent = token.partition(":")
    if colon and extent.isdecimal() and int(extent) and all(a.isidentifier() for a in axes.split(".")):
        return Block(tuple(axes.split(".")), int(extent))
    return None


Config = Schedule  # deprecated alias
