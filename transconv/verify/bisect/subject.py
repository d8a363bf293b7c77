"""The subject of a bisection: a workload on a chip, its data, its kernels in the IR and as emitted.

A convolution is a workload as any other; what is special to it is the oracle that says what is right,
which knows no kernels, and how it is made smaller. One that is too large to interpret is replaced by a
smaller one of the same kind: sizes are halved, the axis with the most tiles first, while the schedule
stays legal, so that the small workload has the same stages, masks and tails as the large one.

The emitted text runs under Triton's interpreter, in a process of its own where this one compiles kernels;
then, on a GPU, as it is compiled."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from transconv.compute import Alone, Answer, Compute, Workload, execute, held_in, with_error
from transconv.conv import CompiledDirection, ConvProblem, ConvWorkload
from transconv.ir import Array, Tensor, convert, offsets_of
from transconv.runtime import Plan, build, plan_steps
from transconv.schedule import Schedule, why_not
from transconv.support import ComputeError, ScheduleError, TransconvError, files, knobs
from transconv.target import Target, detect
from transconv.verify.case import ProblemCase
from transconv.verify.computation import ComputationCase, case_of
from transconv.verify.data import unset
from transconv.verify.fuzz.compute_trial import ComputeTrial, smaller
from transconv.verify.fuzz.trial import resized
from transconv.verify.judgement import convolve, given_to, once_stored


@dataclass(frozen=True)
class BisectSubject:
    """The workload under bisection. ``sizes``: those of a computation whose sizes are arguments."""

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
    memory = {n: np.full(spans[n], unset(t.dtype), held_in(t.dtype)) for n, t in seen.items()}
    for name, values in case.given.items():
        memory[name][places[seen[name]]] = values
    for compute in computes:
        known = {t.name: memory[t.name][places[t]] for t in compute.tensors}
        types = {t.name: t for t in compute.tensors}
        for name, answer in execute(compute, known).items():
            tensor, value = types[name], answer.value
            if tensor.dtype.kind == "float":
                value = convert(value, tensor.dtype).astype(np.float64)
            # Several kernels may store parts of one tensor.
            told = value != unset(tensor.dtype) if value.dtype.kind == "i" else ~np.isnan(value)
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
    """A direction of a convolution with small integers, and the answer of the oracle in f64."""

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
        want = once_stored(
            torch.from_numpy(answer.value), slice(None), w.problem, w.prop, w.epilogue, self.extra
        ).numpy()
        spacings = 1.0 * launched if w.epilogue.function.is_exact else 4.0
        spacing = tensor.dtype.spacing * (4 if tensor.dtype.bits > 16 else 1)  # as wide as sums: some more
        return want, np.nan_to_num(spacings * spacing * np.maximum(1.0, np.abs(want)) + answer.error)


PRODUCTS = 1 << 24  # multiplications that the interpreter does in seconds, at all stages together
SLOW = 4  # as long takes one that is not part of a matrix product


def products(subject: BisectSubject) -> int:
    """The multiplications of all launches, those of lanes beyond the end of an axis included; what
    is multiplied element by element counts ``SLOW`` times."""
    total = 0
    for compute, schedule in subject.steps():
        compute = compute.at(**subject.sizes)
        work = prod(x.size for x in compute.axes if schedule.block_of(x.name) is None)
        for block in schedule.blocks:
            work *= -(-prod(compute.size(a) for a in block.axes) // block.extent) * block.extent
        total += work * (SLOW if schedule.unit == "fma" else 1)
    return total


def shrunk(subject: BisectSubject, limit: int = PRODUCTS) -> tuple[BisectSubject, str]:
    """A subject with at most about ``limit`` products, and in words how it differs; the schedule is
    that of the large workload where it is legal. Raises what choosing a schedule raises, ComputeError for
    a computation that cannot be made small."""
    schedules = [s for c, s in subject.steps() if c.does == "compute"]
    if subject.sizes or not schedules or products(subject) <= limit:
        return subject, ""
    at = replace(subject, schedule=subject.schedule or (schedules[0] if len({*schedules}) == 1 else None))
    work = _legal_work(at)
    if work is None:
        at = replace(subject, schedule=None)
        work = products(at)
    kept = at.schedule is not None
    while work > limit:
        near = list(_halved(at, schedules[0]))
        tried = near if at.schedule is None else [*near, *(replace(q, schedule=None) for q in near)]
        for small in tried:
            less = _legal_work(small)
            if less is not None and less < work:
                at, work = small, less
                break
        else:
            break
    if work > limit and isinstance(at.workload, Alone):
        raise ComputeError(
            f"{at.workload.title} has {work} products, and none that is smaller has a "
            f"schedule; expected at most {limit}, smaller axes, or a --limit"
        )
    if at.workload == subject.workload:
        return at, ""
    remark = f"shrunk to {_sizes(at)}, a size for the interpreter"
    if kept and at.schedule is None:
        remark += f"; {schedules[0]} is not legal there, heuristics choose anew"
    return at, remark


def _sizes(subject: BisectSubject) -> str:
    if isinstance(subject.workload, Alone):
        return " ".join(f"{x.name}={x.size}" for x in subject.workload.compute.axes)
    return str(subject.workload)


def _legal_work(subject: BisectSubject) -> int | None:
    """Its products; None where its schedule is not legal."""
    try:
        return products(subject) or None
    except TransconvError:
        return None


def _halved(subject: BisectSubject, schedule: Schedule) -> Iterator[BisectSubject]:
    """The workload with one axis halved, that with the most tiles, or the longest, first."""
    workload = subject.workload
    if isinstance(workload, Alone):
        trial = ComputeTrial(str(workload.compute), subject.target.name, str(subject.schedule or ""))
        yield from (replace(subject, workload=Alone(t.compute)) for t in smaller(trial))
        return
    assert isinstance(workload, ConvWorkload)
    p = workload.problem
    tiles = {a: b.extent for b in schedule.blocks if len(b.axes) == 1 for a in b.axes}

    def extent(*names: str) -> int:
        return max([tiles.get(n, 1) for n in names])

    sizes: list[tuple[float, str, int, int]] = [
        (p.mb / extent("mb"), "mb", p.mb, extent("mb")),
        (p.g / extent("g"), "g", p.g, extent("g")),
        (p.icg / extent("ic"), "ic", p.icg, extent("ic")),
        (p.ocg / extent("oc"), "oc", p.ocg, extent("oc")),
    ]
    for x, n in enumerate(p.spatial):
        step = extent(f"o{n}", f"i{n}", f"q{n}")
        sizes.append((p.o[x] / step, f"o{x}", p.o[x], step))
    for _, what, size, step in sorted(sizes, key=lambda s: -s[0]):
        rounded = -(-(size // 2) // step) * step
        for new in dict.fromkeys((rounded, -(-size // 2))):
            for made in _resized(p, what, new) if 1 <= new < size else ():
                yield replace(subject, workload=replace(workload, problem=made))


def _resized(p: ConvProblem, what: str, size: int) -> Iterator[ConvProblem]:
    """The problem with another size along one axis; the same padding, types and memory order."""
    if what == "g":
        return resized(p, g=size, ic=size * p.icg, oc=size * p.ocg)
    if what in ("mb", "ic", "oc"):
        return resized(p, **{what: size if what == "mb" else p.g * size})
    x, i, o = int(what[1:]), list(p.i), list(p.o)
    i[x] -= (o[x] - size) * p.stride[x]
    o[x] = size
    return resized(p, i=tuple(i), o=tuple(o)) if min(i) > 0 else iter(())


CHILD_SECONDS = 300


@dataclass(frozen=True, slots=True)
class EmittedVerdict:
    """The verdict on an emitted text. ``text``: what was found, in words; ``source``: what is to be read,
    if it is ``wrong``."""

    wrong: bool
    text: str
    source: str = ""


def ask_emitter(subject: BisectSubject, seed: int = 0, isolated: bool = True) -> EmittedVerdict:
    """Run the emitted text under Triton's interpreter; ``isolated``: in a process of its own, which
    a wrong kernel may kill (and which knows nothing of what was changed in this one)."""
    if any(schedule.via == "gluon" for _, schedule in subject.steps()):
        return EmittedVerdict(False, "not asked: Triton's interpreter does not run Gluon")
    if isolated or not knobs.interpret():
        return _in_a_child(subject, seed)
    from transconv.verify.machine import executable

    target = executable(subject.target, "cpu")
    try:
        plan = subject.plan(target)
        wrong = _run(plan, subject, "cpu", seed)
    except TransconvError as error:
        return EmittedVerdict(False, f"not asked: {error}")
    except Exception as error:  # whatever Triton's interpreter raises about a text
        return EmittedVerdict(True, f"{type(error).__name__}: {error}", _source(subject, target))
    return EmittedVerdict(bool(wrong), wrong or "right", plan.source if wrong else "")


def _run(plan: Plan, subject: BisectSubject, device: str, seed: int) -> str:
    """What is wrong with a plan's result."""
    return next(filter(None, (c.launched(plan, device).problem for c in subject.cases(seed))), "")


def _source(subject: BisectSubject, target: Target) -> str:
    try:
        return subject.plan(target).source
    except Exception as error:  # it could not even be written
        return str(error)


def _in_a_child(subject: BisectSubject, seed: int) -> EmittedVerdict:
    """What ``bisect`` says of the emitted text where Triton interprets it."""
    command = [
        sys.executable,
        "-m",
        "transconv",
        "bisect",
        *subject.words(),
        "--limit",
        str(1 << 62),
        "--seed",
        str(seed),
        "--target",
        subject.target.name,
        "--parts",
        "emitter",
        "--json",
        "--here",
        *(["--schedule", str(subject.schedule)] if subject.schedule else []),
    ]
    environment = knobs.child_environment({knobs.interpret.name: "1"}, str(files.PACKAGE.parent))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CHILD_SECONDS, check=False, env=environment
        )
        if done.returncode < 0:
            return EmittedVerdict(
                True,
                f"Triton's interpreter died of signal {-done.returncode}",
                _source(subject, subject.target),
            )
        told = json.loads(done.stdout)
        return EmittedVerdict(told["stage"] == "emit", str(told["verdict"]), str(told["diff"]))
    except subprocess.TimeoutExpired:
        return EmittedVerdict(
            False, f"not asked: no answer from Triton's interpreter in {CHILD_SECONDS} s"
        )
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return EmittedVerdict(False, f"not asked: Triton's interpreter did not start: {last}")


def no_compiler(target: Target) -> str:
    """Why the compiled kernel cannot be run here; empty if it can."""
    machine = detect()
    if knobs.interpret():
        return "kernels are interpreted here"
    if machine.backend == "interpreter":
        return "there is no GPU"
    return "" if machine.name == target.name else f"this machine is {machine.name}"


def ask_compiler(small: BisectSubject, asked: BisectSubject, seed: int = 0) -> EmittedVerdict:
    """Run the compiled kernel on the GPU: in the small size, then in the size that was asked for."""
    if why := no_compiler(small.target):
        return EmittedVerdict(False, f"not asked: {why}")
    try:
        plan = small.plan()
        if wrong := _run(plan, small, "cuda", seed):
            return EmittedVerdict(True, wrong, plan.source)
        if asked.workload == small.workload:
            return EmittedVerdict(False, "right")
        plan = replace(asked, schedule=asked.schedule or small.schedule).plan()
        wrong = _in_full(asked, plan)
    except TransconvError as error:
        return EmittedVerdict(False, f"not asked: {error}")
    except Exception as error:  # Triton's compiler, or the driver
        return EmittedVerdict(True, f"{type(error).__name__}: {error}", _source(small, small.target))
    if wrong:
        wrong = f"right in the small size, but for {asked.workload} {wrong}"
        return EmittedVerdict(True, wrong, plan.source)
    return EmittedVerdict(False, f"right, for {asked.workload} too")


def _in_full(asked: BisectSubject, plan: Plan) -> str:
    return case_of(asked.workload.text, asked.workload.direction, asked.workload.behind).same(plan).reason
