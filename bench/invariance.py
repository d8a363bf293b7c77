"""``python -m bench invariance``: what invariant mode costs layers and models.

A layer's direction is timed with the kernel for its size and with the one for any number of images, in
turn, at the list's batch and at one image. A model runs through torch.compile's backend, with its batch as
a name of the graph in invariant mode; what is refused has the reason. Rows are printed as they come:

    python -m bench invariance resnet50 --limit 240                layers
    python -m bench invariance --models resnet50,convnext_t        models, in inference

Rows are in ``<gpu>_invariance.csv``; a repeated run measures what is missing. Several runs, with an
``--out`` each, compile side by side and time one by one. On a CPU (``--quick``, with
``TRITON_INTERPRET=1``) kernels are interpreted: only whether it runs is worth something there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import exp, log
from pathlib import Path
from typing import Any

import torch

import transconv
from bench import environment, layers
from bench.graph_models import MODELS
from bench.issues import short
from bench.network_setting import TIMING, gpu
from bench.size_calls import switched
from transconv.cli.arguments import ranges
from transconv.conv import DIRECTIONS, CompiledDirection, ConvProblem, ConvWorkload, ListedLayer, Prop
from transconv.errors import TransconvError
from transconv.runtime import Plan, PlanRequest, ready
from transconv.runtime.timing import Clock, Timing
from transconv.target import detect
from transconv.tuning.table import CsvTable, Row
from transconv.verify.data import torch_dtype
from transconv.verify.machine import device

COLUMNS = (
    "what",
    "direction",
    "batch",
    "us",
    "invariant_us",
    "ratio",
    "schedule",
    "invariant_schedule",
    "refused",
    "device",
    "torch",
    "triton",
    "commit",
)
KEY = ("what", "direction", "batch", "device")
SMALL_BATCH = 1
Calls = dict[str, Callable[[int], Callable[[], object]]]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("lists", nargs="*", help="layers, as `bench time` has them (default: resnet50)")
    parser.add_argument("--models", type=ranges.some_of(*MODELS), help="in the place of layers")
    parser.add_argument("--match", default="", help="only layers whose name has this")
    parser.add_argument("--dtype", default="bf16", help="default: bf16")
    parser.add_argument("--layout", default="nhwc", help="default: nhwc")
    parser.add_argument("--mb", type=ranges.at_least(0), default=0, help="reduce larger batches to this")
    parser.add_argument("--limit", type=ranges.seconds, default=240, help="seconds in all (default: 240)")
    parser.add_argument("--budget-ms", type=ranges.milliseconds, default=60, help="timing of one call")
    parser.add_argument("--quick", action="store_true", help="small models, for Triton's interpreter")


def main(options: argparse.Namespace) -> int:
    """Measure, and print as it goes; 1 if something was refused."""
    about, end = environment.versions(), time.monotonic() + options.limit
    table = CsvTable(Path(options.out) / f"{short(about['device'])}_invariance.csv", COLUMNS, KEY)
    clock, refused, ratios = Clock(device(), options.budget_ms), 0, list[float]()
    for key, measure in subjects(options, clock):
        row = {**about, **key}
        if table.has(row):
            continue
        if time.monotonic() > end:
            print("no time is left; a repeated run goes on", file=sys.stderr)
            break
        try:
            row |= measure()
            ratios.append(float(row["ratio"]))
            said = f"{row['us']:9.1f} us, invariant {row['invariant_us']:9.1f} us: {row['ratio']:.3f}"
        except TransconvError as error:
            row["refused"], refused = str(error), refused + 1
            said = f"refused: {error}"
        table.add(row)
        print(f"{row['what']:<28} {row['direction']:<9} {row['batch']:>4}  {said}", flush=True)
    if ratios:
        mean = exp(sum(map(log, ratios)) / len(ratios))
        print(f"{len(ratios)} rows: {mean:.3f} times as long in the mean, at most {max(ratios):.3f}")
    print(f"{len(table.rows)} rows are in {table.path}", file=sys.stderr)
    return int(refused > 0)


def subjects(options: argparse.Namespace, clock: Clock) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """What is timed: the columns that tell it, and what measures it."""
    for name in options.models.split(",") if options.models else ():
        for batch in (max(2, MODELS[name].shapes[0][0]), SMALL_BATCH):
            key = {"what": name, "direction": "inference", "batch": batch}
            yield key, partial(of_model, name, batch, options, clock)
    if options.models:
        return
    for source in options.lists or ["resnet50"]:
        for layer in layers.read(source):
            if options.match not in layer.name:
                continue
            most = layer.reduced(options.mb)
            for batch in dict.fromkeys((most.shape.mb, SMALL_BATCH)):
                for direction in DIRECTIONS:
                    key = {"what": layer.name, "direction": direction, "batch": batch}
                    yield key, partial(of_layer, most, direction, batch, options, clock)


def of_layer(
    layer: ListedLayer, direction: str, batch: int, options: argparse.Namespace, clock: Clock
) -> Row:
    """The times of a direction of a layer, with both kernels."""
    whole = layer.problem(options.dtype, options.layout)
    problem, prop = whole.at(batch, whole.i, whole.o), layer.prop(direction)
    request = PlanRequest(ConvWorkload(problem, prop), detect(), deterministic=True)
    plain, form = (planned(r) for r in (request, request.of_any_batch()))
    sides: dict[str, CompiledDirection] = {"plain": plain, "invariant": form.at({"MB": batch})}
    calls: Calls = {name: partial(call_of, plan, problem, prop) for name, plan in sides.items()}
    footprint = sum(spec.layout.span * spec.dtype.bytes for spec in problem.specs.values())
    with gpu(TIMING, exclusive=True):
        found = clock.compare(calls, footprint)
    return {
        **times(found["plain"], found["invariant"]),
        "schedule": plain.schedule,
        "invariant_schedule": form.schedule,
    }


def planned(request: PlanRequest) -> CompiledDirection:
    """The kernels of a request, compiled now."""
    return ready(
        request.workload,
        request.target,
        None,
        request.deterministic,
        CompiledDirection,
        request.aligned,
        "now",
    )


def call_of(plan: Plan, problem: ConvProblem, prop: Prop, seed: int) -> Callable[[], object]:
    """A launch of a plan on tensors of its own."""
    generator = torch.Generator(device()).manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in problem.shapes.items():
        spec = problem.specs[name]
        made = torch.empty_strided(
            shape, spec.layout.strides() or (), dtype=torch_dtype(spec.dtype), device=device()
        )
        values = torch.randn(shape, generator=generator, device=device())
        tensors[name] = made if name == prop.result else made.copy_(values)
    return lambda: plan.launch(**tensors)


def of_model(name: str, batch: int, options: argparse.Namespace, clock: Clock) -> Row:
    """The times of a model in inference, compiled as usual and in invariant mode."""
    kind: Any = getattr(
        torch, "float32" if options.quick else {"bf16": "bfloat16"}.get(options.dtype, "float16")
    )
    model = MODELS[name].built(options.quick).eval().to(device(), kind)
    given = [
        x[:1].repeat(batch, *[1] * (x.dim() - 1)).to(device(), kind)
        for x in MODELS[name].inputs(options.quick)
    ]
    found: dict[str, Timing] = {}
    with torch.no_grad():
        for side, invariant in (("plain", False), ("invariant", True)):
            torch.compiler.reset()
            with switched(compile="now", fallback="silent"), transconv.config.changed(invariant=invariant):
                for x in given if invariant else ():
                    torch._dynamo.mark_dynamic(x, 0)
                run = torch.compile(model, backend="transconv")
                try:
                    run(*given)
                except Exception as error:
                    raise _told(error) from error
                with gpu(TIMING, exclusive=True):
                    found[side] = clock.one(lambda _, run=run: lambda: run(*given), 1 << 30)  # type: ignore[misc]
    return times(found["plain"], found["invariant"])


def _told(error: BaseException) -> Exception:
    """The refusal behind an error of torch's compiler, or the error."""
    at: BaseException | None = error
    while at is not None and not isinstance(at, TransconvError):
        at = getattr(at, "inner_exception", None) or at.__cause__
    return at if isinstance(at, TransconvError) else TransconvError(f"{type(error).__name__}: {error}")


def times(plain: Timing, invariant: Timing) -> Row:
    """The columns of two times."""
    return {"us": plain.us, "invariant_us": invariant.us, "ratio": invariant.us / plain.us}
