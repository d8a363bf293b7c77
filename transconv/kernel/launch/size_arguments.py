"""Whole numbers of a call that are arguments of a kernel: sizes of arrays and of the work, numbers.

    X.shape = (200, 4096), work 200    X_d0 = 200, which is the work too; X_d1_by128 = 32

One compiled kernel serves all calls that it fits. Equal numbers share a name, so a mask that compares a
group's place with the end of an array is proved away where work and array have one size. A number that a
power of two divides is passed divided by it: what follows from that (no ragged end, aligned rows) follows
from the expression, for the simplifier and for Triton. A number below 2, and one that the kernel needs to
know, is a constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transconv.ir import LARGEST_SIZE, Const, Expr, Size, Sizes, Var, as_expr, text_of

UNITS = (128, 64, 32, 16, 8)
"""Divisors that belong to a compiled kernel."""


@dataclass(frozen=True, slots=True)
class Number:
    """A whole number of a call. ``said``: as users write it; ``name``: of the kernel's argument."""

    said: str
    name: str
    value: int


class Needed(Exception):
    """A kernel needs to know the values of arguments, by name, when it is compiled."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = frozenset(names)


def unit_of(value: int) -> int:
    """The divisor of a number that belongs to a compiled kernel."""
    return next((u for u in UNITS if value % u == 0), 1)


@dataclass(frozen=True, slots=True)
class Sizing:
    """How the numbers of a call enter a kernel. ``exprs``: each as a constant, or as an argument times a
    divisor; ``sizes``: the arguments, with the call's as examples, None without any; ``sources``: for each
    the place of its number and the divisor; ``first``: for each number the place of the one it equals;
    ``plain``: the places of numbers whose divisors do not matter."""

    numbers: tuple[Number, ...]
    exprs: tuple[Expr, ...]
    sizes: Sizes | None
    sources: tuple[tuple[int, int], ...]
    first: tuple[int, ...]
    plain: frozenset[int]

    def fits(self, given: Sequence[int]) -> bool:
        """Whether other numbers have the same constants, are equal where these are, and have the same
        divisors where these matter."""
        for at, (value, e, first) in enumerate(zip(given, self.exprs, self.first, strict=True)):
            if value != (self.numbers[at].value if isinstance(e, Const) else given[first]):
                return False
        return all(1 < given[at] <= LARGEST_SIZE and (at in self.plain or unit_of(given[at]) == unit)
                   for at, unit in self.sources)

    def values(self, given: Sequence[int]) -> dict[str, int]:
        """The arguments for numbers that fit."""
        return {name: given[at] // unit for name, (at, unit) in zip(self.names, self.sources, strict=True)}

    def places(self, names: Iterable[str]) -> frozenset[int]:
        """The numbers that become arguments of these names."""
        own = {name: at for name, (at, _) in zip(self.names, self.sources, strict=True)}
        roots = {own[n] for n in names}
        return frozenset(at for at, first in enumerate(self.first) if first in roots)

    def is_argument(self, at: int) -> bool:
        """Whether a number is an argument of the kernel, not a constant."""
        return not isinstance(self.exprs[at], Const)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arguments."""
        return self.sizes.names if self.sizes else ()

    @property
    def divided(self) -> frozenset[str]:
        """The names of arguments that are divided."""
        return frozenset(n for n, (_, unit) in zip(self.names, self.sources, strict=True) if unit > 1)

    @property
    def told(self) -> tuple[str, ...]:
        """What each argument is, in the user's words."""
        found = []
        for at, _ in self.sources:
            same = [n.said for n, first in zip(self.numbers, self.first, strict=True) if first == at]
            if same != [str(self.exprs[at])]:
                found.append(f"{' = '.join(same)} = {text_of(self.exprs[at])}")
        return tuple(found)


def sizing(numbers: Sequence[Number], fixed: Iterable[int] = (), plain: Iterable[int] = ()) -> Sizing:
    """How numbers enter a kernel. ``fixed``: the places of those that are constants; ``plain``: of those
    whose divisors do not matter."""
    constant, whole = {*fixed}, {*plain}
    alike: dict[int, list[int]] = {}
    for at, number in enumerate(numbers):
        if at not in constant and 1 < number.value <= LARGEST_SIZE:
            alike.setdefault(number.value, []).append(at)
    exprs: list[Expr] = [as_expr(n.value) for n in numbers]
    first = [*range(len(numbers))]
    each: list[Size] = []
    sources: list[tuple[int, int]] = []
    for value, places in alike.items():
        root = places[0]
        unit = 1 if whole.issuperset(places) else unit_of(value)
        name = numbers[root].name if unit == 1 else f"{numbers[root].name}_by{unit}"
        each.append(Size(name, value // unit, 2 if unit == 1 else 1, LARGEST_SIZE // unit))
        sources.append((root, unit))
        for at in places:
            exprs[at] = Var(name) if unit == 1 else Var(name) * unit
            first[at] = root
    unchecked = frozenset(places[0] for places in alike.values() if whole.issuperset(places))
    return Sizing(tuple(numbers), tuple(exprs), Sizes(tuple(each)) if each else None, tuple(sources),
                  tuple(first), unchecked)
