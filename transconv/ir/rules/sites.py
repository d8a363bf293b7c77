"""Every statement of a kernel with the names in scope there, for the rules of rules/verifier.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from transconv.ir import explicit as xp
from transconv.ir import expr as ex
from transconv.ir import stmt as st
from transconv.ir import tensor as ac
from transconv.ir.node import Node
from transconv.ir.tensor import Tensor
from transconv.ir.visit import free_vars, lanes_of

E = TypeVar("E", bound=ex.Expr)


@dataclass(frozen=True, slots=True)
class Site:
    """A statement and the names in scope there."""

    stmt: st.Stmt
    params: frozenset[Tensor] | None  # None outside of a kernel
    scope: dict[Node, st.Stmt]  # what binds each variable, and reserves each ring of shared memory
    lanes: dict[ex.Var, tuple[ex.Lane, ...]]  # of the variables in scope
    around: tuple[st.Stmt, ...]  # the loops and branches around it

    def exprs(self) -> tuple[ex.Expr, ...]:
        """The expressions that the statement evaluates; not the variables that it binds, nor those of
        statements inside it."""
        match self.stmt:
            case st.Let(_, value) | st.Update(_, value):
                return (value,)
            case st.Alloc(init=init):
                return (init,)
            case st.If(cond=cond):
                return (cond,)
            case st.Store(_, offset, value, mask):
                return (offset, value, mask)
            case st.BoxStore(_, corner, within, _, value):
                return (*corner, *within, value)
            case st.For(start=start, until=until):
                return (start,) if until is None else (start, until)
            case xp.Fetch(_, corner, piece, _, slot):
                return (*corner, piece, slot)
            case xp.Put(piece, value):
                return (piece, value)
            case xp.Send(_, corner, piece):
                return (*corner, piece)
            case st.FuncCall(func, args):
                read = args[1:] if func.multiplies else args
                return tuple(a for a in read if isinstance(a, ex.Expr))
        return ()

    def nodes(self) -> list[ex.Expr]:
        """All subexpressions of ``exprs``, each once."""
        return [e for found in self._by_class().values() for e in found]

    def find(self, kind: type[E]) -> list[E]:
        """The subexpressions of ``exprs`` of a class, each once."""
        return [e for cls, found in self._by_class().items() if issubclass(cls, kind) for e in found]

    def has(self, *kinds: type[ex.Expr]) -> bool:
        """Whether ``exprs`` have a subexpression of these classes."""
        return any(issubclass(cls, kinds) for cls in self._by_class())

    def _by_class(self) -> dict[type, list[Any]]:
        """The subexpressions of ``exprs`` by class, parents first. Cached in the statement, because every
        rule needs them after every pass."""
        try:
            return self.stmt._within
        except AttributeError:
            within: dict[type, list[Any]] = {}
            stack: list[Node] = list(reversed(self.exprs()))
            seen: set[Node] = set()
            while stack:
                at = stack.pop()
                if isinstance(at, ex.Expr) and at not in seen:
                    seen.add(at)
                    within.setdefault(type(at), []).append(at)
                    stack.extend(reversed(at.children()))
            object.__setattr__(self.stmt, "_within", within)
            return within

    def tensors(self) -> Iterator[tuple[Node | str, Node]]:
        """The tensors that are accessed, as (the access, tensor)."""
        for e in self.find(ac.MemoryRead):
            yield e, e.tensor
        match self.stmt:
            case st.BoxStore(tensor) | st.Store(tensor):
                yield "the store", tensor
            case xp.Fetch(tensor) | xp.Send(tensor):
                yield "the copy", tensor
            case st.FuncCall(func, (tensor, *_)):
                if func.name in ("atomic_add", "partial"):
                    yield "the addition", tensor

    def accesses(self) -> Iterator[tuple[Node | str, ex.Expr, ex.Expr]]:
        """The accesses to memory, as (the access, offset, mask)."""
        for e in self.find(ac.MemoryRead):
            load = e.as_load() if isinstance(e, ac.BoxLoad) else e
            if isinstance(load, ac.Load):
                yield load, load.offset, load.mask
        match self.stmt:
            case st.BoxStore() as box:
                yield "the store", *ac.box_address(box.tensor, box.corner, box.within)
            case st.Store(_, offset, _, mask):
                yield "the store", offset, mask
            case xp.Fetch(tensor, corner, piece) | xp.Send(tensor, corner, piece):
                yield "the copy", *ac.box_address(tensor, corner, piece.within)
            case st.FuncCall(func, (_, ex.Expr() as offset, _, ex.Expr() as mask, *_)):
                if func.name in ("atomic_add", "partial"):
                    yield "the addition", offset, mask

    def is_of_sizes(self, e: ex.Expr) -> bool:
        """Whether sizes that are arguments are the only variables of an expression."""
        return all(isinstance(self.scope.get(v), st.Kernel) for v in free_vars(e))

    def lanes_of(self, e: ex.Expr) -> set[ex.Lane]:
        return set(lanes_of(e, self.lanes))


def sites(root: st.Stmt) -> Iterator[Site]:
    """Every statement of a tree with its scope, in the order of execution."""
    params = frozenset(root.params) if isinstance(root, st.Kernel) else None
    sizes = root.sizes.each if isinstance(root, st.Kernel) and root.sizes else ()
    yield from _sites(root, Site(root, params, {s.var: root for s in sizes}, {}, ()))


def _sites(s: st.Stmt, block: Site) -> Iterator[Site]:
    """A statement of a block and those inside it. Binding adds to ``scope`` and ``lanes`` in place, so
    each inner block gets copies."""
    params, scope, lanes, around = block.params, block.scope, block.lanes, block.around
    yield Site(s, params, scope, lanes, around)
    match s:
        case st.Seq(stmts):
            for part in stmts:
                yield from _sites(part, block)
        case st.Let(var, value):
            lanes[var] = lanes_of(value, lanes)
            scope[var] = s
        case st.Alloc(var, of):
            lanes[var] = of
            scope[var] = s
        case st.Kernel(body=body):
            yield from _sites(body, block)
        case xp.Shared(what):
            scope[what] = s
        case st.For(var, _, body):
            yield from _sites(body, Site(s, params, {**scope, var: s}, dict(lanes), (*around, s)))
        case xp.Roles(roles):
            for role in roles:
                yield from _sites(role, block)
        case xp.Role(body=body):
            yield from _sites(body, Site(s, params, dict(scope), dict(lanes), (*around, s)))
        case st.If(_, then, other):
            for branch in (then, other):
                if branch is not None:
                    yield from _sites(branch, Site(s, params, dict(scope), dict(lanes), (*around, s)))


def statements(root: st.Stmt) -> Iterator[st.Stmt]:
    """Every statement of a tree, in the order of execution."""
    yield root
    for child in root.children():
        if isinstance(child, st.Stmt):
            yield from statements(child)


def alone(s: st.Stmt) -> Site:
    """A statement with nothing in scope, for rules that do not depend on it."""
    return Site(s, None, {}, {}, ())


def title(s: st.Stmt) -> str:
    """The first line of a statement, or its ``repr`` if it cannot be printed."""
    if isinstance(s, (st.Kernel, st.Seq)):
        return s.name if isinstance(s, st.Kernel) else "sequence"
    try:
        return str(s).split("\n")[0]
    except TypeError:
        return repr(s)
