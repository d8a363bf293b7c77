"""Which kind of work calls spend their time at, beside the calls themselves.

    with watched() as phases:
        call()
        phases.take()      {"read": 3.1, "check": 12.0, "beside:load": 1.9, "gc": 0.4}, in milliseconds

Functions of the package that run where something is new are replaced by ones that take the time: warm
calls run none of them, so that watching costs them nothing. A phase has the time of those within it taken
out. ``beside:`` is before those of the thread that makes kernels ready, which took place meanwhile. Pauses
of the interpreter's garbage collector are told by its own hook.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

from transconv.runtime import rehearsal_thread

CALL, LAUNCH = "transconv.torch_ops.calls", "transconv.backend_triton.launch"
PHASES: dict[str, tuple[tuple[str, str], ...]] = {
    "decide": (
        (f"{CALL}.select_impl", "make_forward"),
        (f"{CALL}.select_impl", "make_backward"),
        ("transconv.functional.calls.dispatch", "_made"),
    ),
    "layer": ((f"{CALL}.route", "LayerEntry.__init__"),),
    "ask": (("transconv.runtime.compilation.async_compile", "_submit"),),
    "key": (("transconv.runtime.plan_cache", "key"),),
    "read": (("transconv.runtime.plan_cache", "read"),),
    "generate": (("transconv.runtime.compiler", "build"),),
    "rank": (
        ("transconv.runtime.registry", "SizeTable.__init__"),
        ("transconv.runtime.registry", "SizeTable.estimates"),
    ),
    "compile": ((f"{LAUNCH}.triton_kernel", "TritonKernel._compiled"),),
    "load": ((f"{LAUNCH}.triton_kernel", "TritonKernel.starting"),),
    "check": (
        ("transconv.runtime.first_run_check", "_launch_and_look"),
        (f"{CALL}.lower_call", "check_zeros"),
    ),
    "compare": (
        ("transconv.functional.calls.first_call_check", "_hold"),
        ("transconv.graph.verification.eager_check", "WatchedCall.difference"),
    ),
    "region": (("transconv.graph.regions.region_calls", "RegionLaunches.first"),),
    "plan": (("transconv.graph.torch_compile", "_Graph.__init__"),),
    "verdict": (("transconv.runtime.first_run_check", "note"),),
    "entry": ((f"{CALL}.call_entries", "written"), ("transconv.functional.calls.route", "written")),
    "torch": (
        ("transconv.torch_ops.conversion.aten_convolutions", "aten_forward"),
        ("transconv.torch_ops.conversion.aten_convolutions", "aten_backward"),
    ),
}
BESIDE = rehearsal_thread.NAME
OTHERS = "transconv-"  # threads whose work no call waits for


class CallPhases:
    """The times so far, by phase."""

    def __init__(self) -> None:
        self.spent = defaultdict[str, float](float)
        self.local = threading.local()
        self.began = 0.0  # of a pause

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time counts."""

        def run(*given: Any, **named: Any) -> Any:
            name = threading.current_thread().name
            if name.startswith(OTHERS) and name != BESIDE:
                return function(*given, **named)
            within: list[float] = self.local.__dict__.setdefault("within", [])
            within.append(0.0)
            start = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                took = time.perf_counter() - start
                self.spent["beside:" * (name == BESIDE) + phase] += 1e3 * (took - within.pop())
                if within:
                    within[-1] += took

        return run

    def paused(self, when: str, _: Any) -> None:
        """The hook of the garbage collector."""
        if when == "start":
            self.began = time.perf_counter()
        else:
            self.spent["gc"] += 1e3 * (time.perf_counter() - self.began)

    def take(self) -> dict[str, float]:
        """The milliseconds of each phase since the last time, those that took any."""
        found, self.spent = self.spent, defaultdict(float)
        longest = sorted(found.items(), key=lambda item: -item[1])
        return {name: round(ms, 2) for name, ms in longest if ms >= 0.005}


@contextmanager
def watched() -> Iterator[CallPhases]:
    """Within ``with``, the phases are timed."""
    phases = CallPhases()
    with ExitStack() as stack:
        for phase, places in PHASES.items():
            for module, name in places:
                home: Any = import_module(module)
                if "." in name:
                    owner, name = name.split(".")
                    home = getattr(home, owner)
                stack.enter_context(patch.object(home, name, phases.timed(phase, getattr(home, name))))
        gc.callbacks.append(phases.paused)
        stack.callback(gc.callbacks.remove, phases.paused)
        yield phases


def said(phases: dict[str, float]) -> str:
    """The phases in a column of a table."""
    return " ".join(f"{name}={ms:g}" for name, ms in phases.items())
