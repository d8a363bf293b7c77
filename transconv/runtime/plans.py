"""Plans: the launches that compute a workload.

Sizes of a call that are arguments of kernels are read from its tensors, and checked against the kernels'
requirements before a launch. The kernels are started by one function that is written out
(``launch_codegen.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from transconv.backend_triton import TritonKernel, numbers_of, torch_internals
from transconv.compute import Compute, Workload
from transconv.cost import AtSizes, CostFormula
from transconv.ir import Expr, Kernel, Sizes, Tensor, Values, function_of, sizes_told, strictest, values_of
from transconv.runtime.launch_codegen import GuardedAt, StarterAt, StartWriter, StepStart
from transconv.runtime.operands import Wanted, check, check_indices, torch_type
from transconv.schedule import Schedule
from transconv.support import TensorError, knobs
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
    ``triton``: the text as Triton compiles and runs it; ``lowered``: its computation and kernel; runs the
    passes if the text was read from disk."""

    does: str
    schedule: Schedule
    lowered: Callable[[], LoweredStep]
    source: str
    path: Path | None
    triton: TritonKernel
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
        each = [s.triton.requires for s in sized if s.triton.requires]
        self.required = required(each, self.workload.tensors, self.workload.title) if each else None

    @property
    def numbers(self) -> Callable[..., tuple[Any, ...]]:
        """What calls compute from sizes that are arguments, in their order: see ``numbers_of``."""
        required, spaces = self.required, self.workspaces.values()
        if required is None:
            rooms = tuple([(t.layout.span,) for t in spaces])
            found = *[s.triton.numbers()[0] for s in self.steps], rooms
            return lambda: found
        if required.numbers is None:  # a plan that is read need not be run
            required.numbers = numbers_of(
                [s.triton for s in self.steps], [t.room for t in spaces], required.names
            )
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
            sized = [s for s in self.steps if s.triton.sizes and not _copies(s)]
            each = self.workload.computations
            together = len(sized) == 1  # which may compute all stride phases
            self.estimated = tuple(
                [
                    AtSizes(s.schedule, c, self.target, together and n > 0).formula()
                    for n, (s, c) in enumerate(
                        zip(sized * len(each) if together else sized, each, strict=True)
                    )
                ]
            )
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
        wanted = (
            self.required.wanted(self.required.of_call(tensors))
            if self.required and not self.sizes
            else self.operands()
        )
        check(wanted, tensors, lambda: self.workload.title)

    def operands(self) -> tuple[Wanted, ...]:
        """The tensors of its calls, of the given sizes where these are arguments of its kernels."""
        if not self.wanted:
            self.wanted = (
                self.required.wanted(self.sizes)
                if self.required and self.sizes
                else tuple(map(Wanted.of, self.workload.tensors))
            )
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
            step.triton.run([tensors[name] for name in step.params], sizes)

    def starter(
        self, device: int, aligned: bool, names: tuple[str, ...], spaces: bool = False
    ) -> Callable[..., None] | None:
        """A function of the tensors ``names`` that launches the plan without checks; ``spaces``: behind
        them it takes the plan's workspaces, too, in their order, which the caller then allocates.

        None before the first launch on the device with tensors of this alignment (``aligned``: at
        multiples of 16 bytes), and if sizes are arguments and none are given (``at``). The device must be
        the current one.
        """
        if self.required is not None and not self.sizes:
            return None
        at = self.starter_at(device, aligned, names, spaces)
        return at and at(self.in_order(self.sizes))

    def starter_at(
        self, device: int, aligned: bool, names: tuple[str, ...], spaces: bool = False
    ) -> StarterAt | None:
        """``starter`` as a function of the sizes that are arguments, in the order of their names."""
        steps = self._starts(device, aligned, names)
        if not steps:
            return None
        return self._writer(device, names, spaces).starter(steps)

    def guarded_at(self, device: int, names: tuple[str, ...], tensors: Sequence[str]) -> GuardedAt | None:
        """A function of sizes, and of the bytes of ``tensors``, to one of arguments, of which ``names``
        has the plan's names, or others: launches the plan and returns True; False for a call that has to
        be looked at: with tensors that share memory, or negated, or of an alignment for which no kernel is
        loaded, or while another device is the current one. None if no kernel is loaded."""
        near, far = (self._starts(device, aligned, names) for aligned in (True, False))
        if (not near and not far) or (self.required is not None and not self.sizes):
            return None
        return self._writer(device, names).guarded(near, far, [names.index(n) for n in tensors])

    def _starts(self, device: int, aligned: bool, names: tuple[str, ...]) -> list[StepStart] | None:
        """What starts the kernels, the arguments of each by their places in ``names`` and behind these in
        the plan's workspaces; None if one of them is not loaded, or takes another tensor, and where
        padding is cleared behind them."""
        known = (*names, *self.workspaces)
        steps: list[StepStart] = []
        for step in self.steps:
            begun = step.triton.begun(device, aligned)
            if begun is None or self.padding or not {*step.params} <= {*known}:
                return None
            steps.append(
                StepStart(
                    begun,
                    tuple([known.index(p) for p in step.params]),
                    known.index(step.zero.name) if step.zero else None,
                )
            )
        return steps

    def _writer(self, device: int, names: tuple[str, ...], spaces: bool = False) -> StartWriter:
        """Of a start with arguments of these names, and with workspaces if it allocates none."""
        values = [names.index(t.name) for t in self.workload.tensors if t.number]
        sizes = self.required.names if self.required is not None else ()
        types = [torch_type(spec) for spec in self.workspaces.values()]
        return StartWriter(
            self.numbers,
            device,
            len(names) + spaces * len(types),
            len(sizes),
            [] if spaces else types,
            torch_internals.quickest(),
            values,
        )

    def spaces(self) -> tuple[tuple[tuple[int], Any], ...]:
        """The shape and the type, torch's, of each workspace; of its own sizes, where these are
        arguments."""
        types = [torch_type(spec) for spec in self.workspaces.values()]
        return tuple(zip(self._rooms(self.sizes), types, strict=True))

    def _rooms(self, sizes: Values | None) -> tuple[tuple[int], ...]:
        """The shape of each workspace for sizes that are arguments."""
        if not self.workspaces:
            return ()
        found: tuple[tuple[int], ...] = self.numbers(*self.in_order(sizes))[-1]
        return found

    def in_order(self, sizes: Values | None) -> tuple[int, ...]:
        """Sizes that are arguments, in the order of their names."""
        return tuple([sizes[n] for n in self.required.names]) if self.required and sizes else ()


def _copies(step: PlanStep) -> bool:
    return step.does in ("pack", "unpack")


@dataclass(slots=True)
class Required:
    """The sizes that are arguments of all kernels of a plan, and what each of them requires."""

    sizes: Sizes
    tensors: tuple[Tensor, ...]  # of a call
    about: str  # what the plan is for
    names: tuple[str, ...] = field(init=False, repr=False)
    meets: Callable[..., bool] | None = field(default=None, init=False, repr=False)
    lying: list[Callable[[Values], Wanted]] = field(init=False, repr=False)
    numbers: Callable[..., tuple[Any, ...]] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.names, self.lying = self.sizes.names, []

    def wanted(self, values: Values) -> tuple[Wanted, ...]:
        """The tensors of a call of these sizes."""
        if not self.lying:  # torch is there by then
            self.lying = [_lying(t, self.sizes) for t in self.tensors]
        return tuple([at(values) for at in self.lying])

    def takes(self, *sizes: int) -> bool:
        """Whether sizes, in the order of their names, meet the requirements."""
        if self.meets is None:  # many plans are read from disk, and few take a call
            self.meets = function_of(
                self.sizes.requirements, self.names, lambda texts: ([], " and ".join(texts) or "True")
            )
        return self.meets(*sizes)

    def check(self, values: Values) -> None:
        """Raise TensorError, with a message of one line, for sizes that do not meet the requirements."""
        if not self.takes(*[values[n] for n in self.names]):
            raise TensorError(
                f"{self.sizes.why_not(values)}; the plan requires {self.sizes}, and is for {self.about}"
            )

    def of_call(self, tensors: Mapping[str, Any]) -> dict[str, int]:
        """Each size by name: that of the first tensor that has it as a dimension. Raises TensorError, with
        a message of one line, for sizes that do not meet the requirements, and if no tensor has a size."""
        found = sizes_told((t, getattr(tensors.get(t.name), "shape", ())) for t in self.tensors)
        if missing := [n for n in self.sizes.names if n not in found]:
            raise TensorError(
                f"no tensor of the call tells {missing[0]}, as a dimension of that size "
                f"does; the plan is for {self.about}"
            )
        self.check(found)
        return found


def _lying(tensor: Tensor, sizes: Sizes) -> Callable[[Values], Wanted]:
    """A function of sizes that says how a tensor has to lie."""
    given = Wanted.of(tensor)
    if not tensor.extents:
        return lambda _: given
    rank = len(tensor.shape)
    find = values_of([*tensor.extents, *tensor.steps, tensor.room], sizes.names)
    name, elements, layout, names = tensor.name, given.elements, tensor.layout, sizes.names

    def at(values: Values) -> Wanted:
        found = find(*[values[n] for n in names])
        return Wanted(name, elements, found[:rank], found[rank:-1], found[-1], layout)

    return at


def required(each: Sequence[Sizes], tensors: tuple[Tensor, ...], about: str) -> Required | None:
    """What kernels together require, all of which take the same sizes, with the examples of the first."""
    first = each[0]
    where = strictest(c for s in each for c in (*_narrower(s, first), *s.where))
    return Required(Sizes(first.each, where), tensors, about)


def _narrower(sizes: Sizes, first: Sizes) -> list[Expr]:
    """The ends of ranges that exclude more than those of the first kernel."""
    pairs = [*zip(sizes.each, first.each, strict=True)]
    return [
        *(s.var >= s.least for s, own in pairs if s.least > own.least),
        *(s.var <= s.most for s, own in pairs if s.most < own.most),
    ]
