"""Mutation testing: drawn mutants of the rooms that decide numbers, tried by the tests that execute them.

``python -m tests.mutation --n 100 --seed 1`` draws from the files of ROOMS, and adds what it finds to
``bench/results/mutation.csv``; what is there is not tried again. ``--again`` tries those that survived.
``--summary`` prints the score. A mutant that changes nothing that a test could see is marked by hand:
its verdict becomes ``equivalent``, and ``why`` says the reason.
"""

from __future__ import annotations

import argparse
import csv
import functools
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.mutation.covering import FOLDER, PLANTED, ROOMS, ROOT, SELECTED, copy_project, record_all
from tests.mutation.operators import WEIGHTS, Mutant, Source
from tests.mutation.trials import Trials

# Files where a wrong line is a wrong number: they are drawn so many times as often as their length says.
OFTEN = (
    "graph/fusion/index_ir.py",
    "kernel/tiles/values.py",
    "runtime/plans.py",
    "graph/lowerings/elementwise.py",
    "passes/scalar/index_width.py",
    "simplify/facts.py",
    "verify/data.py",
    "passes/lowering/split_k.py",
    "compute/elementwise.py",
)
TIMES = 5
RESULTS = Path(os.environ.get("MUTATION_RESULTS", ROOT / "bench" / "results" / "mutation.csv"))
COLUMNS = (
    "commit",
    "file",
    "line",
    "operator",
    "before",
    "after",
    "verdict",
    "test",
    "tests",
    "seconds",
    "why",
)
KILLED = ("killed", "timeout")


# -- drawing ----------------------------------------------------------------------------------------


@functools.cache
def source(file: str) -> Source:
    return Source(file, (PLANTED / file).read_text())


def files(rooms: Sequence[str]) -> dict[str, int]:
    """Files that may be drawn, with their weights."""
    found = [
        p.relative_to(PLANTED).as_posix()
        for room in rooms
        for p in (PLANTED / "transconv" / room).rglob("*.py")
    ]
    return {
        name: len((PLANTED / name).read_text().splitlines())
        * (TIMES if name.removeprefix("transconv/") in OFTEN else 1)
        for name in sorted(found)
    }


def drawn(seed: int, n: int, rooms: Sequence[str] = ROOMS) -> Iterator[Mutant]:
    """Mutants number 0 to n - 1 of a seed: a file, an operator that applies in it, a place."""
    seen = set[tuple[str, ...]]()
    rng = random.Random(seed)
    weights = files(rooms)
    while len(seen) < n:
        of = source(rng.choices(list(weights), list(weights.values()))[0])
        names = sorted({site.operator for site in of.sites})
        if not names:
            continue
        name = rng.choices(names, [WEIGHTS[name] for name in names])[0]
        mutant = of.mutant(rng.choice([site for site in of.sites if site.operator == name]))
        if mutant is not None and mutant.key not in seen:
            seen.add(mutant.key)
            yield mutant


def found_again(row: dict[str, str]) -> Mutant | None:
    """The mutant of a row of the results in the files of today, the nearest to its line."""
    if not (PLANTED / row["file"]).exists():
        return None
    of = source(row["file"])
    each = (of.mutant(site) for site in of.sites if site.operator == row["operator"])
    same = [m for m in each if m is not None and (m.before, m.after) == (row["before"], row["after"])]
    return min(same, key=lambda m: abs(m.line - int(row["line"])), default=None)


# -- results ----------------------------------------------------------------------------------------


def rows() -> list[dict[str, str]]:
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def write(kept: list[dict[str, str]]) -> None:
    new = RESULTS.with_suffix(".new")
    with new.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
    new.replace(RESULTS)


def row_key(row: dict[str, str]) -> tuple[str, ...]:
    return row["file"], row["operator"], row["before"], row["after"]


def judge(trials: Trials, mutant: Mutant, why: str = "") -> None:
    """Tries a mutant, and writes its row in the place of an older one."""
    outcome = trials.outcome(mutant)
    row = {
        "commit": os.environ.get("MUTATION_COMMIT", ""),
        "file": mutant.file,
        "line": str(mutant.line),
        "operator": mutant.operator,
        "before": mutant.before,
        "after": mutant.after,
        "verdict": outcome.verdict,
        "test": outcome.test,
        "tests": str(outcome.tests),
        "seconds": str(outcome.seconds),
        "why": why if outcome.verdict not in KILLED else "",
    }
    kept = rows()
    old = next((i for i, r in enumerate(kept) if row_key(r) == mutant.key), None)
    if old is None:
        kept.append(row)
    else:
        kept[old] = row
    write(kept)
    print(
        f"{outcome.verdict} {mutant.file}:{mutant.line} {outcome.seconds} s, {outcome.tests} tests "
        f"{outcome.test}\n    {mutant.before}\n    {mutant.after}",
        file=sys.__stderr__,
        flush=True,
    )


def summary() -> str:
    """The score of all rooms and of each."""
    by_room: dict[str, Counter[str]] = {}
    for row in rows():
        for room in ("all", row["file"].split("/")[1]):
            by_room.setdefault(room, Counter())[row["verdict"]] += 1
    lines = ["| room | mutants | equivalent | killed | survived | score |", "|---|---|---|---|---|---|"]
    for room, counts in sorted(by_room.items(), key=lambda each: (each[0] != "all", each[0])):
        killed = sum(counts[word] for word in KILLED)
        real = counts.total() - counts["equivalent"]
        score = f"{100 * killed / max(real, 1):.1f}%"
        lines.append(
            f"| {room} | {counts.total()} | {counts['equivalent']} | {killed} | {real - killed} "
            f"| {score} |"
        )
    return "\n".join(lines)


# -- the command ------------------------------------------------------------------------------------


def try_drawn(trials: Trials, n: int, seed: int, rooms: Sequence[str]) -> None:
    judged = {row_key(row) for row in rows()}
    for mutant in drawn(seed, n, rooms):
        if mutant.key not in judged and trials.has_tests(mutant):
            judge(trials, mutant)


def try_again(trials: Trials, parts: Sequence[str]) -> None:
    for row in rows():
        if row["verdict"] == "survived" and any(part in row["file"] for part in parts or [""]):
            mutant = found_again(row)
            if mutant is not None:
                judge(trials, mutant, row["why"])


def serve(options: argparse.Namespace) -> int:
    """In the copy of the project: collects all tests, and tries mutants."""
    if options.again is None:
        trials = Trials(
            lambda trials: try_drawn(trials, options.n, options.seed, options.rooms), options.budget
        )
    else:
        trials = Trials(lambda trials: try_again(trials, options.again), options.budget)
    tests = sorted({test.partition("::")[0] for test in trials.covering.seconds})
    return int(pytest.main([*SELECTED, *(t for t in tests if (PLANTED / t).exists())], plugins=[trials]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--n", type=int, default=100, help="how many mutants of the seed (100)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--rooms",
        nargs="+",
        choices=ROOMS,
        default=ROOMS,
        metavar="ROOM",
        help="draw from these alone (those that decide numbers)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=40,
        metavar="SECONDS",
        help="how long the tests of one mutant may take (40)",
    )
    parser.add_argument(
        "--again",
        metavar="FILE",
        nargs="*",
        help="the survivors of files with one of these in their path; all if none is said",
    )
    parser.add_argument(
        "--no-record", dest="record", action="store_false", help="only tests that were recorded before"
    )
    parser.add_argument("--summary", action="store_true", help="only the score of what was tried")
    options = parser.parse_args()
    if options.summary:
        print(summary())
        return 0
    if ROOT == PLANTED or "MUTATION_COMMIT" in os.environ:
        return serve(options)
    if options.record:
        record_all([])
    copy_project(PLANTED)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True, capture_output=True
    )
    path = os.pathsep.join([str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "MUTATION": str(FOLDER),
        "MUTATION_RESULTS": str(RESULTS),
        "MUTATION_COMMIT": commit.stdout.strip(),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
    }
    code = subprocess.run(
        [sys.executable, "-m", "tests.mutation", *sys.argv[1:]], cwd=PLANTED, env=environment
    ).returncode
    print(summary())
    return code


if __name__ == "__main__":
    sys.exit(main())
