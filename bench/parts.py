"""Times each kernel of plans, copies and sums of parts as well as products: a row each in ``parts.csv``.

A file has a line for each plan, as for ``python -m bench schedules``, which compiles the same kernels,
many at a time. Kernels are timed where they run: what lies between them does not count.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch

from bench.environment import expect_gpu, versions
from bench.schedules import GIVEN, read
from transconv.errors import TransconvError
from transconv.verify.case import synchronize
from transconv.verify.timed import Call, timed

COLUMNS = (*GIVEN, "call", "kernel", "us", "device", "torch", "triton", "commit")
TAIL = re.compile(r"_[0-9a-f]{8}$")  # of a kernel's name: what tells equal names apart


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("files", nargs="+", type=Path,
                        help=f"CSV files with the columns {', '.join(GIVEN)}")
    parser.add_argument("--match", default="", help="only problems that have this in their text")
    parser.add_argument("--calls", type=int, default=20, help="calls of each plan")


def main(options: argparse.Namespace) -> int:
    """Measure, and print as it goes. 1 if a plan was refused. Raises ValueError where there is no GPU."""
    expect_gpu("parts")
    asked = [row for path in options.files for row in read(path) if options.match in row["problem"]]
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    about, refused = versions(), 0
    with (out / "parts.csv").open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, COLUMNS, lineterminator="\n", extrasaction="ignore")
        lines.writeheader()
        for row in asked:
            try:
                found = measured(row, options.calls)
            except TransconvError as error:
                found, refused = {f"{type(error).__name__}: {error}": float("nan")}, refused + 1
            for at, (kernel, us) in enumerate(found.items()):
                lines.writerow({**about, **row, "call": at, "kernel": kernel, "us": us})
            file.flush()
            each = ", ".join(f"{kernel} {us:.2f}" for kernel, us in found.items())
            what = f"{row['problem']} {row['direction']} | {row['schedule']}"
            print(f"{sum(found.values()):9.2f} us {what}: {each}", flush=True)
    return int(refused > 0)


def measured(row: dict[str, str], calls: int) -> dict[str, float]:
    """The median microseconds of each kernel of a call; on a CPU the computations, without times."""
    case = timed(row["problem"], row["direction"], row["behind"])
    plan = case.plan(row["schedule"])
    call = case.make(plan)(0)
    call()
    synchronize()
    found = (seen(call, calls) if case.where == "cuda" else
             {step.compute.name: float("nan") for step in plan.steps})
    case.release()
    return found


def seen(call: Call, calls: int) -> dict[str, float]:
    """The kernels that calls ran, by their names, and the median of their microseconds."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        call()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as watched:
        for _ in range(calls):
            call()
        synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in watched.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[TAIL.sub("", event.name)].append(event.time_range.end - event.time_range.start)
    return {name: median(each) for name, each in times.items()}
