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
from transconv.functional.launches import SIZES
from transconv.graph import decompositions, reporting
from transconv.graph.compiled import Launches, launches
from transconv.graph.partition import Region, extracted, is_size, names, regions
from transconv.graph.price import Price
from transconv.graph.symbols import Symbols
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
MOST = 8  # ways to compute a graph, for different sizes
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

    decompositions.repeated(gm)
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

    def __init__(self, gm: fx.GraphModule, rest: str, sized: bool) -> None:
        self.gm, self.sized = gm, sized  # whether its sizes differ between calls
        self.run: Callable[..., Any] | None = gm.forward if rest == "eager" else None

    def __call__(self, *given: Any) -> Sequence[Any]:
        if self.run is None:
            self.run = self.dynamic() if self.sized else self.compiled(given)
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


    def dynamic(self) -> Callable[..., Any]:
        """By Inductor, for all sizes: through torch.compile, which asks for symbols of its own."""
        made: Callable[..., Any] = torch.compile(self.gm, dynamic=True)
        return made


@dataclass(slots=True)
class _Part:
    """A region that runs, of the sizes of a call and the values that it takes: what it gives, and those
    that nothing needs behind it."""

    run: Callable[..., Sequence[Any]]
    inputs: list[str]
    outputs: list[str]
    done: list[str] = field(default_factory=list)


Chosen = tuple["_Way", dict[str, int], dict[str, "int | float"]]


class _Graph:
    """A graph of AOTAutograd, as a function of a list of inputs, which it empties. What it runs is made
    for an example of its sizes, and is right for all that meet what was assumed; for others it is made
    anew, at most ``MOST`` times."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], phase: str, rest: str,
                 made: Made) -> None:
        self.gm, self.rest, self.phase, self.made = gm, rest, phase, made
        device = next((t.device for t in inputs if isinstance(t, Tensor) and t.device.type != "cpu"), CPU)
        self.device = device
        self.target = TARGETS["interpreter"] if device is CPU else target_of(device)
        self.rates = Price(TARGETS[PRICED] if device is CPU else self.target)
        self.placeholders = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
        output = next(n for n in gm.graph.nodes if n.op == "output")
        self.results = [n.name if isinstance(n, fx.Node) else n for n in output.args[0]]
        self.ways = [_Way(self, Symbols(gm.graph))]
        self.known: dict[tuple[int, ...], Chosen] = {}

    def __call__(self, given: list[Any]) -> list[Any]:
        way, sizes, numbers = self.way(self.ways[0].symbols.values(given))
        values: dict[str, Any] = dict(zip(self.placeholders, given, strict=True)) | numbers
        given.clear()
        for node in self.gm.graph.nodes:
            if node.op == "get_attr":
                values[node.name] = getattr(self.gm, node.target)
        for part in way.parts:
            made = part.run(sizes, *[values[name] for name in part.inputs])
            values.update(zip(part.outputs, made, strict=True))
            for name in part.done:
                values.pop(name, None)
        return [values[r] if isinstance(r, str) else r for r in self.results]

    def way(self, values: tuple[int, ...]) -> Chosen:
        """What runs for the sizes of a call, these by name, and the values of nodes that are sizes."""
        found = self.known.get(values)
        if found is None:
            with _unseen():
                way = next((w for w in self.ways if w.takes(values)), None) or self.another(values)
            if len(self.known) >= SIZES:
                self.known.clear()
            found = self.known[values] = way, way.symbols.by_name(values), way.numbers(values)
        return found

    def another(self, values: tuple[int, ...]) -> _Way:
        symbols = Symbols(self.gm.graph, values)
        why = "" if len(self.ways) < MOST else (
            f"its sizes, such as {values}, are not those of {MOST} ways to compute it")
        way = _Way(self, symbols, why)
        self.ways.append(way)
        return way


class _Way:
    """The regions of a graph, for all sizes that meet what was assumed of them. ``whole``: why torch
    computes all of it."""

    def __init__(self, graph: _Graph, symbols: Symbols, whole: str = "") -> None:
        self.graph, self.symbols, self.whole = graph, symbols, whole
        rows: list[reporting.KernelRow | reporting.TorchRow] = []
        edges: list[Any] = []
        found = regions(graph.gm.graph, graph.device, symbols, whole)
        self.parts = [self.part(region, rows, edges) for region in found]
        self.forget()
        self.sizes = [n for n in graph.gm.graph.nodes if is_size(n, symbols)]
        held = [reporting.peak_of(p.run) for p in self.parts if isinstance(p.run, Launches)]
        graph.made.graphs.append(reporting.GraphReport(
            graph.phase, tuple(rows), tuple(edges), sizes=symbols.known.said(), peak=max(held, default=0)))

    def takes(self, values: tuple[int, ...]) -> bool:
        """Whether sizes meet what was assumed."""
        return bool(self.whole) or not self.symbols.known.why_not(self.symbols.by_name(values))

    def numbers(self, values: tuple[int, ...]) -> dict[str, int | float]:
        """The values of nodes that are sizes."""
        return {n.name: self.symbols.numbered(n.meta["val"], values) for n in self.sizes}

    def part(self, region: Region, rows: list[Any], edges: list[Any]) -> _Part:
        """How a region runs. What cannot be written as texts is torch's."""
        graph = self.graph
        by_torch = _Rest(extracted(region, graph.gm), graph.rest, self.symbols.any)
        ends = [n.name for n in region.inputs], [n.name for n in region.outputs]
        why = [f"{name}: {reason}" for name, reason in region.reasons.items()]
        if region.ours:
            try:
                found: Launches = launches(region, graph.device, graph.target, graph.rates, by_torch,
                                           self.symbols)
                rows += reporting.kernel_rows(found, graph.rates)
                edges += found.plan.edges
                return _Part(found, *ends)
            except TransconvError as error:
                why = [str(error)]
            except Exception as error:  # a program must not stop for a bug of ours
                if settings.fallback == "error":
                    raise
                log.warning("no kernels for a part of a graph: %s", error, exc_info=True)
                why = [f"{type(error).__name__}: {error}"]
        rows.append(reporting.TorchRow(graph.rest, names(region.nodes), tuple(dict.fromkeys(why))))
        return _Part(lambda _, *given: by_torch(*given), *ends)

    def forget(self) -> None:
        """Find the last user of every value."""
        kept = {*map(str, self.graph.results)}
        for part in reversed(self.parts):
            part.done = [n for n in (*part.inputs, *part.outputs) if n not in kept]
            kept |= {*part.inputs, *part.outputs}
