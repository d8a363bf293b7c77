"""``python -m bench networks``: whole models before and after ``transconv.convert_(model)``.

For every model, precision and layout: errors of outputs and gradients against float64, twenty
training steps, and times of inference and training; with ``--compiled`` the times under
torch.compile instead, with ``--graphs`` those under torch.compile into CUDA graphs, where the host
has next to nothing to do. Kernels are collected first, then compiled by many processes, then the models
are measured, because compiling at the same time would slow the host. Every requested row is in
``networks.csv``, with the reason where a number is missing; ``networks_kernels.csv`` has the GPU's time
by kernel.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import models
from bench.environment import at_hand, versions, worker_environment
from bench.network_measures import STEPS
from bench.network_setting import LAYOUTS, PRECISIONS, Row
from transconv.cli.arguments import ranges
from transconv.tuning.session import Progress
from transconv.tuning.table import CsvTable
from transconv.verify.machine import Pool, Task, WorkerTask

# ratio: of errors, ours to torch's; of times, torch's to ours; of losses, the largest difference.
COLUMNS = (
    "model",
    "batch",
    "image",
    "precision",
    "layout",
    "what",
    "torch",
    "transconv",
    "ratio",
    "unit",
    "native",
    "fallback",
    "note",
    "error",
    "torch_gpu_ms",
    "transconv_gpu_ms",
    "torch_compile_s",
    "transconv_compile_s",
    "device",
    "versions_torch",
    "triton",
    "commit",
)
KEY = ("model", "precision", "layout", "what")
KERNELS = (*KEY, "side", "kernel", "calls", "gpu_us", "commit")
EAGER = ("outputs", "gradients", f"training, {STEPS} steps", "forward", "forward+backward")
COMPILED = ("compiled forward", "compiled forward+backward")
GRAPHED = ("graphed forward", "graphed forward+backward")
Case = tuple[str, str, str]


def arguments(parser: argparse.ArgumentParser) -> None:
    cores = max(1, (os.cpu_count() or 2) - 4)
    parser.add_argument("--models", type=ranges.some_of(*models.NAMES), default=",".join(models.NAMES))
    parser.add_argument(
        "--precisions",
        type=ranges.some_of(*PRECISIONS),
        default=",".join(PRECISIONS),
        help="bf16 (autocast), tf32, ieee (both float32)",
    )
    parser.add_argument("--layouts", type=ranges.some_of(*LAYOUTS), default=",".join(LAYOUTS))
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--compiled", action="store_true", help="times under torch.compile")
    ways.add_argument(
        "--graphs", action="store_true", help="times under torch.compile(mode='reduce-overhead')"
    )
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--device", type=at_hand, default=at_hand())
    parser.add_argument("--processes", type=ranges.processes, default=4, help="that share the GPU")
    parser.add_argument("--workers", type=ranges.processes, default=cores, help="that compile")
    parser.add_argument(
        "--limit",
        type=ranges.limit,
        default=540,
        help="seconds for one setting, waiting for the GPU included",
    )
    parser.add_argument("--time-budget", type=ranges.seconds, default=540)
    parser.add_argument("--cache", default="", help="folder of compiled kernels")


class Run:
    """The tasks of all settings: collect, then compile what is new, then measure."""

    def __init__(self, options: argparse.Namespace, table: CsvTable, told: CsvTable) -> None:
        self.options, self.table, self.told = options, table, told
        self.kinds = COMPILED if options.compiled else GRAPHED if options.graphs else EAGER
        self.cases: list[Case] = [
            (m, p, layout)
            for m in options.models.split(",")
            for p in options.precisions.split(",")
            for layout in options.layouts.split(",")
        ]
        self.lock = str(Path(options.out) / "gpu.lock")
        self.asked: set[Any] = set()  # kernels that were given to a compiler
        self.done: set[Any] = set()  # those that it has compiled, or could not
        self.kernels: dict[Case, list[Any]] = {}
        self.missing = {case: dict.fromkeys(self.kinds, "out of budget") for case in self.cases}
        measured = "measure" if self.kinds is EAGER else "measure_compiled"
        variables = worker_environment(options.cache)
        threads = max(1, options.workers // options.processes)
        variables["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
        self.pool = Pool(
            {
                "collect": WorkerTask("bench.network_kernels:collect", 2, variables),
                "compile": WorkerTask("bench.network_kernels:compile_one", options.workers, variables),
                "measure": WorkerTask(f"bench.network_measures:{measured}", options.processes, variables),
            }
        )
        self.progress = Progress(len(self.cases), "step")

    def setting(self, case: Case) -> Row:
        model, precision, layout = case
        return {
            "model": model,
            "precision": precision,
            "layout": layout,
            "device": self.options.device,
            "small": self.options.small,
            "lock": self.lock,
        }

    def go(self) -> None:
        tasks = [Task("collect", self.setting(case), 120) for case in self.cases]
        for task, row in self.pool.run(tasks, self.options.time_budget, grace_s=30):
            self.progress.step()
            if task.group == "compile":
                self.compiled(task.payload["kernel"], row)
                continue
            case: Case = (task.payload["model"], task.payload["precision"], task.payload["layout"])
            if "error" in row:
                self.progress.say(f"{task.group} {case}: {row['error'][:300]}")
            if task.group == "collect":
                self.collected(case, row)
            else:
                self.measured(case, row)
        self.progress.close()

    def collected(self, case: Case, row: Row) -> None:
        kernels = self.kernels[case] = row.get("kernels", [])
        fresh = [k for k in kernels if k not in self.asked]
        self.asked.update(fresh)
        if self.options.device == "cuda":
            for kernel in fresh:
                self.pool.add(Task("compile", {"kernel": kernel}, 120))
            self.progress.total += len(fresh)
        else:
            self.done.update(fresh)
        self.measure()

    def compiled(self, kernel: Any, row: Row) -> None:
        self.done.add(kernel)
        if "error" in row:
            self.progress.say(
                f"not compiled ahead: {kernel[0]} {kernel[1]} {kernel[2]}: {row['error'][:300]}"
            )
        self.measure()

    def measure(self) -> None:
        """Start measuring once all kernels of all cases are compiled, or could not be."""
        if len(self.kernels) < len(self.cases) or self.done != self.asked:
            return
        for case in self.cases:
            payload = {**self.setting(case), "kernels": self.kernels[case]}
            if self.kinds is not EAGER:
                payload |= {"backend": self.options.backend, "graphs": self.options.graphs}
            self.pool.add(Task("measure", payload, self.options.limit))
        self.progress.total += len(self.cases)

    def measured(self, case: Case, row: Row) -> None:
        for part in row.get("kernels", ()):
            self.told.add(dict(zip(KEY[:3], case, strict=True)) | part | {"commit": versions()["commit"]})
        for part in row.get("rows") or [{"what": what} for what in self.kinds]:
            self.finish(case, part | {"error": row.get("error", "")})

    def finish(self, case: Case, row: Row) -> None:
        """Write a row and say it."""
        self.missing[case].pop(row["what"], None)
        model, precision, layout = case
        size = models.size_of(model, self.options.small)
        told = versions()
        row = {
            "model": model,
            "precision": precision,
            "layout": layout,
            "batch": size.batch,
            "image": "x".join(map(str, size.image)),
            **row,
            "device": told["device"],
            "versions_torch": told["torch"],
            "triton": told["triton"],
            "commit": told["commit"],
        }
        self.table.add(row)
        self.progress.say(line(row))

    def leftovers(self) -> Iterator[tuple[Case, Row]]:
        """Rows for the cases without a result, so that none is left out."""
        for case, kinds in self.missing.items():
            for what, why in list(kinds.items()):
                yield case, {"what": what, "error": why}


def line(row: Row) -> str:
    """One row, for people."""

    def cell(name: str) -> str:
        value = row.get(name, "")
        return f"{value:10.4g}" if isinstance(value, float) else f"{value!s:>10}"

    return (
        f"{row['model']:<12} {row['precision']:<4} {row['layout']:<4} {row['what']:<26}"
        f"{cell('torch')} {cell('transconv')} {row.get('unit', ''):<9} {cell('ratio')}  "
        f"native {row.get('native', '')} fell back {row.get('fallback') or '-'}  "
        f"{row.get('note', '')} {row.get('error', '')[:200]}"
    )


def main(options: argparse.Namespace) -> int:
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    table = CsvTable(out / "networks.csv", COLUMNS, KEY)
    run = Run(options, table, CsvTable(out / "networks_kernels.csv", KERNELS, KERNELS[:6]))
    run.go()
    for case, row in list(run.leftovers()):
        run.finish(case, row)
    print("\n".join(sorted(map(line, _typed(table.rows)))))
    Path(run.lock).unlink(missing_ok=True)
    return 1 if any(r["error"] for r in table.rows) else 0


def _typed(rows: list[Row]) -> Iterator[Row]:
    """Rows of the table, whose cells are text, with their numbers as numbers."""
    for row in rows:
        made = dict(row)
        for name in ("torch", "transconv", "ratio"):
            if row[name]:
                made[name] = float(row[name])
        yield made
