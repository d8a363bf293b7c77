"""Reductions of a product's result: whether they leave with its store, or a kernel reads the result again.

    conv -> mean, var              one kernel stores the result and parts of its sums and squared
                                   deviations; a small one combines the parts

The estimates of the cost room decide: of the product with what leaves with it, and of the plain one, which
may have schedules that statistics rule out, with the time to read its result again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from transconv.compute import Alone, Compute, Workload
from transconv.conv import Surrounded
from transconv.graph.fusion.fusion_cost import Price, sources
from transconv.graph.fusion.groups import FusionGroup, Statistic, behind
from transconv.graph.fusion.index_ir import Index, Mapped, Piece, ProductSum, Reduced
from transconv.graph.fusion.materialize import viewed, widens
from transconv.graph.regions.region_kernel import RegionKernel
from transconv.graph.sizes import SymbolicSize, like
from transconv.ir import Const, FloorDiv, Var, free_vars
from transconv.runtime import estimated
from transconv.selection import HELD
from transconv.support import TransconvError

if TYPE_CHECKING:
    from transconv.graph.fusion.plan import Planner

KEPT = (torch.float32, torch.float64)
REFUSED = "no schedule of the product reduces it, too"
DEARER = "leaves with the product: {:.3g} us, the product and a kernel that reads it again {:.3g} us"


def left(piece: Reduced, planner: Planner) -> str:
    """Have a reduction leave with the product of its input, or say why it does not."""
    x = piece.inputs[0] if piece.deviating is None else piece.deviating
    group = planner.home.get(x)
    if group is None or group.product is None:
        return "its input is no result of a product"
    op = "squares" if piece.deviating is not None else piece.op
    at = group.at[x]
    if why := planner.again.get(group.product) or _why_not(piece, op, x, at):
        return why
    if group.siblings:
        return "the parts of its input are computed apart"
    if not all(_own_axes(group.product)):
        return "a vector is multiplied, which is a reduction of rows"
    if any(isinstance(n, SymbolicSize) for _, n in group.axes):
        return "sizes that are names do not tell how many tiles there are"
    place = group.simple(behind(at, piece))
    if (why := _why_not_place(place)) or x.size != group.product.size:
        return why or "it reduces values more often than the product has them"
    applied = _is_applied(x, planner)
    alike = Statistic("sum", x, at, applied)
    if op == "squares" and not any(s == alike and group.at[p] == place
                                   for p, s in group.statistics.items()):
        return "its mean does not leave with the product"
    if all(p in group.statistics for p in group.stores):
        planner.hold(_result(x, group, planner))
    group.statistics[piece] = Statistic(op, x, at, applied)
    group.at[piece] = place
    group.stores.append(piece)
    group.evaluated[piece] = None
    planner.plan.stored[piece] = group
    return ""


def _result(x: Piece, group: FusionGroup, planner: Planner) -> Piece:
    """What is stored beside a statistic of a value: this, but for what only the statistic needs."""
    while x not in planner.outputs and x not in planner.plan.stored:
        own = [y for y in x.operands if planner.home.get(y) is group]
        alone = isinstance(x, Mapped) and len(planner.users[x]) == 1 and len(own) == 1 and (
            own[0].dtype.itemsize <= x.dtype.itemsize)
        if not own or not (alone or viewed(x) or widens(x)):
            break
        x = own[0]
    return x


def _why_not(piece: Reduced, op: str, x: Piece, at: Index) -> str:
    if op not in ("sum", "max", "min", "squares"):
        return f"{op} is no statistic that leaves with a product"
    if op != "squares" and (len(piece.inputs) > 1 or piece.write is not str):
        return "it reduces what is computed of the result"
    if piece.dtype not in KEPT:
        return f"a statistic is kept in f32, this is {piece.dtype}"
    return "" if len(at) == len(x.shape) else "its input stands elsewhere"


def _own_axes(product: ProductSum) -> tuple[set[str], set[str]]:
    """The axes of a product that one factor alone has, for each."""
    one, other = ({v.name for e in factor.at for v in free_vars(e)} for factor in product.factors)
    sizes = dict(product.axes)
    one, other = ({name for name in own if sizes.get(name, 1) != 1} for own in (one, other))
    return one - other, other - one


def _why_not_place(place: Index) -> str:
    """Why the places of a reduction are none that a store can reduce to."""
    names: list[str] = []
    for e in place:
        match e:
            case Var(name) | FloorDiv(Var(name), Const()):
                names.append(name)
            case Const():
                pass
            case _:
                return f"its places, {e}, are no axes of the product"
    return "" if len(names) == len({*names}) else "its places have an axis twice"


def weighed(kernel: RegionKernel) -> tuple[Workload, ...]:
    """What ``why_again`` estimates."""
    return (kernel.workload, plain(kernel.workload)) if kernel.group.statistics else ()


def why_again(kernel: RegionKernel, rates: Price) -> str:
    """Why the result of a product's kernel should be read again; empty if its statistics leave with it, or
    if it has none."""
    group = kernel.group
    if not group.statistics or not isinstance(group.product, ProductSum):
        return ""
    work = kernel.workload
    try:
        leaves = estimated(work, rates.target)
    except TransconvError:
        return REFUSED
    try:
        alone = estimated(plain(work), rates.target)
    except TransconvError:
        return ""
    ends = {s.of for p, s in group.statistics.items() if not (s.applied and _is_held(p, s))}
    read = {t for x in ends for t in sources(x, {*kernel.stored, *kernel.given})}
    apart = alone + (rates.kernel(sum(t.bytes for t in read), 0.0, None) if read else 0.0)
    return DEARER.format(leaves, apart) if apart < leaves else ""


def _is_held(piece: Piece, found: Statistic) -> bool:
    """Whether registers hold what is reduced to one place: a kernel that applies it reads it once."""
    return bool(like(found.of.size) <= HELD * like(piece.size))


def _is_applied(x: Piece, planner: Planner) -> bool:
    """Whether something other than reductions needs all elements of a value."""
    left, seen = [x], {x}
    while left:
        at = left.pop()
        users = [u for u in planner.users.get(at, []) if not isinstance(u, Reduced)]
        if at in planner.outputs or any(isinstance(u, ProductSum) or u.size != x.size for u in users):
            return True
        left += [u for u in users if u not in seen]
        seen |= {*users}
    return False


@lru_cache(maxsize=4096)  # so that its text is written once
def plain(work: Workload) -> Workload:
    """A product without what leaves with it."""
    if not any(c.statistics for c in work.computations):
        return work
    made = tuple(_without(c) for c in work.computations)
    return replace(work, parts=made) if isinstance(work, Surrounded) else Alone(made[0])


def _without(compute: Compute) -> Compute:
    return replace(compute, steps=tuple(s for s in compute.steps if s not in compute.statistics))
