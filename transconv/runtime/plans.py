"""What the compiler hands out: the launches that answer a workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transconv import knobs
from transconv.backend_triton import Launcher
from transconv.compute import Compute, Workload
from transconv.ir import Kernel, Tensor
from transconv.runtime import allocator
from transconv.runtime.operands import Wanted, check, check_indices, torch_type
from transconv.schedule import Schedule
from transconv.target import Target


@dataclass(slots=True)
class Step:
    """One launch of a plan: a kernel, its text, and the schedule that shaped it."""

    compute: Compute
    schedule: Schedule
    kernel: Kernel
    source: str
    path: Path | None
    launcher: Launcher
    params: tuple[str, ...]
    digest: str  # under which its verdict is kept
    zero: Tensor | None = None  # cleared before the launch


@dataclass(slots=True)
class Plan:
    """The launches of one workload. ``fixed``: the caller gave the schedule; ``rejected``: better
    schedules that were passed over, their kernels being wrong; ``why``: what spoke for the schedule, in a
    sentence; ``deterministic``: the same bits were asked for."""

    workload: Workload
    target: Target
    schedule: Schedule
    steps: tuple[Step, ...]
    workspaces: dict[str, Tensor] = field(default_factory=dict)
    fixed: bool = False
    rejected: int = 0
    why: str = ""
    deterministic: bool = False
    wanted: tuple[Wanted, ...] = field(default=(), repr=False, compare=False)  # by the first launch

    @property
    def source(self) -> str:
        return "\n\n".join(s.source for s in self.steps)

    def launch(self, **tensors: Any) -> None:
        """Run on torch tensors by name; what is stored is written in place. Raises TensorError for a
        tensor that is missing, or that does not lie as the workload says; with TRANSCONV_VERIFY=1 also
        for an index that leaves its tensor."""
        self.check(tensors)
        if knobs.verify():
            check_indices(self.workload.computations, tensors)
        self.run(tensors)

    def check(self, tensors: dict[str, Any]) -> None:
        """TensorError unless each tensor is what the plan was made for: kernels ask no more."""
        if not self.wanted:
            self.wanted = tuple(Wanted(t.name, t.dtype, t.shape, t.layout) for t in self.workload.tensors)
        check(self.wanted, tensors, lambda: self.workload.title)

    def run(self, tensors: dict[str, Any]) -> None:
        """Launch on tensors by name that were checked, to which workspaces are added for the time of the
        call."""
        near = next(iter(tensors.values()))
        for name, spec in self.workspaces.items():
            tensors[name] = near.new_empty(spec.layout.span, dtype=torch_type(spec))
        for step in self.steps:
            if step.zero is not None:
                tensors[step.zero.name].zero_()
            step.launcher([tensors[name] for name in step.params])

    def starter(self, device: int, aligned: bool,
                names: tuple[str, ...]) -> Callable[..., None] | None:
        """A function of the tensors ``names`` that starts the plan with nothing left to decide.

        None before the first launch on the device with tensors so ``aligned``. The caller sees to it
        that the device is the current one.
        """
        known = (*names, *self.workspaces)
        steps: list[tuple[Callable[..., None], int | None]] = []
        for step in self.steps:
            begin = None
            if all(p in known for p in step.params):
                begin = step.launcher.starter(device, aligned,
                                              tuple(known.index(p) for p in step.params))
            if begin is None:
                return None
            steps.append((begin, known.index(step.zero.name) if step.zero else None))
        if not steps:
            return None
        if len(steps) == 1 and not self.workspaces and steps[0][1] is None:
            return steps[0][0]
        spaces = [((spec.layout.span,), torch_type(spec)) for spec in self.workspaces.values()]
        empty = allocator.quickest()

        def run(*given: Any) -> None:
            for shape, dtype in spaces:
                given = (*given, empty(shape, (1,), dtype))
            for begin, zero in steps:
                if zero is not None:
                    given[zero].zero_()
                begin(*given)

        return run
