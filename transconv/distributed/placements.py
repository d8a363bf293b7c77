"""Placements: the axis along which each mesh dim splits a convolution, and the operands brought there.

Ranks that split an axis each compute a part of it. A tensor whose view has the axis is sharded along that
dim, any other operand is whole on every rank, and a result without the axis is a sum over the ranks. Which
axes may be split follows from the views of the convolution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from transconv.conv import ConvProblem, Prop, computes
from transconv.distributed.halo import shards
from transconv.ir import View, free_vars
from transconv.runtime import Cache


@dataclass(frozen=True, slots=True)
class Split:
    """One axis: the dim of input, weight, bias and result that it splits, None where it is not in the
    tensor. ``groups``: the axis of groups; ``spatial``: the number of the spatial axis, of which ranks
    need rows of each other."""

    name: str
    input: int | None
    weight: int | None
    bias: int | None
    result: int | None
    groups: bool = False
    spatial: int | None = None


@cache
def splits(ndims: int, transposed: bool, grouped: bool) -> tuple[Split, ...]:
    """The axes that may be split. A dim is split along the outermost axis of its coordinate; an axis that
    is an inner one of any dim (a tap, a channel within a group) cannot be split."""
    problem = ConvProblem.make(2, 4, 4, (4,) * ndims, 2, g=2 if grouped else 1)
    (compute,) = computes(problem, Prop.FWD)
    assert compute.b is not None
    names = [x.name for x in compute.axes]
    views = {v.tensor.name: v for v in (compute.a, compute.b, compute.c)}
    if transposed:
        views["src"], views["dst"] = views["dst"], views["src"]
    found = []
    for name in names:
        dims = [_split_dim(views[tensor], name, names) for tensor in ("src", "wei", "dst")]
        if -1 in dims:
            continue
        source, weight, result = dims
        spatial = result - 2 if source is not None and result is not None and result >= 2 else None
        found.append(
            Split(
                name,
                source,
                weight,
                0 if result == 1 else None,
                result,
                weight is not None and source == result == 1,
                spatial,
            )
        )
    return tuple(found)


def _split_dim(view: View, name: str, order: list[str]) -> int | None:
    """The dim whose coordinate has the axis as its outermost; None without it, -1 if it is an inner
    one."""
    for number, dim in enumerate(view.dims):
        mentioned = sorted((v.name for v in free_vars(dim.coord)), key=order.index)
        if name in mentioned:
            return number if mentioned[0] == name else -1
    return None


Tensor = torch.Tensor
# A row of the choice: the axis that a mesh dim splits; None where every rank computes the same.
Choice = tuple[Split | None, ...]


@dataclass(frozen=True)
class WholeShapes:
    """Shapes of the whole tensors, by the names of ``Split``, and the number of groups."""

    shapes: Mapping[str, tuple[int, ...]]
    groups: int

    def fits(self, split: Split, parts: int, used: Sequence[Split | None]) -> bool:
        """Whether a mesh dim of so many ranks can split the axis after others split those of ``used``."""
        if split.spatial is not None:
            return split not in used  # rows are exchanged along one mesh dim
        if not split.groups:
            return True
        if split in used:
            return False
        per = [self.shapes[name][1] // self.groups for name in ("input", "result")]
        cuts = [
            [rows.start / n for rows in shards(self.shapes[name][1], parts)]
            for name, n in zip(("input", "result"), per, strict=True)
        ]
        return cuts[0] == cuts[1] and all(cut == int(cut) for cut in cuts[0])


def wanted(split: Split | None, name: str) -> Placement:
    """How an operand lies along a mesh dim that splits an axis."""
    dim = None if split is None else getattr(split, name)
    return Replicate() if dim is None else Shard(dim)


def produced(split: Split | None, name: str) -> Placement:
    """How a sum of products lies then: the ranks of an axis that it lacks have parts of the sum."""
    dim = None if split is None else getattr(split, name)
    return Shard(dim) if dim is not None else Replicate() if split is None else Partial()


def choose(
    mesh: Any, operands: Mapping[str, DTensor], rows: Sequence[Split], sizes: WholeShapes
) -> Choice:
    """For each mesh dim the axis for which the fewest bytes move; where several move as few, every rank
    computes the same, then the first axis."""
    made: list[Split | None] = []
    for at in range(mesh.ndim):
        parts = mesh.size(at)
        legal = [None, *(row for row in rows if sizes.fits(row, parts, made))]
        made.append(
            min(
                legal,
                key=lambda row: sum(
                    _moved(t.placements[at], wanted(row, name), parts) * t.numel() * t.element_size()
                    for name, t in operands.items()
                ),
            )
        )
    return tuple(made)


def _moved(has: Placement, wants: Placement, parts: int) -> float:
    """The share of a tensor that each rank receives when its placement changes."""
    others = (parts - 1) / parts
    if has == wants or has.is_replicate():
        return 0.0
    if has.is_partial():
        return 2 * others if wants.is_replicate() else others
    return others if wants.is_replicate() else others / parts


def brought(tensor: DTensor, name: str, choice: Choice) -> Tensor:
    """The part of an operand on this rank, redistributed if it lies otherwise."""
    return part(tensor, tuple(wanted(split, name) for split in choice))


def part(tensor: DTensor, places: Sequence[Placement]) -> Tensor:
    """What this rank has of a tensor that lies so, redistributed if it does not; gradients are off."""
    if tuple(tensor.placements) != tuple(places):
        # Below autograd: torch 2.11 has no detach_ of DTensors, which a redistributed leaf would need.
        detached: Any = tensor.detach()
        tensor = detached.redistribute(tensor.device_mesh, places)
    local: Any = tensor.to_local()
    ready: Tensor = local.wait() if hasattr(local, "wait") else local  # it may still be on its way
    return ready


_specs: Cache[Any, Any] = Cache("specs of DTensors", 1 << 12)  # by what they are made of


def dealt(
    local: Tensor, mesh: Any, places: Sequence[Placement], shape: Sequence[int], stride: Sequence[int]
) -> DTensor:
    """The tensor of which every rank has its part. Below autograd, where ``DTensor.from_local``, which
    checks and differentiates, costs the host more than a launch: what is made again takes what that call
    made before, as FSDP makes its DTensors."""
    if torch.is_grad_enabled():
        return DTensor.from_local(local, mesh, places, shape=torch.Size(shape), stride=tuple(stride))
    key = mesh, tuple(places), tuple(shape), tuple(stride), local.dtype
    spec = _specs.get(key)
    if spec is not None and spec.mesh is mesh:  # an equal one may have groups that are no more
        made: Callable[..., DTensor] = DTensor
        return made(local, copy(spec), requires_grad=False)
    first = DTensor.from_local(local, mesh, places, shape=torch.Size(shape), stride=tuple(stride))
    _specs.pop(key, None)  # of an equal mesh
    _specs.keep(key, copy(first._spec))
    return first


def local_shape(mesh: Any, shape: Sequence[int], places: Sequence[Placement]) -> tuple[int, ...]:
    """The shape of this rank's part of a tensor."""
    found = list(shape)
    for at, place in enumerate(places):
        if isinstance(place, Shard):
            found[place.dim] = shards(found[place.dim], mesh.size(at))[mesh.get_local_rank(at)].size
    return tuple(found)
