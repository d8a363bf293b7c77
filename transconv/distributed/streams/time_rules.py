"""Rules of aten's operations along the time of a stream: which rows it reads, how many it makes, and
how it computes some of them.

A rule is found from two captures of different length (graph_capture.py). An operation without a rule, and
one whose rows depend on the end of the stream, is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from transconv.compute import AxisSpan
from transconv.distributed.streams.graph_capture import CELLS, Capture, CapturedOperation, ResultReference
from transconv.distributed.streams.time_axis import (
    StreamPiece,
    TimeAxis,
    TimeRelation,
    TimeRule,
    Values,
    clipped,
    has_numbers_of,
    pad_rows,
    repeated,
    runner,
    slice_of,
    take_rows,
    value_of,
)
from transconv.support import Unsupported

Tensor = torch.Tensor
Convolve = Callable[..., Tensor]
END = 1 << 62


class TimeRules:
    """The rules of a captured model. ``axes``: of the results so far that have rows; ``fixed``: those that
    do not change any more."""

    def __init__(self, short: Capture, long: Capture, axis: TimeAxis, convolve: Convolve) -> None:
        self.short, self.long, self.convolve = short, long, convolve
        self.axes: dict[ResultReference, TimeAxis] = {ResultReference(-1): axis}
        self.fixed: set[ResultReference] = set()

    def of_all(self) -> list[TimeRule]:
        """A rule for each operation. Raises Unsupported that names the first one without a rule."""
        return [self._kept(at, op) for at, op in enumerate(self.short.operations)]

    def _kept(self, at: int, op: CapturedOperation) -> TimeRule:
        rule = self.rule_of(at, op)
        for output, shape in enumerate(op.shapes):
            value = ResultReference(at, output)
            if rule.axis is None:
                self.fixed.add(value)
                continue
            if len(shape) <= rule.axis.dim or (rule.carries and output):
                continue  # moments that nobody asked for, or a state
            self.axes[value] = rule.axis
            for capture in (self.short, self.long):
                made = capture.operations[at].shapes[output]
                rows = rule.total(self.rows(op.references, capture))
                if made[rule.axis.dim] != rows * rule.axis.outer:
                    self.refuse(op, "its number of rows does not follow from its operand's")
        return rule

    def rows(self, references: Sequence[ResultReference], capture: Capture) -> int:
        """The number of rows of an operation's operands in a capture."""
        moving = [r for r in references if r in self.axes]
        counts = {capture.shape_of(r)[self.axes[r].dim] // self.axes[r].outer for r in moving}
        return max(counts)

    def refuse(self, op: CapturedOperation, why: str, cure: str = "") -> NoReturn:
        """Raise Unsupported with an operation's name."""
        hint = cure or "stream the part of the model before or behind it"
        raise Unsupported(f"stream:{op.name}", f"{op} cannot be streamed: {why}; {hint}")

    # -- what is common --------------------------------------------------------------------------

    def rule_of(self, at: int, op: CapturedOperation) -> TimeRule:
        """The rule of an operation."""
        other = self.long.operations[at]
        self._compare(op, other)
        moving = [r for r in op.references if r in self.axes]
        if not all(r in self.axes or r in self.fixed for r in op.references):
            self.refuse(op, "it reads the last state of a recurrence, which is known at the end alone")
        if not moving:
            if op.args != other.args and not has_numbers_of(op, other):
                self.refuse(op, "it depends on the length of the stream")
            return TimeRule(None, runner(op))
        found = getattr(self, f"rule_{op.name.strip('_')}", None)
        if found is not None:
            made: TimeRule = found(op, other)
            return made
        if op.name in CELLS:
            return self.recurrent(at, op, other)
        if torch.Tag.pointwise in op.op.tags:
            return self.pointwise(op, other)
        self.refuse(op, "there is no rule for it")

    def _compare(self, op: CapturedOperation, other: CapturedOperation) -> None:
        """Refuse constants that are as long as the stream: positions, masks."""
        for a, b in zip(op.leaves(), other.leaves(), strict=True):
            if isinstance(a, Tensor) and a is not b and (a.shape != b.shape or not torch.equal(a, b)):
                self.refuse(op, "it reads a constant that is as long as the stream, such as positions")

    def single(self, op: CapturedOperation) -> tuple[ResultReference, TimeAxis]:
        """The one operand that has rows."""
        moving = list(dict.fromkeys(r for r in op.references if r in self.axes))
        if len(moving) != 1:
            self.refuse(op, "several of its operands change along time")
        return moving[0], self.axes[moving[0]]

    def by_row(
        self, op: CapturedOperation, other: CapturedOperation, axis: TimeAxis, alike: bool = True
    ) -> TimeRule:
        """Each row of the same row of its operands. ``alike``: numbers must be those of the other capture,
        too."""
        if alike and not has_numbers_of(op, other):
            self.refuse(op, "its numbers depend on the length of the stream")
        return TimeRule(axis, runner(op))

    def pointwise(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        """Operands broadcast; of each with rows the time is counted from the last dim."""
        rank = len(op.shapes[0])
        places = {
            (self.axes[r].dim - len(self.short.shape_of(r)) + rank, self.axes[r].outer)
            for r in op.references
            if r in self.axes
        }
        if len(places) != 1:
            self.refuse(op, "its operands have time in different dims")
        dim, outer = places.pop()
        for leaf in op.leaves():
            fixed = isinstance(leaf, Tensor) or (isinstance(leaf, ResultReference) and leaf in self.fixed)
            shape = (
                (leaf.shape if isinstance(leaf, Tensor) else self.short.shape_of(leaf)) if fixed else ()
            )
            at = dim - rank + len(shape)
            if fixed and at >= 0 and shape[at] != 1:
                self.refuse(op, "an operand without time is as long as the stream")
        return self.by_row(op, other, TimeAxis(dim, outer))

    def beside(
        self, op: CapturedOperation, dims: Sequence[int], what: str
    ) -> tuple[ResultReference, TimeAxis]:
        """The operand, of an operation over ``dims``, none of which is time."""
        x, axis = self.single(op)
        rank = len(self.short.shape_of(x))
        if axis.dim in {d % rank for d in dims}:
            self.refuse(op, f"{what} goes over time", "a norm over channels alone can be streamed")
        return x, axis

    # -- windows ---------------------------------------------------------------------------------

    def rule_convolution(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        x, w, b, stride, padding, dilation, transposed, more, groups = op.args
        _, axis = self.single(op)
        if not isinstance(x, ResultReference) or x not in self.axes:
            self.refuse(op, "its weight changes along time")
        if axis.dim == 0:
            return self.by_row(op, other, axis)
        at, outer = axis.dim - 2, axis.outer
        if at < 0 or outer != 1:
            self.refuse(op, "it sums over a dim that has time")
        k = w.shape[2 + at] if isinstance(w, Tensor) else self.short.shape_of(w)[2 + at]
        s, p, d = stride[at], padding[at], dilation[at]
        beside = [0 if i == at else n for i, n in enumerate(padding)]
        reach = (k - 1) * d + 1
        if transposed:
            extra = more[at]
            relation = TimeRelation.of_transposed_window(k, s, d, p)
            more = [max(0, s - reach) if i == at else n for i, n in enumerate(more)]

            if extra > p:
                self.refuse(op, "its output_padding adds rows behind the last window")

            def scatter(values: Values, piece: StreamPiece) -> Tensor:
                """All that the operand's rows make, of which the wanted rows."""
                read = value_of(w, values), value_of(b, values)
                given = (*read, stride, beside, dilation, True, more, groups)
                wide = self.convolve(values[x], *given, at)
                return take_rows(wide, axis, *piece.made.seen_from(piece.read.start * s - p))

            return TimeRule(
                axis, scatter, relation, lambda n: (n - 1) * s - 2 * p + reach + extra if n else 0
            )

        def gather(values: Values, piece: StreamPiece) -> Tensor:
            wide = pad_rows(values[x], axis, piece.low, piece.high)
            given = value_of(w, values), value_of(b, values), stride, beside, dilation, False, more, groups
            return self.convolve(wide, *given, at)

        return TimeRule(
            axis,
            gather,
            TimeRelation.of_window(k, s, d, p),
            lambda n: max(0, (n + 2 * p - reach) // s + 1),
        )

    def rule_constant_pad_nd(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        return self.padded(
            op, other, lambda t, axis, low, high: pad_rows(t, axis, low, high, *op.args[2:])
        )

    def rule_replication_pad1d(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        def repeat(t: Tensor, axis: TimeAxis, low: int, high: int) -> Tensor:
            first = t.narrow(axis.dim, 0, 1).expand(*t.shape[: axis.dim], low, *t.shape[axis.dim + 1 :])
            return torch.cat([first, t], axis.dim)

        return self.padded(op, other, repeat, behind=False)

    rule_replication_pad2d = rule_replication_pad3d = rule_replication_pad1d

    def rule_reflection_pad1d(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        def reflect(t: Tensor, axis: TimeAxis, low: int, high: int) -> Tensor:
            return torch.cat([t.narrow(axis.dim, 1, low).flip(axis.dim), t], axis.dim)

        return self.padded(op, other, reflect, behind=False, least=1 + op.args[1][0])

    rule_reflection_pad2d = rule_reflection_pad3d = rule_reflection_pad1d

    def padded(
        self,
        op: CapturedOperation,
        other: CapturedOperation,
        fill: Callable[[Tensor, TimeAxis, int, int], Tensor],
        behind: bool = True,
        least: int = 1,
    ) -> TimeRule:
        """Rows before and behind. ``behind``: whether those behind are known before the end; ``least``:
        how many rows those before are made of, where time is the last dim."""
        x, axis = self.single(op)
        pad, rank = op.args[1], len(self.short.shape_of(x))
        at = 2 * (rank - 1 - axis.dim)
        low, high = (pad[at], pad[at + 1]) if at < len(pad) else (0, 0)
        if list(pad) != list(other.args[1]):
            self.refuse(op, "how much it pads depends on the length of the stream")
        if axis.outer != 1 and (low or high):
            self.refuse(op, "it pads a dim that has time and something else")
        if high > 0 and not behind:
            self.refuse(op, f"it repeats the last {high} rows, which are known at the end alone")
        if high < 0 and not behind:
            self.refuse(op, "it repeats the first rows and drops the last ones", "pad first, then slice")
        if least > 1 and (at or not low):
            least = 1 + low
        rest = [0 if i in (at, at + 1) else n for i, n in enumerate(pad)]

        def compute(values: Values, piece: StreamPiece) -> Tensor:
            t = values[x]
            t = fill(t, axis, piece.low, piece.high) if piece.low or piece.high else t
            return op.op(t, rest, *op.args[2:]) if any(rest) else t

        return TimeRule(
            axis, compute, TimeRelation(rows=(AxisSpan(-low, 1 - low),)), lambda n: n + low + high, least
        )

    def rule_upsample_nearest1d(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        x, axis = self.single(op)
        if axis.dim < 2:
            return self.by_row(op, other, axis)
        sizes = op.shapes[0][2:]
        f = self._ratio(op, other, x, axis)

        def compute(values: Values, piece: StreamPiece) -> Tensor:
            rows = piece.made.size * axis.outer
            spatial = [rows if i == axis.dim - 2 else n for i, n in enumerate(sizes)]
            return F.interpolate(values[x], spatial, mode=mode)

        mode = "nearest-exact" if "exact" in op.name else "nearest"
        return TimeRule(axis, compute, repeated(f), lambda n: n * f)

    rule_upsample_nearest2d = rule_upsample_nearest3d = rule_upsample_nearest1d
    rule_upsample_nearest_exact1d = rule_upsample_nearest_exact2d = rule_upsample_nearest1d
    rule_upsample_nearest_exact3d = rule_upsample_nearest1d

    def _ratio(
        self, op: CapturedOperation, other: CapturedOperation, x: ResultReference, axis: TimeAxis
    ) -> int:
        made = [o.shapes[0][axis.dim] for o in (op, other)]
        had = [c.shape_of(x)[axis.dim] for c in (self.short, self.long)]
        f = made[0] // had[0]
        if [n * f for n in had] != made:
            self.refuse(op, "rows are not repeated equally often")
        return f

    # -- views -----------------------------------------------------------------------------------

    def rule_view(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        x, axis = self.single(op)
        sizes, longer, before = op.shapes[0], other.shapes[0], self.short.shape_of(x)
        changed = [d for d, (a, b) in enumerate(zip(sizes, longer, strict=True)) if a != b]
        outside = prod(before[: axis.dim]) * axis.outer
        dim = changed[0] if len(changed) == 1 else 0
        inside = prod(sizes[:dim])
        if len(changed) != 1 or outside % inside or sizes[dim] % (outside // inside):
            self.refuse(op, "time is no dim of its result")
        outer = outside // inside
        made, had = sizes[dim] // outer, before[axis.dim] // axis.outer
        if made % had and had % made:
            self.refuse(op, "it divides rows unequally")
        f, g = max(1, made // had), max(1, had // made)
        relation = repeated(f) if g == 1 else TimeRelation(1, g, (AxisSpan(0, g),))

        def compute(values: Values, piece: StreamPiece) -> Tensor:
            return values[x].reshape(
                [piece.made.size * outer if d == dim else n for d, n in enumerate(sizes)]
            )

        return TimeRule(TimeAxis(dim, outer), compute, relation, lambda n: n * f // g)

    rule_reshape = rule_unsafe_view = rule_reshape_alias = rule_view

    def rule_expand(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        x, axis = self.single(op)
        sizes = op.shapes[0]
        dim = axis.dim + len(sizes) - len(self.short.shape_of(x))

        def compute(values: Values, piece: StreamPiece) -> Tensor:
            return values[x].expand(
                [piece.made.size * axis.outer if d == dim else n for d, n in enumerate(sizes)]
            )

        return TimeRule(TimeAxis(dim, axis.outer), compute)

    def rule_repeat(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        x, axis = self.single(op)
        dim = axis.dim + len(op.shapes[0]) - len(self.short.shape_of(x))
        if op.args[1][dim] != 1:
            self.refuse(op, "it repeats the whole stream")
        return self.by_row(op, other, TimeAxis(dim, axis.outer))

    def rule_permute(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        x, axis = self.single(op)
        rank = len(self.short.shape_of(x))
        dims = [d % rank for d in op.args[1]]
        return self.by_row(op, other, TimeAxis(dims.index(axis.dim), axis.outer))

    def rule_transpose(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        x, axis = self.single(op)
        rank = len(self.short.shape_of(x))
        a, b = (d % rank for d in (op.args[1:3] if len(op.args) > 1 else (0, rank - 1)))
        dim = {a: b, b: a}.get(axis.dim, axis.dim)
        return self.by_row(op, other, TimeAxis(dim, axis.outer))

    rule_t = rule_transpose

    def rule_unsqueeze(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        _, axis = self.single(op)
        at = op.args[1] % len(op.shapes[0])
        return self.by_row(op, other, TimeAxis(axis.dim + (at <= axis.dim), axis.outer))

    def rule_squeeze(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        x, axis = self.single(op)
        shape = self.short.shape_of(x)
        given: Any = op.args[1] if len(op.args) > 1 else range(len(shape))
        dims = [d % len(shape) for d in (range(given, given + 1) if isinstance(given, int) else given)]
        dims = [d for d in dims if shape[d] == 1 and d != axis.dim]
        made = TimeAxis(axis.dim - sum(d < axis.dim for d in dims), axis.outer)
        return TimeRule(made, lambda values, piece: values[x].squeeze(tuple(dims)))

    def rule_slice(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        x, axis = self.single(op)
        dim, start, end, step = slice_of(op)
        if dim % len(self.short.shape_of(x)) != axis.dim:
            return self.by_row(op, other, axis)
        if axis.outer != 1:
            self.refuse(op, "it cuts a dim that has time and something else")
        size, longer = (c.shape_of(x)[axis.dim] for c in (self.short, self.long))
        _, of_start, of_end, _ = slice_of(other)
        begins = [clipped(s or 0, n) for s, n in ((start, size), (of_start, longer))]
        ends = [clipped(END if e is None else e, n) for e, n in ((end, size), (of_end, longer))]
        if begins[0] != begins[1]:
            self.refuse(op, "it takes the last rows, which are known at the end alone")
        if ends[0] == ends[1]:
            return self._first_rows(op, ends[0])
        if end == of_end and END > end > 0:
            self.refuse(op, f"it ends at row {end}, wherever the stream ends")
        less, begin = size - ends[0], begins[0]
        if longer - ends[1] != less:
            self.refuse(op, "where it ends depends on the length of the stream")
        relation = TimeRelation(1, step, (AxisSpan(begin, begin + 1),))

        def compute(values: Values, piece: StreamPiece) -> Tensor:
            return (
                values[x] if step == 1 else values[x][(slice(None),) * axis.dim + (slice(0, None, step),)]
            )

        return TimeRule(axis, compute, relation, lambda n: max(0, -(-(n - less - begin) // step)))

    def rule_select(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        x, axis = self.single(op)
        dim, index = op.args[1] % len(self.short.shape_of(x)), op.args[2]
        if dim != axis.dim:
            return self.by_row(op, other, TimeAxis(axis.dim - (dim < axis.dim), axis.outer))
        if axis.outer != 1 or index < 0 or other.args[2] != index:
            self.refuse(op, "it takes the last rows, which are known at the end alone")
        return self._first_rows(op, index + 1)

    def _first_rows(self, op: CapturedOperation, count: int) -> TimeRule:
        """A value of the first rows alone."""
        return TimeRule(None, runner(op), least=count)

    def rule_cat(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        parts, dim = op.args[0], (op.args[1] if len(op.args) > 1 else 0)
        moving = [i for i, t in enumerate(parts) if isinstance(t, ResultReference) and t in self.axes]
        axis = self.axes[parts[moving[0]]]
        if dim % len(op.shapes[0]) != axis.dim:
            if len(moving) < len(parts):
                self.refuse(op, "an operand without time is as long as the stream")
            if len({self.axes[t] for t in parts}) > 1:
                self.refuse(op, "its operands have time in different dims")
            return self.by_row(op, other, axis)
        if len(moving) != 1 or axis.outer != 1:
            self.refuse(op, "it joins several streams in time")
        x, before, behind = parts[moving[0]], parts[: moving[0]], parts[moving[0] + 1 :]
        low, high = (sum(self._length(t, axis.dim) for t in side) for side in (before, behind))

        def compute(values: Values, piece: StreamPiece) -> Tensor:
            found = [values[x]]
            if piece.low:
                first = torch.cat([value_of(t, values) for t in before], axis.dim)
                found.insert(0, first.narrow(axis.dim, low - piece.low, piece.low))
            if piece.high:
                last = torch.cat([value_of(t, values) for t in behind], axis.dim)
                found.append(last.narrow(axis.dim, high - piece.high, piece.high))
            return torch.cat(found, axis.dim)

        return TimeRule(
            axis, compute, TimeRelation(rows=(AxisSpan(-low, 1 - low),)), lambda n: n + low + high
        )

    def _length(self, t: Any, dim: int) -> int:
        return (t.shape if isinstance(t, Tensor) else self.short.shape_of(t))[dim]

    def rule_split(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        x, axis = self.single(op)
        dim = (op.args[2] if len(op.args) > 2 else 0) % len(self.short.shape_of(x))
        if dim == axis.dim:
            self.refuse(op, "it cuts the stream in pieces")
        return self.by_row(op, other, axis)

    rule_split_with_sizes = rule_split

    def rule_unbind(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        x, axis = self.single(op)
        dim = (op.args[1] if len(op.args) > 1 else 0) % len(self.short.shape_of(x))
        if dim == axis.dim:
            self.refuse(op, "it cuts the stream in pieces")
        return self.by_row(op, other, TimeAxis(axis.dim - (dim < axis.dim), axis.outer))

    def rule_stack(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        axis = self.axes[next(r for r in op.references if r in self.axes)]
        if {self.axes.get(t) for t in op.args[0] if isinstance(t, ResultReference)} != {axis}:
            self.refuse(op, "its operands have time in different dims")
        dim = (op.args[1] if len(op.args) > 1 else 0) % len(op.shapes[0])
        return self.by_row(op, other, TimeAxis(axis.dim + (dim <= axis.dim), axis.outer))

    def rule_clone(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        return self.by_row(op, other, self.single(op)[1])

    rule_prelu_kernel = pointwise
    rule_alias = rule_detach = rule_to_copy = rule_zeros_like = rule_ones_like = rule_clone

    # -- sums beside time ------------------------------------------------------------------------

    def rule_mm(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        x, axis = self.single(op)
        if axis.dim or x not in (op.args[0], op.args[-2]):
            self.refuse(op, "it sums over time")
        return self.by_row(op, other, axis)

    rule_addmm = rule_mm

    def rule_linear(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        x, axis = self.beside(op, [-1], "its sum")
        if x != op.args[0]:
            self.refuse(op, "its weight changes along time")
        return self.by_row(op, other, axis)

    def rule_bmm(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        a, b = (self.axes.get(t) if isinstance(t, ResultReference) else None for t in op.args[-2:])
        if a and b and a == b and a.dim == 0:
            return self.by_row(op, other, a)
        if a and not b and a.dim == 1:
            return self.by_row(op, other, a)
        self.refuse(op, "it multiplies rows of different times, as attention over time does")

    rule_baddbmm = rule_bmm

    def rule_softmax(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        return self.by_row(op, other, self.beside(op, [op.args[1]], "it")[1])

    rule_log_softmax = rule_glu = rule_softmax

    def rule_native_layer_norm(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        dims = range(-len(op.args[1]), 0)
        return self.by_row(op, other, self.beside(op, list(dims), "the norm")[1])

    rule_fused_rms_norm = rule_native_layer_norm

    def rule_native_group_norm(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        x, axis = self.beside(op, range(1, len(op.shapes[0])), "the norm")
        _, w, b, _, c, hw, groups, eps = op.args

        def compute(values: Values, piece: StreamPiece) -> Any:
            t = values[x]
            return op.op(t, value_of(w, values), value_of(b, values), t.shape[0], c, hw, groups, eps)

        return TimeRule(axis, compute)

    def rule_native_batch_norm_legit_no_training(
        self, op: CapturedOperation, other: CapturedOperation
    ) -> TimeRule:
        return self.by_row(op, other, self.beside(op, [1], "the norm")[1])

    def rule_native_batch_norm(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        if op.args[5]:
            self.refuse(op, "in training its norm goes over time", "call model.eval() first")
        return self.by_row(op, other, self.beside(op, [1], "the norm")[1])

    rule_cudnn_batch_norm = rule_native_batch_norm

    def rule_sum(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        return self._reduced(op, other, 1, 2)

    rule_mean = rule_amax = rule_amin = rule_sum

    def rule_var(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        return self._reduced(op, other, 1, 3)

    def rule_linalg_vector_norm(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        return self._reduced(op, other, 2, 3)

    def _reduced(
        self, op: CapturedOperation, other: CapturedOperation, dims_at: int, keep_at: int
    ) -> TimeRule:
        rank = len(self.short.shape_of(self.single(op)[0]))
        found = op.args[dims_at] if len(op.args) > dims_at else op.kwargs.get("dim")
        given = [found] if isinstance(found, int) else found
        dims = [d % rank for d in given] if given else list(range(rank))
        _, axis = self.beside(op, dims, "its sum" if op.name in ("sum", "mean") else "it")
        keeps = op.args[keep_at] if len(op.args) > keep_at else op.kwargs.get("keepdim", False)
        gone = 0 if keeps else sum(d < axis.dim for d in dims)
        return self.by_row(op, other, TimeAxis(axis.dim - gone, axis.outer))

    def recurrent(self, at: int, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        """A recurrence from the first row to the last, with its state from piece to piece."""
        x, axis = self.single(op)
        *_, both_ways, batch_first = op.args
        rank = len(self.short.shape_of(x))
        if axis.dim != int(batch_first and rank == 3):
            return self.by_row(op, other, axis)
        if both_ways or axis.outer != 1:
            self.refuse(op, "it also runs from the end to the beginning")

        def compute(values: Values, piece: StreamPiece) -> Any:
            begin = tree_leaves(op.args[1])
            states = [values.get(ResultReference(at, 1 + i), t) for i, t in enumerate(begin)]
            return op.op(values[x], states if op.name == "lstm" else states[0], *op.args[2:])

        return TimeRule(axis, compute, carries=True)

    def rule_embedding(self, op: CapturedOperation, other: CapturedOperation) -> TimeRule:
        return self.by_row(op, other, self.single(op)[1])

    def rule_scaled_dot_product_flash_attention_for_cpu(
        self, op: CapturedOperation, other: CapturedOperation
    ) -> TimeRule:
        found = {self.axes.get(t) for t in op.args[:3]}
        axis = found.pop()
        if found or axis is None or axis.dim != 0:
            self.refuse(op, "attention goes over time")
        return self.by_row(op, other, axis)

    rule_scaled_dot_product_flash_attention = rule_scaled_dot_product_flash_attention_for_cpu
    rule_scaled_dot_product_efficient_attention = rule_scaled_dot_product_flash_attention_for_cpu
    rule_scaled_dot_product_cudnn_attention = rule_scaled_dot_product_flash_attention_for_cpu
