"""The statements of a program for one tile, taken apart, and those of a role around its tiles."""

from __future__ import annotations

from dataclasses import dataclass

from transconv.ir import Alloc, BoxLoad, Const, For, FuncCall, Let, Stmt, Var, seq, statements
from transconv.passes.warp_spec.smem_pipeline import PHASE, SLOT

PROGRAM = Var("program")


@dataclass(frozen=True, slots=True)
class TileStatements:
    """The statements of a program for one tile: those ``before`` the sum, its loop with the fetches and
    the product, and those ``after`` it."""

    before: tuple[Stmt, ...]
    acc: Alloc
    loop: For
    lets: tuple[Stmt, ...]
    fetched: tuple[Let, ...]  # of boxes
    product: FuncCall
    after: tuple[Stmt, ...]


Around = tuple[tuple[tuple[Stmt, ...], For], ...]
"""Loops over the tiles of one program, outer ones first, each with the statements before it."""


def around_of(body: Stmt) -> tuple[Around, Stmt]:
    """The loops over the tiles of one program, each with the statements before it, and the tile's body."""
    parts = statements(body)
    if any(isinstance(s, Alloc) for s in parts):
        return (), body
    *before, loop = parts
    assert isinstance(loop, For), "the tiles of a program are a loop"
    outer, tile = around_of(loop.body)
    return ((tuple(before), loop), *outer), tile


def take_apart(body: Stmt) -> TileStatements:
    """The parts of a tile's body."""
    parts = statements(body)
    at = next((i for i, s in enumerate(parts) if isinstance(s, For)), None)
    if at is None:  # a sum of one step has no loop any more
        at = next(i for i, s in enumerate(parts) if isinstance(s, FuncCall) and s.func.multiplies)
        end, first = at + 1, next(i for i, s in enumerate(parts) if isinstance(s, Alloc)) + 1
        once = For(Var("once"), 1, seq(*parts[first:end]))
        parts = (*parts[:first], once, *parts[end:])
        at = first
    loop = parts[at]
    assert isinstance(loop, For)
    acc = next(s for s in parts[:at] if isinstance(s, Alloc))
    *steps, product = statements(loop.body)
    assert isinstance(product, FuncCall) and product.func.multiplies
    fetched = tuple(s for s in steps if isinstance(s, Let) and isinstance(s.value, BoxLoad))
    lets = tuple(s for s in steps if s not in fetched)
    return TileStatements(tuple(s for s in parts[:at] if s is not acc), acc, loop, lets, fetched, product,
                parts[at + 1:])


@dataclass(frozen=True, slots=True)
class Act:
    """What a role does before the first tile, for every tile, and after the last one."""

    first: tuple[Stmt, ...]
    tile: Stmt
    last: tuple[Stmt, ...] = ()


def counters(phase: int) -> tuple[Stmt, ...]:
    """The slot that a role uses next, and the phase that it waits for there."""
    return Alloc(SLOT, (), Const(0)), Alloc(PHASE, (), Const(phase))
