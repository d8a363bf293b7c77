"""Word: one row of the table of schedule words, with its values, its meaning and its rules."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING

from transconv.compute import Compute
from transconv.target import Target

if TYPE_CHECKING:
    from transconv.schedule.schedule import Schedule

Value = str | int
Rule = Callable[["Schedule", Compute, Target], "str | None"]
Draw = Callable[[Random, "Schedule", Compute], Value]
Propose = Callable[["Schedule", Compute, Target], "Iterable[Schedule]"]
Price = Callable[[float, "Schedule", Compute, Target], float]

ENDLESS = sys.maxsize
TEXT = re.compile(r"[\w.]*", re.ASCII)  # a text of one token


@dataclass(frozen=True)
class Such:
    """The texts for which ``holds`` is true; ``says`` describes them in errors and documentation."""

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
    why_not   the rule of the word: returns None, or why a schedule with it is not legal. It gets the
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
        if value is self.default or type(value) is self.kind and value in self.values:
            return None
        shown = value if type(value) is int or TEXT.fullmatch(str(value)) else repr(value)
        if type(value) is self.kind and self.expects:
            return f"{self.name}={shown}: {self.expects}"
        return f"{self.name}={shown}, expected {self.expected}"

    def read(self, text: str) -> Value:
        """The value of a text. Raises ValueError with the reason.

        ``refuses`` checks the range of numbers later, so that the text of an older version can be read,
        and is refused with a reason when it is used.
        """
        if self.kind is int:
            if not re.fullmatch("-?[0-9]+", text):
                raise ValueError(f"{self.name}={text}, expected a whole number")
            return int(text)
        if text not in self.values:
            raise ValueError(f"{self.name}={text}, expected {self.expected}")
        return text
