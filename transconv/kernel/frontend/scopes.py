"""The scopes of sub-groups and work-items: a function's body for each of them, as tiles of all of them.

    @group.workitems
    def inner(item):
        i, j = item.global_id()                 tiles of positions, one element for each work-item
        if i < X.shape[0]:                      a mask: assignments and stores inside of it are under it
            Y[i, j] = X[i, j] + 1.0             a store of all work-items at once

Neither sees the values of its neighbours. A value that has dimensions (``X[i]``, a row; a vector) has them
behind those of the work-items, or behind the one of the sub-groups.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from transconv.ir import as_expr
from transconv.kernel.device_functions import Scope
from transconv.kernel.frontend.group_scope import GroupScope
from transconv.kernel.tiles.lanes import Shape, lanes_along
from transconv.kernel.tiles.values import Tile


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """What the function of the items gets: where they are. ``shape``: how many there are along each
    dimension; ``size``: the work-items of a sub-group."""

    group: GroupScope
    scope: Scope
    shape: Shape
    size: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class ForItems:
    """A function of work-items or sub-groups, to be called."""

    node: ast.FunctionDef
    item: Item


def for_items(node: ast.FunctionDef, kind: str, group: GroupScope) -> ForItems:
    """What ``@group.workitems`` and ``@group.subgroups`` make of a function."""
    if kind == "workitems":
        return ForItems(node, Item(group, Scope.WorkItem, group.shape))
    count = -(-prod(group.shape) // group.subgroup_size)
    return ForItems(node, Item(group, Scope.SubGroup, (count,), group.subgroup_size))


def scope_of(here: Any) -> Scope:
    """The scope of a group, or of an item."""
    return here.scope if isinstance(here, Item) else Scope.WorkGroup


def _local(item: Item) -> tuple[Tile, ...]:
    rank = len(item.shape)
    found = []
    for at, (lane, size) in enumerate(zip(lanes_along(item.shape), item.shape, strict=True)):
        shape = tuple(size if i == at else 1 for i in range(rank))
        found.append(Tile(shape, as_expr(0) if lane is None else lane, items=rank))
    return tuple(found)


def _global(item: Item) -> tuple[Tile, ...]:
    found = []
    for local, place, size in zip(_local(item), item.group.ids, item.group.shape, strict=True):
        found.append(Tile(local.shape, place.expr * size + local.expr, items=local.items))
    return tuple(found)


METHODS: dict[Scope, dict[str, Callable[[Item], Any]]] = {
    Scope.WorkItem: {"global_id": _global, "local_id": _local, "group_id": lambda item: item.group.ids},
    Scope.SubGroup: {"subgroup_id": lambda item: _local(item)[0], "size": lambda item: item.size,
                     "group_id": lambda item: item.group.ids},
}
"""The methods of a work-item (its place in the work, in its group, and that of its group) and of a
sub-group (its place among those of its group, its work-items), by name."""


class Conditions:
    """The conditions of the branches around the current line of an item's function."""

    def __init__(self) -> None:
        self.within: list[Any] = []

    @contextmanager
    def holding(self, parts: list[Any]) -> Iterator[None]:
        """Inside of a branch."""
        self.within += parts
        try:
            yield
        finally:
            del self.within[len(self.within) - len(parts):]
