"""``python -m bench issues``: convolutions that public threads report as slow, failing or wrong, ours
beside torch's of today: a row each in ``<gpu>_issues.csv``.

Both libraries run in both memory orders, torch with its own tuning on (cudnn.benchmark), and the faster
right one counts. Some processes compile ours ahead; one has the GPU, and loses a case only when a kernel
of either side faults or hangs. Without a GPU the cases run at small sizes (``--small``) in Triton's
interpreter, where nothing is timed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import environment
from bench.issue_cases import CASES, IssueCase
from bench.issue_table import issues_table
from transconv.cli.arguments import ranges
from transconv.tuning.session import Progress
from transconv.tuning.table import CsvTable, Row
from transconv.verify.machine import Pool, Task, WorkerTask

LIBRARIES = ("ours", "torch")
OF_EACH = ("verdict", "us", "layout", "err", "peak_mb", "reason")
COLUMNS = (
    "case",
    "issue",
    "url",
    "matter",
    "call",
    "dtype",
    "direction",
    "small",
    *(f"{side}_{what}" for side in ("our", "torch") for what in OF_EACH),
    "ratio",
    "spread",
    "schedule",
    *environment.VERSIONS,
)
KEY = ("case", "small", "device")
LOST = ("timeout", "crash", "out of budget")


def arguments(parser: argparse.ArgumentParser) -> None:
    cores = max(1, (os.cpu_count() or 2) - 2)
    parser.add_argument(
        "--only",
        default="",
        metavar="WORDS",
        help="only cases with one of these words, joined by commas, in their names or "
        "calls: pytorch#75747,conv3d",
    )
    parser.add_argument("--small", action="store_true", help="at sizes for Triton's interpreter")
    parser.add_argument(
        "--time-budget",
        type=ranges.seconds,
        default=110,
        help="seconds; then no new case starts (default: 110)",
    )
    parser.add_argument("--limit", type=ranges.limit, default=45, help="seconds for one case")
    parser.add_argument("--compile-limit", type=ranges.limit, default=40, help="seconds for one compile")
    parser.add_argument("--workers", type=ranges.processes, default=cores, help="processes that compile")
    parser.add_argument(
        "--retry",
        default="",
        help="run rows again whose result of ours begins so: wrong,raises,timeout,...",
    )
    parser.add_argument("--cache", default="", help="folder of compiled kernels")


def main(options: argparse.Namespace) -> int:
    """1 if one of our results is not right. Raises ValueError if no case is selected, or if there is no
    GPU for the cases as they are."""
    versions = environment.versions()
    on_cpu = versions["device"] == "cpu"
    if on_cpu and not options.small:
        raise ValueError("there is no GPU; --small has the cases at sizes for Triton's interpreter")
    chosen = selected(options.only)
    table = CsvTable(Path(options.out) / f"{short(versions['device'])}_issues.csv", COLUMNS, KEY)
    if options.retry:
        table.drop(options.retry.split(","), "our_verdict")
    about = {"small": int(options.small), **versions}
    todo = [c for c in chosen if not table.has({"case": c.name, **about})]
    print(f"{len(chosen)} cases, {len(chosen) - len(todo)} done before", flush=True)
    for case, sides in Run(todo, options, on_cpu).go():
        table.add(row(case.shrunk() if options.small else case, sides) | about)
        print(line(table.rows[-1]), flush=True)
    rows = [
        r
        for r in table.rows
        if r["case"] in {c.name for c in chosen}
        and r["small"] == str(int(options.small))
        and r["device"] == versions["device"]
    ]
    print(f"{len(rows)} of {len(chosen)} rows are in {table.path}\n\n{issues_table(rows)}", flush=True)
    return int(any(r["our_verdict"] != "right" for r in rows))


def selected(words: str) -> list[IssueCase]:
    """Raises ValueError for words that no case has."""
    asked = [w for w in words.split(",") if w] or [""]
    found = [c for c in CASES if any(w in f"{c.name} {c.function} {c.dtype}" for w in asked)]
    if not found:
        raise ValueError(
            f"--only={words}: no case has this in its name; expected some of "
            f"{' '.join(dict.fromkeys(c.issue for c in CASES))}"
        )
    return found


def short(device: str) -> str:
    """A device's name for the names of files: ``NVIDIA_H200`` is h200."""
    return device.lower().removeprefix("nvidia_").removeprefix("amd_").split("_")[0] or "gpu"


# -- the tasks -------------------------------------------------------------------------------------


class Run:
    """The tasks of the cases: ours compiled ahead, in every memory order and direction, then all sides
    measured. A side that hangs or ends its process is lost, and the others get another turn, alone."""

    def __init__(self, todo: list[IssueCase], options: argparse.Namespace, on_cpu: bool) -> None:
        self.todo, self.options, self.on_cpu = todo, options, on_cpu
        self.case_of: dict[int, IssueCase] = {}  # by the id of a task, which stays alive
        self.found: dict[str, Row] = {c.name: {} for c in todo}
        self.tasks: list[Task] = []

    def measuring(self, case: IssueCase, sides: list[str]) -> Task:
        payload = {"name": case.name, "small": self.options.small, "sides": sides}
        return self.known(Task("measure", payload, self.options.limit), case)

    def known(self, task: Task, case: IssueCase) -> Task:
        self.case_of[id(task)] = case
        self.tasks.append(task)
        return task

    def first(self, case: IssueCase) -> Task:
        """The chain of a case: compile, compile, ..., measure."""
        last = self.measuring(case, sides_of(case))
        for layout in () if self.on_cpu else case.layouts:
            for prop in case.props():
                if (problem := case.problem(layout)) is not None:
                    epilogue = "bias" if case.bias and case.direction == "fwd" else ""
                    payload = {"problem": str(problem), "prop": prop.value, "epilogue": epilogue}
                    task = Task("compile", payload, self.options.compile_limit, then=last)
                    last = self.known(task, case)
        return last

    def go(self) -> Iterator[tuple[IssueCase, Row]]:
        """Cases with the results of their sides, as they end."""
        o = self.options
        variables = environment.worker_environment(o.cache) | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        on_cpu = {"OMP_NUM_THREADS": environment.threads(), "TRITON_INTERPRET": "1"}
        pool = Pool(
            {
                "compile": WorkerTask("bench.runner:prepare", o.workers, variables),
                "measure": WorkerTask(
                    "bench.issue_sides:measure", 1, variables | (on_cpu if self.on_cpu else {})
                ),
            }
        )
        progress = Progress(len(self.todo), "case")
        for task, answer in pool.run([self.first(c) for c in self.todo], o.time_budget):
            case = self.case_of[id(task)]
            if task.group == "compile":
                if answer.get("error") in LOST and task.then is not None:
                    pool.add(task.then)  # which compiles it for itself, or is lost
                continue
            for again in self.after(case, task, answer):
                pool.add(again)
            if len(self.found[case.name]) == len(sides_of(case)):
                progress.step()
                yield case, self.found[case.name]
        progress.close()

    def after(self, case: IssueCase, task: Task, answer: Row) -> Iterator[Task]:
        """Keep the results; the tasks of the sides that have not run."""
        asked: list[str] = task.payload["sides"]
        if error := answer.get("error"):
            if error == "out of budget":
                return
            if len(asked) > 1:  # unknown which of them failed
                yield from (self.measuring(case, [side]) for side in asked)
                return
            word = error if error in LOST else "raises"
            answer = {"sides": {asked[0]: {"verdict": word, "reason": error[:200]}}, "left": []}
        self.found[case.name] |= answer["sides"]
        if answer["left"]:
            yield self.measuring(case, answer["left"])


def sides_of(case: IssueCase) -> list[str]:
    return [f"{library}.{layout}" for library in LIBRARIES for layout in case.layouts]


# -- rows ------------------------------------------------------------------------------------------


def row(case: IssueCase, sides: Row) -> Row:
    """The columns of a case: of each library, its faster right memory order."""
    ours, theirs = (best(case, library, sides) for library in LIBRARIES)
    made: Row = {
        "case": case.name,
        "issue": case.issue,
        "url": case.url,
        "matter": case.matter,
        "call": case.call(),
        "dtype": case.dtype,
        "direction": case.direction,
        "schedule": ours.get("schedule", ""),
    }
    for name, side in (("our", ours), ("torch", theirs)):
        made |= {f"{name}_{what}": side.get(what, "") for what in OF_EACH}
    if ours.get("us") and theirs.get("us"):
        made |= {"ratio": theirs["us"] / ours["us"], "spread": ours["spread"] + theirs["spread"]}
    return made


def best(case: IssueCase, library: str, sides: Row) -> Row:
    """One library's side that counts, with the verdict of all of its memory orders."""
    mine = {layout: dict(sides[f"{library}.{layout}"]) for layout in case.layouts}
    verdicts = {layout: side["verdict"] for layout, side in mine.items()}
    right = [x for x in mine if verdicts[x] == "right"]
    order = sorted(right or mine, key=lambda x: (mine[x].get("us", float("inf")), x != case.layout))
    chosen: dict[str, Any] = {**mine[order[0]], "layout": order[0]}
    if len({*verdicts.values()}) > 1:
        others = [f"{word} in {layout}" for layout, word in verdicts.items() if word != "right"]
        chosen["verdict"] = (
            f"right in {' and '.join(right)}, {', '.join(others)}" if right else ", ".join(others)
        )
        chosen["reason"] = "; ".join(mine[x]["reason"] for x in mine if verdicts[x] != "right")
    return chosen


def line(found: Row) -> str:
    """One row, for people."""
    times = [f"{float(found[c]):9.1f}" if found[c] else f"{'-':>9}" for c in ("our_us", "torch_us")]
    ratio = f"{float(found['ratio']):6.2f}x" if found["ratio"] else "      -"
    return (
        f"{found['case'][:28]:28} {' '.join(times)} {ratio} ours {found['our_verdict']}, torch "
        f"{found['torch_verdict']} {found['our_reason'][:70]} {found['torch_reason'][:70]}"
    ).rstrip()
