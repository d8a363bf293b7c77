"""``options={"cudagraphs": True}`` or ``mode="reduce-overhead"``: all launches of a graph are started at
once, as a CUDA graph that torch's own CUDA graph trees record.

The first call runs as without it, as results of new kernels are looked at; the second one is recorded. As
with torch's own backend, a result is overwritten by the next call, and tensors other than parameters and
buffers are copied to where the recorded kernels read them.

In the pool of the CUDA graphs results alone outlive a call. torch lists those that are there, has Python
collect cycles if the pool has more, and then misses what only a cycle had held ("not allocated in pool").
A first call may leave cycles with all of its tensors, such as the traceback of a kernel that could not be
loaded. So they are collected as it ends.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from transconv.runtime import torch_internals

Run = Callable[[list[Any]], list[Any]]
log = logging.getLogger("transconv.graph")


class Captures:
    """The graphs of one compiled function, of ``count`` inputs. ``device``: whose forward graph is
    recorded; None: none is, nor its backward graph."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.device: int | None = None

    def of(self, graph: fx.GraphModule, inputs: Sequence[Any], phase: str) -> Callable[[Run], Run]:
        """What makes a recorded function of one that runs a graph; ``graph`` is as AOTAutograd made it.
        Where it cannot be recorded, the function stays as it is, and a line in the log says why."""
        try:
            skip, mutations = torch_internals.why_no_cudagraph, torch_internals.input_mutations
            tangents, fixed_of = torch_internals.count_tangents, torch_internals.fixed_arguments
            record, placeholders = torch_internals.cudagraphify, torch_internals.placeholder_info
            parameters = torch_internals.static_inputs
        except (AttributeError, ImportError) as error:
            return self.without(phase, f"this release of torch has no {error.name}")
        backward = phase == "backward"
        if backward and self.device is None:
            return self.without(phase, "the forward graph is not recorded")
        if reason := _why_not(inputs):
            return self.without(phase, reason)
        fixed = tangents(graph) if backward else fixed_of(self.count, len(inputs))
        static = range(fixed) if backward else parameters(fixed)
        if why := skip(graph, max(static, default=-1) + 1):
            return self.without(phase, why)
        device = next(t.device.index or 0 for t in inputs if isinstance(t, torch.Tensor))
        self.device = device if self.device is None else self.device
        ends: Any = graph.graph.output_node().args[0]
        about = {"device_index": device, "is_backward": backward, "is_inference": phase == "inference",
                 "stack_traces": [getattr(n, "stack_trace", None) for n in ends],
                 "placeholders": placeholders(graph.graph),
                 "mutated_input_idxs": mutations(graph.graph)}

        def recorded(run: Run) -> Run:
            found: Run = record(_leaving_no_cycles(run), list(inputs), static, **about)
            return found
        return recorded

    def without(self, phase: str, why: str) -> Callable[[Run], Run]:
        """No recording. A backward graph whose forward graph is recorded tells the trees that it runs."""
        log.warning("a graph (%s) runs without CUDA graphs: %s", phase, why)
        if phase != "backward" or self.device is None:
            return lambda run: run
        device = self.device

        def told(run: Run) -> Run:
            def call(given: list[Any]) -> list[Any]:
                manager: Any = torch_internals.cudagraph_manager(device, create_if_none_exists=False)
                if manager is not None:
                    manager.set_to_running_backward()
                return run(given)
            return call
        return told


def _leaving_no_cycles(run: Run) -> Run:
    """A function whose first call leaves no tensors but its results."""
    first = [True]

    def call(given: list[Any]) -> list[Any]:
        made = run(given)
        if first:
            first.clear()
            gc.collect()
        return made
    return call


def _why_not(inputs: Sequence[Any]) -> str:
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    if not tensors or any(t.device.type != "cuda" for t in tensors):
        return "its tensors are not all on a GPU"
    if len(tensors) < len(inputs) or any(not isinstance(n, int) for t in tensors for n in t.shape):
        return "its sizes are symbols"
    return ""
