"""Variational autoencoders of images as latent diffusion has them (Rombach et al. 2022), in the public
sizes of SDXL and FLUX: group norms, SiLU, 3x3 convolutions, one attention in the middle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor
WIDTHS = (128, 256, 512, 512)


class Residual(nn.Module):
    """Norm, SiLU, convolution, twice."""

    def __init__(self, channels: int, out: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, channels, 1e-6), nn.GroupNorm(groups, out, 1e-6)
        self.conv1, self.conv2 = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.short = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.conv2(F.silu(self.norm2(y)))
        z: Tensor = self.short(x) + y
        return z


class Attention(nn.Module):
    """One head over all pixels."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, 1e-6)
        self.q, self.k, self.v, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (f(y).unsqueeze(1) for f in (self.q, self.k, self.v))
        y = self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        return x + y.transpose(1, 2).reshape(n, c, h, w)


def middle(channels: int, groups: int) -> nn.Module:
    return nn.Sequential(
        Residual(channels, channels, groups),
        Attention(channels, groups),
        Residual(channels, channels, groups),
    )


class Up(nn.Module):
    """Twice as large by nearest neighbours, and a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return y


class Down(nn.Module):
    """Half as large by a stride, padded on two sides."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(F.pad(x, (0, 1, 0, 1)))
        return y


class Decoder(nn.Module):
    """From latents to images; ``quant``: a 1x1 convolution first."""

    def __init__(
        self, latent: int, quant: bool, widths: Sequence[int] = WIDTHS, groups: int = 32, layers: int = 3
    ) -> None:
        super().__init__()
        last, *above = list(widths)[::-1]
        self.quant = nn.Conv2d(latent, latent, 1) if quant else nn.Identity()
        self.begin, self.middle = nn.Conv2d(latent, last, 3, padding=1), middle(last, groups)
        made: list[nn.Module] = []
        channels = last
        for at, width in enumerate((last, *above)):
            made += [Residual(channels if i == 0 else width, width, groups) for i in range(layers)]
            made += [Up(width)] * (at < len(above))
            channels = width
        self.levels = nn.Sequential(*made)
        self.norm, self.end = nn.GroupNorm(groups, channels, 1e-6), nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.levels(self.middle(self.begin(self.quant(z))))
        y: Tensor = self.end(F.silu(self.norm(x)))
        return y


class Encoder(nn.Module):
    """From images to the means of latents."""

    def __init__(
        self, latent: int, quant: bool, widths: Sequence[int] = WIDTHS, groups: int = 32, layers: int = 2
    ) -> None:
        super().__init__()
        self.begin = nn.Conv2d(3, widths[0], 3, padding=1)
        made: list[nn.Module] = []
        channels = widths[0]
        for at, width in enumerate(widths):
            made += [Residual(channels if i == 0 else width, width, groups) for i in range(layers)]
            made += [Down(width)] * (at < len(widths) - 1)
            channels = width
        self.levels, self.middle = nn.Sequential(*made), middle(channels, groups)
        self.norm = nn.GroupNorm(groups, channels, 1e-6)
        self.end = nn.Conv2d(channels, 2 * latent, 3, padding=1)
        self.quant = nn.Conv2d(2 * latent, 2 * latent, 1) if quant else nn.Identity()
        self.latent = latent

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.levels(self.begin(x)))
        y = self.quant(self.end(F.silu(self.norm(y))))
        return y[:, : self.latent]
