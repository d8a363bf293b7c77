"""Estimates of kernels of 8 bits: near what was measured on an H200, and what they decide."""

from __future__ import annotations

import csv
from pathlib import Path

from transconv.conv import ConvProblem, Epilogue, Prop
from transconv.conv.relation import computes
from transconv.cost import estimate
from transconv.cost.work import count
from transconv.schedule import Schedule
from transconv.target import TARGETS

SM90 = TARGETS["sm_90"]
ROWS = Path(__file__).parents[2] / "bench" / "results" / "h200_small_types.csv"
LONG = 20.0  # microseconds; of shorter kernels launches decide


def us(row: dict[str, str]) -> float:
    made = computes(ConvProblem.parse(row["problem"]), Prop(row["prop"]), Epilogue.parse(row["epilogue"]))
    return estimate(Schedule.parse(row["config"]), next(c for c in made if c.factors), SM90)


def test_estimates_are_near_what_was_measured() -> None:
    with ROWS.open(newline="", encoding="utf-8") as file:
        rows = [
            r
            for r in csv.DictReader(file)
            if r["dtype"] != "bf16"
            and r["prop"] == "fwd"
            and r["kind"] == "dense"
            and float(r["ours_us"]) > LONG
        ]
    found = {(r["layer"], r["dtype"]): us(r) / float(r["ours_us"]) for r in rows}
    assert len(found) > 40
    far = {name: round(ratio, 2) for name, ratio in found.items() if not 0.7 < ratio < 1.5}
    assert not far


def test_rows_that_follow_one_another_fill_lines() -> None:
    """Of all 32 features of 8 bits at neighbouring positions; not of half of them, or at every second."""
    schedule = Schedule.parse("mb.oh.ow:256 oc:32 ic:32 | mma | a=gather b=gather | stages=4 warps=4")
    for line, lines in (
        ("mb8ic32ih128oc32oh128kh3ph1", 128),
        ("g2mb8ic64ih128oc64oh128kh3ph1", 32),
        ("mb8ic32ih128oc32oh64kh3sh2ph1", 32),
    ):
        (compute,) = computes(ConvProblem.parse(f"{line} dt=s8:s8:s8 tag=nhwc"), Prop.FWD)
        assert min(count(schedule, compute, SM90).fetched[0].row, 128) == lines
