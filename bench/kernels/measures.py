"""Times the cases and writes their rows."""

from __future__ import annotations

import argparse
import csv
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import first_launches
from bench.environment import VERSIONS, expect_gpu, versions
from bench.kernels.cases import Arguments, KernelCase, cases, drawing
from bench.kernels.sides import BY_HAND, EXAMPLES, by_hand, example, lines, masks, recorded
from transconv.runtime.timing import Clock, Make
from transconv.verify.machine import Pool, Task, WorkerTask

COLUMNS = (
    "kernel",
    "api_us",
    "triton_us",
    "torch_us",
    "ratio",
    "torch_ratio",
    "spread",
    "api_lines",
    "triton_lines",
    "api_masks",
    "triton_masks",
    "error",
    "triton_error",
    "first_s",
    "schedule",
    "torch_side",
    "sizes",
    *VERSIONS,
)
WRONG = 0.02


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--match", default="", help="only cases whose name matches (regex)")
    parser.add_argument("--no-inductor", action="store_true", help="torch without torch.compile")
    parser.add_argument("--no-torch", action="store_true", help="leave torch out")
    parser.add_argument("--budget-ms", type=float, default=60.0, help="timing of one call")
    parser.add_argument(
        "--time-budget", type=float, default=500, help="seconds after which no case begins"
    )
    parser.add_argument(
        "--first",
        action="store_true",
        help="time first launches instead, with empty caches and in a second process",
    )
    parser.add_argument(
        "--limit", type=float, default=60, help="seconds for one case, which has a process of its own"
    )


def main(options: argparse.Namespace) -> int:
    """Time them, each in a child process that has a time limit; 1 if a result is wrong or a case fails.
    Raises ValueError where there is no GPU."""
    expect_gpu("kernels")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    if options.first:
        return first_launches.write(out, versions())
    began, wrong = time.monotonic(), 0
    tasks = [
        Task("time", {"name": c.name, "options": options}, options.limit)
        for c in cases()
        if re.search(options.match, c.name)
    ]
    pool = Pool({"time": WorkerTask("bench.kernels.measures:timed", 1)})
    with (out / "kernels.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        rows.writeheader()
        for task, made in pool.run(tasks, options.time_budget, options.limit):
            spent = f"[{time.monotonic() - began:.0f} s]"
            if "kernel" not in made:  # the compiler, memory or time: the others are timed all the same
                print(spent, f"{task.payload['name']}: {made['error']}", flush=True)
                wrong += 1
                continue
            rows.writerow(made)
            file.flush()
            print(spent, *(f"{k}={v}" for k, v in made.items()), flush=True)
            wrong += float(str(made["error"])) > WRONG
    return 1 if wrong else 0


def timed(name: str, options: argparse.Namespace) -> dict[str, object]:
    """The row of a case, in a child process."""
    torch.cuda.empty_cache()
    return row(next(c for c in cases() if c.name == name), Clock("cuda", options.budget_ms), options)


def row(case: KernelCase, clock: Clock, options: argparse.Namespace) -> dict[str, object]:
    """One case: the results of both programs, then times in turn."""
    given = case.data(drawing("cuda", 0), *case.sizes)
    module = example(case.kernel)
    with recorded(module) as launched:
        began = time.monotonic()
        ours = getattr(module, case.kernel)(*given)
        torch.cuda.synchronize()
        first = time.monotonic() - began
    schedule = described(launched)
    theirs = getattr(by_hand(case.kernel), case.kernel)(*given)
    answer = answer_of(case, given)
    errors = error_of(case, ours, answer), error_of(case, theirs, answer)
    size = bytes_of(given) + bytes_of(ours)
    del given, ours, theirs, answer, launched
    torch.cuda.empty_cache()
    compiled = case.compiled and not options.no_inductor
    found = clock.compare(sides(case, compiled, not options.no_torch), size)
    us = {side: found[side].us for side in found}
    api, other = EXAMPLES / f"{case.kernel}.py", BY_HAND / f"{case.kernel}.py"
    made: dict[str, object] = {"kernel": case.name}
    made |= {side: f"{value:.4g}" for side, value in us.items()}
    made |= {
        "ratio": f"{us['triton_us'] / us['api_us']:.3f}",
        "torch_ratio": f"{us['torch_us'] / us['api_us']:.3f}" if "torch_us" in us else "",
        "spread": f"{found['api_us'].spread:.3f}",
        "api_lines": lines(api),
        "triton_lines": lines(other),
        "api_masks": masks(api),
        "triton_masks": masks(other),
        "error": f"{errors[0]:.2e}",
        "triton_error": f"{errors[1]:.2e}",
        "first_s": f"{first:.2f}",
        "schedule": schedule,
        "torch_side": "torch.compile" if compiled else "eager",
        "sizes": "x".join(map(str, case.sizes)),
        **versions(),
    }
    return made


def sides(case: KernelCase, compiled: bool, with_torch: bool) -> dict[str, Make]:
    """What is timed in turn."""

    def side(function: Callable[..., object], prepare: Callable[..., Arguments] | None = None) -> Make:
        def make(index: int) -> Callable[[], object]:
            given = case.data(drawing("cuda", index), *case.sizes)
            given = prepare(*given) if prepare else given
            return lambda: function(*given)

        return make

    made = {
        "api_us": side(getattr(example(case.kernel), case.kernel)),
        "triton_us": side(getattr(by_hand(case.kernel), case.kernel)),
    }
    if with_torch:
        torch._dynamo.reset()
        function = torch.compile(case.torch) if compiled else case.torch
        made["torch_us"] = side(function, case.prepare)
    return made


def described(launched: list[tuple[Any, tuple[Any, ...]]]) -> str:
    """Groups, warps and stages of the kernels that were launched."""
    seen: dict[str, str] = {}
    for kernel, given in launched:
        low = kernel.lower(*given)
        group = "x".join(map(str, low.group.shape))
        seen[low.name] = f"{low.name} {group} warps={low.warps} stages={low.num_stages}"
    return " ;; ".join(seen.values())


def answer_of(case: KernelCase, given: Arguments) -> Any:
    """The results in f64."""
    exact = case.exact or case.torch
    return exact(*(a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in given))


def error_of(case: KernelCase, got: Any, answer: Any) -> float:
    """The largest of the results' distances from the answer: the 2-norm of the difference as a share of
    the answer's; of whole numbers the share that differs; of dropout what is kept, and how much."""
    pairs = zip(*((x,) if torch.is_tensor(x) else x for x in (got, answer)), strict=True)
    worst = 0.0
    for x, want in pairs:
        x, want = case.part(x), case.part(want)
        if case.kernel == "dropout":
            kept = x != 0
            worst = max(worst, abs(float(kept.double().mean()) - 0.5) / 4)
            x, want = x[kept], want[kept]
        if not x.is_floating_point():
            worst = max(worst, float((x != want.to(x.dtype)).double().mean()))
        else:
            norm = want.norm().clamp_min(1e-30)
            worst = max(worst, float((x.double() - want).norm() / norm))
    return worst


def bytes_of(values: Any) -> int:
    """The memory of tensors."""
    return sum(
        t.numel() * t.element_size()
        for t in ((values,) if torch.is_tensor(values) else values)
        if torch.is_tensor(t)
    )
