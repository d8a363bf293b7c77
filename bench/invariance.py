"""``python -m bench invariance``: what invariant mode costs layers and models.

A layer's direction is timed with the kernel for its size and with the one for any number of images, in
turn, at the list's batch and at one image. A model runs through torch.compile's backend, with its batch as
a name of the graph in invariant mode, in a process of its own: some compile at a time, each is timed
alone. What is refused has the reason. Rows are printed as they come:

    python -m bench invariance resnet50 --limit 240                layers
    python -m bench invariance --models resnet50,convnext_t        models, in inference

Rows are in ``<gpu>_invariance.csv``; a repeated run measures what is missing. On a CPU (``--quick``, with
``TRITON_INTERPRET=1``) kernels are interpreted: only whether it runs is worth something there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Any

import torch

import transconv
from bench import environment, layers, waves
from bench.graph_models import MODELS
from bench.issues import short
from bench.network_setting import TIMING, gpu
from bench.size_calls import switched
from transconv.cli.arguments import ranges
from transconv.conv import DIRECTIONS, CompiledDirection, ConvProblem, ConvWorkload, ListedLayer, Prop
from transconv.errors import TransconvError
from transconv.ir import DTYPES
from transconv.runtime import Plan, PlanRequest, ready
from transconv.runtime.timing import Clock, Timing
from transconv.target import detect
from transconv.tuning.table import CsvTable, Row
from transconv.verify.data import torch_dtype
from transconv.verify.machine import Pool, device

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
Calls = dict[Any, Callable[..., Any]]
WORK = "bench.invariance:work"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("lists", nargs="*", help="layers, as `bench time` has them (default: resnet50)")
    parser.add_argument("--models", type=ranges.some_of(*MODELS), help="in the place of layers")
    parser.add_argument("--match", default="", help="only layers whose name has this")
    parser.add_argument("--dtype", default="bf16", help="default: bf16")
    parser.add_argument("--layout", default="nhwc", help="default: nhwc")
    parser.add_argument("--mb", type=ranges.at_least(0), default=0, help="reduce larger batches to this")
    parser.add_argument("--limit", type=ranges.seconds, default=240, help="seconds in all (default: 240)")
    parser.add_argument("--together", type=ranges.processes, default=5, help="models that compile at once")
    parser.add_argument("--budget-ms", type=ranges.milliseconds, default=60, help="timing of one call")
    parser.add_argument("--quick", action="store_true", help="small models, for Triton's interpreter")


def main(options: argparse.Namespace) -> int:
    """Measure, and print as it goes; 1 if something was refused."""
    about = environment.versions()
    table = CsvTable(Path(options.out) / f"{short(about['device'])}_invariance.csv", COLUMNS, KEY)
    refused, ratios = 0, list[float]()
    for found in (of_models if options.models else of_layers)(options, lambda key: table.has(about | key)):
        row = about | found
        if row.get("refused"):
            refused, said = refused + 1, f"refused: {row['refused']}"
        else:
            ratios.append(float(row["ratio"]))
            said = f"{row['us']:9.1f} us, invariant {row['invariant_us']:9.1f} us: {row['ratio']:.3f}"
        table.add(row)
        print(f"{row['what']:<28} {row['direction']:<9} {row['batch']:>4}  {said}", flush=True)
    if ratios:
        mean = exp(sum(map(log, ratios)) / len(ratios))
        print(f"{len(ratios)} rows: {mean:.3f} times as long in the mean, at most {max(ratios):.3f}")
    print(f"{len(table.rows)} rows are in {table.path}", file=sys.stderr)
    return int(refused > 0)


def of_models(options: argparse.Namespace, is_there: Callable[[Row], bool]) -> Iterator[Row]:
    """The rows of models, each by a process of its own; some compile at a time, and one is timed."""
    about = {"direction": "inference"}
    keys = {m: [{"what": m, "batch": n} | about for n in batches(m)] for m in options.models.split(",")}
    given = {"quick": options.quick, "dtype": options.dtype, "budget_ms": options.budget_ms}
    left = {name: {"model": name, **given} for name in keys if not all(map(is_there, keys[name]))}
    pool = Pool(waves.groups(WORK, [*left], options.together, environment.worker_environment(), 1))
    for name, row in waves.measured(pool, left, options.together, options.limit, options.limit):
        error = row.get("error")
        if error in ("timeout", "crash"):  # a repeated run tries again
            print(f"{name}: {error}", file=sys.stderr)
        elif error or "rows" in row:
            yield from (k | ({"refused": error} if error else row["rows"][k["batch"]]) for k in keys[name])


def of_layers(options: argparse.Namespace, is_there: Callable[[Row], bool]) -> Iterator[Row]:
    """The rows of layers' directions."""
    end, clock = time.monotonic() + options.limit, Clock(device(), options.budget_ms)
    for source in options.lists or ["resnet50"]:
        for layer in layers.read(source):
            if options.match not in layer.name:
                continue
            most = layer.reduced(options.mb)
            for batch, direction in product(dict.fromkeys((most.shape.mb, SMALL_BATCH)), DIRECTIONS):
                key = {"what": layer.name, "direction": direction, "batch": batch}
                if is_there(key):
                    continue
                if time.monotonic() > end:
                    print("no time is left; a repeated run goes on", file=sys.stderr)
                    return
                try:
                    yield key | of_layer(most, direction, batch, options, clock)
                except TransconvError as error:
                    yield key | {"refused": str(error)}


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


def work(
    step: str, model: str, quick: bool, dtype: str, budget_ms: float, share: tuple[int, int] = (0, 1)
) -> Row:
    """``prepare`` or ``time``, the last thing that a process does: a model in inference, as usual and in
    invariant mode, with the batch of its list and with one sample."""
    waves.take(step, share)
    if step == "prepare":
        try:
            _held.update(compiled(model, quick, dtype))
        except Exception as error:
            raise _told(error) from error
        return {}
    clock, found = Clock(device(), budget_ms), dict[tuple[int, bool], Timing]()
    with gpu(TIMING, exclusive=True):
        for (batch, invariant), run in _held.items():
            with mode(invariant):
                found[batch, invariant] = clock.one(lambda _, run=run: run, 1 << 30)  # type: ignore[misc]
    rows = {batch: times(found[batch, False], found[batch, True]) for batch, _ in found}
    return {"rows": rows, "fatal": True}


_held: dict[tuple[int, bool], Callable[[], object]] = {}


def compiled(name: str, quick: bool, dtype: str) -> Calls:
    """A model's calls, made once, by the batch and whether in invariant mode."""
    kind, found = torch_dtype(DTYPES["f32" if quick else dtype]), dict[Any, Any]()
    model = MODELS[name].built(quick).eval().to(device(), kind)
    for invariant in (False, True):
        run = torch.compile(model, backend="transconv", dynamic=None if invariant else False)
        for batch in batches(name):
            given = [torch.cat([x[:1]] * batch).to(device(), kind) for x in MODELS[name].inputs(quick)]
            found[batch, invariant] = partial(run, *given)
            with mode(invariant):
                for x in given if invariant else ():
                    torch._dynamo.mark_dynamic(x, 0)
                run(*given)
    return found


def batches(name: str) -> tuple[int, int]:
    """The batch of a model's list, at least two, and one."""
    return max(2, MODELS[name].shapes[0][0]), SMALL_BATCH


@contextmanager
def mode(invariant: bool) -> Iterator[None]:
    """Inside, models compute in invariant mode, or as usual."""
    changed = transconv.config.changed(invariant=invariant)
    with switched(compile="now", fallback="silent"), torch.no_grad(), changed:
        yield


def _told(error: BaseException) -> Exception:
    """The refusal behind an error of torch's compiler, or the error."""
    at: BaseException | None = error
    while at is not None and not isinstance(at, TransconvError):
        at = getattr(at, "inner_exception", None) or at.__cause__
    return at if isinstance(at, TransconvError) else TransconvError(f"{type(error).__name__}: {error}")


def times(plain: Timing, invariant: Timing) -> Row:
    """The columns of two times."""
    return {"us": plain.us, "invariant_us": invariant.us, "ratio": invariant.us / plain.us}
