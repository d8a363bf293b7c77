"""The derivatives of traced epilogues as one kernel: a computation over the result's elements.

    read acc, arg0, arg1, g        let value_0 = ...        store dacc = ..., darg0 = ...

Each follows from the derivatives of the table's rows by the chain rule (``Pointwise.derivatives``). torch
sums the gradient of an operand over the dims that it was broadcast along."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from transconv.compute import Axis, Compute, Read, Write, pointwise
from transconv.functional.calls import torch_operators
from transconv.functional.calls.compiled_launch import refused
from transconv.ir import Cast, Const, DType, Expr, Layout, View, ViewDim, f32, f64
from transconv.ir import Tensor as Memory
from transconv.runtime import torch_internals
from transconv.support import ComputeError
from transconv.torch_ops.fused import traced_route
from transconv.torch_ops.fused.traced_route import TYPES, spread

Tensor = torch.Tensor
Place = tuple[tuple[int, ...], tuple[int, ...], DType]  # shape, strides, type


def gradients(
    text: str, acc: Tensor, operands: Sequence[Tensor], grad: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None] | None:
    """The gradients of ``acc`` and of the operands by one kernel, or None where torch computes them: on
    the CPU, in graphs, and for a function that has no derivative."""
    given = [acc, *(spread(t, acc.dim()) for t in operands), grad]
    if torch.compiler.is_compiling() or torch_internals.dispatch_modes() or refused(given, [True]):
        return None
    places = tuple((tuple(t.shape), t.stride(), TYPES[t.dtype]) for t in given)
    try:
        compute, reads, stores = _compute(text, places, tuple(wanted))
    except ComputeError:
        return None
    made = iter(torch_operators.compute(compute, [given[i] for i in reads]))
    found: list[Tensor | None] = [None] * len(wanted)
    for i in stores:
        like = acc if i == 0 else operands[i - 1]
        found[i] = next(made).sum_to_size(like.shape).to(like.dtype)
    return [
        t if t is not None or not on else torch.zeros_like(given[i])
        for i, (t, on) in enumerate(zip(found, wanted, strict=True))
    ]


@lru_cache(maxsize=256)
def _compute(
    text: str, places: tuple[Place, ...], wanted: tuple[bool, ...]
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The computation's text, the places of the tensors that it reads in order, and of those whose
    gradients it stores."""
    function = pointwise(text)
    names = ["acc", *(f"arg{i}" for i in range(len(places) - 2)), "grad"]
    sizes = places[0][0]
    axes = tuple(Axis(f"d{i}", n, "") for i, n in enumerate(sizes))
    computed = f64 if f64 in (t for _, _, t in places) else f32

    def view(name: str, shape: tuple[int, ...], layout: Layout) -> View:
        dims = tuple(f"{name}_{i}" for i in range(len(shape)))
        coords = (x.var if n == x.size else Const(0) for x, n in zip(axes, shape, strict=True))
        return View(Memory(name.upper(), dims, shape, layout), tuple(ViewDim(c) for c in coords))

    reads, given = [], dict[str, Expr]()
    for name, (shape, strides, dtype) in zip(names, places, strict=True):
        if name in (*function.names, "grad"):
            reads.append(Read(name, view(name, shape, Layout.from_strides(dtype, shape, strides))))
            var = reads[-1].var
            given[name] = var if dtype is computed else Cast(var, computed)
    lets, found = function.derivatives(given, given.pop("grad"), computed)
    stores = [i for i, (name, on) in enumerate(zip(names, wanted, strict=False)) if on and name in found]
    writes = []
    for i in stores:
        shape, strides, dtype = places[i]
        dtype = dtype if shape == sizes else computed  # the terms of a sum
        layout = Layout.from_strides(dtype, sizes, places[0][1])
        writes.append(Write(view(f"d{names[i]}", sizes, layout), Cast(found[names[i]], dtype)))
    if not writes:
        raise ComputeError("nothing that is wanted depends on the result")
    compute = Compute("epilogue_gradient", axes, (*reads, *lets, *writes))
    order = tuple(names.index(r.name) for r in reads)
    return str(compute).replace("\n", " ;; "), order, tuple(stores)


traced_route.TracedConvolution.kernels += (gradients,)
