"""Maps, reductions and norms (map_cases.py) beside torch, eager and compiled, and the rate of a copy: a
row each in ``maps.csv``. ``limit_us``: each tensor once at that rate; ``kernels_us``: the tensors of each
of our kernels once, which is more where another kernel reads a row again; ``other``: torch with tensors
laid out as it may like them better. With ``--tries`` other schedules as well, a row each in
``map_trials.csv``. ``copy_us``: torch's copy of as many bytes, half of them read, in the same run."""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from bench.environment import VERSIONS, versions
from bench.map_cases import MapCase, Tensors, cases
from transconv.compute import Compute, kernels, parse, touched
from transconv.cost import estimate
from transconv.runtime import Plan, build_compute, microseconds
from transconv.runtime.timing import Clock
from transconv.schedule import Schedule, why_not
from transconv.selection import spread
from transconv.selection.proposals import heuristics
from transconv.target import detect
from transconv.verify.data import random_tensor

SIDES = ("us", "copy_us", "torch_us", "inductor_us", "torch_other_us", "inductor_other_us")
COLUMNS = (
    "case",
    *SIDES,
    "limit_us",
    "of_limit",
    "kernels_us",
    "spread",
    "error",
    "schedule",
    "estimate_us",
    *VERSIONS,
)
TRIAL = ("case", "schedule", "us", "estimate_us", "device", "commit")
FAR = 3.0  # times the best estimate: schedules beyond are not tried


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--match", default="", help="only cases whose name matches (regex)")
    parser.add_argument(
        "--clean",
        action="store_true",
        help="caches hold nothing that has to be written back when a call begins",
    )
    parser.add_argument("--no-inductor", action="store_true", help="leave torch.compile out")
    parser.add_argument("--tries", type=int, default=0, help="time so many schedules of each case")
    parser.add_argument(
        "--schedule",
        action="append",
        default=[],
        dest="schedules",
        help="also time this one, where it is legal (rows in parts: also whole); may be repeated",
    )
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument(
        "--time-budget", type=float, default=500, help="seconds after which no case begins"
    )


def main(options: argparse.Namespace) -> int:
    """Time them; 1 if a result is far from torch's."""
    chosen = [c for c in cases() if re.search(options.match, c.name)]
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    began, clock = time.monotonic(), Clock("cuda", 60.0, clean=options.clean)
    rate = copy_rate(clock)
    wrong = 0
    with (
        (out / "maps.csv").open("w", newline="", encoding="utf-8") as file,
        (out / "map_trials.csv").open("w", newline="", encoding="utf-8") as log,
    ):
        lines, trials = csv.DictWriter(file, COLUMNS), csv.DictWriter(log, TRIAL)
        lines.writeheader()
        trials.writeheader()
        with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
            failed = pool.starmap(
                warm,
                [
                    (str(k), str(s))
                    for c in chosen
                    for k in kernels_of(c, options)
                    for s in compiled(k, options)
                ],
                chunksize=1,
            )
        print(*(f"not compiled: {reason}" for reason in failed if reason), sep="\n", flush=True)
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


def copies(count: int) -> Callable[[int], Callable[[], object]]:
    """Torch's copy that moves so many bytes, half of them read."""

    def make(index: int) -> Callable[[], object]:
        x, y = (torch.zeros(max(1, count // 8), dtype=torch.int32, device="cuda") for _ in range(2))
        return lambda: y.copy_(x)

    return make


def copy_rate(clock: Clock) -> float:
    """Gigabytes a second that a large copy reads and writes together."""
    x, y = (torch.empty(1 << 28, dtype=torch.int32, device="cuda").random_() for _ in range(2))
    return 2 * x.nbytes / clock.one(lambda i: lambda: y.copy_(x), 2 * x.nbytes).us / 1e3


def parts_of(case: MapCase) -> list[Compute]:
    """The kernels that the selection makes of it, more than one for a row in parts."""
    return [
        part for text in case.texts for kernel in kernels(parse(text)) for part in spread(kernel, detect())
    ]


def kernels_of(case: MapCase, options: argparse.Namespace) -> list[Compute]:
    """Those whose schedules are timed; where schedules are given, also the ones without parts of rows."""
    whole = [k for text in case.texts for k in kernels(parse(text))] if options.schedules else []
    return [*dict.fromkeys((*parts_of(case), *whole))]


def tried(compute: Compute, count: int, more: Sequence[str] = ()) -> list[Schedule]:
    """The first schedule, and some of the others: half of them the next ones, half from among the rest;
    then ``more`` that are legal."""
    target = detect()
    given = [s for s in map(Schedule.parse, more) if why_not(s, compute, target) is None]
    found = heuristics.candidates(compute, target)
    best = estimate(found[0], compute, target)
    near = [s for s in found if estimate(s, compute, target) <= FAR * best]
    first, rest = near[: max(1, count // 2)], near[max(1, count // 2) :]
    step = max(1, len(rest) // max(1, count - len(first)))
    chosen = [*first, *rest[::step][: count - len(first)]] if count else first[:1]
    return list(dict.fromkeys((*chosen, *given)))


def compiled(compute: Compute, options: argparse.Namespace) -> list[Schedule]:
    """The schedules of a kernel that are timed."""
    return tried(compute, options.tries, options.schedules)


def warm(text: str, schedule: str) -> str:
    """Compile for tensors at multiples of 16 bytes, in a process of its own; why not, if it fails."""
    try:
        plan = build_compute(parse(text), detect(), Schedule.parse(schedule))
        for step in plan.steps:
            step.triton.warm([torch.empty(0, dtype=_type(t), device="meta") for t in step.kernel.params])
    except Exception as error:  # a compiler's, of any kind
        return f"{schedule}: {type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def _type(tensor: Any) -> torch.dtype:
    from transconv.verify.data import torch_dtype

    return torch_dtype(tensor.dtype)


def row(
    case: MapCase,
    clock: Clock,
    rate: float,
    options: argparse.Namespace,
    log: Callable[[dict[str, object]], object],
) -> dict[str, object]:
    """One case: its first schedule, torch, torch.compile, in turn; then the other schedules."""
    computes, target = [parse(text) for text in case.texts], detect()
    plans = [build_compute(c, target) for c in computes]
    steps = [s for plan in plans for s in plan.steps]
    moved = moves(*computes)
    sides = sides_of(case, plans, computes, not options.no_inductor)
    sides["copy_us"] = copies(moved)
    found = clock.compare(sides, moved)
    limit = moved / rate / 1e3
    made: dict[str, object] = {"case": case.name}
    made |= {side: f"{found[side].us:.4g}" for side in SIDES if side in found}
    made |= {
        "limit_us": f"{limit:.4g}",
        "of_limit": f"{limit / found['us'].us:.3f}",
        "kernels_us": f"{sum(moves(s.compute) for s in steps) / rate / 1e3:.4g}",
        "spread": f"{found['us'].spread:.3f}",
        "error": f"{error_of(case, plans, computes):.2e}",
        "schedule": " ;; ".join(str(s.schedule) for s in steps),
        "estimate_us": f"{microseconds([(s.compute, s.schedule) for s in steps], target):.4g}",
        **versions(),
    }
    for kernel in kernels_of(case, options) if options.tries or options.schedules else ():
        for schedule in tried(kernel, options.tries, options.schedules):
            try:
                plan = build_compute(kernel, target, schedule)
                us = clock.one(calls_of([plan], [kernel], case.below), moves(kernel)).us
            except RuntimeError as error:  # a compiler's, reported by `warm`
                print(f"{schedule}: {str(error).splitlines()[0]}", flush=True)
                continue
            log(
                {
                    "case": f"{case.name}: {kernel.name}",
                    "schedule": schedule,
                    "us": f"{us:.4g}",
                    "estimate_us": f"{estimate(schedule, kernel, target):.4g}",
                    "device": made["device"],
                    "commit": made["commit"],
                }
            )
    return made


def sides_of(
    case: MapCase, plans: list[Plan], computes: list[Compute], inductor: bool
) -> dict[str, Callable[[int], Callable[[], object]]]:
    """What is timed in turn."""

    def instead(
        function: Callable[[Tensors], object], laid: Callable[[Tensors], Tensors] | None
    ) -> Callable[[int], Callable[[], object]]:
        def make(index: int) -> Callable[[], object]:
            tensors = tensors_of(computes, case.below)
            tensors = laid(tensors) if laid else tensors
            return lambda: function(tensors)

        return make

    sides = {"us": calls_of(plans, computes, case.below)}
    for name, laid in (("", None), ("_other", case.other)):
        if name and laid is None:
            continue
        sides[f"torch{name}_us"] = instead(case.instead, laid)
        if inductor:
            torch._dynamo.reset()
            compiled = torch.compile(case.instead, mode="max-autotune-no-cudagraphs")
            sides[f"inductor{name}_us"] = instead(compiled, laid)
    return sides


def moves(*computes: Compute) -> int:
    """Bytes of the tensors of computations, each once."""
    most: dict[str, int] = {}
    for compute in computes:
        own: dict[str, int] = {}
        for view in dict.fromkeys(compute.views()):
            t, known = view.tensor, own.get(view.tensor.name, 0)
            own[t.name] = min(prod(t.shape) * t.dtype.bytes, known + touched(view, compute))
        for name, size in own.items():
            most[name] = max(size, most.get(name, 0))
    return sum(most.values())


def calls_of(
    plans: list[Plan], computes: list[Compute], below: int
) -> Callable[[int], Callable[[], object]]:
    """The plans on a new set of tensors for each index."""

    def make(index: int) -> Callable[[], object]:
        tensors = tensors_of(computes, below)
        given = [{t.name: tensors[t.name] for t in c.tensors} for c in computes]

        def call() -> None:
            for plan, own in zip(plans, given, strict=True):
                plan.run(dict(own))

        return call

    return make


def tensors_of(computes: list[Compute], below: int) -> Tensors:
    """Random data for the tensors that are read, memory for those that are stored."""
    made: Tensors = {}
    for t in (t for c in computes for t in c.tensors if t.name not in made):
        made[t.name] = (
            torch.randint(below, t.shape, dtype=_type(t), device="cuda")
            if t.dtype.is_integer
            else random_tensor(t.shape, t.layout, "cuda")
        )
    return made


def error_of(case: MapCase, plans: list[Plan], computes: list[Compute]) -> float:
    """The 2-norm of the difference from torch's result, as a share of its norm."""
    tensors = tensors_of(computes, case.below)
    for plan, compute in zip(plans, computes, strict=True):
        plan.launch(**{t.name: tensors[t.name] for t in compute.tensors})
    result = computes[0].writes[0].view.tensor
    ours = tensors[result.name].double()
    theirs = case.instead(tensors)
    want = (theirs[0] if isinstance(theirs, tuple) else theirs).double()  # type: ignore[attr-defined]
    if want.dim() >= ours.dim() and want.shape != ours.shape:  # an image, channels last
        want = want.movedim(1, -1)
    return float(((ours - want.reshape(ours.shape)).norm() / want.norm().clamp_min(1e-30)).item())
