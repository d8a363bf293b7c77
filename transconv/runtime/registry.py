"""The registry of one kind of call: plans whose sizes are arguments, one of which is chosen for each size.

A plan's requirements say which sizes it is for; of those that a size meets, the one that the cost model
estimates to be the fastest for it is taken. A new size makes no other kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from transconv.backend_triton import SizedLauncher
from transconv.cost import AtSizes
from transconv.errors import ComputeError, ProblemError, ScheduleError, Unsupported
from transconv.runtime.plans import Made, Plan
from transconv.runtime.readiness import COMPILING, NEVER, Question, ready


@dataclass(frozen=True, slots=True)
class Chosen(Generic[Made]):
    """The plan for one size of a kind of call, held at it, and the question that it answers. ``us``: its
    estimate; ``of``: how many had a say; ``waits``: another one is being compiled, and may then be
    chosen; ``kind``: of the calls."""

    plan: Made
    question: Question
    us: float
    of: int
    waits: bool
    kind: str

    @property
    def why(self) -> str:
        """Why it is taken, in a sentence."""
        assert self.plan.required is not None
        among = f"the fastest of {self.of} kernels" if self.of > 1 else "the kernel"
        return (f"{among} for any size of this {self.kind}, by its estimate for this one; requires "
                f"{self.plan.required.sizes}")


@dataclass(slots=True)
class _Kernels(Generic[Made]):
    """A plan, and what it is estimated to take."""

    plan: Made
    estimates: Sequence[AtSizes] = field(init=False)

    def __post_init__(self) -> None:
        sized = [s for s in self.plan.steps if isinstance(s.launcher, SizedLauncher)]
        # The computations are at hand; those of a plan from disk would be lowered anew.
        each = self.plan.workload.computations
        one = sized * len(each) if len(sized) == 1 else sized  # which may compute all stride phases
        self.estimates = [AtSizes(s.schedule, c, self.plan.target) for s, c in zip(one, each, strict=True)]

    def us(self, sizes: Sequence[int]) -> float:
        return sum(e(*sizes) for e in self.estimates)


class Registry(Generic[Made]):
    """The plans that answer ``questions``, each for any size: ``made`` is their type, ``kind`` what a size
    is one of, such as a layer, ``title`` what it does. Plans that would have more than ``most`` kernels
    with those before them are left out (0: none is)."""

    def __init__(self, questions: Sequence[Question], made: type[Made], kind: str, title: str,
                 most: int = 0) -> None:
        self.questions, self.made, self.kind, self.most = [*questions], made, kind, most
        self.there: dict[Question, _Kernels[Made]] = {}
        self.failed: dict[Question, str] = {}
        self.looked = False
        self.title = f"{title}, any size"

    def choose(self, sizes: Sequence[int], mode: str) -> Chosen[Made]:
        """The plan for sizes, in the order of their names. Unsupported where there is none, or none yet
        as the mode has it (see ``runtime.ready``)."""
        waits = self._look(mode) if len(self.there) + len(self.failed) < len(self.questions) else ""
        found = [(q, k) for q, k in list(self.there.items())  # other threads may add some
                 if k.plan.required and all(k.plan.required.meets(*sizes))]
        if not found:
            raise Unsupported(waits or "sizes:refused", self._why_none(sizes))
        us, _, at = min((k.us(sizes), len(k.plan.steps), at) for at, (_, k) in enumerate(found))
        question, best = found[at]
        assert best.plan.required is not None
        held = best.plan.held(dict(zip(best.plan.required.names, sizes, strict=True)))
        return Chosen(held, question, us, len(found), waits == COMPILING, self.kind)

    def told(self, sizes: Sequence[int]) -> list[str]:
        """Its plans and what they are estimated to take for sizes, as lines; the one that is taken first
        in the line that says so. Makes them; compiles nothing."""
        taken = self.choose(sizes, "now")
        return [f"{'taken' if q is taken.question else '     '}  {k.us(sizes):10.4g} us  "
                f"chosen for {q.workload.text}: {k.plan.schedule}" for q, k in self.there.items()]

    @property
    def kernels(self) -> set[str]:
        """The digests of its plans' kernels."""
        return {d for k in self.there.values() for d in _digests(k.plan)}

    def forget(self) -> None:
        """Ask for all plans anew, one of them having been found to be wrong."""
        self.there.clear()

    def _look(self, mode: str) -> str:
        """Ask for the plans that are not there; why some are not, if they may come."""
        waits = ""
        if mode == "never" and self.looked:  # what another process makes meanwhile is not looked for
            return NEVER
        self.looked = True
        for question in self.questions:
            if question in self.there or question in self.failed:
                continue
            try:
                plan = ready(question.workload, question.target, None, question.deterministic, self.made,
                             question.aligned, mode)
                if self.most and self.there and len(self.kernels | _digests(plan)) > self.most:
                    self.failed[question] = f"with its kernels there would be more than {self.most}"
                else:
                    self.there[question] = _Kernels(plan)
            except Unsupported as error:
                if error.reason in (COMPILING, NEVER):
                    waits = waits or error.reason
                else:
                    self.failed[question] = str(error)
            except (ScheduleError, ProblemError, ComputeError) as error:
                self.failed[question] = str(error)
        return waits

    def _why_none(self, sizes: Sequence[int]) -> str:
        plans = [k.plan.required for k in self.there.values()]
        told = [r.sizes.why_not(dict(zip(r.sizes.names, sizes, strict=True))) for r in plans if r]
        return "; ".join(dict.fromkeys([*told, *self.failed.values()])) or "its kernels are not compiled"


def _digests(plan: Plan) -> set[str]:
    return {s.digest for s in plan.steps}
