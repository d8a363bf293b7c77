"""``python -m bench sizes``: layers at drawn image sizes with kernels whose sizes are arguments, beside
the kernels for these sizes and cuDNN. ``<gpu>_size_rows.csv`` has a row for each layer, direction, size
and layout, ``<gpu>_sizes.csv`` a line of all sizes, and ``<gpu>_size_models.csv`` one for each side of six
OCR layers and of a graph with symbolic sizes.

Processes without a GPU compile the plans of one layer and direction after another; what has all of its
plans is measured meanwhile, by a process of its own. Results are compared with exact sums
(size_reference.py). Rows are written as they come, and a repeated run skips those that are there.
``--quick`` runs small layers in Triton's interpreter, where times say nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bench import environment
from bench.issues import short
from bench.size_layers import LAYOUTS, Size, allowed, chosen, chunks, drawn, order
from bench.size_table import LINE, lines_of, models_table, sizes_table
from transconv.cli.arguments import ranges
from transconv.conv import DIRECTIONS
from transconv.runtime.compilation.async_compile import compiles
from transconv.tuning.table import CsvTable, Row
from transconv.verify.machine import Pool, Task, WorkerTask

COLUMNS = (
    "layer",
    "kind",
    "direction",
    "size",
    "layout",
    "seed",
    "wrong",
    "kernels",
    "compiled",
    "elsewhere",
    "first_use",
    "first_us",
    "later_us",
    "cudnn_first_us",
    "cudnn_later_us",
    "us",
    "exact_us",
    "cudnn_us",
    "benchmark_us",
    "schedule",
    "estimate_us",
    "exact_schedule",
    *environment.VERSIONS,
)
KEY = ("layer", "direction", "size", "layout", "device")
LINE_KEY = ("layer", "direction", "order", "device")
MODEL_COLUMNS = (
    "case",
    "side",
    "sizes",
    "plans",
    "graphs",
    "prepare_s",
    "first_ms",
    "worst_ms",
    "stalls",
    "later_ms",
    "later_worst_ms",
    "compiled",
    "native",
    "far",
    *environment.VERSIONS,
)
MODEL_KEY = ("case", "side", "device")
SIDES = (
    ("ocr", "prepared"),
    ("dynamic", "prepared"),
    ("dynamic", "prepared, 1 as any size"),
    ("ocr", "torch heuristics"),
    ("ocr", "torch benchmark"),
    ("ocr", "background"),
)
CASES = {"models": ("ocr", "dynamic"), "ocr": ("ocr",), "dynamic": ("dynamic",)}
"""The cases that ``--only`` names, which has no layers then."""
Pair = tuple[str, str]
"""A layer's name and a direction."""
MODELS_S = 90.0  # kept for the sides of models, at most a quarter of the limit


def arguments(parser: argparse.ArgumentParser) -> None:
    cores = max(1, (os.cpu_count() or 2) - 2)
    parser.add_argument(
        "--count",
        type=ranges.at_least(1),
        default=0,
        help="sizes for each layer (default: 200, with --quick 3)",
    )
    parser.add_argument("--seed", type=ranges.at_least(0), default=1, help="of the draws")
    parser.add_argument(
        "--timed",
        type=ranges.at_least(0),
        default=40,
        help="how many of the sizes are timed, beside cuDNN (default: 40)",
    )
    parser.add_argument(
        "--share",
        type=ranges.at_least(0),
        default=8,
        help="how many of these beside a kernel of their own and cuDNN's benchmark",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="WORDS",
        help="only layers with one of these words, "
        "joined by commas, in their names; models: the models alone, or one of them: "
        "ocr, dynamic",
    )
    parser.add_argument("--props", type=ranges.some_of(*DIRECTIONS), default=",".join(DIRECTIONS))
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="nhwc",
        help="the order of all tensors, cuDNN's too: nhwc (channels last; 1D layers, for "
        "which torch has none, in nchw), or nchw (torch's own; without 1D layers and "
        "models, whose rows nhwc has). Default: nhwc",
    )
    parser.add_argument("--quick", action="store_true", help="small layers, for Triton's interpreter")
    parser.add_argument("--limit", type=ranges.seconds, default=480, help="seconds in all (default: 480)")
    parser.add_argument("--chunk", type=ranges.at_least(1), default=20, help="sizes of one task")
    parser.add_argument("--task-limit", type=ranges.limit, default=90, help="seconds for one task")
    parser.add_argument("--budget-ms", type=ranges.milliseconds, default=6, help="timing of one side")
    parser.add_argument("--workers", type=ranges.processes, default=cores, help="processes that compile")
    parser.add_argument("--cache", default="", help="folder of compiled kernels")


def main(options: argparse.Namespace) -> int:
    """1 if a result is wrong or a task failed. Raises ValueError if no layer is selected, if there is no
    GPU for layers as they are, or for models in another layout."""
    versions = environment.versions()
    if versions["device"] == "cpu" and not options.quick:
        raise ValueError("there is no GPU; --quick has small layers for Triton's interpreter")
    if options.only in CASES and options.layout != "nhwc":
        raise ValueError(
            f"--only={options.only} with --layout={options.layout}: models have one order; "
            "expected no --layout"
        )
    options.count = options.count or (3 if options.quick else 200)
    return Run(options, versions).go()


class Run:
    """The rows of a run. Measurements run in children: size_measures.py, size_models.py."""

    def __init__(self, options: argparse.Namespace, versions: Row) -> None:
        self.options, self.versions = options, versions
        self.end = time.monotonic() + options.limit
        name = short(versions["device"])
        out = Path(options.out)
        self.table = CsvTable(out / f"{name}_size_rows.csv", COLUMNS, KEY)
        self.lines = CsvTable(out / f"{name}_sizes.csv", LINE, LINE_KEY)
        self.models = CsvTable(out / f"{name}_size_models.csv", MODEL_COLUMNS, MODEL_KEY)
        self.layers = [] if options.only in CASES else chosen(options.quick, options.only, options.layout)
        self.sizes = {x.name: drawn(x, options.count, options.seed, options.quick) for x in self.layers}
        self.cases = CASES.get(options.only or "models", ()) if options.layout == "nhwc" else ()
        self.lost = self.measured = 0
        on_cpu = versions["device"] == "cpu"
        self.variables = environment.worker_environment(options.cache) | (
            {"OMP_NUM_THREADS": environment.threads()} if on_cpu else {}
        )

    def go(self) -> int:
        if pairs := dict(self.todo()):
            self.measure_layers(pairs)
        self.measure_models()
        self.lines.drop(("",), "layer")
        for line in lines_of(self.table.rows):
            self.lines.add(line)
        print(
            f"{len(self.table.rows)} rows are in {self.table.path}\n\n{sizes_table(self.lines.rows)}\n\n"
            f"{models_table(self.models.rows)}",
            flush=True,
        )
        wrong = [r for r in self.table.rows if r["wrong"]]
        wrong += [r for r in self.models.rows if float(r["far"] or 0) > allowed(r)]
        for row in wrong:
            print(f"wrong: {row}", file=sys.stderr)
        return int(bool(wrong or self.lost))

    def left(self) -> float:
        return max(1.0, self.end - time.monotonic())

    def todo(self) -> Iterator[tuple[Pair, list[Size]]]:
        """Layers and directions with the sizes that have no row yet."""
        for layer in self.layers:
            for direction in self.options.props.split(","):
                about = {
                    "layer": layer.name,
                    "direction": direction,
                    "device": self.versions["device"],
                    "layout": order(layer, self.options.layout),
                }
                left = [s for s in self.sizes[layer.name] if not self.table.has({**about, "size": s})]
                if left:
                    yield (layer.name, direction), left

    def beside(self, name: str) -> list[str]:
        """The sizes that get a kernel of their own: they are drawn like all others, and come first."""
        return [str(s) for s in self.sizes[name][: self.options.share]]

    def compilations(self, pairs: dict[Pair, list[Size]]) -> Iterator[Task]:
        """A task for each plan, pair after pair."""
        from bench.size_measures import questions

        for (name, direction), sizes in pairs.items():
            alone = [s for s in self.beside(name) if s in map(str, sizes)]
            for question in questions(name, direction, self.options.quick, alone, self.options.layout):
                if compiles(question.target):
                    yield Task(
                        "compile",
                        {"job": question.job, "name": name, "direction": direction},
                        self.options.task_limit,
                    )

    def measurements(self, pair: Pair, sizes: list[Size]) -> Iterator[Task]:
        """The chunks of a pair, one after another."""
        name, direction = pair
        timed = [str(s) for s in self.sizes[name][: self.options.timed]]
        for piece in chunks(sizes, self.options.chunk):
            yield Task(
                "measure",
                {
                    "name": name,
                    "direction": direction,
                    "quick": self.options.quick,
                    "sizes": [str(s) for s in piece],
                    "timed": timed,
                    "beside": self.beside(name),
                    "budget_ms": self.options.budget_ms,
                    "layout": self.options.layout,
                },
                self.options.task_limit,
            )

    def measure_layers(self, pairs: dict[Pair, list[Size]]) -> None:
        """Compile and measure. A pair is measured when its last plan is there, a chunk of sizes after one
        of another pair: where time is short, all have rows."""
        compiling = list(self.compilations(pairs))
        left = Counter((task.payload["name"], task.payload["direction"]) for task in compiling)
        waiting = {pair: self.measurements(pair, sizes) for pair, sizes in pairs.items()}
        workers = self.options.workers
        pool = Pool(
            {
                "compile": WorkerTask("bench.size_compiles:compiled", workers, self.variables),
                "measure": WorkerTask("bench.size_measures:measure", 1, self.variables),
            }
        )
        ready: Iterator[Task] = (
            task for pair in pairs if not left[pair] for task in [next(waiting[pair])]
        )
        first = Task(
            "measure",
            {
                "name": "",
                "direction": "",
                "quick": self.options.quick,
                "sizes": [],
                "timed": [],
                "beside": [],
                "budget_ms": 0,
            },
            self.options.task_limit,
        )
        budget_s = self.left() - min(MODELS_S, self.left() / 4) * bool(self.cases)
        print(
            f"{len(compiling)} plans of {len(pairs)} pairs of layer and direction, in at most "
            f"{budget_s:.0f} s",
            flush=True,
        )
        for task, answer in pool.run([*compiling, first, *ready], budget_s):
            pair = task.payload["name"], task.payload["direction"]
            self.keep(task, answer, pairs)
            if task.group == "compile":
                left[pair] -= 1
            if pair in waiting and not left[pair] and (then := next(waiting[pair], None)):
                pool.add(then)

    def keep(self, task: Task, answer: Row, pairs: dict[Pair, list[Size]]) -> None:
        """Add the rows of a task, and say how far it is."""
        about, kinds = task.payload, {x.name: x.kind for x in self.layers}
        who = f"{about['name']} {about['direction']}"
        if error := answer.get("error"):
            self.lost += error != "out of budget"
            print(f"not {task.group}d: {who}: {error}", flush=True)
        for row in answer.get("rows", ()):
            head = {
                "layer": about["name"],
                "kind": kinds[about["name"]],
                "direction": about["direction"],
                "seed": self.options.seed,
            }
            self.table.add({**head, **row, **self.versions})
        if rows := len(answer.get("rows", ())):
            wanted = sum(map(len, pairs.values()))
            self.measured += rows
            print(
                f"measured {who}: {self.measured} of {wanted} sizes, {self.left():.0f} s left", flush=True
            )

    def measure_models(self) -> None:
        """Each side in a process of its own, with caches that are empty, or that it shares with others of
        its name."""
        todo = [
            (case, side)
            for case, side in SIDES
            if case in self.cases
            and not self.models.has({"case": case, "side": side, "device": self.versions["device"]})
        ]
        with tempfile.TemporaryDirectory(prefix="bench-sizes-") as place:
            for case, side in todo:
                self.measure_model(case, side, Path(place) / side.replace(" ", "_"))

    def measure_model(self, case: str, side: str, place: Path) -> None:
        payload = {"side": side, "quick": self.options.quick, "workers": self.options.workers}
        group = WorkerTask(
            f"bench.size_models:{case}",
            1,
            self.variables | {"TRANSCONV_CACHE": f"{place}/ours", "TRITON_CACHE_DIR": f"{place}/triton"},
        )
        limit = max(5.0, self.left())
        for _, answer in Pool({case: group}).run([Task(case, payload, limit)], limit):
            if error := answer.get("error"):
                self.lost += error != "out of budget"
                print(f"not measured: {case} {side}: {error}", flush=True)
                continue
            self.models.add({**answer, **self.versions})
            print(
                f"measured {case} {side}: first calls {answer['first_ms']:.1f} ms, worst "
                f"{answer['worst_ms']:.1f} ms, {self.left():.0f} s left",
                flush=True,
            )
