"""Residuals behind 1x1 convolutions, timed on an H100 (bench/problems/residual_trials.csv)."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stages import SM90
from transconv.conv import ConvProblem, Epilogue, Prop
from transconv.conv.workload import ConvWorkload
from transconv.cost import estimate
from transconv.schedule import Schedule, why_not

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def timed(problem: str) -> Iterator[tuple[Schedule, float, float]]:
    """Persistent kernels of a problem whose residual is fetched in boxes: microseconds, and estimated."""
    with (RESULTS / "h100_residual_trials.csv").open() as file:
        for row in csv.DictReader(file):
            schedule = Schedule.parse(row["schedule"])
            if row["problem"].startswith(problem) and schedule.programs and schedule.behind == "box":
                behind = Epilogue.parse(row["behind"])
                work = ConvWorkload(ConvProblem.parse(row["problem"]), Prop.FWD, behind)
                compute = work.computations[0]
                assert why_not(schedule, compute, SM90) is None and row["verdict"] == "right"
                yield schedule, float(row["us"]), estimate(schedule, compute, SM90)


@pytest.mark.parametrize("problem", ["mb32ic64ih56", "mb32ic128ih28", "mb32ic256ih14"])
def test_estimates_find_a_fast_one(problem: str) -> None:
    """They are the time within a quarter, and the best of them is within 1.15 of the fastest kernel."""
    found = [(us, guess) for _, us, guess in timed(problem)]
    assert len(found) == 7 and all(0.75 < guess / us < 1.25 for us, guess in found)
    assert min(found, key=lambda x: x[1])[0] < 1.15 * min(us for us, _ in found)
