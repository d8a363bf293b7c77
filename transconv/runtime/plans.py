"""Plans: the launches that compute a workload.

Sizes of a call that are arguments of kernels are read from its tensors, and checked against the kernels'
requirements before a launch. The start of a plan is written out: one function for all its kernels, with
each argument in its place. A call makes no list and no other call of Python but for memory, addresses and
the starts themselves.

    def at(sizes):                                      of a copy, and of a kernel that reads it
        n0, n1, = sizes
        (g0, p0), (g1, p1), (s0, ), = numbers(n0, n1)
        def run(x0, x1, x2):
            x3 = empty(s0, (1,), t0)
            a0, a1, a2, a3, = x0.data_ptr(), x1.data_ptr(), x2.data_ptr(), x3.data_ptr(),
            on = stream(device)
            raw0(g0, 1, 1, on, f0, False, e0, None, None, m0, None, None, None, a0, a3, n0, n1)
            k1 = (a3, a1, a2, n0, n1, )
            raw1(g1, 1, 1, on, f1, False, e1, None, None, m1, None, None, None,
                 *(known1(k1) or encode1(k1, p1)))
        return run

What a kernel is given is of one of these kinds:

    a3      the address of a tensor, or of a workspace
    x3      a number that is passed itself (``Tensor.number``)
    n0      a size
    k1      addresses, numbers and sizes, of which descriptors of boxes are made and kept

A guarded start looks at its arguments first. It serves tensors at multiples of 16 bytes and others, for
which Triton compiles a text separately, and leaves to its caller those that share memory, negated views,
and calls while another device is the current one:

        def run(x0, x1, x2):                            of a group, and of two arrays
            a1, a2, = x1.data_ptr(), x2.data_ptr(),
            if current() != device or x1.is_neg() or x2.is_neg(): return False
            if a1 < a2 + r2 and a2 < a1 + r1: return False
            on = stream(device)
            if (a1 | a2) & 15:
                return False                            no such kernel is loaded
            raw0(g0, 1, 1, on, f0, False, e0, None, None, m0, None, None, None, a1, a2, n0, )
            return True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from transconv.backend_triton import KernelStart, TritonKernel, numbers_of, torch_internals
from transconv.compute import Compute, Workload
from transconv.cost import AtSizes, CostFormula
from transconv.ir import Expr, Kernel, Sizes, Tensor, Values, function_of, sizes_told, strictest, values_of
from transconv.runtime.operands import Wanted, check, check_indices, torch_type
from transconv.schedule import Schedule
from transconv.support import TensorError, factory, knobs
from transconv.target import Target

StarterAt = Callable[[tuple[int, ...]], Callable[..., None]]
"""From sizes to a function of tensors that starts a plan for them."""
GuardedAt = Callable[[tuple[int, ...], tuple[int, ...]], Callable[..., bool]]
"""From sizes, and the bytes of tensors, to a function of arguments: whether it started a plan."""


class StepStart(NamedTuple):
    """A kernel of a plan, the numbers of its arguments among those of the start and its workspaces, and of
    the one that is cleared before."""

    kernel: KernelStart
    order: tuple[int, ...]
    zero: int | None = None


class StartWriter:
    """Writes a start of ``arguments`` for so many ``sizes``. ``numbers``: as ``Plan.numbers``; ``types``:
    of workspaces, which ``empty`` allocates; ``values``: the numbers of arguments that are passed
    themselves."""

    def __init__(
        self,
        numbers: Callable[..., tuple[Any, ...]],
        device: int,
        arguments: int,
        sizes: int = 0,
        types: Sequence[Any] = (),
        empty: Any = None,
        values: Sequence[int] = (),
    ) -> None:
        self.arguments, self.types, self.values = arguments, types, values
        self.sizes = _listed("n", range(sizes))
        self.known: dict[str, Any] = {  # what the text mentions
            "numbers": numbers,
            "empty": empty,
            "stream": None,
            "device": device,
            **{f"t{at}": kind for at, kind in enumerate(types)},
        }

    def starter(self, steps: Sequence[StepStart]) -> StarterAt:
        """From sizes to a function of tensors that starts all steps."""
        lines = [*self.prepared(steps, ()), *self.started(steps), *([] if steps else ["return None"])]
        made: StarterAt = self.made(len(steps), lines)
        return made

    def guarded(
        self, near: Sequence[StepStart] | None, far: Sequence[StepStart] | None, tensors: Sequence[int]
    ) -> GuardedAt:
        """``starter`` that looks at its arguments, of which ``tensors`` are. ``near``, ``far``: the steps
        for such that begin at multiples of 16 bytes, and for others; None where one is not loaded."""
        each = [*(near or ()), *(far or ())]
        bits = " | ".join(f"a{x}" for x in tensors) or "0"
        lines = [
            *self.guard(tensors),
            *self.prepared(each, tensors),
            f"if ({bits}) & 15:",
            *(f"    {line}" for line in self.variant(far, len(near or ()))),
            *self.variant(near, 0),
        ]
        made: GuardedAt = self.made(len(near or far or ()), lines, tensors)
        return made

    def made(self, count: int, body: Sequence[str], spans: Sequence[int] | None = None) -> Any:
        """The function of sizes, and of ``spans``, around the body of one that starts so many kernels."""
        grids = "".join(f"(g{at}, p{at}), " for at in range(count))
        rooms = f"({_listed('s', range(len(self.types)))})" if self.types else "_"
        given = "" if spans is None else ", spans"
        lines = [
            f"def made({', '.join(self.known)}):",
            f"def at(sizes{given}):",
            *([f"    {self.sizes}= sizes"] if self.sizes else []),
            *([f"    {_listed('r', spans)}= spans"] if spans else []),
            f"    {grids}{rooms}, = numbers({self.sizes})",
            f"    def run({_listed('x', range(self.arguments))}):",
            *(f"        {line}" for line in body),
            "    return run",
            "return at",
        ]
        return factory("\n    ".join(lines))(**self.known)

    def guard(self, tensors: Sequence[int]) -> Iterator[str]:
        """The conditions under which nothing is started."""
        self.known["current"] = torch_internals.current_device()
        if tensors:
            yield _addresses(tensors)
        negated = "".join(f" or x{x}.is_neg()" for x in tensors)
        yield f"if current() != device{negated}: return False"
        for x, y in combinations(tensors, 2):
            yield f"if a{x} < a{y} + r{y} and a{y} < a{x} + r{x}: return False"

    def prepared(self, steps: Sequence[StepStart], addressed: Iterable[int]) -> Iterator[str]:
        """Workspaces, addresses but for those that are there, and the stream."""
        for at in range(len(self.types)):
            yield f"x{self.arguments + at} = empty(s{at}, (1,), t{at})"
        direct = {x for step in steps if step.kernel.raw is not None for x in step.order}
        if rest := sorted(direct - {*addressed, *self.values}):
            yield _addresses(rest)
        if steps:
            self.known["stream"] = torch_internals.raw_stream
            yield "on = stream(device)"

    def variant(self, steps: Sequence[StepStart] | None, first: int) -> list[str]:
        """The end of a guarded start for tensors of an alignment."""
        return ["return False"] if steps is None else [*self.started(steps, first), "return True"]

    def started(self, steps: Sequence[StepStart], first: int = 0) -> Iterator[str]:
        """The lines of some kernels, whose numbers in the text begin with ``first``."""
        for place, (begun, order, zero) in enumerate(steps):
            at, kernel, sizes = first + place, begun.kernel, self.sizes * (begun.sizes > 0)
            if zero is not None:
                yield f"x{zero}.zero_()"
            if begun.raw is None:
                self.known[f"start{at}"] = begun
                yield f"start{at}(({sizes}), (g{place}, p{place}), ({_listed('x', order)}), on)"
                continue
            self.known |= {
                f"raw{at}": begun.raw,
                f"f{at}": kernel.function,
                f"m{at}": kernel.packed_metadata,
                f"e{at}": begun.early,
            }
            given = "".join(f"{'x' if x in self.values else 'a'}{x}, " for x in order) + sizes
            if begun.encoder is not None:
                self.known |= {f"known{at}": begun.encoder.calls.get, f"encode{at}": begun.encoder}
                yield f"k{at} = ({given})"
                given = f"*(known{at}(k{at}) or encode{at}(k{at}, p{place}))"
            yield (
                f"raw{at}(g{place}, 1, 1, on, f{at}, False, e{at}, None, None, m{at}, None, None, "
                f"None, {given})"
            )


def _addresses(numbers: Sequence[int]) -> str:
    return f"{_listed('a', numbers)}= {''.join(f'x{x}.data_ptr(), ' for x in numbers)}"


def _listed(letter: str, numbers: Iterable[int]) -> str:
    return "".join(f"{letter}{at}, " for at in numbers)


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
            if each and len(sized) > len(each):  # rows in parts, by several kernels
                each = tuple([s.compute for s in sized])
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
        the current one."""
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
