"""``tune``: times schedules on this machine and saves the fastest correct ones."""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from os.path import exists
from pathlib import Path

from transconv.cli.arguments import computations, options, ranges
from transconv.compute import Alone, Compute
from transconv.conv import (
    DIRECTIONS,
    ConvProblem,
    ConvWorkload,
    Epilogue,
    ListedLayer,
    from_problems,
    read,
    select,
    writable,
)
from transconv.selection import tuning_db
from transconv.support import ProblemError, __version__, knobs, triton_version
from transconv.target import Target, detect
from transconv.tuning import ranks
from transconv.tuning.ranks import Dealer, serve
from transconv.tuning.session import Limits, Session, TuningJob, groups, log_of, log_path, of_log
from transconv.verify.machine import Pool, code, terminable


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "tune",
        "time schedules on this machine and save the fastest",
        "Compiles, checks and times up to --trials schedules of every problem in child processes.\n"
        "Saves the fastest correct one in the user's cache, where later plans find it, or in a file\n"
        "(--db FILE; TRANSCONV_TUNED=FILE uses it). Trials that the log of --db already has are not\n"
        "repeated. Started by torchrun, every rank runs trials on a GPU of its own; rank 0 deals them\n"
        "and writes what was found.",
        (
            "tune mb32ic64ih56oc128oh28kh3sh2ph1 --dtype bf16 --layout nhwc",
            "tune bench/problems/resnet50.txt --prop fwd --trials 8 --time-budget 300",
            "tune layers.json --db tuned.csv --trials 16 --jobs 14",
            "tune bench/computes/row_sum.txt --trials 24",
        ),
        tune,
    )
    made.add_argument(
        "problem",
        nargs="+",
        metavar="PROBLEM|FILE",
        help="a problem in benchdnn's grammar, a computation as text (compute ...), or a "
        "file of either; or a layers.json file",
    )
    made.set_defaults(usual_prop=",".join(DIRECTIONS))
    made.add_argument(
        "--prop",
        "--props",
        default=",".join(DIRECTIONS),
        help="directions of the layers: fwd,bwd_d,bwd_w (default: all)",
    )
    made.option("--dtype", "T", "element type; default: the problem's own, bf16 for files", "")
    made.option("--layout", "TAG", "memory order; default: the problem's own, nhwc for files", "")
    made.option("--epilogue", "E", "such as bias+relu; layer: each layer's own (not for bwd_w)", "")
    made.add_argument("--match", default="", help="only layers whose name matches (regex)")
    made.add_argument("--kinds", default="", help="only dense,depthwise,grouped,first,last layers")
    made.add_argument("--mb", type=ranges.at_least(0), default=0, help="reduce larger batches to this")
    made.option(
        "--trials",
        "N",
        "schedules of each problem and direction (default: 16)",
        16,
        ranges.at_least(1, 10**6),
    )
    made.add_argument(
        "--explore",
        choices=("near", "spread"),
        default="near",
        help="the last 40%% of the trials: close to the best so far, or spread over "
        "the ranking (to fit the estimate to)",
    )
    made.option(
        "--jobs",
        "J",
        "worker processes that compile, of each rank (default: its cores - 2)",
        max(1, ranks.own_share(os.cpu_count() or 2) - 2),
        ranges.processes,
    )
    made.option("--limit", "S", "seconds for one measurement (default: 30)", 30, ranges.limit)
    made.option("--compile-limit", "S", "seconds for one compile (default: 60)", 60, ranges.limit)
    made.option(
        "--time-budget",
        "S",
        "seconds after which no trial starts; results so far are kept",
        float("inf"),
        ranges.seconds,
    )
    made.option(
        "--budget-ms",
        "MS",
        "milliseconds of timing for one schedule (default: 30)",
        30,
        ranges.milliseconds,
    )
    made.option(
        "--gone-after",
        "S",
        "seconds of silence after which the trials of a rank are dealt again (default: 30)",
        30,
        ranges.limit,
    )
    made.option(
        "--db",
        "FILE",
        "save results in this CSV file (tuned.csv) instead of the user's cache, and "
        "every trial beside it (tuned.trials.csv)",
        None,
        ranges.output,
    )
    made.option("--log", "FILE", "write every trial to this CSV file", None, ranges.output)


def tune(words: argparse.Namespace) -> int:
    if not ranks.started():
        return _tuned(words, _target())
    ranks.own_gpu()
    target = _target()
    about = {"machine": tuning_db.machine(target), "transconv": __version__, "triton": triton_version()}
    with ranks.meet(about, words.jobs, words.gone_after) as between:
        if between.rank == 0:
            return _tuned(words, target, between)
        ran, found = serve(groups(words.jobs), between)
        print(f"rank {between.rank} had {ran} trials", flush=True)
        if between.writes and not words.db:
            tuning_db.remember(row for x in found if (row := tuning_db.of_mapping(x)))
    return 0


def _target() -> Target:
    if detect().backend == "interpreter":
        knobs.use_interpreter()
    return detect()


def _tuned(words: argparse.Namespace, target: Target, between: ranks.Ranks | None = None) -> int:
    """Tune as the one process that searches and writes."""
    database = words.db
    before = tuning_db.load(database) if database else []
    named = {source: computations.given([source]) for source in words.problem}
    texts = [c for found in named.values() for c in found]
    words.problem = [source for source, found in named.items() if not found]
    if texts and not words.problem:
        computations.of_texts(words, texts[0])
    jobs = jobs_of(words) if words.problem else []
    options.some_computable(
        [(j.workload.problem, j.workload.prop) for j in jobs if isinstance(j.workload, ConvWorkload)]
    )
    on_cpu = target.backend == "interpreter"
    if on_cpu:
        print("no GPU: kernels run in Triton's interpreter, whose times say nothing about a GPU")
    jobs += [job for c in texts for job in _jobs_of_kernels(c, target)]
    limits = Limits(
        words.trials, words.limit, words.compile_limit, words.time_budget, words.budget_ms, words.jobs
    )
    one = len(jobs) == 1
    what = f"computation{'' if one else 's'}" if texts else f"direction{'' if one else 's'} of problems"
    many = "one process compiles" if words.jobs == 1 else f"{words.jobs} processes compile"
    shared = f" on each of {between.count} ranks" if between else ""
    chip = "this CPU" if on_cpu else f"{target.name}, {target.sms} multiprocessors"
    print(
        f"{len(jobs)} {what}: of each up to {words.trials} schedules are timed on {chip}; {many}{shared}",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="transconv-tune-") as folder:
        path = words.log or (log_path(database) if database else Path(folder) / "trials.csv")
        log = log_of(path)
        known = len(log.rows)
        session = Session(
            jobs,
            target,
            limits,
            log,
            versions(on_cpu),
            words.explore,
            pool=partial(Dealer, ranks=between) if between else Pool,
        )
        stopped = 0
        try:
            with terminable():
                found = session.run()
        except KeyboardInterrupt as stop:
            stopped, found = code(stop), session.winners()
            print(f"stopped after {len(log.rows) - known} trials; what was found is kept")
        if database:
            tuning_db.save(database, tuning_db.merged(before, tuning_db.merged(of_log(log.rows), found)))
            kept, where = len(found), str(database)
        else:
            kept, where = tuning_db.remember(found), "the user's cache"
    print(f"{kept} of {len(jobs)} are kept in {where}", flush=True)
    if between:
        between.end("rank 0 was stopped" if stopped else "", [tuning_db.mapping(row) for row in found])
    return stopped


def jobs_of(words: argparse.Namespace) -> list[TuningJob]:
    """The jobs, each direction of each problem once. Raises ProblemError, ScheduleError, and
    FileNotFoundError for a missing file."""
    found: list[tuple[ListedLayer, ConvProblem]] = []
    files = [s for s in words.problem if exists(s)]
    if files:
        layers = [x.reduced(words.mb) for source in files for x in read(source)]
        found = [
            (x, x.problem(words.dtype or "bf16", words.layout or "nhwc"))
            for x in select(layers, words.match, words.kinds)
        ]
    texts = [s for s in words.problem if not exists(s)]
    if texts:
        for problem in (options.dressed(p, words) for p in options.each_described(texts)):
            (layer,) = from_problems([problem], "")
            found.append((replace(layer, name=problem.name), problem))
    return [
        _job(layer, problem, direction, words)
        for layer, problem in found
        for direction in _directions(words.prop)
    ]


def _directions(text: str) -> list[str]:
    words = list(DIRECTIONS) if text == "all" else text.split(",")
    for word in words:
        if word not in DIRECTIONS:
            raise ProblemError(f"direction '{word}' is unknown; expected {', '.join(DIRECTIONS)}")
    return words


def _job(layer: ListedLayer, problem: ConvProblem, direction: str, words: argparse.Namespace) -> TuningJob:
    epilogue = layer.epilogue if words.epilogue == "layer" else words.epilogue
    prop = layer.prop(direction)
    writable(problem, prop)
    about = {
        "layer": layer.name,
        "layer_kind": layer.kind,
        "layer_direction": direction,
        "dtype": problem.src.dtype.name,
        "layout": _tag(problem),
    }
    behind = Epilogue.parse("" if direction == "bwd_w" else epilogue)
    return TuningJob(ConvWorkload(problem, prop, behind), about)


def _jobs_of_kernels(compute: Compute, target: Target) -> list[TuningJob]:
    """A job for each kernel of a computation, because a schedule names the kernel's axes."""
    return [
        TuningJob(
            Alone(kernel),
            {"layer": kernel.name, "layer_kind": "compute", "dtype": kernel.tensors[0].dtype.name},
        )
        for kernel in computations.of_kernels(compute, target)
    ]


def _tag(problem: ConvProblem) -> str:
    return next((w[4:] for w in str(problem).split() if w.startswith("tag=")), "nchw")


def versions(on_cpu: bool) -> dict[str, str]:
    """The columns of a log that tell the device and torch's version."""
    import torch

    device = "cpu" if on_cpu else torch.cuda.get_device_name().replace(" ", "_")
    return {"device": device, "torch": version("torch")}
