"""Plans: the launches that compute a workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from transconv import knobs
from transconv.backend_triton import Bind, KernelStart, Launcher, numbers_of, torch_internals
from transconv.compute import Compute, Workload
from transconv.cost import AtSizes, CostFormula
from transconv.ir import Kernel, Tensor, Values
from transconv.runtime import launch_codegen
from transconv.runtime.launch_codegen import StarterAt
from transconv.runtime.operands import Wanted, check, check_indices, torch_type
from transconv.runtime.size_arguments import Required, required
from transconv.schedule import Schedule
from transconv.target import Target

Made = TypeVar("Made", bound="Plan")


@cache
def _field_names(kind: type[Plan]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


class LoweredStep(NamedTuple):
    """The computation of a launch, and the kernel that the passes made of it."""

    compute: Compute
    kernel: Kernel


@dataclass(slots=True)
class PlanStep:
    """One launch of a plan: a kernel, its text and its schedule. ``does``: that of its computation;
    ``lowered``: its computation and kernel; runs the passes if the text was read from disk."""

    does: str
    schedule: Schedule
    lowered: Callable[[], LoweredStep]
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
    sentence; ``tuned``: whether tuning found it, for this problem or one that is close;
    ``deterministic``: results have the same bits in every run; ``required``: what must hold for the sizes
    that are arguments of its kernels; ``sizes``: these, if the plan is for given ones (``at``); otherwise
    they are read from a call's tensors; ``padding``: boxes of the result's blocks that hold no element and
    are cleared behind the launches; ``estimated``: see ``formulas``."""

    workload: Workload
    target: Target
    schedule: Schedule
    steps: tuple[PlanStep, ...]
    workspaces: dict[str, Tensor] = field(default_factory=dict)
    fixed: bool = False
    rejected: int = 0
    why: str = ""
    tuned: bool = False
    deterministic: bool = False
    wanted: tuple[Wanted, ...] = field(default=(), repr=False, compare=False)  # set at the first launch
    required: Required | None = field(default=None, repr=False, compare=False)
    sizes: Values | None = None
    padding: list[tuple[slice, ...]] = field(default_factory=list, repr=False)
    estimated: tuple[CostFormula, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        sized = sorted(self.steps, key=_copies)  # the examples are those of what needs the copies
        each = [s.launcher.requires for s in sized if s.launcher.requires]
        self.required = required(each, self.workload.tensors, self.workload.title) if each else None

    @property
    def numbers(self) -> Callable[..., tuple[Any, ...]]:
        """What calls compute from sizes that are arguments, in their order: see ``numbers_of``."""
        required, spaces = self.required, self.workspaces.values()
        if required is None:
            rooms = tuple([(t.layout.span,) for t in spaces])
            found = *[s.launcher.numbers()[0] for s in self.steps], rooms
            return lambda: found
        if required.numbers is None:  # a plan that is read need not be run
            required.numbers = numbers_of([s.launcher for s in self.steps], [t.room for t in spaces],
                                          required.names)
        return required.numbers

    @property
    def source(self) -> str:
        """The Triton text of its kernels, in the order of launches."""
        return "\n\n".join(s.source for s in self.steps)

    @property
    def digests(self) -> set[str]:
        """The keys of its kernels' verdicts."""
        return {s.digest for s in self.steps}

    def formulas(self) -> tuple[CostFormula, ...]:
        """What its kernels are estimated to take for sizes that are their arguments, one for each
        computation; of a plan from disk as they were found when it was made."""
        if not self.estimated:
            # Copies are part of what needs them.
            sized = [s for s in self.steps if s.launcher.sizes and not _copies(s)]
            each = self.workload.computations
            together = len(sized) == 1  # which may compute all stride phases
            self.estimated = tuple([AtSizes(s.schedule, c, self.target, together and n > 0).formula()
                                    for n, (s, c) in enumerate(zip(
                                        sized * len(each) if together else sized, each, strict=True))])
        return self.estimated

    def launch(self, /, **tensors: Any) -> None:
        """Run on torch tensors by name; results are written in place. Raises TensorError for a tensor that
        is missing or has another type, shape or layout than the workload's; with TRANSCONV_VERIFY=1 also
        for an index that is out of bounds."""
        self.check(tensors)
        if knobs.verify():
            check_indices(self.workload.computations, tensors)
        self.run(tensors)

    def check(self, tensors: dict[str, Any]) -> None:
        """Raise TensorError unless each tensor is as the workload says. Kernels do not check this."""
        wanted = (self.required.wanted(self.required.of_call(tensors))
                  if self.required and not self.sizes else self.operands())
        check(wanted, tensors, lambda: self.workload.title)

    def operands(self) -> tuple[Wanted, ...]:
        """The tensors of its calls, of the given sizes where these are arguments of its kernels."""
        if not self.wanted:
            self.wanted = (self.required.wanted(self.sizes) if self.required and self.sizes else
                           tuple(map(Wanted.of, self.workload.tensors)))
        return self.wanted

    def at(self: Made, sizes: Values) -> Made:
        """This plan for given sizes: its calls read none from their tensors. Raises TensorError for sizes
        that do not meet the requirements."""
        assert self.required is not None
        self.required.check(sizes)
        return self.held(sizes)

    def held(self: Made, sizes: Values) -> Made:
        """``at`` for sizes that meet the requirements."""
        kind: Any = type(self)
        made: Made = object.__new__(kind)
        for name in _field_names(kind):
            setattr(made, name, getattr(self, name))
        made.sizes, made.wanted = sizes, ()
        return made

    def run(self, tensors: dict[str, Any]) -> None:
        """Launch on checked tensors, by name; workspaces are added to the dict."""
        sizes: Values = {}
        if self.required:
            sizes = self.sizes or self.required.of_call(tensors)
        near = next(iter(tensors.values()))
        for (name, spec), room in zip(self.workspaces.items(), self._rooms(sizes), strict=True):
            tensors[name] = near.new_empty(room, dtype=torch_type(spec))
        for step in self.steps:
            if step.zero is not None:
                tensors[step.zero.name].zero_()
            step.launcher.start([tensors[name] for name in step.params], sizes)

    def starter(self, device: int, aligned: bool, names: tuple[str, ...],
                spaces: bool = False) -> Callable[..., None] | None:
        """A function of the tensors ``names`` that launches the plan without checks; ``spaces``: behind
        them it takes the plan's workspaces, too, in their order, which the caller then allocates.

        None before the first launch on the device with tensors of this alignment (``aligned``: at
        multiples of 16 bytes), and if sizes are arguments and none are given (``at``). The device must be
        the current one.
        """
        if self.required is not None and not self.sizes:
            return None
        at = self.starter_at(device, aligned, names, spaces)
        return at and at(self._in_order(self.sizes))

    def starter_at(self, device: int, aligned: bool, names: tuple[str, ...],
                   spaces: bool = False) -> StarterAt | None:
        """``starter`` as a function of the sizes that are arguments, in the order of their names."""
        known = (*names, *self.workspaces)
        steps: list[tuple[KernelStart | Bind, tuple[int, ...], int | None]] = []
        for step in self.steps:
            begun: KernelStart | Bind | None = None
            if all(p in known for p in step.params):
                order = tuple([known.index(p) for p in step.params])
                begun = (step.launcher.begun(device, aligned)
                         or step.launcher.binding(device, aligned, order))
            if begun is None:
                return None
            steps.append((begun, order, known.index(step.zero.name) if step.zero else None))
        if not steps:
            return None
        types = [] if spaces else [torch_type(spec) for spec in self.workspaces.values()]
        sizes = self.required.names if self.required is not None else ()
        return launch_codegen.starter(self.numbers, torch_internals.quickest(), device,
                                      len(known) - len(types), len(sizes), types, steps)

    def spaces(self) -> tuple[tuple[tuple[int], Any], ...]:
        """The shape and the type, torch's, of each workspace; of its own sizes, where these are
        arguments."""
        types = [torch_type(spec) for spec in self.workspaces.values()]
        return tuple(zip(self._rooms(self.sizes), types, strict=True))

    def _rooms(self, sizes: Values | None) -> tuple[tuple[int], ...]:
        """The shape of each workspace for sizes that are arguments."""
        if not self.workspaces:
            return ()
        found: tuple[tuple[int], ...] = self.numbers(*self._in_order(sizes))[-1]
        return found

    def _in_order(self, sizes: Values | None) -> tuple[int, ...]:
        """Sizes that are arguments, in the order of their names."""
        return tuple([sizes[n] for n in self.required.names]) if self.required and sizes else ()


def _copies(step: PlanStep) -> bool:
    return step.does in ("pack", "unpack")
