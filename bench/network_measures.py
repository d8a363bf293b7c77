"""What the processes of ``python -m bench networks`` measure: errors, a training, times of both sides."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

import transconv
from bench.network_kernels import plan_all
from bench.network_setting import Row, Setting, Tensor, gpu, prepare, release

STEPS = 20
LONGEST = 30  # kernels of a call that are told


def measure(model: str, precision: str, layout: str, device: str, small: bool, lock: str,
            kernels: list[tuple[Any, ...]], seconds: float = 0.6) -> Row:
    """All rows of one setting: accuracy, training, times."""
    setting = Setting(model, precision, layout, device, small)
    prepare()
    plan_all(kernels, device)
    rows: list[Row] = []
    with gpu(lock, exclusive=False):
        setting.arrange()
        rows += accuracy(setting)
        rows.append(training(setting))
        release()
        before, after = setting.pair()
        runs = calls(setting, before), calls(setting, after)
        for what in runs[0]:
            for run in runs:
                run[what]()
        setting.wait()
    told: list[Row] = []
    with gpu(lock, exclusive=True):
        for what in runs[0]:
            rows.append({"what": what, **timed(runs[0][what], runs[1][what], setting, seconds)})
            for side, run in zip(("torch", "transconv"), runs, strict=True):
                rows[-1][f"{side}_gpu_ms"], each = kernels_of(run[what], setting)
                told += [{"what": what, "side": side, **r} for r in each]
    return {"rows": rows, "kernels": told}


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
    errors = [(name, relative(theirs[name], ref), relative(ours[name], ref))
              for name, ref in wanted.items()]
    _, torchs, mine = errors[0]
    outputs = {"what": "outputs", "torch": torchs, "transconv": mine, "unit": "rel. RMSE",
               "ratio": mine / torchs if torchs else 1.0, **counts}
    rest = [(name, a, b) for name, a, b in errors[1:] if a > 0]
    ratios = sorted((b / a, name) for name, a, b in rest)
    gradients = {"what": "gradients", "torch": median(a for _, a, _ in rest) if rest else 0.0,
                 "transconv": median(b for _, _, b in rest) if rest else 0.0, "unit": "rel. RMSE",
                 "ratio": median(r for r, _ in ratios) if ratios else 1.0, **counts,
                 "note": f"worst of {len(ratios)}: {ratios[-1][0]:.2f} at {ratios[-1][1]}"
                 if ratios else "equal to float64"}
    return [outputs, gradients]


def results(setting: Setting, model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The output, then the gradients by name."""
    found = {"output": setting.forward(model, x)}
    nn.functional.cross_entropy(found["output"].to(
        torch.float64 if setting.precision == "f64" else torch.float32), y).backward()
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
    how far torch's own do when cuDNN chooses other algorithms."""
    batches = [setting.batch(seed) for seed in range(4)]
    losses = []
    for side in ("torch", "transconv", "torch again"):
        torch.backends.cudnn.benchmark = side == "torch again"
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
    torch.backends.cudnn.benchmark = False
    first, ours, again = losses
    apart, itself = (max(abs(a - b) / abs(a) for a, b in zip(first, others, strict=True))
                     for others in (ours, again))
    return {"what": f"training, {STEPS} steps", "torch": first[-1], "transconv": ours[-1],
            "unit": "last loss", "ratio": apart,
            "note": f"first loss {first[0]:.4f}; losses differ by {apart:.2e} at most, torch with "
                    f"other algorithms by {itself:.2e}"}


def calls(setting: Setting, model: nn.Module,
          wrap: Callable[[nn.Module], nn.Module] = lambda m: m) -> dict[str, Callable[[], object]]:
    """Inference and a training step without the optimizer's part."""
    x, y = setting.batch()
    torch.backends.cudnn.benchmark = True
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
    """Milliseconds that the GPU computes in one call, whatever the host needs; and each kernel's share,
    the longest first."""
    if setting.device != "cuda":
        return "", []
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        setting.wait()
    each = [{"kernel": e.key[:120], "calls": e.count, "gpu_us": e.self_device_time_total}
            for e in seen.key_averages() if e.self_device_time_total > 0]
    return (sum(r["gpu_us"] for r in each) / 1e3,
            sorted(each, key=lambda r: -r["gpu_us"])[:LONGEST])


def timed(before: Callable[[], object], after: Callable[[], object], setting: Setting,
          seconds: float) -> Row:
    """Milliseconds of both, in turn: medians over rounds of un-synchronised repetitions."""
    samples: list[list[float]] = [[], []]
    counts = [repetitions(call, setting, seconds / 5) for call in (before, after)]
    transconv.stats(reset=True)
    after()
    told = stats_columns()
    for _ in range(5):
        for call, count, seen in zip((before, after), counts, samples, strict=True):
            seen.append(once(call, count, setting))
    theirs, ours = map(median, samples)
    spread = max((max(s) - min(s)) / median(s) for s in samples)
    return {"torch": theirs, "transconv": ours, "unit": "ms", "ratio": theirs / ours,
            "note": f"spread {spread:.1%}", **told}


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
    return {"native": sum(seen.native.values()),
            "fallback": " ".join(f"{k}={v}" for k, v in sorted(seen.fallback.items()))}


def measure_compiled(model: str, precision: str, layout: str, device: str, small: bool, lock: str,
                     kernels: list[tuple[Any, ...]], side: str, backend: str = "inductor",
                     graphs: bool = False, seconds: float = 0.6) -> Row:
    """Times of one side under torch.compile; ``graphs``: into CUDA graphs."""
    setting = Setting(model, precision, layout, device, small)
    prepare()
    rows: list[Row] = []
    told: list[Row] = []
    mode = {"mode": "reduce-overhead"} if graphs else {}
    with gpu(lock, exclusive=False):
        setting.arrange()
        before, after = setting.pair()
        if side == "transconv":
            plan_all(kernels, device)
        run = calls(setting, after if side == "transconv" else before,
                    lambda m: torch.compile(m, backend=backend, **mode))
        start = time.perf_counter()
        for call in run.values():
            call()
        setting.wait()
        compiling = time.perf_counter() - start
    with gpu(lock, exclusive=True):
        for what, call in run.items():
            count = repetitions(call, setting, seconds / 5)
            transconv.stats(reset=True)
            call()
            counts = stats_columns() if side == "transconv" else {}
            samples = [once(call, count, setting) for _ in range(5)]
            what = f"{'graphed' if graphs else 'compiled'} {what}"
            busy, each = kernels_of(call, setting)
            told += [{"what": what, "side": side, **r} for r in each]
            rows.append({"what": what, side: median(samples), f"{side}_gpu_ms": busy, "unit": "ms",
                         f"{side}_compile_s": compiling, **counts})
    return {"rows": rows, "kernels": told}
