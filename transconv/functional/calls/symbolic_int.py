"""Whole numbers that remember how they were computed from the sizes of a call.

    trace = Trace()
    n, k = trace.numbers("n", (3, 4)), ...
    n * 2 + k      is 10, and knows "(n*2) + k"
    n > 1          is True, and is noted as a condition of the trace

What Python code makes of such numbers is thus known for all sizes that meet the conditions: ``function``
writes it out. A number in a text becomes a condition that it is that number; ``int(n)`` is the number
alone. Other arithmetic than + - * // % raises Untraced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from transconv.support import defined


class Untraced(TypeError):
    """An operation whose result would not be known for other sizes."""


class SymbolicTrace:
    """Conditions under which the same is computed of other numbers."""

    def __init__(self) -> None:
        self.conditions: dict[str, None] = {}

    def numbers(self, name: str, values: Iterable[int]) -> tuple[Traced, ...]:
        """Numbers that a function is given, as the tuple ``name``."""
        return tuple(self.said(value, f"{name}{at}") for at, value in enumerate(values))

    def said(self, value: int, said: str) -> Traced:
        """A number with its expression."""
        made = Traced(value)
        made.text, made.trace = said, self
        return made

    def function(self, given: dict[str, int], made: Any) -> Callable[..., Any]:
        """A function of tuples, ``given`` by their names and lengths, to ``made`` for their numbers, or to
        None where a condition does not hold."""
        known: dict[str, Any] = {}
        told = _spelled(made, known)
        names = ", ".join(f"{name}_" for name in given)
        lines = [f"def at({names}):",
                 *(f"    {''.join(f'{name}{i}, ' for i in range(n))} = {name}_"
                   for name, n in given.items() if n),
                 f"    if {' and '.join(self.conditions) or 'True'}:", f"        return {told}",
                 "    return None"]
        found: Callable[..., Any] = defined("\n".join(lines), "at", known)
        return found


class Traced(int):
    """A number with its expression ``text`` and its trace."""

    text: str
    trace: SymbolicTrace
    __hash__ = None  # type: ignore[assignment]  # a look-up by a number would not be noted

    def __int__(self) -> int:
        return int.__add__(self, 0)

    def __bool__(self) -> bool:
        return self != 0

    def __str__(self) -> str:
        return format(self)

    def __repr__(self) -> str:
        return format(self)

    def __format__(self, spec: str) -> str:
        self.trace.conditions[f"({self.text} == {int(self)})"] = None
        return format(int(self), spec)

    def __neg__(self) -> Traced:
        return self.trace.said(-int(self), f"(-{self.text})")


def _term(of: Any) -> str | None:
    """A number in an expression; None for what is no number."""
    if isinstance(of, Traced):
        return of.text
    return repr(of) if isinstance(of, (int, float)) and abs(of) < 1e300 else None


def _plain(of: Any) -> Any:
    return int(of) if isinstance(of, Traced) else of


def _arithmetic(name: str, sign: str) -> None:
    def forward(self: Traced, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        return self.trace.said(getattr(int(self), name)(_plain(other)),
                               f"({self.text} {sign} {_term(other)})")

    def behind(self: Traced, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        return self.trace.said(getattr(_plain(other), name)(int(self)),
                               f"({_term(other)} {sign} {self.text})")

    setattr(Traced, name, forward)
    setattr(Traced, name.replace("__", "__r", 1), behind)


def _comparison(name: str, sign: str) -> None:
    def compare(self: Traced, other: Any) -> Any:
        if (term := _term(other)) is None:
            return NotImplemented
        holds: bool = getattr(int(self), name)(_plain(other))
        if isinstance(other, float):
            holds = getattr(float(int(self)), name)(other)
        if term != self.text:
            self.trace.conditions[f"{'' if holds else 'not '}({self.text} {sign} {term})"] = None
        return holds

    setattr(Traced, name, compare)


def _refused(name: str) -> None:
    def refuse(self: Traced, *others: Any) -> Any:
        raise Untraced(f"{name} of a size")

    setattr(Traced, name, refuse)


for _name, _sign in {"__add__": "+", "__sub__": "-", "__mul__": "*", "__floordiv__": "//",
                     "__mod__": "%"}.items():
    _arithmetic(_name, _sign)
for _name, _sign in {"__eq__": "==", "__ne__": "!=", "__lt__": "<", "__le__": "<=", "__gt__": ">",
                     "__ge__": ">="}.items():
    _comparison(_name, _sign)
for _name in ("truediv", "rtruediv", "divmod", "rdivmod", "pow", "rpow", "and", "rand", "or", "ror", "xor",
              "rxor", "lshift", "rlshift", "rshift", "rrshift", "invert", "abs", "round", "float"):
    _refused(f"__{_name}__")


def _spelled(made: Any, known: dict[str, Any]) -> str:
    """An expression of a value: tuples, dicts and dataclasses that hold traced numbers are made anew, all
    else is ``known`` under a name."""
    if isinstance(made, Traced):
        return made.text
    if _holds(made):
        if isinstance(made, dict):
            return f"{{{', '.join(f'{_kept(k, known)}: {_spelled(v, known)}' for k, v in made.items())}}}"
        parts = [*made] if isinstance(made, tuple) else [getattr(made, f.name) for f in fields(made)]
        inside = "".join(f"{_spelled(part, known)}, " for part in parts)
        return f"({inside})" if type(made) is tuple else f"{_kept(type(made), known)}({inside})"
    return _kept(made, known)


def _kept(value: Any, known: dict[str, Any]) -> str:
    name = f"kept_{len(known)}"
    known[name] = value
    return name


def _holds(made: Any) -> bool:
    """Whether there are traced numbers in a value."""
    if isinstance(made, Traced):
        return True
    if isinstance(made, dict):
        return any(map(_holds, made.values()))
    if isinstance(made, tuple):
        return any(map(_holds, made))
    return is_dataclass(made) and not isinstance(made, type) and any(
        _holds(getattr(made, f.name)) for f in fields(made))
