"""Calls of functions from kernels: whose body is read, with which names; what intrinsics build."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transconv.backend_triton import spelled_lines
from transconv.ir import Call, DType, Expr, Let, Load, Mul, Reduce, Var, f32, find, i32, walk
from transconv.kernel.device_functions import DeviceFunction, OverloadSet, asked, of_another_scope
from transconv.kernel.frontend.reader import ForItems, Lambda, Returned, SourceReader, scope_of
from transconv.kernel.functions import cast
from transconv.kernel.source import Refusal, WrongScope
from transconv.kernel.tiles import arrays
from transconv.kernel.tiles.intrinsic_builder import TEXT, Builder, Unavailable, row
from transconv.kernel.tiles.kernel_builder import Building, aligned, named
from transconv.kernel.tiles.values import PendingProduct, Tile, combined, tile_of

OF_A_FUNCTION = tuple(
    "env gone carried fixed items items_shape at base here returns "
    "entered given written also elements".split()
)
"""What a reader knows of the function that it reads, and of no other."""


class Calls(SourceReader):
    """Reads the bodies of functions. ``here``: the group, or the items whose function is read."""

    def inlined(self, callee: Any, args: list[Any], words: dict[str, Any]) -> Any:
        if isinstance(callee, ForItems):
            return self.of_items(callee, args or list(words.values()))
        if callee.scope is not None:
            if callee.scope is not scope_of(self.here):
                raise of_another_scope(callee, scope_of(self.here))
            args = [self.here, *args]
        names = callee.source.parameters
        args, words = [self.settled(a) for a in args], {n: self.settled(a) for n, a in words.items()}
        given = dict(zip(names, args, strict=False)) | words
        if len(args) + len(words) != len(names) or set(given) != set(names):
            shown = names[1:] if callee.scope is not None else names
            raise Refusal(
                f"a call of {callee.source.name} with other arguments than it takes",
                f"{callee.source.name}({', '.join(shown)})",
            )
        if callee in self.calls:
            raise Refusal(f"{callee.source.name}, which calls itself", "loops", "for k in range(n):")
        if not callee.inline:
            return own_function(self, callee, given)
        return self.settled(self.read(callee, given))

    def read(self, callee: DeviceFunction, given: dict[str, Any]) -> Any:
        """The result of a function's body. What it writes to elements of tiles that it is given, the
        caller's names have."""
        before = self.source, self.outside
        self.calls.append(callee)
        try:
            with self.apart(dict(given), {}):
                self.source, self.outside, self.returns = callee.source, callee.source.outside(), True
                self.given = {n for n, v in given.items() if isinstance(v, Tile)}
                made = self.returned(callee.source.tree.body)
                changed = [(given[n], self.env[n]) for n in sorted(self.written)]
        finally:
            self.calls.pop()
            self.source, self.outside = before
        for old, new in changed:
            self.through(old, new)
        return made

    def settled(self, value: Any) -> Any:
        """A value that goes into a function or comes from it: a product is rounded there."""
        if isinstance(value, Tile) and isinstance(value.expr, Mul) and value.dtype is f32:
            return replace(value, expr=self.b.let("value", value.expr))
        return value

    def of_items(self, callee: ForItems, args: Sequence[Any]) -> None:
        """The function of work-items or of sub-groups."""
        if args:
            raise Refusal(
                f"arguments for a function of {callee.item.scope.value}", "none", f"{callee.node.name}()"
            )
        if self.items:
            raise WrongScope(
                f"a call of {callee.node.name} inside of {self.here.scope.value}", "the scope of the group"
            )
        with self.apart(self.env, {}):
            self.here, self.items, self.items_shape = callee.item, True, callee.item.shape
            self.env = {n: self.each(v) for n, v in self.env.items()}
            self.env[callee.node.args.args[0].arg] = callee.item
            self.returned(callee.node.body)

    @contextmanager
    def apart(self, env: dict[str, Any], gone: dict[str, str]) -> Iterator[None]:
        """The names of another function."""
        before = {name: getattr(self, name) for name in OF_A_FUNCTION}
        self.env, self.gone, self.carried, self.fixed, self.base = env, gone, {}, set(), self.depth
        self.entered, self.given, self.written, self.also, self.elements = [], set(), set(), {}, set()
        self.returns = False
        try:
            yield
        finally:
            vars(self).update(before)

    def returned(self, body: Sequence[ast.stmt]) -> Any:
        """The result of a function's statements."""
        try:
            self.run(body)
        except Returned as made:
            return made.value
        return None

    def of_lambda(self, callee: Lambda, args: list[Any]) -> Any:
        if len(args) != len(callee.names):
            raise Refusal(f"a call of a lambda of {len(callee.names)} with {len(args)} values", "as many")
        given = zip(callee.names, map(self.settled, args), strict=True)
        env, self.env = self.env, {**callee.env, **dict(given)}
        try:
            return self.settled(self.value(callee.node.body))
        finally:
            self.env = env

    # -- functions with several bodies --

    def dispatched(self, family: OverloadSet, args: list[Any], words: dict[str, Any]) -> Any:
        scope = scope_of(self.here)
        reasons: list[str] = []
        for intrinsic in family.asked(scope):
            if words:
                raise Refusal(
                    f"{', '.join(words)}= in a call of the intrinsic {family.name}", "arguments by place"
                )
            told = [asked(a, lambda view: arrays.sizes(self.b, view)) for a in args]
            build = intrinsic.built(told, self.chip.target)
            shown = f"({', '.join(map(str, told))})"
            if build is None:
                reasons.append(f"{intrinsic.name} has nothing for {shown}")
                continue
            mark = len(self.b.stmts)
            body = family.body(scope)
            try:
                return self.settled(build(Builder(self, family.name, self.meaning(body)), *args))
            except TypeError as error:
                raise Refusal(
                    f"what the intrinsic {intrinsic.name} builds for {shown}, which fails ({error})"
                ) from error
            except Unavailable as reason:
                del self.b.stmts[mark:]
                reasons.append(f"{intrinsic.name}: {reason}")
        body = family.body(scope)
        if body is not None:
            return self.inlined(body, args, words)
        what = f"{family.name}, which has no body for {scope.value}"
        found = f"a call of {what}" + (f" ({'; '.join(reasons)})" if reasons else "")
        raise (Refusal if reasons else WrongScope)(found, family.candidates())

    def summed(self, acc: Tile, term: PendingProduct) -> Tile:
        """``acc + term``, which every name of ``acc`` becomes; one call of the matrix unit where a loop
        carries the name."""
        names = [n for n, v in self.env.items() if v is acc]
        if names and names[0] not in self.carried and any(names[0] in e for e in self.entered):
            self.through(acc, acc)
        if len(names) == 1 and self.accumulated(names[0], acc, term):
            summed: Tile = self.env[names[0]]
            return summed
        made = named(self.b, "add", acc, self.whole(term))
        self.through(acc, made)
        return self.latest(acc) if names else made


# -- functions of Triton -----------------------------------------------------------------------------


DIVISIONS = ("FloorDiv", "Mod")


def own_function(at: Calls, callee: DeviceFunction, given: dict[str, Any]) -> Tile:
    """A call of a function of its own. Refuses bodies that are more than expressions of elements."""
    tiles = {n: v for n, v in given.items() if isinstance(v, Tile)}
    if not tiles:
        raise Refusal(
            f"a call of {callee.source.name} without tiles, which is a function of its own",
            "@kernel.func, whose body is read in the place of the call",
        )
    kinds = {n: _held(t.dtype, at.chip.target.upcast16) for n, t in tiles.items()}
    params = {n: Tile((), Var(f"x{i}", kinds[n])) for i, n in enumerate(tiles)}
    outer, at.b = at.b, Building(tuple(f"x{i}" for i in range(len(params))))
    at.b.elements = callee.source.name
    try:
        made = at.read(callee, {**given, **params})
        lets, result = _expression(callee, at.b, made)
    finally:
        at.b = outer
    whole = aligned(at.b, list(tiles.values()))
    lines = "\n".join(f"    {line}" for line in spelled_lines(lets, result))
    meaning = at.meaning(callee) if len(tiles) == len(given) else None
    needs = sorted({c.name for e in (result, *(s.value for s in lets)) for c in find(e, Call)})
    name = row(
        callee.source.name, TEXT, list(kinds.values()), result.dtype, meaning, tuple(needs), body=lines
    )
    at.b.taken.add(name)
    args = tuple(cast(t.expr, kind) for t, kind in zip(whole, kinds.values(), strict=True))
    value = Call(name, args)
    narrow = next((t.dtype for t in whole if t.dtype.bits == 16), None)
    wide = narrow is None or result.dtype is not f32 or not at.chip.target.upcast16
    gives = result.dtype if wide or narrow is None else narrow
    return combined(whole, cast(value, gives))


def _held(dtype: DType, upcast16: bool) -> DType:
    if dtype.kind == "index":
        return i32
    return f32 if upcast16 and dtype.kind == "float" and dtype.bits <= 16 else dtype


def _expression(callee: DeviceFunction, b: Building, made: Any) -> tuple[list[Let], Expr]:
    """The names and the value of a body."""
    name = callee.source.name
    tile = tile_of(made) if made is not None else None
    lets = [s for s in b.stmts if isinstance(s, Let)]
    if tile is None or tile.shape or tile.mask or len(lets) < len(b.stmts):
        raise Refusal(
            f"{name}, a function of its own that does more than compute a value of elements",
            "operators and functions; @kernel.func for loops, loads and reductions",
        )
    for e in [tile.expr, *(s.value for s in lets)]:
        if any(isinstance(x, (Load, Reduce)) for x in walk(e)) or any(
            type(x).__name__ in DIVISIONS and x.dtype.is_integer for x in find(e, Expr)
        ):
            raise Refusal(
                f"{name}, a function of its own with a load, a reduction or a whole division",
                "@kernel.func, whose body is read in the place of the call",
            )
    return lets, tile.expr
