"""Plans: the launches that compute a workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from transconv import knobs
from transconv.backend_triton import Launcher, SizedLauncher
from transconv.compute import Compute, Workload
from transconv.ir import Kernel, Sizes, Tensor
from transconv.runtime import allocator
from transconv.runtime.operands import Wanted, check, check_indices, torch_type
from transconv.runtime.sized import sizes_of_call
from transconv.schedule import Schedule
from transconv.target import Target


class Lowered(NamedTuple):
    """The computation of a launch, and the kernel that the passes made of it."""

    compute: Compute
    kernel: Kernel


@dataclass(slots=True)
class Step:
    """One launch of a plan: a kernel, its text and its schedule. ``does``: that of its computation;
    ``lowered``: its computation and kernel; runs the passes if the text was read from disk."""

    does: str
    schedule: Schedule
    lowered: Callable[[], Lowered]
    source: str
    path: Path | None
    launcher: Launcher
    params: tuple[str, ...]
    digest: str  # the key of its verdict
    zero: Tensor | None = None  # cleared before the launch

    @property
    def compute(self) -> Compute:
        """The computation of the launch."""
        return self.lowered().compute

    @property
    def kernel(self) -> Kernel:
        """The kernel, in the IR."""
        return self.lowered().kernel


@dataclass(slots=True)
class Plan:
    """The launches of one workload. ``fixed``: the caller gave the schedule; ``rejected``: how many better
    schedules were skipped because their kernels are wrong; ``why``: the reason for the schedule, in a
    sentence; ``deterministic``: results have the same bits in every run."""

    workload: Workload
    target: Target
    schedule: Schedule
    steps: tuple[Step, ...]
    workspaces: dict[str, Tensor] = field(default_factory=dict)
    fixed: bool = False
    rejected: int = 0
    why: str = ""
    deterministic: bool = False
    wanted: tuple[Wanted, ...] = field(default=(), repr=False, compare=False)  # set at the first launch

    @property
    def source(self) -> str:
        """The Triton text of its kernels, in the order of launches."""
        return "\n\n".join(s.source for s in self.steps)

    def launch(self, **tensors: Any) -> None:
        """Run on torch tensors by name; results are written in place. Raises TensorError for a tensor that
        is missing or has another type, shape or layout than the workload's; with TRANSCONV_VERIFY=1 also
        for an index that is out of bounds."""
        self.check(tensors)
        if knobs.verify():
            check_indices(self.workload.computations, tensors)
        self.run(tensors)

    def check(self, tensors: dict[str, Any]) -> None:
        """Raise TensorError unless each tensor is as the workload says. Kernels do not check this."""
        if self.sizes:
            check(self._wanted_at(self.sizes_of(tensors)), tensors, lambda: self.workload.title)
            return
        if not self.wanted:
            self.wanted = tuple(Wanted(t.name, t.dtype, t.shape, t.layout) for t in self.workload.tensors)
        check(self.wanted, tensors, lambda: self.workload.title)

    @property
    def sizes(self) -> Sizes | None:
        """The sizes that are arguments of its kernels, and their requirements; None if there are none."""
        return next((s.kernel.sizes for s in self.steps if s.kernel.sizes), None)

    def sizes_of(self, tensors: dict[str, Any]) -> dict[str, int]:
        """The sizes of a call, by name. Raises TensorError for sizes that do not meet the requirements."""
        assert self.sizes is not None
        return sizes_of_call(self.sizes, self.workload.tensors, tensors, self.workload.title)

    def _wanted_at(self, sizes: dict[str, int]) -> list[Wanted]:
        made = [t.at(sizes) for t in self.workload.tensors]
        return [Wanted(t.name, t.dtype, t.shape, t.layout) for t in made]

    def run(self, tensors: dict[str, Any]) -> None:
        """Launch on checked tensors, by name; workspaces are added to the dict."""
        if self.sizes:
            sizes = self.sizes_of(tensors)
            for step in self.steps:
                assert isinstance(step.launcher, SizedLauncher)
                step.launcher.start([tensors[name] for name in step.params], sizes)
            return
        near = next(iter(tensors.values()))
        for name, spec in self.workspaces.items():
            tensors[name] = near.new_empty(spec.layout.span, dtype=torch_type(spec))
        for step in self.steps:
            if step.zero is not None:
                tensors[step.zero.name].zero_()
            step.launcher([tensors[name] for name in step.params])

    def starter(self, device: int, aligned: bool,
                names: tuple[str, ...]) -> Callable[..., None] | None:
        """A function of the tensors ``names`` that launches the plan without checks.

        None before the first launch on the device with tensors of this alignment (``aligned``: at
        multiples of 16 bytes), and if sizes are arguments. The device must be the current one.
        """
        known = (*names, *self.workspaces)
        if self.sizes:
            return None
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
