"""The kernels that ``python -m bench networks`` needs: collected from a model, compiled beforehand.

A worker collects the kernels of a setting; others compile them, so that no measurement waits.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from bench.network_setting import Row, Setting, gpu, prepare, release


def collect(model: str, precision: str, layout: str, device: str, small: bool, lock: str) -> Row:
    """The kernels that one training step and one inference need, eager and compiled: a graph
    leaves a bias under autocast in float32."""
    from transconv.calls import route_cache
    from transconv.errors import Unsupported
    from transconv.torch_ops.calls import lower_call

    setting = Setting(model, precision, layout, device, small)
    prepare()
    asked: dict[tuple[Any, ...], None] = {}
    question = lower_call.question

    def note(
        problem: Any,
        prop: Any,
        device: Any,
        epilogue: str,
        aligned: bool,
        deterministic: bool,
        bias: torch.dtype | None = None,
    ) -> Any:
        for added in dict.fromkeys((bias, bias and torch.float32)):
            asked[problem, prop, epilogue, aligned, deterministic, added] = None
        raise Unsupported("bench:collecting")

    lower_call.question = note
    try:
        with gpu(lock, exclusive=False):
            setting.arrange()
            _, after = setting.pair()
            x, y = setting.batch()
            setting.loss(after, x, y).backward()
            with torch.no_grad():
                setting.forward(after.eval(), x)
            setting.wait()
    finally:
        lower_call.question = question
        route_cache.forget()
        release()
    return {"kernels": list(asked)}


def compile_one(kernel: tuple[Any, ...]) -> Row:
    """Plan and compile into the shared cache. What fails here will fail, and be counted, there."""
    from transconv.torch_ops.calls import lower_call
    from transconv.verify.case import warm

    problem, prop, epilogue, aligned, *how = kernel
    start = time.perf_counter()
    compiled = lower_call.planned(problem, prop, torch.device("cuda"), epilogue, aligned, *how)
    if aligned:  # others are compiled where they are launched
        warm(compiled)
    return {"seconds": time.perf_counter() - start}


def plan_all(kernels: list[tuple[Any, ...]], device: str) -> None:
    """Generate the kernels' texts before the GPU is locked."""
    from transconv.errors import Unsupported
    from transconv.torch_ops.calls import lower_call

    for problem, prop, *how in kernels:
        try:
            lower_call.planned(
                problem, prop, torch.device(device, 0) if device == "cuda" else torch.device(device), *how
            )
        except Unsupported:
            pass
