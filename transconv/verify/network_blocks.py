"""Twelve blocks of networks, with random weights: the graphs that ``doctor --measure`` times.

Each has the size of a published network and a small one for a CPU: a residual block of ResNet (He et al.
2016) and its stem, ConvNeXt's (Liu et al. 2022), MobileNetV3's (Howard et al. 2019), one of latent
diffusion (Rombach et al. 2022), its upsampling, nnU-Net's (Isensee et al. 2021), attention and the two
layers behind it (Vaswani et al. 2017), SwiGLU behind an RMS norm (Shazeer 2020), dilated convolutions of
audio (Kong et al. 2020), and a classifier's head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class NetworkBlock:
    """A block of a network: ``make`` builds it for a number of ``features``, the second of ``shape``
    unless that is (batch, tokens, features); ``small``: features and shape for a CPU."""

    make: Callable[[int], nn.Module]
    features: int
    shape: tuple[int, ...]
    small: tuple[int, tuple[int, ...]]

    def built(self, device: str, dtype: torch.dtype, small: bool = False) -> tuple[nn.Module, Tensor]:
        """The block in inference and an input, channels last; the same numbers at every call."""
        features, shape = self.small if small else (self.features, self.shape)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            block, x = self.make(features).eval().requires_grad_(False), torch.randn(shape)
        last: dict[int, torch.memory_format] = {4: torch.channels_last, 5: torch.channels_last_3d}
        for p in block.parameters():
            p.data = p.data.contiguous(memory_format=last.get(p.dim(), torch.contiguous_format))
        x = x.contiguous(memory_format=last.get(x.dim(), torch.contiguous_format))
        return block.to(device, dtype), x.to(device, dtype)


class ResidualSum(nn.Module):
    """An input and what is computed of it."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.body(x)
        return y


class FeatureGate(nn.Module):
    """An input times what is computed of it, or of two halves of features one times SiLU of the other."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        if self.body:
            y: Tensor = x * self.body(x)
            return y
        a, b = x.chunk(2, -1)
        return nn.functional.silu(a) * b


class FeaturesLast(nn.Module):
    """Layers of features that lie last, for images."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return y


class BlockAttention(nn.Module):
    """Heads of 64 features; fewer features are one head."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.heads = max(1, features // 64)
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v
        z: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return z


def _bottleneck(c: int) -> nn.Module:
    n = c // 4
    inner = [nn.Conv2d(c, n, 1, bias=False), nn.BatchNorm2d(n), nn.ReLU()]
    inner += [nn.Conv2d(n, n, 3, padding=1, bias=False), nn.BatchNorm2d(n), nn.ReLU()]
    return nn.Sequential(ResidualSum(*inner, nn.Conv2d(n, c, 1, bias=False), nn.BatchNorm2d(c)), nn.ReLU())


def _inverted(c: int) -> nn.Module:
    n = 4 * c
    squeeze = [nn.AdaptiveAvgPool2d(1), nn.Conv2d(n, c, 1), nn.ReLU(), nn.Conv2d(c, n, 1)]
    inner = [nn.Conv2d(c, n, 1), nn.Hardswish(), nn.Conv2d(n, n, 5, padding=2, groups=n), nn.Hardswish()]
    return ResidualSum(*inner, FeatureGate(*squeeze, nn.Hardsigmoid()), nn.Conv2d(n, c, 1))


def _convnext(c: int) -> nn.Module:
    layers = [nn.LayerNorm(c), nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c)]
    return ResidualSum(nn.Conv2d(c, c, 7, padding=3, groups=c), FeaturesLast(*layers))


def _diffusion(c: int) -> nn.Module:
    def half() -> list[nn.Module]:
        return [nn.GroupNorm(max(1, c // 16), c), nn.SiLU(), nn.Conv2d(c, c, 3, padding=1)]

    return ResidualSum(*half(), *half())


def _volume(c: int) -> nn.Module:
    def half() -> list[nn.Module]:
        return [nn.Conv3d(c, c, 3, padding=1), nn.InstanceNorm3d(c, affine=True), nn.LeakyReLU(0.01)]

    return nn.Sequential(*half(), *half())


def _audio(c: int) -> nn.Module:
    def part(dilation: int) -> nn.Module:
        first = nn.Conv1d(c, c, 7, padding=3 * dilation, dilation=dilation)
        return ResidualSum(nn.LeakyReLU(0.1), first, nn.LeakyReLU(0.1), nn.Conv1d(c, c, 7, padding=3))

    return nn.Sequential(part(1), part(3))


def _stem(c: int) -> nn.Module:
    first = nn.Conv2d(c, 64, 7, 2, 3, bias=False)
    return nn.Sequential(first, nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))


BLOCKS = {
    "resnet_block": NetworkBlock(_bottleneck, 256, (32, 256, 56, 56), (16, (1, 16, 5, 5))),
    "resnet_stem": NetworkBlock(_stem, 3, (32, 3, 224, 224), (3, (1, 3, 10, 10))),
    "convnext_block": NetworkBlock(_convnext, 192, (32, 192, 28, 28), (8, (1, 8, 5, 5))),
    "mobilenet_block": NetworkBlock(_inverted, 80, (32, 80, 14, 14), (8, (1, 8, 5, 5))),
    "diffusion_block": NetworkBlock(_diffusion, 320, (2, 320, 64, 64), (16, (1, 16, 5, 5))),
    "diffusion_upsampling": NetworkBlock(
        lambda c: nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(c, c, 3, padding=1)),
        512,
        (1, 512, 64, 64),
        (8, (1, 8, 4, 4)),
    ),
    "volume_block": NetworkBlock(_volume, 32, (2, 32, 64, 64, 64), (8, (1, 8, 3, 4, 5))),
    "audio_block": NetworkBlock(_audio, 128, (4, 128, 16384), (8, (1, 8, 40))),
    "attention": NetworkBlock(
        lambda c: ResidualSum(nn.LayerNorm(c), BlockAttention(c)), 768, (8, 256, 768), (16, (1, 6, 16))
    ),
    "two_layers": NetworkBlock(
        lambda c: ResidualSum(nn.LayerNorm(c), nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c)),
        768,
        (8, 1024, 768),
        (16, (1, 6, 16)),
    ),
    "gated_layers": NetworkBlock(
        lambda c: ResidualSum(nn.RMSNorm(c), nn.Linear(c, 4 * c), FeatureGate(), nn.Linear(2 * c, c)),
        1024,
        (4, 1024, 1024),
        (16, (1, 6, 16)),
    ),
    "classifier": NetworkBlock(
        lambda c: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 1000), nn.Softmax(-1)),
        2048,
        (64, 2048, 7, 7),
        (8, (2, 8, 3, 3)),
    ),
}
"""The blocks by name, in the order in which they are measured."""
