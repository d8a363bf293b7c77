"""``compile``: a problem's kernels as machine code for any chip, and the resources that they use."""

from __future__ import annotations

import argparse

from transconv.backend_triton import compile_offline
from transconv.cli import computations
from transconv.cli.arguments import options, ranges
from transconv.cli.compile_report import TEXTS, printed
from transconv.target import Target
from transconv.verify.matrix.cases import jobs_of


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs, "compile", "compile kernels without a GPU and print registers, spills, shared memory",
        "Compiles the generated kernels in a child process, without a GPU. Prints registers, spills,\n"
        "shared memory, and the matrix and copy instructions in the machine code.",
        (f"compile {options.EXAMPLE} dt=bf16 tag=nhwc --target sm_90,gfx942",
         f"compile {options.EXAMPLE} --target sm_80 --prop bwd_d --print ptx"), run)
    options.add_problem(made)
    options.add_props(made, "all")
    made.add_argument("--target", required=True, metavar="T[,T...]", help="chips: sm_90,gfx942")
    made.add_argument("--epilogue", default="", metavar="E",
                      help="operations on the sum before it is stored: bias+relu, bias+res+silu")
    made.add_argument("--print", default="", metavar="TEXT", dest="text", choices=TEXTS,
                      help=f"also print this form of each kernel: {', '.join(TEXTS)}")
    made.add_argument("--timeout", type=ranges.limit, default=120, metavar="S",
                      help="seconds to compile one kernel (default: 120)")
    options.add_schedule(made)


def run(words: argparse.Namespace) -> int:
    if found := computations.asked(words, sizes=True):
        return max(computations.compile_offline(c, words) for c in found)
    problem, schedule = options.problem(words), options.schedule(words)
    epilogue = options.epilogue(words)
    targets = [Target.parse(name) for name in words.target.split(",")]
    jobs = [j for t in targets for p in options.props(words)
            for j in jobs_of(problem, p, t, schedule, epilogue, words.text)]
    answers = compile_offline(jobs, words.timeout)
    return printed(str(problem), answers, words.text)
