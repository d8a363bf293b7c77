"""torch's side of a comparison as calls on numbered sets of tensors (ours: transconv.verify.timed).

Every side gets random data of the same distribution in its own layout; a set is made at its first
use, so that only short calls, which rotate through many sets, have more than one.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from bench import reference
from transconv.conv import Prop
from transconv.ir import Layout
from transconv.tuning.timing import Call, Make
from transconv.verify.case import Case, epilogue_tensors
from transconv.verify.timed import random_tensor


def baseline_calls(case: Case, names: list[str]) -> dict[str, Make]:
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


def _baseline(case: Case, name: str, layout: str) -> Make:
    p = case.problem.with_layout(layout)
    compiled = reference.inductor(p, case.prop, case.epilogue) if name == "inductor" else None

    def make(index: int) -> Call:
        a, b = (random_tensor(p.shapes[n], getattr(p, n).layout, case.where)
                for n in case.prop.operands)
        extra = epilogue_tensors(p, case.prop, case.epilogue, "float", case.where)
        if compiled is not None:
            return lambda: compiled(a, b, extra.get("bia"), extra.get("res"))
        run: Callable[[], torch.Tensor] | None
        if name == "fused":
            run = reference.fused(p, a, b, extra["bia"])
            if run is None:
                raise NotImplementedError("torch has no fused call for this")
        else:
            run = reference.call(p, case.prop, a, b, case.epilogue, extra.get("bia"),
                                 extra.get("res"))
        return run
    return make


def _product(case: Case) -> Make:
    """The matrix product of a convolution whose input was already expanded (im2col): what it
    reads is larger by the taps. Rows and columns lie as those of channels-last tensors do."""
    p = case.problem
    pixels = {Prop.FWD: p.mb * prod(p.o), Prop.BWD_D: p.mb * prod(p.i), Prop.BWD_W: p.oc}[case.prop]
    columns = {Prop.FWD: p.oc, Prop.BWD_D: p.ic, Prop.BWD_W: p.ic * prod(p.k)}[case.prop]
    terms = round(p.flops(valid=False) / 2 / pixels / columns)

    def make(index: int) -> Call:
        a, b = (random_tensor(shape, Layout.dense(p.src.dtype, shape), case.where)
                for shape in ((pixels, terms), (terms, columns)))
        if case.prop is Prop.BWD_W:
            a = a.t().contiguous().t()
        elif case.prop is Prop.FWD:
            b = b.t().contiguous().t()
        return lambda: a @ b
    return make
