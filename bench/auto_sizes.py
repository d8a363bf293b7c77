"""``python -m bench auto-sizes``: who answers a program whose sizes change, with default settings.

A 3x3 layer at 24 drawn sizes and a training step of a detection model at 16, forward and backward, from
empty caches: the host waits for each call, and a row says who answered it and which work it did besides
(``phases``, see call_phases.py). The sizes come again and again for ``--seconds``; the first three passes
and the last one have a row for each call, those between only for calls above ``SLOW_MS``, which are also
printed. Their gradients are those of a sum, one element that all share. At the end the GPU's time of each
size is measured as it is then answered (``us``), and with kernels of their own (``own_us``, in rows of
their own, pass ``own``), for as many sizes as there is time for, those with the most such kernels first;
both with a dense gradient, as a further layer would give it. Lines say how much of both are kernels of
each direction, copies of operands, and others.
torch runs with cuDNN's benchmark off and on. A training step of a compiled graph, of one size, is timed
next to that of torch.compile:

    python -m bench auto-sizes --only graph --seconds 60 --limit 170

Rows are in ``<gpu>_auto_sizes.csv`` as soon as they are measured; a repeated run measures the sides that
are missing or were not finished. All of a model takes 200 s, of which cuDNN's benchmark takes half:

    python -m bench auto-sizes --only detection --limit 200
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import transconv
from bench import call_phases, environment, epochs, reference
from bench.call_phases import CallPhases
from bench.graph_models import MODELS
from bench.issues import short
from bench.size_calls import switched
from transconv.cli.arguments import ranges
from transconv.tuning.table import CsvTable, Row
from transconv.verify.machine import Pool, Task, WorkerTask, device, synchronize

COLUMNS = (
    "case",
    "side",
    "pass",
    "size",
    "at_s",
    "forward_ms",
    "backward_ms",
    "kernels",
    "waiting",
    "answered",
    "phases",
    "us",
    "own_us",
    *environment.VERSIONS,
)
KEY = ("case", "side", "device")
SIDES = (
    ("layer", "torch heuristics"),
    ("layer", "auto"),
    ("layer", "torch benchmark"),
    ("detection", "torch heuristics"),
    ("detection", "torch benchmark"),
    ("detection", "auto"),  # last: kernels of their own take the time that is left
    ("graph", "torch.compile"),
    ("graph", "auto"),
    ("graph", "background"),
)
COUNTS = {"layer": 24, "detection": 16, "graph": 1}
OURS = ("auto", "background")  # a graph waits for its kernels in the first call, or in none
MODEL = "resnet50"  # of bench/graph_models.py
SLOW_MS = 20.0
SETTLED_S = 30.0
WHOLE_PASSES = 3
TIMED = {"layer": 10, "detection": 2, "graph": 4}  # steps in a row, for the time of one
LEAST_OF = 3  # times of so many steps in a row
OWN_S = {"layer": 20.0, "detection": 150.0}  # at most, for the times of kernels of their own
OWN = "own"  # the pass of their rows
ENDING_S = 20.0  # for the times of all sizes, after the calls
LAST_S = 5.0  # for those of one size with kernels of its own
MOST_LINES = 40  # slow calls that are printed
OWN_MOST = {"layer": COUNTS["layer"], "detection": 4}  # sizes; each of the model's has some 170 problems
PARTS = ("fwd", "bwd_d", "bwd_w", "pack")
Forward = Callable[[], torch.Tensor]
Step = tuple[str, Forward]  # a size, and its result


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=(*COUNTS, ""), default="", help="one of the cases")
    parser.add_argument(
        "--seconds", type=ranges.seconds, default=40, help="of one side's calls (default: 40)"
    )
    parser.add_argument("--limit", type=ranges.seconds, default=240, help="seconds in all (default: 240)")
    parser.add_argument("--quick", action="store_true", help="a small layer, for Triton's interpreter")


def main(options: argparse.Namespace) -> int:
    """1 if a side failed. Each runs in a process of its own."""
    versions, end = environment.versions(), time.time() + options.limit
    path = Path(options.out) / f"{short(versions['device'])}_auto_sizes.csv"
    failed = 0
    chosen = [(case, side) for case, side in SIDES if options.only in ("", case)]
    for at, (case, side) in enumerate(chosen, 1):
        left = share(end - time.time(), len(chosen) - at)
        about = {"case": case, "side": side, **versions}
        if _is_finished(path, about):
            continue
        failed += 1  # until it has its rows
        with tempfile.TemporaryDirectory(prefix="bench-auto-", ignore_cleanup_errors=True) as place:
            variables = {"TRANSCONV_CACHE": f"{place}/ours", "TRITON_CACHE_DIR": f"{place}/triton"}
            if device() == "cpu":
                variables["TRITON_INTERPRET"] = "1"
            group = WorkerTask("bench.auto_sizes:measure", 1, variables)
            seconds = options.seconds if side in OURS else options.seconds / 10
            payload = {
                "path": str(path),
                "about": about,
                "quick": options.quick,
                "seconds": seconds,
                "end": time.time() + left,
            }
            answer: Row = {"error": "no time was left to start it"}
            for _, answer in Pool({case: group}).run([Task(case, payload, left)], left, LAST_S):
                failed -= "error" not in answer
            print(f"{case}, {side}: {answer.get('error') or describe(answer['rows'])}", flush=True)
            print(*slow(answer.get("rows", ())), *answer.get("lines", ()), sep="\n", flush=True)
    print(f"{len(CsvTable(path, COLUMNS, KEY).rows)} rows are in {path}", file=sys.stderr)
    return int(bool(failed))


def share(left: float, following: int) -> float:
    """The seconds that a side may take of those that are ``left``: all but half of the equal shares of
    those ``following``. A side that takes less leaves more to them."""
    return left * (1 - following / (2 * (following + 1)))


def _is_finished(path: Path, about: Row) -> bool:
    """Whether a side has all of its rows. Those of one that was stopped are removed."""
    table = CsvTable(path, COLUMNS, KEY)
    rows = [r for r in table.rows if all(r[k] == about[k] for k in KEY)]
    if rows and {r["size"] for r in rows} == {r["size"] for r in rows if r["us"]}:
        return True
    table.drop(("",), "case", {k: about[k] for k in KEY})
    return False


def describe(rows: list[Row]) -> str:
    """The slowest calls, who answered at the end, and what a choice costs beside kernels of its own."""
    ratios = [float(r["us"]) / float(r["own_us"]) for r in rows if r.get("own_us")]
    rows = [r for r in rows if r["pass"] != OWN]
    calls = [(float(r["forward_ms"]), float(r["backward_ms"])) for r in rows]
    graph = rows[0]["size"] == MODEL
    few, said = (1, "first call") if graph else (10, "slowest of ten first calls")
    late = [r for r in rows if float(r["at_s"]) > SETTLED_S]
    kernels, waiting = (sum(int(r[name]) for r in late) for name in ("kernels", "waiting"))
    parts = [
        f"{said} {max(map(max, calls[:few])):.1f} ms, {'slowest ' * graph}of others "
        f"{max(map(max, calls[few:]), default=0.0):.1f} ms"
    ]
    if kernels + waiting:
        parts.append(f"after {SETTLED_S:.0f} s {kernels / (kernels + waiting):.1%} by kernels")
    if ratios:
        parts.append(f"time over that of own kernels at most {max(ratios):.3f}")
    return "; ".join(parts)


def slow(rows: Sequence[Row]) -> Iterator[str]:
    """Lines about slow calls behind the first pass."""
    calls = [r for r in rows if r["pass"] != OWN and int(r["pass"]) > 1]
    found = [r for r in calls if max(r["forward_ms"], r["backward_ms"]) > SLOW_MS]
    for r in found[:MOST_LINES]:
        yield (
            f"  {r['at_s']:8.3f} s  {r['size']:>9}  {r['forward_ms']:8.2f} + {r['backward_ms']:8.2f} ms"
            f"  {r['answered']}  {r['phases']}"
        )
    if len(found) > MOST_LINES:
        yield f"  and {len(found) - MOST_LINES} more"


def measure(path: str, about: Row, quick: bool, seconds: float, end: float) -> Row:
    """Writes the rows of one side, each as soon as it is there, and returns them. ``end``: when the
    process is ended, in seconds of the system's clock."""
    case, side = about["case"], about["side"]
    ours, mode = side in OURS, side if side == "background" else "auto"
    table, rows = CsvTable(Path(path), COLUMNS, KEY), list[Row]()

    def add(row: Row) -> None:
        rows.append(row)
        table.add({**about, **row})

    reference.settings(tf32=True, benchmark=side == "torch benchmark")
    torch.ones(1, device=device()).sum().item()  # the GPU itself
    with (
        switched(compile=mode, sizes="auto", fallback="silent"),
        call_phases.watched() if ours else nullcontext() as phases,
    ):
        if case == "graph":
            model, steps = _graph(quick, ours)
        else:
            model, steps = _layer(quick) if case == "layer" else _detection()
        if ours and case != "graph":
            transconv.convert_(model)
        again = 1 + TIMED[case] * (LEAST_OF if device() == "cuda" else 1)
        last = _passes(steps, min(seconds, end - time.time() - ENDING_S), phases, add, end, again)
        us = dict[str, float]()
        for row, (size, forward) in zip(last, steps, strict=True):
            step_s = (row["forward_ms"] + row["backward_ms"]) / 1e3
            us[size] = _us(forward, TIMED[case] if time.time() + again * step_s < end else 1)
            add({**row, "us": us[size]})
        lines = list[str]()
        if ours and case in OWN_S:
            at_most = min(end - LAST_S, time.time() + OWN_S[case])
            for size, own, line in _own(_most_own(steps, last)[: OWN_MOST[case]], TIMED[case], at_most):
                add({"pass": OWN, "size": size, "us": us[size], "own_us": own})
                lines.append(line)
    return {"rows": rows, "lines": lines}


def _most_own(steps: list[Step], last: list[Row]) -> list[Step]:
    """The steps, those first that have the most kernels of their own already."""
    others = {r["size"]: sum(map(int, re.findall(r"any_size=(\d+)", r["answered"]))) for r in last}
    return sorted(steps, key=lambda step: others[step[0]])


def _own(steps: list[Step], times: int, end: float) -> Iterator[tuple[str, float, str]]:
    """Of each size whose kernels of its own are there before the ``end``: its microseconds with them, and
    a line about the parts."""
    parts = {size: _parts(forward) for size, forward in steps if device() == "cuda"}
    with switched(compile="background", sizes="exact"):
        for size, forward in steps:
            if _has_own(forward, end):
                us = _us(forward, times)
                alone = _parts(forward) if size in parts else {}
                each = [f"{p} {parts[size][p]:.0f} of {took:.0f}" for p, took in alone.items()]
                yield size, us, f"  {size} [us, of own kernels]: {', '.join(each)}"


def _has_own(forward: Forward, end: float) -> bool:
    """Whether kernels of their own answer all calls of a step before the ``end``."""
    while time.time() < end:
        transconv.stats(reset=True)  # of what was measured before
        forward().sum().backward()
        synchronize()
        found = transconv.stats(reset=True)
        if not found.waiting and not any("any size" in name for name in found.native):
            return True
    return False


def _parts(forward: Forward) -> dict[str, float]:
    """The microseconds of a step's kernels by what they do, as a dense gradient makes them: the least of
    three steps."""
    found = dict.fromkeys((*PARTS, "others"), 0.0)
    gradient = torch.ones_like(forward())
    steps = [epochs.kernel_ms(lambda _: forward().backward(gradient), 1) for _ in range(3)]
    for name, ms in min(steps, key=lambda each: sum(each.values())).items():
        found[next((p for p in PARTS if re.match(f"(conv_)?{p}_", name)), "others")] += 1e3 * ms
    return found


def _passes(
    steps: list[Step],
    seconds: float,
    phases: CallPhases | None,
    add: Callable[[Row], None],
    until: float = float("inf"),
    again: int = 0,
) -> list[Row]:
    """Adds a row for each call that has one, after its pass, and returns those of the last pass, one for
    each call. ``phases``: of calls that are ours. No pass begins that would not be over before
    ``until``, with ``again`` as many calls after it, if each took as long as the last pass's quickest."""
    transconv.stats(reset=True)
    if phases is not None:
        phases.take()
    last, number, began, quick_s = list[Row](), 0, time.monotonic(), 0.0
    while number == 0 or (
        time.time() + (1 + again) * quick_s < until
        and (number <= WHOLE_PASSES or time.monotonic() - began < seconds)
    ):
        number += 1
        for row in last:
            if number <= WHOLE_PASSES + 1 or max(row["forward_ms"], row["backward_ms"]) > SLOW_MS:
                add(row)
        last = []
        for size, forward in steps:
            start = time.perf_counter()
            y = forward().sum()
            synchronize()
            middle = time.perf_counter()
            y.backward()
            synchronize()
            end = time.perf_counter()
            found = transconv.stats(reset=True)
            answered = found.native | found.fallback | {"waiting": found.waiting}
            last.append(
                {
                    "pass": number,
                    "size": size,
                    "at_s": time.monotonic() - began,
                    "forward_ms": (middle - start) * 1e3,
                    "backward_ms": (end - middle) * 1e3,
                    "kernels": sum(found.native.values()),
                    "waiting": found.waiting,
                    "answered": " ".join(f"{k.replace(' ', '_')}={n}" for k, n in answered.items() if n)
                    if phases is not None
                    else "torch",
                    "phases": call_phases.said(phases.take()) if phases is not None else "",
                }
            )
        quick_s = len(steps) * min(r["forward_ms"] + r["backward_ms"] for r in last) / 1e3
    return last


def _us(forward: Forward, times: int) -> float:
    """The microseconds of a step, of ``times`` that follow each other, after one: those in which a GPU
    works, least of three, or on a CPU all."""
    y = forward()
    gradient = torch.ones_like(y)
    y.backward(gradient)
    synchronize()
    if device() == "cuda":
        return 1e3 * min(
            epochs.busy_ms(lambda _: forward().backward(gradient), times) for _ in range(LEAST_OF)
        )
    start = time.perf_counter()
    for _ in range(times):
        forward().backward(gradient)
    return (time.perf_counter() - start) * 1e6 / times


def _layer(quick: bool) -> tuple[Any, list[Step]]:
    """A layer, and its result at each size."""
    torch.manual_seed(0)
    draw, channels = random.Random(1), 4 if quick else 64
    dtype = torch.float32 if quick else torch.bfloat16
    model: Any = torch.nn.Conv2d(channels, channels, 3, padding=1).to(device(), dtype)
    model = model.to(memory_format=torch.channels_last)
    low, high, count = (4, 9, 3) if quick else (64, 160, COUNTS["layer"])
    sides = [(draw.randint(low, high), draw.randint(low, high)) for _ in range(count)]

    def step(h: int, w: int) -> Forward:
        x = torch.randn(1 if quick else 16, channels, h, w, device=device(), dtype=dtype)
        x = x.to(memory_format=torch.channels_last).requires_grad_()

        def run() -> torch.Tensor:
            x.grad = None  # nothing is added to it
            made: torch.Tensor = model(x)
            return made

        return run

    return model, [(f"{h}x{w}", step(h, w)) for h, w in dict.fromkeys(sides)]


def _graph(quick: bool, ours: bool) -> tuple[Any, list[Step]]:
    """A classifier, compiled, and its loss."""
    of, dtype = MODELS[MODEL], torch.float32 if quick else torch.bfloat16
    model: Any = of.built(quick).to(device(), dtype).to(memory_format=torch.channels_last)
    (x,), targets = of.inputs(quick), of.targets(quick).to(device())
    x = x.to(device(), dtype).to(memory_format=torch.channels_last)
    run = torch.compile(model, backend="transconv") if ours else torch.compile(model)
    loss = torch.nn.functional.cross_entropy
    return model, [(MODEL, lambda: loss(run(x).float(), targets))]


def _detection() -> tuple[Any, list[Step]]:
    """The detection model of bench/epochs.py, and its loss at each size."""
    model, step_of, count = epochs.build("detection", device() == "cpu", device())
    model = model.to(device())
    step = step_of(model)
    return model, [
        (f"image {at}", lambda at=at: step(at)) for at in range(min(count, COUNTS["detection"]))
    ]  # type: ignore[misc]
