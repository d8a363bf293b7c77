"""``options={"cudagraphs": True}`` or ``mode="reduce-overhead"``: all launches of a graph are started at
once, as a CUDA graph that torch's own CUDA graph trees record.

The first call runs as without it, as results of new kernels are looked at; the second one is recorded.
Calls that torch answers while kernels are compiled are not, nor are backward graphs behind these. As with
torch's own backend, a result is overwritten by the next call, and tensors other than parameters and
buffers are copied to where the recorded kernels read them.

In the pool of the CUDA graphs results alone outlive a call. torch lists those that are there, has Python
collect cycles if the pool has more, and then misses what only a cycle had held ("not allocated in pool").
A first call may leave cycles with all of its tensors, such as the traceback of a kernel that could not be
loaded. So they are collected as it ends."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from transconv.runtime import torch_internals

Run = Callable[[list[Any]], list[Any]]
Recorder = Callable[[Run, Callable[[list[Any]], bool]], Run]
"""From what runs a graph, and whether torch answers a call of these inputs, to what is called."""
log = logging.getLogger("transconv.graph")


class Captures:
    """The graphs of one compiled function, of ``count`` inputs. ``device``: whose forward graph is
    recorded; None: none is, nor its backward graph; ``begun``: whether its last call was."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.device: int | None = None
        self.begun = False

    def of(self, graph: fx.GraphModule, inputs: Sequence[Any], phase: str) -> Recorder:
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
        about = {
            "device_index": device,
            "is_backward": backward,
            "is_inference": phase == "inference",
            "stack_traces": [getattr(n, "stack_trace", None) for n in ends],
            "placeholders": placeholders(graph.graph),
            "mutated_input_idxs": mutations(graph.graph),
        }

        def recorder(run: Run, waits: Callable[[list[Any]], bool]) -> Run:
            recorded: Run = record(_leaving_no_cycles(run), list(inputs), static, **about)
            plain = self.telling(run) if backward else run

            def call(given: list[Any]) -> list[Any]:
                if waits(given) or (backward and not self.begun):
                    self.begun &= backward
                    return plain(given)
                self.begun = True
                return recorded(given)

            return call

        return recorder

    def without(self, phase: str, why: str) -> Recorder:
        """No recording."""
        log.warning("a graph (%s) runs without CUDA graphs: %s", phase, why)
        if phase != "backward" or self.device is None:
            return lambda run, waits: run
        return lambda run, waits: self.telling(run)

    def telling(self, run: Run) -> Run:
        """A backward graph without recording, whose forward graph is recorded: it tells the trees that it
        runs."""

        def call(given: list[Any]) -> list[Any]:
            manager: Any = torch_internals.cudagraph_manager(self.device, create_if_none_exists=False)
            if manager is not None:
                manager.set_to_running_backward()
            return run(given)

        return call


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
