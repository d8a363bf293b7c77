"""Statements: what a kernel does, in order. A variable bound by a ``Let`` or ``Alloc`` is visible in
the statements after it in the same sequence, and inside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transconv.ir.access import box_address
from transconv.ir.expr import TRUE, ZERO, Expr, Lane, Var, as_expr
from transconv.ir.func import Func
from transconv.ir.functions.size_values import Values
from transconv.ir.node import Node, node
from transconv.ir.tensor import Tensor

if TYPE_CHECKING:
    from transconv.ir.sizes import Sizes


class Stmt(Node):
    """Base of all statements."""

    __slots__ = ()

    def __str__(self) -> str:
        from transconv.ir.text.printer import text

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
    ``side``: the kind of the axes that a tile loop runs along, B, M, N or K; empty for other loops.
    """

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

    ``corner``, ``within`` and ``extents`` as in ``BoxLoad``.
    """

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
