"""Names that change inside of a loop or branch that runs at run time.

Such a name becomes one of the kernel that is assigned again: with one type and one shape. Its mask is the
same in all iterations, or grows by conditions that do not depend on the iteration (``acc += a @ b``: those
of the rows and columns), or is kept in a boolean tile of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transconv.ir import DType, Expr, Or, Var, boolean, free_vars, i32, promote
from transconv.kernel.functions import cast
from transconv.kernel.refusals import Refusal
from transconv.kernel.tiles.kernel_builder import Building
from transconv.kernel.tiles.lanes import Shape, broadcast
from transconv.kernel.tiles.masks import joined, whole
from transconv.kernel.tiles.values import WEAK, Mask, Tile, described, is_number, named, tile_of


@dataclass(frozen=True, slots=True)
class CarryPlan:
    """How a name is carried. ``weak``: it begins as a number, which takes the type and shape of what
    follows; ``grows``: the conditions that an iteration adds to its mask; ``kept``: its mask is a tile."""

    dtype: DType
    shape: Shape
    weak: bool
    grows: Mask = ()
    kept: bool = False
    items: int = 0


@dataclass(slots=True)
class CarriedName:
    """A name that is carried now. ``first``: its mask at the beginning; ``on``: the tile of its mask;
    ``depth``: how many blocks are around the one that carries it; ``branch``: whether it is a branch."""

    plan: CarryPlan
    var: Var
    first: Mask
    on: Var | None
    depth: int
    branch: bool = False

    def now(self, mask: Mask) -> Tile:
        """The value, with a mask."""
        return Tile(self.plan.shape, self.var, mask, items=self.plan.items)


class Again(Exception):
    """A block has to be read again, with another plan for a name."""

    def __init__(self, name: str, plan: CarryPlan) -> None:
        super().__init__(name)
        self.name, self.plan = name, plan


def assigned_names(body: Sequence[ast.stmt]) -> list[str]:
    """The names that statements assign to, also by ``x[...] = y`` and ``out=x``, in order."""
    found: dict[str, None] = {}
    for at in (n for s in body for n in ast.walk(s)):
        if isinstance(at, ast.Name) and isinstance(at.ctx, ast.Store):
            found[at.id] = None
        elif isinstance(at, ast.Subscript) and isinstance(at.ctx, ast.Store):
            if isinstance(at.value, ast.Name):
                found[at.value.id] = None
        elif isinstance(at, ast.keyword) and at.arg == "out" and isinstance(at.value, ast.Name):
            found[at.value.id] = None
    return list(found)


def plan_of(value: Any) -> CarryPlan | None:
    """How a value would be carried; None for one that cannot change at run time."""
    if is_number(value):
        return CarryPlan(WEAK[type(value)], (), True)
    if isinstance(value, Tile):
        weak = value.dtype.kind == "index"
        return CarryPlan(i32 if weak else value.dtype, value.shape, weak, items=value.items)
    return None


def begun(b: Building, name: str, value: Any, plan: CarryPlan, depth: int,
          branch: bool = False) -> tuple[CarriedName, Tile]:
    """A name that changes from here on, and its value now."""
    tile = tile_of(value)
    var = b.alloc(name, plan.dtype, plan.shape, cast(tile.expr, plan.dtype))
    on = b.alloc(f"{name}_active", boolean, plan.shape, whole(tile.mask)) if plan.kept else None
    now = Tile(plan.shape, var, tile.mask if on is None else (on,), items=plan.items)
    return CarriedName(plan, var, tile.mask, on, depth, branch), now


def at_iteration(held: CarriedName, first: Expr) -> Mask:
    """The mask at the beginning of an iteration; ``first``: whether it is the first one."""
    if held.on is not None:
        return (held.on,)
    return joined(held.first, *([Or(first, part)] for part in held.plan.grows))


def afterwards(held: CarriedName, never: Expr | None) -> Mask:
    """The mask after a loop; ``never``: whether it had no iteration, None if it had one."""
    if held.on is not None:
        return (held.on,)
    return joined(held.first, *([part if never is None else Or(never, part)] for part in held.plan.grows))


def fitted(name: str, held: CarriedName, value: Any) -> Tile:
    """A value as one of a carried name. Raises Again where a weak beginning takes its type or shape, and
    refuses others."""
    plan, tile = held.plan, tile_of(value)
    dtype = i32 if tile.dtype.kind == "index" else tile.dtype
    if plan.weak:
        wanted = dtype if plan.dtype is dtype or is_number(value) and plan.dtype.kind == dtype.kind else (
            promote(plan.dtype, dtype))
        shape = broadcast(plan.shape, tile.shape)
        if (wanted, shape) != (plan.dtype, plan.shape):
            raise Again(name, replace(plan, dtype=wanted, shape=shape, items=max(plan.items, tile.items)))
    elif broadcast(tile.shape, plan.shape) != plan.shape:
        raise Refusal(f"{name} with shape {tile.shape} in a loop or branch, and {plan.shape} before it",
                      "one shape", f"{name} = group.zeros(shape={tile.shape}, dtype=...)")
    weak = is_number(value) and not (isinstance(value, float) and plan.dtype.kind != "float")
    if not plan.weak and not weak and tile.dtype.kind != "index" and promote(plan.dtype, dtype) is not (
            plan.dtype):
        raise Refusal(f"{name} of type {named(tile.dtype)} in a loop or branch, and {named(plan.dtype)} "
                      "before it", "one type", f"{name} = {name}.astype(np.{named(dtype)})")
    return Tile(plan.shape, cast(tile.expr, plan.dtype), tile.mask, items=plan.items)


def masked(name: str, held: CarriedName, new: Mask, now: Mask, depth: int, inner: Iterable[Var]) -> Mask:
    """The mask of a carried name after an assignment; ``now``: before it. ``inner``: the names that differ
    between iterations. Raises Again where the mask has to be carried in another way."""
    if held.on is not None:
        return (held.on,)
    whole = joined(held.first, held.plan.grows)
    if {*new} == {*now} or depth == held.depth and {*new} == {*whole}:
        return new
    more = tuple(m for m in new if m not in held.first and not isinstance(m, Or))
    changing = {*inner}
    steady = depth == held.depth and {*held.first} <= {*new} and not any(
        free_vars(m) & changing for m in more)
    # What one branch adds does not hold in the other.
    grows = steady and not held.branch and not held.plan.grows and more
    if grows and joined(held.first, more) == joined(new):
        raise Again(name, replace(held.plan, grows=more))
    raise Again(name, replace(held.plan, kept=True, grows=()))


def refused(name: str, value: Any) -> Refusal:
    """What cannot change at run time."""
    return Refusal(f"{name}, {described(value)}, which changes in a loop or branch at run time",
                   "numbers and tiles; loops over tuples are written out", "for step in (0, 1, 2):")

