"""What a process of ``python -m bench graphs`` measures: one model on one side in one layout.

The median time of a call, its peak memory beside what it holds before, the kernels that it launches, which
of them only move elements, and how far its results are from f64 (small) or IEEE f32 (large).
"""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import transconv
from bench.graph_models import MODELS, GraphModel, Tensor
from bench.network_measures import covered, relative
from bench.waves import take
from transconv.backend_triton.launch import bound_start
from transconv.graph import KernelRow, Report, TorchRow

Row = dict[str, Any]
LAYOUTS = ("nhwc", "nchw")
STEPS = 20
FEWEST, MOST = 5, 50  # calls that are timed
PROFILED = 5  # calls whose kernels are timed
MOVES = re.compile(r"copy|catarray|memcpy|pad|nchwtonhwc|nhwctonchw|transpose", re.IGNORECASE)


_held: dict[str, Run] = {}


def work(
    step: str,
    model: str,
    side: str,
    layout: str,
    device: str,
    quick: bool,
    seconds: float = 2.0,
    steps: int = STEPS,
    pages: str = "",
    share: tuple[int, int] = (0, 1),
) -> Row:
    """``prepare``: compile a model, and all that is not a time; ``time``, the last thing that a process
    does. ``pages``: a folder for the report of its kernels, each with its time."""
    take(step, share)
    name = f"{model} {side} {layout}"
    if step == "prepare":
        torch._dynamo.reset()
        torch.backends.cudnn.benchmark = True
        if device == "cpu":  # only results are compared there
            transconv.config.cpu = "interpret"
            torch.backends.cudnn.allow_tf32 = False
        _held[name] = Run(MODELS[model], side, layout, device, quick)
        return _held[name].prepared(steps)
    run = _held.pop(name)
    row: Row = run.milliseconds(seconds) | {"fatal": True} | run.launched()
    if pages and side == "transconv":
        found = transconv.graph.report(run.compiled, measure=True)
        for ending, text in (("txt", str(found)), ("html", found.html())):
            (Path(pages) / f"{model}_{layout}.{ending}").write_text(text)
    return row


class Run:
    """A model as one side computes it. Inference: all of it in bf16; training: f32 weights, autocast to
    bf16, forward and backward. On a CPU f32."""

    def __init__(self, model: GraphModel, side: str, layout: str, device: str, quick: bool) -> None:
        self.model, self.side, self.layout, self.quick = model, side, layout, quick
        self.device = torch.device(device)
        self.narrow = torch.float32 if device == "cpu" else torch.bfloat16
        self.reference = "f64" if quick else "f32"
        dtype = torch.float32 if model.classes else self.narrow
        self.plain = self.arranged(model.built(quick).to(self.device, dtype))
        self.plain = self.plain.train() if model.classes else self.plain.eval().requires_grad_(False)
        self.compiled = self.wrapped(copy.deepcopy(self.plain))
        self.weights = [*self.compiled.parameters()]
        self.inputs = self.batch(0, dtype)
        self.targets = model.targets(quick).to(self.device) if model.classes else None

    def prepared(self, steps: int) -> Row:
        """Seconds of the first call, errors, megabytes, losses of ``steps`` of training."""
        began = time.perf_counter()
        self.call()
        self.wait()
        row: Row = {
            "compile_s": time.perf_counter() - began,
            "rmse": self.error(),
            "reference": self.reference,
        }
        row |= self.memory()
        if self.model.classes and steps:
            row["losses"] = " ".join(f"{x:.5g}" for x in self.losses(steps))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return row

    def arranged(self, thing: Any) -> Any:
        """A module or tensor in the layout."""
        if self.layout == "nchw":
            return thing
        if isinstance(thing, nn.Module):
            for dims, form in ((4, torch.channels_last), (5, torch.channels_last_3d)):
                for p in thing.parameters():
                    p.data = p.data.contiguous(memory_format=form) if p.dim() == dims else p.data
            return thing
        forms = {4: torch.channels_last, 5: torch.channels_last_3d}
        return thing.contiguous(memory_format=forms[thing.dim()])

    def batch(self, seed: int, dtype: torch.dtype) -> list[Tensor]:
        given = self.model.inputs(self.quick, seed)
        return [self.arranged(x.to(self.device, dtype)) for x in given]

    def wrapped(self, model: nn.Module) -> Any:
        match self.side:
            case "eager":
                return model
            case "inductor":
                return torch.compile(model)
            case "max-autotune":
                return torch.compile(model, mode="max-autotune-no-cudagraphs")
            case "reduce-overhead":
                return torch.compile(model, mode="reduce-overhead")
        recorded = {"cudagraphs": True} if self.side == "cudagraphs" else {}
        return torch.compile(model, backend=transconv.graph.backend, options=recorded)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # -- a call ----------------------------------------------------------------------------------

    def call(self) -> Tensor:
        """Results of inference, or the loss of a step whose gradients are left in the weights."""
        if self.targets is None:
            with torch.no_grad():
                made: Tensor = self.compiled(*self.inputs)
                return made
        for p in self.weights:
            p.grad = None
        loss = self.loss(self.compiled, self.inputs, self.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def loss(self, model: Any, inputs: list[Tensor], targets: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.narrow is torch.bfloat16):
            made = model(*inputs)
        return nn.functional.cross_entropy(
            made.to(torch.float64 if made.dtype is torch.float64 else torch.float32), targets
        )

    # -- results ---------------------------------------------------------------------------------

    def error(self) -> float:
        """Of results, or the median of those of gradients, relative to the root mean square of the
        reference."""
        exact = copy.deepcopy(self.plain).to(torch.float64 if self.quick else torch.float32)
        exact.to(memory_format=torch.contiguous_format)
        inputs = [x.to(next(exact.parameters()).dtype).contiguous() for x in self.inputs]
        with in_full():
            if self.targets is None:
                with torch.no_grad():
                    want = exact(*inputs)
            else:
                nn.functional.cross_entropy(exact(*inputs), self.targets).backward()
        if self.targets is None:
            return relative(self.call(), want)
        self.call()
        wanted = dict(exact.named_parameters())
        inner = getattr(self.compiled, "_orig_mod", self.compiled)
        found = [
            relative(p.grad, w)
            for name, p in inner.named_parameters()
            if p.grad is not None and (w := wanted[name].grad) is not None and w.any()
        ]
        return median(found) if found else math.nan

    def memory(self) -> Row:
        """Megabytes: at most during a call, more than before it."""
        if self.device.type != "cuda":
            return {"peak_mb": ""}
        self.call()
        self.wait()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.call()
        self.wait()
        return {"peak_mb": (torch.cuda.max_memory_allocated() - before) / 2**20}

    def milliseconds(self, seconds: float) -> Row:
        """The medians of calls one by one: until the device is done, and until the call returns, which an
        idle device keeps waiting for nothing but a full queue of launches."""
        taken: list[tuple[float, float]] = []
        until = time.perf_counter() + seconds
        fewest = 1 if self.device.type == "cpu" else FEWEST
        while len(taken) < fewest or (time.perf_counter() < until and len(taken) < MOST):
            taken.append(timed(self.call, self.device))
        both = [median(each) for each in zip(*taken, strict=True)]
        return {"ms": both[0]} | ({"host_ms": both[1]} if self.device.type == "cuda" else {})

    def launched(self) -> Row:
        """Kernels of a call, those of them that only move elements, and the GPU's own time."""
        row: Row = {}
        if self.side in ("transconv", "cudagraphs"):
            row = of_report(transconv.graph.report(self.compiled))
        if self.device.type != "cuda":
            return row
        if self.side == "transconv":
            with counted() as found:
                self.call()
            row["encoded"] = len(found)
            self.wait()
        from torch.profiler import ProfilerActivity, profile

        times = []
        for _ in range(PROFILED):  # the GPU's clock changes from call to call
            with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
                self.call()
                self.wait()
            kernels = [e for e in seen.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
            times.append(covered([(e.time_range.start, e.time_range.end) for e in kernels]) / 1e3)
        row["kernels"] = len(kernels)
        row["gpu_ms"] = median(times)
        row.setdefault("copies", sum(bool(MOVES.search(e.name)) for e in kernels))
        return row

    def losses(self, steps: int) -> list[float]:
        """Of training from the same weights on the same batches, by what is compiled; its weights are then
        as before."""
        inner = getattr(self.compiled, "_orig_mod", self.compiled)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.01, momentum=0.9)
        batches = [
            (self.batch(seed, torch.float32), self.model.targets(self.quick, seed).to(self.device))
            for seed in range(min(4, steps))
        ]
        inner.load_state_dict(self.plain.state_dict())  # calls before have moved running statistics
        found = []
        for step in range(steps):
            optimizer.zero_grad()
            loss = self.loss(self.compiled, *batches[step % len(batches)])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.append(float(loss.detach()))
        optimizer.zero_grad()
        inner.load_state_dict(self.plain.state_dict())
        return found


@contextmanager
def in_full() -> Iterator[None]:
    """f32 is multiplied as f32, by the first of cuDNN's kernels: trying all takes longer."""
    conv, mm = torch.backends.cudnn, torch.backends.cuda.matmul
    before = conv.allow_tf32, mm.allow_tf32, conv.benchmark
    conv.allow_tf32, mm.allow_tf32, conv.benchmark = False, False, False
    try:
        yield
    finally:
        conv.allow_tf32, mm.allow_tf32, conv.benchmark = before


def of_report(found: Report) -> Row:
    """What a compiled model became: kernels of ours, those that compute nothing, regions of torch."""
    rows = [r for g in found.graphs for r in g.rows]
    ours = [r for r in rows if isinstance(r, KernelRow)]
    moving = [r for r in ours if not r.flops]
    torchs = [r for r in rows if isinstance(r, TorchRow)]
    return {
        "kernels": len(ours),
        "ours": len(ours),
        "copies": len(moving),
        "regions": len(torchs),
        "estimated_ms": sum(r.us for r in ours) / 1e3,
        "note": "; ".join(
            [*(f"moves: {r.name}" for r in moving[:8]), *(f"torch: {r.operations}" for r in torchs[:8])]
        )[:600],
    }


@contextmanager
def counted() -> Iterator[list[tuple[int, ...]]]:
    """Within ``with``, the addresses of launches with boxes whose descriptors were not at hand."""
    found: list[tuple[int, ...]] = []
    look = bound_start.Encoder.__call__

    def noted(self: bound_start.Encoder, at: tuple[int, ...], places: Any) -> Any:
        found.append(at)
        return look(self, at, places)

    with patch.object(bound_start.Encoder, "__call__", noted):
        yield found


def timed(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Milliseconds of one call: until the device is done, and until the call returns."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return ((time.perf_counter() - began) * 1e3,) * 2
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    began = time.perf_counter()
    call()
    host = (time.perf_counter() - began) * 1e3
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)), host
