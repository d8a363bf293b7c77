"""Sizes that are arguments of kernels: the line that names them, examples, what is refused.

    sizes  N=8 in 1..64, H in 1..4096, W in 1..4096, C=64 in 8..512, C % 8 == 0, N*H*W*C < 2147483648

A name has an example (``N=8``; default: 64, or the nearest legal size) and a range (default:
1..2147483647); conditions may follow. Extents of axes and of tensors are expressions of names. Kernels are
correct for all sizes that meet these requirements; a launch with others is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from transconv import ir
from transconv.compute.compute import Compute
from transconv.compute.expressions import ComputeScope, expression
from transconv.compute.steps import Read, Step, Write
from transconv.ir import conjuncts, f32, free_vars, index, substitute, value_at
from transconv.simplify import simplify
from transconv.support import ComputeError

MANY = 256  # an example of a size that nothing else is known of


def with_examples(compute: Compute, values: ir.Values) -> Compute:
    """The same computation with other examples of its sizes. Raises ComputeError for sizes that do not
    meet its requirements."""
    named = compute.named
    assert named is not None
    if reason := named.why_not(values):
        raise ComputeError(f"{compute.name}: {reason}; it requires {named}")

    def view(of: ir.View) -> ir.View:
        tensor = of.tensor
        return ir.View(replace(tensor.at(values), extents=tensor.extents, pitches=tensor.pitches), of.dims)

    axes = tuple(
        x if x.extent is None else replace(x, size=value_at(x.extent, values)) for x in compute.axes
    )
    steps = tuple(
        replace(s, view=view(s.view)) if isinstance(s, (Read, Write)) else s for s in compute.steps
    )
    each = tuple(replace(s, like=values[s.name]) for s in named.each)
    return replace(compute, axes=axes, steps=steps, named=replace(named, each=each))


def usual(sizes: ir.Sizes) -> dict[str, int]:
    """Examples that follow from the requirements alone: each size as near to ``MANY`` as its own let it
    be; to half of that, or a quarter, where they together ask for less."""
    near = MANY
    while near:
        found = {s.name: example(s, sizes.where, near) for s in sizes.each}
        if not sizes.why_not(found):
            return found
        near //= 2
    return sizes.like


@lru_cache(maxsize=512)  # asked for each schedule that is proposed
def why_not_any_size(compute: Compute) -> str | None:
    """None if one kernel can have the sizes as arguments, else the reason."""
    return next(_refused(compute), None)


def _refused(compute: Compute) -> Iterator[str]:
    if compute.named is None:
        return
    sized = {x.name for x in compute.axes if x.extent is not None}
    for write in compute.writes:
        told = [compute.roots(d.coord) for d in write.view.dims]
        alone = {
            a
            for seen, d in zip(told, write.view.dims, strict=True)
            if len(seen) == 1
            for a in seen
            if _moves(d, a)
        }
        mixed = {a for seen in told if len(seen) > 1 for a in seen}
        if wrong := sorted(sized & mixed):
            yield (
                f"sizes that are arguments: {write.view.tensor.name} has {wrong[0]} in a coordinate "
                "with something else; expected the axis alone"
            )
        reduced = set() if write in _inside(compute) else {*compute.reduced}
        if wrong := sorted(sized - alone - reduced):
            yield (f"sizes that are arguments: {write.view.tensor.name} has no coordinate for {wrong[0]}")
        if write.op:
            yield f"sizes that are arguments: {write.view.tensor.name} is added to in place"
    stored = {w.view for w in compute.writes}
    for view in compute.views():
        values, each = compute.names.told(view), zip(view.dims, view.tensor.bounds, strict=True)
        sizes = [n for d, n in each if ir.free_vars(d.coord) & values]
        if sizes and (view in stored or not all(isinstance(n, ir.Const) for n in sizes)):
            yield (
                f"sizes that are arguments: places in {view.tensor.name} are told by the values of a "
                "tensor; expected reads, along dims whose sizes are numbers"
            )


def _moves(seen: ir.ViewDim, axis: str) -> bool:
    """Whether each step along an axis adds the same positive number to a coordinate."""
    ahead = simplify(substitute(seen.coord, {ir.Var(axis): ir.Var(axis) + 1}) - seen.coord)
    return isinstance(ahead, ir.Const) and ahead.value > 0


def _inside(compute: Compute) -> set[Step]:
    return {s for sweep in compute.sweeps.each for s in sweep.steps}


SIZE = re.compile(r"([A-Za-z_]\w*)(?:\s*=\s*(\d+))?(?:\s+in\s+(\d+)\s*\.\.\s*(\d+))?")
USUAL = 64  # the default example


def sizes_of(text: str) -> ir.Sizes:
    """The sizes of a line. Raises ComputeError."""
    if not text:
        raise ComputeError("no size; expected names such as N=8 in 1..64")
    words = [w.strip() for w in text.split(",")]
    named = [found for w in words if (found := SIZE.fullmatch(w))]
    names = tuple(found[1] for found in named)
    where = tuple(p for w in words if not SIZE.fullmatch(w) for p in conjuncts(_condition(w, names)))
    each: list[ir.Size] = []
    for found in named:
        least, most = int(found[3] or 1), int(found[4] or ir.LARGEST_SIZE)
        if not 1 <= least <= most <= ir.LARGEST_SIZE:
            raise ComputeError(f"size '{found[0]}'; expected a range within 1..{ir.LARGEST_SIZE}")
        if found[1] in (s.name for s in each):
            raise ComputeError(f"size '{found[1]}' is there twice; expected it once")
        size = ir.Size(found[1], int(found[2] or least), least, most)
        each.append(size if found[2] else replace(size, like=example(size, where, USUAL)))
    made = ir.Sizes(tuple(each), where)
    if not each:
        raise ComputeError(f"sizes '{text}'; expected names such as N=8 in 1..64")
    if reason := made.why_not(made.like):
        raise ComputeError(f"the example does not meet the requirements: {reason}")
    return made


def of_sizes(text: str, sizes: ir.Sizes) -> ir.Expr:
    """An expression of sizes. Raises ComputeError."""
    return _of_names(text, sizes.names)


@lru_cache(maxsize=4096)  # plans of any size, which are read from disk, have the same again and again
def _of_names(text: str, names: tuple[str, ...]) -> ir.Expr:
    return expression(text, ComputeScope(dict.fromkeys(names, 0), f32, whole=index))


@lru_cache(maxsize=4096)
def _condition(text: str, names: tuple[str, ...]) -> ir.Expr:
    made = expression(text, ComputeScope(dict.fromkeys(names, 0), f32))
    if made.dtype.kind != "bool" or not free_vars(made):
        raise ComputeError(f"'{text}'; expected a size such as N=8 in 1..64, or a condition of sizes")
    return made


def example(size: ir.Size, where: Sequence[ir.Expr], near: int) -> int:
    """An example of a size, ``near`` a number, that meets those conditions which are about it alone."""
    name, least, most = size.name, size.least, size.most
    own = [c for c in where if free_vars(c) == {ir.Var(name)}]
    near = min(max(near, least), most)
    tried = [near, *range(near, min(most, near + 4096)), *range(near, max(least - 1, near - 4096), -1)]
    return next((n for n in tried if all(value_at(c, {name: n}) for c in own)), near)
