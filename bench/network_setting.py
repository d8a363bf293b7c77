"""A setting of ``python -m bench networks``: a model, how it computes, and when it may have the GPU.

A model is measured as it is and as a copy that ``transconv.convert_`` has converted, in turn, in
one process. While a process takes times, or cuDNN does, it has the GPU for itself (``exclusive``);
everything else shares it.
"""

from __future__ import annotations

import copy
import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import transconv
from bench import models

Row = dict[str, Any]
Tensor = torch.Tensor
PRECISIONS = ("bf16", "tf32", "ieee")
LAYOUTS = ("nhwc", "nchw")


class Setting:
    """A model's name with the precision, the layout and the device it runs in."""

    def __init__(self, model: str, precision: str, layout: str, device: str, small: bool) -> None:
        self.model, self.precision, self.layout = model, precision, layout
        self.device, self.small = device, small

    def arrange(self, precision: str = "") -> None:
        """Set torch's switches for float32."""
        tf32 = (precision or self.precision) == "tf32"
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32

    def to_layout(self, thing: Any) -> Any:
        """A module or a tensor in this layout."""
        dense3d = self.model == "unet3d"
        form = torch.channels_last_3d if dense3d else torch.channels_last
        if self.layout == "nchw" or (isinstance(thing, Tensor) and thing.dim() != 4 + dense3d):
            return thing
        return thing.to(memory_format=form)

    def pair(self) -> tuple[nn.Module, nn.Module]:
        """The model, and its copy after the one line that this is about."""
        torch.manual_seed(1)
        before = self.to_layout(models.build(self.model, self.small).to(self.device)).train()
        after = copy.deepcopy(before)
        transconv.convert_(after)
        return before, after

    def batch(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        x, y = models.inputs(self.model, self.small, seed)
        return self.to_layout(x.to(self.device)), y.to(self.device)

    def autocast(self) -> Any:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16")

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        with self.autocast():
            y: Tensor = model(x)
            return y

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            self.forward(model, x).to(x.dtype if x.dtype == torch.float64 else torch.float32), y
        )

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


# Held by whoever times, so that commands which run side by side time one by one.
TIMING = f"{tempfile.gettempdir()}/bench_timing.lock"


@contextmanager
def gpu(lock: str, exclusive: bool) -> Iterator[None]:
    """Share the GPU with other processes, or have it alone."""
    with Path(lock).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def prepare() -> None:
    transconv.config.fallback = "silent"
    transconv.stats(reset=True)


def release() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
