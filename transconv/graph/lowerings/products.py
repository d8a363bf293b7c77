"""Rows of products: of matrices, and convolutions by their relation, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from transconv.compute import BATCH, Axis, Compute, counted, of_any_batch
from transconv.conv import ConvProblem, Prop, any_size, computes, why_not_multiplied
from transconv.graph.fusion import index_ir
from transconv.graph.fusion.index_ir import Factor, Instead, MovedView, Piece, ProductSum
from transconv.graph.lowerings import upsampling, view_indexing
from transconv.graph.lowerings.table import (
    NodeCall,
    NotOurs,
    arithmetic,
    expanded,
    from_before,
    kind,
    mapped,
    reduced,
    reshaped,
    row,
)
from transconv.graph.sizes import Length, SymbolicSize, like
from transconv.ir import TRUE, Expr, Var, all_of, free_vars, substitute, value_at
from transconv.support import TransconvError, Unsupported
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls.lower_call import DTYPES, Types, describe, each, flags, read_precision
from transconv.torch_ops.operators import read
from transconv.torch_ops.quantized.qparams import OPERANDS

Shape = tuple[Length, ...]


def check_types(*operands: Piece) -> None:
    """Raises NotOurs unless the operands are of one type that is multiplied."""
    first = operands[0].dtype
    if first not in DTYPES or any(x.dtype is not first for x in operands):
        raise NotOurs("a product of these types")


def product(x: Piece, w: Piece, label: str, dtype: torch.dtype) -> Piece:
    """(..., m, k) times (..., k, n), of the same leading dims. Of one term it is no sum."""
    x, w = before_widened(x, w)
    check_types(x, w)
    *lead, m, k = x.shape
    if k == 1:
        return one_term(x, w, (*lead, m, w.shape[-1]), label, dtype)
    axes = list(zip(counted("b"), lead, strict=False))
    batch = [Var(name) for name, _ in axes]
    places = []
    for name, n, seen in (("m", m, (x,)), ("n", w.shape[-1], (w,)), ("k", k, (x, w))):
        own = _split(name, n, seen)
        axes += own
        places.append(view_indexing.flattened([Var(e) for e, _ in own], [size for _, size in own]))
        summed = tuple(e for e, _ in own)
    row_, column, inner = places
    math = "tf32" if x.dtype is torch.float32 and read_precision("cuda", "matmul") == "tf32" else "ieee"
    return ProductSum(
        shape=(*lead, m, w.shape[-1]),
        dtype=dtype,
        label=label,
        math=math,
        axes=tuple(axes),
        summed=summed,
        factors=(Factor(x, (*batch, row_, inner), TRUE), Factor(w, (*batch, inner, column), TRUE)),
        at=(*batch, row_, column),
    )


def before_widened(x: Piece, w: Piece) -> tuple[Piece, Piece]:
    """Factors of f32 that were both of one type of 16 bits, as they were: f32 has each of their products,
    and units that multiply matrices take them many times as fast."""
    for held in (torch.bfloat16, torch.float16) if x.dtype is torch.float32 is w.dtype else ():
        found = from_before(x, held), from_before(w, held)
        if found[0] is not None and found[1] is not None:
            return found[0], found[1]
    return x, w


def one_term(x: Piece, w: Piece, shape: Shape, label: str, dtype: torch.dtype) -> Piece:
    """A product of one term for each element: no sum, but a map."""
    return mapped("{} * {}".format, expanded(x, shape), expanded(w, shape), dtype=dtype, label=label)


def _split(name: str, n: Length, seen: Sequence[Piece]) -> list[tuple[str, Length]]:
    """An axis of a product; where its size is a name, the dims that were joined to it: a coordinate cannot
    be divided by a name."""
    for piece in seen if isinstance(n, SymbolicSize) else ():
        while isinstance(piece, MovedView):
            piece = piece.of
            for first in range(len(piece.shape)):
                for last in range(first + 2, len(piece.shape) + 1):
                    if prod(piece.shape[first:last]) == n:
                        wide = [size for size in piece.shape[first:last] if size != 1]
                        return list(zip(counted(name), wide, strict=False))
    return [(name, n)]


@row("mm", "bmm")
def _mm(call: NodeCall) -> Piece:
    x, w = call.args[:2]
    return product(x, w, call.name.split(".")[0], call.dtype)


@row("addmm", "baddbmm")
def _addmm(call: NodeCall) -> Piece:
    added, x, w = call.args[:3]
    beta, alpha = call.kwargs.get("beta", 1), call.kwargs.get("alpha", 1)
    made = product(x, w, call.name.split(".")[0], call.dtype)
    text = "{}" if alpha == 1 else f"{{}}*{alpha!r}"
    if beta == 0:
        return mapped(text.format, made, dtype=call.dtype, label="addmm")
    text += " + {}" if beta == 1 else f" + {{}}*{beta!r}"
    return mapped(text.format, made, expanded(added, call.shape), dtype=call.dtype, label="addmm")


@row("mv", "dot")
def _mv(call: NodeCall) -> Piece:
    x, w = call.args[:2]
    check_types(x, w)
    return reduced(
        "sum",
        (len(x.shape) - 1,),
        x,
        expanded(w, x.shape),
        dtype=call.dtype,
        write="{}*{}".format,
        label=call.name.split(".")[0],
    )


@row("convolution")
def _convolution(call: NodeCall) -> Piece:
    x, w, bias, *rest = call.args
    p = params(rest)
    return _forward(call, x, w, bias, p)


def _forward(call: NodeCall, x: Piece, w: Piece, bias: Piece | None, p: Params) -> Piece:
    if not p.transposed:
        x, p = _unpadded(x, p)
    made = _scaled(call.shape, x, w, p, call.dtype, "convolution") if not p.transposed else None
    if made is None:
        related = _related(Prop.BWD_D if p.transposed else Prop.FWD, call.shape, x, w, p, call.dtype)
        related.instead = _instead(call, x, w, p, bias is not None)
        made = related
    if bias is None:
        return made
    if bias.dtype is not x.dtype and kind(bias.dtype) != "float":
        raise NotOurs("a bias of whole numbers")
    wide = expanded(reshaped(bias, (bias.size, *[1] * (len(call.shape) - 2))), call.shape)
    return arithmetic(call, "{} + {}".format, made, wide, label="bias")


def _scaled(shape: Shape, x: Piece, w: Piece, p: Params, dtype: torch.dtype, label: str) -> Piece | None:
    """A convolution of one feature by one tap, or its gradient: each element times that of its feature's
    weight, which is no sum. None for another one."""
    numbers = (*p.stride, *(1 + n for n in (*p.padding, *p.output_padding)), p.groups, x.shape[1])
    if any(n != 1 for n in (*numbers, *w.shape[2:])):
        return None
    check_types(x, w)
    return one_term(x, reshaped(w, (w.size, *[1] * (len(shape) - 2))), shape, label, dtype)


def _instead(call: NodeCall, x: Piece, w: Piece, p: Params, finished: bool) -> Instead | None:
    """A convolution of the image that is made larger before this one. Sums in a narrow weight are rounded
    once more: no more often than torch rounds a result to which a bias is added behind (``finished``)."""
    found = upsampling.small(x)
    other = found and upsampling.params(p, found, [int(k) for k in w.shape[2:]])
    if found is None or other is None:
        return None
    try:
        made = _related(
            Prop.BWD_D, call.shape, found.image, upsampling.weight(w, found), other, call.dtype
        )
    except NotOurs:
        return None
    made.label = "upsampled convolution"
    return Instead(made, not finished and call.dtype.itemsize < 4)


@row("convolution_backward")
def _backward(call: NodeCall) -> tuple[Piece | None, ...]:
    grad, x, w, _, *rest, mask = call.args
    p = params(rest)
    made: list[Piece | None] = [None, None, None]
    if mask[0]:
        prop = Prop.FWD if p.transposed else Prop.BWD_D
        made[0] = _gradient(prop, x.shape, grad, w, p, x.dtype)
    if mask[1]:
        made[1] = _weight(x, grad, w, p)
    if mask[2]:
        dims = [d for d in range(len(grad.shape)) if d != 1]
        made[2] = reduced("sum", dims, grad, dtype=grad.dtype, label="bias gradient")
    return tuple(made)


# The operators that converted modules and calls of this package become in a graph.


@row("transconv::fwd")
def _converted(call: NodeCall) -> Piece:
    x, w, bias, residual, text = call.args
    p, activation, _ = read(text)
    made = _forward(call, x, w, bias, p)
    if residual is not None:
        made = arithmetic(call, "{} + {}".format, made, residual, label="add")
    return arithmetic(call, f"{activation}({{}})".format, made, label=activation) if activation else made


@row("transconv::bwd_d")
def _converted_input(call: NodeCall) -> Piece:
    grad, x, w, text = call.args
    p = read(text).params
    return _gradient(Prop.FWD if p.transposed else Prop.BWD_D, x.shape, grad, w, p, x.dtype)


@row("transconv::bwd_w")
def _converted_weight(call: NodeCall) -> Piece:
    grad, x, w, text = call.args
    return _weight(x, grad, w, read(text).params)


def params(rest: Sequence[Any]) -> Params:
    """The numbers of a convolution's call, from its strides on. Sizes among them are assumed to be the
    example's."""
    stride, padding, dilation, transposed, output_padding, groups = rest[:6]
    n = len(stride)

    def ints(given: Any) -> tuple[int, ...]:
        return tuple(map(int, given)) * (n if len(given) == 1 else 1)

    return Params(
        ints(stride), ints(padding), ints(dilation), transposed, ints(output_padding), int(groups)
    )


def _dense(shape: Shape, named: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape and strides; of the example, where the relation has names for the sizes of an image and of a
    batch (``named``). A number of features or taps is assumed to be the example's."""
    numbers = tuple([int(like(n) if named and d != 1 else n) for d, n in enumerate(shape)])
    return numbers, torch.empty(numbers, device="meta").stride()


class _Relation(NamedTuple):
    """The computations of a direction: of a convolution, or with names for sizes, and what these stand
    for."""

    computes: tuple[Compute, ...]
    prop: Prop
    problem: tuple[ConvProblem, Prop] | None
    sizes: dict[str, SymbolicSize]

    def of(self, e: Expr) -> Expr:
        """An expression with these sizes."""
        return substitute(e, {Var(name): size.expr for name, size in self.sizes.items()})


def _relation(
    prop: Prop, near: Shape, weight: Shape, far: Shape, p: Params, dtype: Types, math: str | None = None
) -> _Relation:
    """``math``: torch's for the type by default. Raises NotOurs."""
    try:
        problem = describe(
            dtype,
            _dense(near, True),
            _dense(weight),
            _dense(far, True),
            p,
            math or flags(each(dtype)[0]).math,
        )
        src = far if p.transposed else near
        named = zip(("mb", *(f"i{n}" for n in problem.spatial)), (src[0], *src[2:]), strict=True)
        sizes = {name: n for name, n in named if isinstance(n, SymbolicSize)}
        if not sizes:
            return _Relation(computes(problem, prop), prop, (problem, prop), {})
        made = _of_any_batch(problem, prop) if {*sizes} == {"mb"} else ()
        made = made or any_size(problem, prop, frozenset(sizes))
    except (TransconvError, ValueError) as error:
        raise NotOurs(str(error)) from None
    stands = {name.upper(): n for name, n in sizes.items()}
    found = _Relation(made, prop, None, stands | ({BATCH: sizes["mb"]} if "mb" in sizes else {}))
    known = next(iter(sizes.values())).known
    for condition in dict.fromkeys(c for m in made if m.named for c in m.named.requirements):
        if not known.assume(found.of(condition)):
            raise NotOurs(f"a convolution of any size requires {condition}")
    return found


def _of_any_batch(problem: ConvProblem, prop: Prop) -> tuple[Compute, ...]:
    """The computations of a direction with the number of images as a name, as they are for one number;
    none where a position of the result may be none of the image's, or tensors are too large."""
    each = computes(problem, prop)
    if any(d.mask is not TRUE for c in each for d in c.c.dims):
        return ()
    try:
        return tuple(map(of_any_batch, each))
    except Unsupported:
        return ()


def _related(prop: Prop, shape: Shape, x: Piece, w: Piece, p: Params, dtype: torch.dtype) -> ProductSum:
    """A convolution, forward."""
    check_types(x, w)
    return _product(
        _relation(prop, x.shape, w.shape, shape, p, x.dtype), (x, w), shape, dtype, "convolution"
    )


def convolved(
    shape: Shape, x: Piece, w: Piece, p: Params, dtype: torch.dtype, math: str | None = None
) -> ProductSum:
    """A convolution of other element types: its sums, in ``dtype``. ``math``: tf32 leaves those of 8-bit
    floats in the matrix unit. Raises NotOurs for types that are not multiplied."""
    if (
        x.dtype not in OPERANDS
        or w.dtype not in OPERANDS
        or why_not_multiplied(OPERANDS[x.dtype], OPERANDS[w.dtype])
    ):
        raise NotOurs("a product of these types")
    prop = Prop.BWD_D if p.transposed else Prop.FWD
    found = _relation(prop, x.shape, w.shape, shape, p, (x.dtype, w.dtype, dtype), math)
    return _product(found, (x, w), shape, dtype, "convolution")


def _gradient(prop: Prop, shape: Shape, grad: Piece, w: Piece, p: Params, dtype: torch.dtype) -> Piece:
    """The gradient of the input."""
    check_types(grad, w)
    if not p.transposed and (made := _scaled(shape, grad, w, p, dtype, "input gradient")) is not None:
        return made
    return _product(
        _relation(prop, shape, w.shape, grad.shape, p, grad.dtype),
        (grad, w),
        shape,
        dtype,
        "input gradient",
    )


def _weight(x: Piece, grad: Piece, w: Piece, p: Params) -> ProductSum:
    """The gradient of the weight."""
    check_types(x, grad)
    found = _relation(Prop.BWD_W, x.shape, w.shape, grad.shape, p, x.dtype)
    given = (grad, x) if p.transposed else (x, grad)
    return _product(found, given, w.shape, w.dtype, "weight gradient")


def _product(
    found: _Relation, given: tuple[Piece, Piece], shape: Shape, dtype: torch.dtype, label: str
) -> ProductSum:
    """The relation's axes and views, over pieces."""
    first, *others = [_one(c, found, given, shape, dtype, label) for c in found.computes]
    first.others = tuple(others)
    for part in (first, *others):
        part.prop, part.relation = found.prop, found.problem
    return first


def _one(
    compute: Compute,
    found: _Relation,
    given: tuple[Piece, Piece],
    shape: Shape,
    dtype: torch.dtype,
    label: str,
) -> ProductSum:
    assert compute.sum is not None and compute.b is not None
    a, b = (
        Factor(
            piece,
            tuple(found.of(d.coord) for d in view.dims),
            found.of(all_of([d.mask for d in view.dims])),
        )
        for view, piece in zip((compute.a, compute.b), given, strict=True)
    )
    if any(d.mask is not TRUE for d in compute.c.dims):
        raise NotOurs("its phases are not of one size")
    return ProductSum(
        shape=shape,
        dtype=dtype,
        label=label,
        math=compute.math,
        summed=compute.sum.axes,
        axes=tuple((x.name, _extent(x, found)) for x in compute.axes),
        factors=(a, b),
        at=tuple(found.of(d.coord) for d in compute.c.dims),
    )


def _extent(axis: Axis, found: _Relation) -> Length:
    if axis.extent is None:
        return axis.size
    return next(iter(found.sizes.values())).known.made(found.of(axis.extent))


def _unpadded(x: Piece, p: Params) -> tuple[Piece, Params]:
    """What is padded, and a convolution's numbers with all zeros before and behind it.

        conv(pad(x, 2 before, 0 behind), padding=1)    ->    conv(x, padding=3 before, 1 behind)

    Boxes have the zeros beyond an image for nothing; of a pad that is a view of its own they would not."""
    before, behind = list(p.pad_lo), list(p.pad_hi)
    while (sides := _zeros(x)) and isinstance(x, index_ir.PiecewiseIndex):
        before = [a + n for a, (n, _) in zip(before, sides, strict=True)]
        behind = [a + n for a, (_, n) in zip(behind, sides, strict=True)]
        x = x.parts[0].of
    both = before if before == behind else [*before, *behind]
    return x, p._replace(padding=tuple(both))


def _zeros(x: Piece) -> list[tuple[int, int]]:
    """How many zeros are before and behind each spatial dim of what a value pads; none if it is no pad, or
    one along other dims, or where sizes are names."""
    if not isinstance(x, index_ir.PiecewiseIndex) or x.label != "pad" or len(x.parts) != 2:
        return []
    of, beyond = x.parts[0].of, x.parts[1].of
    if (
        not isinstance(beyond, index_ir.ConstantValue)
        or beyond.value != 0
        or any(isinstance(n, SymbolicSize) for n in (*of.shape, *x.shape))
    ):
        return []
    names = [Var(f"d{d}") for d in range(len(x.shape))]
    first = [
        value_at(e, {name.name: 0}) if free_vars(e) <= {name} else 1
        for name, e in zip(names, x.parts[0].move(tuple(names)), strict=True)
    ]
    sides = [(-at, int(n) + at - int(m)) for at, n, m in zip(first, x.shape, of.shape, strict=True)]
    return sides[2:] if sides[:2] == [(0, 0)] * 2 and all(n >= 0 for s in sides for n in s) else []
