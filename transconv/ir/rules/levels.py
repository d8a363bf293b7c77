"""Well-formedness rules of each level, from the loop nest to warp-specialized kernels.

    nest       one loop for each axis, or one in each sweep over a reduced axis; scalars
    tiles      one grid; tiles are loops, the sum is a loop of steps
    lanes      tiles are lanes of values, products are calls
    explicit   the same, or with explicit shared memory, barriers and roles

Each rule has the signature ``verify.Rule``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from transconv.ir import access as ac
from transconv.ir import explicit as xp
from transconv.ir import expr as ex
from transconv.ir import stmt as st
from transconv.ir.functions.reductions import REDUCERS
from transconv.ir.rules.sites import Site, alone, statements, title
from transconv.ir.tile_expr import Reduce, Renamed, Spread

WAITS = ("wait", "expect", "arrive", "dot_async", "dot_wait", "part_wait", "fence", "send_wait")
STEPS = (xp.Fetch, xp.Put, xp.Send)


# -- nest and tiles ------------------------------------------------------------------------------------


def values_are_scalars(site: Site) -> Iterator[str]:
    """No value has lanes yet."""
    for kind in (ex.Lane, Reduce, Renamed, Spread):
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
    if isinstance(site.stmt, st.FuncCall) and not _is_explicit(site.stmt) and (
            site.stmt.func.name not in ("atomic_add", "partial")):
        yield f"{site.stmt.func.name} is called"
    if isinstance(site.stmt, st.If):
        yield f"a branch where `{site.stmt.cond}`"


def loops_are_axes(site: Site) -> Iterator[str]:
    """A loop runs over a whole axis: a parallel axis has one loop, a reduced axis one in each sweep."""
    if isinstance(site.stmt, st.Kernel):
        loops = [s for s in statements(site.stmt) if isinstance(s, st.For)]
        parallel = {s.var for s in loops if s.kind == "parallel"}
        counts = Counter(s.var for s in loops)
        yield from (f"{v.name} is the counter of {n} loops" for v, n in counts.items()
                    if n > 1 and v in parallel)
        for v in counts.keys() - parallel:
            if len({(s.stop, s.until) for s in loops if s.var is v}) > 1:
                yield f"the sweeps over {v.name} are of different lengths"
    if isinstance(loop := site.stmt, st.For):
        if loop.kind not in ("parallel", "serial"):
            yield f"{loop.var.name} is a {loop.kind} loop; expected parallel or serial"
        sized = loop.until is not None and site.is_of_sizes(loop.until)
        if (loop.start, loop.stages, loop.programs, loop.side) != (ex.ZERO, 0, 0, "") or not (
                loop.until is None or sized):
            yield f"{loop.var.name} does not run plainly from 0 to {loop.stop}"


def parallel_loops_are_outside(site: Site) -> Iterator[str]:
    """Parallel loops are nested, and outside of everything else."""
    if isinstance(site.stmt, st.For) and site.stmt.kind == "parallel":
        if any(not isinstance(s, st.For) or s.kind != "parallel" for s in site.around):
            yield f"`{title(site.around[-1])}` is around a parallel loop"
        if isinstance(site.stmt.body, st.Seq) and any(
                isinstance(s, st.For) and s.kind == "parallel" for s in site.stmt.body.stmts):
            yield f"something stands beside the parallel loop inside of {site.stmt.var.name}"


def sums_begin_before_loops(site: Site) -> Iterator[str]:
    """An accumulator is allocated before the loops that reduce into it, and one statement changes it."""
    if isinstance(site.stmt, st.Kernel):
        counts = Counter(s.var.name for s in statements(site.stmt) if isinstance(s, st.Update))
        yield from (f"{name} is changed by {n} statements" for name, n in counts.items() if n > 1)
    if isinstance(site.stmt, st.Alloc) and any(
            isinstance(s, st.For) and s.kind == "serial" for s in site.around):
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
            isinstance(body := site.stmt.body, st.For) and body.kind == "grid"):
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
    if isinstance(site.stmt, st.FuncCall) and site.stmt.func.name == "dot":
        for arg in site.stmt.args[1:]:
            value = arg.x if isinstance(arg, (Renamed, Spread)) else arg
            if not isinstance(value, ex.Var):
                yield f"`{arg}` is multiplied; expected a name"


# -- all but explicit, and explicit --------------------------------------------------------------------


def nothing_is_explicit(site: Site) -> Iterator[str]:
    """Only explicit kernels have shared memory, barriers and roles."""
    if _is_explicit(site.stmt) or isinstance(site.stmt, (xp.Shared, xp.Roles, xp.Role)):
        yield f"a {type(site.stmt).__name__} before the level explicit"
    yield from (f"`{e}` is in shared memory before the level explicit" for e in site.find(xp.SlotTile))


def tiles_are_dealt_in_the_grid(site: Site) -> Iterator[str]:
    """Outside of roles a program's loop over its tiles is the body of the grid."""
    if isinstance(site.stmt, st.For) and site.stmt.kind == "dealt" and [
            s.kind for s in site.around if isinstance(s, st.For)] != ["grid"]:
        yield f"the tiles of {site.stmt.var.name} are dealt out inside of a loop or outside of the grid"


def roles_share_a_program(site: Site) -> Iterator[str]:
    """Roles occur once, at the end of the grid's body, after the shared memory; each has a name of its
    own and at least one warp."""
    if isinstance(site.stmt, (xp.Shared, xp.Roles)) and [type(s) for s in site.around] != [st.For]:
        yield "it stands deeper than in the grid"
    if isinstance(site.stmt, st.For) and site.stmt.kind == "grid":
        parts = st.statements(site.stmt.body)
        if any(isinstance(s, xp.Roles) for s in parts) and not all(
                isinstance(s, xp.Shared) for s in parts[:-1]):
            yield "roles have something other than shared memory before them, or anything behind them"
    if isinstance(site.stmt, xp.Roles):
        names = [role.name for role in site.stmt.roles]
        if len(names) != len(set(names)):
            yield f"two roles have one name: {' '.join(names)}"
        if any(role.warps < 1 for role in site.stmt.roles):
            yield "a role is played by no warp"


def only_roles_wait(site: Site) -> Iterator[str]:
    """Statements that copy boxes, wait, arrive or multiply pieces are inside a role."""
    if _is_explicit(site.stmt) and not any(isinstance(s, xp.Role) for s in site.around):
        yield f"`{title(site.stmt)}` is in no role"
    if not any(isinstance(s, xp.Role) for s in site.around):
        yield from tiles_are_dealt_in_the_grid(site)


def roles_say_all(site: Site) -> Iterator[str]:
    """A role has no implicit copies or products: it uses ``Fetch``, ``Send`` and ``dot_async``."""
    if any(isinstance(s, xp.Role) for s in site.around):
        if isinstance(site.stmt, st.BoxStore) or site.has(ac.BoxLoad):
            yield "a box is moved that no barrier counts"
        if isinstance(site.stmt, st.FuncCall) and site.stmt.func.name == "dot":
            yield "a product without a wait; expected dot_async"


def pieces_are_multiplied(site: Site) -> Iterator[str]:
    """An asynchronous product reads shared memory."""
    if isinstance(site.stmt, st.FuncCall) and site.stmt.func.name == "dot_async":
        for arg in site.stmt.args[1:]:
            if not isinstance(arg, xp.SlotTile):
                yield f"`{arg}` is multiplied; expected a piece of shared memory"


def _is_explicit(s: st.Stmt) -> bool:
    return isinstance(s, STEPS) or isinstance(s, st.FuncCall) and s.func.name in WAITS
