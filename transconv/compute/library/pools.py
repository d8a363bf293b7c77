"""Pools: the largest or the mean of a window that slides over the last one to three dims.

Sizes of windows, strides, padding and dilation are tuples, one number for each of these dims. What lies
beyond an end is never the largest, and counts in a mean only where the caller says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from transconv.compute.library.formula import Formula, Gradient
from transconv.compute.library.page import Page, Strided
from transconv.ir import i32

Ints = Sequence[int]
LETTERS = "dhw"
BEYOND = 1 << 30  # no place
LARGEST_PLACE = 1 << 24  # beyond it not every number of a place is one in f32


def max_pool(x: Strided, window: Ints, stride: Ints, padding: Ints, dilation: Ints, y: Strided,
             saves: bool = False) -> Formula:
    """``y``: the result, whose sizes say how often windows fit. ``saves``: where each largest element
    is (the first of equals) is stored too, for gradients. ValueError for ``LARGEST_PLACE`` places."""
    page, n = _page(x, y, window, stride, padding, dilation), len(window)
    if prod(x.shape[-n:]) >= LARGEST_PLACE:
        raise ValueError(f"{prod(x.shape[-n:])} places; expected fewer than {LARGEST_PLACE}")
    words = {"window": _window(page, n)}
    ahead = _place(_ahead(stride, padding, dilation), x.shape[-n:])
    text = page.text("max_pool", "read a = {X} else -inf", "let m = max(a; {window})", "store {Y} = m",
                     f"store {{I}} = min(where(a == m, {ahead}, {BEYOND}); {{window}})" if saves else "",
                     **words)
    where, here = _fits(stride, padding, dilation), _place([f"i{c}" for c in LETTERS[-n:]], x.shape[-n:])
    back = page.text("max_pool_gradient", f"read g = {{G}}{where}", f"read at = {{J}}{where}",
                     f"store {{dX}} = sum(where(at == {here}, g, 0.0); {{window}})", **words)
    return Formula(page, text, ("X",), gradients=(Gradient(back, {"dX": "X"}),))


def average_pool(x: Strided, window: Ints, stride: Ints, padding: Ints, y: Strided, pads: bool = True,
                 divisor: int | None = None) -> Formula:
    """``pads``: places of the padding count in a mean, as zeros; ``divisor``: instead of a count."""
    n = len(window)
    page = _page(x, y, window, stride, padding, (1,) * n)
    sizes, words = x.shape[-n:], {"window": _window(page, n)}

    def count(places: Sequence[str]) -> str:
        if divisor:
            return f"{float(divisor)}"
        dims = zip(places, sizes, y.shape[-n:], window, stride, padding, strict=True)
        return "*".join(_counted(o, size, results, k, s, p, pads) for o, size, results, k, s, p in dims)

    ones = (1,) * n
    here, behind = count([f"o{c}" for c in LETTERS[-n:]]), count(_behind(stride, padding, ones))
    text = page.text("average_pool", "read a = {X}", f"store {{Y}} = sum(a; {{window}}) / ({here})",
                     **words)
    back = page.text("average_pool_gradient", f"read g = {{G}}{_fits(stride, padding, ones)}",
                     f"store {{dX}} = sum(g / ({behind}); {{window}})", **words)
    return Formula(page, text, ("X",), gradients=(Gradient(back, {"dX": "X"}),))


def _counted(place: str, size: int, results: int, window: int, stride: int, padding: int,
             pads: bool) -> str:
    """How many elements a window counts along a dim, of its place in the result: a number where it is the
    same for all."""
    lowest, highest = (-padding, size + padding) if pads else (0, size)
    first, last = -padding, (results - 1) * stride - padding
    if first >= lowest and last + window <= highest:
        return f"{float(window)}"
    low = f"({place})*{stride} - {padding}"
    return f"max(1, min({low} + {window}, {highest}) - max({low}, {lowest}))"


def _page(x: Strided, y: Strided, window: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Page:
    n = len(window)
    lead, letters = range(len(x.shape) - n), LETTERS[-n:]
    begin = len(lead)
    results, elements = [f"o{c}" for c in letters], range(begin + n, begin + 2 * n)
    ahead = _ahead(stride, padding, dilation)
    behind = _behind(stride, padding, dilation)
    at = Strided.dense(y.shape, i32)
    return Page(["n"] * begin + [f"{kind}{c}" for kind in "oik" for c in letters],
                (*x.shape[:begin], *y.shape[-n:], *x.shape[-n:], *window), {
                    "X": (x, [*lead, *ahead]), "Y": (y, [*lead, *results]), "I": (at, [*lead, *results]),
                    "J": (at, [*lead, *behind]), "G": (y, [*lead, *behind]),
                    "dX": (x.like(), [*lead, *elements])}, called={"J": "I"})


def _ahead(stride: Ints, padding: Ints, dilation: Ints) -> list[str]:
    """The place of an element of a window."""
    return [f"o{c}*{s} + k{c}*{d} - {p}"
            for c, s, d, p in zip(LETTERS[-len(stride):], stride, dilation, padding, strict=True)]


def _behind(stride: Ints, padding: Ints, dilation: Ints) -> list[str]:
    """The place in the result whose window has an element at a place of its own."""
    near = [f"i{c} + {p} - k{c}*{d}"
            for c, p, d in zip(LETTERS[-len(stride):], padding, dilation, strict=True)]
    return [f"({e}) // {s}" if s > 1 else e for e, s in zip(near, stride, strict=True)]


def _fits(stride: Ints, padding: Ints, dilation: Ints) -> str:
    """The condition under which there is such a place."""
    near = _behind([1] * len(stride), padding, dilation)
    found = [f"({e}) % {s} == 0" for e, s in zip(near, stride, strict=True) if s > 1]
    return f" where {' and '.join(found)}" if found else ""


def _window(page: Page, n: int) -> str:
    return " ".join(page[f"k{c}"] for c in LETTERS[-n:])


def _place(coords: Sequence[str], sizes: Ints) -> str:
    """The number of a place among all, the last dim counting fastest."""
    said = coords[0]
    for coord, size in zip(coords[1:], sizes[1:], strict=True):
        said = f"({said})*{size} + {coord}"
    return said
