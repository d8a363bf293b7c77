"""Variational autoencoders of videos: causal convolutions in time, in the public sizes of Wan (Wan Team
2025: RMS norms) and CogVideoX (Yang et al. 2024: group norms steered by the latents). A convolution over
time sees frames before the first as zeros, as that frame again, or as a cache of earlier frames."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor


class CausalConv3d(nn.Conv3d):
    """A convolution that sees no later frame. ``repeat``: before the first frame stands that frame."""

    def __init__(
        self,
        channels: int,
        out: int,
        kernel: Sequence[int] = (3, 3, 3),
        repeat: bool = False,
        stride: Sequence[int] = (1, 1, 1),
    ) -> None:
        super().__init__(channels, out, tuple(kernel), tuple(stride))  # type: ignore[arg-type]
        self.before, self.repeat = kernel[0] - 1, repeat
        self.sides = (kernel[2] // 2, kernel[2] // 2, kernel[1] // 2, kernel[1] // 2)

    def forward(self, x: Tensor, cache: Tensor | None = None) -> Tensor:
        if cache is not None:
            x = torch.cat([cache, x], 2)
        elif self.repeat and self.before:
            x = torch.cat([x[:, :, :1].expand(-1, -1, self.before, -1, -1), x], 2)
        else:
            x = F.pad(x, (0, 0, 0, 0, self.before, 0))
        return super().forward(F.pad(x, (*self.sides, 0, 0)))


class RMSNorm(nn.Module):
    """Of the channels at each point."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.normalize(x, dim=1) * (x.shape[1] ** 0.5) * self.gamma
        return y


class WanResidual(nn.Module):
    """Norm, SiLU, causal convolution, twice; with caches of the two frames before, if given."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(channels), RMSNorm(out)
        self.conv1, self.conv2 = CausalConv3d(channels, out), CausalConv3d(out, out)
        self.short = CausalConv3d(channels, out, (1, 1, 1)) if channels != out else nn.Identity()

    def forward(self, x: Tensor, one: Tensor | None = None, two: Tensor | None = None) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)), one)
        y = self.conv2(F.silu(self.norm2(y)), two)
        z: Tensor = self.short(x) + y
        return z


def framewise(f: nn.Module, x: Tensor) -> Tensor:
    """A function of images, for every frame."""
    n, _, t = x.shape[:3]
    y = f(x.transpose(1, 2).flatten(0, 1))
    return y.unflatten(0, (n, t)).transpose(1, 2)


class WanAttention(nn.Module):
    """One head over the pixels of each frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = RMSNorm(channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + framewise(self.frame, self.norm(x))  # type: ignore[arg-type]

    def frame(self, x: Tensor) -> Tensor:
        h, w = x.shape[2:]
        q, k, v = self.qkv(x).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2)
        z: Tensor = self.out(y.unflatten(2, (h, w)))
        return z


class WanUp(nn.Module):
    """Twice as large, half the channels; with ``time``, twice the frames but for the first."""

    def __init__(self, channels: int, time: bool) -> None:
        super().__init__()
        self.time = CausalConv3d(channels, 2 * channels, (3, 1, 1)) if time else None
        self.conv = nn.Conv2d(channels, channels // 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if self.time is not None:
            y = self.time(x).unflatten(1, (2, x.shape[1]))
            x = torch.stack([y[:, 0], y[:, 1]], 3).flatten(2, 3)[:, :, 1:]
        return framewise(nn.Sequential(nn.Upsample(scale_factor=2.0, mode="nearest-exact"), self.conv), x)


class WanDown(nn.Module):
    """Half as large; with ``time``, half the frames but for the first."""

    def __init__(self, channels: int, time: bool) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(channels, channels, 3, stride=2))
        self.time = CausalConv3d(channels, channels, (3, 1, 1), stride=(2, 1, 1)) if time else None

    def forward(self, x: Tensor) -> Tensor:
        y = framewise(self.conv, x)
        return y if self.time is None else self.time(y)


class WanDecoder(nn.Module):
    """From latents to frames."""

    def __init__(self, base: int = 96, latent: int = 16, layers: int = 3) -> None:
        super().__init__()
        widths = [4 * base, 4 * base, 4 * base, 2 * base, base]
        self.quant, self.begin = CausalConv3d(latent, latent, (1, 1, 1)), CausalConv3d(latent, widths[0])
        made: list[nn.Module] = [
            WanResidual(widths[0], widths[0]),
            WanAttention(widths[0]),
            WanResidual(widths[0], widths[0]),
        ]
        for at, (channels, out) in enumerate(itertools.pairwise(widths)):
            channels = channels // 2 if at else channels
            made += [WanResidual(channels if i == 0 else out, out) for i in range(layers)]
            made += [WanUp(out, at < 2)] if at < 3 else []
        self.levels = nn.Sequential(*made, RMSNorm(base), nn.SiLU(), CausalConv3d(base, 3))

    def forward(self, z: Tensor) -> Tensor:
        y: Tensor = self.levels(self.begin(self.quant(z)))
        return y.clamp(-1.0, 1.0)


class WanEncoder(nn.Module):
    """From frames to the means of latents."""

    def __init__(self, base: int = 96, latent: int = 16, layers: int = 2) -> None:
        super().__init__()
        widths = [base, base, 2 * base, 4 * base, 4 * base]
        made: list[nn.Module] = [CausalConv3d(3, base)]
        for at, (channels, out) in enumerate(itertools.pairwise(widths)):
            made += [WanResidual(channels if i == 0 else out, out) for i in range(layers)]
            made += [WanDown(out, at > 0)] if at < 3 else []
        made += [
            WanResidual(widths[-1], widths[-1]),
            WanAttention(widths[-1]),
            WanResidual(widths[-1], widths[-1]),
            RMSNorm(widths[-1]),
            nn.SiLU(),
        ]
        self.levels = nn.Sequential(
            *made, CausalConv3d(widths[-1], 2 * latent), CausalConv3d(2 * latent, 2 * latent, (1, 1, 1))
        )
        self.latent = latent

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.levels(x)
        return y[:, : self.latent]


# -- CogVideoX -------------------------------------------------------------------------------------


class SteeredNorm(nn.Module):
    """A group norm whose scale and shift are convolutions of the latents, nearest neighbours of them."""

    def __init__(self, channels: int, latent: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, 1e-6)
        self.scale, self.shift = nn.Conv3d(latent, channels, 1), nn.Conv3d(latent, channels, 1)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        z = F.interpolate(z, size=x.shape[2:], mode="nearest")
        y: Tensor = self.norm(x) * self.scale(z) + self.shift(z)
        return y


class CogResidual(nn.Module):
    """Steered norm, SiLU, causal convolution, twice."""

    def __init__(self, channels: int, out: int, latent: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (SteeredNorm(c, latent, groups) for c in (channels, out))
        self.conv1, self.conv2 = (CausalConv3d(c, out, repeat=True) for c in (channels, out))
        self.short = nn.Conv3d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x, z)))
        y = self.conv2(F.silu(self.norm2(y, z)))
        made: Tensor = self.short(x) + y
        return made


class CogUp(nn.Module):
    """Twice as large, with ``time`` in frames, too."""

    def __init__(self, channels: int, time: bool) -> None:
        super().__init__()
        self.scale = (2.0 if time else 1.0, 2.0, 2.0)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return framewise(self.conv, F.interpolate(x, scale_factor=self.scale, mode="nearest"))


class CogDecoder(nn.Module):
    """From an even number of latent frames to frames, as a long video is decoded in pieces."""

    def __init__(
        self,
        widths: Sequence[int] = (128, 256, 256, 512),
        latent: int = 16,
        layers: int = 4,
        groups: int = 32,
    ) -> None:
        super().__init__()
        wide_first = list(widths)[::-1]
        self.begin = CausalConv3d(latent, wide_first[0], repeat=True)
        channels = wide_first[0]
        made: list[nn.Module] = [CogResidual(channels, channels, latent, groups) for _ in range(2)]
        for at, width in enumerate(wide_first):
            made += [
                CogResidual(channels if i == 0 else width, width, latent, groups) for i in range(layers)
            ]
            made += [CogUp(width, at < 2)] if at < len(wide_first) - 1 else []
            channels = width
        self.levels = nn.ModuleList(made)
        self.norm, self.end = SteeredNorm(channels, latent, groups), CausalConv3d(channels, 3, repeat=True)

    def forward(self, z: Tensor) -> Tensor:
        x = self.begin(z)
        for level in self.levels:
            x = level(x, z)
        y: Tensor = self.end(F.silu(self.norm(x, z)))
        return y
