"""``python -m bench estimates``: how far estimates are from measured times, and what their choices cost.

Reads logs of ``transconv tune`` and tables of ``bench schedules``, of layers or of computations as texts
(``h200_graph_trials.csv``), and measures nothing. ``--half 0`` and ``--half 1`` take every other problem,
so that a change that was fitted to one half is judged by the other. With ``--verbose`` the problems whose
first schedule is far from the best one. With ``--changed FILE`` only that file is written: the schedules
that were put first when the log was made, and those that are now, to be timed side by side:

    python -m bench estimates bench/results/h200_graph_trials.csv --changed out/changed.csv
    python -m bench schedules out/changed.csv --out out

Times above ``GRAPH_US`` were taken between events, which begins with an idle GPU: what that adds to a
kernel of a stream (``ALONE_US``) is subtracted.
"""

from __future__ import annotations

import argparse
import hashlib
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import mean, median

from bench.schedules import GIVEN, writing
from bench.tables import geometric_mean, markdown
from bench.trials import REFERENCE, target_of
from transconv.compute import Alone, Compute, parse
from transconv.conv import ConvProblem, ConvWorkload, Epilogue, Prop
from transconv.cost import of_phases, spills
from transconv.errors import TransconvError
from transconv.runtime.timing import GRAPH_US
from transconv.schedule import Schedule
from transconv.selection import shortlist, transfer
from transconv.selection.proposals.maps import even
from transconv.target import Target
from transconv.tuning.session import TuningJob, read_log
from transconv.tuning.table import Row, number

ALONE_US = 3.4  # of a launch: of 4.1 us that a fit of such times found, 0.7 are there in a stream, too
FAR = 1.1  # times as slow as the best: what --verbose lists


@dataclass(frozen=True, slots=True)
class TimedSchedule:
    """A schedule: its time, its estimate, both in microseconds, and how its kernel is written."""

    schedule: Schedule
    us: float
    estimated: float
    last: bool  # whether it is proposed last, because it is likely to spill
    family: str

    @property
    def off(self) -> float:
        """The logarithm of the time by the estimate."""
        return log(self.us / self.estimated)


@dataclass(frozen=True, slots=True)
class TimedProblem:
    """All that was timed of one problem."""

    name: str
    first: TimedSchedule
    timed: tuple[TimedSchedule, ...]

    @property
    def best(self) -> TimedSchedule:
        return min(self.timed, key=lambda t: t.us)

    @property
    def regret(self) -> float:
        """The time of what is put first by that of the best."""
        return self.first.us / self.best.us

    @property
    def agreement(self) -> float:
        """The rank correlation of estimates and times."""
        return rank_correlation([t.estimated for t in self.timed], [t.us for t in self.timed])


def rank_correlation(some: Sequence[float], others: Sequence[float]) -> float:
    """Of two numbers of each of several things (Spearman, 1904): 1 in the same order, -1 in the opposite
    one."""
    ranks = _ranks(some), _ranks(others)
    middle = (len(some) - 1) / 2
    varied = sum((n - middle) ** 2 for n in range(len(some)))
    return sum((a - middle) * (b - middle) for a, b in zip(*ranks, strict=True)) / varied


def _ranks(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    return [order.index(i) for i in range(len(values))]


def alone(us: float) -> float:
    """The time of a kernel among others, from that which a clock of ``transconv.runtime`` tells."""
    return us - ALONE_US if us > GRAPH_US else us


def problems(found: Iterable[Row], target: Target) -> Iterator[TimedProblem]:
    """The problems of logs. Schedules that cannot be read, or are no longer legal, are left out."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in found:
        if number(row, "us") and row.get("verdict", "right") == "right" and row["schedule"] != REFERENCE:
            groups.setdefault((row["problem"], row["direction"], row.get("behind", "")), []).append(row)
    for (text, direction, behind), rows in groups.items():
        computes = _job(text, direction, behind).phases()
        timed = [t for t in (_timed(row, computes, target) for row in rows) if t is not None]
        if timed:
            name = text.split()[1] if text.startswith("compute") else " ".join((text, direction, behind))
            yield TimedProblem(name, _first(timed, computes, target), tuple(timed))


def _job(text: str, direction: str, behind: str) -> TuningJob:
    if text.startswith("compute"):
        return TuningJob(Alone(parse(text)))
    problem = replace(ConvProblem.parse(text), name="")
    return TuningJob(ConvWorkload(problem, Prop(direction), Epilogue.parse(behind)))


def changed(found: Iterable[Row], target: Target) -> Iterator[dict[str, str]]:
    """Lines for ``bench schedules``: of each problem of a log of tune whose first schedule is another one
    now, the one that was first then, and the one that is now."""
    for row in found:
        if row.get("rank") != "0":
            continue
        asked = {"problem": row["problem"], "direction": row["direction"], "behind": row.get("behind", "")}
        job = _job(*asked.values())
        (now,) = shortlist(1, job.phases()[0], target, job.workload)
        before = Schedule.parse(row["schedule"])
        for schedule in (before, now.schedule) if before != now.schedule else ():
            yield asked | {"schedule": str(schedule)}


def _timed(row: Row, computes: Sequence[Compute], target: Target) -> TimedSchedule | None:
    try:
        schedule = Schedule.parse(row["schedule"])
        each = [transfer.fitted(schedule, c, target) for c in computes]
    except TransconvError:
        return None
    if not all(transfer.believable(s, c, target) for s, c in zip(each, computes, strict=True)):
        return None
    pairs = [*zip(each, computes, strict=True)]
    return TimedSchedule(
        each[0],
        alone(float(row["us"])),
        of_phases(each, computes, target),
        any(spills(s, c, target) for s, c in pairs),
        family(each[0], computes[0]),
    )


def _first(timed: Sequence[TimedSchedule], computes: Sequence[Compute], target: Target) -> TimedSchedule:
    """The schedule that the ranking puts first among those that were timed."""
    order = sorted(timed, key=lambda t: (t.last, t.estimated))
    if not computes[0].streams:
        return order[0]
    us = {t.schedule: t.estimated for t in order}
    chosen = even([*us], us, computes[0], target)[0]
    return next(t for t in order if t.schedule == chosen)


def family(schedule: Schedule, compute: Compute) -> str:
    """How a kernel is written, which decides what its estimate consists of."""
    if compute.streams:
        return "reduction" if any(x.size > 1 for x in compute.axes_of("K")) else "map"
    if schedule.unit != "mma":
        return "fma in registers" if schedule.regs or schedule.late else "fma"
    boxed = "boxes" if "box" in (schedule.a, schedule.b) else "gathers"
    return " ".join(
        [boxed, "by roles" if schedule.via == "gluon" else "by Triton", *["split"][: schedule.split_k - 1]]
    )


def half_of(name: str) -> int:
    """Which half of the problems one is in, by its text."""
    return hashlib.sha256(name.encode()).digest()[0] % 2


HEAD = ("schedules", "number", "time / estimate", "median off by", "beyond 2x")


def errors_table(found: Sequence[TimedProblem]) -> str:
    """A line for each family, and one for all: how far estimates are off, as logarithms."""
    families: dict[str, list[float]] = {}
    for problem in found:
        for t in problem.timed:
            families.setdefault(t.family, []).append(t.off)
            families.setdefault("all", []).append(t.off)
    lines = []
    for name, off in sorted(families.items(), key=lambda item: (item[0] == "all", item[0])):
        beyond = sum(abs(x) > log(2) for x in off)
        lines.append(
            [name, str(len(off)), f"{exp(median(off)):.2f}", f"{median(map(abs, off)):.2f}", str(beyond)]
        )
    return markdown([*HEAD], lines)


def choices(found: Sequence[TimedProblem]) -> str:
    """What the choices cost, in a sentence."""
    several = [p for p in found if len(p.timed) > 1]
    if not several:
        return "no problem has two schedules"
    worst = max(several, key=lambda p: p.regret)
    return (
        f"{len(several)} problems: the schedule put first takes "
        f"{geometric_mean([p.regret for p in several]):.3f} times as long as the best one (at most "
        f"{worst.regret:.2f}); rank correlation {mean(p.agreement for p in several):.2f}"
    )


def arguments(made: argparse.ArgumentParser) -> None:
    """Its options."""
    made.add_argument("logs", nargs="+", type=Path, help="logs of tune, tables of schedules, or sweeps")
    made.add_argument("--half", type=int, choices=(0, 1), default=None, help="only every other problem")
    made.add_argument(
        "--changed", type=Path, help="write here, for bench schedules, what was put first and what is now"
    )
    made.add_argument(
        "--verbose", action="store_true", help="also list choices that are far from the best"
    )


def main(options: Namespace) -> int:
    """Print a table and a sentence for each log. Raises ValueError for a file that is no log."""
    logs = [read_log(path) for path in options.logs]
    if options.changed:
        with writing(options.changed, GIVEN) as write:
            for rows in logs:
                for line in changed(rows, target_of(rows)):
                    write(line)
        return 0
    for path, rows in zip(options.logs, logs, strict=True):
        if not rows or {"problem", "direction", "schedule", "us"} - set(rows[0]):
            raise ValueError(f"{path} has no schedules with times; expected a log of transconv tune")
        found = [
            p
            for p in problems(rows, target_of(rows))
            if options.half is None or half_of(p.name) == options.half
        ]
        print(f"{path.name}\n\n{errors_table(found)}\n\n{choices(found)}\n")
        for p in sorted(found, key=lambda p: -p.regret) if options.verbose else ():
            if p.regret > FAR:
                print(f"{p.regret:.2f}  {p.name}")
                for said, t in (("first", p.first), ("best", p.best)):
                    print(f"      {said:5} {t.us:9.1f} us, estimate {t.estimated:9.1f}  {t.schedule}")
    return 0
