"""The sides of a tile: the axes of one kind (B, M, N or K), split into blocks and lanes.

Tiling is substitution: position = block_index * extent + lane. If an extent does not divide the size, what
depends on the block gets the mask ``position < size``, one of the side's tails.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from transconv.ir import Expr, For, Let, Stmt, Var
from transconv.passes.counts import Extent, blocks, simple, unpack
from transconv.schedule import Block, Schedule
from transconv.simplify import Facts

LANES = {"B": "grp", "M": "m", "N": "n", "K": "k"}


@dataclass(slots=True)
class Side:
    """The tiling of the axes of one kind: block indices and their counts, the lanes of a tile, and lets of
    the positions."""

    kind: str
    name: str  # of the lanes
    facts: Facts
    counts: list[tuple[Var, Extent]] = field(default_factory=list)
    lets: list[Stmt] = field(default_factory=list)
    extent: int = 1
    lanes: dict[Block, Var] = field(default_factory=dict)  # if each block has lanes of its own
    written: list[tuple[Var, int]] = field(default_factory=list)  # positions written out (``regs``)
    tails: dict[Var, Expr] = field(default_factory=dict)  # axis -> mask that its accesses need

    @property
    def count(self) -> Extent:
        return simple(prod(n for _, n in self.counts), self.facts)

    @property
    def lane(self) -> Var:
        return Var(self.name)

    def wrap(self, body: Stmt) -> Stmt:
        """The tile loops around a body, which is executed at each position of the tile."""
        for var, extent in reversed(self.written):
            body = For(var, extent, body, "jam")
        if not self.lanes:
            return self.tile_loop(self.lane, self.extent, body) if self.extent > 1 else body
        for block, lane in reversed(self.lanes.items()):
            body = self.tile_loop(lane, block.extent, body)
        return body

    def tile_loop(self, lane: Var, extent: int, body: Stmt) -> For:
        return For(lane, extent, body, "tile", side=self.kind)


def side_of(kind: str, axes: list[Var], sizes: dict[Var, Extent], schedule: Schedule,
            product: bool, facts: Facts) -> Side:
    """The tiling of ``axes``, all of one kind. With ``product`` each side of a tile is one dimension, as
    in a dot. Otherwise each block is a dimension: a copy may load along one and store along another."""
    taken = {v.name for v in sizes}
    # The lanes of several blocks are numbered: m0, m1.
    clash = any(name.rstrip("0123456789") == LANES[kind] for name in taken)
    side = Side(kind, f"{LANES[kind]}_lane" if clash else LANES[kind], facts)
    if kind == "K" and schedule.order:
        rank = {n: i for i, n in enumerate(schedule.order.split("."))}
        axes = sorted(axes, key=lambda v: rank[v.name])
    tiles = [b for b in schedule.blocks if Var(b.first) in axes and b.extent > 1]
    tiles = [b for b in tiles if not schedule.in_registers(b)]
    tiles.sort(key=lambda b: axes.index(Var(b.first)))
    side.extent = prod(b.extent for b in tiles)
    if not product and len(tiles) > 1:
        side.lanes = {b: Var(f"{side.lane.name}{i}") for i, b in enumerate(tiles)}
    below = side.extent
    for axis in axes:
        block = schedule.block_of(axis.name)
        if block is None or block.extent == 1:
            side.counts.append((axis, sizes[axis]))
        elif schedule.in_registers(block):
            side.written.append((Var(f"{axis.name}_in"), block.extent))
            _tile(side, block, [axis], side.written[-1][0], sizes)
        elif block.first == axis.name:
            below //= block.extent
            within = _within(side, block, below)
            _tile(side, block, [Var(n) for n in block.axes], within, sizes)
    return side


def _within(side: Side, block: Block, below: int) -> Expr:
    """The position inside a block. A tile of several blocks (``oh:8 ow:8``) has one lane, from which the
    positions are unpacked; the last block varies fastest."""
    if block.extent == side.extent or block in side.lanes:
        return side.lanes.get(block, side.lane)
    within = Var(f"{block.first}_in")
    at: Expr = side.lane // below if below > 1 else side.lane
    side.lets.append(Let(within, at % block.extent if below * block.extent < side.extent else at))
    return within


def _tile(side: Side, block: Block, axes: list[Var], within: Expr,
          sizes: dict[Var, Extent]) -> None:
    """Add the let position = index*extent + within and, if the block fuses several axes, one per axis."""
    whole = block.extent == side.extent and within is side.lane
    index = Var(f"{side.lane.name if whole else axes[0].name}_blk")
    total = simple(prod(sizes[a] for a in axes), side.facts)
    name = axes[0] if len(axes) == 1 else Var("_".join(a.name for a in axes))
    side.lets.append(Let(name, index * block.extent + within))
    if len(axes) > 1:
        # The outermost axis may exceed its size; the tail mask excludes such positions.
        inner = [(a, sizes[a]) for a in axes[1:]]
        side.lets.append(Let(axes[0], name // prod(n for _, n in inner)))
        side.lets += unpack(name, inner, total)
    side.counts.append((index, blocks(total, block.extent)))
    if isinstance(total, Expr) or total % block.extent:
        side.tails |= {a: name < total for a in axes}
