"""The computations that copy operands and results (tiles/packing.py), each of a kernel of its own.

    pack_A      A_packed[n, h, w, c] = A[n, c, h, w]              n h_w c

Adjacent dimensions that are contiguous in both tensors are one axis. Where sizes are arguments, they are
those of the copy as well; its examples do not depend on the computation's, so that kernels which were
chosen for other examples share it.

``Scheduled``, a computation with its schedule and target, derives all computations that become kernels:
the main one, with its groups merged and over copies, and those that copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from transconv import ir
from transconv.compute import Axis, Compute, moved, usual, with_examples
from transconv.schedule.schedule import Schedule
from transconv.schedule.tiles.merging import inner_feature, merged
from transconv.schedule.tiles.packing import (
    FEATURES,
    copy_for,
    diagonal,
    frame_copy,
    innermost,
    over_copies,
    row_copy,
    rows_of_features,
    view_of,
    workspaces,
)
from transconv.schedule.words import has_rows, is_framed, letters, widens
from transconv.simplify import simplify
from transconv.target import Target


def copies(compute: Compute, pack: str, split: int = 1, unit: str = "mma") -> Iterator[Compute]:
    """The computations that copy the operands in ``pack``; that of the result C, after the main kernel, is
    the last one.

    With a split sum, C needs no copy: the partial sums have the copy's layout, and the kernel that adds
    them stores to C."""
    for letter in letters(pack):
        if letter == "c" and split > 1:
            continue
        view = view_of(compute, letter)
        assert view is not None
        if has_rows(pack) or is_framed(pack):
            yield (row_copy if has_rows(pack) else frame_copy)(view, compute)
            continue
        tensor, copied = view.tensor, copy_for(compute, letter, unit, widens(pack))
        inner, feature = innermost(compute, letter, widens(pack)), None
        if letter == "c":
            yield _copy("unpack", tensor.name, copied, tensor, inner, compute)
            continue
        exact = copied.dtype is ir.f32
        name = f"exact_{tensor.name}" if exact else tensor.name
        name = f"{copied.dtype}_{name}" if tensor.dtype.is_short and not copied.dtype.is_short else name
        if diagonal(view, compute) > 1:
            name, feature = f"blocks{compute.merge}_{name}", _in_blocks(view, compute)
        yield _copy("pack", name, tensor, copied, inner, compute, feature)


def _in_blocks(view: ir.View, compute: Compute) -> ir.ViewDim:
    """The inner feature of the original for a point of the copy, and the condition that it is in a
    block."""
    outer, inner = (ir.Var(n) for n in view.tensor.dims[:2])
    across = inner_feature(view, compute)
    along = next(x for x in compute.axes if x.role == "feature" and x is not across)
    each, rows = view.tensor.shape[1], along.size // compute.merge
    return ir.ViewDim(inner % each, ir.eq(inner // each, outer // rows % compute.merge))


def _copy(
    does: str,
    name: str,
    a: ir.Tensor,
    c: ir.Tensor,
    inner: int,
    compute: Compute,
    feature: ir.ViewDim | None = None,
) -> Compute:
    """``c = a`` for all elements. The innermost dimension of the copy varies fastest, then features if
    they are innermost in the original. Adjacent dimensions that are contiguous in both tensors are one
    axis; if both have the same dense layout, all are. ``feature``: the feature of A for one of C, if not
    the same."""
    whole = () if feature else _whole(a, c)
    runs = [whole] if whole else _runs(a, c, inner)
    fastest, features = (0, 0) if whole else (runs.index((inner,)), runs.index((FEATURES,)))
    order = [d for d in range(len(runs)) if d != fastest]
    if inner != FEATURES and not _is_one(a, FEATURES) and rows_of_features(a, FEATURES) and not whole:
        order.append(order.pop(order.index(features)))
    order.append(fastest)
    a, c = _merged(a, runs), _merged(c, runs)
    axes = tuple(_axis(c, d, "feature" if d == fastest else "position") for d in order)
    dims = tuple(ir.ViewDim(ir.Var(name)) for name in c.dims)
    seen = tuple(feature or x if d == features else x for d, x in enumerate(dims))
    made = moved(f"{does}_{name}", axes, ir.View(a, seen), ir.View(c, dims), compute.math)
    if compute.named is None or not c.extents:
        return replace(made, does=does)
    required = _required(compute.named, c)
    return with_examples(replace(made, does=does, named=required), usual(required))


def _required(named: ir.Sizes, tensor: ir.Tensor) -> ir.Sizes:
    """What a copy of a tensor requires of sizes that are arguments: that it has elements, and no more than
    the computation requires. What a size is divided by is not required, so that kernels that need it share
    the copy with others."""
    each = tuple(replace(s, like=s.least, least=_least(s, tensor)) for s in named.each)
    return ir.Sizes(each, tuple(c for c in named.where if not ir.find(c, ir.Mod)))


def _least(size: ir.Size, tensor: ir.Tensor) -> int:
    """The smallest size for which the dimensions that follow from it alone have elements."""
    alone = [e for e in tensor.extents if ir.free_vars(e) == {size.var}]
    return next(
        (n for n in range(1, size.least) if all(ir.value_at(e, {size.name: n}) >= 1 for e in alone)),
        size.least,
    )


def _axis(tensor: ir.Tensor, dim: int, role: str) -> Axis:
    """The axis of a dimension."""
    extent = tensor.bounds[dim]
    return Axis(tensor.dims[dim], tensor.shape[dim], role, extent if ir.free_vars(extent) else None)


def _is_one(tensor: ir.Tensor, dim: int) -> bool:
    """Whether a dimension has one place, whatever the sizes are."""
    return tensor.bounds[dim] == ir.ONE


def _strides(tensor: ir.Tensor) -> list[ir.Expr] | None:
    """The stride of each dimension; None for a layout of blocks."""
    if tensor.extents:
        return [simplify(s) for s in tensor.steps]
    strides = tensor.layout.strides()
    return None if strides is None else [ir.Const(s) for s in strides]


def _order(tensor: ir.Tensor) -> list[int]:
    """The dimensions of a tensor without blocks, outermost first."""
    if tensor.extents:
        return [b.dim for b in tensor.layout.blocks]
    strides = tensor.layout.strides() or ()
    return sorted(range(len(strides)), key=lambda d: (-strides[d], tensor.shape[d]))


def _whole(a: ir.Tensor, c: ir.Tensor) -> tuple[int, ...]:
    """All dimensions, outermost first, if both tensors have the same dense layout; else none."""
    strides = _strides(c)
    if strides is None or strides != _strides(a):
        return ()
    order = _order(c)
    step: ir.Expr = ir.ONE
    for dim in reversed(order):
        if not _is_one(c, dim) and strides[dim] != step:
            return ()
        step = simplify(step * c.bounds[dim])
    return tuple(order)


def _runs(a: ir.Tensor, c: ir.Tensor, inner: int) -> list[tuple[int, ...]]:
    """The dimensions grouped into runs that are contiguous in both tensors. A dimension of size 1 joins
    any neighbour; ``inner`` and the features stay separate."""
    apart = {inner, FEATURES}
    runs: list[tuple[int, ...]] = []
    strides = [_strides(t) for t in (a, c)]
    for dim, size in enumerate(a.bounds):
        before = runs[-1] if runs else (inner,)
        wide = [d for d in before if not _is_one(a, d)]
        if (
            not apart.intersection(before)
            and dim not in apart
            and all(strides)
            and (
                _is_one(a, dim)
                or not wide
                or all(s is not None and s[wide[-1]] == simplify(s[dim] * size) for s in strides)
            )
        ):
            runs[-1] = (*before, dim)
        else:
            runs.append((dim,))
    return runs


def _merged(tensor: ir.Tensor, runs: list[tuple[int, ...]]) -> ir.Tensor:
    """The tensor with each run of dimensions merged into one."""
    if all(len(run) == 1 for run in runs):
        return tensor
    strides = tensor.layout.strides()
    assert strides is not None
    shape = tuple(prod(tensor.shape[d] for d in run) for run in runs)
    inner = [next((d for d in reversed(run) if not _is_one(tensor, d)), run[-1]) for run in runs]
    layout = ir.Layout.from_strides(tensor.dtype, shape, [strides[d] for d in inner], tensor.layout.offset)
    names = tuple("_".join(tensor.dims[d] for d in run) for run in runs)
    made = replace(tensor, dims=names, shape=shape, layout=layout)
    if not tensor.extents:
        return made
    held = [next(at for at, run in enumerate(runs) if b.dim in run) for b in tensor.layout.blocks]
    order = [x for at, x in enumerate(held) if x not in held[:at]]
    blocks = tuple(next(b for b in layout.blocks if b.dim == d) for d in order)
    extents = tuple(simplify(prod((tensor.extents[d] for d in run), start=ir.ONE)) for run in runs)
    pitches = tuple(tensor.pitches[d] for d in inner) if tensor.pitches else ()
    return replace(made, layout=replace(layout, blocks=blocks), extents=extents, pitches=pitches)


def is_copy(compute: Compute) -> bool:
    """Whether a computation only moves elements."""
    return compute.does in ("pack", "unpack")


def rounds(copy: Compute) -> bool:
    """Whether a copy rounds its elements."""
    return is_copy(copy) and copy.c.tensor.dtype is not copy.a.tensor.dtype


def share(compute: Compute) -> float:
    """The fraction of the copies' cost that counts for a computation: 1, or for a stride phase its
    fraction of the result, because all phases share the copies."""
    owned = prod(x.size for x in compute.axes if compute.kind(x.name) != "K")
    return min(1.0, owned / max(1, prod(compute.c.tensor.shape))) if compute.phase else 1.0


@dataclass(frozen=True)
class Scheduled:
    """A computation with a schedule and a target. The properties are defined if ``why_not`` is None. No
    other code merges groups or replaces tensors by copies."""

    compute: Compute
    schedule: Schedule
    target: Target

    @cached_property
    def grouped(self) -> Compute:
        """The computation with groups merged, over the original tensors."""
        return merged(self.compute, self.schedule.merge)

    @cached_property
    def main(self) -> Compute:
        """The computation of the main kernel: groups merged, over the copies."""
        pack = self.schedule.pack
        return over_copies(self.grouped, pack, self.schedule.unit) if pack else self.grouped

    @property
    def copies(self) -> tuple[Compute, ...]:
        """The computations that copy operands, and last the one that copies the result."""
        c = self.schedule
        return tuple(copies(self.grouped, c.pack, c.split_k, c.unit))

    @property
    def workspaces(self) -> list[ir.Tensor]:
        """The tensors that hold the copies, and the one that the main kernel writes if its result is
        copied afterwards."""
        c = self.schedule
        return workspaces(self.grouped, c.pack, c.split_k, c.unit)
