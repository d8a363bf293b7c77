"""Convolutions along a stream by kernels to which the length is an argument.

The schedule of a kernel decides how its sums are grouped, and sizes decide which schedule is chosen. So
a stream has one plan for each convolution, whatever the lengths of its pieces: the length is a name
(``iw?``), and the example that the plan is chosen for does not depend on a call. Nothing is padded along
time here: a piece has the rows that it reads, and zeros that were added to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from transconv.calls import stats
from transconv.calls.guard import ALIGNMENT
from transconv.conv import CompiledDirection, ConvWorkload, Epilogue, Prop
from transconv.runtime import PlanRequest, ready
from transconv.support import Unsupported
from transconv.torch_ops.arguments import Params, output_shape
from transconv.torch_ops.calls import lower_call

Tensor = torch.Tensor
LENGTHS = {1: 1024, 2: 64, 3: 8}
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
    """The plans of a stream's convolutions."""

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
        made: Any = torch.ops.aten.convolution.default
        return made(x, w, b, stride, padding, dilation, transposed, more, groups)  # type: ignore[no-any-return]

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
        rows = LENGTHS[len(params.stride)]
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
