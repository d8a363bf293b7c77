"""The parts of a norm whose rows are in several places: moments of the rows that are here, and what is
made of each element once those of all rows are known.

x [n, c, ...] is normalised over the dims after c; moments and factors are [n, c], in the type of
arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from transconv.compute.library.any_size import counted
from transconv.compute.library.formula import LibraryFormula, held, lines
from transconv.compute.library.page import NamedSpace, Placed, Strided


def moments(x: Strided) -> LibraryFormula:
    """``M``: the mean over the dims after c; ``V``: the sum of squared deviations from it."""
    page = _page(x, ("X",), ("M", "V"))
    text = page.sized("moments", *lines("""read x = {X}
        let mean = sum(x; {k}) / {count}
        let d = x - mean
        let v = sum(d*d; {k})
        store {M} = mean
        store {V} = v"""), count=counted(page, "k"))
    return LibraryFormula(page, text, ("X",), ("M", "V"))


def sums(x: Strided) -> LibraryFormula:
    """``S``: the sum of g*x over the dims after c; ``T``: that of g."""
    page = _page(x, ("X", "G"), ("S", "T"))
    text = page.sized("sums", *lines("""read x = {X}
        read g = {G}
        let s = sum(g*x; {k})
        let t = sum(g; {k})
        store {S} = s
        store {T} = t"""))
    return LibraryFormula(page, text, ("G", "X"), ("S", "T"))


def scaled(x: Strided, y: Strided) -> LibraryFormula:
    """a*x + b."""
    page = _page(x, ("X",), ("A", "B"), y)
    text = page.sized("scaled", "read x = {X}", "read a = {A}", "read b = {B}", "store {Y} = x*a + b")
    return LibraryFormula(page, text, ("X", "A", "B"))


def mixed(x: Strided, y: Strided) -> LibraryFormula:
    """a*g + b*x + c."""
    page = _page(x, ("G", "X"), ("A", "B", "C"), y)
    text = page.sized("mixed", "read g = {G}", "read x = {X}", "read a = {A}", "read b = {B}",
                      "read c = {C}", "store {Y} = g*a + x*b + c")
    return LibraryFormula(page, text, ("G", "X", "A", "B", "C"))


def _page(x: Strided, whole: Sequence[str], kept: Sequence[str], y: Strided | None = None) -> NamedSpace:
    rank = len(x.shape)
    one = Strided.dense(x.shape[:2], held(x.dtype))
    tensors: dict[str, Placed] = {name: (x, range(rank)) for name in whole}
    tensors |= {name: (one, (0, 1)) for name in kept}
    tensors |= {"Y": (y, range(rank))} if y else {}
    return NamedSpace(["n", "n", *"k" * (rank - 2)], x.shape, tensors)
