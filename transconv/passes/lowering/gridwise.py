"""The pass ``gridwise``: splits the axes of the naive loop nest into grid, loop and tile.

    for h parallel:                         for pid grid:
        for w parallel:                         m_blk, n_blk = unpack(pid)
            for f parallel:             ->      for m in 0..128 tile, n in 0..64 tile:
                acc = 0                             h, w = unpack(m_blk*128 + m); f = n_blk*64 + n
                for c:                              acc = 0
                    acc += a * b                    for step in 0..C/32:
                store(...)                              for k in 0..32 tile: c = step*32 + k ...
                                                    store(...)

``sides`` splits the axes, ``tails`` masks what a partly filled block has too much. The grid has one
dimension: others are limited.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from transconv.compute import Compute
from transconv.ir import (
    ASSUME,
    Expr,
    For,
    FuncCall,
    Kernel,
    Let,
    Seq,
    Stmt,
    Var,
    find,
    minimum,
    seq,
    statements,
    substitute,
)
from transconv.passes.counts import Extent, blocks, countable, counted, simple, unpack
from transconv.passes.lowering import tile_statistics
from transconv.passes.lowering.loop_nest import SweepLoops, parts
from transconv.passes.lowering.tail_masks import Guard
from transconv.passes.lowering.tile_axes import Side, side_of
from transconv.passes.names import VariableNames
from transconv.schedule import Schedule, ahead
from transconv.simplify import facts_of

STEP = Var("step")  # counts the steps of the sum


def gridwise(kernel: Kernel, schedule: Schedule, compute: Compute) -> Kernel:
    """Tile every axis as the schedule says. The blocks of B, M and N become the grid, those of K the loop
    over the steps."""
    kernel = tile_statistics.leave_partials(kernel, schedule, compute)
    nest = parts(kernel)
    sizes = {x.var: x.stop if x.until is None else x.until
             for x in (*nest.around, *(x for s in nest.sweeps[:1] for x in s.loops))}
    facts = facts_of(kernel.sizes)
    kinds = {v: compute.kind(v.name) for v in sizes}
    sides = {kind: side_of(kind, [v for v in sizes if kinds[v] == kind], sizes, schedule,
                           compute.factors is not None, facts) for kind in "BMNK"}
    pid, grid_lets, grid = _unpack_grid(sides, schedule)
    tails = {v: m for side in sides.values() for v, m in side.tails.items()}
    written = {Var(a) for a in schedule.regs.split(".")} & {v for v in tails if kinds[v] != "K"}
    guard = Guard(tails, nest, written)
    outer = [sides[kind] for kind in "BMN"]
    inner: list[Stmt] = [x for side in outer for x in side.lets]
    taken = VariableNames(taken=[x.var.name for x in inner if isinstance(x, Let)])
    for number, sweep in enumerate(nest.sweeps):
        loop = _sweep(sweep, sides["K"], guard, schedule, bool(schedule.turn and number % 2))
        inner += [*statements(guard.mutate(Seq(sweep.before))), _renamed(loop, number, taken)]
    whole = seq(*inner, *statements(guard.mutate(Seq(nest.after))))
    for side in reversed(outer):
        whole = side.wrap(whole)
    # A persistent program computes several tiles; parts of a split sum count as tiles.
    several = schedule.programs and (isinstance(grid, Expr) or schedule.programs < grid * schedule.split_k)
    dealt = (ahead(schedule, compute), schedule.programs) if several else (0, 0)
    required = countable(kernel.sizes, grid, facts)
    body = counted(For(pid, 0, seq(*grid_lets, whole), "grid", *dealt), grid, facts_of(required))
    return replace(kernel, sizes=required, body=tile_statistics.deal_tiles(body, schedule, compute))


def _sweep(sweep: SweepLoops, side: Side, guard: Guard, schedule: Schedule, turned: bool) -> Stmt:
    """The loop over the steps of a sweep, with the tile loops inside; ``turned``: from the last step."""
    body = side.wrap(seq(*side.lets, *statements(guard.mutate(sweep.body))))
    if not sweep.loops:
        return body
    kind = "unroll" if schedule.unroll else "serial"
    at = Var("step_from_last") if turned else STEP
    last = simple(side.count, side.facts) - 1
    named = [Let(at, last - STEP)] if turned else []
    loop = For(STEP, 0, seq(*named, *unpack(at, side.counts), body), kind, schedule.stages)
    return counted(loop, side.count, side.facts)


def _renamed(loop: Stmt, number: int, taken: VariableNames) -> Stmt:
    """A sweep renamed so that it shares no names with other sweeps, except for the lanes."""
    bound = sorted({STEP, *(x.var for x in find(loop, Let))}, key=lambda v: v.name)
    names: dict[Var, Expr] = {v: Var(taken.fresh(v.name, f"_{number + 1}"), v.type) for v in bound}
    return substitute(loop, names)


def _unpack_grid(sides: dict[str, Side], schedule: Schedule) -> tuple[Var, list[Stmt], Extent]:
    """The program's index, lets that unpack it to (batch, row block, column block), and the grid's size.

    Programs are numbered in groups of ``group_m`` row blocks, each over all columns, so that programs that
    run at the same time share operands in the cache (Triton's tutorial on matrix multiplication). With
    ``back`` the program with the last index has the first blocks.
    """
    pid, rows, columns = Var("pid"), sides["M"].count, sides["N"].count
    group = min(schedule.group_m, rows) if isinstance(rows, int) else schedule.group_m
    pair, m, n = Var("mn_blk"), Var("m_at"), Var("n_at")
    lets: list[Stmt] = []
    outer = sides["B"].counts
    grid = prod(c for _, c in outer) * rows * columns
    first: Var = pid
    if schedule.back and grid != 1:
        first = Var("from_last")
        lets.append(Let(first, grid - 1 - pid))
    lets += unpack(first, [*outer, (pair, rows * columns)])
    if columns == 1 or rows == 1 or group <= 1:
        lets += unpack(pair, [(m, rows), (n, columns)])
    elif isinstance(rows, int) and rows % group == 0:
        whole, rest = Var("group"), Var("in_group")
        lets += unpack(pair, [(whole, rows // group), (rest, group * columns)])
        lets += [Let(m, whole * group + rest % group), Let(n, rest // group)]
    else:
        whole, rest, size = Var("group"), Var("in_group"), Var("group_size")
        lets += unpack(pair, [(whole, blocks(rows, group)), (rest, group * columns)])
        lets.append(Let(size, minimum(rows - whole * group, group)))
        if isinstance(rows, Expr):  # for numbers the simplifier proves it
            lets.append(FuncCall(ASSUME, (size > 0,)))
        lets += [Let(m, whole * group + rest % size), Let(n, rest // size),
                 FuncCall(ASSUME, (m < rows,)), FuncCall(ASSUME, (n < columns,))]
    lets += unpack(m, sides["M"].counts) + unpack(n, sides["N"].counts)
    return pid, lets, grid
