"""Texts of computations whose sizes are names.

A text is written once, with the sizes of axes and tensors in braces. In the named form the names are
arguments of the kernel. They are counted in the order of the text, so that parts of a network that do the
same at other resolutions have the same text. What cannot be said with names has a text of numbers for the
sizes of each call."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from transconv.compute import Alone
from transconv.functional.calls.compiled_launch import program
from transconv.graph.sizes import Length
from transconv.ir import sizes_told
from transconv.support import TransconvError

NAME = re.compile(r"\b[ST]\d+\b")
BRACED = re.compile(r"\{([^{}]*)\}")
PRODUCT = re.compile(r"(\w+)=([ST]\d+(?:\*[ST]\d+)*)\*(\d+)(?= |$)")
MOST = 2**31 - 2**16  # elements of a tensor, and positions: 32 bits count them
LONG = 2**20  # a dim

Factors = tuple[str, ...]  # of a size: names and numbers


def braced(n: Length) -> str:
    """A size in a text."""
    return str(n) if isinstance(n, int) else f"{{{str(n).strip('()')}}}"


@dataclass(frozen=True)
class SizedText:
    """A text whose sizes may be names. ``template``: the text. ``dims``: those of its tensors, and
    ``spaces``, the axes that are swept together, as the text has them; ``like``: an example; ``derived``:
    of a name, what it is of others; ``why``: why it has no named form, where that is known."""

    template: str
    dims: Sequence[Sequence[str]]
    spaces: Sequence[Sequence[str]]
    like: Mapping[str, int]
    derived: Mapping[str, str]
    why: str = ""
    stands: dict[str, Factors] = field(default_factory=dict)  # for which names of the graph a name does

    def at(self, values: Mapping[str, int]) -> str:
        """The text of numbers. ``values``: of all names of the graph."""
        plain = NAME.sub(lambda n: str(values[n[0]]), self.template)
        return BRACED.sub(lambda n: str(_product(_factors(n[1]), {})), plain)

    def made_of(self, names: Collection[str]) -> list[str]:
        """The names of the named form that stand for some of the graph's, or products with them."""
        return [own for own, factors in self.stands.items() if {*factors} & {*names}]

    def names(self, values: Mapping[str, int]) -> dict[str, int]:
        """The values of the named form's names."""
        assert self.named
        return {name: _product(factors, values) for name, factors in self.stands.items()}

    @cached_property
    def refused(self) -> str:
        """Why no kernel has the sizes as arguments; empty if one has."""
        if self.why:
            return self.why
        try:
            compute = program(self.named).compute
            Alone(compute).refuse()
        except TransconvError as error:
            return str(error)
        told = sizes_told((t, t.shape) for t in compute.tensors)
        return next((f"no tensor has a dim of {n}" for n in self.stands if n not in told), "")

    @cached_property
    def named(self) -> str:
        """The text with names."""
        joined = self._joined()

        def with_joined(text: str) -> str:
            factors = _factors(text)
            for name, own in joined.items():
                if not Counter(own) - Counter(factors):  # each as often as it is a factor
                    factors = (name, *_without(factors, own))
            return "*".join(factors)

        text = BRACED.sub(lambda n: f"{{{with_joined(n[1])}}}", self.template)
        told = {*joined, *self._told()}

        def plain(text: str) -> str:
            return NAME.sub(lambda n: n[0] if n[0] in told else self.derived.get(n[0], n[0]), text)

        text = plain(text)
        order = list(dict.fromkeys(NAME.findall(text)))
        new = {old: f"S{i}" for i, old in enumerate(order)}
        self.stands.update({new[old]: joined.get(old, (old,)) for old in order})
        text = NAME.sub(lambda n: new[n[0]], text).replace("{", "").replace("}", "")
        head, _, rest = text.partition("\n")

        def said(sizes: Sequence[str]) -> str:
            made = plain("*".join(with_joined(s.strip("{}")) for s in sizes))
            return NAME.sub(lambda n: new[n[0]], made)

        words = [*self._ranges(), *self._bounds(said)]
        return f"{head}\n    sizes  {', '.join(words)}\n{_divided(rest)}" if order else text

    def _joined(self) -> dict[str, Factors]:
        """Products of names that no tensor tells one by one, each with a name of its own."""
        told = self._told()
        own = dict.fromkeys(
            names for t in self.dims for d in t if (names := _names(_dim(d))) and ({*names} - told)
        )
        return {f"T{i}": names for i, names in enumerate(sorted(own, key=len))}

    def _told(self) -> set[str]:
        """The names that are alone in a dim."""
        return {names[0] for t in self.dims for d in t if len(names := _names(_dim(d))) == 1}

    def _ranges(self) -> Iterator[str]:
        for name, factors in self.stands.items():
            like = _product(factors, self.like)
            most = MOST if len(factors) > 1 or like > LONG else LONG
            yield f"{name}={like} in 1..{most}"

    def _bounds(self, said: Callable[[Sequence[str]], str]) -> Iterator[str]:
        found: dict[str, None] = {}
        for sizes in (*self.dims, *self.spaces):
            factors = [f for s in sizes for f in _dim(s)]
            if len(_names(factors)) > 1 and _product(factors, self.like) <= MOST:
                found[said(sizes)] = None
        yield from (f"{product} <= {MOST}" for product in found)


def _divided(text: str) -> str:
    """The text, where an axis of a name times a number, such as all frames of all videos, is two axes if a
    store has its quotient by the number: a kernel stores along a name by a coordinate of its own."""
    axes = next((line for line in text.splitlines() if line.startswith("    axes ")), "")
    for axis, names, number in PRODUCT.findall(axes.partition("|")[0]):
        if not re.search(rf"^ +store .*\b{axis} // {number}\b", text, re.MULTILINE):
            continue
        text = text.replace(f" {axis}={names}*{number}", f" {axis}_of={names} {axis}_in={number}")
        text = re.sub(rf"\b{axis} // {number}\b", f"{axis}_of", text)
        text = re.sub(rf"\b{axis} % {number}\b", f"{axis}_in", text)
        text = re.sub(rf"\b{axis}\b", f"({axis}_of*{number} + {axis}_in)", text)
    return text


def _factors(text: str) -> Factors:
    return tuple(text.replace(" ", "").split("*"))


def _dim(text: str) -> Factors:
    return _factors(text.strip("{}"))


def _names(factors: Sequence[str]) -> Factors:
    return tuple(sorted(f for f in factors if NAME.fullmatch(f)))


def _without(factors: Factors, own: Factors) -> Factors:
    left = [*factors]
    for name in own:
        left.remove(name)
    return tuple(left)


def _product(factors: Sequence[str], values: Mapping[str, int]) -> int:
    return prod(int(f) if f.isdigit() else values[f] for f in factors)


# -- kernels ------------------------------------------------------------------------------------------
