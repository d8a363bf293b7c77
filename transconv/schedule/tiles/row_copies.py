"""Copies whose rows are summed positions, as the matrix unit reads operands of 8 bits: those that a window
sees, once for each of its columns.

    A[n, c, h + kh - 1, w + kw - 1]   -- pack_rows_A -->   A_rows[n, c, h + kh - 1, kw, w]

A box begins at a multiple of 16 bytes in memory, a window anywhere; so each column of the window has rows
of its own, in which its first position comes first. What lies outside of the image is 0 in them. In memory
features are outermost, then images and columns of the window. The other operand, which has no window, is
copied with positions innermost.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from transconv.compute import Axis, Compute, moved
from transconv.ir import TRUE, Expr, Layout, Tensor, Var, View, ViewDim, free_vars, substitute

PITCH = 16  # bytes: rows begin at multiples
LEAST = 32  # positions of a row; fewer do not fill a row of shared memory
MOST = 16  # columns of a window, of each of which there is a copy


def why_not_rows(view: View, compute: Compute) -> str | None:
    """None if an operand can be copied in rows of summed positions, else the reason."""
    name, tensor = view.tensor.name, view.tensor
    if tensor.dtype.bits != 8:
        return f"{name} holds {tensor.dtype}; rows of positions are for types of 8 bits"
    if not compute.sums_positions or len(tensor.shape) < 3:
        return f"no positions of {name} are summed"
    if reason := compute.why_not_plain(view):
        return reason
    if compute.merge > 1 or compute.fill_of(view):
        return f"{name} is of merged groups, or read as another number than 0 beyond its end"
    row = _row(compute)
    if row.size < LEAST:
        return f"rows of {row.size} positions are shorter than {LEAST}"
    last, others = view.dims[-1], view.dims[:-1]
    if row.var not in free_vars(last.coord) or any(
            row.var in free_vars(e) for d in others for e in (d.coord, d.mask)):
        return f"{name} has no dimension of {row.name} alone"
    if len(_seen(last)) > 2 or any(compute.kind(v.name) == "K" for v in _seen(last) if v is not row.var):
        return f"{name}: a row depends on more than {row.name} and one column of a window"
    columns = prod(compute.size(v.name) for v in _seen(last) if v is not row.var)
    if columns > MOST:
        return f"{name}: a window has {columns} columns, and each has a copy; expected at most {MOST}"
    return None


def rows_of(view: View, compute: Compute) -> View:
    """The view of an operand through its copy. Relies on ``why_not_rows``."""
    tensor, row = view.tensor, _row(compute)
    columns = [v for v in _seen(view.dims[-1]) if v is not row.var]
    dims = (*view.dims[:-1], *map(ViewDim, columns), ViewDim(row.var))
    names = (*tensor.dims[:-1], *(v.name for v in columns), row.name)
    shape = (*tensor.shape[:-1], *(compute.size(v.name) for v in columns), row.size)
    space = [*range(2, len(tensor.shape) - 1)]
    last = len(shape) - 1
    order = [1, 0, *range(len(tensor.shape) - 1, last), *space, last]  # outermost first
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= -(-shape[dim] // PITCH) * PITCH if dim == last else shape[dim]
    layout = Layout.from_strides(tensor.dtype, shape, strides, 0)
    return View(Tensor(f"{tensor.name}_rows", names, shape, layout, copy_of=tensor.name), dims)


def row_copy(view: View, compute: Compute) -> Compute:
    """The computation that makes the copy. Features vary next to positions, as both memories have them."""
    over = rows_of(view, compute)
    made, row = over.tensor, _row(compute)
    given = {Var(n): Var(n) for n in made.dims}
    values: dict[Expr, Expr] = {row.var: given[Var(row.name)]}
    last = view.dims[-1]
    coord, mask = (substitute(e, values) for e in (last.coord, last.mask))
    seen = (*(ViewDim(Var(n)) for n in made.dims[:len(view.dims) - 1]), ViewDim(coord, mask))
    inner = len(made.dims) - 1
    order = [d for d in range(inner) if d != 1] + [1, inner]
    axes = tuple(Axis(made.dims[d], made.shape[d], "feature" if d == inner else "position") for d in order)
    found = moved(f"pack_rows_{view.tensor.name}", axes, View(view.tensor, seen),
                  View(made, tuple(ViewDim(Var(n)) for n in made.dims)), compute.math)
    return replace(found, does="pack")


def _row(compute: Compute) -> Axis:
    """The last axis of summed positions."""
    return next(x for x in reversed(compute.axes_of("K")) if x.role == "position")


def _seen(dim: ViewDim) -> list[Var]:
    """The variables of a coordinate and its mask, in the order of their names."""
    mask = free_vars(dim.mask) if dim.mask is not TRUE else frozenset()
    return sorted(free_vars(dim.coord) | mask, key=lambda v: v.name)


__all__ = ["row_copy", "rows_of", "why_not_rows"]
