"""The pass ``gridwise``: splits the axes of the naive loop nest into grid, loop and tile.

    for h parallel:                         for pid grid:
        for w parallel:                         m_blk, n_blk = unpack(pid)
            for f parallel:             ->      for m in 0..128 tile, n in 0..64 tile:
                acc = 0                             h, w = unpack(m_blk*128 + m); f = n_blk*64 + n
                for c:                              acc = 0
                    acc += a * b                    for step in 0..C/32:
                store(...)                              for k in 0..32 tile: c = step*32 + k ...
                                                    store(...)

A side of the tile has the axes of one kind (B, M, N or K), split into blocks and lanes. Tiling is
substitution: position = block_index * extent + lane. If an extent does not divide the size, what depends
on the block gets the mask ``position < size``, one of the side's tails: no position beyond the end of an
axis is read, written or summed. The grid has one dimension: others are limited. A count of tiles is a
number, or an expression of sizes that are arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite, prod

from transconv import ir
from transconv.compute import Compute
from transconv.passes.lowering import tile_statistics
from transconv.passes.lowering.naive import Nest, SweepLoops, parts
from transconv.passes.scope import VariableNames
from transconv.schedule import Block, Schedule, ahead
from transconv.simplify import Facts, facts_of, range_of, simplify

STEP = ir.Var("step")
"""Counts the steps of the sum."""


def gridwise(kernel: ir.Kernel, schedule: Schedule, compute: Compute) -> ir.Kernel:
    """Tile every axis as the schedule says. The blocks of B, M and N become the grid, those of K the loop
    over the steps."""
    kernel = tile_statistics.leave_partials(kernel, schedule, compute)
    nest = parts(kernel)
    sizes = {
        x.var: x.stop if x.until is None else x.until
        for x in (*nest.around, *(x for s in nest.sweeps[:1] for x in s.loops))
    }
    facts = facts_of(kernel.sizes)
    kinds = {v: compute.kind(v.name) for v in sizes}
    sides = {
        kind: side_of(
            kind,
            [v for v in sizes if kinds[v] == kind],
            sizes,
            schedule,
            compute.factors is not None,
            facts,
        )
        for kind in "BMNK"
    }
    pid, grid_lets, grid = _unpack_grid(sides, schedule)
    tails = {v: m for side in sides.values() for v, m in side.tails.items()}
    written = {ir.Var(a) for a in schedule.regs.split(".")} & {v for v in tails if kinds[v] != "K"}
    guard = Guard(tails, nest, written)
    outer = [sides[kind] for kind in "BMN"]
    inner: list[ir.Stmt] = [x for side in outer for x in side.lets]
    taken = VariableNames(taken=[x.var.name for x in inner if isinstance(x, ir.Let)])
    for number, sweep in enumerate(nest.sweeps):
        loop = _sweep(sweep, sides["K"], guard, schedule, bool(schedule.turn and number % 2))
        inner += [*ir.statements(guard.mutate(ir.Seq(sweep.before))), _renamed(loop, number, taken)]
    whole = ir.seq(*inner, *ir.statements(guard.mutate(ir.Seq(nest.after))))
    for side in reversed(outer):
        whole = side.wrap(whole)
    # A persistent program computes several tiles; parts of a split sum count as tiles.
    several = schedule.programs and (
        isinstance(grid, ir.Expr) or schedule.programs < grid * schedule.split_k
    )
    dealt = (ahead(schedule, compute), schedule.programs) if several else (0, 0)
    required = countable(kernel.sizes, grid, facts)
    body = counted(ir.For(pid, 0, ir.seq(*grid_lets, whole), "grid", *dealt), grid, facts_of(required))
    return replace(kernel, sizes=required, body=tile_statistics.deal_tiles(body, schedule, compute))


def _sweep(sweep: SweepLoops, side: Side, guard: Guard, schedule: Schedule, turned: bool) -> ir.Stmt:
    """The loop over the steps of a sweep, with the tile loops inside; ``turned``: from the last step."""
    body = side.wrap(ir.seq(*side.lets, *ir.statements(guard.mutate(sweep.body))))
    if not sweep.loops:
        return body
    kind = "unroll" if schedule.unroll else "serial"
    at = ir.Var("step_from_last") if turned else STEP
    last = simple(side.count, side.facts) - 1
    named = [ir.Let(at, last - STEP)] if turned else []
    loop = ir.For(STEP, 0, ir.seq(*named, *unpack(at, side.counts), body), kind, schedule.stages)
    return counted(loop, side.count, side.facts)


def _renamed(loop: ir.Stmt, number: int, taken: VariableNames) -> ir.Stmt:
    """A sweep renamed so that it shares no names with other sweeps, except for the lanes."""
    bound = sorted({STEP, *(x.var for x in ir.find(loop, ir.Let))}, key=lambda v: v.name)
    names: dict[ir.Var, ir.Expr] = {
        v: ir.Var(taken.fresh(v.name, f"_{number + 1}"), v.type) for v in bound
    }
    return ir.substitute(loop, names)


def _unpack_grid(sides: dict[str, Side], schedule: Schedule) -> tuple[ir.Var, list[ir.Stmt], Extent]:
    """The program's index, lets that unpack it to (batch, row block, column block), and the grid's size.

    Programs are numbered in groups of ``group_m`` row blocks, each over all columns, so that programs that
    run at the same time share operands in the cache (Triton's tutorial on matrix multiplication). With
    ``back`` the program with the last index has the first blocks."""
    pid, rows, columns = ir.Var("pid"), sides["M"].count, sides["N"].count
    group = min(schedule.group_m, rows) if isinstance(rows, int) else schedule.group_m
    pair, m, n = ir.Var("mn_blk"), ir.Var("m_at"), ir.Var("n_at")
    lets: list[ir.Stmt] = []
    outer = sides["B"].counts
    grid = prod(c for _, c in outer) * rows * columns
    first: ir.Var = pid
    if schedule.back and grid != 1:
        first = ir.Var("from_last")
        lets.append(ir.Let(first, grid - 1 - pid))
    lets += unpack(first, [*outer, (pair, rows * columns)])
    if columns == 1 or rows == 1 or group <= 1:
        lets += unpack(pair, [(m, rows), (n, columns)])
    elif isinstance(rows, int) and rows % group == 0:
        whole, rest = ir.Var("group"), ir.Var("in_group")
        lets += unpack(pair, [(whole, rows // group), (rest, group * columns)])
        lets += [ir.Let(m, whole * group + rest % group), ir.Let(n, rest // group)]
    else:
        whole, rest, size = ir.Var("group"), ir.Var("in_group"), ir.Var("group_size")
        lets += unpack(pair, [(whole, blocks(rows, group)), (rest, group * columns)])
        lets.append(ir.Let(size, ir.minimum(rows - whole * group, group)))
        if isinstance(rows, ir.Expr):  # for numbers the simplifier proves it
            lets.append(ir.FuncCall(ir.ASSUME, (size > 0,)))
        lets += [
            ir.Let(m, whole * group + rest % size),
            ir.Let(n, rest // size),
            ir.FuncCall(ir.ASSUME, (m < rows,)),
            ir.FuncCall(ir.ASSUME, (n < columns,)),
        ]
    lets += unpack(m, sides["M"].counts) + unpack(n, sides["N"].counts)
    return pid, lets, grid


LANES = {"B": "grp", "M": "m", "N": "n", "K": "k"}


@dataclass(slots=True)
class Side:
    """The tiling of the axes of one kind: block indices and their counts, the lanes of a tile, and lets of
    the positions."""

    kind: str
    name: str  # of the lanes
    facts: Facts
    counts: list[tuple[ir.Var, Extent]] = field(default_factory=list)
    lets: list[ir.Stmt] = field(default_factory=list)
    extent: int = 1
    lanes: dict[Block, ir.Var] = field(default_factory=dict)  # if each block has lanes of its own
    written: list[tuple[ir.Var, int]] = field(default_factory=list)  # positions written out (``regs``)
    parts: int = 1  # that are written out (``subtiles``)
    tails: dict[ir.Var, ir.Expr] = field(default_factory=dict)  # axis -> mask that its accesses need

    @property
    def count(self) -> Extent:
        return simple(prod(n for _, n in self.counts), self.facts)

    @property
    def lane(self) -> ir.Var:
        return ir.Var(self.name)

    @property
    def at(self) -> ir.Expr:
        """The position in the tile: that of the lane, in a part if there are several."""
        part = ir.Var(f"{self.name}_part")
        return self.lane if self.parts == 1 else part * (self.extent // self.parts) + self.lane

    def wrap(self, body: ir.Stmt) -> ir.Stmt:
        """The tile loops around a body, which is executed at each position of the tile."""
        for var, extent in reversed(self.written):
            body = ir.For(var, extent, body, "jam")
        if not self.lanes:
            extent = self.extent // self.parts
            return self.tile_loop(self.lane, extent, body) if extent > 1 else body
        for block, lane in reversed(self.lanes.items()):
            body = self.tile_loop(lane, block.extent, body)
        return body

    def tile_loop(self, lane: ir.Var, extent: int, body: ir.Stmt) -> ir.For:
        return ir.For(lane, extent, body, "tile", side=self.kind)


def side_of(
    kind: str,
    axes: list[ir.Var],
    sizes: dict[ir.Var, Extent],
    schedule: Schedule,
    product: bool,
    facts: Facts,
) -> Side:
    """The tiling of ``axes``, all of one kind. With ``product`` each side of a tile is one dimension, as
    in a dot. Otherwise each block is a dimension: a copy may load along one and store along another."""
    taken = {v.name for v in sizes}
    # The lanes of several blocks are numbered: m0, m1.
    clash = any(name.rstrip("0123456789") == LANES[kind] for name in taken)
    side = Side(kind, f"{LANES[kind]}_lane" if clash else LANES[kind], facts)
    if kind == "K" and schedule.order:
        rank = {n: i for i, n in enumerate(schedule.order.split("."))}
        axes = sorted(axes, key=lambda v: rank[v.name])
    tiles = [b for b in schedule.blocks if ir.Var(b.first) in axes and b.extent > 1]
    tiles = [b for b in tiles if not schedule.in_registers(b)]
    tiles.sort(key=lambda b: axes.index(ir.Var(b.first)))
    side.extent = prod(b.extent for b in tiles)
    if not product and len(tiles) > 1:
        side.lanes = {b: ir.Var(f"{side.lane.name}{i}") for i, b in enumerate(tiles)}
    if kind == "N" and schedule.subtiles > 1:
        side.parts = schedule.subtiles
        side.written.append((ir.Var(f"{side.name}_part"), side.parts))
    below = side.extent
    for axis in axes:
        block = schedule.block_of(axis.name)
        if block is None or block.extent == 1:
            side.counts.append((axis, sizes[axis]))
        elif schedule.in_registers(block):
            side.written.append((ir.Var(f"{axis.name}_in"), block.extent))
            _tile(side, block, [axis], side.written[-1][0], sizes)
        elif block.first == axis.name:
            below //= block.extent
            within = _within(side, block, below)
            _tile(side, block, [ir.Var(n) for n in block.axes], within, sizes)
    return side


def _within(side: Side, block: Block, below: int) -> ir.Expr:
    """The position inside a block. A tile of several blocks (``oh:8 ow:8``) has one lane, from which the
    positions are unpacked; the last block varies fastest."""
    if block.extent == side.extent or block in side.lanes:
        return side.lanes.get(block, side.at)
    within = ir.Var(f"{block.first}_in")
    at: ir.Expr = side.at // below if below > 1 else side.at
    side.lets.append(ir.Let(within, at % block.extent if below * block.extent < side.extent else at))
    return within


def _tile(
    side: Side, block: Block, axes: list[ir.Var], within: ir.Expr, sizes: dict[ir.Var, Extent]
) -> None:
    """Add the let position = index*extent + within and, if the block fuses several axes, one per axis."""
    whole = block.extent == side.extent and within is side.at
    index = ir.Var(f"{side.lane.name if whole else axes[0].name}_blk")
    total = simple(prod(sizes[a] for a in axes), side.facts)
    name = axes[0] if len(axes) == 1 else ir.Var("_".join(a.name for a in axes))
    side.lets.append(ir.Let(name, index * block.extent + within))
    if len(axes) > 1:
        # The outermost axis may exceed its size; the tail mask excludes such positions.
        inner = [(a, sizes[a]) for a in axes[1:]]
        side.lets.append(ir.Let(axes[0], name // prod(n for _, n in inner)))
        side.lets += unpack(name, inner, total)
    side.counts.append((index, blocks(total, block.extent)))
    if isinstance(total, ir.Expr) or total % block.extent:
        side.tails |= {a: name < total for a in axes}


class Guard(ir.ExprMutator):
    """The mutator that adds the tail masks to every access that depends on a partly filled block. The
    positions of ``written`` axes are written out. Their loads need no tail mask if their own mask keeps
    them inside the tensor: results beyond the end are not stored, and the pass ``reuse`` can then share
    the load."""

    def __init__(self, tails: dict[ir.Var, ir.Expr], nest: Nest, written: set[ir.Var]) -> None:
        super().__init__()
        self.tails, self.written = tails, written
        self.lets = nest.lets
        self.summed = {x.var for s in nest.sweeps for x in s.loops}

    def guarded(self, offset: ir.Expr, mask: ir.Expr, inside: frozenset[ir.Var] = frozenset()) -> ir.Expr:
        roots = roots_of(offset, self.lets) - inside
        needed = [m for v, m in self.tails.items() if v in roots]
        return ir.all_of([p for m in needed for p in ir.conjuncts(m)] + ir.conjuncts(mask))

    def mutate_Load(self, at: ir.Load) -> ir.Node:
        inside = frozenset(v for v in self.written if self.keeps_inside(at, v))
        return replace(at, mask=self.guarded(at.offset, at.mask, inside))

    def keeps_inside(self, at: ir.Load, axis: ir.Var) -> bool:
        """Whether a load's own mask excludes positions beyond the end of an axis: it bounds a coordinate
        in the direction in which the axis moves it."""
        seen = {*ir.find(at.offset, ir.Expr)}
        for condition in ir.conjuncts(at.mask):
            match condition:
                case ir.Lt(coord, end) if coord in seen and axis not in roots_of(end, self.lets):
                    towards = 1
                case ir.Le(ir.Const(), coord) if coord in seen:
                    towards = -1
                case _:
                    continue
            if axis in roots_of(coord, self.lets) and self.step(coord, axis) * towards > 0:
                return True
        return False

    def step(self, coord: ir.Expr, axis: ir.Var) -> int:
        """The change of a coordinate from one position of an axis to the next; 0 if it is not constant."""
        while named := {v: self.lets[v] for v in ir.free_vars(coord) if v in self.lets}:
            coord = ir.substitute(coord, named)
        moved = simplify(ir.substitute(coord, {axis: axis + 1}) - coord, Facts())
        return int(moved.value) if isinstance(moved, ir.Const) else 0

    def mutate_Store(self, at: ir.Store) -> ir.Node:
        return ir.Store(at.tensor, at.offset, self.mutate(at.value), self.guarded(at.offset, at.mask))

    def mutate_FuncCall(self, at: ir.FuncCall) -> ir.Node:
        if not at.func.leaves and at.func is not ir.ATOMIC_ADD:
            return at
        tensor, offset, value, mask, *count = at.args
        assert isinstance(offset, ir.Expr) and isinstance(value, ir.Expr) and isinstance(mask, ir.Expr)
        if at.func.leaves:  # all points count that are in the axes
            kept = roots_of(offset, self.lets) | {*self.tails} - self.summed
            ends = dict.fromkeys(p for v, m in self.tails.items() if v in kept for p in ir.conjuncts(m))
            return ir.FuncCall(at.func, (tensor, offset, value, ir.all_of([*ends]), *count))
        return ir.FuncCall(at.func, (tensor, offset, self.mutate(value), self.guarded(offset, mask)))

    def mutate_Update(self, at: ir.Update) -> ir.Node:
        """Positions beyond the end must not change the result. In a sum of products it is enough that they
        are loaded as 0; in other reductions the neutral element replaces their terms."""
        match at.value:
            case ir.Add(old, term) | ir.Mul(old, term) | ir.Max(old, term) | ir.Min(old, term) if (
                old is at.var
            ):
                op = type(at.value)
                reducer = ir.REDUCERS[ir.reducer_of(op)]
                lacking = [
                    m
                    for v, m in self.tails.items()
                    if v in self.summed and not vanishes(term, v, reducer.neutral, self.lets)
                ]
                if lacking:
                    nothing = reducer.identity(term.dtype)
                    kept = ir.Select(
                        ir.all_of([p for m in lacking for p in ir.conjuncts(m)]), term, nothing
                    )
                    return ir.Update(at.var, op(old, kept))
        return at


# -- terms beyond the end of an axis -----------------------------------------------------------------


Lets = Mapping[ir.Var, ir.Expr]


def roots_of(e: ir.Expr, lets: Lets) -> frozenset[ir.Var]:
    """The loop variables that an expression depends on, directly or through lets."""
    found: set[ir.Var] = set()
    for v in ir.free_vars(e):
        found |= roots_of(lets[v], lets) if v in lets else {v}
    return frozenset(found)


def vanishes(term: ir.Expr, axis: ir.Var, nothing: float, lets: Lets) -> bool:
    """Whether a term equals ``nothing``, the neutral element, beyond the end of an axis, because it is
    loaded with that fill; in a sum, also if a factor of it is, and the others are finite."""
    if isinstance(term, ir.Mul) and nothing == 0:
        return any(
            vanishes(x, axis, nothing, lets) and is_finite(y, axis, lets)
            for x, y in ((term.a, term.b), (term.b, term.a))
        )
    value = term.x if isinstance(term, ir.Cast) else term
    load = lets.get(value) if isinstance(value, ir.Var) else None
    if isinstance(load, ir.Select):  # between two loads
        return vanishes(load.yes, axis, nothing, lets) and vanishes(load.no, axis, nothing, lets)
    return isinstance(load, ir.Load) and load.fill == nothing and axis in roots_of(load.offset, lets)


def is_finite(e: ir.Expr, axis: ir.Var, lets: Lets) -> bool:
    """Whether a value beyond the end of an axis is finite, if the elements of tensors are: it is loaded,
    moved, added and multiplied, or it is the same along the axis."""
    match e:
        case ir.Const(value):
            return isfinite(value)
        case ir.Load():
            return isfinite(e.fill)
        case ir.Cast(x) | ir.Neg(x):
            return is_finite(x, axis, lets)
        case ir.Select(_, x, y) | ir.Add(x, y) | ir.Sub(x, y) | ir.Mul(x, y) | ir.Max(x, y) | ir.Min(x, y):
            return is_finite(x, axis, lets) and is_finite(y, axis, lets)
        case ir.Var() if e in lets:
            return is_finite(lets[e], axis, lets)
    return axis not in roots_of(e, lets)


Extent = int | ir.Expr
"""A number, or an expression of sizes that are arguments."""


def countable(sizes: ir.Sizes | None, tiles: Extent, facts: Facts) -> ir.Sizes | None:
    """The requirements of a kernel, and that its tiles can be counted in 32 bits."""
    if sizes is None or not isinstance(tiles, ir.Expr):
        return sizes
    tiles = simplify(tiles, facts)
    most = range_of(tiles, facts).hi
    if most is not None and most <= ir.LARGEST_SIZE:
        return sizes
    return replace(sizes, where=(*sizes.where, tiles <= ir.LARGEST_SIZE))


def counted(loop: ir.For, count: Extent, facts: Facts) -> ir.For:
    """The loop with ``count`` iterations. An expression becomes ``until``, its largest value ``stop``."""
    if isinstance(count, int):
        return replace(loop, stop=count)
    count = simplify(count, facts)
    if isinstance(count, ir.Const):
        return replace(loop, stop=int(count.value))
    most = range_of(count, facts).hi
    assert most is not None, f"{count} has no end"
    return replace(loop, stop=most, until=count)


def simple(count: Extent, facts: Facts) -> Extent:
    """A count, simplified with the facts about sizes."""
    return simplify(count, facts) if isinstance(count, ir.Expr) else count


def blocks(total: Extent, extent: int) -> Extent:
    """The number of blocks of ``extent`` that hold ``total`` positions."""
    return (total + (extent - 1)) // extent if isinstance(total, ir.Expr) else -(-total // extent)


def unpack(packed: ir.Var, counts: list[tuple[ir.Var, Extent]], total: Extent = 0) -> list[ir.Stmt]:
    """Lets that unpack an index below ``total``, in row-major order: the last variable varies fastest.
    Without a ``total``, it is the product of the counts."""
    lets: list[ir.Stmt] = []
    below: Extent = 1
    given = isinstance(total, ir.Expr) or total > 0
    total = total if given else prod(count for _, count in counts)
    for var, count in reversed(counts):
        value: ir.Expr = packed // below if isinstance(below, ir.Expr) or below > 1 else packed
        if count == 1:
            value = ir.ZERO
        elif (given or var is not counts[0][0]) and _less(below * count, total):
            value = value % count
        lets.append(ir.Let(var, value))
        below *= count
    return lets[::-1]


def _less(a: Extent, b: Extent) -> bool:
    """Whether ``a`` may be less than ``b``."""
    return isinstance(a, ir.Expr) or isinstance(b, ir.Expr) or a < b
