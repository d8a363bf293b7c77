"""A workload on this machine: its plans, its tensors, and the check of results; one direction of a
convolution (computations have verify/computation.py).

Runs in worker processes or in the caller's; workloads are passed as text."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from transconv import runtime
from transconv.compute import Compute
from transconv.conv import (
    TABLE,
    CompiledDirection,
    ConvProblem,
    ConvWorkload,
    Epilogue,
    Prop,
    compiler,
    without_zeros,
    zero_sums,
)
from transconv.ir import DTYPES, DType, Memory, Tensor, offsets_of, run, verify
from transconv.runtime import Choose, Plan, first_run_check
from transconv.schedule import Schedule, chain
from transconv.selection.proposals import heuristics
from transconv.support import ScheduleError
from transconv.target import Target, detect
from transconv.verify import data, judgement
from transconv.verify.machine import device, synchronize

Call = Callable[[], object]


class Case(ABC):
    """A workload with tensors on this machine; plans for many schedules share them."""

    __slots__ = ()

    @property
    @abstractmethod
    def where(self) -> str:
        """``cuda`` or ``cpu``."""

    @property
    @abstractmethod
    def footprint(self) -> int:
        """Bytes that a call moves at least."""

    @abstractmethod
    def plan(self, schedule: str = "") -> Plan:
        """Raises ScheduleError or Unsupported, which are refusals, not failures."""

    @abstractmethod
    def same(self, plan: Any) -> judgement.Judgement:
        """Whether a plan's result on exact data is the answer."""

    @abstractmethod
    def drawn(self) -> dict[str, torch.Tensor]:
        """Tensors of random data."""

    @abstractmethod
    def release(self) -> None:
        """Give the tensors back."""

    def make(self, plan: Plan) -> Callable[[int], Call]:
        """The plan on tensors of random data, a new set for each index."""

        def of(index: int) -> Call:
            tensors, result = self.drawn(), plan.workload.result

            def call() -> torch.Tensor:
                plan.launch(**tensors)
                return tensors[result]

            return call

        return of


@dataclass(slots=True)
class ProblemCase(Case):
    """A direction of a problem with its tensors. ``open``: the sizes that are arguments of its kernels.

    ``bia`` is the bias's element type (default: the result's); ``shift`` puts every tensor that
    many elements off a multiple of 16 bytes; ``extra`` is what the epilogue reads; ``numpy`` runs
    kernels in the interpreter of the IR instead of Triton's; ``guard``: elements around each tensor."""

    problem: ConvProblem
    prop: Prop
    epilogue: str = ""
    where: str = field(default_factory=device)
    tensors: dict[str, data.Guarded] = field(default_factory=dict)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    answer: torch.Tensor | None = None  # to the exact data, once `same` has asked for it
    answered: int = 0  # the seed of that data
    filled: tuple[str, int] = ("", 0)  # kind and seed of the data that the tensors hold
    target: Target = field(default_factory=detect)
    bia: str = ""
    shift: int = 0
    deterministic: bool = False
    numpy: bool = False
    guard: int = data.GUARD
    open: frozenset[str] = frozenset()
    beside: dict[str, data.Guarded] = field(default_factory=dict)  # the epilogue's tensors
    read: dict[str, Tensor] = field(default_factory=dict)  # what they are in the IR

    @property
    def after(self) -> Epilogue:
        return Epilogue.parse(self.epilogue, DTYPES[self.bia] if self.bia else None)

    def plan(self, schedule: str | Schedule | None = "") -> CompiledDirection:
        """The plan that the passes make in this process, at the problem's sizes. Raises ScheduleError or
        Unsupported, which are refusals, not failures."""
        asked = compiler.question(
            self.problem,
            self.prop,
            self.target,
            self.after,
            aligned=not self.shift,
            deterministic=self.deterministic,
        )
        if isinstance(schedule, str):
            schedule = Schedule.parse(schedule) if schedule else None
        p, workload = self.problem, asked.workload
        if self.open:
            workload = ConvWorkload(p, self.prop, self.after, self.open)
        made = runtime.plan(
            workload, asked.target, schedule, asked.deterministic, CompiledDirection, keeps=False
        )
        return (
            made.at(dict(zip(made.required.sizes.names, (p.mb, *p.i), strict=True)))
            if (self.open and made.required)
            else made
        )

    @property
    def answers(self) -> str:
        """What computes the answer, in words."""
        return judgement.told_answers(judgement.answered_by(self.problem))

    @property
    def footprint(self) -> int:
        return self.problem.bytes_moved()

    def drawn(self) -> dict[str, torch.Tensor]:
        p = self.problem
        tensors = {n: data.random_tensor(p.shapes[n], s.layout, self.where) for n, s in p.specs.items()}
        return tensors | epilogue_tensors(p, self.prop, self.epilogue, "float", self.where)

    def plan_of(self, schedules: Sequence[str]) -> CompiledDirection:
        """The plan whose kernels have these schedules, in the order that the compiler asks for them
        (see ``choices``); one schedule is for all of them. Raises ScheduleError or Unsupported."""
        if len(schedules) == 1:
            return self.plan(schedules[0])
        left = list(schedules)

        def choose(compute: Compute, target: Target) -> Schedule:
            if not left:
                raise ScheduleError(f"{len(schedules)} schedules are too few: {compute.name} has none")
            return Schedule.parse(left.pop(0))

        made = self._chosen(choose)
        if left:
            raise ScheduleError(
                f"{len(schedules)} schedules for {len(made.steps)} kernels; expected "
                "one for all, or one for each"
            )
        return made

    def choices(self, most: int | None = None) -> Iterator[tuple[str, ...]]:
        """The schedules of every plan that the heuristics may choose, best first, in the order that
        the compiler asks for them: the n-th plan takes the n-th candidate of every kernel, or its
        last. ``plan_of`` builds them."""
        known: dict[str, list[Schedule]] = {}
        longest = 1
        for rank in itertools.count():
            if rank >= longest or rank == most:
                return

            asked: list[str] = []

            def choose(
                compute: Compute, target: Target, rank: int = rank, asked: list[str] = asked
            ) -> Schedule:
                if str(compute) not in known:
                    known[str(compute)] = heuristics.candidates(compute, target)
                found = known[str(compute)]
                asked.append(str(found[min(rank, len(found) - 1)]))
                return found[min(rank, len(found) - 1)]

            compiler.plan_steps(self.problem, self.prop, self._target, None, self.after, choose)
            longest = max(map(len, known.values()), default=0)
            yield tuple(asked)

    @property
    def _target(self) -> Target:
        """The target as `plan` sees it: boxes need aligned tensors."""
        if not self.shift:
            return self.target
        return replace(self.target, features=self.target.features - {"box"})

    def _chosen(self, choose: Choose) -> CompiledDirection:
        return compiler.build(
            self.problem, self.prop, self._target, None, self.after, choose, self.deterministic
        )

    def proven(self, schedule: str = "", seed: int = 9) -> CompiledDirection:
        """The plan that a user gets: one that gave a right result (see transconv.trust). A given
        schedule is taken as it is, and so is a plan with blocked layouts, which have no views in torch to
        look at. Raises ScheduleError or Unsupported."""
        compiled = self.plan(schedule)
        known = first_run_check.is_trusted(compiled, aligned=not self.shift)
        blocked = any(t.layout.strides() is None for t in compiled.workload.tensors)
        if schedule or known or blocked or self.where == "cpu":  # verdicts are on what a GPU runs
            return compiled
        self.fill("float", seed)
        return first_run_check.run(compiled, {n: t.view for n, t in self.held.items()})

    def operands(self) -> list[torch.Tensor]:
        """The operands of the product, without zero points."""
        held = {n: self.tensors[n].view for n in self.prop.operands}
        whole = without_zeros(held | self.extra, self.after.zeros)
        return [whole[n] for n in self.prop.operands]

    @property
    def _result(self) -> DType:
        return self.problem.specs[self.prop.result].dtype

    @property
    def held(self) -> dict[str, data.Guarded]:
        """All tensors."""
        return self.tensors | self.beside

    def fill(self, mode: str, seed: int = 0) -> None:
        """New operands (``exact`` or ``float``), and a poisoned result."""
        if not self.tensors:
            self.tensors = data.allocate(self.problem, self.where, self.shift, self.guard)
            read = epilogue_operands(self.problem, self.prop, self.after)
            self.beside = {
                name: data.Guarded.make(t.layout, t.shape, self.where, self.shift, self.guard)
                for name, t in read.items()
            }
            self.read = read
        data.fill(self.tensors, self.problem, self.prop, mode, seed)
        self.filled = mode, seed
        halves = self._result.kind == "int"
        for place, (name, tensor) in enumerate(self.beside.items(), start=1 << 20):
            tensor.put(epilogue_values(self.read[name], mode, self.where, seed + place, halves))
            tensor.seal()
        self.extra = {name: t.view for name, t in self.beside.items()}
        if known := self.after.zeros.known:  # what the drawn weights and zero point add
            low, high = ([n - 1 for n in known[end::2]] for end in (0, 1))
            made = zero_sums(
                self.tensors["wei"].view, self.extra["src_zero"], low, high, self.problem.dilation
            )
            assert made is not None
            self.beside[TABLE].put(made)
            self.beside[TABLE].seal()

    def launch(self, compiled: CompiledDirection, device: str = "") -> None:
        """``device``: where the tensors are meanwhile, with all that is around them. Raises InterpError
        where the interpreter of the IR finds a fault."""
        if self.numpy:
            interpret(compiled, self.held)
            return
        for t in self.held.values() if device else ():
            t.memory = t.memory.to(device)
        compiled.launch(**{name: t.argument for name, t in self.held.items()})
        for t in self.held.values() if device else ():
            t.memory = t.memory.to(self.where)

    def strayed(self, compiled: CompiledDirection) -> list[str]:
        """What was written beside the result, in words."""
        cleared = {s.zero.name for s in compiled.steps if s.zero is not None}
        return data.strayed(self.held, (self.prop.result,), cleared)

    def judge(self, compiled: CompiledDirection, mode: str, seed: int = 0) -> judgement.Judgement:
        """Run on fresh data and compare; nothing but the result may be written."""
        self.fill(mode, seed)
        self.launch(compiled)
        return self.judged(compiled, mode)

    def judged(self, compiled: CompiledDirection, mode: str) -> judgement.Judgement:
        """Compare what a launch has stored."""
        if self.where == "cuda":
            synchronize()
        a, b = self.operands()
        got = self.tensors[self.prop.result].view
        found = judgement.judge(
            self.problem, self.prop, a, b, got, mode, self.epilogue, self.extra, longest_chain(compiled)
        )
        return self._guarded(found, compiled)

    def _guarded(self, found: judgement.Judgement, compiled: CompiledDirection) -> judgement.Judgement:
        reasons = [found.reason, *self.strayed(compiled)]
        # The interpreter of the IR runs kernels alone: what a plan does beside them is not seen there.
        if not self.numpy and not self.tensors[self.prop.result].is_padded_with_zeros:
            reasons.append("what pads the result is not 0")
        found.reason = "; ".join(filter(None, reasons))
        return found

    def same(self, compiled: CompiledDirection, seed: int = 0) -> judgement.Judgement:
        """``judge`` on exact data for one schedule of many: data and answer are kept, where equal
        bits are asked for."""
        if judgement.approximates(self.epilogue) or (
            self.where == "cpu" and "bf16" in map(str, self.problem.dtypes)
        ):
            return self.judge(compiled, "exact", seed)
        if self.filled != ("exact", seed):
            self.fill("exact", seed)
        result = self.tensors[self.prop.result]
        if self.answer is None or self.answered != seed:
            a, b = self.operands()
            found = [
                judgement.once_stored(
                    judgement.after(want, at, self.epilogue, self.extra),
                    at,
                    self.problem,
                    self.prop,
                    self.after,
                    self.extra,
                )
                for at, want in judgement.pieces(self.problem, self.prop, a, b)
            ]
            kept = torch.empty_like(result.view)
            self.answer = kept if not found else kept.copy_(torch.cat(found))
            self.answered = seed
        result.poison()
        self.launch(compiled)
        synchronize()
        wrong = int((result.view.double() != self.answer.double()).sum())
        told = judgement.Judgement(max_err=float("nan") if wrong else 0.0)
        if wrong:
            told.reason = f"{wrong} of {self.answer.numel()} elements are wrong"
        return self._guarded(told, compiled)

    def release(self) -> None:
        self.tensors, self.extra, self.beside, self.answer = {}, {}, {}, None
        self.filled = ("", 0)


def interpret(compiled: CompiledDirection, tensors: Mapping[str, data.Guarded]) -> None:
    """Run the final kernels of a plan in place on tensors of the CPU, in NumPy, for any chip: explicit
    kernels too, which Triton's interpreter cannot read. The rules of the IR are checked first. Raises
    InterpError for accesses that are errors on any target, VerifyError for a kernel that breaks a rule."""
    memory = Memory({name: _numpy(t.span[: t.layout.span]) for name, t in tensors.items()})
    for step in compiled.steps:
        if not step.triton.grid:
            continue
        for tensor in step.kernel.params:
            space = compiled.workspaces.get(tensor.name)
            if space is not None:  # several kernels use it, some as planes of a copy
                span = (space if tensor.copy_of else tensor).layout.span
                room = memory.buffers.get(tensor.name)
                if room is None or len(room) != span:  # each kernel has its own layout of the partial sums
                    fresh = np.full(span, data.unset(tensor.dtype), tensor.dtype.numpy)
                    memory = Memory({**memory.buffers, tensor.name: fresh})
        verify(step.kernel, "explicit")
        if step.zero is not None:
            memory.buffers[step.zero.name][offsets_of(step.zero)] = 0
        memory.new_launch()
        run(step.kernel, memory)
    for name, guarded in tensors.items():
        _keep(guarded.span[: guarded.layout.span], memory.buffers[name])


def _numpy(memory: torch.Tensor) -> Any:
    """A copy as the interpreter holds it: bf16 and 8-bit floats live in f32."""
    held = memory.dtype is torch.bfloat16 or (memory.is_floating_point() and memory.itemsize == 1)
    return (memory.float() if held else memory).numpy().copy()


def _keep(place: torch.Tensor, made: Any) -> None:
    """Take over what is no NaN: the poison keeps its pattern where nothing was written."""
    values = torch.from_numpy(np.ascontiguousarray(made))
    if not place.is_floating_point():
        place.copy_(values)
        return
    written = ~values.isnan()
    bits = data.poison(place.dtype)[0]  # torch does not select among 8-bit floats
    place.view(bits)[written] = values.to(place.dtype).view(bits)[written]


def longest_chain(compiled: CompiledDirection) -> int:
    """How many products the matrix unit adds to one accumulator, of the kernel where they are most."""
    return max((chain(s.schedule, s.compute) for s in compiled.steps), default=0)


def warm(compiled: Plan) -> float:
    """Compile a plan's kernels into Triton's cache without launching them; returns seconds.

    The kernels are specialised as for tensors at addresses that are multiples of 16, which is what
    tensors without memory (of torch's ``meta`` device) look like to Triton."""
    start = time.perf_counter()
    for step in compiled.steps:
        step.triton.warm(
            [torch.empty(1, dtype=data.torch_dtype(t.dtype), device="meta") for t in step.kernel.params]
        )
    return time.perf_counter() - start


assert data.GUARD * 2 % 256 == 0  # results stay as aligned as torch's allocator makes them


# -- what an epilogue reads beside the operands --------------------------------------------------------


def epilogue_operands(p: ConvProblem, prop: Prop, epilogue: Epilogue) -> dict[str, Tensor]:
    """The tensors that an epilogue reads, by name."""
    workload = ConvWorkload(p, prop, epilogue)
    return {t.name: t for t in workload.tensors[len(p.specs) :]}


def epilogue_values(
    tensor: Tensor, mode: str, where: str, seed: int = 0, halves: bool = False
) -> torch.Tensor:
    """For a bias, a residual and others: integers up to 8 in size, or normally distributed. ``halves``:
    floats are halves of these integers, which a result of integers rounds."""
    generator = torch.Generator(where).manual_seed(seed)
    whole = tensor.dtype.kind == "int"
    if mode == "exact" or whole:
        least = max(-8, tensor.dtype.limits[0]) if whole else -8
        drawn = torch.randint(least, 9, tensor.shape, device=where, generator=generator)
        return drawn / 2 if halves and not whole else drawn
    return torch.randn(tensor.shape, device=where, generator=generator)


def epilogue_tensors(
    p: ConvProblem, prop: Prop, epilogue: str, mode: str, where: str
) -> dict[str, torch.Tensor]:
    """What an epilogue reads, without guards: for timing."""
    made = {}
    for name, tensor in epilogue_operands(p, prop, Epilogue.parse(epilogue)).items():
        like = torch.empty_strided(
            tensor.shape, tensor.layout.strides() or (), dtype=data.torch_dtype(tensor.dtype), device=where
        )
        made[name] = like.copy_(epilogue_values(tensor, mode, where))
    return made
