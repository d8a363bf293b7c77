"""The compiler of workloads: from one to a plan that can be launched, and the caches of plans.

``passes/pipeline.py`` lowers one computation; ``steps.py`` lists the computations of a workload and makes
a launch of each. Here they become a plan (``plans.py``): ``build`` takes for each step the best kernel
that is not known to be wrong, and ``plan`` caches the result."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf, prod
from typing import Any, TypeVar, cast

from transconv.compute import Alone, Compute, Workload, in_bands
from transconv.cost import estimate, of_phases, takes_turns
from transconv.ir import Kernel, Tensor
from transconv.passes import TOGETHER, decided, leave, lower, running, together
from transconv.passes.lowering import split_k
from transconv.runtime import check_records, plan_cache
from transconv.runtime.compilation.plan_request import PlanRequest
from transconv.runtime.plans import Plan, PlanStep
from transconv.runtime.steps import (
    Choose,
    Planned,
    given_schedule,
    kernel_name,
    launched,
    main_computations,
    with_copies,
)
from transconv.schedule import Schedule, Scheduled, is_copy, part_spaces, why_not
from transconv.selection import Listed, forget_lists, grouped_alike, grouping, shortlist, with_same_bits
from transconv.support import Cache, ScheduleError, StageError, Unsupported, knobs
from transconv.target import Target

log = logging.getLogger("transconv.compiler")
Made = TypeVar("Made", bound=Plan)


def build(
    workload: Workload,
    target: Target,
    schedule: Schedule | None,
    choose: Choose | None,
    deterministic: bool,
    kind: type[Made],
) -> Made:
    """Compile a workload into a plan of a front end's ``kind``, without any cache.

    Without a schedule, each kernel is the best that is not known to be wrong, or that of ``choose``.
    ``deterministic``: results have the same bits in every run. Raises ScheduleError if the given schedule
    is not legal, Unsupported if no kernel is left."""
    started = time.perf_counter()
    shelf = _Shelf(workload, deterministic)
    pick, mains = choose or shelf.choose, list[tuple[Compute, Schedule]]()
    computations, given = main_computations(workload, target, schedule)
    for compute in computations:
        mains.append((compute, given_schedule(compute, workload, target, given) or pick(compute, target)))
    planned, one = shelf.one_launch(
        with_copies(mains, target, given, pick), target, schedule is None and choose is None
    )
    if deterministic and (varying := [c for a, c in planned if grouped_alike(c, a) != c]):
        raise _same_bits(varying[0])
    if deterministic and (adding := next((a for a, _ in planned if a.added), None)) is not None:
        raise ScheduleError(
            f"{adding.name} adds to {adding.added[0].tensor.name} in no order, and the "
            "same bits were asked for"
        )
    steps, spaces = shelf.assembled(planned, one, target)
    used = next(
        (s.schedule for s in steps if not is_copy(s.compute) and not workload.prepares(s.compute)),
        schedule or Schedule(),
    )
    spent = time.perf_counter() - started
    level = logging.INFO if spent > 1 else logging.DEBUG
    if knobs.debug() >= 1:
        level = logging.WARNING
    log.log(
        level,
        "%s %s on %s: %s, generated in %.2f s",
        workload,
        workload.direction,
        target.name,
        used,
        spent,
    )
    if knobs.debug() >= 2:
        for step in steps:
            log.warning("%s\n%s", step.compute, step.source)
    return kind(
        workload,
        target,
        used,
        tuple(steps),
        spaces,
        schedule is not None or choose is not None,
        shelf.rejected,
        shelf.why or "given by the caller",
        shelf.tuned,
        deterministic,
    )


def build_scheduled(workload: Workload, target: Target, mains: Planned, choose: Choose) -> Plan:
    """Compile a workload whose main kernels are these, each with its schedule; ``choose``: those of copies
    and of kernels that add up parts. Raises ScheduleError for one that is not legal."""
    for compute, schedule in mains:
        if reason := why_not(schedule, compute, target):
            raise ScheduleError(f"{compute.name}: {schedule}: {reason}")
    shelf = _Shelf(workload, True)
    planned, one = shelf.one_launch(with_copies(mains, target, None, choose), target, False)
    steps, spaces = shelf.assembled(planned, one, target)
    schedule = mains[0][1]
    return Plan(workload, target, schedule, tuple(steps), spaces, True, why="that of the whole")


def _same_bits(schedule: Schedule) -> ScheduleError:
    return ScheduleError(
        f"{schedule}: atomic sums differ from run to run, and those of parts with sizes that are "
        "arguments, and the same bits were asked for; use reduce=partials, with deal=1"
    )


def build_compute(compute: Compute, target: Target, schedule: Schedule | None = None) -> Plan:
    """Compile one computation, without any cache. Without a schedule, each kernel is the best that is not
    known to be wrong. Raises ScheduleError if the given schedule is not legal, or none is."""
    return build(Alone(compute), target, schedule, None, False, Plan)


MOST_JOINED = 32  # schedules of a stride phase that are tried for all
MOST_REJECTED = 8  # wrong kernels of one computation after which torch computes it


class _Shelf:
    """Makes the kernels of one plan, each once."""

    def __init__(self, workload: Workload, deterministic: bool) -> None:
        self.workload, self.deterministic = workload, deterministic
        self.switches = running()
        self.made: dict[tuple[str, Schedule], PlanStep] = {}
        self.rejected = 0
        self.why = ""  # the reason for the schedule of the first kernel
        self.tuned = False  # whether that was found by tuning, for this problem or one that is close

    def step(self, compute: Compute, schedule: Schedule, target: Target) -> PlanStep:
        """The kernel of a computation. Raises ScheduleError, or StageError for a bug in a pass."""
        key = (compute.name, schedule)
        if key not in self.made:
            try:
                name, math = kernel_name(self.workload, compute, schedule, target), self.workload.math
                self.made[key] = launched(
                    self.workload,
                    compute,
                    schedule,
                    target,
                    lower(compute, schedule, target, name, math, self.switches)[-1][1],
                )
            except ScheduleError:
                raise
            except Exception as cause:
                raise StageError(
                    stage="passes",
                    problem=str(self.workload),
                    options=self.workload.options,
                    schedule=str(schedule),
                    reason=f"{type(cause).__name__}: {cause}",
                ) from cause
        return self.made[key]

    def assembled(
        self, planned: Planned, one: PlanStep | None, target: Target
    ) -> tuple[list[PlanStep], dict[str, Tensor]]:
        """The launches of the planned computations, and the workspaces that they share."""
        steps: list[PlanStep] = []
        spaces: dict[str, Tensor] = {}
        for compute, chosen in planned:
            made = one if one and compute.phase else self.step(compute, chosen, target)
            if made not in steps:
                steps.append(made)
            for view in compute.added:  # cleared once, also if several kernels add to it
                if all(s.zero is not view.tensor for s in steps):
                    made.zero = view.tensor
            whole = Scheduled(compute, chosen, target)
            spaces |= {t.name: t for t in whole.workspaces}
            spaces |= {t.name: t for t in (*part_spaces(whole.main, chosen), *self.between(compute))}
            if most := split_k.most_parts(chosen, whole.main):
                parts = split_k.workspace(whole.main, most)
                if parts.name not in spaces or spaces[parts.name].layout.span < parts.layout.span:
                    spaces[parts.name] = parts  # stride phases share the largest
            elif chosen.split_k > 1:  # atomic: clear before the first launch, as other phases may store
                steps[0].zero = compute.c.tensor
        return steps, spaces

    def between(self, compute: Compute) -> list[Tensor]:
        """The tensors in which a computation stores values for later ones."""
        if compute.does != "compute":
            return []
        return [w.view.tensor for w in compute.writes if w.view.tensor not in self.workload.tensors]

    def one_launch(self, planned: Planned, target: Target, free: bool) -> tuple[Planned, PlanStep | None]:
        """The stride phases of one result as one launch: if a schedule of one of them makes explicit
        kernels and is legal for all, the one with the best estimate for all first; else, where schedules
        are ``free``, one of the longest sum's with which all take no longer than each with its own and a
        launch. Where sizes are arguments, phases may be small, each with few programs: so are others that
        have one schedule, unless positions are written out, which would take the registers of all phases.
        Otherwise the planned computations and None."""
        phases = [(a, c) for a, c in planned if a.phase]
        phases.sort(key=lambda p: -prod(x.size for x in p[0].axes_of("K")))
        if len(phases) < 2 or any(c.split_k > 1 for _, c in phases):
            return planned, None
        explicit = all(c.via == "gluon" for _, c in phases)
        step = self.joined(phases, (c for _, c in phases if c.via == "gluon"), inf, target)
        if step is None and free and explicit:
            apart = sum(estimate(c, a, target) for a, c in phases)
            saved = (len(phases) - 1) * target.rates.gluon.launch_us
            listed = shortlist(MOST_JOINED, phases[0][0], target, self.workload)
            step = self.joined(
                phases, (k.schedule for k in listed if k.schedule.via == "gluon"), apart + saved, target
            )
        elif step is None and phases[0][0].named and len(own := {c for _, c in phases}) == 1:
            step = self.joined(phases, [c for c in own if not c.regs], inf, target)
        if step is None:
            return planned, None
        return [(a, step.schedule if a.phase else c) for a, c in planned], step

    def joined(
        self, phases: Planned, schedules: Iterable[Schedule], most: float, target: Target
    ) -> PlanStep | None:
        """One launch of all phases with one of some schedules that is estimated to take ``most`` at most
        for all of them, the best first."""
        found: dict[Schedule, float] = {}
        for s in dict.fromkeys(schedules):
            if s.split_k == 1 and not any(
                (c.pack, c.merge) != (s.pack, s.merge)
                or (s.via == "gluon" and not takes_turns(s, a, target))
                or (self.deterministic and a.named and grouping(s, a) != grouping(c, a))
                or why_not(s, a, target)
                for a, c in phases
            ):
                found[s] = of_phases([s] * len(phases), [a for a, _ in phases], target)
        for schedule in sorted((s for s in found if found[s] <= most), key=found.__getitem__):
            kernel = together([self.step(a, schedule, target).kernel for a, _ in phases])
            if kernel is None or self.uncertified(kernel, phases[0][0]):
                continue
            whole = replace(phases[0][0], name=self.workload.direction, part=None)
            step = launched(self.workload, whole, schedule, target, kernel)
            leave(step.kernel.name, TOGETHER.name, str(kernel))
            if not check_records.is_wrong(step.digest):
                return step
            self.rejected += 1
        return None

    def uncertified(self, kernel: Kernel, compute: Compute) -> str:
        """What the number of samples decides about sums of a kernel, although the same bits are asked for:
        it has no certificate. Empty if it decides nothing."""
        if not self.deterministic or compute.named is None or not in_bands(compute):
            return ""
        is_summed = any(x.extent is not None for x in compute.axes_of("K"))
        return "; ".join(why for name in compute.named.names for why in decided(kernel, name, is_summed))

    def candidates(self, compute: Compute, target: Target) -> Sequence[Listed]:
        """The best schedules, tuned ones first; of those with the same bits where these are asked for."""
        listed = with_same_bits if self.deterministic else shortlist
        return listed(MOST_REJECTED, compute, target, self.workload)

    def choose(self, compute: Compute, target: Target) -> Schedule:
        """The best schedule whose kernel is not known to be wrong, nor, unless it was measured, to keep
        values in memory for want of registers: of ``check_records.MOST_SPILT`` that do, the one with the
        fewest. Raises Unsupported if the first ``MOST_REJECTED`` are wrong or without a certificate,
        ScheduleError if results must be deterministic and the user's schedule is not."""
        spilt: list[tuple[int, Listed]] = []
        unproved = ""
        candidates = self.candidates(compute, target)
        if self.deterministic and not candidates:
            raise _same_bits(shortlist(1, compute, target, self.workload)[0].schedule)
        for made in candidates:
            try:
                step = self.step(compute, made.schedule, target)
            except (ScheduleError, StageError) as error:
                if not made.tuned:
                    raise
                log.warning("a row of the tuning database is passed over: %s", error)
                continue
            wrong = check_records.is_wrong(step.digest)
            why = "" if wrong else self.uncertified(step.kernel, compute)
            if wrong or why:
                self.rejected, unproved = self.rejected + 1, unproved or why
                continue
            size = 0 if made.tuned else check_records.spilled(step.digest)
            if not size:
                return self._taken(made)
            spilt.append((size, made))
            self.rejected += 1
            if len(spilt) == check_records.MOST_SPILT:
                break
        if spilt:
            self.rejected = max(self.rejected, check_records.MOST_SPILT)
            return self._taken(min(spilt, key=lambda found: found[0])[1])
        best = f"the {len(candidates)} best kernels for {compute.name} of {self.workload}"
        if unproved:
            raise Unsupported("invariant:kernel", f"{best} have no certificate: {unproved}")
        raise Unsupported("miscompiled", f"{best} are known to give wrong results on {target.name}")

    def _taken(self, made: Listed) -> Schedule:
        if not self.why:
            self.why, self.tuned = made.why, made.close
        return made.schedule


_plans: Cache[tuple[Any, ...], Plan] = Cache("plans")
_lock = threading.Lock()


def plan(
    workload: Workload,
    target: Target,
    schedule: Schedule | None,
    deterministic: bool,
    kind: type[Made],
    keeps: bool = True,
) -> Made:
    """``build``, cached: equal arguments give the same plan, compiled once per process. ``keeps``: whether
    plans are also read from disk and written to it; checks of the passes do not use the disk."""
    found = known(workload, target, schedule, deterministic, kind, keeps)
    if found is None:
        found = added(
            build(workload, target, schedule, None, deterministic, kind),
            workload,
            target,
            schedule,
            deterministic,
            kind,
            keeps,
        )
    return found


def known(
    workload: Workload,
    target: Target,
    schedule: Schedule | None,
    deterministic: bool,
    kind: type[Made],
    keeps: bool = True,
) -> Made | None:
    """The plan if this process has made it, or if it is on disk and may be read (``keeps``); else None."""
    key = (workload, target, schedule, kind, deterministic)
    found = _plans.get(key)
    if found is None:
        made: Plan | None = None
        plain = _plans.get((*key[:-1], False))
        if plain is not None and not any(s.schedule.varies for s in plain.steps):
            made = replace(plain, deterministic=True)  # shares the kernels
        elif schedule is None and keeps:
            made = plan_cache.find(
                workload,
                target,
                deterministic,
                kind,
                lambda: build(workload, target, None, None, deterministic, kind),
            )
        if made is None:
            return None
        with _lock:
            found = _plans.setdefault(key, made)
    return cast(Made, found)


def is_made(question: PlanRequest, kind: type[Plan]) -> bool:
    """Whether this process has the plan of a request; the disk is not looked at."""
    return (question.workload, question.target, None, kind, question.deterministic) in _plans


def added(
    made: Made,
    workload: Workload,
    target: Target,
    schedule: Schedule | None,
    deterministic: bool,
    kind: type[Made],
    keeps: bool = True,
) -> Made:
    """A plan that was just built, as the one of this process, and on disk unless its ``schedule`` was
    given or the disk is not used (``keeps``)."""
    if schedule is None and keeps:
        plan_cache.keep(made)
    with _lock:
        found = _plans.setdefault((workload, target, schedule, kind, deterministic), made)
    return cast(Made, found)


def adopt(answer: dict[str, Any]) -> None:
    """Record the kernels that another process found to be wrong (``wrong``), and log them; and those that
    keep values in memory (``spilled``)."""
    for key, size in answer.get("spilled", ()):
        check_records.note_spills(str(key), int(size))
    for found in answer.get("wrong", ()):
        log.warning(
            "rejected: %s with schedule %s: %s", found["function"], found["schedule"], found["reason"]
        )
        check_records.record(
            found["kernel"],
            check_records.WRONG,
            bool(found["keep"]),
            reason=found["reason"],
            function=found["function"],
            schedule=found["schedule"],
        )


def spills(plan: Plan) -> list[tuple[str, int]]:
    """The kernels of a plan that another schedule may spare memory of their threads, with its bytes: none
    of a schedule that was given or measured, or after others were tried."""
    if plan.fixed or plan.tuned or plan.rejected >= check_records.MOST_SPILT:
        return []
    return [(s.digest, n) for s in plan.steps if (n := s.triton.spilled) > check_records.ALLOWED]


def replan(wrong: Made) -> Made:
    """Remove a plan with wrong kernels from the cache and make the next one, for the same sizes if the
    plan was for given ones (``Plan.at``). Raises as ``build``."""
    key = (wrong.workload, wrong.target, None, type(wrong))
    with _lock:
        for deterministic in (False, True):  # two plans may share their kernels
            held = _plans.get((*key, deterministic))
            if held is not None and held.steps is wrong.steps:
                del _plans[(*key, deterministic)]
    made = plan(wrong.workload, wrong.target, None, wrong.deterministic, type(wrong))
    return made.at(wrong.sizes) if wrong.sizes else made


def forget() -> None:
    """Clear the caches of plans and of shortlists of this process."""
    with _lock:
        _plans.clear()
    forget_lists()
