"""Checks the emitted and the compiled kernels of a workload whose IR is right.

The text runs under Triton's interpreter, in a process of its own where this one compiles kernels;
then, on a GPU, as it is compiled.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from transconv import knobs
from transconv.errors import TransconvError
from transconv.runtime import Plan
from transconv.target import Target, detect
from transconv.verify.bisect.subject import BisectSubject
from transconv.verify.computation import case_of

CHILD_SECONDS = 300


@dataclass(frozen=True, slots=True)
class EmittedVerdict:
    """``text``: what was found, in words; ``source``: what is to be read, if it is ``wrong``."""

    wrong: bool
    text: str
    source: str = ""


def ask_emitter(subject: BisectSubject, seed: int = 0, isolated: bool = True) -> EmittedVerdict:
    """Run the emitted text under Triton's interpreter; ``isolated``: in a process of its own, which
    a wrong kernel may kill (and which knows nothing of what was changed in this one)."""
    if any(schedule.via == "gluon" for _, schedule in subject.steps()):
        return EmittedVerdict(False, "not asked: Triton's interpreter does not run Gluon")
    if isolated or not knobs.interpret():
        return _in_a_child(subject, seed)
    from transconv.verify.machine import executable

    target = executable(subject.target, "cpu")
    try:
        plan = subject.plan(target)
        wrong = _run(plan, subject, "cpu", seed)
    except TransconvError as error:
        return EmittedVerdict(False, f"not asked: {error}")
    except Exception as error:  # whatever Triton's interpreter raises about a text
        return EmittedVerdict(True, f"{type(error).__name__}: {error}", _source(subject, target))
    return EmittedVerdict(bool(wrong), wrong or "right", plan.source if wrong else "")


def _run(plan: Plan, subject: BisectSubject, device: str, seed: int) -> str:
    """What is wrong with a plan's result."""
    return next(filter(None, (c.launched(plan, device).problem for c in subject.cases(seed))), "")


def _source(subject: BisectSubject, target: Target) -> str:
    try:
        return subject.plan(target).source
    except Exception as error:  # it could not even be written
        return str(error)


def _in_a_child(subject: BisectSubject, seed: int) -> EmittedVerdict:
    """What ``bisect`` says of the emitted text where Triton interprets it."""
    command = [sys.executable, "-m", "transconv", "bisect", *subject.words(), "--limit", str(1 << 62),
               "--seed", str(seed), "--target", subject.target.name, "--parts", "emitter", "--json",
               "--here", *(["--schedule", str(subject.schedule)] if subject.schedule else [])]
    root = str(Path(__file__).resolve().parents[3])
    environment = knobs.child_environment({knobs.interpret.name: "1"}, root)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_SECONDS,
                              check=False, env=environment)
        if done.returncode < 0:
            return EmittedVerdict(True, f"Triton's interpreter died of signal {-done.returncode}",
                                  _source(subject, subject.target))
        told = json.loads(done.stdout)
        return EmittedVerdict(told["stage"] == "emit", str(told["verdict"]), str(told["diff"]))
    except subprocess.TimeoutExpired:
        return EmittedVerdict(False,
                              f"not asked: no answer from Triton's interpreter in {CHILD_SECONDS} s")
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return EmittedVerdict(False, f"not asked: Triton's interpreter did not start: {last}")


def no_compiler(target: Target) -> str:
    """Why the compiled kernel cannot be run here; empty if it can."""
    machine = detect()
    if knobs.interpret():
        return "kernels are interpreted here"
    if machine.backend == "interpreter":
        return "there is no GPU"
    return "" if machine.name == target.name else f"this machine is {machine.name}"


def ask_compiler(small: BisectSubject, asked: BisectSubject, seed: int = 0) -> EmittedVerdict:
    """Run the compiled kernel on the GPU: in the small size, then in the size that was asked for."""
    if why := no_compiler(small.target):
        return EmittedVerdict(False, f"not asked: {why}")
    try:
        plan = small.plan()
        if wrong := _run(plan, small, "cuda", seed):
            return EmittedVerdict(True, wrong, plan.source)
        if asked.workload == small.workload:
            return EmittedVerdict(False, "right")
        plan = replace(asked, schedule=asked.schedule or small.schedule).plan()
        wrong = _in_full(asked, plan)
    except TransconvError as error:
        return EmittedVerdict(False, f"not asked: {error}")
    except Exception as error:  # Triton's compiler, or the driver
        return EmittedVerdict(True, f"{type(error).__name__}: {error}", _source(small, small.target))
    if wrong:
        wrong = f"right in the small size, but for {asked.workload} {wrong}"
        return EmittedVerdict(True, wrong, plan.source)
    return EmittedVerdict(False, f"right, for {asked.workload} too")


def _in_full(asked: BisectSubject, plan: Plan) -> str:
    return case_of(asked.workload.text, asked.workload.direction, asked.workload.behind).same(plan).reason
