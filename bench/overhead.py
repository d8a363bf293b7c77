"""What one warm call costs the host, the framework's and ours, side by side in one run.

Calls on tiny tensors are made in bursts without waiting for the GPU, which has less to do than the
host; a burst is shorter than the driver's launch queue, so nothing blocks. Sides take turns, and
the table has the median and the fastest burst of each.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

import transconv
from bench import overhead_functional
from bench.environment import VERSIONS, at_hand, versions
from bench.overhead_functional import MODES
from bench.overhead_parts import parts
from transconv.cli.arguments import ranges
from transconv.tuning.table import CsvTable

COLUMNS = ("case", "mode", "side", "median_us", "best_us", "ratio", "calls", "fallback", *VERSIONS)
Call = Callable[[], object]

# name -> input, weight, bias?, keyword arguments
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool, dict[str, Any]]] = {
    "conv2d 1x1": ((1, 8, 4, 4), (8, 8, 1, 1), False, {}),
    "conv2d 3x3": ((1, 16, 8, 8), (16, 16, 3, 3), False, {"padding": 1}),
    "conv2d 3x3 bias": ((1, 16, 8, 8), (16, 16, 3, 3), True, {"padding": 1}),
    "conv2d depthwise": ((1, 16, 8, 8), (16, 1, 3, 3), False, {"padding": 1, "groups": 16}),
    "conv1d": ((1, 16, 16), (16, 16, 3), False, {"padding": 1}),
    "conv3d": ((1, 8, 4, 4, 4), (8, 8, 3, 3, 3), False, {"padding": 1}),
    "conv_transpose2d": ((1, 16, 8, 8), (16, 16, 2, 2), False, {"stride": 2}),
}


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def make(
    f: Callable[..., torch.Tensor],
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    kwargs: dict[str, Any],
    mode: str,
) -> Call:
    """The call of one side in one mode."""
    if mode == "no grad":

        def plain() -> object:
            with torch.no_grad():
                return f(x, w, b, **kwargs)

        return plain
    leaves = [t.detach().requires_grad_() if t is not None else None for t in (x, w, b)]
    if mode == "grad":
        return lambda: f(*leaves, **kwargs)
    wanted = [t for t in leaves if t is not None]
    grad = torch.ones_like(f(x, w, b, **kwargs))
    return lambda: torch.autograd.grad(f(*leaves, **kwargs), wanted, grad)


def burst(call: Call, calls: int, device: str) -> float:
    """Microseconds per call of one burst."""
    sync(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    spent = time.perf_counter() - start
    sync(device)
    return spent / calls * 1e6


def compare(sides: dict[str, Call], calls: int, bursts: int, device: str) -> dict[str, list[float]]:
    """Microseconds per call of every burst of each side, the sides taking turns."""
    for call in sides.values():
        for _ in range(20):
            call()
    seen: dict[str, list[float]] = {name: [] for name in sides}
    gc.disable()
    try:
        for _ in range(bursts):
            for name, call in sides.items():
                seen[name].append(burst(call, calls, device))
    finally:
        gc.enable()
    return seen


def direct(x: torch.Tensor, w: torch.Tensor, kwargs: dict[str, Any], transposed: bool) -> dict[str, Call]:
    """The part below the public function: the plan's launch on a kept result."""
    from transconv.torch_ops.calls import call_attributes, select_impl

    n = x.dim() - 2
    stride, padding, dilation = (
        tuple((kwargs.get(k, d),) * n) for k, d in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    req = call_attributes.request(
        "", 0, stride, padding, dilation, transposed, (0,) * n, kwargs.get("groups", 1)
    )
    route = select_impl.forward_route(req, x, w, None, "now")
    if route.compiled is None:
        return {}
    y = x.new_empty_strided(route.shape, route.strides)
    src, dst = (y, x) if transposed else (x, y)
    return {"ours: plan.launch alone": lambda: route.compiled.launch(src, w, dst)}


def measure(table: CsvTable, name: str, device: str, calls: int, bursts: int) -> None:
    """All modes of one case."""
    x_shape, w_shape, biased, kwargs = CASES[name]
    function = name.split()[0]
    theirs, ours = getattr(F, function), getattr(transconv, function)
    x, w = torch.randn(x_shape, device=device), torch.randn(w_shape, device=device)
    b = torch.randn(w_shape[0], device=device) if biased else None
    for mode in MODES:
        transconv.stats(reset=True)
        sides = {
            "torch": make(theirs, x, w, b, kwargs, mode),
            "transconv": make(ours, x, w, b, kwargs, mode),
        }
        if mode == "no grad" and b is None:
            sides |= direct(x, w, kwargs, "transpose" in function)
        count = max(1, calls // 3) if mode == "forward+backward" else calls
        seen = compare(sides, count, bursts, device)
        fallback = " ".join(transconv.stats().fallback) if "transconv" in sides else ""
        base = median(seen["torch"])
        for side, values in seen.items():
            row = {
                "case": name,
                "mode": mode,
                "side": side,
                "median_us": median(values),
                "best_us": min(values),
                "ratio": median(values) / base,
                "calls": count * bursts,
                "fallback": "" if side == "torch" else fallback,
                **versions(),
            }
            table.add(row)
            print(
                f"{name:<18} {mode:<17} {side:<24} {row['median_us']:8.2f} us "
                f"(best {row['best_us']:.2f}), {row['ratio']:.2f} x torch {row['fallback']}",
                flush=True,
            )


def measure_parts(table: CsvTable, device: str, calls: int, bursts: int) -> None:
    """The parts of one call, each alone; their ``ratio`` is to a whole call."""
    seen = compare(parts(device), calls, bursts, device)
    whole = median(seen["a whole call"])
    for part, values in seen.items():
        row = {
            "case": "parts",
            "mode": "part",
            "side": part,
            "median_us": median(values),
            "best_us": min(values),
            "ratio": median(values) / whole,
            "calls": calls * bursts,
            "fallback": "",
            **versions(),
        }
        table.add(row)
        print(f"part: {part:<44} {row['median_us']:8.2f} us (best {row['best_us']:.2f})", flush=True)


def measure_functional(table: CsvTable, name: str, device: str, calls: int, bursts: int) -> None:
    """Warm calls of one function of ``transconv.functional``, in all modes."""
    with overhead_functional.launched(device):
        for mode in MODES:
            count = max(1, calls // 3) if mode == MODES[2] else calls
            seen = compare(overhead_functional.sides(name, device, mode), count, bursts, device)
            base = median(seen["torch"])
            for side, values in seen.items():
                row = {
                    "case": name,
                    "mode": mode if device == "cuda" else f"{mode}, no launch",
                    "side": side,
                    "median_us": median(values),
                    "best_us": min(values),
                    "ratio": median(values) / base,
                    "calls": count * bursts,
                    "fallback": "",
                    **versions(),
                }
                table.add(row)
                print(
                    f"{name:<18} {row['mode']:<17} {side:<24} {row['median_us']:8.2f} us "
                    f"(best {row['best_us']:.2f}), {row['ratio']:.2f} x torch",
                    flush=True,
                )


def measure_generated(table: CsvTable, name: str) -> None:
    """From a text to its kernels' source."""
    us = overhead_functional.generated(name)
    table.add(
        {
            "case": name,
            "mode": "generate",
            "side": "transconv",
            "median_us": us,
            "best_us": us,
            "ratio": 1.0,
            "calls": 5,
            "fallback": "",
            **versions(),
        }
    )
    print(f"{name:<24} from its text to source: {us / 1e3:.0f} ms of the processor", flush=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=at_hand, default=at_hand())
    parser.add_argument("--calls", type=ranges.at_least(1), default=400, help="calls in a burst")
    parser.add_argument("--bursts", type=ranges.at_least(1), default=15)
    parser.add_argument(
        "--match", default="", help="only cases with this in their name; the parts of a call are `parts`"
    )


def main(options: argparse.Namespace) -> int:
    transconv.config.fallback = "silent"
    functions, texts = overhead_functional.CASES, overhead_functional.GENERATED
    if not any(options.match in name for name in (*CASES, *functions, *texts, "parts")):
        raise ValueError(
            f"--match={options.match}: expected a part of {', '.join(CASES)}, "
            f"{', '.join(functions)}, {', '.join(texts)}, or parts"
        )
    table = CsvTable(Path(options.out) / "overhead.csv", COLUMNS, ("case", "mode", "side", "commit"))
    for name in CASES:
        if options.match in name:
            measure(table, name, options.device, options.calls, options.bursts)
    for name in functions:
        if options.match in name:
            measure_functional(table, name, options.device, options.calls, options.bursts)
    for name in texts:
        if options.match in name:
            measure_generated(table, name)
    if options.match in "parts":
        measure_parts(table, options.device, options.calls, options.bursts)
    return 0
