"""Names for the variables that a pass adds, and for the values of a computation beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from transconv.compute import Compute, Read, Step, Write
from transconv.ir import Alloc, Expr, For, Kernel, Let, Seq, Stmt, Var, bound_vars, substitute


class VariableNames:
    """The names of the variables of kernels, and those in ``taken``, of which no two are alike."""

    def __init__(self, *kernels: Kernel, taken: Iterable[str] = ()) -> None:
        self.taken = {*taken, *(v.name for k in kernels for v in bound_vars(k))}

    def fresh(self, name: str, mark: str = "_") -> str:
        """The name, with marks added until no other variable has it."""
        while name in self.taken:
            name += mark
        self.taken.add(name)
        return name


def renamed(compute: Compute, names: Mapping[Var, str]) -> Compute:
    """The computation with other names for some of its values, which axes and values must not have."""
    values: dict[Expr, Expr] = {v: Var(name, v.type) for v, name in names.items()}
    steps: list[Step] = []
    for s in compute.steps:
        if isinstance(s, (Read, Write)):
            s = replace(s, view=substitute(s.view, values))
        if not isinstance(s, Read):
            s = replace(s, value=substitute(s.value, values))
        if not isinstance(s, Write) and s.var in names:
            s = replace(s, name=names[s.var])
        steps.append(s)
    return replace(compute, steps=tuple(steps))


def hidden(kernel: Kernel) -> frozenset[str]:
    """The names that a kernel binds where they are bound already: a pass has added a variable with the
    name of one that was there."""
    found: set[str] = set()
    _look(kernel.body, {s.name for s in kernel.sizes.each} if kernel.sizes else set(), found)
    return frozenset(found)


def _look(s: Stmt, bound: set[str], found: set[str]) -> None:
    """Look at a statement and those inside it; ``bound`` holds the names of the block, and gets more."""
    own = {s.var.name} if isinstance(s, (Let, Alloc, For)) else set()
    found |= own & bound
    if isinstance(s, (Let, Alloc)):
        bound |= own
        return
    for part in s.children():
        if isinstance(part, Stmt):
            _look(part, bound if isinstance(s, Seq) else bound | own, found)
