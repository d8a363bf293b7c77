"""Timing of calls on the GPU: medians, cold caches, CUDA graphs for short kernels.

Long calls are timed one by one with events, the second-level cache overwritten before each. Calls under
``GRAPH_US``, and near ones that are compared with them, are captured into a CUDA graph, many in a row,
each on another set of tensors, so that neither launch gaps nor a warm cache are measured (sets are limited
to ``SETS``: problems of less than a megabyte or two stay warm, on every side of a comparison alike)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

Call = Callable[[], object]
Make = Callable[[int], Call]  # the call on the i-th set of tensors
Run = Callable[[float], list[float]]  # microseconds of samples, of a budget in milliseconds

GRAPH_US = 25.0
FAR = 4.0  # times as long as a short call: the other way of timing makes no difference then
SLOW_US = 1e5  # what the host spends on a call is not worth waiting for twenty of these
FLUSH_BYTES = 256 << 20
ROTATE_BYTES = 160 << 20
SETS = 64
FEW = 9  # calls in a row on a host, where they take at most PATIENCE times the budget
PATIENCE = 10


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds: median, 20th and 80th percentile of the samples; the method; and what one
    asynchronous call costs the host."""

    us: float
    p20: float
    p80: float
    method: str
    host_us: float = 0.0

    @property
    def spread(self) -> float:
        """Half the distance of the percentiles, as a share of the median."""
        return (self.p80 - self.p20) / 2 / self.us if self.us else 0.0


def summary(samples: Sequence[float], method: str, host_us: float = 0.0) -> Timing:
    """A Timing of samples in microseconds."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Timing(median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)], method, host_us)


class Clock:
    """Times calls on the current device. On a CPU it reads the host's clock, and caches stay warm.
    ``clean``: what fills the second-level cache before a call was read, not written, so that a call does
    not wait until it is written back."""

    def __init__(self, device: str = "cuda", budget_ms: float = 120.0, clean: bool = False) -> None:
        self.gpu = device.startswith("cuda")
        self.budget_ms = budget_ms
        size = FLUSH_BYTES if self.gpu else 1024
        self.flush = torch.empty(size, dtype=torch.int8, device=device)
        self.read = torch.zeros(size // 4, device=device) if clean else None

    def compare(self, calls: dict[str, Make], footprint: int, rounds: int = 3) -> dict[str, Timing]:
        """Time several calls in turn, in ``rounds`` rounds, so that drift affects all alike, and all in
        one way: if one of them is short, those that are not ``FAR`` times as long are captured, too.
        ``footprint``: bytes that one call touches."""
        runs = self._prepared(calls, footprint)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, (run, _, _) in runs.items():
                samples[name] += run(self.budget_ms / rounds)
        return {name: summary(samples[name], method, host) for name, (_, method, host) in runs.items()}

    def one(self, make: Make, footprint: int) -> Timing:
        return self.compare({"": make}, footprint, rounds=2)[""]

    def _prepared(self, makes: dict[str, Make], footprint: int) -> dict[str, tuple[Run, str, float]]:
        """How each call is timed, the name of the method, and what the call costs the host."""
        calls = {name: make(0) for name, make in makes.items()}
        for call in calls.values():
            for _ in range(3):
                call()
        if not self.gpu:
            method = f"host, threads={torch.get_num_threads()}"
            return {name: (self._on_host(call), method, 0.0) for name, call in calls.items()}
        torch.cuda.synchronize()
        took = {name: min(self._events(call, 3)) for name, call in calls.items()}
        host = {name: self._host(call, 20 if took[name] < SLOW_US else 1) for name, call in calls.items()}
        found: dict[str, tuple[Run, str, float]] = {}
        if min(took.values(), default=SLOW_US) <= GRAPH_US:
            try:
                found = {
                    name: (self._graph(make, footprint, took[name]), "graph", host[name])
                    for name, make in makes.items()
                    if took[name] <= FAR * GRAPH_US
                }
            except Exception:  # not everything can be captured
                torch.cuda.synchronize()
        return {
            name: found.get(name) or (self._by_events(call, took[name]), "events", host[name])
            for name, call in calls.items()
        }

    def _on_host(self, call: Call) -> Run:
        def run(budget_ms: float) -> list[float]:
            found: list[float] = []
            budget = budget_ms * 1e3
            # The first call may have waited for a core that another program used: time more than one.
            while (
                not found
                or sum(found) + min(found) < min(budget, 100 * min(found))
                or (len(found) < FEW and sum(found) < PATIENCE * budget)
            ):
                start = time.perf_counter()
                call()
                found.append((time.perf_counter() - start) * 1e6)
            return found

        return run

    def _host(self, call: Call, times: int) -> float:
        """Microseconds the host spends on a call that it does not wait for."""
        torch.cuda.synchronize()
        spent = []
        for _ in range(times):
            start = time.perf_counter()
            call()
            spent.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
        return median(spent)

    def _events(self, call: Call, times: int) -> list[float]:
        marks = [(_event(), _event()) for _ in range(times)]
        for start, stop in marks:
            self.flush.fill_(1)
            if self.read is not None:
                self.read.sum()
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) * 1e3 for start, stop in marks]

    def _by_events(self, call: Call, estimate: float) -> Run:
        def run(budget_ms: float) -> list[float]:
            times = min(200, max(5, int(budget_ms * 1e3 / (estimate + 80))))
            call()
            return self._events(call, times)

        return run

    def _graph(self, make: Make, footprint: int, estimate: float) -> Run:
        sets = max(2, min(SETS, -(-ROTATE_BYTES // max(1, footprint))))
        calls = [make(i) for i in range(sets)]
        rounds = max(1, round(min(200, max(20, 2000 / max(estimate, 1))) / sets))
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        kept: list[object] = []  # results stay, so that each call writes its own memory
        with torch.cuda.graph(graph):
            for turn in range(rounds):
                for call in calls:
                    made = call()
                    if turn == 0:
                        kept.append(made)
        count = rounds * sets
        graph.replay()
        torch.cuda.synchronize()

        def run(budget_ms: float) -> list[float]:
            times = min(40, max(5, int(budget_ms * 1e3 / (estimate * count))))
            marks = [(_event(), _event()) for _ in range(times)]
            for start, stop in marks:
                start.record()
                graph.replay()
                stop.record()
            torch.cuda.synchronize()
            assert len(calls) == len(kept)  # the graph reads and writes their tensors
            return [start.elapsed_time(stop) * 1e3 / count for start, stop in marks]

        return run


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
