"""``torch.compile(model, backend="transconv")``: graphs of AOTAutograd, their regions, how they run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import _disable_current_modes

from transconv.errors import TransconvError
from transconv.graph import decompositions, reporting
from transconv.graph.compiled import Launches, launches
from transconv.graph.partition import Region, extracted, names, regions
from transconv.graph.price import Price
from transconv.target import TARGETS
from transconv.torch_ops import stats
from transconv.torch_ops.execute import target_of
from transconv.torch_ops.settings import settings

Tensor = torch.Tensor
log = logging.getLogger("transconv.graph")
_unseen: Any = _disable_current_modes  # by tracers and other modes
RESTS = ("inductor", "eager")
CPU = torch.device("cpu")
PRICED = "sm_90"  # whose rates decide where there is no chip
NO_CPU = ('no kernel of ours runs on a CPU (transconv.config.cpu = "interpret" has Triton\'s interpreter '
          "run them)")


@dataclass(slots=True)
class Made:
    """The graphs of one call of the backend, as they come: the backward one at the first backward."""

    graphs: list[reporting.GraphReport] = field(default_factory=list)


def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None,
            options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """The backend of torch.compile, by the name ``transconv``, or handed over as a function.

    ``options``: ``{"rest": "inductor" | "eager"}``, who computes what kernels of ours do not; ``mode`` is
    for torch's own backend and ignored. Returns a function of the graph's inputs. Where no kernel runs,
    the whole graph is the rest's: with one warning, or as ``transconv.config.fallback`` says. ValueError
    for options that are unknown."""
    given = dict(options or {})
    rest = given.pop("rest", "inductor")
    if given or rest not in RESTS:
        raise ValueError(f"options {options}; expected {{\"rest\": one of {', '.join(RESTS)}}}")
    made = Made()
    tensors = [t for t in example_inputs if isinstance(t, Tensor)]
    if tensors and all(t.device.type == "cpu" for t in tensors) and settings.cpu != "interpret":
        stats.announce("device:cpu", NO_CPU, "whole graphs")
        made.graphs.append(reporting.GraphReport("whole", (), (), NO_CPU))
        return _marked(_whole(gm, example_inputs, rest), made)

    def compiler(phase: str) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
        def compiled(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            with _unseen():
                found = _Graph(graph, inputs, phase, rest, made)

            def call(given: list[Any]) -> list[Any]:
                return found(given)
            call._boxed_call = True  # type: ignore[attr-defined]
            return call
        return compiled

    run = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"),
                       inference_compiler=compiler("inference"), decompositions=decompositions.table(),
                       partition_fn=decompositions.divided)
    return _marked(run(gm, example_inputs), made)


def _marked(run: Callable[..., Any], made: Made) -> Callable[..., Any]:
    """The function, with what ``report`` looks for."""
    def whole(*given: Any) -> Any:
        return run(*given)
    whole.transconv = made  # type: ignore[attr-defined]
    return whole


def _whole(gm: fx.GraphModule, inputs: Sequence[Any], rest: str) -> Callable[..., Any]:
    if rest == "eager":
        return gm.forward
    from torch._inductor.compile_fx import compile_fx

    found: Any = compile_fx(gm, list(inputs))
    return found  # type: ignore[no-any-return]


class _Rest:
    """A region of torch's: compiled when it is first called, as its inputs then are."""

    def __init__(self, gm: fx.GraphModule, rest: str) -> None:
        self.gm, self.rest = gm, rest
        self.run: Callable[..., Any] | None = gm.forward if rest == "eager" else None

    def __call__(self, *given: Any) -> Sequence[Any]:
        if self.run is None:
            self.run = self.compiled(given)
        found: Sequence[Any] = self.run(*given)
        return found

    def compiled(self, given: Sequence[Any]) -> Callable[..., Any]:
        """By Inductor. In a thread of its own: the call that asks for it stands in the middle of autograd,
        whose state is the thread's."""
        import torch._inductor

        like = [t.detach() if isinstance(t, Tensor) else t for t in given]

        def compile_() -> Callable[..., Any]:
            found: Any = torch._inductor.compile(self.gm, like)
            return found  # type: ignore[no-any-return]
        with ThreadPoolExecutor(1) as fresh:
            return fresh.submit(compile_).result()


@dataclass(slots=True)
class _Part:
    """A region that runs: the values that it takes, gives, and those that nothing needs behind it."""

    run: Callable[..., Sequence[Any]]
    inputs: list[str]
    outputs: list[str]
    done: list[str] = field(default_factory=list)


class _Graph:
    """A graph of AOTAutograd, as a function of a list of inputs, which it empties."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], phase: str, rest: str,
                 made: Made) -> None:
        self.gm, self.rest = gm, rest
        device = next((t.device for t in inputs if isinstance(t, Tensor) and t.device.type != "cpu"), CPU)
        self.device = device
        self.target = TARGETS["interpreter"] if device is CPU else target_of(device)
        self.rates = Price(TARGETS[PRICED] if device is CPU else self.target)
        self.placeholders = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
        output = next(n for n in gm.graph.nodes if n.op == "output")
        self.results = [n.name if isinstance(n, fx.Node) else n for n in output.args[0]]
        rows: list[reporting.KernelRow | reporting.TorchRow] = []
        edges: list[Any] = []
        self.parts = [self.part(region, rows, edges) for region in regions(gm.graph, device)]
        self.forget()
        made.graphs.append(reporting.GraphReport(phase, tuple(rows), tuple(edges)))

    def part(self, region: Region, rows: list[Any], edges: list[Any]) -> _Part:
        """How a region runs. What cannot be written as texts is torch's."""
        by_torch = _Rest(extracted(region, self.gm), self.rest)
        ends = [n.name for n in region.inputs], [n.name for n in region.outputs]
        why = [f"{name}: {reason}" for name, reason in region.reasons.items()]
        if region.ours:
            try:
                found: Launches = launches(region, self.device, self.target, self.rates, by_torch)
                rows += reporting.kernel_rows(found, self.rates)
                edges += found.plan.edges
                return _Part(found, *ends)
            except TransconvError as error:
                why = [str(error)]
            except Exception as error:  # a program must not stop for a bug of ours
                if settings.fallback == "error":
                    raise
                log.warning("no kernels for a part of a graph: %s", error, exc_info=True)
                why = [f"{type(error).__name__}: {error}"]
        rows.append(reporting.TorchRow(self.rest, names(region.nodes), tuple(why)))
        return _Part(by_torch, *ends)

    def forget(self) -> None:
        """Find the last user of every value."""
        kept = {*map(str, self.results)}
        for part in reversed(self.parts):
            part.done = [n for n in (*part.inputs, *part.outputs) if n not in kept]
            kept |= {*part.inputs, *part.outputs}

    def __call__(self, given: list[Any]) -> list[Any]:
        values: dict[str, Any] = dict(zip(self.placeholders, given, strict=True))
        given.clear()
        for node in self.gm.graph.nodes:
            if node.op == "get_attr":
                values[node.name] = getattr(self.gm, node.target)
        for part in self.parts:
            made = part.run(*[values[name] for name in part.inputs])
            values.update(zip(part.outputs, made, strict=True))
            for name in part.done:
                values.pop(name, None)
        return [values[r] if isinstance(r, str) else r for r in self.results]
