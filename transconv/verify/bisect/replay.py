"""Executes the launches of a plan at any stage in NumPy.

The operands are small integers, so that every order of summation gives the same bits; what no
element maps to, and the result before the run, hold NaN: what is read or left out by mistake shows.
A stage after which the kernel breaks a rule of the IR, or a pass that fails, counts as wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from transconv.compute import Compute
from transconv.conv import ConvProblem, ConvWorkload, Epilogue, Prop, plan_steps, without_zeros
from transconv.errors import ScheduleError
from transconv.ir import (
    Array,
    DType,
    Kernel,
    Memory,
    Roles,
    Tensor,
    VerifyError,
    find,
    offsets_of,
    rewrite,
    run,
    select,
    verify,
)
from transconv.ir import expr as ex
from transconv.passes import NAIVE, Context, levels, passes, running
from transconv.passes.lowering import naive
from transconv.schedule import Schedule, Scheduled, is_copy, why_not
from transconv.target import Target
from transconv.verify.bisect.rewrite_rules import rule_of


@dataclass(slots=True)
class ReplayedDirection:
    """One direction of one problem, with its data in logical shape by tensor name, and in f64 the
    ``sums``, the ``answer``, which the epilogue makes of them, and how far it may be ``off`` where the
    epilogue rounds."""

    problem: ConvProblem
    prop: Prop
    target: Target
    schedule: Schedule | None
    epilogue: Epilogue
    values: dict[str, Array] = field(default_factory=dict)
    sums: Array = field(default_factory=lambda: np.zeros(0))
    answer: Array = field(default_factory=lambda: np.zeros(0))
    off: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def result(self) -> str:
        return self.prop.result

    def steps(self) -> list[tuple[Compute, Schedule]]:
        """The computations and their schedules. Raises ScheduleError for what is not legal."""
        made = plan_steps(self.problem, self.prop, self.target, self.schedule, self.epilogue)
        for compute, schedule in made:
            if reason := why_not(schedule, compute, self.target):
                raise ScheduleError(f"{schedule}: {reason}")
        return made

    def fill(self, seed: int = 0) -> None:
        """Draw the operands and work out the answer, with an oracle that knows no kernels."""
        import torch

        from transconv.compute import with_error
        from transconv.verify.data import density, whole_values
        from transconv.verify.oracle import convolve, given_to

        p, random = self.problem, np.random.default_rng(seed)
        share = density(p, self.prop)
        for name in self.prop.operands:
            if p.specs[name].dtype.kind == "int":
                generator = torch.Generator().manual_seed(int(random.integers(1 << 30)))
                whole = whole_values(p, self.prop, name, p.shapes[name], generator)
                self.values[name] = whole.double().numpy()
                continue
            drawn = random.integers(-2, 3, p.shapes[name]).astype(np.float64)
            self.values[name] = drawn * (random.random(drawn.shape) < share)
            share = 1.0
        for tensor in self.extra():
            least = max(-8, tensor.dtype.limits[0]) if tensor.dtype.kind == "int" else -8
            self.values[tensor.name] = random.integers(least, 9, tensor.shape).astype(np.float64)
        given = {n: torch.from_numpy(v) for n, v in self.values.items()}
        sums = convolve(p, self.prop, *(given[n] for n in self.prop.operands))
        self.sums = sums.numpy()
        if self.epilogue.zeros:  # they are subtracted behind the sums
            multiplied = without_zeros(given, self.epilogue.zeros)
            sums = convolve(p, self.prop, *(multiplied[n] for n in self.prop.operands))
        function, eps = self.epilogue.function, 2.0 ** -(23 if p.acc.bits == 32 else 52)
        values = given_to(self.epilogue, sums, slice(None), given)
        answer, off = with_error(function, values, {}, eps, not function.is_exact)
        self.answer, self.off = answer.numpy(), off.expand(answer.shape).numpy()

    def extra(self) -> tuple[Tensor, ...]:
        """The tensors that the epilogue reads."""
        return ConvWorkload(self.problem, self.prop, self.epilogue).tensors[len(self.problem.specs):]

    def buffers(self, tensors: Mapping[str, Tensor]) -> dict[str, Array]:
        """Memory for the tensors: operands at their elements, NaN everywhere else."""
        made = {}
        for name, tensor in tensors.items():
            empty = np.nan if tensor.dtype.kind == "float" else tensor.dtype.limits[1]
            made[name] = np.full(tensor.layout.span, empty, tensor.dtype.numpy)
            if name in self.values:
                made[name][offsets_of(tensor)] = self.values[name]
        return made

    def wrong(self, got: Array, slack: float = 0.0) -> str:
        """How a result in logical shape differs from the answer; empty where it does not.
        ``slack``: in spacings of the type, for machines that cut instead of rounding."""
        import torch

        from transconv.verify.oracle import stored

        dtype = getattr(self.problem, self.result).dtype
        if not self.epilogue.function.is_exact:
            slack = max(slack, 4.0)
        want = stored(torch.from_numpy(self.answer), dtype, self.problem.acc).numpy()
        return differing(self.result, got.astype(np.float64), want, slack * _spacing(dtype), self.off)


def _spacing(dtype: DType) -> float:
    """Of numbers near 1; of types as wide as the sums some spacings more."""
    return dtype.spacing * (4 if dtype.bits > 16 else 1)


def differing(name: str, got: Array, want: Array, relative: float = 0.0, off: Array | float = 0.0) -> str:
    """How two arrays differ by more than a share of their size, and more than they may be ``off``, in
    words; empty where they do not."""
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(got - want) <= relative * np.maximum(1.0, np.abs(want)) + off)
    bad &= ~((got == want) | (np.isnan(got) & np.isnan(want)))
    if not bad.any():
        return ""
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    return (f"{int(bad.sum())} of {bad.size} elements of {name} are wrong, the first at "
            f"[{', '.join(map(str, first))}]: {got[first]:g}, expected {want[first]:g}")


# -- what kernels compute --------------------------------------------------------------------------


@dataclass(slots=True)
class Stages:
    """One launch: the kernel after ``naive`` and every pass, up to the one that failed, if any.
    ``compute`` is what is compiled, over merged groups and over copies; ``given`` was asked for."""

    given: Compute
    compute: Compute
    schedule: Schedule
    context: Context
    kernels: list[tuple[str, Kernel]] = field(default_factory=list)
    failed: str = ""  # the stage that raised
    reason: str = ""

    @staticmethod
    def of(compute: Compute, schedule: Schedule, target: Target, precision: str,
           switches: Mapping[str, bool]) -> Stages:
        context = Context(Scheduled(compute, schedule, target), precision)
        main, runs = context.compute, running(switches)
        made = Stages(compute, main, schedule, context)
        made.extend(NAIVE.name, lambda: naive.naive(main, f"conv_{main.name}"))
        for step in passes():
            if made.failed:
                break
            kernel = made.kernels[-1][1]
            made.extend(step.name, lambda s=step, k=kernel:  # type: ignore[misc]
                        s.run(k, context) if runs[s.name] else k)
        return made

    def extend(self, stage: str, make: Callable[[], Kernel]) -> None:
        """Make the next kernel, and hold it against the rules of the IR."""
        try:
            kernel = make()
            verify(kernel, levels()[stage], stage)
        except VerifyError as error:
            self.failed, self.reason = stage, f"the kernel breaks a rule of the IR: {error}"
        except Exception as error:  # whatever a pass may raise
            self.failed, self.reason = stage, f"the pass failed: {type(error).__name__}: {error}"
        else:
            self.kernels.append((stage, kernel))

    def kernel(self, stage: int) -> Kernel:
        return self.kernels[stage][1]

    def rule_of(self, stage: int, seed: int) -> str:
        """The rule of the simplifier that makes a stage wrong, in words; empty if none does."""
        made_by = next((p for p in passes() if p.name == NAMES[stage]), None)
        if made_by is None:
            return ""
        return rule_of(lambda: made_by.run(self.kernel(stage - 1), self.context), seed)

    def orders(self, stage: int) -> int:
        """How many orders of events a stage should be tried in."""
        return 3 if find(self.kernel(stage), Roles) else 1


NAMES = (NAIVE.name, *(p.name for p in passes()))
GRIDWISE, BLOCKWISE = NAMES.index("gridwise"), NAMES.index("blockwise")
NARROW = NAMES.index("narrow")
FINAL = NAMES.index("final")  # from here on divisions may round as the target's do


def parts_begin(launches: Iterable[Stages]) -> int:
    """The first stage in which the parts of statistics, or those of a split sum, exist."""
    return GRIDWISE if any(launch.compute.statistics for launch in launches) else BLOCKWISE


def as_targets_divide(kernel: Kernel) -> Kernel:
    """The kernel with integer divisions that round towards zero, spelled with the IR's own, which
    round down. What is left of a quotient has the sign of the numerator."""
    def towards_zero(e: ex.Expr) -> ex.Expr:
        if not isinstance(e, (ex.FloorDiv, ex.Mod)) or not e.dtype.is_integer:
            return e
        rest = ex.Mod(e.a, e.b)
        up = ex.Ne(rest, ex.Const(0)) & ex.Ne(ex.Lt(e.a, ex.Const(0)), ex.Lt(e.b, ex.Const(0)))
        return select(up, rest - e.b if isinstance(e, ex.Mod) else e + 1, e)

    return rewrite(kernel, towards_zero)


def compute(question: ReplayedDirection, launches: Sequence[Stages], stages: Sequence[int],
            seed: int = 0) -> Array:
    """The result, in logical shape, of running each launch at its stage (0 is ``naive``); ``seed``
    says who goes first among the roles of a kernel that has them. Raises InterpError for accesses that
    are errors on any target."""
    parts = parts_begin(launches)
    whole = [n for n in stages if n < parts]
    if whole and len(whole) < len(stages):
        raise ValueError(f"either all launches are looked at before `{NAMES[parts]}`, or none")
    work = []
    for launch, n in zip(launches, stages, strict=True):
        if not (whole and any(x.role == "part" for x in launch.compute.axes)):
            kernel = launch.kernel(n)
            work.append((launch, as_targets_divide(kernel) if n >= FINAL else kernel))
    tensors = {t.name: t for launch, kernel in work
               for t in (*launch.compute.tensors, *kernel.params)}
    # Boxes and copies see memory as other dimensions: the tensor as what was asked for has it says where
    # its elements lie.
    tensors |= {t.name: t for launch, _ in work if not is_copy(launch.given)
                for t in launch.given.tensors}
    buffers = question.buffers(tensors)
    if not whole and any(s.schedule.split_k > 1 and s.schedule.reduce == "atomic" for s, _ in work):
        buffers[question.result][:] = 0
    memory = Memory(buffers)
    for _, kernel in work:
        for t in kernel.params:  # parts of several sums lie in one workspace, each in its own way
            if t.parts_of and len(memory.buffers[t.name]) != t.layout.span:
                memory = Memory(memory.buffers | question.buffers({t.name: t}))
        memory.new_launch()
        run(kernel, memory, seed=seed)
    result = holder(tensors, [launch.compute for launch, _ in work], question.result)
    return np.asarray(memory.buffers[result.name][offsets_of(result)])


def holder(tensors: Mapping[str, Tensor], made: Sequence[Compute], result: str) -> Tensor:
    """The tensor that a result ends up in: its copy, where the sum of parts, which is not looked at,
    would have gone to the result itself."""
    stored = {a.c.tensor.name: a.c.tensor for a in made}
    return tensors[result] if result in stored else next(
        t for t in stored.values() if t.copy_of == result)
