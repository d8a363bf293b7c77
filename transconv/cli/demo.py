"""``demo``: a network through generated kernels, then one problem from text to machine code."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transconv.backend_triton import CompileFailure, compile_offline
from transconv.cli import execute, run, show
from transconv.cli.arguments import options
from transconv.cli.compile_report import table
from transconv.conv import ConvProblem, Prop, read_problems
from transconv.errors import ProblemError
from transconv.passes import EMIT, NAIVE
from transconv.target import TARGETS, detect
from transconv.verify.matrix.cases import jobs_of

NETWORK = Path(__file__).parents[1] / "data" / "resnet50.txt"
SHOWN = "mb32ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc"
CHIPS = ("sm_90", "gfx942")


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs, "demo", "check a network's convolutions; show one problem stage by stage",
        "Runs ResNet-50's convolutions in all three directions with generated kernels and compares\n"
        "each with the exact answer; then shows one problem stage by stage and compiles it.",
        ("demo",), demo)
    made.add_argument("--network", default=str(NETWORK), metavar="FILE",
                      help="a list of problems (default: ResNet-50)")


def demo(words: argparse.Namespace) -> int:
    started = time.perf_counter()
    where = execute.device()
    problems = read_problems(words.network)
    if not problems:
        raise ProblemError(f"{words.network} contains no problem; expected at least one")
    if where == "cpu":
        problems = [one_image(p) for p in problems]
        print("No GPU: one image instead of the network's batch, in f32; all else as it is.")
    else:
        problems = [p.with_dtype("bf16").with_layout("nhwc") for p in problems]
    work = [(p, prop) for p in problems for prop in Prop]
    rows = run.table(work, detect(), None, f"on {run._machine(where)}")
    failed = run.report(rows)
    excerpt()
    failed |= chips()
    right = sum(r.right for r in rows)
    print(f"\n{'=' * 100}\n{'FAILED' if failed else 'PASSED'}: {right} of {len(rows)} kernels of "
          f"{Path(words.network).stem} are right, in {time.perf_counter() - started:.0f} s")
    return failed


def one_image(p: ConvProblem) -> ConvProblem:
    """The problem at batch 1."""
    return ConvProblem.make(1, p.ic, p.oc, p.i, p.k, p.stride, p.dilation, p.pad_lo, p.o, p.g,
                            layout="nhwc", name=p.name)


def excerpt() -> None:
    """Print one problem as computation, a few stages, and source."""
    problem, target = ConvProblem.parse(SHOWN), TARGETS["sm_90"]
    print(f"\n{'=' * 100}\nStage by stage: the last of the four stride phases of\n")
    words: Any = SimpleNamespace(stage="compute", diff=False, schedule=None, epilogue="")
    pages = list(show.pages(problem, Prop.BWD_D, target, words))
    print(pages[0] + "\n" + pages[-1])
    for words.stage in (NAIVE.name, "lanewise", EMIT.name):
        print(list(show.pages(problem, Prop.BWD_D, target, words))[-1])
    print("\nEvery stage: python -m transconv show "
          f"{SHOWN.split()[0]} --prop bwd_d --stage all   (or --diff)")


def chips() -> int:
    """Compile the problem for two chips; 1 when one fails."""
    problem = ConvProblem.parse(SHOWN)
    jobs = [j for name in CHIPS for p in Prop
            for j in jobs_of(problem, p, TARGETS[name])]
    print(f"\n{'=' * 100}\nCompiled offline, {problem}\n")
    answers = compile_offline(jobs)
    print(table(answers))
    return int(any(isinstance(a, CompileFailure) for a in answers))


