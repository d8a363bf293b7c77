"""Patch embedding of Qwen3-VL, forward and backward: github.com/sgl-project/sglang-omni/pull/539."""

import torch
from torch import nn

from bench.gallery_measures import Demonstration, show


def build(small):
    features = 8 if small else 1152
    return nn.Sequential(nn.Conv3d(3, features, (2, 16, 16), (2, 16, 16)), nn.Flatten())


def given(small):
    return [(torch.randn(3 if small else 4096, 3, 2, 16, 16),)]


DEMONSTRATION = Demonstration(
    "https://github.com/sgl-project/sglang-omni/pull/539",
    "a Conv3d as large as its input takes some 3.7 s a call (H100, bf16)",
    build,
    given,
    trains=True,
)
if __name__ == "__main__":
    show(DEMONSTRATION)
