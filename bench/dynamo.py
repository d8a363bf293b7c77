"""``python -m bench dynamo``: PyTorch's own benchmark runner, with our backend and with Inductor.

The runner is ``benchmarks/dynamo`` of the release of PyTorch that is installed:

    git clone --depth 1 --filter=blob:none --sparse -b v2.11.0 https://github.com/pytorch/pytorch
    git -C pytorch sparse-checkout set benchmarks/dynamo

With ``--pytorch pytorch/benchmarks/dynamo`` each compiler runs each model of its lists, in a process of
its own. First accuracy, which the runner judges by f64 and eager torch, several models at a time. Then
speedups over eager torch: some models are compiled at a time, without kernels of former runs, and each is
timed alone. Nothing is fetched: weights are random. The runner's figures become a row of ``dynamo.csv``
for each model and compiler; a run that is repeated skips those it has.
"""

from __future__ import annotations

import argparse
import itertools
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench import waves
from bench.dynamo_table import dynamo_table, lost
from bench.environment import VERSIONS, at_hand, versions, worker_environment
from transconv.cli.arguments import ranges
from transconv.tuning.table import CsvTable, Row
from transconv.verify.machine import Pool, Task

SUITES = {"timm": "timm_models", "huggingface": "huggingface", "torchbench": "torchbench"}
SIDES = ("transconv", "inductor")
MODES = ("accuracy", "performance")
PHASES = ("inference", "training")
TYPES = ("bfloat16", "float16", "float32", "amp")
KEY = ("suite", "model", "mode", "phase", "dtype", "flags", "side")
COLUMNS = (
    *KEY,
    "status",
    "speedup",
    "ms",
    "compile_s",
    "compression",
    "eager_peak_gb",
    "peak_gb",
    "batch",
    "graphs",
    "breaks",
    "ours",
    "regions",
    "note",
    "error",
    *VERSIONS,
)
WORK = "bench.dynamo_runner:work"
OUT_OF_TIME = "out of budget"  # what a Pool says


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pytorch",
        type=Path,
        required=True,
        help="the folder benchmarks/dynamo of PyTorch: git clone --depth 1 --filter=blob:none --sparse "
        "-b v2.11.0 https://github.com/pytorch/pytorch; git -C pytorch sparse-checkout set "
        "benchmarks/dynamo. torchbench needs a clone of pytorch/benchmark, too, two folders above at most",
    )
    parser.add_argument("--suites", type=ranges.some_of(*SUITES), default="timm,huggingface")
    parser.add_argument(
        "--models", default="", help="default: those of the suites' lists; of timm any that it has"
    )
    parser.add_argument("--modes", type=ranges.some_of(*MODES), default=",".join(MODES))
    parser.add_argument("--what", type=ranges.some_of(*PHASES), default=PHASES[0])
    parser.add_argument("--dtype", choices=TYPES, default=TYPES[0])
    parser.add_argument("--sides", type=ranges.some_of(*SIDES), default=",".join(SIDES))
    parser.add_argument(
        "--cudagraphs", action="store_true", help="both compilers record CUDA graphs; otherwise none does"
    )
    parser.add_argument("--flags", default="", help='more for the runner: --flags="--cosine --repeat 10"')
    parser.add_argument("--device", type=at_hand, default=at_hand())
    parser.add_argument("--quick", action="store_true", help="timm's models for images of 64 x 64 pixels")
    waves.arguments(parser, "model", together=5, limit=180, budget=540)
    parser.add_argument("--retry", default="", help="statuses or errors to run again: timeout,fail,...")


def main(options: argparse.Namespace) -> int:
    """Fill ``dynamo.csv``. Returns 1 if ours fails where Inductor does not. Raises ValueError where the
    runner is not in the folder."""
    if not (options.pytorch / "common.py").is_file():
        raise ValueError(f"{options.pytorch} has no common.py; expected benchmarks/dynamo of PyTorch")
    table = CsvTable(Path(options.out) / "dynamo.csv", COLUMNS, KEY)
    if options.retry:
        for column in ("error", "status"):
            table.drop(options.retry.split(","), column)
    jobs = [key for key in asked(options) if not table.has(key)]
    until = time.monotonic() + options.time_budget
    for mode, run in (("accuracy", at_once), ("performance", in_waves)):
        mine = {" ".join(key.values()): key for key in jobs if key["mode"] == mode}
        for name, found in run(options, mine, until - time.monotonic()):
            row = dict.fromkeys(COLUMNS, "") | mine[name] | versions() | found
            print(line(row), flush=True)
            if row["error"] != OUT_OF_TIME:  # the next run has time for it
                table.add(row)
    print(dynamo_table(table.rows), flush=True)
    return 1 if lost(table.rows) else 0


def asked(options: argparse.Namespace) -> Iterator[Row]:
    """The keys of all rows, the compilers of a model one after another."""
    names = [name for name in options.models.split(",") if name]
    lists = {suite: listed(options.pytorch, suite) for suite in options.suites.split(",")}
    others = [n for n in names if not any(n in known for known in lists.values())]
    if others and "timm" not in lists:
        raise ValueError(f"--models: {', '.join(others)} in no list of {', '.join(lists)}")
    flags = " ".join((*["cudagraphs"] * options.cudagraphs, *options.flags.split()))
    for (suite, known), phase, mode in itertools.product(
        lists.items(), options.what.split(","), options.modes.split(",")
    ):
        more = others if suite == "timm" else []
        for model in [*(n for n in known if n in names or not names), *more]:
            for side in options.sides.split(","):
                found = (suite, model, mode, phase, options.dtype, flags, side)
                yield dict(zip(KEY, found, strict=True))


def listed(folder: Path, suite: str) -> list[str]:
    """The models of a suite's list that the runner does not leave out and that need no download."""
    import yaml  # type: ignore[import-untyped]  # which the runner needs, too

    script = SUITES[suite]
    text = (folder / f"{script}_models_list.txt".replace("models_models", "models")).read_text("utf-8")
    path = folder / f"{script}.yaml"
    settings = yaml.safe_load(path.read_text("utf-8")) if path.exists() else {}
    left = settings.get("skip", {}).get("all", [])
    names = [re.split("[ ,]", row)[0] for row in text.splitlines() if row]
    return [name for name in names if name not in left and "/" not in name]


def job(options: argparse.Namespace, name: str, key: Row) -> Row:
    """What the worker's Run takes."""
    ours = "transconv_cudagraphs" if options.cudagraphs else "transconv"
    words = [f"--{key[c]}" for c in ("mode", "phase", "dtype")] + ["--device", options.device]
    words += [] if options.cudagraphs else ["--disable-cudagraphs"]
    words += ["--cold-start-latency"] if key["mode"] == "performance" else []
    words += (["--batch-size", "2"] if options.quick else []) + options.flags.split()
    logs = Path(options.out).resolve() / "dynamo_logs"
    logs.mkdir(parents=True, exist_ok=True)
    return {
        "key": name,
        "folder": str(options.pytorch.resolve()),
        "suite": SUITES[key["suite"]],
        "model": key["model"],
        "side": ours if key["side"] == "transconv" else key["side"],
        "words": words,
        "log": str(logs / f"{re.sub('[^A-Za-z0-9]+', '_', name)}.log"),
        "quick": options.quick,
    }


def at_once(options: argparse.Namespace, jobs: dict[str, Row], budget: float) -> Iterator[tuple[str, Row]]:
    """Names with rows: some run at a time, each on its share of the cores; one that ends makes place."""
    todo = list(jobs)
    places = [str(i) for i in range(min(options.together, len(todo)))]
    pool = Pool(
        waves.groups(WORK, places, options.together, variables(options), waves.gpus(options.device))
    )

    def task(place: str, name: str) -> Task:
        share = {"step": "prepare", "share": (int(place), len(places))}
        return Task(place, job(options, name, jobs[name]) | share, options.limit)

    first = [task(place, todo.pop(0)) for place in places]
    for done, row in pool.run(first, budget):
        if todo:
            pool.add(task(done.group, todo.pop(0)))
        yield done.payload["key"], row


def in_waves(
    options: argparse.Namespace, jobs: dict[str, Row], budget: float
) -> Iterator[tuple[str, Row]]:
    """Names with rows: some compile at a time, then each is timed alone. Kernels on disk would make first
    calls shorter, so that each has a folder of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        found = variables(options)
        groups = waves.groups(WORK, [*jobs], options.together, found, waves.gpus(options.device))
        for i, name in enumerate(jobs):
            groups[name].environment["TRANSCONV_CACHE"] = f"{scratch}/{i}/kernels"
            groups[name].environment["TRITON_CACHE_DIR"] = f"{scratch}/{i}/triton"
        payloads = {name: job(options, name, key) for name, key in jobs.items()}
        for name, row in waves.measured(Pool(groups), payloads, options.together, options.limit, budget):
            if row:
                yield name, row


def variables(options: argparse.Namespace) -> dict[str, str]:
    """Of a worker."""
    found = worker_environment(options.cache)
    if options.device == "cpu":
        found["TRITON_INTERPRET"] = "1"
    return found


def line(row: Row) -> str:
    """A row, for people."""
    what = f"{row['model']:32} {row['phase']:9} {row['mode']:11} {row['side']:9}"
    if not row["status"]:
        return f"{what} {row['error'][:160]}"
    times = f", {row['speedup']} of eager" if row["speedup"] else ""
    kernels = f", {row['ours']} kernels, {row['regions']} regions of torch" if row["ours"] else ""
    return f"{what} {row['status']}{times}, compiled in {row['compile_s'] or '-'} s{kernels}"
