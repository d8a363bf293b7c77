"""Statements of a kernel's source, read into a kernel of the IR, at the level of lanes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transconv.ir import Expr, Lane, Not, Or, Var, all_of, walk
from transconv.kernel import arrays, carried, tiles
from transconv.kernel.blocks import Blocks
from transconv.kernel.calls import is_static
from transconv.kernel.elementwise import named
from transconv.kernel.expressions import BINARY
from transconv.kernel.group_scope import GroupScope
from transconv.kernel.masks import either, joined, whole
from transconv.kernel.products import Product, active, added
from transconv.kernel.refusals import Refusal, spelled
from transconv.kernel.scopes import ForItems, Item
from transconv.kernel.values import ArrayView, Tile, described, is_number, tile_of

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


class Tracer(Blocks):
    """Reads statements. ``env`` has the values of names; statements of the kernel collect in ``b``."""

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
        kinds = [d.attr for d in s.decorator_list if isinstance(d, ast.Attribute)
                 and isinstance(self.value(d.value), GroupScope)]
        if kinds == ["subgroups"]:
            raise Refusal("@group.subgroups, whose warps this compiler cannot tell apart",
                          "statements of the group, @group.workitems")
        if kinds != ["workitems"] or len(s.decorator_list) != 1 or self.items or self.calls:
            raise Refusal("a function inside of a kernel", "@group.workitems there, @kernel.func outside")
        if len(s.args.args) != 1 or s.args.defaults or s.args.vararg or s.args.kwonlyargs or s.args.kwarg:
            raise Refusal("a function of work-items with other parameters", "one, the item",
                          "def inner(item):")
        first = s.decorator_list[0]
        assert isinstance(first, ast.Attribute)
        self.env[s.name] = ForItems(s, self.value(first.value))

    def inlined(self, callee: Any, args: list[Any], words: dict[str, Any]) -> Any:
        if isinstance(callee, ForItems):
            if args or words:
                raise Refusal("arguments for a function of work-items", "none", f"{callee.node.name}()")
            seen = {n: v for n, v in self.env.items() if not (isinstance(v, Tile) and v.shape)}
            hidden = {n: "a tile of the group, inside of work-items" for n in self.env if n not in seen}
            with self.apart(seen | {callee.node.args.args[0].arg: Item(callee.group)}, hidden):
                self.items, self.items_shape = True, callee.group.shape
                return self.returned(callee.node.body)
        if callee in self.calls:
            raise Refusal(f"{callee.source.name}, which calls itself", "loops", "for k in range(n):")
        names = callee.source.parameters
        given = dict(zip(names, args, strict=False)) | words
        if len(args) + len(words) != len(names) or set(given) != set(names):
            raise Refusal(f"a call of {callee.source.name} with other arguments than it takes",
                          f"{callee.source.name}({', '.join(names)})")
        before = self.source, self.outside
        self.calls.append(callee)
        try:
            with self.apart(given, {}):
                self.source, self.outside = callee.source, callee.source.outside()
                return self.returned(callee.source.tree.body)
        finally:
            self.calls.pop()
            self.source, self.outside = before

    @contextmanager
    def apart(self, env: dict[str, Any], gone: dict[str, str]) -> Iterator[None]:
        """The names of another function."""
        before = self.env, self.gone, self.carried, self.fixed, self.items, self.at, self.base
        self.env, self.gone, self.carried, self.fixed, self.base = env, gone, {}, set(), self.depth
        try:
            yield
        finally:
            self.env, self.gone, self.carried, self.fixed, self.items, self.at, self.base = before

    def returned(self, body: Sequence[ast.stmt]) -> Any:
        """The result of a function's statements."""
        try:
            self.run(body)
        except Returned as made:
            return made.value
        return None

    def do_Return(self, s: ast.Return) -> None:
        if self.calls:
            if self.depth != self.base:
                raise Refusal("a return inside of a loop or branch at run time", "one behind it",
                              "return np.where(x > 0, x, y)")
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
        if isinstance(target, ast.Name):
            left = self.value(ast.copy_location(ast.Name(target.id, ast.Load()), target))
            if isinstance(s.op, ast.Add) and self.accumulated(target.id, left, self.raw(s.value)):
                return
            right = self.whole(self.last)
        else:
            load = ast.copy_location(ast.parse(ast.unparse(target), mode="eval").body, target)
            left, right = self.value(_placed(load, target)), self.value(s.value)
        self.bind(target, self.binary(BINARY[type(s.op)], left, right))

    def assign(self, targets: Sequence[ast.expr], node: ast.expr) -> None:
        (first, *_) = targets
        self.stem = first.id if isinstance(first, ast.Name) and _is_read(node) else ""
        match first, node:
            case ast.Name(name), ast.BinOp(ast.Name(left), ast.Add(), right) if (
                    name == left and name in self.carried and len(targets) == 1):
                if self.accumulated(name, self.value(node.left), self.raw(right)):
                    return
                value = self.binary(BINARY[ast.Add], self.env[name], self.whole(self.last))
            case _:
                value = self.value(node)
        self.stem = ""
        for target in targets:
            self.bind(target, value)

    def accumulated(self, name: str, acc: Any, term: Any) -> bool:
        """Add a product to a carried name in one call, if ``term`` is one that allows it. ``last`` is the
        term otherwise."""
        self.last = term
        held = self.carried.get(name)
        if held is None or not isinstance(term, Product) or held.plan.shape != term.shape:
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
        if self.within.within and not isinstance(value, (ArrayView, tuple, Item)):
            value = self.guarded(name, value)
        if (held := self.carried.get(name)) is not None:
            self.bind_carried(name, held, value)
            return
        if name in self.fixed:
            raise carried.refused(name, self.env[name])
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
        within, old = tuple(self.within.within), self.env.get(name)
        part = joined(within, tile.mask)
        if not (is_number(old) or isinstance(old, Tile)):
            return replace(tile, mask=part)
        kept = tile_of(old)
        if {*part} <= {*kept.mask}:  # the old value is nowhere active but where the new one is
            return replace(tile, mask=part)
        here = Tile(self.items_shape, whole(within), items=rank)
        chosen = named(self.b, "where", here, replace(tile, mask=()), replace(kept, mask=()))
        own = tuple(p for p in tile.mask if p not in within)
        rest = tuple(p for p in kept.mask if p not in own)
        if {*own} <= {*kept.mask}:
            mask = joined(own, either(rest, within))
        else:  # inside of the branch where the new value is active, elsewhere where the old one was
            mask = (Or(all_of(part), all_of([Not(all_of(within)), *kept.mask])),)
        return replace(chosen, mask=self.b.proved(mask))

    def scatter(self, of: ArrayView, items: tuple[Any, ...], value: Any) -> None:
        """A store of all work-items."""
        if not any(isinstance(i, Tile) and i.items for i in items):
            raise Refusal("a store of all work-items to one place", "places of their own", "Y[i] = x")
        self.check_written(of)
        arrays.scattered(self.b, of, items, value, tuple(self.within.within))
        self.accessed(of, writes=True)

    def bind_element(self, target: ast.Subscript, value: Any) -> None:
        of, item = self.value(target.value), self.value(target.slice)
        items = item if isinstance(item, tuple) else (item,)
        if isinstance(of, ArrayView) and self.items:
            self.scatter(of, items, value)
        elif isinstance(of, ArrayView):
            view = arrays.sliced(self.b, of, items)
            if view.ndim and not (isinstance(value, Tile) and len(value.shape) == view.ndim):
                raise Refusal(f"{described(value)} assigned to a slice of an array", "group.store",
                              "group.store(Y[i:], y)")
            self.store(view, value)
        elif isinstance(of, Tile):
            self.replaced(of, tiles.assigned(self.b, of, self.b.known(items), value))
        else:
            raise Refusal(f"an assignment to an element of {described(of)}", "tiles")

    def replaced(self, old: Tile, new: Tile) -> None:
        names = [n for n, v in self.env.items() if v is old]
        if not names:
            raise Refusal("an assignment to a tile without a name", "x[...] = y")
        for name in names:
            self.bind_name(name, new)
            new = self.env[name]


def _is_read(node: ast.expr) -> bool:
    """Whether an expression is nothing but a load or an element."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in ("load", "vload")
    return isinstance(node, ast.Subscript)


class Returned(Exception):
    """The end of a function that a kernel calls."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def _placed(load: ast.expr, at: ast.AST) -> ast.expr:
    for n in ast.walk(load):
        ast.copy_location(n, at)
    return load


def _is_position(e: Expr) -> bool:
    """Whether an expression is of ids, counters and lanes alone: it stays as it is, so that facts about
    these apply to it."""
    if e.dtype.kind not in ("index", "bool"):
        return False
    return all(n.dtype.kind in ("index", "bool") and (not isinstance(n, Var) or n.dtype.kind == "index")
               for n in walk(e) if isinstance(n, Expr) and not isinstance(n, Lane))
