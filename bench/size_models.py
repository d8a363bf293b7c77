"""Six layers over images of sixteen sizes, and a graph with symbolic sizes: the rows of ``bench sizes``
that are about calls of a model.

A stall is a size whose first call, waited for, takes longer than ``STALL_MS``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import transconv
from bench import reference
from bench.size_calls import Compilations, switched
from bench.size_layers import OCR_LAYERS, OCR_SIZES
from transconv.tuning.table import Row
from transconv.verify.machine import device, synchronize

STALL_MS = 50.0
SIDES = ("torch heuristics", "torch benchmark", "prepared", "background")
ONE_GRAPH = "prepared, 1 as any size"
SETTLE_S = 40.0


def ocr(side: str, quick: bool, workers: int) -> Row:
    """The sixteen sizes, each for the first time, then again."""
    reference.settings(tf32=True, benchmark=side == "torch benchmark")  # as torch has it for convolutions
    model, images = _model(quick), _images(quick)
    warm_up = _model(quick)(images[0].new_zeros(1, 3, 64, 64))  # cuDNN itself, and the GPU
    row: Row = {"case": "ocr", "side": side, "sizes": len(images), "plans": len(images) * len(model) // 2}
    mode = "background" if side == "background" else "now"
    torch.cuda.empty_cache() if device() == "cuda" else None
    del warm_up
    with switched(sizes="any", compile=mode, fallback="silent"), torch.no_grad():
        wanted = [model(image) for image in images] if side in SIDES[2:] else []
        if side in SIDES[2:]:
            transconv.convert_(model)
        if side == "prepared":
            row["prepare_s"] = _prepare(model, images[0], quick, workers)
        transconv.stats(reset=True)
        with Compilations() as compilations:
            first, made = _each(model, images)
        counted = transconv.stats(reset=True)
        if side == "background":
            _settle(model, images)
        later, _ = _each(model, images)
    row |= {
        "first_ms": sum(first),
        "worst_ms": max(first),
        "stalls": sum(t > STALL_MS for t in first),
        "later_ms": sum(later),
        "later_worst_ms": max(later),
        "compiled": compilations.count,
        "native": counted.native_share if wanted else "",
        "far": _far(made, wanted) if wanted else 0.0,
    }
    return row


def _prepare(model: Any, image: torch.Tensor, quick: bool, workers: int) -> float:
    """Compile the kernels of all layers, load and check those of a small image; how many seconds it
    took."""
    start = time.perf_counter()
    transconv.prepare(model, image, backward=False, workers=workers, progress=False)
    model(image[:, :, :, : 64 if not quick else 8].contiguous())
    synchronize()
    return time.perf_counter() - start


def dynamic(side: str, quick: bool, workers: int) -> Row:
    """torch.compile(dynamic=True) over twenty sizes, its layers prepared, and the first size called, which
    makes the graph (``prepare_s``): what the others take, then all of them again, how many graphs there
    are, and what is compiled for the others, Inductor's kernels as well. torch makes a graph of its own
    for a batch of 1, but for the side ``ONE_GRAPH``."""
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch.fx.experimental import _config as symbolic

    reference.settings(tf32=True, benchmark=False)
    images = [i for n, i in enumerate(_images(quick, 20)) if n < (3 if quick else 20)]
    model = _model(quick)
    oblivious = symbolic.patch(backed_size_oblivious=side == ONE_GRAPH)  # type: ignore[attr-defined]
    with oblivious, torch.no_grad(), switched(sizes="any", compile="now", fallback="silent"):
        wanted = [model(image) for image in images]
        transconv.convert_(model)
        prepared = _prepare(model, images[0], quick, workers)
        counter = CompileCounterWithBackend("eager" if quick else "inductor")
        compiled = torch.compile(model, dynamic=True, backend=counter)
        made_ms, _ = _each(compiled, images[:1])
        with Compilations() as compilations:
            first, made = _each(compiled, images[1:])
            later, _ = _each(compiled, images)
    return {
        "case": "dynamic",
        "side": side,
        "sizes": len(images),
        "graphs": counter.frame_count,
        "plans": "",
        "prepare_s": prepared + sum(made_ms) / 1e3,
        "first_ms": sum(first),
        "worst_ms": max(first),
        "compiled": compilations.count,
        "stalls": sum(t > STALL_MS for t in first),
        "later_ms": sum(later),
        "later_worst_ms": max(later),
        "far": _far(made, wanted[1:]),
    }


def _model(quick: bool) -> torch.nn.Sequential:
    """Convolutions and ReLUs, the same weights each time."""
    torch.manual_seed(0)
    made: list[torch.nn.Module] = []
    for channels, filters, stride in OCR_LAYERS[:2] if quick else OCR_LAYERS:
        made += [torch.nn.Conv2d(channels, 8 if quick else filters, 3, stride, 1), torch.nn.ReLU()]
    return torch.nn.Sequential(*made[:2] if quick else made).to(device()).requires_grad_(False)


def _images(quick: bool, count: int = len(OCR_SIZES)) -> list[torch.Tensor]:
    generator = torch.Generator(device()).manual_seed(1)
    sizes = [(n, 48, w) for n, w in OCR_SIZES] + [(n, 32, w) for n, w in OCR_SIZES]
    if quick:
        sizes = [(n, 5, 4 + w % 5) for n, w in OCR_SIZES[:3]]
    return [torch.randn(n, 3, h, w, device=device(), generator=generator) for n, h, w in sizes[:count]]


def _each(model: Callable[..., Any], images: list[torch.Tensor]) -> tuple[list[float], list[Any]]:
    """Milliseconds of each call, waited for, and the results."""
    spent, made = [], []
    for image in images:
        synchronize()
        start = time.perf_counter()
        made.append(model(image))
        synchronize()
        spent.append((time.perf_counter() - start) * 1e3)
    return spent, made


def _settle(model: Callable[..., Any], images: list[torch.Tensor]) -> None:
    """Call until no call waits for a kernel, at most for a while."""
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        transconv.stats(reset=True)
        _each(model, images)
        found = transconv.stats(reset=True)
        if not found.fallback and not found.waiting:
            return
        time.sleep(0.2)


def _far(made: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest difference, as a share of the largest element."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(made, wanted, strict=True))
