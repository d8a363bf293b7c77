"""``fuzz``: random problems, layouts, types, schedules and epilogues, run and compared exactly."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from pathlib import Path

from transconv.cli.arguments import options, ranges
from transconv.support import knobs
from transconv.target import Target


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "fuzz",
        "run random problems and schedules and compare bit for bit",
        "Draws random problems, layouts, types, schedules and epilogues, and runs their kernels. Trial\n"
        "i of a seed is the same on every machine. Results on integer data must equal the answer bit\n"
        "for bit, and writes outside the result are detected. A failure is shrunk and printed as one\n"
        "line of options that --line repeats. Trials of the corpus, which have failed before, run\n"
        "first. Each trial runs in a worker process, so a hang or a fault ends only that trial. A run\n"
        "that is stopped (--time-budget, Ctrl-C, SIGTERM) prints the trial to continue with. The exit\n"
        "code is 1 if any trial failed.",
        (
            "fuzz --n 20000 --seed 1 --time-budget 330 --json fuzz.json",
            "fuzz --n 2000 --seed 1 --interpreter",
            "fuzz --computes 400 --seed 1 --interpreter",
            "fuzz --small-types 400 --seed 1 --interpreter",
            "fuzz --kernels 400 --seed 1 --interpreter",
            "fuzz --computes 500 --seed 1 --opencl",
            "fuzz --line='--dir=BWD_D --dt=f16:f16:f16 --schedule=mb.qh.qw:16+ic:16+oc:16+mma "
            "mb2ic16ih9oc16oh5kh3sh2ph1' --interpreter",
        ),
        run,
    )
    made.option(
        "--n", "N", "number of trials (default: 1000; with --line 0)", None, ranges.at_least(0, 10**6)
    )
    made.option(
        "--computes",
        "N",
        "draw N computations as text instead of convolutions; with --interpreter "
        "their kernels are interpreted after every pass",
        0,
        ranges.at_least(1, 10**6),
    )
    made.option(
        "--small-types",
        "N",
        "draw N convolutions with types of 8 bits: their scales, zero points, post-ops",
        0,
        ranges.at_least(1, 10**6),
    )
    made.option(
        "--kernels",
        "N",
        "draw N programs of the kernel API; engines must agree with its simulator: the "
        "GPU, or with --interpreter Triton's and that of the IR",
        0,
        ranges.at_least(1, 10**6),
    )
    made.option("--seed", "S", "the seed of all trials (default: 0)", 0, ranges.at_least(0))
    made.option(
        "--first", "I", "number of the first trial, such as the `next` of a report", 0, ranges.at_least(0)
    )
    made.option(
        "--jobs",
        "J",
        "worker processes (default: one for each core)",
        os.cpu_count() or 1,
        ranges.processes,
    )
    made.option(
        "--time-budget",
        "SECONDS",
        "no trial starts after this time; running ones have 20 s more",
        float("inf"),
        ranges.seconds,
    )
    made.option("--limit", "SECONDS", "seconds for one trial", 60.0, ranges.limit)
    made.add_argument("--target", default="sm_90", help="the chip that kernels are made for")
    made.flag("--interpreter", "use no GPU, but the interpreter of the IR, and for --share Triton's")
    made.flag(
        "--opencl",
        "use no GPU: kernels for the Max 1550 are executed on the CPU through OpenCL (docs/intel.md)",
    )
    made.option(
        "--sets",
        "N",
        "run the kernels of a convolution with N sets of scales, zero points and operands of post-ops, "
        "which are arguments, where their values matter: zero points, and results that are rounded or "
        "saturate. Each is a problem with its own check, of whole numbers or of rounded ones in turn; "
        "shapes, types and chains differ from trial to trial alone (default: 1)",
        1,
        ranges.at_least(1, 1000),
    )
    made.option(
        "--share",
        "F",
        "fraction of interpreted trials in Triton's interpreter (default: 0.2)",
        0.2,
        ranges.fraction,
    )
    made.option(
        "--shrink", "N", "how many kinds of failures to shrink (default: 4)", 4, ranges.at_least(0, 1000)
    )
    made.flag("--no-corpus", "skip the trials of the corpus")
    made.add_argument(
        "--line", action="append", default=[], metavar="LINE", help="run this trial; may be repeated"
    )
    made.option(
        "--file", "FILE", "run the trials in a file of lines; kernels have files of their own", None, Path
    )
    made.option(
        "--json",
        "FILE",
        "write counts by dimension and status, and the trials that failed, timed "
        "out or ran out of memory; updated during the run",
        None,
        ranges.output,
    )


def run(words: argparse.Namespace) -> int:
    from transconv.verify.fuzz.main_loop import (
        COMPUTES,
        CONVOLUTIONS,
        SMALL_TYPES,
        FuzzPlan,
        fuzz,
        lines_of,
        read,
    )

    Target.parse(words.target)
    kind = COMPUTES if words.computes else SMALL_TYPES if words.small_types else CONVOLUTIONS
    texts = [*words.line, *(line for _, line in lines_of(words.file))] if words.file else words.line
    if words.kernels or any(line.startswith("kernel ") for line in texts):
        from transconv.kernel.trials import KERNELS as kind
    lines = [str(kind.read(line)) for line in words.line]
    if words.file is not None:
        lines += [str(entry.trial) for entry in read(words.file, kind.read)]
        if not lines:
            raise ValueError(f"{words.file} contains no trial; expected lines in the format of --line")
    if words.sets > 1 and kind not in (CONVOLUTIONS, SMALL_TYPES):
        raise ValueError(f"--sets={words.sets} is for convolutions, whose scales are arguments of kernels")
    said = [
        f"--{w}"
        for w in ("n", "computes", "small-types", "kernels")
        if getattr(words, w.replace("-", "_")) not in (0, None)
    ]
    if len(said) > 1:
        raise ValueError(f"{' and '.join(said)} say how many trials; expected one of them")
    number = (
        words.computes
        or words.small_types
        or words.kernels
        or (words.n if words.n is not None else 0 if lines else 1000)
    )
    if words.opencl:
        knobs.use_opencl()
    elif not words.interpreter and not has_gpu():
        raise ValueError(
            "there is no GPU to run kernels on; expected one, or --interpreter, "
            "which executes them with NumPy and in Triton's interpreter"
        )
    return fuzz(
        FuzzPlan(
            number,
            words.seed,
            words.jobs,
            words.time_budget,
            words.target,
            words.interpreter,
            words.share,
            words.first,
            words.limit,
            words.shrink,
            not words.no_corpus and not lines,
            tuple(lines),
            kind,
            words.sets,
        ),
        words.json,
    )


def has_gpu() -> bool:
    """Whether torch finds a GPU, tested in a child: this process forks later and must not start CUDA."""
    child = multiprocessing.get_context("fork").Process(target=_ask)
    child.start()
    child.join()
    return child.exitcode == 0


def _ask() -> None:
    import torch

    raise SystemExit(0 if torch.cuda.is_available() else 1)
