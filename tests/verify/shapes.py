"""Small problems of every kind, and operands for them."""

from __future__ import annotations

import torch

from transconv.conv.conv_problem import ConvProblem, Prop

PROBLEMS = {
    "groups": ConvProblem.make(3, 4, 6, (7, 6), (3, 2), (2, 1), (1, 2), (1, 2), g=2),
    "depthwise": ConvProblem.make(2, 4, 4, (7, 6), (3, 2), stride=(2, 1), pad=1, g=4),
    "multiplier": ConvProblem.make(2, 4, 8, (7, 6), (3, 2), pad=1, g=4),
    "to one": ConvProblem.make(2, 8, 4, (7,), (3,), stride=2, pad=3, g=4),
    "3d": ConvProblem.make(1, 3, 4, (5, 4, 3), (3, 2, 1), stride=2, pad=1),
    "asymmetric": ConvProblem.make(2, 4, 4, (7, 6), (4, 2), pad=(1, 0), o=(8, 7)),
    "unread tail": ConvProblem.make(2, 4, 4, (9, 9), (3, 3), o=(5, 5), stride=1),
    "transposed": ConvProblem.make(2, 6, 4, (8, 8), (3, 3), stride=2, pad=1, o=(4, 4)),
}


def operands(p: ConvProblem, prop: Prop, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(p.shapes[n], generator=generator, dtype=torch.float64) for n in prop.operands)
    return a, b
