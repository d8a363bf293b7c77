"""The estimate of maps and reductions beside the schedules that were timed on an H200."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from dataclasses import replace

import pytest

from bench.environment import ROOT
from bench.map_cases import cases
from transconv.compute import kernels, parse
from transconv.cost import estimate
from transconv.schedule import Schedule
from transconv.selection.maps import even
from transconv.target import TARGETS

H200 = replace(TARGETS["sm_90"], bandwidth_gbs=4800.0)
TRIALS = ROOT / "bench" / "results" / "h200_map_trials.csv"


def timed() -> dict[str, dict[Schedule, float]]:
    """Microseconds of schedules, by the computation that they are of."""
    found: dict[str, dict[Schedule, float]] = defaultdict(dict)
    with TRIALS.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["case"]][Schedule.parse(row["schedule"])] = float(row["us"])
    return found


def test_what_is_chosen_is_nearly_the_fastest() -> None:
    """In the geometric mean within 8% of the best that was timed, and never twice as slow."""
    logs = {}
    known = timed()
    for case in cases():
        made = kernels(parse(case.text))
        for name, compute in ((case.name, made[0]), *((f"{case.name}: {k.name}", k) for k in made)):
            if len(of := known.get(name, {})) > 1:
                us = {s: estimate(s, compute, H200) for s in of}
                first = even(sorted(us, key=lambda s: us[s]), us, compute, H200)[0]
                logs[name] = math.log(of[first] / min(of.values()))
    assert len(logs) > 40
    assert math.exp(sum(logs.values()) / len(logs)) < 1.08, logs
    assert max(logs.values()) < math.log(2), logs


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_cases_are_texts(case: object) -> None:
    made = parse(case.text)  # type: ignore[attr-defined]
    assert parse(str(made)) == made and kernels(made)
