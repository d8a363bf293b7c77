"""Nearest upsampling of DTensors whose rows are on several ranks: aten's operators, below autograd.

Each row of the result is one row of the input, and the rows that read it follow each other: a rank gets
the rows that its own read, and for the gradient those that read its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from transconv.distributed import halo
from transconv.distributed.halo import Exchange, RowRange, exchange, shards
from transconv.distributed.placements import dealt, part
from transconv.torch_ops.shapes import result_strides, suggests_channels_last

Tensor = torch.Tensor
_aten = torch.ops.aten


@lru_cache(maxsize=1 << 10)
def source_rows(exact: bool, size: int, result: int, scale: float | None) -> tuple[int, ...]:
    """The row of the input that each row of the result is, by torch's own rounding."""
    rows = torch.arange(size, dtype=torch.float64).view(1, 1, -1)
    operator = _aten._upsample_nearest_exact1d if exact else _aten.upsample_nearest1d
    return tuple(int(row) for row in operator.default(rows, [result], scale).flatten().tolist())


def _readers(rows: Sequence[int], some: RowRange) -> RowRange:
    """The rows of the result that are one of these rows."""
    found = [at for at, row in enumerate(rows) if some.start <= row < some.stop]
    return RowRange(found[0], found[-1] + 1) if found else RowRange(0, 0)


def _read(rows: Sequence[int], some: RowRange) -> RowRange:
    """The rows of the input that these rows of the result are."""
    return RowRange(rows[some.start], rows[some.stop - 1] + 1) if some.size else RowRange(0, 0)


@lru_cache(maxsize=1 << 10)
def planned(rows: tuple[int, ...], size: int, parts: int, rank: int, back: bool) -> Exchange:
    """The exchange of one of ``parts`` ranks: of rows of the input or, ``back``, of the gradient."""
    inputs, results = shards(size, parts), shards(len(rows), parts)
    if back:
        return exchange(results, [_readers(rows, own) for own in inputs], rank)
    return exchange(inputs, [_read(rows, own) for own in results], rank)


@lru_cache(maxsize=1 << 8)
def _index(rows: tuple[int, ...], read: RowRange, own: RowRange, device: torch.device) -> Tensor:
    """The row, counted from the first that is read, of each of a rank's rows of the result. Kept: a copy
    from the host waits for the device, and cannot be recorded in a CUDA graph."""
    return torch.tensor([row - read.start for row in rows[own.start:own.stop]], dtype=torch.long,
                        device=device)


def _places(x: DTensor) -> tuple[Placement, ...]:
    return tuple(p if isinstance(p, Shard) else Replicate() for p in x.placements)


class _UpsampleCall:
    """One call: what each row of the result is, along each spatial axis."""

    def __init__(self, exact: bool, size: Sequence[int], result: Sequence[int],
                 scales: Sequence[float | None]) -> None:
        self.size, self.result = tuple(size), tuple(result)
        every = (*scales, *[None] * len(self.size))  # those at the end may be left out
        self.rows = [source_rows(exact, *line) for line in zip(size, result, every, strict=False)]

    def moved(
        self, x: DTensor, back: bool
    ) -> tuple[Tensor, list[tuple[RowRange, RowRange]], list[Placement]]:
        """The local rows of the input or, ``back``, of the gradient that this rank's rows need; along each
        axis, the rows of the input and those of the result that it has then; and the placements."""
        mesh, places = x.device_mesh, list(_places(x))
        last = suggests_channels_last(x.shape, x.stride())
        local = part(x, places)
        have = [(RowRange(0, i), RowRange(0, o)) for i, o in zip(self.size, self.result, strict=True)]
        for at, place in enumerate(places):
            if isinstance(place, Shard) and place.dim > 1:
                axis, parts, rank = place.dim - 2, mesh.size(at), mesh.get_local_rank(at)
                plan = planned(self.rows[axis], self.size[axis], parts, rank, back)
                local = halo.extended(local, place.dim, plan, mesh.get_group(at), last)
                own = shards((self.size if back else self.result)[axis], parts)[rank]
                have[axis] = (own, plan.needed) if back else (plan.needed, own)
        return local, have, places


def _forward(exact: bool, x: DTensor, result: Sequence[int], *scales: float | None) -> DTensor:
    call = _UpsampleCall(exact, x.shape[2:], result, scales)
    local, have, places = call.moved(x, False)
    for axis, (read, own) in enumerate(have):
        local = local.index_select(2 + axis, _index(call.rows[axis], read, own, local.device))
    last = suggests_channels_last(x.shape, x.stride())
    shape = torch.Size((*x.shape[:2], *result))
    return dealt(local, x.device_mesh, places, shape, result_strides(shape, last))


def _forward_of(exact: bool, x: DTensor, result: Sequence[int] | None,
                scales: Sequence[float] | None) -> DTensor:
    """The overload that is given sizes or scales, which inference mode leaves whole."""
    if result is None:
        assert scales is not None
        result = [int(i * scale) for i, scale in zip(x.shape[2:], scales, strict=True)]
    return _forward(exact, x, result, *(scales or ()))


def _backward(exact: bool, grad: DTensor, result: Sequence[int], size: Sequence[int],
              *scales: float | None) -> DTensor:
    call = _UpsampleCall(exact, size[2:], result, scales)
    local, have, places = call.moved(grad, True)
    for axis, (own, readers) in enumerate(have):
        counts = [0] * own.size
        for row in call.rows[axis][readers.start:readers.stop]:
            counts[row - own.start] += 1
        local = _summed(local, 2 + axis, counts)
    last = suggests_channels_last(grad.shape, grad.stride())
    shape = torch.Size(size)
    return dealt(local, grad.device_mesh, places, shape, result_strides(shape, last))


def _summed(grad: Tensor, dim: int, counts: Sequence[int]) -> Tensor:
    """Sums of so many rows each, in their order: the same bits in every run."""
    if counts and counts[0] > 0 and len(set(counts)) == 1:
        shape = (*grad.shape[:dim], len(counts), counts[0], *grad.shape[dim + 1:])
        return grad.reshape(shape).sum(dim + 1)
    parts = [part.sum(dim, keepdim=True) for part in torch.split(grad, list(counts), dim)]
    return torch.cat(parts, dim) if parts else grad.narrow(dim, 0, 0)


def _rule(function: Callable[..., DTensor], exact: bool) -> Callable[..., DTensor]:
    @torch.no_grad()
    def run(*call: Any, **named: Any) -> DTensor:
        return function(exact, *call, *named.values())
    return run


RULES = {f"aten::{name}{n}d{back}": _rule(function, exact)
         for name, exact in (("upsample_nearest", False), ("_upsample_nearest_exact", True))
         for back, function in (("", _forward), (".vec", _forward_of), ("_backward", _backward))
         for n in (1, 2, 3)}
"""What computes aten's operators on DTensors."""
