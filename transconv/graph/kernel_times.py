"""Microseconds of a kernel of a graph on the device, and of torch for the operations of kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from transconv.compute import Workload
from transconv.functional.calls.compiled_launch import launch
from transconv.graph.fusion.index_ir import Piece
from transconv.graph.regions.partition import graph_of
from transconv.runtime import timing

Tensor = torch.Tensor
Compiled = Callable[[torch.fx.GraphModule], Callable[..., Any]]
Origins = Mapping[Piece, torch.fx.Node]
"""The operations of values."""


def measured(asked: str | Workload, device: torch.device, clock: timing.Clock) -> float | None:
    """The median of a kernel on random data; indices are zeros. None on a CPU, where nothing that is
    measured says anything about a device. Raises Unsupported."""
    if device.type != "cuda":
        return None
    found = launch(asked, device, True, "now")
    operands = found.operands()

    def make(_: int) -> Callable[[], object]:
        tensors = [_made(m.shape, m.strides or (), m.elements, device) for m in operands]
        return lambda: found.start(tensors)
    return clock.one(make, sum(prod(m.shape) * m.elements.itemsize for m in operands)).us


@dataclass(frozen=True, eq=False, slots=True)
class TorchSide:
    """Operations of a graph as torch computes them; ``compiled`` makes a function of a graph of them."""

    nodes: tuple[torch.fx.Node, ...]
    compiled: Compiled
    device: torch.device

    def us(self, clock: timing.Clock) -> float | None:
        """The median on random data; indices are zeros. None where sizes are names, and where torch does
        not compute the operations of such data alone."""
        gm = graph_of(self.nodes)
        given = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
        if not all(isinstance(t, Tensor) and all(isinstance(n, int) for n in (*t.shape, *t.stride()))
                   for t in given):
            return None
        run = self.compiled(gm)

        def make(_: int) -> Callable[[], object]:
            tensors = [_made(t.shape, t.stride(), t.dtype, self.device) for t in given]
            return lambda: run(*tensors)
        try:
            with torch.no_grad():
                return clock.one(make, sum(t.numel() * t.dtype.itemsize for t in given)).us
        except Exception:  # whatever torch says of it: a report has one number less
            return None


def sides(kernels: Sequence[Origins], compiled: Compiled, device: torch.device) -> list[TorchSide | None]:
    """What of torch each kernel stands beside, by the values that it evaluates; None: nothing. Kernels
    with parts of one operation, such as the moments of a norm and its result, stand together."""
    Nodes = set[torch.fx.Node]
    sets: list[tuple[set[int], Nodes, Nodes]] = []  # kernels; operations; those with sums
    for i, made in enumerate(kernels):
        joined, every = {i}, {*made.values()}
        summed = {n for p, n in made.items() if p.anchored}
        for s in [s for s in sets if s[1] & summed or s[2] & every]:
            sets.remove(s)
            joined, every, summed = joined | s[0], every | s[1], summed | s[2]
        sets.append((joined, every, summed))
    found: list[TorchSide | None] = [None] * len(kernels)
    for joined, every, _ in sets:
        side = TorchSide(tuple(every), compiled, device) if every else None
        for i in joined:
            found[i] = side
    return found


def _made(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype,
          device: torch.device) -> Tensor:
    t = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return t.normal_() if t.is_floating_point() else t.zero_()
