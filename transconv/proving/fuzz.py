"""The proving ground. In: how many trials, a seed, a time. Out: how they went, and what failed.

Trials run in worker processes forked from this one after it has imported everything and before
anything touched a GPU, so a worker starts in no time. One that hangs or faults is killed and
replaced; its trial has failed. What failed is shrunk by asking the same workers about simpler
trials, and printed as lines that repeat it.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transconv import knobs
from transconv.proving import corpus
from transconv.proving.fuzz_run import GOOD, Row, work
from transconv.proving.fuzz_trial import Trial, draw_trial
from transconv.proving.pool import Group, Pool, Task
from transconv.proving.shrink import shrink

WORKER = "transconv.proving.fuzz_run:work"
REPEAT = "python -m transconv fuzz --line='{line}'"
EVERY_S = 15.0  # between two reports of how far it is


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do. ``number`` trials from ``first`` on, each at most ``limit_s`` seconds; no trial
    starts after ``budget_s``. ``share``: of interpreted trials, those in Triton's interpreter.
    ``lines`` are run before, and with ``known`` the corpus. ``shrunk``: failures made simpler."""

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

    def way(self, number: int) -> str:
        """How a trial is executed: of every 100 interpreted ones, so many by Triton."""
        if not self.interpreted:
            return "device"
        return "triton" if number * 37 % 100 < self.share * 100 else "numpy"

    def tasks(self) -> Iterator[Task]:
        """The lines, the corpus, the trials."""
        given = [*self.lines, *(str(e.trial) for e in (corpus.corpus() if self.known else ()))]
        for at, line in enumerate(given):
            for way in ("numpy", "triton") if self.interpreted else ("device",):
                yield self._task({"line": line, "way": way, "number": at})
        for n in range(self.first, self.first + self.number):
            yield self._task({"seed": self.seed, "number": n, "way": self.way(n)})

    def _task(self, payload: Row) -> Task:
        return Task("fuzz", {"target": self.target, **payload}, self.limit_s)


@dataclass(slots=True)
class Tally:
    """What came of the trials: rows that are not good, and counts of all by what they are about."""

    asked: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    facts: dict[str, dict[str, Counter[str]]] = field(default_factory=dict)
    bad: list[Row] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    spent: Counter[str] = field(default_factory=Counter)
    silent: int = 0  # answers of mostly zeros

    def add(self, row: Row) -> None:
        status = row["status"]
        self.asked += 1
        self.statuses[status] += 1
        for name, word in {**row["facts"], "way": row["way"]}.items():
            self.facts.setdefault(name, {}).setdefault(word, Counter())[status] += 1
        for name in ("seconds", "generate_s", "compile_s"):
            self.spent[name] += row.get(name, 0.0)
        self.spent["kernels"] += row.get("kernels", 0)
        self.silent += status == "passed" and row.get("nonzero", 1.0) < 0.3
        if status not in GOOD:
            self.bad.append(row)
        elif status != "passed":
            self.refusals[row["reason"][:160]] += 1

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
        lines = [f"{self.asked} trials in {self.seconds:.0f} s ({self.rate:.1f}/s): {said or 'none'}",
                 f"  {self.spent['kernels']:.0f} kernels, {per * 1e3:.0f} ms a trial"
                 + (f", of them {', '.join(parts)}" if parts else "")
                 + f"; {self.silent} answers were mostly zeros"]
        lines += [f"  {n} times {reason}" for reason, n in self.refusals.most_common(5)]
        return lines

    @property
    def rate(self) -> float:
        return self.asked / self.seconds if self.seconds else 0.0

    def to_json(self, plan: Plan) -> dict[str, object]:
        """Everything worth keeping: counts by dimension and status, and what is not good."""
        return {"asked": self.asked, "wanted": plan.number, "seed": plan.seed, "first": plan.first,
                "target": plan.target, "jobs": plan.jobs, "interpreted": plan.interpreted,
                "seconds": round(self.seconds, 1), "per second": round(self.rate, 2),
                "statuses": dict(self.statuses), "mostly zeros": self.silent,
                "spent": {k: round(v, 1) for k, v in self.spent.items()},
                "counts": {name: {word: dict(c) for word, c in sorted(words.items())}
                           for name, words in sorted(self.facts.items())},
                "refusals": dict(self.refusals.most_common(50)), "not good": self.bad}


class Campaign:
    """One run of the fuzzer. ``say`` prints a line."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tally = Tally()
        self.started = self.told = time.monotonic()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def run(self) -> Tally:
        """Run the trials, then shrink what failed, within the time."""
        imported()
        with scratch() as folder:
            for row in self.rows(self.plan.tasks(), folder):
                self.tally.add(row)
                if row["status"] not in GOOD:
                    self.say(f"{row['status']}: {row['reason'][:400]}\n    {repeated(row)}")
                self._tell()
            self.tally.seconds = time.monotonic() - self.started
            for row in self.simplest_reasons():
                if self.left() > 0:
                    self.shrink(row, folder)
        return self.tally

    def left(self) -> float:
        return self.plan.budget_s - (time.monotonic() - self.started)

    def rows(self, tasks: Iterable[Task], folder: str) -> Iterator[Row]:
        """A row for every task that ran; a worker that was lost makes one too."""
        group = Group(WORKER, self.plan.jobs)
        pool = Pool({"fuzz": group}, start="fork")
        given = (Task(t.group, {**t.payload, "scratch": folder}, t.limit_s) for t in tasks)
        for task, row in pool.run(given, self.left()):
            if row.get("error") != "out of budget":
                yield row if "error" not in row else self.lost(task.payload, row)

    def lost(self, payload: Row, row: Row) -> Row:
        """What is known of a trial whose worker did not answer."""
        trial = Trial.parse(payload["line"]) if payload.get("line") else draw_trial(
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

    def simplest_reasons(self) -> list[Row]:
        """Failures worth shrinking: one of each kind, as far as reasons tell."""
        kinds: dict[str, Row] = {}
        for row in self.tally.bad:
            kinds.setdefault(kind_of(row), row)
        return list(kinds.values())[:self.plan.shrunk]

    def shrink(self, row: Row, folder: str) -> None:
        """Find a simpler trial that fails in the same way; it is added to the row."""
        kind = kind_of(row)

        def fails(trials: Sequence[Trial]) -> int | None:
            tasks = [Task("fuzz", {"line": str(t), "way": row["way"], "number": at},
                          min(self.plan.limit_s, 30.0)) for at, t in enumerate(trials)]
            places = {str(t): at for at, t in enumerate(trials)}
            bad = [places[r["line"]] for r in self.rows(tasks, folder) if kind_of(r) == kind]
            return min(bad, default=None)

        simple, asked = shrink(Trial.parse(row["line"]), fails)
        row["shrunk"] = str(simple)
        self.say(f"the simplest of {asked} trials that also {kind}:\n    "
                 f"{repeated({**row, 'line': str(simple)})}")


def repeated(row: Row) -> str:
    """The command that repeats a trial."""
    return REPEAT.format(line=row["line"]) + ("" if row["way"] == "device" else " --interpreter")


def kind_of(row: Row) -> str:
    """A failure in a few words: what shrinking must keep."""
    first = row.get("reason", "").split(": ")[0]
    kind = first if first.replace(".", "").isidentifier() and row["status"] == "error" else ""
    return f"{row['status']} {kind}".strip()


def imported() -> None:
    """Import what workers need, so that they are born with it; nothing may touch the GPU. Neither
    does anything here use threads, which a fork would not take along."""
    import torch  # noqa: F401
    import triton  # noqa: F401

    from transconv.pipeline import lower
    from transconv.proving import case, oracle  # noqa: F401

    trial = next(t for n in range(100) if (t := draw_trial(0, n)).config is not None)
    assert trial.config is not None
    lower(trial.algorithms[0], trial.config, trial.chip, "first")
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


def fuzz(plan: Plan, json_file: Path | None = None) -> int:
    """Run a plan; 0 if nothing failed. Prints as it goes."""
    if plan.interpreted:
        knobs.use_interpreter()
    campaign = Campaign(plan)
    tally = campaign.run()
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(tally.to_json(plan), indent=1) + "\n", encoding="utf-8")
    for line in tally.describe():
        campaign.say(line)
    for row in tally.bad:
        print(row.get("shrunk", row["line"]), file=sys.stderr if tally.asked > 1 else sys.stdout)
    return 0 if tally.ok else 1


__all__ = ["Campaign", "Plan", "Tally", "fuzz", "work"]
