"""Convolutions on sharded rows whose border is circular, reflected or replicated.

A padded row is a row of the image. A rank gets those that its rows of the result read, in their order,
from the ranks that own them: there are no other padded rows. It convolves them without a border.

Also here: constant padding of DTensors whose rows are on several ranks: aten's operator, below autograd.

A padded image is dealt anew: a rank gets those rows of the image that its rows are, the others are border.
The gradient is the same with borders of negative widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from transconv.distributed import halo
from transconv.distributed.halo import Exchange, HaloRows, RowRange, exchange, shards
from transconv.distributed.modules.rowwise import exchanged
from transconv.distributed.placements import dealt, part
from transconv.torch_ops import functional
from transconv.torch_ops.shapes import result_strides, suggests_channels_last

Tensor = torch.Tensor


class Border(NamedTuple):
    """The convolution along one axis: rows of the image and of the result, taps, stride, dilation, padded
    rows in front, and what they are (torch's word)."""

    i: int
    o: int
    k: int
    stride: int
    dilation: int
    low: int
    mode: str

    def row(self, at: int) -> int:
        """The row of the image at a padded position."""
        at -= self.low
        if self.mode == "circular":
            return at % self.i
        if self.mode == "reflect":
            return abs(at) if at < self.i else 2 * self.i - 2 - at
        return min(max(at, 0), self.i - 1)

    def needs(self, rows: RowRange) -> list[int]:
        """The rows of the image that these rows of the result read, in the order of their positions."""
        if not rows.size:
            return []
        last = (rows.stop - 1) * self.stride + (self.k - 1) * self.dilation
        return [self.row(at) for at in range(rows.start * self.stride, last + 1)]


@lru_cache(maxsize=1 << 10)
def planned(line: Border, parts: int, rank: int) -> Exchange:
    """The exchange of one of ``parts`` ranks; ``needed`` counts rows, of which some may occur twice."""
    owned = shards(line.i, parts)
    pieces = [_pieces(line.needs(rows), owned) for rows in shards(line.o, parts)]
    sends = [
        HaloRows(r, p.rows.seen_from(owned[rank].start))
        for r, wanted in enumerate(pieces)
        if r != rank
        for p in wanted
        if p.rank == rank
    ]
    mine = [HaloRows(-1, p.rows) if p.rank == rank else p for p in pieces[rank]]
    return Exchange(owned[rank], RowRange(0, sum(p.rows.size for p in mine)), tuple(sends), tuple(mine))


def _pieces(rows: list[int], owned: tuple[RowRange, ...]) -> list[HaloRows]:
    """Rows as runs that ascend and belong to one rank."""
    found: list[HaloRows] = []
    for row in rows:
        owner = next(r for r, has in enumerate(owned) if has.start <= row < has.stop)
        if found and found[-1].rank == owner and found[-1].rows.stop == row:
            found[-1] = HaloRows(owner, RowRange(found[-1].rows.start, row + 1))
        else:
            found.append(HaloRows(owner, RowRange(row, row + 1)))
    return found


def convolution(module: Any, x: DTensor) -> DTensor:
    """The forward of a convolution module with such a border, on images whose batch or rows are sharded.
    RuntimeError if the border is wider than the image."""
    n = len(module.kernel_size)
    if x.dim() == n + 1:
        one: Any = x.unsqueeze(0)
        return cast(DTensor, convolution(module, one).squeeze(0))
    mesh, lines = x.device_mesh, _lines(module, x)
    places = [p if isinstance(p, Shard) and p.dim != 1 else Replicate() for p in x.placements]
    last = suggests_channels_last(x.shape, x.stride())
    x = x.redistribute(mesh, places)
    local, whole = x.to_local(), list(module._reversed_padding_repeated_twice)
    sizes = [line.o for line in lines]
    for at, place in enumerate(places):
        if isinstance(place, Shard) and place.dim > 1:
            axis, parts, rank = place.dim - 2, mesh.size(at), mesh.get_local_rank(at)
            plan = planned(lines[axis], parts, rank)
            local = exchanged(local, place.dim, plan, mesh.get_group(at), last)
            sizes[axis] = shards(lines[axis].o, parts)[rank].size
            whole[2 * (n - 1 - axis):2 * (n - axis)] = [0, 0]
    of_parameters = [Partial() if p.is_shard() else Replicate() for p in places]
    weight: Tensor = module.weight.to_local(grad_placements=of_parameters)
    bias = None if module.bias is None else module.bias.to_local(grad_placements=of_parameters)
    if local.numel() and all(sizes):
        local = F.pad(local, whole, mode=module.padding_mode) if any(whole) else local
        function = (functional.conv1d, functional.conv2d, functional.conv3d)[n - 1]
        made: Tensor = function(local, weight, bias, module.stride, 0, module.dilation, module.groups)
    else:  # every rank has gradients, of zeros
        nothing = sum(t.sum() for t in (local, weight, bias) if t is not None)
        made = nothing * local.new_zeros(local.shape[0], module.out_channels, *sizes)
    shape = torch.Size((x.shape[0], module.out_channels, *(line.o for line in lines)))
    return dealt(made, mesh, places, shape, result_strides(shape, last))


def _lines(module: Any, x: DTensor) -> list[Border]:
    """The borders along the spatial axes, from the module's numbers."""
    n, mode = len(module.kernel_size), module.padding_mode
    most = {"circular": 0, "reflect": -1}.get(mode)
    found = []
    for axis, (i, k, s, d) in enumerate(zip(x.shape[2:], module.kernel_size, module.stride,
                                            module.dilation, strict=True)):
        low, high = module._reversed_padding_repeated_twice[2 * (n - 1 - axis):2 * (n - axis)]
        if most is not None and max(low, high) > i + most:
            raise RuntimeError(f"a {mode} border of {max(low, high)} rows is wider than an image of {i}")
        o = (i + low + high - (k - 1) * d - 1) // s + 1
        if o < 1:
            raise RuntimeError(f"a kernel of {(k - 1) * d + 1} rows is larger than the padded image of "
                               f"{i + low + high}")
        found.append(Border(i, o, k, s, d, low, mode))
    return found


def has_border(module: nn.Module) -> bool:
    """Whether a module is a convolution with a border of the image's own rows."""
    return isinstance(module, nn.modules.conv._ConvNd) and module.padding_mode != "zeros"


@torch.no_grad()
def constant(x: DTensor, pad: Sequence[int], value: Any = 0) -> DTensor:
    """aten.constant_pad_nd."""
    mesh, rank = x.device_mesh, x.dim()
    widths = [(0, 0)] * (rank - len(pad) // 2) + [
        (pad[at], pad[at + 1]) for at in range(len(pad) - 2, -1, -2)]
    shape = [n + low + high for n, (low, high) in zip(x.shape, widths, strict=True)]
    if min(shape) < 0:
        raise RuntimeError(f"a border of {list(pad)} leaves no image of {list(x.shape)}")
    places = [p if isinstance(p, Shard) and (p.dim > 1 or not any(widths[p.dim])) else Replicate()
              for p in x.placements]
    local = part(x, places)
    last = suggests_channels_last(x.shape, x.stride())
    for at, place in enumerate(places):
        if isinstance(place, Shard) and any(widths[place.dim]):
            dim, parts, own = place.dim, mesh.size(at), mesh.get_local_rank(at)
            low, every = widths[dim][0], RowRange(0, x.shape[dim])
            ours = shards(shape[dim], parts)
            needed = [rows.seen_from(low).within(every) for rows in ours]
            plan = exchange(shards(x.shape[dim], parts), needed, own)
            local = halo.extended(local, dim, plan, mesh.get_group(at), last)
            low = low + needed[own].start - ours[own].start if needed[own].size else 0
            widths[dim] = (low, ours[own].size - low - needed[own].size)
    spread = [width for both in reversed(widths) for width in both]
    made = F.pad(local, spread, value=float(value)) if any(spread) else local.clone()
    whole = torch.Size(shape)
    return dealt(made, mesh, places, whole, result_strides(whole, last))
