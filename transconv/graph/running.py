"""How a region runs: one function of Python, written out for its kernels, in which every tensor is a local
variable.

    def run(given):
        a0, a1 = given
        given.clear()
        b0 = empty(*s0)        memory of a result
        k0(a0, a1, b0)         a launch
        del a0                 nothing needs it any more
        return [b0, a1]

A dictionary of tensors, and lists made for each launch, take the host as long as the launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from transconv.functional.launches import Memory
from transconv.graph.kernel import Kernel
from transconv.graph.pieces import Piece
from transconv.graph.placing import Slices

Tensor = torch.Tensor
NONE: Mapping[Piece, Slices] = MappingProxyType({})
Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Of another tensor's memory: sizes, strides, and how many elements it begins behind it."""
Run = Callable[[list[Tensor]], list[Tensor]]


class Line(NamedTuple):
    """A launch: the kernel, what starts it on tensors, what it stores, which results replace operands (see
    in_place.py), and what nothing needs behind it."""

    kernel: Kernel
    start: Callable[..., None]
    memory: Sequence[Memory]
    over: dict[int, int]
    done: Sequence[Piece]


def written(inputs: Sequence[Piece], lines: Sequence[Line], handed: Sequence[tuple[Piece, Place | None]],
            empty: Callable[..., Tensor], cut: Mapping[Piece, Slices] = NONE) -> Run:
    """A function of the tensors of ``inputs``, in a list that it empties, that returns those that are
    ``handed`` out. ``empty`` makes memory of a shape, strides and a type; ``cut``: what has a slice of a
    tensor with others."""
    return _Writer(inputs, lines, handed, {"empty": empty}, cut).run()


class _Writer:
    """``known``: the values of names that are no tensors."""

    def __init__(self, inputs: Sequence[Piece], lines: Sequence[Line],
                 handed: Sequence[tuple[Piece, Place | None]], known: dict[str, Any],
                 cut: Mapping[Piece, Slices]) -> None:
        self.inputs, self.lines, self.handed, self.known = inputs, lines, handed, known
        self.cut = cut
        self.names: dict[Piece, str] = {}
        self.constants: dict[Any, str] = {}

    def run(self) -> Run:
        body = "\n".join(f"        {line}" for line in self.body())  # has all names entered
        text = f"def made({', '.join(self.known)}):\n    def run(given):\n{body}\n    return run"
        made: Run = _made(text)(*self.known.values())
        return made

    def body(self) -> Iterator[str]:
        self.names = {p: f"a{i}" for i, p in enumerate(self.inputs)}
        if self.names:
            yield f"{''.join(f'{n}, ' for n in self.names.values())}= given"
        yield "given.clear()"
        for number, line in enumerate(self.lines):
            yield from self.launched(number, line)
        yield f"return [{', '.join(self.result(*h) for h in self.handed)}]"

    def launched(self, number: int, line: Line) -> Iterator[str]:
        names, kernel = self.names, line.kernel
        for into, place in line.over.items():
            names[kernel.stored[into]] = names[kernel.given[place]]
        for p, m in zip(kernel.stored, line.memory, strict=True):
            if p not in names and p in self.cut:
                yield from self.sliced(self.cut[p])
            elif p not in names:  # of others a part is there
                yield self.allocated(p, m)
        self.known[f"k{number}"] = line.start
        yield f"k{number}({', '.join(names[p] for p in (*kernel.given, *kernel.stored))})"
        gone = {names[p] for p in line.done} - {names[kernel.stored[into]] for into in line.over
                                                if kernel.stored[into] not in line.done}
        if gone:
            yield f"del {', '.join(sorted(gone))}"

    def allocated(self, piece: Piece, memory: Memory) -> str:
        self.names[piece] = name = f"b{len(self.names)}"
        return f"{name} = empty({', '.join(map(self.constant, memory))})"

    def sliced(self, cut: Slices) -> Iterator[str]:
        """Memory that several values have together, and the view that each of them is."""
        yield self.allocated(cut.whole, cut.memory)
        for piece, shape, behind in cut.parts:
            self.names[piece] = name = f"b{len(self.names)}"
            place = ", ".join(map(self.constant, (shape, cut.memory.strides, behind)))
            yield f"{name} = {self.names[cut.whole]}.as_strided({place})"

    def result(self, piece: Piece, view: Place | None) -> str:
        name = self.names[piece]
        if view is None:
            return name
        shape, strides, behind = map(self.constant, view)
        return f"{name}.as_strided({shape}, {strides}, {name}.storage_offset() + {behind})"

    def constant(self, value: Any) -> str:
        """The name of a value."""
        if value not in self.constants:
            self.constants[value] = name = f"c{len(self.constants)}"
            self.known[name] = value
        return self.constants[value]


@lru_cache(maxsize=64)
def _made(text: str) -> Callable[..., Run]:
    """What a text defines: it has names alone, so that regions of other sizes share it."""
    scope: dict[str, Any] = {}
    exec(text, scope)
    made: Callable[..., Run] = scope["made"]
    return made


def alike(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function of as many tensors: whether each is of the type, shape, strides, device and dispatch keys
    of one of these. torch compares all of them in one call; where it has none that does, never."""
    try:
        guards: Any = torch._C._dynamo.guards.TensorGuards
        found: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=None,
                                            dynamic_dims_strides=None).check
        return found if tensors else _none
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return never


def _none(*_: Tensor) -> bool:
    return True


def never(*_: Tensor) -> bool:
    """No tensors are alike."""
    return False
