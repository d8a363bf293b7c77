"""Checks the emitted and the compiled kernel of a problem whose IR is right.

The text runs under Triton's interpreter, in a process of its own where this one compiles kernels;
then, on a GPU, as it is compiled.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from transconv import knobs
from transconv.conv import CompiledDirection, compiler
from transconv.errors import TransconvError
from transconv.ir import Array, offsets_of
from transconv.schedule import Schedule
from transconv.target import Target, detect
from transconv.verify.bisect.replay import ReplayedDirection

if TYPE_CHECKING:
    import torch

CHILD_SECONDS = 300
GUARD = 1 << 16  # elements around each tensor: a wrong kernel must not harm this process


@dataclass(frozen=True, slots=True)
class EmittedVerdict:
    """``text``: what was found, in words; ``source``: what is to be read, if it is ``wrong``."""

    wrong: bool
    text: str
    source: str = ""


def ask_emitter(question: ReplayedDirection, seed: int = 0, isolated: bool = True) -> EmittedVerdict:
    """Run the emitted text under Triton's interpreter; ``isolated``: in a process of its own, which
    a wrong kernel may kill (and which knows nothing of what was changed in this one)."""
    if any(schedule.via == "gluon" for _, schedule in question.steps()):
        return EmittedVerdict(False, "not asked: Triton's interpreter does not run Gluon")
    if isolated or not knobs.interpret():
        return _in_a_child(question, seed)
    from transconv.verify.machine import executable

    try:
        compiled = _compile(question, executable(question.target, "cpu"))
        wrong = _run(compiled, question, "cpu")
    except TransconvError as error:
        return EmittedVerdict(False, f"not asked: {error}")
    except Exception as error:  # whatever Triton's interpreter raises about a text
        return EmittedVerdict(True, f"{type(error).__name__}: {error}", _source(question))
    return EmittedVerdict(bool(wrong), wrong or "right", compiled.source if wrong else "")


def _run(compiled: CompiledDirection, question: ReplayedDirection, device: str) -> str:
    """What is wrong with a plan's result."""
    got, outside = launch(compiled, question, device)
    return "; ".join(filter(None, [question.wrong(got, 1.0), outside]))


def _compile(question: ReplayedDirection, target: Target) -> CompiledDirection:
    return compiler.build(question.problem, question.prop, target, question.schedule,
                          question.epilogue)


def _source(question: ReplayedDirection) -> str:
    from transconv.verify.machine import executable

    try:
        return _compile(question, executable(question.target, "cpu")).source
    except Exception as error:  # it could not even be written
        return str(error)


def _in_a_child(question: ReplayedDirection, seed: int) -> EmittedVerdict:
    """The same command with one part of the question, where Triton interprets."""
    words = [str(question.problem), "--prop", str(question.prop), "--limit", str(1 << 62),
             "--seed", str(seed)]
    if question.epilogue:
        words += ["--epilogue", str(question.epilogue)]
    return in_a_child(words, question.target, question.schedule, lambda: _source(question))


def in_a_child(words: Sequence[str], target: Target, schedule: Schedule | None,
               source: Callable[[], str]) -> EmittedVerdict:
    """What ``bisect`` with some words says of the emitted text where Triton interprets it; ``source``:
    what is to be read if it does not come back."""
    command = [sys.executable, "-m", "transconv", "bisect", *words, "--target", target.name, "--parts",
               "emitter", "--json", "--here", *(["--schedule", str(schedule)] if schedule else [])]
    root = str(Path(__file__).resolve().parents[3])
    environment = knobs.child_environment({knobs.interpret.name: "1"}, root)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_SECONDS,
                              check=False, env=environment)
        if done.returncode < 0:
            return EmittedVerdict(
                True, f"Triton's interpreter died of signal {-done.returncode}", source()
            )
        told = json.loads(done.stdout)
        return EmittedVerdict(told["stage"] == "emit", str(told["verdict"]), str(told["diff"]))
    except subprocess.TimeoutExpired:
        return EmittedVerdict(
            False, f"not asked: no answer from Triton's interpreter in {CHILD_SECONDS} s"
        )
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


def ask_compiler(question: ReplayedDirection, asked: ReplayedDirection) -> EmittedVerdict:
    """Run the compiled kernel on the GPU: in the small size, then in the size that was asked for."""
    if why := no_compiler(question.target):
        return EmittedVerdict(False, f"not asked: {why}")
    try:
        compiled = _compile(question, question.target)
        if wrong := _run(compiled, question, "cuda"):
            return EmittedVerdict(True, wrong, compiled.source)
        if asked.problem == question.problem:
            return EmittedVerdict(False, "right")
        compiled = _compile(replace(asked, schedule=asked.schedule or question.schedule), asked.target)
        wrong = _in_full(asked, compiled)
    except TransconvError as error:
        return EmittedVerdict(False, f"not asked: {error}")
    except Exception as error:  # Triton's compiler, or the driver
        return EmittedVerdict(True, f"{type(error).__name__}: {error}", _source(question))
    if wrong:
        return EmittedVerdict(True, f"right in the small size, but for {asked.problem} {wrong}",
                       compiled.source)
    return EmittedVerdict(False, f"right, for {asked.problem} too")


def _in_full(asked: ReplayedDirection, compiled: CompiledDirection) -> str:
    from transconv.verify.case import ProblemCase

    return ProblemCase(asked.problem, asked.prop, str(asked.epilogue)).judge(compiled, "exact").reason


def launch(compiled: CompiledDirection, question: ReplayedDirection, device: str) -> tuple[Array, str]:
    """The result of a plan on the question's data, in logical shape, and what it wrote to beside
    the tensors, in words: each lies in the middle of a longer buffer of NaN."""
    import torch

    from transconv.verify.data import torch_dtype

    tensors = {t.name: t for step in compiled.steps for t in step.compute.tensors
               if t.name not in compiled.workspaces}
    around, made = {}, {}
    for name, values in question.buffers(tensors).items():
        dtype = torch_dtype(tensors[name].dtype)
        empty = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
        whole = torch.full((len(values) + 2 * GUARD,), empty, dtype=dtype, device=device)
        around[name] = whole
        made[name] = whole[GUARD:GUARD + len(values)]
        made[name].copy_(torch.from_numpy(values))
    compiled.launch(**made)
    got = made[question.result].double().cpu().numpy()
    outside = [name for name, whole in around.items()
               if not all(_is_empty(part) for part in (whole[:GUARD], whole[-GUARD:]))]
    return (np.asarray(got[offsets_of(tensors[question.result])]),
            f"wrote outside of {', '.join(outside)}" if outside else "")


def _is_empty(memory: torch.Tensor) -> bool:
    """Whether memory holds what stands around tensors: NaN, or the largest integer."""
    import torch

    if memory.dtype.is_floating_point:
        return bool(memory.float().isnan().all())
    return bool((memory == torch.iinfo(memory.dtype).max).all())
