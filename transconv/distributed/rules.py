"""DTensor rules: of convolutions, for transconv's operators and for aten's; and of group norms, constant
padding and nearest upsampling of aten, below autograd, for images whose rows are on several ranks.

transconv's own are served from the import of this room on. aten's are while `transconv.enable` or a scope
of `transconv.use` replaces its kernels on any device, in all threads, and from the first `parallelize` on:
torch's rule for sharded images is wrong.

DTensor's own rule for a group norm gathers the rows, and it has none for the gradient; here moments are
sums of each rank's sums. A padded image is dealt anew: a rank gets those rows of the image that its rows
are, the others are border; the gradient is the same with borders of negative widths. Each row of an
upsampled image is one row of the input, and the rows that read it follow each other: a rank gets the rows
that its own read, and for the gradient those that read its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from transconv.calls.stats import refuse_invariant
from transconv.compute import AxisSpan
from transconv.distributed import halo, sharded_convolution
from transconv.distributed.halo import Exchange, exchange, shards
from transconv.distributed.placements import dealt, part
from transconv.functional import norms
from transconv.runtime import torch_internals
from transconv.support import Unsupported
from transconv.torch_ops import operators, tensor_subclasses
from transconv.torch_ops.arguments import result_strides, suggests_channels_last
from transconv.torch_ops.conversion import aten_convolutions

Tensor = torch.Tensor


def _places_of_norm(x: DTensor) -> tuple[Placement, ...]:
    """Where the input is normalised: along channels, and of parts of a sum, it must be whole."""
    return tuple(p if isinstance(p, Shard) and p.dim != 1 else Replicate() for p in x.placements)


def _whole(t: Any, mesh: Any) -> Tensor | None:
    return None if t is None else part(t, [Replicate()] * mesh.ndim)


def _summed_over_ranks(total: Tensor, mesh: Any, places: Sequence[Placement]) -> Tensor:
    """A sum over rows, from the sums over the rows of each rank."""
    for at, place in enumerate(places):
        if isinstance(place, Shard) and place.dim > 1:
            refuse_invariant("ranks", "moments of rows on several ranks are added up rank by rank")
            dist.all_reduce(total, group=mesh.get_group(at))
    return total


def _by_image(places: Sequence[Placement], otherwise: Placement) -> list[Placement]:
    """How a tensor lies that has the dim of images, but not those of rows."""
    return [p if isinstance(p, Shard) and p.dim == 0 else otherwise for p in places]


@torch.no_grad()
def group_norm(
    x: DTensor,
    weight: DTensor | None,
    bias: DTensor | None,
    _n: int,
    c: int,
    rows: int,
    groups: int,
    eps: float,
) -> tuple[DTensor, DTensor, DTensor]:
    """aten.native_group_norm: the result, and the mean and 1 / standard deviation of each group."""
    mesh, places = x.device_mesh, _places_of_norm(x)
    local = _with_rows(part(x, places))
    held, count, size = _held(local), rows * c // groups, local.shape[2:].numel()
    if local.numel():
        means, squares = norms.moments(local)
    else:  # a rank without rows
        means, squares = local.new_zeros(2, *local.shape[:2], dtype=held)
    mean = _summed_over_ranks(_grouped(means * size, groups).sum(2), mesh, places) / count
    apart = _grouped(squares, groups) + size * (_grouped(means, groups) - mean[:, :, None]).square()
    variance = _summed_over_ranks(apart.sum(2), mesh, places) / count
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
def group_norm_backward(
    grad: DTensor,
    x: DTensor,
    mean: DTensor,
    rstd: DTensor,
    weight: DTensor | None,
    _n: int,
    c: int,
    rows: int,
    groups: int,
    mask: Sequence[bool],
) -> tuple[DTensor | None, DTensor | None, DTensor | None]:
    """aten.native_group_norm_backward: gradients of the input, the weight and the bias; None where
    ``mask`` is False."""
    mesh, places = x.device_mesh, _places_of_norm(x)
    g, local = (_with_rows(part(t, places)) for t in (grad, x))
    held = _held(local)
    images = _by_image(places, Replicate())
    m, r = (part(t, images).repeat_interleave(c // groups, 1) for t in (mean, rstd))
    w = _whole(weight, mesh)
    both = (
        torch.stack(norms.sums(g, local))
        if local.numel()
        else local.new_zeros(2, *local.shape[:2], dtype=held)
    )
    with_x, alone = _summed_over_ranks(both, mesh, places)
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
        dx = norms.mixed(g, local, scaled, factor, rest) if local.numel() else torch.empty_like(local)
        found = [_like(dx, x, places)]
    if any(mask[1:]):
        refuse_invariant("ranks", "gradients of a norm's weight and bias are added up rank by rank")
    for wanted, of_image in ((mask[1], (with_x - alone * m) * r), (mask[2], alone)):
        total = of_image.sum(0).to(x.dtype if weight is None else weight.dtype)
        found.append(
            dealt(
                total,
                mesh,
                [Partial() if p.is_shard() else p for p in images],
                total.shape,
                total.stride(),
            )
            if wanted
            else None
        )
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


# -- constant padding ------------------------------------------------------------------------------


@torch.no_grad()
def padded(x: DTensor, pad: Sequence[int], value: Any = 0) -> DTensor:
    """aten.constant_pad_nd."""
    mesh, rank = x.device_mesh, x.dim()
    widths = [(0, 0)] * (rank - len(pad) // 2) + [
        (pad[at], pad[at + 1]) for at in range(len(pad) - 2, -1, -2)
    ]
    shape = [n + low + high for n, (low, high) in zip(x.shape, widths, strict=True)]
    if min(shape) < 0:
        raise RuntimeError(f"a border of {list(pad)} leaves no image of {list(x.shape)}")
    places = [
        p if isinstance(p, Shard) and (p.dim > 1 or not any(widths[p.dim])) else Replicate()
        for p in x.placements
    ]
    local = part(x, places)
    last = suggests_channels_last(x.shape, x.stride())
    for at, place in enumerate(places):
        if isinstance(place, Shard) and any(widths[place.dim]):
            dim, parts, own = place.dim, mesh.size(at), mesh.get_local_rank(at)
            low, every = widths[dim][0], AxisSpan(0, x.shape[dim])
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


_aten = torch.ops.aten


@lru_cache(maxsize=1 << 10)
def source_rows(exact: bool, size: int, result: int, scale: float | None) -> tuple[int, ...]:
    """The row of the input that each row of the result is, by torch's own rounding."""
    rows = torch.arange(size, dtype=torch.float64).view(1, 1, -1)
    operator = _aten._upsample_nearest_exact1d if exact else _aten.upsample_nearest1d
    return tuple(int(row) for row in operator.default(rows, [result], scale).flatten().tolist())


def _readers(rows: Sequence[int], some: AxisSpan) -> AxisSpan:
    """The rows of the result that are one of these rows."""
    found = [at for at, row in enumerate(rows) if some.start <= row < some.stop]
    return AxisSpan(found[0], found[-1] + 1) if found else AxisSpan(0, 0)


def _read(rows: Sequence[int], some: AxisSpan) -> AxisSpan:
    """The rows of the input that these rows of the result are."""
    return AxisSpan(rows[some.start], rows[some.stop - 1] + 1) if some.size else AxisSpan(0, 0)


@lru_cache(maxsize=1 << 10)
def planned_rows(rows: tuple[int, ...], size: int, parts: int, rank: int, back: bool) -> Exchange:
    """The exchange of one of ``parts`` ranks: of rows of the input or, ``back``, of the gradient."""
    inputs, results = shards(size, parts), shards(len(rows), parts)
    if back:
        return exchange(results, [_readers(rows, own) for own in inputs], rank)
    return exchange(inputs, [_read(rows, own) for own in results], rank)


@lru_cache(maxsize=1 << 8)
def _index(rows: tuple[int, ...], read: AxisSpan, own: AxisSpan, device: torch.device) -> Tensor:
    """The row, counted from the first that is read, of each of a rank's rows of the result. Kept: a copy
    from the host waits for the device, and cannot be recorded in a CUDA graph."""
    return torch.tensor(
        [row - read.start for row in rows[own.start : own.stop]], dtype=torch.long, device=device
    )


def _places(x: DTensor) -> tuple[Placement, ...]:
    return tuple(p if isinstance(p, Shard) else Replicate() for p in x.placements)


class _UpsampleCall:
    """One call: what each row of the result is, along each spatial axis."""

    def __init__(
        self, exact: bool, size: Sequence[int], result: Sequence[int], scales: Sequence[float | None]
    ) -> None:
        self.size, self.result = tuple(size), tuple(result)
        every = (*scales, *[None] * len(self.size))  # those at the end may be left out
        self.rows = [source_rows(exact, *line) for line in zip(size, result, every, strict=False)]

    def moved(
        self, x: DTensor, back: bool
    ) -> tuple[Tensor, list[tuple[AxisSpan, AxisSpan]], list[Placement]]:
        """The local rows of the input or, ``back``, of the gradient that this rank's rows need; along each
        axis, the rows of the input and those of the result that it has then; and the placements."""
        mesh, places = x.device_mesh, list(_places(x))
        last = suggests_channels_last(x.shape, x.stride())
        local = part(x, places)
        have = [(AxisSpan(0, i), AxisSpan(0, o)) for i, o in zip(self.size, self.result, strict=True)]
        for at, place in enumerate(places):
            if isinstance(place, Shard) and place.dim > 1:
                axis, parts, rank = place.dim - 2, mesh.size(at), mesh.get_local_rank(at)
                plan = planned_rows(self.rows[axis], self.size[axis], parts, rank, back)
                local = halo.extended(local, place.dim, plan, mesh.get_group(at), last)
                own = shards((self.size if back else self.result)[axis], parts)[rank]
                have[axis] = (own, plan.needed) if back else (plan.needed, own)
        return local, have, places


def _upsampled(exact: bool, x: DTensor, result: Sequence[int], *scales: float | None) -> DTensor:
    call = _UpsampleCall(exact, x.shape[2:], result, scales)
    local, have, places = call.moved(x, False)
    for axis, (read, own) in enumerate(have):
        local = local.index_select(2 + axis, _index(call.rows[axis], read, own, local.device))
    last = suggests_channels_last(x.shape, x.stride())
    shape = torch.Size((*x.shape[:2], *result))
    return dealt(local, x.device_mesh, places, shape, result_strides(shape, last))


def _upsampled_by_scales(
    exact: bool, x: DTensor, result: Sequence[int] | None, scales: Sequence[float] | None
) -> DTensor:
    """The overload that is given sizes or scales, which inference mode leaves whole."""
    if result is None:
        assert scales is not None
        result = [int(i * scale) for i, scale in zip(x.shape[2:], scales, strict=True)]
    return _upsampled(exact, x, result, *(scales or ()))


def _upsampled_gradient(
    exact: bool, grad: DTensor, result: Sequence[int], size: Sequence[int], *scales: float | None
) -> DTensor:
    call = _UpsampleCall(exact, size[2:], result, scales)
    local, have, places = call.moved(grad, True)
    for axis, (own, readers) in enumerate(have):
        counts = [0] * own.size
        for row in call.rows[axis][readers.start : readers.stop]:
            counts[row - own.start] += 1
        local = _sums_of_rows(local, 2 + axis, counts)
    last = suggests_channels_last(grad.shape, grad.stride())
    shape = torch.Size(size)
    return dealt(local, grad.device_mesh, places, shape, result_strides(shape, last))


def _sums_of_rows(grad: Tensor, dim: int, counts: Sequence[int]) -> Tensor:
    """Sums of so many rows each, in their order: the same bits in every run."""
    if counts and counts[0] > 0 and len(set(counts)) == 1:
        shape = (*grad.shape[:dim], len(counts), counts[0], *grad.shape[dim + 1 :])
        return grad.reshape(shape).sum(dim + 1)
    parts = [part.sum(dim, keepdim=True) for part in torch.split(grad, list(counts), dim)]
    return torch.cat(parts, dim) if parts else grad.narrow(dim, 0, 0)


def _rule(function: Callable[..., DTensor], exact: bool) -> Callable[..., DTensor]:
    @torch.no_grad()
    def run(*call: Any, **named: Any) -> DTensor:
        return function(exact, *call, *named.values())

    return run


UPSAMPLING = {
    f"aten::{name}{n}d{back}": _rule(function, exact)
    for name, exact in (("upsample_nearest", False), ("_upsample_nearest_exact", True))
    for back, function in (
        ("", _upsampled),
        (".vec", _upsampled_by_scales),
        ("_backward", _upsampled_gradient),
    )
    for n in (1, 2, 3)
}
"""What computes aten's nearest upsampling on DTensors."""


_new_library: Any = torch.library.Library
_register: Any = torch.library.register_torch_dispatch
FakeTensor: Any = torch_internals.FakeTensor


def _check(*tensors: Any) -> None:
    """RuntimeError or Unsupported for tensors that no rule is for."""
    given = [t for t in tensors if t is not None]
    plain = [t for t in given if not isinstance(t, DTensor)]
    if plain:
        raise RuntimeError(
            f"a convolution got a plain tensor of size {list(plain[0].shape)} beside DTensors; distribute "
            "all of them over one mesh, with torch.distributed.tensor.distribute_tensor"
        )
    meshes = list(dict.fromkeys(t.device_mesh for t in given))
    if len(meshes) > 1:
        raise RuntimeError(
            f"a convolution got DTensors of {len(meshes)} meshes: {meshes[0]} and "
            f"{meshes[1]}; distribute all of them over one"
        )
    if meshes[0].get_coordinate() is None:
        raise RuntimeError(
            f"a convolution of DTensors was called by a rank that their mesh {meshes[0]} does not have"
        )
    if torch.compiler.is_compiling() or any(isinstance(t.to_local(), FakeTensor) for t in given):
        raise Unsupported(
            "distributed:compile",
            "sharded convolutions run eagerly; leave them out of "
            "torch.compile with torch.compiler.disable",
        )


@torch.no_grad()
def forward(input: Any, weight: Any, bias: Any, *numbers: Any) -> DTensor:
    """aten.convolution of DTensors."""
    _check(input, weight, bias)
    params = operators.resolve(input, weight, bias, numbers)
    return sharded_convolution.forward(input, weight, bias, params)


@torch.no_grad()
def backward(grad: Any, input: Any, weight: Any, *rest: Any) -> tuple[DTensor | None, ...]:
    """The gradients of input, weight and bias that the mask, the last of ``rest``, asks for."""
    *numbers, mask = rest
    _check(grad, input, weight)
    params = operators.resolve(input, weight, None, numbers)
    return sharded_convolution.backward(grad, input, weight, params, mask)


def _aten_backward(
    grad: Any, input: Any, weight: Any, _bias_sizes: Any, *rest: Any
) -> tuple[DTensor | None, ...]:
    return backward(grad, input, weight, *rest)


@torch.no_grad()
def _own_forward(input: Any, weight: Any, bias: Any, residual: Any, numbers: str) -> DTensor:
    params, activation, _ = operators.read(numbers)
    if residual is not None or activation:
        raise Unsupported(
            "distributed:fused",
            "DTensors have no fused convolution; call the convolution, then the activation",
        )
    return forward(input, weight, bias, *params)


def _add(name: str, function: Callable[..., Any], library: Any) -> None:
    """Let an operator on DTensors be computed by a function of its arguments."""

    def rule(_class: Any, _function: Any, _types: Any, args: Any, kwargs: Any) -> Any:
        return function(*args, **(kwargs or {}))

    _register(name, DTensor, rule, lib=library)


_ATEN: dict[str, Callable[..., Any]] = {
    "aten::convolution": forward,
    "aten::convolution_backward": _aten_backward,
}


class _Libraries:
    """What holds the rules for aten's operators: while they are replaced, and of models for good."""

    def __init__(self) -> None:
        self.replacing: Any = None
        self.of_models: Any = None


_libraries = _Libraries()


def replace(devices: frozenset[str]) -> None:
    """Serve aten's operators while any device is replaced, or a model is sharded, and give them back to
    torch after that."""
    wanted = bool(devices) or _libraries.of_models is not None
    if wanted and _libraries.replacing is None:
        library = _libraries.replacing = _new_library("aten", "FRAGMENT")
        for name, function in _ATEN.items():
            _add(name, function, library)
    elif _libraries.replacing is not None and not wanted:
        _libraries.replacing._destroy()
        _libraries.replacing = None


_OF_MODELS: dict[str, Callable[..., Any]] = {
    "aten::native_group_norm": group_norm,
    "aten::native_group_norm_backward": group_norm_backward,
    "aten::constant_pad_nd": padded,
    **UPSAMPLING,
}


def serve_models() -> None:
    """Serve convolutions, group norms, constant padding and nearest upsampling of DTensors from now on, in
    place of DTensor's rules."""
    if _libraries.of_models is None:
        _libraries.of_models = _new_library("aten", "FRAGMENT")
        for name, function in _OF_MODELS.items():
            _add(name, function, _libraries.of_models)
        replace(aten_convolutions.replacement.devices)


def _own_backward(grad: Any, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(grad.new_empty(0) if t is None else t for t in backward(grad, *rest))


# The first is called below autograd, the others where there is none, as in inference mode.
_OWN: dict[str, Callable[..., Any]] = {
    "transconv::fwd": _own_forward,
    "transconv::convolution": forward,
    "transconv::convolution_backward": _own_backward,
}
for _name, _rule in _OWN.items():
    _add(_name, _rule, operators.library)
tensor_subclasses.serve(DTensor, forward, backward, replace)
