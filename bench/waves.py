"""Subjects that are compiled some at a time, each by a process of its own, and then timed one by one.

A wave of processes divides the cores and the GPUs, so that their compilers do not wait for each other's;
when all of a wave have compiled, each is timed alone, with all cores, and ends.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transconv.cli.arguments import ranges
from transconv.verify.machine import Pool, Task, WorkerTask

Row = dict[str, Any]
TIMING_S = 60.0  # at most for one subject

_all: set[int] = set()  # the cores that this process had at first


def arguments(
    parser: argparse.ArgumentParser, subject: str, together: int, limit: float, budget: float
) -> None:
    """The options of a command whose subjects are compiled and timed so, with their defaults."""
    parser.add_argument(
        "--together",
        type=ranges.processes,
        default=together,
        help=f"{subject}s that are compiled at the same time, before they are timed one by one; "
        "they divide the cores and GPUs",
    )
    parser.add_argument(
        "--limit", type=ranges.limit, default=limit, help=f"seconds to compile one {subject}"
    )
    parser.add_argument(
        "--time-budget", type=ranges.seconds, default=budget, help="seconds; then everything ends"
    )
    parser.add_argument("--cache", default="", help="folder of compiled kernels")


def groups(
    function: str, names: Sequence[str], together: int, variables: Mapping[str, str], gpus: int
) -> dict[str, WorkerTask]:
    """A process for each subject. ``function`` takes its payload, with the ``step``, ``prepare`` or
    ``time``, and calls ``take``; what it returns in the second has ``fatal``."""
    seen = [x for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x]
    found = {}
    for at, name in enumerate(names):
        own = dict(variables)
        if gpus > 1:
            card = at % together % gpus
            own["CUDA_VISIBLE_DEVICES"] = seen[card] if len(seen) == gpus else str(card)
        found[name] = WorkerTask(function, 1, own)
    return found


def measured(
    pool: Pool, payloads: Mapping[str, Row], together: int, limit: float, budget: float
) -> Iterator[tuple[str, Row]]:
    """Subjects with what was found of them, once compiled and once timed. ``limit``: seconds to compile
    one; ``budget``: seconds for all."""

    def task(step: str, name: str) -> Task:
        share = (places[name], min(together, len(places)))
        return Task(
            name, payloads[name] | {"step": step, "share": share}, limit if step == "prepare" else TIMING_S
        )

    todo = [*payloads]
    places = {name: at % together for at, name in enumerate(todo)}
    waves = [todo[i : i + together] for i in range(0, len(todo), together)]
    compiling = {*(waves.pop(0) if waves else ())}
    ready: list[str] = []
    for done, row in pool.run([task("prepare", name) for name in todo if name in compiling], budget):
        name = done.group
        if done.payload["step"] == "prepare":
            compiling.discard(name)
            ready += [name] * ("error" not in row)
        yield name, row
        if compiling:
            continue
        if ready:
            pool.add(task("time", ready.pop(0)))
        elif waves:
            compiling = {*waves[0]}
            for other in waves.pop(0):
                pool.add(task("prepare", other))


def take(step: str, share: tuple[int, int]) -> None:
    """Take this process's part of the cores to compile, or all of them to time. ``share``: which part, of
    how many; the compilers that it starts have the same."""
    if not hasattr(os, "sched_setaffinity"):
        return
    _all.update(() if _all else os.sched_getaffinity(0))
    cores, (at, of) = sorted(_all), share
    mine = cores[at * len(cores) // of : (at + 1) * len(cores) // of]
    os.sched_setaffinity(0, mine if step == "prepare" and mine else cores)


def gpus(device: str) -> int:
    """How many GPUs a wave may use: one, where the caller names it."""
    if device != "cuda":
        return 1
    import torch

    return max(1, torch.cuda.device_count())
