"""Every statement of a kernel with the names in scope there, for the rules of verify.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from transconv.ir import access as ac
from transconv.ir import explicit as xp
from transconv.ir import expr as ex
from transconv.ir import stmt as st
from transconv.ir.node import Node
from transconv.ir.tensor import Tensor
from transconv.ir.visit import free_vars, lanes_of


@dataclass(frozen=True, slots=True)
class Site:
    """A statement and what is in sight there."""

    stmt: st.Stmt
    params: frozenset[Tensor] | None  # None outside of a kernel
    scope: dict[Node, st.Stmt]  # what binds each variable, and reserves each ring of shared memory
    lanes: dict[ex.Var, tuple[ex.Lane, ...]]  # of the variables in scope
    around: tuple[st.Stmt, ...]  # the loops and branches around it

    def exprs(self) -> tuple[ex.Expr, ...]:
        """The expressions whose value the statement needs; not the variables that it binds."""
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

    def nodes(self) -> Iterator[ex.Expr]:
        """All expressions within, parents first, each once."""
        stack: list[Node] = list(reversed(self.exprs()))
        seen: set[Node] = set()
        while stack:
            at = stack.pop()
            if isinstance(at, ex.Expr) and at not in seen:
                seen.add(at)
                yield at
                stack.extend(reversed(at.children()))

    def accesses(self) -> Iterator[tuple[str, Node, ex.Expr, ex.Expr]]:
        """What reaches memory: (the text of who does, tensor, offset, mask)."""
        for e in self.nodes():
            if isinstance(e, ac.BoxLoad):
                e = e.as_load()
            if isinstance(e, ac.Load):
                yield str(e), e.tensor, e.offset, e.mask
        match self.stmt:
            case st.BoxStore() as box:
                yield "the store", box.tensor, *ac.box_address(box.tensor, box.corner, box.within)
            case st.Store(tensor, offset, _, mask):
                yield "the store", tensor, offset, mask
            case xp.Fetch(tensor, corner, piece) | xp.Send(tensor, corner, piece):
                yield "the copy", tensor, *ac.box_address(tensor, corner, piece.within)
            case st.FuncCall(func, (tensor, ex.Expr() as offset, _, ex.Expr() as mask)):
                if func.name == "atomic_add":
                    yield "the addition", tensor, offset, mask

    def is_of_sizes(self, e: ex.Expr) -> bool:
        """Whether an expression mentions sizes that are arguments alone."""
        return all(isinstance(self.scope.get(v), st.Kernel) for v in free_vars(e))

    def lanes_of(self, e: ex.Expr) -> set[ex.Lane]:
        return set(lanes_of(e, self.lanes))


def sites(root: st.Stmt) -> Iterator[Site]:
    """Every statement of a tree with its scope, in the order of execution."""
    params = frozenset(root.params) if isinstance(root, st.Kernel) else None
    sizes = root.sizes.each if isinstance(root, st.Kernel) and root.sizes else ()
    scope: dict[Node, st.Stmt] = {s.var: root for s in sizes}
    yield from _sites(Site(root, params, scope, {}, ()))


def _sites(site: Site) -> Iterator[Site]:
    """A statement and those inside it. Binding adds to ``scope`` and ``lanes`` in place: whoever
    opens a block gives it copies."""
    s = site.stmt
    yield site
    match s:
        case st.Seq(stmts):
            for part in stmts:
                yield from _sites(replace(site, stmt=part))
        case st.Let(var, value):
            site.lanes[var] = lanes_of(value, site.lanes)
            site.scope[var] = s
        case st.Alloc(var, lanes):
            site.lanes[var] = lanes
            site.scope[var] = s
        case st.Kernel(body=body):
            yield from _sites(replace(site, stmt=body))
        case xp.Shared(what):
            site.scope[what] = s
        case st.For(var, _, body):
            yield from _block(site, body, {**site.scope, var: s})
        case xp.Roles(roles):
            for role in roles:
                yield from _sites(replace(site, stmt=role))
        case xp.Role(body=body):
            yield from _block(site, body, dict(site.scope))
        case st.If(_, then, other):
            for branch in (then, other):
                if branch is not None:
                    yield from _block(site, branch, dict(site.scope))


def _block(site: Site, body: st.Stmt, scope: dict[Node, st.Stmt]) -> Iterator[Site]:
    around = (*site.around, site.stmt)
    return _sites(replace(site, stmt=body, scope=scope, lanes=dict(site.lanes), around=around))


def title(s: st.Stmt) -> str:
    """The first line of a statement; also of one that cannot be printed."""
    if isinstance(s, (st.Kernel, st.Seq)):
        return s.name if isinstance(s, st.Kernel) else "sequence"
    try:
        return str(s).split("\n")[0]
    except TypeError:
        return repr(s)
