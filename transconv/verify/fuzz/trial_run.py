"""Runs one trial in a worker process and returns a row with the outcome, for each kind of trials.

A worker has cache folders of its own: no trial needs a kernel again.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import time
import warnings
from typing import Any

from transconv import knobs
from transconv.ir import InterpError, VerifyError
from transconv.verify.fuzz import compute_trial, conv_trial
from transconv.verify.fuzz.compute_trial import ComputeTrial
from transconv.verify.fuzz.conv_trial import ConvTrial
from transconv.verify.fuzz.trial import Row, Trial, TrialKind, TrialRun
from transconv.verify.pool import is_fatal

KEPT_COMPILED = 64  # trials after which a worker's compiled kernels are thrown away
TRIMMED = 8  # the same where workers have one cache


def read(line: str) -> ConvTrial | ComputeTrial:
    """The trial of a line. Raises a TransconvError, one sentence."""
    return (ComputeTrial if compute_trial.LINE.fullmatch(line.strip()) else ConvTrial).parse(line)


CONVOLUTIONS = TrialKind("convolutions", conv_trial.draw_trial, read, corpus=True)
COMPUTES = TrialKind("computes", lambda seed, number, target: compute_trial.draw_trial(seed, number), read,
                     corpus=True)
SMALL_TYPES = TrialKind("small-types", functools.partial(conv_trial.draw_trial, small=True), read)
KINDS = {kind.name: kind for kind in (CONVOLUTIONS, COMPUTES, SMALL_TYPES)}


def work(*args: Any, kind: str = CONVOLUTIONS.name, **asked: Any) -> Row:
    """``run_trial`` of a kind, by its name."""
    return run_trial(KINDS[kind], *args, **asked)


def run_trial(kind: TrialKind, seed: int | str = 0, number: int = -1, line: str = "", way: str = "numpy",
              scratch: str = "", target: str = "sm_90", sets: int = 1) -> Row:
    """One trial, by its number or its line, in a worker. ``sets``: with how many sets of scales and zero
    points the kernels run, where they are arguments; each is a problem with its own check, counted in
    ``problems``.
    ``status`` is ``passed``, ``failed`` (with a reason), ``error`` (of our compiler or of Triton),
    ``refused`` or ``resources``. What ends the use of the GPU is raised: the worker is then lost."""
    start = time.perf_counter()
    try:
        trial: Trial = kind.read(line) if line else kind.drawn(seed, number, target)
    except Exception as error:  # to choose a schedule is a part of what is tested
        return {"line": "", "facts": {}, "way": way, "status": "error", "seconds": 0.0,
                "reason": f"{number} of seed {seed} cannot be drawn: {type(error).__name__}: {error}"}
    row: Row = {"line": str(trial), "facts": trial.facts, "way": way}
    prepare(scratch, "triton" if way == "device" else "")
    knobs.adopt({knobs.passes.name: ",".join(f"{'+' if on else '-'}{n}" for n, on in trial.switches)})
    try:
        reason = trial.run(TrialRun(way, max(0, number) % (1 << 31), sets, scratch, target, row))
        row |= {"status": "failed" if reason else "passed", "reason": _short(reason)}
    except (InterpError, VerifyError) as fault:
        row |= {"status": "failed", "reason": _short(f"{type(fault).__name__}: {fault}")}
    except Exception as error:
        if is_fatal(error):
            raise
        name = type(error).__name__
        status = ("refused" if isinstance(error, trial.refusals) else
                  "resources" if name == "OutOfResources" else "error")
        row |= {"status": status, "reason": _short(f"{name}: {error}")}
    row["seconds"] = round(time.perf_counter() - start, 4)
    return row


def _short(reason: str) -> str:
    return " ".join(reason.split())[:600]


@functools.cache
def _worker() -> dict[str, Any]:
    """Set a worker up, once: one thread, and no garbage collection of the objects that exist already."""
    import torch

    torch.set_num_threads(1)
    gc.freeze()
    if torch.cuda.is_available() and not knobs.interpret():
        torch.cuda.set_device(os.getpid() % torch.cuda.device_count())
    return {"trials": 0}


def prepare(scratch: str, launchers: str = "") -> None:
    """Give the worker a cache folder of its own, and empty it from time to time. ``launchers``: a folder
    in ``scratch`` for a cache of Triton that all workers have, where launchers stay: a C compiler makes
    one in more time than Triton takes for a small kernel, and kernels of as many arguments have the same
    (12 in 81 kernels)."""
    mine = _worker()
    warnings.filterwarnings("error", "tl.where with a non-boolean condition")  # it selects wrongly
    if scratch:
        folder = f"{scratch}/{os.getpid()}"
        if mine["trials"] % KEPT_COMPILED == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(f"{folder}/transconv", mode=0o700, exist_ok=True)
        triton = f"{scratch}/{launchers}" if launchers else f"{folder}/triton"
        os.makedirs(triton, exist_ok=True)
        if launchers and mine["trials"] % TRIMMED == 0:
            without_kernels(triton)
        knobs.adopt({"TRITON_CACHE_DIR": triton,
                     knobs.cache.name: f"{folder}/transconv"})
    mine["trials"] += 1


def without_kernels(folder: str, age_s: float = 10.0) -> None:
    """Remove compiled kernels from a cache of Triton, but for those that may still be written."""
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError):  # another worker removes it
            if time.time() - entry.stat().st_mtime > age_s and any(
                    name.endswith((".cubin", ".hsaco")) for name in os.listdir(entry.path)):
                shutil.rmtree(entry.path, ignore_errors=True)
