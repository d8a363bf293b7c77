"""A tuning session: runs trials in worker processes, logs each, and saves the fastest schedules.

Compiles run in several processes, measurements in one, each with a time limit. Several workloads
are tuned at a time, so that there is always something to compile while a workload's next trials wait
for its first results. Trials in the log are not measured again. Progress is a bar on a terminal, a line
from time to time in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from transconv.compute import Compute, Workload
from transconv.schedule import Schedule
from transconv.selection import TuningRecord, choice, tuning_db
from transconv.support import TransconvError, triton_version
from transconv.target import Target
from transconv.tuning.search import ScheduleTrial, Search
from transconv.tuning.table import CsvTable, number, read
from transconv.verify.machine import Pool, Task, WorkerTask

COLUMNS = tuple(
    "layer layer_kind layer_direction problem direction behind dtype layout machine trial origin rank "
    "schedule estimate us p20 p80 method verdict reason max_err lower_s triton_s device torch triton "
    "lowering".split()
)
FORMER = {
    "kind": "layer_kind",
    "direction": "layer_direction",
    "prop": "direction",
    "epilogue": "behind",
    "config": "schedule",
}  # names of columns in older logs
NAME = "layer"  # the column of a workload's name
WORKLOAD = ("problem", "direction", "behind")  # the columns from which a workload is read
SECONDS = ("lower_s", "triton_s")
KEY = (*WORKLOAD, "machine", "schedule", "triton", "lowering")

WORKERS = "transconv.tuning.measure"

Found = dict[str, Any]


@dataclass(slots=True)
class Limits:
    """Bounds of a session. ``trials`` for each workload; seconds: ``trial_s`` for one
    measurement, ``compile_s`` for one compile, ``total_s`` after which nothing starts;
    ``budget_ms`` of timing for each trial; ``jobs`` processes that compile."""

    trials: int = 16
    trial_s: float = 30.0
    compile_s: float = 60.0
    total_s: float = float("inf")
    budget_ms: float = 30.0
    jobs: int = 1


@dataclass(slots=True)
class TuningJob:
    """A workload to tune; ``about``: columns of the log that only people read."""

    workload: Workload
    about: dict[str, str] = field(default_factory=dict)
    search: Search | None = None
    tried: int = 0  # trials with a right result
    ended: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        return self.workload.text, self.workload.direction, self.workload.behind

    @property
    def name(self) -> str:
        """The name for people."""
        return self.about.get(NAME, "")

    def phases(self) -> list[Compute]:
        """The computations that share one schedule; empty where there is nothing to compute."""
        return [a for a in self.workload.computations if all(x.size for x in a.axes)]

    def seeds(self, phases: Sequence[Compute], target: Target) -> list[Schedule]:
        """The schedules that the database has."""
        first = choice.ranked(phases[0], target, self.workload)[0]
        return [] if first.row is None else [first.schedule]


class Session:
    """Tunes jobs on a target; ``versions``: columns device and torch of the log; ``workers``: the
    module whose functions the processes run; ``pool``: what runs trials, here or over several ranks."""

    def __init__(
        self,
        jobs: Iterable[TuningJob],
        target: Target,
        limits: Limits,
        log: CsvTable,
        versions: dict[str, str],
        explore: str = "near",
        say: Callable[[str], None] | None = None,
        workers: str = WORKERS,
        pool: Callable[[dict[str, WorkerTask]], Pool] = Pool,
    ) -> None:
        self.jobs = list({job.key: job for job in jobs}.values())
        self.target, self.limits, self.log, self.explore = target, limits, log, explore
        self.versions = {
            **versions,
            "triton": triton_version(),
            "lowering": str(tuning_db.LOWERING),
            "machine": tuning_db.machine(target),
        }
        self.say, self.workers, self.pool = say, workers, pool
        self.enough = 2 * limits.jobs + 2  # trials under way, so that no process waits
        self.waiting: list[TuningJob] = []
        self.trials: dict[int, tuple[TuningJob, ScheduleTrial, Task]] = {}  # by the id of a running task
        self.seconds: dict[int, Found] = {}  # compile time of a trial, by its id

    # -- the loop ----------------------------------------------------------------------------------

    def run(self, environment: dict[str, str] | None = None) -> list[TuningRecord]:
        """Run until every job has had its trials or time is up. Returns the winners' rows, those of
        unfinished jobs too. Raises RuntimeError when worker processes do not start."""
        self.waiting = list(self.jobs)
        pool = self.pool(groups(self.limits.jobs, self.workers, environment))
        self.enough = pool.ranks * (2 * self.limits.jobs + 2)
        progress = Progress(self.limits.trials * len(self.jobs), "trial")
        say = self.say or progress.say
        tasks = list(self._refill(say, progress.step))
        with closing(pool.run(tasks, self.limits.total_s)) as ends:
            self._follow(ends, pool, say, progress)
        progress.close()
        for job in self.jobs:
            if job.search is not None and not job.ended:
                say(f"unfinished: {self._line(job)}")
        return self.winners()

    def _follow(
        self,
        ends: Iterable[tuple[Task, Found]],
        pool: Pool,
        say: Callable[[str], None],
        progress: Progress,
    ) -> None:
        """Process the workers' results and start the tasks that follow."""
        for task, found in ends:
            job, trial, _ = self.trials[id(task)]
            error = str(found.get("error", ""))
            if error == "out of budget":
                continue
            if task.group == "compile" and not error:
                self.seconds[id(task)] = {c: found[c] for c in SECONDS if c in found}
                continue  # its measurement follows
            if task.group == "compile" and error not in ("timeout", "crash"):
                continue  # the measuring process compiles, or reports the refusal
            progress.step()
            self._answer(job, trial, task, found)
            for new in (*self._ask(job, say, progress.step), *self._refill(say, progress.step)):
                pool.add(new)

    def _refill(self, say: Callable[[str], None], skip: Callable[[], None]) -> Iterator[Task]:
        """Start jobs until the compiling processes have enough to do."""
        while (
            self.waiting
            and sum(len(j.search.waiting) for j in self.jobs if j.search is not None) < self.enough
        ):
            job = self.waiting.pop(0)
            try:
                self._open(job)
            except TransconvError as error:
                say(f"{job.name} {job.workload.title}: not tuned: {error}")
            if job.search is not None:
                for _ in job.search.asked:
                    skip()
                yield from self._ask(job, say, skip)

    def _open(self, job: TuningJob) -> None:
        """Make a job's search with the trials of the log. Raises Unsupported, ScheduleError."""
        phases = job.phases()
        if not phases:
            return
        search = Search(
            phases, self.target, self.limits.trials, job.seeds(phases, self.target), self.explore
        )
        for row in self.log.rows:
            if self._same(row, job):
                self._tell(job, search, Schedule.parse(row["schedule"]), row)
        job.search = search

    def _same(self, row: Found, job: TuningJob) -> bool:
        wanted = dict(zip(WORKLOAD, job.key, strict=True)) | {
            c: self.versions[c] for c in ("triton", "lowering", "machine")
        }
        return all(row[c] == v for c, v in wanted.items())

    def _ask(self, job: TuningJob, say: Callable[[str], None], skip: Callable[[], None]) -> list[Task]:
        """The tasks of a job's next trials."""
        assert job.search is not None
        if job.ended or job.search.waiting:
            return []
        made = []
        for trial in job.search.next():
            text, direction, behind = job.key
            what = {
                "text": text,
                "direction": direction,
                "behind": behind,
                "schedule": str(trial.schedule),
            }
            second = Task("gpu", what | {"budget_ms": self.limits.budget_ms}, self.limits.trial_s)
            first = Task("compile", what, self.limits.compile_s, then=second)
            for task in (first, second):
                self.trials[id(task)] = (job, trial, first)
            made.append(first)
        if not made:
            job.ended = True
            for _ in range(self.limits.trials - len(job.search.asked)):
                skip()
            say(self._line(job))
        return made

    # -- results -----------------------------------------------------------------------------------

    def _answer(self, job: TuningJob, trial: ScheduleTrial, task: Task, found: Found) -> None:
        first = self.trials[id(task)][2]
        assert job.search is not None
        error = str(found.get("error", ""))
        if error:
            word = error if error in ("timeout", "crash") else "failed"
            told: Found = {"verdict": word, "reason": " ".join(error.split())[:500]}
        else:
            told = {k: v for k, v in found.items() if k != "trace"}
        row = {
            **job.about,
            **self.versions,
            **dict(zip(WORKLOAD, job.key, strict=True)),
            "trial": len(job.search.times),
            "origin": trial.origin,
            "rank": trial.rank,
            "schedule": str(trial.schedule),
            "estimate": trial.estimate,
            **self.seconds.get(id(first), {}),
            **told,
        }
        self.log.add(row)
        self._tell(job, job.search, trial.schedule, row)

    def _tell(self, job: TuningJob, search: Search, schedule: Schedule, row: Found) -> None:
        us = number(row, "us") if row["verdict"] == "right" else None
        job.tried += us is not None
        search.tell(schedule, us)

    def winners(self) -> list[TuningRecord]:
        """A row for each job of which a trial was right."""
        made = []
        for job in self.jobs:
            best = job.search.best if job.search is not None else None
            if best is not None:
                assert job.search is not None
                made.append(
                    tuning_db.make(job.workload, self.target, str(best), job.search.times[best], job.tried)
                )
        return made

    def _line(self, job: TuningJob) -> str:
        """The result of a job, for people."""
        assert job.search is not None
        head = f"{(job.name or job.workload.title)[:28]:28} {job.workload.direction:5}"
        best = job.search.best
        if best is None:
            return f"{head} none of the {len(job.search.times)} schedules that were tried was right"
        us = job.search.times[best]
        first = job.search.times.get(job.search.ranking[0], float("inf"))
        gain = (
            f"{first / us:.2f} times as fast as the schedule that was estimated to be the best"
            if first < float("inf")
            else "the schedule that was estimated to be the best did not run"
        )
        return f"{head} {us:9.1f} us, {gain}; right: {job.tried} of {len(job.search.times)}  {best}"


def groups(
    jobs: int, workers: str = WORKERS, environment: Mapping[str, str] | None = None
) -> dict[str, WorkerTask]:
    """The processes that run trials: ``jobs`` compile, one measures."""
    variables = {"OMP_NUM_THREADS": "1", **(environment or {})}
    return {
        "compile": WorkerTask(f"{workers}:compile_trial", jobs, variables),
        "gpu": WorkerTask(f"{workers}:measure_trial", 1, variables),
    }


def of_log(log: Iterable[Found]) -> list[TuningRecord]:
    """The winners of a whole log, of any machine and version."""
    best: dict[object, TuningRecord] = {}
    for row in log:
        us = number(row, "us") if row["verdict"] == "right" else None
        if not us or (about := tuning_db.workload_of(*(row[c] for c in WORKLOAD))) is None:
            continue
        made = TuningRecord(
            about.text,
            about.direction,
            about.kind,
            row["machine"],
            row["schedule"],
            us,
            1,
            int(row["lowering"]),
            row["triton"],
        )
        key = made.key, made.triton, made.lowering
        if (old := best.get(key)) is not None:
            made = replace(min(old, made, key=lambda r: r.us), tried=old.tried + 1)
        best[key] = made
    return list(best.values())


def read_log(path: Path) -> list[Found]:
    """The rows of a log, or of a table of times by problem, direction and schedule; those of older
    versions with the column names of today. Raises ValueError for a file that is no CSV file."""
    return read(path, FORMER)


def log_of(path: Path) -> CsvTable:
    """The log at a path, to be continued. Raises ValueError for a file with other columns."""
    return CsvTable(path, COLUMNS, KEY, FORMER)


def log_path(database: Path) -> Path:
    """Where the trials of a database file are written."""
    return database.with_suffix(".trials.csv")


EVERY_S = 20.0


class Progress:
    """Counts steps of a total that may grow."""

    def __init__(self, total: int, unit: str) -> None:
        self.total, self.unit, self.done = total, unit, 0
        self.start = self.last = time.monotonic()
        self.bar = tqdm(total=total, unit=unit) if sys.stderr.isatty() else None

    def step(self) -> None:
        self.done += 1
        now = time.monotonic()
        if self.bar is not None:
            self.bar.total = self.total
            self.bar.update()
        elif now - self.last > EVERY_S:
            self.last = now
            self.say(f"... {self.done} of {self.total} {self.unit}s, {now - self.start:.0f} s")

    def say(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        if self.bar is not None:
            self.bar.write(text)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
