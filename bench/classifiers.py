"""Three image classifiers, written from their papers: ResNet-50 (v1.5), MobileNetV3-Large, ConvNeXt-T."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

Tensor = torch.Tensor


# -- ResNet-50: He et al. 2015; stride in the 3x3, as everybody trains it --------------------------


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with four times the channels, and a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet50(nn.Module):
    def __init__(self, width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3), classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        stages: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stages.append(Bottleneck(channels, width << stage, 2 if stage and not block else 1))
                channels = 4 * width << stage
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


# -- MobileNetV3-Large: Howard et al. 2019, table 1 ------------------------------------------------

# kernel, expansion, out channels, squeeze-and-excite, hard swish, stride
MOBILE_LARGE = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)


def eighth(channels: float) -> int:
    """The multiple of eight nearest to ``channels``, not more than a tenth below it."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near + 8 if near < 0.9 * channels else near


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = eighth(channels / 4)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, inner, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, channels, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)


class InvertedResidual(nn.Module):
    """Expand, depthwise, squeeze-and-excite, project; a shortcut where shapes allow."""

    def __init__(
        self, channels: int, kernel: int, expansion: int, out: int, gated: bool, swish: bool, stride: int
    ) -> None:
        super().__init__()
        act: type[nn.Module] = nn.Hardswish if swish else nn.ReLU
        layers: list[nn.Module] = []
        if expansion != channels:
            layers += [nn.Conv2d(channels, expansion, 1, bias=False), nn.BatchNorm2d(expansion), act()]
        layers += [
            nn.Conv2d(expansion, expansion, kernel, stride, kernel // 2, groups=expansion, bias=False),
            nn.BatchNorm2d(expansion),
            act(),
        ]
        if gated:
            layers.append(SqueezeExcite(expansion))
        layers += [nn.Conv2d(expansion, out, 1, bias=False), nn.BatchNorm2d(out)]
        self.body = nn.Sequential(*layers)
        self.adds = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.adds else y


class MobileNetV3(nn.Module):
    def __init__(
        self, blocks: Sequence[tuple[int, int, int, bool, bool, int]] = MOBILE_LARGE, classes: int = 1000
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, 16, 3, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.Hardswish(),
        ]
        channels = 16
        for kernel, expansion, out, gated, swish, stride in blocks:
            layers.append(InvertedResidual(channels, kernel, expansion, out, gated, swish, stride))
            channels = out
        self.body = nn.Sequential(
            *layers,
            nn.Conv2d(channels, 6 * channels, 1, bias=False),
            nn.BatchNorm2d(6 * channels),
            nn.Hardswish(),
        )
        self.head = nn.Sequential(nn.Linear(6 * channels, 1280), nn.Hardswish(), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x).mean((2, 3)))
        return y


# -- ConvNeXt-T: Liu et al. 2022 -------------------------------------------------------------------


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of (mb, c, h, w)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """7x7 depthwise, norm, two linear layers with GELU between, a scaled shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.wide = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)
        # The paper starts at 1e-6; larger, so that twenty steps see the branch.
        self.scale = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.narrow(nn.functional.gelu(self.wide(y))) * self.scale
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(
        self,
        widths: Sequence[int] = (96, 192, 384, 768),
        blocks: Sequence[int] = (3, 3, 9, 3),
        classes: int = 1000,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            if stage:
                layers += [ChannelNorm(channels, eps=1e-6), nn.Conv2d(channels, width, 2, 2)]
            else:
                layers += [nn.Conv2d(channels, width, 4, 4), ChannelNorm(width, eps=1e-6)]
            layers += [ConvNeXtBlock(width) for _ in range(count)]
            channels = width
        self.body = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.body(x).mean((2, 3))))
        return y
