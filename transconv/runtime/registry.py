"""The registry of one kind of call: plans whose sizes are arguments, one of which is chosen for each size.

A plan's requirements say which sizes it is for; of those that a size meets, the one that the cost model
estimates to be the fastest for it is taken. A new size makes no other kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Generic

from transconv.cost import CostFormula, Lines
from transconv.ir import Const, Expr, Le, Sizes, function_of
from transconv.runtime.compilation.async_compile import compiles, planned, ready
from transconv.runtime.compilation.plan_request import (
    COMPILING,
    NEVER,
    Batch,
    PlanRequest,
    Room,
    Waiting,
    collect,
    is_collecting,
)
from transconv.runtime.plans import Made
from transconv.support import ComputeError, ProblemError, ScheduleError, Unsupported

NEVER_US = "1e999"  # infinity, as Python reads it
# What counts of the estimate of a schedule that tuning found for a problem that is close: estimates that
# differ by less count as equal, as where schedules are chosen, and what was measured comes first.
TUNED = 0.95
NONE = inf, None, 0  # no plan takes such sizes: see ``SizeTable.fastest``


@dataclass(frozen=True, slots=True)
class ChosenPlan(Generic[Made]):
    """The plan for one size of a kind of call, held at it, and the question that it answers. ``us``: its
    estimate; ``of``: how many had a say; ``waits``, if another one is being compiled: whether it may be
    chosen by now; ``kind``: of the calls."""

    plan: Made
    question: PlanRequest
    us: float
    of: int
    waits: Callable[[], bool] | None
    kind: str

    @property
    def why(self) -> str:
        """Why it is taken, in a sentence."""
        assert self.plan.required is not None
        among = f"the fastest of {self.of} kernels" if self.of > 1 else "the kernel"
        return (
            f"{among} for any size of this {self.kind}, by its estimate for this one; requires "
            f"{self.plan.required.sizes}"
        )


@dataclass(slots=True, eq=False)
class RegisteredPlan(Generic[Made]):
    """A plan of a registry, what it requires, and what it is estimated to take."""

    question: PlanRequest
    plan: Made
    sizes: Sizes = field(init=False)
    takes: Callable[..., bool] = field(init=False)  # of sizes, in the order of their names
    estimates: Sequence[CostFormula] = field(init=False)

    def __post_init__(self) -> None:
        assert self.plan.required is not None
        self.sizes, self.takes = self.plan.required.sizes, self.plan.required.takes
        self.estimates = self.plan.formulas()


class SizeTable(Generic[Made]):
    """What a registry's plans require and what they are estimated to take, as one function of sizes
    (``find``): the place of the plan with the least estimate, -1 where it does not take these sizes after
    all, and the estimates of all, infinite for those that do not take sizes of this kind. ``settled``: no
    other plan may come."""

    def __init__(self, kernels: Sequence[RegisteredPlan[Made]], settled: bool) -> None:
        self.count, self.settled = len(kernels), settled
        different: dict[Hashable, RegisteredPlan[Made]] = {}  # two examples may lead to one schedule
        for k in kernels:
            different.setdefault((tuple([s.schedule for s in k.plan.steps]), k.sizes.requirements), k)
        # Of equals the first wins.
        self.kernels = sorted(different.values(), key=lambda k: len(k.plan.steps))
        each = [dict.fromkeys(k.sizes.requirements) for k in self.kernels]
        common = [c for c in each[0] if all(c in other for other in each)]
        own = [[c for c in mine if c not in common] for mine in each]
        counts = [c for k in self.kernels for e in k.estimates for c in e.counts]
        self.find: Callable[..., tuple[int, tuple[float, ...]]] = function_of(
            [*common, *(c for mine in own for c in mine), *counts],
            kernels[0].sizes.names,
            lambda texts: self._spelled(texts, len(common), own),
        )

    def _spelled(
        self, texts: list[str], common: int, own: Sequence[Sequence[Expr]]
    ) -> tuple[Sequence[tuple[str, str]], str]:
        """What ``find`` returns, of the texts of requirements, of which some are common to all plans, and
        of counts. That large sizes are not too large is looked at for one plan only."""
        lines, left = Lines(), iter(texts)
        shared = _all_of([next(left) for _ in range(common)])
        said = [[(is_limit(c), next(left)) for c in mine] for mine in own]
        us: list[str] = []
        takes: list[str] = []
        number = itertools.count()
        for k, mine in zip(self.kernels, said, strict=True):
            each = [e.among(lines, next(number), [next(left) for _ in e.counts]) for e in k.estimates]
            found, share = " + ".join(each), f" * {TUNED}" if k.plan.tuned else ""
            limits, others = ([text for limit, text in mine if limit is kind] for kind in (True, False))
            if others:
                kinds = lines.name(lines.number(_all_of(others)))
                found, limits = f"({found}){share} if {kinds} else {NEVER_US}", [kinds, *limits]
            else:
                found = f"({found}){share}"
            us.append(lines.name(lines.number(found)))
            takes.append(_all_of(limits))
        best = "-1"
        for at in reversed(range(len(us))):
            first = " and ".join(f"{us[at]} <= {other}" for other in us[at + 1 :]) or "True"
            best = f"({at} if {takes[at]} else -1) if {first} else {best}"
        return lines.named, f"(({best}) if {shared} else -1, ({', '.join(us)},))"

    def fastest(self, sizes: Sequence[int]) -> tuple[float, RegisteredPlan[Made] | None, int]:
        """The plan with the least estimate, the microseconds of that, and how many take such sizes; no
        plan where none does."""
        at, us = self.find(*sizes)
        if at >= 0:
            return us[at], self.kernels[at], sum(each < inf for each in us)
        found = self.estimates(sizes)
        return (*min(found, key=lambda one: one[0]), len(found)) if found else NONE

    def estimates(self, sizes: Sequence[int]) -> list[tuple[float, RegisteredPlan[Made]]]:
        """The plans that take sizes, each with the microseconds that it is estimated to take. A function
        of their requirements would take a hundred times as long to compile as these take to evaluate."""
        values = dict(zip(self.kernels[0].sizes.names, sizes, strict=True))
        return [
            (us, k)
            for us, k in zip(self.find(*sizes)[1], self.kernels, strict=True)
            if us < inf and not k.sizes.why_not(values)
        ]


def _is_any(waits: Sequence[Callable[[], bool]]) -> bool:
    """Whether one of them is over; each call that waits asks for it."""
    for over in waits:
        if over():
            return True
    return False


def _are_all(waits: Sequence[Callable[[], bool]]) -> bool:
    """Whether each of them is over; mostly the first one is not."""
    for over in waits:
        if not over():
            return False
    return True


def is_limit(condition: Expr) -> bool:
    """Whether it says that a number of sizes is not too large for a kernel."""
    return isinstance(condition, Le) and isinstance(condition.b, Const)


def _all_of(conditions: Sequence[str]) -> str:
    return " and ".join(conditions) or "True"


class Registry(Generic[Made]):
    """The plans that answer ``questions``, each for any size: ``made`` is their type, ``kind`` what a size
    is one of, such as a layer, ``title`` what it does. Plans that would have more than ``most`` kernels
    with those before them are left out (0: none is); ``each`` as for a batch."""

    def __init__(
        self,
        questions: Sequence[PlanRequest],
        made: type[Made],
        kind: str,
        title: str,
        most: int = 0,
        each: int = 1,
    ) -> None:
        self.questions, self.made, self.kind, self.most = [*questions], made, kind, most
        self.each = each
        self.there: dict[PlanRequest, RegisteredPlan[Made]] = {}
        self.table: SizeTable[Made] | None = None  # of those that are there
        self.failed: dict[PlanRequest, str] = {}
        self.over: dict[PlanRequest, Callable[[], bool]] = {}  # of those that processes compile
        self.looked = False
        self.title = f"{title}, any size"

    def choose(self, sizes: Sequence[int], mode: str) -> ChosenPlan[Made]:
        """The plan for sizes, in the order of their names. Unsupported where there is none, or none yet
        as the mode has it (see ``runtime.ready``)."""
        why, waits = ("", []) if self.is_settled() else self._look(mode, sizes)
        # While plans come, those that came first answer: a size is decided once more, when all are there.
        us, best, of = NONE if not waits or self.table is None else self.table.fastest(sizes)
        if best is None and (table := self._tabled()) is not None:
            us, best, of = table.fastest(sizes)
        if best is None:
            if waits:
                raise Waiting(self._why_none(sizes), partial(_is_any, waits))
            raise Unsupported(why or "sizes:refused", self._why_none(sizes))
        over = partial(_are_all, waits) if waits else None
        held = best.plan.held(dict(zip(best.sizes.names, sizes, strict=True)))
        return ChosenPlan(held, best.question, us, of, over, self.kind)

    def is_settled(self) -> bool:
        """Whether each question has a plan, or the reason why it has none."""
        return len(self.there) + len(self.failed) >= len(self.questions)

    def estimates(self, sizes: Sequence[int]) -> list[tuple[float, RegisteredPlan[Made]]]:
        """The plans that are there and take sizes, each with the microseconds that it is estimated to
        take."""
        table = self._tabled()
        return [] if table is None else table.estimates(sizes)

    def fastest(self, sizes: Sequence[int]) -> RegisteredPlan[Made] | None:
        """What ``choose`` takes, if no plan may come; None where there is none."""
        table = self.table
        if table is None or not table.settled:
            table = self._tabled()
            if table is None or not table.settled:
                return None
        at = table.find(*sizes)[0]  # the first call of a size runs few functions
        return table.kernels[at] if at >= 0 else table.fastest(sizes)[1]

    def _tabled(self) -> SizeTable[Made] | None:
        """The table of the plans that are there, if there is one."""
        table, settled = self.table, self.is_settled()
        if table is None or table.count < len(self.there) or table.settled is not settled:
            kernels = list(self.there.values())  # other threads may add some
            table = self.table = SizeTable(kernels, settled) if kernels else None
        return table

    def complete(self) -> None:
        """Find or make all plans, so that the next call has nothing left to look up."""
        if not self.is_settled():
            self._look("now")
        if self.there:
            self.estimates([*next(iter(self.there.values())).sizes.like.values()])

    def told(self, sizes: Sequence[int]) -> list[str]:
        """Its plans and what they are estimated to take for sizes, as lines; the one that is taken first
        in the line that says so. Makes them; compiles nothing."""
        taken = self.choose(sizes, "now")
        us = {k.question: us for us, k in self.estimates(sizes)}
        return [
            f"{'taken' if q is taken.question else '     '}  "
            f"{f'{us[q]:10.4g} us' if q in us else self._why_not(k, sizes)}  "
            f"chosen for {q.workload.text}: {k.plan.schedule}"
            for q, k in self.there.items()
        ]

    @property
    def batch(self) -> Batch:
        """Its questions."""
        return Batch(tuple(self.questions), self.most, self.each)

    @property
    def kernels(self) -> set[str]:
        """The digests of its plans' kernels."""
        return {d for k in self.there.values() for d in k.plan.digests}

    def forget(self) -> None:
        """Ask for all plans anew, one of them having been found to be wrong."""
        self.there.clear()
        self.table = None

    def _look(self, mode: str, sizes: Sequence[int] = ()) -> tuple[str, list[Callable[[], bool]]]:
        """Ask for the plans that are not there, for a call of ``sizes``; why some will not come in this
        mode, and for each that may whether it has."""
        why, waits = "", list[Callable[[], bool]]()
        if mode == "never" and self.looked:  # what another process makes meanwhile is not looked for
            return NEVER, waits
        self.looked = True
        if is_collecting():
            collect(self.batch)
        for before, question in enumerate(self.questions):  # a middle size's plan is the first
            if question in self.there or question in self.failed:
                continue
            room = Room(self.most, self.kernels)
            if room.is_full:
                self.failed[question] = f"there are {self.most} kernels before it"
                continue
            over = self.over.get(question)
            if over is not None and mode == "background" and not over():  # there is nothing to ask yet
                waits.append(over)
                continue
            try:
                plan = self._left_out(question, room, mode) or ready(
                    question.workload,
                    question.target,
                    None,
                    question.deterministic,
                    self.made,
                    question.aligned,
                    mode,
                    sizes,
                    before,
                )
                if not room.takes(plan.digests):
                    self.failed[question] = f"with its kernels there would be more than {self.most}"
                else:
                    self.there[question] = RegisteredPlan(question, plan)
            except Waiting as error:
                self.over[question] = error.over
                waits.append(error.over)
            except Unsupported as error:
                if error.reason in (COMPILING, NEVER):
                    why = error.reason
                else:
                    self.failed[question] = str(error)
            except (ScheduleError, ProblemError, ComputeError) as error:
                self.failed[question] = str(error)
        return why, waits

    def _left_out(self, question: PlanRequest, room: Room, mode: str) -> Made | None:
        """The plan that there is no room for, if it is known: ``prepare`` compiles nothing for it, and
        no other process need."""
        if mode not in ("background", "never") or not room.there or not compiles(question.target):
            return None
        plan = planned(question, self.made)
        return None if plan is None or room.takes(plan.digests) else plan

    def _why_none(self, sizes: Sequence[int]) -> str:
        told = [self._why_not(k, sizes) for k in self.there.values()]
        return "; ".join(dict.fromkeys([*told, *self.failed.values()])) or "its kernels are not compiled"

    @staticmethod
    def _why_not(k: RegisteredPlan[Made], sizes: Sequence[int]) -> str:
        return k.sizes.why_not(dict(zip(k.sizes.names, sizes, strict=True)))
