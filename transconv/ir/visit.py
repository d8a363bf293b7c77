"""Walking and rewriting trees, written once for every node class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from operator import is_
from typing import Any, TypeVar, cast

from transconv.ir.expr import Expr, Lane, Var
from transconv.ir.node import Node, field_values
from transconv.ir.operations import Gather, Reduce, Renamed, Running, Spread
from transconv.ir.stmt import Alloc, For, FuncCall, Let, Seq, Stmt, Update, seq

T = TypeVar("T", bound=Node)
N = TypeVar("N", bound=Node)


def walk(root: Node) -> Iterator[Node]:
    """Every node of a tree, parents first; a node that occurs twice is visited twice."""
    stack = [root]
    while stack:
        at = stack.pop()
        yield at
        stack.extend(reversed(at.children()))


class Visitor:
    """Dispatch on the class of a node: define ``visit_For`` to act on loops.

    A method that wants the children visited as well calls ``self.generic(node)``::

        class LoopCounter(Visitor):
            loops = 0

            def visit_For(self, loop):
                self.loops += 1
                self.generic(loop)      # to count nested loops
    """

    def visit(self, at: Node) -> None:
        """Call the method of the node's class, or ``generic`` if there is none."""
        method = getattr(self, f"visit_{type(at).__name__}", None)
        if method is None:
            self.generic(at)
        else:
            method(at)

    def generic(self, at: Node) -> None:
        """Visit a node's children."""
        for child in at.children():
            self.visit(child)


class Mutator:
    """Rebuild a tree bottom-up: ``mutate_X`` returns what a node of class X becomes.

    A node under which nothing changed is returned as it is. A method that returns None removes the
    statement; one that returns a ``Seq`` splices it into the surrounding sequence."""

    def mutate(self, at: Node) -> Any:
        """The result of the method of the node's class, or of ``generic`` if there is none."""
        method = getattr(self, f"mutate_{type(at).__name__}", None)
        return self.generic(at) if method is None else method(at)

    def mutate_Tensor(self, at: Node) -> Any:
        """A tensor is not rebuilt: its extents are part of its type."""
        return at

    def mutate_Sizes(self, at: Node) -> Any:
        """Requirements of sizes are not rebuilt."""
        return at

    def rebuilt(self, root: T) -> T:
        """What becomes of a root whose class stays, as that of a kernel does."""
        made = self.mutate(root)
        assert isinstance(made, type(root))
        return made

    def generic(self, at: N) -> N:
        """The node with mutated children; the node itself if none changed. A ``Seq`` of one statement is
        that statement."""
        if isinstance(at, Seq):
            parts = [self.mutate(s) for s in at.stmts]
            return at if all(map(is_, parts, at.stmts)) else cast(N, seq(*parts))
        if not at.children():
            return at
        changed, values = False, []
        for old in field_values(at):
            new = old
            if isinstance(old, Node):
                new = self.mutate(old)
                if new is None and isinstance(old, Stmt):
                    new = Seq(())
            elif isinstance(old, tuple) and old:
                new = tuple(self.mutate(v) if isinstance(v, Node) else v for v in old)
                new = old if all(map(is_, new, old)) else new
            changed |= new is not old
            values.append(new)
        return type(at)(*values) if changed else at


class ExprMutator(Mutator):
    """A mutator that caches the result of each expression, so that shared parts are rewritten once."""

    def __init__(self) -> None:
        self.done: dict[Node, Any] = {}

    def mutate(self, at: Node) -> Any:
        if not isinstance(at, Expr):
            return super().mutate(at)
        found = self.done.get(at)
        if found is None:
            found = self.done[at] = super().mutate(at)
        return found


class _Substitute(ExprMutator):
    def __init__(self, values: Mapping[Any, Expr]) -> None:
        super().__init__()
        self.done.update(values)
        self.lacks = frozenset(values).isdisjoint if all(isinstance(v, Var) for v in values) else None

    def mutate(self, at: Node) -> Any:
        """An expression without the variables stays as it is."""
        stays = self.lacks and isinstance(at, Expr) and self.lacks(free_vars(at))
        return at if stays else super().mutate(at)

    def mutate_Alloc(self, at: Alloc) -> Stmt:
        """The lanes of a tile are part of its type and are not replaced."""
        return Alloc(self.mutate(at.var), at.lanes, self.mutate(at.init), at.scope)

    def mutate_Reduce(self, at: Reduce) -> Expr:
        return Reduce(at.op, self.mutate(at.x), at.lane)

    def mutate_Running(self, at: Running) -> Expr:
        return Running(at.op, self.mutate(at.x), at.lane)

    def mutate_Gather(self, at: Gather) -> Expr:
        return Gather(self.mutate(at.x), at.lanes, tuple(map(self.mutate, at.places)))

    def mutate_Spread(self, at: Spread) -> Expr:
        return Spread(self.mutate(at.x), at.lanes)

    def mutate_Renamed(self, at: Renamed) -> Expr:
        return Renamed(self.mutate(at.x), at.old, at.new)


def substitute(root: T, values: Mapping[Any, Expr]) -> T:
    """Replace expressions (usually variables) by others throughout a tree."""
    return _Substitute(values).mutate(root) if values else root


def rewrite(root: T, rule: Callable[[Expr], Expr]) -> T:
    """Apply ``rule`` to every expression of a tree, children first."""
    return cast(T, _Rewrite(rule).mutate(root))


class _Rewrite(ExprMutator):
    def __init__(self, rule: Callable[[Expr], Expr]) -> None:
        super().__init__()
        self.rule = rule

    def generic(self, at: N) -> N:
        made = super().generic(at)
        return cast(N, self.rule(made)) if isinstance(made, Expr) else made


def find(root: Node, kind: type[T]) -> list[T]:
    """All nodes of a class, in order, without repeats."""
    nodes, within = _nodes(root)
    own = [found for cls, found in within.items() if issubclass(cls, kind)]
    return [n for n in nodes if isinstance(n, kind)] if len(own) > 1 else list(*own)


@lru_cache(maxsize=64)  # an emitter asks for many classes of one kernel's nodes
def _nodes(root: Node) -> tuple[tuple[Node, ...], dict[type, list[Any]]]:
    """All nodes in order, each once, and those of each class."""
    seen: dict[Node, None] = {}
    stack = [root]
    while stack:
        if (at := stack.pop()) not in seen:
            seen[at] = None
            stack.extend(reversed(at.children()))
    within: dict[type, list[Any]] = {}
    for n in seen:
        within.setdefault(type(n), []).append(n)
    return tuple(seen), within


def free_vars(e: Node) -> frozenset[Var]:
    """The variables that an expression mentions."""
    try:
        return e._free_vars
    except AttributeError:
        found = frozenset((e,)) if isinstance(e, Var) else _NONE.union(*map(free_vars, e.children()))
        object.__setattr__(e, "_free_vars", found)
        return found


_NONE: frozenset[Var] = frozenset()


def lanes_of(e: Expr, scope: Mapping[Var, tuple[Lane, ...]] | None = None) -> tuple[Lane, ...]:
    """The lanes of a tile expression, in the order of its dimensions.

    ``scope`` gives the lanes of variables; a variable that is not in it is a scalar."""
    found = _own_lanes(e)
    if found is None:
        found = _lanes_below_reductions(e, scope or {})
    elif scope:
        found = found.union(*[scope[v] for v in free_vars(e) if v in scope])
    return tuple(sorted(found, key=lambda x: (x.axis, x.name))) if len(found) > 1 else tuple(found)


def _own_lanes(e: Node) -> frozenset[Lane] | None:
    """The lanes that an expression mentions; None if it has a Reduce, a Renamed or a Gather, whose
    result has other lanes than what is inside."""
    try:
        return e._own_lanes
    except AttributeError:
        found: frozenset[Lane] | None
        if isinstance(e, (Reduce, Renamed, Gather)):
            found = None
        elif isinstance(e, Lane):
            found = frozenset((e,))
        else:
            parts = [_own_lanes(c) for c in e.children() if isinstance(c, Expr)]
            known = [p for p in parts if p is not None]
            found = _NO_LANES.union(*known) if len(known) == len(parts) else None
        object.__setattr__(e, "_own_lanes", found)
        return found


_NO_LANES: frozenset[Lane] = frozenset()


def _lanes_below_reductions(e: Node, scope: Mapping[Var, tuple[Lane, ...]]) -> frozenset[Lane]:
    if isinstance(e, Reduce):
        return frozenset(lanes_of(e.x, scope)) - {e.lane}
    if isinstance(e, Renamed):
        return frozenset(map(e.of, lanes_of(e.x, scope)))
    if isinstance(e, Gather):
        kept = frozenset(lanes_of(e.x, scope)).difference(e.lanes)
        return kept.union(*[lanes_of(at, scope) for at in e.places])
    return _NO_LANES.union(*[lanes_of(c, scope) for c in e.children() if isinstance(c, Expr)])


def bound_vars(root: Node) -> list[Var]:
    """The variables that the lets, allocations and loops of a tree bind, in order."""
    return [n.var for n in walk(root) if isinstance(n, (Let, Alloc, For))]


def updated(root: Stmt) -> frozenset[Var]:
    """The variables that a tree assigns or adds products to: what mentions one has another value then."""
    found: set[Var] = set()
    stack: list[Stmt] = [root]
    while stack:
        at = stack.pop()
        if isinstance(at, Update):
            found.add(at.var)
        elif isinstance(at, FuncCall) and at.func.multiplies and isinstance(at.args[0], Var):
            found.add(at.args[0])
        stack += [c for c in at.children() if isinstance(c, Stmt)]
    return frozenset(found)
