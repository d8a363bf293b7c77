"""``compile``: a problem's kernels as machine code for any chip, and the resources that they use, without
a GPU."""

from __future__ import annotations

import argparse

from transconv.backend_triton import Answer, CompileFailure, Resources, compile_offline
from transconv.cli.arguments import computations, options, ranges
from transconv.conv import build
from transconv.passes import told_addresses
from transconv.runtime import Plan, build_compute, job_of
from transconv.target import Target

TEXTS = ("ttir", "ttgir", "llir", "ptx", "amdgcn", "sass")


def add_to(verbs: object) -> None:
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
        run,
    )
    options.add_problem(made)
    options.add_props(made, "all")
    made.add_argument("--target", required=True, metavar="T[,T...]", help="chips: sm_90,gfx942")
    made.add_argument(
        "--epilogue",
        default="",
        metavar="E",
        help="operations on the sum before it is stored: bias+relu, bias+res+silu",
    )
    made.add_argument(
        "--print",
        default="",
        metavar="TEXT",
        dest="text",
        choices=TEXTS,
        help=f"also print this form of each kernel: {', '.join(TEXTS)}",
    )
    made.add_argument(
        "--timeout",
        type=ranges.limit,
        default=120,
        metavar="S",
        help="seconds to compile one kernel (default: 120)",
    )
    options.add_schedule(made)


def run(words: argparse.Namespace) -> int:
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
