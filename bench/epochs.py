"""Models over inputs of varying size, for ``python -m bench start``: the seconds of each epoch.

    audio        a feature encoder of seven 1D convolutions, 8 clips of 1 to 4 seconds, training
    detection    torchvision's Faster R-CNN with ResNet-50 and FPN, images of 320 to 640 pixels, training

The inputs are drawn once and come in the same order in every epoch and on every side.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import transconv

Tensor = torch.Tensor
Step = Callable[[int], Tensor]  # the loss of an input, by its number
EPOCHS = 3
PROFILED = 20  # inputs
# Filters, kernel and stride, after https://arxiv.org/abs/2006.11477
ENCODER = ((512, 10, 5), *((512, 3, 2),) * 4, *((512, 2, 2),) * 2)
NAMES = ("audio", "detection")


def build(name: str, small: bool, device: str) -> tuple[nn.Module, Callable[[nn.Module], Step], int]:
    """A model, a function of it that makes its step, and the number of inputs. ImportError without
    torchvision, for ``detection``."""
    torch.manual_seed(0)
    return (_audio if name == "audio" else _detection)(small, device)


def measure(
    name: str,
    small: bool,
    device: str,
    convert: Callable[[nn.Module], object],
    prepares: bool,
    wait: Callable[[], None],
    left: Callable[[], float],
    tell: Callable[[dict[str, object]], None],
) -> None:
    """Epochs of one side, no more than fit the seconds that are ``left``; tells how many inputs, the
    seconds of the first epoch and of the fastest later one, and the worst step of each in milliseconds.
    A first epoch that does not fit ends there, with as many ``inputs`` as it came to. ``prepares``:
    transconv compiles kernels for all inputs before. On a GPU also how long it works in a step."""
    model, step_of, count = build(name, small, device)
    model = model.to(device)
    convert(model)
    step = step_of(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def train(at: int) -> float:
        wait()
        begun = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = step(at)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait()
        return time.perf_counter() - begun

    if prepares:
        begun = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            transconv.prepare(_Stepping(model, step), torch.zeros((), device=device), progress=False)
        tell({"prepare_s": round(time.perf_counter() - begun, 3)})
    first = list[float]()
    while len(first) < count and (not first or left() > max(first)):
        first.append(train(len(first)))
        tell(
            {
                "inputs": len(first),
                "epoch1_s": round(sum(first), 3),
                "worst_ms": round(max(first) * 1e3, 2),
            }
        )
    epochs = [first]
    while len(first) == count and len(epochs) < EPOCHS and left() > sum(epochs[-1]):
        epochs.append([train(at) for at in range(count)])
        later = min(epochs[1:], key=sum)
        tell({"later_s": round(sum(later), 3), "later_worst_ms": round(max(later) * 1e3, 2)})
    if len(epochs) > 1 and device == "cuda" and left() > sum(epochs[-1]):
        tell({"busy_ms": round(busy_ms(train, min(count, PROFILED)), 3)})


def busy_ms(train: Callable[[int], object], count: int) -> float:
    """The milliseconds that a GPU works in a step, in the mean of the first ``count`` inputs."""
    return sum(kernel_ms(train, count).values())


def kernel_ms(train: Callable[[int], object], count: int) -> dict[str, float]:
    """Those of each kernel, by its name, in the stream that works longest: others have the work
    of other threads, such as checks of first results."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for at in range(count):
            train(at)
    streams: dict[int, dict[str, float]] = {}
    # As they were recorded: `found.events()` takes 17 times as long, seconds for a model's steps.
    for e in found.profiler.kineto_results.events():  # type: ignore[union-attr]
        if e.device_type() == DeviceType.CUDA and not e.is_user_annotation():
            here = streams.setdefault(e.device_resource_id(), {})
            here[e.name()] = here.get(e.name(), 0.0) + e.duration_ns() / 1e6 / count
    return max(streams.values(), key=lambda s: sum(s.values()), default={})


class _Stepping(nn.Module):
    """A model with its step as forward pass, at the first input: kernels for any size serve all."""

    def __init__(self, model: nn.Module, step: Step) -> None:
        super().__init__()
        self.model, self.step = model, step

    def forward(self, _: Tensor) -> Tensor:
        return self.step(0)


def _audio(small: bool, device: str) -> tuple[nn.Module, Callable[[nn.Module], Step], int]:
    draw, count = random.Random(1), 2 if small else 100
    layers: list[nn.Module] = []
    channels = 1
    for filters, kernel, stride in ENCODER[:2] if small else ENCODER:
        filters = 4 if small else filters
        layers += [
            nn.Conv1d(channels, filters, kernel, stride, bias=False),
            nn.GroupNorm(1, filters),
            nn.GELU(),
        ]
        channels = filters
    lengths = [draw.randint(60, 90) if small else draw.randint(16000, 64000) for _ in range(count)]
    clips = [torch.randn(1 if small else 8, 1, n, device=device) for n in lengths]
    return (
        nn.Sequential(*layers),
        lambda model: lambda at: model(clips[at]).float().square().mean(),
        count,
    )


def _detection(small: bool, device: str) -> tuple[nn.Module, Callable[[nn.Module], Step], int]:
    from torchvision.models.detection import fasterrcnn_resnet50_fpn

    draw, count = random.Random(1), 2 if small else 100
    low, high = (64, 96) if small else (320, 640)
    sides = [(draw.randint(low, high), draw.randint(low, high)) for _ in range(count)]
    images = [torch.rand(3, h, w, device=device) for h, w in sides]
    boxes = [
        torch.tensor([[8.0, 8.0, w / 2, h / 2], [w / 4, h / 4, w - 8, h - 8]], device=device)
        for h, w in sides
    ]
    labels = torch.tensor([1, 2], device=device)
    model = fasterrcnn_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=11,
        min_size=low,
        max_size=high,
        trainable_backbone_layers=5,
    )

    def step_of(model: nn.Module) -> Step:
        def step(at: int) -> Tensor:
            losses = model([images[at]], [{"boxes": boxes[at], "labels": labels}])
            return torch.stack([loss.float() for loss in losses.values()]).sum()

        return step

    return model.train(), step_of, count
