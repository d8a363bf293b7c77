"""The batch of a computation: the axis along which its tensors hold samples, and the form in which the
number of samples is a name.

    compute linear                              compute linear
                                                    sizes  BATCH=1024 in 1..32768
        tensor X f32 [m=4, k=64]                    tensor X f32 [m=BATCH, k=64]
        tensor W f32 [n=32, k=64]           ->      tensor W f32 [n=32, k=64]
        tensor Y f32 [m=4, n=32]                    tensor Y f32 [m=BATCH, n=32]
        axes  m=4 n=32 | k=64                       axes  m=BATCH n=32 | k=64
        ...                                         ...

Samples lie along the first dims: the batch is the axis that moves through the first dim of the most
tensors, in doubt of the first one that is read. The example of the name follows from what one sample has
(``reference``), so that all batches have one form, one choice of a schedule, and one kernel.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from math import prod

from transconv.compute.compute import Compute
from transconv.compute.parser import parse
from transconv.compute.symbolic_compute import with_examples
from transconv.ir import Const, Expr, Size, Sizes, Tensor, Var, View, as_expr, substitute
from transconv.simplify import simplify
from transconv.support import Unsupported

BATCH = "BATCH"
"""The name of the number of samples."""
FEWEST, MOST = 8, 4096  # samples of a reference
ELEMENTS = 1 << 20  # of a reference's largest tensor, if so many samples have as many
LARGEST = 2**31 - 2**16  # elements of a tensor; with those of the last tile they fit 32 bits


def reference(elements: int) -> int:
    """The number of samples that schedules are chosen for, where one sample's largest tensor has so many
    elements: a power of two."""
    wanted = min(MOST, max(FEWEST, ELEMENTS // max(1, elements)))
    return 1 << (wanted.bit_length() - 1)


def batch_axis(compute: Compute) -> str | None:
    """The axis along which a computation's tensors hold samples; None if it has none."""
    votes: Counter[str] = Counter()
    for view in {v.tensor: v for v in compute.views()}.values():
        if view.dims and len(seen := compute.roots(view.dims[0].coord)) == 1:
            votes.update(seen)  # the first one stays the first of equals
    return votes.most_common(1)[0][0] if votes else None


@lru_cache(maxsize=4096)
def of_any_batch(compute: Compute) -> Compute:
    """The computation with the number of its samples as a name; itself if its sizes are names already, or
    if it has no samples. Raises Unsupported where that cannot be said."""
    axis = batch_axis(compute)
    if compute.named is not None or axis is None:
        return compute
    seen = {t: _with_batch(t, axis, compute) for t in compute.tensors}
    each = max(prod(t.shape) // compute.size(axis) for t, of in seen.items() if of is not t)
    size = Size(BATCH, reference(each), 1, min(LARGEST // max(1, each), LARGEST))
    axes = tuple(replace(x, extent=Var(BATCH)) if x.name == axis else x for x in compute.axes)
    made = compute.over(lambda v: View(seen[v.tensor], v.dims))
    made = with_notes(parse(str(replace(made, axes=axes, named=Sizes((size,))))), compute)
    if str(made.at(**samples(compute))) != str(compute):
        raise Unsupported("invariant:form", f"{compute.name}: its text does not say it for any batch")
    return made


def samples(compute: Compute) -> dict[str, int]:
    """The number of samples of a computation of numbers, as its form has it."""
    axis = batch_axis(compute)
    return {} if compute.named is not None or axis is None else {BATCH: compute.size(axis)}


def with_reference(compute: Compute, name: str) -> Compute:
    """A computation in which a name is a number of samples, or of rows of samples, with ``reference`` as
    its example, for what one of them has; itself where its requirements exclude that."""
    named = compute.named
    if named is None or name not in named.names:
        return compute
    one = {**named.like, name: 1}
    each = max((prod(t.at(one).shape) for t in compute.tensors if t.extents), default=1)
    (size,) = (s for s in named.each if s.name == name)
    wanted = {**named.like, name: min(size.most, max(size.least, reference(each)))}
    return compute if named.why_not(wanted) else with_examples(compute, wanted)


def with_samples(compute: Compute, count: int) -> Compute:
    """A computation of numbers, of so many samples; itself if it has none. Raises as ``of_any_batch``."""
    if not samples(compute):
        return compute
    return with_notes(of_any_batch(compute).at(**{BATCH: count}), compute)


def with_notes(made: Compute, of: Compute) -> Compute:
    """A computation that was read, with what no text says of another one: roles of axes, the stride phase,
    the name of what is behind the sum."""
    roles = {x.name: x.role for x in of.axes}
    axes = tuple(replace(x, role=roles[x.name]) for x in made.axes)
    return replace(made, axes=axes, part=of.part, behind=of.behind)


def _with_batch(tensor: Tensor, axis: str, compute: Compute) -> Tensor:
    """A tensor whose dims along the axis are as many samples as the name says. Raises Unsupported."""
    count = compute.size(axis)
    extents: list[Expr] = [*map(as_expr, tensor.shape)]
    for view in (v for v in compute.views() if v.tensor is tensor):
        for at, seen in enumerate(view.dims):
            if axis not in compute.roots(seen.coord):
                continue
            moved = substitute(seen.coord, {Var(axis): Var(axis) + 1}) - seen.coord
            by = simplify(moved)
            if not isinstance(by, Const) or by.value < 1 or tensor.shape[at] != int(by.value) * count:
                raise Unsupported(
                    "invariant:form",
                    f"{compute.name}: dim {at} of {tensor.name} holds something else beside samples",
                )
            extents[at] = Var(BATCH) * int(by.value) if by.value > 1 else Var(BATCH)
    if all(isinstance(e, Const) for e in extents):
        return tensor
    if tensor.layout.tag() is None or tensor.layout.strides() is None:
        raise Unsupported(
            "invariant:layout",
            f"{compute.name}: {tensor.name} has gaps between its elements; expected a dense tensor",
        )
    return replace(tensor, extents=tuple(extents))
