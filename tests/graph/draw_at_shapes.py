"""Drawn graphs in torch.compile at several shapes, under each way that torch has with sizes that change.

    python -m tests.graph.draw --n 50 --shapes 4 --dynamic none,true,false

Each is called with one set of inputs after the other; what it gives, and the gradients, are held to the
function itself in torch. Kernels run in Triton's interpreter or, with ``--device cuda``, on a GPU; with
``--meaning`` their texts are executed.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.graph.draw import Draw, Drawn, smaller
from tests.graph.meant import by_meaning, compare, near
from tests.graph.shaken import F64, made, movements
from transconv.graph import backend, report
from transconv.support import knobs

MODES = {"none": None, "true": True, "false": False}
MOST = 1e-8


@dataclass
class Ran:
    """What came of a graph: ``problem``, empty if all is torch's; the ``kernels`` that answered; those of
    them that have their sizes as ``names``."""

    problem: str = ""
    kernels: int = 0
    names: int = 0


def ran(drawn: Drawn, dynamic: bool | None) -> Ran:
    """A graph by the backend at each of its sets of inputs, beside torch."""
    sets = [given for given in (drawn.inputs, *drawn.others) if _is_graph(drawn, given)]
    run = compiled(drawn, dynamic)
    try:
        for given in sets:
            shapes = " ".join(str(list(x.shape)) for x in given)
            try:
                compare(drawn, run, given, MOST)
            except AssertionError as error:
                if "off by" not in str(error):
                    return Ran(f"at {shapes}: {error}")
                moved = max(movements(drawn, given, F64))
                try:
                    compare(drawn, run, given, MOST + 4 * (moved + between_devices(drawn, given)))
                except AssertionError as wrong:
                    return Ran(f"at {shapes}: {wrong}")
    except Exception as error:  # any error is a failure that the caller shows
        return Ran(f"at {shapes}: {type(error).__name__}: {error}")
    kernels = [k for g in report(run).graphs for k in g.kernels]
    return Ran("", len(kernels), sum("sizes  S" in k.text and not k.numbers for k in kernels))


def compiled(drawn: Drawn, dynamic: bool | None) -> Callable[..., Any]:
    """The backend's function of a graph, in a way that torch has with sizes that change."""

    def function(*given: Any) -> Any:
        return drawn(*given)

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, dynamic=dynamic, options={"rest": "eager"})


def between_devices(drawn: Drawn, given: Sequence[torch.Tensor]) -> float:
    """How far torch's results on a device are from its own on the CPU: its hardswish of f64 has a sixth
    in f32 on a GPU alone."""
    here = made(drawn, given)
    with torch.device("cpu"):
        there = made(drawn, _moved(given, "cpu"))
    apart = [
        float((a.double() - b.double()).abs().nan_to_num(0.0, 0.0, 0.0).max())
        for a, b in zip(here, there, strict=True)
        if a.is_floating_point() and a.numel()
    ]
    return max(apart, default=0.0)


def halved(drawn: Drawn, run: Callable[..., Any]) -> str:
    """How a graph of a batch differs from those of its halves; empty if it does not."""
    n = drawn.batched
    parts = zip(*(x.chunk(2) for x in drawn.inputs[:n]), strict=True)
    halves = [run(*part, *drawn.inputs[n:]) for part in parts]
    return _apart([torch.cat(made) for made in zip(*halves, strict=True)], run(*drawn.inputs))


def permuted(drawn: Drawn, run: Callable[..., Any]) -> str:
    """How a graph of a batch in another order differs from its results in that order."""
    n = drawn.batched
    order = torch.randperm(len(drawn.inputs[0]), generator=torch.Generator().manual_seed(1), device="cpu")
    moved = run(*(x[order] for x in drawn.inputs[:n]), *drawn.inputs[n:])
    return _apart(moved, [made[order] for made in run(*drawn.inputs)])


def _apart(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> str:
    try:
        for i, (a, b) in enumerate(zip(some, others, strict=True)):
            near(a, b, MOST, f"result {i}")
    except AssertionError as error:
        return str(error)
    return ""


def _is_graph(drawn: Drawn, given: tuple[torch.Tensor, ...]) -> bool:
    """Whether torch computes it: a graph with an operation less may be none."""
    try:
        with torch.no_grad():
            drawn(*given)
    except (RuntimeError, IndexError, ValueError):
        return False
    return True


def wrong(
    seed: int, count: int, dynamic: str, gradients: bool | None = None, device: str = "cpu"
) -> tuple[Ran, Drawn]:
    """A drawn graph, and what came of it. Gradients: of every third by default."""
    drawn = Draw(seed, count).drawn(seed % 3 == 0 if gradients is None else gradients)
    drawn = replace(
        drawn,
        inputs=_moved(drawn.inputs, device),
        others=tuple(_moved(given, device) for given in drawn.others),
    )
    with torch.device(device):
        return ran(drawn, MODES[dynamic]), drawn


def _moved(given: Sequence[torch.Tensor], device: str) -> tuple[torch.Tensor, ...]:
    return tuple(x.detach().to(device).requires_grad_(x.requires_grad) for x in given)


def least(drawn: Drawn, dynamic: str) -> tuple[str, Drawn]:
    """A wrong graph made smaller, and what is wrong with it."""
    kind = _kind(ran(drawn, MODES[dynamic]).problem)
    small = smaller(drawn, lambda d: _kind(ran(d, MODES[dynamic]).problem) == kind)
    return ran(small, MODES[dynamic]).problem, small


def _kind(problem: str) -> str:
    """What goes wrong, without where: a graph made smaller has to go wrong in the same way."""
    return re.sub(r"^at [^:]*: |\d.*", "", problem.partition("\n\nSet")[0], flags=re.DOTALL)[:60]


def at_shapes(options: argparse.Namespace) -> None:
    """Draw graphs until all are done, or the time is over; show each wrong one, shrunk."""
    import transconv

    device = options.device or "cpu"
    if device == "cpu":
        knobs.use_interpreter()
        transconv.config.cpu = "interpret"
    torch.set_num_threads(1)
    transconv.config.fallback = "error"
    counts: Counter[str] = Counter()
    began = time.perf_counter()
    with by_meaning() if options.meaning else nullcontext():
        for seed in range(options.seed, options.seed + options.n):
            if time.perf_counter() - began > options.time_budget:
                break
            for dynamic in options.dynamic.split(","):
                found, drawn = wrong(seed, options.shapes, dynamic, device=device)
                counts.update(
                    graphs=1, kernels=found.kernels, names=found.names, wrong=bool(found.problem)
                )
                if found.problem:
                    with torch.device(device):
                        why, made = least(drawn, dynamic)
                    print(f"seed {seed} dynamic={dynamic}: {found.problem}\n{made}\n{why}\n", flush=True)
            if seed % 25 == 0:
                _say(counts, options, began)
    _say(counts, options, began)
    if counts["wrong"]:
        raise SystemExit(1)


def _say(counts: Counter[str], options: argparse.Namespace, began: float) -> None:
    print(
        f"{counts['graphs']} graphs at {options.shapes} shapes, {counts['kernels']} kernels, "
        f"{counts['names']} of them for any sizes, {counts['wrong']} wrong, "
        f"{time.perf_counter() - began:.0f} s",
        flush=True,
    )
