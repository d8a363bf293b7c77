"""The GPU tests of the drop-in, in several processes, and what they counted.

A process that dies, hangs or loses the GPU fails the test it was at; another takes its place.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.environment import ROOT, versions, worker_environment
from transconv.cli.arguments import ranges
from transconv.tuning.session import Progress

COUNTS = ("passed", "rounded", "failed", "fell_back")


def arguments(parser: argparse.ArgumentParser) -> None:
    cores = max(1, (os.cpu_count() or 2) - 2)
    parser.add_argument("tests", nargs="*", default=["tests/gpu"], help="files or folders")
    parser.add_argument("-n", "--processes", type=ranges.processes, default=min(12, cores))
    parser.add_argument("-k", "--match", default="", help="only tests that match (pytest's -k)")
    parser.add_argument(
        "--time-budget", type=ranges.seconds, default=520, help="seconds; then no new test starts"
    )
    parser.add_argument("--limit", type=ranges.limit, default=200, help="seconds for one test")
    parser.add_argument("--cache", default="", help="folder of compiled kernels")


@dataclass(slots=True)
class Worker:
    """A pytest process, and the test it is at."""

    name: str
    process: subprocess.Popen[bytes]
    record: Path
    read: int = 0
    test: str = ""
    since: float = field(default_factory=time.time)

    def events(self) -> Iterator[dict[str, Any]]:
        """The lines that are new in its record file."""
        if not self.record.exists():
            return
        with self.record.open("rb") as file:
            file.seek(self.read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.read += len(line)
                yield json.loads(line)


class Run:
    """All processes of one run. ``without``: tests that are left out."""

    def __init__(self, options: argparse.Namespace, folder: Path, without: Sequence[str] = ()) -> None:
        self.options, self.folder, self.without = options, folder, without
        self.end = time.time() + options.time_budget
        self.environment = {"TRANSCONV_VERIFY": "0", **os.environ, **worker_environment(options.cache)}
        self.environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))
        )
        self.workers: list[Worker] = []
        self.results: dict[str, dict[str, Any]] = {}
        self.started = self.total = 0
        self.progress = Progress(0, "test")

    def start(self) -> None:
        name = f"worker{self.started}"
        self.started += 1
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "bench.claims",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            "--claims",
            str(self.folder),
            "--claim-as",
            name,
            "--claim-until",
            str(self.end),
            "-k",
            self.options.match,
            *(f"--deselect={test}" for test in self.without),
            *self.options.tests,
        ]
        log = (self.folder / f"{name}.log").open("wb")
        process = subprocess.Popen(
            command, cwd=ROOT, env=self.environment, stdout=log, stderr=subprocess.STDOUT
        )
        self.workers.append(Worker(name, process, self.folder / f"{name}.jsonl"))

    def add(self, test: str, **row: Any) -> None:
        self.results[test] = row
        self.progress.total = self.total
        self.progress.step()
        if row["outcome"] == "failed":
            last = (row.get("text") or "").strip().splitlines()[-1:]
            self.progress.say(f"FAILED {test} {' '.join(last)[:160]}")

    def read(self, worker: Worker) -> None:
        for event in worker.events():
            if event["event"] == "collected":
                self.total = max(self.total, event["tests"])
            elif event["event"] == "start":
                worker.test, worker.since = event["test"], event["time"]
            elif event["event"] == "end":
                event.pop("event")
                self.add(event.pop("test"), **event)
                worker.test, worker.since = "", time.time()

    def watch(self) -> None:
        """Until every process has ended."""
        for _ in range(self.options.processes):
            self.start()
        while self.workers:
            time.sleep(0.2)
            for worker in list(self.workers):
                code = worker.process.poll()
                self.read(worker)
                now = time.time()
                late = now - worker.since > self.options.limit or now > self.end + 40
                if code is None and not late:
                    continue
                worker.process.kill()
                worker.process.wait()
                self.read(worker)
                self.workers.remove(worker)
                self.lost(worker, code)
        self.progress.close()
        logs = sorted(self.folder.glob("*.log"))
        if not self.results and logs:
            print(logs[0].read_text(encoding="utf-8", errors="replace")[-4000:])

    def lost(self, worker: Worker, code: int | None) -> None:
        """After a process has ended: record the test that it ran, and replace it if tests are left."""
        if worker.test:
            what = "timeout" if code is None else f"the process ended with {code}"
            self.add(worker.test, outcome="failed", seconds=self.options.limit, text=what, cases={})
        left = self.total == 0 or len(self.results) + len(self.workers) < self.total
        broken = self.total == 0 and self.started >= 2 * self.options.processes
        if code not in (0, 1, 5) and left and not broken and time.time() < self.end - 20:
            self.start()


def group_of(test: str) -> str:
    """File and function of a test, without its parameters."""
    return test.split("[")[0].removeprefix("tests/")


def summary(results: dict[str, dict[str, Any]], collected: int) -> dict[str, Any]:
    """Counts by function, and over everything."""
    groups: dict[str, Counter[str]] = {}
    fallback: Counter[str] = Counter()
    native: Counter[str] = Counter()
    for test, row in results.items():
        counts = groups.setdefault(group_of(test), Counter())
        counts[f"tests {row['outcome']}"] += 1
        for name in COUNTS:
            counts[name] += row["cases"].get(name, 0)
        fallback.update(row["cases"].get("fallback", {}))
        native.update(row["cases"].get("native", {}))
    total: Counter[str] = Counter()
    for counts in groups.values():
        total.update(counts)
    return {
        **versions(),
        "collected": collected,
        "run": len(results),
        "total": dict(total),
        "fallback": dict(fallback),
        "native": dict(native),
        "groups": {name: dict(counts) for name, counts in sorted(groups.items())},
        "failures": {
            t: (r["cases"].get("failures") or [r["text"][-1500:]])
            for t, r in sorted(results.items())
            if r["outcome"] == "failed"
        },
        "slowest": sorted(((r["seconds"], t) for t, r in results.items()), reverse=True)[:15],
    }


def show(found: dict[str, Any]) -> str:
    """The summary as a table."""
    head = ("function", "tests ok", "failed", "skipped", "cases ok", "by bound", "failed", "fell back")
    rows = [
        (
            name,
            *(str(counts.get(k, 0)) for k in ("tests passed", "tests failed", "tests skipped", *COUNTS)),
        )
        for name, counts in [*found["groups"].items(), ("total", found["total"])]
    ]
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    ]
    for test, texts in found["failures"].items():
        lines += [f"FAILED {test}", *(f"    {text[-300:]}" for text in texts[:4])]
    lines += [
        f"{found['run']} of {found['collected']} tests were run on {found['device']}",
        f"results by generated kernels: {found['native']}",
        f"results by torch: {found['fallback']}",
    ]
    return "\n".join(lines)


def main(options: argparse.Namespace) -> int:
    out = Path(options.out)
    folder = out / "dropin"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run = Run(options, folder)
    run.watch()
    found = summary(run.results, run.total)
    (out / "dropin.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    print(show(found))
    done = run.results and len(run.results) == run.total and not found["failures"]
    return 0 if done else 1
