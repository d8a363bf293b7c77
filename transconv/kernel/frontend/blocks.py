"""Loops and branches: those that Python decides are written out, the others run at run time.

A name that changes inside of one that runs at run time becomes one of the kernel that is assigned
again: with one type and one shape. Its mask is the same in all iterations, or grows by conditions that
do not depend on the iteration (``acc += a @ b``: those of the rows and columns), or is kept in a
boolean tile of its own."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transconv import ir
from transconv.kernel.frontend.reader import CarriedName, CarryPlan, SourceReader, is_static
from transconv.kernel.functions import cast
from transconv.kernel.source import Refusal, is_number, named, spelled
from transconv.kernel.tiles.kernel_builder import Building, position
from transconv.kernel.tiles.values import (
    WEAK,
    Mask,
    Tile,
    broadcast,
    described,
    ends,
    joined,
    lanes_along,
    tile_of,
    whole,
)
from transconv.simplify import range_of, simplify

ATTEMPTS = 16
FARTHEST = 2**31 - 1
LONGEST = 256  # iterations that are written out


class Blocks(SourceReader):
    """Reads loops and branches, and carries names that a block at run time changes through it."""

    @contextmanager
    def inner(self, what: str) -> Iterator[list[ir.Stmt]]:
        """A block at run time: names that are bound inside of it end with it."""
        before, fixed = dict(self.env), self.fixed
        self.fixed = {n for n, v in self.env.items() if plan_of(v) is None} | fixed
        self.depth += 1
        self.entered.append(set(before))
        try:
            with self.b.block() as stmts:
                yield stmts
        finally:
            self.depth -= 1
            self.fixed = fixed
            self.entered.pop()
        self.gone |= {n: ended(what) for n in self.env if n not in before}
        after = self.env
        self.env = {n: after[n] if n in self.carried else v for n, v in before.items()}

    def with_carried(
        self, body: Sequence[ast.stmt], read: Callable[[], None], branch: bool = False
    ) -> None:
        """Read a loop, or a branch, with the names that it changes carried; again with other plans where
        they have to be carried in another way."""
        plans: dict[str, CarryPlan] = {}
        for name in assigned_names(body):
            if name in self.env and name not in self.carried and (plan := self.planned(name)):
                plans[name] = plan
        b, before = self.b, (dict(self.env), dict(self.gone), dict(self.carried))
        mark, taken, changing, counters = len(b.stmts), set(b.taken), set(b.changing), list(self.counters)
        accesses, loops, replaced = len(self.accesses), list(self.loops), dict(self.replacements)
        for _ in range(ATTEMPTS):
            try:
                for name, plan in plans.items():
                    self.other_names(name, before[0])
                    held, tile = begun(b, name, self.env[name], plan, self.depth + 1, branch)
                    self.carried[name], self.env[name] = held, tile
                read()
                break
            except Again as again:
                del b.stmts[mark:]
                self.env, self.gone, self.carried = (dict(x) for x in before)
                del self.accesses[accesses:]
                self.loops, self.replacements = list(loops), dict(replaced)
                b.taken, b.changing, self.counters = set(taken), set(changing), list(counters)
                around = any(again.name in names for names in self.entered)
                if again.name not in plans and (around or again.name not in self.env):
                    raise
                plans[again.name] = again.plan
        else:
            raise Refusal("names whose types and shapes do not settle", "one type and shape each")
        for name in plans:
            self.also.pop(name, None)
            b.changing.discard(self.carried.pop(name).var)

    def planned(self, name: str) -> CarryPlan | None:
        """How a name would be carried from here on; None for what cannot change at run time."""
        plan = plan_of(self.env[name])
        if plan is not None and plan.items:  # other items may change it otherwise
            plan = replace(plan, shape=(*self.items_shape, *plan.shape[plan.items :]))
        return plan

    def other_names(self, name: str, env: dict[str, Any]) -> None:
        """Note another name of the tile that a name is about to be carried apart from."""
        tile = env[name]
        for other, value in env.items():
            same = value is tile and other != name
            if same and isinstance(tile, Tile) and tile.shape and not tile.vector:
                self.also[name] = other

    def through(self, old: Tile, new: Tile) -> None:
        """What a called function wrote to elements of a tile, which every name of it has. Raises Again
        where a block at run time has to carry one of them."""
        for name in [n for n, v in self.env.items() if v is old]:
            if name not in self.carried and any(name in names for names in self.entered):
                plan = self.planned(name)
                assert plan is not None
                raise Again(name, plan)
            self.rebind(name, new)
            new = self.replacements[old] = self.env[name]

    def bind_carried(self, name: str, held: CarriedName, value: Any) -> None:
        """Assign to a carried name."""
        if not isinstance(value, Tile) and plan_of(value) is None:
            raise Refusal(f"{name}, which becomes {described(value)} at run time", "numbers and tiles")
        now = self.env[name].mask
        tile = fitted(name, held, value)
        mask = self.new_mask(name, held, tile.mask, now)
        self.detach(name, held)
        self.b.update(held.var, tile.expr)
        if held.on is not None:
            self.b.update(held.on, whole(tile.mask))
        self.env[name] = held.now(mask)

    def new_mask(self, name: str, held: CarriedName, new: Mask, now: Mask) -> Mask:
        """The mask of a carried name after an assignment."""
        inside = [v for s in self.b.stmts for v in ir.bound_vars(s)]
        inner = [*self.counters, *inside, *(c.on for c in self.carried.values() if c.on is not None)]
        return masked(name, held, new, now, self.depth, inner)

    def detach(self, name: str, held: CarriedName) -> None:
        """Give names to the values that mention a carried name, before it changes."""
        for other, value in self.env.items():
            if other != name and isinstance(value, Tile) and held.var in ir.free_vars(value.expr):
                kept = self.b.let(other, value.expr)
                self.env[other] = replace(value, expr=kept)

    # -- loops --

    def do_For(self, s: ast.For) -> None:
        if s.orelse:
            raise Refusal("else behind a loop", "statements behind the loop")
        call = s.iter
        if isinstance(call, ast.Call) and self.value(call.func) is range and not call.keywords:
            bounds = [self.value(a) for a in call.args]
            if not 1 <= len(bounds) <= 3:
                raise Refusal(f"range of {len(bounds)} values", "range(stop), range(start, stop, step)")
            start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
            self.counted(s, start, stop, self.b.known(step))
            return
        items = self.value(call)
        if not isinstance(items, (tuple, list, range)):
            raise Refusal(f"a loop over {described(items)}", "range(...), tuples", "for k in range(n):")
        if len(items) > LONGEST:
            raise Refusal(
                f"a loop over {len(items)} items, which is written out", f"up to {LONGEST}, range"
            )
        for item in items:
            self.bind(s.target, item)
            self.run(s.body)

    def counted(self, s: ast.For, start: Any, stop: Any, step: Any) -> None:
        """A loop over ``range(start, stop, step)``, at run time."""
        if not isinstance(s.target, ast.Name):
            raise Refusal(f"{spelled(s.target)} as a counter", "a name")
        if not isinstance(step, int) or step == 0:
            raise Refusal("a step that is known at run time only, or 0", "a number", "range(0, n, 16)")
        name = s.target.id
        if any(isinstance(x, Tile) and x.items for x in (start, stop)):
            self.counted_by_each(s, name, tile_of(start), tile_of(stop), step)
            return
        first, last = position(start, "a bound"), position(stop, "a bound")
        trips = simplify(_trips(first, last, step), self.b.facts)
        if abs(step) != 1:
            self.b.divides(last)
        if isinstance(trips, ir.Const) and int(trips.value) <= 0:
            self.gone |= {n: ended("a loop without an iteration") for n in [name] if n not in self.env}
            return
        self.with_carried(s.body, lambda: self.loop(s, name, first, last, step, trips))

    def counted_by_each(self, s: ast.For, name: str, start: Tile, stop: Tile, step: int) -> None:
        """A loop whose bounds differ between items: it is as long as the longest one, and its lines are
        under a condition."""
        for bound in (start, stop):
            if bound.own or not bound.dtype.is_integer:
                raise Refusal(f"{bound} as a bound", "a whole number")
        first, last = (cast(bound.expr, ir.index) for bound in (start, stop))
        where = joined(start.mask, stop.mask, self.within.within, ends(self.items_shape))
        trips = self.b.let("trips", self.b.where(where, _trips(first, last, step), ir.ZERO))
        most: ir.Expr = cast(trips, ir.i32)
        for lane in self.b.scope[trips]:
            most = ir.Reduce("max", most, lane)
        longest = cast(self.b.let("longest", most), ir.index)
        self.with_carried(s.body, lambda: self.loop(s, name, first, last, step, longest, trips))

    def loop(
        self,
        s: ast.For,
        name: str,
        first: ir.Expr,
        last: ir.Expr,
        step: int,
        trips: ir.Expr,
        each: ir.Expr | None = None,
    ) -> None:
        """``each``: the iterations of each item, where these differ."""
        plain = (
            step == 1 and isinstance(first, ir.Const) and first.value >= 0 and isinstance(trips, ir.Const)
        )
        var = ir.Var(self.b.fresh(name if plain else f"{name}_step"))
        known = range_of(trips, self.b.facts)
        most = FARTHEST if known.hi is None else max(0, int(known.hi))
        begin = first if plain else ir.ZERO
        low = int(begin.value) if isinstance(begin, ir.Const) else 0
        with self.inner(f"the loop over {name}") as inner:
            self.b.facts = self.b.facts.with_range(var, low, max(low, low + most - 1))
            if not isinstance(trips, ir.Const):
                self.assume(var < trips)
            self.counters.append(var)
            here = {
                n: at_iteration(c, ir.eq(var, begin))
                for n, c in self.carried.items()
                if c.depth == self.depth
            }
            for n, mask in here.items():
                self.env[n] = self.carried[n].now(mask)
            counter: ir.Expr = var if plain else first + (var if step == 1 else var * step)
            if not isinstance(trips, ir.Const) and abs(step) != 1 and self.b.is_of_sizes(Tile((), last)):
                self.b.facts = self.b.facts.assume(counter < last if step > 0 else counter > last)
            if step > 0 and isinstance(last, ir.Min):  # below the least of two is below both
                self.assume(counter < last.a)
                self.assume(counter < last.b)
            found = ir.lanes_of(counter, self.b.scope)
            lanes = zip(self.items_shape, lanes_along(self.items_shape), strict=True)
            shape = tuple(n if lane in found else 1 for n, lane in lanes) if found else ()
            self.env[name] = Tile(shape, counter, items=len(shape))
            self.loops.append(f"{name}:{s.lineno}")
            with self.within.holding([] if each is None else [var < each]):
                self.run(s.body)
            self.loops.pop()
            self.counters.pop()
        self.env.pop(name, None)
        self.gone[name] = ended(f"the loop over {name}")
        until = None if isinstance(trips, ir.Const) else trips
        self.b.add(ir.For(var, low + most, ir.seq(*inner), start=begin, until=until))
        never = None if known.lo is not None and known.lo > 0 else trips < ir.ONE
        for n, held in self.carried.items():
            if held.depth == self.depth + 1:
                mask = self.b.proved(afterwards(held, never))
                self.env[n] = held.now(mask)

    def assume(self, fact: ir.Expr) -> None:
        """A fact of positions inside of a loop, whose bounds are those at its begin: none of a name that
        may change before the loop ends."""
        if not self.b.changes(fact):
            self.b.facts = self.b.facts.assume(fact)

    # -- branches --

    def do_If(self, s: ast.If) -> None:
        test = self.value(s.test)
        if is_static(test):
            self.run(s.body if test else s.orelse)
            return
        self.truth([test])
        if test.items:
            self.masked_branches(s, test)
            return
        if test.mask:
            raise Refusal("a condition that may be inactive", "active numbers", "np.where(c, x, y)")
        condition = simplify(test.expr, self.b.facts)
        if isinstance(condition, ir.Const):
            self.run(s.body if condition.value else s.orelse)
            return
        self.with_carried([*s.body, *s.orelse], lambda: self.branches(s, condition), True)

    def masked_branches(self, s: ast.If, test: Tile) -> None:
        """A branch of each work-item: its statements are executed under a mask, if it is ever taken."""
        expr = self.b.let("condition", test.expr) if self.b.changes(test.expr) else test.expr
        for body, holds in ((s.body, expr), (s.orelse, ir.Not(expr))):
            decided = simplify(holds, self.b.facts)
            if decided is ir.FALSE:
                continue
            holds = ir.TRUE if decided is ir.TRUE else holds
            parts = [*test.mask, *ir.conjuncts(holds)]
            with self.within.holding([p for p in parts if p not in self.within.within]):
                self.run(body)

    def branches(self, s: ast.If, condition: ir.Expr) -> None:
        made: list[ir.Stmt | None] = []
        for body, holds in ((s.body, condition), (s.orelse, ir.Not(condition))):
            with self.inner("a branch") as inner:
                if condition.dtype.kind == "bool" and all(
                    v.dtype.kind == "index" for v in ir.free_vars(condition)
                ):
                    self.b.facts = self.b.facts.assume(holds)
                self.run(body)
            made.append(ir.seq(*inner) if body else None)
        then, other = made
        assert then is not None
        self.b.add(ir.If(condition, then, other))


def ended(block: str) -> str:
    """Why a name has no value behind a block."""
    return f"which is bound inside of {block} alone"


def _trips(first: ir.Expr, last: ir.Expr, step: int) -> ir.Expr:
    distance = last - first if step > 0 else first - last
    size = abs(step)
    return distance if size == 1 else (distance + (size - 1)) // size


class Again(Exception):
    """The signal that a block has to be read again, with another plan for a name."""

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
        return CarryPlan(ir.i32 if weak else value.dtype, value.shape, weak, items=value.items)
    return None


def begun(
    b: Building, name: str, value: Any, plan: CarryPlan, depth: int, branch: bool = False
) -> tuple[CarriedName, Tile]:
    """A name that changes from here on, and its value now."""
    tile = tile_of(value)
    var = b.alloc(name, plan.dtype, plan.shape, cast(tile.expr, plan.dtype))
    on = b.alloc(f"{name}_active", ir.boolean, plan.shape, whole(tile.mask)) if plan.kept else None
    now = Tile(plan.shape, var, tile.mask if on is None else (on,), items=plan.items)
    return CarriedName(plan, var, tile.mask, on, depth, branch), now


def at_iteration(held: CarriedName, first: ir.Expr) -> Mask:
    """The mask at the beginning of an iteration; ``first``: whether it is the first one."""
    if held.on is not None:
        return (held.on,)
    return joined(held.first, *([ir.Or(first, part)] for part in held.plan.grows))


def afterwards(held: CarriedName, never: ir.Expr | None) -> Mask:
    """The mask after a loop; ``never``: whether it had no iteration, None if it had one."""
    if held.on is not None:
        return (held.on,)
    return joined(
        held.first, *([part if never is None else ir.Or(never, part)] for part in held.plan.grows)
    )


def fitted(name: str, held: CarriedName, value: Any) -> Tile:
    """A value as one of a carried name. Raises Again where a weak beginning takes its type or shape, and
    refuses others."""
    plan, tile = held.plan, tile_of(value)
    dtype = ir.i32 if tile.dtype.kind == "index" else tile.dtype
    if plan.weak:
        fits = plan.dtype is dtype or (is_number(value) and plan.dtype.kind == dtype.kind)
        wanted = dtype if fits else ir.promote(plan.dtype, dtype)
        shape = broadcast(plan.shape, tile.shape)
        if (wanted, shape) != (plan.dtype, plan.shape):
            raise Again(name, replace(plan, dtype=wanted, shape=shape, items=max(plan.items, tile.items)))
    elif broadcast(tile.shape, plan.shape) != plan.shape:
        raise Refusal(
            f"{name} with shape {tile.shape} in a loop or branch, and {plan.shape} before it",
            "one shape",
            f"{name} = group.zeros(shape={tile.shape}, dtype=...)",
        )
    weak = is_number(value) and not (isinstance(value, float) and plan.dtype.kind != "float")
    if (
        not plan.weak
        and not weak
        and tile.dtype.kind != "index"
        and ir.promote(plan.dtype, dtype) is not (plan.dtype)
    ):
        raise Refusal(
            f"{name} of type {named(tile.dtype)} in a loop or branch, and {named(plan.dtype)} before it",
            "one type",
            f"{name} = {name}.astype(np.{named(dtype)})",
        )
    return Tile(plan.shape, cast(tile.expr, plan.dtype), tile.mask, items=plan.items)


def masked(
    name: str, held: CarriedName, new: Mask, now: Mask, depth: int, inner: Iterable[ir.Var]
) -> Mask:
    """The mask of a carried name after an assignment; ``now``: before it. ``inner``: the names that differ
    between iterations. Raises Again where the mask has to be carried in another way."""
    if held.on is not None:
        return (held.on,)
    whole = joined(held.first, held.plan.grows)
    if {*new} == {*now} or (depth == held.depth and {*new} == {*whole}):
        return new
    more = tuple(m for m in new if m not in held.first and not isinstance(m, ir.Or))
    changing = {*inner}
    steady = (
        depth == held.depth
        and {*held.first} <= {*new}
        and not any(ir.free_vars(m) & changing for m in more)
    )
    # What one branch adds does not hold in the other.
    grows = steady and not held.branch and not held.plan.grows and more
    if grows and joined(held.first, more) == joined(new):
        raise Again(name, replace(held.plan, grows=more))
    raise Again(name, replace(held.plan, kept=True, grows=()))
