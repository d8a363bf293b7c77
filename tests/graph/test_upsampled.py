"""Convolutions of upsampled images as transposed ones of the small image: their values, and when it is
done."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.graph.meant import by_meaning, compare, results, traced
from transconv.graph import KernelRow, backend, report
from transconv.graph.regions import region_kernels

Tensor = torch.Tensor
F64, BF16 = torch.float64, torch.bfloat16


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding up weights saves time: images are large. No image is written before a product reads it."""
    monkeypatch.setattr(region_kernels, "written_for", lambda *_: -1e9)
    monkeypatch.setattr(region_kernels, "why_apart", lambda *_: "")


def rewritten(run: Any) -> bool:
    """Whether the last graph has a transposed convolution."""
    return any(
        "upsampled convolution" in r.operations
        for r in run.transconv.graphs[-1].rows
        if isinstance(r, KernelRow)
    )


def compared(f: Callable[..., tuple[Tensor]], *inputs: Tensor) -> bool:
    """Whether a graph whose results are torch's has a transposed convolution."""
    with torch.no_grad():
        run = traced(f, inputs)
        with by_meaning():
            compare(f, run, inputs, 1e-12)
    return rewritten(run)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("image", "times", "weight", "padding"),
    [
        ((2, 3, 3, 2), 2, (2, 3, 3, 3), 1),
        ((1, 2, 2, 3), (3, 2), (3, 2, 5, 1), (2, 0)),
        ((1, 2, 2, 3, 2), (1, 2, 2), (2, 2, 2, 3, 3), (0, 1, 2)),
        ((1, 2, 4), 4, (2, 2, 5), 2),
    ],
    ids=str,
)
def test_the_values_are_those_of_the_large_image(
    free: None, image: tuple[int, ...], times: Any, weight: tuple[int, ...], padding: Any
) -> None:
    conv = (F.conv1d, F.conv2d, F.conv3d)[len(image) - 3]

    def f(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (conv((F.interpolate(x, scale_factor=times) * 2).sin(), w, padding=padding),)

    assert compared(f, torch.randn(image, dtype=F64), torch.randn(weight, dtype=F64))


@pytest.mark.slow
def test_of_frames_that_are_a_batch(free: None) -> None:
    """Twice as many frames, too, each with a convolution of its own."""

    def f(x: Tensor, w: Tensor) -> tuple[Tensor]:
        frames = F.interpolate(x, scale_factor=2.0).transpose(1, 2).flatten(0, 1)
        return (F.conv2d(frames, w, padding=1).unflatten(0, (1, 4)).transpose(1, 2),)

    assert compared(f, torch.randn(1, 3, 2, 3, 2, dtype=F64), torch.randn(2, 3, 3, 3, dtype=F64))


@pytest.mark.every(5)
@pytest.mark.parametrize("how", ["stride", "dilation", "groups", "more padding", "other neighbours"])
def test_other_convolutions_stay(free: None, how: str) -> None:
    words: dict[str, Any] = {
        "stride": {"stride": 2},
        "dilation": {"dilation": 2},
        "groups": {"groups": 2},
        "more padding": {"padding": 3},
    }.get(how, {})
    size = (7, 7) if how == "other neighbours" else (8, 8)

    def f(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (F.conv2d(F.interpolate(x, size=size), w, **words),)

    w = torch.randn(2, 1 if how == "groups" else 2, 3, 3, dtype=F64)
    assert not compared(f, torch.randn(1, 2, 4, 4, dtype=F64), w)


def test_small_images_are_not_worth_it() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (F.conv2d(F.interpolate(x, scale_factor=2), w),)

    assert not compared(f, torch.randn(1, 2, 3, 3, dtype=F64), torch.randn(2, 2, 3, 3, dtype=F64))


def far(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).square().mean().sqrt())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bias", "upsampling", "done"),
    [(True, "auto", True), (False, "auto", False), (False, "always", True), (True, "never", False)],
)
def test_narrow_weights_round_no_more_often_than_torch(
    free: None, bias: bool, upsampling: str, done: bool
) -> None:
    """On a GPU torch rounds the convolution's result, and again behind the bias."""
    torch.manual_seed(0)
    x, w = torch.randn(1, 16, 8, 8).to(BF16), (torch.randn(16, 16, 3, 3) / 12).to(BF16)
    b = torch.randn(16).to(BF16) if bias else None

    def f(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (F.conv2d(F.interpolate(x, scale_factor=2), w, b, padding=1),)

    with torch.no_grad():
        run = traced(f, [x, w], upsampling=upsampling)
        with by_meaning():
            (got,) = results(run(x, w))
    assert rewritten(run) is done
    assert len(run.transconv.graphs[-1].rows) == 1 + done, "nothing copies the image"
    exact = F.conv2d(F.interpolate(x.double(), scale_factor=2), w.double(), padding=1)
    theirs, want = exact.to(BF16), exact
    if b is not None:
        theirs, want = theirs + b.view(-1, 1, 1), want + b.double().view(-1, 1, 1)
    ratio = far(got, want) / far(theirs, want)
    assert ratio < 1.1 if upsampling == "auto" else ratio < 1.5, ratio


@pytest.mark.gpu
def test_on_the_device() -> None:
    """Behind a norm, as decoders have it, at a size where it is worth it: as near to f64 as torch."""
    torch.manual_seed(0)
    layers = [
        torch.nn.GroupNorm(8, 128),
        torch.nn.SiLU(),
        torch.nn.Upsample(scale_factor=2.0),
        torch.nn.Conv2d(128, 128, 3, padding=1),
    ]
    model = torch.nn.Sequential(*layers).cuda().to(BF16, memory_format=torch.channels_last).eval()
    x = torch.randn(1, 128, 256, 256, device="cuda").to(BF16, memory_format=torch.channels_last)
    run: Any = torch.compile(model, backend=backend)
    with torch.no_grad():
        got, theirs = run(x), model(x)
        want = copy.deepcopy(model).double()(x.double())
    assert any("upsampled convolution" in k.operations for k in report(run).graphs[0].kernels)
    assert far(got, want) < 1.1 * far(theirs, want)
