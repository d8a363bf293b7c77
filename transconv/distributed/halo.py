"""Halos: which rows of a sharded image a rank needs for its rows of the result, and how they get there.

Along one spatial axis, src has the positions i, dst the positions o (see conv/relation.py). A rank owns an
interval of each. What it needs of the other tensor is the range of the relation's coordinate over its own
interval and all taps; what it then computes is a convolution of these intervals, with a padding of its
own. Rows move between the ranks of one mesh dim, as a plan says; pieces of a graph that ranks share move
as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from transconv.compute import AxisSpan, span_of
from transconv.conv import ConvProblem, Prop, reading
from transconv.distributed import agreement
from transconv.distributed.agreement import watch_group


def shards(size: int, parts: int) -> tuple[AxisSpan, ...]:
    """The rows of each rank as DTensor's Shard deals them: equally many, the last ones fewer or none."""
    each = -(-size // parts)
    return tuple(AxisSpan(min(size, r * each), min(size, (r + 1) * each)) for r in range(parts))


class Window(NamedTuple):
    """A convolution of some rows of src with some of dst: its low and high padding, and how many rows at
    the end of src no row of dst reaches, beyond those that the stride leaves out."""

    low: int
    high: int
    unread: int


@dataclass(frozen=True, slots=True)
class SpatialAxis:
    """The convolution along one spatial axis: sizes of src, dst and the kernel, and its numbers."""

    i: int
    o: int
    k: int
    stride: int
    dilation: int
    pad: int

    def needs(self, prop: Prop, rows: AxisSpan) -> AxisSpan:
        """The rows of src that these rows of dst read (``FWD``), or the rows of dst that these rows of src
        read (``BWD_D``), without those that lie in the padding."""
        if not rows.size:
            return AxisSpan(0, 0)
        found = _hull(self, prop, rows)
        return found.within(AxisSpan(0, self.i if prop is Prop.FWD else self.o))

    def window(self, src: AxisSpan, dst: AxisSpan) -> Window:
        """The convolution of these rows. For the rows that one rank needs, ``low`` is never negative."""
        low = self.pad + src.start - dst.start * self.stride
        high = (dst.size - 1) * self.stride + (self.k - 1) * self.dilation + 1 - src.size - low
        return Window(low, max(0, high), min(src.size, -high) if high <= -self.stride else 0)


@lru_cache(maxsize=1 << 14)
def _hull(line: SpatialAxis, prop: Prop, rows: AxisSpan) -> AxisSpan:
    problem = ConvProblem.make(1, 1, 1, (line.i,), line.k, line.stride, line.dilation, line.pad, line.o)
    position, tap, view = reading(problem, prop, 0)
    sizes = tuple((x.name, x.size) for x in (position, tap))
    found = span_of(view.coord, sizes, position.name, rows)
    assert found is not None
    return found


class HaloRows(NamedTuple):
    """Rows that a rank sends to, or has from, the one with this index along its axis of the mesh."""

    rank: int
    rows: AxisSpan


class Exchange(NamedTuple):
    """What a rank does to have the rows that it needs. Sent rows are counted from its first; ``pieces``
    are all that it then has, in order, its own included, counted in the whole tensor."""

    owned: AxisSpan
    needed: AxisSpan
    sends: tuple[HaloRows, ...]
    pieces: tuple[HaloRows, ...]

    @property
    def received(self) -> int:
        """The number of rows that come from other ranks."""
        return self.needed.size - sum(p.rows.size for p in self.pieces if p.rank < 0)


def exchange(owned: Sequence[AxisSpan], needed: Sequence[AxisSpan], rank: int) -> Exchange:
    """The exchange of one rank, where rank r owns ``owned[r]`` and needs ``needed[r]``. A piece of its own
    has -1 for a rank."""
    mine = owned[rank]
    sends = [
        HaloRows(r, rows.seen_from(mine.start))
        for r, want in enumerate(needed)
        if r != rank and (rows := want.within(mine)).size
    ]
    pieces = [
        HaloRows(-1 if r == rank else r, rows)
        for r, have in enumerate(owned)
        if (rows := needed[rank].within(have)).size
    ]
    return Exchange(mine, needed[rank], tuple(sends), tuple(pieces))


@lru_cache(maxsize=1 << 12)
def planned(line: SpatialAxis, prop: Prop, parts: int, rank: int) -> Exchange:
    """The exchange of one of ``parts`` ranks that deal the rows of both images, for its rows of the result
    of this direction."""
    size, wanted = (line.i, line.o) if prop is Prop.FWD else (line.o, line.i)
    return exchange(shards(size, parts), [line.needs(prop, rows) for rows in shards(wanted, parts)], rank)


Tensor = torch.Tensor

_batch: Any = dist.batch_isend_irecv
_send: Any = dist.isend
_receive: Any = dist.irecv


class Sent:
    """Messages of one exchange: all are started at once and waited for once."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._requests: list[Any] = []
        self._does: list[str] = []
        self._works: list[Any] = []

    def send(self, rows: Tensor, peer: int, count: int, of: str = "rows") -> None:
        self._add(_send, rows, peer, f"send {count} {of} to")

    def receive(self, rows: Tensor, peer: int, count: int, of: str = "rows") -> None:
        self._add(_receive, rows, peer, f"receive {count} {of} from")

    def _add(self, operation: Any, rows: Tensor, peer: int, does: str) -> None:
        request = dist.P2POp(operation, rows, group=self._group, group_peer=peer)
        self._requests.append(request)
        self._does.append(f"{does} rank {request.peer}")

    def start(self) -> None:
        """RuntimeError that names the ranks."""
        if self._requests:
            with self._named(self._does):
                self._works = _batch(self._requests)

    def wait(self) -> None:
        """On a GPU the current stream waits, not the host. RuntimeError that names the ranks."""
        works, self._works = self._works, []
        for at, work in enumerate(works):  # NCCL has one for all
            with self._named(self._does if len(works) < len(self._does) else self._does[at : at + 1]):
                work.wait()
        if works and self._requests[0].tensor.is_cuda:
            watch_group(self._group, self._requests[0].tensor.device, " nor ".join(self._does))

    @contextmanager
    def _named(self, does: list[str]) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {dist.get_rank()} could not {' nor '.join(does)} in a sharded computation: {error}"
            ) from error


@dataclass(frozen=True)
class Travelling:
    """Rows along ``dim`` that a rank has or will have, as its plan says: ``parts`` in the plan's order."""

    dim: int
    plan: Exchange
    parts: tuple[Tensor, ...]
    local: Tensor
    sent: Sent

    def all(self) -> Tensor:
        """The rows that the rank needs, all there, in one tensor."""
        self.sent.wait()
        if len(self.parts) == 1:
            return self.parts[0]
        return torch.cat(self.parts, self.dim) if self.parts else self.local.narrow(self.dim, 0, 0)

    def some(self, rows: AxisSpan) -> Tensor:
        """These rows, counted in the whole tensor, of a plan whose pieces ascend. Waits only for those
        of other ranks."""
        found = []
        for (peer, has), part in zip(self.plan.pieces, self.parts, strict=True):
            both = has.within(rows)
            if both.size:
                found.append(part.narrow(self.dim, both.start - has.start, both.size))
                if peer >= 0:
                    self.sent.wait()
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)


def started(local: Tensor, dim: int, plan: Exchange, group: Any, channels_last: bool) -> Travelling:
    """Let the rows travel that this rank needs along ``dim``, from its own and those of the others of
    ``group``, whose ranks are numbered as in the plan. All ranks of the group call it with plans of one
    problem. ``channels_last``: how the whole tensor lies in memory. On a GPU rows travel beside what the
    current stream computes next. RuntimeError, here or when they are waited for, which names the rank, if
    another one is gone or does not answer in time."""
    sent, parts = Sent(group), []
    order = _order(local.dim(), channels_last)
    for peer, rows in plan.sends:
        sent.send(local.narrow(dim, rows.start, rows.size).permute(order).contiguous(), peer, rows.size)
    for peer, rows in plan.pieces:
        if peer < 0:
            parts.append(local.narrow(dim, rows.start - plan.owned.start, rows.size))
            continue
        shape = list(local.shape)
        shape[dim] = rows.size
        got = local.new_empty([shape[d] for d in order])
        sent.receive(got, peer, rows.size)
        parts.append(got.permute([order.index(d) for d in range(local.dim())]))
    sent.start()
    return Travelling(dim, plan, tuple(parts), local, sent)


def extended(local: Tensor, dim: int, plan: Exchange, group: Any, channels_last: bool) -> Tensor:
    """``started``, and all rows when they are there."""
    return started(local, dim, plan, group, channels_last).all()


def returned(grad: Tensor, size: int, dim: int, plan: Exchange, group: Any, channels_last: bool) -> Tensor:
    """The way back of ``extended``, for a gradient of what it gave: rows go to the ranks that own them,
    which add them in the order of ranks. ``size``: of the rank's own rows."""
    order = _order(grad.dim(), channels_last)
    shape = list(grad.shape)
    shape[dim] = size
    made, at = grad.new_zeros(shape), 0
    sent, got = Sent(group), []
    for peer, rows in plan.pieces:
        part, at = grad.narrow(dim, at, rows.size), at + rows.size
        if peer < 0:
            made.narrow(dim, rows.start - plan.owned.start, rows.size).add_(part)
            continue
        sent.send(part.permute(order).contiguous(), peer, rows.size)
    for peer, rows in plan.sends:
        shape[dim] = rows.size
        got.append(grad.new_empty([shape[d] for d in order]))
        sent.receive(got[-1], peer, rows.size)
    sent.start()
    sent.wait()
    back = [order.index(d) for d in range(grad.dim())]
    for (_, rows), part in zip(plan.sends, got, strict=True):
        made.narrow(dim, rows.start, rows.size).add_(part.permute(back))
    return made


def _order(rank: int, channels_last: bool) -> tuple[int, ...]:
    """The dims as they lie in memory, so that a piece that is sent is dense in this order."""
    return (0, *range(2, rank), 1) if channels_last else tuple(range(rank))


@dataclass(frozen=True, slots=True)
class MeshRanks:
    """The ranks of a ``mesh`` of one dim that run one plan, one of which is this process: what they
    compare and exchange."""

    mesh: Any

    @property
    def number(self) -> int:
        """Of this process."""
        return int(self.mesh.get_local_rank())

    @property
    def count(self) -> int:
        """Of all."""
        return int(self.mesh.size())

    def agree(self, text: str) -> None:
        """RuntimeError on every rank, with what each has, unless all call it with one text. Asked once for
        each text; ranks that agree choose the same schedules."""
        agreement.agree(self.mesh, text)

    def compare(self, text: str) -> None:
        """The same, asked each time."""
        agreement.compare(self.mesh, text)

    def largest(self, found: tuple[int, ...]) -> tuple[int, ...]:
        """The largest of what each rank has found."""
        return max(own for _, own in agreement.gathered(self.mesh, found))

    def exchange(
        self, sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]]
    ) -> None:
        """Send dense tensors to other ranks, and receive those that they send, in their order.
        RuntimeError that names a rank that is gone, or does not answer in the group's time."""
        sent = Sent(self.mesh.get_group())
        for rank, run in sends:
            sent.send(run.view(torch.uint8), rank, run.nbytes, "bytes")
        for rank, run in receives:
            sent.receive(run.view(torch.uint8), rank, run.nbytes, "bytes")
        sent.start()
        sent.wait()
