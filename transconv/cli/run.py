"""``run``: generate, execute and compare with the answer; a row for each problem and direction. ``demo``:
a network through generated kernels, then one problem from text to machine code.

The data are small integers: products and sums are exact, so a right kernel gives the same bits
as the answer in f64 after one rounding."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from transconv.backend_triton import CompileFailure, compile_offline
from transconv.cli import show
from transconv.cli.arguments import computations, options
from transconv.cli.export import resource_table
from transconv.conv import ConvProblem, Prop, read_problems, writable
from transconv.passes import EMIT, NAIVE
from transconv.schedule import Schedule
from transconv.support import ProblemError, TransconvError
from transconv.target import TARGETS, Target, detect
from transconv.verify.machine import described, device, executable
from transconv.verify.matrix import jobs_of

if TYPE_CHECKING:
    from transconv.conv import CompiledDirection


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run. ``max_error``: largest difference to the answer; ``milliseconds``: on a
    GPU; ``problem``: the failure, empty if there was none."""

    compiled: CompiledDirection
    max_error: float
    milliseconds: float | None
    problem: str

    @property
    def right(self) -> bool:
        return not self.problem


def execute(
    problem: ConvProblem,
    prop: Prop,
    target: Target,
    schedule: Schedule | None = None,
    time: bool = True,
    epilogue: str = "",
) -> Outcome:
    """Generate, execute, compare. Raises the compiler's errors (ScheduleError, Unsupported)."""
    from transconv.verify.case import ProblemCase

    case = ProblemCase(problem, prop, epilogue, target=target)
    compiled = case.plan(schedule or "")
    found = case.judge(compiled, "exact")
    spent = None
    if case.where == "cuda" and time:
        from triton.testing import do_bench

        spent = float(do_bench(lambda: case.launch(compiled)))
    return Outcome(compiled, found.max_err, spent, found.reason)


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "run",
        "generate and run kernels, and compare with the exact answer",
        "Runs the generated kernels on integer data and compares with the exact answer. Uses the\n"
        "GPU, or without one Triton's interpreter. The exit code is 1 if a result is wrong.",
        (
            "run mb2ic8ih14oc16oh14kh3ph1",
            "run bench/problems/edge_cases.txt --dtype f16 --layout nhwc",
            "run mb1ic16ih14oc32oh7kh3sh2ph1 --prop bwd_d --target sm_90",
            "run mb1ic8ih7oc8oh7kh3ph1 --prop fwd --epilogue bias+sum:0.5+relu:0.1+add:u8:per_oc",
        ),
        run,
    )
    options.add_problem(made, or_file=True)
    options.add_props(made, "all")
    made.add_argument(
        "--target", default="auto", help="generate kernels for this chip; default: the one here"
    )
    options.add_schedule(made)
    made.option(
        "--epilogue",
        "E",
        "what is done with the sums before they are stored, not for bwd_w: bias+relu, "
        "sum:0.5+relu:0.1+add:u8:per_oc, ... (docs/checking.md)",
        "",
    )
    made.option("--sizes", "N=8,H=17", "of a computation whose sizes are arguments")


def run(words: argparse.Namespace) -> int:
    if found := computations.asked(words, sizes=True):
        return max(computations.run(c, words) for c in found)
    work = options.problems(words)
    options.some_computable(work)
    for problem, prop in work:
        writable(problem, prop)
    where = device()
    target = executable(options.target(words.target), where)
    rows = table(
        work, target, options.schedule(words), f"on {described(where)}", str(options.epilogue(words))
    )
    return report(rows)


@dataclass(frozen=True, slots=True)
class RunRow:
    """A line of the table: a request and its result."""

    problem: ConvProblem
    prop: Prop
    outcome: Outcome | None
    error: str = ""

    @property
    def right(self) -> bool:
        return self.outcome is not None and self.outcome.right

    @property
    def verdict(self) -> str:
        return "right" if self.right else "WRONG" if self.outcome else "ERROR"


def table(
    work: Sequence[tuple[ConvProblem, Prop]],
    target: Target,
    schedule: Schedule | None = None,
    remark: str = "",
    epilogue: str = "",
) -> list[RunRow]:
    """Run everything, printing a row as soon as it is known. An error is a row too."""
    from tqdm import tqdm

    width = max([len(str(p)) for p, _ in work] + [7])
    print(f"{len(work)} kernels for {target} {remark}\n")
    print(
        f"{'problem':<{width}}  {'prop':<5}  {'max error':>9}  verdict {'time':>18}  schedule; kernel file"
    )
    rows = []
    with tqdm(
        total=len(work), disable=len(work) < LONG or not sys.stderr.isatty(), leave=False, file=sys.stderr
    ) as bar:
        for problem, prop in work:
            row = _row(problem, prop, target, schedule, epilogue if prop is not Prop.BWD_W else "")
            rows.append(row)
            with bar.external_write_mode():
                print(_line(row, width), flush=True)
            bar.update()
    return rows


def _row(
    problem: ConvProblem, prop: Prop, target: Target, schedule: Schedule | None, epilogue: str
) -> RunRow:
    try:
        return RunRow(problem, prop, execute(problem, prop, target, schedule, epilogue=epilogue))
    except TransconvError as error:
        return RunRow(problem, prop, None, str(error))
    except Exception as error:  # report it and continue with the other kernels
        told = str(error).partition("\n")[0]
        return RunRow(problem, prop, None, f"{type(error).__name__}: {told}")


def _line(row: RunRow, width: int) -> str:
    start = f"{row.problem!s:<{width}}  {row.prop.value:<5}  "
    made = row.outcome
    if made is None:
        lines = [x for x in row.error.splitlines() if x.strip()] or ["no message"]
        return f"{start}{'':>9}  {row.verdict:<7} {lines[0][:200]}"
    steps = made.compiled.steps
    file = steps[0].path.name if steps and steps[0].path else "(not kept)"
    more = f" and {len(steps) - 1} more" if len(steps) > 1 else ""
    spent = ""
    if made.milliseconds:
        rate = row.problem.flops() / made.milliseconds / 1e9
        spent = f"{made.milliseconds:.3f} ms {rate:6.1f} TF"
    wrong = f"  {made.problem};" if made.problem else ""
    return (
        f"{start}{made.max_error:>9.2g}  {row.verdict:<7} {spent:>18}{wrong}  "
        f"{made.compiled.schedule}; {file}{more}"
    )


def report(rows: Sequence[RunRow]) -> int:
    """The last lines, and the exit code."""
    bad = [r for r in rows if not r.right]
    folder = next(
        (s.path.parent for r in rows if r.outcome for s in r.outcome.compiled.steps if s.path), None
    )
    if folder:
        print(f"\nkernel files are in {folder}")
    wrong = sum(r.verdict == "WRONG" for r in bad)
    print(
        f"\n{len(rows) - len(bad)} of {len(rows)} right, each compared with the answer"
        + (f"; {wrong} wrong, {len(bad) - wrong} with errors" if bad else "")
    )
    for r in bad:
        print(f"  {r.verdict} {r.problem} {r.prop}: {r.error or (r.outcome and r.outcome.problem)}")
    return 1 if bad else 0


NETWORK = Path(__file__).parents[1] / "data" / "resnet50.txt"
SHOWN = "mb32ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc"
CHIPS = ("sm_90", "gfx942")
LONG = 4  # least number of rows for a progress bar


def add_demo(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "demo",
        "check a network's convolutions; show one problem stage by stage",
        "Runs ResNet-50's convolutions in all three directions with generated kernels and compares\n"
        "each with the exact answer; then shows one problem stage by stage and compiles it.",
        ("demo",),
        demo,
    )
    made.option("--network", "FILE", "a list of problems (default: ResNet-50)", str(NETWORK))


def demo(words: argparse.Namespace) -> int:
    started = time.perf_counter()
    where = device()
    problems = read_problems(words.network)
    if not problems:
        raise ProblemError(f"{words.network} contains no problem; expected at least one")
    if where == "cpu":
        problems = [one_image(p) for p in problems]
        print("No GPU: one image instead of the network's batch, in f32; all else as it is.")
    else:
        problems = [p.with_dtype("bf16").with_layout("nhwc") for p in problems]
    work = [(p, prop) for p in problems for prop in Prop]
    rows = table(work, detect(), None, f"on {described(where)}")
    failed = report(rows)
    excerpt()
    failed |= chips()
    right = sum(r.right for r in rows)
    print(
        f"\n{'=' * 100}\n{'FAILED' if failed else 'PASSED'}: {right} of {len(rows)} kernels of "
        f"{Path(words.network).stem} are right, in {time.perf_counter() - started:.0f} s"
    )
    return failed


def one_image(p: ConvProblem) -> ConvProblem:
    """The problem at batch 1."""
    return ConvProblem.make(
        1, p.ic, p.oc, p.i, p.k, p.stride, p.dilation, p.pad_lo, p.o, p.g, layout="nhwc", name=p.name
    )


def excerpt() -> None:
    """Print one problem as computation, a few stages, and source."""
    problem, target = ConvProblem.parse(SHOWN), TARGETS["sm_90"]
    print(f"\n{'=' * 100}\nStage by stage: the last of the four stride phases of\n")
    words: Any = SimpleNamespace(stage="compute", diff=False, schedule=None, epilogue="")
    pages = list(show.pages(problem, Prop.BWD_D, target, words))
    print(pages[0] + "\n" + pages[-1])
    for words.stage in (NAIVE.name, "lanewise", EMIT.name):
        print(list(show.pages(problem, Prop.BWD_D, target, words))[-1])
    print(f"\nEvery stage: transconv show {SHOWN.split()[0]} --prop bwd_d --stage all   (or --diff)")


def chips() -> int:
    """Compile the problem for two chips; 1 when one fails."""
    problem = ConvProblem.parse(SHOWN)
    jobs = [j for name in CHIPS for p in Prop for j in jobs_of(problem, p, TARGETS[name])]
    print(f"\n{'=' * 100}\nCompiled offline, {problem}\n")
    answers = compile_offline(jobs)
    print(resource_table(answers))
    return int(any(isinstance(a, CompileFailure) for a in answers))
