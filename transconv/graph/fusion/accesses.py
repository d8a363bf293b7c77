"""Reads and stores of a text, and the dims that their tensors have in it.

A tensor has the dims of its value until all reads and stores of a text are known. Then some fall out, or
become others, which count the same elements: what a schedule sees is a rectangle of axes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from transconv.graph.fusion.index_ir import TYPES, Piece
from transconv.graph.fusion.sized_text import braced
from transconv.graph.lowerings.view_indexing import flattened
from transconv.graph.sizes import Length, SymbolicSize, like, packed
from transconv.ir import TRUE, ZERO, Expr, Var, free_vars, readable
from transconv.simplify import Facts, simplify

SELECTION = re.compile(r"\bselect\(")
Axes = Sequence[tuple[str, Length]]


@dataclass(slots=True)
class MemoryAccess:
    """A read or store: the tensor's name, its sizes and strides, coordinates, what else must hold."""

    tensor: str
    piece: Piece
    shape: list[Length]
    strides: list[Length]
    at: list[Expr]
    where: Expr = TRUE
    fill: float = 0.0

    def declared(self) -> str:
        """The tensor, as a text declares it."""
        sizes = ", ".join(map(braced, self.shape))
        dense = [prod(self.shape[d + 1:]) for d in range(len(self.shape))]
        order = "" if self.strides == dense else f" strides({','.join(map(braced, self.strides))})"
        if order and any(isinstance(n, SymbolicSize) for n in self.shape) and (tag := self.order()):
            order = f" {tag}"
        return f"{self.tensor} {TYPES[self.piece.dtype].name} [{sizes}]{order}"

    def order(self) -> str | None:
        """The dims of a dense tensor as letters, outermost first; None for one with gaps."""
        inner = packed(self.shape, self.strides)
        if inner is None:
            return None
        alone = [d for d, n in enumerate(self.shape) if n == 1]
        order = sorted([*inner, *alone], key=lambda d: (like(self.strides[d]), like(self.shape[d])))
        if [d for d in order if d in inner] != inner:  # the order of the example is another one
            order = [*alone, *inner]
        return "".join("abcdefghijklmnopqrstuvwxyz"[d] for d in reversed(order))

    def written(self, words: str) -> str:
        """The line of a text. ``words``: ``read`` and the name that it gets, or ``store``, the name of
        what is stored, and what it is reduced by."""
        view = f"{self.tensor}[{', '.join(map(said, self.at))}]"
        view += f" where {said(self.where)}" if self.where is not TRUE else ""
        word, name, *op = words.split()
        if word == "store":
            return f"store  {view} {''.join(op)}= {name}"
        fill = f" else {self.fill!r}" if self.fill else ""
        return f"read   {name} = {view}{fill}"

    def neighbours(self, u: str, v: str, inner: Length) -> bool:
        """Whether the tensor has both axes as neighbouring dims, or neither."""
        has = [d for d, e in enumerate(self.at) if isinstance(e, Var) and e.name in (u, v)]
        if not has:
            return True
        if len(has) != 2 or has[1] != has[0] + 1:
            return False
        d = has[0]
        return (self.at[d] is Var(u) and self.at[d + 1] is Var(v) and self.shape[d + 1] == inner
                and self.strides[d] == self.strides[d + 1] * inner)

    def join(self, u: str, v: str) -> None:
        """Make one dim of two neighbours, if it has them, that counts with the first axis."""
        d = next((d for d, e in enumerate(self.at) if e is Var(u)), None)
        if d is not None:
            size = self.shape[d] * self.shape[d + 1]
            self._replace(range(d, d + 2), [size], [self.strides[d + 1]], [Var(u)])

    def _replace(self, dims: Sequence[int], sizes: Sequence[Length], strides: Sequence[Length],
                 at: Sequence[Expr]) -> None:
        """Other dims where the first of some stood."""
        first = min(dims)
        for d in sorted({*dims}, reverse=True):
            del self.shape[d], self.strides[d], self.at[d]
        self.shape[first:first], self.strides[first:first], self.at[first:first] = sizes, strides, at


def said(e: Expr) -> str:
    """An expression as a text has it."""
    return SELECTION.sub("where(", readable(e))


def split(accesses: Iterable[MemoryAccess], axes: Axes, facts: Facts) -> None:
    """Dims that several axes count, of which some are names, become the dims of these axes."""
    for seen in _of_tensors(accesses):
        first = seen[0]
        for d in reversed(range(len(first.shape))):
            found = _counting(first.at[d], first.shape[d], axes, facts)
            if len(found) > 1 and all(a.at[d] is first.at[d] for a in seen):
                sizes = [n for _, n in found]
                steps = [prod(sizes[i + 1:]) * first.strides[d] for i in range(len(sizes))]
                for a in seen:
                    a._replace([d], sizes, steps, [Var(name) for name, _ in found])


def shorten(accesses: Iterable[MemoryAccess]) -> None:
    """Leave out dims of size 1 that nothing looks for elsewhere."""
    for seen in _of_tensors(accesses):
        shape = seen[0].shape
        kept = [d for d, n in enumerate(shape) if n != 1 or any(a.at[d] is not ZERO for a in seen)]
        for a in seen:
            a.shape = [shape[d] for d in kept] or [1]
            a.strides, a.at = [a.strides[d] for d in kept] or [1], [a.at[d] for d in kept] or [ZERO]


def join(accesses: Iterable[MemoryAccess], axes: Axes, facts: Facts) -> None:
    """Dims that are the digits of one axis become its dim. They need not be neighbours: images may have
    their features in front of their rows."""
    for seen in _of_tensors(accesses):
        first = seen[0]
        for name, n in axes:
            own = [d for d, e in enumerate(first.at) if {v.name for v in free_vars(e)} == {name}]
            dims = sorted(own, key=lambda d: -like(first.strides[d]))
            if len(dims) > 1 and _count(first, dims, name, n, facts) and all(
                    a.at[d] is first.at[d] for a in seen for d in dims):
                step = first.strides[dims[-1]]
                for a in seen:
                    a._replace(dims, [n], [step], [Var(name)])


def _of_tensors(accesses: Iterable[MemoryAccess]) -> list[list[MemoryAccess]]:
    """The accesses of each tensor."""
    tensors: dict[str, list[MemoryAccess]] = {}
    for a in accesses:
        tensors.setdefault(a.tensor, []).append(a)
    return [*tensors.values()]


def _counting(at: Expr, size: Length, axes: Axes, facts: Facts) -> Axes:
    """The axes that count a dim together."""
    own = {v.name for v in free_vars(at)}
    found = [(name, n) for name, n in axes if name in own]
    if not any(isinstance(n, SymbolicSize) for _, n in found) or prod(n for _, n in found) != size:
        return []
    flat = flattened([Var(name) for name, _ in found], [n for _, n in found])
    return found if simplify(flat, facts) is at else []


def _count(a: MemoryAccess, dims: Sequence[int], name: str, size: Length, facts: Facts) -> bool:
    """Whether dims of an access, outermost first, count an axis of a size in even steps of memory."""
    sizes, steps = [a.shape[d] for d in dims], [a.strides[d] for d in dims]
    even = all(s == n * t for n, s, t in zip(sizes[1:], steps, steps[1:], strict=False))
    return even and prod(sizes) == size and (
        simplify(flattened([a.at[d] for d in dims], sizes), facts) is Var(name))
