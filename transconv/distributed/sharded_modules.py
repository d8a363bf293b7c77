"""The forwards of torch.nn's modules on sharded rows, as plain tensors: no rule of DTensor's is asked.

Elementwise modules, and those that a model's owner names, such as a norm of each pixel's channels, compute
each row of their result from the same rows of their inputs: a rank computes its own. A pool's windows are
those of a convolution: the same rows are exchanged, and their gradients go back. Batch and instance norms
are group norms of an image seen otherwise, whose moments are summed over ranks.

A convolution may have a circular, reflected or replicated border, of which a padded row is a row of the
image. A rank gets those that its rows of the result read, in their order, from the ranks that own them:
there are no other padded rows. It convolves them without a border."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from transconv.compute import AxisSpan
from transconv.conv import Prop
from transconv.distributed import halo
from transconv.distributed.halo import Exchange, HaloRows, SpatialAxis, planned, shards
from transconv.distributed.placements import dealt
from transconv.torch_ops import functional
from transconv.torch_ops.arguments import result_strides, suggests_channels_last

Tensor = torch.Tensor
_aten = torch.ops.aten


class Activation(NamedTuple):
    """An activation and its gradient, of the result's gradient and what is kept: the input or, with
    ``of_result``, the result, which the next layer keeps too."""

    made: Callable[[Any], Any]
    gradient: Callable[[Any, Any], Any]
    of_result: bool


def _activation(module: Any) -> Activation | None:
    """That of a module whose gradient is known here; of others autograd keeps what torch's need."""
    if type(module) is nn.LeakyReLU and module.negative_slope > 0:
        slope = module.negative_slope
        return Activation(
            lambda x: F.leaky_relu(x, slope),
            lambda grad, y: _aten.leaky_relu_backward(grad, y, slope, True),
            True,
        )
    if type(module) is nn.ReLU:
        return Activation(F.relu, lambda grad, y: _aten.threshold_backward(grad, y, 0), True)
    if type(module) is nn.SiLU:
        return Activation(F.silu, _aten.silu_backward, False)
    return None


class _Activated(torch.autograd.Function):
    """An activation of a rank's own part. One function between DTensors: a change to plain tensors and
    back again costs the host four."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, activation: Activation) -> DTensor:
        made = _like(x, activation.made(x.to_local()))
        ctx.activation = activation
        ctx.save_for_backward(made if activation.of_result else x)
        return made

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, None]:
        (kept,), (made, gradient, of_result) = ctx.saved_tensors, ctx.activation
        if torch.is_grad_enabled():  # it is differentiated again: by DTensor's rules
            found = (
                gradient(grad, kept)
                if of_result
                else torch.autograd.grad(made(kept), kept, grad, create_graph=True)[0]
            )
            return found, None
        return _like(kept, gradient(lying(grad, kept.placements).to_local(), kept.to_local())), None


def _like(x: DTensor, local: Tensor) -> DTensor:
    return dealt(local, x.device_mesh, x.placements, x.shape, x.stride())


def elementwise(module: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of a module of single elements, on any placements of its input. ``inner``: its own."""
    leaves, form = tree_flatten((args, kwargs))
    x = next((t for t in leaves if isinstance(t, DTensor)), None)
    if x is None:
        return inner(*args, **kwargs)
    x = lying(x, [p if isinstance(p, Shard) else Replicate() for p in x.placements])
    activation = _activation(module)
    if activation is not None:
        return _activated(x, activation)
    own = [x.to_local() if isinstance(t, DTensor) else t for t in leaves]
    args, kwargs = tree_unflatten(own, form)
    return _like(x, inner(*args, **kwargs))


_activated: Callable[..., DTensor] = _Activated.apply


def named(
    module: Any,
    name: str,
    inner: Callable[..., Any],
    dealt: Callable[[Any], Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The forward of a module that its model's owner says to compute row by row. ``inner``: its own;
    ``dealt`` lays arguments as the plan has them. ValueError if a result has other rows than the rank."""
    leaves, form = tree_flatten(dealt((args, kwargs)))
    x = next((t for t in leaves if isinstance(t, DTensor)), None)
    if x is None:
        return inner(*args, **kwargs)
    args, kwargs = tree_unflatten([t.to_local() if isinstance(t, DTensor) else t for t in leaves], form)
    own, module.forward = module.forward, inner
    try:
        made = functional_call(module, _parameters(module, x.placements), args, kwargs)
    finally:
        module.forward = own
    found, form = tree_flatten(made)
    return tree_unflatten([_whole(t, x, name) if isinstance(t, Tensor) else t for t in found], form)


def _parameters(module: nn.Module, places: Sequence[Placement]) -> dict[str, Any]:
    """Plain parameters and buffers; the gradients of the ranks are parts of sums."""
    parts = [Partial() if p.is_shard() else Replicate() for p in places]
    return {
        name: p.to_local(grad_placements=parts) if isinstance(p, DTensor) else p
        for name, p in (*module.named_parameters(), *module.named_buffers())
    }


def _whole(made: Tensor, x: DTensor, name: str) -> DTensor:
    """The tensor of which every rank has computed its rows."""
    local, shape = x.to_local(), list(made.shape)
    for place in x.placements:
        if isinstance(place, Shard):
            at = place.dim if place.dim < 2 else place.dim - x.dim()  # spatial axes are the last ones
            if made.dim() < x.dim() or made.shape[at] != local.shape[place.dim]:
                raise ValueError(
                    f"'{name}' was said to compute row by row, but makes {list(made.shape)} "
                    f"of a rank's {list(local.shape)}, of which dim {place.dim} is split"
                )
            shape[at] = x.shape[place.dim]
    whole, last = torch.Size(shape), suggests_channels_last(x.shape, x.stride())
    stride = x.stride() if whole == x.shape else result_strides(whole, last and len(whole) > 2)
    return dealt(made, x.device_mesh, x.placements, whole, stride)


def lying(x: DTensor, places: Sequence[Placement]) -> DTensor:
    """The tensor with these placements, redistributed if it has others."""
    return x if tuple(x.placements) == tuple(places) else x.redistribute(x.device_mesh, places)


class _Extended(torch.autograd.Function):
    """The autograd function of ``halo.extended``, whose gradient adds what every rank made of a row."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, *call: Any) -> Tensor:
        ctx.call, ctx.size = call, local.shape[call[0]]
        return halo.extended(local, *call)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _returned(grad, ctx.size, *ctx.call), None, None, None, None


class _ReturnedExtension(torch.autograd.Function):
    """The autograd function of ``halo.returned``: the gradient of ``_Extended``, which is its gradient."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, size: int, *call: Any) -> Tensor:
        ctx.call = call
        return halo.returned(grad, size, *call)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return exchanged(grad, *ctx.call), None, None, None, None, None


_returned: Callable[..., Tensor] = _ReturnedExtension.apply
exchanged: Callable[..., Tensor] = _Extended.apply
"""``halo.extended`` with a gradient."""


def pool(module: Any, x: DTensor) -> DTensor:
    """MaxPool and AvgPool of 1, 2 or 3 dims."""
    n = _ndims(module)
    if x.dim() == n + 1:
        one: Any = x.unsqueeze(0)
        return cast(DTensor, pool(module, one).squeeze(0))
    mesh = x.device_mesh
    kernel, stride, padding, dilation = (
        _spread(getattr(module, name, 1), n) for name in ("kernel_size", "stride", "padding", "dilation")
    )
    lines = [
        SpatialAxis(i, (i + 2 * p - (k - 1) * d - 1) // s + 1, k, s, d, p)
        for i, k, s, p, d in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    ]
    places = [p if isinstance(p, Shard) else Replicate() for p in x.placements]
    x = x.redistribute(mesh, places)
    local, last = x.to_local(), suggests_channels_last(x.shape, x.stride())
    src, dst = [AxisSpan(0, line.i) for line in lines], [AxisSpan(0, line.o) for line in lines]
    for at, place in enumerate(places):
        if isinstance(place, Shard) and place.dim > 1:
            line, parts, rank = lines[place.dim - 2], mesh.size(at), mesh.get_local_rank(at)
            plan: Exchange = planned(line, Prop.FWD, parts, rank)
            local = exchanged(local, place.dim, plan, mesh.get_group(at), last)
            src[place.dim - 2], dst[place.dim - 2] = plan.needed, shards(line.o, parts)[rank]
    maximum = isinstance(module, _MAXIMA)
    made = _pooled(local, lines, src, dst, maximum)
    shape = torch.Size((*x.shape[:2], *(line.o for line in lines)))
    return dealt(made, mesh, places, shape, result_strides(shape, last))


def _pooled(
    local: Tensor, lines: list[SpatialAxis], src: list[AxisSpan], dst: list[AxisSpan], maximum: bool
) -> Tensor:
    sizes = [rows.size for rows in dst]
    if not local.numel() or not all(sizes):
        # Windows that lie in the padding alone do not exist: torch's padding is at most half a kernel.
        return local.sum() * local.new_zeros(*local.shape[:2], *sizes)
    padded: list[int] = []
    for dim, (line, *rows) in enumerate(zip(lines, src, dst, strict=True), 2):
        window = line.window(*rows)
        local = local.narrow(dim, 0, local.shape[dim] - window.unread)
        padded = [window.low, window.high, *padded]
    local = F.pad(local, padded, value=-torch.inf if maximum else 0.0) if any(padded) else local
    kernel, stride = [line.k for line in lines], [line.stride for line in lines]
    if maximum:
        function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(lines) - 1]
        return function(local, kernel, stride, 0, [line.dilation for line in lines])
    average: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(lines) - 1]
    made: Tensor = average(local, kernel, stride)
    return made


def _spread(value: Any, n: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * n


def instance_norm(module: Any, x: DTensor) -> DTensor:
    """InstanceNorm without running statistics: each channel is a group."""
    seen = x.unsqueeze(0) if x.dim() == _ndims(module) + 1 else x
    with torch.autocast(x.device.type, enabled=False):  # which leaves the type to instance norms
        made: Any = F.group_norm(seen, seen.shape[1], module.weight, module.bias, module.eps)
    return cast(DTensor, made.squeeze(0) if seen is not x else made)


def batch_norm(module: Any, x: DTensor) -> DTensor:
    """BatchNorm: in training one image whose rows are all images; else a scale and a shift."""
    weight, bias = module.weight, module.bias
    running = module.running_mean is not None
    if not module.training and running:
        scale = (module.running_var + module.eps).rsqrt()
        scale = scale if weight is None else scale * weight
        shift = -module.running_mean * scale
        shift = shift if bias is None else shift + bias
        ones = [1] * (x.dim() - 2)
        return cast(DTensor, (x * scale.view(1, -1, *ones) + shift.view(1, -1, *ones)).to(x.dtype))
    channels = x.shape[1]
    count = x.numel() // channels
    if count < 2:
        raise ValueError(f"a batch norm needs more than one value for each channel, got {list(x.shape)}")
    seen = x.transpose(0, 1).unsqueeze(0)
    result, mean, rstd = torch.native_group_norm(
        seen, weight, bias, 1, channels, count, channels, module.eps
    )
    if running and module.training:
        with torch.no_grad():
            module.num_batches_tracked.add_(1)
            share = (
                1.0 / float(module.num_batches_tracked.item())
                if module.momentum is None
                else module.momentum
            )
            variance = (rstd[0].square().reciprocal() - module.eps) * (count / max(1, count - 1))
            module.running_mean.lerp_(mean[0].to(module.running_mean.dtype), share)
            module.running_var.lerp_(variance.to(module.running_var.dtype), share)
    return cast(DTensor, result.squeeze(0).transpose(0, 1))


_MAXIMA = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_AVERAGES = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def _ndims(module: Any) -> int:
    """The spatial axes of a module's images."""
    for kinds in (_MAXIMA, _AVERAGES, _BATCH, _INSTANCE):
        for n, kind in enumerate(kinds, 1):
            if isinstance(module, kind):
                return n
    raise TypeError(f"a {type(module).__name__} has no forward on sharded rows")


def forward_of(module: Any) -> Callable[..., DTensor] | None:
    """The forward of a module on sharded rows; None if there is none."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return convolution if module.padding_mode != "zeros" else None
    if isinstance(module, (*_MAXIMA, *_AVERAGES)):
        return None if module.ceil_mode or not _is_plain(module) else pool
    if isinstance(module, _BATCH):
        return batch_norm
    if isinstance(module, _INSTANCE) and not module.track_running_stats:
        return instance_norm
    return None


def _is_plain(module: Any) -> bool:
    """Whether a pool gives its windows' maxima, or sums divided by the size of the kernel, and torch's
    pools accept its padding."""
    n = _ndims(module)
    padding = _spread(module.padding, n)
    if any(2 * p > k for p, k in zip(padding, _spread(module.kernel_size, n), strict=True)):
        return False
    if isinstance(module, _MAXIMA):
        return not module.return_indices
    divides = getattr(module, "divisor_override", None) is None
    return divides and (module.count_include_pad or not any(padding))


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

    def needs(self, rows: AxisSpan) -> list[int]:
        """The rows of the image that these rows of the result read, in the order of their positions."""
        if not rows.size:
            return []
        last = (rows.stop - 1) * self.stride + (self.k - 1) * self.dilation
        return [self.row(at) for at in range(rows.start * self.stride, last + 1)]


@lru_cache(maxsize=1 << 10)
def border_exchange(line: Border, parts: int, rank: int) -> Exchange:
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
    return Exchange(owned[rank], AxisSpan(0, sum(p.rows.size for p in mine)), tuple(sends), tuple(mine))


def _pieces(rows: list[int], owned: tuple[AxisSpan, ...]) -> list[HaloRows]:
    """Rows as runs that ascend and belong to one rank."""
    found: list[HaloRows] = []
    for row in rows:
        owner = next(r for r, has in enumerate(owned) if has.start <= row < has.stop)
        if found and found[-1].rank == owner and found[-1].rows.stop == row:
            found[-1] = HaloRows(owner, AxisSpan(found[-1].rows.start, row + 1))
        else:
            found.append(HaloRows(owner, AxisSpan(row, row + 1)))
    return found


def convolution(module: Any, x: DTensor) -> DTensor:
    """The forward of a convolution module with such a border, on images whose batch or rows are sharded.
    RuntimeError if the border is wider than the image."""
    n = len(module.kernel_size)
    if x.dim() == n + 1:
        one: Any = x.unsqueeze(0)
        return cast(DTensor, convolution(module, one).squeeze(0))
    mesh, lines = x.device_mesh, _borders(module, x)
    places = [p if isinstance(p, Shard) and p.dim != 1 else Replicate() for p in x.placements]
    last = suggests_channels_last(x.shape, x.stride())
    x = x.redistribute(mesh, places)
    local, whole = x.to_local(), list(module._reversed_padding_repeated_twice)
    sizes = [line.o for line in lines]
    for at, place in enumerate(places):
        if isinstance(place, Shard) and place.dim > 1:
            axis, parts, rank = place.dim - 2, mesh.size(at), mesh.get_local_rank(at)
            plan = border_exchange(lines[axis], parts, rank)
            local = exchanged(local, place.dim, plan, mesh.get_group(at), last)
            sizes[axis] = shards(lines[axis].o, parts)[rank].size
            whole[2 * (n - 1 - axis) : 2 * (n - axis)] = [0, 0]
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


def _borders(module: Any, x: DTensor) -> list[Border]:
    """The borders along the spatial axes, from the module's numbers."""
    n, mode = len(module.kernel_size), module.padding_mode
    most = {"circular": 0, "reflect": -1}.get(mode)
    found = []
    for axis, (i, k, s, d) in enumerate(
        zip(x.shape[2:], module.kernel_size, module.stride, module.dilation, strict=True)
    ):
        low, high = module._reversed_padding_repeated_twice[2 * (n - 1 - axis) : 2 * (n - axis)]
        if most is not None and max(low, high) > i + most:
            raise RuntimeError(f"a {mode} border of {max(low, high)} rows is wider than an image of {i}")
        o = (i + low + high - (k - 1) * d - 1) // s + 1
        if o < 1:
            raise RuntimeError(
                f"a kernel of {(k - 1) * d + 1} rows is larger than the padded image of {i + low + high}"
            )
        found.append(Border(i, o, k, s, d, low, mode))
    return found
