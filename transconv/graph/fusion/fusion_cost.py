"""What it costs to compute a value again, to write and read it, to run a kernel: counts and a roofline.

Only decisions need it: the estimate of a kernel's schedule is the cost room's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from transconv.graph.fusion.groups import FusionGroup
from transconv.graph.fusion.index_ir import Mapped, Piece, ProductSum, RegionInput
from transconv.graph.sizes import like
from transconv.ir import free_vars
from transconv.target import Target

WIDE = 128  # columns of a product's tile: as often is a row loaded


@dataclass(frozen=True, slots=True)
class Price:
    """Rates of a target."""

    target: Target

    @property
    def launch_us(self) -> float:
        """Microseconds of a launch that computes nothing."""
        return self.target.rates.issue.empty_us

    def late(self, p: ProductSum) -> float:
        """Microseconds more of a product of which a factor is computed in registers first."""
        return self.target.rates.issue.computed_late * self.multiplied(p)

    def moved(self, count: float) -> float:
        """Microseconds that so many bytes take."""
        return count / (self.target.bandwidth_gbs * 1e3)

    def worked(self, count: float) -> float:
        """Microseconds that so many instructions take."""
        issue = self.target.rates.issue
        return count / (self.target.sms * issue.cores * (issue.clock * 1e3))

    def multiplied(self, p: ProductSum) -> float:
        """Microseconds of a product."""
        rate = self.target.tflops * (1.0 if p.factors[0].of.dtype.itemsize < 4 else 0.5)
        return 2 * sum(part.multiplied for part in (p, *p.others)) / (rate * 1e6)

    def least(self, p: ProductSum) -> float:
        """Microseconds that no kernel of a product alone stays below, by the cost room's estimates."""
        moved = self.moved(sum(f.of.bytes for f in p.factors) + p.bytes)
        quick = 0.5 if p.factors[0].of.dtype.itemsize == 1 else 1.0
        return max(moved, quick * self.multiplied(p))

    def kernel(self, bytes_: float, work: float, p: ProductSum | None) -> float:
        """Microseconds of a kernel: its launch, and memory beside arithmetic."""
        busy = self.worked(work) + (self.multiplied(p) if p else 0.0)
        return self.launch_us + max(self.moved(bytes_), busy)


def inside(piece: Piece, stored: set[Piece]) -> Iterator[Piece]:
    """All that a value is made of, up to what is in memory, once each."""
    left, seen = [piece], {piece}
    while left:
        at = left.pop()
        yield at
        if not isinstance(at, RegionInput) and at not in stored:
            left += [x for x in dict.fromkeys(at.operands) if x not in seen]
            seen |= {*at.operands}


def sources(piece: Piece, stored: set[Piece]) -> set[Piece]:
    """The tensors in memory that a value is made of."""
    return {x for x in inside(piece, stored) if isinstance(x, RegionInput) or x in stored}


def work(piece: Piece, stored: set[Piece]) -> float:
    """Instructions of one element."""
    return sum(x.work for x in inside(piece, stored) if isinstance(x, Mapped) and x not in stored)


def ahead(piece: Piece) -> float:
    """Instructions of all elements of a value, of operands that are there."""
    return piece.work * like(piece.size) if isinstance(piece, Mapped) else 0.0


def visits(p: ProductSum, side: int) -> float:
    """How often each element of a factor is loaded: by every tile across, in every place of a window."""
    own = p.factors[side].of
    other = like(p.shape[1 - side - 2] if len(p.shape) == 2 else p.factors[1 - side].of.shape[0])
    moved = {v.name for e in p.factors[side].at for v in free_vars(e)}
    seen = prod(like(n) for name, n in p.axes if name in moved)
    return float(max(1.0, seen / max(1, like(own.size))) * -(-other // WIDE))


def counted(group: FusionGroup, stored: set[Piece]) -> tuple[int, float]:
    """Bytes that a group reads and writes at least, and its operations: multiply-adds count twice."""
    ends = [*group.stores, *group.within, *([group.product] if group.product else [])]
    read = {x for e in ends for x in sources(e, stored - {*group.stores})}
    elements = prod(like(n) for _, n in group.axes)
    done = {*group.at, *group.evaluated}
    each = sum(x.work for x in done if isinstance(x, Mapped)) + len(group.within)
    operations = 2.0 * group.product.multiplied if group.product else 0.0
    operations += each * (like(group.product.size) if group.product else elements)
    return sum(x.bytes for x in {*read, *group.stores}), operations
