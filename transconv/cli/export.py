"""``export``: kernels as files that run without transconv, and as machine code with its launchers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from transconv.cli.arguments import computations, options, ranges
from transconv.conv import build
from transconv.runtime import Plan, build_compute
from transconv.runtime.standalone import check, code_folder, files_of, write
from transconv.schedule import Schedule


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "export",
        "write kernels as files that run without transconv",
        "Writes a Python file for each problem and direction: the generated kernels, a function that\n"
        "launches them, and a comparison with torch (`python FILE` exits with 0 if the result is right).\n"
        "The file needs only torch and Triton. --aot also writes a folder of machine code with launchers\n"
        "in C and Python. Sizes, strides and types are constants of the kernels.",
        (
            f"export {options.EXAMPLE} dt=bf16 tag=nhwc --target sm_90 -o kernels",
            "export mb2ic16ih8oc16oh8kh3ph1 --prop all --epilogue bias+relu -o kernels --force",
            "export bench/computes/max_pool.txt --target sm_90,gfx942 --aot -o kernels",
        ),
        run,
    )
    options.add_problem(made, or_file=True)
    made.add_argument(
        "-o", "--output", required=True, metavar="DIR", type=Path, help="the folder to write, new or empty"
    )
    options.add_props(made, "fwd")
    made.add_argument(
        "--target",
        default="",
        metavar="T[,T...]",
        help="chips: sm_90,gfx942; default: the GPU here, or Triton's interpreter",
    )
    made.add_argument(
        "--epilogue",
        default="",
        metavar="E",
        help="operations on the sum before it is stored: bias+relu, bias+res+silu",
    )
    options.add_schedule(made)
    made.add_argument(
        "--aot",
        action="store_true",
        help="also write machine code (cubin, hsaco), a C header and source, and a Python launcher",
    )
    made.add_argument(
        "--timeout",
        type=ranges.limit,
        default=120,
        metavar="S",
        help="seconds to compile one kernel (default: 120)",
    )
    made.add_argument(
        "--workers",
        type=ranges.processes,
        default=1,
        metavar="N",
        help="worker processes that compile (default: 1)",
    )
    made.add_argument(
        "--force",
        action="store_true",
        help="allow a folder that is not empty, and replace files of the same names",
    )


def run(words: argparse.Namespace) -> int:
    directory: Path = words.output
    check(directory, words.force)
    packages, files = files_of(list(plans(words)), words.aot, words.timeout, words.workers)
    said = []
    for package in packages:
        said.append(f"{directory / package.name}.py  {package.title}: {package.plan.schedule}")
        if words.aot:
            said.append(
                f"{directory / code_folder(package)}/  machine code for {package.target.name}, "
                "launchers in C and Python"
            )
    write(directory, files, words.force)
    print("\n".join(dict.fromkeys(said)))
    return 0


def plans(words: argparse.Namespace) -> Iterator[Plan]:
    """A plan of each problem, direction and chip of the command line."""
    targets = [options.target(name) for name in (words.target or "").split(",")]
    schedule = Schedule.parse(words.schedule) if words.schedule else None
    if found := computations.asked(words):
        yield from (build_compute(c, t, schedule) for c in found for t in targets)
        return
    epilogue = options.epilogue(words)
    for problem, prop in options.problems(words):
        for target in targets:
            yield build(problem, prop, target, schedule, epilogue)
