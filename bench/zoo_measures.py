"""What a process of ``python -m bench zoo`` does: it compiles a model and compares its results, and
when no other process works, times it.

Inference in bf16, features last. Errors are root mean squares relative to those of the f32 model's
results; the backend's may be half as large again as eager bf16's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import transconv
from bench.graph_measures import in_full, of_report, timed
from bench.network_measures import covered, relative
from bench.waves import take
from bench.zoo_models import ZOO, Tensor, arranged, results

Row = dict[str, Any]
SIDES = ("eager", "inductor", "transconv")
FEWEST, MOST = 5, 30  # calls of a side that are timed
WARM = 2
AS_EAGER, ROUNDING = 1.5, 2.0**-9  # of eager's error; of bf16

_held: dict[str, Subject] = {}


def work(
    step: str,
    model: str,
    device: str,
    images: int,
    sides: tuple[str, ...],
    share: tuple[int, int] = (0, 1),
) -> Row:
    """``prepare`` or ``time``, the last thing that a process does."""
    take(step, share)
    if step == "prepare":
        _held[model] = Subject(model, device, images, sides)
        return _held[model].prepared()
    return _held[model].timed() | {"fatal": True}


class Subject:
    """A model as all sides compute it."""

    def __init__(self, name: str, device: str, images: int, sides: tuple[str, ...]) -> None:
        if device == "cpu":  # only results are compared there
            transconv.config.cpu = "interpret"
        self.device, self.sides = torch.device(device), sides
        given = ZOO[name].batch(images)
        exact, model = (ZOO[name].built(name).to(self.device).requires_grad_(False) for _ in range(2))
        with in_full(), torch.no_grad():  # a model may keep tensors of its first call, in their type
            self.want = results(exact(given.to(self.device)))
        narrow = torch.float32 if device == "cpu" else torch.bfloat16
        self.model = arranged(model.to(narrow))
        self.given = arranged(given.to(self.device, narrow))
        self.calls: dict[str, Any] = {}

    def compiled(self, side: str) -> Any:
        """The model as a side computes it."""
        match side:
            case "inductor":
                return torch.compile(self.model)
            case "transconv":
                return torch.compile(self.model, backend=transconv.graph.backend)
        return self.model

    def call(self, side: str) -> list[Tensor]:
        with torch.no_grad():
            return results(self.calls[side](self.given))

    def prepared(self) -> Row:
        """Errors, seconds of the first calls, and what became of the graph."""
        row: Row = {}
        for side in dict.fromkeys(("eager", "transconv", *self.sides)):
            self.calls[side] = self.compiled(side)
            began = time.perf_counter()
            made = self.call(side)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            row[f"{side}_compile_s"] = time.perf_counter() - began
            row[f"{side}_rmse"] = max(relative(a, b) for a, b in zip(made, self.want, strict=True))
        found = of_report(transconv.graph.report(self.calls["transconv"]))
        row |= {k: found[k] for k in ("ours", "copies", "regions", "estimated_ms", "note")}
        row["verdict"] = verdict(row["transconv_rmse"], row["eager_rmse"])
        del self.want
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return row

    def timed(self) -> Row:
        """Milliseconds of calls one by one, the sides in turn, and of the GPU's kernels in one call."""
        row: Row = {}
        taken: dict[str, list[float]] = {side: [] for side in self.sides}
        for _ in range(WARM):
            for side in self.sides:
                self.call(side)
        until = time.perf_counter() + (2.0 if self.device.type == "cuda" else 0.0)
        while (n := len(taken[self.sides[0]])) < FEWEST or (n < MOST and time.perf_counter() < until):
            for side in self.sides:
                taken[side].append(timed(self.caller(side), self.device)[0])
        for side in self.sides:
            row[f"{side}_ms"] = median(taken[side])
            row |= self.launched(side)
        return row

    def caller(self, side: str) -> Callable[[], object]:
        return lambda: self.call(side)

    def launched(self, side: str) -> Row:
        """Kernels of a call, and the time in which one of them runs."""
        if self.device.type != "cuda":
            return {}
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            self.call(side)
            torch.cuda.synchronize()
        kernels = [e for e in seen.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
        spans = [(e.time_range.start, e.time_range.end) for e in kernels]
        return {f"{side}_gpu_ms": covered(spans) / 1e3, f"{side}_kernels": len(kernels)}


def verdict(error: float, eager: float) -> str:
    """Whether an error is one of roundings."""
    return "right" if error <= AS_EAGER * eager + ROUNDING else "wrong"
