"""Well-formedness of IR: named rules that hold between passes, each with a reason when it does not.

A rule is a generator function: it takes a ``Site`` and yields a sentence for each breach. Errors call it
by its name, with dashes. ``RULES`` hold for every tree: of nodes, and of names, which are bound,
allocated, reserved or a parameter before they are used. ``LEVELS`` also hold for kernels of a level:

    nest       one loop for each axis, or one in each sweep over a reduced axis; scalars
    tiles      one grid; tiles are loops, the sum is a loop of steps
    lanes      tiles are lanes of values, products are calls
    explicit   the same, or with explicit shared memory, barriers and roles

To add a rule, write the function and add it to one of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from transconv.ir import expr as ex
from transconv.ir import stmt as st
from transconv.ir import tensor as ac
from transconv.ir.functions.calls import REDUCERS
from transconv.ir.node import Node
from transconv.ir.operations import Gather, Reduce, Renamed, Running, Spread
from transconv.ir.rules import forms as form
from transconv.ir.rules.forms import Site, alone, sites, statements, title
from transconv.ir.rules.names import why_not_name
from transconv.ir.tensor import Tensor

WAITS = ("wait", "expect", "arrive", "dot_async", "dot_wait", "part_wait", "fence", "send_wait")
STEPS = (st.Fetch, st.Put, st.Send)


# -- nest and tiles ------------------------------------------------------------------------------------


def values_are_scalars(site: Site) -> Iterator[str]:
    """No value has lanes yet."""
    for kind in (ex.Lane, Reduce, Renamed, Running, Gather, Spread):
        yield from (f"`{e}` speaks of lanes" for e in site.find(kind))
    if isinstance(site.stmt, st.Alloc) and site.stmt.lanes:
        yield f"{site.stmt.var.name} has lanes"


def sums_only_grow(site: Site) -> Iterator[str]:
    """An accumulator changes only by a reduction in ``REDUCERS``, such as ``acc = acc + term``."""
    if isinstance(site.stmt, st.Update):
        var, value = site.stmt.var, site.stmt.value
        if type(value) not in [r.node for r in REDUCERS.values()] or value.children()[0] is not var:
            yield f"{var.name} becomes `{value}`, which is no reduction that begins with it"


# -- nest ----------------------------------------------------------------------------------------------


def nothing_is_called(site: Site) -> Iterator[str]:
    """A nest loads, computes, and stores, adds atomically or leaves a part: no other function, no
    branch."""
    if (
        isinstance(site.stmt, st.FuncCall)
        and not _is_explicit(site.stmt)
        and (site.stmt.func.name not in ("atomic_add", "partial"))
    ):
        yield f"{site.stmt.func.name} is called"
    if isinstance(site.stmt, st.If):
        yield f"a branch where `{site.stmt.cond}`"


def loops_are_axes(site: Site) -> Iterator[str]:
    """A loop runs over a whole axis: a parallel axis has one loop, a reduced axis one in each sweep."""
    if isinstance(site.stmt, st.Kernel):
        loops = [s for s in statements(site.stmt) if isinstance(s, st.For)]
        parallel = {s.var for s in loops if s.kind == "parallel"}
        counts = Counter(s.var for s in loops)
        yield from (
            f"{v.name} is the counter of {n} loops" for v, n in counts.items() if n > 1 and v in parallel
        )
        for v in counts.keys() - parallel:
            if len({(s.stop, s.until) for s in loops if s.var is v}) > 1:
                yield f"the sweeps over {v.name} are of different lengths"
    if isinstance(loop := site.stmt, st.For):
        if loop.kind not in ("parallel", "serial"):
            yield f"{loop.var.name} is a {loop.kind} loop; expected parallel or serial"
        sized = loop.until is not None and site.is_of_sizes(loop.until)
        if (loop.start, loop.stages, loop.programs, loop.side) != (ex.ZERO, 0, 0, "") or not (
            loop.until is None or sized
        ):
            yield f"{loop.var.name} does not run plainly from 0 to {loop.stop}"


def parallel_loops_are_outside(site: Site) -> Iterator[str]:
    """Parallel loops are nested, and outside of everything else."""
    if isinstance(site.stmt, st.For) and site.stmt.kind == "parallel":
        if any(not isinstance(s, st.For) or s.kind != "parallel" for s in site.around):
            yield f"`{title(site.around[-1])}` is around a parallel loop"
        if isinstance(site.stmt.body, st.Seq) and any(
            isinstance(s, st.For) and s.kind == "parallel" for s in site.stmt.body.stmts
        ):
            yield f"something stands beside the parallel loop inside of {site.stmt.var.name}"


def sums_begin_before_loops(site: Site) -> Iterator[str]:
    """An accumulator is allocated before the loops that reduce into it, and one statement changes it."""
    if isinstance(site.stmt, st.Kernel):
        counts = Counter(s.var.name for s in statements(site.stmt) if isinstance(s, st.Update))
        yield from (f"{name} is changed by {n} statements" for name, n in counts.items() if n > 1)
    if isinstance(site.stmt, st.Alloc) and any(
        isinstance(s, st.For) and s.kind == "serial" for s in site.around
    ):
        yield f"{site.stmt.var.name} is made anew in a loop over what is reduced"


def elements_are_read_one_by_one(site: Site) -> Iterator[str]:
    """The naive nest has no boxes; the blockwise pass makes them."""
    yield from (f"`{e}` is a box" for e in site.find(ac.BoxLoad))
    if isinstance(site.stmt, st.BoxStore):
        yield "a box is stored"


# -- tiles and later -----------------------------------------------------------------------------------


def kernel_is_a_grid(site: Site) -> Iterator[str]:
    """The body of a kernel is a grid loop, over the programs of the launch."""
    if isinstance(site.stmt, st.Kernel) and not (
        isinstance(body := site.stmt.body, st.For) and body.kind == "grid"
    ):
        yield f"the body begins with `{title(site.stmt.body)}`; expected a grid loop"


def axes_are_tiled(site: Site) -> Iterator[str]:
    """No parallel loop over an axis is left."""
    if isinstance(site.stmt, st.For) and site.stmt.kind == "parallel":
        yield f"the axis {site.stmt.var.name} is in no grid, loop or tile"


def tiles_become_lanes(site: Site) -> Iterator[str]:
    """A tile loop has a side and 2, 4, 8, ... positions. Loops of one counter agree, because they become
    one lane."""
    if isinstance(site.stmt, st.For) and site.stmt.kind == "tile":
        loop = site.stmt
        if not loop.side:
            yield f"the tile loop over {loop.var.name} has no side"
        if type(loop.stop) is int and (loop.stop < 2 or loop.stop & (loop.stop - 1)):
            yield f"a tile of {loop.stop} positions along {loop.var.name}"
    if isinstance(site.stmt, st.Kernel):
        tiles: dict[ex.Var, st.For] = {}
        for s in statements(site.stmt):
            if isinstance(s, st.For) and s.kind == "tile":
                first = tiles.setdefault(s.var, s)
                if (first.stop, first.side) != (s.stop, s.side):
                    yield f"two tile loops over {s.var.name} differ"


# -- lanes and later -----------------------------------------------------------------------------------


def tiles_are_lanes(site: Site) -> Iterator[str]:
    """No loop over the positions of a tile is left."""
    if isinstance(site.stmt, st.For) and site.stmt.kind == "tile":
        yield f"the tile {site.stmt.var.name} is a loop still"


def a_name_is_one_lane(site: Site) -> Iterator[str]:
    """Lanes of one name are the same lane: the emitted text has one vector for them."""
    if isinstance(site.stmt, st.Kernel):
        found = {e for s in statements(site.stmt) for e in alone(s).find(ex.Lane)}
        found |= {lane for s in statements(site.stmt) if isinstance(s, st.Alloc) for lane in s.lanes}
        counts = Counter(lane.name for lane in found)
        yield from (f"{n} lanes are called {name}" for name, n in counts.items() if n > 1)


def shapes_are_ordered(site: Site) -> Iterator[str]:
    """The lanes of an accumulator, or of a Spread, are ordered by their axis, without repeats."""
    shapes = [e.lanes for e in site.find(Spread)]
    if isinstance(site.stmt, st.Alloc):
        shapes.append(site.stmt.lanes)
    for lanes in shapes:
        order = [(lane.axis, lane.name) for lane in lanes]
        if order != sorted(set(order)):
            yield f"the lanes {' '.join(lane.name for lane in lanes)} are out of order"


def products_are_of_names(site: Site) -> Iterator[str]:
    """The operands of a product are variables, or variables along other lanes."""
    if isinstance(site.stmt, st.FuncCall) and site.stmt.func.name in ("dot", "dot_scaled"):
        for arg in site.stmt.args[1:]:
            value = arg.x if isinstance(arg, (Renamed, Spread)) else arg
            if not isinstance(value, ex.Var):
                yield f"`{arg}` is multiplied; expected a name"


# -- all but explicit, and explicit --------------------------------------------------------------------


def nothing_is_explicit(site: Site) -> Iterator[str]:
    """Only explicit kernels have shared memory, barriers and roles."""
    if _is_explicit(site.stmt) or isinstance(site.stmt, (st.Shared, st.Roles, st.Role)):
        yield f"a {type(site.stmt).__name__} before the level explicit"
    yield from (f"`{e}` is in shared memory before the level explicit" for e in site.find(st.SlotTile))


def tiles_are_dealt_in_the_grid(site: Site) -> Iterator[str]:
    """Outside of roles a program's loop over its tiles is the body of the grid."""
    if (
        isinstance(site.stmt, st.For)
        and site.stmt.kind == "dealt"
        and [s.kind for s in site.around if isinstance(s, st.For)] != ["grid"]
    ):
        yield f"the tiles of {site.stmt.var.name} are dealt out inside of a loop or outside of the grid"


def roles_share_a_program(site: Site) -> Iterator[str]:
    """Roles occur once, at the end of the grid's body, after the shared memory; each has a name of its
    own and at least one warp."""
    if isinstance(site.stmt, (st.Shared, st.Roles)) and [type(s) for s in site.around] != [st.For]:
        yield "it stands deeper than in the grid"
    if isinstance(site.stmt, st.For) and site.stmt.kind == "grid":
        parts = st.statements(site.stmt.body)
        if any(isinstance(s, st.Roles) for s in parts) and not all(
            isinstance(s, st.Shared) for s in parts[:-1]
        ):
            yield "roles have something other than shared memory before them, or anything behind them"
    if isinstance(site.stmt, st.Roles):
        names = [role.name for role in site.stmt.roles]
        if len(names) != len(set(names)):
            yield f"two roles have one name: {' '.join(names)}"
        if any(role.warps < 1 for role in site.stmt.roles):
            yield "a role is played by no warp"


def only_roles_wait(site: Site) -> Iterator[str]:
    """Statements that copy boxes, wait, arrive or multiply pieces are inside a role."""
    if _is_explicit(site.stmt) and not any(isinstance(s, st.Role) for s in site.around):
        yield f"`{title(site.stmt)}` is in no role"
    if not any(isinstance(s, st.Role) for s in site.around):
        yield from tiles_are_dealt_in_the_grid(site)


def roles_say_all(site: Site) -> Iterator[str]:
    """A role has no implicit copies or products: it uses ``Fetch``, ``Send`` and ``dot_async``."""
    if any(isinstance(s, st.Role) for s in site.around):
        if isinstance(site.stmt, st.BoxStore) or site.has(ac.BoxLoad):
            yield "a box is moved that no barrier counts"
        if isinstance(site.stmt, st.FuncCall) and site.stmt.func.name == "dot":
            yield "a product without a wait; expected dot_async"


def pieces_are_multiplied(site: Site) -> Iterator[str]:
    """An asynchronous product reads shared memory."""
    if isinstance(site.stmt, st.FuncCall) and site.stmt.func.name == "dot_async":
        for arg in site.stmt.args[1:]:
            if not isinstance(arg, st.SlotTile):
                yield f"`{arg}` is multiplied; expected a piece of shared memory"


def _is_explicit(s: st.Stmt) -> bool:
    return isinstance(s, STEPS) or (isinstance(s, st.FuncCall) and s.func.name in WAITS)


def var_bound_before_use(site: Site) -> Iterator[str]:
    for e in site.find(ex.Var):
        if e not in site.scope:
            twin = next((v for v in site.scope if isinstance(v, ex.Var) and v.name == e.name), None)
            yield (
                f"{e.name} is not bound here"
                if twin is None
                else f"{e.name} is used as {e.type} and bound as {twin.type}"
            )


def var_bound_once(site: Site) -> Iterator[str]:
    """No name hides another; different branches or loops may bind the same name."""
    if isinstance(site.stmt, (st.Let, st.Alloc, st.For)):
        name = site.stmt.var.name
        for var, by in site.scope.items():
            if isinstance(var, ex.Var) and var.name == name:
                yield f"{name} is already bound by `{title(by)}`"


def update_only_allocated(site: Site) -> Iterator[str]:
    match site.stmt:
        case st.Update(var, _):
            pass
        case st.FuncCall(func, (ex.Var() as var, *_)) if func.multiplies:
            pass
        case _:
            return
    if not isinstance(site.scope.get(var), st.Alloc):
        yield f"{var.name} is not allocated here, so it cannot change"


def tensor_is_parameter(site: Site) -> Iterator[str]:
    for who, tensor in site.tensors():
        if isinstance(tensor, Tensor) and site.params is not None and tensor not in site.params:
            same = any(p.name == tensor.name for p in site.params)
            yield (
                f"{who} reaches {tensor.name}, which is "
                + (
                    "another tensor than the parameter of that name"
                    if same
                    else "no parameter of the kernel"
                )
            )


def workspace_is_of_a_tensor(site: Site) -> Iterator[str]:
    """A workspace is a copy, or holds parts of sums. Only copies have a type without memory of its own
    (tf32): values of other tensors are rounded where they are multiplied."""
    if isinstance(site.stmt, st.Kernel):
        for p in site.stmt.params:
            if p.copy_of and p.parts_of:
                yield f"{p.name} is a copy of {p.copy_of} and holds parts of {p.parts_of}"
            if p.dtype.within and not p.copy_of:
                yield f"{p.name} holds {p.dtype}, and is no copy of a tensor"


def ring_is_reserved(site: Site) -> Iterator[str]:
    """Rings of shared memory and of barriers are reserved before their use, outside of roles."""
    used: list[Node] = [e.buffer for e in site.find(st.SlotTile)]
    match site.stmt:
        case st.Fetch(barrier=barrier):
            used.append(barrier)
        case st.FuncCall(_, args):
            used += [a for a in args if isinstance(a, st.Barrier)]
        case st.Shared(what) if any(isinstance(s, st.Role) for s in site.around):
            yield f"{what.name} is reserved inside of a role"
    for ring in dict.fromkeys(used):
        if ring not in site.scope:
            assert isinstance(ring, (st.Barrier, st.SmemRing))
            yield f"{ring.name} is not reserved here"


def names_are_identifiers(site: Site) -> Iterator[str]:
    """Names are Python identifiers, because the emitters print them unchanged."""
    names: list[str] = [e.name for e in site.find(ex.Lane)]
    match site.stmt:
        case st.Kernel(name, params):
            names += [name, *(p.name for p in params)]
        case st.Alloc(var, lanes):
            names += [var.name, *(lane.name for lane in lanes)]
        case st.Let(var) | st.For(var):
            names.append(var.name)
    for name in dict.fromkeys(names):
        if reason := why_not_name(name):
            yield f"{name!r} is no name: {reason}"


class VerifyError(RuntimeError):
    """A tree breaks rules. The message names each rule, the statement and the reason, the level and the
    stage. ``rules`` holds the names of the rules' functions, with dashes."""

    def __init__(self, breaches: list[tuple[str, st.Stmt, str]], level: str = "", stage: str = "") -> None:
        self.breaches = tuple(breaches)
        self.rules = frozenset(rule for rule, _, _ in breaches)
        lines = [f"  {rule}: `{title(s)}`: {reason}" for rule, s, reason in breaches]
        where = f" at the level {level}" * bool(level) + f" after {stage}" * bool(stage)
        super().__init__("\n".join([f"{len(lines)} broken rules of the IR{where}", *lines]))


Rule = Callable[[Site], Iterator[str]]
RULES: tuple[Rule, ...] = (
    var_bound_before_use,
    var_bound_once,
    update_only_allocated,
    form.mask_is_boolean,
    form.truth_is_apart,
    form.offset_is_index,
    form.index_is_apart,
    form.stored_is_no_index,
    form.constant_is_of_its_type,
    tensor_is_parameter,
    form.known_function,
    form.lanes_agree,
    form.renamed_is_one_to_one,
    form.places_are_along_lanes,
    form.lane_is_power_of_two,
    form.side_is_known,
    form.loop_is_simple,
    form.one_grid,
    form.origin_is_read,
    workspace_is_of_a_tensor,
    names_are_identifiers,
    ring_is_reserved,
    form.piece_fits_its_box,
)
TILED: tuple[Rule, ...] = (form.load_only_in_let, kernel_is_a_grid, axes_are_tiled)
LANES: tuple[Rule, ...] = (
    *TILED,
    tiles_are_lanes,
    a_name_is_one_lane,
    shapes_are_ordered,
    products_are_of_names,
)
LEVELS: dict[str, tuple[Rule, ...]] = {
    "compute": (),  # there is no kernel yet; compute.why_not_lowered checks the computation
    "nest": (
        form.load_only_in_let,
        values_are_scalars,
        loops_are_axes,
        parallel_loops_are_outside,
        sums_begin_before_loops,
        sums_only_grow,
        nothing_is_called,
        elements_are_read_one_by_one,
        nothing_is_explicit,
    ),
    "tiles": (
        *TILED,
        values_are_scalars,
        tiles_become_lanes,
        sums_only_grow,
        nothing_is_explicit,
        tiles_are_dealt_in_the_grid,
    ),
    "lanes": (*LANES, nothing_is_explicit, tiles_are_dealt_in_the_grid),
    "explicit": (*LANES, roles_share_a_program, only_roles_wait, roles_say_all, pieces_are_multiplied),
}
"""The rules of each level, by its name."""


OF_STATEMENTS: frozenset[Rule] = frozenset(
    {
        form.mask_is_boolean,
        form.truth_is_apart,
        form.offset_is_index,
        form.index_is_apart,
        form.constant_is_of_its_type,
        form.lane_is_power_of_two,
        form.side_is_known,
        form.origin_is_read,
        form.piece_fits_its_box,
        form.known_function,
        workspace_is_of_a_tensor,
        names_are_identifiers,
        form.load_only_in_let,
        values_are_scalars,
        sums_only_grow,
        nothing_is_called,
        elements_are_read_one_by_one,
        nothing_is_explicit,
        kernel_is_a_grid,
        axes_are_tiled,
        tiles_become_lanes,
        tiles_are_lanes,
        a_name_is_one_lane,
        shapes_are_ordered,
        products_are_of_names,
        pieces_are_multiplied,
    }
)
"""The rules that depend on the statement alone: a statement that has passed them is not checked again."""


def verify(root: st.Stmt, level: str = "", stage: str = "") -> None:
    """Raise VerifyError with all rules that a tree breaks: ``RULES`` and, if a ``level`` is given, the
    level's. ``stage``: the pass that made the tree, for the message. KeyError for an unknown level."""
    rules = (*RULES, *LEVELS[level]) if level else RULES
    if (whole := f"all in {level}") in _kept(root):
        return
    everything = dict.fromkeys(statements(root))
    new = [s for s in everything if level not in _kept(s)]
    # First, because the other rules need the types and texts of all expressions.
    breaches = list(_breaches(map(alone, new), [form.expression_holds_no_statement]))
    if not breaches:
        apart = [rule for rule in rules if rule in OF_STATEMENTS]
        for s in new:
            found = list(_breaches([alone(s)], apart))
            if not found:
                _kept(s).add(level)
            breaches += found
        breaches += _breaches(sites(root), [rule for rule in rules if rule not in OF_STATEMENTS])
    if breaches:
        order = {s: at for at, s in enumerate(everything)}
        raise VerifyError(sorted(breaches, key=lambda found: order[found[1]]), level, stage)
    _kept(root).add(whole)


def _kept(s: st.Stmt) -> set[str]:
    """The levels whose rules in ``OF_STATEMENTS``, or all of its tree, a statement has passed; cached."""
    try:
        return s._kept
    except AttributeError:
        object.__setattr__(s, "_kept", set())
        return s._kept


def _breaches(of: Iterable[Site], rules: list[Rule]) -> Iterator[tuple[str, st.Stmt, str]]:
    for site in of:
        for rule in rules:
            for reason in rule(site):
                yield rule.__name__.replace("_", "-"), site.stmt, reason
