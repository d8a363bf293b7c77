"""Ranks that run one plan, each its own pieces: what they compare, and what they exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from transconv.compute import AxisSpan
from transconv.distributed import agreement
from transconv.distributed.halo import Sent
from transconv.graph.pieces.piece_execution import PartMemory
from transconv.graph.pieces.step_graph import StepMemory, TensorPart


@dataclass(frozen=True, slots=True)
class PieceRanks:
    """The ranks of a ``mesh`` of one dim, one of which is this process."""

    mesh: Any

    @property
    def number(self) -> int:
        """Of this process."""
        return int(self.mesh.get_local_rank())

    @property
    def count(self) -> int:
        """Of all."""
        return int(self.mesh.size())

    def agree(self, text: str) -> None:
        """The same of a call, asked once for each text; ranks that agree choose the same schedules."""
        agreement.agree(self.mesh, text)

    def compare(self, text: str) -> None:
        """RuntimeError on every rank, with what each has, unless all have one text."""
        agreement.compare(self.mesh, text)

    def worst(self, found: tuple[int, ...]) -> tuple[int, ...]:
        """The largest of what each rank has found."""
        return max(own for _, own in agreement.gathered(self.mesh, found))

    def swap(
        self, memory: StepMemory, room: PartMemory, owned: Sequence[AxisSpan], needed: Sequence[AxisSpan]
    ) -> None:
        """Let the room of this rank have what it needs of a tensor, of which rank r owns ``owned[r]`` and
        needs ``needed[r]``: elements of its digit. Each run of consecutive elements is a message, from
        where it is to where it belongs: nothing is copied. RuntimeError that names a rank that is gone, or
        does not answer in the group's time."""
        sent, own = Sent(self.mesh.get_group()), self.number
        for peer, (has, needs) in enumerate(zip(owned, needed, strict=True)):
            if peer == own:
                continue
            for span, move in (
                (owned[own].within(needs), sent.send),
                (has.within(needed[own]), sent.receive),
            ):
                for run in room.runs(memory, TensorPart(span)) if span.size else ():
                    move(run.view(torch.uint8), peer, span.size // memory.unit)
        sent.start()
        sent.wait()
