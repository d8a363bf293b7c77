"""A naive kernel taken apart: parallel loops, sweeps over the reduced axes, what is between them."""

from __future__ import annotations

from dataclasses import dataclass

from transconv.ir import Expr, For, Kernel, Let, Stmt, Update, Var, statements


@dataclass(frozen=True, slots=True)
class SweepLoops:
    """A sweep of a naive kernel: the statements before it, its loops, and their innermost body."""

    before: tuple[Stmt, ...]
    loops: tuple[For, ...]
    body: Stmt


@dataclass(frozen=True, slots=True)
class Nest:
    """The parts of a naive kernel: parallel loops, sweeps over the reduced axes, statements after them."""

    around: tuple[For, ...]
    sweeps: tuple[SweepLoops, ...]
    after: tuple[Stmt, ...]

    @property
    def lets(self) -> dict[Var, Expr]:
        """The values of the nest's lets."""
        inner = [s for x in self.sweeps for s in (*x.before, *statements(x.body))]
        return {s.var: s.value for s in (*inner, *self.after) if isinstance(s, Let)}


def parts(kernel: Kernel) -> Nest:
    """Take a naive kernel apart."""
    around, at = [], kernel.body
    while isinstance(at, For) and at.kind == "parallel":
        around.append(at)
        at = at.body
    sweeps: list[SweepLoops] = []
    before: list[Stmt] = []
    for s in statements(at):
        if not isinstance(s, (For, Update)):
            before.append(s)
            continue
        loops = []
        while isinstance(s, For):
            loops.append(s)
            s = s.body
        sweeps.append(SweepLoops(tuple(before), tuple(loops), s))
        before = []
    return Nest(tuple(around), tuple(sweeps), tuple(before))
