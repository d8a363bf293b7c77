"""Calls of one layer and direction at one size after another, ours and torch's: what ``bench sizes``
runs in its children.

Operands are exact (small whole numbers), so that two right results have the same bits. Gradients are
computed by what autograd calls, without autograd.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import transconv
from bench import reference
from bench.size_layers import order
from transconv.conv import ConvProblem, ListedLayer, Prop
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import select_impl
from transconv.verify.data import density, exact_values, most, torch_dtype
from transconv.verify.machine import device, synchronize

Tensor = torch.Tensor
Call = Callable[[], Tensor]


@dataclass
class Subject:
    """A direction of a layer, as calls: those of all sizes have one weight and one set of numbers.
    ``layout``: of all tensors, where a layer has it (see ``order``)."""

    layer: ListedLayer
    direction: str
    layout: str = "nhwc"
    weight: Tensor | None = None

    @property
    def prop(self) -> Prop:
        return self.layer.prop(self.direction)

    def operands(self, p: ConvProblem, seed: int) -> dict[str, Tensor]:
        """Exact values for the operands, uninitialised memory for the result, in the layout."""
        made = {}
        for place, (name, shape) in enumerate(p.shapes.items()):
            dtype, where = torch_dtype(p.specs[name].dtype), device()
            if name == self.prop.result:
                tensor = torch.empty(shape, dtype=dtype, device=where)
            else:
                generator = torch.Generator(where).manual_seed(seed * 3 + place)
                share = density(p, self.prop) if name == self.prop.operands[0] else 1.0
                tensor = exact_values(shape, dtype, most(p.specs[name].dtype), share, generator)
            form = reference.memory_format(p.ndims, order(self.layer, self.layout))
            made[name] = tensor if form is None else tensor.contiguous(memory_format=form)
        if self.prop.result != "wei":
            kept = self.weight
            if kept is None or kept.shape != made["wei"].shape or kept.dtype != made["wei"].dtype:
                self.weight = made["wei"]
            made["wei"] = self.weight
        return made

    def call(self, side: str, p: ConvProblem, given: dict[str, Tensor]) -> Call:
        """``ours`` or ``torch`` on tensors by name."""
        transposed = self.layer.transposed
        near, far = ("dst", "src") if transposed else ("src", "dst")
        x, w, y = given[near], given["wei"], given[far]
        zeros = [0] * p.ndims
        if self.prop.result == far:
            home: Any = transconv if side == "ours" else torch.nn.functional
            function = getattr(home, f"conv{'_transpose' * transposed}{p.ndims}d")
            shape = self.layer.shape
            numbers = {
                "stride": shape.stride,
                "padding": shape.pad_lo,
                "dilation": shape.dilation,
                "groups": shape.g,
            }
            return lambda: function(x, w, None, **numbers)  # type: ignore[no-any-return]
        weight = self.prop is Prop.BWD_W
        wanted = [not weight, weight, False]
        if side == "ours":
            params = Params(p.stride, p.pad_lo, p.dilation, transposed, tuple(zeros), p.g)
            return lambda: select_impl.backward(params, y, x, w, wanted, "now")[int(weight)]  # type: ignore
        words = (
            y,
            x,
            w,
            None,
            list(p.stride),
            list(p.pad_lo),
            list(p.dilation),
            transposed,
            zeros,
            p.g,
            wanted,
        )
        backward: Any = torch.ops.aten.convolution_backward.default
        return lambda: backward(*words)[int(weight)]  # type: ignore[no-any-return]


def host_us(call: Call) -> tuple[float, Tensor]:
    """What a call costs the host, which does not wait for it, and its result."""
    synchronize()
    start = time.perf_counter()
    made = call()
    spent = (time.perf_counter() - start) * 1e6
    synchronize()
    return spent, made


@contextmanager
def switched(**settings: str) -> Iterator[None]:
    """Settings of transconv, for a while; without a GPU its interpreter computes."""
    if device() == "cpu":
        settings["cpu"] = "interpret"
    before = {name: getattr(transconv.config, name) for name in settings}
    for name, value in settings.items():
        setattr(transconv.config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(transconv.config, name, value)


def same(ours: Tensor, sums: Tensor) -> str:
    """Empty if a result has the bits of the exact sums, rounded to its type."""
    if ours.shape != sums.shape:
        return f"its shape is {list(ours.shape)}, expected {list(sums.shape)}"
    differs = int((ours != sums.to(ours.dtype)).sum())
    return f"{differs} of {ours.numel()} elements differ from the exact sums" if differs else ""


class Compilations:
    """Counts, while it is open, new plans and kernels that Triton compiles. Both are 0 for a
    size whose kernels exist."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Compilations:
        import triton

        from transconv.runtime import compiler

        self.knobs, self.compiler, self.build = triton.knobs.compilation, compiler, compiler.build
        self.before = self.knobs.listener
        self.knobs.listener = self.compiled

        def build(*given: Any, **named: Any) -> Any:
            self.count += 1
            return self.build(*given, **named)

        compiler.build = build
        return self

    def compiled(self, *given: Any, cache_hit: bool = False, **named: Any) -> None:
        """What Triton calls after each kernel."""
        self.count += not cache_hit

    def __exit__(self, *_: object) -> None:
        self.knobs.listener, self.compiler.build = self.before, self.build
