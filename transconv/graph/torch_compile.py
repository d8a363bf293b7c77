"""``torch.compile(model, backend="transconv")``: graphs of AOTAutograd, their regions, how they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from transconv.calls import stats
from transconv.calls.settings import settings
from transconv.errors import TransconvError
from transconv.graph import decompositions, reporting
from transconv.graph.backend_calls import Made, owner
from transconv.graph.fusion.fusion_cost import Price
from transconv.graph.lowerings import quantized_products
from transconv.graph.lowerings.small_images import UPSAMPLING
from transconv.graph.regions import input_mutation, saved_tensors
from transconv.graph.regions.cudagraphs import Captures
from transconv.graph.regions.partition import is_size
from transconv.graph.regions.region_runner import Parts, Setting, unseen
from transconv.graph.symbols import Symbols
from transconv.graph.verification.eager_check import Checks, FirstCall
from transconv.runtime import (
    SIZES,
    BatchCompile,
    begin,
    begin_processes,
    cores,
    is_collecting,
    torch_internals,
)
from transconv.target import TARGETS
from transconv.torch_ops.calls.lower_call import target_of

Tensor = torch.Tensor
RESTS = ("inductor", "eager")
CPU = torch.device("cpu")
CAPTURING = "reduce-overhead"  # the mode of torch.compile that asks for CUDA graphs
PRICED = "sm_90"  # whose rates decide where there is no chip
MANY = 16  # operations of a graph for which processes are started before it is traced
MOST = 8  # ways to compute a graph, for different sizes
NO_CPU = ('no kernel of ours runs on a CPU (transconv.config.cpu = "interpret" has Triton\'s interpreter '
          "run them)")


def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None,
            options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """The backend of torch.compile, by the name ``transconv``, or handed over as a function.

    ``options``: ``{"rest": "inductor" | "eager"}``, who computes what kernels of ours do not;
    ``{"upsampling": "auto" | "always" | "never"}``, whether convolutions of upsampled images become
    ones of the small image: where they round no more often than torch, always, or never;
    ``{"cudagraphs": True}``, or the ``mode`` "reduce-overhead": launches are recorded as CUDA graphs (see
    regions/cudagraphs.py). Other modes are for torch's own backend and ignored. Returns a function of the
    graph's inputs. Where no kernel runs, the whole graph is the rest's: with one warning, or as
    ``transconv.config.fallback`` says. ValueError for options that are unknown."""
    given = dict(options or {})
    rest, upsampling = given.pop("rest", "inductor"), given.pop("upsampling", "auto")
    records = given.pop("cudagraphs", mode == CAPTURING)
    if given or rest not in RESTS or upsampling not in UPSAMPLING or not isinstance(records, bool):
        raise ValueError(f"options {options}; expected {{\"rest\": one of {', '.join(RESTS)}, "
                         f"\"upsampling\": one of {', '.join(UPSAMPLING)}, "
                         "\"cudagraphs\": True or False}")
    captures = Captures(len(example_inputs)) if records else None
    made = Made(owner())
    tensors = [t for t in example_inputs if isinstance(t, Tensor)]
    if tensors and all(t.device.type == "cpu" for t in tensors) and settings.cpu != "interpret":
        stats.announce("device:cpu", NO_CPU, "whole graphs")
        made.graphs.append(reporting.GraphReport("whole", (), (), NO_CPU))
        return _marked(_whole(gm, example_inputs, rest), made)

    def compiler(phase: str) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
        def compiled(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            recorded = captures.of(graph, inputs, phase) if captures else None
            with unseen():
                found = _Graph(graph, inputs, phase, rest, made, upsampling)

            def call(given: list[Any]) -> list[Any]:
                return found(given)
            run = recorded(call) if recorded else call
            run._boxed_call = True  # type: ignore[attr-defined]
            return run
        return compiled

    _expect(gm, tensors)
    decompositions.repeated(gm)
    decompositions.normalized(gm)
    run = torch_internals.aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"),
                       inference_compiler=compiler("inference"), decompositions=decompositions.table(),
                       partition_fn=decompositions.divided, keep_inference_input_mutations=True)
    return _marked(run(gm, example_inputs), made)


def _expect(gm: fx.GraphModule, tensors: Sequence[Tensor]) -> None:
    """Start the processes that will compile the kernels, while autograd traces the graph."""
    device = next((t.device for t in tensors if t.device.type != "cpu"), CPU)
    calls = sum(n.op.startswith("call") for n in gm.graph.nodes)
    if device is not CPU and calls >= MANY and cores() > 1 and not is_collecting():
        with suppress(TransconvError):  # no kernel runs there, which is told later
            begin_processes(target_of(device), min(cores(), calls))


def _marked(run: Callable[..., Any], made: Made) -> Callable[..., Any]:
    """The function, with what ``report`` looks for."""
    def whole(*given: Any) -> Any:
        return run(*given)
    whole.transconv = made  # type: ignore[attr-defined]
    return whole


def _whole(gm: fx.GraphModule, inputs: Sequence[Any], rest: str) -> Callable[..., Any]:
    if rest == "eager":
        return gm.forward
    return cast(Callable[..., Any], torch_internals.compile_fx(gm, list(inputs)))


Chosen = tuple["_Way | FirstCall", dict[str, int], dict[str, "int | float"]]


class _Graph:
    """A graph of AOTAutograd, as a function of a list of inputs, which it empties. What it runs is made
    for an example of its sizes, and is right for all that meet what was assumed; for others it is made
    anew, at most ``MOST`` times."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], phase: str, rest: str,
                 made: Made, upsampling: str = "auto") -> None:
        device = next((t.device for t in inputs if isinstance(t, Tensor) and t.device.type != "cpu"), CPU)
        self.checks = Checks(gm, device)
        if phase == "backward":
            saved_tensors.examples(gm.graph, inputs)
        elif phase == "inference":
            saved_tensors.parts_cast(gm.graph)
        decompositions.waiting_for_nothing(gm.graph)
        if phase == "inference":
            decompositions.once(gm.graph)
        quantized_products.joined(gm.graph)
        self.mutated = input_mutation.taken(gm.graph)
        self.gm, self.rest, self.phase, self.made = gm, rest, phase, made
        self.upsampling = upsampling
        self.device = device
        self.target = TARGETS["interpreter"] if device is CPU else target_of(device)
        self.rates = Price(TARGETS[PRICED] if device is CPU else self.target)
        self.ways = [_Way(self, Symbols(gm.graph))]
        if phase == "forward":
            saved_tensors.told(self.strides())
        self.known: dict[tuple[int, ...], Chosen] = {}

    def __call__(self, given: list[Any]) -> list[Any]:
        way, sizes, numbers = self.way(self.ways[0].symbols.values(given))
        if way.begun is not None:
            way.begun.wait()
            way.begun = None
        if not self.mutated:
            return way.parts(sizes, given, numbers)
        inputs = [given[place] for place in self.mutated]
        made = way.parts(sizes, given, numbers)
        own = len(made) - len(inputs)
        input_mutation.write(inputs, made[own:])
        return made[:own]

    def strides(self) -> list[tuple[int, ...] | None]:
        """How its results lie, without those that are written to inputs; None for what is no tensor."""
        outs: Any = self.gm.graph.output_node().args[0]
        lying = self.ways[0].parts.lying()
        own = outs[:len(outs) - len(self.mutated)]
        vals = [x.meta.get("val") if isinstance(x, fx.Node) else None for x in own]
        return [lying.get(x.name, v.stride()) if isinstance(v, Tensor) else None
                for x, v in zip(own, vals, strict=True)]

    def way(self, values: tuple[int, ...]) -> Chosen:
        """What runs for the sizes of a call, these by name, and the values of nodes that are sizes."""
        found = self.known.get(values)
        if found is None:
            with unseen():
                way = next((w for w in self.ways if w.takes(values)), None) or self.another(values)
            chosen: Chosen = way, way.symbols.by_name(values), way.numbers(values)
            if self.checks.due(values):
                return self.compared(way, values, chosen)
            found = self.enter(values, chosen)
        return found

    def enter(self, values: tuple[int, ...], chosen: Chosen) -> Chosen:
        """What runs for some sizes from now on."""
        if len(self.known) >= SIZES:
            self.known.clear()
        self.known[values] = chosen
        return chosen

    def compared(self, way: _Way, values: tuple[int, ...], chosen: Chosen) -> Chosen:
        """The same for one call, whose results are compared with torch's."""
        _, sizes, numbers = chosen

        def entered(wrong: str) -> None:
            own = self.made.graphs
            if wrong:
                whole = _Way(self, way.symbols, wrong)
                self.ways = [whole if w is way else w for w in self.ways]
                whole.place, own[way.place] = way.place, own.pop()
                self.known = {}
            else:
                self.enter(values, chosen)
            own[way.place] = replace(own[way.place], compared=len(self.checks.sizes.seen),
                                     remarks=self.checks.remarks())
        return FirstCall(self.checks, way, values, self.mutated, entered), sizes, numbers

    def another(self, values: tuple[int, ...]) -> _Way:
        symbols = Symbols(self.gm.graph, values)
        why = "" if len(self.ways) < MOST else (
            f"its sizes, such as {values}, are not those of {MOST} ways to compute it")
        way = _Way(self, symbols, why)
        self.ways.append(way)
        return way


def _left(gm: fx.GraphModule) -> dict[str, str]:
    """The operations, by their names, of modules that ``transconv.off`` leaves to torch, and why."""
    return {n.name: why for n in gm.graph.nodes if (why := (n.meta.get("custom") or {}).get("by"))}


class _Way:
    """The regions of a graph, for all sizes that meet what was assumed of them. ``whole``: why torch
    computes all of it."""

    def __init__(self, graph: _Graph, symbols: Symbols, whole: str = "") -> None:
        self.graph, self.symbols, self.whole = graph, symbols, whole
        self.parts = Parts(graph.gm, Setting(graph.device, graph.target, graph.rates, graph.rest, symbols,
                                             self.changed, graph.upsampling), whole, _left(graph.gm))
        self.sizes = [n for n in graph.gm.graph.nodes if is_size(n, symbols)]
        self.place = len(graph.made.graphs)
        graph.made.graphs.append(self.report())
        self.begun = self.begin()

    def begin(self) -> BatchCompile | None:
        """Have the kernels compiled by processes, for which the first call waits."""
        if is_collecting():
            return None
        try:
            return begin(self.parts.questions(self.symbols.known.like))
        except TransconvError:  # the call that needs the kernel is refused, with the reason
            return None

    def takes(self, values: tuple[int, ...]) -> bool:
        """Whether sizes meet what was assumed."""
        return bool(self.whole) or not self.symbols.known.why_not(self.symbols.by_name(values))

    def numbers(self, values: tuple[int, ...]) -> dict[str, int | float]:
        """The values of nodes that are sizes."""
        return {n.name: self.symbols.numbered(n.meta["val"], values) for n in self.sizes}

    def report(self) -> reporting.GraphReport:
        """What it runs."""
        held = [reporting.peak_of(found) for found in self.parts.launches()]
        return reporting.GraphReport(
            self.graph.phase, tuple(self.parts.rows()), self.parts.edges(),
            whole=self.whole, sizes=self.symbols.known.said(), peak=max(held, default=0),
            compared=len(self.graph.checks.sizes.seen), remarks=self.graph.checks.remarks())

    def changed(self) -> None:
        """Report anew."""
        self.graph.made.graphs[self.place] = self.report()
