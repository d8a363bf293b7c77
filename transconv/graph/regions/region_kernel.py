"""A kernel of a graph: its texts, and the tensors that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from transconv.compute import Alone, Workload
from transconv.conv import Surrounded
from transconv.functional.calls.compiled_launch import TensorMemory, program
from transconv.graph.fusion.groups import FusionGroup
from transconv.graph.fusion.index_ir import Piece
from transconv.graph.fusion.sized_text import SizedText
from transconv.graph.sizes import Length


class SizedTensor(NamedTuple):
    """A tensor whose sizes may be names."""

    shape: tuple[Length, ...]
    strides: tuple[Length, ...]
    dtype: torch.dtype

    def at(self, value: Callable[[Length], int]) -> TensorMemory:
        """With numbers."""
        return TensorMemory(tuple([value(n) for n in self.shape]), tuple([value(n) for n in self.strides]),
                      self.dtype)


@dataclass(frozen=True, eq=False, slots=True)
class RegionKernel:
    """A launch: its text, or one for each part of its result; what it reads and stores in the order of its
    tensors; the group behind it. ``asked``: the text, or the workload of which the texts are parts.
    ``sized``: where sizes are names."""

    group: FusionGroup
    texts: tuple[str, ...]
    given: tuple[Piece, ...]
    stored: tuple[Piece, ...]
    memory: tuple[SizedTensor, ...]  # of what is stored
    asked: str | Surrounded
    sized: SizedText | None = None

    @property
    def workload(self) -> Workload:
        """What is computed."""
        return Alone(program(self.asked).compute) if isinstance(self.asked, str) else self.asked
