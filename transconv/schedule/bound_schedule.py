"""Scheduled: a computation with its schedule and target. Derives on demand the computation with its groups
merged, the computation of the main kernel, and those that copy its operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from transconv.compute import Compute
from transconv.ir import Tensor
from transconv.schedule.schedule import Schedule
from transconv.schedule.tiles.copy_kernels import copies
from transconv.schedule.tiles.merging import merged
from transconv.schedule.tiles.packing import over_copies, workspaces
from transconv.target import Target


@dataclass(frozen=True)
class Scheduled:
    """A computation with a schedule and a target. The properties are defined if ``why_not`` is None. No
    other code merges groups or replaces tensors by copies."""

    compute: Compute
    schedule: Schedule
    target: Target

    @cached_property
    def grouped(self) -> Compute:
        """The computation with groups merged, over the original tensors."""
        return merged(self.compute, self.schedule.merge)

    @cached_property
    def main(self) -> Compute:
        """The computation of the main kernel: groups merged, over the copies."""
        pack = self.schedule.pack
        return over_copies(self.grouped, pack, self.schedule.unit) if pack else self.grouped

    @property
    def copies(self) -> tuple[Compute, ...]:
        """The computations that copy operands, and last the one that copies the result."""
        c = self.schedule
        return tuple(copies(self.grouped, c.pack, c.split_k, c.unit))

    @property
    def workspaces(self) -> list[Tensor]:
        """The tensors that hold the copies, and the one that the main kernel writes if its result is
        copied afterwards."""
        c = self.schedule
        return workspaces(self.grouped, c.pack, c.split_k, c.unit)
