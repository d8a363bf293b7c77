"""CUDA graphs of a stream's steps: one launch instead of one for each operation.

Two things decide what a step does: where the stream is relative to each operation's strides, and how many
rows come. Both come again, and then so do the operations, their sizes and their kernels. A step that
comes a second time is recorded. From then on it is a copy of the kept rows and of the new ones to where
the graph reads them, the graph, and a copy of its result. The kernels, and so the bits, are those of
steps that are not recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from transconv.distributed.streams.graph_capture import ResultReference
from transconv.runtime import torch_internals
from transconv.torch_ops.calls import lower_call

Tensor = torch.Tensor
MOST = 16  # graphs of a stream, each of which has memory of its own
log = logging.getLogger("transconv.distributed")
_copy_each: Callable[[list[Tensor], list[Tensor]], None] = torch_internals.copy_each


class StreamState(NamedTuple):
    """Where a stream is: the numbers of rows that came, were made and were dropped; the kept rows; the
    values that are the same until it ends."""

    numbers: list[int]
    tensors: list[Tensor]
    values: Mapping[ResultReference, Tensor]


class StepKey(NamedTuple):
    """What decides a step: where the stream is relative to the strides, the number of new rows, and
    torch's switches of precision and order."""

    place: tuple[int, ...]
    rows: int
    flags: lower_call.Flags


class MadeStep(NamedTuple):
    """A step: its result, None for no rows, then the state and the place of the stream."""

    result: Tensor | None
    state: StreamState
    place: tuple[int, ...]


Run = Callable[[], list[Tensor]]
Recorder = Callable[[Run, torch.device], tuple[list[Tensor], Callable[[], object]]]
Step = Callable[[StreamState, Tensor], MadeStep]


def record(run: Run, device: torch.device) -> tuple[list[Tensor], Callable[[], object]]:
    """The results of ``run`` in a CUDA graph's memory, and the function that computes them anew."""
    graph: Any = torch.cuda.CUDAGraph()
    # What other devices are given is not recorded.
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = run()
    return made, graph.replay


@dataclass(eq=False, slots=True)
class StepGraph:
    """A recorded step: the tensors that it reads, those that it makes, and what it adds to the numbers of
    the state. ``place``: where the stream is after it; ``has_result``: whether the first of ``made`` is
    the step's result, before the kept rows."""

    rows: Tensor
    kept: list[Tensor]
    made: list[Tensor]
    replay: Callable[[], object]
    grows: list[int]
    place: tuple[int, ...]
    has_result: bool

    def run(self, state: StreamState, x: Tensor) -> tuple[Tensor | None, StreamState]:
        """The step's result and the state after it. The kept rows are copied first, as they may lie in
        this graph's memory, the new rows of its last run among it."""
        old = [
            (own, t)
            for own, t in zip(self.kept, state.tensors, strict=True)
            if own.numel() and own.data_ptr() != t.data_ptr()
        ]
        if old:
            _copy_each([own for own, _ in old], [t for _, t in old])
        self.rows.copy_(x)
        self.replay()
        numbers = [n + d for n, d in zip(state.numbers, self.grows, strict=True)]
        result = self.made[0].clone() if self.has_result else None
        return result, StreamState(numbers, self.made[self.has_result :], state.values)


class StepGraphs:
    """The recorded steps of a stream, also of the streams after it. ``why_not``: why no more are recorded,
    empty if they are. They read copies of a stream's values, which each stream makes anew."""

    def __init__(self, recorder: Recorder = record) -> None:
        self._recorder = recorder
        self._graphs: dict[StepKey, StepGraph] = {}
        self._seen: set[StepKey] = set()
        self._values: dict[ResultReference, Tensor] = {}
        self._copied: Mapping[ResultReference, Tensor] = self._values
        self.why_not = ""

    def graph_of(self, key: StepKey, step: Step, state: StreamState, x: Tensor) -> StepGraph | None:
        """The graph of a step, recorded if the step comes for the second time; recording does not carry it
        out. None if it has none."""
        if key in self._graphs:
            self._copy_values(state.values)
            return self._graphs[key]
        if self.why_not or len(self._graphs) == MOST:
            return None
        if key not in self._seen:
            self._seen.add(key)
            return None
        try:
            self._copy_values(state.values)
            self._graphs[key] = self._recorded(step, state, x)
        except Exception as error:  # an operation waits for the GPU, or copies from the host
            self.why_not = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            log.warning("the steps of a stream run without a CUDA graph: %s", self.why_not)
        return self._graphs.get(key)

    def _copy_values(self, values: Mapping[ResultReference, Tensor]) -> None:
        """Copy a stream's values to where the graphs read them, once."""
        if values is self._copied:
            return
        with torch.inference_mode(False):
            for reference in values.keys() - self._values.keys():
                self._values[reference] = torch.empty_like(values[reference])
        if values:
            _copy_each([self._values[r] for r in values], [*values.values()])
        self._copied = values

    def _recorded(self, step: Step, state: StreamState, x: Tensor) -> StepGraph:
        with torch.inference_mode(False):  # tensors of that mode cannot be written to outside of it
            rows = torch.empty_like(x, memory_format=torch.contiguous_format)
            kept = [torch.empty_like(t) for t in state.tensors]
        steps: list[MadeStep] = []

        def run() -> list[Tensor]:
            steps.append(found := step(StreamState(state.numbers, kept, self._values), rows))
            return [*([] if found.result is None else [found.result]), *found.state.tensors]

        made, replay = self._recorder(run, x.device)
        result, after, place = steps[0]
        grows = [b - a for a, b in zip(state.numbers, after.numbers, strict=True)]
        return StepGraph(rows, kept, made, replay, grows, place, result is not None)
