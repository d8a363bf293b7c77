"""``bisect``: the first stage that changes what a kernel means, and the rule that did it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

from transconv.cli.arguments import computations, options, ranges
from transconv.compute import Compute
from transconv.verify import any_size
from transconv.verify.bisect.stage_search import PARTS, Blame, blame, blame_compute
from transconv.verify.bisect.subject import PRODUCTS


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "bisect",
        "find the stage that makes a kernel wrong",
        "Runs every stage of the kernels of a problem, or of a computation's text, on the same integer\n"
        "data and compares the results with the exact answer. The interpreter of the IR runs the\n"
        "computation and the kernel after each pass, Triton's interpreter runs the emitted source, and\n"
        "the GPU runs the compiled kernel. Prints the first wrong stage, what it changed, and the\n"
        "unsound rule of the simplifier, if one is the cause. The exit code is 1 if a stage is wrong.",
        (
            "bisect mb2ic8ih14oc16oh14kh3ph1 --prop bwd_d",
            "bisect mb1ic16ih9oc32oh5kh3sh2ph1 --epilogue bias+relu --target gfx942",
            "bisect bench/computes/row_sum.txt --target sm_90 --schedule red=split",
        ),
        run,
    )
    options.add_problem(made)
    made.add_argument(
        "--sizes",
        metavar="N=8,...",
        help="of a computation whose sizes are arguments: the sizes to look at (default: the least)",
    )
    options.add_props(made, "all")
    made.add_argument(
        "--target",
        default="",
        help="the chip: sm_90, gfx942, ...; default: the GPU here, sm_90 without one",
    )
    made.add_argument(
        "--epilogue",
        default="",
        metavar="E",
        help="operations on the sum before it is stored: bias+relu, bias+res+silu",
    )
    options.add_schedule(made)
    made.add_argument(
        "--seed", type=ranges.at_least(0), default=0, help="the seed of the data (default: 0)"
    )
    made.add_argument(
        "--limit",
        type=ranges.at_least(1),
        default=PRODUCTS,
        metavar="N",
        help=f"replace a problem of more multiplications by a smaller one (default: {PRODUCTS})",
    )
    made.add_argument(
        "--parts",
        default=",".join(PARTS),
        metavar="P",
        help=f"the stages to run (default: {','.join(PARTS)})",
    )
    made.add_argument(
        "--here", action="store_true", help="interpret in this process, not in a child process"
    )
    made.add_argument("--json", action="store_true", help="print one JSON object per direction")


def run(words: argparse.Namespace) -> int:
    parts = words.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        raise ValueError(
            f"--parts {words.parts}: unknown {', '.join(unknown)}; expected some of {', '.join(PARTS)}"
        )
    target, schedule = options.chip(words.target), options.schedule(words)
    blames: Iterator[Blame]
    if made := computations.asked(words, sizes=True):
        blames = (
            blame_compute(
                compute,
                target,
                schedule,
                seed=words.seed,
                limit=words.limit,
                parts=parts,
                sizes=_sizes(compute, words.sizes),
                isolated=not words.here,
            )
            for compute in made
        )
    else:
        problem = options.problem(words)
        blames = (
            blame(
                problem,
                prop,
                target,
                schedule,
                options.epilogue(words),
                seed=words.seed,
                limit=words.limit,
                parts=parts,
                isolated=not words.here,
            )
            for prop in options.props(words)
        )
    bad = 0
    for found in blames:
        bad += bool(found)
        if words.json:
            print(json.dumps(asdict(found)))
        else:
            print(found.text)
            print(f"  {'WRONG in stage ' + found.stage if found else 'every stage is right'}\n")
    return 1 if bad else 0


def _sizes(compute: Compute, text: str | None) -> dict[str, int] | None:
    return any_size.asked(compute, text)[0] if compute.named and text else None
