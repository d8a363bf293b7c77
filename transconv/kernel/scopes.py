"""The scope of work-items: the body of a function for each element of a group, as tiles of all of them.

    @group.workitems
    def inner(item):
        i, j = item.global_id()                 tiles of positions, one element for each work-item
        if i < X.shape[0]:                      a mask: assignments and stores inside of it are under it
            Y[i, j] = X[i, j] + 1.0             a store of all work-items at once

Work-items do not see each other. A value that has dimensions (``X[i]``, a row) has them behind those of
the work-items.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transconv.ir import as_expr
from transconv.kernel.group_scope import GroupScope
from transconv.kernel.lanes import lanes_along
from transconv.kernel.values import Tile


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """What the function of the work-items gets: where they are."""

    group: GroupScope


@dataclass(frozen=True, slots=True, eq=False)
class ForItems:
    """A function of work-items, to be called once."""

    node: ast.FunctionDef
    group: GroupScope


def _local(group: GroupScope) -> tuple[Tile, ...]:
    rank = len(group.shape)
    found = []
    for at, (lane, size) in enumerate(zip(lanes_along(group.shape), group.shape, strict=True)):
        shape = tuple(size if i == at else 1 for i in range(rank))
        found.append(Tile(shape, as_expr(0) if lane is None else lane, items=rank))
    return tuple(found)


def _global(group: GroupScope) -> tuple[Tile, ...]:
    found = []
    for local, place, size in zip(_local(group), group.ids, group.shape, strict=True):
        found.append(Tile(local.shape, place.expr * size + local.expr, items=local.items))
    return tuple(found)


METHODS: dict[str, Callable[[GroupScope], Any]] = {
    "global_id": _global, "local_id": _local, "group_id": lambda group: group.ids}
"""The methods of a work-item, by name: its place in the work, in its group, and that of its group."""


class Conditions:
    """The conditions of the branches around the current line of a work-item's function."""

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
