"""A trial of a computation: drawn from a seed and a number, written to and read from one line, run.

A trial is a computation's text, a chip and a legal schedule, the same for everybody. Its line is

    --target=sm_90 --schedule=m:8+k:16+fma compute rows ;; axes m=21 k=37 ;; read x = X[m, k] ;; ...

A schedule that says ``red=`` or ``row=`` alone gets a tile, and several kernels, as selection has it.
Where sizes are arguments, one kernel is run at several: the edges of what it requires first.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from transconv.compute import Alone, Compute, kernels, one_line, parse
from transconv.errors import ProblemError, ScheduleError
from transconv.ir import InterpError, VerifyError
from transconv.runtime import build_compute, plan_steps
from transconv.schedule import Schedule
from transconv.target import Target
from transconv.verify import any_size
from transconv.verify.draw import compute_texts, dynamic_texts, legal_schedules
from transconv.verify.draw.conv_problems import chance

if TYPE_CHECKING:
    from transconv.runtime import Plan

Row = dict[str, Any]
TARGETS = ("sm_90", "sm_90", "sm_80", "gfx942")
SIZES = 3  # at which one kernel is run that takes them as arguments
TRIES = 6  # to complete words without a tile
LINE = re.compile(r"((?:--(?:target|schedule)=\S+\s+)*)(compute\s.*)", re.DOTALL)


@dataclass(frozen=True)
class ComputeTrial:
    """A computation's text, and what its kernel is made for. Without a schedule the best is taken."""

    text: str
    target: str
    schedule: str = ""

    def __str__(self) -> str:
        schedule = "+".join(self.schedule.replace("|", " ").split())
        words = [f"--target={self.target}", *([f"--schedule={schedule}"] if schedule else [])]
        return " ".join((*words, one_line(self.text)))

    @staticmethod
    def parse(line: str) -> ComputeTrial:
        """Read a line. Raises ProblemError, ComputeError or ScheduleError, one sentence."""
        found = LINE.fullmatch(line.strip())
        if found is None:
            raise ProblemError(f"the trial '{line[:80]}'; expected --target=, --schedule=, and a text "
                               "that begins with compute")
        said = dict(word.removeprefix("--").split("=", 1) for word in found[1].split())
        schedule = said.get("schedule", "").replace("+", " ")
        parse(found[2])
        Target.parse(said.get("target", "sm_90"))
        return ComputeTrial(one_line(found[2]), said.get("target", "sm_90"),
                            str(Schedule.parse(schedule)) if schedule else "")

    @cached_property
    def compute(self) -> Compute:
        return parse(self.text)

    @property
    def facts(self) -> dict[str, str]:
        """What the trial is about, to count by."""
        c = self.compute
        found = {"computation": c.name, "chip": self.target, "math": c.math,
                 "dtype": ":".join(sorted({t.dtype.name for t in c.tensors})),
                 "sizes": "arguments" if c.named else "numbers",
                 "stores": "add" if c.added else "apart",
                 "places": "told by values" if c.names.indices else "told by axes",
                 "factors": "none" if c.factors is None else "computed" if c.prologue else "read",
                 "kernels": "one" if len(kernels(c)) == 1 else "several"}
        if self.schedule:
            found |= legal_schedules.words(Schedule.parse(self.schedule))
        return found

    def plan(self, target: Target | None = None) -> Plan:
        """The kernels of the computation, for its target or another one."""
        schedule = Schedule.parse(self.schedule) if self.schedule else None
        return build_compute(self.compute, target or Target.parse(self.target), schedule)

    def sizes(self) -> list[dict[str, int]]:
        """The sizes to run one kernel at; one empty choice where they are numbers."""
        return any_size.drawn(self.compute, SIZES) if self.compute.named else [{}]

    def repeated(self) -> str:
        """The command that repeats the trial."""
        words = ["python", "-m", "transconv", "check", f"--target={self.target}"]
        words += [f"--schedule={self.schedule}"] if self.schedule else []
        return shlex.join([*words, self.text])

    def problem(self) -> str:
        """What is wrong, and after which pass; empty if nothing is, or if no kernel can do the
        computation."""
        try:
            return _interpreted(self, self.plan())
        except Exception as error:  # a drawn schedule is legal: whatever is raised is ours
            return f"{type(error).__name__}: {error}"


def outcome(trial: ComputeTrial, way: str, row: Row) -> Row:
    """Compile, run and judge: ``numpy`` after every pass, ``triton`` and ``device`` the emitted text."""
    from transconv.verify.fuzz.trial_run import MOST_STEPS, interpreted_steps
    from transconv.verify.machine import executable

    started = time.perf_counter()
    chip = Target.parse(trial.target)
    try:
        plan = trial.plan(executable(chip, "cpu") if way == "triton" else chip)
    except ScheduleError:  # such as the matrix unit that rounds, which no interpreter has
        if way != "triton":
            raise
        plan = None
    if plan is None or way == "triton" and interpreted_steps(plan) > MOST_STEPS:
        way, plan = "numpy", trial.plan()
        row["way"] = way
    row["kernels"], row["generate_s"] = len(plan.steps), round(time.perf_counter() - started, 4)
    try:
        reason = _interpreted(trial, plan) if way == "numpy" else _launched(trial, plan, way, row)
    except (InterpError, VerifyError) as fault:
        reason = f"{type(fault).__name__}: {fault}"
    return {"status": "failed" if reason else "passed", "reason": " ".join(reason.split())[:600]}


def _interpreted(trial: ComputeTrial, plan: Plan) -> str:
    from transconv.verify.computation import ComputationCase, after_every_pass

    if not _reads_back(trial.compute):
        return f"its text does not read back: {trial.compute}"
    first, *others = trial.sizes()
    for stage, judged in after_every_pass(trial.compute, plan, first):
        if judged.problem:
            return f"{_at(first)}after {stage}: {judged.problem}"
    for sizes in others:
        judged = ComputationCase(trial.compute.at(**sizes)).interpreted(
            *(s.kernel.at(sizes) for s in plan.steps)
        )
        if judged.problem:
            return f"{_at(sizes)}after the last pass: {judged.problem}"
    return ""


def _launched(trial: ComputeTrial, plan: Plan, way: str, row: Row) -> str:
    """On exact and on float data: two launches, of which the second takes another way to the driver."""
    import torch

    from transconv.verify.computation import ComputationCase

    device = "cuda" if way == "device" else "cpu"
    if way == "device":
        row["device"] = torch.cuda.get_device_name()
    for sizes in trial.sizes():
        for data in ("exact", "float"):
            judged = ComputationCase(trial.compute.at(**sizes), data).launched(plan, device)
            if judged.problem:
                return f"{_at(sizes)}{data} data: {judged.problem}"
    return ""


def _at(sizes: dict[str, int]) -> str:
    return f"at {' '.join(f'{n}={v}' for n, v in sizes.items())} " if sizes else ""


def _reads_back(compute: Compute) -> bool:
    """Whether the printed text parses back to the same computation."""
    from transconv.verify.computation import ComputationCase

    again = parse(str(compute))
    if compute.named:
        return again == compute
    told = (ComputationCase(c).answers for c in (compute, again))
    return all(np.array_equal(a.value, b.value, equal_nan=True)
               for a, b in zip(*(x.values() for x in told), strict=True))


def draw_trial(seed: int | str, number: int) -> ComputeTrial:
    """Trial ``number`` of a seed: the same for everybody."""
    rng = Random(f"transconv computes {seed} {number}")
    text = dynamic_texts.text(rng) if chance(rng, 12) else compute_texts.text(rng)
    target = rng.choice(TARGETS)
    made = parse(text)
    chip = Target.parse(target)
    if made.sum is not None and made.streams and chance(rng, 4):
        bare = next((s for s in _bare(rng) if completes(s, made, chip)), None)
        if bare is not None:
            return ComputeTrial(text, target, str(bare))
    schedule = None  # several kernels have axes of their own, and get the best
    if kernels(made) == (made,):
        schedule = legal_schedules.schedule(rng, [made], chip)
    return ComputeTrial(text, target, str(schedule) if schedule else "")


def _bare(rng: Random) -> Iterator[Schedule]:
    """Schedules that say how rows are divided, or read, and leave the tile to selection."""
    for _ in range(TRIES):
        red = rng.choice(("lane", "warp", "block", "split", "split", ""))
        row = rng.choice(("", "held", "again")) if red else rng.choice(("held", "again"))
        reduce = rng.choice(("partials", "atomic")) if red == "split" else "partials"
        yield Schedule(red=red, row=row, reduce=reduce)


def completes(schedule: Schedule, compute: Compute, target: Target) -> bool:
    """Whether selection finds tiles for what a schedule says without any."""
    try:
        plan_steps(Alone(compute), target, schedule)
    except ScheduleError:
        return False
    return True
