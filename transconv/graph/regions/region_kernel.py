"""A region of a graph and its kernels: the texts of each, its tensors, and why it may be refused.

A text whose sizes are names is written once, with the sizes of axes and tensors in braces. In the named
form the names are arguments of the kernel. They are counted in the order of the text, so that parts of a
network that do the same at other resolutions have the same text. What cannot be said with names has a text
of numbers for the sizes of each call.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx

from transconv.calls.settings import settings
from transconv.compute import Alone, Workload
from transconv.conv import Surrounded
from transconv.functional.calls.compiled_launch import TensorMemory, deterministic, program
from transconv.graph.fusion.groups import FusionGroup, FusionPlan, Slices
from transconv.graph.fusion.index_ir import Piece, RegionInput, ingredients
from transconv.graph.sizes import Length
from transconv.ir import sizes_told
from transconv.support import TransconvError, Unsupported

NAME = re.compile(r"\b[ST]\d+\b")
BRACED = re.compile(r"\{([^{}]*)\}")
MOST = 2**31 - 2**16  # elements of a tensor, and positions: 32 bits count them
LONG = 2**20  # a dim

Factors = tuple[str, ...]  # of a size: names and numbers


def braced(n: Length) -> str:
    """A size in a text."""
    return str(n) if isinstance(n, int) else f"{{{str(n).strip('()')}}}"


@dataclass(frozen=True)
class SizedText:
    """``template``: the text. ``dims``: those of its tensors, and ``spaces``, the axes that are swept
    together, as the text has them; ``like``: an example; ``derived``: of a name, what it is of others;
    ``why``: why it has no named form, where that is known."""

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
        return f"{head}\n    sizes  {', '.join(words)}\n{rest}" if order else text

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


class SizedTensor(NamedTuple):
    """A tensor whose sizes may be names."""

    shape: tuple[Length, ...]
    strides: tuple[Length, ...]
    dtype: torch.dtype

    def at(self, value: Callable[[Length], int]) -> TensorMemory:
        """With numbers."""
        return TensorMemory(
            tuple([value(n) for n in self.shape]), tuple([value(n) for n in self.strides]), self.dtype
        )


@dataclass(eq=False, slots=True)
class Region:
    """Nodes in their order; ``ours``: they have pieces. ``reasons``: of torch's nodes, by their names."""

    ours: bool
    nodes: list[fx.Node] = field(default_factory=list)
    pieces: dict[fx.Node, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True, eq=False, slots=True)
class RegionKernel:
    """A launch: its text, or one for each part of its result; what it reads and stores in the order of its
    tensors; the group behind it. ``asked``: the text, or the workload of which the texts are parts.
    ``sized``: where sizes are names."""

    group: FusionGroup
    texts: tuple[str, ...]
    given: tuple[Piece, ...]
    stored: tuple[Piece, ...]
    memory: tuple[SizedTensor, ...]  # of what is stored
    asked: str | Surrounded
    sized: SizedText | None = None

    @property
    def workload(self) -> Workload:
        """What is computed."""
        return Alone(program(self.asked).compute) if isinstance(self.asked, str) else self.asked


View = tuple[tuple[Length, ...], tuple[Length, ...], Length]
"""Of another tensor's memory: sizes, strides, and how many elements it begins behind it."""


@dataclass(frozen=True, slots=True)
class Handed:
    """A result of a region: a tensor, or another view of its memory."""

    piece: Piece
    view: View | None


@dataclass(slots=True)
class RegionPlan:
    """The kernels of a region of ours, in the order in which they run. ``inputs``: its tensors, each with
    its place among the inputs; ``last``: of each launch, what no later one needs; ``over``: which results
    replace operands (see ``in_place``); ``cut``: tensors that hold several values, by these; ``lying``:
    strides of results that are not torch's, by the names of their nodes."""

    device: torch.device
    region: Region
    plan: FusionPlan
    kernels: list[RegionKernel]
    inputs: list[tuple[int, fx.Node, RegionInput]]
    handed: list[Handed]
    last: list[list[Piece]]
    over: list[dict[int, int]]
    cut: dict[Piece, Slices]
    lying: dict[str, tuple[Length, ...]]

    @property
    def peak(self) -> int:
        """Bytes of what its kernels store that are held at once at most."""
        held = most = 0
        inputs = {piece for _, _, piece in self.inputs}
        cut: set[Piece] = set()  # tensors that hold several values, and are there
        for kernel, done, over in zip(self.kernels, self.last, self.over, strict=True):
            new = {self.cut[p].whole for p in kernel.stored if p in self.cut} - cut
            cut |= new
            held += sum(p.bytes for p in new)
            held += sum(
                p.bytes for i, p in enumerate(kernel.stored) if i not in over and p not in self.cut
            )
            most = max(most, held)
            held += sum(kernel.stored[i].bytes for i in over)  # in the place of operands, which go
            held -= sum(p.bytes for p in done if p not in inputs and p not in self.cut)
        return most


# -- refusals -----------------------------------------------------------------------------------------


class RefusedKernel(Exception):
    """``kernel``: its name; ``nodes``: the operations that it computes, by their names; ``reason`` in one
    word, ``message`` in words."""

    def __init__(self, kernel: str, nodes: frozenset[str], reason: str, message: str) -> None:
        super().__init__(f"the kernel {kernel} is refused: {message}")
        self.kernel, self.nodes, self.reason, self.message = kernel, nodes, reason, message


def refusal(
    group: FusionGroup,
    plan: FusionPlan,
    region: Region,
    error: Exception,
    also: frozenset[str] = frozenset(),
) -> RefusedKernel:
    """Of the kernel of a group, for a reason; ``also``: what else is to blame."""
    memory = {p for p, by in plan.stored.items() if by.number != group.number}
    computed = {x for p in group.stores for x in ingredients(p, memory)} - memory
    made_by = origins(region)
    computed |= {
        at.whole
        for p in group.stores
        if p not in made_by  # a copy of a part (fusion/plan.py)
        and (at := plan.places.get(p)) is not None
    }
    nodes = frozenset(node.name for piece, node in made_by.items() if piece in computed)
    reason = error.reason if isinstance(error, Unsupported) else f"error:{type(error).__name__}"
    message = (
        error.message or reason
        if isinstance(error, Unsupported)
        else str(error)
        if isinstance(error, TransconvError)
        else f"a bug: {type(error).__name__}: {error}"
    )
    return RefusedKernel(group.name, nodes | also, reason, message)


def compile_mode() -> str:
    """``compile`` as a graph obeys it. By default calls wait, as torch.compile has them: meanwhile torch
    would compute the graph in steps that take several times as long. They wait also where the same bits
    are asked for."""
    mode = settings.mode
    return "now" if mode == "background" and (settings.compile == "auto" or deterministic()) else mode


def origins(region: Region) -> dict[Piece, fx.Node]:
    """The node whose row made a value: the first that has it."""
    found: dict[Piece, fx.Node] = {}
    for node in region.nodes:
        made = region.pieces[node]
        left = [p for p in (made if isinstance(made, tuple) else (made,)) if p is not None]
        while left:
            piece = left.pop()
            if piece not in found and not isinstance(piece, RegionInput):
                found[piece] = node
                left += piece.operands
    return found
