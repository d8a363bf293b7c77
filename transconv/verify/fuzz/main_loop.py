"""The fuzzer's main loop: runs trials in worker processes, collects results and shrinks failures.

Workers are forked from this process after it has imported everything and before anything touched a GPU,
so that one starts at once; each has cache folders of its own, as no trial needs a kernel again. One that
hangs or faults is killed and replaced; its trial has failed. What failed is shrunk by asking the same
workers about simpler trials, and printed as lines that repeat it. The report is updated during the run: it
is complete when the run is stopped by its time budget, Ctrl-C or SIGTERM, and names the next trial.

Every run begins with the corpus, the trials that have failed before: files of lines of convolutions
(conv_trial.py) and of computations (compute_trial.py), each after a comment that says what was wrong. The
test suite runs them too."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from transconv.ir import InterpError, VerifyError
from transconv.support import AddressError, ProblemError, TransconvError, files, knobs
from transconv.verify.benchdnn_run import packages
from transconv.verify.fuzz import compute_trial, conv_trial
from transconv.verify.fuzz.compute_trial import ComputeTrial
from transconv.verify.fuzz.conv_trial import ConvTrial, draw_trial
from transconv.verify.fuzz.trial import GOOD, Row, Trial, TrialKind, TrialRun, shrink
from transconv.verify.machine import Pool, Task, WorkerTask, code, is_fatal, terminable

KEPT_COMPILED = 64  # trials after which a worker's compiled kernels are thrown away
TRIMMED = 8  # the same where workers have one cache


def trial_of(line: str) -> ConvTrial | ComputeTrial:
    """The trial of a line. Raises a TransconvError, one sentence."""
    return (ComputeTrial if compute_trial.LINE.fullmatch(line.strip()) else ConvTrial).parse(line)


CONVOLUTIONS = TrialKind("convolutions", conv_trial.draw_trial, trial_of, corpus=True)
COMPUTES = TrialKind(
    "computes",
    lambda seed, number, target: compute_trial.draw_trial(seed, number, "pvc" if knobs.opencl() else ""),
    trial_of,
    corpus=True,
)
SMALL_TYPES = TrialKind("small-types", functools.partial(conv_trial.draw_trial, small=True), trial_of)
KINDS = {kind.name: kind for kind in (CONVOLUTIONS, COMPUTES, SMALL_TYPES)}


def work(*args: Any, kind: str = CONVOLUTIONS.name, **asked: Any) -> Row:
    """``run_trial`` of a kind, by its name."""
    return run_trial(KINDS[kind], *args, **asked)


def run_trial(
    kind: TrialKind,
    seed: int | str = 0,
    number: int = -1,
    line: str = "",
    way: str = "numpy",
    scratch: str = "",
    target: str = "sm_90",
    sets: int = 1,
) -> Row:
    """One trial, by its number or its line, in a worker. ``sets``: with how many sets of scales and zero
    points the kernels run, where they are arguments; each is a problem with its own check, counted in
    ``problems``.
    ``status`` is ``passed``, ``failed`` (with a reason), ``error`` (of our compiler or of Triton),
    ``refused`` or ``resources``. What ends the use of the GPU is raised: the worker is then lost."""
    start = time.perf_counter()
    try:
        trial: Trial = kind.read(line) if line else kind.drawn(seed, number, target)
    except Exception as error:  # to choose a schedule is a part of what is tested
        return {
            "line": "",
            "facts": {},
            "way": way,
            "status": "error",
            "seconds": 0.0,
            "reason": f"{number} of seed {seed} cannot be drawn: {type(error).__name__}: {error}",
        }
    row: Row = {"line": str(trial), "facts": trial.facts, "way": way}
    prepare(scratch, "triton" if way == "device" else "")
    knobs.adopt({knobs.passes.name: ",".join(f"{'+' if on else '-'}{n}" for n, on in trial.switches)})
    try:
        reason = trial.run(TrialRun(way, max(0, number) % (1 << 31), sets, scratch, target, row))
        row |= {"status": "failed" if reason else "passed", "reason": _short(reason)}
    except (AddressError, InterpError, VerifyError) as fault:
        row |= {"status": "failed", "reason": _short(f"{type(fault).__name__}: {fault}")}
    except Exception as error:
        if is_fatal(error):
            raise
        name = type(error).__name__
        status = (
            "refused"
            if isinstance(error, trial.refusals)
            else "resources"
            if name == "OutOfResources"
            else "error"
        )
        row |= {"status": status, "reason": _short(f"{name}: {error}")}
    row["seconds"] = round(time.perf_counter() - start, 4)
    return row


def _short(reason: str) -> str:
    return " ".join(reason.split())[:600]


@functools.cache
def _worker() -> dict[str, Any]:
    """Set a worker up, once: one thread, and no garbage collection of the objects that exist already."""
    import torch

    torch.set_num_threads(1)
    gc.freeze()
    if torch.cuda.is_available() and not knobs.interpret():
        torch.cuda.set_device(os.getpid() % torch.cuda.device_count())
    return {"trials": 0}


def prepare(scratch: str, launchers: str = "") -> None:
    """Give the worker a cache folder of its own, and empty it from time to time. ``launchers``: a folder
    in ``scratch`` for a cache of Triton that all workers have, where launchers stay: a C compiler makes
    one in more time than Triton takes for a small kernel, and kernels of as many arguments have the same
    (12 in 81 kernels)."""
    mine = _worker()
    if knobs.given("TRITON_INSTRUMENTATION_MODE"):  # ConSan keeps what it knows in memory of the launch
        import torch
        import triton

        triton.set_allocator(
            lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda")
        )
    warnings.filterwarnings("error", "tl.where with a non-boolean condition")  # it selects wrongly
    if scratch:
        folder = f"{scratch}/{os.getpid()}"
        if mine["trials"] % KEPT_COMPILED == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(f"{folder}/transconv", mode=0o700, exist_ok=True)
        triton = f"{scratch}/{launchers}" if launchers else f"{folder}/triton"
        os.makedirs(triton, exist_ok=True)
        if launchers and mine["trials"] % TRIMMED == 0:
            without_kernels(triton)
        knobs.adopt({"TRITON_CACHE_DIR": triton, knobs.cache.name: f"{folder}/transconv"})
    mine["trials"] += 1


def without_kernels(folder: str, age_s: float = 10.0) -> None:
    """Remove compiled kernels from a cache of Triton, but for those that may still be written."""
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError):  # another worker removes it
            if time.time() - entry.stat().st_mtime > age_s and any(
                name.endswith((".cubin", ".hsaco")) for name in os.listdir(entry.path)
            ):
                shutil.rmtree(entry.path, ignore_errors=True)


REPEAT = "transconv fuzz --line='{line}'"
EVERY_S = 15.0  # between two reports of how far it is


@dataclass(frozen=True, slots=True)
class FuzzPlan:
    """The plan of a run: ``number`` trials from ``first`` on, each at most ``limit_s`` seconds; no trial
    starts after ``budget_s``. ``share``: of interpreted trials, those in Triton's interpreter.
    ``lines`` are run before, and with ``known`` the corpus. ``shrunk``: failures made simpler.
    ``kind``: what trials are of; ``sets``: with how many sets of scales and zero points each runs."""

    number: int
    seed: int = 0
    jobs: int = 2
    budget_s: float = float("inf")
    target: str = "sm_90"
    interpreted: bool = False
    share: float = 0.2
    first: int = 0
    limit_s: float = 60.0
    shrunk: int = 4
    known: bool = True
    lines: tuple[str, ...] = ()
    kind: TrialKind = CONVOLUTIONS
    sets: int = 1

    def way(self, number: int) -> str:
        """How a trial is executed: of every 100 interpreted ones, so many by Triton."""
        if not self.interpreted:
            return "opencl" if knobs.opencl() else "device"
        return "triton" if number * 37 % 100 < self.share * 100 else "numpy"

    def tasks(self) -> Iterator[Task]:
        """The lines, the corpus, the trials."""
        known = corpus() if self.known and self.kind.corpus else ()
        given = [*self.lines, *(str(e.trial) for e in known)]
        for at, line in enumerate(given):
            for way in ("numpy", "triton") if self.interpreted else (self.way(at),):
                yield self._task({"line": line, "way": way, "number": at})
        for n in range(self.first, self.first + self.number):
            yield self._task(
                {
                    "seed": self.seed,
                    "number": n,
                    "way": self.way(n),
                    **({"sets": self.sets} if self.sets > 1 else {}),
                }
            )

    def _task(self, payload: Row) -> Task:
        kind = {"kind": self.kind.name} if self.kind.name in KINDS else {}
        return Task("fuzz", {"target": self.target, **kind, **payload}, self.limit_s)


@dataclass(slots=True)
class Tally:
    """The outcomes of trials: rows of those that did not pass, and counts of all by their properties."""

    asked: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    facts: dict[str, dict[str, Counter[str]]] = field(default_factory=dict)
    bad: list[Row] = field(default_factory=list)
    large: list[Row] = field(default_factory=list)  # trials that exceed a resource of the device
    ended: set[int] = field(default_factory=set)  # numbers of drawn trials
    refusals: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)  # what computed the answers
    seconds: float = 0.0
    spent: Counter[str] = field(default_factory=Counter)
    silent: int = 0  # answers of mostly zeros
    problems: int = 0  # of trials with several sets of scales and zero points, each

    def add(self, row: Row) -> None:
        status = row["status"]
        self.asked += 1
        self.problems += row.get("problems", 1)
        self.statuses[status] += 1
        asked = {**row["facts"], "way": row["way"], "device": row.get("device", "none")}
        for name, word in asked.items():
            self.facts.setdefault(name, {}).setdefault(word, Counter())[status] += 1
        if "answers" in row:
            self.answers[row["answers"]] += 1
        for name in ("seconds", "generate_s", "compile_s"):
            self.spent[name] += row.get(name, 0.0)
        self.spent["kernels"] += row.get("kernels", 0)
        self.silent += status == "passed" and row.get("nonzero", 1.0) < 0.3
        if "number" in row:
            self.ended.add(row["number"])
        if status not in GOOD:
            self.bad.append(row)
        elif status != "passed":
            self.refusals[row["reason"][:160]] += 1
            if status == "resources":
                self.large.append({"line": row["line"], "reason": row["reason"]})

    @property
    def ok(self) -> bool:
        return not self.bad

    def describe(self) -> list[str]:
        """The last lines of a run."""
        said = ", ".join(f"{n} {word}" for word, n in self.statuses.most_common())
        per = self.spent["seconds"] / max(1, self.asked)
        parts = [
            f"{self.spent[name] / max(1, self.asked) * 1e3:.0f} ms {what}"
            for name, what in (("generate_s", "to generate"), ("compile_s", "to compile and start"))
            if self.spent[name]
        ]
        several = f" of {self.problems} problems" if self.problems > self.asked else ""
        rates = f"{self.rate:.1f}/s" + (
            f", {self.problems / self.seconds:.0f} problems/s" if several and self.seconds else ""
        )
        lines = [
            f"{self.asked} trials{several} in {self.seconds:.0f} s ({rates}): {said or 'none'}",
            f"  {self.spent['kernels']:.0f} kernels, {per * 1e3:.0f} ms a trial"
            + (f", of them {', '.join(parts)}" if parts else "")
            + f"; {self.silent} answers were mostly zeros",
        ]
        lines += [f"  {n} beside {named}" for named, n in self.answers.most_common()]
        lines += [f"  {n} times {reason}" for reason, n in self.refusals.most_common(5)]
        return lines

    @property
    def rate(self) -> float:
        return self.asked / self.seconds if self.seconds else 0.0

    def next(self, first: int) -> int:
        """The first number of a drawn trial, from ``first`` on, that has not ended."""
        return next(n for n in count(first) if n not in self.ended)

    def to_json(self) -> dict[str, object]:
        """Everything worth keeping: counts by dimension and status, lines of what is not good."""
        return {
            "asked": self.asked,
            "problems": self.problems,
            "seconds": round(self.seconds, 1),
            "per second": round(self.rate, 2),
            "statuses": dict(self.statuses),
            "answers": dict(self.answers),
            "mostly zeros": self.silent,
            "spent": {k: round(v, 1) for k, v in self.spent.items()},
            "counts": {
                name: {word: dict(c) for word, c in sorted(words.items())}
                for name, words in sorted(self.facts.items())
            },
            "refusals": dict(self.refusals.most_common(50)),
            "out of resources": self.large,
            "not good": self.bad,
        }


class Campaign:
    """One run of the fuzzer. ``say`` prints a line; the report is kept in ``json_file``."""

    def __init__(self, plan: FuzzPlan, json_file: Path | None = None) -> None:
        self.plan, self.json_file = plan, json_file
        self.tally = Tally()
        self.started = self.told = time.monotonic()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def run(self) -> Tally:
        """Run the trials, then shrink what failed, within the time."""
        imported(self.plan.kind.worker)
        with scratch() as folder:
            with closing(self.rows(self.plan.tasks(), folder)) as rows:
                for row in rows:
                    self.tally.add(row)
                    self.tally.seconds = time.monotonic() - self.started
                    if row["status"] not in GOOD:
                        self.say(f"{row['status']}: {row['reason'][:400]}\n    {repeated(row)}")
                    self._tell()
            for row in self.simplest_reasons():
                if self.left() > 0:
                    self.shrink(row, folder)
        return self.tally

    def left(self) -> float:
        return self.plan.budget_s - (time.monotonic() - self.started)

    def rows(self, tasks: Iterable[Task], folder: str) -> Generator[Row, None, None]:
        """A row for every task that ran; a worker that was lost makes one too. Those of drawn trials
        have numbers."""
        group = WorkerTask(self.plan.kind.worker, self.plan.jobs)
        pool = Pool({"fuzz": group}, start="fork")
        given = (Task(t.group, {**t.payload, "scratch": folder}, t.limit_s) for t in tasks)
        for task, row in pool.run(given, self.left()):
            if row.get("error") != "out of budget":
                drawn = {"number": task.payload["number"]} if "seed" in task.payload else {}
                yield drawn | (row if "error" not in row else self.lost(task.payload, row))

    def lost(self, payload: Row, row: Row) -> Row:
        """The row of a trial whose worker did not answer."""
        kind = self.plan.kind
        trial = (
            kind.read(payload["line"])
            if payload.get("line")
            else kind.drawn(payload["seed"], payload["number"], payload["target"])
        )
        known = row["error"] in ("timeout", "crash")
        return {
            "line": str(trial),
            "facts": trial.facts,
            "way": payload["way"],
            "status": row["error"] if known else "crash",
            "reason": "" if known else " ".join(row["error"].split())[:600],
        }

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self.told >= EVERY_S:
            self.told = now
            rate = self.tally.asked / (now - self.started)
            self.say(f"{self.tally.asked} trials, {rate:.1f}/s, {len(self.tally.bad)} not good")
            self.report()

    def report(self) -> dict[str, object]:
        """Write the report, atomically."""
        plan = self.plan
        told = {
            "seed": plan.seed,
            "first": plan.first,
            "wanted": plan.number,
            "next": self.tally.next(plan.first),
            "target": plan.target,
            "jobs": plan.jobs,
            "interpreted": plan.interpreted,
            "versions": packages(),
            **self.tally.to_json(),
        }
        if self.json_file is not None:
            files.replace_named(self.json_file, json.dumps(told, indent=1) + "\n")
        return told

    def simplest_reasons(self) -> list[Row]:
        """Failures worth shrinking: one of each kind, as far as reasons tell."""
        kinds: dict[str, Row] = {}
        for row in self.tally.bad:
            if row["line"]:
                kinds.setdefault(kind_of(row), row)
        return list(kinds.values())[: self.plan.shrunk]

    def shrink(self, row: Row, folder: str) -> None:
        """Find a simpler trial that fails in the same way; it is added to the row."""
        kind = kind_of(row)

        def fails(tried: Sequence[Trial]) -> int | None:
            tasks = [
                Task(
                    "fuzz", {"line": str(t), "way": row["way"], "number": at}, min(self.plan.limit_s, 30.0)
                )
                for at, t in enumerate(tried)
            ]
            places = {str(t): at for at, t in enumerate(tried)}
            bad = [places[r["line"]] for r in self.rows(tasks, folder) if kind_of(r) == kind]
            return min(bad, default=None)

        simple, asked = shrink(self.plan.kind.read(row["line"]), fails)
        row["shrunk"] = str(simple)
        self.say(
            f"the simplest of {asked} trials that also {kind}:\n    "
            f"{repeated({**row, 'line': str(simple)})}"
        )
        if program := simple.program():
            self.say("as a program:\n" + program)


def repeated(row: Row) -> str:
    """The command that repeats a trial."""
    return REPEAT.format(line=row["line"]) + ("" if row["way"] == "device" else " --interpreter")


def kind_of(row: Row) -> str:
    """A failure in a few words, which shrinking must preserve."""
    first = row.get("reason", "").split(": ")[0]
    kind = first if first.replace(".", "").isidentifier() and row["status"] == "error" else ""
    return f"{row['status']} {kind}".strip()


def imported(worker: str) -> None:
    """Import what workers need before they are forked. Nothing here may touch the GPU, or start
    threads, because a fork does not copy them."""
    import torch  # noqa: F401
    import triton  # noqa: F401

    from transconv.passes import lower
    from transconv.verify import case, judgement  # noqa: F401

    trial = next(t for n in range(100) if (t := draw_trial(0, n)).schedule is not None)
    assert trial.schedule is not None
    lower(trial.computes[0], trial.schedule, trial.chip, "first")
    importlib.import_module(worker.split(":")[0])
    gc.collect()
    gc.freeze()


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for compiled kernels, in memory where there is such a place; gone at the end."""
    within = "/dev/shm" if not files.why_unwritable(Path("/dev/shm/x")) else None
    return tempfile.TemporaryDirectory(prefix="transconv-fuzz-", dir=within, ignore_cleanup_errors=True)


def fuzz(plan: FuzzPlan, json_file: Path | None = None) -> int:
    """Run a plan; 0 if nothing failed, 1 if something did, 130 or 143 if Ctrl-C or SIGTERM ended it
    early. Prints as it goes."""
    if plan.interpreted:
        knobs.use_interpreter()
    campaign = Campaign(plan, json_file)
    tally, stopped = campaign.tally, 0
    try:
        with terminable():
            campaign.run()
    except KeyboardInterrupt as stop:
        stopped = code(stop)
        campaign.say("stopped")
    told = campaign.report()
    for line in tally.describe():
        campaign.say(line)
    if len(tally.ended) < plan.number:
        campaign.say(
            f"  {len(tally.ended)} of {plan.number} drawn trials have ended: "
            f"go on with --seed {plan.seed} --first {told['next']}"
        )
    for row in tally.bad:
        print(row.get("shrunk", row["line"]), file=sys.stderr if tally.asked > 1 else sys.stdout)
    return stopped or (0 if tally.ok else 1)


FOLDER = Path(__file__).parent / "corpus"


@dataclass(frozen=True, slots=True)
class Entry:
    """A trial and where it is written: ``pipeline.txt:12``."""

    place: str
    trial: Any


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that say a trial, and their numbers. Raises OSError."""
    for number, text in enumerate(
        files.read_named(path, "lines as fuzz --line takes them").splitlines(), 1
    ):
        line = text.partition("#")[0].strip()
        if line:
            yield number, line


def read(path: Path, trial: Callable[[str], Any] = trial_of) -> Iterator[Entry]:
    """The trials of a file; ``trial``: reads a line. Raises ProblemError naming file and line, OSError."""
    for number, line in lines_of(path):
        try:
            yield Entry(f"{path.name}:{number}", trial(line))
        except (TransconvError, ValueError) as error:
            raise ProblemError(f"{path}:{number}: {error}") from error


def corpus() -> list[Entry]:
    """All trials of the corpus, in the order of file names and lines."""
    return [entry for path in sorted(FOLDER.glob("*.txt")) for entry in read(path)]
