"""A VAE's decoder with 8-bit convolutions: github.com/Comfy-Org/ComfyUI/pull/15334."""

import torch

import transconv
from bench.gallery_measures import Demonstration, show
from bench.vaes import Decoder


def build(small):
    return Decoder(4, True, (8, 8), 4, 1) if small else Decoder(4, True)


def given(small):
    return [(torch.randn(1, 4, 4, 4) if small else torch.randn(1, 4, 128, 128),)]


def convert(model, calls):
    transconv.quantize_(model, calibration=calls)


DEMONSTRATION = Demonstration(
    "https://github.com/Comfy-Org/ComfyUI/pull/15334",
    "a video VAE in 8-bit integers is about 1.5 times as fast",
    build,
    given,
    convert=convert,
)
if __name__ == "__main__":
    show(DEMONSTRATION)
