"""What moves elements, by the library's texts: pads, gathers, concatenations, pools; and long rows of
vocabularies and of video."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench.map_cases import MapCase
from transconv.compute import library
from transconv.compute.library import Strided, views
from transconv.ir import bf16, i64

VOCABULARY = 128256


def last(n: int, c: int, *sizes: int) -> Strided:
    """Images, channels last, in bf16."""
    steps, step = [], c
    for size in reversed(sizes):
        steps.insert(0, step)
        step *= size
    return Strided((n, c, *sizes), (step, 1, *steps), bf16)


def image(t: torch.Tensor, *shape: int) -> torch.Tensor:
    """A tensor of a text as torch's images: channels last."""
    n, c, *sizes = shape
    return t.view(n, *sizes, c).movedim(-1, 1)


def moves() -> list[MapCase]:
    """Forward alone."""
    rows = Strided.dense((4096, VOCABULARY), bf16)
    video = Strided.dense((5 * 480 * 832, 96), bf16)
    return [
        MapCase(
            "reflect pad 256x512x512",
            views.pad(last(1, 256, 512, 512), last(1, 256, 514, 514), (0, 0, 1, 1), "reflect").text,
            lambda t: F.pad(image(t["X"], 1, 256, 512, 512), (1, 1, 1, 1), "reflect"),
            other=lambda t: {"X": t["X"].permute(2, 0, 1).contiguous().permute(1, 2, 0)},
        ),
        MapCase(
            "causal pad 96x17x240x416",
            views.pad(last(1, 96, 17, 240, 416), last(1, 96, 19, 240, 416), (0, 0, 2, 0, 0)).text,
            lambda t: F.pad(image(t["X"], 1, 96, 17, 240, 416), (0, 0, 0, 0, 2, 0)),
        ),
        MapCase(
            "nearest 512x256x256",
            views.nearest(last(1, 512, 256, 256), last(1, 512, 512, 512), (None, None)).text,
            lambda t: F.interpolate(image(t["X"], 1, 512, 256, 256), scale_factor=2),
        ),
        MapCase(
            "concat 320+640 channels",
            views.join([last(2, 320, 128, 128), last(2, 640, 128, 128)], last(2, 960, 128, 128), 1).text,
            lambda t: torch.cat([t["X0"], t["X1"]], 1),
        ),
        MapCase(
            "embedding 16384 of 4096",
            views.embedding(
                Strided.dense((16384,), i64),
                Strided.dense((VOCABULARY, 4096), bf16),
                Strided.dense((16384, 4096), bf16),
            ).text,
            lambda t: F.embedding(t["I"], t["W"]),
            below=VOCABULARY,
        ),
        MapCase(
            "max pool resnet",
            library.max_pool(
                last(256, 64, 112, 112), (3, 3), (2, 2), (1, 1), (1, 1), last(256, 64, 56, 56)
            ).text,
            lambda t: F.max_pool2d(image(t["X"], 256, 64, 112, 112), 3, 2, 1),
        ),
        MapCase(
            f"log softmax 4096x{VOCABULARY}",
            library.log_softmax(rows, 1).text,
            lambda t: F.log_softmax(t["X"], 1),
        ),
        MapCase(
            f"cross entropy 4096x{VOCABULARY}",
            library.cross_entropy(rows, Strided.dense((4096,), i64), 1).text,
            lambda t: F.cross_entropy(t["X"].float(), t["T"], reduction="none"),
            below=VOCABULARY,
        ),
        MapCase(
            "rms norm video 96",
            library.rms_norm(video, 1, Strided.dense((96,), bf16)).text,
            lambda t: F.rms_norm(t["X"], (96,), t["W"], 1e-6),
        ),
        MapCase(
            "batch norm resnet",
            library.batch_norm(
                last(64, 256, 56, 56), w=Strided.dense((256,), bf16), b=Strided.dense((256,), bf16)
            ).text,
            lambda t: F.batch_norm(image(t["X"], 64, 256, 56, 56), None, None, t["W"], t["B"], True),
        ),
    ]
