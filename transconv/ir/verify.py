"""Well-formedness of IR: named rules that hold between passes, each with a reason when it does not.

A rule is a generator function over one statement and what is in sight there. To add one, write the
function and put it in ``RULES``; its name, with dashes, is how errors call it.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from transconv.ir import explicit as xp
from transconv.ir import expr as ex
from transconv.ir import stmt as st
from transconv.ir.dtype import boolean
from transconv.ir.evaluate import CALLS
from transconv.ir.func import FUNCS
from transconv.ir.node import Node
from transconv.ir.tensor import Tensor
from transconv.ir.visit import lanes_of

KINDS = ("parallel", "grid", "tile", "serial", "unroll", "jam", "dealt")


class VerifyError(RuntimeError):
    """Every rule that a tree breaks, where, and why. ``rules`` holds their names."""

    def __init__(self, breaches: list[tuple[str, st.Stmt, str]]) -> None:
        self.breaches = tuple(breaches)
        self.rules = frozenset(rule for rule, _, _ in breaches)
        lines = [f"  {rule}: `{_title(s)}`: {reason}" for rule, s, reason in breaches]
        super().__init__("\n".join([f"{len(lines)} broken rules of the IR", *lines]))


def _title(s: st.Stmt) -> str:
    """The first line of a statement; also of one that cannot be printed."""
    if isinstance(s, (st.Kernel, st.Seq)):
        return s.name if isinstance(s, st.Kernel) else "sequence"
    try:
        return str(s).split("\n")[0]
    except TypeError:
        return repr(s)


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
                read = args[1:] if func.name in ("dot", "dot_async") else args
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
                stack.extend(reversed(list(at.children())))

    def accesses(self) -> Iterator[tuple[str, Node, ex.Expr, ex.Expr]]:
        """What reaches memory: (the text of who does, tensor, offset, mask)."""
        for e in self.nodes():
            if isinstance(e, ex.BoxLoad):
                e = e.as_load()
            if isinstance(e, ex.Load):
                yield str(e), e.tensor, e.offset, e.mask
        match self.stmt:
            case st.BoxStore() as box:
                yield "the store", box.tensor, *ex.box_address(box.tensor, box.corner, box.within)
            case st.Store(tensor, offset, _, mask):
                yield "the store", tensor, offset, mask
            case xp.Fetch(tensor, corner, piece) | xp.Send(tensor, corner, piece):
                yield "the copy", tensor, *ex.box_address(tensor, corner, piece.within)
            case st.FuncCall(func, (tensor, ex.Expr() as offset, _, ex.Expr() as mask)):
                if func.name == "atomic_add":
                    yield "the addition", tensor, offset, mask

    def lanes_of(self, e: ex.Expr) -> set[ex.Lane]:
        return set(lanes_of(e, self.lanes))


def sites(root: st.Stmt) -> Iterator[Site]:
    """Every statement of a tree with its scope, in the order of execution."""
    params = frozenset(root.params) if isinstance(root, st.Kernel) else None
    yield from _sites(Site(root, params, {}, {}, ()))


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


# ---- the rules ----

def expression_holds_no_statement(site: Site) -> Iterator[str]:
    """An expression is pure: it computes a value and does nothing."""
    for e in site.nodes():
        for child in e.children():
            if isinstance(child, st.Stmt):
                yield f"a {type(child).__name__} inside an expression ({type(e).__name__})"


def var_bound_before_use(site: Site) -> Iterator[str]:
    for e in site.nodes():
        if isinstance(e, ex.Var) and e not in site.scope:
            twin = next((v for v in site.scope if isinstance(v, ex.Var) and v.name == e.name), None)
            yield (f"{e.name} is not bound here" if twin is None else
                   f"{e.name} is used as {e.type} and bound as {twin.type}")


def var_bound_once(site: Site) -> Iterator[str]:
    """Names are not hidden by others; siblings in different branches or loops may share one."""
    if isinstance(site.stmt, (st.Let, st.Alloc, st.For)):
        name = site.stmt.var.name
        for var, by in site.scope.items():
            if isinstance(var, ex.Var) and var.name == name:
                yield f"{name} is already bound by `{_title(by)}`"


def update_only_allocated(site: Site) -> Iterator[str]:
    match site.stmt:
        case st.Update(var, _):
            pass
        case st.FuncCall(func, (ex.Var() as var, *_)) if func.name in ("dot", "dot_async"):
            pass
        case _:
            return
    if not isinstance(site.scope.get(var), st.Alloc):
        yield f"{var.name} is not allocated here, so it cannot change"


def load_only_in_let(site: Site) -> Iterator[str]:
    """A Load is the value of a Let, possibly within casts and selects."""
    def misplaced(e: Node, allowed: bool) -> Iterator[ex.Load]:
        if not allowed:
            if e in seen:
                return
            seen.add(e)
        match e:
            case ex.Load() if not allowed:
                yield e
            case ex.Cast(x):
                yield from misplaced(x, allowed)
            case ex.Select(cond, yes, no):
                yield from misplaced(cond, False)
                yield from misplaced(yes, allowed)
                yield from misplaced(no, allowed)
            case _:
                for child in e.children():
                    yield from misplaced(child, False)

    seen: set[Node] = set()
    for root in site.exprs():
        for load in misplaced(root, isinstance(site.stmt, st.Let)):
            yield f"{load} is inside a larger expression; bind it by a let first"


def mask_is_boolean(site: Site) -> Iterator[str]:
    """Also the conditions of branches, selects and assumptions."""
    conds = [mask for _, _, _, mask in site.accesses()]
    conds += [e.cond for e in site.nodes() if isinstance(e, ex.Select)]
    match site.stmt:
        case st.If(cond=cond):
            conds.append(cond)
        case st.FuncCall(func, (ex.Expr() as cond,)) if func.name == "assume":
            conds.append(cond)
    for cond in conds:
        if cond.dtype is not boolean:
            yield f"the condition `{cond}` is {cond.dtype}"


def offset_is_integer(site: Site) -> Iterator[str]:
    for who, _, offset, _ in site.accesses():
        if offset.dtype.kind != "int":
            yield f"{who} has the offset `{offset}` of type {offset.dtype}"


def tensor_is_parameter(site: Site) -> Iterator[str]:
    for who, tensor, _, _ in site.accesses():
        if isinstance(tensor, Tensor) and site.params is not None and tensor not in site.params:
            same = any(p.name == tensor.name for p in site.params)
            yield (f"{who} reaches {tensor.name}, which is "
                   + ("another tensor than the parameter of that name" if same
                      else "no parameter of the kernel"))


def known_function(site: Site) -> Iterator[str]:
    """Functions exist and get as many arguments as they take, of the right kind."""
    for e in site.nodes():
        if isinstance(e, ex.Call):
            count = CALLS[e.name][0] if e.name in CALLS else None
            if count is None:
                yield f"no function {e.name} is known"
            elif count != len(e.args):
                yield f"{e.name} takes {count} arguments, not {len(e.args)}"
        elif isinstance(e, ex.Reduce) and e.op not in ("sum", "max"):
            yield f"no reduction {e.op} is known"
    if not isinstance(site.stmt, st.FuncCall):
        return
    name, args = site.stmt.func.name, site.stmt.args
    if name not in FUNCS:
        yield f"no function {name} is known"
    elif len(args) != len(FUNCS[name].params):
        yield f"{name} takes {len(FUNCS[name].params)} arguments, not {len(args)}"
    else:
        for param, arg in zip(FUNCS[name].params, args, strict=True):
            kind = {"tensor": Tensor, "acc": ex.Var, "barrier": xp.Barrier}.get(param, ex.Expr)
            if not isinstance(arg, kind):
                yield f"{param} of {name} is a {type(arg).__name__}, not a {kind.__name__}"


def lanes_agree(site: Site) -> Iterator[str]:
    """What is stored or assigned can be broadcast to where it goes."""
    def beyond(what: str, e: ex.Expr, target: str, of: set[ex.Lane]) -> Iterator[str]:
        if extra := site.lanes_of(e) - of:
            yield f"{what} has the lanes {_names(extra)}, which {target} lacks"

    match site.stmt:
        case st.Store(_, offset, value, mask):
            yield from beyond("the value", value, "the offset", site.lanes_of(offset))
            yield from beyond("the mask", mask, "the offset", site.lanes_of(offset))
        case st.Alloc(var, lanes, init):
            yield from beyond("the initial value", init, var.name, set(lanes))
        case st.Update(var, value):
            yield from beyond("the value", value, var.name, set(site.lanes.get(var, ())))
        case st.FuncCall(func, (_, ex.Expr() as offset, ex.Expr() as value, ex.Expr() as mask)):
            if func.name == "atomic_add":
                yield from beyond("the value", value, "the offset", site.lanes_of(offset))
                yield from beyond("the mask", mask, "the offset", site.lanes_of(offset))
        case st.FuncCall(func, (ex.Var() as acc, ex.Expr() as a, ex.Expr() as b)):
            if func.name in ("dot", "dot_async"):
                has, left, right = map(site.lanes_of, (acc, a, b))
                if not (left & right) - has:
                    yield "a and b share no lane to sum over"
                if lone := (left ^ right) - has:
                    yield f"only one of a and b has the lanes {_names(lone)}, and acc lacks them"


def lane_is_power_of_two(site: Site) -> Iterator[str]:
    lanes = [e for e in site.nodes() if isinstance(e, ex.Lane)]
    if isinstance(site.stmt, st.Alloc):
        lanes += site.stmt.lanes
    for lane in dict.fromkeys(lanes):
        if lane.extent < 1 or lane.extent & (lane.extent - 1):
            yield f"the lane {lane.name} has {lane.extent} elements"


def loop_is_simple(site: Site) -> Iterator[str]:
    if not isinstance(site.stmt, st.For):
        return
    loop = site.stmt
    if type(loop.stop) is not int or loop.stop < 0:
        yield f"the end {loop.stop!r} is not a count"
    if loop.until is not None and loop.kind != "serial":
        yield f"a {loop.kind} loop cannot end earlier than it says"
    if loop.kind not in KINDS:
        yield f"the kind {loop.kind!r} is none of {', '.join(KINDS)}"
    if loop.var.type.kind != "int":
        yield f"{loop.var.name} is {loop.var.type}, a loop counts in integers"
    if type(loop.stages) is not int or loop.stages < 0:
        yield f"stages={loop.stages!r} is not a count"


def one_grid(site: Site) -> Iterator[str]:
    """A kernel is one launch: at most one grid loop, with everything it needs inside it."""
    if isinstance(site.stmt, st.For) and site.stmt.kind == "grid" and site.around:
        yield f"a grid loop inside `{_title(site.around[-1])}`"
    if isinstance(site.stmt, st.Seq) and not site.around:
        grids = [s for s in site.stmt.stmts if isinstance(s, st.For) and s.kind == "grid"]
        if len(grids) > 1:
            yield f"{len(grids)} grid loops"


def names_are_identifiers(site: Site) -> Iterator[str]:
    """Names are printed into Python as they are."""
    names: list[str] = [e.name for e in site.nodes() if isinstance(e, ex.Lane)]
    match site.stmt:
        case st.Kernel(name, params):
            names += [name, *(p.name for p in params)]
        case st.Alloc(var, lanes):
            names += [var.name, *(lane.name for lane in lanes)]
        case st.Let(var) | st.For(var):
            names.append(var.name)
    for name in dict.fromkeys(names):
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", name) or keyword.iskeyword(name):
            yield f"{name!r} is not a name of at most 64 letters, digits and underscores"


def ring_is_reserved(site: Site) -> Iterator[str]:
    """Rings of shared memory and of barriers are reserved before they are used, outside of roles."""
    used: list[Node] = [e.buffer for e in site.nodes() if isinstance(e, xp.Piece)]
    match site.stmt:
        case xp.Fetch(barrier=barrier):
            used.append(barrier)
        case st.FuncCall(_, args):
            used += [a for a in args if isinstance(a, xp.Barrier)]
        case xp.Shared(what) if any(isinstance(s, xp.Role) for s in site.around):
            yield f"{what.name} is reserved inside of a role"
    for ring in dict.fromkeys(used):
        if ring not in site.scope:
            assert isinstance(ring, (xp.Barrier, xp.Buffer))
            yield f"{ring.name} is not reserved here"


def piece_fits_its_box(site: Site) -> Iterator[str]:
    """A piece and a corner have one expression per dimension of the box."""
    for e in site.nodes():
        if isinstance(e, xp.Piece) and len(e.within) != len(e.buffer.extents):
            yield f"{e} has {len(e.within)} dimensions, a box of it {len(e.buffer.extents)}"
    match site.stmt:
        case xp.Fetch(tensor, corner, piece) | xp.Send(tensor, corner, piece):
            if not len(corner) == len(tensor.shape) == len(piece.within):
                yield f"the corner has {len(corner)} dimensions, {tensor.name} {len(tensor.shape)}"


def _names(lanes: set[ex.Lane]) -> str:
    return ", ".join(sorted(lane.name for lane in lanes))


Rule = Callable[[Site], Iterator[str]]

RULES: tuple[Rule, ...] = (
    var_bound_before_use, var_bound_once, update_only_allocated, mask_is_boolean,
    offset_is_integer, tensor_is_parameter, known_function, lanes_agree, lane_is_power_of_two,
    loop_is_simple, one_grid, names_are_identifiers, ring_is_reserved, piece_fits_its_box,
)


def verify(root: st.Stmt, loads_in_lets: bool = False) -> None:
    """Raise VerifyError with all rules that a tree breaks. ``loads_in_lets`` adds the rule that a
    Load is only the value of a Let, which the stages from lanes onwards keep."""
    rules = (*RULES, load_only_in_let) if loads_in_lets else RULES
    # What is no expression has no type and no text, so the other rules could not even be asked.
    breaches = list(_breaches(root, (expression_holds_no_statement,)))
    breaches = breaches or list(_breaches(root, rules))
    if breaches:
        raise VerifyError(breaches)


def _breaches(root: st.Stmt, rules: tuple[Rule, ...]) -> Iterator[tuple[str, st.Stmt, str]]:
    for site in sites(root):
        for rule in rules:
            for reason in rule(site):
                yield rule.__name__.replace("_", "-"), site.stmt, reason
