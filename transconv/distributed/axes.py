"""Along which axes of a convolution its tensors can be split over ranks, from its views.

Ranks that split an axis each compute a part of it. A tensor whose view has the axis is sharded along that
dim, any other operand is whole on every rank, and a result without the axis is a sum over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from transconv.conv import ConvProblem, Prop, computes
from transconv.ir import View, free_vars


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
        found.append(Split(name, source, weight, 0 if result == 1 else None, result,
                           weight is not None and source == result == 1, spatial))
    return tuple(found)


def _split_dim(view: View, name: str, order: list[str]) -> int | None:
    """The dim whose coordinate has the axis as its outermost; None without it, -1 if it is an inner
    one."""
    for number, dim in enumerate(view.dims):
        mentioned = sorted((v.name for v in free_vars(dim.coord)), key=order.index)
        if name in mentioned:
            return number if mentioned[0] == name else -1
    return None
