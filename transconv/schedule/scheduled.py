"""Stage 3. In: an algorithm and a schedule of it. Out: what the two make together: the algorithm with its
groups merged, the one of the main kernel, the copies beside it, each derived when it is first asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from transconv.compute import Algorithm
from transconv.ir import Tensor
from transconv.schedule.merging import merged
from transconv.schedule.packing import copies, over_copies, workspaces
from transconv.schedule.schedule import Schedule


@dataclass(frozen=True)
class Scheduled:
    """An algorithm as a schedule sees it. It need not be legal: ask for ``main`` when ``why_not`` has no
    reason against it."""

    algorithm: Algorithm
    schedule: Schedule

    @cached_property
    def grouped(self) -> Algorithm:
        """The algorithm that sees neighbouring groups as one, over the tensors as they are."""
        return merged(self.algorithm, self.schedule.merge)

    @cached_property
    def main(self) -> Algorithm:
        """The algorithm of the main kernel: groups merged, over the copies."""
        pack = self.schedule.pack
        return over_copies(self.grouped, pack, self.schedule.unit) if pack else self.grouped

    @property
    def copies(self) -> tuple[Algorithm, ...]:
        """The kernels beside the main one, those before it first."""
        c = self.schedule
        return tuple(copies(self.grouped, c.pack, c.split_k, c.unit))

    @property
    def workspaces(self) -> list[Tensor]:
        """What the copies are made in, or the main kernel writes to."""
        c = self.schedule
        return workspaces(self.grouped, c.pack, c.split_k, c.unit)
