"""What the child of ``python -m bench sizes`` that has the GPU measures, and the plans that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

import transconv
from bench import reference
from bench.size_calls import Compilations, Subject, host_us, same, switched
from bench.size_layers import Size, chosen, order, problem_at
from bench.size_reference import exact_sums
from transconv.conv import (
    CompiledDirection,
    ConvProblem,
    ConvWorkload,
    Epilogue,
    LayerRegistry,
    ListedLayer,
    compiler,
)
from transconv.errors import TransconvError
from transconv.runtime import PlanRequest
from transconv.runtime.timing import Clock
from transconv.target import detect
from transconv.tuning.table import Row
from transconv.verify.case import ProblemCase
from transconv.verify.machine import device, synchronize

LATER = 4  # calls of a size after the first
_registries: dict[tuple[str, str, str], LayerRegistry] = {}
_used: set[tuple[str, str, str]] = set()  # whose kernels are loaded


def questions(
    name: str, direction: str, quick: bool, beside: Sequence[str], layout: str = "nhwc"
) -> list[PlanRequest]:
    """The plans of a layer for any size, then those for each size of ``beside`` alone."""
    layer, prop = _layer(name, quick), _layer(name, quick).prop(direction)
    alone = [
        compiler.question(problem_at(layer, Size.parse(size), _dtype(), layout), prop, detect())
        for size in beside
    ]
    return [*_registry(name, direction, quick, layout).questions, *alone]


def measure(
    name: str,
    direction: str,
    quick: bool,
    sizes: Sequence[str],
    timed: Sequence[str],
    beside: Sequence[str],
    budget_ms: float,
    layout: str = "nhwc",
) -> Row:
    """A row for each size, of tensors in a layout: whether its result is exact, and host times; of those
    in ``timed`` host and device times beside cuDNN's heuristics; of those in ``beside`` also beside the
    kernel for this size and cuDNN's benchmark. Without sizes torch and the GPU are made ready."""
    synchronize()
    if not sizes:
        return {"rows": []}
    subject = Subject(_layer(name, quick), direction, layout)
    reference.settings(tf32=False, benchmark=False)
    rows = []
    with switched(sizes="any", compile="now", fallback="silent"), torch.no_grad():
        registry = _registry(name, direction, quick, layout)
        _first_uses(subject, registry)
        for text in sizes:
            p = problem_at(subject.layer, Size.parse(text), _dtype(), layout)
            row = {"size": text, "layout": order(subject.layer, layout)}
            row |= _called(subject, registry, p, text in timed)
            if text in timed:
                row |= _device_times(subject, registry, p, text in beside, budget_ms)
            rows.append(row)
    if device() == "cuda":
        torch.cuda.empty_cache()
    return {"rows": rows}


def _layer(name: str, quick: bool) -> ListedLayer:
    return next(x for x in chosen(quick) if x.name == name)


def _dtype() -> str:
    return "bf16" if device() == "cuda" else "f32"


def _registry(name: str, direction: str, quick: bool, layout: str = "nhwc") -> LayerRegistry:
    """The registry that calls of a layer use: its plans are the same objects."""
    about = name, direction, layout
    if about not in _registries:
        layer = _layer(name, quick)
        p = problem_at(layer, Size(2, tuple(16 * s for s in layer.shape.stride)), _dtype(), layout)
        _registries[about] = LayerRegistry(
            p, layer.prop(direction), detect(), Epilogue(), aligned=True, deterministic=False
        )
    return _registries[about]


def _workload(question: PlanRequest) -> ConvWorkload:
    assert isinstance(question.workload, ConvWorkload)
    return question.workload


def _plans(registry: LayerRegistry) -> list[CompiledDirection]:
    registry.choose([16] * len(_workload(registry.questions[0]).open), "now")
    return [k.plan for k in registry.there.values()]


def _first_uses(subject: Subject, registry: LayerRegistry) -> None:
    """Make the layer's plans, and on a GPU call it at the size that each was made for: kernels are loaded,
    and first results checked. Once in a process."""
    _plans(registry)
    about = subject.layer.name, subject.direction, subject.layout
    if about in _used:
        return
    _used.add(about)
    for question in registry.questions:
        like = _workload(question).problem
        p = subject.layer.problem(_dtype(), order(subject.layer, subject.layout))
        p = p.at(like.mb, like.i, like.o)
        if device() == "cuda":
            subject.call("ours", p, subject.operands(p, 0))()


def _loaded(registry: LayerRegistry) -> int:
    """How many kernels were started for the first time."""
    steps = [step for k in registry.there.values() for step in k.plan.steps]
    return sum(len(s.triton.kept) for s in steps)


def _called(subject: Subject, registry: LayerRegistry, p: ConvProblem, timed: bool) -> Row:
    """One size for the first time, and again; with cuDNN's calls if ``timed``."""
    given, found = subject.operands(p, 1), {}
    ours, torchs = (subject.call(side, p, given) for side in ("ours", "torch"))
    torch.empty_like(given[subject.prop.result])  # leaves memory that the result will take
    if timed:
        found["cudnn_first_us"], _ = host_us(torchs)
        if device() == "cuda":
            found["cudnn_later_us"] = median(host_us(torchs)[0] for _ in range(LATER))
    transconv.stats(reset=True)
    loaded = _loaded(registry)
    with Compilations() as compilations:
        first, result = host_us(ours)
    later = [host_us(ours)[0] for _ in range(LATER if device() == "cuda" else 1)]
    counted = transconv.stats(reset=True)
    elsewhere = counted.total - sum(n for what, n in counted.native.items() if what.endswith("any size"))
    found |= {
        "wrong": same(result, exact_sums(p, subject.prop, given)),
        "compiled": compilations.count,
        "first_use": int(_loaded(registry) > loaded),
        "elsewhere": elsewhere,
        "kernels": len(registry.kernels),
        "first_us": first,
        "later_us": median(later),
    }
    try:
        sizes = (p.mb, *p.i)
        taken = registry.choose(sizes, "now")
        found |= {"schedule": str(taken.plan.schedule), "estimate_us": taken.us}
    except TransconvError as refusal:
        found["schedule"] = f"refused: {refusal}"[:200]
    return found


def _device_times(
    subject: Subject, registry: LayerRegistry, p: ConvProblem, beside: bool, budget_ms: float
) -> Row:
    """Device times, in turn; schedules of the kernel that is made for this size."""
    case = ProblemCase(p, subject.prop)
    sides, found = {}, {}
    try:
        sides["us"] = case.make(registry.choose((p.mb, *p.i), "now").plan)
    except TransconvError:
        return {}
    if beside:
        plan = case.plan()
        sides["exact_us"], found["exact_schedule"] = case.make(plan), str(plan.schedule)
    if device() == "cuda":

        def torchs(benchmark: bool) -> Any:
            def make(index: int) -> Any:
                call = subject.call("torch", p, subject.operands(p, index))

                def run() -> torch.Tensor:
                    torch.backends.cudnn.benchmark = benchmark
                    return call()

                return run

            return make

        sides["cudnn_us"] = torchs(False)
        if beside:
            sides["benchmark_us"] = torchs(True)
    timings = Clock(device(), budget_ms).compare(sides, p.bytes_moved(), rounds=2)
    torch.backends.cudnn.benchmark = False
    case.release()
    return found | {name: timing.us for name, timing in timings.items()}
