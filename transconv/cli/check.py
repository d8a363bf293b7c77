"""``check``: problems in benchdnn's syntax, each compared with the exact answer; docs/checking.md.

On a GPU every problem runs in a worker process with a time limit, elsewhere in Triton's interpreter
in this process (with ``--workers`` in others)."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from transconv.cli.arguments import computations, options, ranges
from transconv.compute import Compute
from transconv.conv import ConvProblem, Prop, any_size, marked
from transconv.support import ComputeError, knobs

if TYPE_CHECKING:
    from transconv.verify.benchdnn_job import BenchdnnJob
    from transconv.verify.benchdnn_requests import BenchdnnRequest
    from transconv.verify.benchdnn_run import BenchdnnReport, RequestOutcome

ABOUT = """\
Runs problems given in oneDNN's benchdnn syntax, batch files included, or files with a computation
as text, and compares every result with the exact answer: bit for bit on small integers, within an
error bound on random data.
An option applies to the problems after it; commas separate alternatives, all combinations run.

options of problems (defaults after =):
  --dir=FWD_B       FWD_B (with bias) FWD_D FWD_I BWD_D BWD_W
  --dt=f32          f16 bf16 f32 f64, three as src:wei:dst, or tf32
  --tag=any         layout of the three tensors: abx (nchw), axb (nhwc); or --stag --wtag --dtag
  --strides=        SRC:WEI:DST, numbers joined by x
  --mb=0            another batch size
  --bia-dt=f32  --attr-post-ops=relu+sum  --attr-fpmath=strict  --attr-deterministic=false
  --batch=FILE  --reset  --match=REGEX  --mode=C (List Init Run Correctness Bitwise)
  --engine=auto (gpu, cpu: Triton's interpreter, numpy: that of the IR, opencl: compiled for an Intel GPU
                and executed on the CPU)  --start=0
options of problems that benchdnn does not have:
  --data=exact+float  exact, float, or both
  --misalign=0      tensors begin this many elements after a multiple of 16 bytes
  --strided=        rows (slices of larger tensors), steps (every second element), expanded
  --epilogue=       such as bias+res+silu, also for BWD_D
  --target=         generate kernels for this chip; without a GPU they are interpreted
  --schedule=       one schedule for all kernels of a problem, or one for each, joined by ' ;; '
  --seed=0          the seed of the data
options of computations:
  --gradient=       the kernels of the gradient of this tensor, or of all, and its slopes
"""


def add_to(verbs: Any) -> None:
    # All words are passed on unchanged: the order of benchdnn's options matters.
    made = verbs.add_parser(
        "check",
        help="run problems in benchdnn's syntax and check the results",
        add_help=False,
        prefix_chars="\0",
    )
    made.add_argument("words", nargs="*")
    made.set_defaults(action=run)


def parser() -> argparse.ArgumentParser:
    """The options of the whole run; other words are passed to the driver."""
    made = options.Parser(
        prog="transconv check",
        description=ABOUT,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="transconv check [options] PROBLEM...",
        epilog="examples:\n"
        + "\n".join(
            f"  transconv {e}"
            for e in (
                "check mb2ic8ih14oc16oh14kh3ph1",
                "check --dir=FWD_D,BWD_D,BWD_W --dt=f16,bf16 --tag=abx,axb --batch=shapes_basic",
                "check --schedules=all --target=sm_90 --dt=f16 --tag=axb mb1ic16ih8oc32oh8kh3ph1",
            )
        ),
    )
    made.option(
        "--schedules",
        "best|N|all",
        "check the plan that a user gets, the N best schedules, or all that may be chosen",
        "best",
        _schedules,
        ["--configs"],
    )
    made.option("--json", "FILE", "write all results as JSON", None, ranges.output)
    made.flag("--strict", "exit with 1 also if a problem was not checked")
    made.flag("--quiet", "do not print problems that passed")
    workers = ranges.at_least(0, ranges.PROCESSES)
    made.option(
        "--workers", "N", "worker processes (default: 8 on a GPU, none in the interpreter)", None, workers
    )
    made.option("--limit", "S", "seconds for one problem in a worker", 120, ranges.limit)
    budget = "seconds for the whole run; remaining problems are SKIPPED"
    made.option("--time-budget", "S", budget, float("inf"), ranges.seconds)
    made.option("--memory", "GB", "GPU memory that all workers share", 60, ranges.gigabytes)
    made.option(
        "--shard", "I/N", "check every N-th problem, beginning with number I (from 0)", (0, 1), ranges.part
    )
    return made


def run(words: argparse.Namespace) -> int:
    from transconv.verify.benchdnn_job import apart
    from transconv.verify.benchdnn_requests import Driver

    own, rest = parser().parse_known_args(words.words)
    texts = [w for w in rest if not w.startswith("-")]
    if found := _computations(texts):
        if "--engine=opencl" in rest:
            rest.remove("--engine=opencl")
            knobs.use_opencl()
        said = dict(w.removeprefix("--").split("=", 1) for w in rest if w.startswith("--") and "=" in w)
        own.target, own.sizes, own.schedule, of = map(said.pop, OF_TEXTS, [None] * len(OF_TEXTS))
        if left := [*said, *(w for w in rest if w.startswith("-") and "=" not in w)]:
            raise ComputeError(
                f"--{left[0].lstrip('-')} is not for {found[0].name}, whose text says it; "
                f"expected some of {' '.join(f'--{o}=' for o in OF_TEXTS)}"
            )
        computations.expect_sizes(own, found)
        if of:
            return max(computations.check_gradients(c, of, own) for c in found)
        codes = [computations.check(c, own) for c in found]
        if computations.has_sizes(texts):
            codes.append(computations.beside_torch(texts, own))
        return max(codes)
    driver = Driver()
    asked = (each for request in driver.requests(rest) for each in apart(request))
    requests = list(asked)[own.shard[0] :: own.shard[1]]
    if not requests:
        raise ValueError(
            "no problem was given; expected one such as mb2ic8ih14oc16oh14kh3ph1, or --batch=FILE"
        )
    report = check(requests, own, driver.remarks)
    print("\n".join(report.summary()), flush=True)
    if own.json:
        report.write(own.json, shlex.join(["transconv", "check", *words.words]))
    return report.code(own.strict)


OF_TEXTS = ("target", "sizes", "schedule", "gradient")  # options for computations that are given as text


def _computations(texts: Sequence[str]) -> list[Compute]:
    """The computations that words name; of a convolution whose sizes are arguments, all directions."""
    if not computations.has_sizes(texts):
        return computations.given(texts, sizes=True)
    text, names = marked(" ".join(texts))
    return [c for prop in Prop for c in any_size(ConvProblem.parse(text), prop, names)]


def _schedules(text: str) -> str:
    if text not in ("best", "all"):
        try:
            ranges.at_least(1, 10**6)(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, nor best or all") from None
    return text


def check(
    requests: Sequence[BenchdnnRequest], own: argparse.Namespace, remarks: dict[str, str] | None = None
) -> BenchdnnReport:
    """Carry out requests and print them as they end. ``own``: the parsed options of the run."""
    from tqdm import tqdm

    from transconv.verify.benchdnn_run import BenchdnnReport
    from transconv.verify.machine import code, terminable

    report = BenchdnnReport(remarks or {}, asked=len(requests))
    with tqdm(total=len(requests), unit="problem", disable=None, leave=False, file=sys.stderr) as bar:

        def ended(result: RequestOutcome) -> None:
            report.results.append(result)
            if not (own.quiet and result.status in ("PASSED", "LISTED")):
                with bar.external_write_mode(file=sys.stdout):
                    print("\n".join(result.lines()), flush=True)
            bar.update()

        try:
            with terminable():
                _carry_out(requests, own, ended)
        except KeyboardInterrupt as stop:
            report.stopped = code(stop)
    return report


def _carry_out(
    requests: Sequence[BenchdnnRequest], own: argparse.Namespace, ended: Callable[[RequestOutcome], None]
) -> None:
    """Requests that do not apply here first, then the others as they end."""
    from transconv.verify.benchdnn_job import RefusedRequest, job_of
    from transconv.verify.benchdnn_run import RequestOutcome

    todo: list[tuple[int, BenchdnnRequest, BenchdnnJob]] = []
    for place, request in enumerate(requests):
        try:
            job = job_of(request, own.schedules)
        except RefusedRequest as refused:
            ended(RequestOutcome(place, request, refused.status, refused.reason))
            continue
        if request.mode == "L":
            ended(RequestOutcome(place, request, "LISTED"))
        else:
            todo.append((place, request, job))
    with closing(_rows(todo, own)) as rows:
        for place, request, row in rows:
            ended(RequestOutcome(place, request, row["status"], row["reason"], row))


def _rows(
    todo: Sequence[tuple[int, BenchdnnRequest, BenchdnnJob]], own: argparse.Namespace
) -> Generator[tuple[int, BenchdnnRequest, dict[str, Any]], None, None]:
    """The rows of all jobs, as they end: from workers, or from this process."""
    if not todo:
        return
    where = _where({request.engine for _, request, _ in todo})
    workers = own.workers if own.workers is not None else 8 if where == "cuda" else 0
    if workers == 0:
        yield from _here(todo, own.time_budget)
        return
    from transconv.verify.judgement import weight
    from transconv.verify.machine import Pool, Task, WorkerTask

    environment = {} if where == "cuda" else {knobs.interpret.name: "1"}
    environment["OMP_NUM_THREADS"] = "1"
    pool = Pool(
        {"check": WorkerTask("transconv.verify.benchdnn_run:work", workers, environment)},
        capacity=own.memory * 1e9,
    )
    tasks = {
        id(task): (task, place, request)
        for task, place, request in (
            (Task("check", asdict(job), own.limit, weight(ConvProblem.parse(job.problem))), place, request)
            for place, request, job in todo
        )
    }
    with closing(pool.run([t for t, _, _ in tasks.values()], own.time_budget)) as rows:
        for task, row in rows:
            _, place, request = tasks.pop(id(task))
            yield place, request, answer(row)
    for _, place, request in tasks.values():
        yield place, request, answer({"error": "out of budget"})


def answer(row: dict[str, Any]) -> dict[str, Any]:
    """A worker's row with a status, also where the worker crashed or hung."""
    error = row.get("error")
    if error is None:
        return row
    if error == "out of budget":
        return row | {"status": "SKIPPED", "reason": "the time budget was spent"}
    words = {"timeout": "the time limit was reached (--limit)", "crash": "the process died"}
    return row | {"status": "FAILED", "reason": words.get(error, " ".join(error.split())[:500])}


def _here(
    todo: Sequence[tuple[int, BenchdnnRequest, BenchdnnJob]], budget: float
) -> Iterator[tuple[int, BenchdnnRequest, dict[str, Any]]]:
    from transconv.verify.benchdnn_run import work

    end = time.monotonic() + budget
    for place, request, job in todo:
        if time.monotonic() > end:
            yield place, request, answer({"error": "out of budget"})
            continue
        try:
            row = work(**asdict(job))
        except Exception as error:  # report it and continue with the other problems
            row = {"error": f"{type(error).__name__}: {error}"}
        yield place, request, answer(row)


def _where(engines: set[str]) -> str:
    """``cuda`` or ``cpu``. Raises ValueError for an engine that this machine lacks."""
    from transconv.verify.machine import device

    if len(engines) > 1:
        raise ValueError("several engines in one run; expected the same --engine for all problems")
    engine = engines.pop()
    if engine in ("cpu", "numpy"):
        knobs.use_interpreter()
    if engine == "opencl":
        knobs.use_opencl()
    where = device()
    if engine == "gpu" and where != "cuda":
        raise ValueError("--engine=gpu: there is no GPU here")
    return where
