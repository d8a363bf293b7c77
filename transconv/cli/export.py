"""``export``: kernels as files that run without transconv, and as machine code with its launchers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from transconv.cli.arguments import computations, options, ranges
from transconv.conv import build
from transconv.ir import DTYPES
from transconv.runtime import Plan, build_compute
from transconv.runtime.standalone import (
    CHIPS,
    check,
    code_folder,
    files_of,
    operation_names,
    repository_files,
    write,
)
from transconv.schedule import Schedule
from transconv.support import ProblemError
from transconv.target import Target


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "export",
        "write kernels as files that run without transconv",
        "Writes a Python file for each problem and direction: the generated kernels, a function that\n"
        "launches them, and a comparison with torch (`python FILE` exits with 0 if the result is right).\n"
        "The file needs only torch and Triton. --aot also writes a folder of machine code with launchers\n"
        "in C and Python. Sizes, strides and types are constants of the kernels.\n"
        "--hf-kernel writes a folder that Hugging Face's `kernels` loads instead: Triton text\n"
        f"for any size, of operations ({', '.join(operation_names())}; default: all)\n"
        "or of files with computations as text; each is compiled for each chip.",
        (
            f"export {options.EXAMPLE} dt=bf16 tag=nhwc --target sm_90 -o kernels",
            "export mb2ic16ih8oc16oh8kh3ph1 --prop all --epilogue bias+relu -o kernels --force",
            "export bench/computes/max_pool.txt --target sm_90,gfx942 --aot -o kernels",
            "export group_norm_silu patch_embed --hf-kernel my-kernels --dtype bf16,f32 --target sm_90",
        ),
        run,
    )
    options.add_problem(made, or_file=True, least=0)
    made.add_argument("-o", "--output", metavar="DIR", type=Path, help="the folder to write, new or empty")
    made.add_argument(
        "--hf-kernel",
        metavar="DIR",
        type=Path,
        help="write a folder that Hugging Face's `kernels` loads; --dtype may name several types "
        "(default: bf16,f16,f32)",
    )
    made.add_argument(
        "--name", metavar="NAME", help="with --hf-kernel: the kernel's name (default: DIR's)"
    )
    options.add_props(made, "fwd")
    made.add_argument(
        "--target",
        default="",
        metavar="T[,T...]",
        help="chips: sm_90,gfx942; default: the GPU here, or Triton's interpreter; with --hf-kernel: "
        f"{CHIPS}",
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
    if words.hf_kernel is not None:
        return _export_repository(words)
    if words.output is None or not words.problem:
        raise ProblemError("expected a problem or a file, and -o DIR; or --hf-kernel DIR")
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


def _export_repository(words: argparse.Namespace) -> int:
    """Write a folder for Hugging Face's loader, and say what it has."""
    directory: Path = words.hf_kernel
    check(directory, words.force)
    asked = [o for o in ("output", "epilogue", "schedule", "layout") if getattr(words, o)]
    if asked or words.aot or words.prop != words.usual_prop:
        raise ProblemError(f"--{[*asked, 'aot or --prop'][0]} is not for --hf-kernel")
    if wrong := [t for t in (words.dtype or "").split(",") if t and t not in DTYPES]:
        raise ProblemError(f"--dtype {wrong[0]} is no type; expected some of bf16, f16, f32")
    types = [DTYPES[t] for t in (words.dtype or "bf16,f16,f32").split(",")]
    targets = [Target.parse(t) for t in (words.target or CHIPS).split(",")]
    name = words.name or directory.resolve().name.lower().replace("_", "-")
    asked_for = words.problem or operation_names()
    files = repository_files(name, asked_for, types, targets, words.timeout, words.workers)
    write(directory, files, words.force)
    kernels = files["compiled.csv"].count(b"\n") - 1
    print(f"{directory}/  {', '.join(asked_for)}: {kernels} kernels compiled for {len(targets)} chips")
    print(f'get_local_kernel(Path("{directory}")) of the package kernels loads it')
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
