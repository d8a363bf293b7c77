"""Constant padding of DTensors whose rows are on several ranks: aten's operator, below autograd.

A padded image is dealt anew: a rank gets those rows of the image that its rows are, the others are border.
The gradient is the same with borders of negative widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from transconv.distributed import transfer
from transconv.distributed.halo import RowRange, exchange, shards
from transconv.distributed.placing import dealt, part
from transconv.torch_ops.shapes import result_strides, suggests_channels_last

Tensor = torch.Tensor


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
            local = transfer.extended(local, dim, plan, mesh.get_group(at), last)
            low = low + needed[own].start - ours[own].start if needed[own].size else 0
            widths[dim] = (low, ours[own].size - low - needed[own].size)
    spread = [width for both in reversed(widths) for width in both]
    made = F.pad(local, spread, value=float(value)) if any(spread) else local.clone()
    whole = torch.Size(shape)
    return dealt(made, mesh, places, whole, result_strides(whole, last))
