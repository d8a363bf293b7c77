"""Layers of a weather model, which goes around the globe: github.com/pytorch/pytorch/issues/57911."""

from itertools import pairwise

import torch
from torch import nn

from bench.gallery_measures import Demonstration, show


def build(small):
    widths = (4, 8, 4) if small else (69, 256, 256, 256, 69)
    layers = [nn.Conv2d(c, n, 5, padding=2, padding_mode="circular") for c, n in pairwise(widths)]
    return nn.Sequential(*(x for layer in layers for x in (layer, nn.GELU())))


def given(small):
    return [(torch.randn(1, 4, 6, 12) if small else torch.randn(1, 69, 181, 360),)]


DEMONSTRATION = Demonstration(
    "https://github.com/pytorch/pytorch/issues/57911",
    "circular padding by hand, since a layer wraps once alone (no time)",
    build,
    given,
)
if __name__ == "__main__":
    show(DEMONSTRATION)
