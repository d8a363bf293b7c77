"""Whole numbers of a call that are arguments of a kernel: sizes of arrays and of the work, strides, numbers.

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

from transconv.ir import LARGEST_SIZE, Const, Expr, Size, Sizes, Values, Var, as_expr

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
    the place of its number and the divisor; ``first``: for each number the place of the one it equals."""

    numbers: tuple[Number, ...]
    exprs: tuple[Expr, ...]
    sizes: Sizes | None
    sources: tuple[tuple[int, int], ...]
    first: tuple[int, ...]

    def fits(self, given: Sequence[int]) -> bool:
        """Whether other numbers have the same constants, are equal where these are, and have the same
        divisors."""
        return all(value == given[at] and (value == number.value if isinstance(e, Const)
                                           else unit_of(value) == unit_of(number.value))
                   for value, number, e, at in zip(given, self.numbers, self.exprs, self.first, strict=True)
                   ) and all(1 < given[at] <= LARGEST_SIZE for at, _ in self.sources)

    def values(self, given: Sequence[int]) -> dict[str, int]:
        """The arguments for numbers that fit."""
        names = self.sizes.names if self.sizes else ()
        return {name: given[at] // unit for name, (at, unit) in zip(names, self.sources, strict=True)}

    def places(self, names: Iterable[str]) -> frozenset[int]:
        """The numbers that become arguments of these names."""
        own = {s: at for s, (at, _) in zip(self.sizes.names if self.sizes else (), self.sources, strict=True)}
        roots = {own[n] for n in names}
        return frozenset(at for at, first in enumerate(self.first) if first in roots)

    @property
    def told(self) -> tuple[str, ...]:
        """What each argument is, in the user's words."""
        found = []
        for at, unit in self.sources:
            same = [n.said for n, first in zip(self.numbers, self.first, strict=True) if first == at]
            size = f"{self.exprs[at]}"
            found.append(f"{' = '.join(same)} = {size[1:-1] if size.startswith('(') else size}")
        return tuple(found)


def sizing(numbers: Sequence[Number], fixed: Iterable[int] = ()) -> Sizing:
    """How numbers enter a kernel. ``fixed``: the places of those that are constants."""
    constant = {*fixed}
    known: dict[int, int] = {}
    exprs: list[Expr] = []
    each: list[Size] = []
    sources: list[tuple[int, int]] = []
    first: list[int] = []
    for at, number in enumerate(numbers):
        value = number.value
        if at in constant or not 1 < value <= LARGEST_SIZE:
            exprs.append(as_expr(value))
            first.append(at)
        elif value in known:
            exprs.append(exprs[known[value]])
            first.append(known[value])
        else:
            unit = unit_of(value)
            name = number.name if unit == 1 else f"{number.name}_by{unit}"
            each.append(Size(name, value // unit, 2 if unit == 1 else 1, LARGEST_SIZE // unit))
            var = Var(name)
            exprs.append(var if unit == 1 else var * unit)
            known[value] = at
            first.append(at)
            sources.append((at, unit))
    return Sizing(tuple(numbers), tuple(exprs), Sizes(tuple(each)) if each else None, tuple(sources),
                  tuple(first))


def meets(requires: Sizes, values: Values) -> bool:
    """Whether arguments meet what a kernel requires."""
    return not requires.why_not(values)
