"""Runs a trial of a kernel in a worker process: in the simulator, and in one engine more, which both have
to agree with plain NumPy. ``numpy``: the interpreter of the IR, on the kernel as it is written and after
the last pass; ``triton``: Triton's interpreter; ``device``: a GPU."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from transconv.ir import InterpError, Memory, VerifyError, run
from transconv.kernel import Group, KernelFunction
from transconv.kernel_trials.draw import draw_trial
from transconv.kernel_trials.numpy_answer import answered
from transconv.kernel_trials.trial import KernelTrial
from transconv.verify.fuzz.trial_run import Row, of_error
from transconv.verify.fuzz.worker import prepare

NEAR = 2e-4  # floats: of 1, and of the value
TARGET = "sm_90"


def work(seed: int | str = 0, number: int = -1, line: str = "", way: str = "numpy", scratch: str = "",
         target: str = TARGET) -> Row:
    """One trial, by its number or its line; the row as ``verify.fuzz_run.work`` makes them. A program that
    the simulator refuses has been drawn wrongly: an error, as is one that is refused elsewhere alone."""
    start = time.perf_counter()
    trial = KernelTrial.parse(line) if line else draw_trial(seed, number)
    row: Row = {"line": str(trial), "facts": trial.facts, "way": way, "kernels": 1}
    prepare(scratch, "triton" if way == "device" else "")
    try:
        with tempfile.TemporaryDirectory(dir=scratch or None) as folder:
            reason = difference(trial, way, Path(folder), row, target)
        row |= {"status": "failed" if reason else "passed", "reason": reason}
    except (InterpError, VerifyError) as fault:
        row |= of_error(fault) | {"status": "failed"}
    except Exception as error:
        row |= of_error(error)
    row["seconds"] = round(time.perf_counter() - start, 4)
    return row


def difference(trial: KernelTrial, way: str, folder: Path, row: Row, target: str) -> str:
    """What differs from plain NumPy; empty if nothing does."""
    function, group = loaded(trial.kernel(), folder), trial.launch
    wanted = trial.made()
    answered(trial, wanted)
    row["nonzero"] = _written(trial, wanted)
    for stage, got in _elsewhere(trial, function, group, way, row, target):
        for name, array in trial.arrays:
            reason = _apart(name, wanted[name], got[name], array.stored)
            if reason:
                return f"{stage}: {reason}"
    return ""


def _elsewhere(trial: KernelTrial, function: KernelFunction, group: Group, way: str, row: Row,
               target: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The arrays after other engines, the simulator first."""
    started = time.perf_counter()
    given = trial.made()
    with np.errstate(all="ignore"):
        function.simulate(group, *given.values())
    yield "in the simulator", given
    given = trial.made()
    if way == "numpy":
        low = function.lower(group, *given.values(), target=target)
        row["generate_s"] = round(time.perf_counter() - started, 4)
        for stage, kernel in (low.stages[0], low.stages[-1]) if group.count else ():
            buffers = {t.name: np.array(given[t.name], t.dtype.numpy).reshape(-1) for t in kernel.params}
            with np.errstate(all="ignore"):
                run(kernel.at(kernel.sizes.like) if kernel.sizes else kernel, Memory(buffers))
            yield f"after {stage}", {n: buffers[n].reshape(v.shape) for n, v in given.items()}
        return
    import torch

    device = "cuda" if way == "device" else "cpu"
    tensors = {n: torch.tensor(v, device=device) for n, v in given.items()}
    if way == "device":
        row["device"] = torch.cuda.get_device_name()
        started = time.perf_counter()
    with np.errstate(all="ignore"):
        function(group, *tensors.values())
    if way == "device":
        torch.cuda.synchronize()
        row["compile_s"] = round(time.perf_counter() - started, 4)
    yield "on the GPU" if way == "device" else "in Triton's interpreter", {
        n: t.cpu().numpy() for n, t in tensors.items()}


def _apart(name: str, want: Any, got: Any, stored: bool) -> str:
    """Where two arrays differ, the first place."""
    if stored and want.dtype.kind == "f":
        same = np.isclose(got, want, NEAR, NEAR, True)
    else:
        same = got == want
    if same.all():
        return ""
    at = tuple(int(n) for n in np.argwhere(~same)[0])
    return (f"{name}{list(at)} is {got[at]}, in NumPy {want[at]}; {int((~same).sum())} of "
            f"{same.size} differ")


def _written(trial: KernelTrial, arrays: dict[str, Any]) -> float:
    """The share of elements that were stored."""
    from transconv.kernel_trials.trial import CANARY

    stored = [arrays[n] for n, a in trial.arrays if a.stored and a.shape and 0 not in a.shape]
    total = sum(a.size for a in stored)
    return round(sum(int((a != CANARY).sum()) for a in stored) / total, 3) if total else 1.0


def loaded(text: str, folder: Path) -> KernelFunction:
    """The kernel of a source, written to a file, as its lines are read from there."""
    # A name for each text: Python keeps what it compiled of a file by its size and the second of its date.
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    path = folder / f"drawn_kernel_{digest}_{os.getpid()}.py"
    path.write_text(text, "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: KernelFunction = module.drawn
    found.source  # noqa: B018 - read while the file is there
    return found
