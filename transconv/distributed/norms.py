"""Group norms of DTensors whose rows are on several ranks: moments are sums of each rank's sums.

aten's operators, below autograd. DTensor's own rule for the forward gathers the rows, and it has none for
the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

Tensor = torch.Tensor


def _places(x: DTensor) -> tuple[Placement, ...]:
    """Where the input is normalised: along channels, and of parts of a sum, it must be whole."""
    return tuple(p if isinstance(p, Shard) and p.dim != 1 else Replicate() for p in x.placements)


def _local(t: DTensor, places: Sequence[Placement]) -> Tensor:
    return t.redistribute(t.device_mesh, places).to_local()


def _whole(t: Any, mesh: Any) -> Tensor | None:
    return None if t is None else _local(t, [Replicate()] * mesh.ndim)


def _summed(total: Tensor, mesh: Any, places: Sequence[Placement]) -> Tensor:
    """A sum over rows, from the sums over the rows of each rank."""
    for at, place in enumerate(places):
        if isinstance(place, Shard) and place.dim > 1:
            dist.all_reduce(total, group=mesh.get_group(at))
    return total


def _by_image(places: Sequence[Placement], otherwise: Placement) -> list[Placement]:
    """How a tensor lies that has the dim of images, but not those of rows."""
    return [p if isinstance(p, Shard) and p.dim == 0 else otherwise for p in places]


def _wide(x: Tensor) -> Tensor:
    """In the type of sums."""
    return x.float() if x.element_size() < 4 else x


def _spread(t: Tensor, like: Tensor) -> Tensor:
    """One number for each image and channel."""
    return t.reshape(*t.shape, *[1] * (like.dim() - 2))


@torch.no_grad()
def forward(x: DTensor, weight: DTensor | None, bias: DTensor | None, _n: int, c: int, rows: int,
            groups: int, eps: float) -> tuple[DTensor, DTensor, DTensor]:
    """aten.native_group_norm: the result, and the mean and 1 / standard deviation of each group."""
    mesh, places = x.device_mesh, _places(x)
    local = _wide(_local(x, places))
    count = rows * c // groups
    grouped = local.reshape(local.shape[0], groups, local.shape[1:].numel() // groups)
    mean = _summed(grouped.sum(2), mesh, places) / count
    variance = _summed((grouped - mean[:, :, None]).square().sum(2), mesh, places) / count
    rstd = (variance + eps).rsqrt()
    w, b = _whole(weight, mesh), _whole(bias, mesh)
    scale = rstd.repeat_interleave(c // groups, 1) * (1 if w is None else w)
    shift = (0 if b is None else b) - mean.repeat_interleave(c // groups, 1) * scale
    made = torch.addcmul(_spread(shift, local), local, _spread(scale, local)).to(x.dtype)
    images = _by_image(places, Replicate())
    shape = torch.Size((x.shape[0], groups))
    kept = [DTensor.from_local(t, mesh, images, shape=shape, stride=(groups, 1)) for t in (mean, rstd)]
    return _like(made, x, places), kept[0], kept[1]


@torch.no_grad()
def backward(grad: DTensor, x: DTensor, mean: DTensor, rstd: DTensor, weight: DTensor | None, _n: int,
             c: int, rows: int, groups: int,
             mask: Sequence[bool]) -> tuple[DTensor | None, DTensor | None, DTensor | None]:
    """aten.native_group_norm_backward: gradients of the input, the weight and the bias; None where
    ``mask`` is False."""
    mesh, places = x.device_mesh, _places(x)
    g, local = _wide(_local(grad, places)), _wide(_local(x, places))
    images = _by_image(places, Replicate())
    m, r = (_local(t, images).repeat_interleave(c // groups, 1) for t in (mean, rstd))
    w = _whole(weight, mesh)
    both = torch.stack([(g * local).flatten(2).sum(2), g.flatten(2).sum(2)])
    with_x, alone = _summed(both, mesh, places)
    scaled = r if w is None else r * w

    def per_group(t: Tensor) -> Tensor:
        weighted = t if w is None else t * w
        found = weighted.reshape(t.shape[0], groups, c // groups).sum(2) * groups / (rows * c)
        return found.repeat_interleave(c // groups, 1)

    # dx = w*r*g + factor*x + rest, where a group's sums of g and of g*x make factor and rest
    factor = (per_group(alone) * m - per_group(with_x)) * r.pow(3)
    rest = -factor * m - per_group(alone) * r
    dx = g * _spread(scaled, g) + local * _spread(factor, g) + _spread(rest, g) if mask[0] else None
    found: list[DTensor | None] = [None if dx is None else _like(dx.to(x.dtype), x, places)]
    over_images = _by_image(places, Replicate())
    for wanted, of_image in ((mask[1], (with_x - alone * m) * r), (mask[2], alone)):
        total = of_image.sum(0).to(x.dtype if weight is None else weight.dtype)
        found.append(DTensor.from_local(
            total, mesh, [Partial() if p.is_shard() else p for p in over_images]) if wanted else None)
    return found[0], found[1], found[2]


def _like(local: Tensor, x: DTensor, places: Sequence[Placement]) -> DTensor:
    return DTensor.from_local(local, x.device_mesh, places, shape=x.shape, stride=x.stride())
