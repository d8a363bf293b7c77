"""Counts of tiles, and positions unpacked from one index. A count is a number, or an expression of sizes
that are arguments."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from transconv.ir import LARGEST_SIZE, ZERO, Const, Expr, For, Let, Sizes, Stmt, Var
from transconv.simplify import Facts, range_of, simplify

Extent = int | Expr
"""A number, or an expression of sizes that are arguments."""


def countable(sizes: Sizes | None, tiles: Extent, facts: Facts) -> Sizes | None:
    """The requirements of a kernel, and that its tiles can be counted in 32 bits."""
    if sizes is None or not isinstance(tiles, Expr):
        return sizes
    tiles = simplify(tiles, facts)
    most = range_of(tiles, facts).hi
    if most is not None and most <= LARGEST_SIZE:
        return sizes
    return replace(sizes, where=(*sizes.where, tiles <= LARGEST_SIZE))


def counted(loop: For, count: Extent, facts: Facts) -> For:
    """The loop with ``count`` iterations. An expression becomes ``until``, its largest value ``stop``."""
    if isinstance(count, int):
        return replace(loop, stop=count)
    count = simplify(count, facts)
    if isinstance(count, Const):
        return replace(loop, stop=int(count.value))
    most = range_of(count, facts).hi
    assert most is not None, f"{count} has no end"
    return replace(loop, stop=most, until=count)


def simple(count: Extent, facts: Facts) -> Extent:
    """A count, simplified with the facts about sizes."""
    return simplify(count, facts) if isinstance(count, Expr) else count


def blocks(total: Extent, extent: int) -> Extent:
    """The number of blocks of ``extent`` that hold ``total`` positions."""
    return (total + (extent - 1)) // extent if isinstance(total, Expr) else -(-total // extent)


def unpack(packed: Var, counts: list[tuple[Var, Extent]], total: Extent = 0) -> list[Stmt]:
    """Lets that unpack an index below ``total``, in row-major order: the last variable varies fastest.
    Without a ``total``, it is the product of the counts."""
    lets: list[Stmt] = []
    below: Extent = 1
    given = isinstance(total, Expr) or total > 0
    total = total if given else prod(count for _, count in counts)
    for var, count in reversed(counts):
        value: Expr = packed // below if isinstance(below, Expr) or below > 1 else packed
        if count == 1:
            value = ZERO
        elif (given or var is not counts[0][0]) and _less(below * count, total):
            value = value % count
        lets.append(Let(var, value))
        below *= count
    return lets[::-1]


def _less(a: Extent, b: Extent) -> bool:
    """Whether ``a`` may be less than ``b``."""
    return isinstance(a, Expr) or isinstance(b, Expr) or a < b
