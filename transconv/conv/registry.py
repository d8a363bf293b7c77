"""The registry of a layer: plans whose sizes are arguments, one of which is chosen for each size.

    middle, small, large      examples that schedules are chosen for; at most 6 kernels

A plan's requirements say which sizes it is for; of those that a size meets, the one that the cost model
estimates to be the fastest for it is taken. A new size of the layer makes no other kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transconv.backend_triton import SizedLauncher
from transconv.conv.any_size import every, phases
from transconv.conv.compiler import suited
from transconv.conv.epilogue import Epilogue
from transconv.conv.plans import Compiled
from transconv.conv.problem import ConvProblem, Prop
from transconv.conv.workload import ConvWorkload
from transconv.cost import AtSizes
from transconv.errors import ComputeError, ProblemError, ScheduleError, Unsupported
from transconv.runtime import COMPILING, NEVER, Question, ready
from transconv.target import Target

# Images and the length of their sides, by the number of spatial dimensions. Where there is no room for
# all, the first of them are taken.
EXAMPLES = {1: ((8, 4096), (1, 256), (32, 32768)), 2: ((8, 56), (1, 14), (16, 224)),
            3: ((4, 16), (1, 8), (8, 32))}
MOST_KERNELS = 6  # of a layer and direction, where its stride has no more phases


@dataclass(frozen=True, slots=True)
class Chosen:
    """The plan for one size of a layer, held at it, and the question that it answers. ``us``: its
    estimate; ``of``: how many had a say; ``waits``: another one is being compiled, and may then be
    chosen."""

    plan: Compiled
    question: Question
    us: float
    of: int
    waits: bool

    @property
    def why(self) -> str:
        """Why it is taken, in a sentence."""
        assert self.plan.required is not None
        among = f"the fastest of {self.of} kernels" if self.of > 1 else "the kernel"
        return (f"{among} for any size of this layer, by its estimate for this one; requires "
                f"{self.plan.required.sizes}")


@dataclass(slots=True)
class _Kernels:
    """A plan, and what it is estimated to take."""

    plan: Compiled
    estimates: Sequence[AtSizes] = field(init=False)

    def __post_init__(self) -> None:
        sized = [s for s in self.plan.steps if isinstance(s.launcher, SizedLauncher)]
        # The computations are at hand; those of a plan from disk would be lowered anew.
        self.estimates = [AtSizes(s.schedule, c, self.plan.target) for s, c in
                          zip(sized, self.plan.workload.computations, strict=True)]

    def us(self, sizes: Sequence[int]) -> float:
        return sum(e(*sizes) for e in self.estimates)


class Registry:
    """The plans of one layer and direction: of a problem of any size, its filter, strides, channels, types
    and orders of memory. Raises ProblemError for a layer that has none."""

    def __init__(self, problem: ConvProblem, prop: Prop, target: Target, epilogue: Epilogue, aligned: bool,
                 deterministic: bool) -> None:
        if any(_length(problem, x, i) != problem.o[x] for x, i in enumerate(problem.i)):
            raise ProblemError(f"problem '{problem}': the sizes of dst do not follow from those of src")
        room = max(1, MOST_KERNELS // len(phases(problem, prop)))
        examples = dict.fromkeys(_like(problem, *e) for e in EXAMPLES[problem.ndims][:room])
        target = suited(target, aligned)
        self.questions = [Question(ConvWorkload(p, prop, epilogue, every(p)), target, deterministic,
                                   aligned) for p in examples]
        self.there: dict[Question, _Kernels] = {}
        self.failed: dict[Question, str] = {}
        self.looked = False
        self.title = f"{self.questions[0].workload.title}, any size"

    def choose(self, sizes: Sequence[int], mode: str) -> Chosen:
        """The plan for sizes: images, then the sides of src. Unsupported where there is none, or none yet
        as the mode has it (see ``runtime.ready``)."""
        waits = self._look(mode) if len(self.there) + len(self.failed) < len(self.questions) else ""
        found = [(q, k) for q, k in list(self.there.items())  # other threads may add some
                 if k.plan.required and all(k.plan.required.meets(*sizes))]
        if not found:
            raise Unsupported(waits or "sizes:refused", self._why_none(sizes))
        estimates = [k.us(sizes) for _, k in found]
        us = min(estimates)
        question, best = found[estimates.index(us)]
        assert best.plan.required is not None
        held = best.plan.at(dict(zip(best.plan.required.sizes.names, sizes, strict=True)))
        return Chosen(held, question, us, len(found), waits == COMPILING)

    def told(self, sizes: Sequence[int]) -> list[str]:
        """Its plans and what they are estimated to take for sizes, as lines; the one that is taken first
        in the line that says so. Makes them; compiles nothing."""
        taken = self.choose(sizes, "now")
        return [f"{'taken' if q is taken.question else '     '}  {k.us(sizes):10.4g} us  "
                f"chosen for {q.workload.text}: {k.plan.schedule}" for q, k in self.there.items()]

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
                self.there[question] = _Kernels(ready(
                    question.workload, question.target, None, question.deterministic, Compiled,
                    question.aligned, mode))
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


def _length(p: ConvProblem, x: int, i: int) -> int:
    """How many positions of dst so many of src have, along a dimension."""
    high = p.pad_hi[x] if p.stride[x] == 1 else p.pad_lo[x]
    return (i + p.pad_lo[x] + high - (p.k[x] - 1) * p.dilation[x] - 1) // p.stride[x] + 1


def _like(p: ConvProblem, images: int, side: int) -> ConvProblem:
    """The layer of a problem at other sizes: sides so long, or as long as the filter needs."""
    i = tuple(next(n for n in range(max(side, p.stride[x]), 1 << 30) if _length(p, x, n) >= 1)
              for x in range(p.ndims))
    return p.at(images, i, tuple(_length(p, x, n) for x, n in enumerate(i)))
