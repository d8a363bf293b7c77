"""How a region runs: one function of Python, written out for its kernels, in which every tensor is a local
variable.

    def run(given):
        a0, a1 = given
        given.clear()
        b0 = empty(*s0)        memory of a result
        w0 = empty(*s1)        a workspace, for all launches that need one
        k0(a0, a1, b0, w0)     a launch
        del a0                 nothing needs it any more
        return [b0, a1]

A dictionary of tensors, and lists made for each launch, take the host as long as the launches. So does
memory for each kernel's workspaces: launches follow each other, and share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from transconv.functional.calls.compiled_launch import TensorMemory
from transconv.graph.fusion.concat_views import Slices
from transconv.graph.fusion.index_ir import Piece
from transconv.graph.regions.region_kernel import RegionKernel
from transconv.ir import defined
from transconv.runtime import Spaces, torch_internals

Tensor = torch.Tensor
NONE: Mapping[Piece, Slices] = MappingProxyType({})
Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Of another tensor's memory: sizes, strides, and how many elements it begins behind it."""
Run = Callable[[list[Tensor]], list[Tensor]]
SHARED = 2**22  # bytes of the largest workspace that lies in memory which others have, too


class LaunchLine(NamedTuple):
    """A launch: the kernel, what starts it on tensors, what it stores, which results replace operands (see
    fusion/inplace_maps.py), what nothing needs behind it, and the workspaces that it takes behind its
    tensors."""

    kernel: RegionKernel
    start: Callable[..., None]
    memory: Sequence[TensorMemory]
    over: Mapping[int, int]
    done: Sequence[Piece]
    spaces: Spaces = ()


def written(
    inputs: Sequence[Piece],
    lines: Sequence[LaunchLine],
    handed: Sequence[tuple[Piece, Place | None]],
    empty: Callable[..., Tensor],
    cut: Mapping[Piece, Slices] = NONE,
) -> Run:
    """A function of the tensors of ``inputs``, in a list that it empties, that returns those that are
    ``handed`` out. ``empty`` makes memory of a shape, strides and a type; ``cut``: what has a slice of a
    tensor with others."""
    return _RegionWriter(inputs, lines, handed, {"empty": empty}, cut).run()


class _RegionWriter:
    """``known``: the values of names that are no tensors."""

    def __init__(self, inputs: Sequence[Piece], lines: Sequence[LaunchLine],
                 handed: Sequence[tuple[Piece, Place | None]], known: dict[str, Any],
                 cut: Mapping[Piece, Slices]) -> None:
        self.inputs, self.lines, self.handed, self.known = inputs, lines, handed, known
        self.cut = cut
        self.names: dict[Piece, str] = {}
        self.constants: dict[Any, str] = {}
        self.spaces = SharedWorkspaces(line.spaces for line in lines)

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

    def launched(self, number: int, line: LaunchLine) -> Iterator[str]:
        names, kernel = self.names, line.kernel
        for into, place in line.over.items():
            names[kernel.stored[into]] = names[kernel.given[place]]
        for p, m in zip(kernel.stored, line.memory, strict=True):
            if p not in names and p in self.cut:
                yield from self.sliced(self.cut[p])
            elif p not in names:  # of others a part is there
                yield self.allocated(p, m)
        spaces, own = self.spaces.of(number)
        for name, ((span,), dtype) in own.items():
            yield f"{name} = empty({', '.join(map(self.constant, ((span,), (1,), dtype)))})"
        self.known[f"k{number}"] = line.start
        yield f"k{number}({', '.join((*[names[p] for p in (*kernel.given, *kernel.stored)], *spaces))})"
        gone = {names[p] for p in line.done} - {names[kernel.stored[into]] for into in line.over
                                                if kernel.stored[into] not in line.done}
        gone |= self.spaces.ended(number)
        if gone:
            yield f"del {', '.join(sorted(gone))}"

    def allocated(self, piece: Piece, memory: TensorMemory) -> str:
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


class SharedWorkspaces:
    """The memory of workspaces: the first one of a type that each launch needs is the same for all, and so
    is the second one. Larger ones than ``SHARED`` are alone."""

    def __init__(self, spaces: Iterable[Spaces]) -> None:
        self.launches = [self.named(number, each) for number, each in enumerate(spaces)]
        self.span: dict[str, int] = {}
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        for number, named in enumerate(self.launches):
            for name, ((span,), _) in named.items():
                self.span[name] = max(span, self.span.get(name, 0))
                self.first.setdefault(name, number)
                self.last[name] = number

    @staticmethod
    def named(number: int, spaces: Spaces) -> dict[str, tuple[tuple[int], torch.dtype]]:
        """The workspaces of a launch by the name of their memory."""
        found: dict[str, tuple[tuple[int], torch.dtype]] = {}
        for (span,), dtype in spaces:
            size, kind = span * dtype.itemsize, str(dtype).rpartition(".")[2]
            at = sum(d is dtype for _, d in found.values())
            found[f"w{at}_{kind}" + f"_{number}" * (size > SHARED)] = (span,), dtype
        return found

    def of(self, number: int) -> tuple[list[str], dict[str, tuple[tuple[int], torch.dtype]]]:
        """The names of what a launch takes, and which of these have to be allocated, as large as any
        launch needs them."""
        named = self.launches[number]
        return [*named], {name: ((self.span[name],), dtype) for name, (_, dtype) in named.items()
                          if self.first[name] == number}

    def ended(self, number: int) -> set[str]:
        """What no launch behind this one needs."""
        return {name for name in self.launches[number] if self.last[name] == number}


@lru_cache(maxsize=64)
def _made(text: str) -> Callable[..., Run]:
    """What a text defines: it has names alone, so that regions of other sizes share it."""
    made: Callable[..., Run] = defined(text, "made")
    return made


def alike(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function of as many tensors: whether each is of the type, shape, strides, device and dispatch keys
    of one of these. torch compares all of them in one call; where it has none that does, never."""
    try:
        found: Callable[..., bool] = torch_internals.TensorGuards(*tensors, dynamic_dims_sizes=None,
                                            dynamic_dims_strides=None).check
        return found if tensors else _none
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return never


def _none(*_: Tensor) -> bool:
    return True


def never(*_: Tensor) -> bool:
    """No tensors are alike."""
    return False
