"""``python -m bench optimized``: what ``transconv.optimize(model, x, measure=True)`` keeps of eager torch,
torch.compile, a graph of ours, and the same as a CUDA graph.

Models of ``zoo`` are used for inference, those of ``graphs`` as they are there: decoders and encoders
for inference, the others for training. All are in bf16 with features last. Some at a time are compiled,
each by a process of its own; when all of these have done so, each is timed alone. A row is appended to
``optimized.csv`` when it is complete. A run that is repeated skips the models it has.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import transconv
from bench import waves
from bench.environment import VERSIONS, at_hand, versions, worker_environment
from bench.graph_models import MODELS
from bench.optimized_table import SIDES, optimized_table
from bench.zoo_models import ZOO, arranged
from transconv.cli.arguments import ranges
from transconv.graph.optimization import ModelTrial, trial_of
from transconv.tuning.table import CsvTable, Row
from transconv.verify.machine import Pool

COLUMNS = (
    "model",
    "phase",
    "kept",
    *(f"{side}_ms" for side in SIDES),
    *(f"{side}_difference" for side in SIDES),
    "prepare_s",
    "note",
    "error",
    *VERSIONS,
)
WORK = "bench.optimized:work"
GRAPHS = {f"{n}_training" if m.classes else n: m for n, m in MODELS.items()}
NAMES = (*ZOO, *GRAPHS)
_held: dict[str, tuple[ModelTrial, Any]] = {}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=ranges.some_of(*NAMES), default=",".join(NAMES))
    parser.add_argument("--device", type=at_hand, default=at_hand())
    parser.add_argument("--quick", action="store_true", help="those of graphs, in sizes for a CPU")
    waves.arguments(parser, "model", together=5, limit=180, budget=460)


def main(options: argparse.Namespace) -> int:
    """Fill ``optimized.csv``. Returns 1 if a model has an error."""
    table = CsvTable(Path(options.out) / "optimized.csv", COLUMNS, ("model",))
    todo = [name for name in options.models.split(",") if not table.has({"model": name})]
    variables = worker_environment(options.cache)
    if options.device == "cpu":
        variables["TRITON_INTERPRET"] = "1"
    rows: dict[str, Row] = {name: {"model": name} | versions() for name in todo}
    pool = Pool(waves.groups(WORK, todo, options.together, variables, waves.gpus(options.device)))
    payloads = {name: {"model": name, "device": options.device, "quick": options.quick} for name in todo}
    for name, found in waves.measured(
        pool, payloads, options.together, options.limit, options.time_budget
    ):
        rows[name] |= found
        if "error" in found or "kept" in found:
            table.add(rows[name])
            print(rows[name].get("text") or f"{name}: {rows[name]['error'][:200]}", flush=True)
    print(optimized_table(table.rows), flush=True)
    return 1 if any(r["error"] for r in table.rows) else 0


def work(step: str, model: str, device: str, quick: bool, share: tuple[int, int] = (0, 1)) -> Row:
    """``prepare``: compile all sides of a model; ``time``, the last thing that a process does."""
    waves.take(step, share)
    if step == "prepare":
        began = time.perf_counter()
        trial = _trial(model, device, quick)
        trial.prepare()
        _held[model] = trial, trial.tried(trial.recordable())
        return {
            "prepare_s": time.perf_counter() - began,
            "phase": "training" if trial.training else "inference",
        }
    trial, found = _held.pop(model)
    chosen = trial.fastest(*found)
    named = {s.name: s for s in chosen.sides}
    row: Row = {"kept": chosen.kept, "text": f"{model}\n{chosen}", "fatal": True}
    for side, name in SIDES.items():
        if name in named:
            row |= {f"{side}_ms": named[name].ms, f"{side}_difference": named[name].difference}
    return row | {"note": "; ".join(f"{s.name}: {s.error}" for s in chosen.sides if s.error)}


def _trial(name: str, device: str, quick: bool) -> ModelTrial:
    if device == "cpu":  # only results are compared there
        transconv.config.cpu = "interpret"
    torch.backends.cudnn.benchmark = True
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if name in ZOO:
        model, given, training = ZOO[name].built(name), list(ZOO[name].batch(0)), False
    else:
        model, given = GRAPHS[name].built(quick), GRAPHS[name].inputs(quick)
        training = bool(GRAPHS[name].classes)
    model = arranged(model.to(device, dtype).train(training))
    return trial_of(model, tuple(arranged(x.to(device, dtype)) for x in given), training)
