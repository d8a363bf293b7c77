"""Loops and branches: those that Python decides are written out, the others run at run time."""

from __future__ import annotations

import ast
from typing import Any

from transconv.ir import (
    FALSE,
    ONE,
    TRUE,
    ZERO,
    Const,
    Expr,
    For,
    If,
    Min,
    Not,
    Reduce,
    Stmt,
    Var,
    conjuncts,
    eq,
    free_vars,
    i32,
    index,
    lanes_of,
    seq,
)
from transconv.kernel.frontend.calls import is_static
from transconv.kernel.frontend.carried_names import Carrying, ended
from transconv.kernel.frontend.loop_carried import afterwards, at_iteration
from transconv.kernel.functions import cast
from transconv.kernel.refusals import Refusal, spelled
from transconv.kernel.tiles.elementwise import position
from transconv.kernel.tiles.lanes import ends, lanes_along
from transconv.kernel.tiles.masks import joined
from transconv.kernel.tiles.values import Tile, described, tile_of
from transconv.simplify import range_of, simplify

FARTHEST = 2**31 - 1
LONGEST = 256  # iterations that are written out


class Blocks(Carrying):
    """Reads loops and branches."""

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
            raise Refusal(f"a loop over {len(items)} items, which is written out",
                          f"up to {LONGEST}, range")
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
        if isinstance(trips, Const) and int(trips.value) <= 0:
            self.gone |= {n: ended("a loop without an iteration") for n in [name] if n not in self.env}
            return
        self.with_carried(s.body, lambda: self.loop(s, name, first, last, step, trips))

    def counted_by_each(self, s: ast.For, name: str, start: Tile, stop: Tile, step: int) -> None:
        """A loop whose bounds differ between items: it is as long as the longest one, and its lines are
        under a condition."""
        for bound in (start, stop):
            if bound.own or not bound.dtype.is_integer:
                raise Refusal(f"{bound} as a bound", "a whole number")
        first, last = (cast(bound.expr, index) for bound in (start, stop))
        where = joined(start.mask, stop.mask, self.within.within, ends(self.items_shape))
        trips = self.b.let("trips", self.b.where(where, _trips(first, last, step), ZERO))
        most: Expr = cast(trips, i32)
        for lane in self.b.scope[trips]:
            most = Reduce("max", most, lane)
        longest = cast(self.b.let("longest", most), index)
        self.with_carried(s.body, lambda: self.loop(s, name, first, last, step, longest, trips))

    def loop(self, s: ast.For, name: str, first: Expr, last: Expr, step: int, trips: Expr,
             each: Expr | None = None) -> None:
        """``each``: the iterations of each item, where these differ."""
        plain = step == 1 and isinstance(first, Const) and first.value >= 0 and isinstance(trips, Const)
        var = Var(self.b.fresh(name if plain else f"{name}_step"))
        known = range_of(trips, self.b.facts)
        most = FARTHEST if known.hi is None else max(0, int(known.hi))
        begin = first if plain else ZERO
        low = int(begin.value) if isinstance(begin, Const) else 0
        with self.inner(f"the loop over {name}") as inner:
            self.b.facts = self.b.facts.with_range(var, low, max(low, low + most - 1))
            if not isinstance(trips, Const):
                self.assume(var < trips)
            self.counters.append(var)
            here = {n: at_iteration(c, eq(var, begin)) for n, c in self.carried.items()
                    if c.depth == self.depth}
            for n, mask in here.items():
                self.env[n] = self.carried[n].now(mask)
            counter: Expr = var if plain else first + (var if step == 1 else var * step)
            if not isinstance(trips, Const) and abs(step) != 1 and self.b.is_of_sizes(Tile((), last)):
                self.b.facts = self.b.facts.assume(counter < last if step > 0 else counter > last)
            if step > 0 and isinstance(last, Min):  # below the least of two is below both
                self.assume(counter < last.a)
                self.assume(counter < last.b)
            found = lanes_of(counter, self.b.scope)
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
        until = None if isinstance(trips, Const) else trips
        self.b.add(For(var, low + most, seq(*inner), start=begin, until=until))
        never = None if known.lo is not None and known.lo > 0 else trips < ONE
        for n, held in self.carried.items():
            if held.depth == self.depth + 1:
                mask = self.b.proved(afterwards(held, never))
                self.env[n] = held.now(mask)

    def assume(self, fact: Expr) -> None:
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
        if isinstance(condition, Const):
            self.run(s.body if condition.value else s.orelse)
            return
        self.with_carried([*s.body, *s.orelse], lambda: self.branches(s, condition),
                          True)

    def masked_branches(self, s: ast.If, test: Tile) -> None:
        """A branch of each work-item: its statements are executed under a mask, if it is ever taken."""
        expr = self.b.let("condition", test.expr) if self.b.changes(test.expr) else test.expr
        for body, holds in ((s.body, expr), (s.orelse, Not(expr))):
            decided = simplify(holds, self.b.facts)
            if decided is FALSE:
                continue
            holds = TRUE if decided is TRUE else holds
            parts = [*test.mask, *conjuncts(holds)]
            with self.within.holding([p for p in parts if p not in self.within.within]):
                self.run(body)

    def branches(self, s: ast.If, condition: Expr) -> None:
        made: list[Stmt | None] = []
        for body, holds in ((s.body, condition), (s.orelse, Not(condition))):
            with self.inner("a branch") as inner:
                if condition.dtype.kind == "bool" and all(v.dtype.kind == "index"
                                                          for v in free_vars(condition)):
                    self.b.facts = self.b.facts.assume(holds)
                self.run(body)
            made.append(seq(*inner) if body else None)
        then, other = made
        assert then is not None
        self.b.add(If(condition, then, other))

def _trips(first: Expr, last: Expr, step: int) -> Expr:
    distance = last - first if step > 0 else first - last
    size = abs(step)
    return distance if size == 1 else (distance + (size - 1)) // size
