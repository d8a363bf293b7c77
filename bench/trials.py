"""``python -m bench trials``: how good the first trials of the ranking are, and what compiling takes.

Reads logs of ``transconv tune`` (and sweeps: problem, direction, schedule, us), and measures
nothing. Shares are those of the best time that the log has for the row: 0.95 means 5% slower. The
order of trials is that of the estimate now, so that a change of the estimate shows at once.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from bench.tables import geometric_mean, markdown
from transconv.cli.arguments import ranges
from transconv.conv import DIRECTIONS, ConvProblem, ConvWorkload, Epilogue, Prop, from_problems
from transconv.cost import estimate, of_phases
from transconv.errors import TransconvError
from transconv.schedule import Schedule
from transconv.selection import choice, transfer, tuning_db
from transconv.support import replace_named
from transconv.target import Target, of_card
from transconv.tuning.session import TuningJob, read_log
from transconv.tuning.table import Row, number

COUNTS = (1, 4, 8, 16)
REFERENCE = "cudnn"  # a sweep's row of another library


@dataclass(frozen=True, slots=True)
class Tried:
    """What a log has about one direction of one problem: times by schedule (right ones), and which
    schedules were tried before their time was known to be worth a look: ``ranked`` by the estimate,
    ``explored`` after them, in the order of the log."""

    job: TuningJob
    kind: str
    direction: str
    times: dict[Schedule, float]
    ranked: tuple[Schedule, ...]
    explored: tuple[Schedule, ...]

    @property
    def best(self) -> float:
        return min(self.times.values())

    def share(self, count: int) -> float:
        """Best of the first ``count`` trials, as a share of the best of all."""
        first = (*self.ranked, *self.explored)[:count]
        return self.best / min(self.times[c] for c in first)


def collect(found: Iterable[Row], target: Target) -> list[Tried]:
    """The rows of logs, by problem and direction. Schedules that cannot be read or are no longer
    legal are left out."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in found:
        if number(row, "us") and row.get("verdict", "right") == "right" and (row["schedule"] != REFERENCE):
            groups.setdefault((row["problem"], row["direction"], row.get("behind", "")), []).append(row)
    made = []
    for (text, direction, behind), mine in groups.items():
        problem = replace(ConvProblem.parse(text), name="")
        job = TuningJob(ConvWorkload(problem, Prop(direction), Epilogue.parse(behind)))
        tried = _tried(job, mine, target)
        if tried is not None:
            made.append(tried)
    return made


def _tried(job: TuningJob, mine: list[Row], target: Target) -> Tried | None:
    phases = job.phases()
    times: dict[Schedule, float] = {}
    guesses: dict[Schedule, float] = {}
    explored = []
    for row in mine:
        try:
            schedule = Schedule.parse(row["schedule"])
            fitted = [transfer.fitted(schedule, a, target) for a in phases]
            if not all(transfer.believable(c, a, target) for c, a in zip(fitted, phases, strict=True)):
                continue
        except TransconvError:
            continue
        times[schedule] = float(row["us"])
        guesses[schedule] = of_phases(fitted, phases, target)
        if row.get("origin") == "neighbour":
            explored.append(schedule)
    if not times:
        return None
    ranked = sorted((c for c in times if c not in explored), key=lambda c: guesses[c])
    assert isinstance(job.workload, ConvWorkload)
    (layer,) = from_problems([job.workload.problem], "")
    return Tried(
        job,
        layer.kind,
        mine[0].get("layer_direction") or job.workload.direction,
        times,
        tuple(ranked),
        tuple(explored),
    )


# -- tables ----------------------------------------------------------------------------------------


def shares(found: Sequence[Tried]) -> str:
    """Geometric mean (and the worst) share of the best after so many trials."""
    lines = []
    for kind in (*dict.fromkeys(t.kind for t in found), "all"):
        for direction in DIRECTIONS:
            mine = [t for t in found if kind in ("all", t.kind) and t.direction == direction]
            if not mine or (kind == "all" and len({t.kind for t in found}) == 1):
                continue
            cells = []
            for count in COUNTS:
                values = [t.share(count) for t in mine if len(t.times) >= count]
                cells.append(f"{geometric_mean(values):.3f} ({min(values):.2f})" if values else "-")
            tried = sum(len(t.times) for t in mine) / len(mine)
            lines.append([kind, direction, str(len(mine)), f"{tried:.0f}", *cells])
    return markdown(
        ["layers", "direction", "problems", "schedules each", *(f"after {n}" for n in COUNTS)], lines
    )


def explored(found: Sequence[Tried]) -> str:
    """What looking around the best found adds to the best of the ranking's trials."""
    mine = [t for t in found if t.explored and t.ranked]
    if not mine:
        return "The logs have no trials around the best found."
    gains = [min(t.times[c] for c in t.ranked) / t.best for t in mine]
    better = sum(g > 1.02 for g in gains)
    return (
        f"Trials around the best found made it {geometric_mean(gains):.3f} times as fast in "
        f"geometric mean over {len(mine)} problems, more than 2% faster in {better} of them, "
        f"at most {max(gains):.2f} times."
    )


def left_out(found: Sequence[Tried], target: Target) -> str:
    """The measured schedule that a database of all other problems would choose for each problem."""
    table = [
        tuning_db.make(
            t.job.workload, target, str(min(t.times, key=lambda c: t.times[c])), t.best, len(t.times)
        )
        for t in found
    ]
    groups = [t.job.workload.group(tuning_db.machine(target)) for t in found]
    plain, near, used = [], [], 0
    for i, tried in enumerate(found):
        others = [
            r for j, r in enumerate(table) if j != i and groups[j] == groups[i] and r.key != table[i].key
        ]
        schedule = _neighbours_choice(tried, others, target)
        first = tried.times[(*tried.ranked, *tried.explored)[0]]
        plain.append(tried.best / first)
        near.append(tried.best / (tried.times[schedule] if schedule else first))
        used += schedule is not None
    return (
        f"The estimate alone reaches {geometric_mean(plain):.3f} (worst {min(plain):.2f}) of the "
        f"best found; with the rows of all other problems as a database, which then speak for "
        f"{used} of {len(found)} problems, {geometric_mean(near):.3f} (worst {min(near):.2f})."
    )


def _neighbours_choice(
    tried: Tried, others: list[tuning_db.TuningRecord], target: Target
) -> Schedule | None:
    """The schedule that neighbours put first, if any; only measured ones can be."""
    compute = tried.job.phases()[0]
    measured = sorted(
        (choice.Choice(c, estimate(c, compute, target)) for c in tried.times), key=lambda c: c.us
    )
    for away, row, other in transfer.nearest(tried.job.workload, others):
        winner = Schedule.parse(row.schedule)
        made = choice.of_neighbour(winner, winner, row, away, other, measured, compute, target)
        made = [m for m in made if m.schedule in tried.times]
        if made:
            return made[0].schedule
    return None


def seconds(found: Iterable[Row]) -> str:
    """Seconds to generate a plan's kernels and to compile them, by how operands are fetched."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for row in found:
        lower, triton = number(row, "lower_s"), number(row, "triton_s")
        if lower is not None and triton is not None:
            groups.setdefault(_path(row["schedule"]), []).append((lower, triton))
    lines = []
    for name, pairs in sorted(groups.items()):
        cells = [
            f"{median(v):.2f} / {sorted(v)[int(0.9 * (len(v) - 1))]:.2f} / {max(v):.2f}"
            for v in zip(*pairs, strict=True)
        ]
        lines.append([name, str(len(pairs)), *cells])
    return markdown(
        [
            "kernels",
            "plans",
            "generated s: median / 90% / most",
            "compiled by Triton s: median / 90% / most",
        ],
        lines,
    )


def _path(text: str) -> str:
    """The words of a schedule that decide how a kernel is written."""
    try:
        schedule = Schedule.parse(text)
    except TransconvError:
        return "other"
    words = [schedule.unit, "box" if "box" in (schedule.a, schedule.b) else "gather"]
    via = getattr(schedule, "via", "")
    return " ".join([*words, *([str(via)] if via else []), *(["split"] if schedule.split_k > 1 else [])])


def document(found: list[Row], target: Target, sources: Sequence[str]) -> str:
    """The whole page, Markdown. Raises ValueError where no time can be judged."""
    tried = collect(found, target)
    if not tried:
        raise ValueError("the logs have no time of a kernel that was right; expected one at least")
    told = [sorted({r.get(c, "") for r in found} - {""}) for c in ("device", "torch", "triton")]
    parts = [
        "# Trials: how good the ranking is, and what compiling takes",
        "Measured on {}, torch {}, Triton {}; from {}.".format(
            *(", ".join(t) for t in told), ", ".join(f"`{s}`" for s in sources)
        ),
        "Generated by `python -m bench trials`. Share of the best time that the logs have, "
        "geometric mean (worst), after the first trials: those of the ranking in the order of "
        "the estimate, then those around the best found.",
        shares(tried),
        explored(tried),
        left_out(tried, target),
    ]
    if any(number(r, "triton_s") for r in found):
        parts += ["What one plan costs before its first launch, one process, cold caches:", seconds(found)]
    return "\n\n".join(parts) + "\n"


def target_of(found: Iterable[Row]) -> Target:
    """The chip that the logs were measured on; sweeps, which do not say it, on sm_90. Raises
    ValueError for logs of several."""
    found = list(found)
    names = sorted({m.rpartition("x")[0] for r in found if (m := r.get("machine", ""))}) or ["sm_90"]
    if len(names) > 1:
        raise ValueError(f"the logs are of {', '.join(names)}; expected those of one chip")
    target = Target.parse(names[0])
    target = of_card(target, " ".join({r.get("device", "") for r in found}))
    # The record's bandwidth is an H100's.
    return (
        replace(target, bandwidth_gbs=4800)
        if any("H200" in r.get("device", "") for r in found)
        else target
    )


def arguments(made: argparse.ArgumentParser) -> None:
    made.add_argument("logs", nargs="+", help="logs of tune, or sweeps")
    made.add_argument("--docs", type=ranges.output, default=None, help="also write the document here")


def main(options: Namespace) -> int:
    """Print the document. Raises ValueError if the logs hold nothing."""
    found = [row for path in options.logs for row in read_log(Path(path))]
    if not found:
        raise ValueError(f"{', '.join(options.logs)}: the logs are empty; expected those of tune")
    if lacks := {"problem", "direction", "schedule", "us"} - set(found[0]):
        raise ValueError(
            f"{options.logs[0]} is no log of tune: it has no column {', '.join(sorted(lacks))}"
        )
    target = target_of(found)
    text = document(found, target, [Path(p).name for p in options.logs])
    if options.docs:
        replace_named(options.docs, text)
    print(text)
    return 0
