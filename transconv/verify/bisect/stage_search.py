"""Finds the first stage that makes a problem's kernel wrong.

Asked one after the other, each against the same answer, until one disagrees:

    compute          its views, evaluated as they stand
    merging, packing the views of merged groups, and those of the copies and of what reads them
    naive ... final  the kernel after every pass, in the interpreter of the IR
    emit             the emitted text, under Triton's interpreter
    compiler         the compiled kernel on the GPU: Triton or ptxas

A pass that is to blame is run once more while every rewrite of the simplifier is checked at random
points, which names the rule, where one is unsound.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from transconv.compute import Compute, describe
from transconv.conv import ConvProblem, Epilogue, Prop, computes
from transconv.errors import ProblemError
from transconv.ir import InterpError
from transconv.passes import EMIT, TOGETHER, forms, running, together
from transconv.schedule import Schedule
from transconv.target import TARGETS, Target
from transconv.verify.bisect.direct_sums import meaning, readings
from transconv.verify.bisect.emitted_kernel import ask_compiler, ask_emitter
from transconv.verify.bisect.index_widths import overflow
from transconv.verify.bisect.problem_shrinker import PRODUCTS, shrunk
from transconv.verify.bisect.replay import (
    BLOCKWISE,
    FINAL,
    NAMES,
    NARROW,
    ReplayedDirection,
    Stages,
    compute,
    differing,
)
from transconv.verify.bisect.report import PARTS, BisectReport, Blame, changes
from transconv.verify.bisect.rewrite_rules import rule_of


def blame(problem: ConvProblem | str, prop: Prop | str, target: Target | str | None = None,
          schedule: Schedule | str | None = None, epilogue: Epilogue | str = "", *, seed: int = 0,
          limit: int = PRODUCTS, parts: Collection[str] = PARTS,
          switches: Mapping[str, bool] | None = None, isolated: bool = True) -> Blame:
    """Find the first stage that changes what a direction of a problem means.

    A problem with more than ``limit`` multiplications is looked at in a smaller size (the report
    says which). ``switches`` turn passes on and off; default: as TRANSCONV_PASSES says. Raises
    ScheduleError or Unsupported when there is no kernel to blame.
    """
    asked = ReplayedDirection(
        ConvProblem.parse(problem) if isinstance(problem, str) else problem, Prop(prop),
        target if isinstance(target, Target) else TARGETS["sm_90"] if not target
        else Target.parse(target),
        Schedule.parse(schedule) if isinstance(schedule, str) and schedule else schedule or None,
        Epilogue.parse(epilogue) if isinstance(epilogue, str) else epilogue)
    return _Trial(asked, seed, limit, running(switches), isolated).judge(parts)


class _Trial(BisectReport):
    """One search."""

    def __init__(self, asked: ReplayedDirection, seed: int, limit: int,
                 switches: Mapping[str, bool], isolated: bool) -> None:
        super().__init__(f"{asked.problem}  {asked.prop}  on {asked.target.name}"
                         + (f"  epilogue {asked.epilogue}" if asked.epilogue else ""))
        self.isolated = isolated
        self.asked, self.seed, self.limit, self.switches = asked, seed, limit, switches

    def judge(self, parts: Collection[str]) -> Blame:
        self.small, remark = shrunk(self.asked, self.limit)
        if remark:
            self.say("size", remark)
        if not self.small.steps():
            raise ProblemError(f"{self.asked.problem} {self.asked.prop} has no element to compute")
        self.small.fill(self.seed)
        if "ir" in parts and (found := self.judge_ir()):
            return found
        if "emitter" in parts and (found := self.judge_emitter()):
            return found
        if "compiler" in parts and (found := self.judge_compiler()):
            return found
        return self.end("")

    # -- the IR ------------------------------------------------------------------------------------

    def judge_ir(self) -> Blame | None:
        small = self.small
        steps = small.steps()
        for schedule in dict.fromkeys(str(c) for _, c in steps):
            self.say("schedule", schedule)
        for name, described in readings(small):
            if found := self.judge_meaning(name, described):
                return found
        launches = [Stages.of(a, c, small.target, small.problem.math, self.switches)
                    for a, c in steps]
        for stage, name in enumerate(NAMES):
            if found := self.judge_stage(launches, stage, name):
                return found
        return self.judge_together(launches) or self.judge_widths()

    def judge_meaning(self, name: str, made: list[Compute]) -> Blame | None:
        """What computations describe, before there is a kernel."""
        try:
            reason = differing(self.small.result, meaning(self.small, made), self.small.sums)
        except InterpError as error:
            reason = str(error)
        if reason:
            asked = self.asked
            rule = "" if name != forms()[0].name else rule_of(
                lambda: computes(asked.problem, asked.prop, asked.epilogue), self.seed)
            return self.guilty(name, reason, rule, "\n".join(map(describe, made)))
        self.say(name, "right")
        return None

    def judge_together(self, launches: list[Stages]) -> Blame | None:
        """The stride phases as one launch, where they become one."""
        phases = [s for s in launches if s.compute.phase]
        if len({s.schedule for s in phases}) != 1 or phases[0].schedule.split_k > 1:
            return None
        last = len(NAMES) - 1
        joined = together([s.kernel(last) for s in phases])
        if joined is None:
            return None
        whole = replace(phases[0], kernels=[(name, joined) for name in NAMES])
        others = [s for s in launches if s not in phases]
        order = [*(s for s in others if s.compute.does == "pack"), whole,
                 *(s for s in others if s.compute.does != "pack")]
        if reason := self.result(order, [last] * len(order)):
            return self.guilty(TOGETHER.name, reason, diff=changes(
                phases[0].kernel(last), joined, NAMES[last], TOGETHER.name))
        self.say(TOGETHER.name, "right")
        return None

    def judge_widths(self) -> Blame | None:
        """Whether indices fit into their types at the size that was asked for."""
        for a, c in self.asked.steps():
            made = Stages.of(a, c, self.asked.target, self.asked.problem.math, self.switches)
            if not made.failed and (reason := overflow(made.kernel(NARROW), self.seed)):
                return self.guilty("narrow", f"at the size that was asked for, {reason}")
        return None

    def judge_stage(self, launches: list[Stages], stage: int, name: str) -> Blame | None:
        failed = next((s for s in launches if s.failed == name), None)
        if failed is not None:
            return self.guilty(name, failed.reason, failed.rule_of(stage, self.seed))
        before = [s.kernel(stage - 1) if stage else None for s in launches]
        same = all(s.kernel(stage) is old for s, old in zip(launches, before, strict=True))
        if same and stage != FINAL:
            self.say(name, "unchanged")
            return None
        reason = self.result(launches, [stage] * len(launches))
        if not reason:
            self.say(name, "right")
            return None
        culprit = self.culprit(launches, stage)
        return self.guilty(name, reason, culprit.rule_of(stage, self.seed),
                           changes(before[launches.index(culprit)], culprit.kernel(stage),
                                   NAMES[stage - 1] if stage else "", name))

    def result(self, launches: list[Stages], stages: list[int]) -> str:
        """What is wrong with the result of the launches, each at its stage."""
        orders = max(s.orders(n) for s, n in zip(launches, stages, strict=True))
        for seed in range(orders):
            try:
                reason = self.small.wrong(compute(self.small, launches, stages, seed))
            except InterpError as error:
                reason = str(error)
            if reason:
                return reason
        return ""

    def culprit(self, launches: list[Stages], stage: int) -> Stages:
        """The launch that is wrong: with all others a stage back, the result is wrong still."""
        changed = [i for i, s in enumerate(launches)
                   if not stage or s.kernel(stage) is not s.kernel(stage - 1)]
        if len(changed) > 1 and (stage > BLOCKWISE or 0 < stage < BLOCKWISE):
            for i in changed:
                if self.result(launches, [stage - (j != i) for j in range(len(launches))]):
                    return launches[i]
        return launches[changed[0] if changed else 0]

    # -- below the IR ------------------------------------------------------------------------------

    def judge_emitter(self) -> Blame | None:
        verdict = ask_emitter(self.small, self.seed, self.isolated)
        if verdict.wrong:
            return self.guilty(EMIT.name, verdict.text, diff=verdict.source)
        self.say(EMIT.name, verdict.text)
        return None

    def judge_compiler(self) -> Blame | None:
        verdict = ask_compiler(self.small, self.asked)
        if verdict.wrong:
            explicit = any(schedule.via == "gluon" for _, schedule in self.small.steps())
            who = "the Gluon emitter, Triton or ptxas" if explicit else "Triton or ptxas"
            return self.guilty("compiler", f"{verdict.text}; {who}", diff=verdict.source)
        self.say("compiler", verdict.text)
        return None
