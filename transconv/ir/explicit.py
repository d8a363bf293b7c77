"""Shared memory, barriers and roles of warps, as nodes of warp-specialized kernels.

A program owns rings of shared memory (``Buffer``) and of barriers (``Barrier``), and its warps play
roles: one fetches boxes into slots of the rings, another multiplies them. What they wait for is
written down; the interpreter runs the roles side by side and reports what would hang or race.

The functions that go with these nodes (see ``func.py``) name a slot of a barrier or a buffer:

    wait(ready, slot, phase)      go on once the phase of that parity has completed
    expect(ready, slot, bytes)    announce that so many bytes will land, and arrive
    arrive(empty, slot, when)     arrive, where ``when`` holds
    dot_async(acc, a, b)          start acc += a * b from shared memory
    dot_wait(pending)             go on when at most so many products are still running
    fence()                       what was put into shared memory is visible to the copy engine
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
class Buffer(Node):
    """A ring of ``slots`` in shared memory. A slot holds ``members`` boxes of ``extents`` elements,
    each as the copy engine leaves it, side by side or ``below`` one another."""

    name: str
    type: DType
    slots: int
    extents: tuple[int, ...]
    members: int = 1
    below: bool = False

    @property
    def box_bytes(self) -> int:
        """Bytes of one slot."""
        return prod(self.extents) * self.type.bytes


@node
class Barrier(Node):
    """A ring of ``slots`` barriers. A phase of one completes when ``arrivals`` have arrived and
    every announced byte has landed; then the next phase begins."""

    name: str
    slots: int
    arrivals: int = 1


@node
class Piece(Expr):
    """The contents of a slot as a tile. ``member`` and ``within`` say, over lanes, which box of the
    slot and which element of it along each dimension."""

    buffer: Buffer
    slot: Expr
    member: Expr
    within: tuple[Expr, ...]

    @property
    def dtype(self) -> DType:
        return self.buffer.type


@node
class Shared(Stmt):
    """Reserve a ring of memory or of barriers for every program."""

    what: Buffer | Barrier


@node
class Fetch(Stmt):
    """Start copying the box at ``corner`` of a tensor to a piece; it lands at the barrier's phase."""

    tensor: Tensor
    corner: tuple[Expr, ...]
    piece: Piece
    barrier: Barrier
    slot: Expr


@node
class Put(Stmt):
    """Write a tile from registers to a piece of shared memory."""

    piece: Piece
    value: Expr


@node
class Send(Stmt):
    """Start copying a piece to the box at ``corner`` of a tensor; what lies outside is dropped."""

    tensor: Tensor
    corner: tuple[Expr, ...]
    piece: Piece


@node
class Role(Stmt):
    """What some warps of a program do; ``registers`` per thread, 0 for what is left."""

    name: str
    warps: int
    registers: int
    body: Stmt


@node
class Roles(Stmt):
    """Roles that run at the same time; the first is played by the program's own warps."""

    roles: tuple[Role, ...]
