"""Softmax and layer norm over short rows, most of them at odd addresses: each form of kernel timed.

A row of ``short_rows.csv`` for each kernel and side: ``before``, the tile that was chosen until estimates
knew how threads share such rows; ``chosen``, what the package takes now; ``form``, the first by its
estimate of each other tile, in one step, in a loop, or in steps that are written out; ``transconv``,
``torch`` and ``torch.compile`` of the whole call. At the end: how much slower the choice is than the best.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import time
from collections.abc import Callable, Iterator
from math import exp, log
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench.environment import VERSIONS, expect_gpu, versions
from bench.map_cases import MapCase, Tensors
from bench.maps import calls_of, error_of, moves, parts_of, sides_of, warm
from transconv.compute import Compute, library, parse
from transconv.compute.library import LibraryFormula, Strided
from transconv.cost import estimate
from transconv.errors import ScheduleError
from transconv.ir import bf16
from transconv.runtime import build_compute
from transconv.runtime.timing import Clock
from transconv.schedule import Block, Schedule, holds_rows, why_not
from transconv.selection.proposals import heuristics
from transconv.target import Target, detect

LENGTHS = (49, 50, 64, 77, 100, 196, 197)
ELEMENTS = 301056 * 49  # of a window's attention in the first stage of Swin-T, 32 images
FORMS = 14  # of a kernel, at most
# Of a length: rows, lanes of a row and warps of the tile that was chosen before, forward and backward.
BEFORE = {
    49: ((16, 64, 2), (8, 64, 1)),
    50: ((32, 64, 4), (32, 64, 4)),
    64: ((16, 64, 2), (8, 64, 1)),
    77: ((8, 128, 2), (8, 128, 2)),
    100: ((32, 128, 8), (32, 128, 8)),
    196: ((4, 256, 2), (2, 256, 1)),
    197: ((4, 256, 2), (2, 256, 1)),
}
COLUMNS = ("case", "kernel", "side", "schedule", "us", "estimate_us", "limit_us", "error", *VERSIONS)
aten = torch.ops.aten


def cases(lengths: tuple[int, ...] = LENGTHS, elements: int = ELEMENTS) -> list[MapCase]:
    """Forward and backward passes over as many elements of rows of each length; the attention of Swin."""
    found = []
    for k in lengths:
        rows = elements // k // 2048 * 2048  # sums of columns are split in parts
        x, w = Strided.dense((rows, k), bf16), Strided.dense((k,), bf16)
        soft, norm = library.softmax(x, 1), library.layer_norm(x, 1, w, w)
        found += [
            MapCase(f"softmax {rows}x{k}", soft.text, lambda t: torch.softmax(t["X"], -1)),
            _backward(
                f"softmax backward {rows}x{k}",
                soft,
                lambda t: torch._softmax_backward_data(t["G"], t["Y"], -1, torch.bfloat16),
            ),
            MapCase(
                f"layer norm {rows}x{k}",
                norm.text,
                lambda t: F.layer_norm(t["X"], t["W"].shape, t["W"], t["B"]),
            ),
            _backward(
                f"layer norm backward {rows}x{k}",
                norm,
                lambda t: aten.native_layer_norm_backward(
                    t["G"],
                    t["X"],
                    t["W"].shape,
                    t["M"][:, None],
                    t["R"][:, None],
                    t["W"],
                    t["W"],
                    [True] * 3,
                ),
            ),
        ]
    return [*found, _windows(max(1, elements // 49 // 49 // 192))]


def _backward(name: str, formula: LibraryFormula, instead: Callable[[Tensors], object]) -> MapCase:
    whole = formula.together
    first, *more = (g.text for g in (formula.gradients if whole is None else (whole,)))
    return MapCase(name, first, instead, tuple(more))


def _windows(images: int) -> MapCase:
    """The attention of Swin's shifted windows: a bias for each head, a mask for each window."""
    shape = f"[n={images}, w=64, h=3, i=49, k=49]"
    text = f"""compute windows
    tensor X bf16 {shape}
    tensor B bf16 [h=3, i=49, k=49]
    tensor M bf16 [w=64, i=49, k=49]
    tensor Y bf16 {shape}
    axes   n={images} w=64 h=3 i=49 | k=49
    read   x = X[n, w, h, i, k]
    read   b = B[h, i, k]
    read   m = M[w, i, k]
    let    s = x + b + m
    let    top = max(s; k)
    let    e = exp(s - top)
    let    total = sum(e; k)
    store  Y[n, w, h, i, k] = e / total"""
    return MapCase(
        f"windows {images}x64x3x49x49",
        text,
        lambda t: torch.softmax(t["X"].float() + t["B"] + t["M"][:, None], -1).bfloat16(),
    )


def before(compute: Compute, target: Target) -> Schedule | None:
    """What was chosen until estimates knew how threads share rows at odd addresses."""
    row, kept = compute.axes_of("K"), compute.axes_of("M")
    if len(row) != 1 or row[0].size not in BEFORE or compute.statistics:
        return None
    rows, lanes, warps = BEFORE[row[0].size]["gradient" in compute.name]
    blocks = Block(tuple(x.name for x in kept), rows), Block((row[0].name,), lanes)
    made = Schedule(blocks, "fma", stages=1, warps=warps)
    return made if why_not(made, compute, target) is None else None


def forms(compute: Compute, target: Target) -> Iterator[tuple[str, Schedule]]:
    """The sides of a kernel: what was and is chosen, and one of each other form."""
    ranked = heuristics.candidates(compute, target)
    if (old := before(compute, target)) is not None:
        yield "before", old
    yield "chosen", ranked[0]
    seen = {_form(ranked[0], compute)}
    for schedule in ranked:
        if (form := _form(schedule, compute)) not in seen and len(seen) <= FORMS:
            seen.add(form)
            yield "form", schedule


def _form(schedule: Schedule, compute: Compute) -> tuple[object, ...]:
    """Schedules of one form are timed once: those that differ in their rows, and in warps where they load
    elements again."""
    reduced = [b.extent for b in schedule.blocks if compute.kind(b.first) == "K"]
    whole = holds_rows(schedule, compute)
    return (
        *reduced,
        schedule.unroll,
        schedule.late,
        bool(schedule.programs),
        whole and min(schedule.warps, 4),
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--match", default="", help="only cases whose name has this text")
    parser.add_argument("--no-inductor", action="store_true", help="leave torch.compile out")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument(
        "--time-budget", type=float, default=400, help="seconds after which no case begins"
    )


def main(options: argparse.Namespace) -> int:
    """Time them; 1 if a result is far from torch's. Raises ValueError where there is no GPU."""
    expect_gpu("short-rows")
    target, began = detect(), time.monotonic()
    chosen = [c for c in cases() if options.match in c.name]
    kernels_of = {
        c.name: [k for k in parts_of(c) if any(x.name == "k" for x in k.axes_of("K"))] for c in chosen
    }
    jobs = [(str(k), str(s)) for ks in kernels_of.values() for k in ks for _, s in forms(k, target)]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        failed = pool.starmap(warm, dict.fromkeys(jobs), chunksize=1)
    print(*(reason for reason in failed if reason), sep="\n")
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    out, clock, wrong = Path(options.out), Clock("cuda", 30.0), 0
    out.mkdir(parents=True, exist_ok=True)
    lost: list[float] = []
    with (out / "short_rows.csv").open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, COLUMNS, lineterminator="\n", restval="")
        lines.writeheader()
        for case in chosen:
            if time.monotonic() - began > options.time_budget:
                print(f"no time for {case.name}", flush=True)
                continue
            for row in (
                *_whole(case, clock, not options.no_inductor),
                *_each(case, kernels_of[case.name], clock, target, lost),
            ):
                print(" ".join(map(str, row.values())), flush=True)
                wrong += float(row.get("error") or 0.0) > 0.02
                lines.writerow({"case": case.name, **row, **versions()})
            file.flush()
    if lost:
        print(
            f"{len(lost)} kernels: the choice takes {exp(sum(lost) / len(lost)):.3f} times the best form "
            f"in the geometric mean, {exp(max(lost)):.2f} at most"
        )
    return int(wrong > 0)


def _whole(case: MapCase, clock: Clock, inductor: bool) -> Iterator[dict[str, Any]]:
    """All kernels of a case together, torch and torch.compile."""
    computes = [parse(text) for text in case.texts]
    plans = [build_compute(c, detect()) for c in computes]
    found = clock.compare(sides_of(case, plans, computes, inductor), moves(*computes))
    error = error_of(case, plans, computes)
    names = {"us": "transconv", "torch_us": "torch", "inductor_us": "torch.compile"}
    for side, name in ((side, name) for side, name in names.items() if side in found):
        row = {"kernel": "all", "side": name, "us": f"{found[side].us:.4g}"}
        yield row | ({"error": f"{error:.2e}"} if side == "us" else {})


def _each(
    case: MapCase, of: list[Compute], clock: Clock, target: Target, lost: list[float]
) -> Iterator[dict[str, Any]]:
    """The forms of each kernel of a case; ``lost`` gets how far the choice is from the best one."""
    for kernel in of:
        took: dict[str, float] = {}
        for side, schedule in forms(kernel, target):
            try:
                plan = build_compute(kernel, target, schedule)
                us = clock.one(calls_of([plan], [kernel], case.below), moves(kernel)).us
            except (RuntimeError, ScheduleError) as error:  # a compiler's, reported by `warm`
                print(f"{schedule}: {str(error).splitlines()[0]}", flush=True)
                continue
            took[f"{side} {schedule}"] = us
            yield {
                "kernel": kernel.name,
                "side": side,
                "schedule": schedule,
                "us": f"{us:.4g}",
                "estimate_us": f"{estimate(schedule, kernel, target):.4g}",
                "limit_us": f"{moves(kernel) / target.bandwidth_gbs / 1e3:.4g}",
            }
        own = [us for side, us in took.items() if side.startswith("chosen")]
        lost += [log(us / min(took.values())) for us in own]
