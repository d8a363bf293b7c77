"""What a process of ``python -m bench zoo`` does: it compiles a model and compares its results, and
when no other process works, times it.

Inference: all of it in bf16, features last. Training: weights in f32 and autocast to bf16, a forward and a
backward pass. Errors are root mean squares relative to those of the f32 model's results, in training the
median over the gradients of weights; the backend's may be half as large again as eager bf16's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import transconv
from bench.graph_measures import in_full, of_report, timed
from bench.network_measures import covered, relative
from bench.waves import take
from bench.zoo_kernels import kernel_rows
from bench.zoo_models import ZOO, Tensor, arranged, results, without_chance

Row = dict[str, Any]
SIDES = ("eager", "inductor", "transconv")
PHASES = ("inference", "training")
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
    phase: str = "inference",
    kernels: bool = False,
) -> Row:
    """``prepare`` or ``time``, the last thing that a process does. ``kernels``: also the time of each of
    ours, as ``rows``."""
    take(step, share)
    if step == "prepare":
        _held[model] = Subject(model, device, images, sides, phase)
        return _held[model].prepared()
    row = _held[model].timed() | {"fatal": True}
    if kernels:
        row["rows"] = kernel_rows(transconv.graph.report(_held[model].compiled["transconv"]))
    return row


class Subject:
    """A model as all sides compute it."""

    def __init__(
        self, name: str, device: str, images: int, sides: tuple[str, ...], phase: str = "inference"
    ) -> None:
        if device == "cpu":  # only results are compared there
            transconv.config.cpu = "interpret"
        self.device, self.sides = torch.device(device), sides
        self.trained = phase == "training"
        self.narrow = torch.float32 if device == "cpu" else torch.bfloat16
        given = [x.to(self.device) for x in ZOO[name].batch(images)]
        exact, model = (self.model_of(name) for _ in range(2))
        with in_full():  # a model may keep tensors of its first call, in their type
            self.want = self.step(exact, exact, given)
        kept = torch.float32 if self.trained else self.narrow
        self.model = arranged(model.to(kept))
        self.given = [arranged(x.to(kept)) for x in given]
        self.compiled: dict[str, Any] = {}

    def model_of(self, name: str) -> Any:
        """The model in f32 on the device, for the phase."""
        made = ZOO[name].built(name).to(self.device)
        return without_chance(made) if self.trained else made.requires_grad_(False)

    def step(self, call: Any, model: Any, given: list[Tensor], narrow: bool = False) -> list[Tensor]:
        """Results of inference, or the gradients of all weights."""
        if not self.trained:
            with torch.no_grad():
                return results(call(*given))
        weights = [p for p in model.parameters() if p.requires_grad]
        for p in weights:
            p.grad = None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=narrow):
            made = results(call(*given))
        loss: Any = sum(t.float().square().mean() for t in made)
        loss.backward()
        return [torch.zeros(()) if p.grad is None else p.grad for p in weights]

    def compile(self, side: str) -> Any:
        """The model as a side computes it."""
        match side:
            case "inductor":
                return torch.compile(self.model)
            case "transconv":
                return torch.compile(self.model, backend=transconv.graph.backend)
        return self.model

    def call(self, side: str) -> list[Tensor]:
        narrow = self.narrow is torch.bfloat16
        return self.step(self.compiled[side], self.model, self.given, narrow)

    def prepared(self) -> Row:
        """Errors, seconds of the first calls, megabytes of a later one beside what it holds before, and
        what became of the graph."""
        row: Row = {}
        for side in dict.fromkeys(("eager", "transconv", *self.sides)):
            self.compiled[side] = self.compile(side)
            began = time.perf_counter()
            made = self.call(side)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            row[f"{side}_compile_s"] = time.perf_counter() - began
            errors = [relative(a, b) for a, b in zip(made, self.want, strict=True) if b.any()]
            row[f"{side}_rmse"] = (median if self.trained else max)(errors) if errors else math.nan
            del made
            row |= self.memory(side)
        found = of_report(transconv.graph.report(self.compiled["transconv"]))
        row |= {k: found[k] for k in ("ours", "copies", "regions", "estimated_ms", "note")}
        row["verdict"] = verdict(row["transconv_rmse"], row["eager_rmse"])
        del self.want
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return row

    def memory(self, side: str) -> Row:
        """Megabytes: at most during a call, more than before it."""
        if self.device.type != "cuda":
            return {}
        for p in self.model.parameters():
            p.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.call(side)
        torch.cuda.synchronize()
        return {f"{side}_peak_mb": (torch.cuda.max_memory_allocated() - before) / 2**20}

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
