"""The subject of a bisection: a workload on a chip, its kernels and its data.

A convolution is a workload as any other; what is special to it is the oracle that says what is right,
which knows no kernels, and how it is made smaller (workload_shrinker.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from transconv.compute import Alone, Answer, Compute, Workload, execute, with_error
from transconv.conv import CompiledDirection, ConvWorkload
from transconv.errors import ScheduleError
from transconv.ir import Array, Tensor, convert, offsets_of
from transconv.runtime import Plan, build, plan_steps
from transconv.schedule import Schedule, why_not
from transconv.target import Target
from transconv.verify.case import ProblemCase
from transconv.verify.computation import ComputationCase
from transconv.verify.data import unset
from transconv.verify.oracle import convolve, given_to, once_stored


@dataclass(frozen=True)
class BisectSubject:
    """``sizes``: those of a computation whose sizes are arguments."""

    workload: Workload
    target: Target
    schedule: Schedule | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)

    def steps(self) -> list[tuple[Compute, Schedule]]:
        """The computations and their schedules. Raises ScheduleError for what is not legal."""
        made = plan_steps(self.workload, self.target, self.schedule)
        for compute, schedule in made:
            if reason := why_not(schedule, compute, self.target):
                raise ScheduleError(f"{schedule}: {reason}")
        return made

    def plan(self, target: Target | None = None) -> Plan:
        """Its kernels, for its target or another one."""
        kind = CompiledDirection if isinstance(self.workload, ConvWorkload) else Plan
        return build(self.workload, target or self.target, self.schedule, None, False, kind)

    def cases(self, seed: int = 0) -> list[ComputationCase]:
        """Data, the exact ones first."""
        if isinstance(self.workload, ConvWorkload):
            return [OracleCase(self.workload, self.target, seed)]
        assert isinstance(self.workload, Alone)
        compute = self.workload.compute.at(**self.sizes)
        return [ComputationCase(compute, data, seed) for data in ("exact", "float")]

    def words(self) -> list[str]:
        """The words of a command line that name it."""
        w = self.workload
        words = [w.text, *w.options, *(["--epilogue", w.behind] if w.behind else [])]
        sizes = ",".join(f"{n}={v}" for n, v in self.sizes.items())
        return [*words, f"--sizes={sizes}"] if sizes else words

    def made_anew(self) -> tuple[Compute, ...]:
        """The computations, written once more."""
        w = self.workload
        return (replace(w) if isinstance(w, ConvWorkload) else w).computations


def evaluated(computes: Sequence[Compute], case: ComputationCase) -> dict[str, Array]:
    """What computations that follow one another store, in f64, by their views alone. Raises InterpError
    for a coordinate outside of its tensor where the mask lets it through."""
    seen = {t.name: t for c in computes for t in c.tensors} | {t.name: t for t in case.held}
    places = {t: offsets_of(t) for c in computes for t in (*c.tensors, *case.held)}
    spans = {n: max(int(at.max(initial=0)) + 1 for t, at in places.items() if t.name == n) for n in seen}
    memory = {n: np.full(spans[n], unset(t.dtype), np.float64) for n, t in seen.items()}
    for name, values in case.given.items():
        memory[name][places[seen[name]]] = values
    for compute in computes:
        known = {t.name: memory[t.name][places[t]] for t in compute.tensors}
        types = {t.name: t for t in compute.tensors}
        for name, answer in execute(compute, known).items():
            tensor, value = types[name], answer.value
            if tensor.dtype.kind == "float":
                value = convert(value, tensor.dtype).astype(np.float64)
            told = ~np.isnan(value)  # several kernels may store parts of one tensor
            memory[name][places[tensor][told]] = value[told]
    return {n: memory[t.name][places[t]] for n, t in _holders(computes, case)}


def _holders(computes: Sequence[Compute], case: ComputationCase) -> Iterator[tuple[str, Tensor]]:
    """Where results are: in their copies, where what would have gone to the results is not computed."""
    made = {w.view.tensor.name: w.view.tensor for c in computes for w in c.writes}
    own = {t.name: t for t in case.held}
    for name in case.answers:
        copies = [t for t in made.values() if t.copy_of == name]
        yield name, own[name] if name in made or not copies else copies[0]


class OracleCase(ComputationCase):
    """A direction of a convolution with small whole numbers, and the answer of the oracle in f64."""

    def __init__(self, workload: ConvWorkload, target: Target, seed: int = 0) -> None:
        p, prop, after = workload.problem, workload.prop, workload.epilogue
        self.workload, self.compute = workload, workload.computations[-1]
        self.data, self.seed = "exact", seed
        case = ProblemCase(p, prop, str(after), "cpu", target=target)
        case.fill("exact", seed)
        self.extra = case.extra
        self.given = {n: t.view.double().numpy() for n, t in case.held.items() if n != prop.result}
        function, eps = after.function, 2.0 ** -(23 if p.acc.bits == 32 else 52)
        values = given_to(after, convolve(p, prop, *case.operands()), slice(None), self.extra)
        answer, off = with_error(function, values, {}, eps, not function.is_exact)
        self.answers = {prop.result: Answer(answer.numpy(), off.expand(answer.shape).numpy())}

    @property
    def held(self) -> tuple[Tensor, ...]:
        return self.workload.tensors

    def _bound(self, answer: Answer, tensor: Tensor, launched: bool) -> tuple[Array, Array]:
        """Machines may cut what is to be rounded, and approximate functions."""
        import torch

        w = self.workload
        want = once_stored(torch.from_numpy(answer.value), slice(None), w.problem, w.prop, w.epilogue,
                           self.extra).numpy()
        spacings = 1.0 * launched if w.epilogue.function.is_exact else 4.0
        spacing = tensor.dtype.spacing * (4 if tensor.dtype.bits > 16 else 1)  # as wide as sums: some more
        return want, np.nan_to_num(spacings * spacing * np.maximum(1.0, np.abs(want)) + answer.error)
