"""The time axis of a stream: where it lies in a tensor, the pieces of a stream, what an operation does
along it, which rows of an operand an operation reads while the stream has no end yet, and which it keeps.

Rows repeat after a period, in which the operand advances: the relation of a convolution (halo.py) far from
both ends of an image, where it is the same everywhere.

    convolution of stride 2, 4 taps             row o reads 2*o - P up to 2*o - P + 4
    transposed convolution of stride 2          rows 2*q and 2*q + 1 read q - 1 up to q + 1
    nearest upsampling by 3                     rows 3*q, 3*q + 1 and 3*q + 2 read q
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from transconv.compute import AxisSpan
from transconv.conv import Prop
from transconv.distributed.halo import SpatialAxis
from transconv.distributed.streams.graph_capture import CapturedOperation, ResultReference

FAR = 1 << 20  # a row that is far from both ends of an axis


@dataclass(frozen=True, slots=True)
class TimeRelation:
    """The rows that an operation reads: row ``period*q + phase`` reads the operand's rows from ``advance*q
    + rows[phase].start`` up to ``advance*q + rows[phase].stop``. Both are ascending; rows below 0 are
    before the stream."""

    period: int = 1
    advance: int = 1
    rows: tuple[AxisSpan, ...] = (AxisSpan(0, 1),)

    @staticmethod
    def of_window(k: int, stride: int, dilation: int, pad: int) -> TimeRelation:
        """That of a convolution."""
        line = SpatialAxis(2 * FAR * stride, 2 * FAR, k, stride, dilation, pad)
        found = line.needs(Prop.FWD, AxisSpan(FAR, FAR + 1)).seen_from(FAR * stride)
        return TimeRelation(1, stride, (found,))

    @staticmethod
    def of_transposed_window(k: int, stride: int, dilation: int, pad: int) -> TimeRelation:
        """That of a transposed convolution; a row that no tap reaches is made with the one before it."""
        line = SpatialAxis(2 * FAR * stride, 2 * FAR, k, stride, dilation, pad)
        begin = FAR * stride
        rows = []
        for row in range(begin, begin + stride):
            found, at = line.needs(Prop.BWD_D, AxisSpan(row, row + 1)), (row + pad) // stride
            rows.append((found if found.size > 0 else AxisSpan(at, at + 1)).seen_from(FAR))
        return TimeRelation(stride, 1, tuple(rows))

    def needs(self, rows: AxisSpan) -> AxisSpan:
        """The operand's rows that these rows read; some may be before the stream, or behind it."""
        return AxisSpan(self.first(rows.start), self._end(rows.stop - 1))

    def first(self, row: int) -> int:
        """The first row of the operand that this row and those behind it read."""
        q, phase = divmod(row, self.period)
        return self.advance * q + self.rows[phase].start

    def _end(self, row: int) -> int:
        q, phase = divmod(row, self.period)
        return self.advance * q + self.rows[phase].stop

    def ready(self, count: int) -> int:
        """How many rows read only the first ``count`` rows of the operand."""
        return min(
            self.period * max(0, (count - rows.stop) // self.advance + 1) + phase
            for phase, rows in enumerate(self.rows)
        )

    @property
    def rate(self) -> tuple[int, int]:
        """Rows of the result, and of the operand, in one period."""
        return self.period, self.advance


Tensor = torch.Tensor
Values = Mapping[ResultReference, Tensor]


class TimeAxis(NamedTuple):
    """The dim that is time in a tensor, whose index is a row behind ``outer`` others."""

    dim: int
    outer: int = 1


def rows_of(t: Tensor, axis: TimeAxis) -> int:
    """The number of rows of a tensor."""
    return t.shape[axis.dim] // axis.outer


def take_rows(t: Tensor, axis: TimeAxis, start: int, stop: int) -> Tensor:
    """The rows from ``start`` up to ``stop``."""
    if start == 0 and stop == rows_of(t, axis):
        return t
    if axis.outer == 1:
        return t.narrow(axis.dim, start, stop - start).contiguous()
    return _apart(t, axis).narrow(axis.dim + 1, start, stop - start).flatten(axis.dim, axis.dim + 1)


def join_rows(parts: Sequence[Tensor], axis: TimeAxis) -> Tensor:
    """The rows of all parts, one behind another."""
    if len(parts) == 1:
        return parts[0]
    if axis.outer == 1:
        return torch.cat(list(parts), axis.dim)
    return torch.cat([_apart(t, axis) for t in parts], axis.dim + 1).flatten(axis.dim, axis.dim + 1)


def _apart(t: Tensor, axis: TimeAxis) -> Tensor:
    """The tensor with time in a dim of its own."""
    return t.reshape(*t.shape[: axis.dim], axis.outer, -1, *t.shape[axis.dim + 1 :])


def pad_rows(t: Tensor, axis: TimeAxis, low: int, high: int, value: float = 0.0) -> Tensor:
    """Rows of a value before and behind."""
    if not low and not high:
        return t
    return F.pad(t, [*(0, 0) * (t.dim() - 1 - axis.dim), low, high], value=value)


class StreamPiece(NamedTuple):
    """Rows that an operation makes, the operand's rows that there are of those that they read, and how
    many are missing before and behind these."""

    made: AxisSpan
    read: AxisSpan
    low: int = 0
    high: int = 0


@dataclass(frozen=True, slots=True)
class TimeRule:
    """One operation along time. ``axis``: of its results, None for values that do not change any more once
    the first ``least`` rows are there; ``total``: how many rows it makes of so many; ``least``: how many
    it waits for; ``compute``: a piece, of the rows that it reads by reference; ``carries``: it also reads
    its own further results of the piece before."""

    axis: TimeAxis | None
    compute: Callable[[Values, StreamPiece], Any]
    relation: TimeRelation = TimeRelation()
    total: Callable[[int], int] = lambda n: n
    least: int = 1
    carries: bool = False

    def ready(self, count: int, total: int) -> int:
        """How many rows there are, where the operand has ``count`` and would have ``total`` if the stream
        ended."""
        if count < self.least:
            return 0
        return max(0, min(self.relation.ready(count), self.total(total)))


def repeated(times: int) -> TimeRelation:
    """Each row as often."""
    return TimeRelation(times, 1, (AxisSpan(0, 1),) * times)


def slice_of(op: CapturedOperation) -> tuple[Any, ...]:
    """The dim, the start, the end and the step of a slice."""
    defaults: list[Any] = [0, None, None, 1]
    return tuple([*op.args[1:], *defaults[len(op.args) - 1 :]])


def clipped(place: int, size: int) -> int:
    return min(size, max(0, place + size if place < 0 else place))


def value_of(t: Any, values: Values) -> Any:
    return values[t] if isinstance(t, ResultReference) else t


def runner(op: CapturedOperation) -> Callable[[Values, StreamPiece], Any]:
    """The operation, of the values of its references."""
    function, args, kwargs = op.op, op.args, op.kwargs
    places = [(i, a) for i, a in enumerate(args) if isinstance(a, ResultReference)]

    def run(values: Values, piece: StreamPiece) -> Any:
        given = [*args]
        for i, reference in places:
            given[i] = values[reference]
        return function(*given, **kwargs)

    def run_nested(values: Values, piece: StreamPiece) -> Any:
        made, named = op.with_arguments(lambda a: value_of(a, values))
        return function(*made, **named)

    return run if len(places) == len(op.references) else run_nested


def has_numbers_of(op: CapturedOperation, other: CapturedOperation) -> bool:
    """Whether two operations have the same numbers."""
    pairs = zip(op.leaves(), other.leaves(), strict=True)
    return all(isinstance(a, (Tensor, ResultReference)) or a == b for a, b in pairs)


@dataclass(eq=False, slots=True)
class KeptRows:
    """The rows of an operand that an operation still reads, from row ``first`` on."""

    axis: TimeAxis
    rows: Tensor
    first: int = 0

    def add(self, rows: Tensor) -> None:
        """Rows behind the others."""
        self.rows = join_rows([self.rows, rows], self.axis) if rows_of(self.rows, self.axis) else rows

    def take(self, rows: AxisSpan) -> Tensor:
        """These rows, by their numbers in the stream."""
        return take_rows(self.rows, self.axis, rows.start - self.first, rows.stop - self.first)

    def drop(self, before: int) -> None:
        """Forget the rows before this one."""
        count = rows_of(self.rows, self.axis)
        gone = min(before - self.first, count)
        if gone > 0:
            self.rows = take_rows(self.rows, self.axis, gone, count)
            self.first += gone


@dataclass(eq=False, slots=True)
class StreamedOperation:
    """An operation with its rule, what it keeps, and how many rows it has made."""

    at: int
    rule: TimeRule
    moving: list[ResultReference]  # the operands with rows
    fixed: list[ResultReference]
    kept: dict[ResultReference, KeptRows] = field(default_factory=dict)
    carried: dict[ResultReference, Tensor] = field(default_factory=dict)
    made: int = 0

    def reset(self, none: dict[ResultReference, KeptRows]) -> None:
        """Forget the stream; of each operand no rows are kept."""
        self.kept, self.carried, self.made = {r: replace(none[r]) for r in self.moving}, {}, 0

    def piece(self, count: int, totals: list[int], ends: bool) -> StreamPiece | None:
        """What it makes now, where its operands have ``count`` rows, and operation i would have made
        ``totals[i]`` if the stream ended, as it does if ``ends``. None for nothing."""
        rule, total = self.rule, totals[self.moving[0].at]
        if rule.axis is None:
            due = not self.made and count >= rule.least
            return StreamPiece(AxisSpan(0, 1), AxisSpan(0, count)) if due else None
        stop = rule.total(total) if ends else rule.ready(count, total)
        if stop <= self.made:
            return None
        wanted = rule.relation.needs(AxisSpan(self.made, stop))
        start = min(count, max(0, wanted.start))  # all that is read may be before the stream, or behind it
        read = AxisSpan(start, max(start, min(count, wanted.stop)))
        low = max(0, min(0, wanted.stop) - wanted.start)
        return StreamPiece(AxisSpan(self.made, stop), read, low, wanted.size - low - read.size)
