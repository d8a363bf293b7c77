"""Computations under test: what kernels store compared with f64 evaluations, gradients with differences.

Exact data are -1, 0 and 1: sums and products of them are held exactly, so that a right kernel gives the
same bits as the answer in f64 after one rounding, unless an operation of it (exp, erf) is itself rounded.
Float data are bounded by the rounding of the result and by what that of sums becomes in the steps behind
them (compute/error_bounds.py), and as a whole as judgement.py says.

Gradients are compared with differences of the results, both in f64:

    <v, f(x + h u) - f(x - h u)> / 2h  =  <gradient, u>        along a random direction u of each tensor,
                                                               for random gradients v of the results

The texts of the derivative are executed by their meaning, so that kernels, which are compared with that,
are not asked. Where a result jumps or is not finite there is nothing to compare."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
import torch

from transconv import ir
from transconv.compute import (
    Alone,
    Answer,
    Compute,
    Read,
    Reduction,
    allowed,
    differentiate,
    examine,
    execute,
    is_tf32,
    parse,
    reaches,
    rounds_once,
    share_of,
)
from transconv.conv import ConvProblem, Prop, marked
from transconv.passes import levels, lower
from transconv.runtime import Plan, plan
from transconv.schedule import Schedule
from transconv.target import detect
from transconv.verify.case import Case, ProblemCase
from transconv.verify.data import Guarded, poison, random_tensor, strayed, strides_of, torch_dtype, unset
from transconv.verify.judgement import FEW, MANY, NEAREST_TF32, NEIGHBOURS, Judgement
from transconv.verify.machine import device, synchronize

WHOLE = 1 << 22  # points of which every element is checked; of more, samples are
GUARD = 1 << 12  # elements around a tensor, of which there are many small ones
# What is drawn from by reduction: a product of zeros tells little, one of twos overflows, and the greatest
# of many ones is one.
EXACT = {"sum": (-1, 0, 1), "prod": (-1, 1), "max": range(-99, 100), "min": range(-99, 100)}


@dataclass(frozen=True)
class Judged:
    """What came of one kind of data: the largest difference, and what is wrong, empty if nothing is."""

    data: str
    max_error: float
    problem: str = ""


def case_of(text: str, direction: str = "", behind: str = "") -> Case:
    """The case of a workload that is passed as text: a convolution's problem, direction and epilogue, or a
    computation. Raises ProblemError, ComputeError."""
    if text.startswith("compute "):
        return ComputationCase(parse(text))
    plain, names = marked(text)
    return ProblemCase(ConvProblem.parse(plain), Prop(direction), behind, open=names)


@dataclass
class ComputationCase(Case):
    """A computation with data, and its answer."""

    compute: Compute
    data: str = "exact"
    seed: int = 0

    @cached_property
    def given(self) -> dict[str, ir.Array]:
        """What is read, by name, in logical shape."""
        draw = np.random.default_rng(self.seed)
        stored = {w.view.tensor.name for w in self.compute.writes}
        return {t.name: self._values(draw, t) for t in self.compute.tensors if t.name not in stored}

    @cached_property
    def answers(self) -> dict[str, Answer]:
        """What is to be stored."""
        rounded = self.data != "exact" or not self.is_exact
        # One thread may add up a row, and its roundings may all go one way: a quarter of a place for each
        # term on average.
        share = max(share_of(self.compute), self.row * 2.0**-26)
        return execute(self.compute, self.given, share if rounded else 0.0)

    # -- on this machine, with many schedules --------------------------------------------------------

    @cached_property
    def where(self) -> str:
        return device()

    @property
    def footprint(self) -> int:
        return sum(t.layout.span * t.dtype.bytes for t in self.compute.tensors)

    def plan(self, schedule: str = "") -> Plan:
        said = Schedule.parse(schedule) if schedule else None
        return plan(Alone(self.compute), detect(), said, False, Plan)

    def same(self, plan: Plan) -> Judgement:
        """Every element, or those of sampled points where there are many."""
        if prod(x.size for x in self.compute.axes) <= WHOLE:
            judged = self.launched(plan, self.where)
            return Judgement(max_err=judged.max_error, reason=judged.problem)
        tensors = {t.name: self._random(t, exact=True) for t in self.compute.tensors}
        for name in plan.workload.results:
            if tensors[name].is_floating_point():
                tensors[name].fill_(float("nan"))
        plan.launch(**tensors)
        synchronize()
        found = examine(self.compute, tensors)
        return Judgement(max_err=float("nan") if found.reason else 0.0, reason=found.reason)

    def drawn(self) -> dict[str, torch.Tensor]:
        return {t.name: self._random(t) for t in self.compute.tensors}

    def release(self) -> None:
        for name in ("given", "answers"):
            self.__dict__.pop(name, None)

    def _random(self, tensor: ir.Tensor, exact: bool = False) -> torch.Tensor:
        """Random values; indices lie inside of what they are indices of."""
        dtype = torch_dtype(tensor.dtype)
        if tensor.dtype.kind == "float" and not exact:
            return random_tensor(tensor.shape, tensor.layout, self.where)
        sizes = indexed(self.compute, tensor)
        low, high = (0, min(sizes)) if sizes else (-1 if dtype.is_signed else 0, 2)
        made = torch.empty_strided(tensor.shape, strides_of(tensor.layout), dtype=dtype, device=self.where)
        return made.copy_(torch.randint(low, max(high, low + 1), tensor.shape, device=self.where))

    # -- data and judgements -------------------------------------------------------------------------

    def _values(self, draw: np.random.Generator, tensor: ir.Tensor) -> ir.Array:
        if sizes := indexed(self.compute, tensor):
            near = draw.integers(-1, max(sizes) + 1, tensor.shape)  # a few are outside
            return as_memory_has_it(tensor, near)
        if tensor.dtype.kind == "int":
            low, high = (max(-128, tensor.dtype.limits[0]), min(255, tensor.dtype.limits[1]))
            return as_memory_has_it(tensor, draw.integers(low, high, tensor.shape, endpoint=True) * 1.0)
        if self.data == "exact":
            drawn = draw.choice(EXACT.get(self.op, EXACT["sum"]), tensor.shape).astype(np.float64)
            return as_memory_has_it(tensor, drawn)
        drawn = draw.standard_normal(tensor.shape)
        if self.op == "prod" and self._in_rows(tensor):  # a product of many of them would be nothing
            drawn = np.copysign(np.exp(drawn / self.row**0.5), draw.standard_normal(tensor.shape))
        made = torch.from_numpy(drawn).to(torch_dtype(tensor.dtype))
        return as_memory_has_it(tensor, made.double().numpy())

    def _in_rows(self, tensor: ir.Tensor) -> bool:
        """Whether a tensor's elements are read along the axes that are reduced."""
        along = {
            a
            for r in self.compute.reads
            if r.view.tensor is tensor
            for d in r.view.dims
            for a in self.compute.roots(d.coord)
        }
        return not along.isdisjoint(self.compute.reduced)

    @property
    def held(self) -> tuple[ir.Tensor, ...]:
        """The tensors of a call."""
        return self.compute.tensors

    def flat(self, tensor: ir.Tensor, size: int = 0, zero: bool = False) -> ir.Array:
        """A tensor's memory: what is given at its elements, or ``zero``; NaN elsewhere."""
        made = np.full(size or tensor.layout.span, 0 if zero else unset(tensor.dtype), tensor.dtype.numpy)
        if tensor.name in self.given:
            made[ir.offsets_of(tensor)] = self.given[tensor.name]
        return made

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        """What kernels are given."""
        return {name: t.argument for name, t in self.guarded(device).items()}

    def guarded(self, device: str) -> dict[str, Guarded]:
        """What is read, sealed, and NaN where something is to be stored, between guards."""
        made = {t.name: Guarded.make(t.layout, t.shape, device, guard=GUARD) for t in self.held}
        for t in self.held:
            memory = made[t.name].span
            values = torch.from_numpy(self.flat(t)).to(memory.dtype).to(device)
            places = torch.from_numpy(np.unique(ir.offsets_of(t))).to(device)
            bits = poison(memory.dtype)[0]  # torch does not select among 8-bit floats
            memory.view(bits)[places] = values.view(bits)[places]
            if t.name in self.given:
                made[t.name].seal()
        return made

    def launched(self, plan: Plan, device: str) -> Judged:
        """What the emitted kernels make of it; they may write nothing but results."""
        tensors = self.guarded(device)
        given = {name: t.argument for name, t in tensors.items()}
        plan.check(given)
        plan.run(dict(given))  # some indices are out of bounds on purpose; run unchecked
        found = self.judged(
            {name: _held(tensors[name].view).cpu().numpy() for name in self.answers}, launched=True
        )
        outside = strayed(tensors, self.answers, {s.zero.name for s in plan.steps if s.zero is not None})
        return replace(found, problem="; ".join(filter(None, [found.problem, *outside])))

    def judged(self, got: Mapping[str, ir.Array], launched: bool = False) -> Judged:
        """Compare stored tensors with the answer; ``launched``: of emitted kernels."""
        worst, wrong = 0.0, ""
        for name, answer in self.answers.items():
            tensor = next(t for t in self.held if t.name == name)
            want, bound = self._bound(answer, tensor, launched)
            same = (want == got[name]) | (np.isnan(want) & np.isnan(got[name]))
            with np.errstate(invalid="ignore"):  # infinities, of which only like ones are equal
                apart = np.where(same, 0.0, np.abs((got[name] - want).astype(np.float64)))
            apart = np.where(np.isnan(apart), np.inf, apart)
            worst = max(worst, float(apart.max(initial=0.0)))
            if (bad := apart > bound).any():
                at = tuple(int(i) for i in np.argwhere(bad)[0])
                wrong = wrong or (
                    f"{name}{list(at)} is {got[name][at]:.6g}, expected {want[at]:.6g}; "
                    f"{int(bad.sum())} of {bad.size} elements are wrong"
                )
            if self.data == "float":
                wrong = wrong or self._imprecise(answer, tensor, want, got[name])
        return Judged(self.data, worst, wrong)

    def _imprecise(self, answer: Answer, tensor: ir.Tensor, want: ir.Array, got: ir.Array) -> str:
        """What is wrong with a tensor as a whole, although no element of it is."""
        if self.compute.prologue:  # factors are rounded before they are multiplied, and seen by no norm
            return ""
        told = np.isfinite(want) & (want != 0)
        if tensor.dtype.digits < self.compute.acc.digits and not is_tf32(self.compute):
            sure = told & rounds_once(answer.value, answer.error, tensor.dtype)
            other = int((sure & (got != want)).sum())
            if other > NEIGHBOURS * sure.sum() + FEW:
                return (
                    f"{other} of {int(sure.sum())} elements of {tensor.name} are not the answer "
                    "rounded once"
                )
        if self._shows_tf32(tensor) and told.any():
            terms = prod(x.size for x in self.compute.axes if self.compute.kind(x.name) == "K")
            drift = terms**0.5 * 2.0**-23 + terms * 2.0**-29
            error = float(np.linalg.norm((got - answer.value)[told]) / np.linalg.norm(answer.value[told]))
            if error > NEAREST_TF32 + drift:
                return f"the error of {tensor.name} in the 2-norm is {error:.2e}"
        return ""

    def _shows_tf32(self, tensor: ir.Tensor) -> bool:
        """Whether a tensor holds enough sums of products of tf32, and nothing else, to judge rounding."""
        write = next(w for w in self.compute.writes if w.view.tensor is tensor)
        value = write.value.x if isinstance(write.value, ir.Cast) else write.value
        if not is_tf32(self.compute) or self.compute.sum is None or value is not self.compute.sum.var:
            return False
        read = [r.view.tensor for r in self.compute.operands]
        return tensor.dtype.digits >= 24 and min(prod(t.shape) for t in (tensor, *read)) >= MANY

    def _bound(self, answer: Answer, tensor: ir.Tensor, launched: bool) -> tuple[ir.Array, ir.Array]:
        """The answer in the tensor's type, and how far from it a result may be."""
        want = _held(torch.from_numpy(answer.value).to(torch_dtype(tensor.dtype))).numpy()
        want = np.where(np.isnan(answer.value), unset(tensor.dtype), want)
        if self.data == "exact" and self.is_exact:
            return want, np.zeros_like(want)
        return want, allowed(want, answer.error, tensor.dtype)

    @property
    def row(self) -> int:
        """How many terms a reduction has."""
        return prod(self.compute.size(a) for a in self.compute.reduced)

    @property
    def op(self) -> str:
        """The reduction, if there is one alone, whose terms alone decide what is stored."""
        found = {s.op for s in self.compute.steps if isinstance(s, Reduction)}
        return found.pop() if len(found) == 1 and not self.compute.again else ""

    @property
    def is_exact(self) -> bool:
        """Whether integers stay so small and whole that nothing is rounded on the way."""
        values = [s.value for s in self.compute.steps if not isinstance(s, Read)]
        means = any(w.op == "squares" for w in self.compute.writes)
        return not means and not any(
            ir.find(v, ir.Call)
            or ir.find(v, ir.Div)
            or any(
                isinstance(c.value, float) and c.value % 1 and np.isfinite(c.value)
                for c in ir.find(v, ir.Const)
            )
            for v in values
        )

    def interpreted(self, *kernels: ir.Kernel, zeroed: Collection[str] = (), seed: int = 0) -> Judged:
        """The same by the IR's own interpreter, which finds what is read out of bounds; the kernels of a
        plan run one after another. What is neither given nor ``zeroed`` holds NaN before. ``seed`` says
        who goes first among the roles of a kernel that has them."""
        params = sorted((t for k in kernels for t in k.params), key=lambda t: not t.planes)
        seen = {t.name: t for t in params}
        held = {t.name: t for t in self.held}  # says where elements lie, which boxes see otherwise
        done = ir.Memory({name: self.flat(t, zero=name in zeroed) for name, t in (seen | held).items()})
        for kernel in kernels:
            for t in kernel.params:  # parts of several sums lie in one workspace, each in its own way
                if t.parts_of and len(done.buffers[t.name]) != t.layout.span:
                    done = ir.Memory(done.buffers | {t.name: self.flat(t)})
            done.new_launch()
            ir.run(kernel, done, seed=seed)
        # A result that no kernel stores is in its copy: what would have added parts to it is not run.
        copies = {t.copy_of: t for t in seen.values() if t.copy_of}
        lies = {n: held[n] if n in seen else copies.get(n, held[n]) for n in self.answers}
        stored = {n: torch.from_numpy(done.buffers[t.name][ir.offsets_of(t)]) for n, t in lies.items()}
        return self.judged({n: _held(t).numpy() for n, t in stored.items()})


def after_every_pass(
    compute: Compute, plan: Plan, sizes: Mapping[str, int] | None = None
) -> list[tuple[str, Judged]]:
    """What the interpreter finds after every pass that changed something, on exact data, and after the
    last one on float data, of all kernels of a plan one after another, for given ``sizes`` where they are
    arguments. Raises VerifyError for a kernel that breaks a rule of the IR."""
    numbers = compute.at(**(sizes or {}))
    case, before, found = ComputationCase(numbers), None, []
    zeroed = {s.zero.name for s in plan.steps if s.zero is not None}
    made = [lower(s.compute, s.schedule, plan.target, s.kernel.name, compute.math) for s in plan.steps]
    stages, level = [name for name, _ in made[0]], levels()
    # What adds the parts of a sum has none before the pass that makes them.
    parts = any(x.role == "part" for s in plan.steps for x in s.compute.axes)
    first = "gridwise" if any(s.compute.statistics for s in plan.steps) else "blockwise"
    for at in range(stages.index(first) if parts else 0, len(stages)):
        kernels = [stage[at][1] for stage in made]
        if kernels != before:
            for kernel in kernels:
                ir.verify(kernel, level[stages[at]], stages[at])
            found.append(
                (stages[at], case.interpreted(*(k.at(sizes or {}) for k in kernels), zeroed=zeroed))
            )
        before = kernels
    last = ComputationCase(numbers, "float").interpreted(
        *(stage[-1][1].at(sizes or {}) for stage in made), zeroed=zeroed
    )
    return [*found, (stages[-1], last)]


def indexed(compute: Compute, tensor: ir.Tensor) -> list[int]:
    """The sizes of the dimensions that elements of a tensor are coordinates along."""
    read = compute.names.indices & {r.var for r in compute.reads if r.view.tensor is tensor}
    return [
        n
        for view in compute.views()
        for d, n in zip(view.dims, view.tensor.shape, strict=True)
        if read & ir.free_vars(d.coord)
    ]


def _held(values: torch.Tensor) -> torch.Tensor:
    """The same numbers in f64, those of i64 as they are."""
    return values if values.dtype is torch.int64 else values.double()


def as_memory_has_it(tensor: ir.Tensor, values: ir.Array) -> ir.Array:
    """The same number wherever elements share a place."""
    places, flat = ir.offsets_of(tensor), np.zeros(tensor.layout.span, values.dtype)
    flat[places] = values
    return np.asarray(flat[places])


STEP = 1e-6  # of a difference
NEAR = 1e-5  # of the sum of the absolute terms of a gradient

Arrays = dict[str, ir.Array]


def wide(compute: Compute) -> Compute:
    """The computation with every float tensor in f64."""
    lines = []
    for line in str(compute).splitlines():
        words = line.split(maxsplit=3)
        floats = words[0] == "tensor" and words[2][0] in "fb" and words[2] != "boolean"
        lines.append(" ".join([*words[:2], "f64", words[3]]) if floats else line)
    return parse("\n".join(lines))


def wrong_slope(compute: Compute, seed: int = 0) -> str:
    """What is wrong with the gradients of a computation; empty if nothing is, or if it has none. Raises
    ComputeError for an operation without a derivative."""
    compute = wide(compute)
    reach = {name: of for name, of in reaches(compute).items() if of}
    of = tuple(sorted(frozenset().union(*reach.values())))
    if not of:
        return ""
    draw = np.random.default_rng(seed)
    derivative = differentiate(compute, of, tuple(reach))
    given: Arrays = {**ComputationCase(compute, "float", seed).given}
    results = _executed(compute, given)
    v = {name: draw.standard_normal(results[name].shape) for name in reach}
    known = given | results | {own: v[name] for name, own in derivative.given.items()}
    for text in derivative.computes:
        known |= _executed(wide(text), known)
    for name in of:
        gradient = known[derivative.of[name]] if name in derivative.of else np.zeros(given[name].shape)
        u = ComputationCase(compute, "float", seed + 1).given[name]
        ends = [_executed(compute, given | {name: given[name] + h * u}) for h in (STEP, -STEP)]
        slope = sum(float(np.nan_to_num(v[r] * (ends[0][r] - ends[1][r])).sum()) for r in v) / (2 * STEP)
        size = max(1.0, float(np.abs(gradient * u).sum()))
        whole = all(np.isfinite(e[r][~np.isnan(results[r])]).all() for e in ends for r in v)
        told = float((gradient * u).sum())
        if whole and not abs(slope - told) <= NEAR * size:
            return f"the slope along {name} is {slope:.6g} by differences, {told:.6g} by its gradient"
    return ""


def _executed(compute: Compute, given: Mapping[str, ir.Array]) -> Arrays:
    stored = {w.view.tensor.name for w in compute.writes}
    read = {t.name: given[t.name] for t in compute.tensors if t.name not in stored}
    return {name: answer.value for name, answer in execute(compute, read).items()}
