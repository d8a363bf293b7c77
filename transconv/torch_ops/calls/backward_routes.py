"""The routes of the gradients of one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from transconv.torch_ops import shapes
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls.route import ConvCall, laid_out
from transconv.torch_ops.conversion import aten_convolutions

if TYPE_CHECKING:
    from transconv.torch_ops.calls.shape_cache import LayerEntry

_new = object.__new__


class BackwardRoutes:
    """The gradients of one call: a route for each wanted tensor, torch for what is left over."""

    __slots__ = ("aten", "aten_mask", "bias_dims", "channels_last", "data", "layer", "params", "weight")

    def __init__(self, params: Params, channels_last: bool, data: ConvCall | None,
                 weight: ConvCall | None, wants_bias: bool, rank: int) -> None:
        self.params = params
        self.channels_last = channels_last
        self.layer: LayerEntry | None = None  # whose calls of other sizes have routes made from these
        self.data = data if data and data.compiled else None
        self.weight = weight if weight and weight.compiled else None
        self.aten = [r for r in (data, weight) if r and not r.compiled]
        # torch sums the bias gradient too if it computes another gradient anyway.
        bias_with_aten = wants_bias and bool(self.aten)
        self.aten_mask = (data in self.aten, weight in self.aten, bias_with_aten)
        self.bias_dims = [0, *range(2, rank)] if wants_bias and not bias_with_aten else None

    def resized(self, data: ConvCall | None, weight: ConvCall | None, layer: LayerEntry) -> BackwardRoutes:
        """The gradients of a call of the layer that differs in its sizes alone; kernels compute them."""
        made: BackwardRoutes = _new(BackwardRoutes)
        made.params, made.channels_last, made.data, made.weight = (
            self.params, self.channels_last, data, weight)
        made.aten, made.aten_mask, made.bias_dims = self.aten, self.aten_mask, self.bias_dims
        made.layer = layer
        return made

    def routes(self) -> list[ConvCall]:
        return [r for r in (self.data, self.weight, *self.aten) if r]

    def run(self, grad: torch.Tensor, x: torch.Tensor,
            w: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx: torch.Tensor | None = None
        dw: torch.Tensor | None = None
        db: torch.Tensor | None = None
        if self.aten:
            dx, dw, db = self._run_aten(grad, x, w)
        if self.data:
            dx = self.data.gradient(x, None, w, grad)
        if self.weight:
            dw = self.weight.gradient(w, x, None, grad)
        if self.bias_dims:
            db = shapes.bias_gradient(grad, w, self.params)
        return dx, dw, db

    def _run_aten(self, grad: torch.Tensor, x: torch.Tensor,
                  w: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        for route in self.aten:
            route.calls += 1
        found = aten_convolutions.aten_backward(grad, x, w, self.params, self.aten_mask)
        dx, dw = (None if t is None else laid_out(t, self.channels_last) for t in found[:2])
        return dx, dw, found[2]

    def bound(self) -> tuple[str, dict[str, Any]]:
        """The line of an entry that runs them, and what it mentions: on the device of these as the current
        one, without ``run`` where every kernel has its start function."""
        there = [r for r in (self.data, self.weight) if r is not None]
        if self.aten or not there or any(r.start is None for r in there):
            return "return run(grad, x, w)", {"run": self.run}
        made = ("data(w, grad)" if self.data else "None", "weight(x, grad)" if self.weight else "None",
                f"grad.sum({self.bias_dims})" if self.bias_dims is not None else "None")
        return f"return {', '.join(made)}", {"data": self.data and self.data.start,
                                             "weight": self.weight and self.weight.start}
