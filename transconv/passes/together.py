"""Stage 9c. In: the explicit kernels of several stride phases. Out: one kernel that does all of them.

    kernel phase 0_0: role products: for pid in program..784 dealt: ...
    kernel phase 0_1: role products: for pid in program..784 dealt: ...

        ->  kernel: role products: for pid in program..784 dealt: ...            (phase 0_0)
                                   for pid in (program + 8) % 132..784 dealt: ...  (phase 0_1)

The phases write other rows and columns of one result, so their order is free. In one launch the rings
stay full from phase to phase, and the multiprocessors that are done with one phase begin the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transconv.ir import (
    Alloc,
    Expr,
    For,
    FuncCall,
    Kernel,
    Role,
    Roles,
    Shared,
    Stmt,
    find,
    seq,
    statements,
)


def together(kernels: Sequence[Kernel]) -> Kernel | None:
    """One kernel for all, longest sums first; None unless they differ in their tiles' loops alone."""
    first = kernels[0]
    if len(kernels) < 2 or not all(_alike(first, k) for k in kernels):
        return None
    kernels = sorted(kernels, key=lambda k: -_steps(k))
    grid = first.body
    assert isinstance(grid, For)
    roles = [find(k, Roles)[0].roles for k in kernels]
    joined = [_joined(same, grid) for same in zip(*roles, strict=True)]
    body = seq(*(s for s in statements(grid.body) if not isinstance(s, Roles)), Roles(tuple(joined)))
    notes = tuple(dict.fromkeys(n for k in kernels for n in k.notes))
    return Kernel(first.name, first.params, replace(grid, body=body), notes)


def _alike(a: Kernel, b: Kernel) -> bool:
    """Whether two kernels are explicit, deal tiles to as many programs, and share their memory."""
    if not (find(a, Roles) and find(b, Roles) and _dealt(a) and _dealt(b)):
        return False
    assert isinstance(a.body, For) and isinstance(b.body, For)
    shapes = [[(r.name, r.warps, r.registers) for r in find(k, Role)] for k in (a, b)]
    return (a.params == b.params and a.body.stop == b.body.stop and shapes[0] == shapes[1]
            and find(a, Shared) == find(b, Shared))


def _dealt(k: Kernel) -> bool:
    """Whether each role is counters, one loop over dealt tiles, and last waits: what can be joined."""
    for role in find(k, Role):
        parts = statements(role.body)
        loops = [s for s in parts if isinstance(s, For)]
        rest = [s for s in parts if not isinstance(s, For)]
        if len(loops) != 1 or loops[0].kind != "dealt" or not all(
                isinstance(s, (Alloc, FuncCall)) for s in rest):
            return False
    return True


def _steps(k: Kernel) -> int:
    return max((loop.stop for loop in find(k, For) if loop.kind == "serial"), default=1)


def _joined(same: tuple[Role, ...], grid: For) -> Role:
    """A role's loops one after another; counters and last waits are there once."""
    parts = [statements(r.body) for r in same]
    before = [s for s in parts[0] if isinstance(s, Alloc)]
    after = [s for s in parts[0] if isinstance(s, FuncCall)]
    loops: list[Stmt] = []
    given = 0  # tiles dealt out so far: the next program is the one whose turn it would be
    for loop in (s for p in parts for s in p if isinstance(s, For)):
        offset = -given % grid.stop
        start: Expr = (grid.var + offset) % grid.stop if offset else grid.var
        loops.append(replace(loop, start=start))
        given += loop.stop
    return replace(same[0], body=seq(*before, *loops, *after))
