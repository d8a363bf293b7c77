"""Functions behind a sum (GELU, SiLU): what is estimated of 48 kernels that were measured, by
``python -m bench schedules bench/problems/called_trials.csv``."""

from __future__ import annotations

import csv
from collections import defaultdict
from math import exp, log
from pathlib import Path
from statistics import mean

from tests.stages import SM90
from transconv.conv import ConvProblem, Epilogue, Prop, compiler
from transconv.cost import estimate
from transconv.schedule import Schedule

MEASURED = Path(__file__).parents[2] / "bench" / "results" / "h100_called_trials.csv"


def estimated(row: dict[str, str]) -> float:
    plan = compiler.build(ConvProblem.parse(row["problem"]), Prop.FWD, SM90,
                          Schedule.parse(row["schedule"]), Epilogue.parse(row["behind"]))
    (step,) = plan.steps
    return estimate(step.schedule, step.compute, SM90)


def test_estimates_of_functions_behind_a_sum() -> None:
    """The schedule that is estimated to be the fastest takes little more than the fastest one."""
    with MEASURED.open(newline="", encoding="utf-8") as file:
        rows = [(r, float(r["us"]), estimated(r)) for r in csv.DictReader(file)]
    assert len(rows) == 48
    assert 0.8 < exp(mean(log(us / most) for _, us, most in rows)) < 1.05
    trials: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row, us, found in rows:
        trials[row["problem"], row["behind"]].append((found, us))
    regret = [min(each)[1] / min(us for _, us in each) for each in trials.values()]
    assert max(regret) < 1.1, regret
