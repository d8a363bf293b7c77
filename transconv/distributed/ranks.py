"""The ranks of a mesh that run one plan, each its own part of it: what they compare, and exchange."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from transconv.distributed import agreement
from transconv.distributed.halo import Sent

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class MeshRanks:
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
        """RuntimeError on every rank, with what each has, unless all call it with one text. Asked once for
        each text; ranks that agree choose the same schedules."""
        agreement.agree(self.mesh, text)

    def compare(self, text: str) -> None:
        """The same, asked each time."""
        agreement.compare(self.mesh, text)

    def largest(self, found: tuple[int, ...]) -> tuple[int, ...]:
        """The largest of what each rank has found."""
        return max(own for _, own in agreement.gathered(self.mesh, found))

    def exchange(
        self, sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]]
    ) -> None:
        """Send dense tensors to other ranks, and receive those that they send, in their order.
        RuntimeError that names a rank that is gone, or does not answer in the group's time."""
        sent = Sent(self.mesh.get_group())
        for rank, run in sends:
            sent.send(run.view(torch.uint8), rank, run.nbytes, "bytes")
        for rank, run in receives:
            sent.receive(run.view(torch.uint8), rank, run.nbytes, "bytes")
        sent.start()
        sent.wait()
