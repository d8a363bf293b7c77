"""The sides of a comparison as calls on numbered sets of tensors: ours, and torch's.

Every side gets random data of the same distribution in its own layout; a set is made when it is
asked for, so that only short calls, which rotate through many sets, have more than one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench import reference
from bench.case import Case, epilogue_tensors
from bench.data import OPERANDS, RESULT, torch_dtype
from bench.timing import Call, Make
from transconv.compiler import Compiled
from transconv.ir import Layout


def random_tensor(shape: tuple[int, ...], layout: Layout, where: str) -> torch.Tensor:
    """Normally distributed values in a strided layout."""
    strides = layout.strides()
    if strides is None:
        raise ValueError(f"the layout {layout} is blocked; expected one with strides")
    made = torch.empty_strided(shape, strides, dtype=torch_dtype(layout.dtype), device=where)
    return made.normal_()


def our_calls(case: Case, compiled: Compiled) -> Make:
    """Our plan on its own tensors."""
    def make(index: int) -> Call:
        p = case.problem
        tensors = {name: random_tensor(p.shapes[name], spec.layout, case.where)
                   for name, spec in p.specs.items()}
        extra = epilogue_tensors(p, case.prop, case.epilogue, "float", case.where)

        def call() -> torch.Tensor:
            compiled.launch(**tensors, **extra)
            return tensors[RESULT[case.prop]]
        return call
    return make


def baseline_calls(case: Case, names: list[str]) -> dict[str, Make]:
    """torch's side per name: ``cl`` and ``nchw`` (layouts), ``fused`` (convolution + bias + ReLU in
    one call), ``inductor`` (torch.compile). What torch cannot do is left out."""
    p = case.problem
    reference.settings(tf32=p.math == "tf32")
    found: dict[str, Make] = {}
    for name in names:
        layout = "nchw" if name == "nchw" or p.ndims == 1 else "nhwc"
        if name == "cl" and p.ndims == 1:
            continue  # torch has no channels-last for one spatial axis
        if name == "fused" and (case.epilogue != "bias+relu" or case.prop.value != "fwd"):
            continue
        make = _baseline(case, name, layout)
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

    def make(index: int) -> Call:
        a, b = (random_tensor(p.shapes[n], getattr(p, n).layout, case.where)
                for n in OPERANDS[case.prop])
        extra = epilogue_tensors(p, case.prop, case.epilogue, "float", case.where)
        run: Callable[[], torch.Tensor] | None
        if name == "fused":
            run = reference.fused(p, a, b, extra["bia"])
            if run is None:
                raise NotImplementedError("torch has no fused call for this")
        else:
            run = reference.call(p, case.prop, a, b, case.epilogue, extra.get("bia"),
                                 extra.get("res"))
        return reference.inductor(run) if name == "inductor" else run
    return make
