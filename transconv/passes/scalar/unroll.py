"""The pass ``unroll``: unrolls a loop, so that its index arithmetic becomes constant.

    for step in 0..2 unroll:            kh_0 = 0;  a_0 = load(.., kh_0)
        kh = step               ->      acc = acc + a_0 * b_0
        a = load(.., kh)                kh_1 = 1;  a_1 = load(.., kh_1)
        acc = acc + a * b               acc = acc + a_1 * b_1

A loop around accumulators (``jam``) is written out statement by statement, so that its iterations share
the loop of the sum and all statements that do not depend on the iteration:

    for ow_in in 0..2 jam:              acc_0 = 0;  acc_1 = 0
        acc = 0                         for step in 0..9:
        for step in 0..9:       ->          a_0 = load(.., 0);  a_1 = load(.., 1);  b = load(..)
            a = load(.., ow_in)             acc_0 = acc_0 + a_0 * b
            b = load(..)                    acc_1 = acc_1 + a_1 * b
            acc = acc + a * b           store(.., 0, acc_0);  store(.., 1, acc_1)
        store(.., ow_in, acc)
"""

from __future__ import annotations

from dataclasses import replace

from transconv.ir import (
    ASSUME,
    Alloc,
    Const,
    Expr,
    For,
    FuncCall,
    Kernel,
    Let,
    Mutator,
    Stmt,
    Var,
    find,
    free_vars,
    seq,
    statements,
    substitute,
)
from transconv.schedule import LONGEST


def unroll(kernel: Kernel) -> Kernel:
    """Write out loops of kind ``unroll`` and ``jam``, and serial loops of one iteration. A loop of kind
    ``unroll`` becomes serial if its bounds are not numbers, or if it has more than ``LONGEST`` iterations,
    which would take long to compile."""
    return _Unroll().rebuilt(kernel)


def _iterations(loop: For) -> range | None:
    """The iterations of a loop, or None if its bounds are not numbers."""
    if not isinstance(loop.start, Const) or loop.until is not None:
        return None
    return range(int(loop.start.value), loop.stop)


class _Unroll(Mutator):
    def mutate_For(self, loop: For) -> Stmt:
        made: Stmt = self.generic(loop)
        if not isinstance(made, For) or made.kind not in ("serial", "unroll", "jam"):
            return made
        counted = _iterations(made)
        if counted and made.kind == "jam":
            return _Jam(made.var, counted).written(made.body)
        if counted and made.kind == "serial" and len(counted) == 1:
            return substitute(made.body, {made.var: Const(counted[0], made.var.type)})
        if made.kind == "serial":
            return made
        if counted is None or len(counted) > LONGEST:
            return replace(made, kind="serial")
        lets = [x.var for x in find(made.body, Let)]
        copies = []
        for i in counted:
            names: dict[Var, Expr] = {v: Var(f"{v.name}_{i}", v.type) for v in lets}
            copies.append(substitute(made.body, {made.var: Const(i, made.var.type), **names}))
        return seq(*copies)


class _Jam:
    """Writes out the iterations of one loop, statement by statement. ``names``: for each iteration, its
    own variables; variables that do not depend on the iteration are bound once."""

    def __init__(self, var: Var, counted: range) -> None:
        self.names: list[dict[Var, Expr]] = [{var: Const(i, var.type)} for i in counted]

    def written(self, body: Stmt) -> Stmt:
        return seq(*(self.statement(s) for s in statements(body)))

    def statement(self, s: Stmt) -> Stmt:
        if isinstance(s, For):
            return replace(s, body=self.written(s.body))
        pure = isinstance(s, Let) or isinstance(s, FuncCall) and s.func is ASSUME
        if pure and not any(free_vars(e) & self.names[0].keys() for e in _values(s)):
            return s
        if isinstance(s, (Let, Alloc)):
            for i, names in enumerate(self.names):
                names[s.var] = Var(f"{s.var.name}_{i}", s.var.type)
        return seq(*(substitute(s, names) for names in self.names))


def _values(s: Stmt) -> list[Expr]:
    if isinstance(s, Let):
        return [s.value]
    return [e for e in s.children() if isinstance(e, Expr)]
