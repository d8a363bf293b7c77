"""Draws computations and reports those whose kernels differ from the computation.

Trial i of a seed is a computation, a chip and a legal schedule, the same for everybody. Its kernels are
interpreted after every pass and held against NumPy's answer.
"""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from random import Random

import numpy as np

from transconv.compute import Compute, kernels, parse
from transconv.errors import TransconvError
from transconv.ir import InterpError, VerifyError
from transconv.runtime import build_compute
from transconv.schedule import Schedule
from transconv.target import Target
from transconv.verify import draw_compute, draw_schedule
from transconv.verify.computation import Case, after_every_pass

TARGETS = ("sm_90", "sm_90", "sm_80", "gfx942")


@dataclass(frozen=True, slots=True)
class ComputeTrial:
    """A computation's text, and what its kernel is made for. Without a schedule the best is taken."""

    text: str
    target: str
    schedule: str = ""

    def repeated(self) -> str:
        """The command that does it again."""
        words = ["python", "-m", "transconv", "check", f"--target={self.target}"]
        words += [f"--schedule={self.schedule}"] if self.schedule else []
        return shlex.join([*words, self.text])

    @staticmethod
    def _reads_back(compute: Compute) -> bool:
        """Whether the text that is printed says the same."""
        again = parse(str(compute))
        told = (Case(c).answers for c in (compute, again))
        return all(np.array_equal(a.value, b.value, equal_nan=True)
                   for a, b in zip(*(x.values() for x in told), strict=True))

    def problem(self) -> str:
        """What is wrong, after which pass; empty if nothing is. What no kernel can do is no problem."""
        try:
            compute, target = parse(self.text), Target.parse(self.target)
            if not self._reads_back(compute):
                return f"its text does not read back: {compute}"
            plan = build_compute(compute, target,
                                 Schedule.parse(self.schedule) if self.schedule else None)
            found = after_every_pass(compute, plan)
        except (InterpError, VerifyError) as error:
            return f"{type(error).__name__}: {error}"
        except Exception as error:  # a drawn schedule is legal: whatever is raised is ours
            return f"{type(error).__name__}: {error}"
        return next((f"after {stage}: {j.problem}" for stage, j in found if j.problem), "")


def draw_trial(seed: int | str, number: int) -> ComputeTrial:
    """Trial ``number`` of a seed: the same for everybody."""
    rng = Random(f"transconv computes {seed} {number}")
    text, target = draw_compute.text(rng), rng.choice(TARGETS)
    made = parse(text)
    schedule = None  # several kernels have axes of their own, and get the best
    if kernels(made) == (made,):
        schedule = draw_schedule.schedule(rng, [made], Target.parse(target))
    return ComputeTrial(text, target, str(schedule) if schedule else "")


def fuzz_computes(number: int, seed: int, first: int = 0, budget_s: float = float("inf")) -> int:
    """Run trials, print what is wrong with how to repeat it, and say how they went: 1 if any failed."""
    end, failed, done = time.monotonic() + budget_s, 0, 0
    for at in range(first, first + number):
        if time.monotonic() > end:
            break
        done += 1
        try:
            trial = draw_trial(seed, at)
        except TransconvError as error:
            print(f"{at}: cannot be drawn: {error}")
            failed += 1
            continue
        if problem := trial.problem():
            failed += 1
            print(f"{at}: {problem}\n{trial.text}\n{trial.repeated()}\n", flush=True)
    print(f"{done} computations of seed {seed}, {failed} failed; next: {first + done}")
    return 1 if failed else 0
