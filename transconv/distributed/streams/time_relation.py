"""Which rows of an operand an operation reads, along the time of a stream that has no end yet.

Rows repeat after a period, in which the operand advances: the relation of a convolution (halo.py) far from
both ends of an image, where it is the same everywhere.

    convolution of stride 2, 4 taps             row o reads 2*o - P up to 2*o - P + 4
    transposed convolution of stride 2          rows 2*q and 2*q + 1 read q - 1 up to q + 1
    nearest upsampling by 3                     rows 3*q, 3*q + 1 and 3*q + 2 read q
"""

from __future__ import annotations

from dataclasses import dataclass

from transconv.compute import AxisSpan
from transconv.conv import Prop
from transconv.distributed.halo import SpatialAxis

FAR = 1 << 20  # a row that is far from both ends of an axis


@dataclass(frozen=True, slots=True)
class TimeRelation:
    """Row ``period*q + phase`` reads the operand's rows from ``advance*q + rows[phase].start`` up to
    ``advance*q + rows[phase].stop``. Both are ascending; rows below 0 are before the stream."""

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
        """That of a transposed convolution."""
        line = SpatialAxis(2 * FAR * stride, 2 * FAR, k, stride, dilation, pad)
        begin = FAR * stride
        rows = (AxisSpan(begin + phase, begin + phase + 1) for phase in range(stride))
        return TimeRelation(stride, 1, tuple(line.needs(Prop.BWD_D, r).seen_from(FAR) for r in rows))

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
