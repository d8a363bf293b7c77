"""A detector's backbone whose images change their size: github.com/ultralytics/ultralytics/issues/6022."""

from itertools import pairwise

import torch
from torch import nn

from bench.gallery_measures import Demonstration, show


def build(small):
    made = nn.Sequential()
    for c, n in pairwise((3, 4, 8) if small else (3, 64, 128, 256, 512)):
        made.extend([nn.Conv2d(c, n, 3, 2, 1, bias=False), nn.BatchNorm2d(n), nn.SiLU()])
    return made


def given(small):
    sides = ((8, 12), (16, 8)) if small else ((640, 480), (640, 512), (448, 640), (384, 640))
    return [(torch.randn(1, 3, *size),) for size in sides]


DEMONSTRATION = Demonstration(
    "https://github.com/ultralytics/ultralytics/issues/6022",
    "torch.compile compiles a detector again and again (no time)",
    *(build, given, False, True),
)
if __name__ == "__main__":
    show(DEMONSTRATION)
