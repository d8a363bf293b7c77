"""Loads behind a sum that do not wait for it, in the consumers of warp-specialized kernels
(``warp_spec/warp_roles.py``).

    for pid ..:                                       let q = load(Q, 0); let i = 1 / q
        for step: dot_async(acc, ..)                  for pid ..:
        dot_wait(0)                              ->       let b = load(B, n_at*128 + n)
        let q = load(Q, 0)                                for step: dot_async(acc, ..)
        let b = load(B, n_at*128 + n)                     dot_wait(0)
        let y = (acc + b) * (1 / q)                       let y = (acc + b) * i

What is the same for all tiles is loaded once. Vectors along a side of the tile are loaded before its sum,
so that they are there when it is, as far as a thread has registers for them beside its sums: along the
columns of the register tile each thread holds a quarter of them, along its rows few. Behind the waits, a
tile of few steps spends more time on them than on its products.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from transconv.ir import (
    Alloc,
    BoxLoad,
    BoxStore,
    Lane,
    Let,
    Load,
    Stmt,
    Store,
    Tensor,
    Var,
    find,
    free_vars,
    lanes_of,
)
from transconv.schedule import Schedule

# Of a thread, for its sums, the tiles that are added to them, and vectors: of the 255 that it may have,
# without those for addresses. Not fitted to times.
REGISTERS = 208
COLUMNS = 4  # threads that share a row of the register tile
ROWS = 8  # rows of it that a warp's threads share

Scope = Mapping[Var, tuple[Lane, ...]]


@dataclass(frozen=True, slots=True)
class Sooner:
    """Statements that stood behind the sum: those to execute ``once``, before the first tile, and those
    ``early``, before the sum of each."""

    once: tuple[Stmt, ...] = ()
    early: tuple[Stmt, ...] = ()


def sooner(after: Sequence[Stmt], names: Iterable[Stmt], acc: Alloc, schedule: Schedule) -> Sooner:
    """What of the statements behind the sum ``acc`` need not wait for it. ``names``: the statements before
    it, which say the places of a tile."""
    lets = [s for s in after if isinstance(s, Let)]
    stored = {x.tensor for s in after for x in find(s, Store)} | {
        x.tensor for s in after for x in find(s, BoxStore)}
    scope = _scope(names)
    once = _once(lets, stored, scope)
    late = {acc.var, *(s.var for s in lets)} - {s.var for s in once}
    left = REGISTERS - _of_tiles(acc, lets, schedule)
    early: list[Stmt] = []
    for s in lets:
        if s in once or not isinstance(s.value, Load) or s.value.tensor in stored or (
                late & free_vars(s.value)):
            continue
        along = lanes_of(s.value, scope)
        if len(along) < 2 and (need := _registers(s.value, along, schedule)) <= left:
            early.append(s)
            left -= need
    return Sooner(tuple(once), tuple(early))


def _scope(names: Iterable[Stmt]) -> dict[Var, tuple[Lane, ...]]:
    """The lanes along which names vary."""
    found: dict[Var, tuple[Lane, ...]] = {}
    for s in names:
        if isinstance(s, Let):
            found[s.var] = lanes_of(s.value, found)
    return found


def _once(lets: list[Let], stored: set[Tensor], scope: Scope) -> list[Let]:
    """Scalars that are the same for all tiles: loads, and what follows from them alone."""
    found: list[Let] = []
    for s in lets:
        known = free_vars(s.value) <= {x.var for x in found} and not lanes_of(s.value, scope)
        loads = isinstance(s.value, Load) and s.value.tensor not in stored
        if known and (loads or free_vars(s.value)):
            found.append(s)
    return found


def _of_tiles(acc: Alloc, lets: list[Let], schedule: Schedule) -> float:
    """Registers of a thread for a tile's sums, and for boxes that are read behind them."""
    points = prod(lane.extent for lane in acc.lanes) / (32 * schedule.warps)
    read = sum(s.value.dtype.bytes for s in lets if isinstance(s.value, BoxLoad))
    return points * (acc.var.type.bytes + read) / 4


def _registers(load: Load, along: tuple[Lane, ...], schedule: Schedule) -> float:
    """Registers of a thread for what it holds of a vector: a row's share of it, or a column's."""
    if not along:
        return 1
    left = along[0].kind == ("N" if schedule.swap else "M")
    shared = ROWS * schedule.warps if left else COLUMNS
    return max(1.0, along[0].extent / shared * max(2, load.dtype.bytes) / 4)
