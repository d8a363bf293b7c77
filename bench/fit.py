"""Fit the constants of the estimate to measured sweeps, and tell how well it ranks.

    python -m bench.fit sweep.csv more.csv          table of first/best, and the leave-one-out check
    python -m bench.fit --fit sweep.csv more.csv    search for better constants first

A sweep has the columns problem, direction, schedule, us; ``cudnn`` as schedule is the reference, an empty
``us`` means refused. The last file that has a schedule counts. Numbers are ratios of times, the best
measured schedule over the one that the estimate puts first among the measured ones. The constants of
the H200 were fitted to bench/results/h200_sweep_boxes.csv and bench/results/h200_sweep_gather.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, log
from pathlib import Path

from transconv.conv import ConvProblem, Prop, computes
from transconv.cost import Work, count
from transconv.cost import model as cost
from transconv.schedule import Schedule, why_not
from transconv.target import TARGETS, Constants, Target
from transconv.tuning.session import read_log

REFERENCE = "cudnn"
NOT_FITTED = (
    "latency_ns",
    "late_access_ns",
    "scatter_ns",
    "behind_ns",
    "copy_us",
    "baton_ns",
    "meeting_us",
    "through_ns",
    "older",
    "shared_gbs",
    "fma_share",
)  # too few trials have them
SHARES = ("persistent", "memory_share", "exposed")  # at most 1
H200 = replace(TARGETS["sm_90"], bandwidth_gbs=4800)

# Where the leave-one-out check begins: rough guesses, so that the full fit does not leak into it.
ROUGH = Constants(
    narrow=16,
    fetch_gbs=100,
    short_rows=0.5,
    access_ns=0.02,
    unpack_ns=0.05,
    gather_step_ns=100,
    fill_ns=1000,
    store_gbs=25,
    box_store=0.5,
    flat_positions=1.5,
    persistent=0.5,
    memory_share=0.75,
    exposed=0.2,
    launch_us=3,
)


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured schedule: the counts of each of its kernels (several where there are phases)."""

    schedule: Schedule
    works: tuple[Work, ...]
    us: float


@dataclass(frozen=True, slots=True)
class Group:
    """All that was measured of one direction of one problem."""

    problem: str
    prop: str
    reference: float
    samples: tuple[Sample, ...]

    @property
    def best(self) -> Sample:
        return min(self.samples, key=lambda s: s.us)


def read(paths: Iterable[Path], target: Target, whole: Iterable[Path] = ()) -> list[Group]:
    """The groups of the sweeps; schedules that are legal no more are left out, and of the files
    ``whole`` those that split the sum."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    whole = set(whole)
    for path in [*whole, *paths]:
        for row in read_log(path):
            if row["us"] and not (path in whole and "split_k" in row["schedule"]):
                group = found.setdefault((row["problem"], row["direction"]), {})
                group[row["schedule"]] = float(row["us"])
    groups = [_group(*key, times, target) for key, times in found.items()]
    return [g for g in groups if g.samples]


def _group(problem: str, prop: str, found: dict[str, float], target: Target) -> Group:
    parts = computes(ConvProblem.parse(problem), Prop(prop))
    samples = []
    for text, us in found.items():
        if text == REFERENCE:
            continue
        schedule = Schedule.parse(text)
        if all(why_not(schedule, a, target) is None for a in parts):
            works = tuple(count(schedule, a, target) for a in parts)
            samples.append(Sample(schedule, works, us))
    return Group(problem, prop, found.get(REFERENCE, 0.0), tuple(samples))


def predicted(sample: Sample, target: Target, constants: Constants) -> float:
    return sum(cost.microseconds(w, sample.schedule, target, constants) for w in sample.works)


def first(group: Group, target: Target, constants: Constants) -> Sample:
    """The measured schedule that the estimate ranks first."""
    return min(group.samples, key=lambda s: (predicted(s, target, constants), str(s.schedule)))


def ratio(group: Group, target: Target, constants: Constants) -> float:
    return group.best.us / first(group, target, constants).us


def loss(groups: Sequence[Group], target: Target, constants: Constants) -> float:
    """The error of the times, weighted towards the best schedules, and the cost of ranking by them.

    Only relative times matter within a group, so half of a common error is forgiven.
    """
    total = 0.0
    for g in groups:
        best = g.best.us
        guesses = [predicted(s, target, constants) for s in g.samples]
        errors = [log(guess / s.us) for guess, s in zip(guesses, g.samples, strict=True)]
        weights = [(best / s.us) ** 4 for s in g.samples]
        mean = sum(e * w for e, w in zip(errors, weights, strict=True)) / sum(weights)
        total += sum(w * (e - 0.7 * mean) ** 2 for e, w in zip(errors, weights, strict=True)) / sum(
            weights
        )
        # A soft choice: schedules guessed within some 2% of the first share the vote.
        least = min(guesses)
        votes = [exp(-log(guess / least) / 0.02) for guess in guesses]
        lost = sum(v * log(s.us / best) for v, s in zip(votes, g.samples, strict=True)) / sum(votes)
        total += lost + 2 * lost * lost
    return total / len(groups)


def search(score: Callable[[Constants], float], start: Constants, rounds: int = 30) -> Constants:
    """Change one constant at a time, by smaller and smaller factors, as long as it helps."""
    names = [f.name for f in fields(Constants) if f.name not in NOT_FITTED]
    best, least, factor = start, score(start), 1.5
    for _ in range(rounds):
        before = least
        for name in names:
            for by in (factor, 1 / factor):
                value = getattr(best, name) * by
                if name in SHARES:
                    value = min(value, 1.0)
                tried = replace(best, **{name: value})
                if (now := score(tried)) < least:
                    best, least = tried, now
                    break
        if least > before * 0.999:
            factor = factor**0.5
            if factor < 1.02:
                break
    return best


def geomean(values: Iterable[float]) -> float:
    logs = [log(v) for v in values]
    return exp(sum(logs) / len(logs))


def table(groups: Sequence[Group], target: Target, constants: Constants) -> str:
    rows = ["problem prop ref_us best_us first_us ratio estimate first best".split()]
    for g in groups:
        top = first(g, target, constants)
        times = [g.reference, g.best.us, top.us, g.best.us / top.us, predicted(top, target, constants)]
        numbers = [f"{t:.3f}" if at == 3 else f"{t:.1f}" for at, t in enumerate(times)]
        best = "" if top is g.best else str(g.best.schedule)
        rows.append([g.problem.split()[0], g.prop, *numbers, str(top.schedule), best])
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Cells under one another, two spaces apart."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{n}}" for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def summary(groups: Sequence[Group], target: Target, constants: Constants) -> str:
    ratios = [ratio(g, target, constants) for g in groups]
    return f"geomean {geomean(ratios):.3f}  worst {min(ratios):.3f}  groups {len(ratios)}"


def leave_one_out(groups: Sequence[Group], target: Target) -> list[tuple[str, float]]:
    """Per problem: the geometric mean of its ratios with constants fitted to all the others."""
    found = []
    for problem in dict.fromkeys(g.problem for g in groups):
        others = [g for g in groups if g.problem != problem]
        fitted = search(lambda c: loss(others, target, c), ROUGH)  # noqa: B023
        found.append((problem, geomean(ratio(g, target, fitted) for g in groups if g.problem == problem)))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sweeps", nargs="+", type=Path)
    parser.add_argument(
        "--whole",
        nargs="+",
        type=Path,
        default=[],
        metavar="SWEEP",
        help="older sweeps whose split sums are out of date",
    )
    parser.add_argument("--fit", action="store_true", help="search for better constants")
    parser.add_argument("--no-check", action="store_true", help="skip the leave-one-out check")
    given = parser.parse_args(arguments)
    groups = read(given.sweeps, H200, given.whole)
    constants = H200.rates.triton
    if given.fit:
        constants = search(lambda c: loss(groups, H200, c), constants)
        print("\n".join(f"{f.name} = {getattr(constants, f.name):.4g}" for f in fields(constants)))
    print(table(groups, H200, constants))
    print(summary(groups, H200, constants))
    if not given.no_check:
        left = leave_one_out(groups, H200)
        print(columns([("left out", "ratio"), *((p.split()[0], f"{r:.3f}") for p, r in left)]))
        print(f"left out one by one: geomean {geomean(r for _, r in left):.3f}")


if __name__ == "__main__":
    main()
