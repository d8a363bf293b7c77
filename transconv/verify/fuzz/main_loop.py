"""The fuzzer's main loop: runs trials, collects results and shrinks failures.

Trials run in worker processes forked from this one after it has imported everything and before
anything touched a GPU, so a worker starts at once. One that hangs or faults is killed and
replaced; its trial has failed. What failed is shrunk by asking the same workers about simpler
trials, and printed as lines that repeat it. The report is updated during the run: it is complete when
the run is stopped by its time budget, Ctrl-C or SIGTERM, and names the next trial.

Also here: the corpus: fuzzer trials that have failed, as lines in the files of the folder ``corpus``.

A file holds lines of convolutions (see fuzz/conv_trial.py) and of computations (see
fuzz/compute_trial.py), each after a comment that says what was wrong. Every run of the fuzzer begins with
them, and so does the test suite.
"""

from __future__ import annotations

import gc
import importlib
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from transconv import knobs
from transconv.disk_cache import read_named, replace_named
from transconv.errors import ProblemError, TransconvError
from transconv.verify.benchdnn.run import packages
from transconv.verify.fuzz import trial_run
from transconv.verify.fuzz.conv_trial import draw_trial
from transconv.verify.fuzz.shrinker import shrink
from transconv.verify.fuzz.trial import GOOD, Row, Trial, TrialKind
from transconv.verify.fuzz.trial_run import CONVOLUTIONS, KINDS
from transconv.verify.pool import Pool, Task, WorkerTask, code, terminable

REPEAT = "python -m transconv fuzz --line='{line}'"
EVERY_S = 15.0  # between two reports of how far it is


@dataclass(frozen=True, slots=True)
class FuzzPlan:
    """What to do. ``number`` trials from ``first`` on, each at most ``limit_s`` seconds; no trial
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
            return "device"
        return "triton" if number * 37 % 100 < self.share * 100 else "numpy"

    def tasks(self) -> Iterator[Task]:
        """The lines, the corpus, the trials."""
        known = corpus() if self.known and self.kind.corpus else ()
        given = [*self.lines, *(str(e.trial) for e in known)]
        for at, line in enumerate(given):
            for way in ("numpy", "triton") if self.interpreted else ("device",):
                yield self._task({"line": line, "way": way, "number": at})
        for n in range(self.first, self.first + self.number):
            yield self._task({"seed": self.seed, "number": n, "way": self.way(n),
                              **({"sets": self.sets} if self.sets > 1 else {})})

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
        parts = [f"{self.spent[name] / max(1, self.asked) * 1e3:.0f} ms {what}" for name, what in
                 (("generate_s", "to generate"), ("compile_s", "to compile and start"))
                 if self.spent[name]]
        several = f" of {self.problems} problems" if self.problems > self.asked else ""
        rates = f"{self.rate:.1f}/s" + (f", {self.problems / self.seconds:.0f} problems/s"
                                       if several and self.seconds else "")
        lines = [f"{self.asked} trials{several} in {self.seconds:.0f} s ({rates}): "
                 f"{said or 'none'}",
                 f"  {self.spent['kernels']:.0f} kernels, {per * 1e3:.0f} ms a trial"
                 + (f", of them {', '.join(parts)}" if parts else "")
                 + f"; {self.silent} answers were mostly zeros"]
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
        return {"asked": self.asked, "problems": self.problems, "seconds": round(self.seconds, 1),
                "per second": round(self.rate, 2),
                "statuses": dict(self.statuses), "answers": dict(self.answers),
                "mostly zeros": self.silent,
                "spent": {k: round(v, 1) for k, v in self.spent.items()},
                "counts": {name: {word: dict(c) for word, c in sorted(words.items())}
                           for name, words in sorted(self.facts.items())},
                "refusals": dict(self.refusals.most_common(50)), "out of resources": self.large,
                "not good": self.bad}


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
        trial = kind.read(payload["line"]) if payload.get("line") else kind.drawn(
            payload["seed"], payload["number"], payload["target"])
        known = row["error"] in ("timeout", "crash")
        return {"line": str(trial), "facts": trial.facts, "way": payload["way"],
                "status": row["error"] if known else "crash",
                "reason": "" if known else " ".join(row["error"].split())[:600]}

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
        told = {"seed": plan.seed, "first": plan.first, "wanted": plan.number,
                "next": self.tally.next(plan.first), "target": plan.target, "jobs": plan.jobs,
                "interpreted": plan.interpreted,
                "versions": packages(),
                **self.tally.to_json()}
        if self.json_file is not None:
            replace_named(self.json_file, json.dumps(told, indent=1) + "\n")
        return told

    def simplest_reasons(self) -> list[Row]:
        """Failures worth shrinking: one of each kind, as far as reasons tell."""
        kinds: dict[str, Row] = {}
        for row in self.tally.bad:
            if row["line"]:
                kinds.setdefault(kind_of(row), row)
        return list(kinds.values())[:self.plan.shrunk]

    def shrink(self, row: Row, folder: str) -> None:
        """Find a simpler trial that fails in the same way; it is added to the row."""
        kind = kind_of(row)

        def fails(tried: Sequence[Trial]) -> int | None:
            tasks = [Task("fuzz", {"line": str(t), "way": row["way"], "number": at},
                          min(self.plan.limit_s, 30.0)) for at, t in enumerate(tried)]
            places = {str(t): at for at, t in enumerate(tried)}
            bad = [places[r["line"]] for r in self.rows(tasks, folder) if kind_of(r) == kind]
            return min(bad, default=None)

        simple, asked = shrink(self.plan.kind.read(row["line"]), fails)
        row["shrunk"] = str(simple)
        self.say(f"the simplest of {asked} trials that also {kind}:\n    "
                 f"{repeated({**row, 'line': str(simple)})}")
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


class scratch:
    """A folder for compiled kernels, in memory where there is such a place; gone at the end."""

    def __enter__(self) -> str:
        memory = Path("/dev/shm")
        within = str(memory) if memory.is_dir() and _is_writable(memory) else None
        self.folder = tempfile.mkdtemp(prefix="transconv-fuzz-", dir=within)
        return self.folder

    def __exit__(self, *problem: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


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
        campaign.say(f"  {len(tally.ended)} of {plan.number} drawn trials have ended: "
                     f"go on with --seed {plan.seed} --first {told['next']}")
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
    for number, text in enumerate(read_named(path, "lines as fuzz --line takes them").splitlines(), 1):
        line = text.partition("#")[0].strip()
        if line:
            yield number, line


def read(path: Path, trial: Callable[[str], Any] = trial_run.read) -> Iterator[Entry]:
    """The trials of a file; ``trial``: reads a line. Raises ProblemError naming file and line, OSError."""
    for number, line in lines_of(path):
        try:
            yield Entry(f"{path.name}:{number}", trial(line))
        except (TransconvError, ValueError) as error:
            raise ProblemError(f"{path}:{number}: {error}") from error


def corpus() -> list[Entry]:
    """All trials of the corpus, in the order of file names and lines."""
    return [entry for path in sorted(FOLDER.glob("*.txt")) for entry in read(path)]
