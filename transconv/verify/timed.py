"""A workload run with many schedules: checked on exact data, then timed on random data.

A workload is passed between processes as text: a convolution's problem, direction and epilogue, or a
computation. Its tensors and answers are kept while schedules change.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Protocol

import torch

from transconv.compute import Alone, Compute, examine, parse
from transconv.conv import CompiledDirection, ConvProblem, ConvWorkload, Prop, marked
from transconv.ir import Layout, Tensor
from transconv.runtime import Plan, plan
from transconv.schedule import Schedule
from transconv.target import detect
from transconv.verify import computation
from transconv.verify.case import ProblemCase
from transconv.verify.data import torch_dtype
from transconv.verify.epilogue_data import epilogue_tensors
from transconv.verify.judgement import Judgement
from transconv.verify.machine import device, synchronize

Call = Callable[[], object]

WHOLE = 1 << 22  # points of a computation of which every element is checked; of larger ones samples are


class TimedWorkload(Protocol):
    """A workload with tensors on this machine. ``footprint``: bytes that a call moves at least."""

    where: str

    @property
    def footprint(self) -> int: ...

    def plan(self, schedule: str) -> Plan:
        """Raises ScheduleError or Unsupported, which are refusals, not failures."""

    def same(self, plan: Plan) -> Judgement:
        """Whether a plan's result on exact data is the answer."""

    def make(self, plan: Plan) -> Callable[[int], Call]:
        """The plan on tensors of random data, a new set for each index."""

    def release(self) -> None:
        """Give the tensors back."""

def timed(text: str, direction: str = "", behind: str = "") -> TimedWorkload:
    """The question of some texts. Raises ProblemError, ComputeError."""
    if text.startswith("compute "):
        return OfCompute(parse(text))
    plain, names = marked(text)
    case = ProblemCase(ConvProblem.parse(plain), Prop(direction), behind)
    return OfAnySize(case, names) if names else OfProblem(case)


class OfProblem:
    """A direction of a convolution."""

    def __init__(self, case: ProblemCase) -> None:
        self.case, self.where = case, case.where

    @property
    def footprint(self) -> int:
        return self.case.problem.bytes_moved()

    def plan(self, schedule: str) -> CompiledDirection:
        return self.case.plan(schedule)

    def same(self, plan: Plan) -> Judgement:
        assert isinstance(plan, CompiledDirection)
        return self.case.same(plan)

    def make(self, plan: Plan) -> Callable[[int], Call]:
        def of(index: int) -> Call:
            case, p = self.case, self.case.problem
            tensors: dict[str, Any] = {name: random_tensor(p.shapes[name], spec.layout, case.where)
                                       for name, spec in p.specs.items()}
            tensors |= epilogue_tensors(p, case.prop, case.epilogue, "float", case.where)
            return _call(plan, tensors, case.prop.result)
        return of

    def release(self) -> None:
        self.case.release()


class OfAnySize(OfProblem):
    """The same with kernels that take some sizes as arguments (``names``), at the problem's sizes."""

    def __init__(self, case: ProblemCase, names: frozenset[str]) -> None:
        super().__init__(case)
        self.names = names

    def plan(self, schedule: str) -> CompiledDirection:
        case, p = self.case, self.case.problem
        said = Schedule.parse(schedule) if schedule else None
        workload = ConvWorkload(p, case.prop, case.after, self.names)
        made = plan(workload, case.target, said, case.deterministic, CompiledDirection, keeps=False)
        assert made.required is not None
        return made.at(dict(zip(made.required.sizes.names, (p.mb, *p.i), strict=True)))


class OfCompute:
    """A computation by itself."""

    def __init__(self, compute: Compute) -> None:
        self.compute, self.where = compute, device()
        self.case: computation.ComputationCase | None = None

    @property
    def footprint(self) -> int:
        return sum(t.layout.span * t.dtype.bytes for t in self.compute.tensors)

    def plan(self, schedule: str) -> Plan:
        said = Schedule.parse(schedule) if schedule else None
        return plan(Alone(self.compute), detect(), said, False, Plan)

    def same(self, plan: Plan) -> Judgement:
        """Every element, or those of sampled points where there are many."""
        if prod(x.size for x in self.compute.axes) <= WHOLE:
            self.case = self.case or computation.ComputationCase(self.compute)
            judged = self.case.launched(plan, self.where)
            return Judgement(max_err=judged.max_error, reason=judged.problem)
        tensors = {t.name: self._tensor(t, exact=True) for t in self.compute.tensors}
        for name in plan.workload.results:
            if tensors[name].is_floating_point():
                tensors[name].fill_(float("nan"))
        plan.launch(**tensors)
        synchronize()
        found = examine(self.compute, tensors)
        return Judgement(max_err=float("nan") if found.reason else 0.0, reason=found.reason)

    def make(self, plan: Plan) -> Callable[[int], Call]:
        def of(index: int) -> Call:
            tensors = {t.name: self._tensor(t) for t in self.compute.tensors}
            return _call(plan, tensors, plan.workload.result)
        return of

    def _tensor(self, tensor: Tensor, exact: bool = False) -> torch.Tensor:
        """Random values; indices lie inside of what they are indices of."""
        dtype = torch_dtype(tensor.dtype)
        if tensor.dtype.kind == "float" and not exact:
            return random_tensor(tensor.shape, tensor.layout, self.where)
        sizes = computation.indexed(self.compute, tensor)
        low, high = (0, min(sizes)) if sizes else (-1 if dtype.is_signed else 0, 2)
        made = torch.empty_strided(tensor.shape, _strides(tensor.layout), dtype=dtype, device=self.where)
        return made.copy_(torch.randint(low, max(high, low + 1), tensor.shape, device=self.where))

    def release(self) -> None:
        self.case = None


def _call(plan: Plan, tensors: dict[str, torch.Tensor], result: str) -> Call:
    def call() -> torch.Tensor:
        plan.launch(**tensors)
        return tensors[result]
    return call


def random_tensor(shape: tuple[int, ...], layout: Layout, where: str) -> torch.Tensor:
    """Normally distributed values in a strided layout, of integers a sixteenth of the range wide. Raises
    ValueError for a blocked one."""
    dtype = torch_dtype(layout.dtype)
    made = torch.empty_strided(shape, _strides(layout), dtype=dtype, device=where)
    if layout.dtype.kind == "int":
        low, high = layout.dtype.limits
        drawn = torch.randn(shape, device=where) * ((high - low) / 16) + (low + high + 1) / 2
        return made.copy_(drawn.clamp_(low, high).round_())
    return made.normal_() if dtype.itemsize > 1 else made.copy_(torch.randn(shape, device=where))


def _strides(layout: Layout) -> tuple[int, ...]:
    strides = layout.strides()
    if strides is None:
        raise ValueError(f"the layout {layout} is blocked; expected one with strides")
    return strides
