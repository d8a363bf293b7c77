"""``python -m bench host-times``: what calls cost the host while kernels are compiled beside it. No GPU is
needed.

Layers of a detection model are called at ``--sizes`` sizes, forward and backward, ``--passes`` times, with
default settings and from no plans. Nothing is launched, and torch's own convolutions are replaced by
allocations of what they return. In place of processes the program makes the plans between two passes,
``--each`` of those that were asked for, the first first; calls are then answered by one kernel after
another, as beside a GPU. A line for each pass says how many microseconds of processor a call took, forward
and backward, in the mean and at most, how many were decided anew (``decisions``), how long these took, and
how many objects the pass left that Python's garbage collector looks through (``objects``). Plans are kept
in ``--cache``, so that a second run makes none. The last line has torch's own calls, of one pixel and one
channel, which cost its host as much as others.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import mean
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch

import transconv
from bench import faked_launches
from transconv.backend_triton import Compilers
from transconv.backend_triton.launch import bound_start, triton_kernel
from transconv.calls import size_policy
from transconv.cli.arguments import ranges
from transconv.conv import CompiledDirection
from transconv.runtime import PlanRequest, compiler, first_run_check, torch_internals
from transconv.runtime.compilation import async_compile
from transconv.torch_ops import functional
from transconv.torch_ops.arguments import Params, output_shape
from transconv.torch_ops.calls import lower_call, route, select_impl
from transconv.torch_ops.calls.call_attributes import ConvFunction, requested
from transconv.torch_ops.conversion import aten_convolutions

# Channels in and out, filter, stride, whether there is a bias, and by what an image is larger.
LAYERS = (
    (64, 64, 3, 1, False, 4),
    (64, 256, 1, 1, False, 4),
    (128, 128, 3, 2, False, 4),
    (256, 256, 3, 1, True, 8),
)
LOW, HIGH = 320, 640  # sides of images
ALL = 1 << 30
WARM = 10  # passes of torch's calls, of which the last counts


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--sizes", type=ranges.at_least(2), default=16, help="of images (default: 16)")
    parser.add_argument("--passes", type=ranges.at_least(1), default=40, help="default: 40")
    parser.add_argument(
        "--each", type=ranges.at_least(1), default=2, help="plans between two passes (default: 2)"
    )
    parser.add_argument("--layers", type=ranges.at_least(1), default=len(LAYERS), help="of four")
    parser.add_argument("--cache", default="", help="a folder for the plans")


def main(options: argparse.Namespace) -> int:
    """Print a line for each pass; 0."""
    if options.cache:
        os.environ["TRANSCONV_CACHE"] = options.cache
    torch.set_num_threads(1)
    with beside_processes() as processes, watched() as decided:
        calls = list(drawn(options.sizes, LAYERS[: options.layers]))
        for number in range(1, options.passes + 1):
            decided.clear()
            objects, took = len(gc.get_objects()), [call() for call in calls]
            said = [f"{mean(us):7.1f} {max(us):8.1f}" for us in zip(*took, strict=True)]
            left, found = len(gc.get_objects()) - objects, transconv.stats(reset=True)
            print(
                f"pass {number:3}  fwd {said[0]}  bwd {said[1]} us  decisions {len(decided):4} "
                f"{sum(decided):9.1f} us  objects {left:6}  kernels {sum(found.native.values()):4} "
                f"waiting {found.waiting:4}  asked {len(processes.jobs):4}",
                flush=True,
            )
            processes.answer(options.each)
    pixels = [_call(torch.nn.Conv2d(1, 1, 1), *(torch.zeros(1, 1, 1, 1) for _ in range(2))) for _ in calls]
    for _ in range(WARM):
        len(gc.get_objects())
        took = [call() for call in pixels]
    print(
        *(
            f"{name} {mean(us):7.1f} {max(us):8.1f}"
            for name, us in zip(("torch     fwd", " bwd"), zip(*took, strict=True), strict=True)
        ),
        "us",
    )
    return 0


class Processes:
    """Stands for the processes that compile: plans are made when it is told to answer."""

    def __init__(self, *_: Any) -> None:
        self.jobs: list[tuple[int, int, dict[str, Any], Callable[[dict[str, Any]], None]]] = []
        self.any_size, self.count, self.first = False, 0, dict[str, Any]()
        self.made: set[PlanRequest] = set()  # whose kernels are compiled

    def begin(self) -> None:
        """They are there."""

    def is_patient(self, job: dict[str, Any]) -> bool:
        return Compilers.is_patient(cast(Any, self), job)

    def submit(self, job: dict[str, Any], done: Callable[[dict[str, Any]], None]) -> Callable[[], bool]:
        """Queue a job, in the order of ``Compilers``."""
        self.any_size |= job.get("any_size", False)
        self.count += 1
        turn = ALL * self.is_patient(job) + job.get("later", 0)
        self.jobs.append((turn, self.count, job, done))
        return lambda: False

    def answer(self, most: int) -> None:
        """Make the plans of the first jobs."""
        self.jobs.sort(key=lambda one: one[:2])
        now, self.jobs = self.jobs[:most], self.jobs[most:]
        for _, _, job, done in now:
            question = PlanRequest.of_job(job)
            compiler.plan(
                question.workload, question.target, None, question.deterministic, CompiledDirection
            )
            self.made.add(question)
            done({"kernels": 1, "seconds": 0.0})

    def close(self) -> None:
        self.jobs.clear()


class Mark:
    """A point in a stream that does not exist."""

    def record(self) -> None:
        """At once."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0


@contextmanager
def beside_processes() -> Iterator[Processes]:
    """Within ``with`` calls are those of a GPU on which nothing is compiled; the processes."""
    processes = Processes()
    there = async_compile.there

    def compiled(question: PlanRequest, kind: Any) -> Any:
        """A plan that is on disk from a run before is read, and counts only once it was asked for."""
        found = there(question, kind)
        return found if question in processes.made else None

    def begun(self: triton_kernel.TritonKernel, *given: Any, **named: Any) -> None:
        faked_launches.made(self, *given, **named)
        kernel = SimpleNamespace(function="f", packed_metadata="p")
        self.kept[None, True] = self.kept[None, False] = self.starting(kernel)  # type: ignore[index]

    replaced: list[tuple[Any, str, Any]] = [
        (async_compile, "Compilers", lambda *_: processes),
        (async_compile, "there", compiled),
        (async_compile, "PAUSE_S", 0.0),  # a thread makes kernels ready before they count
        (lower_call, "target_of", lambda device: faked_launches.SM90),
        (route, "current_device", lambda: None),
        (route, "_empty", _empty),
        (torch_internals, "quickest", lambda: _empty),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
        (first_run_check, "is_trusted", lambda *_: True),
        (bound_start, "entry", lambda kernel, boxed: (_nothing, ["record"] * 8)),
        (bound_start, "encoding", lambda meta, box: lambda address, lying: [lying]),
        (triton_kernel.TritonKernel, "__init__", begun),
        (triton_kernel.TritonKernel, "_interpret", _nothing),
        (size_policy, "_event", Mark),
        (functional, "_hand_over", _hand_over),
        (aten_convolutions, "aten_forward", _aten_forward),
        (aten_convolutions, "aten_backward", _aten_backward),
    ]
    with ExitStack() as stack:
        stack.enter_context(patch.dict("os.environ", {"TRITON_INTERPRET": "1"}))
        for home, name, value in replaced:
            stack.enter_context(patch.object(home, name, value, create=home is torch._C))
        stack.enter_context(
            transconv.config.changed(
                cpu="interpret", compile="background", sizes="auto", fallback="silent"
            )
        )
        compiler.forget()
        async_compile.forget()
        yield processes
        async_compile.forget()


@contextmanager
def watched() -> Iterator[list[float]]:
    """The microseconds of processor of each decision."""
    found: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                found.append(1e6 * (time.thread_time() - start))

        return run

    with ExitStack() as stack:
        for name in ("make_forward", "make_backward"):
            stack.enter_context(patch.object(select_impl, name, timed(getattr(select_impl, name))))
        yield found


def _empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


def _nothing(*_: Any) -> None:
    """In place of a launch."""


def _aten_forward(x: torch.Tensor, w: torch.Tensor, b: Any, p: Params) -> torch.Tensor:
    return x.new_empty(output_shape(x.shape, w.shape, p))


def _aten_backward(
    grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, p: Params, mask: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    made = torch.empty_like(x), torch.empty_like(w), w.new_empty(w.shape[0])
    return tuple(t if wanted else None for t, wanted in zip(made, mask, strict=True))


def _hand_over(f: ConvFunction, x: torch.Tensor, w: torch.Tensor, b: Any, *numbers: Any) -> torch.Tensor:
    """The result without a history: torch's own gradients cost us nothing."""
    found = requested(f, *numbers)
    assert found is not None
    return _aten_forward(x, w, b, found.resolve(x, w, b))


def drawn(sizes: int, layers: Any) -> Iterator[Callable[[], tuple[float, float]]]:
    """Calls of layers at sizes, each with the microseconds of processor of its two halves."""
    draw = random.Random(1)
    sides = [(draw.randint(LOW, HIGH), draw.randint(LOW, HIGH)) for _ in range(sizes)]
    model = torch.nn.Sequential(
        *(
            torch.nn.Conv2d(ic, oc, k, stride, k // 2, bias=biased)
            for ic, oc, k, stride, biased, _ in layers
        )
    )
    transconv.convert_(model)
    for h, w in sides:
        for layer, (ic, oc, k, stride, _, less) in zip(model, layers, strict=True):
            x = torch.empty(1, ic, h // less, w // less)
            far = [(n + 2 * (k // 2) - k) // stride + 1 for n in x.shape[2:]]
            yield _call(layer, x, torch.empty(1, oc, *far))


def _call(layer: Any, x: torch.Tensor, gradient: torch.Tensor) -> Callable[[], tuple[float, float]]:
    x.requires_grad_()

    def run() -> tuple[float, float]:
        start = time.thread_time()
        y = layer(x)
        middle = time.thread_time()
        if y.requires_grad:
            y.backward(gradient)
        end = time.thread_time()
        x.grad = layer.weight.grad = None
        return 1e6 * (middle - start), 1e6 * (end - middle)

    return run
