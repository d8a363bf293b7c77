"""``bisect``: the first stage that changes what a kernel means, and the rule that did it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from transconv.cli import options, ranges
from transconv.verify.bisect import PARTS, blame
from transconv.verify.bisect_shrink import PRODUCTS


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs, "bisect", "find the stage that makes a kernel wrong",
        "Runs every stage of a problem's kernel on the same integer data and compares the results\n"
        "with the exact answer. The interpreter of the IR runs the computation and the kernel after\n"
        "each pass, Triton's interpreter runs the emitted source, and the GPU runs the compiled\n"
        "kernel. Prints the first wrong stage, what it changed, and the unsound rule of the\n"
        "simplifier, if one is the cause. The exit code is 1 if a stage is wrong.",
        ("bisect mb2ic8ih14oc16oh14kh3ph1 --prop bwd_d",
         "bisect mb1ic16ih9oc32oh5kh3sh2ph1 --epilogue bias+relu --target gfx942"), run)
    options.add_problem(made)
    options.add_props(made, "all")
    made.add_argument("--target", default="",
                      help="the chip: sm_90, gfx942, ...; default: the GPU here, sm_90 without one")
    made.add_argument("--epilogue", default="", metavar="E",
                      help="operations on the sum before it is stored: bias+relu, bias+res+silu")
    options.add_schedule(made)
    made.add_argument("--seed", type=ranges.at_least(0), default=0,
                      help="the seed of the data (default: 0)")
    made.add_argument("--limit", type=ranges.at_least(1), default=PRODUCTS, metavar="N",
                      help="replace a problem of more multiplications by a smaller one "
                           f"(default: {PRODUCTS})")
    made.add_argument("--parts", default=",".join(PARTS), metavar="P",
                      help=f"the stages to run (default: {','.join(PARTS)})")
    made.add_argument("--here", action="store_true",
                      help="interpret in this process, not in a child process")
    made.add_argument("--json", action="store_true", help="print one JSON object per direction")


def run(words: argparse.Namespace) -> int:
    problem, target = options.problem(words), options.chip(words.target)
    parts = words.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        raise ValueError(f"--parts {words.parts}: unknown {', '.join(unknown)}; "
                         f"expected some of {', '.join(PARTS)}")
    bad = 0
    for prop in options.props(words):
        found = blame(problem, prop, target, options.schedule(words), options.epilogue(words),
                      seed=words.seed, limit=words.limit, parts=parts,
                      isolated=not words.here)
        bad += bool(found)
        if words.json:
            print(json.dumps(asdict(found)))
        else:
            print(found.text)
            print(f"  {'WRONG in stage ' + found.stage if found else 'all that was asked is right'}"
                  "\n")
    return 1 if bad else 0
