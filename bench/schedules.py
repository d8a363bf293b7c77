"""Times given schedules of given problems, each checked first: a row each in ``schedules.csv``.

A file has a line for each, as CSV with the columns ``problem``, ``direction``, ``behind`` and ``schedule``
(bench/results/h200_int8_trials.csv is one). Without a schedule the chosen one is timed.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.environment import VERSIONS, versions
from transconv.tuning.session import groups
from transconv.verify.machine import Pool, Task

GIVEN = ("problem", "direction", "behind", "schedule")
COLUMNS = (*GIVEN, "us", "p20", "p80", "verdict", "reason", *VERSIONS)


def which(parser: argparse.ArgumentParser) -> None:
    """The options that say which schedules are measured."""
    parser.add_argument(
        "files", nargs="+", type=Path, help=f"CSV files with the columns {', '.join(GIVEN)}"
    )
    parser.add_argument("--match", default="", help="only problems that have this in their text")


def asked(options: argparse.Namespace) -> list[dict[str, str]]:
    """The rows of the files that match. Raises ValueError where columns are missing."""
    return [row for path in options.files for row in read(path) if options.match in row["problem"]]


@contextmanager
def writing(path: Path, columns: Sequence[str]) -> Iterator[Callable[[Mapping[str, object]], None]]:
    """A new CSV file, in a folder that is made: a function that writes a row at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
        lines.writeheader()

        def write(row: Mapping[str, object]) -> None:
            lines.writerow(row)
            file.flush()

        yield write


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    which(parser)
    parser.add_argument("--workers", type=int, default=4, help="processes that compile")
    parser.add_argument("--limit", type=float, default=30, help="seconds for one measurement")
    parser.add_argument("--compile-limit", type=float, default=60, help="seconds for one compile")
    parser.add_argument("--time-budget", type=float, default=540, help="seconds; then no new one starts")
    parser.add_argument("--budget-ms", type=float, default=60, help="timing of one schedule")


def main(options: argparse.Namespace) -> int:
    """Measure, and print as it goes. 1 if a schedule is not right."""
    about, wrong = versions(), 0
    pool = Pool(groups(options.workers))
    rows = asked(options)  # before the file is opened, which may be one of these
    with writing(Path(options.out) / "schedules.csv", COLUMNS) as write:
        for row in measured(pool, rows, options):
            write({**about, **row})
            wrong += row["verdict"] != "right"
            us = f"{float(row['us']):9.2f}" if row.get("us") else "        -"
            print(
                f"{us} us {row['verdict']:8} {row['problem']} {row['direction']} | {row['schedule']} "
                f"{row['reason'][:200]}",
                flush=True,
            )
    return int(wrong > 0)


def read(path: Path) -> list[dict[str, str]]:
    """The lines of a file. Raises ValueError where columns are missing."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if rows and (missing := [c for c in GIVEN if c not in rows[0]]):
        raise ValueError(f"{path}: there is no column {missing[0]}; expected {', '.join(GIVEN)}")
    return [{c: row[c] for c in GIVEN} for row in rows]


def measured(
    pool: Pool, asked: list[dict[str, str]], options: argparse.Namespace
) -> Iterator[dict[str, str]]:
    """The rows in the order in which they end: compiled side by side, timed one at a time."""
    of: dict[int, dict[str, str]] = {}
    tasks = []
    for row in asked:
        what = {"text": row["problem"], **{c: row[c] for c in GIVEN[1:]}}
        timed = Task("gpu", what | {"budget_ms": options.budget_ms}, options.limit)
        tasks.append(Task("compile", what, options.compile_limit, then=timed))
        of[id(tasks[-1])] = of[id(timed)] = row
    for task, found in pool.run(tasks, options.time_budget):
        error = " ".join(str(found.get("error", "")).split())
        if task.group == "compile" and (not error or error not in ("timeout", "crash", "out of budget")):
            continue  # the measurement follows, and reports what cannot be compiled
        word = error if error in ("timeout", "crash", "out of budget") else "failed"
        told = {"verdict": word, "reason": error} if error else found
        yield {**of[id(task)], **{k: str(v) for k, v in told.items()}}
