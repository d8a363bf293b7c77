"""Finds the first stage that makes the kernels of a computation wrong.

Asked one after the other, each against the f64 evaluation of the text:

    compute          the computations of single kernels, evaluated one after another: how the text was
                     split into kernels, and its rows into parts
    merging, packing the same, over merged groups and over copies, where the schedule has them
    naive ... final  the kernels after every pass, in the interpreter of the IR
    emit             the emitted text, under Triton's interpreter
    compiler         the compiled kernels on the GPU

Where sizes are arguments, the kernel is asked at one choice of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

import numpy as np

from transconv.compute import Alone, Compute, describe, execute
from transconv.errors import ComputeError, TransconvError
from transconv.ir import Array, InterpError, Kernel, convert
from transconv.passes import EMIT, forms, running
from transconv.runtime import build_compute, plan_steps
from transconv.schedule import Schedule, Scheduled
from transconv.target import Target
from transconv.verify import any_size
from transconv.verify.bisect.emitted_kernel import EmittedVerdict, in_a_child, no_compiler
from transconv.verify.bisect.replay import NAMES, Stages, parts_begin
from transconv.verify.bisect.report import PARTS, BisectReport, Blame, changes
from transconv.verify.computation import ComputationCase
from transconv.verify.fuzz.compute_shrinker import smaller
from transconv.verify.fuzz.compute_trial import ComputeTrial

POINTS = 1 << 20  # of all axes together, that the interpreter does in seconds at all stages


def blame_compute(compute: Compute, target: Target, schedule: Schedule | None = None, *, seed: int = 0,
                  limit: int = POINTS, parts: Collection[str] = PARTS,
                  switches: Mapping[str, bool] | None = None, sizes: Mapping[str, int] | None = None,
                  isolated: bool = True) -> Blame:
    """Find the first stage that changes what a computation means.

    One of more than ``limit`` points is looked at with smaller axes (the report says which). ``sizes``:
    where they are arguments; default: the least that are allowed. Raises ScheduleError when there is no
    kernel to blame, ComputeError for a computation that cannot be made small.
    """
    search = _Search(compute, target, schedule, limit, seed, running(switches or {}), isolated)
    return search.judge(parts, sizes)


class _Search(BisectReport):
    def __init__(self, compute: Compute, target: Target, schedule: Schedule | None, limit: int, seed: int,
                 switches: Mapping[str, bool], isolated: bool) -> None:
        super().__init__(f"{compute.name}  on {target.name}")
        self.compute, self.target, self.schedule = compute, target, schedule
        self.seed, self.switches, self.isolated = seed, switches, isolated
        self.limit = limit

    def judge(self, parts: Collection[str], sizes: Mapping[str, int] | None) -> Blame:
        if self.compute.named:
            self.sizes = dict(sizes or any_size.edges(self.compute)[0])
            self.say("sizes", " ".join(f"{n}={v}" for n, v in self.sizes.items()))
        else:
            self.sizes = {}
            self.make_small()
        self.cases = [
            ComputationCase(self.compute.at(**self.sizes), data, self.seed) for data in ("exact", "float")
        ]
        self.planned = plan_steps(Alone(self.compute), self.target, self.schedule)
        for schedule in dict.fromkeys(str(s) for _, s in self.planned):
            self.say("schedule", schedule)
        if "ir" in parts and (found := self.judge_meaning() or self.judge_stages()):
            return found
        for part, ask, stage in (("emitter", self.ask_emitter, EMIT.name),
                                 ("compiler", self.ask_compiler, "compiler")):
            if part in parts:
                verdict = ask()
                if verdict.wrong:
                    return self.guilty(stage, verdict.text, diff=verdict.source)
                self.say(stage, verdict.text)
        return self.end("")

    def make_small(self) -> None:
        """Look at smaller axes, where there are too many points."""
        trial = ComputeTrial(str(self.compute), self.target.name, str(self.schedule or ""))
        while prod(x.size for x in trial.compute.axes) > self.limit:
            found = next(smaller(trial), None)
            if found is None:
                raise ComputeError(f"{self.compute.name} has more than {self.limit} points, and none that "
                                   "is smaller has a schedule; expected smaller axes, or a --limit")
            trial = found
        if trial.compute != self.compute and str(trial.compute) != str(self.compute):
            self.compute = trial.compute
            self.schedule = Schedule.parse(trial.schedule) if trial.schedule else None
            self.say("size", " ".join(f"{x.name}={x.size}" for x in self.compute.axes))

    # -- the IR ------------------------------------------------------------------------------------

    def judge_meaning(self) -> Blame | None:
        """What the computations of the kernels mean, before there is a kernel."""
        mains = [Scheduled(c, s, self.target) for c, s in self.planned
                 if not any(x.role == "part" for x in c.axes)]
        before: list[Compute] = []
        for form in forms():
            made = [form.of(s).at(**self.sizes) for s in mains]
            if made == before:
                continue
            before = made
            try:
                reason = next(filter(None, (self.evaluated(made, case) for case in self.cases)), "")
            except InterpError as error:
                reason = str(error)
            if reason:
                return self.guilty(form.name, reason, diff="\n".join(map(describe, made)))
            self.say(form.name, "right")
        return None

    def evaluated(self, computes: Collection[Compute], case: ComputationCase) -> str:
        """What is wrong with the stores of computations that follow one another."""
        known: dict[str, Array] = dict(case.given)
        for compute in computes:
            if any(t.copy_of for t in compute.tensors):  # their layouts are not the text's
                return ""
            types = {t.name: t.dtype for t in compute.tensors}
            for name, answer in execute(compute, known).items():
                value = answer.value
                if types[name].kind == "float":
                    value = convert(value, types[name]).astype(np.float64)
                old = known.get(name)  # several kernels may store parts of one tensor
                known[name] = value if old is None else np.where(np.isnan(value), old, value)
        return case.judged({name: known[name] for name in case.answers}).problem

    def judge_stages(self) -> Blame | None:
        """On exact data; if they show no error, on float data."""
        launches = [Stages.of(c, s, self.target, self.compute.math, self.switches)
                    for c, s in self.planned]
        exact, wide = self.cases
        if found := self.judge_data(launches, exact):
            return found
        last = [s.kernel(len(NAMES) - 1) for s in launches]
        if not (reason := self.wrong(last, wide)):
            return None
        self.say("float data", reason)
        return self.judge_data(launches, wide)

    def judge_data(self, launches: list[Stages], case: ComputationCase) -> Blame | None:
        for stage, name in enumerate(NAMES):
            # The kernel that adds partial sums can only run after the pass that creates them.
            asked = [s for s in launches if stage >= parts_begin(launches) or not any(
                x.role == "part" for x in s.compute.axes)]
            failed = next((s for s in asked if s.failed == name), None)
            if failed is not None:
                return self.guilty(name, failed.reason, failed.rule_of(stage, self.seed))
            before = [s.kernel(stage - 1) if stage else None for s in asked]
            if all(s.kernel(stage) is old for s, old in zip(asked, before, strict=True)):
                self.say(name, "unchanged")
                continue
            if reason := self.wrong([s.kernel(stage) for s in asked], case):
                changed = [s for s, old in zip(asked, before, strict=True) if s.kernel(stage) is not old]
                one = changed[0] if len(changed) == 1 else self.culprit(asked, changed, stage, case)
                old, earlier = (one.kernel(stage - 1), NAMES[stage - 1]) if stage else (None, "")
                return self.guilty(name, reason, one.rule_of(stage, self.seed),
                                   changes(old, one.kernel(stage), earlier, name))
            self.say(name, "right")
        return None

    def culprit(
        self, asked: list[Stages], changed: list[Stages], stage: int, case: ComputationCase
    ) -> Stages:
        """The launch that is wrong: with all others a stage back, the result is wrong still."""
        for one in changed if stage and stage != parts_begin(asked) else ():
            if self.wrong([s.kernel(stage - (s is not one)) for s in asked], case):
                return one
        return changed[0]

    def wrong(self, kernels: list[Kernel], case: ComputationCase) -> str:
        """What is wrong with the result of kernels that run one after another."""
        zeroed = {v.tensor.name for c, _ in self.planned for v in c.added}
        zeroed |= {c.c.tensor.name for c, s in self.planned if s.split_k > 1 and s.reduce == "atomic"}
        try:
            return case.interpreted(*(k.at(self.sizes) for k in kernels), zeroed=zeroed).problem
        except InterpError as error:
            return str(error)

    # -- below the IR ------------------------------------------------------------------------------

    def ask_emitter(self) -> EmittedVerdict:
        if any(s.via == "gluon" for _, s in self.planned):
            return EmittedVerdict(False, "not asked: Triton's interpreter does not run Gluon")
        if self.isolated:
            words = [str(self.compute), "--limit", str(1 << 62), "--seed", str(self.seed)]
            words += [f"--sizes={','.join(f'{n}={v}' for n, v in self.sizes.items())}"] * bool(self.sizes)
            return in_a_child(words, self.target, self.schedule, self.source)
        from transconv.verify.machine import executable

        return self.launched(executable(self.target, "cpu"), "cpu")

    def ask_compiler(self) -> EmittedVerdict:
        why = no_compiler(self.target)
        return EmittedVerdict(False, f"not asked: {why}") if why else self.launched(self.target, "cuda")

    def launched(self, target: Target, device: str) -> EmittedVerdict:
        try:
            plan = build_compute(self.compute, target, self.schedule)
            wrong = next(filter(None, (c.launched(plan, device).problem for c in self.cases)), "")
        except TransconvError as error:
            return EmittedVerdict(False, f"not asked: {error}")
        except Exception as error:  # whatever Triton raises about a text
            return EmittedVerdict(True, f"{type(error).__name__}: {error}", self.source())
        return EmittedVerdict(bool(wrong), wrong or "right", plan.source if wrong else "")

    def source(self) -> str:
        try:
            return build_compute(self.compute, self.target, self.schedule).source
        except Exception as error:  # it could not even be written
            return str(error)
