"""A convolution of DTensors and its gradients: placements, exchange of rows, the convolution of each rank.

    forward    rows of the input for this rank's rows of the result
    backward   rows of the gradient for this rank's rows of the input: from these follow its part of the
               input's gradient and, as each row of the input is in one rank, a term of the weight's

A rank computes while rows of other ranks travel: all of its rows from its own alone, then those at the
edges again, from the few rows that these read.

    rows of this rank       |-------------------------------|
    from its own alone      |xxxx=======================xxxx|     x: wrong, for lack of rows
    computed again          |====|                     |====|     when the others' rows are there

No copy is made of the rank's own rows. The rows at the edges are computed twice, so this is for shards
that have many more rows than a kernel reaches; else the rows are joined first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from transconv.calls.guard import at_multiple
from transconv.calls.settings import settings
from transconv.compute import AxisSpan
from transconv.conv import Prop
from transconv.distributed import agreement, halo, placements
from transconv.distributed.halo import SpatialAxis, Travelling, Window, planned, shards
from transconv.distributed.placements import Choice, WholeShapes, produced, splits
from transconv.runtime import Cache
from transconv.torch_ops import arguments
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import select_impl
from transconv.torch_ops.calls.call_attributes import request
from transconv.torch_ops.calls.lower_call import bias_gradient
from transconv.torch_ops.quantized.quantized_route import weight_gradient

Tensor = torch.Tensor


class LocalConv(NamedTuple):
    """The numbers of the convolution of some rows of src with some of dst: windows by spatial axis."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    windows: tuple[Window, ...]
    groups: int

    @property
    def params(self) -> Params:
        low, high = tuple(w.low for w in self.windows), tuple(w.high for w in self.windows)
        padding = low if low == high else low + high
        return Params(self.stride, padding, self.dilation, False, (0,) * len(low), self.groups)

    def read(self, src: Tensor) -> Tensor:
        """src without the rows at its end that are not read."""
        for dim, window in enumerate(self.windows, 2):
            if window.unread:
                src = src.narrow(dim, 0, src.shape[dim] - window.unread)
        return src

    def dst(self, src: Tensor, wei: Tensor, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
        """dst of src and the weight, of this shape."""
        src = self.read(src)
        if not (src.numel() and wei.numel() and all(shape)):
            return with_bias(src.new_zeros(tuple(shape)), bias)
        made: Tensor = select_impl.forward_route(
            request("", 0, *self.params), src, wei, bias, settings.mode
        ).forward(src, wei, bias)
        return made

    def src(self, dst: Tensor, wei: Tensor, like: Tensor) -> Tensor:
        """The gradient of src, with shape and layout of ``like``, whose elements are not read."""
        read = self.read(like)
        if not (read.numel() and wei.numel() and dst.numel()):
            return torch.zeros_like(like)
        made = select_impl.backward(self.params, dst, read, wei, (True, False, False), settings.mode)[0]
        assert made is not None
        missing = [n for w in reversed(self.windows) for n in (0, w.unread)]
        return F.pad(made, missing) if any(missing) else made

    def wei(self, dst: Tensor, src: Tensor, wei: Tensor, addend: bool = False) -> Tensor:
        """The gradient of the weight ``wei``, whose elements are not read. An ``addend`` of a sum has 32
        bits where the others have 16: the sum is rounded once."""
        src = self.read(src)
        if not (src.numel() and wei.numel() and dst.numel()):
            return torch.zeros_like(wei)
        if addend and wei.element_size() < 4:
            return weight_gradient(src, dst, wei, self.params, False)
        made = select_impl.backward(self.params, dst, src, wei, (False, True, False), settings.mode)[1]
        assert made is not None
        return made


def with_bias(made: Tensor, bias: Tensor | None) -> Tensor:
    """The tensor plus a bias of its channels."""
    if bias is None:
        return made
    return made + bias.to(made.dtype).view(1, -1, *[1] * (made.dim() - 2))


# Of calls on which all ranks of a mesh agreed: those of all ranks are dropped at the same call.
_choices: Cache[Any, Choice] = Cache("choices of axes", agreement.MOST)


class Problem:
    """One convolution of whole tensors over a mesh. In ``lines`` and local parts src and dst are those of
    the convolution that a transposed one is the transpose of."""

    def __init__(self, input: DTensor, weight: DTensor, p: Params) -> None:
        self.mesh, self.p = input.device_mesh, p
        self.shapes = {
            "input": tuple(input.shape),
            "weight": tuple(weight.shape),
            "result": arguments.output_shape(input.shape, weight.shape, p),
        }
        self.shapes["bias"] = self.shapes["result"][1:2]
        self.channels_last = arguments.channels_last_result(input, weight)
        src, dst = ("result", "input") if p.transposed else ("input", "result")
        self.lines = [
            SpatialAxis(*sizes)
            for sizes in zip(
                self.shapes[src][2:],
                self.shapes[dst][2:],
                weight.shape[2:],
                p.stride,
                p.dilation,
                p.pad_lo,
                strict=True,
            )
        ]

    def choose(self, summed: bool = False, **operands: DTensor | None) -> Choice:
        """Which axis each mesh dim splits. RuntimeError on all ranks if they disagree on the call. In
        invariant mode samples alone, whose bits do not depend on the others; with ``summed``, where sums
        over samples are wanted, nothing: every rank adds up all of them."""
        given = {name: t for name, t in operands.items() if t is not None}
        key = (
            self.mesh,
            self.p,
            self.channels_last,
            given["weight"].dtype,
            (settings.invariant, summed),
            *((name, t.shape, t.placements) for name, t in given.items()),
        )
        if (known := _choices.get(key)) is not None:
            return known
        laid = " ".join(f"{name}{list(t.shape)}{t.placements}" for name, t in given.items())
        agreement.agree(self.mesh, f"{laid} {self.p} {self.channels_last} {given['weight'].dtype}")
        rows = splits(len(self.lines), self.p.transposed, self.p.groups > 1)
        if settings.invariant:
            rows = tuple(row for row in rows if row.result == 0 and not summed)
        found = placements.choose(self.mesh, given, rows, WholeShapes(self.shapes, self.p.groups))
        return _choices.keep(key, found)

    def brought(self, tensor: DTensor, name: str, choice: Choice) -> Tensor:
        """The part of an operand on this rank; in invariant mode without gaps, as one process has it."""
        found, last = placements.brought(tensor, name, choice), self.channels_last
        if settings.invariant and found.dim() > 1 and arguments.has_gaps(found, last):
            found = arguments.with_result_strides(found, last)
        return at_multiple(found) if settings.invariant else found

    def local(self, name: str, choice: Choice) -> tuple[int, ...]:
        """The shape of this rank's part of a tensor."""
        places = [produced(split, name) for split in choice]
        return placements.local_shape(self.mesh, self.shapes[name], places)

    def extend(self, local: Tensor, choice: Choice, has: str, wants: str) -> Halo:
        """This rank's part of the tensor ``has`` with the rows of other ranks that its part of ``wants``
        is computed from. Those along the last axis that is split may still be on their way."""
        reads_src = (has == "input") != self.p.transposed
        prop = Prop.FWD if reads_src else Prop.BWD_D
        owned, mine = ([AxisSpan(0, n) for n in self.shapes[name][2:]] for name in (has, wants))
        split = [(at, s.spatial) for at, s in enumerate(choice) if s is not None and s.spatial is not None]
        pending: tuple[Any, ...] = ()
        for at, x in split:
            parts, rank = self.mesh.size(at), self.mesh.get_local_rank(at)
            plan, line = planned(self.lines[x], prop, parts, rank), self.lines[x]
            rows = halo.started(local, 2 + x, plan, self.mesh.get_group(at), self.channels_last)
            way = apart(line, prop, parts, rank) if (at, x) == split[-1] else None
            if way is not None:
                pending = rows, line, x, way
            else:
                local = rows.all()
            owned[x], mine[x] = plan.needed, shards(self.shapes[wants][2 + x], parts)[rank]
        src, dst = (owned, mine) if reads_src else (mine, owned)
        windows = tuple(line.window(*rows) for line, *rows in zip(self.lines, src, dst, strict=True))
        part = LocalConv(self.p.stride, self.p.dilation, windows, self._groups(choice))
        return Halo(local, part, prop, *pending)

    def _groups(self, choice: Choice) -> int:
        """The groups of this rank's channels."""
        if any(split is not None and split.groups for split in choice):
            per_group = self.shapes["input"][1] // self.p.groups
            return max(1, self.local("input", choice)[1] // per_group)
        return self.p.groups

    def whole(self, local: Tensor, name: str, places: Sequence[Placement]) -> DTensor:
        """The tensor of which every rank has its part."""
        shape = torch.Size(self.shapes[name])
        strides = arguments.result_strides(shape, self.channels_last and len(shape) > 1)
        return placements.dealt(local, self.mesh, places, shape, strides)


def forward(input: DTensor, weight: DTensor, bias: DTensor | None, p: Params) -> DTensor:
    """The result of a checked, batched call."""
    problem = Problem(input, weight, p)
    choice = problem.choose(input=input, weight=weight, bias=bias)
    x, w = problem.brought(input, "input", choice), problem.brought(weight, "weight", choice)
    b = None if bias is None else problem.brought(bias, "bias", choice)
    places = [produced(split, "result") for split in choice]
    if any(place.is_partial() and problem.mesh.get_local_rank(at) for at, place in enumerate(places)):
        b = None  # of the parts of a sum, the first has the bias
    shape = problem.local("result", choice)

    def of(part: LocalConv, rows: Tensor, shape: Sequence[int]) -> Tensor:
        if p.transposed:
            like = arguments.empty_result(rows, shape, problem.channels_last)
            return with_bias(part.src(rows, w, like), b)
        return part.dst(rows, w, b, shape)

    made = problem.extend(x, choice, "input", "result").computed(of, shape)
    return problem.whole(made, "result", places)


def backward(
    grad: DTensor, input: DTensor, weight: DTensor, p: Params, mask: Sequence[bool]
) -> tuple[DTensor | None, ...]:
    """Gradients of input, weight and bias of a checked, batched call; None where ``mask`` is False."""
    problem = Problem(input, weight, p)
    if settings.invariant and mask[0] and any(mask[1:]):
        of_input, *_ = backward(grad, input, weight, p, (True, False, False))
        return of_input, *backward(grad, input, weight, p, (False, *mask[1:]))[1:]
    choice = problem.choose(not mask[0], result=grad, input=input, weight=weight)
    g = problem.brought(grad, "result", choice)
    found: list[DTensor | None] = [None, None, None]
    if mask[2]:
        whole = settings.invariant  # then g has all channels, and a kernel adds up its samples in order
        total = bias_gradient(g, weight, p) if whole else g.sum([0, *range(2, g.dim())])
        places = [_of_bias(split) for split in choice]
        found[2] = problem.whole(total, "bias", places)
    if mask[0] or mask[1]:
        x, w = problem.brought(input, "input", choice), problem.brought(weight, "weight", choice)
        parts = _gradients(problem, problem.extend(g, choice, "result", "input"), x, w, mask)
        for at, name in enumerate(("input", "weight")):
            if parts[at] is not None:
                found[at] = problem.whole(parts[at], name, [produced(split, name) for split in choice])
    return tuple(found)


def _gradients(problem: Problem, g: Halo, x: Tensor, w: Tensor, mask: Sequence[bool]) -> tuple[Any, Any]:
    transposed = problem.p.transposed

    def of_input(part: LocalConv, rows: Tensor, shape: Sequence[int]) -> Tensor:
        if transposed:
            return part.dst(rows, w, None, shape)
        like = x if x.shape == shape else arguments.empty_result(x, shape, problem.channels_last)
        return part.src(rows, w, like)

    def of_weight(part: LocalConv, rows: Tensor, other: Tensor, addend: bool) -> Tensor:
        return part.wei(*((other, rows) if transposed else (rows, other)), w, addend)

    return (
        g.computed(of_input, x.shape) if mask[0] else None,
        g.summed(of_weight, x).to(w.dtype) if mask[1] else None,
    )


def _of_bias(split: Any) -> Placement:
    """The gradient of the bias is the sum of the result's over all other dims."""
    if split is None or split.result is None:
        return Replicate()
    return Partial() if split.bias is None else Shard(split.bias)


SHARE = 8  # at most the eighth part of the rows is computed twice
Kernel = Callable[[LocalConv, Tensor, Sequence[int]], Tensor]
Sum = Callable[[LocalConv, Tensor, Tensor, bool], Tensor]


class Pair(NamedTuple):
    """Rows of the tensor that is read, and rows of the other one, counted in the whole tensors."""

    read: AxisSpan
    other: AxisSpan


class OverlapSplit(NamedTuple):
    """A rank's rows, divided by what they need. ``own``: all that the rank has with all of its rows of the
    other tensor. ``edges``: rows that read rows of others, with all that they read. ``received``: rows of
    others, with the rank's rows that read them: with ``own`` these are each pair of rows once."""

    own: Pair
    edges: tuple[Pair, ...]
    received: tuple[Pair, ...]


@lru_cache(maxsize=1 << 12)
def apart(line: SpatialAxis, prop: Prop, parts: int, rank: int) -> OverlapSplit | None:
    """How one of ``parts`` ranks computes its rows of this direction's result; None if nothing travels,
    and where its rows are too few."""
    plan = planned(line, prop, parts, rank)
    mine = shards(line.o if prop is Prop.FWD else line.i, parts)[rank]
    own = plan.needed.within(plan.owned)
    if not (plan.received and own.size and mine.size):
        return None
    low, high = mine.start, mine.stop
    most = mine.size // SHARE
    while low < mine.stop and low - mine.start <= most and _before(line, prop, low, own):
        low += 1
    while high > low and mine.stop - high <= most and _behind(line, prop, high - 1, own):
        high -= 1
    inner = line.needs(prop, AxisSpan(low, high))  # rows in the padding alone may end the search too early
    if low - mine.start + mine.stop - high > most or inner.within(own).size < inner.size:
        return None
    edges = tuple(
        Pair(line.needs(prop, rows), rows)
        for rows in (AxisSpan(mine.start, low), AxisSpan(high, mine.stop))
        if rows.size
    )
    back = Prop.BWD_D if prop is Prop.FWD else Prop.FWD
    others = (AxisSpan(plan.needed.start, own.start), AxisSpan(own.stop, plan.needed.stop))
    received = tuple(Pair(rows, line.needs(back, rows).within(mine)) for rows in others if rows.size)
    made = OverlapSplit(Pair(own, mine), edges, tuple(pair for pair in received if pair.other.size))
    pairs = (made.own, *made.edges, *made.received)
    return made if all(window_of(line, prop, pair).low >= 0 for pair in pairs) else None


def _before(line: SpatialAxis, prop: Prop, row: int, own: AxisSpan) -> bool:
    read = line.needs(prop, AxisSpan(row, row + 1))
    return read.size > 0 and read.start < own.start


def _behind(line: SpatialAxis, prop: Prop, row: int, own: AxisSpan) -> bool:
    read = line.needs(prop, AxisSpan(row, row + 1))
    return read.size > 0 and read.stop > own.stop


def window_of(line: SpatialAxis, prop: Prop, pair: Pair) -> Window:
    """The convolution of a pair of rows."""
    return line.window(*(pair if prop is Prop.FWD else pair[::-1]))


@dataclass(frozen=True)
class Halo:
    """A rank's rows of one tensor with those of others that its rows of another tensor read. ``part`` is
    the convolution of all of them. ``rows``: still on their way along the axis of ``line``, with how to
    compute meanwhile; otherwise ``local`` has them all."""

    local: Tensor
    part: LocalConv
    prop: Prop
    rows: Travelling | None = None
    line: SpatialAxis | None = None
    axis: int = 0
    way: OverlapSplit | None = None

    def computed(self, kernel: Kernel, shape: Sequence[int]) -> Tensor:
        """The rank's rows of the other tensor, of this shape."""
        if self.rows is None or self.way is None:
            return kernel(self.part, self.local, shape)
        dim, (has, mine) = 2 + self.axis, self.way.own
        made = kernel(self._part(self.way.own), self.rows.some(has), shape)
        for pair in self.way.edges:
            edge = kernel(self._part(pair), self.rows.some(pair.read), _resized(shape, dim, pair.other))
            made.narrow(dim, pair.other.start - mine.start, pair.other.size).copy_(edge)
        self.rows.sent.wait()
        return made

    def summed(self, kernel: Sum, other: Tensor) -> Tensor:
        """The gradient of the weight, from the rank's rows of the other tensor: one, or a sum of parts of
        at least 32 bits."""
        if self.rows is None or self.way is None:
            return kernel(self.part, self.local, other, False)
        dim, (has, mine) = 2 + self.axis, self.way.own
        several = len(self.way.received) > 0
        made = kernel(self._part(self.way.own), self.rows.some(has), other, several)
        for pair in self.way.received:
            read = other.narrow(dim, pair.other.start - mine.start, pair.other.size)
            made = made.add_(kernel(self._part(pair), self.rows.some(pair.read), read, True))
        self.rows.sent.wait()
        return made

    def _part(self, pair: Pair) -> LocalConv:
        assert self.line is not None
        windows = list(self.part.windows)
        windows[self.axis] = window_of(self.line, self.prop, pair)
        return self.part._replace(windows=tuple(windows))


def _resized(shape: Sequence[int], dim: int, rows: AxisSpan) -> tuple[int, ...]:
    return (*shape[:dim], rows.size, *shape[dim + 1 :])
