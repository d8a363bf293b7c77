"""Functions behind a sum (GELU, SiLU): what is estimated of 48 kernels that were measured, by
``python -m bench schedules bench/problems/called_trials.csv``."""

from __future__ import annotations

import csv
from collections import defaultdict
from math import exp, log
from pathlib import Path
from statistics import mean

import pytest

from tests.stages import SM90
from transconv.compute import parse
from transconv.conv import ConvProblem, Epilogue, Prop, compiler
from transconv.cost import estimate
from transconv.cost.copies import PLAIN, read_behind
from transconv.ir import CALLS
from transconv.schedule import Schedule

MEASURED = Path(__file__).parents[2] / "bench" / "results" / "h100_called_trials.csv"


def estimated(row: dict[str, str]) -> float:
    plan = compiler.build(
        ConvProblem.parse(row["problem"]),
        Prop.FWD,
        SM90,
        Schedule.parse(row["schedule"]),
        Epilogue.parse(row["behind"]),
    )
    (step,) = plan.steps
    return estimate(step.schedule, step.compute, SM90)


@pytest.mark.slow
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


WAVE = """compute wave
    tensor x f16 [m=65536, k=96]
    tensor w f16 [n=128, k=96]
    axes   m=65536 n=128 | k=96
    read   u = x[m, k]
    read   v = w[n, k]
    let    s = sum(u*v; k)
    store  y[m, n] = {value}"""


def slots_of(value: str, rows: int) -> float:
    """Slots of an element of a tile of so many rows."""
    tile = Schedule.parse(f"m:{rows} n:128 k:32 | mma | a=box b=box | c=box stages=4 warps=8 via=gluon")
    return read_behind(tile, parse(WAVE.format(value=value))).called / (rows * 128)


def test_a_function_with_a_branch_holds_the_sums_of_a_thread() -> None:
    """128 of them beside as many arguments are more than a thread has registers; 64 are not."""
    plain = CALLS["sin"].slots + 1 - PLAIN
    assert slots_of("sin(s) + 1.0", 128) == plain < slots_of("sin(s) + 1.0", 256)
    assert slots_of("erf(s) + 1.0", 128) == slots_of("erf(s) + 1.0", 256) == CALLS["erf"].slots + 1 - PLAIN


def test_every_operation_has_a_price() -> None:
    """A product and what is added to it are one instruction; a bias is beside the store."""
    found = [
        slots_of(value, 128)
        for value in (
            "s + 1.0",
            "max(s + 1.0, 0.0)",
            "s*2.0 + 1.0",
            "where(s < 2.0, s*s, 1.0)",
            "s / (s + 2.0)",
        )
    ]
    assert found == [0, 1, 0, 2, 8]
