"""``fuzz``: drawn problems, layouts, types, schedules and epilogues, executed and compared exactly."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from transconv.cli import options, ranges


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs, "fuzz", "draw problems and schedules at random, execute, compare bit for bit",
        "Trial i of a seed is the same on every machine. Results of whole numbers are compared bit\n"
        "for bit; results are poisoned and tensors guarded. What fails is shrunk and printed as a\n"
        "line (benchdnn's, with --schedule= and other words) that --line repeats; what failed once\n"
        "runs before the trials. A trial that hangs or faults costs its worker alone. A run that is\n"
        "stopped (--time-budget, Ctrl-C, SIGTERM) says with which trial to go on. The exit code is 1\n"
        "if anything failed.",
        ("fuzz --n 20000 --seed 1 --time-budget 330 --json fuzz.json",
         "fuzz --n 2000 --seed 1 --interpreter", "fuzz --computes 400 --seed 1",
         "fuzz --line='--dir=BWD_D --dt=f16:f16:f16 --schedule=mb.qh.qw:16+ic:16+oc:16+mma "
         "mb2ic16ih9oc16oh5kh3sh2ph1' --interpreter"), run)
    made.add_argument("--n", type=ranges.at_least(0, 10**6), default=None, metavar="N",
                      help="trials (default: 1000; with --line none)")
    made.add_argument("--computes", type=ranges.at_least(1, 10**6), default=0, metavar="N",
                      help="instead of convolutions, N drawn computations as text; their kernels are "
                           "interpreted after every pass, no GPU is asked")
    made.add_argument("--seed", type=ranges.at_least(0), default=0, metavar="S")
    made.add_argument("--first", type=ranges.at_least(0), default=0, metavar="I",
                      help="number of the first trial, such as the `next` of a report")
    made.add_argument("--jobs", type=ranges.processes, default=os.cpu_count() or 1, metavar="J",
                      help="worker processes (default: one for each core)")
    made.add_argument("--time-budget", type=ranges.seconds, default=float("inf"), metavar="SECONDS",
                      help="no trial starts later; those under way have 20 s more")
    made.add_argument("--limit", type=ranges.limit, default=60.0, metavar="SECONDS",
                      help="for one trial")
    made.add_argument("--target", default="sm_90", help="the chip that kernels are made for")
    made.add_argument("--interpreter", action="store_true",
                      help="no GPU: the interpreter of the IR, and Triton's for a share")
    made.add_argument("--share", type=ranges.fraction, default=0.2, metavar="F",
                      help="of interpreted trials, those in Triton's interpreter (default: 0.2)")
    made.add_argument("--shrink", type=ranges.at_least(0, 1000), default=4, metavar="N",
                      help="kinds of failures that are shrunk (default: 4)")
    made.add_argument("--no-corpus", action="store_true", help="leave out what failed once")
    made.add_argument("--line", action="append", default=[], metavar="LINE",
                      help="run this trial; may be given again")
    made.add_argument("--file", type=Path, metavar="FILE", help="run the trials in a file of lines")
    made.add_argument("--json", type=ranges.output, metavar="FILE",
                      help="counts by dimension and status, lines that failed, timed out or took more "
                      "than the device has; kept up to date")


def run(words: argparse.Namespace) -> int:
    from transconv.target import Target
    from transconv.verify.corpus import read
    from transconv.verify.fuzz import Plan, fuzz
    from transconv.verify.fuzz_trial import Trial

    if words.computes:
        from transconv.verify.fuzz_compute import fuzz_computes

        return fuzz_computes(words.computes, words.seed, words.first, words.time_budget)
    Target.parse(words.target)
    lines = [str(Trial.parse(line)) for line in words.line]
    if words.file is not None:
        lines += [str(entry.trial) for entry in read(words.file)]
        if not lines:
            raise ValueError(f"{words.file} has no trial; expected lines as --line takes them")
    number = words.n if words.n is not None else 0 if lines else 1000
    if not words.interpreter and not has_gpu():
        raise ValueError("no GPU is at hand to run kernels on; expected one, or --interpreter, "
                         "which executes them with NumPy and in Triton's interpreter")
    return fuzz(Plan(number, words.seed, words.jobs, words.time_budget, words.target,
                     words.interpreter, words.share, words.first, words.limit, words.shrink,
                     not words.no_corpus and not lines, tuple(lines)), words.json)


def has_gpu() -> bool:
    """Whether torch finds a GPU, asked in a child: this process must not touch it before it forks."""
    import multiprocessing

    child = multiprocessing.get_context("fork").Process(target=_ask)
    child.start()
    child.join()
    return child.exitcode == 0


def _ask() -> None:
    import torch

    raise SystemExit(0 if torch.cuda.is_available() else 1)
