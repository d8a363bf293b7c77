"""Names that a block at run time changes: how they are carried through it, and what holds behind it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transconv.ir import Stmt, Var, bound_vars, free_vars
from transconv.kernel.frontend.expressions import ExpressionEvaluator
from transconv.kernel.frontend.loop_carried import (
    Again,
    CarriedName,
    CarryPlan,
    assigned_names,
    begun,
    fitted,
    masked,
    plan_of,
)
from transconv.kernel.refusals import Refusal
from transconv.kernel.tiles.masks import whole
from transconv.kernel.tiles.values import Mask, Tile, described

ATTEMPTS = 16


class Carrying(ExpressionEvaluator):
    """``carried``: names that change at run time; ``fixed``: those that may not change in this block;
    ``depth``: how many run-time blocks are around; ``counters``: what differs between iterations."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.carried: dict[str, CarriedName] = {}
        self.fixed: set[str] = set()
        self.depth = 0
        self.counters: list[Var] = []
        self.calls: list[Any] = []  # the functions that are being read, from the kernel inwards
        self.base = 0  # the depth at which the current one began
        self.returns = False  # whether the current function has a result
        self.entered: list[set[str]] = []  # the names before each block at run time of this function
        self.given: set[str] = set()  # parameters that are still what the caller gave
        self.written: set[str] = set()  # those of which elements were written
        self.also: dict[str, str] = {}  # of names that are carried, another name of the same tile
        self.elements: set[str] = set()  # names of which elements were written

    def run(self, body: Sequence[ast.stmt]) -> None:
        """Read statements."""
        raise NotImplementedError

    def bind(self, target: ast.expr, value: Any) -> None:
        """``target = value``"""
        raise NotImplementedError

    @contextmanager
    def inner(self, what: str) -> Iterator[list[Stmt]]:
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

    def with_carried(self, body: Sequence[ast.stmt], read: Callable[[], None],
                     branch: bool = False) -> None:
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
            plan = replace(plan, shape=(*self.items_shape, *plan.shape[plan.items:]))
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

    def rebind(self, name: str, value: Tile) -> None:
        """Bind a name again, because elements of its tile were written."""
        raise NotImplementedError

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
        inside = [v for s in self.b.stmts for v in bound_vars(s)]
        inner = [*self.counters, *inside, *(c.on for c in self.carried.values() if c.on is not None)]
        return masked(name, held, new, now, self.depth, inner)

    def detach(self, name: str, held: CarriedName) -> None:
        """Give names to the values that mention a carried name, before it changes."""
        for other, value in self.env.items():
            if other != name and isinstance(value, Tile) and held.var in free_vars(value.expr):
                kept = self.b.let(other, value.expr)
                self.env[other] = replace(value, expr=kept)


def ended(block: str) -> str:
    """Why a name has no value behind a block."""
    return f"which is bound inside of {block} alone"
