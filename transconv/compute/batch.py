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
tensors, in doubt of the first one that is read. Vectors beside larger tensors, such as scales of features,
are none of these. The examples of the name follow from what one sample has
(``examples``). A batch has the form with the nearest of them, so that few samples have another schedule
than many, with sums that are grouped alike (selection/same_bits.py):

    samples    1  2    3 .. 15    16 .. 63    64 ..        of 56 x 56 x 64 numbers
    example     1         8          32        128
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import isqrt, prod

from transconv import ir
from transconv.compute.compute import Compute
from transconv.compute.parser import parse
from transconv.compute.steps import Value, Write, uncast
from transconv.compute.symbolic_compute import with_examples
from transconv.ir import Const, Expr, Size, Sizes, Tensor, Var, View, as_expr, substitute
from transconv.simplify import simplify
from transconv.support import Unsupported

BATCH = "BATCH"
"""The name of the number of samples."""
FEWEST, MOST = 8, 4096  # samples of a reference
ELEMENTS = 1 << 20  # of a reference's largest tensor, if so many samples have as many
MANY, TIMES = 128, 4  # samples of the largest example, at least; how many times those of the reference
LARGEST = 2**31 - 2**16  # elements of a tensor; with those of the last tile they fit 32 bits


def reference(elements: int) -> int:
    """The number of samples between few and many, a power of two, where one sample's largest tensor has
    so many elements."""
    wanted = min(MOST, max(FEWEST, ELEMENTS // max(1, elements)))
    return 1 << (wanted.bit_length() - 1)


def examples(elements: int, computes: Iterable[Compute]) -> tuple[int, ...]:
    """The numbers of samples that plans are made for: several, if kernels with different tiles may add up
    alike. Where the reference is as large as ``MANY``, one between it and one sample is among them: of
    pooled images there are dozens in a batch, not thousands."""
    few = reference(elements)
    if not all(map(adds_alike, computes)):
        return (few,)
    one, *more = several(elements)
    return (one, 1 << few.bit_length() // 2, *more) if few >= MANY else (one, *more)


def several(elements: int) -> tuple[int, ...]:
    """The numbers of samples that schedules are weighed for: one, the reference, and many; where these are
    far from the reference, one between them."""
    few = reference(elements)
    many = max(MANY, TIMES * few)
    between = (TIMES * few,) if many >= TIMES**2 * few else ()
    return tuple([n for n in (1, few, *between, many) if n * max(1, elements) <= LARGEST or n <= few])


def nearest(computes: Iterable[Compute], count: int) -> int:
    """The example of the number of samples of some computations from which a number differs by the
    smallest factor: of those that all of them have. The number where there is none."""
    each = min((found for c in computes if (found := in_bands(c))), key=len, default=())
    return _nearest(each, count) if each else count


def _nearest(each: Sequence[int], count: int) -> int:
    return each[bisect.bisect_right(fewest(each), count) - 1]


def fewest(each: Sequence[int]) -> list[int]:
    """The fewest samples for which each of the ``examples`` is the nearest."""
    return [1, *(isqrt(a * b - 1) + 1 for a, b in pairwise(each))][: len(each)]


def adds_alike(compute: Compute) -> bool:
    """Whether kernels with different tiles may have the same bits: those of sums of products by a matrix
    unit, and depthwise ones, whose terms are added one after another. Other sums are added across lanes,
    as the tile has them."""
    if compute.factors is None or compute.statistics or compute.added or compute.acc is ir.f64:
        return False
    short = all(f.var.type.bits == 16 for f in compute.factors)  # products of these are not rounded
    units = (compute.math == "tf32" or short) and _is_of_matrices(compute)
    return (units or (short and _is_depthwise(compute))) and _rounds_alike(compute)


def _is_depthwise(compute: Compute) -> bool:
    """Whether each feature of a result is a sum over a window of one feature."""
    kinds, axis = {k: prod(x.size for x in compute.axes_of(k)) for k in "BMNK"}, batch_axis(compute)
    is_window = axis is not None and compute.kind(axis) != "K"
    return is_window and min(kinds["B"], kinds["K"]) > 1 and kinds["N"] == 1


def _is_of_matrices(compute: Compute) -> bool:
    """Whether a matrix unit computes a product: depthwise ones, matrices times vectors and windows of one
    or two features it does not, as a schedule's tiles have them."""
    kinds = {k: compute.axes_of(k) for k in "BMNK"}
    if kinds["B"]:
        return all(prod(x.size for x in kinds[k]) > 2 for k in "MNK")
    narrow = all(prod(x.size for x in kinds[k] if x.role == "feature") <= 2 for k in "NK")
    slides = any(x.size > 1 for x in [x for x in kinds["K"] if x.role == "window"][-2:-1])
    return all(kinds[k] for k in "MNK") and not (narrow and slides)


def _rounds_alike(compute: Compute) -> bool:
    """Whether machine code rounds ``a*b + c`` alike in all tiles, once or twice: where one value is as
    large as a tile, in ``a*b``, both operations are done where it lies."""
    made = {s.var: s for s in compute.steps if not isinstance(s, Write)}

    def large(e: Expr) -> set[Var]:
        found = set[Var]()
        for v in ir.free_vars(e) & made.keys():
            step = made[v]
            if isinstance(step, Value):
                found |= large(step.value)
            elif len({compute.kind(a) for a in compute.names.rooted[v]}) > 1:
                found.add(v)
        return found

    def is_product(e: Expr) -> bool:
        inner = uncast(e)
        step = made.get(inner) if isinstance(inner, Var) else None
        return is_product(step.value) if isinstance(step, Value) else isinstance(inner, ir.Mul)

    for s in (s for s in compute.steps if isinstance(s, (Value, Write))):
        for at in (*ir.find(s.value, ir.Add), *ir.find(s.value, ir.Sub)):
            products = [x for x in (at.a, at.b) if is_product(x)]
            if len(products) > 1 or any(len(large(at)) != 1 or large(x) != large(at) for x in products):
                return False
    return True


def batch_axis(compute: Compute) -> str | None:
    """The axis along which a computation's tensors hold samples; None if it has none."""
    votes: Counter[str] = Counter()
    views = [v for v in {v.tensor: v for v in compute.views()}.values() if v.dims]
    wide = [v for v in views if any(n != 1 for n in v.tensor.shape[1:])]
    for view in views:
        if len(seen := compute.roots(view.dims[0].coord)) == 1 and (view in wide or not wide):
            votes.update(seen)
    columns = Counter(
        axis for v in views if len(v.dims) > 1 for axis in compute.roots(v.dims[0].coord)
    )  # of one element a sample, too: they decide among equals, and then the first one
    return max(votes, key=lambda axis: (votes[axis], columns[axis]), default=None)


@lru_cache(maxsize=4096)
def of_any_batch(compute: Compute) -> Compute:
    """The computation with the number of its samples as a name; itself if its sizes are names already, or
    if it has no samples. Raises Unsupported where that cannot be said."""
    axis = batch_axis(compute)
    if compute.named is not None or axis is None:
        return compute
    seen = {t: _with_batch(t, axis, compute) for t in compute.tensors}
    each = max(prod(t.shape) // compute.size(axis) for t, of in seen.items() if of is not t)
    most = LARGEST // max(1, each)
    if compute.size(axis) > most:
        why = f"{compute.size(axis)} samples of {each} elements; one kernel takes at most {most}"
        raise Unsupported("invariant:size", why)
    size = Size(BATCH, min(reference(each), most), 1, most)
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


def with_reference(compute: Compute, name: str, count: int) -> Compute:
    """A computation in which a name is a number of samples, or of rows of samples, with the nearest of its
    examples to so many, for what one of them has; itself where its requirements exclude that."""
    if compute.named is None or name not in compute.named.names:
        return compute
    each = in_bands(compute) or (reference(_each(compute, name)),)
    return _with_example(compute, name, _nearest(each, count))


def in_bands(compute: Compute) -> tuple[int, ...]:
    """The ``examples`` of the number of samples, if that is the one size that is an argument."""
    name = _batch_name(compute)
    return examples(_each(compute, name), (compute,)) if name else ()


def for_batches(compute: Compute) -> list[Compute]:
    """The computation with each of ``several`` numbers of samples as the example; itself alone, if sizes
    beside it are arguments, too."""
    name = _batch_name(compute)
    each = several(_each(compute, name)) if name else ()
    return [_with_example(compute, name, n) for n in each] or [compute]


def _batch_name(compute: Compute) -> str:
    """The name of the number of samples, if that is the one size that is an argument; else empty."""
    named, axis = compute.named, batch_axis(compute)
    if named is None or len(named.names) > 1 or axis is None or compute.axis(axis).extent is None:
        return ""
    return named.names[0]


def _each(compute: Compute, name: str) -> int:
    """The elements of the largest tensor with sizes that are arguments, of one sample."""
    assert compute.named is not None
    one = {**compute.named.like, name: 1}
    return max((prod(t.at(one).shape) for t in compute.tensors if t.extents), default=1)


def _with_example(compute: Compute, name: str, count: int) -> Compute:
    named = compute.named
    assert named is not None
    (size,) = (s for s in named.each if s.name == name)
    wanted = {**named.like, name: min(size.most, max(size.least, count))}
    return compute if named.why_not(wanted) else with_examples(compute, wanted)


def with_samples(compute: Compute, count: int) -> Compute:
    """A computation of numbers, of so many samples, or one with their number as a name and this example;
    itself if it has none. Raises as ``of_any_batch``."""
    if in_bands(compute):
        named = compute.named
        return _with_example(compute, named.names[0], count) if named is not None else compute
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
            if axis not in compute.roots(seen.coord) or _is_told(seen.coord, axis, compute):
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


def _is_told(coord: Expr, axis: str, compute: Compute) -> bool:
    """Whether a coordinate moves along the axis only by what other tensors hold: all samples share the
    dim, as rows of a table."""
    read = {r.var for r in compute.reads}
    return all(v in read or axis not in compute.roots(v) for v in ir.free_vars(coord))
