"""Numbers of the model that are known later: the model's formulas, computed with these, give the text of
an expression instead of a value, so that what is computed again and again is compiled once.

    Lines().number("tiles") * 2 + 1   ->   "((tiles * 2) + 1)"
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Lines:
    """The text of a function: what has a name is computed before the results that use it."""

    named: list[tuple[str, str]] = field(default_factory=list)
    sign: str = "v"  # what names begin with

    def number(self, text: str) -> Spelled:
        """The number that a text computes."""
        return Spelled(text, self)

    def name(self, number: Number) -> str:
        """A name for a number, that is computed once."""
        self.named.append((f"{self.sign}{len(self.named)}", _text(number)))
        return self.named[-1][0]


@dataclass(slots=True)
class Spelled:
    """A number that is the value of a text of Python."""

    text: str
    lines: Lines

    def _with(self, left: Number, sign: str, right: Number) -> Spelled:
        return Spelled(f"({_text(left)} {sign} {_text(right)})", self.lines)

    def __add__(self, other: Number) -> Spelled:
        return self if _is(other, 0) else self._with(self, "+", other)

    def __radd__(self, other: Number) -> Spelled:
        return self if _is(other, 0) else self._with(other, "+", self)

    def __sub__(self, other: Number) -> Spelled:
        return self if _is(other, 0) else self._with(self, "-", other)

    def __rsub__(self, other: Number) -> Spelled:
        return self._with(other, "-", self)

    def __mul__(self, other: Number) -> Spelled:
        return self if _is(other, 1) else self._with(self, "*", other)

    def __rmul__(self, other: Number) -> Spelled:
        return self if _is(other, 1) else self._with(other, "*", self)

    def __truediv__(self, other: Number) -> Spelled:
        return self if _is(other, 1) else self._with(self, "/", other)

    def __rtruediv__(self, other: Number) -> Spelled:
        return self._with(other, "/", self)

    def __floordiv__(self, other: Number) -> Spelled:
        return self if _is(other, 1) else self._with(self, "//", other)

    def __neg__(self) -> Spelled:
        return Spelled(f"(-{self.text})", self.lines)


Number = int | float | Spelled
"""What the model's formulas compute with."""


def _text(number: Number) -> str:
    return number.text if isinstance(number, Spelled) else repr(number)


def _is(number: Number, value: int) -> bool:
    """Whether it is a number, and this one."""
    return not isinstance(number, Spelled) and number == value


def larger(a: Number, b: Number) -> Number:
    """The larger of two numbers."""
    if isinstance(a, Spelled) or isinstance(b, Spelled):
        return _chosen(a, ">", b)
    return a if a > b else b


def smaller(a: Number, b: Number) -> Number:
    """The smaller of two numbers."""
    if isinstance(a, Spelled) or isinstance(b, Spelled):
        return _chosen(a, "<", b)
    return a if a < b else b


def _chosen(a: Number, sign: str, b: Number) -> Number:
    """The one of the two that a comparison prefers; spelled without a call, which takes longer."""
    x, y = _text(kept(a)), _text(kept(b))
    lines = next(n.lines for n in (a, b) if isinstance(n, Spelled))
    return kept(Spelled(f"({x} if {x} {sign} {y} else {y})", lines))


def kept(number: Number) -> Number:
    """A number that is used more than once: it is computed once."""
    if not isinstance(number, Spelled) or number.text.isidentifier():
        return number
    return Spelled(number.lines.name(number), number.lines)
