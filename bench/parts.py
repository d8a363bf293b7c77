"""Times each kernel of plans, copies and sums of parts as well as products: a row each in ``parts.csv``.

A file has a line for each plan, as for ``python -m bench schedules``, which compiles the same kernels,
many at a time. Kernels are timed where they run: what lies between them does not count.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch

from bench.environment import VERSIONS, expect_gpu, versions
from bench.schedules import GIVEN, asked, which, writing
from transconv.errors import TransconvError
from transconv.verify.case import Call
from transconv.verify.computation import case_of
from transconv.verify.machine import synchronize

COLUMNS = (*GIVEN, "call", "kernel", "us", *VERSIONS)
TAIL = re.compile(r"_[0-9a-f]{8}$")  # of a kernel's name: what tells equal names apart


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    which(parser)
    parser.add_argument("--calls", type=int, default=20, help="calls of each plan")


def main(options: argparse.Namespace) -> int:
    """Measure, and print as it goes. 1 if a plan was refused. Raises ValueError where there is no GPU."""
    expect_gpu("parts")
    about, refused = versions(), 0
    rows = asked(options)
    with writing(Path(options.out) / "parts.csv", COLUMNS) as write:
        for row in rows:
            try:
                found = measured(row, options.calls)
            except TransconvError as error:
                found, refused = {f"{type(error).__name__}: {error}": float("nan")}, refused + 1
            for at, (kernel, us) in enumerate(found.items()):
                write({**about, **row, "call": at, "kernel": kernel, "us": us})
            each = ", ".join(f"{kernel} {us:.2f}" for kernel, us in found.items())
            what = f"{row['problem']} {row['direction']} | {row['schedule']}"
            print(f"{sum(found.values()):9.2f} us {what}: {each}", flush=True)
    return int(refused > 0)


def measured(row: dict[str, str], calls: int) -> dict[str, float]:
    """The median microseconds of each kernel of a call; on a CPU the computations, without times."""
    case = case_of(row["problem"], row["direction"], row["behind"])
    plan = case.plan(row["schedule"])
    call = case.make(plan)(0)
    call()
    synchronize()
    found = (
        seen(call, calls)
        if case.where == "cuda"
        else {step.compute.name: float("nan") for step in plan.steps}
    )
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
