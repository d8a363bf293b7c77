"""The reader of a kernel's source, as far as its mixins share it: names, scopes, accesses to arrays.

    @group.workitems
    def inner(item):
        i, j = item.global_id()                 tiles of positions, one element for each work-item
        if i < X.shape[0]:                      a mask: assignments and stores inside of it are under it
            Y[i, j] = X[i, j] + 1.0             a store of all work-items at once

The function of work-items, or of sub-groups, is read once, with tiles of all of them. Neither sees the
values of its neighbours. A value that has dimensions (``X[i]``, a row; a vector) has them behind those
of the work-items, or behind the one of the sub-groups."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from transconv.ir import DType, Expr, FuncCall, Let, Load, Store, Update, Var, find, free_vars
from transconv.kernel.device_functions import DeviceFunction, OverloadSet, Scope
from transconv.kernel.source import FunctionSource, Refusal, SourcePlace, WrongScope
from transconv.kernel.tiles.kernel_builder import Building, Chip
from transconv.kernel.tiles.values import (
    ArrayView,
    AtomicView,
    BoundMethod,
    Mask,
    PendingProduct,
    Shape,
    Tile,
    described,
)
from transconv.simplify import simplify
from transconv.support import KernelError

OF_ITEMS = ("id", "group_id", "work_offset", "vload", "vzeros", "vones", "vfull", "store")
"""Methods of the group that work-items and sub-groups may call."""
Meanings = Callable[[DeviceFunction | None], Callable[..., Any] | None]


# -- scopes ----------------------------------------------------------------------------------------


class GroupScope:
    """The group of a kernel, while its source is read. ``ids``: its place among the groups;
    ``subgroup_size``: the work-items of its sub-groups."""

    def __init__(
        self, shape: Shape, work: tuple[Any, ...], ids: tuple[Tile, ...], subgroup_size: int = 32
    ) -> None:
        self.shape, self.work_shape, self.ids = shape, work, ids
        self.subgroup_size = subgroup_size


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """The items, as their function gets them: where they are. ``shape``: how many there are along each
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


def scope_of(here: Any) -> Scope:
    """The scope of a group, or of an item."""
    return here.scope if isinstance(here, Item) else Scope.WorkGroup


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
            del self.within[len(self.within) - len(parts) :]


@dataclass(frozen=True, slots=True, eq=False)
class Lambda:
    """A lambda of a kernel, with the names around it."""

    node: ast.Lambda
    names: tuple[str, ...]
    env: dict[str, Any]


class Returned(Exception):
    """The end of a function that a kernel calls."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


# -- values ----------------------------------------------------------------------------------------


def is_static(value: Any) -> bool:
    """Whether a value is known while the source is read."""
    if isinstance(value, (tuple, list)):
        return all(is_static(v) for v in value)
    if isinstance(value, slice):
        return is_static((value.start, value.stop, value.step))
    return not isinstance(value, (Tile, ArrayView, AtomicView, GroupScope, BoundMethod, Item, ForItems))


def sizes_of(given: Any) -> Shape:
    """A shape that is known. Refuses others."""
    sizes = given if isinstance(given, (tuple, list)) else (given,)
    for n in sizes:
        if isinstance(n, Tile):
            raise Refusal(
                "a shape that is known at run time only",
                "numbers, sizes of groups and arrays",
                "group.zeros(shape=(16, X.shape[1]), dtype=np.float32)",
            )
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise Refusal(f"{described(n)} as a size of a tile", "whole numbers from 1 on")
    return tuple(sizes)


def view_of(x: Any) -> ArrayView:
    """An array, or a part of one. Refuses others."""
    if not isinstance(x, ArrayView):
        raise Refusal(
            described(x), "an array of the call, or a slice of one", "group.load(X[i:], shape=(16,))"
        )
    return x


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


@dataclass(frozen=True, slots=True)
class ArrayAccess:
    """A read or write of an array: its line, and the loops at run time around it."""

    array: str
    writes: bool
    place: SourcePlace
    loops: tuple[str, ...]
    offset: Expr
    atomic: bool = False


# -- the reader ------------------------------------------------------------------------------------


class SourceReader:
    """The names of a kernel, and what its lines access. ``stem``: a name for what is loaded next;
    ``meant``: the values of symbols and tunable numbers, by name; ``meaning``: of a function's body, what
    it computes of NumPy's arrays."""

    # What the mixins have for each other: the value of an expression, with products that are not computed
    # yet, and without; one that gets a name, whose products are rounded; ``a op b``; ``of.name``.
    value: Callable[[ast.AST], Any]
    raw: Callable[[ast.AST], Any]
    whole: Callable[[Any], Any]
    settled: Callable[[Any], Any]
    binary: Callable[[type[ast.operator], Any, Any], Any]
    attribute: Callable[[Any, str], Any]
    # Numbers that are known at run time only, joined by ``and``.
    truth: Callable[[list[Any]], Tile]
    # ``group.load`` and ``group.store``; ``out=``: the active elements of a result are written to a tile.
    load: Callable[..., Tile]
    store: Callable[[ArrayView, Any], None]
    write_out: Callable[[Any, Tile], Any]
    # A call of a function whose body is read here, of one with several bodies, of a lambda.
    inlined: Callable[[Any, list[Any], dict[str, Any]], Any]
    dispatched: Callable[[OverloadSet, list[Any], dict[str, Any]], Any]
    of_lambda: Callable[[Any, list[Any]], Any]
    # Statements; ``target = value``; a name again, because elements of its tile were written; every name
    # of a tile, from here on a name of the other one.
    run: Callable[[Sequence[ast.stmt]], None]
    bind: Callable[[ast.expr, Any], None]
    rebind: Callable[[str, Tile], None]
    replaced: Callable[[Tile, Tile], None]
    # A product added to a carried name in one call, and whether that is possible; ``acc + term``, which
    # every name of ``acc`` becomes; what a called function wrote to elements of a tile.
    accumulated: Callable[[str, Any, Any], bool]
    summed: Callable[[Tile, PendingProduct], Tile]
    through: Callable[[Tile, Tile], None]
    # A carried name assigned to, its mask then, and values that mention it named before.
    bind_carried: Callable[[str, CarriedName, Any], None]
    new_mask: Callable[[str, CarriedName, Mask, Mask], Mask]
    detach: Callable[[str, CarriedName], None]

    def __init__(
        self, b: Building, source: FunctionSource, chip: Chip, meant: Mapping[str, Any], meaning: Meanings
    ) -> None:
        self.b, self.source, self.chip, self.meant, self.meaning = b, source, chip, meant, meaning
        self.env: dict[str, Any] = {}
        self.gone: dict[str, str] = {}  # names that ended with a branch or a loop, and which
        self.outside = source.outside()
        self.stem = ""
        self.at: ast.AST = source.tree
        self.accesses: list[ArrayAccess] = []
        self.items = False  # whether the current function is that of work-items or sub-groups
        self.items_shape: Shape = ()
        self.here: Any = None  # the group, or the items whose function is read
        self.viewed = False  # whether an index of an array makes a part of it, and does not read
        self.within = Conditions()
        self.replacements: dict[Tile, Tile] = {}  # tiles of which elements were written since
        self.loops: list[str] = []  # the loops at run time around the current line
        self.carried: dict[str, CarriedName] = {}  # names that change at run time
        self.fixed: set[str] = set()  # those that may not change in this block
        self.depth = 0  # how many run-time blocks are around
        self.counters: list[Var] = []  # what differs between iterations
        self.calls: list[Any] = []  # the functions that are being read, from the kernel inwards
        self.base = 0  # the depth at which the current one began
        self.returns = False  # whether the current function has a result
        self.entered: list[set[str]] = []  # the names before each block at run time of this function
        self.given: set[str] = set()  # parameters that are still what the caller gave
        self.written: set[str] = set()  # those of which elements were written
        self.also: dict[str, str] = {}  # of names that are carried, another name of the same tile
        self.elements: set[str] = set()  # names of which elements were written

    def error(self, refusal: Refusal) -> KernelError:
        """The user's error at the current line."""
        return refusal.at(self.source.place(self.at))

    def accessed(self, view: ArrayView, writes: bool = False) -> None:
        """Note the access to an array in the last statement; there is none where nothing is active."""
        last = self.b.stmts[-1] if self.b.stmts else None
        access = last.value if isinstance(last, Let) else last
        if not isinstance(access, Store if writes else Load) or access.tensor is not view.tensor:
            return
        offset = simplify(access.offset, self.b.facts)
        place = self.source.place(self.at)
        self.accesses.append(ArrayAccess(view.tensor.name, writes, place, tuple(self.loops), offset))

    def check_written(self, view: ArrayView) -> None:
        """Refuse a store to an array with several elements in one place."""
        if view.layout is not None and view.layout.collision:
            raise Refusal(
                f"a store to {view.tensor.name} by a layout in which {view.layout.collision}",
                "layouts with a place for each element",
                "index_map((H, W), lambda i, j: i * W + j)",
            )
        if view.tensor.layout.overlaps and all(view.tensor.shape):
            raise Refusal(
                f"a store to {view.tensor.name}, several of whose elements are one in memory",
                "elements of their own, such as those of a contiguous copy",
            )

    def latest(self, value: Any) -> Any:
        """A tile after what was written to its elements."""
        while isinstance(value, Tile) and value in self.replacements:
            value = self.replacements[value]
        return value

    def still(self, value: Any, since: int) -> Any:
        """An operand as it is behind the statements from one on, which other operands made: a tile after
        what was written to it. Refused is what was computed from a name that has changed."""
        if not isinstance(value, Tile) or len(self.b.stmts) == since:
            return value
        mentioned = free_vars(value.expr).union(*map(free_vars, value.mask)) & self.b.changing
        behind = self.b.stmts[since:]
        changed = {n.var for s in behind for n in find(s, Update)}
        changed |= {a for s in behind for n in find(s, FuncCall) for a in n.args if isinstance(a, Var)}
        if mentioned & changed - {value.expr}:
            raise Refusal(
                "an operand computed from a name that another operand changes",
                "two statements",
                "y = acc * 2; np.add(acc, x, out=acc); acc = y + acc",
            )
        return self.latest(value)

    def of_group(self, method: str) -> None:
        """Refuse methods of the group where these have no meaning."""
        if self.items and method not in OF_ITEMS:
            raise WrongScope(
                f"group.{method} inside of {self.here.scope.value}",
                "elements of arrays: X[i, j], Y[i, j] = x; vectors",
                "group.vload(X[i:], 4)",
            )

    def each(self, made: Any) -> Any:
        """A value of the group inside of items: each of them has it."""
        if not self.items or not isinstance(made, Tile) or made.items or not made.shape:
            return made
        rank, own = len(self.items_shape), made.shape
        alone = tuple(1 for _ in range(rank))
        of = (*(None for _ in range(rank)), *range(len(own)))
        return replace(self.b.placed(made, (*alone, *own), of), items=rank, vector=True)
