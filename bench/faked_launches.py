"""Calls on a machine without a GPU, as if there were one: a call does all that it does before the driver.

Tensors of the CPU are taken for a GPU's on which all kernels are loaded and checked; plans are made for
sm_90, and instead of a launch its arguments are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import transconv
from transconv.backend_triton.launch import bound_start, triton_kernel
from transconv.functional.calls import compiled_launch
from transconv.graph import torch_compile
from transconv.graph.regions import graph_wait, region_calls, region_kernels
from transconv.graph.verification import eager_check
from transconv.runtime import Launch, compiler, first_run_check, torch_internals
from transconv.target import TARGETS, Target
from transconv.torch_ops.calls import lower_call, route

Launched = list[tuple[Any, ...]]
"""Of each launch the number of programs, then addresses, descriptors and sizes."""
SM90 = Target.parse("sm_90")
made = triton_kernel.TritonKernel.__init__


@contextmanager
def as_on_gpu() -> Iterator[Launched]:
    """Within ``with`` calls take kernels for any size and launch nothing; the launches so far."""
    found: Launched = []

    def started(*given: Any) -> None:
        found.append((given[0], *given[13:]))

    def init(self: triton_kernel.TritonKernel, *given: Any, **named: Any) -> None:
        made(self, *given, **named)
        kernel = SimpleNamespace(function="f", packed_metadata="p")
        self.kept[None, True] = self.starting(kernel)  # type: ignore[index]

    replaced: list[tuple[Any, str, Any]] = [
        (lower_call, "target_of", lambda device: SM90),
        (route, "current_device", lambda: None),
        (route, "_empty", _empty),
        (torch_internals, "quickest", lambda: _empty),
        (first_run_check, "is_trusted", lambda *_: True),
        (bound_start, "entry", lambda kernel, boxed: (started, ["record"] * 8)),
        (bound_start, "encoding", lambda meta, box: lambda address, lying: [lying]),
        (triton_kernel.TritonKernel, "__init__", init),
        (triton_kernel.TritonKernel, "_interpret", _interpret),
    ]
    config = transconv.config
    before = config.cpu, config.sizes, config.fallback
    with ExitStack() as stack:
        stack.enter_context(patch.dict("os.environ", {"TRITON_INTERPRET": "1"}))
        stack.enter_context(
            patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", create=True)
        )
        for home, name, value in replaced:
            stack.enter_context(patch.object(home, name, value))
        config.cpu, config.sizes, config.fallback = "interpret", "any", "error"
        compiler.forget()
        try:
            yield found
        finally:
            config.cpu, config.sizes, config.fallback = before
            compiler.forget()


@contextmanager
def graphs_as_on_gpu() -> Iterator[Launched]:
    """``as_on_gpu`` for graphs of ``torch.compile(backend="transconv")``: they are planned for sm_90, and
    from the second call on a call does all that it does on a GPU but launch; its numbers mean nothing."""
    with ExitStack() as stack:
        found = stack.enter_context(as_on_gpu())
        for home, name, value in (
            (torch_compile, "TARGETS", {**TARGETS, "interpreter": SM90}),
            (graph_wait, "begin", lambda questions: None),
            (region_kernels, "rank", lambda questions: None),
            (compiled_launch, "target_of", lambda device: SM90),
            (Launch, "start", _start_text),
            (eager_check.Checks, "due", lambda self, values: False),
            (region_calls.RegionLaunches, "empty", staticmethod(_empty)),
        ):
            stack.enter_context(patch.object(home, name, value))
        yield found


def _start_text(self: Launch, tensors: Any, judge: Any = None) -> None:
    if self.begin is None:
        self.begin, self.device = self.plan.starter(None, True, self.names), None  # type: ignore
    assert self.begin is not None
    self.begin(*tensors)


def _empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    assert type(shape) is tuple and type(strides) is tuple  # the fast allocation takes nothing else
    return torch.empty_strided(shape, strides, dtype=dtype)


def _interpret(self: triton_kernel.TritonKernel, tensors: list[Any], sizes: Any, at: Any) -> None:
    self.kept[None, True](sizes, at, tensors, "stream")  # type: ignore[index]
