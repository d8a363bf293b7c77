"""``compile``: kernels as machine code for any chip, and the resources that they use, without a GPU; and
``export``: kernels as files that run without transconv, and as machine code with its launchers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from transconv.backend_triton import Answer, CompileFailure, Resources, compile_offline
from transconv.cli.arguments import computations, options, ranges
from transconv.conv import build
from transconv.ir import DTYPES
from transconv.passes import told_addresses
from transconv.runtime import Plan, build_compute, job_of, standalone
from transconv.schedule import Schedule
from transconv.support import ProblemError
from transconv.target import Target

TEXTS = ("ttir", "ttgir", "llir", "ptx", "amdgcn", "sass")


def add_compile(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "compile",
        "compile kernels without a GPU and print registers, spills, shared memory",
        "Compiles the generated kernels in a child process, without a GPU. Prints registers, spills,\n"
        "shared memory, the matrix and copy instructions in the machine code, and which addresses each\n"
        "access of a kernel forms and reaches, with the rule that proves them inside of its tensor.",
        (
            f"compile {options.EXAMPLE} dt=bf16 tag=nhwc --target sm_90,gfx942",
            f"compile {options.EXAMPLE} --target sm_80 --prop bwd_d --print ptx",
        ),
        run_compile,
    )
    options.add_problem(made)
    options.add_props(made, "all")
    made.add_argument("--target", required=True, metavar="T[,T...]", help="chips: sm_90,gfx942")
    options.add_epilogue(made)
    made.add_argument(
        "--print",
        default="",
        metavar="TEXT",
        dest="text",
        choices=TEXTS,
        help=f"also print this form of each kernel: {', '.join(TEXTS)}",
    )
    made.option("--timeout", "S", "seconds to compile one kernel (default: 120)", 120, ranges.limit)
    options.add_schedule(made)


def run_compile(words: argparse.Namespace) -> int:
    schedule = options.schedule(words)
    targets = [Target.parse(name) for name in words.target.split(",")]
    if found := computations.asked(words, sizes=True):
        return max(
            _compiled(c.name, [build_compute(c, t, schedule) for t in targets], words) for c in found
        )
    problem, epilogue = options.problem(words), options.epilogue(words)
    return _compiled(
        str(problem),
        [build(problem, prop, t, schedule, epilogue) for t in targets for prop in options.props(words)],
        words,
    )


def _compiled(name: str, plans: list[Plan], words: argparse.Namespace) -> int:
    """Compile the kernels of plans, print what became of them and the form of each that was asked for.
    Returns the exit code."""
    answers = compile_offline(
        [job_of(step, plan.target, words.text) for plan in plans for step in plan.steps], words.timeout
    )
    print(f"{name}\n\n{resource_table(answers)}")
    for plan, step in ((p, s) for p in plans for s in p.steps):
        print(f"\n{step.kernel.name} for {plan.target}\n{told_addresses(step.kernel)}")
    for a in answers:
        if isinstance(a, CompileFailure) and a.log:
            print(f"\n{a.function} for {a.target}:\n{a.log}")
        elif isinstance(a, Resources):
            for form in a.texts.values():
                print(f"\n{a.function} for {a.target}:\n{form}")
            if words.text and not a.texts:
                print(f"\n{a.function} for {a.target}: its compiler makes no {words.text}")
    return 1 if any(isinstance(a, CompileFailure) for a in answers) else 0


def resource_table(answers: list[Answer]) -> str:
    """A row for each kernel."""
    lines = [
        f"{'target':<8} {'registers':>9} {'spilt':>6} {'shared':>7} {'time':>6}  kernel, instructions",
        "-" * 100,
    ]
    for a in answers:
        if isinstance(a, CompileFailure):
            lines += [f"{a.target:<8} {'not compiled':<32}  {a.function}", f"{'':<42}{a.reason}"]
            continue
        words = " ".join(f"{w}:{n}" for w, n in a.words.items())
        lines.append(
            f"{a.target:<8} {a.registers:>9} {a.spill_bytes:>6} {a.shared_bytes:>7} "
            f"{a.seconds:>5.1f}s  {a.function}"
        )
        lines.append(f"{'':<42}{words}")
        lines += [f"{'':<42}{w}" for w in a.warnings]
        if a.flaw:
            lines.append(f"{'':<42}miscompiled, so it would be rejected: {a.flaw}")
        if a.serialised:
            lines.append(f"{'':<42}the matrix unit waits after each product (serialised)")
    return "\n".join(lines)


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
        f"for any size, of operations ({', '.join(standalone.operation_names())}; default: all)\n"
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
    made.option(
        "--hf-kernel",
        "DIR",
        "write a folder that Hugging Face's `kernels` loads; --dtype may name several types "
        "(default: bf16,f16,f32)",
        None,
        Path,
    )
    made.option("--name", "NAME", "with --hf-kernel: the kernel's name (default: DIR's)")
    options.add_props(made, "fwd")
    made.option(
        "--target",
        "T[,T...]",
        "chips: sm_90,gfx942; default: the GPU here, or Triton's interpreter; "
        f"with --hf-kernel: {standalone.CHIPS}",
        "",
    )
    options.add_epilogue(made)
    options.add_schedule(made)
    made.flag(
        "--aot", "also write machine code (cubin, hsaco), a C header and source, and a Python launcher"
    )
    made.option("--timeout", "S", "seconds to compile one kernel (default: 120)", 120, ranges.limit)
    made.option("--workers", "N", "worker processes that compile (default: 1)", 1, ranges.processes)
    made.flag("--force", "allow a folder that is not empty, and replace files of the same names")


def run(words: argparse.Namespace) -> int:
    if words.hf_kernel is not None:
        return _export_repository(words)
    if words.output is None or not words.problem:
        raise ProblemError("expected a problem or a file, and -o DIR; or --hf-kernel DIR")
    directory: Path = words.output
    standalone.check(directory, words.force)
    packages, files = standalone.files_of(list(plans(words)), words.aot, words.timeout, words.workers)
    said = []
    for package in packages:
        said.append(f"{directory / package.name}.py  {package.title}: {package.plan.schedule}")
        if words.aot:
            said.append(
                f"{directory / standalone.code_folder(package)}/  machine code for {package.target.name}, "
                "launchers in C and Python"
            )
    standalone.write(directory, files, words.force)
    print("\n".join(dict.fromkeys(said)))
    return 0


def _export_repository(words: argparse.Namespace) -> int:
    """Write a folder for Hugging Face's loader, and say what it has."""
    directory: Path = words.hf_kernel
    standalone.check(directory, words.force)
    asked = [o for o in ("output", "epilogue", "schedule", "layout") if getattr(words, o)]
    if asked or words.aot or words.prop != words.usual_prop:
        raise ProblemError(f"--{[*asked, 'aot or --prop'][0]} is not for --hf-kernel")
    if wrong := [t for t in (words.dtype or "").split(",") if t and t not in DTYPES]:
        raise ProblemError(f"--dtype {wrong[0]} is no type; expected some of bf16, f16, f32")
    types = [DTYPES[t] for t in (words.dtype or "bf16,f16,f32").split(",")]
    targets = [Target.parse(t) for t in (words.target or standalone.CHIPS).split(",")]
    name = words.name or directory.resolve().name.lower().replace("_", "-")
    asked_for = words.problem or standalone.operation_names()
    files = standalone.repository_files(name, asked_for, types, targets, words.timeout, words.workers)
    standalone.write(directory, files, words.force)
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
