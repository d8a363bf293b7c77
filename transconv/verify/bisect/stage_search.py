"""The search for the first stage that makes the kernels of a workload wrong.

Asked one after the other, each against the same answer, until one disagrees:

    compute          its views, evaluated as they stand, one computation after another: how a text was
                     split into kernels, and its rows into parts
    merging, packing the views of merged groups, and those of the copies and of what reads them
    naive ... final  the kernels after every pass, in the interpreter of the IR
    emit             the emitted text, under Triton's interpreter
    compiler         the compiled kernel on the GPU: Triton or ptxas

The answer is the oracle's for a convolution, the f64 evaluation of the text for a computation, of which
float data are looked at where exact ones show nothing. A pass that is to blame is run once more while
every rewrite of the simplifier is checked at random points, which names the rule, where one is unsound.

A stage after which the kernel breaks a rule of the IR, or a pass that fails, counts as wrong."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from transconv.compute import Alone, Compute, describe
from transconv.conv import ConvProblem, ConvWorkload, Epilogue, Prop
from transconv.ir import InterpError, Kernel, Roles, VerifyError, find, readable, rewrite, select, verify
from transconv.ir import expr as ex
from transconv.passes import EMIT, NAIVE, TOGETHER, Context, forms, levels, passes, running, together
from transconv.passes.lowering import naive
from transconv.schedule import Schedule, Scheduled, is_copy
from transconv.support import ProblemError
from transconv.target import TARGETS, Target
from transconv.verify import any_size
from transconv.verify.bisect.sampled_values import overflow, rule_of
from transconv.verify.bisect.subject import (
    PRODUCTS,
    BisectSubject,
    EmittedVerdict,
    ask_compiler,
    ask_emitter,
    evaluated,
    shrunk,
)
from transconv.verify.computation import ComputationCase

PARTS = ("ir", "emitter", "compiler")


@dataclass(frozen=True, slots=True)
class Blame:
    """The result of a bisection. ``stage``: ``compute``, ``naive``, a pass, ``emit``, ``compiler``, or
    empty if all stages that could be asked are right; ``rule``: of the simplifier, if one is unsound;
    ``diff``: of the kernel's text before and after the stage; ``text``: the whole report; ``verdict``: on
    the last stage that was asked, in words."""

    stage: str
    rule: str
    diff: str
    text: str
    verdict: str = ""

    def __bool__(self) -> bool:
        return bool(self.stage)


def blame(
    problem: ConvProblem | str,
    prop: Prop | str,
    target: Target | str | None = None,
    schedule: Schedule | str | None = None,
    epilogue: Epilogue | str = "",
    *,
    seed: int = 0,
    limit: int = PRODUCTS,
    parts: Collection[str] = PARTS,
    switches: Mapping[str, bool] | None = None,
    isolated: bool = True,
) -> Blame:
    """Find the first stage that changes what a direction of a problem means; see ``blame_workload``."""
    problem = ConvProblem.parse(problem) if isinstance(problem, str) else problem
    after = Epilogue.parse(epilogue) if isinstance(epilogue, str) else epilogue
    asked = BisectSubject(
        ConvWorkload(problem, Prop(prop), after),
        target if isinstance(target, Target) else TARGETS["sm_90"] if not target else Target.parse(target),
        Schedule.parse(schedule) if isinstance(schedule, str) and schedule else schedule or None,
    )
    return blame_workload(asked, seed, limit, parts, switches, isolated)


def blame_compute(
    compute: Compute,
    target: Target,
    schedule: Schedule | None = None,
    *,
    seed: int = 0,
    limit: int = PRODUCTS,
    parts: Collection[str] = PARTS,
    switches: Mapping[str, bool] | None = None,
    sizes: Mapping[str, int] | None = None,
    isolated: bool = True,
) -> Blame:
    """Find the first stage that changes what a computation means; see ``blame_workload``. ``sizes``: where
    they are arguments; default: the least that are allowed."""
    at = dict(sizes or any_size.edges(compute)[0]) if compute.named else {}
    asked = BisectSubject(Alone(compute), target, schedule, at)
    return blame_workload(asked, seed, limit, parts, switches, isolated)


def blame_workload(
    asked: BisectSubject,
    seed: int = 0,
    limit: int = PRODUCTS,
    parts: Collection[str] = PARTS,
    switches: Mapping[str, bool] | None = None,
    isolated: bool = True,
) -> Blame:
    """Find the first stage that changes what a workload means.

    One with more than ``limit`` multiplications is looked at in a smaller size (the report says which).
    ``switches`` turn passes on and off; default: as TRANSCONV_PASSES says. Raises ScheduleError or
    Unsupported when there is no kernel to blame, ComputeError for a computation that cannot be made
    small."""
    return _StageSearch(asked, seed, limit, running(switches), isolated).judge(parts)


class BisectReport:
    """Builds the report, a line for each stage."""

    def __init__(self, title: str) -> None:
        self.lines = [title]
        self.verdict = ""

    def say(self, stage: str, verdict: str) -> None:
        """Add a line."""
        self.verdict = verdict
        self.lines.append(f"  {stage:<11} {verdict}")

    def guilty(self, stage: str, reason: str, rule: str = "", diff: str = "") -> Blame:
        """Record the first wrong stage, which ends the search."""
        self.say(stage, f"WRONG: {reason}")
        return self.end(stage, rule, diff)

    def end(self, stage: str, rule: str = "", diff: str = "") -> Blame:
        """The whole report; ``stage`` is empty where none is wrong."""
        verdict = self.verdict
        if rule:
            self.say("", f"by a rule of the simplifier, {rule}")
        tail = ["", *diff.splitlines()] if diff else []
        name = rule.partition(":")[0].partition(" (")[0]
        return Blame(stage, name, diff, "\n".join([*self.lines, *tail]), verdict)


class _StageSearch(BisectReport):
    """One search."""

    def __init__(
        self, asked: BisectSubject, seed: int, limit: int, switches: Mapping[str, bool], isolated: bool
    ) -> None:
        about = [asked.workload.title, f"on {asked.target.name}"]
        super().__init__("  ".join(about))
        self.asked, self.seed, self.limit = asked, seed, limit
        self.switches, self.isolated = switches, isolated

    def judge(self, parts: Collection[str]) -> Blame:
        self.small, remark = shrunk(self.asked, self.limit)
        if self.asked.sizes:
            self.say("sizes", " ".join(f"{n}={v}" for n, v in self.asked.sizes.items()))
        if remark:
            self.say("size", remark)
        self.planned = self.small.steps()
        if not self.planned:
            raise ProblemError(f"{self.asked.workload.title} has no element to compute")
        self.cases = self.small.cases(self.seed)
        if "ir" in parts and (found := self.judge_ir()):
            return found
        if "emitter" in parts and (
            found := self.judge_verdict(EMIT.name, ask_emitter(self.small, self.seed, self.isolated))
        ):
            return found
        if "compiler" in parts and (
            found := self.judge_verdict("compiler", ask_compiler(self.small, self.asked, self.seed))
        ):
            return found
        return self.end("")

    # -- the IR ------------------------------------------------------------------------------------

    def judge_ir(self) -> Blame | None:
        for schedule in dict.fromkeys(str(s) for _, s in self.planned):
            self.say("schedule", schedule)
        if found := self.judge_meaning():
            return found
        launches = self.staged(self.small)
        exact, *others = self.cases
        if found := self.judge_stages(launches, exact):
            return found
        for case in others:
            if reason := self.wrong(launches, [len(NAMES) - 1] * len(launches), case):
                self.say(f"{case.data} data", reason)
                if found := self.judge_stages(launches, case):
                    return found
        return self.judge_together(launches) or self.judge_widths(launches)

    def staged(self, subject: BisectSubject) -> list[Stages]:
        """The kernels of a subject after every pass."""
        math = subject.workload.math
        return [Stages.of(c, s, subject.target, math, self.switches) for c, s in subject.steps()]

    def judge_meaning(self) -> Blame | None:
        """What the computations of the kernels mean, before there is a kernel; forms that change nothing
        are left out."""
        asked = [
            Scheduled(c, s, self.small.target)
            for c, s in self.planned
            if not any(x.role == "part" for x in c.axes)
        ]  # what adds the parts of another one's sum
        mains = [s for s in asked if not is_copy(s.compute)]
        before: list[Compute] = []
        for form in forms():
            made = [form.of(s) for s in mains]
            if made == before:
                continue
            packed = any(t.copy_of for c in made for t in c.tensors)
            before, computes = made, [form.of(s) for s in asked] if packed else made
            numbers = [c.at(**self.small.sizes) for c in computes]
            try:
                reason = next(
                    filter(None, (case.judged(evaluated(numbers, case)).problem for case in self.cases)),
                    "",
                )
            except InterpError as error:
                reason = str(error)
            if reason:
                rule = rule_of(self.asked.made_anew, self.seed) if form is forms()[0] else ""
                return self.guilty(form.name, reason, rule, "\n".join(map(describe, computes)))
            self.say(form.name, "right")
        return None

    def judge_stages(self, launches: list[Stages], case: ComputationCase) -> Blame | None:
        for stage, name in enumerate(NAMES):
            # The kernel that adds partial sums can only run after the pass that creates them.
            asked = [
                s
                for s in launches
                if stage >= parts_begin(launches) or not any(x.role == "part" for x in s.compute.axes)
            ]
            failed = next((s for s in asked if s.failed == name), None)
            if failed is not None:
                return self.guilty(name, failed.reason, failed.rule_of(stage, self.seed))
            changed = [s for s in asked if not stage or s.kernel(stage) is not s.kernel(stage - 1)]
            if not changed and stage != FINAL:
                self.say(name, "unchanged")
                continue
            reason = self.wrong(asked, [stage] * len(asked), case)
            if not reason:
                self.say(name, "right")
                continue
            one = self.culprit(asked, changed or asked, stage, case)
            before = one.kernel(stage - 1) if stage else None
            return self.guilty(
                name,
                reason,
                one.rule_of(stage, self.seed),
                changes(before, one.kernel(stage), NAMES[stage - 1] if stage else "", name),
            )
        return None

    def culprit(
        self, asked: list[Stages], changed: list[Stages], stage: int, case: ComputationCase
    ) -> Stages:
        """The launch that is wrong: with all others a stage back, the result is wrong still."""
        if len(changed) > 1 and stage and stage != parts_begin(asked):
            for one in changed:
                if self.wrong(asked, [stage - (s is not one) for s in asked], case):
                    return one
        return changed[0]

    def wrong(self, launches: Sequence[Stages], stages: Sequence[int], case: ComputationCase) -> str:
        """What is wrong with the result of launches that follow one another, each at its stage."""
        zeroed = {v.tensor.name for c, _ in self.planned for v in c.added}
        zeroed |= {c.c.tensor.name for c, s in self.planned if s.split_k > 1 and s.reduce == "atomic"}
        sizes = self.small.sizes
        kernels: list[Kernel] = [s.seen(n).at(sizes) for s, n in zip(launches, stages, strict=True)]
        orders = 3 if any(find(k, Roles) for k in kernels) else 1  # of events
        for seed in range(orders):
            try:
                reason = case.interpreted(*kernels, zeroed=zeroed, seed=seed).problem
            except InterpError as error:
                reason = str(error)
            if reason:
                return reason
        return ""

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
        order = [
            *(s for s in others if s.compute.does == "pack"),
            whole,
            *(s for s in others if s.compute.does != "pack"),
        ]
        if reason := self.wrong(order, [last] * len(order), self.cases[0]):
            return self.guilty(
                TOGETHER.name,
                reason,
                diff=changes(phases[0].kernel(last), joined, NAMES[last], TOGETHER.name),
            )
        self.say(TOGETHER.name, "right")
        return None

    def judge_widths(self, launches: list[Stages]) -> Blame | None:
        """Whether indices fit into their types at the size that was asked for."""
        if self.asked.sizes:
            return None
        for made in launches if self.small == self.asked else self.staged(self.asked):
            if not made.failed and (reason := overflow(made.kernel(NARROW), self.seed)):
                return self.guilty("narrow", f"at the size that was asked for, {reason}")
        return None

    # -- below the IR ------------------------------------------------------------------------------

    def judge_verdict(self, stage: str, verdict: EmittedVerdict) -> Blame | None:
        if not verdict.wrong:
            self.say(stage, verdict.text)
            return None
        explicit = any(schedule.via == "gluon" for _, schedule in self.planned)
        who = (
            ""
            if stage == EMIT.name
            else ("; the Gluon emitter, Triton or ptxas" if explicit else "; Triton or ptxas")
        )
        return self.guilty(stage, verdict.text + who, diff=verdict.source)


def changes(before: Kernel | None, after: Kernel, earlier: str, later: str) -> str:
    """The statements that changed, as a unified diff."""
    old = readable(before).splitlines() if before is not None else []
    return "\n".join(
        difflib.unified_diff(old, readable(after).splitlines(), earlier, later, lineterm="", n=1)
    )


@dataclass(slots=True)
class Stages:
    """One launch: the kernel after ``naive`` and every pass, up to the one that failed, if any.
    ``compute`` is what is compiled, over merged groups and over copies."""

    compute: Compute
    schedule: Schedule
    context: Context
    kernels: list[tuple[str, Kernel]] = field(default_factory=list)
    failed: str = ""  # the stage that raised
    reason: str = ""

    @staticmethod
    def of(
        compute: Compute, schedule: Schedule, target: Target, precision: str, switches: Mapping[str, bool]
    ) -> Stages:
        context = Context(Scheduled(compute, schedule, target), precision)
        main, runs = context.compute, running(switches)
        made = Stages(main, schedule, context)
        made.extend(NAIVE.name, lambda: naive.naive(main, f"conv_{main.name}"))
        for step in passes():
            if made.failed:
                break
            kernel = made.kernels[-1][1]
            made.extend(
                step.name,
                lambda s=step, k=kernel: (  # type: ignore[misc]
                    s.run(k, context) if runs[s.name] else k
                ),
            )
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

    def seen(self, stage: int) -> Kernel:
        """The kernel as the interpreter is to run it."""
        return as_targets_divide(self.kernel(stage)) if stage >= FINAL else self.kernel(stage)


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
