"""Where checks run: a GPU, or Triton's interpreter on the CPU; and the memory that one needs."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from transconv import knobs
from transconv.conv import ConvProblem
from transconv.target import TARGETS, Target, detect
from transconv.verify.judgement import PIECE


def device() -> str:
    """Where kernels run: the GPU; or the CPU under Triton's interpreter, which is switched on here
    and must be before anything imports triton."""
    if detect().backend == "interpreter":
        knobs.use_interpreter()
        return "cpu"
    return "cuda"


def executable(target: Target, where: str) -> Target:
    """The target as it runs here: kernels made for a chip can be interpreted by Triton, 16-bit
    operands then need casts, and explicit kernels cannot be."""
    if where == "cuda" or target.backend == "interpreter":
        return target
    return replace(target, name=f"{target.name}-interpreted", upcast16=True,
                   features=target.features - {"wgmma"},
                   precisions=TARGETS["interpreter"].precisions)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def weight(p: ConvProblem) -> float:
    """An upper estimate of the GPU memory that a check needs, in bytes."""
    image = p.ic * prod(p.i) + p.oc * prod(p.o)
    piece = min(p.mb * image, max(PIECE, image))
    # Filling takes several times the tensors, comparing six f64 copies of a piece.
    return 10.0 * p.bytes_moved() + 6 * 8 * piece + 2**29
