"""Moves rows of an image between the ranks of one mesh dim, as a plan says."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from transconv.distributed.halo import Exchange

Tensor = torch.Tensor

_batch: Any = dist.batch_isend_irecv
_send: Any = dist.isend
_receive: Any = dist.irecv


def extended(local: Tensor, dim: int, plan: Exchange, group: Any, channels_last: bool) -> Tensor:
    """The rows that this rank needs along ``dim``, from its own and those of the others of ``group``,
    whose ranks are numbered as in the plan. All ranks of the group call it with plans of one problem.
    ``channels_last``: how the whole tensor lies in memory. RuntimeError, which names the rank, if another
    one is gone or does not answer in time."""
    peers, requests, parts = [], [], []
    order = _order(local.dim(), channels_last)
    for peer, rows in plan.sends:
        sent = local.narrow(dim, rows.start, rows.size).permute(order).contiguous()
        requests.append(dist.P2POp(_send, sent, group=group, group_peer=peer))
        peers.append(f"send {rows.size} rows to")
    for peer, rows in plan.pieces:
        if peer < 0:
            parts.append(local.narrow(dim, rows.start - plan.owned.start, rows.size))
            continue
        shape = list(local.shape)
        shape[dim] = rows.size
        got = local.new_empty([shape[d] for d in order])
        requests.append(dist.P2POp(_receive, got, group=group, group_peer=peer))
        peers.append(f"receive {rows.size} rows from")
        parts.append(got.permute([order.index(d) for d in range(local.dim())]))
    _run(requests, peers)
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else local.narrow(dim, 0, 0)


def returned(grad: Tensor, size: int, dim: int, plan: Exchange, group: Any, channels_last: bool) -> Tensor:
    """The way back of ``extended``, for a gradient of what it gave: rows go to the ranks that own them,
    which add them in the order of ranks. ``size``: of the rank's own rows."""
    order = _order(grad.dim(), channels_last)
    shape = list(grad.shape)
    shape[dim] = size
    made, at = grad.new_zeros(shape), 0
    peers, requests, got = [], [], []
    for peer, rows in plan.pieces:
        part, at = grad.narrow(dim, at, rows.size), at + rows.size
        if peer < 0:
            made.narrow(dim, rows.start - plan.owned.start, rows.size).add_(part)
            continue
        requests.append(dist.P2POp(_send, part.permute(order).contiguous(), group=group, group_peer=peer))
        peers.append(f"send {rows.size} rows to")
    for peer, rows in plan.sends:
        shape[dim] = rows.size
        got.append(grad.new_empty([shape[d] for d in order]))
        requests.append(dist.P2POp(_receive, got[-1], group=group, group_peer=peer))
        peers.append(f"receive {rows.size} rows from")
    _run(requests, peers)
    back = [order.index(d) for d in range(grad.dim())]
    for (_, rows), part in zip(plan.sends, got, strict=True):
        made.narrow(dim, rows.start, rows.size).add_(part.permute(back))
    return made


def _order(rank: int, channels_last: bool) -> tuple[int, ...]:
    """The dims as they lie in memory, so that a piece that is sent is dense in this order."""
    return (0, *range(2, rank), 1) if channels_last else tuple(range(rank))


def _run(requests: list[Any], does: list[str]) -> None:
    """Start all and wait for all; on a GPU the current stream waits, not the host."""
    if not requests:
        return
    failed = told = [f"{what} rank {op.peer}" for what, op in zip(does, requests, strict=True)]
    try:
        works = _batch(requests)
        for at, work in enumerate(works):
            failed = told if len(works) < len(told) else told[at:at + 1]  # NCCL has one for all
            work.wait()
    except RuntimeError as error:
        raise RuntimeError(f"rank {dist.get_rank()} could not {' nor '.join(failed)} in a sharded "
                           f"convolution: {error}") from error


MOST = 1 << 12  # texts of one mesh that are remembered
_agreed: dict[Any, set[str]] = {}


def agree(mesh: Any, text: str) -> None:
    """RuntimeError on every rank of the mesh unless all ranks call it with one text. Asked once for each
    text; ranks that disagree after that wait for each other until torch.distributed's time is over."""
    known = _agreed.setdefault(mesh, set())
    if text in known:
        return
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    both = torch.tensor([number, -number], dtype=torch.int64, device=mesh.device_type)
    for dim in range(mesh.ndim):
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
    most, least = both.tolist()
    if most != -least:
        raise RuntimeError("the ranks of a mesh disagree about a sharded convolution. Rank "
                           f"{dist.get_rank()} has: {text}")
    if len(known) >= MOST:
        known.clear()  # all ranks of a mesh do, at the same call
    known.add(text)
