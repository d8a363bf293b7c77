"""The tokenizer: a line of text as words and signs."""

from __future__ import annotations

import re

from transconv.errors import KernelError
from transconv.ir.dtype import DTYPES, DType
from transconv.ir.rules.names import DEEPEST, NAME, why_not_name, why_not_text

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
WORD = re.compile(rf"\s*({NUMBER.pattern}|{NAME.pattern}|\.\.|->|//|<<|>>|<=|==|!=|\S)")
END = "the end of the line"


class LineWords:
    """The unread words of a line. Methods raise KernelError with what was found and what was expected, and
    so does the constructor, for a character that no text has and for too many open parentheses."""

    def __init__(self, text: str) -> None:
        if not text.startswith("#") and (reason := why_not_text(text)):
            raise KernelError(reason)
        self.words = [found[1] for found in WORD.finditer(text)]
        self.at = 0
        if _depth(self.words) > 2 * DEEPEST:  # casts are operations here
            raise KernelError(f"found more than {2 * DEEPEST} operations inside one another, expected "
                              "fewer")

    def next(self, ahead: int = 0) -> str:
        """The next word, or the one ``ahead`` words after it; empty beyond the end."""
        place = self.at + ahead
        return self.words[place] if place < len(self.words) else ""

    def follows(self, *words: str) -> bool:
        """Whether these words come next, in this order."""
        return all(self.next(i) == word for i, word in enumerate(words))

    def take(self) -> str:
        self.at += 1
        return self.words[self.at - 1]

    def accept(self, *words: str) -> bool:
        """Take these words if they come next."""
        if found := self.follows(*words):
            self.at += len(words)
        return found

    def expect(self, *words: str) -> None:
        for word in words:
            if not self.accept(word):
                raise self.unlike(f"'{word}'")

    def unlike(self, expected: str) -> KernelError:
        found = f"'{self.next()}'" if self.next() else END
        return KernelError(f"found {found}, expected {expected}")

    def end(self) -> None:
        if self.next():
            raise self.unlike(END)

    def name(self, what: str = "a name") -> str:
        """A word that may name something."""
        if not NAME.fullmatch(self.next()):
            raise self.unlike(what)
        return self.take()

    def new_name(self, what: str = "a name") -> str:
        """A name that the text gives to something."""
        name = self.name(what)
        if reason := why_not_name(name):
            raise KernelError(f"found '{name}', which cannot name anything: {reason}")
        return name

    def type(self) -> DType:
        if self.next() not in DTYPES:
            raise self.unlike(f"a type ({' '.join(DTYPES)})")
        return DTYPES[self.take()]

    def number(self) -> int | float:
        if not NUMBER.fullmatch(self.next()):
            raise self.unlike("a number")
        word = self.take()
        return int(word) if word.isdigit() else float(word)

    def count(self) -> int:
        if not self.next().isdigit():
            raise self.unlike("a whole number")
        return int(self.take())

    def counts(self) -> tuple[int, ...]:
        """``[4, 4, 16]``"""
        self.expect("[")
        found: list[int] = []
        while not self.accept("]"):
            if found:
                self.expect(",")
            found.append(self.count())
        return tuple(found)


def _depth(words: list[str]) -> int:
    """The most parentheses and signs that are open at once."""
    depth = signs = deepest = 0
    for word in words:
        signs = signs + 1 if word in ("-", "~") else 0
        depth += (word == "(") - (word == ")")
        deepest = max(deepest, depth + signs)
    return deepest
