"""Joins the kernels of several stride phases into one kernel.

Explicit kernels, whose programs are persistent, do the tiles of one phase after another:

    kernel phase 0_0: role consumer: for pid in program..784 dealt: ...
    kernel phase 0_1: role consumer: for pid in program..784 dealt: ...

        ->  kernel: role consumer: for pid in program..784 dealt: ...            (phase 0_0)
                                   for pid in (program + 8) % 132..784 dealt: ...  (phase 0_1)

The phases write different rows and columns of one result, so they may run in any order. In one launch the
rings stay full from phase to phase, and multiprocessors that have finished one phase begin the next.

Consumers that take turns go on taking turns: the one whose turn it is has the first tile of the next
phase, and finds its slot of the ring behind all steps of the phases before.

Other kernels have a program for each tile, which looks for its phase:

    for pid in 0..33 grid: ...     ->     for pid in 0..66 grid: if pid < 33: ...        (phase 0_0)
    for pid in 0..33 grid: ...                                   if pid - 33 >= 0: ...   (phase 0_1)

Small phases then run beside one another, instead of one after another with few programs each.

Where sizes are arguments, the tiles of the phases before are counted in the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transconv.ir import (
    LARGEST_SIZE,
    ZERO,
    Alloc,
    BoxLoad,
    BoxStore,
    Expr,
    For,
    FuncCall,
    If,
    Kernel,
    Let,
    Mutator,
    Role,
    Roles,
    Shared,
    Sizes,
    Stmt,
    Tensor,
    Var,
    all_of,
    as_expr,
    find,
    seq,
    statements,
    substitute,
    sum_of,
)
from transconv.passes.scope import VariableNames
from transconv.passes.warp_spec.consumer import FETCHED
from transconv.simplify import simplify


def together(kernels: Sequence[Kernel]) -> Kernel | None:
    """One kernel for all, with the longest sums first; None if they differ in more than their tiles, or if
    there is only one."""
    first = kernels[0]
    if len(kernels) < 2:
        return None
    kernels = sorted(kernels, key=lambda k: -_steps(k))
    if all(_is_tile(k) and _same_call(first, k) for k in kernels):
        return _one_grid(first, kernels)
    if not all(_alike(first, k) for k in kernels):
        return None
    grid = first.body
    assert isinstance(grid, For)
    roles = [find(k, Roles)[0].roles for k in kernels]
    joined = [_joined(same, grid, number) for number, same in enumerate(zip(*roles, strict=True))]
    body = seq(*(s for s in statements(grid.body) if not isinstance(s, Roles)), Roles(tuple(joined)))
    notes = tuple(dict.fromkeys(n for k in kernels for n in k.notes))
    whole = replace(grid, body=body, until=None)  # each phase begins at another program
    return Kernel(first.name, first.params, whole, notes, _required(kernels))


def _required(kernels: Sequence[Kernel]) -> Sizes | None:
    """What all kernels require, and that all their tiles are counted in 32 bits."""
    first = kernels[0].sizes
    if not isinstance(first, Sizes):
        return None
    kind = "dealt" if find(kernels[0], Roles) else "grid"  # around dealt tiles is a grid of programs
    loops = [next(x for x in find(k, For) if x.kind == kind and x.until is not None) for k in kernels]
    tiles = simplify(sum_of([as_expr(_end(x)) for x in loops]))
    where = [c for k in kernels if isinstance(k.sizes, Sizes) for c in k.sizes.where]
    counted = tiles <= LARGEST_SIZE - 2 * loops[0].programs
    return replace(first, where=tuple(dict.fromkeys([*where, counted])))


def _is_tile(k: Kernel) -> bool:
    """Whether each program of a kernel has one tile, and the kernel no memory or roles of its own."""
    return (isinstance(k.body, For) and k.body.kind == "grid" and not k.body.programs
            and not find(k, Roles) and not find(k, Shared))


def _same_call(a: Kernel, b: Kernel) -> bool:
    """Whether two kernels take the same tensors, in boxes of the same extents, and the same sizes."""
    each = [k.sizes.each if isinstance(k.sizes, Sizes) else () for k in (a, b)]
    return a.params == b.params and each[0] == each[1] and _boxes(a) == _boxes(b)


def _boxes(k: Kernel) -> set[tuple[Tensor, tuple[int, ...]]]:
    """The tensors that a kernel reads or stores in boxes, with their extents."""
    read, stored = find(k, BoxLoad), find(k, BoxStore)
    return {(x.tensor, x.extents) for x in read} | {(x.tensor, x.extents) for x in stored}


def _one_grid(first: Kernel, kernels: Sequence[Kernel]) -> Kernel:
    """The kernel whose programs have the tiles of one kernel, then those of the next, and so on."""
    grids = [k.body for k in kernels if isinstance(k.body, For)]
    pid, names = grids[0].var, VariableNames(*kernels)
    body: list[Stmt] = []
    given: Expr | int = 0
    for phase, grid in enumerate(grids):
        tile = Var(names.fresh(f"tile_{phase}"))
        body.append(Let(tile, simplify(pid - given)))
        last = phase == len(grids) - 1
        here = [*([tile >= 0] if phase else []), *([] if last else [tile < _end(grid)])]
        body.append(If(all_of(here), substitute(grid.body, {grid.var: tile})))
        given = simplify(as_expr(_end(grid)) + given)
    stop = sum(g.stop for g in grids)
    whole = replace(grids[0], stop=stop, body=seq(*body),
                    until=None if grids[0].until is None else as_expr(given))
    notes = tuple(dict.fromkeys(n for k in kernels for n in k.notes))
    return Kernel(first.name, first.params, whole, notes, _required(kernels))


def _alike(a: Kernel, b: Kernel) -> bool:
    """Whether two kernels are explicit and persistent, with equal grids, roles, tensors and memory."""
    if not (find(a, Roles) and find(b, Roles) and _dealt(a) and _dealt(b)):
        return False
    assert isinstance(a.body, For) and isinstance(b.body, For)
    shapes = [[(r.name, r.warps, r.registers) for r in find(k, Role)] for k in (a, b)]
    return (_same_call(a, b) and a.body.stop == b.body.stop
            and shapes[0] == shapes[1] and find(a, Shared) == find(b, Shared))


def _dealt(k: Kernel) -> bool:
    """Whether each role consists of counters, one loop over the program's tiles, and final waits."""
    for role in find(k, Role):
        parts = statements(role.body)
        loops = [s for s in parts if isinstance(s, For)]
        rest = [s for s in parts if not isinstance(s, For)]
        if len(loops) != 1 or loops[0].kind != "dealt" or not all(
                isinstance(s, (Alloc, FuncCall)) for s in rest):
            return False
    return True


def _steps(inside: Stmt) -> int:
    return max((loop.stop for loop in find(inside, For) if loop.kind == "serial"), default=1)


def _joined(same: tuple[Role, ...], grid: For, number: int) -> Role:
    """A role's loops one after another; counters and last waits are there once. ``number``: of the
    role, which is that of the consumer where two take turns."""
    parts = [statements(r.body) for r in same]
    before = [s for s in parts[0] if isinstance(s, Alloc)]
    after = [s for s in parts[0] if isinstance(s, FuncCall)]
    joined: list[Stmt] = []
    given: Expr | int = 0  # tiles so far; the next phase begins at the program after the last one used
    done = _Done()
    for phase, loop in enumerate(s for p in parts for s in p if isinstance(s, For)):
        start = _after(given, grid)
        if not phase:
            joined.append(loop)
        elif loop.programs == grid.stop:
            joined.append(replace(loop, start=start))
        else:
            joined += [*done.names, done.continued(loop, start, grid.stop, number)]
        done = done.and_also(Var(f"had{phase}"), loop, start, grid.stop)
        given = _end(loop) + given if phase else _end(loop)
    return replace(same[0], body=seq(*before, *joined, *after))


def _end(loop: For) -> Expr | int:
    """The number of tiles of a loop."""
    return loop.stop if loop.until is None else loop.until


def _after(given: Expr | int, grid: For) -> Expr:
    """The first tile of a program in a phase, ``given`` tiles having been dealt."""
    if isinstance(given, Expr):
        return (grid.var + (grid.stop - simplify(given) % grid.stop)) % grid.stop
    offset = -given % grid.stop
    return (grid.var + offset) % grid.stop if offset else grid.var


@dataclass(frozen=True, slots=True)
class _Done:
    """What a program has done in the phases before, as its consumers count it; ``names`` are new ones."""

    tiles: Expr = ZERO
    steps: Expr = ZERO
    names: tuple[Let, ...] = ()

    def and_also(self, had: Var, loop: For, start: Expr, programs: int) -> _Done:
        """Add the tiles of a phase; ``had`` names their number."""
        number = (_end(loop) + (programs - 1) - start) // programs
        return _Done(self.tiles + had, self.steps + had * _steps(loop.body), (Let(had, number),))

    def continued(self, loop: For, start: Expr, programs: int, consumer: int) -> For:
        """A consumer's tiles of the next phase, and the steps that were fetched before each."""
        ahead = (self.tiles + consumer) % 2  # how many tiles the other consumer has first
        return _Later(self.steps).rebuilt(
            replace(loop, start=start + ahead * programs))


class _Later(Mutator):
    """Adds the steps of earlier phases to ``fetched``."""

    def __init__(self, steps: Expr) -> None:
        self.steps = steps

    def mutate_Let(self, let: Let) -> Stmt:
        return replace(let, value=self.steps + let.value) if let.var is FETCHED else let
