"""Statements of a kernel's source, read into a kernel of the IR, at the level of lanes; assignments to
names, and to elements of tiles and arrays."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from transconv.ir import ZERO, Expr, Lane, Not, Or, Var, all_of, lanes_of, walk
from transconv.kernel.frontend.methods import for_items
from transconv.kernel.frontend.reader import (
    ArrayAccess,
    GroupScope,
    Item,
    Returned,
    SourceReader,
    is_static,
)
from transconv.kernel.source import Refusal, WrongScope, is_number, spelled
from transconv.kernel.tiles import arrays, tile_elements
from transconv.kernel.tiles.kernel_builder import aligned, named
from transconv.kernel.tiles.reductions import active, added
from transconv.kernel.tiles.values import (
    ArrayView,
    AtomicView,
    Mask,
    PendingProduct,
    Tile,
    described,
    either,
    joined,
    lanes_along,
    tile_of,
    whole,
)

INSTEAD = {
    "While": ("a while loop", "a for loop over range(...)", "for k in range(0, n, 16):"),
    "Try": ("try", "kernels raise nothing", ""),
    "With": ("with", "loops and branches", ""),
    "Import": ("an import", "imports above the kernel", ""),
    "ImportFrom": ("an import", "imports above the kernel", ""),
    "Global": ("global", "arguments of the kernel", ""),
    "Nonlocal": ("nonlocal", "arguments of the kernel", ""),
    "Delete": ("del", "names may just be left", ""),
    "Raise": ("raise", "kernels raise nothing", ""),
    "ClassDef": ("a class", "tiles, numbers and tuples", ""),
    "AsyncFunctionDef": ("an async function", "plain statements", ""),
    "Break": ("break", "a loop that runs to its end, and np.where", "np.where(done, x, y)"),
    "Continue": ("continue", "an if around the rest of the loop", "if k != i:"),
    "Match": ("match", "if", "if n == 1:"),
}


class Statements(SourceReader):
    """Reads statements, and binds names to values, under the conditions of branches. Statements of the
    kernel collect in ``b``."""

    def assign(self, targets: Sequence[ast.expr], node: ast.expr) -> None:
        (first, *_) = targets
        self.stem = first.id if isinstance(first, ast.Name) and _is_read(node) else ""
        match first, node:
            case ast.Name(name), ast.BinOp(ast.Name(left), ast.Add(), right) if (
                name == left and name in self.carried and len(targets) == 1
            ):
                term = self.raw(right)
                if self.accumulated(name, self.env[name], term):
                    return
                value = self.binary(ast.Add, self.env[name], self.whole(term))
            case _:
                value = self.value(node)
        self.stem = ""
        for target in targets:
            self.bind(target, value)

    def accumulated(self, name: str, acc: Any, term: Any) -> bool:
        """Add a product to a carried name in one call, if ``term`` is one that allows it."""
        held = self.carried.get(name)
        if (
            held is None
            or not isinstance(term, PendingProduct)
            or term.items
            or held.plan.shape != term.own
        ):
            return False
        new = joined(acc.mask, active(self.b, term))
        mask = self.new_mask(name, held, new, acc.mask)
        self.detach(name, held)
        if not added(self.b, held.var, term, self.chip):
            return False
        if held.on is not None:
            self.b.update(held.on, whole(new))
        self.env[name] = held.now(mask)
        return True

    def bind(self, target: ast.expr, value: Any) -> None:
        """``target = value``"""
        if isinstance(target, ast.Name):
            self.bind_name(target.id, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            self.unpack(target, value)
        elif isinstance(target, ast.Subscript):
            self.bind_element(target, value)
        else:
            raise Refusal(f"an assignment to {spelled(target)}", "names, elements of tiles")

    def unpack(self, target: ast.Tuple | ast.List, value: Any) -> None:
        if isinstance(value, Tile):
            raise Refusal(f"{value} taken apart", "tuples, ids of the group")
        parts = list(value) if isinstance(value, (tuple, list)) else [value]
        if len(parts) != len(target.elts):
            raise Refusal(f"{len(parts)} values for {len(target.elts)} names", "as many")
        parts = [self.steady(p) for p in parts]
        for t, part in zip(target.elts, parts, strict=True):
            self.bind(t, part)

    def steady(self, value: Any) -> Any:
        """A value that later assignments do not change."""
        if isinstance(value, Tile) and self.b.changes(value.expr):
            return replace(value, expr=self.b.let("old", value.expr))
        return value

    def bind_name(self, name: str, value: Any) -> None:
        if isinstance(self.env.get(name), (ArrayView, GroupScope)) and name in self.source.parameters:
            raise Refusal(f"an assignment to the argument {name}", "other names", f"{name}_2 = {name}[1:]")
        if name in self.written:
            raise Refusal(
                f"{name}, a parameter that is bound again after its elements were written",
                "another name",
                f"{name}_2 = {name} + 1.0",
            )
        self.given.discard(name)
        if self.also.get(other := self.also.pop(name, "")) == name:
            del self.also[other]
        self.shared(name, value)
        self.bind_again(name, value)

    def shared(self, name: str, value: Any) -> None:
        """Note that a name becomes another one of a tile that a loop or branch carries, which keeps the
        values of both apart."""
        if not isinstance(value, Tile) or not value.shape or value.vector:
            return
        for other in [n for n in self.carried if n != name and self.env.get(n) is value]:
            if name in self.carried and self.elements & {name, other}:  # the next iteration writes them
                raise _two_names(other, name)
            self.also[name], self.also[other] = other, name

    def rebind(self, name: str, value: Tile) -> None:
        if name in self.also:
            raise _two_names(name, self.also[name])
        self.elements.add(name)
        if name in self.given:
            self.written.add(name)
        self.bind_again(name, value)

    def bind_again(self, name: str, value: Any) -> None:
        """Bind a name, also to what its tile is after elements were written."""
        if self.within.within and not isinstance(value, (ArrayView, tuple, Item)):
            value = self.guarded(name, value)
        if (held := self.carried.get(name)) is not None:
            self.bind_carried(name, held, value)
            return
        if name in self.fixed:
            raise _unchanging(name, self.env[name])
        if isinstance(value, Tile):
            plain = _is_position(value.expr)
            expr = value.expr if plain else self.b.named(name, value.expr)
            value = value if expr is value.expr else replace(value, expr=expr)
        self.env[name] = value
        self.gone.pop(name, None)

    def guarded(self, name: str, value: Any) -> Tile:
        """A value that is assigned where the conditions of branches hold; elsewhere a name keeps what it
        has, or has nothing."""
        tile, rank = tile_of(value), len(self.items_shape)
        if not tile.items:
            tile = Tile(self.items_shape, tile.expr, tile.mask, items=rank)
        old = self.env.get(name)
        if isinstance(old, Tile) and old.items:
            tile, old = aligned(self.b, [tile, old])
        deep = len(tile.own)
        within = tuple(arrays.lifted(self.b, m, self.items_shape, deep) for m in self.within.within)
        part = joined(within, tile.mask)
        tile = self.widened(tile, part)
        if not (is_number(old) or isinstance(old, Tile)):
            return replace(tile, mask=part)
        kept = tile_of(old)
        if {*part} <= {*kept.mask}:  # the old value is nowhere active but where the new one is
            return replace(tile, mask=part)
        here = Tile((*self.items_shape, *(1 for _ in range(deep))), whole(within), items=rank)
        chosen = named(self.b, "where", here, replace(tile, mask=()), replace(kept, mask=()))
        own = tuple(p for p in tile.mask if p not in within)
        rest = tuple(p for p in kept.mask if p not in own)
        if {*own} <= {*kept.mask}:
            mask = joined(own, either(rest, within))
        else:  # inside of the branch where the new value is active, elsewhere where the old one was
            mask = (Or(all_of(part), all_of([Not(all_of(within)), *kept.mask])),)
        mask = self.b.proved(mask)
        if any(isinstance(p, Or) for p in mask):  # the next branch would say all of it again
            mask = (self.b.let(f"{name}_active", whole(mask)),)
        return replace(chosen, mask=mask)

    def widened(self, tile: Tile, mask: Mask) -> Tile:
        """A value of items with a dimension for each along which its mask varies."""
        along = {x for m in mask for x in lanes_of(m, self.b.scope)}
        lanes = lanes_along((*self.items_shape, *tile.own))
        each = (
            n if lane in along else m
            for n, m, lane in zip(self.items_shape, tile.shape, lanes, strict=False)
        )
        return self.b.spread(tile, (*each, *tile.own))

    def scatter(self, of: ArrayView, items: tuple[Any, ...], value: Any) -> None:
        """A store of all work-items."""
        if not any(isinstance(i, Tile) and i.items for i in items):
            raise Refusal("a store of all work-items to one place", "places of their own", "Y[i] = x")
        self.check_written(of)
        arrays.scattered(self.b, of, items, value, tuple(self.within.within), self.items_shape)
        self.accessed(of, writes=True)

    def added_to(self, of: ArrayView, item: Any, s: ast.AugAssign) -> None:
        """``atomic_ref(X)[i] += v``"""
        if not isinstance(s.op, (ast.Add, ast.Sub)):
            raise Refusal(f"{spelled(s)}, which is no addition", "+= and -=", "atomic_ref(X)[i] += x")
        value = self.value(s.value)
        if isinstance(s.op, ast.Sub):
            value = named(self.b, "negative", value)
        self.check_written(of)
        items = item if isinstance(item, tuple) else (item,)
        place = self.source.place(s)
        self.accesses.append(
            ArrayAccess(of.tensor.name, True, place, tuple(self.loops), ZERO, atomic=True)
        )
        arrays.added(self.b, of, items, value, tuple(self.within.within), self.items_shape)

    def bind_element(self, target: ast.Subscript, value: Any) -> None:
        of, item = self.value(target.value), self.value(target.slice)
        items = item if isinstance(item, tuple) else (item,)
        if (
            isinstance(of, ArrayView)
            and self.items
            and not any(i is None or (isinstance(i, slice) and i != slice(None)) for i in items)
        ):
            self.scatter(of, items, value)
        elif isinstance(of, ArrayView):
            view = arrays.sliced(self.b, of, items, self.items_shape)
            if view.ndim and not (isinstance(value, Tile) and len(value.own) == view.ndim):
                raise Refusal(
                    f"{described(value)} assigned to a slice of an array",
                    "group.store",
                    "group.store(Y[i:], y)",
                )
            self.store(view, value)
        elif isinstance(of, Tile):
            self.replaced(of, tile_elements.assigned(self.b, of, self.b.known(items), value))
        else:
            raise Refusal(f"an assignment to an element of {described(of)}", "tiles")

    def replaced(self, old: Tile, new: Tile) -> None:
        names = [n for n, v in self.env.items() if v is old]
        if not names:
            raise Refusal("an assignment to a tile without a name", "x[...] = y")
        for name in names:
            self.rebind(name, new)
            new = self.env[name]
        self.replacements[old] = new

    # -- statements --

    def run(self, body: Sequence[ast.stmt]) -> None:
        for s in body:
            before, self.at = self.at, s
            try:
                method = getattr(self, f"do_{type(s).__name__}", None)
                if method is None:
                    raise Refusal(*INSTEAD.get(type(s).__name__, (spelled(s), "assignments, loops, if")))
                method(s)
            except Refusal as refusal:
                raise self.error(refusal) from None
            finally:
                self.at = before

    def do_Pass(self, s: ast.Pass) -> None:
        pass

    def do_FunctionDef(self, s: ast.FunctionDef) -> None:
        """``@group.workitems def inner(item): ...``"""
        kinds = [
            d.attr
            for d in s.decorator_list
            if isinstance(d, ast.Attribute) and isinstance(self.value(d.value), GroupScope)
        ]
        if len(kinds) != 1 or kinds[0] not in ("workitems", "subgroups") or len(s.decorator_list) != 1:
            raise Refusal(
                "a function inside of a kernel",
                "@group.workitems and @group.subgroups there, @kernel.func outside",
            )
        if self.items:
            raise WrongScope(
                f"@group.{kinds[0]} inside of {self.here.scope.value}", "the scope of the group"
            )
        if len(s.args.args) != 1 or s.args.defaults or s.args.vararg or s.args.kwonlyargs or s.args.kwarg:
            raise Refusal(
                f"a function of {kinds[0]} with other parameters", "one, the item", "def inner(item):"
            )
        first = s.decorator_list[0]
        assert isinstance(first, ast.Attribute)
        self.env[s.name] = for_items(s, kinds[0], self.value(first.value))

    def do_Return(self, s: ast.Return) -> None:
        if self.returns:
            if self.depth != self.base:
                raise Refusal(
                    "a return inside of a loop or branch at run time",
                    "one behind it",
                    "return np.where(x > 0, x, y)",
                )
            raise Returned(None if s.value is None else self.value(s.value))
        if s.value is not None:
            raise Refusal("a result", "results are stored to arrays", "group.store(Y[i:], y)")
        if self.depth or self.items or s is not self.source.tree.body[-1]:
            raise Refusal("a return before the end", "an if around the rest")

    def do_Assert(self, s: ast.Assert) -> None:
        held = self.value(s.test)
        if not is_static(held):
            raise Refusal("an assert of what is known at run time only", "sizes, types, numbers")
        if not held:
            said = f": {self.value(s.msg)}" if s.msg is not None else ""
            raise Refusal(f"an assertion that does not hold, {spelled(s.test)}{said}")

    def do_Expr(self, s: ast.Expr) -> None:
        if not isinstance(s.value, ast.Constant):
            self.value(s.value)

    # -- assignments --

    def do_AnnAssign(self, s: ast.AnnAssign) -> None:
        if s.value is not None:
            self.assign([s.target], s.value)

    def do_Assign(self, s: ast.Assign) -> None:
        self.assign(s.targets, s.value)

    def do_AugAssign(self, s: ast.AugAssign) -> None:
        target = s.target
        if isinstance(target, ast.Subscript) and isinstance(of := self.value(target.value), AtomicView):
            self.added_to(of.view, self.value(target.slice), s)
            return
        load = copy(target)
        load.ctx = ast.Load()
        if isinstance(target, ast.Name):
            left = self.value(load)
            since = len(self.b.stmts)
            right = self.raw(s.value)
            left = self.still(left, since)
            if isinstance(s.op, ast.Add) and self.accumulated(target.id, left, right):
                return
            right = self.whole(right)
        else:
            left, right = self.value(load), self.value(s.value)
        self.bind(target, self.binary(type(s.op), left, right))


def _unchanging(name: str, value: Any) -> Refusal:
    """What cannot change at run time."""
    return Refusal(
        f"{name}, {described(value)}, which changes in a loop or branch at run time",
        "numbers and tiles; loops over tuples are written out",
        "for step in (0, 1, 2):",
    )


def _two_names(name: str, other: str) -> Refusal:
    """What is refused of a tile with several names."""
    return Refusal(
        f"elements of {name} written in a loop or branch, which is {other} too",
        "a tile with one name",
        f"{name} = {other}.copy()",
    )


def _is_read(node: ast.expr) -> bool:
    """Whether an expression is nothing but a load or an element."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in ("load", "vload")
    return isinstance(node, ast.Subscript)


def _is_position(e: Expr) -> bool:
    """Whether an expression is of ids, counters and lanes alone: it stays as it is, so that facts about
    these apply to it."""
    if e.dtype.kind not in ("index", "bool"):
        return False
    return all(
        n.dtype.kind in ("index", "bool") and (not isinstance(n, Var) or n.dtype.kind == "index")
        for n in walk(e)
        if isinstance(n, Expr) and not isinstance(n, Lane)
    )
