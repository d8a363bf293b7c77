"""An audio codec's decoder at chunks of some frames: github.com/SesameAILabs/csm/issues/105."""

import torch
from torch import nn

from bench.gallery_measures import Demonstration, show


def build(small):
    widths = (8, 4) if small else (1024, 512, 256, 128, 64)
    layers = [nn.Conv1d(4 if small else 512, widths[0], 7, padding=3)]
    for c, n, s in zip(widths, widths[1:], (8, 6, 5, 4), strict=False):
        layers += [nn.ELU(), nn.ConvTranspose1d(c, n, 2 * s, s, s // 2)]
        layers += [nn.ELU(), nn.Conv1d(n, n, 3, padding=1)]
    return nn.Sequential(*layers, nn.ELU(), nn.Conv1d(widths[-1], 1, 7, padding=3))


def given(small):
    chunks, features = ((3, 5), 4) if small else ((2, 8, 16, 25), 512)
    return [(torch.randn(1, features, frames),) for frames in chunks]


DEMONSTRATION = Demonstration(
    "https://github.com/SesameAILabs/csm/issues/105",
    "a frame is 80 ms of sound; 8 frames, 640 ms, are decoded at a time",
    *(build, given),
    dynamic=True,
)
if __name__ == "__main__":
    show(DEMONSTRATION)
