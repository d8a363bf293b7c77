"""A convolution of DTensors and its gradients: placements, exchange of rows, the convolution of each rank.

    forward    rows of the input for this rank's rows of the result
    backward   rows of the gradient for this rank's rows of the input: from these follow its part of the
               input's gradient and, as each row of the input is in one rank, a term of the weight's
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from transconv.conv import Prop
from transconv.distributed import agreement, placing, transfer
from transconv.distributed.axes import splits
from transconv.distributed.halo import RowRange, SpatialAxis, planned, shards
from transconv.distributed.local import LocalConv, with_bias
from transconv.distributed.overlap import Halo, apart
from transconv.distributed.placing import Choice, WholeShapes, produced
from transconv.runtime import Cache
from transconv.torch_ops import shapes
from transconv.torch_ops.arguments import Params

Tensor = torch.Tensor
# Of calls on which all ranks of a mesh agreed: those of all ranks are dropped at the same call.
_choices: Cache[Any, Choice] = Cache("choices of axes", agreement.MOST)


class Problem:
    """One convolution of whole tensors over a mesh. In ``lines`` and local parts src and dst are those of
    the convolution that a transposed one is the transpose of."""

    def __init__(self, input: DTensor, weight: DTensor, p: Params) -> None:
        self.mesh, self.p = input.device_mesh, p
        self.shapes = {"input": tuple(input.shape), "weight": tuple(weight.shape),
                       "result": shapes.output_shape(input.shape, weight.shape, p)}
        self.shapes["bias"] = self.shapes["result"][1:2]
        self.channels_last = shapes.channels_last_result(input, weight)
        src, dst = ("result", "input") if p.transposed else ("input", "result")
        self.lines = [SpatialAxis(*sizes) for sizes in zip(
            self.shapes[src][2:], self.shapes[dst][2:], weight.shape[2:], p.stride, p.dilation, p.pad_lo,
            strict=True)]

    def choose(self, **operands: DTensor | None) -> Choice:
        """Which axis each mesh dim splits. RuntimeError on all ranks if they disagree on the call."""
        given = {name: t for name, t in operands.items() if t is not None}
        key = (self.mesh, self.p, self.channels_last, given["weight"].dtype,
               *((name, t.shape, t.placements) for name, t in given.items()))
        if (known := _choices.get(key)) is not None:
            return known
        laid = " ".join(f"{name}{list(t.shape)}{t.placements}" for name, t in given.items())
        agreement.agree(self.mesh, f"{laid} {self.p} {self.channels_last} {given['weight'].dtype}")
        rows = splits(len(self.lines), self.p.transposed, self.p.groups > 1)
        found = placing.choose(self.mesh, given, rows, WholeShapes(self.shapes, self.p.groups))
        return _choices.keep(key, found)

    def local(self, name: str, choice: Choice) -> tuple[int, ...]:
        """The shape of this rank's part of a tensor."""
        places = [produced(split, name) for split in choice]
        return placing.local_shape(self.mesh, self.shapes[name], places)

    def extend(self, local: Tensor, choice: Choice, has: str, wants: str) -> Halo:
        """This rank's part of the tensor ``has`` with the rows of other ranks that its part of ``wants``
        is computed from. Those along the last axis that is split may still be on their way."""
        reads_src = (has == "input") != self.p.transposed
        prop = Prop.FWD if reads_src else Prop.BWD_D
        owned, mine = ([RowRange(0, n) for n in self.shapes[name][2:]] for name in (has, wants))
        split = [(at, s.spatial) for at, s in enumerate(choice) if s is not None and s.spatial is not None]
        pending: tuple[Any, ...] = ()
        for at, x in split:
            parts, rank = self.mesh.size(at), self.mesh.get_local_rank(at)
            plan, line = planned(self.lines[x], prop, parts, rank), self.lines[x]
            rows = transfer.started(local, 2 + x, plan, self.mesh.get_group(at), self.channels_last)
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
        strides = shapes.result_strides(shape, self.channels_last and len(shape) > 1)
        return placing.dealt(local, self.mesh, places, shape, strides)


def forward(input: DTensor, weight: DTensor, bias: DTensor | None, p: Params) -> DTensor:
    """The result of a checked, batched call."""
    problem = Problem(input, weight, p)
    choice = problem.choose(input=input, weight=weight, bias=bias)
    x, w = placing.brought(input, "input", choice), placing.brought(weight, "weight", choice)
    b = None if bias is None else placing.brought(bias, "bias", choice)
    places = [produced(split, "result") for split in choice]
    if any(place.is_partial() and problem.mesh.get_local_rank(at) for at, place in enumerate(places)):
        b = None  # of the parts of a sum, the first has the bias
    shape = problem.local("result", choice)

    def of(part: LocalConv, rows: Tensor, shape: Sequence[int]) -> Tensor:
        if p.transposed:
            like = shapes.empty_result(rows, shape, problem.channels_last)
            return with_bias(part.src(rows, w, like), b)
        return part.dst(rows, w, b, shape)

    made = problem.extend(x, choice, "input", "result").computed(of, shape)
    return problem.whole(made, "result", places)


def backward(grad: DTensor, input: DTensor, weight: DTensor, p: Params,
             mask: Sequence[bool]) -> tuple[DTensor | None, ...]:
    """Gradients of input, weight and bias of a checked, batched call; None where ``mask`` is False."""
    problem = Problem(input, weight, p)
    choice = problem.choose(result=grad, input=input, weight=weight)
    g = placing.brought(grad, "result", choice)
    found: list[DTensor | None] = [None, None, None]
    if mask[2]:
        total = g.sum([0, *range(2, g.dim())])
        places = [_of_bias(split) for split in choice]
        found[2] = problem.whole(total, "bias", places)
    if mask[0] or mask[1]:
        x, w = placing.brought(input, "input", choice), placing.brought(weight, "weight", choice)
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
        like = x if x.shape == shape else shapes.empty_result(x, shape, problem.channels_last)
        return part.src(rows, w, like)

    def of_weight(part: LocalConv, rows: Tensor, other: Tensor, addend: bool) -> Tensor:
        return part.wei(*((other, rows) if transposed else (rows, other)), w, addend)

    return (g.computed(of_input, x.shape) if mask[0] else None,
            g.summed(of_weight, x).to(w.dtype) if mask[1] else None)


def _of_bias(split: Any) -> Placement:
    """The gradient of the bias is the sum of the result's over all other dims."""
    if split is None or split.result is None:
        return Replicate()
    return Partial() if split.bias is None else Shard(split.bias)

