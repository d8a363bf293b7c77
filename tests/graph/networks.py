"""Parts of networks, as small as they can be."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.two, self.other = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.one(x)))
        return F.relu(self.other(self.two(y)) + x)


class Normalized(nn.Module):
    """Group norm, SiLU, convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.silu(self.norm(x)))


class Causal(nn.Module):
    """A convolution over time behind a cache of frames; the sides repeat the last pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv3d(4, 4, 3), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        y = F.pad(torch.cat([cache, x], 2), (1, 1, 1, 1, 0, 0), mode="replicate")
        return F.silu(self.norm(self.conv(y))), x[:, :, -2:]


class Mlp(nn.Module):
    """Layer norm and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ConvNext(nn.Module):
    """A depthwise convolution, a norm over features, two layers with features last."""

    def __init__(self) -> None:
        super().__init__()
        self.deep, self.inner = nn.Conv2d(8, 8, 7, padding=3, groups=8), Mlp8()
        self.scale = nn.Parameter(torch.full((8,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.deep(x).permute(0, 2, 3, 1)) * self.scale
        return x + y.permute(0, 3, 1, 2)


class Mlp8(nn.Module):
    """Its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return y


class UNet(nn.Module):
    """Downsampling, upsampling by nearest neighbours, and a concatenation with the tensor before
    (U-Net)."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.up = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.interpolate(F.silu(self.down(x)), scale_factor=2.0, mode="nearest")
        z: Tensor = self.up(torch.cat([y, x], 1))
        return z


class Gated(nn.Module):
    """Convolutions in blocks, whose results have a gate: their mean over the image."""

    def __init__(self, conv: type[nn.Module], wide: int, deep: int, count: int) -> None:
        super().__init__()
        self.first = conv(2, wide, 3, padding=1)
        blocks = [[nn.SiLU(), conv(wide, wide, 3, padding=1)] * deep for _ in range(count)]
        self.blocks = nn.ModuleList(nn.Sequential(*block) for block in blocks)
        self.last = conv(wide, 2, 3, padding=1)
        self.image = [*range(2, self.first.weight.dim())]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        for block in self.blocks:
            z = block(y)
            y = y + z * torch.sigmoid(z.mean(self.image, keepdim=True))
        made: Tensor = self.last(y)
        return made
