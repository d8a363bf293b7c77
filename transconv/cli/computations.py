"""``show``, ``run``, ``compile`` and ``check`` of a computation that is given as text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from os.path import isfile
from pathlib import Path

from transconv.compute import Compute, describe, kernels, parse
from transconv.errors import ScheduleError
from transconv.ir import readable
from transconv.passes import EMIT, PROBLEM, SCHEDULE, forms, lower
from transconv.runtime import Plan, build_compute
from transconv.schedule import Schedule, Scheduled
from transconv.target import Target, detect


def given(texts: Sequence[str]) -> list[Compute]:
    """The computations that words of a command line name: files that begin with ``compute``, or such
    texts themselves; none if the words are something else. Raises ComputeError."""
    found = []
    for text in texts:
        if isfile(text):
            with Path(text).open(encoding="utf-8", errors="replace") as file:
                text = file.read(1 << 20)
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        if lines and lines[0].split()[0] == "compute":
            found.append(parse(text))
    return found


def show(compute: Compute, words: argparse.Namespace) -> int:
    """Text, axes, schedule, stages, source."""
    target = Target.parse(words.target) if words.target not in ("", None, "auto") else detect()
    schedule = Schedule.parse(words.schedule) if words.schedule else None
    made = build_compute(compute, target, schedule)
    shown = words.stage
    print(compute if shown in (None, PROBLEM.name, "all") else f"compute {compute.name}")
    if shown is None:
        for part in kernels(compute):
            print(f"\n{describe(part)}")
    for form in forms():
        for step in made.steps if shown in (form.name, "all") else ():
            print(f"\n{describe(form.of(Scheduled(step.compute, step.schedule, target)))}")
    if shown in (None, SCHEDULE.name, "all"):
        print("")
        for step in made.steps:
            print(f"schedule   {step.schedule}")
        print(f"chosen     {made.why}")
    for step in made.steps if shown is not None else ():
        for stage, kernel in lower(step.compute, step.schedule, target, step.kernel.name, compute.math):
            if shown in (stage, "all"):
                print(f"\n{f'---- {stage} ':-<100}\n{readable(kernel)}")
    if shown in (None, EMIT.name, "all"):
        print(f"\n{made.source}")
    return 0


def run(compute: Compute, words: argparse.Namespace) -> int:
    """Execute on exact data, on the GPU or in Triton's interpreter."""
    return _verified(compute, words, ("exact",))


def check(compute: Compute, words: argparse.Namespace) -> int:
    """Execute on exact and on float data, and interpret the kernel after every pass."""
    return _verified(compute, words, ("exact", "float"))


def _verified(compute: Compute, words: argparse.Namespace, kinds: Sequence[str]) -> int:
    from transconv.cli.execute import device, executable
    from transconv.verify import computation

    where = device()
    named = getattr(words, "target", None) or "auto"
    target = detect() if named == "auto" else Target.parse(named)
    schedule = Schedule.parse(words.schedule) if getattr(words, "schedule", None) else None
    made = build_compute(compute, target, schedule)
    print(f"{compute.name} on {where}: {made.schedule}")
    found = []
    try:
        run = build_compute(compute, executable(target, where), schedule)
        found = [computation.Case(compute, kind).launched(run, where) for kind in kinds]
    except ScheduleError as error:  # an explicit kernel, which Triton does not interpret
        print(f"  not run on {where}: {error}")
    for judged in found:
        print(f"  {'WRONG' if judged.problem else 'right'}  {judged.data:<6} "
              f"max error {judged.max_error:.3g}  {judged.problem}".rstrip())
    wrong = any(j.problem for j in found)
    if len(kinds) > 1:
        for stage, judged in computation.after_every_pass(compute, made):
            print(f"  {'WRONG' if judged.problem else 'right'}  after {stage}  {judged.problem}".rstrip())
            wrong |= bool(judged.problem)
    return 1 if wrong else 0


def compile_offline(compute: Compute, words: argparse.Namespace) -> int:
    """Machine code for chips, and what it takes."""
    from transconv.backend_triton import CompileFailure
    from transconv.backend_triton import compile_offline as compiled
    from transconv.cli.compile import table
    from transconv.verify.matrix.jobs import job_of

    schedule = Schedule.parse(words.schedule) if words.schedule else None
    targets = [Target.parse(name) for name in words.target.split(",")]
    jobs = []
    for target in targets:
        made: Plan = build_compute(compute, target, schedule)
        jobs += [job_of(step, target, words.text) for step in made.steps]
    answers = compiled(jobs, words.timeout)
    print(f"{compute.name}\n\n{table(answers)}")
    return 1 if any(isinstance(a, CompileFailure) for a in answers) else 0

