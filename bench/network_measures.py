"""What the processes of ``python -m bench networks`` measure: errors, a training, times of both sides."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

import transconv
from bench.network_kernels import plan_all
from bench.network_setting import Row, Setting, Tensor, gpu, prepare, release

STEPS = 20
ROUNDS = 9
LONGEST = 30  # kernels of a call that are listed
SIDES = ("torch", "transconv")


def measure(
    model: str,
    precision: str,
    layout: str,
    device: str,
    small: bool,
    lock: str,
    kernels: list[tuple[Any, ...]],
    seconds: float = 0.9,
) -> Row:
    """All rows of one setting: accuracy, training, times."""
    setting = Setting(model, precision, layout, device, small)
    begin(setting, kernels, lock)
    runs = [calls(setting, model) for model in setting.pair()]
    with gpu(lock, exclusive=False):
        start_all(setting, runs[1:])  # which checks kernels, and measures nothing
        release()
    with gpu(lock, exclusive=True):
        start_all(setting, runs)
        timings, told = compared(setting, runs, "", seconds)
    del runs
    release()
    torch.backends.cudnn.benchmark = False  # keeps the choices so far; float64 needs none
    with gpu(lock, exclusive=False):
        rows = [*accuracy(setting), training(setting)]
    return {"rows": rows + timings, "kernels": told}


def measure_compiled(
    model: str,
    precision: str,
    layout: str,
    device: str,
    small: bool,
    lock: str,
    kernels: list[tuple[Any, ...]],
    backend: str = "inductor",
    graphs: bool = False,
    seconds: float = 0.9,
) -> Row:
    """Times of both sides under torch.compile; ``graphs``: into CUDA graphs."""
    setting = Setting(model, precision, layout, device, small)
    begin(setting, kernels, lock)
    mode = {"mode": "reduce-overhead"} if graphs else {}
    runs, compiling = [], {}
    pair = setting.pair()
    with gpu(lock, exclusive=True):  # cuDNN chooses by measuring and keeps the choice by shape
        start_all(setting, [calls(setting, pair[0])])
    with gpu(lock, exclusive=False):
        for side, model in zip(SIDES, pair, strict=True):
            runs.append(calls(setting, model, lambda m: torch.compile(m, backend=backend, **mode)))
            compiling[f"{side}_compile_s"] = start_all(setting, runs[-1:])
    with gpu(lock, exclusive=True):
        rows, told = compared(setting, runs, "graphed " if graphs else "compiled ", seconds)
    return {"rows": [row | compiling for row in rows], "kernels": told}


def begin(setting: Setting, kernels: list[tuple[Any, ...]], lock: str) -> None:
    """Set the switches, cuDNN's that lets it choose by measuring included, and plan."""
    prepare()
    setting.arrange()
    torch.backends.cudnn.benchmark = True
    with gpu(lock, exclusive=False):  # measurements wait while the host plans
        plan_all(kernels, setting.device)


def start_all(setting: Setting, runs: Sequence[dict[str, Callable[[], object]]]) -> float:
    """Make every call once. Returns seconds."""
    start = time.perf_counter()
    for run in runs:
        for call in run.values():
            call()
    setting.wait()
    return time.perf_counter() - start


def compared(
    setting: Setting, runs: Sequence[dict[str, Callable[[], object]]], prefix: str, seconds: float
) -> tuple[list[Row], list[Row]]:
    """Times of the calls of both sides, and the kernels in them."""
    rows: list[Row] = []
    told: list[Row] = []
    for name, theirs in runs[0].items():
        what = prefix + name
        rows.append({"what": what, **timed(theirs, runs[1][name], setting, seconds)})
        for side, run in zip(SIDES, runs, strict=True):
            rows[-1][f"{side}_gpu_ms"], each = kernels_of(run[name], setting)
            told += [{"what": what, "side": side, **row} for row in each]
    return rows, told


def accuracy(setting: Setting) -> list[Row]:
    """Errors against float64 of the outputs and of every parameter's gradient, relative to the
    root mean square of each; the row of the gradients has medians over the parameters."""
    before, after = setting.pair()
    x, y = setting.batch()
    exact = copy.deepcopy(before).double()
    double = Setting(setting.model, "f64", setting.layout, setting.device, setting.small)
    wanted = results(double, exact, x.double(), y)
    del exact
    theirs = results(setting, before, x, y)
    transconv.stats(reset=True)
    ours = results(setting, after, x, y)
    counts = stats_columns()
    errors = [
        (name, relative(theirs[name], ref), relative(ours[name], ref)) for name, ref in wanted.items()
    ]
    _, torchs, mine = errors[0]
    outputs = {
        "what": "outputs",
        "torch": torchs,
        "transconv": mine,
        "unit": "rel. RMSE",
        "ratio": mine / torchs if torchs else 1.0,
        **counts,
    }
    rest = [(name, a, b) for name, a, b in errors[1:] if a > 0]
    ratios = sorted((b / a, name) for name, a, b in rest)
    gradients = {
        "what": "gradients",
        "torch": median(a for _, a, _ in rest) if rest else 0.0,
        "transconv": median(b for _, _, b in rest) if rest else 0.0,
        "unit": "rel. RMSE",
        "ratio": median(r for r, _ in ratios) if ratios else 1.0,
        **counts,
        "note": f"worst of {len(ratios)}: {ratios[-1][0]:.2f} at {ratios[-1][1]}"
        if ratios
        else "equal to float64",
    }
    return [outputs, gradients]


def results(setting: Setting, model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The output, then the gradients by name."""
    found = {"output": setting.forward(model, x)}
    nn.functional.cross_entropy(
        found["output"].to(torch.float64 if setting.precision == "f64" else torch.float32), y
    ).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad
    return {name: t.detach() for name, t in found.items()}


def relative(got: Tensor, ref: Tensor) -> float:
    """Root mean square of the error over that of the exact values."""
    scale = ref.square().mean().sqrt()
    error = (got.double() - ref).square().mean().sqrt()
    return float((error / scale).item()) if scale else 0.0


def training(setting: Setting) -> Row:
    """Twenty steps from the same weights on the same batches: how far the losses come apart, and
    how far torch's own do when cuDNN has to take deterministic algorithms."""
    batches = [setting.batch(seed) for seed in range(4)]
    losses = []
    for side in ("torch", "transconv", "torch again"):
        torch.backends.cudnn.deterministic = side == "torch again"
        before, after = setting.pair()
        model = after if side == "transconv" else before
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        seen = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = setting.loss(model, *batches[step % len(batches)])
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        losses.append([float(v) for v in torch.stack(seen).cpu()])
    torch.backends.cudnn.deterministic = False
    first, ours, again = losses
    apart, itself = (
        max(abs(a - b) / abs(a) for a, b in zip(first, others, strict=True)) for others in (ours, again)
    )
    return {
        "what": f"training, {STEPS} steps",
        "torch": first[-1],
        "transconv": ours[-1],
        "unit": "last loss",
        "ratio": apart,
        "note": f"first loss {first[0]:.4f}; losses differ by {apart:.2e} at most, torch with "
        f"deterministic algorithms by {itself:.2e}",
    }


def calls(
    setting: Setting, model: nn.Module, wrap: Callable[[nn.Module], nn.Module] = lambda m: m
) -> dict[str, Callable[[], object]]:
    """Inference and a training step without the optimizer's part."""
    x, y = setting.batch()
    inference = wrap(copy.deepcopy(model).eval())
    training = wrap(model)

    def forward() -> object:
        with torch.no_grad():
            return setting.forward(inference, x)

    def step() -> object:
        model.zero_grad(set_to_none=True)
        setting.loss(training, x, y).backward()
        return None

    return {"forward": forward, "forward+backward": step}


def kernels_of(call: Callable[[], object], setting: Setting) -> tuple[float | str, list[Row]]:
    """Milliseconds in which the GPU computes during one call, whatever the host needs; and the time
    from each kernel's start to its end, the longest first. Kernels overlap where one starts while it
    still has to wait for the one before."""
    if setting.device != "cuda":
        return "", []
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        call()
        setting.wait()
    events = seen.events() or ()
    spans = [
        (e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    each = [
        {"kernel": e.key[:120], "calls": e.count, "gpu_us": e.self_device_time_total}
        for e in seen.key_averages()
        if e.self_device_time_total > 0
    ]
    return covered(spans) / 1e3, sorted(each, key=lambda r: -r["gpu_us"])[:LONGEST]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans."""
    total, until = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def timed(
    before: Callable[[], object], after: Callable[[], object], setting: Setting, seconds: float
) -> Row:
    """Milliseconds of both, in turn: medians over rounds of un-synchronised repetitions."""
    samples: list[list[float]] = [[], []]
    counts = [repetitions(call, setting, seconds / ROUNDS) for call in (before, after)]
    transconv.stats(reset=True)
    after()
    told = stats_columns()
    for _ in range(ROUNDS):
        for call, count, seen in zip((before, after), counts, samples, strict=True):
            seen.append(once(call, count, setting))
    theirs, ours = map(median, samples)
    spread = max((max(s) - min(s)) / median(s) for s in samples)
    return {
        "torch": theirs,
        "transconv": ours,
        "unit": "ms",
        "ratio": theirs / ours,
        "note": f"spread {spread:.1%}",
        **told,
    }


def repetitions(call: Callable[[], object], setting: Setting, seconds: float) -> int:
    call()
    return max(1, min(50, round(seconds / (once(call, 2, setting) / 1e3))))


def once(call: Callable[[], object], count: int, setting: Setting) -> float:
    """Milliseconds of one call, over ``count`` in a row."""
    setting.wait()
    start = time.perf_counter()
    for _ in range(count):
        call()
    setting.wait()
    return (time.perf_counter() - start) * 1e3 / count


def stats_columns() -> Row:
    seen = transconv.stats(reset=True)
    return {
        "native": sum(seen.native.values()),
        "fallback": " ".join(f"{k}={v}" for k, v in sorted(seen.fallback.items())),
    }
