"""What lines of a kernel do to arrays: loads, stores, and which accesses there are.

Also here: refuses kernels that read what they write, but for the same elements before it, as ``x = x +
1`` reads. Threads of a group would need a barrier between, and groups run in no order.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transconv.ir import Expr, FuncCall, Let, Load, Store, Update, Var, find, free_vars
from transconv.kernel.device_functions import OverloadSet
from transconv.kernel.frontend.scopes import Conditions
from transconv.kernel.frontend.source import FunctionSource
from transconv.kernel.functions import cast
from transconv.kernel.refusals import Refusal, SourcePlace, WrongScope
from transconv.kernel.tiles import arrays, tile_elements
from transconv.kernel.tiles.kernel_builder import Building
from transconv.kernel.tiles.lanes import Shape
from transconv.kernel.tiles.products import Chip, PendingProduct
from transconv.kernel.tiles.values import ArrayView, Tile, described
from transconv.kernel.tiles.values import named as type_name
from transconv.simplify import simplify
from transconv.support import KernelError

OF_ITEMS = ("id", "group_id", "work_offset", "vload", "vzeros", "vones", "vfull", "store")
"""Methods of the group that work-items and sub-groups may call."""


class Effects:
    """The names of a kernel, and what its lines access. ``stem``: a name for what is loaded next;
    ``meant``: the values of symbols and tunable numbers, by name."""

    def __init__(self, b: Building, source: FunctionSource, chip: Chip, meant: Mapping[str, Any]) -> None:
        self.b, self.source, self.chip, self.meant = b, source, chip, meant
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

    def load(self, view: ArrayView, shape: Shape | None, vector: bool = False, fill: Any = None) -> Tile:
        """``group.load``, ``group.vload``"""
        if self.items and not view.items:
            view = replace(view, items=self.items_shape)
        made = arrays.load(self.b, view, shape, self.stem, vector or self.items, fill)
        self.accessed(view)
        return made

    def store(self, view: ArrayView, value: Any) -> None:
        """``group.store``"""
        self.check_written(view)
        if self.items and not view.items:
            view = replace(view, items=self.items_shape)
        arrays.store(self.b, view, value, tuple(self.within.within))
        self.accessed(view, writes=True)

    def check_written(self, view: ArrayView) -> None:
        """Refuse a store to an array with several elements in one place."""
        if view.layout is not None and view.layout.collision:
            raise Refusal(f"a store to {view.tensor.name} by a layout in which {view.layout.collision}",
                          "layouts with a place for each element",
                          "index_map((H, W), lambda i, j: i * W + j)")
        if view.tensor.layout.overlaps and all(view.tensor.shape):
            raise Refusal(f"a store to {view.tensor.name}, several of whose elements are one in memory",
                          "elements of their own, such as those of a contiguous copy")

    def write_out(self, out: Any, made: Tile) -> Any:
        """``out=``: the active elements of a result are written to a tile."""
        if not isinstance(out, Tile) or out.vector:
            raise Refusal(f"out={described(out)}", "a tile that is not a vector")
        if made.shape != out.shape:
            raise Refusal(f"a result of shape {made.shape} for out= of shape {out.shape}", "equal shapes")
        value = tile_elements.written(self.b, out, _cast(made, out), made.mask, ())
        self.replaced(out, value)
        return self.latest(out)

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
            raise Refusal("an operand computed from a name that another operand changes",
                          "two statements", "y = acc * 2; np.add(acc, x, out=acc); acc = y + acc")
        return self.latest(value)

    def inlined(self, callee: Any, args: list[Any], words: dict[str, Any]) -> Any:
        """A call of a function whose body is read here."""
        raise NotImplementedError

    def dispatched(self, family: OverloadSet, args: list[Any], words: dict[str, Any]) -> Any:
        """A call of a function with several bodies."""
        raise NotImplementedError

    def of_lambda(self, callee: Any, args: list[Any]) -> Any:
        """The result of a lambda."""
        raise NotImplementedError

    def summed(self, acc: Tile, term: PendingProduct) -> Tile:
        """``acc + term``, which every name of ``acc`` becomes."""
        raise NotImplementedError

    def of_group(self, method: str) -> None:
        """Refuse methods of the group where these have no meaning."""
        if self.items and method not in OF_ITEMS:
            raise WrongScope(f"group.{method} inside of {self.here.scope.value}",
                             "elements of arrays: X[i, j], Y[i, j] = x; vectors", "group.vload(X[i:], 4)")

    def each(self, made: Any) -> Any:
        """A value of the group inside of items: each of them has it."""
        if not self.items or not isinstance(made, Tile) or made.items or not made.shape:
            return made
        rank, own = len(self.items_shape), made.shape
        alone = tuple(1 for _ in range(rank))
        of = (*(None for _ in range(rank)), *range(len(own)))
        return replace(self.b.placed(made, (*alone, *own), of), items=rank, vector=True)

    def replaced(self, old: Tile, new: Tile) -> None:
        """Every name of a tile is a name of the other one from here on."""
        raise NotImplementedError


def _cast(made: Tile, out: Tile) -> Expr:
    if made.dtype.kind == "float" and out.dtype.kind != "float":
        raise Refusal(f"a result of type {type_name(made.dtype)} for out= of type {type_name(out.dtype)}",
                      "a type that holds it")
    return cast(made.expr, out.dtype)


@dataclass(frozen=True, slots=True)
class ArrayAccess:
    """A read or write of an array: its line, and the loops at run time around it."""

    array: str
    writes: bool
    place: SourcePlace
    loops: tuple[str, ...]
    offset: Expr
    atomic: bool = False


def check_order(accesses: Sequence[ArrayAccess], alike: Mapping[str, str]) -> None:
    """Refuse a read behind a write of the same memory. ``alike``: for each name of an array the first name
    of the same memory. Raises KernelError at the line of the read."""
    written: dict[str, ArrayAccess] = {}
    for access in accesses:
        memory = alike.get(access.array, access.array)
        if access.writes:
            written.setdefault(memory, access)
    seen: dict[str, ArrayAccess] = {}
    for access in accesses:
        memory = alike.get(access.array, access.array)
        first = written.get(memory)
        if access.writes:
            seen.setdefault(memory, access)
        elif first is not None and (memory in seen or _again(access, first)):
            raise _refusal(access, first).at(access.place)
    for access in (a for a in accesses if not a.writes):
        for write in (w for w in accesses if w.writes):
            same = alike.get(access.array, access.array) == alike.get(write.array, write.array)
            if same and (access.offset is not write.offset or write.atomic):
                raise _elsewhere(access, write).at(access.place)


def _elsewhere(read: ArrayAccess, write: ArrayAccess) -> Refusal:
    return Refusal(f"a read of other elements of {read.array} than line {write.place.line} writes, which "
                   "another group or thread may have written before", "reads of the elements that are "
                   "written, of the same shape; results in another array", "group.store(Y[i:], x)")


def _again(read: ArrayAccess, write: ArrayAccess) -> bool:
    """Whether a loop brings a read back after a write."""
    return bool(set(read.loops) & set(write.loops))


def _refusal(read: ArrayAccess, write: ArrayAccess) -> Refusal:
    other = "" if read.array == write.array else f", which shares memory with {write.array}"
    return Refusal(f"a read of {read.array}{other} after line {write.place.line} stores to it",
                   "reads before the first store; keep the value under a name, or launch a second kernel",
                   "y = x * 2.0; group.store(Y[i:], y); z = y + 1.0")
