"""Builds computations of common forms: a sum of products of two views, a sum of one view, a copy.

Also here: a computation of several examples at once: the same, over one axis more.

    read  x = X[m, k]                     read  x = X[example, m, k]
    read  w = W[k]                        read  w = W[k]                   the same for all examples
    store Y[m] = sum(x*w; k)        ->    store Y[example, m] = sum(x*w; k)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from transconv.compute.analysis.axis_roles import with_roles
from transconv.compute.compute import Compute
from transconv.compute.steps import Axis, Read, Reduction, Step, Value, Write, fresh, used
from transconv.compute.text.format import parse
from transconv.ir import (
    Cast,
    DType,
    Layout,
    LayoutBlock,
    Tensor,
    Var,
    View,
    ViewDim,
    f32,
    free_vars,
)
from transconv.support import ComputeError

ACC = "acc"
"""The name of the reduction in ``product``."""


def product(name: str, axes: tuple[Axis, ...], a: View, b: View, c: View, acc: DType,
            behind: tuple[tuple[Step, ...], str] | None = None, math: str = "tf32") -> Compute:
    """``c = sum(a * b)`` over the axes that c does not mention. ``behind``: the steps from the sum, named
    ``acc``, to the store, and a name for them; by default the sum is cast and stored."""
    left, right = Read("a", a), Read("b", b)

    def made(before: tuple[Value, ...], factors: tuple[Var, Var]) -> Compute:
        term = Cast(factors[0], acc) * Cast(factors[1], acc)
        total = Reduction(ACC, "sum", term, _summed(axes, c))
        after, word = behind or ((_stored(c, total),), "")
        return Compute(name, axes, (left, right, *before, total, *after), math, behind=word)

    plain = made((), (left.var, right.var))
    if a.tensor.dtype.kind == b.tensor.dtype.kind:
        return plain
    of_one = made(*_of_one_kind(left, right))
    return of_one if of_one.factors else plain


def _of_one_kind(left: Read, right: Read) -> tuple[tuple[Value, ...], tuple[Var, Var]]:
    """An integer beside a float, cast to its type, in which matrix units multiply both. It is f32 on the
    way: Triton's interpreter has no cast of integers to bf16."""
    kinds = left.view.tensor.dtype, right.view.tensor.dtype
    if kinds[0].kind == "int":
        value = Value("near_a", Cast(Cast(left.var, f32), kinds[1]))
        return (value,), (value.var, right.var)
    value = Value("near_b", Cast(Cast(right.var, f32), kinds[0]))
    return (value,), (left.var, value.var)


def total(name: str, axes: tuple[Axis, ...], a: View, c: View, like: Compute) -> Compute:
    """``c = sum(a)`` over the axes that c does not mention, with the reduction of ``like``, the steps
    after it, and what these use of the steps before it, such as a bias that is read first."""
    assert like.sum is not None
    kept = _kept(like)
    part = Read(fresh("a", [s.name for s in (*kept, *like.after) if not isinstance(s, Write)]), a)
    made = Reduction(like.sum.name, like.sum.op, Cast(part.var, like.acc), _summed(axes, c))
    return Compute(name, axes, (part, made, *kept, *like.after), like.math, behind=like.behind,
                   part=like.part, does="add")


def _kept(like: Compute) -> tuple[Step, ...]:
    """The steps before the first reduction that steps after it use."""
    assert like.sum is not None
    names = {v.name for s in like.after for v in used(s)}
    kept: list[Step] = []
    for step in reversed(like.steps[:like.steps.index(like.sum)]):
        if not isinstance(step, Write) and step.name in names:
            kept.append(step)
            names |= {v.name for v in used(step)}
    return tuple(reversed(kept))


def moved(name: str, axes: tuple[Axis, ...], a: View, c: View, math: str) -> Compute:
    """``c = a``, rounded to the type of c."""
    given = Read("a", a)
    steps: tuple[Step, ...] = (given, Write(c, given.var))
    if c.tensor.dtype is not a.tensor.dtype:
        rounded = Value("near", Cast(given.var, c.tensor.dtype))
        steps = (given, rounded, Write(c, rounded.var))
    return Compute(name, axes, steps, math)


def _summed(axes: tuple[Axis, ...], c: View) -> tuple[str, ...]:
    seen = {v.name for d in c.dims for e in (d.coord, d.mask) for v in free_vars(e)}
    return tuple(x.name for x in axes if x.name not in seen)


def _stored(c: View, total: Reduction) -> Write:
    return Write(c, Cast(total.var, c.tensor.dtype))


def of_examples(compute: Compute, count: int, given: Collection[str]) -> Compute:
    """The computation of ``count`` examples: the tensors ``given`` and all that is stored have them at a
    first dim, one behind the other. Raises ComputeError where sizes are arguments."""
    if compute.named is not None:
        raise ComputeError(f"sizes that are arguments ({compute.named}) have no examples; "
                           "expected numbers")
    taken = {*compute.names.all, *(t.name for t in compute.tensors)}
    axis = Axis(fresh("example", taken), count, "")
    stored = {w.view.tensor.name for w in compute.writes}

    def seen(view: View) -> View:
        tensor = view.tensor
        if tensor.name not in stored and tensor.name not in given:
            return view
        return View(several(tensor, axis.name, count), (ViewDim(axis.var), *view.dims))

    made = compute.over(seen)
    name = compute.name.removesuffix("_examples")
    made = replace(made, axes=(axis, *compute.axes), name=f"{name}_examples")
    return parse(str(with_roles(made)))


def several(tensor: Tensor, dim: str, count: int) -> Tensor:
    """A tensor of a first dim more, along which tensors like this one lie."""
    old = tensor.layout
    step = 1 + sum((b.size - 1) * b.stride for b in old.blocks)
    blocks = (LayoutBlock(0, count, step), *(replace(b, dim=b.dim + 1) for b in old.blocks))
    return Tensor(tensor.name, (dim, *tensor.dims), (count, *tensor.shape),
                  Layout(old.dtype, old.ndims + 1, blocks, old.offset))
