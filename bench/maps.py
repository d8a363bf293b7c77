"""Maps, reductions and norms (map_cases.py) beside torch, eager and compiled, and the rate of a copy: a
row each in ``maps.csv``. With ``--tries`` other schedules as well, a row each in ``map_trials.csv``."""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.environment import versions
from bench.map_cases import MapCase, Tensors, cases
from transconv.compute import Compute, kernels, parse, touched
from transconv.cost import estimate
from transconv.runtime import Plan, build_compute
from transconv.schedule import Schedule
from transconv.selection import heuristics
from transconv.target import detect
from transconv.tuning.measure import random_tensor
from transconv.tuning.timing import Clock

COLUMNS = ("case", "us", "torch_us", "inductor_us", "limit_us", "of_limit", "spread", "error", "schedule",
           "estimate_us", "device", "torch", "triton", "commit")
TRIAL = ("case", "schedule", "us", "estimate_us", "device", "commit")
FAR = 3.0  # times the best estimate: schedules beyond are not tried


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--match", default="", help="only cases with this in their name")
    parser.add_argument("--no-inductor", action="store_true", help="leave torch.compile out")
    parser.add_argument("--tries", type=int, default=0, help="time so many schedules of each case")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--time-budget", type=float, default=500,
                        help="seconds after which no case begins")


def main(options: argparse.Namespace) -> int:
    """Time them; 1 if a result is far from torch's."""
    chosen = [c for c in cases() if options.match in c.name]
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    began, clock = time.monotonic(), Clock("cuda", 60.0)
    rate = copy_rate(clock)
    wrong = 0
    with (out / "maps.csv").open("w", newline="", encoding="utf-8") as file, (
            out / "map_trials.csv").open("w", newline="", encoding="utf-8") as log:
        lines, trials = csv.DictWriter(file, COLUMNS), csv.DictWriter(log, TRIAL)
        lines.writeheader()
        trials.writeheader()
        with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
            pool.starmap(warm, [(str(k), str(s)) for c in chosen for k in kernels(parse(c.text))
                                for s in tried(k, options.tries)], chunksize=1)
        print(f"compiled after {time.monotonic() - began:.0f} s, copies reach {rate:.0f} GB/s", flush=True)
        for case in chosen:
            if time.monotonic() - began > options.time_budget:
                print(f"no time for {case.name}", flush=True)
                continue
            made = row(case, clock, rate, options, trials.writerow)
            print(" ".join(str(v) for v in made.values()), flush=True)
            lines.writerow(made)
            file.flush()
            log.flush()
            wrong += float(str(made["error"])) > 0.02
    return 1 if wrong else 0


def copy_rate(clock: Clock) -> float:
    """Gigabytes a second that a large copy reads and writes together."""
    x, y = (torch.empty(1 << 28, dtype=torch.int32, device="cuda").random_() for _ in range(2))
    return 2 * x.nbytes / clock.one(lambda i: lambda: y.copy_(x), 2 * x.nbytes).us / 1e3


def tried(compute: Compute, count: int) -> list[Schedule]:
    """The first schedule, and some of the others: half of them the next ones, half from among the rest."""
    target = detect()
    found = heuristics.candidates(compute, target)
    best = estimate(found[0], compute, target)
    near = [s for s in found if estimate(s, compute, target) <= FAR * best]
    first, rest = near[:max(1, count // 2)], near[max(1, count // 2):]
    step = max(1, len(rest) // max(1, count - len(first)))
    return [*first, *rest[::step][:count - len(first)]] if count else first[:1]


def warm(text: str, schedule: str) -> None:
    """Compile for tensors at multiples of 16 bytes, in a process of its own."""
    plan = build_compute(parse(text), detect(), Schedule.parse(schedule))
    for step in plan.steps:
        step.launcher.warm([torch.empty(0, dtype=_type(t), device="meta") for t in step.kernel.params])


def _type(tensor: Any) -> torch.dtype:
    from transconv.verify.data import torch_dtype

    return torch_dtype(tensor.dtype)


def row(case: MapCase, clock: Clock, rate: float, options: argparse.Namespace,
        log: Callable[[dict[str, object]], object]) -> dict[str, object]:
    """One case: its first schedule, torch, torch.compile, in turn; then the other schedules."""
    compute, target = parse(case.text), detect()
    moved = moves(compute)
    plan = build_compute(compute, target)

    def instead(function: Callable[[Tensors], object]) -> Callable[[int], Callable[[], object]]:
        def make(index: int) -> Callable[[], object]:
            tensors = tensors_of(compute)
            return lambda: function(tensors)
        return make

    sides = {"us": calls_of(plan, compute), "torch_us": instead(case.instead)}
    if not options.no_inductor:
        torch._dynamo.reset()
        sides["inductor_us"] = instead(torch.compile(case.instead, mode="max-autotune-no-cudagraphs"))
    found = clock.compare(sides, moved)
    limit = moved / rate / 1e3
    made: dict[str, object] = {"case": case.name}
    made |= {side: f"{t.us:.4g}" for side, t in found.items()}
    made |= {"limit_us": f"{limit:.4g}", "of_limit": f"{limit / found['us'].us:.3f}",
             "spread": f"{found['us'].spread:.3f}", "error": f"{error_of(compute, plan, case):.2e}",
             "schedule": " ;; ".join(str(s.schedule) for s in plan.steps),
             "estimate_us": f"{sum(estimate(s.schedule, s.compute, target) for s in plan.steps):.4g}",
             **versions()}
    for kernel in kernels(compute) if options.tries else ():
        for schedule in tried(kernel, options.tries):
            us = clock.one(calls_of(build_compute(kernel, target, schedule), kernel), moves(kernel)).us
            log({"case": f"{case.name}: {kernel.name}", "schedule": schedule, "us": f"{us:.4g}",
                 "estimate_us": f"{estimate(schedule, kernel, target):.4g}",
                 "device": made["device"], "commit": made["commit"]})
    return made


def moves(compute: Compute) -> int:
    """Bytes of the tensors of a computation, each once."""
    return sum(touched(v, compute) for v in dict.fromkeys(compute.views()))


def calls_of(plan: Plan, compute: Compute) -> Callable[[int], Callable[[], object]]:
    """The plan on a new set of tensors for each index."""
    def make(index: int) -> Callable[[], object]:
        tensors = tensors_of(compute)
        return lambda: plan.run(dict(tensors))
    return make


def tensors_of(compute: Compute) -> Tensors:
    """Random data for what is read, memory for what is stored."""
    return {t.name: random_tensor(t.shape, t.layout, "cuda") for t in compute.tensors}


def error_of(compute: Compute, plan: Plan, case: MapCase) -> float:
    """The 2-norm of the difference from torch's result, as a share of its norm."""
    tensors = tensors_of(compute)
    plan.launch(**tensors)
    theirs = case.instead(tensors)
    ours = tensors[compute.c.tensor.name].double().flatten()
    want = theirs.double().reshape(compute.c.tensor.shape).flatten()  # type: ignore[attr-defined]
    return float(((ours - want).norm() / want.norm().clamp_min(1e-30)).item())
