"""Statements: what a kernel does, in order. A variable bound by a ``Let`` or ``Alloc`` is visible in
the statements after it in the same sequence, and inside them.

The functions of ``FUNCS`` are called for their effect: the verifier checks their arguments, the
interpreter executes them and the emitters spell them.

In warp-specialized kernels a program owns rings of shared memory (``SmemRing``) and of barriers
(``Barrier``), and its warps have roles: one fetches boxes into slots of the rings, another multiplies
them. All waits are explicit; the interpreter runs the roles concurrently and reports deadlocks and races.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from transconv.ir.dtype import DType
from transconv.ir.expr import TRUE, ZERO, Expr, Lane, Var, as_expr
from transconv.ir.functions.size_values import Values
from transconv.ir.node import Node, node
from transconv.ir.tensor import Tensor, box_address

if TYPE_CHECKING:
    from transconv.ir.sizes import Sizes


class Stmt(Node):
    """Base of all statements."""

    __slots__ = ()

    def __str__(self) -> str:
        from transconv.ir.printer import text

        return text(self)


@node
class Seq(Stmt):
    """Statements one after another."""

    stmts: tuple[Stmt, ...]


@node
class Let(Stmt):
    """Bind a value to a name that never changes. ``origin``: ``a`` or ``b`` if it reads that operand of
    the product, ``epilogue`` if it reads a tensor of the epilogue, else empty. Passes keep it."""

    var: Var
    value: Expr
    origin: str = ""


@node
class For(Stmt):
    """``for var in start..stop`` (step 1). Loops of kind ``grid``, ``parallel`` and ``tile`` start at 0.

    kind: ``parallel`` iterations are independent; ``grid`` are the programs of a launch;
    ``tile`` become lanes; ``serial`` run in order; ``unroll`` are written out;
    ``jam`` too, statement by statement: first statement of all iterations, then the second;
    ``dealt`` run in order inside a persistent program: ``start``, ``start + programs``, ...
    ``stages``: how many iterations' loads the software pipeline keeps in flight (0: the compiler decides).
    ``programs``: the number of persistent programs that share a grid (0: one program an iteration).
    ``until``: an end that is at most ``stop``, of a serial loop or of one over a size that is an argument.
    ``side``: the kind of the axes that a tile loop runs along, B, M, N or K; empty for other loops."""

    var: Var
    stop: int
    body: Stmt
    kind: str = "serial"
    stages: int = 0
    programs: int = 0
    start: Expr = ZERO
    until: Expr | None = None
    side: str = ""


@node
class If(Stmt):
    """``then`` where ``cond`` holds, else ``other``."""

    cond: Expr
    then: Stmt
    other: Stmt | None = None


@node
class Alloc(Stmt):
    """A variable that may change: a tile with the given lanes (a scalar if there are none), initially
    ``init``. ``scope`` is its memory: ``register`` or ``shared``."""

    var: Var
    lanes: tuple[Lane, ...] = ()
    init: Expr = ZERO
    scope: str = "register"


@node
class Update(Stmt):
    """Assign to an allocated variable; the value may mention the variable."""

    var: Var
    value: Expr


@node
class Store(Stmt):
    """``tensor.data[offset] = value`` where ``mask`` holds."""

    tensor: Tensor
    offset: Expr
    value: Expr
    mask: Expr = TRUE


@node
class BoxStore(Stmt):
    """Write a tile into a tensor in one piece; elements outside the tensor are dropped.

    ``corner``, ``within`` and ``extents`` as in ``BoxLoad``."""

    tensor: Tensor
    corner: tuple[Expr, ...]
    within: tuple[Expr, ...]
    extents: tuple[int, ...]
    value: Expr

    def as_store(self) -> Store:
        """The equivalent masked store."""
        offset, inside = box_address(self.tensor, self.corner, self.within)
        return Store(self.tensor, offset, self.value, inside)


@node
class FuncCall(Stmt):
    """Call a function for its effect; an argument is an expression or a tensor."""

    func: Func
    args: tuple[Node, ...]


@node
class Comment(Stmt):
    """A line of text in the kernel."""

    text: str


@node
class Kernel(Stmt):
    """A whole kernel. ``params``: its tensors in the order of the call; ``notes``: comments before it;
    ``sizes``: arguments after the tensors, and their requirements."""

    name: str
    params: tuple[Tensor, ...]
    body: Stmt
    notes: tuple[str, ...] = ()
    sizes: Sizes | None = None

    @staticmethod
    def parse(text: str) -> Kernel:
        """The kernel of a printed text: ``Kernel.parse(str(kernel)) is kernel``. Raises KernelError with a
        message of one line: the number of the text's line, what was found and what was expected."""
        from transconv.ir.reader import parse_kernel

        return parse_kernel(text)

    def at(self, values: Values) -> Kernel:
        """The kernel for given sizes, with numbers instead of arguments; itself if no size is one."""
        from transconv.ir.sizes import kernel_at

        return kernel_at(self, values) if self.sizes else self


def seq(*stmts: Stmt | None) -> Stmt:
    """The statements as one sequence, with nested sequences flattened and None left out; a single
    statement is returned as it is."""
    flat: list[Stmt] = []
    for s in stmts:
        if isinstance(s, Seq):
            flat.extend(s.stmts)
        elif s is not None:
            flat.append(s)
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def statements(s: Stmt) -> tuple[Stmt, ...]:
    """The parts of a sequence; a lone statement is a sequence of one."""
    return s.stmts if isinstance(s, Seq) else (s,)


def store(tensor: Tensor, offset: Expr | int, value: Expr, mask: Expr = TRUE) -> Store:
    """A store; the offset may be a number."""
    return Store(tensor, as_expr(offset), value, mask)


@node
class Func(Node):
    """A function to call; ``attrs`` are settings such as the precision of a dot."""

    name: str
    attrs: tuple[tuple[str, str], ...] = ()

    def attr(self, key: str, default: str = "") -> str:
        """The setting ``key``, or the default."""
        return dict(self.attrs).get(key, default)

    @property
    def multiplies(self) -> bool:
        """Whether this is a matrix product, which adds to its first argument."""
        return self.name in ("dot", "dot_async", "dot_scaled")

    @property
    def takes_scales(self) -> bool:
        """Whether this multiplies elements with the scales of their blocks."""
        return self.name == "dot_scaled"

    @property
    def leaves(self) -> bool:
        """Whether this leaves a part of what is reduced."""
        return self.name == "partial"

    def __str__(self) -> str:
        words = ", ".join(f"{k}={v}" for k, v in self.attrs)
        return f"{self.name}[{words}]" if words else self.name


@dataclass(frozen=True, slots=True)
class FuncSpec:
    """A function's parameters, and what it does."""

    params: tuple[str, ...]
    meaning: str


FUNCS = {
    "dot": FuncSpec(
        ("acc", "a", "b"), "acc[..m, n] += sum over k of a[..m, k] * b[..k, n], summed in the type of acc"
    ),
    "dot_scaled": FuncSpec(
        ("acc", "a", "b", "a_scale", "b_scale"),
        "dot of elements, two of f4e2m1 in a byte, each times the scale of its block along k",
    ),
    "atomic_add": FuncSpec(
        ("tensor", "offset", "value", "mask"),
        "tensor.data[offset] += value where mask holds, as one indivisible step per element",
    ),
    "partial": FuncSpec(
        ("tensor", "offset", "value", "mask", "count"),
        "tensor.data[offset] = the reduction of the values of a tile where mask holds, of which there are "
        "count, along the lanes that offset lacks; there are none yet, and the tile is all points around",
    ),
    "assume": FuncSpec(
        ("condition",), "the condition holds; it may be relied on, and is checked when interpreted"
    ),
    "wait": FuncSpec(
        ("barrier", "slot", "phase"), "go on once the barrier's phase of that parity has completed"
    ),
    "expect": FuncSpec(("barrier", "slot", "bytes"), "announce that so many bytes will land, and arrive"),
    "arrive": FuncSpec(("barrier", "slot", "when"), "arrive at the barrier where the condition holds"),
    "dot_async": FuncSpec(
        ("acc", "a", "b"), "start acc += a * b; acc and the pieces a and b stay in use until a dot_wait"
    ),
    "dot_wait": FuncSpec(("pending",), "go on when at most so many products are still running"),
    "part_wait": FuncSpec(
        ("pending", "acc", "total"),
        "go on when at most so many products are still running; acc may be "
        "read then, and what was added to total before is in it",
    ),
    "fence": FuncSpec((), "what was put into shared memory is visible to the copy engine"),
    "send_wait": FuncSpec(("pending",), "go on when at most so many sends still read shared memory"),
}
"""Functions that statements call, by name."""


def dot(precision: str) -> Func:
    """A matrix-unit product; ``precision`` is ``tf32``, ``tf32x3`` or ``ieee`` for f32 operands. With tf32
    the unit truncates significands to 10 fraction bits; operands that need rounding are rounded before."""
    return Func("dot", (("precision", precision),))


def dot_scaled(a: str, b: str, scales: str) -> Func:
    """A matrix-unit product of elements of types ``a`` and ``b`` in blocks, with scales of a type."""
    return Func("dot_scaled", (("a", a), ("b", b), ("scales", scales)))


def partial(op: str) -> Func:
    """Leaves the reduction of a tile: its ``sum``, ``max``, ``min``, or the ``squares`` of its deviations
    from its mean, whose sum comes before."""
    return Func("partial", (("op", op),))


ATOMIC_ADD = Func("atomic_add")
"""Adds to memory in one indivisible step."""
ASSUME = Func("assume")
"""States a condition that may be relied on."""
WAIT = Func("wait")
"""Waits until a barrier's phase has completed."""
EXPECT = Func("expect")
"""Announces bytes that will land, and arrives."""
ARRIVE = Func("arrive")
"""Arrives at a barrier."""
DOT_ASYNC = Func("dot_async")
"""Starts a product."""
DOT_WAIT = Func("dot_wait")
"""Waits until few enough products are running."""
PART_WAIT = Func("part_wait")
"""Waits until a part of a sum is complete."""
FENCE = Func("fence")
"""Makes what was put into shared memory visible to the copy engine."""
SEND_WAIT = Func("send_wait")
"""Waits until few enough sends read shared memory."""


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
