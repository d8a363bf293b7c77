"""``transconv.streaming(model)``: a model that takes its input piece by piece, and remembers what later
rows read of earlier ones.

The operations of a call are captured once (graph_capture.py); along time each has a rule (time_rules.py).
At a call an operation makes the rows that have all that they read, and keeps the operand's rows that later
ones read. So the pieces may have any length, and the state is as long as the relation says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, lcm
from typing import Any, NamedTuple

import torch
from torch import nn

from transconv.calls import stats
from transconv.calls.guard import ALIGNMENT
from transconv.compute import AxisSpan
from transconv.conv import CompiledDirection, ConvWorkload, Epilogue, Prop
from transconv.distributed.streams.graph_capture import Capture, ResultReference, with_rows
from transconv.distributed.streams.step_replay import MadeStep, StepGraphs, StepKey, StreamState
from transconv.distributed.streams.time_axis import (
    KeptRows,
    StreamedOperation,
    StreamPiece,
    TimeAxis,
    rows_of,
)
from transconv.distributed.streams.time_rules import TimeRules
from transconv.runtime import PlanRequest, is_capturing, ready
from transconv.support import TensorError, Unsupported
from transconv.torch_ops.arguments import Params, autocast_dtype, output_shape
from transconv.torch_ops.calls import lower_call

Tensor = torch.Tensor
ROWS_OF_RANK = {1: 1024, 2: 64, 3: 8}
"""Rows of the result that plans are chosen for, by the number of spatial dims."""


class Kind(NamedTuple):
    """The kind of a convolution's calls: what they have in common but for the length of the piece."""

    params: Params
    shape: tuple[int, ...]  # of the input, with -1 for the length
    weight: tuple[int, ...]
    strides: tuple[int, ...]  # of the weight
    dtype: torch.dtype
    device: torch.device
    flags: lower_call.Flags
    bias: bool
    last: bool  # whether channels lie innermost
    aligned: bool
    at: int


class LengthKernels:
    """The plans of a stream's convolutions, by kernels to which the length is an argument.

    The schedule of a kernel decides how its sums are grouped, and sizes decide which schedule is chosen.
    So a stream has one plan for each convolution, whatever the lengths of its pieces: the length is a name
    (``iw?``), and the example that the plan is chosen for does not depend on a call. Nothing is padded
    along time: a piece has the rows that it reads, and zeros that were added to it."""

    def __init__(self) -> None:
        self._plans: dict[Kind, CompiledDirection] = {}

    def convolve(
        self,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        more: Sequence[int],
        groups: int,
        at: int,
    ) -> Tensor:
        """torch's convolution of a piece; along spatial dim ``at`` lies time, which is not padded."""
        params = Params(tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(more), groups)
        why, message = next(iter(lower_call.reasons(x, w)), ""), ""
        if not why:
            try:
                return self._by_kernel(x, w, b, params, at)
            except Unsupported as error:
                why, message = error.reason, error.message
        stats.announce(why, message, "the convolution of a stream")
        made: Tensor = torch.ops.aten.convolution.default(
            x, w, b, stride, padding, dilation, transposed, more, groups
        )
        return made

    def _by_kernel(self, x: Tensor, w: Tensor, b: Tensor | None, params: Params, at: int) -> Tensor:
        """Raises Unsupported where there is no kernel."""
        form = torch.channels_last_3d if x.dim() == 5 else torch.contiguous_format
        last = x.dim() == 5 and not x.is_contiguous() and x.is_contiguous(memory_format=form)
        x = x.contiguous(memory_format=form if last else torch.contiguous_format)
        shape = output_shape(x.shape, w.shape, params)
        y = torch.empty(
            shape, dtype=x.dtype, device=x.device, memory_format=form if last else torch.contiguous_format
        )
        tensors = {"src": y, "dst": x} if params.transposed else {"src": x, "dst": y}
        tensors["wei"] = w
        given = [x, w, y] if b is None else [x, w, y, b]
        aligned = not any(t.data_ptr() & ALIGNMENT for t in given)
        lengths = (*x.shape[: at + 2], -1, *x.shape[at + 3 :])
        flags = lower_call.flags(x.dtype)
        of_w, biased = (tuple(w.shape), w.stride()), b is not None
        kind = Kind(params, lengths, *of_w, x.dtype, x.device, flags, biased, last, aligned, at)
        if b is not None:
            tensors["bia"] = b
        plan = self._plans.get(kind)
        if plan is None:
            plan = self._plan(kind)
            operands = {n: t for n, t in tensors.items() if t is not y}
            plan = lower_call.proven(plan, aligned, lambda: torch.empty_like(y), **operands)
            self._plans[kind] = plan
        stats.add(True, "stream", 1)
        lower_call.launch(plan, **tensors)
        return y

    def _plan(self, kind: Kind) -> CompiledDirection:
        """The plan for pieces of any length."""
        params, at = kind.params, kind.at
        reach = (kind.weight[at + 2] - 1) * params.dilation[at] + 1
        rows = ROWS_OF_RANK[len(params.stride)]
        long = (rows - 1) * params.stride[at] + reach
        shape = tuple((rows if params.transposed else long) if n < 0 else n for n in kind.shape)
        far = output_shape(shape, kind.weight, params)
        problem = lower_call.describe(
            kind.dtype,
            (shape, _strides(shape, kind.last)),
            (kind.weight, kind.strides),
            (tuple(far), _strides(far, kind.last)),
            params,
            kind.flags.math,
        )
        prop = Prop.BWD_D if params.transposed else Prop.FWD
        with lower_call.or_unsupported(f"{problem} {prop} of any length"):
            workload = ConvWorkload(
                problem,
                prop,
                Epilogue.parse("bias" if kind.bias else ""),
                frozenset({f"i{problem.spatial[at]}"}),
            )
            workload.refuse()
            asked = PlanRequest(workload, lower_call.target_of(kind.device), True, kind.aligned)
            return ready(asked.workload, asked.target, None, True, CompiledDirection, kind.aligned, "now")


def _strides(shape: Sequence[int], last: bool) -> tuple[int, ...]:
    """Those of a tensor without gaps, ``last`` with channels innermost."""
    order = [0, *range(2, len(shape)), 1] if last else range(len(shape))
    steps, step = [0] * len(shape), 1
    for d in reversed([*order]):
        steps[d] = step
        step *= shape[d]
    return tuple(steps)


ROWS = 4096  # of a capture, at least: longer than what the rows at the beginning see
LENGTHS = (ROWS, ROWS + 1, 5040, 5041, 20160)  # tried until a model takes one: multiples of 2, 3, 5, 7
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)  # of rows that a model may take together


class StreamKind(NamedTuple):
    """What the inputs of a stream have in common, and what its operations depend on."""

    shape: tuple[int, ...]  # with -1 for time
    dtype: torch.dtype
    device: torch.device
    autocast: torch.dtype | None
    training: bool

    def __str__(self) -> str:
        cast = f", autocast {self.autocast}" * (self.autocast is not None)
        return f"{list(self.shape)} {self.dtype} on {self.device}{cast}{', in training' * self.training}"


class StreamPlan:
    """The operations of a model for inputs of one kind. Raises Unsupported for a model that cannot be
    streamed."""

    def __init__(self, model: nn.Module, kind: StreamKind, latency: int, record: bool) -> None:
        dim = kind.shape.index(-1)
        axis = TimeAxis(dim)
        self.weights = _versions(model)
        with torch.autocast(kind.device.type, kind.autocast, enabled=kind.autocast is not None):
            short, long = _captured_twice(model, kind)
        sizes = list(short.shape)
        hop = long.shape[dim] - sizes[dim]
        self.kernels = LengthKernels()
        rules = TimeRules(short, long, axis, self.kernels.convolve)
        found = rules.of_all()
        self.axes, self.fixed, self.capture = rules.axes, rules.fixed, short
        self.none = {r: KeptRows(a, short.no_rows(r, a.dim, kind.device)) for r, a in rules.axes.items()}
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
        self.graphs = StepGraphs() if record and kind.device.type == "cuda" else None
        self.reset()

    def reset(self) -> None:
        """Begin a stream."""
        for op in self.operations:
            op.reset(self.none)
        self.count, self.failed = 0, False
        self._place: tuple[int, ...] = ()
        self.values: Mapping[ResultReference, Tensor] = {}  # those that do not change any more

    @property
    def progress(self) -> Any:
        """Where the stream is, for ``resume``."""
        return self.failed, [[*op.carried] for op in self.operations], self.state_now

    def resume(self, progress: Any) -> None:
        """Go on where a plan of the same model was."""
        self.failed, carried, state = progress
        for op, references in zip(self.operations, carried, strict=True):
            op.carried = dict.fromkeys(references, self.none[ResultReference(-1)].rows)
        self.go_to(state)

    @property
    def state_now(self) -> StreamState:
        """Where the stream is."""
        kept = [kept for op in self.operations for kept in op.kept.values()]
        carried = [t for op in self.operations for t in op.carried.values()]
        numbers = [self.count, *(op.made for op in self.operations), *(k.first for k in kept)]
        return StreamState(numbers, [*(k.rows for k in kept), *carried], self.values)

    def go_to(self, state: StreamState) -> None:
        """Be where ``state_now`` was this."""
        numbers, tensors = iter(state.numbers), iter(state.tensors)
        self.count, self._place, self.values = next(numbers), (), state.values
        for op in self.operations:
            op.made = next(numbers)
        for op in self.operations:
            for kept in op.kept.values():
                kept.first, kept.rows = next(numbers), next(tensors)
        for op in self.operations:
            op.carried = {r: next(tensors) for r in op.carried}

    @property
    def place(self) -> tuple[int, ...]:
        """Where the stream is relative to the strides: the next step depends on this and its rows alone.
        Empty while an operation still reads what lies before the beginning."""
        if not self._place and self.count:
            counts = [*(op.made for op in self.operations), self.count]
            found = [self.count % self.hop]
            for op in self.operations:
                if not op.made or (op.rule.axis is not None and op.rule.relation.first(op.made) < 0):
                    return ()
                if op.moving and op.rule.axis is not None:
                    period, advance = op.rule.relation.rate
                    have = min(counts[r.at] for r in op.moving)
                    found += [op.made * advance - have * period, *(counts[r.at] - have for r in op.moving)]
                    for kept in op.kept.values():
                        found += [have - kept.first, rows_of(kept.rows, kept.axis)]
            self._place = tuple(found)
        return self._place

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

    def take(self, x: Tensor) -> Tensor | None:
        """The rows of the result that the next rows of the input let be computed, in memory of its own;
        by a CUDA graph, if the step came before. None for no rows."""
        if self.graphs is not None and not (self.failed or is_capturing(x.device)) and self.place:
            rows = rows_of(x, self.axes[ResultReference(-1)])
            key = StepKey(self.place, rows, lower_call.flags(x.dtype))
            state = self.state_now
            if graph := self.graphs.graph_of(key, self._step_from, state, x):
                self.failed = True
                made, state = graph.run(state, x)
                self.go_to(state)
                self.failed, self._place = False, graph.place
                return made
        # What is kept must not change where the caller writes to the input, or to the result.
        made = self.step(x.clone(memory_format=torch.contiguous_format))
        return made.clone() if made is not None and self.shares_result else made

    def _step_from(self, state: StreamState, x: Tensor) -> MadeStep:
        """The step from a state; then the stream is where it was."""
        now, failed = self.state_now, self.failed
        self.go_to(state)
        self.failed = False
        try:
            return MadeStep(self.step(x), self.state_now, self.place)
        finally:
            self.go_to(now)
            self.failed = failed

    def step(self, x: Tensor | None, ends: bool = False) -> Tensor | None:
        """The rows of the result that the next rows of the input let be computed; all that are left if the
        stream ``ends``. None for no rows. Raises TensorError behind a piece that failed."""
        if self.failed:
            raise TensorError(
                "streaming: a piece of this stream failed, rows are missing; reset() begins another one"
            )
        self.failed, self._place = True, ()
        new: dict[ResultReference, Tensor] = {} if x is None else {ResultReference(-1): x}
        self.count += 0 if x is None else rows_of(x, self.axes[ResultReference(-1)])
        counts = [0] * len(self.operations) + [self.count]
        totals = [*counts]
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
            count = min(counts[r.at] for r in op.moving)
            if ends and 0 < count < rule.least and not op.made:
                name = self.capture.operations[op.at]
                raise TensorError(
                    f"streaming: {name} reads the first {rule.least} rows; the stream had {count}"
                )
            piece = op.piece(count, totals, ends)
            if piece is not None and all(r in self.values for r in op.fixed):
                values = {r: kept.take(piece.read) for r, kept in op.kept.items()}
                made = rule.compute(values | {r: self.values[r] for r in op.fixed} | op.carried, piece)
                if rule.axis is None:
                    self._keep_fixed(op, made)
                    for kept in op.kept.values():
                        kept.drop(piece.read.stop)
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
        self.failed = False
        return new.get(self.capture.result)

    def _keep_fixed(self, op: StreamedOperation, made: Any) -> None:
        each = made if isinstance(made, (tuple, list)) else (made,)
        made = {ResultReference(op.at, i): t for i, t in enumerate(each) if t is not None}
        self.values = {**self.values, **made}
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
            if rows_of(kept.rows, kept.axis)
        }


class StreamedModel(nn.Module):
    """A model with a state, see ``streaming``."""

    def __init__(self, model: nn.Module, dim: int, latency: int, record: bool) -> None:
        super().__init__()
        self.model, self.dim, self.allowed, self.records = model, dim, latency, record
        self._plan: StreamPlan | None = None
        self._kind: StreamKind | None = None

    def __getstate__(self) -> dict[str, Any]:
        going = self._plan.progress if self._plan is not None and self._plan.count else None
        return {**self.__dict__, "_plan": None, "_kind": self._kind if going else None, "going": going}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, or what is loaded, goes on where the stream was; its plan is that of its own model."""
        going = state.pop("going")
        self.__dict__ |= state
        if going is not None and self._kind is not None:
            self._plan = StreamPlan(self.model, self._kind, self.allowed, self.records)
            self._plan.resume(going)

    def forward(self, x: Tensor) -> Tensor:
        """The next rows of the result. Raises TensorError for an input unlike the earlier ones of the
        stream, Unsupported for a model that cannot be streamed."""
        if not isinstance(x, Tensor) or x.dim() < 2 or not -x.dim() <= self.dim < x.dim():
            found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise TensorError(f"streaming: expected a tensor with time in dim {self.dim}, got {found}")
        plan = self._planned(x)
        with torch.no_grad():
            made = plan.take(x) if x.shape[self.dim] else None
        return plan.none[plan.capture.result].rows.clone() if made is None else made

    def flush(self) -> Tensor | None:
        """The rest of the result at the end of a stream, None if nothing is left; then a stream begins."""
        plan = self._plan
        if plan is None or not plan.count:
            return None
        try:
            with torch.no_grad():
                return plan.step(None, ends=True)
        finally:
            plan.reset()

    def reset(self) -> None:
        """Begin a stream. Weights that changed meanwhile are taken."""
        if self._plan is not None:
            self._plan.reset()
            if self._plan.weights != _versions(self.model):
                self._plan, self._kind = None, None

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
        kind = StreamKind(tuple(shape), x.dtype, x.device, autocast_dtype(x), self.model.training)
        if kind == self._kind and self._plan is not None:
            if self._plan.count or self._plan.weights == _versions(self.model):
                return self._plan
        elif self._plan is not None and self._plan.count:
            got = kind._replace(shape=tuple(x.shape))
            raise TensorError(
                f"streaming: the stream has inputs of shape {self._kind}, got {got}; "
                "reset() begins another one"
            )
        self._plan = StreamPlan(self.model, kind, self.allowed, self.records)
        self._kind = kind
        return self._plan


def streaming(model: nn.Module, latency: int = 0, dim: int = 2, record: bool = True) -> StreamedModel:
    """A module that computes a model's result piece by piece: ``s(x1)``, ``s(x2)``, ... are, joined along
    time, the rows of the model's result for the joined input, as far as they are known. Pieces may have
    any length, also another one at each call.

    ``dim``: of the input, which holds time (batch, channels, time, ...). ``latency``: how many rows of
    input the result may wait for, where the model looks ahead so far; ``flush()`` then gives the rest at
    the end of a stream. ``record``: whether a step that comes again becomes a CUDA graph, where there is
    one, with memory of its own. ``reset()`` begins another stream. There are no gradients.

    Convolutions are computed by kernels to which the length is an argument, so that the pieces have the
    bits of the whole; where there is no kernel, torch computes them. TypeError for what is no module,
    ValueError for a latency below 0; at the first call Unsupported, with the operation's name and the
    cure, for models that look ahead, that norm or attend over time, or whose operations have no rule."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"streaming: model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ValueError(f"streaming: dim: expected the number of a dim, got {dim!r}")
    if not isinstance(latency, int) or isinstance(latency, bool) or latency < 0:
        raise ValueError(f"streaming: latency: expected a number of rows from 0 on, got {latency!r}")
    return StreamedModel(model, dim, latency, record)


def _captured_twice(model: nn.Module, kind: StreamKind) -> tuple[Capture, Capture]:
    """Captures at a length and at the next one that the model takes: rows may go in groups. Raises
    Unsupported, also for other operations at far more rows, as in a loop over pieces, and for a model that
    takes none of the lengths."""
    failures: list[Exception] = []

    def captured(rows: int) -> Capture | None:
        try:
            shape = with_rows(kind.shape, kind.shape.index(-1), rows)
            return Capture.of(model, shape, kind.dtype, kind.device)
        except Unsupported:
            raise
        except Exception as error:  # of the model, which does not take this length
            failures.append(error)
            return None

    for rows in LENGTHS:
        hop = 1 if (short := captured(rows)) is None else _hop(short)
        rows += -rows % hop
        short = captured(rows) if hop > 1 else short
        for more in (hop * groups for groups in GROUPS) if short is not None else ():
            if short is not None and (long := captured(rows + more)) is not None:
                short.compare(long, captured(rows + more * ceil(ROWS / more)) or long)
                return short, long
    error = failures[0]
    raise Unsupported(
        "stream:length",
        f"the model fails for inputs of {ROWS} rows, and of others that a stream is planned with: "
        f"{type(error).__name__}: {error}",
    ) from error


def _hop(capture: Capture) -> int:
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


def _versions(model: nn.Module) -> list[Any]:
    """What tells whether modules, their weights, hooks, numbers and what else they hold are the same, and
    unchanged."""
    seen: set[int] = set()

    def told(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.data_ptr(), 0 if value.is_inference() else value._version
        if isinstance(value, (nn.Module, int, float, str)) or callable(value):
            return value  # also keeps what an id would be of
        held = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
        held = dict(enumerate(value)) if isinstance(value, (list, tuple, set, frozenset)) else held
        if held is None or id(value) in seen:
            return id(value)
        seen.add(id(value))
        return [(key, told(part)) for key, part in held.items()]

    return [(module, told(vars(module))) for module in model.modules()]
