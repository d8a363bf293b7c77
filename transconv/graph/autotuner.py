"""Tuning of a graph's kernels, for ``mode="max-autotune"``: the schedules that the estimate ranks first
are timed on the GPU, those of the kernels first that take most of a call, within a time budget.

The trials run in a process of their own (``transconv tune``), which sees the graph's GPU alone and keeps
the fastest in the user's cache: a second process, or another model with the same kernels, starts with
them.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from transconv.compute import Alone, Compute
from transconv.functional.calls import compiled_launch
from transconv.runtime import PlanRequest, compiler, cores, estimated, plan_steps
from transconv.selection import Listed, shortlist, tuning_db
from transconv.support import TransconvError, knobs
from transconv.target import Target

log = logging.getLogger("transconv.graph")
SECONDS = 120.0  # for one graph, unless the caller gives another budget
TRIALS = 8  # schedules of a kernel
SHARE = 0.9  # of the estimated time of a graph: kernels beyond it gain little
TIMING_MS = 8  # of one schedule
ENDING_S = 30.0  # to end what runs when the time is over


@dataclass(frozen=True, slots=True)
class Costly:
    """A kernel that a graph launches so many ``times``, and its estimated microseconds."""

    compute: Compute
    times: int
    us: float


def autotune(
    questions: Iterable[PlanRequest], target: Target, device: torch.device, seconds: float
) -> str:
    """Tune the kernels of requests on a device, which is a target, and say how many in how long; the next
    plans take what was found."""
    if target.backend == "interpreter":
        return "max-autotune: nothing is timed without a GPU"
    found = [k for k in costly(questions, target) if not _is_tuned(k.compute, target)]
    if not found:
        return "max-autotune: every kernel that takes much of a call is tuned"
    began = perf_counter()
    problem = _tuned([k.compute for k in found], device, seconds)
    for forget in (tuning_db.forget, compiler.forget, compiled_launch.forget):
        forget()
    kept = sum(_is_tuned(k.compute, target) for k in found)
    said = f"max-autotune: {kept} of {len(found)} kernels tuned in {perf_counter() - began:.0f} s"
    log.info(said)
    return f"{said}; {problem}" if problem else said


def costly(questions: Iterable[PlanRequest], target: Target) -> list[Costly]:
    """The kernels of requests that take ``SHARE`` of the estimated time, the longest first; without those
    whose sizes are arguments, which serve more than one problem."""
    times: Counter[Compute] = Counter()
    for question in questions:
        try:
            steps = plan_steps(question.workload, target)
        except TransconvError as error:  # torch computes it
            log.debug("not tuned: %s: %s", question, error)
            continue
        times.update(
            c
            for c, _ in steps
            if c.does == "compute" and not c.named and isinstance(question.workload.about(c), Alone)
        )
    made = [Costly(c, n, estimated(Alone(c), target)) for c, n in times.items()]
    made.sort(key=lambda k: -k.us * k.times)
    whole, before, taken = sum(k.us * k.times for k in made), 0.0, []
    for kernel in made:
        if before >= SHARE * whole:
            break
        taken.append(kernel)
        before += kernel.us * kernel.times
    return taken


def _first(compute: Compute, target: Target) -> Listed:
    return shortlist(1, compute, target, Alone(compute))[0]


def _is_tuned(compute: Compute, target: Target) -> bool:
    return _first(compute, target).tuned


def _seen(device: torch.device) -> dict[str, str]:
    """The variable with which a process sees only the GPU of a graph; empty without one."""
    if device.type != "cuda":
        return {}
    at = torch.cuda.current_device() if device.index is None else device.index
    return knobs.one_gpu(at, bool(torch.version.hip))


def _tuned(computations: Sequence[Compute], device: torch.device, seconds: float) -> str:
    """Run trials of computations on a device; why that failed, empty if it did not."""
    changes = {"TRITON_INTERPRET": None, **_seen(device)}
    variables = knobs.child_environment(changes, str(Path(__file__).parents[2]))
    with tempfile.TemporaryDirectory(prefix="transconv-autotune-") as folder:
        files = []
        for at, compute in enumerate(computations):
            files.append(f"{folder}/{at:03}.txt")
            Path(files[-1]).write_text(str(compute), encoding="utf-8")
        words = [
            "--trials",
            str(TRIALS),
            "--jobs",
            str(max(1, cores() - 2)),
            "--budget-ms",
            str(TIMING_MS),
        ]
        words += ["--time-budget", str(seconds)]
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "transconv", "tune", *files, *words],
                env=variables,
                capture_output=True,
                text=True,
                check=False,
                timeout=seconds + ENDING_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"tuning ended: {error}"
    log.debug("%s", ended.stdout)
    return "" if ended.returncode == 0 else f"tuning failed: {ended.stderr.strip()[-300:]}"
