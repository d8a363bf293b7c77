"""The networks of ``python -m bench distributed``: each with an input, the axis that is split, and whether
a step trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from bench.unets import UNet3d
from bench.video_vaes import RMSNorm, WanDecoder

Tensor = torch.Tensor


class Earth(nn.Conv2d):
    """A convolution of a latitude-longitude grid: circular along the longitude, zeros beyond the poles."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__(channels, out, 3, padding=(1, 0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x[..., -1:], x, x[..., :1]], -1))


class EarthBlock(nn.Module):
    """Norm, SiLU, convolution, twice, beside the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.steps = nn.Sequential(
            nn.InstanceNorm2d(width, affine=True),
            nn.SiLU(),
            Earth(width, width),
            nn.InstanceNorm2d(width, affine=True),
            nn.SiLU(),
            Earth(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.steps(x)
        return y


def weather(variables: int = 69, width: int = 192, blocks: int = 6) -> nn.Module:
    """One step of a forecast: residual blocks on the whole grid."""
    return nn.Sequential(
        Earth(variables, width), *(EarthBlock(width) for _ in range(blocks)), Earth(width, variables)
    )


@dataclass(frozen=True, slots=True)
class Sharded:
    """``build`` makes the network, ``shape`` is its input's; ``small``: of both a size for a CPU."""

    says: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    small: tuple[Callable[[], nn.Module], tuple[int, ...]]
    plan: str
    trains: bool
    whole: tuple[str, ...] = ()  # modules that every rank computes whole
    rows: tuple[type[nn.Module], ...] = ()  # modules that compute row by row


def _small_unet() -> nn.Module:
    return UNet3d((4, 8))


MODELS = {
    "unet3d": Sharded(
        "training step of nnU-Net's 3D U-Net, 256x256x256",
        UNet3d,
        (1, 1, 256, 256, 256),
        (_small_unet, (1, 1, 16, 8, 8)),
        "d",
        True,
    ),
    "wan": Sharded(
        "Wan's VAE decoder, 17 frames of 480x832",
        WanDecoder,
        (1, 16, 5, 60, 104),
        (lambda: WanDecoder(8, 4, 1), (1, 4, 2, 4, 6)),
        "w",
        False,
        ("levels.1",),
        (RMSNorm,),
    ),
    "weather": Sharded(
        "training step of a weather network, 721x1440",
        weather,
        (1, 69, 721, 1440),
        (lambda: weather(3, 4, 1), (1, 3, 13, 8)),
        "h",
        True,
    ),
    "volume": Sharded(
        "training step of the same U-Net, 480x480x480: not on one GPU of 80 GB",
        UNet3d,
        (1, 1, 480, 480, 480),
        (_small_unet, (1, 1, 16, 8, 8)),
        "d",
        True,
    ),
}
