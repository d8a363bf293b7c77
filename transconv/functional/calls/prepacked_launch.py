"""Launches that read copies of frozen weights in another order, made once (``transconv.inference``).

A copy is found by the weight itself, at every launch: by its version and its address. What was written to
is copied again, behind the launch that found the copy to be old. While a CUDA graph is captured the copies
are made inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from transconv.functional.calls.compiled_launch import CompiledLaunch, Spaces
from transconv.runtime import Plan, WeightPrepack, apart
from transconv.torch_ops.calls.route import current_device
from transconv.torch_ops.conversion import prepacked_weights

Tensor = torch.Tensor


@dataclass(slots=True)
class LaidOut:
    """A launch. ``copied``: of each tensor that its plan copies first, the place among a launch's tensors,
    and the plan without these copies; ``begins``: the start function of each of these plans."""

    launch: CompiledLaunch
    plan: Plan | None = None  # that is divided
    copied: list[tuple[int, WeightPrepack[Plan]]] = field(default_factory=list)
    begins: dict[int, Callable[..., None]] = field(default_factory=dict)

    def start(self, tensors: Sequence[Tensor]) -> None:
        """As ``Launch.start``; the copies of a weight that is registered and does not need a gradient are
        made once."""
        for place, halves in self.copied:
            made = prepacked_weights.find(halves, tensors[place])
            if made is not None:
                self.rest(place, halves, tensors, made)
                return
        self.launch.start(tensors)
        if self.plan is not self.launch.plan:
            self.divide()
        for place, halves in self.copied:
            prepacked_weights.lay_out(halves, tensors[place])

    def begun(self) -> tuple[Callable[..., None] | None, Spaces]:
        """What starts it on its device, which has to be the current one: a function of its tensors and of
        the workspaces that are named, if nothing is left to look at, neither weights nor results."""
        looked_at = self.copied or self.plan is not self.launch.plan or self.launch.begin is None
        return (None, ()) if looked_at else self.launch.within()

    def divide(self) -> None:
        """Find what the plan that made a result copies."""
        self.plan, names = self.launch.plan, self.launch.names
        found = [None if self.launch.indexed else apart(self.plan, n) for n in names]
        self.copied = [(place, halves) for place, halves in enumerate(found) if halves is not None]
        self.begins.clear()

    def rest(self, place: int, halves: WeightPrepack[Plan], tensors: Sequence[Tensor],
             made: Sequence[Tensor]) -> None:
        """Launch what is behind the copies."""
        launch, copies = self.launch, [c.name for c in halves.copies]
        if launch.begin is not None and current_device() == launch.device:
            begin = self.begins.get(place)
            if begin is None:
                names = (*launch.names, *copies)
                begin = halves.rest.starter(launch.device, launch.aligned, names)
            if begin is not None:
                self.begins[place] = begin
                begin(*tensors, *made)
                return
        views = launch.views(tensors) | dict(zip(copies, made, strict=True))
        with launch.on(tensors[place].device):
            halves.rest.launch(**views)
