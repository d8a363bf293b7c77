"""Two U-Nets, written from their papers: Ronneberger et al. 2015 (2D)
and Isensee et al. 2021 (3D, for medical images)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

Tensor = torch.Tensor


class _Raising(nn.Module):
    """The way up: ``up`` doubles, ``join`` takes that and what was kept, ``head`` classifies."""

    up: nn.ModuleList
    join: nn.ModuleList
    head: nn.Module

    def raised(self, x: Tensor, kept: Sequence[Tensor]) -> Tensor:
        for at in reversed(range(len(self.up))):
            x = self.join[at](torch.cat([kept[at], self.up[at](x)], 1))
        y: Tensor = self.head(x)
        return y


class UNet(_Raising):
    """Two 3x3 convolutions a level, halved by pooling, doubled by transposed convolutions."""

    def __init__(self, widths: Sequence[int] = (64, 128, 256, 512, 1024), classes: int = 2) -> None:
        super().__init__()
        ins = (3, *widths)
        self.down = nn.ModuleList(map(self.level, ins, widths))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(wide, narrow, 2, 2) for narrow, wide in itertools.pairwise(widths)
        )
        self.join = nn.ModuleList(self.level(2 * width, width) for width in widths[:-1])
        self.head = nn.Conv2d(widths[0], classes, 1)

    @staticmethod
    def level(channels: int, out: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(True),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(True),
        )

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for level in self.down:
            x = level(nn.functional.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        return self.raised(x, kept)


class UNet3d(_Raising):
    """Convolution, instance norm, leaky ReLU, twice a level; halved by strides, doubled by
    transposed convolutions."""

    def __init__(self, widths: Sequence[int] = (32, 64, 128, 256, 320), classes: int = 3) -> None:
        super().__init__()
        ins = (1, *widths)
        self.down = nn.ModuleList(
            self.level(channels, width, 2 if at else 1)
            for at, (channels, width) in enumerate(zip(ins, widths, strict=False))
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(wide, narrow, 2, 2) for narrow, wide in itertools.pairwise(widths)
        )
        self.join = nn.ModuleList(self.level(2 * width, width, 1) for width in widths[:-1])
        self.head = nn.Conv3d(widths[0], classes, 1)

    @staticmethod
    def level(channels: int, out: int, stride: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(channels, out, 3, stride, 1),
            nn.InstanceNorm3d(out, affine=True),
            nn.LeakyReLU(0.01, True),
            nn.Conv3d(out, out, 3, 1, 1),
            nn.InstanceNorm3d(out, affine=True),
            nn.LeakyReLU(0.01, True),
        )

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for level in self.down:
            x = level(x)
            kept.append(x)
        return self.raised(x, kept)


class Residual3d(nn.Module):
    """Convolution, instance norm, leaky ReLU, convolution, instance norm, and the input added."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Sequential(
            nn.Conv3d(channels, out, 3, stride, 1, bias=False),
            nn.InstanceNorm3d(out, affine=True),
            nn.LeakyReLU(0.01),
        )
        self.two = nn.Sequential(
            nn.Conv3d(out, out, 3, 1, 1, bias=False), nn.InstanceNorm3d(out, affine=True)
        )
        self.short = (
            nn.Identity()
            if stride == 1 and channels == out
            else nn.Sequential(
                nn.AvgPool3d(stride) if stride > 1 else nn.Identity(),
                nn.Conv3d(channels, out, 1, bias=False),
                nn.InstanceNorm3d(out, affine=True),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu(self.two(self.one(x)) + self.short(x), 0.01)


class ResEnc3d(_Raising):
    """nnU-Net's residual encoder (Isensee et al. 2024): residual blocks on the way down, one convolution a
    level on the way up."""

    def __init__(
        self,
        widths: Sequence[int] = (32, 64, 128, 256, 320, 320),
        blocks: Sequence[int] = (1, 3, 4, 6, 6, 6),
        classes: int = 3,
    ) -> None:
        super().__init__()
        ins = (widths[0], *widths)
        self.stem = nn.Sequential(
            nn.Conv3d(1, widths[0], 3, 1, 1, bias=False),
            nn.InstanceNorm3d(widths[0], affine=True),
            nn.LeakyReLU(0.01),
        )
        self.down = nn.ModuleList(
            nn.Sequential(
                *(
                    Residual3d(channels if i == 0 else width, width, 2 if at and i == 0 else 1)
                    for i in range(count)
                )
            )
            for at, (channels, width, count) in enumerate(zip(ins, widths, blocks, strict=False))
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(wide, narrow, 2, 2) for narrow, wide in itertools.pairwise(widths)
        )
        self.join = nn.ModuleList(
            nn.Sequential(
                nn.Conv3d(2 * width, width, 3, 1, 1, bias=False),
                nn.InstanceNorm3d(width, affine=True),
                nn.LeakyReLU(0.01),
            )
            for width in widths[:-1]
        )
        self.head = nn.Conv3d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        kept: list[Tensor] = []
        for level in self.down:
            x = level(x)
            kept.append(x)
        return self.raised(x, kept)
