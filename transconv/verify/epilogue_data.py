"""The tensors that an epilogue reads beside the operands, and their data."""

from __future__ import annotations

import torch

from transconv.conv import ConvProblem, ConvWorkload, Epilogue, Prop
from transconv.ir import Tensor
from transconv.verify.data import torch_dtype


def epilogue_operands(p: ConvProblem, prop: Prop, epilogue: Epilogue) -> dict[str, Tensor]:
    """The tensors that an epilogue reads, by name."""
    workload = ConvWorkload(p, prop, epilogue)
    return {t.name: t for t in workload.tensors[len(p.specs):]}


def epilogue_values(tensor: Tensor, mode: str, where: str, seed: int = 0,
                    halves: bool = False) -> torch.Tensor:
    """For a bias, a residual and others: integers up to 8 in size, or normally distributed. ``halves``:
    floats are halves of these integers, which a result of integers rounds."""
    generator = torch.Generator(where).manual_seed(seed)
    whole = tensor.dtype.kind == "int"
    if mode == "exact" or whole:
        least = max(-8, tensor.dtype.limits[0]) if whole else -8
        drawn = torch.randint(least, 9, tensor.shape, device=where, generator=generator)
        return drawn / 2 if halves and not whole else drawn
    return torch.randn(tensor.shape, device=where, generator=generator)


def epilogue_tensors(p: ConvProblem, prop: Prop, epilogue: str, mode: str,
                     where: str) -> dict[str, torch.Tensor]:
    """What an epilogue reads, without guards: for timing."""
    made = {}
    for name, tensor in epilogue_operands(p, prop, Epilogue.parse(epilogue)).items():
        like = torch.empty_strided(tensor.shape, tensor.layout.strides() or (),
                                   dtype=torch_dtype(tensor.dtype), device=where)
        made[name] = like.copy_(epilogue_values(tensor, mode, where))
    return made
