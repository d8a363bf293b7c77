"""torch's side of a comparison as calls on numbered sets of tensors (ours: transconv.verify.case).

Every side gets random data of the same distribution in its own layout; a set is made at its first
use, so that only short calls, which rotate through many sets, have more than one.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from bench import reference
from transconv.conv import ConvProblem, Prop
from transconv.ir import Layout
from transconv.runtime.timing import Call, Make
from transconv.verify.case import ProblemCase, epilogue_tensors
from transconv.verify.data import random_tensor


def baseline_calls(case: ProblemCase, names: list[str]) -> dict[str, Make]:
    """torch's side per name: ``cl`` and ``nchw`` (layouts), ``fused`` (convolution + bias + ReLU in
    one call), ``inductor`` (torch.compile), ``gemm`` (a matrix product with as many rows, columns
    and terms). What torch cannot do is left out."""
    p = case.problem
    reference.settings(tf32=p.math == "tf32")
    found: dict[str, Make] = {}
    for name in names:
        layout = "nchw" if name == "nchw" or p.ndims == 1 else "nhwc"
        if name == "cl" and p.ndims == 1:
            continue  # torch has no channels-last for one spatial axis
        if name == "fused" and (case.epilogue != "bias+relu" or case.prop.value != "fwd"):
            continue
        if name == "gemm" and p.g > 1:
            continue
        make = _product(case) if name == "gemm" else _baseline(case, name, layout)
        try:
            make(0)()
        except (RuntimeError, NotImplementedError) as error:
            if "CUDA error" in str(error):
                raise
            continue
        found[name] = make
    return found


def _baseline(case: ProblemCase, name: str, layout: str) -> Make:
    p = case.problem.with_layout(layout)
    compiled = reference.inductor(p, case.prop, case.epilogue) if name == "inductor" else None

    def make(index: int) -> Call:
        a, b = (random_tensor(p.shapes[n], getattr(p, n).layout, case.where) for n in case.prop.operands)
        extra = epilogue_tensors(p, case.prop, case.epilogue, "float", case.where)
        if compiled is not None:
            return lambda: compiled(a, b, extra.get("bia"), extra.get("res"))
        run: Callable[[], torch.Tensor] | None
        if name == "fused":
            run = reference.fused(p, a, b, extra["bia"])
            if run is None:
                raise NotImplementedError("torch has no fused call for this")
        else:
            run = reference.call(p, case.prop, a, b, case.epilogue, extra.get("bia"), extra.get("res"))
        return run

    return make


def _product(case: ProblemCase) -> Make:
    """The matrix product of a convolution whose input was already expanded (im2col): what it
    reads is larger by the taps. Rows and columns lie as those of channels-last tensors do."""
    p = case.problem
    pixels = {Prop.FWD: p.mb * prod(p.o), Prop.BWD_D: p.mb * prod(p.i), Prop.BWD_W: p.oc}[case.prop]
    columns = {Prop.FWD: p.oc, Prop.BWD_D: p.ic, Prop.BWD_W: p.ic * prod(p.k)}[case.prop]
    terms = round(p.flops(valid=False) / 2 / pixels / columns)

    def make(index: int) -> Call:
        if all(p.specs[n].dtype.bits == 8 for n in case.prop.operands):
            return _short_product(p, pixels, columns, terms, case.where)
        a, b = (
            random_tensor(shape, Layout.dense(p.src.dtype, shape), case.where)
            for shape in ((pixels, terms), (terms, columns))
        )
        if case.prop is Prop.BWD_W:
            a = a.t().contiguous().t()
        elif case.prop is Prop.FWD:
            b = b.t().contiguous().t()
        return lambda: a @ b

    return make


def _short_product(p: ConvProblem, rows: int, columns: int, terms: int, where: str) -> Call:
    """torch's product of matrices of the problem's 8-bit types, in the order that it takes: torch._int_mm
    to s32, torch._scaled_mm to bf16, with ``use_fast_accum`` unless math is ieee."""
    a, b = (_matrix(rows if left else columns, terms, p, left, where) for left in (True, False))
    if p.acc.kind == "int":
        return lambda: torch._int_mm(a, b.t())
    one, fast = torch.ones((), device=where), p.math != "ieee"
    return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)


def _matrix(rows: int, terms: int, p: ConvProblem, left: bool, where: str) -> torch.Tensor:
    """Random values of the type of the first or second operand; a gradient stands first."""
    short = [x.dtype for x in p.specs.values() if x.dtype.bits == 8]
    held = next((t for t in short if t.name == "f8e5m2"), short[0]) if left else short[0]
    made = torch.empty(rows, terms, dtype=getattr(torch, held.torch), device=where)
    flat, step = made.view(-1), 1 << 26
    block = torch.randn(min(step, flat.numel()), device=where)
    if held.kind == "int":
        block = (block * 16).round().clamp(*held.limits)
    for start in range(0, flat.numel(), step):
        flat[start : start + step] = block[: flat[start : start + step].numel()].to(made.dtype)
    return made
