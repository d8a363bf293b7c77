"""``transconv.streaming(model)``: a model that takes its input piece by piece, and remembers what later
rows read of earlier ones.

The operations of a call are captured once (graph_capture.py); along time each has a rule (time_rules.py).
At a call an operation makes the rows that have all that they read, and keeps the operand's rows that later
ones read. So the pieces may have any length, and the state is as long as the relation says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, lcm
from typing import Any

import torch
from torch import nn

from transconv.compute import AxisSpan
from transconv.distributed.streams.graph_capture import Capture, ResultReference
from transconv.distributed.streams.length_kernels import LengthKernels
from transconv.distributed.streams.time_axis import (
    StreamPiece,
    TimeAxis,
    TimeRule,
    join_rows,
    rows_of,
    take_rows,
)
from transconv.distributed.streams.time_rules import TimeRules
from transconv.support import TensorError, Unsupported

Tensor = torch.Tensor
ROWS = 4096  # of a capture, at least: longer than what the rows at the beginning see


@dataclass(eq=False, slots=True)
class KeptRows:
    """The rows of an operand that an operation still reads, from row ``first`` on."""

    axis: TimeAxis
    first: int = 0
    rows: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Rows behind the others."""
        self.rows = rows if self.rows is None else join_rows([self.rows, rows], self.axis)

    def take(self, rows: AxisSpan) -> Tensor:
        """These rows, by their numbers in the stream."""
        assert self.rows is not None
        return take_rows(self.rows, self.axis, rows.start - self.first, rows.stop - self.first)

    def drop(self, before: int) -> None:
        """Forget the rows before this one."""
        if self.rows is None or before <= self.first:
            return
        count = rows_of(self.rows, self.axis)
        gone = min(before - self.first, count)
        self.rows = take_rows(self.rows, self.axis, gone, count) if gone < count else None
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

    def reset(self, axes: dict[ResultReference, TimeAxis]) -> None:
        """Forget the stream."""
        self.kept, self.carried, self.made = {r: KeptRows(axes[r]) for r in self.moving}, {}, 0

    def piece(self, counts: list[int], totals: list[int], ends: bool) -> StreamPiece | None:
        """What it makes now, where operation i has made ``counts[i]`` rows, and would have made
        ``totals[i]`` if the stream ended, as it does if ``ends``. None for nothing."""
        count = min(counts[r.at] for r in self.moving)
        rule, total = self.rule, totals[self.moving[0].at]
        if rule.axis is None:
            due = not self.made and (count >= rule.least or ends)
            return StreamPiece(AxisSpan(0, 1), AxisSpan(0, count)) if due else None
        stop = rule.total(total) if ends else rule.ready(count, total)
        if stop <= self.made:
            return None
        wanted = rule.relation.needs(AxisSpan(self.made, stop))
        read = AxisSpan(max(0, wanted.start), min(count, wanted.stop))
        return StreamPiece(
            AxisSpan(self.made, stop), read, read.start - wanted.start, wanted.stop - read.stop
        )


class StreamPlan:
    """The operations of a model for inputs of one kind. Raises Unsupported for a model that cannot be
    streamed."""

    def __init__(self, model: nn.Module, like: Tensor, dim: int, latency: int) -> None:
        axis = TimeAxis(dim)
        sizes = list(like.shape)
        self.weights = _versions(model)
        probe = _captured(model, like, dim, ROWS)
        hop = _hop(probe, dim)
        sizes[dim] = hop * ceil(ROWS / hop)
        short, long = (_captured(model, like, dim, sizes[dim] + more) for more in (0, hop))
        self.kernels = LengthKernels()
        rules = TimeRules(short, long, axis, self.kernels.convolve)
        found = rules.of_all()
        self.axes, self.fixed, self.capture = rules.axes, rules.fixed, short
        if short.result not in self.axes or self.axes[short.result].outer != 1:
            raise Unsupported(
                "stream:result", "the result does not change along time: it has no rows to stream"
            )
        self.operations = [
            StreamedOperation(
                at,
                rule,
                list(dict.fromkeys(r for r in op.references if r in self.axes)),
                list(dict.fromkeys(r for r in op.references if r in self.fixed)),
            )
            for at, (op, rule) in enumerate(zip(short.operations, found, strict=True))
        ]
        self.last = {r.at: at for at, op in enumerate(short.operations) for r in op.references}
        self.last[short.result.at] = len(short.operations)
        self.latency = self._checked_latency(sizes[dim], latency)
        self.hop = hop
        made = short.operations[short.result.at] if short.result.at >= 0 else None
        read = any(short.result in op.moving for op in self.operations)
        self.shares_result = made is None or read or made.op.is_view
        self.reset()

    def reset(self) -> None:
        """Begin a stream."""
        for op in self.operations:
            op.reset(self.axes)
        self.count = 0
        self.values: dict[ResultReference, Tensor] = {}  # those that do not change any more

    def _checked_latency(self, rows: int, allowed: int) -> int:
        """How many rows of input the result waits for. Raises Unsupported if that is more than allowed."""
        counts, totals = self._counted(rows)
        at = self.capture.result.at
        missing = totals[at] - counts[at]
        found = ceil(missing * rows / max(1, totals[at])) if missing > 0 else 0
        if found <= allowed:
            return found
        while True:
            behind = [
                r.at for r in self.operations[at].moving if r.at >= 0 and totals[r.at] > counts[r.at]
            ]
            if not behind:
                break
            at = behind[0]
        op = self.capture.operations[at]
        raise Unsupported(
            f"stream:{op.name}",
            f"{op} looks ahead: the last {missing} rows of the result wait for later rows; pad on the "
            f"left alone, or allow it to be late: transconv.streaming(model, latency={found}), then "
            "flush() at the end",
        )

    def _counted(self, rows: int) -> tuple[list[int], list[int]]:
        """How many rows each operation has made after so many of the input, the input's behind the last,
        and how many it would have made at the end."""
        counts, totals = [0] * len(self.operations) + [rows], [0] * len(self.operations) + [rows]
        for op in self.operations:
            if op.rule.axis is not None:
                total = totals[op.moving[0].at]
                totals[op.at] = op.rule.total(total)
                counts[op.at] = op.rule.ready(min(counts[r.at] for r in op.moving), total)
        return counts, totals

    def step(self, x: Tensor | None, ends: bool = False) -> Tensor | None:
        """The rows of the result that the next rows of the input let be computed; all that are left if the
        stream ``ends``. None for no rows."""
        new: dict[ResultReference, Tensor] = {} if x is None else {ResultReference(-1): x}
        self.count += 0 if x is None else rows_of(x, self.axes[ResultReference(-1)])
        counts, totals = (
            [0] * len(self.operations) + [self.count],
            [0] * len(self.operations) + [self.count],
        )
        for op in self.operations:
            rule = op.rule
            if not op.moving:
                if not op.made and all(r in self.values for r in op.fixed):
                    self._keep_fixed(
                        op, rule.compute(self.values, StreamPiece(AxisSpan(0, 1), AxisSpan(0, 0)))
                    )
                continue
            for r, kept in op.kept.items():
                if r in new and (rule.axis is not None or not op.made):
                    kept.add(new[r])
            piece = op.piece(counts, totals, ends)
            if piece is not None and all(r in self.values for r in op.fixed):
                values = {r: kept.take(piece.read) for r, kept in op.kept.items()}
                made = rule.compute(values | {r: self.values[r] for r in op.fixed} | op.carried, piece)
                if rule.axis is None:
                    self._keep_fixed(op, made)
                    for kept in op.kept.values():
                        kept.rows = None
                else:
                    self._check(op, made, piece)
                    each = made if isinstance(made, (tuple, list)) else (made,)
                    results = {ResultReference(op.at, i): t for i, t in enumerate(each) if t is not None}
                    if rule.carries:
                        first = results.pop(ResultReference(op.at))
                        op.carried, results = results, {ResultReference(op.at): first}
                    new |= results
                    op.made = piece.made.stop
                    for kept in op.kept.values():
                        kept.drop(rule.relation.first(op.made))
            if rule.axis is not None:
                counts[op.at], totals[op.at] = op.made, rule.total(totals[op.moving[0].at])
            for r in op.moving:
                if self.last[r.at] == op.at:
                    new.pop(r, None)
        return new.get(self.capture.result)

    def _keep_fixed(self, op: StreamedOperation, made: Any) -> None:
        each = made if isinstance(made, (tuple, list)) else (made,)
        self.values |= {ResultReference(op.at, i): t for i, t in enumerate(each) if t is not None}
        op.made = 1

    def _check(self, op: StreamedOperation, made: Any, piece: StreamPiece) -> None:
        """RuntimeError for another number of rows than the rule says."""
        first = made[0] if isinstance(made, (tuple, list)) else made
        axis = op.rule.axis
        if axis is not None and first.shape[axis.dim] != piece.made.size * axis.outer:
            raise RuntimeError(
                f"{self.capture.operations[op.at]} made {first.shape[axis.dim]} rows for {piece}"
            )

    @property
    def state(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what is kept, by the operation that reads it."""
        return {
            f"{op.at} {self.capture.operations[op.at]}": tuple(kept.rows.shape)
            for op in self.operations
            for kept in op.kept.values()
            if kept.rows is not None
        }


class StreamedModel(nn.Module):
    """A model with a state, see ``streaming``."""

    def __init__(self, model: nn.Module, dim: int, latency: int) -> None:
        super().__init__()
        self.model, self.dim, self.allowed = model, dim, latency
        self._plan: StreamPlan | None = None
        self._kind: tuple[Any, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """The next rows of the result. Raises TensorError for an input unlike the earlier ones of the
        stream, Unsupported for a model that cannot be streamed."""
        if not isinstance(x, Tensor) or x.dim() < 2 or not -x.dim() <= self.dim < x.dim():
            found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise TensorError(f"streaming: expected a tensor with time in dim {self.dim}, got {found}")
        plan = self._planned(x)
        with torch.no_grad():
            # What is kept must not change where the caller writes to the input, or to the result.
            made = plan.step(x.clone(memory_format=torch.contiguous_format)) if x.shape[self.dim] else None
            if made is None:
                return self._empty(plan, x)
            return made.clone() if plan.shares_result else made

    def flush(self) -> Tensor | None:
        """The rest of the result at the end of a stream, None if nothing is left; then a stream begins."""
        plan = self._plan
        if plan is None or not plan.count:
            return None
        with torch.no_grad():
            rest = plan.step(None, ends=True)
        plan.reset()
        return rest

    def reset(self) -> None:
        """Begin a stream. Weights that changed meanwhile are taken."""
        if self._plan is not None:
            self._plan.reset()
            if self._plan.weights != _versions(self.model):
                self._plan, self._kind = None, ()

    @property
    def latency(self) -> int:
        """How many rows of input the result is behind, once the first call was made."""
        return 0 if self._plan is None else self._plan.latency

    @property
    def hop(self) -> int:
        """The number of rows of input after which the model's strides begin anew."""
        return 1 if self._plan is None else self._plan.hop

    @property
    def state(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what is kept between calls, by the operation that reads it."""
        return {} if self._plan is None else self._plan.state

    def _planned(self, x: Tensor) -> StreamPlan:
        shape = list(x.shape)
        dim = self.dim % x.dim()
        shape[dim] = -1
        kind = (tuple(shape), x.dtype, x.device, self.model.training)
        if kind == self._kind and self._plan is not None:
            if self._plan.count or self._plan.weights == _versions(self.model):
                return self._plan
        elif self._plan is not None and self._plan.count:
            raise TensorError(
                f"streaming: the stream has inputs of shape {list(self._kind[0])} {self._kind[1]} on "
                f"{self._kind[2]}, got {list(x.shape)} {x.dtype} on {x.device}; reset() begins another one"
            )
        self._plan = StreamPlan(self.model, x, dim, self.allowed)
        self._kind = kind
        return self._plan

    def _empty(self, plan: StreamPlan, x: Tensor) -> Tensor:
        shape = list(plan.capture.shape_of(plan.capture.result))
        shape[plan.axes[plan.capture.result].dim] = 0
        return x.new_empty(shape, dtype=plan.capture.dtype)


def streaming(model: nn.Module, latency: int = 0, dim: int = 2) -> StreamedModel:
    """A module that computes a model's result piece by piece: ``s(x1)``, ``s(x2)``, ... are, joined along
    time, the rows of the model's result for the joined input, as far as they are known. Pieces may have
    any length, also another one at each call.

    ``dim``: of the input, which holds time (batch, channels, time, ...). ``latency``: how many rows of
    input the result may wait for, where the model looks ahead so far; ``flush()`` then gives the rest at
    the end of a stream. ``reset()`` begins another stream. There are no gradients.

    Convolutions are computed by kernels to which the length is an argument, so that the pieces have the
    bits of the whole; where there is no kernel, torch computes them. TypeError for what is no module,
    ValueError for a latency below 0; at the first call Unsupported, with the operation's name and the
    cure, for models that look ahead, that norm or attend over time, or whose operations have no rule.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"streaming: model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(latency, int) or isinstance(latency, bool) or latency < 0:
        raise ValueError(f"streaming: latency: expected a number of rows from 0 on, got {latency!r}")
    return StreamedModel(model, dim, latency)


def _captured(model: nn.Module, like: Tensor, dim: int, rows: int) -> Capture:
    shape = list(like.shape)
    shape[dim] = rows
    return Capture.of(model, like, tuple(shape))


def _hop(capture: Capture, dim: int) -> int:
    """A number of rows after which all strides of a model begin anew."""
    found = 1
    for op in capture.operations:
        if op.name == "convolution" and not op.args[6]:
            found *= max(op.args[3])
        elif "pool" in op.name and len(op.args) > 2:
            found *= max([*op.args[2], 1])
        elif op.name == "slice" and len(op.args) > 4:
            found = lcm(found, op.args[4])
    return found


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    """What tells whether weights are the same, and unchanged."""
    tensors = [*model.parameters(), *model.buffers()]
    return [(t.data_ptr(), t._version) for t in tensors]
