"""Pools: the maximum or the mean of a window that slides over the last one to three dims; adaptive pools
take the number of windows instead of their size.

Sizes of windows, strides, padding and dilation are tuples, with one number for each of these dims. Padding
is never the maximum, and counts in a mean only with ``pads``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from transconv.compute.library.page import Dim, Gradient, LibraryFormula, NamedSpace, Strided, length
from transconv.ir import i32

Ints = Sequence[int]
LETTERS = "dhw"
BEYOND = 1 << 30  # a number that is no element's index; tensors must have fewer elements


def max_pool(
    x: Strided,
    window: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    y: Strided,
    saves: bool = False,
    at: Strided | None = None,
) -> LibraryFormula:
    """``y``: the result, whose sizes are the numbers of windows. ``saves``: the index of each maximum (the
    first of equal elements, the last NaN) is stored as well, for gradients; ``at``: as a result.
    ValueError for ``BEYOND`` or more positions."""
    page, n = _page(x, y, window, stride, padding, dilation, at), len(window)
    _few_places(x, n)
    words = {"window": _window(page, n)} | _lengths(page, _ahead(stride, padding, dilation))
    ahead = _ahead(stride, padding, dilation)
    inside = [f" and {e} >= 0" for e, p in zip(ahead, padding, strict=True) if p]
    which = (
        _which(_place(ahead, [f"{{size_{c}}}" for c in LETTERS[-n:]]), "".join(inside))
        if saves or at
        else ()
    )
    text = page.sized(
        "max_pool", "read a = {X} else -inf", "let m = max(a; {window})", "store {Y} = m", *which, **words
    )
    where = _fits(stride, padding, dilation)
    here = _place([f"i{c}" for c in LETTERS[-n:]], [f"{{long_{c}}}" for c in LETTERS[-n:]])
    back = page.sized(
        "max_pool_gradient",
        f"read g = {{G}}{where}",
        f"read at = {{J}}{where}",
        f"store {{dX}} = sum(where(at == {here}, g, 0.0); {{window}})",
        **words,
    )
    return LibraryFormula(page, text, ("X",), ("Y", "I") if at else ("Y",), (Gradient(back, {"dX": "X"}),))


def _which(place: str, inside: str = "") -> tuple[str, str]:
    """The steps that store the index of the maximum as torch defines it: the first of equal elements, but
    the last NaN. For a NaN the minimum is taken over -1 - index. ``inside``: a condition that excludes
    padding, for windows whose maximum is -inf."""
    return (
        f"let which = min(where(a != a, -1 - i32({place}), where(a == m{inside}, i32({place}), "
        f"{BEYOND})); {{window}})",
        "store {I} = where(which < 0, -1 - which, which)",
    )


def _few_places(x: Strided, n: int) -> None:
    if prod(x.shape[-n:]) >= BEYOND:
        raise ValueError(f"{prod(x.shape[-n:])} places; expected fewer than {BEYOND}")


def average_pool(
    x: Strided,
    window: Ints,
    stride: Ints,
    padding: Ints,
    y: Strided,
    pads: bool = True,
    divisor: int | None = None,
) -> LibraryFormula:
    """``pads``: padding counts in a mean, as zeros; ``divisor``: replaces the number of elements."""
    n = len(window)
    page = _page(x, y, window, stride, padding, (1,) * n)
    sizes, ones = x.shape[-n:], (1,) * n
    words = {"window": _window(page, n)} | _lengths(page, _ahead(stride, padding, ones))

    def count(places: Sequence[str], lengths: str) -> str:
        if divisor:
            return f"{float(divisor)}"
        dims = zip(LETTERS[-n:], places, sizes, y.shape[-n:], window, stride, padding, strict=True)
        return "*".join(
            _counted(o, size, f"{{{lengths}_{c}}}", results, k, s, p, pads)
            for c, o, size, results, k, s, p in dims
        )

    here = count([f"o{c}" for c in LETTERS[-n:]], "size")
    behind = count(_behind(stride, padding, ones), "long")
    text = page.sized(
        "average_pool", "read a = {X}", f"store {{Y}} = sum(a; {{window}}) / ({here})", **words
    )
    back = page.sized(
        "average_pool_gradient",
        f"read g = {{G}}{_fits(stride, padding, ones)}",
        f"store {{dX}} = sum(g / ({behind}); {{window}})",
        **words,
    )
    return LibraryFormula(page, text, ("X",), gradients=(Gradient(back, {"dX": "X"}),))


def _lengths(page: NamedSpace, ahead: Sequence[str]) -> dict[str, Any]:
    """The words for the sizes of x along the dims of windows: ``size_h`` where x is read, ``long_h`` where
    its gradient is stored."""
    letters = LETTERS[-len(ahead) :]
    return {f"size_{c}": length(page, e, "X") for c, e in zip(letters, ahead, strict=True)} | {
        f"long_{c}": length(page, f"i{c}") for c in letters
    }


def _counted(
    place: str, size: int, said: str, results: int, window: int, stride: int, padding: int, pads: bool
) -> str:
    """The number of elements of a window along a dim, as an expression of the window's position and of the
    word ``said`` for the size; a number if it is the same for all windows."""
    lowest, highest = (-padding, size + padding) if pads else (0, size)
    first, last = -padding, (results - 1) * stride - padding
    if first >= lowest and last + window <= highest:
        return f"{float(window)}"
    low, most = f"({place})*{stride} - {padding}", f"{said} + {padding}" if pads and padding else said
    return f"max(1, min({low} + {window}, {most}) - max({low}, {lowest}))"


def adaptive_max_pool(
    x: Strided, n: int, y: Strided, at: Strided | None = None, saves: bool = False
) -> LibraryFormula:
    """The maxima of as many windows of the last ``n`` dims as ``y`` has elements; windows may overlap.
    ``at``, ``saves`` and ValueError as in max_pool."""
    page, inside, back_inside = _adapted(x, n, y, at)
    _few_places(x, n)
    sizes, words = x.shape[-n:], {"window": _window(page, n)}
    ahead = [_begun(f"o{c}", f"k{c}", *of) for c, of in _dims(x, y, n)]
    which = _which(_place(ahead, sizes)) if saves or at else ()
    text = page.text(
        "adaptive_max_pool",
        f"read a = {{X}}{inside} else -inf",
        "let m = max(a; {window})",
        "store {Y} = m",
        *which,
        **words,
    )
    here = _place([f"i{c}" for c in LETTERS[-n:]], sizes)
    back = page.text(
        "adaptive_max_pool_gradient",
        f"read g = {{G}}{back_inside}",
        f"read at = {{J}}{back_inside}",
        f"store {{dX}} = sum(where(at == {here}, g, 0.0); {_turns(page, n)})",
    )
    return LibraryFormula(page, text, ("X",), ("Y", "I") if at else ("Y",), (Gradient(back, {"dX": "X"}),))


def adaptive_average_pool(x: Strided, n: int, y: Strided) -> LibraryFormula:
    """The means of as many windows of the last ``n`` dims as ``y`` has elements; windows may overlap."""
    page, inside, back_inside = _adapted(x, n, y)
    here = "*".join(_length(f"o{c}", *of) for c, of in _dims(x, y, n))
    behind = "*".join(_length(f"({_begun(f'i{c}', f't{c}', o, i)})", i, o) for c, (i, o) in _dims(x, y, n))
    text = page.text(
        "adaptive_average_pool",
        f"read a = {{X}}{inside}",
        f"store {{Y}} = sum(a; {{window}}) / ({here})",
        window=_window(page, n),
    )
    back = page.text(
        "adaptive_average_pool_gradient",
        f"read g = {{G}}{back_inside}",
        f"store {{dX}} = sum(g / max(1, {behind}); {_turns(page, n)})",
    )
    return LibraryFormula(page, text, ("X",), gradients=(Gradient(back, {"dX": "X"}),))


def _dims(x: Strided, y: Strided, n: int) -> list[tuple[str, tuple[int, int]]]:
    """For each dim, its letter and its numbers of elements and of windows."""
    return list(zip(LETTERS[-n:], zip(x.shape[-n:], y.shape[-n:], strict=True), strict=True))


def _turns(page: NamedSpace, n: int) -> str:
    return " ".join(page[f"t{c}"] for c in LETTERS[-n:])


def _begun(of: str, within: str, size: int, places: int) -> str:
    """The element ``within`` window ``of``. With the numbers of elements and windows exchanged, it is the
    window ``within`` those that contain element ``of``."""
    return f"{of}*{size} // {places} + {within}"


def _length(of: str, size: int, places: int) -> str:
    """The number of elements of a window, or of windows that contain an element."""
    return f"((({of} + 1)*{size} + {places - 1}) // {places} - {of}*{size} // {places})"


def _longest(size: int, places: int) -> int:
    return max((p * size + size + places - 1) // places - p * size // places for p in range(places))


def _adapted(x: Strided, n: int, y: Strided, at: Strided | None = None) -> tuple[NamedSpace, str, str]:
    """The page of windows of different sizes, and the conditions that an element is in a window, and a
    window contains an element."""
    begin, dims = len(x.shape) - n, _dims(x, y, n)
    letters = LETTERS[-n:]
    lead: list[Dim] = [*range(begin)]
    ahead = [*lead, *(_begun(f"o{c}", f"k{c}", i, o) for c, (i, o) in dims)]
    behind = [*lead, *(_begun(f"i{c}", f"t{c}", o, i) for c, (i, o) in dims)]
    of_y = [*lead, *(f"o{c}" for c in letters)]
    index = at or Strided.dense(y.shape, i32)
    page = NamedSpace(
        ["n"] * begin + [f"{kind}{c}" for kind in "oikt" for c in letters],
        (
            *x.shape[:begin],
            *y.shape[begin:],
            *x.shape[begin:],
            *(_longest(i, o) for _, (i, o) in dims),
            *(_longest(o, i) for _, (i, o) in dims),
        ),
        {
            "X": (x, ahead),
            "Y": (y, of_y),
            "I": (index, of_y),
            "J": (index, behind),
            "G": (y, behind),
            "dX": (x.like(), [*range(begin), *(f"i{c}" for c in letters)]),
        },
        called={"J": "I"},
    )
    inside = " and ".join(f"k{c} < {_length(f'o{c}', i, o)}" for c, (i, o) in dims)
    back = " and ".join(f"t{c} < {_length(f'i{c}', o, i)}" for c, (i, o) in dims)
    return page, f" where {inside}", f" where {back}"


def _page(
    x: Strided,
    y: Strided,
    window: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    index: Strided | None = None,
) -> NamedSpace:
    n = len(window)
    lead, letters = range(len(x.shape) - n), LETTERS[-n:]
    begin = len(lead)
    results, elements = [f"o{c}" for c in letters], range(begin + n, begin + 2 * n)
    ahead = _ahead(stride, padding, dilation)
    behind = _behind(stride, padding, dilation)
    at = index or Strided.dense(y.shape, i32)
    return NamedSpace(
        ["n"] * begin + [f"{kind}{c}" for kind in "oik" for c in letters],
        (*x.shape[:begin], *y.shape[-n:], *x.shape[-n:], *window),
        {
            "X": (x, [*lead, *ahead]),
            "Y": (y, [*lead, *results]),
            "I": (at, [*lead, *results]),
            "J": (at, [*lead, *behind]),
            "G": (y, [*lead, *behind]),
            "dX": (x.like(), [*lead, *elements]),
        },
        called={"J": "I"},
        numbers=" ".join(f"k{c}" for c in letters),
    )


def _ahead(stride: Ints, padding: Ints, dilation: Ints) -> list[str]:
    """The coordinates of an element of a window."""
    return [
        f"o{c}*{s} + k{c}*{d} - {p}"
        for c, s, d, p in zip(LETTERS[-len(stride) :], stride, dilation, padding, strict=True)
    ]


def _behind(stride: Ints, padding: Ints, dilation: Ints) -> list[str]:
    """The coordinates of the window that has an element as its element k."""
    near = [
        f"i{c} + {p} - k{c}*{d}"
        for c, p, d in zip(LETTERS[-len(stride) :], padding, dilation, strict=True)
    ]
    return [f"({e}) // {s}" if s > 1 else e for e, s in zip(near, stride, strict=True)]


def _fits(stride: Ints, padding: Ints, dilation: Ints) -> str:
    """The condition that there is such a window."""
    near = _behind([1] * len(stride), padding, dilation)
    found = [f"({e}) % {s} == 0" for e, s in zip(near, stride, strict=True) if s > 1]
    return f" where {' and '.join(found)}" if found else ""


def _window(page: NamedSpace, n: int) -> str:
    return " ".join(page[f"k{c}"] for c in LETTERS[-n:])


def _place(coords: Sequence[str], sizes: Sequence[int | str]) -> str:
    """The row-major index of a position."""
    said = coords[0]
    for coord, size in zip(coords[1:], sizes[1:], strict=True):
        said = f"({said})*{size} + {coord}"
    return said
