"""``compile``: a problem's kernels as machine code for any chip, and what they take of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from transconv import compiler
from transconv.backend_triton.offline import Answer, CompileFailure, Job, Resources, compile_offline
from transconv.cli import options
from transconv.config import Config
from transconv.epilogue import Epilogue
from transconv.problem import ConvProblem, Prop
from transconv.target import Target


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs, "compile", "compile offline, with no GPU, and print what the code takes",
        "Compiles the generated kernels in a child process and prints registers, spills, shared\n"
        "memory, and which matrix and copy instructions the machine code contains.",
        (f"compile {options.EXAMPLE} dt=bf16 tag=nhwc --target sm_90,gfx942",
         f"compile {options.EXAMPLE} --target sm_80 --prop bwd_d --print ptx"), run)
    options.add_problem(made)
    options.add_props(made, "all")
    made.add_argument("--target", required=True, metavar="T[,T...]", help="chips: sm_90,gfx942")
    made.add_argument("--epilogue", default="", metavar="E", help="bias+relu, ...")
    made.add_argument("--print", default="", metavar="TEXT", dest="text",
                      help="also print this text of each: ttir, ttgir, llir, ptx, amdgcn, sass")
    made.add_argument("--timeout", type=float, default=120, metavar="S",
                      help="seconds that one kernel may take (default: 120)")
    options.add_config(made)


def run(words: argparse.Namespace) -> int:
    problem, config = options.problem(words), options.config(words)
    epilogue = options.epilogue(words)
    targets = [Target.parse(name) for name in words.target.split(",")]
    jobs = [j for t in targets for p in options.props(words)
            for j in jobs_of(problem, p, t, config, epilogue, words.text)]
    answers = compile_offline(jobs, words.timeout)
    print(f"{problem}\n\n{table(answers)}")
    for a in answers:
        if isinstance(a, CompileFailure) and a.log:
            print(f"\n{a.function} for {a.target}:\n{a.log}")
        elif isinstance(a, Resources):
            for text in a.texts.values():
                print(f"\n{a.function} for {a.target}:\n{text}")
    return 1 if any(isinstance(a, CompileFailure) for a in answers) else 0


def jobs_of(problem: ConvProblem, prop: Prop, target: Target, config: Config | None = None,
            epilogue: Epilogue | None = None, text: str = "") -> list[Job]:
    """One job for each launch of a direction."""
    return [job_of(s, target, text) for s in compiler.build(problem, prop, target, config,
                                                            epilogue).steps]


def job_of(step: compiler.Step, target: Target, text: str = "") -> Job:
    """What the offline compiler has to know of a launch."""
    boxes = step.launcher.boxes or (None,) * len(step.kernel.params)
    params = tuple((p.dtype.name, box[1] if box else ())
                   for p, box in zip(step.kernel.params, boxes, strict=True))
    return Job(step.source, step.kernel.name, params, target.name, target.backend, target.arch,
               target.warp_size, step.config.warps, step.config.stages, (text,) if text else ())


def table(answers: Sequence[Answer]) -> str:
    """A row for each kernel."""
    lines = [f"{'target':<8} {'registers':>9} {'spilt':>6} {'shared':>7} {'time':>6}  "
             "kernel, instructions", "-" * 100]
    for a in answers:
        if isinstance(a, CompileFailure):
            lines += [f"{a.target:<8} {'not compiled':<32}  {a.function}", f"{'':<42}{a.reason}"]
            continue
        words = " ".join(f"{w}:{n}" for w, n in a.words.items())
        lines.append(f"{a.target:<8} {a.registers:>9} {a.spill_bytes:>6} {a.shared_bytes:>7} "
                     f"{a.seconds:>5.1f}s  {a.function}")
        lines.append(f"{'':<42}{words}")
        lines += [f"{'':<42}{w}" for w in a.warnings]
        if a.serialised:
            lines.append(f"{'':<42}the matrix unit waits after each product (serialised)")
    return "\n".join(lines)
