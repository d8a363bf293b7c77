"""BigVGAN's blocks, with Snake between two filters: github.com/vllm-project/vllm-omni/pull/7881."""

import torch

from bench.gallery_measures import Demonstration, show
from bench.vocoders import vocoder


def build(small):
    return vocoder(8, (8, 4)) if small else vocoder()


def given(small):
    return [(torch.randn(1, 8, 12) if small else torch.randn(1, 100, 256),)]


DEMONSTRATION = Demonstration(
    "https://github.com/vllm-project/vllm-omni/pull/7881",
    "some 2,700 kernels a clip; 37.6 ms of GPU work take 42 to 90 ms",
    build,
    given,
)
if __name__ == "__main__":
    show(DEMONSTRATION)
