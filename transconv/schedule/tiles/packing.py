"""Packing: a computation over copies of some of its tensors in another order.

A box needs features to be contiguous. A tensor in which they are not is copied first, by a kernel of its
own, and the main kernel reads the copy through the same view. Here n, h and w are positions, f and c
features:

    pack=a      A[n, c, h, w]  -- pack_A -->  A_packed[n, h, w, c]  -- main -->  C
    pack=a.c    ... main -->  C_packed[n, h, w, f]  -- unpack_C -->  C[n, f, h, w]

The matrix unit takes operands of 32 and of 8 bits only with the summed dimension innermost. If the sum
runs over dimension 0 of an operand, that is the innermost dimension of the copy:

    pack=b      B[f, kh, kw, c]   -- pack_B -->  B_packed[c, kh, kw, f]  -- main sums over f -->  C
    pack=a.b    A[n, h, w, c]     -- pack_A -->  A_packed[c, h, w, n]    -- main sums over n -->  C

Where both are floats of 8 bits, copies may hold them as f16, in which they and their products are exact,
and which the matrix unit takes in any order and sums in f32:

    pack=a.b.f16    A[n, c, h, w] (f8)  -- pack_f16_A -->  A_packed_f16[n, h, w, c] (f16)  -- main -->  C

A copy is a computation ``c = a``, without a second factor and without a sum, and goes through the same
pipeline. An operand that is multiplied as tf32 is rounded in its copy. That alone can be worth a copy:
otherwise each element is rounded every time it is gathered. A plan that needs both has two copies,
``A_packed`` and ``A_packed_exact``. Rows of a copy of at least 16 bytes begin at multiples of 16 bytes;
the padding between them is never read. Sizes that are arguments are those of the copy, too. What copies
is in tiles/copy_kernels.py.

The factor of merged groups is copied with the zeros around its blocks, so that boxes can load it:

    B[f, c % 4] where c//4 == f//4 % 16  -- pack_blocks16_B -->  B_packed16[f, kh, kw, c]

Rows of a copy may be summed positions, as the matrix unit reads operands of 8 bits: those that
a window sees, once for each of its columns.

    A[n, c, h + kh - 1, w + kw - 1]   -- pack_rows_A -->   A_rows[n, c, h + kh - 1, kw, w]

A box begins at a multiple of 16 bytes in memory, a window anywhere; so each column of the window has rows
of its own, in which its first position comes first. What lies outside of the image is 0 in them. In memory
features are outermost, then images and columns of the window. The other operand, which has no window, is
copied with positions innermost.

Images of few features may be copied with a frame of zeros around them, and with zeros for features that
are not there, so that windows begin at multiples of 16 bytes and no element of one is masked. Then a row
of a window is a row of a box (tiles/boxes.py). The computation has the further features, too: they add
zeros to sums, and of results they are not stored.

    A[n, c, h*2 + kh - 3, w*2 + kw - 3]  -- pack_frame_A -->  A_framed[n, c, h*2 + kh, w*2 + kw]
        of c < 3                                                  of c < 4

With ``pack=f16`` nothing is copied: the elements of 8 bits become f16 in registers, on their way to the
matrix unit.

    read   a = A[n, c, h, w] (f8)             read   a = A[n, c, h, w] (f8)
    read   b = B[n, f, h, w] (f8)      ->     read   b = B[n, f, h, w] (f8)
    let    s = sum(a*b; n h w)                let    wide_a = f16(a)
                                              let    wide_b = f16(b)
                                              let    s = sum(wide_a*wide_b; n h w)

Bytes that do not lie along the sum would be transposed one by one in registers."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import lcm, prod

from transconv import ir
from transconv.compute import Axis, Compute, Read, Reduction, Value, axis_facts, moved
from transconv.schedule.tiles.merging import inner_feature
from transconv.schedule.words import has_rows, in_registers, is_framed, letters, widens
from transconv.simplify import Facts, multiple_of, prove, range_of, simplify

ROW_ALIGN = 16  # bytes
FEATURES = 1
"""The dimension of features in every tensor, innermost in most copies."""
LEAST_ROW = 32  # summed positions; fewer do not fill a row of shared memory (128 bytes of f32)


def row_of(view: ir.View, compute: Compute) -> int:
    """The innermost dimension of a copy: that of features. It is dimension 0 if there is only one feature
    and dimension 0 has features or batches, as in the factor of a depthwise sum, or if there is no other
    dimension."""
    if len(view.tensor.shape) < 2:
        return 0
    seen = ir.free_vars(view.dims[0].coord)
    outer = {x.role for x in compute.axes if x.var in seen}
    alone = view.tensor.shape[FEATURES] == 1 and not is_named(view.tensor, FEATURES)
    return 0 if alone and outer and outer <= {"feature", "batch"} else FEATURES


def innermost(compute: Compute, letter: str, wide: bool = False) -> int:
    """The innermost dimension of the copy of an operand: ``row_of``, or dimension 0 for f32 and 8-bit
    types that the matrix unit multiplies and that are summed along dimension 0, if no copy is ``wide``;
    not positions whose number is an argument, which may be few."""
    view = view_of(compute, letter)
    assert view is not None, f"{compute.name} has no operand {letter}"
    row = row_of(view, compute) if diagonal(view, compute) == 1 else FEATURES
    depthwise = all(x.size == 1 for x in compute.axes if x.role == "feature")
    if letter == "c" or depthwise or wide or not reads_along(compute):
        return row
    summed = {
        x.var
        for x in compute.axes_of("K")
        if x.role == "feature" or (x.extent is None and x.size >= LEAST_ROW)
    }
    return 0 if summed & ir.free_vars(view.dims[0].coord) else row


def reads_along(compute: Compute) -> bool:
    """Whether an asynchronous matrix unit reads both operands along the sum: tf32, and types of 8 bits."""
    types = [v.tensor.dtype for v in (compute.a, compute.b) if v is not None]
    if all(t.bits == 8 for t in types):
        return True
    return compute.math != "ieee" and all(t.memory is ir.f32 for t in types)


def copy_of(
    tensor: ir.Tensor, inner: int = FEATURES, merge: int = 1, wide: bool = False, near: bool = False
) -> ir.Tensor:
    """The workspace for a copy of a tensor: dimension ``inner`` innermost, the other one of the first two
    outermost, or if ``near`` next to it, the rest in order, and rows of at least 16 bytes padded to
    multiples of 16, also those whose length is an argument. Dimensions, shape and dtype stay, but
    dimension 1 is ``merge`` times as long, and 8-bit floats are f16 if ``wide``."""
    dtype = ir.f16 if wide and tensor.dtype.is_short else tensor.dtype
    rest = [*range(len(tensor.shape) - 1, 1, -1)]
    order = [inner, 1 - inner, *rest] if near else [inner, *rest, 1 - inner]
    shape = (tensor.shape[0], tensor.shape[1] * merge, *tensor.shape[2:])
    row = ROW_ALIGN // dtype.bytes
    row = row if shape[inner] >= row or is_named(tensor, inner) else 1
    blocks, step = [], 1
    for dim in order:
        blocks.append(ir.LayoutBlock(dim, shape[dim], step))
        step *= -(-shape[dim] // row) * row if dim == inner else shape[dim]
    layout = ir.Layout(dtype, len(shape), tuple(reversed(blocks)))
    name = f"{tensor.name}_packed{merge if merge > 1 else ''}"
    name += "" if dtype is tensor.dtype else f"_{dtype}"
    made = ir.Tensor(name, tensor.dims, shape, layout, copy_of=tensor.name, extents=tensor.extents)
    return replace(made, pitches=_apart(made, order, row)) if tensor.extents else made


def _apart(copy: ir.Tensor, order: list[int], row: int) -> tuple[ir.Expr, ...]:
    """The strides of a copy whose sizes are arguments, dimensions in ``order`` from the innermost, rows
    of multiples of ``row`` elements; none where rows follow one another."""
    inner = order[0]
    if not is_named(copy, inner) and copy.shape[inner] % row == 0:
        return ()
    found: dict[int, ir.Expr] = {}
    step: ir.Expr = ir.ONE
    for dim in order:
        found[dim] = step
        size = copy.extents[dim]
        step = simplify(step * ((size + (row - 1)) // row * row if dim == inner else size))
    return tuple(found[dim] for dim in range(len(order)))


def is_named(tensor: ir.Tensor, dim: int) -> bool:
    """Whether the size of a dimension is an argument, or follows from some."""
    return bool(tensor.extents) and bool(ir.free_vars(tensor.extents[dim]))


def workspaces(compute: Compute, pack: str, split: int, unit: str = "mma") -> list[ir.Tensor]:
    """The tensors that hold the copies of operands, and the one that the main kernel writes to if its
    result is copied afterwards."""
    named = [x for x in letters(pack) if x != "c" or split == 1]
    over = rows_of if has_rows(pack) else framed if is_framed(pack) else None
    if over is not None:
        return [over(v, compute).tensor for x in named if (v := view_of(compute, x)) is not None]
    return [copy_for(compute, x, unit, widens(pack)) for x in named]


def copy_for(compute: Compute, letter: str, unit: str, wide: bool) -> ir.Tensor:
    """The copy of an operand for a unit. An operand that the matrix unit multiplies as tf32 is rounded in
    its copy, because the unit would truncate it, with twice the error. Other products of f32 need the
    exact values and have a copy with another name."""
    view = view_of(compute, letter)
    assert view is not None
    inner = innermost(compute, letter, wide)
    made = copy_of(
        view.tensor, inner, diagonal(view, compute), wide, inner == 0 and _in_patches(view, compute)
    )
    if letter == "c" or made.dtype is not ir.f32:
        return made
    if unit == "mma" and wants_rounding(view, compute):
        return replace(made, layout=replace(made.layout, dtype=ir.multiplied_as(ir.f32, compute.math)))
    return replace(made, name=f"{made.name}_exact")


def _in_patches(view: ir.View, compute: Compute) -> bool:
    """Whether a tensor of 8-bit elements is summed along its first dimension alone, as gradients of layers
    are whose windows do not overlap: the others are then a run, with features innermost as in memory. Not
    where the computation is one of several parts: they share the copy, and others may sum along more."""
    if compute.part is not None:
        return False
    summed = {x.var for x in compute.axes_of("K") if x.size > 1}
    apart = {v for d in view.dims[1:] for e in (d.coord, d.mask) for v in ir.free_vars(e)}
    return view.tensor.dtype.bits == 8 and prod(view.tensor.shape[2:]) > 1 and not summed & apart


def view_of(compute: Compute, letter: str) -> ir.View | None:
    return {"a": compute.a, "b": compute.b, "c": compute.c}[letter]


def diagonal(view: ir.View, compute: Compute) -> int:
    """The number of blocks on the diagonal of a view: 1 unless it is a factor of merged groups."""
    return 1 if inner_feature(view, compute) is None else compute.merge


@lru_cache(maxsize=512)
def over_copies(compute: Compute, pack: str, unit: str = "mma") -> Compute:
    """The computation with views of copies, for the operands in ``pack`` and a unit."""
    seen = compute
    if is_framed(pack):
        return over_frame(compute.a, compute)
    for letter in letters(pack):
        view = view_of(seen, letter)
        assert view is not None, f"{compute.name} has no operand {letter}"
        dims = view.dims
        if inner := inner_feature(view, seen):
            dims = (dims[0], ir.ViewDim(inner.var), *dims[2:])
        over = (
            rows_of(view, seen)
            if has_rows(pack)
            else ir.View(copy_for(seen, letter, unit, widens(pack)), dims)
        )
        compute = compute.through(**{letter: over})
    return widened(compute) if in_registers(pack) else compute


def wants_rounding(view: ir.View, compute: Compute) -> bool:
    """Whether an operand of the matrix unit must be rounded to tf32 and is not a rounded copy."""
    return ir.multiplied_as(view.tensor.dtype, compute.math) is not view.tensor.dtype


def why_not_copied(
    compute: Compute, letter: str, gathered: bool = False, wide: bool = False
) -> str | None:
    """None if a copy of an operand is useful, because its layout or, if ``wide``, its type differs, else
    the reason. If the operand is ``gathered`` for the matrix unit, a copy that rounds is useful also with
    the same layout."""
    view = view_of(compute, letter)
    assert view is not None
    name = view.tensor.name
    if 0 in view.tensor.shape:
        return f"{name} is empty"
    if reason := compute.why_not_plain(view):
        return reason
    if len(view.tensor.shape) < 2:
        return f"{name} has only one dimension, which is innermost already"
    if diagonal(view, compute) > 1:
        stored = letter == "c"
        return f"only the blocks of {name} are stored, one element at a time" if stored else None
    if wide and view.tensor.dtype.is_short:
        return None
    inner = innermost(compute, letter)
    if rows_of_features(view.tensor, inner, axis_facts(compute)) and not (
        gathered and wants_rounding(view, compute)
    ):
        return (
            f"{name} already has {view.tensor.dims[inner]} innermost and rows that begin at multiples "
            "of 16 bytes or are shorter"
        )
    return None


def rows_of_features(tensor: ir.Tensor, inner: int = FEATURES, facts: Facts | None = None) -> bool:
    """Whether a tensor already has the layout of a copy: stride 1 along ``inner``, and the other strides
    multiples of 16 bytes unless rows are shorter. True for a tensor of one dimension. ``facts``: of sizes
    that are arguments."""
    strides = tensor.layout.strides()
    if len(tensor.shape) < 2:
        return True
    if strides is None:
        return False
    if tensor.extents:
        return _are_rows(tensor, inner, facts or Facts())
    others = [s for d, s in enumerate(strides) if d != inner and tensor.shape[d] > 1]
    short = tensor.shape[inner] * tensor.dtype.bytes < ROW_ALIGN
    return (strides[inner] == 1 or tensor.shape[inner] == 1) and (
        short or all(s * tensor.dtype.bytes % ROW_ALIGN == 0 for s in others)
    )


def _are_rows(tensor: ir.Tensor, inner: int, facts: Facts) -> bool:
    """``rows_of_features`` for all sizes that are arguments."""
    steps, row = [simplify(s) for s in tensor.steps], tensor.bounds[inner]
    others = [s for d, s in enumerate(steps) if d != inner and tensor.bounds[d] != ir.ONE]
    short = isinstance(row, ir.Const) and row.value * tensor.dtype.bytes < ROW_ALIGN
    return (steps[inner] == ir.ONE or row == ir.ONE) and (
        short or all(multiple_of(s, facts) * tensor.dtype.bytes % ROW_ALIGN == 0 for s in others)
    )


MOST = 16  # columns of a window, of each of which there is a copy


def why_not_rows(view: ir.View, compute: Compute) -> str | None:
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
    if row.size < LEAST_ROW:
        return f"rows of {row.size} positions are shorter than {LEAST_ROW}"
    last, others = view.dims[-1], view.dims[:-1]
    if row.var not in ir.free_vars(last.coord) or any(
        row.var in ir.free_vars(e) for d in others for e in (d.coord, d.mask)
    ):
        return f"{name} has no dimension of {row.name} alone"
    if len(_seen(last)) > 2 or any(compute.kind(v.name) == "K" for v in _seen(last) if v is not row.var):
        return f"{name}: a row depends on more than {row.name} and one column of a window"
    columns = prod(compute.size(v.name) for v in _seen(last) if v is not row.var)
    if columns > MOST:
        return f"{name}: a window has {columns} columns, and each has a copy; expected at most {MOST}"
    return None


def rows_of(view: ir.View, compute: Compute) -> ir.View:
    """The view of an operand through its copy. Relies on ``why_not_rows``."""
    tensor, row = view.tensor, _row(compute)
    columns = [v for v in _seen(view.dims[-1]) if v is not row.var]
    dims = (*view.dims[:-1], *map(ir.ViewDim, columns), ir.ViewDim(row.var))
    names = (*tensor.dims[:-1], *(v.name for v in columns), row.name)
    shape = (*tensor.shape[:-1], *(compute.size(v.name) for v in columns), row.size)
    space = [*range(2, len(tensor.shape) - 1)]
    last = len(shape) - 1
    order = [1, 0, *range(len(tensor.shape) - 1, last), *space, last]  # outermost first
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= -(-shape[dim] // ROW_ALIGN) * ROW_ALIGN if dim == last else shape[dim]
    layout = ir.Layout.from_strides(tensor.dtype, shape, strides, 0)
    return ir.View(ir.Tensor(f"{tensor.name}_rows", names, shape, layout, copy_of=tensor.name), dims)


def row_copy(view: ir.View, compute: Compute) -> Compute:
    """The computation that makes the copy. Features vary next to positions, as both memories have them."""
    over = rows_of(view, compute)
    made, row = over.tensor, _row(compute)
    given = {ir.Var(n): ir.Var(n) for n in made.dims}
    values: dict[ir.Expr, ir.Expr] = {row.var: given[ir.Var(row.name)]}
    last = view.dims[-1]
    coord, mask = (ir.substitute(e, values) for e in (last.coord, last.mask))
    seen = (*(ir.ViewDim(ir.Var(n)) for n in made.dims[: len(view.dims) - 1]), ir.ViewDim(coord, mask))
    inner = len(made.dims) - 1
    order = [d for d in range(inner) if d != 1] + [1, inner]
    axes = tuple(Axis(made.dims[d], made.shape[d], "feature" if d == inner else "position") for d in order)
    found = moved(
        f"pack_rows_{view.tensor.name}",
        axes,
        ir.View(view.tensor, seen),
        ir.View(made, tuple(ir.ViewDim(ir.Var(n)) for n in made.dims)),
        compute.math,
    )
    return replace(found, does="pack")


def why_not_framed(view: ir.View, compute: Compute) -> str | None:
    """None if an operand can be copied with a frame of zeros, else the reason."""
    name, tensor, facts = view.tensor.name, view.tensor, axis_facts(compute)
    if compute.named is not None or compute.merge > 1 or compute.part is not None or compute.fill_of(view):
        return f"{name}: frames are for sizes that are numbers, all phases in one, and zeros around images"
    if reason := compute.why_not_plain(view):
        return reason
    if len(tensor.shape) < 3 or _feature(view, compute) is None:
        return f"{name} has no dimension of features alone, or no further ones"
    if tensor.shape[FEATURES] * tensor.dtype.bytes >= ROW_ALIGN:
        return f"{name} has {tensor.shape[FEATURES]} features, which are a row of 16 bytes without a frame"
    for d, size in zip(view.dims[2:], tensor.shape[2:], strict=True):
        seen, inside = range_of(d.coord, facts), facts.assume(d.coord >= 0).assume(d.coord < size)
        if seen.lo is None or seen.hi is None:
            return f"{name}: {ir.readable(d.coord)} has no first or no last place"
        if not all(prove(simplify(part, facts), inside) for part in ir.conjuncts(d.mask)):
            return f"{name}: the mask {ir.readable(d.mask)} says more than that {d.coord} is inside"
    return None if _features(view, compute) else f"{name}: no row of windows lies along its last dimension"


def _feature(view: ir.View, compute: Compute) -> Axis | None:
    """The axis that runs through all features of a view, and along no other dimension."""
    d, others = view.dims[FEATURES], [x for x in view.dims if x is not view.dims[FEATURES]]
    axis = next((x for x in compute.axes if x.var is d.coord and x.role == "feature"), None)
    alone = axis and not any(axis.var in ir.free_vars(e) for x in others for e in (x.coord, x.mask))
    return axis if alone and axis and axis.size == view.tensor.shape[FEATURES] else None


def _step(d: ir.ViewDim, compute: Compute) -> int:
    """How far windows of neighbouring positions are apart along a dimension; 0 if that is no number."""
    steps = [
        simplify(ir.substitute(d.coord, {x.var: x.var + 1}) - d.coord, axis_facts(compute))
        for x in compute.axes
        if x.role == "position" and x.var in ir.free_vars(d.coord)
    ]
    found = steps[0].value if len(steps) == 1 and isinstance(steps[0], ir.Const) else 0
    return max(0, int(found))


def _features(view: ir.View, compute: Compute) -> int:
    """How many features a framed copy has, so that neighbouring windows begin multiples of 16 bytes apart;
    0 if windows lie in no row."""
    step, row, count = _step(view.dims[-1], compute), ROW_ALIGN // view.tensor.dtype.bytes, 1
    while step and (count < view.tensor.shape[FEATURES] or count * step % row):
        count *= 2
    return count if step else 0


def framed(view: ir.View, compute: Compute) -> ir.View:
    """The view of an operand through its framed copy, whose sizes are multiples of the steps between
    windows, and its rows of 16 bytes. Relies on ``why_not_framed``."""
    tensor, facts, features = view.tensor, axis_facts(compute), _features(view, compute)
    ends = [(int(r.lo or 0), int(r.hi or 0)) for d in view.dims[2:] for r in [range_of(d.coord, facts)]]
    each = [max(1, _step(d, compute)) for d in view.dims[2:]]
    each[-1] = lcm(each[-1], max(1, ROW_ALIGN // tensor.dtype.bytes // features))
    sizes = [-(-(hi - lo + 1) // n) * n for (lo, hi), n in zip(ends, each, strict=True)]
    shape = (tensor.shape[0], features, *sizes)
    layout = ir.Layout.dense(tensor.dtype, shape, (0, *range(2, len(shape)), FEATURES))
    places = (
        ir.ViewDim(simplify(d.coord - lo, facts)) for d, (lo, _) in zip(view.dims[2:], ends, strict=True)
    )
    made = ir.Tensor(f"{tensor.name}_framed", tensor.dims, shape, layout, copy_of=tensor.name)
    return ir.View(made, (*view.dims[:2], *places))


def over_frame(view: ir.View, compute: Compute) -> Compute:
    """The computation over the framed copy of its first operand, with as many features as that has."""
    over, feature = framed(view, compute), _feature(view, compute)
    assert feature is not None
    axes = tuple(replace(x, size=over.tensor.shape[1]) if x is feature else x for x in compute.axes)

    def masked(seen: ir.View) -> ir.View:
        dims = tuple(
            replace(d, mask=ir.all_of([d.mask, feature.var < feature.size]))
            if feature.var in ir.free_vars(d.coord)
            else d
            for d in seen.dims
        )
        return over if seen is view else ir.View(seen.tensor, dims)

    return replace(compute.over(masked), axes=axes)


def frame_copy(view: ir.View, compute: Compute) -> Compute:
    """The computation that makes the framed copy."""
    made, facts = framed(view, compute).tensor, axis_facts(compute)
    batch, feature, *places = (ir.Var(n) for n in made.dims)
    seen = [ir.ViewDim(batch), ir.ViewDim(feature, feature < view.tensor.shape[FEATURES])]
    for at, d, size in zip(places, view.dims[2:], view.tensor.shape[2:], strict=True):
        coord = simplify(at + int(range_of(d.coord, facts).lo or 0))
        seen.append(ir.ViewDim(coord, ir.all_of([coord >= 0, coord < size])))
    axes = tuple(
        Axis(made.dims[d], made.shape[d], "feature" if d == FEATURES else "position")
        for d in (0, *range(2, len(made.dims)), FEATURES)
    )
    whole = ir.View(made, tuple(ir.ViewDim(ir.Var(n)) for n in made.dims))
    given = ir.View(view.tensor, tuple(seen))
    return replace(moved(f"pack_frame_{view.tensor.name}", axes, given, whole, compute.math), does="pack")


def _row(compute: Compute) -> Axis:
    """The last axis of summed positions."""
    return next(x for x in reversed(compute.axes_of("K")) if x.role == "position")


def _seen(dim: ir.ViewDim) -> list[ir.Var]:
    """The variables of a coordinate and its mask, in the order of their names."""
    mask = ir.free_vars(dim.mask) if dim.mask is not ir.TRUE else frozenset()
    return sorted(ir.free_vars(dim.coord) | mask, key=lambda v: v.name)


def why_not_widened(compute: Compute) -> str | None:
    """None if both factors are elements of 8-bit floats as they are read, else the reason."""
    views = [v for v in (compute.a, compute.b) if v is not None]
    other = next((v.tensor for v in views if not v.tensor.dtype.is_short), None)
    if other is not None:
        return f"{other.name} holds {other.dtype}, no floats of 8 bits"
    if compute.factors is None or not all(isinstance(f, Read) for f in compute.factors):
        return f"{compute.name} has no product of two tensors as they are"
    return None


def widened(compute: Compute) -> Compute:
    """The computation with factors of f16. Relies on ``why_not_widened``."""
    assert compute.factors is not None and compute.sum is not None
    wide = {f.var: Value(f"wide_{f.name}", ir.Cast(f.var, ir.f16)) for f in compute.factors}
    a, b = (ir.Cast(wide[f.var].var, compute.acc) for f in compute.factors)
    at = compute.steps.index(compute.sum)
    made: Reduction = replace(compute.sum, value=a * b)
    return replace(compute, steps=(*compute.steps[:at], *wide.values(), made, *compute.steps[at + 1 :]))
