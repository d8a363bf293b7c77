"""Texts of the library whose sizes are names, which kernels take as arguments.

    named(page, text)      compute softmax
                               tensor X f32 [n=N, k=K]
                               tensor Y f32 [n=N, k=K]
                               axes   n=N | k=K
                               ...
                           N and K with their values; K is summed; N*K elements are in a tensor

For the values of a page it is the same computation as the page's text, so that one such text serves all
sizes whose texts have its form. Its line of sizes, with ranges and examples, is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod

from transconv.compute.library.page import SUMMED, WORD, NamedSpace, Strided


@dataclass(frozen=True, slots=True)
class SizeExpression:
    """A number that follows from sizes, as a text of numbers and one of names have it."""

    number: str
    names: str

    def __str__(self) -> str:
        return self.number


@dataclass(frozen=True, slots=True)
class LibraryText:
    """``head`` and ``rest``: a text without its line of sizes, which belongs between them. ``sizes``: the
    values; ``summed``: the names of axes that are reduced; ``products``: of each tensor the factors of its
    number of elements; ``windows``: whether coordinates are made of several axes."""

    head: str
    rest: str
    sizes: dict[str, int]
    summed: frozenset[str]
    products: tuple[tuple[str, ...], ...]
    windows: bool


def counted(page: NamedSpace, *names: str, less: float = 0.0) -> SizeExpression:
    """The number of points of the axes of these names, less a number; as a float."""
    axes = [axis for name in names for axis in page.classes.get(name, ())]
    left = int(prod(map(page.size, axes))) - less
    product = "*".join(_name(page, axis) for axis in axes) or "1.0"
    return SizeExpression(f"{float(left)}", f"({product} - {less})" if less else f"({product})")


def named(page: NamedSpace, text: str) -> LibraryText | None:
    """The form for any size of one of the page's texts; None for texts with sizes in their lines, without
    axes, and of tensors with gaps."""
    if text not in page.lines:
        return None
    name, lines, words = page.lines[text]
    used = {*WORD.findall(text)}
    read = [t for t in page.seen if t in used]
    if not page.groups or not all(_is_dense(page, t) for t in read):
        return None
    said = {
        word: value.names if isinstance(value, SizeExpression) else value for word, value in words.items()
    }
    whole = page.written(name, lines, said, partial(_name, page), partial(_declared, page))
    head, rest = whole.split("\n", 1)
    used = {word for word in WORD.findall(rest) if not word.isdigit()}
    sizes = {own: page.size(axis) for axis in page.groups if (own := _name(page, axis)) in used}
    for t in read:
        sizes |= {own: n for own, n in zip(_dims(page, t), page.seen[t].sizes, strict=True) if own in used}
    over = {axis for found in SUMMED.findall(rest) for axis in found.split()}
    products = dict.fromkeys(tuple(d for d in _dims(page, t) if d != "1") for t in read)
    summed = frozenset(own for axis in over if (own := _name(page, axis)) in sizes)
    told = tuple(p for p in products if sizes.keys() & {*p})
    axes = {_name(page, axis) for axis in page.groups}
    windows = any(d not in axes and d in sizes for t in read for d in _dims(page, t))
    return LibraryText(head, rest, sizes, summed, told, windows) if sizes else None


def length(page: NamedSpace, coord: str, tensor: str = "") -> SizeExpression:
    """The size of an axis, or of the dim of a tensor that has this coordinate."""
    if not tensor:
        return SizeExpression(f"{int(page.size(coord))}", _name(page, coord))
    at = page.seen[tensor].coords.index(coord)
    return SizeExpression(f"{int(page.seen[tensor].sizes[at])}", _dims(page, tensor)[at])


def _name(page: NamedSpace, axis: str) -> str:
    """The name of an axis' size, or the size where it stays a number."""
    if axis not in page.groups or any(page.names[d] in page.numbers for d in page.groups[axis]):
        return f"{page.size(axis)}"
    return axis.upper() if axis.upper() not in page.seen else f"{axis.upper()}_"


def _dims(page: NamedSpace, name: str) -> list[str]:
    """The sizes of a tensor's dims."""
    seen = page.seen[name]
    return [_name(page, c) if c in page.groups else f"{n}" if c in ("0", "one") else f"{name}{i}"
            for i, (c, n) in enumerate(zip(seen.coords, seen.sizes, strict=True))]


def _declared(page: NamedSpace, name: str) -> str:
    dims = ", ".join(f"{c}={own}" if c in page.groups or c == "one" else own
                     for c, own in zip(page.seen[name].coords, _dims(page, name), strict=True))
    return f"{name} {page.tensors[name].dtype} [{dims}]"


def _is_dense(page: NamedSpace, name: str) -> bool:
    seen = page.seen[name]
    return Strided.dense(seen.sizes, page.tensors[name].dtype).strides == seen.strides
