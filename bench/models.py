"""Five whole models, written from their papers, without pretrained weights.

ResNet-50 (v1.5), MobileNetV3-Large, ConvNeXt-T, a 2D U-Net, and a 3D U-Net of residual blocks as
used for medical images. ``build`` makes each in its paper's size or, with ``small``, in a size for
a CPU; ``inputs`` makes a batch and its targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width),
            nn.ReLU(inplace=True), nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out))
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False),
                                          nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet50(nn.Module):
    def __init__(self, width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3),
                 classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width),
                                  nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        stages: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stages.append(Bottleneck(channels, width << stage,
                                         2 if stage and not block else 1))
                channels = 4 * width << stage
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


# -- MobileNetV3-Large: Howard et al. 2019, table 1 ------------------------------------------------

# kernel, expansion, out channels, squeeze-and-excite, hard swish, stride
MOBILE_LARGE = (
    (3, 16, 16, False, False, 1), (3, 64, 24, False, False, 2), (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2), (5, 120, 40, True, False, 1), (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2), (3, 200, 80, False, True, 1), (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1), (3, 480, 112, True, True, 1), (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2), (5, 960, 160, True, True, 1), (5, 960, 160, True, True, 1))


def eighth(channels: float) -> int:
    """The multiple of eight nearest to ``channels``, not more than a tenth below it."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near + 8 if near < 0.9 * channels else near


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = eighth(channels / 4)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, inner, 1),
                                  nn.ReLU(inplace=True), nn.Conv2d(inner, channels, 1),
                                  nn.Hardsigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)


class InvertedResidual(nn.Module):
    """Expand, depthwise, squeeze-and-excite, project; a shortcut where shapes allow."""

    def __init__(self, channels: int, kernel: int, expansion: int, out: int, gated: bool,
                 swish: bool, stride: int) -> None:
        super().__init__()
        act: type[nn.Module] = nn.Hardswish if swish else nn.ReLU
        layers: list[nn.Module] = []
        if expansion != channels:
            layers += [nn.Conv2d(channels, expansion, 1, bias=False), nn.BatchNorm2d(expansion),
                       act()]
        layers += [nn.Conv2d(expansion, expansion, kernel, stride, kernel // 2, groups=expansion,
                             bias=False), nn.BatchNorm2d(expansion), act()]
        if gated:
            layers.append(SqueezeExcite(expansion))
        layers += [nn.Conv2d(expansion, out, 1, bias=False), nn.BatchNorm2d(out)]
        self.body = nn.Sequential(*layers)
        self.adds = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.adds else y


class MobileNetV3(nn.Module):
    def __init__(self, blocks: Sequence[tuple[int, int, int, bool, bool, int]] = MOBILE_LARGE,
                 classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16),
                                   nn.Hardswish()]
        channels = 16
        for kernel, expansion, out, gated, swish, stride in blocks:
            layers.append(InvertedResidual(channels, kernel, expansion, out, gated, swish, stride))
            channels = out
        self.body = nn.Sequential(*layers, nn.Conv2d(channels, 6 * channels, 1, bias=False),
                                  nn.BatchNorm2d(6 * channels), nn.Hardswish())
        self.head = nn.Sequential(nn.Linear(6 * channels, 1280), nn.Hardswish(),
                                  nn.Linear(1280, classes))

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
    def __init__(self, widths: Sequence[int] = (96, 192, 384, 768),
                 blocks: Sequence[int] = (3, 3, 9, 3), classes: int = 1000) -> None:
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


# -- U-Nets: Ronneberger et al. 2015 (2D), Isensee et al. 2021 (3D) --------------------------------


class UNet(nn.Module):
    """Two 3x3 convolutions a level, halved by pooling, doubled by transposed convolutions."""

    def __init__(self, widths: Sequence[int] = (64, 128, 256, 512, 1024), classes: int = 2) -> None:
        super().__init__()
        ins = (3, *widths)
        self.down = nn.ModuleList(map(self.level, ins, widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, 2)
                                for narrow, wide in zip(widths, widths[1:], strict=False))
        self.join = nn.ModuleList(self.level(2 * width, width) for width in widths[:-1])
        self.head = nn.Conv2d(widths[0], classes, 1)

    @staticmethod
    def level(channels: int, out: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(True),
            nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(True))

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for level in self.down:
            x = level(nn.functional.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        for at in reversed(range(len(self.up))):
            x = self.join[at](torch.cat([kept[at], self.up[at](x)], 1))
        y: Tensor = self.head(x)
        return y


class UNet3d(nn.Module):
    """Convolution, instance norm, leaky ReLU, twice a level; halved by strides, doubled by
    transposed convolutions."""

    def __init__(self, widths: Sequence[int] = (32, 64, 128, 256, 320), classes: int = 3) -> None:
        super().__init__()
        ins = (1, *widths)
        self.down = nn.ModuleList(
            self.level(channels, width, 2 if at else 1)
            for at, (channels, width) in enumerate(zip(ins, widths, strict=False)))
        self.up = nn.ModuleList(nn.ConvTranspose3d(wide, narrow, 2, 2)
                                for narrow, wide in zip(widths, widths[1:], strict=False))
        self.join = nn.ModuleList(self.level(2 * width, width, 1) for width in widths[:-1])
        self.head = nn.Conv3d(widths[0], classes, 1)

    @staticmethod
    def level(channels: int, out: int, stride: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(channels, out, 3, stride, 1), nn.InstanceNorm3d(out, affine=True),
            nn.LeakyReLU(0.01, True), nn.Conv3d(out, out, 3, 1, 1),
            nn.InstanceNorm3d(out, affine=True), nn.LeakyReLU(0.01, True))

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for level in self.down:
            x = level(x)
            kept.append(x)
        for at in reversed(range(len(self.up))):
            x = self.join[at](torch.cat([kept[at], self.up[at](x)], 1))
        y: Tensor = self.head(x)
        return y


# -- sizes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Size:
    """A batch: ``image`` has the channels first; ``classes`` per image, or per point if dense."""

    batch: int
    image: tuple[int, ...]
    classes: int
    dense: bool = False


SIZES: dict[str, Size] = {
    "resnet50": Size(32, (3, 224, 224), 1000),
    "mobilenetv3": Size(64, (3, 224, 224), 1000),
    "convnext_t": Size(32, (3, 224, 224), 1000),
    "unet2d": Size(4, (3, 256, 256), 2, dense=True),
    "unet3d": Size(2, (1, 96, 96, 96), 3, dense=True),
}
SMALL: dict[str, Size] = {
    "resnet50": Size(2, (3, 64, 64), 10),
    "mobilenetv3": Size(4, (3, 64, 64), 10),
    "convnext_t": Size(2, (3, 64, 64), 10),
    "unet2d": Size(1, (3, 32, 32), 2, dense=True),
    "unet3d": Size(1, (1, 16, 16, 16), 3, dense=True),
}
NAMES = tuple(SIZES)


def size_of(name: str, small: bool) -> Size:
    """Raises ValueError for a model that is not in the list."""
    if name not in SIZES:
        raise ValueError(f"model '{name}' is unknown; expected one of: {', '.join(NAMES)}")
    return (SMALL if small else SIZES)[name]


def build(name: str, small: bool = False) -> nn.Module:
    """The model, with random weights from torch's generator, on the CPU in float32."""
    classes = size_of(name, small).classes
    if name == "resnet50":
        return ResNet50(8, (1, 1, 2, 1), classes) if small else ResNet50(classes=classes)
    if name == "mobilenetv3":
        return MobileNetV3(MOBILE_LARGE[:5] if small else MOBILE_LARGE, classes)
    if name == "convnext_t":
        return (ConvNeXt((8, 16, 24, 32), (1, 1, 2, 1), classes) if small
                else ConvNeXt(classes=classes))
    if name == "unet2d":
        return UNet((8, 16, 24), classes) if small else UNet(classes=classes)
    return UNet3d((4, 8, 12), classes) if small else UNet3d(classes=classes)


def inputs(name: str, small: bool = False, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A batch of images (float32) and its targets, on the CPU; the same for the same seed."""
    size = size_of(name, small)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((size.batch, *size.image), generator=generator)
    shape = (size.batch, *size.image[1:]) if size.dense else (size.batch,)
    return x, torch.randint(0, size.classes, shape, generator=generator)
