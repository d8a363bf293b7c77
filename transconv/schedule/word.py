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
TEXT = re.compile(r"[\w.]*", re.ASCII)  # what stays one token of a line, and one line


@dataclass(frozen=True)
class Such:
    """Values that a predicate holds for, and what they are called."""

    holds: Callable[[str], object]
    says: str

    def __contains__(self, value: object) -> bool:
        return isinstance(value, str) and bool(TEXT.fullmatch(value) and self.holds(value))


@dataclass(frozen=True, eq=False)
class Word:
    """One word. The parser, the printer, the rules, the fuzzer and the documentation read this row.

    default   the value where a schedule does not say the word; its type is the type of all values
    says      one plain sentence
    values    a tuple of all legal values, a ``range`` of numbers, or ``Such`` texts
    expects   the end of the sentence that refuses another value; default: made from ``values``
    why_not   the rule of the word: None, or why a schedule with it is not legal. It sees the computation
              of the main kernel: groups merged, operands over their copies
    draw      what the fuzzer draws: values to pick from (none: it leaves the word alone), or a function;
              default: from ``values``
    together  words that decide whether this one is legal; the fuzzer draws them along with it
    always    printed also where the value is the default
    propose   schedules to try beside a legal one; price: estimated microseconds, corrected
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
        """The legal values in words."""
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
        """None if the value is one of the word's, else why not, in one line."""
        if value is self.default or type(value) is self.kind and value in self.values:
            return None
        shown = value if type(value) is int or TEXT.fullmatch(str(value)) else repr(value)
        if type(value) is self.kind and self.expects:
            return f"{self.name}={shown}: {self.expects}"
        return f"{self.name}={shown}, expected {self.expected}"

    def read(self, text: str) -> Value:
        """The value of a text. Raises ValueError with the whole reason.

        Whether a number is in range is left to the rules: a text of an older version reads, and is
        refused in words where it is used.
        """
        if self.kind is int:
            if not re.fullmatch("-?[0-9]+", text):
                raise ValueError(f"{self.name}={text}, expected a whole number")
            return int(text)
        if text not in self.values:
            raise ValueError(f"{self.name}={text}, expected {self.expected}")
        return text
