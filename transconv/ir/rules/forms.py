"""Well-formedness of nodes: types, lanes, the arguments of functions, the form of loops and of boxes.

Each rule has the signature ``verify.Rule``: of a ``Site``, a statement with the names in scope there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from transconv.ir import expr as ex
from transconv.ir import stmt as st
from transconv.ir import tensor as ac
from transconv.ir.dtype import DType, boolean
from transconv.ir.functions.calls import CALLS, REDUCERS
from transconv.ir.functions.rounding import is_held
from transconv.ir.node import Node
from transconv.ir.operations import Call, Cast, Gather, Reduce, Renamed, Running, Select
from transconv.ir.stmt import FUNCS
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
            case st.Fetch(_, corner, piece, _, slot):
                return (*corner, piece, slot)
            case st.Put(piece, value):
                return (piece, value)
            case st.Send(_, corner, piece):
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
        within = self._by_class()
        if not kind.__subclasses__():
            return within.get(kind, [])
        return [e for cls, found in within.items() if issubclass(cls, kind) for e in found]

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
            case st.Fetch(tensor) | st.Send(tensor):
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
            case st.Fetch(tensor, corner, piece) | st.Send(tensor, corner, piece):
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
        case st.Shared(what):
            scope[what] = s
        case st.For(var, _, body):
            yield from _sites(body, Site(s, params, {**scope, var: s}, dict(lanes), (*around, s)))
        case st.Roles(roles):
            for role in roles:
                yield from _sites(role, block)
        case st.Role(body=body):
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


def expression_holds_no_statement(site: Site) -> Iterator[str]:
    """An expression is pure: it computes a value and has no effect."""
    for e in site.nodes():
        for child in e.children():
            if isinstance(child, st.Stmt):
                yield f"a {type(child).__name__} inside an expression ({type(e).__name__})"


def load_only_in_let(site: Site) -> Iterator[str]:
    """A Load is the value of a Let, possibly within casts and selects."""

    def misplaced(e: Node, allowed: bool) -> Iterator[ac.Load]:
        if not allowed:
            if e in seen:
                return
            seen.add(e)
        match e:
            case ac.Load() if not allowed:
                yield e
            case Cast(x):
                yield from misplaced(x, allowed)
            case Select(cond, yes, no):
                yield from misplaced(cond, False)
                yield from misplaced(yes, allowed)
                yield from misplaced(no, allowed)
            case _:
                for child in e.children():
                    yield from misplaced(child, False)

    seen: set[Node] = set()
    for root in site.exprs() if site.has(ac.Load) else ():
        for load in misplaced(root, isinstance(site.stmt, st.Let)):
            yield f"{load} is inside a larger expression; bind it by a let first"


def mask_is_boolean(site: Site) -> Iterator[str]:
    """Masks, and the conditions of branches, selects and assumptions, are boolean."""
    conds = [mask for _, _, mask in site.accesses()]
    conds += [e.cond for e in site.find(Select)]
    match site.stmt:
        case st.If(cond=cond):
            conds.append(cond)
        case st.FuncCall(func, (ex.Expr() as cond,)) if func.name == "assume":
            conds.append(cond)
    for cond in conds:
        if cond.dtype is not boolean:
            yield f"the condition `{cond}` is {cond.dtype}"


def truth_is_apart(site: Site) -> Iterator[str]:
    """``~`` takes a boolean, and ``&``, ``|`` and ``^`` two booleans or none: of an integer they give an
    integer, which a target takes for a true condition unless it is 0."""
    for e in site.find(ex.Not):
        if e.x.dtype is not boolean:
            yield f"`{e}` is of {e.x.dtype}; expected a boolean"
    for both in site.find(ex.Logic):
        if (both.a.dtype is boolean) is not (both.b.dtype is boolean):
            yield f"`{both}` takes {both.a.dtype} and {both.b.dtype}; expected two booleans or none"


def offset_is_index(site: Site) -> Iterator[str]:
    """Offsets are of kind index; an element of a tensor must be cast before it is an address."""
    for who, offset, _ in site.accesses():
        if offset.dtype.kind != "index":
            yield f"{who} has the offset `{offset}` of type {offset.dtype}, which is no address (index)"


def index_is_apart(site: Site) -> Iterator[str]:
    """No operation mixes positions with integers of a tensor; one of them must be cast."""
    pairs: list[tuple[ex.Expr, ex.Expr, ex.Expr]] = [(e, e.a, e.b) for e in site.find(ex.Binary)]
    pairs += [(e, e.yes, e.no) for e in site.find(Select)]
    for e, a, b in pairs:
        if {a.dtype.kind, b.dtype.kind} == {"index", "int"}:
            yield f"`{e}` takes {a.dtype} and {b.dtype}; expected a cast of one of them"


def stored_is_no_index(site: Site) -> Iterator[str]:
    """A position is stored as a whole number; as a float it needs a cast, which says how it is rounded."""
    if isinstance(site.stmt, st.Store) and site.stmt.value.dtype.kind == "index":
        if not (held := site.stmt.tensor.dtype).is_integer:
            yield f"the index `{site.stmt.value}` is stored into {held}; expected a cast of it"


def constant_is_of_its_type(site: Site) -> Iterator[str]:
    """A constant, and what a load gives where its mask does not hold, is a number that its type has; of
    another number a text would compute with digits that the type lacks. It needs an explicit cast."""
    held: list[tuple[ex.Expr, float, DType]] = [(e, e.value, e.type) for e in site.find(ex.Const)]
    held += [(e, e.fill if e.dtype.kind == "float" else int(e.fill), e.dtype) for e in site.find(ac.Load)]
    for e, value, by in held:
        if not is_held(value, by):
            yield f"`{e}` holds {value!r}, which is no number of {by}"


def known_function(site: Site) -> Iterator[str]:
    """Called functions exist, and their arguments have the right number and kind."""
    for call in site.find(Call):
        callee = CALLS.get(call.name)
        if callee is None:
            yield f"no function {call.name} is known"
        elif callee.arity != len(call.args):
            yield f"{call.name} takes {callee.arity} arguments, not {len(call.args)}"
        elif reason := (
            callee.why_not_of([a.dtype for a in call.args]) if callee.takes else callee.why_not(call.taken)
        ):
            yield f"{call.name} {reason}"
    reduces: list[Reduce | Running] = [*site.find(Reduce), *site.find(Running)]
    for reduce in reduces:
        if reduce.op not in REDUCERS:
            yield f"no reduction {reduce.op} is known"
    if not isinstance(site.stmt, st.FuncCall):
        return
    name, args = site.stmt.func.name, site.stmt.args
    if name not in FUNCS:
        yield f"no function {name} is known"
    elif len(args) != len(FUNCS[name].params):
        yield f"{name} takes {len(FUNCS[name].params)} arguments, not {len(args)}"
    else:
        for param, arg in zip(FUNCS[name].params, args, strict=True):
            kind = {"tensor": Tensor, "acc": ex.Var, "barrier": st.Barrier}.get(param, ex.Expr)
            if not isinstance(arg, kind):
                yield f"{param} of {name} is a {type(arg).__name__}, not a {kind.__name__}"


def lanes_agree(site: Site) -> Iterator[str]:
    """A stored or assigned value can be broadcast to the shape of its destination."""

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
            if func.multiplies:
                has, left, right = map(site.lanes_of, (acc, a, b))
                if not (left & right) - has:
                    yield "a and b share no lane to sum over"
                if wrong := {x for x in (left & right) - has if x.kind not in ("", "K")}:
                    yield f"the lanes {_names(wrong)} run along a side of the tile and are summed over"
                if lone := (left ^ right) - has:
                    yield f"only one of a and b has the lanes {_names(lone)}, and acc lacks them"
        case st.FuncCall(func, (ex.Var() as acc, *operands)) if func.takes_scales:
            has = site.lanes_of(acc)
            for e in (e for e in operands if isinstance(e, ex.Expr)):
                if wrong := {x for x in site.lanes_of(e) - has if x.kind not in ("", "K")}:
                    yield f"the lanes {_names(wrong)} run along a side of the tile and are summed over"


def renamed_is_one_to_one(site: Site) -> Iterator[str]:
    """Lanes are renamed to others of the same extent, and no two of a value become one."""
    for e in site.find(Renamed):
        if [x.extent for x in e.old] != [x.extent for x in e.new]:
            yield f"`{e}` renames lanes to others of another extent"
        elif len(set(e.old)) < len(e.old) or len(set(e.new)) < len(e.new):
            yield f"`{e}` names a lane twice"
        elif twice := (site.lanes_of(e.x) - set(e.old)) & set(e.new):
            yield f"`{e}` renames a lane to {_names(twice)}, which the value has already"


def places_are_along_lanes(site: Site) -> Iterator[str]:
    """Elements are looked for along different lanes, at a whole number along each."""
    for e in site.find(Gather):
        if len(e.places) != len(e.lanes) or len(set(e.lanes)) < len(e.lanes):
            yield f"`{e}` has {len(e.places)} places along {_names(set(e.lanes))}"
        elif wrong := [at for at in e.places if not at.dtype.is_integer]:
            yield f"`{e}` looks at `{wrong[0]}`, which is no whole number"


def _names(lanes: set[ex.Lane]) -> str:
    return ", ".join(sorted(lane.name for lane in lanes))


def lane_is_power_of_two(site: Site) -> Iterator[str]:
    lanes = [*site.find(ex.Lane)]
    if isinstance(site.stmt, st.Alloc):
        lanes += site.stmt.lanes
    for lane in dict.fromkeys(lanes):
        if lane.extent < 1 or lane.extent & (lane.extent - 1):
            yield f"the lane {lane.name} has {lane.extent} elements"


SIDES = ("B", "M", "N", "K")


ORIGINS = ("", "a", "b", "epilogue")


def origin_is_read(site: Site) -> Iterator[str]:
    """A let with the origin ``a`` or ``b`` reads memory."""
    if isinstance(site.stmt, st.Let) and (origin := site.stmt.origin):
        if origin not in ORIGINS:
            yield f"the origin {origin!r} is none of {', '.join(ORIGINS[1:])}"
        elif origin != "epilogue" and not site.has(ac.MemoryRead, st.SlotTile):
            yield f"{site.stmt.var.name} is of the origin {origin!r} and reads nothing"


def side_is_known(site: Site) -> Iterator[str]:
    """The kind of a lane, and the side of a tile loop, is B, M, N or K; only tile loops have a side."""
    lanes = [*site.find(ex.Lane)]
    if isinstance(site.stmt, st.Alloc):
        lanes += site.stmt.lanes
    for lane in dict.fromkeys(lanes):
        if lane.kind not in ("", *SIDES):
            yield f"the lane {lane.name} runs along {lane.kind!r}, which is none of {', '.join(SIDES)}"
    if isinstance(site.stmt, st.For) and site.stmt.side:
        loop = site.stmt
        if loop.kind != "tile":
            yield f"a {loop.kind} loop has no side of a tile, and this one says {loop.side!r}"
        elif loop.side not in SIDES:
            yield f"the side {loop.side!r} is none of {', '.join(SIDES)}"


KINDS = ("parallel", "grid", "tile", "serial", "unroll", "jam", "dealt")


def loop_is_simple(site: Site) -> Iterator[str]:
    if not isinstance(site.stmt, st.For):
        return
    loop = site.stmt
    if type(loop.stop) is not int or loop.stop < 0:
        yield f"the end {loop.stop!r} is not a count"
    sized = (
        loop.kind in ("parallel", "grid", "dealt")
        and loop.until is not None
        and site.is_of_sizes(loop.until)
    )
    if loop.until is not None and loop.kind != "serial" and not sized:
        yield f"a {loop.kind} loop cannot end earlier than it says"
    if loop.start is not ex.ZERO and loop.kind in ("grid", "parallel", "tile"):
        yield f"a {loop.kind} loop starts at 0, not at `{loop.start}`"
    if loop.kind == "jam" and not isinstance(loop.start, ex.Const):
        yield f"a jam loop starts at a number, not at `{loop.start}`"
    if loop.kind not in KINDS:
        yield f"the kind {loop.kind!r} is none of {', '.join(KINDS)}"
    if loop.var.type.kind != "index":
        yield f"{loop.var.name} is {loop.var.type}, a loop counts in positions (index)"
    if type(loop.stages) is not int or loop.stages < 0:
        yield f"stages={loop.stages!r} is not a count"


def one_grid(site: Site) -> Iterator[str]:
    """A kernel is one launch: it has at most one grid loop, which no other statement surrounds."""
    if isinstance(site.stmt, st.For) and site.stmt.kind == "grid" and site.around:
        yield f"a grid loop inside `{title(site.around[-1])}`"
    if isinstance(site.stmt, st.Seq) and not site.around:
        grids = [s for s in site.stmt.stmts if isinstance(s, st.For) and s.kind == "grid"]
        if len(grids) > 1:
            yield f"{len(grids)} grid loops"


def piece_fits_its_box(site: Site) -> Iterator[str]:
    """Positions in a piece and corners have one expression per dimension of the box."""
    for e in site.find(st.SlotTile):
        if len(e.within) != len(e.buffer.extents):
            yield f"{e} has {len(e.within)} dimensions, a box of it {len(e.buffer.extents)}"
    match site.stmt:
        case st.Fetch(tensor, corner, piece) | st.Send(tensor, corner, piece):
            if not len(corner) == len(tensor.shape) == len(piece.within):
                yield f"the corner has {len(corner)} dimensions, {tensor.name} {len(tensor.shape)}"
