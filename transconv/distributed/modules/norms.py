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

from transconv.distributed.placements import dealt, part
from transconv.functional import norms

Tensor = torch.Tensor


def _places(x: DTensor) -> tuple[Placement, ...]:
    """Where the input is normalised: along channels, and of parts of a sum, it must be whole."""
    return tuple(p if isinstance(p, Shard) and p.dim != 1 else Replicate() for p in x.placements)


def _whole(t: Any, mesh: Any) -> Tensor | None:
    return None if t is None else part(t, [Replicate()] * mesh.ndim)


def _summed(total: Tensor, mesh: Any, places: Sequence[Placement]) -> Tensor:
    """A sum over rows, from the sums over the rows of each rank."""
    for at, place in enumerate(places):
        if isinstance(place, Shard) and place.dim > 1:
            dist.all_reduce(total, group=mesh.get_group(at))
    return total


def _by_image(places: Sequence[Placement], otherwise: Placement) -> list[Placement]:
    """How a tensor lies that has the dim of images, but not those of rows."""
    return [p if isinstance(p, Shard) and p.dim == 0 else otherwise for p in places]


@torch.no_grad()
def forward(x: DTensor, weight: DTensor | None, bias: DTensor | None, _n: int, c: int, rows: int,
            groups: int, eps: float) -> tuple[DTensor, DTensor, DTensor]:
    """aten.native_group_norm: the result, and the mean and 1 / standard deviation of each group."""
    mesh, places = x.device_mesh, _places(x)
    local = _with_rows(part(x, places))
    held, count, size = _held(local), rows * c // groups, local.shape[2:].numel()
    if local.numel():
        means, squares = norms.moments(local)
    else:  # a rank without rows
        means, squares = local.new_zeros(2, *local.shape[:2], dtype=held)
    mean = _summed(_grouped(means * size, groups).sum(2), mesh, places) / count
    apart = _grouped(squares, groups) + size * (_grouped(means, groups) - mean[:, :, None]).square()
    variance = _summed(apart.sum(2), mesh, places) / count
    rstd = (variance + eps).rsqrt()
    w, b = _whole(weight, mesh), _whole(bias, mesh)
    scale = rstd.repeat_interleave(c // groups, 1) * (1 if w is None else w.to(held))
    shift = (0 if b is None else b.to(held)) - mean.repeat_interleave(c // groups, 1) * scale
    made = norms.scaled(local, scale, shift) if local.numel() else torch.empty_like(local)
    images = _by_image(places, Replicate())
    shape = torch.Size((x.shape[0], groups))
    kept = [dealt(t, mesh, images, shape, (groups, 1)) for t in (mean, rstd)]
    return _like(made, x, places), kept[0], kept[1]


@torch.no_grad()
def backward(grad: DTensor, x: DTensor, mean: DTensor, rstd: DTensor, weight: DTensor | None, _n: int,
             c: int, rows: int, groups: int,
             mask: Sequence[bool]) -> tuple[DTensor | None, DTensor | None, DTensor | None]:
    """aten.native_group_norm_backward: gradients of the input, the weight and the bias; None where
    ``mask`` is False."""
    mesh, places = x.device_mesh, _places(x)
    g, local = (_with_rows(part(t, places)) for t in (grad, x))
    held = _held(local)
    images = _by_image(places, Replicate())
    m, r = (part(t, images).repeat_interleave(c // groups, 1) for t in (mean, rstd))
    w = _whole(weight, mesh)
    both = (torch.stack(norms.sums(g, local)) if local.numel() else
            local.new_zeros(2, *local.shape[:2], dtype=held))
    with_x, alone = _summed(both, mesh, places)
    scaled = r if w is None else r * w.to(held)

    def per_group(t: Tensor) -> Tensor:
        weighted = t if w is None else t * w.to(held)
        found = _grouped(weighted, groups).sum(2) * groups / (rows * c)
        return found.repeat_interleave(c // groups, 1)

    # dx = w*r*g + factor*x + rest, where a group's sums of g and of g*x make factor and rest
    factor = (per_group(alone) * m - per_group(with_x)) * r.pow(3)
    rest = -factor * m - per_group(alone) * r
    found: list[DTensor | None] = [None]
    if mask[0]:
        dx = (
            norms.mixed(g, local, scaled, factor, rest) if local.numel() else torch.empty_like(local)
        )
        found = [_like(dx, x, places)]
    over_images = _by_image(places, Replicate())
    for wanted, of_image in ((mask[1], (with_x - alone * m) * r), (mask[2], alone)):
        total = of_image.sum(0).to(x.dtype if weight is None else weight.dtype)
        found.append(dealt(total, mesh, [Partial() if p.is_shard() else p for p in over_images],
                           total.shape, total.stride()) if wanted else None)
    return found[0], found[1], found[2]


def _held(x: Tensor) -> torch.dtype:
    """The type of moments."""
    return torch.float32 if x.element_size() < 4 else x.dtype


def _with_rows(local: Tensor) -> Tensor:
    """Images that are single numbers have one row."""
    return local if local.dim() > 2 else local.unsqueeze(2)


def _grouped(t: Tensor, groups: int) -> Tensor:
    """Numbers of channels by groups."""
    return t.reshape(t.shape[0], groups, t.shape[1] // groups)


def _like(local: Tensor, x: DTensor, places: Sequence[Placement]) -> DTensor:
    local = local if x.dim() > 2 else local.squeeze(2)
    return dealt(local, x.device_mesh, places, x.shape, x.stride())
