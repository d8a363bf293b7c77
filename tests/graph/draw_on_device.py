"""Drawn graphs by kernels of a device, in processes: results and gradients beside torch's.

python -m tests.graph.draw --device cuda --n 2000
"""

from __future__ import annotations

import argparse
import gc
import importlib
import multiprocessing
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.graph.draw import Draw
from tests.graph.shaken import made, movements

Tensor = torch.Tensor

REASON = re.compile(r"[;:(]|\d")  # what follows differs from graph to graph
COLUMNS = (
    "seed",
    "draws",
    "passed",
    "failed",
    "refused",
    "kernels",
    "reasons",
    "seconds",
    "error",
    "device",
    "torch",
    "triton",
    "commit",
)
AS_TORCH, ROUNDING = 16.0, 1e-4  # of the errors of torch's f32; of the largest element
AS_SHAKEN = 4.0  # of what results move by where each operation rounds


def work(seed: int, device: str) -> dict[str, object]:
    """What a process of ``main`` answers of a drawn graph: what is wrong with it, and its kernels, which
    it compiles itself, as all processes have something to do. ``spent``: the seconds of each stage."""
    from transconv.errors import Unsupported
    from transconv.graph import torch_compile

    _settle(device)
    clock, compiled_before = Clock(), Clock.compiling
    drawn = Draw(seed).drawn()
    exact = [_rounded(x) for x in drawn.inputs]
    given = [
        x.detach()
        .to(device, torch.float32 if x.is_floating_point() else x.dtype)
        .requires_grad_(x.requires_grad)
        for x in exact
    ]
    clock("drawn")
    run = torch_compile.backend(drawn.traced(), given, options={"rest": "eager"})
    clock("traced")
    want, own = made(drawn, exact), made(drawn, given)
    clock("by torch")
    try:
        turns = []
        for name in ("first calls", "second calls"):  # the second is not looked at, and writes over
            turns.append(made(run, given))
            clock(name)
    except Unsupported as why:
        return {"refused": str(why)}
    for turn, found in zip(("first", "second"), turns, strict=True):
        for i, (a, b, c) in enumerate(zip(want, own, found, strict=True)):
            if (why := _far(a, b, c)) and _far(a, b, c, movements(drawn, exact)[i]):
                return {"problem": f"{turn} call, value {i}: {why}", "text": str(drawn)}
    kernels = sum(len(g.kernels) for g in run.transconv.graphs)  # type: ignore[attr-defined]
    clock.spent["of them compiling"] = Clock.compiling - compiled_before
    return {"kernels": kernels, "spent": clock.spent}


class Clock:
    """What stages take: a call ends one, by its name. ``compiling``: the seconds of Triton's compiler in
    this process."""

    compiling = 0.0

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.last = time.perf_counter()

    def __call__(self, stage: str) -> None:
        before, self.last = self.last, time.perf_counter()
        self.spent[stage] += self.last - before

    @classmethod
    def of(cls, does: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose calls are a stage of all clocks, within others."""

        def timed(*given: Any) -> Any:
            began = time.perf_counter()
            try:
                return does(*given)
            finally:
                cls.compiling += time.perf_counter() - began

        return timed


@cache
def _settle(device: str) -> None:
    """Set a process up, once: one thread, and garbage is rarely looked for, as little of it has cycles."""
    import transconv
    from transconv.backend_triton.launch.triton_kernel import TritonKernel
    from transconv.graph.regions import graph_wait, region_kernels

    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    transconv.config.fallback = "error"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if device == "cpu":
        transconv.config.cpu = "interpret"
    graph_wait.begin = lambda questions: None  # type: ignore[attr-defined]
    region_kernels.rank = lambda questions: None  # type: ignore[attr-defined]
    TritonKernel._compiled = Clock.of(TritonKernel._compiled)  # type: ignore[method-assign]


NEEDED = (
    "triton",
    "triton.compiler.code_generator",
    "triton.experimental.gluon.nvidia.hopper",
    "functorch.compile",
    "torch._dynamo.backends.common",
    "torch._inductor.pattern_matcher",
    "torch._inductor.decomposition",
    "transconv.graph.torch_compile",
    "transconv.functional.calls.compiled_launch",
)


def forked(device: str) -> bool:
    """Import what processes need before they are forked, which takes as long as several graphs; nothing
    here may touch the GPU, or start threads. Whether a fork can use the device: else they are spawned."""
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    for name in NEEDED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    child = multiprocessing.get_context("fork").Process(
        target=torch.zeros, args=(1,), kwargs={"device": device}
    )
    child.start()
    child.join()
    return child.exitcode == 0


def _rounded(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    return x.detach().float().double().requires_grad_(x.requires_grad)


def _far(want: Tensor, own: Tensor, got: Tensor, shaken: float = 0.0) -> str:
    """Why a value is not that of f64, by the errors of torch's f32 and by how far roundings move it; empty
    if it is."""
    if got.shape != want.shape or not got.is_floating_point():
        return "" if got.shape == want.shape and torch.equal(got, own) else "another shape or number"
    if not own.isfinite().all():
        return ""
    off, of_torch = ((t.double() - want.double()).abs().max() for t in (got, own))
    allowed = AS_TORCH * of_torch + ROUNDING * (1 + want.double().abs().max()) + AS_SHAKEN * shaken
    return "" if off <= allowed else f"off by {off:g}, torch by {of_torch:g}"


def on_device(options: argparse.Namespace) -> None:
    """Draw graphs for kernels of a device, in processes, until the time is over."""
    from bench.environment import versions, worker_environment
    from transconv.support import knobs
    from transconv.tuning.table import CsvTable
    from transconv.verify.machine import Pool, Task, WorkerTask

    if options.device == "cpu":
        knobs.use_interpreter()
    start = "fork" if forked(options.device) else "spawn"
    variables = worker_environment() | ({"TRITON_INTERPRET": "1"} if options.device == "cpu" else {})
    pool = Pool(
        {"draw": WorkerTask("tests.graph.draw_on_device:work", options.processes, variables)}, start=start
    )
    seeds = range(options.seed, options.seed + options.n)
    tasks = [Task("draw", {"seed": seed, "device": options.device}, 120.0) for seed in seeds]
    right = kernels = wrong = 0
    refusals: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    began = time.perf_counter()
    for task, row in pool.run(tasks, options.time_budget):
        if "kernels" in row:
            right, kernels = right + 1, kernels + int(row["kernels"])
            spent.update(row["spent"])
        elif "refused" in row:
            refusals[REASON.split(str(row["refused"]))[0]] += 1
            print(f"seed {task.payload['seed']} refused: {row['refused']}", flush=True)
        elif row.get("error") != "out of budget":
            wrong += 1
            why = row.get("problem") or row["error"]
            print(f"seed {task.payload['seed']}: {why}\n{row.get('text', '')}", flush=True)
    refused = refusals.total()
    print(
        f"{right} graphs with {kernels} kernels as torch's on {options.device}, {refused} refused, "
        f"{wrong} wrong",
        flush=True,
    )
    took = time.perf_counter() - began
    print(
        f"{(right + refused + wrong) / took:.1f} graphs/s; seconds of one: "
        + ", ".join(f"{name} {s / max(1, right):.2f}" for name, s in spent.items()),
        flush=True,
    )
    if options.out:
        said = "; ".join(f"{n} x {why}" for why, n in refusals.most_common())
        table = CsvTable(Path(options.out), COLUMNS, ("seed", "commit"))
        table.add(
            {
                "seed": options.seed,
                "draws": right + refused + wrong,
                "passed": right,
                "failed": wrong,
                "refused": refused,
                "kernels": kernels,
                "reasons": said,
                "seconds": took,
                "error": "",
            }
            | versions()
        )
