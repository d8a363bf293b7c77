"""A vocoder as BigVGAN has it (Lee et al. 2023): transposed convolutions, and blocks of dilated
convolutions with Snake between two filters, so that its harmonics do not alias."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

Tensor = torch.Tensor
TAPS = 12


class AliasFreeSnake(nn.Module):
    """Twice as many samples, ``x + sin(a*x)^2 / a``, and half as many: x [n, c, t]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels, taps = channels, torch.hann_window(TAPS + 2)[1:-1]
        self.a = nn.Parameter(torch.ones(channels, 1))
        self.register_buffer("up", (2 * taps / taps.sum()).repeat(channels, 1, 1))
        self.register_buffer("down", (taps / taps.sum()).repeat(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        padding, groups = TAPS // 2 - 1, self.channels
        y = nn.functional.conv_transpose1d(x, self.up, stride=2, padding=padding, groups=groups)
        y = y + (y * self.a).sin().square() / self.a
        return nn.functional.conv1d(y, self.down, stride=2, padding=padding, groups=groups)


class Residual(nn.Module):
    """Snake and a dilated convolution, added to the input; once for each dilation."""

    def __init__(self, channels: int, size: int = 3, dilations: Sequence[int] = (1, 3, 5)) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(
                AliasFreeSnake(channels),
                nn.Conv1d(channels, channels, size, padding=size // 2 * d, dilation=d),
            )
            for d in dilations
        )

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x)
        return x


def vocoder(mels: int = 100, widths: Sequence[int] = (512, 256, 128, 64, 32)) -> nn.Module:
    """From mels to samples, 4 times as many a level."""
    layers: list[nn.Module] = [nn.Conv1d(mels, widths[0], 7, padding=3)]
    for channels, out in itertools.pairwise(widths):
        layers += [nn.ConvTranspose1d(channels, out, 8, 4, 2), Residual(out)]
    return nn.Sequential(
        *layers, AliasFreeSnake(widths[-1]), nn.Conv1d(widths[-1], 1, 7, padding=3), nn.Tanh()
    )
