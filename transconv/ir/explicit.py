"""Shared memory, barriers and roles of warps, as nodes of warp-specialized kernels.

A program owns rings of shared memory (``SmemRing``) and of barriers (``Barrier``), and its warps have
roles: one fetches boxes into slots of the rings, another multiplies them. All waits are explicit; the
interpreter runs the roles concurrently and reports deadlocks and races.

Functions that go with these nodes (see ``stmt.py``):

    wait(ready, slot, phase)      go on once the phase of that parity has completed
    expect(ready, slot, bytes)    announce that so many bytes will land, and arrive
    arrive(empty, slot, when)     arrive, where ``when`` holds
    dot_async(acc, a, b)          start acc += a * b from shared memory
    dot_wait(pending)             go on when at most so many products are still running
    part_wait(pending, acc, total)  the same; acc is a part of the sum that total will be
    fence()                       make what was put into shared memory visible to the copy engine
    send_wait(pending)            go on when at most so many sends still read shared memory
"""

from __future__ import annotations

from math import prod

from transconv.ir.dtype import DType
from transconv.ir.expr import Expr
from transconv.ir.node import Node, node
from transconv.ir.stmt import Stmt
from transconv.ir.tensor import Tensor


@node
class SmemRing(Node):
    """A ring of ``slots`` in shared memory. A slot holds ``members`` boxes of ``extents`` elements, each
    in the order in which the copy engine writes it, side by side or ``below`` one another."""

    name: str
    type: DType
    slots: int
    extents: tuple[int, ...]
    members: int = 1
    below: bool = False

    @property
    def box_bytes(self) -> int:
        """Bytes of one box; a slot has ``members`` of them."""
        return prod(self.extents) * self.type.bytes


@node
class Barrier(Node):
    """A ring of ``slots`` barriers. A phase completes after ``arrivals`` arrivals, when all announced
    bytes have landed; then the next phase begins."""

    name: str
    slots: int
    arrivals: int = 1


@node
class SlotTile(Expr):
    """The contents of a slot as a tile. For each lane, ``member`` is the box of the slot and ``within``
    the position in that box, one entry per dimension."""

    buffer: SmemRing
    slot: Expr
    member: Expr
    within: tuple[Expr, ...]

    @property
    def dtype(self) -> DType:
        return self.buffer.type


@node
class Shared(Stmt):
    """Reserve a ring of shared memory or of barriers in each program."""

    what: SmemRing | Barrier


@node
class Fetch(Stmt):
    """Start copying the box at ``corner`` of a tensor to a piece. The copied bytes count towards the
    current phase of the barrier in ``slot``."""

    tensor: Tensor
    corner: tuple[Expr, ...]
    piece: SlotTile
    barrier: Barrier
    slot: Expr


@node
class Put(Stmt):
    """Write a tile of values from registers to a piece of shared memory."""

    piece: SlotTile
    value: Expr


@node
class Send(Stmt):
    """Start copying a piece to the box at ``corner`` of a tensor, without elements outside the tensor."""

    tensor: Tensor
    corner: tuple[Expr, ...]
    piece: SlotTile


@node
class Role(Stmt):
    """The code of some warps of a program. ``registers``: per thread; 0 for what other roles leave."""

    name: str
    warps: int
    registers: int
    body: Stmt


@node
class Roles(Stmt):
    """Roles that run concurrently; the first one runs on the program's default warps."""

    roles: tuple[Role, ...]
