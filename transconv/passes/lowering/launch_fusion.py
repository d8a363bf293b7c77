"""Launch fusion: the kernels of several stride phases become one kernel.

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

Small phases then run beside one another. Where sizes are arguments, the tiles of the phases before are
counted in the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transconv import ir
from transconv.passes.scope import VariableNames
from transconv.passes.warp_roles import FETCHED
from transconv.simplify import simplify


def together(kernels: Sequence[ir.Kernel]) -> ir.Kernel | None:
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
    assert isinstance(grid, ir.For)
    roles = [ir.find(k, ir.Roles)[0].roles for k in kernels]
    joined = [_joined(same, grid, number) for number, same in enumerate(zip(*roles, strict=True))]
    body = ir.seq(
        *(s for s in ir.statements(grid.body) if not isinstance(s, ir.Roles)), ir.Roles(tuple(joined))
    )
    notes = tuple(dict.fromkeys(n for k in kernels for n in k.notes))
    whole = replace(grid, body=body, until=None)  # each phase begins at another program
    return ir.Kernel(first.name, first.params, whole, notes, _required(kernels))


def _required(kernels: Sequence[ir.Kernel]) -> ir.Sizes | None:
    """What all kernels require, and that all their tiles are counted in 32 bits."""
    first = kernels[0].sizes
    if not isinstance(first, ir.Sizes):
        return None
    kind = "dealt" if ir.find(kernels[0], ir.Roles) else "grid"  # around dealt tiles is a grid of programs
    loops = [
        next(x for x in ir.find(k, ir.For) if x.kind == kind and x.until is not None) for k in kernels
    ]
    tiles = simplify(ir.sum_of([ir.as_expr(_end(x)) for x in loops]))
    where = [c for k in kernels if isinstance(k.sizes, ir.Sizes) for c in k.sizes.where]
    counted = tiles <= ir.LARGEST_SIZE - 2 * loops[0].programs
    return replace(first, where=tuple(dict.fromkeys([*where, counted])))


def _is_tile(k: ir.Kernel) -> bool:
    """Whether each program of a kernel has one tile, and the kernel no memory or roles of its own."""
    return (
        isinstance(k.body, ir.For)
        and k.body.kind == "grid"
        and not k.body.programs
        and not ir.find(k, ir.Roles)
        and not ir.find(k, ir.Shared)
    )


def _same_call(a: ir.Kernel, b: ir.Kernel) -> bool:
    """Whether two kernels take the same tensors, in boxes of the same extents, and the same sizes."""
    each = [k.sizes.each if isinstance(k.sizes, ir.Sizes) else () for k in (a, b)]
    return a.params == b.params and each[0] == each[1] and _boxes(a) == _boxes(b)


def _boxes(k: ir.Kernel) -> set[tuple[ir.Tensor, tuple[int, ...]]]:
    """The tensors that a kernel reads or stores in boxes, with their extents."""
    read, stored = ir.find(k, ir.BoxLoad), ir.find(k, ir.BoxStore)
    return {(x.tensor, x.extents) for x in read} | {(x.tensor, x.extents) for x in stored}


def _one_grid(first: ir.Kernel, kernels: Sequence[ir.Kernel]) -> ir.Kernel:
    """The kernel whose programs have the tiles of one kernel, then those of the next, and so on."""
    grids = [k.body for k in kernels if isinstance(k.body, ir.For)]
    pid, names = grids[0].var, VariableNames(*kernels)
    body: list[ir.Stmt] = []
    given: ir.Expr | int = 0
    for phase, grid in enumerate(grids):
        tile = ir.Var(names.fresh(f"tile_{phase}"))
        body.append(ir.Let(tile, simplify(pid - given)))
        last = phase == len(grids) - 1
        here = [*([tile >= 0] if phase else []), *([] if last else [tile < _end(grid)])]
        body.append(ir.If(ir.all_of(here), ir.substitute(grid.body, {grid.var: tile})))
        given = simplify(ir.as_expr(_end(grid)) + given)
    stop = sum(g.stop for g in grids)
    whole = replace(
        grids[0],
        stop=stop,
        body=ir.seq(*body),
        until=None if grids[0].until is None else ir.as_expr(given),
    )
    notes = tuple(dict.fromkeys(n for k in kernels for n in k.notes))
    return ir.Kernel(first.name, first.params, whole, notes, _required(kernels))


def _alike(a: ir.Kernel, b: ir.Kernel) -> bool:
    """Whether two kernels are explicit and persistent, with equal grids, roles, tensors and memory."""
    if not (ir.find(a, ir.Roles) and ir.find(b, ir.Roles) and _dealt(a) and _dealt(b)):
        return False
    assert isinstance(a.body, ir.For) and isinstance(b.body, ir.For)
    shapes = [[(r.name, r.warps, r.registers) for r in ir.find(k, ir.Role)] for k in (a, b)]
    return (
        _same_call(a, b)
        and a.body.stop == b.body.stop
        and shapes[0] == shapes[1]
        and ir.find(a, ir.Shared) == ir.find(b, ir.Shared)
    )


def _dealt(k: ir.Kernel) -> bool:
    """Whether each role consists of counters, one loop over the program's tiles, and final waits."""
    for role in ir.find(k, ir.Role):
        parts = ir.statements(role.body)
        loops = [s for s in parts if isinstance(s, ir.For)]
        rest = [s for s in parts if not isinstance(s, ir.For)]
        if (
            len(loops) != 1
            or loops[0].kind != "dealt"
            or not all(isinstance(s, (ir.Alloc, ir.FuncCall)) for s in rest)
        ):
            return False
    return True


def _steps(inside: ir.Stmt) -> int:
    return max((loop.stop for loop in ir.find(inside, ir.For) if loop.kind == "serial"), default=1)


def _joined(same: tuple[ir.Role, ...], grid: ir.For, number: int) -> ir.Role:
    """A role's loops one after another; counters and last waits are there once. ``number``: of the
    role, which is that of the consumer where two take turns."""
    parts = [ir.statements(r.body) for r in same]
    before = [s for s in parts[0] if isinstance(s, ir.Alloc)]
    after = [s for s in parts[0] if isinstance(s, ir.FuncCall)]
    joined: list[ir.Stmt] = []
    given: ir.Expr | int = 0  # tiles so far; the next phase begins at the program after the last one used
    done = _Done()
    for phase, loop in enumerate(s for p in parts for s in p if isinstance(s, ir.For)):
        start = _after(given, grid)
        if not phase:
            joined.append(loop)
        elif loop.programs == grid.stop:
            joined.append(replace(loop, start=start))
        else:
            joined += [*done.names, done.continued(loop, start, grid.stop, number)]
        done = done.and_also(ir.Var(f"had{phase}"), loop, start, grid.stop)
        given = _end(loop) + given if phase else _end(loop)
    return replace(same[0], body=ir.seq(*before, *joined, *after))


def _end(loop: ir.For) -> ir.Expr | int:
    """The number of tiles of a loop."""
    return loop.stop if loop.until is None else loop.until


def _after(given: ir.Expr | int, grid: ir.For) -> ir.Expr:
    """The first tile of a program in a phase, ``given`` tiles having been dealt."""
    if isinstance(given, ir.Expr):
        return (grid.var + (grid.stop - simplify(given) % grid.stop)) % grid.stop
    offset = -given % grid.stop
    return (grid.var + offset) % grid.stop if offset else grid.var


@dataclass(frozen=True, slots=True)
class _Done:
    """What a program has done in the phases before, as its consumers count it; ``names`` are new ones."""

    tiles: ir.Expr = ir.ZERO
    steps: ir.Expr = ir.ZERO
    names: tuple[ir.Let, ...] = ()

    def and_also(self, had: ir.Var, loop: ir.For, start: ir.Expr, programs: int) -> _Done:
        """Add the tiles of a phase; ``had`` names their number."""
        number = (_end(loop) + (programs - 1) - start) // programs
        return _Done(self.tiles + had, self.steps + had * _steps(loop.body), (ir.Let(had, number),))

    def continued(self, loop: ir.For, start: ir.Expr, programs: int, consumer: int) -> ir.For:
        """A consumer's tiles of the next phase, and the steps that were fetched before each."""
        ahead = (self.tiles + consumer) % 2  # how many tiles the other consumer has first
        return _Later(self.steps).rebuilt(replace(loop, start=start + ahead * programs))


class _Later(ir.Mutator):
    """Adds the steps of earlier phases to ``fetched``."""

    def __init__(self, steps: ir.Expr) -> None:
        self.steps = steps

    def mutate_Let(self, let: ir.Let) -> ir.Stmt:
        return replace(let, value=self.steps + let.value) if let.var is FETCHED else let
