"""Store conflicts: the check that no two points of a computation store to the same element.

Programs run in any order, so if two points stored to one element, either value could be the last.
Additions have no order. For most stores the coordinates prove that elements are distinct; for others, all
elements are enumerated, unless sizes are arguments: then it has to be proved of all sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from transconv import ir
from transconv.compute.steps import Axis, Write
from transconv.simplify import Facts, facts_of, prove, simplify

if TYPE_CHECKING:
    from transconv.compute.compute import Compute

MOST_COUNTED = 1 << 24  # the most points of a store that are enumerated
MOST_COVERED = 1 << 22  # the most points of a view that are
OTHER = "_other"  # behind the axes of another store


def why_not_stored(compute: Compute) -> str | None:
    """None if no two points store to one element, and no tensor is both read and stored; else the reason.
    Stores that add may share elements; they must be to one tensor, of a type with atomic additions."""
    read = {r.view.tensor for r in compute.reads}
    for tensor, writes in _by_tensor(compute).items():
        if tensor in read:
            return f"{tensor.name} is read and stored; expected another tensor for the result"
        if compute.statistics and {*writes} & {*compute.statistics}:
            continue
        if any(w.op for w in writes):
            if reason := _why_not_added(compute, tensor, writes):
                return reason
            continue
        for w in writes:
            if told := compute.names.told(w.view):
                names = " ".join(sorted(v.name for v in told))
                return (
                    f"places in {tensor.name} are told by the values of {names}, which may be equal; "
                    "expected a store to a place of its own from every point"
                )
        apart = all(_is_apart(compute, w) for w in writes)
        if apart and all(_are_apart(compute, *pair) for pair in combinations(writes, 2)):
            continue
        if compute.named is not None:
            return (
                f"it is not known whether all that is stored in {tensor.name} has places of its own "
                "at all sizes; expected one axis in each coordinate, and a coordinate that tells two "
                "stores apart"
            )
        points = sum(prod(x.size for x in axes_of(compute, w)) for w in writes)
        if points > MOST_COUNTED:
            return (
                f"it is not known whether the {points} points that are stored in {tensor.name} have "
                "places of their own; expected one axis in each coordinate"
            )
        found = np.concatenate([_places(compute, w) for w in writes])
        if len(np.unique(found)) < len(found):
            return (
                f"several points are stored in one place of {tensor.name}; expected a place of its own "
                f"for each{', or another tensor for the second store' if len(writes) > 1 else ''}"
            )
    return None


def covers(compute: Compute, view: ir.View) -> bool:
    """Whether each element of a view's tensor is at exactly one point of the axes in its coordinates and
    conditions. False if that is not known."""
    return all(
        _counted(compute, view, dims, axes) == (size, size)
        for dims, axes in _groups(compute, view)
        for size in [prod(view.tensor.shape[i] for i in dims)]
    )


def why_not_all_stored(compute: Compute) -> str | None:
    """None if each element of the results is stored, or if that is not known; else the reason. Stores that
    add begin with 0 everywhere. Sizes that are arguments: at their examples."""
    if compute.named is not None:
        return why_not_all_stored(compute.at(**compute.named.like))
    for tensor, writes in _by_tensor(compute).items():
        counts = [_elements(compute, w.view) for w in writes if not w.op]
        stored, size = sum(n or 0 for n in counts), prod(tensor.shape)
        if counts and None not in counts and stored < size:
            return (
                f"{size - stored} of the {size} elements of {tensor.name} are stored by no point; "
                "expected a store to each"
            )
    return None


def _elements(compute: Compute, view: ir.View) -> int | None:
    """How many elements of a view's tensor are at points of the axes; None if that is not known."""
    counts = [_counted(compute, view, dims, axes) for dims, axes in _groups(compute, view)]
    return None if None in counts else prod(n[1] for n in counts if n is not None)


def _groups(compute: Compute, view: ir.View) -> Iterator[tuple[list[int], frozenset[str]]]:
    """The dims of a view in groups that have no axes in common, and the axes of each group."""
    left = [(compute.roots(d.coord) | compute.roots(d.mask), i) for i, d in enumerate(view.dims)]
    while left:
        axes, first = left.pop()
        dims = [first]
        while (near := next((g for g in left if g[0] & axes), None)) is not None:
            left.remove(near)
            axes, dims = axes | near[0], [*dims, near[1]]
        yield sorted(dims), axes


def _counted(
    compute: Compute, view: ir.View, dims: list[int], axes: frozenset[str]
) -> tuple[int, int] | None:
    """The points of the axes of some dims that are inside of these, and the places there at which they
    are. None for too many, and for those that values tell."""
    shape = tuple(view.tensor.shape[i] for i in dims)
    own = [x for x in compute.axes if x.name in axes]
    count = prod(x.size for x in own)
    dim = view.dims[dims[0]]
    alone = len(dims) == len(own) == 1 and dim.coord is own[0].var and dim.mask is ir.TRUE
    if compute.named is not None:  # only what holds at all sizes
        extent = alone and (own[0].extent or ir.Const(own[0].size))
        return (count, count) if extent == view.tensor.bounds[dims[0]] else None
    if alone:
        return (min(count, *shape),) * 2
    if max(count, prod(shape)) > MOST_COVERED or compute.names.told(view):
        return None
    at = ir.Evaluator(ir.Memory({}), {}, max(1, len(own)))
    for i, x in enumerate(own):
        at.env[x.var] = at.along(i, np.arange(x.size, dtype=np.int64))
    points = [x.size for x in own] or [1]

    def over(e: ir.Expr) -> ir.Array:
        return np.broadcast_to(at.compute(e), points)

    inside = np.ones(points, bool)
    for i in dims:
        coord = over(view.dims[i].coord)
        inside = (
            inside & over(view.dims[i].mask).astype(bool) & (coord >= 0) & (coord < view.tensor.shape[i])
        )
    found = np.ravel_multi_index([over(view.dims[i].coord)[inside] for i in dims], shape)
    return len(found), len(np.unique(found))


def _why_not_added(compute: Compute, tensor: ir.Tensor, writes: list[Write]) -> str | None:
    if not all(w.op for w in writes):
        return f"{tensor.name} is both stored and added to; expected one of the two"
    if len({v.tensor for v in compute.added}) > 1:
        return "several tensors are added to; expected one in each computation"
    for w in writes:
        coords = [simplify(d.coord, _facts(compute)) for d in w.view.dims]
        moved = {a for c in coords for a in compute.roots(c)}
        if still := [x for x in axes_of(compute, w) if _is_long(x) and x.name not in moved]:
            return (
                f"{tensor.name} has one place for all of {still[0].name}; expected a sum over "
                f"{still[0].name}"
            )
    if tensor.dtype not in (ir.f16, ir.bf16, ir.f32, ir.f64, ir.i32, ir.i64):  # 16 bits are added in f32
        return f"{tensor.name} is {tensor.dtype}; expected a float, i32 or i64, which are added in place"
    return None


def _facts(compute: Compute, *ends: str) -> Facts:
    """What is known of the positions along the axes, at all sizes that are arguments; also of names of
    theirs with these ends."""
    facts = facts_of(compute.named)
    for x in compute.axes:
        for at in (x.var, *(ir.Var(x.name + end) for end in ends)):
            facts = facts.with_range(at, 0, None if x.extent is not None else max(0, x.size - 1))
            if x.extent is not None:
                facts = facts.assume(at < x.extent)
    return facts


def _by_tensor(compute: Compute) -> dict[ir.Tensor, list[Write]]:
    found: dict[ir.Tensor, list[Write]] = {}
    for w in compute.writes:
        found.setdefault(w.view.tensor, []).append(w)
    return found


def axes_of(compute: Compute, write: Write) -> list[Axis]:
    """The axes over whose points a store is done: all axes inside a sweep, else those not reduced."""
    inside = any(write in sweep.steps for sweep in compute.sweeps.each)
    return [x for x in compute.axes if inside or x.name not in compute.reduced]


def _is_long(x: Axis) -> bool:
    """Whether an axis may have more than one position."""
    return x.size > 1 or x.extent is not None


def _is_apart(compute: Compute, write: Write) -> bool:
    """Whether the coordinates determine the position along every axis of more than one position."""
    told = _told_by_digits(compute, [d.coord for d in write.view.dims])
    for dim in write.view.dims:
        told |= _told(compute, dim.coord)
    return told >= {x.name for x in axes_of(compute, write) if _is_long(x)}


def _are_apart(compute: Compute, one: Write, other: Write) -> bool:
    """Whether some coordinate of two stores to one tensor is never equal, at all sizes."""
    facts, renamed = _facts(compute, OTHER), {x.var: ir.Var(x.name + OTHER) for x in compute.axes}
    facts = facts.assume(one.view.mask()).assume(ir.substitute(other.view.mask(), renamed))
    return any(
        prove(differ, facts)
        for a, b in zip(one.view.dims, other.view.dims, strict=True)
        for here, there in [(a.coord, ir.substitute(b.coord, renamed))]
        for differ in (here < there, there < here, ir.ne(here, there))
    )


def _told_by_digits(compute: Compute, coords: Iterable[ir.Expr]) -> set[str]:
    """The axes whose positions follow from coordinates that are their digits, or sums of such: of
    ``m // 3136``, ``m // 392 % 8 * 7 + m // 7 % 7`` and ``m // 49 % 8 * 7 + m % 7`` each digit begins
    where the one below ends."""
    digits: dict[str, dict[int, int]] = {}
    for coord in coords:
        for name, below, most in _digits(compute, coord):
            at = digits.setdefault(name, {})
            at[below] = max(most, at.get(below, 0))
    found = set()
    for name, known in digits.items():
        reach, size = 1, _longest(compute, name)
        while reach < size and reach in known and known[reach] > 1:
            reach *= known[reach]
        found |= {name} if reach >= size else set()
    return found


def _digits(compute: Compute, coord: ir.Expr) -> list[tuple[str, int, int]]:
    """The digits of axes that a coordinate tells: of each the axis, the positions of a step, and how many
    values it takes. None if it is no digit, or sum of digits each of which steps over all smaller ones."""
    found: list[tuple[int, tuple[str, int, int]]] = []
    left = [(coord, 1)]
    while left:
        e, step = left.pop()
        match e:
            case ir.Add(a, b):
                left += [(a, step), (b, step)]
                continue
            case ir.Mul(a, ir.Const(int(by))) if by > 0:
                left.append((a, step * by))
                continue
        most = below = 0
        match e:
            case ir.Mod(a, ir.Const(int(most))):
                e = a
        match e:
            case ir.FloorDiv(a, ir.Const(int(below))):
                e = a
        if not isinstance(e, ir.Var) or e.name not in compute.sizes:
            return []
        below = max(1, below)
        rest = -(-_longest(compute, e.name) // below)
        found.append((step, (e.name, below, min(most or rest, rest))))
    reach = 0
    for step, (_, _, most) in sorted(found, key=lambda f: f[0]):
        if step <= reach:
            return []
        reach += step * (most - 1)
    return [digit for _, digit in found]


def _longest(compute: Compute, name: str) -> int:
    """The most positions of an axis, which are more than any tensor has if its size is an argument."""
    extent = next((x.extent for x in compute.axes if x.name == name), None)
    return compute.size(name) if extent is None else 1 << 64


def _told(compute: Compute, coord: ir.Expr) -> set[str]:
    """The axes whose positions follow from a coordinate: all on which it depends, if the step of each is
    longer than the reach of all axes with smaller steps (``part*128 + within``); else none."""
    facts, sizes = _facts(compute), compute.named.like if compute.named else {}
    roots = compute.roots(coord)
    own = {x.name: x for x in compute.axes if x.name in roots and _is_long(x)}
    steps: dict[str, ir.Expr] = {}
    for name, x in own.items():
        steps[name] = simplify(ir.substitute(coord, {x.var: x.var + 1}) - coord, facts)
        if not {v.name for v in ir.free_vars(steps[name])} <= {*sizes}:
            return set()
    reach: ir.Expr = ir.Const(0)
    for name in sorted(steps, key=lambda name: abs(ir.value_at(steps[name], sizes))):
        step, x = steps[name], own[name]
        length = next((s for s in (step, -step) if prove(reach < s, facts)), None)
        if length is None:
            return set()
        reach = reach + length * ((x.size if x.extent is None else x.extent) - 1)
    return {*steps}


def _places(compute: Compute, write: Write) -> ir.Array:
    """The offsets of all elements of a store."""
    axes = axes_of(compute, write)
    at = ir.Evaluator(ir.Memory({}), {}, max(1, len(axes)))
    for i, x in enumerate(axes):
        at.env[x.var] = at.along(i, np.arange(x.size, dtype=np.int64))
    offset, mask = at.compute(write.view.offset()), at.compute(write.view.mask()).astype(bool)
    shape = [x.size for x in axes] or [1]
    return np.asarray(np.broadcast_to(offset, shape)[np.broadcast_to(mask, shape)])
