"""The page of a text: torch tensors become axes, ``tensor`` lines and coordinates.

    page = NamedSpace(["n", "n", "k"], (2, 3, 40), {"X": (x, (0, 1, 2)), "Y": (y, (0, 1, 2))})
    page.sized("twice", "read x = {X}", "store {Y} = x + x")

    compute twice                       named(page, text):  compute twice
        tensor X f32 [n=6, k=40]                                tensor X f32 [n=N, k=K]
        tensor Y f32 [n=6, k=40]                                tensor Y f32 [n=N, k=K]
        axes   n=6 k=40                                         axes   n=N k=K
        read   x = X[n, k]                                      read   x = X[n, k]
        store  Y[n, k] = x + x                                  store  Y[n, k] = x + x

Dims of one name become one axis if the strides of every tensor allow it. Texts thus have few axes, and
different shapes often have the same text. A text by ``sized`` also has a form whose sizes are names, which
kernels take as arguments: for the values of a page it is the same computation, so that one form serves all
sizes. Its line of sizes, with ranges and examples, is the caller's.

A ``LibraryFormula`` is the result of a library function: the text of a computation, the texts of its
gradients, and how torch's tensors map to the tensors in the texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

from transconv.ir import DType, Layout, Tensor, f32, f64

WORD = re.compile(r"\w+")
SUMMED = re.compile(r";([^)]*)\)")
COORDINATES = re.compile(r"\[(.*?)\]")


@dataclass(frozen=True, slots=True)
class Strided:
    """The metadata of a tensor: shape, strides in elements, and type."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType

    @staticmethod
    def dense(shape: Sequence[int], dtype: DType) -> Strided:
        """A tensor without gaps, with the last dim innermost."""
        steps = [prod(max(1, n) for n in shape[i + 1 :]) for i in range(len(shape))]
        return Strided(tuple(shape), tuple(steps), dtype)

    def like(self, dtype: DType | None = None) -> Strided:
        """A tensor without gaps, with the dims in the same order in memory, as torch's ``empty_like``."""
        order = sorted(range(len(self.shape)), key=lambda d: (-self.strides[d], d))
        steps = [0] * len(self.shape)
        step = 1
        for d in reversed(order):
            steps[d] = step
            step *= max(1, self.shape[d])
        return Strided(self.shape, tuple(steps), dtype or self.dtype)

    def split(self, dim: int, *sizes: int) -> Strided:
        """The same memory with one dim split into several."""
        step = self.strides[dim]
        steps = [step * prod(sizes[i + 1 :]) for i in range(len(sizes))]
        return Strided(
            (*self.shape[:dim], *sizes, *self.shape[dim + 1 :]),
            (*self.strides[:dim], *steps, *self.strides[dim + 1 :]),
            self.dtype,
        )


Dim = int | str  # a dim of the space, or the text of a coordinate
Placed = tuple[Strided, Sequence[Dim]]


@dataclass(frozen=True, slots=True)
class TensorView:
    """The view of a tensor that the text uses: ``t.reshape(shape).permute(order).reshape(sizes)``, with
    its strides in elements and its coordinates."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    coords: tuple[str, ...]


class NamedSpace:
    """A space of named dims, and tensors placed in it. A tensor's dim of size 1 is left out: the tensor is
    broadcast along that dim of the space. ``called``: for tensors that are placed twice, the name of the
    first; ``keeps``: names whose dims of size 1 stay; ``numbers``: names whose sizes are numbers in every
    form of a text, and coordinates of dims whose sizes are."""

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        tensors: Mapping[str, Placed],
        called: Mapping[str, str] | None = None,
        keeps: str = "",
        numbers: str = "",
    ) -> None:
        self.names, self.sizes = tuple(names), tuple(sizes)
        self.called, self.numbers = called or {}, {*numbers.split()}
        self.lines: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {}  # of texts by ``sized``
        self.kept = {
            d
            for d, own in enumerate(names)
            if sizes[d] == 1 and own in keeps.split() and any(d in dims for _, dims in tensors.values())
        }
        self.placed = dict(tensors)
        self.tensors = {name: t for name, (t, _) in tensors.items()}
        self.groups: dict[str, list[int]] = {}  # the dims that each axis runs over
        self.classes: dict[str, list[str]] = {name: [] for name in names}
        for name in self.classes:
            dims = [d for d, own in enumerate(names) if own == name and (sizes[d] != 1 or d in self.kept)]
            for group in self._merged(dims):
                axis = f"{name}{len(self.classes[name]) or ''}"
                self.classes[name].append(axis)
                self.groups[axis] = group
        self.seen = {name: self._view(t, dims) for name, (t, dims) in tensors.items()}

    def _steps(self, dim: int) -> list[int | None]:
        """The stride along a dim in each tensor; None for tensors without the dim."""
        own = [(t, list(dims).index(dim)) if dim in dims else None for t, dims in self.placed.values()]
        return [at[0].strides[at[1]] if at and self._has(*at, dim) else None for at in own]

    def _has(self, t: Strided, own: int, dim: int) -> bool:
        return t.shape[own] != 1 or dim in self.kept

    def _merged(self, dims: list[int]) -> list[list[int]]:
        """Dims of one name, in the order of the first tensor's memory, in groups that are one axis."""
        dims = sorted(dims, key=lambda d: (-(self._steps(d)[0] or 0), d))
        groups: list[list[int]] = []
        for d in dims:
            inner, size = self._steps(d), self.sizes[d]
            outer = self._steps(groups[-1][-1]) if groups else []
            if groups and all(
                b is None if a is None else b is not None and a == b * size
                for a, b in zip(outer, inner, strict=True)
            ):
                groups[-1].append(d)
            else:
                groups.append([d])
        return groups

    def _view(self, t: Strided, dims: Sequence[Dim]) -> TensorView:
        own = {d: i for i, d in enumerate(dims)}
        parts: list[tuple[list[int], str]] = []  # own dims, and their coordinate
        for axis, group in self.groups.items():
            if all(d in own and self._has(t, own[d], d) for d in group):
                parts.append(([own[d] for d in group], axis))
        parts += [([i], d) for d, i in own.items() if isinstance(d, str)]
        parts.sort(key=lambda p: (-t.strides[p[0][-1]], p[0][-1]))  # as the tensor has them, of one stride
        kept = [i for group, _ in parts for i in group]
        order = tuple(i for i in range(len(t.shape)) if i not in kept) + tuple(kept)
        return TensorView(
            t.shape,
            order,
            tuple(prod(t.shape[i] for i in group) for group, _ in parts) or (1,),
            tuple(t.strides[group[-1]] for group, _ in parts) or (1,),
            tuple(coord for _, coord in parts) or ("0" if self.groups else "one",),
        )

    def __getitem__(self, word: str) -> str:
        """The replacement of a word in braces: a tensor with its coordinates, or axes."""
        if word in self.seen:
            return f"{self.called.get(word, word)}[{', '.join(self.seen[word].coords)}]"
        return " ".join(self.classes.setdefault(word, []) or [word])

    def count(self, *names: str) -> int:
        """The number of points of the axes of these names."""
        return prod(self.size(axis) for name in names for axis in self.classes.get(name, ()))

    def size(self, axis: str) -> int:
        """The size of an axis of the text."""
        return prod(self.sizes[d] for d in self.groups.get(axis, ()))

    def place(self, name: str) -> str:
        """The index of a point over the dims of a name, in their order, the last one fastest, as an
        expression of the axes."""
        dims = [d for d, own in enumerate(self.names) if own == name]
        terms: list[tuple[int, str]] = []
        for axis in self.classes.get(name, ()):
            group = self.groups[axis]
            runs: list[list[int]] = []  # dims that are consecutive in both orders
            for d in group:
                if (
                    runs
                    and [x for x in dims if runs[-1][-1] < x < d and self.sizes[x] > 1] == []
                    and (d > runs[-1][-1])
                ):
                    runs[-1].append(d)
                else:
                    runs.append([d])
            below = self.size(axis)
            for run in runs:
                above, size = below, prod(self.sizes[d] for d in run)
                below //= size
                part = f"{axis} // {below}" if below > 1 else axis
                part = f"{part} % {size}" if above < self.size(axis) else part
                terms.append((prod(self.sizes[d] for d in dims if d > run[-1]), part))
        terms.sort(key=lambda t: -t[0])
        return " + ".join(f"{part}*{step}" if step > 1 else part for step, part in terms) or "0"

    def text(self, name: str, *lines: str, **words: Any) -> str:
        """The text of a computation with these lines. In them ``{X}`` is a tensor, ``{k}`` the axes of a
        name; ``words`` are other replacements. Empty lines are left out."""
        return self.written(name, lines, words, lambda axis: f"{int(self.size(axis))}", self._declared)

    def sized(self, name: str, *lines: str, **words: Any) -> str:
        """As ``text``, for lines that say no size, and words that say one only as ``SizeExpression``."""
        made = self.text(name, *lines, **words)
        self.lines[made] = name, lines, words
        return made

    def written(
        self,
        name: str,
        lines: Sequence[str],
        words: Mapping[str, Any],
        size: Callable[[str], str],
        declared: Callable[[str], str],
    ) -> str:
        """A text, with the sizes of axes and the declarations of tensors as these functions say them."""
        said = [line.format_map(_PageWords(self, words)) for line in lines if line]
        inside = [coords for line in said for coords in COORDINATES.findall(line)]
        read = {word for coords in inside for word in WORD.findall(coords)}
        said = [
            _without(line, {axis for axis in self.classes if axis not in read | {*self.groups}})
            for line in said
        ]
        used = set(WORD.findall("\n".join(said)))
        axes = [axis for axis in [*self.groups, *self.classes, "one"] if axis in used]
        axes = list(dict.fromkeys(axes))
        summed = {axis for line in said for found in SUMMED.findall(line) for axis in found.split()}
        groups = [
            " ".join(f"{axis}={size(axis)}" for axis in axes if (axis in summed) is inside)
            for inside in (False, True)
        ]
        steps = (line.split(maxsplit=1) for line in said)
        tensors = [f"    tensor {declared(t)}" for t in self.seen if t in used]
        return "\n".join(
            [
                f"compute {name}",
                *tensors,
                f"    axes   {' | '.join(filter(None, groups))}",
                *(f"    {word:<6} {rest}" for word, rest in steps),
            ]
        )

    def tensor(self, name: str) -> Tensor:
        """A tensor with the shape and layout that texts declare."""
        seen, dtype = self.seen[name], self.tensors[name].dtype
        strides = f"strides({','.join(map(str, seen.strides))})"
        return Tensor(
            name,
            tuple(f"{name}_{i}" for i in range(len(seen.sizes))),
            seen.sizes,
            Layout.parse(strides, dtype, seen.sizes),
        )

    def _declared(self, name: str) -> str:
        seen, dtype = self.seen[name], self.tensors[name].dtype
        sizes, steps = tuple(map(int, seen.sizes)), tuple(map(int, seen.strides))
        said = ", ".join(
            f"{c}={n}" if c in self.groups or c == "one" else f"{n}"
            for c, n in zip(seen.coords, sizes, strict=True)
        )
        dense = Strided.dense(sizes, dtype).strides == steps
        strides = "" if dense else f" strides({','.join(map(str, steps))})"
        return f"{name} {dtype} [{said}]{strides}"


def _without(line: str, gone: set[str]) -> str:
    """The line without reductions over the axes ``gone``, which have size 1 and no coordinate."""
    for found in reversed([*SUMMED.finditer(line)]):
        names = found[1].split()
        left = [axis for axis in names if axis not in gone]
        if left:
            line = f"{line[: found.start()]}; {' '.join(left)}){line[found.end() :]}"
            continue
        depth, at = 1, found.start()
        while depth:
            at -= 1
            depth += {")": 1, "(": -1}.get(line[at], 0)
        word = re.search(r"\w+$", line[:at])
        assert word is not None, line
        line = f"{line[: word.start()]}{line[at : found.start()]}){line[found.end() :]}"
    return line


class _PageWords(dict[str, Any]):
    def __init__(self, page: NamedSpace, words: Mapping[str, Any]) -> None:
        super().__init__(words)
        self.page = page

    def __missing__(self, word: str) -> str:
        return self.page[word]


@dataclass(frozen=True, slots=True)
class Gradient:
    """A text that reads operands, results, ``G`` (the gradient of the first result), those of others, and
    tensors that earlier gradients store. ``of``: the stored tensors that are gradients, each with its
    operand."""

    text: str
    of: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LibraryFormula:
    """The result of a library function. ``page``: shapes, strides and types of all tensors by name.
    ``given``: the operands, in the order of a call. ``results``: the tensors that the caller gets;
    gradients read the others that the text stores. ``together``: all gradients by one text, where that
    reads what they share only once. ``flows``: the gradients of as many of the results, the first ones;
    the others have none."""

    page: NamedSpace
    text: str
    given: tuple[str, ...]
    results: tuple[str, ...] = ("Y",)
    gradients: tuple[Gradient, ...] = field(default=())
    together: Gradient | None = None
    flows: tuple[str, ...] = ("G",)


def held(dtype: DType) -> DType:
    """The type of tensors stored for gradients: the type of arithmetic."""
    return dtype if dtype is f64 else f32


def lines(text: str) -> tuple[str, ...]:
    """The lines of a text, stripped."""
    return tuple(line.strip() for line in text.strip().splitlines())


@dataclass(frozen=True, slots=True)
class SizeExpression:
    """A number that follows from sizes, as a text of numbers and one of names have it."""

    number: str
    names: str

    def __str__(self) -> str:
        return self.number


@dataclass(frozen=True, slots=True)
class LibraryText:
    """A text without its line of sizes, which belongs between ``head`` and ``rest``. ``sizes``: the
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
    return [
        _name(page, c)
        if c in page.groups
        else f"{n}"
        if c in {"0", "one"} | page.numbers
        else f"{name}{i}"
        for i, (c, n) in enumerate(zip(seen.coords, seen.sizes, strict=True))
    ]


def _declared(page: NamedSpace, name: str) -> str:
    dims = ", ".join(
        f"{c}={own}" if c in page.groups or c == "one" else own
        for c, own in zip(page.seen[name].coords, _dims(page, name), strict=True)
    )
    return f"{name} {page.tensors[name].dtype} [{dims}]"


def _is_dense(page: NamedSpace, name: str) -> bool:
    seen = page.seen[name]
    return Strided.dense(seen.sizes, page.tensors[name].dtype).strides == seen.strides
