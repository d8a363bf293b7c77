"""``torch.compile(model, backend="transconv")``: graphs of AOTAutograd, and the ways to compute one.

For ``mode="max-autotune"`` the schedules that the estimate ranks first are timed on the GPU, those of the
kernels first that take most of a call, within a time budget. The trials run in a process of their own
(``transconv tune``), which sees the graph's GPU alone and keeps the fastest in the user's cache: a second
process, or another model with the same kernels, starts with them."""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import fx

from transconv.calls import stats
from transconv.calls.settings import settings
from transconv.compute import Alone, Compute
from transconv.functional.calls import compiled_launch
from transconv.graph import graph_report
from transconv.graph.backend_options import BackendOptions, options_of
from transconv.graph.fusion.groups import Price
from transconv.graph.graph_report import Made, owner
from transconv.graph.lowerings import quantization
from transconv.graph.pieces.region_pieces import BoundedGraph
from transconv.graph.regions import aot_graphs, batch_invariance, concatenations, function_graphs
from transconv.graph.regions.batch_invariance import (
    batch_names,
    largest_batch,
    lookups,
    planned_sizes,
    planned_symbols,
    refuse_larger,
)
from transconv.graph.regions.cudagraphs import Captures
from transconv.graph.regions.graph_parts import Parts, Setting, rows_of, unseen
from transconv.graph.regions.graph_wait import GraphWait, WaitingCall, expect_kernels
from transconv.graph.regions.partition import is_size, place_numbers
from transconv.graph.regions.region_kernels import UPSAMPLING
from transconv.graph.regions.torch_region import left_nodes, whole_graph, why_not_inductor
from transconv.graph.symbols import Symbols
from transconv.graph.verification.eager_check import Checks, FirstCall
from transconv.runtime import (
    SIZES,
    PlanRequest,
    compiler,
    cores,
    estimated,
    is_collecting,
    plan_steps,
    torch_internals,
)
from transconv.selection import Listed, shortlist, tuning_db
from transconv.support import TransconvError, Unsupported, knobs, without_collections
from transconv.target import TARGETS, Target
from transconv.torch_ops.calls.lower_call import target_of

log = logging.getLogger("transconv.graph")
TRIALS = 8  # schedules of a kernel
SHARE = 0.9  # of the estimated time of a graph: kernels beyond it gain little
TIMING_MS = 8  # of one schedule
ENDING_S = 30.0  # to end what runs when the time is over


@dataclass(frozen=True, slots=True)
class Costly:
    """A kernel that a graph launches so many ``times``, and its estimated microseconds."""

    compute: Compute
    times: int
    us: float


def autotune(
    questions: Iterable[PlanRequest], target: Target, device: torch.device, seconds: float
) -> str:
    """Tune the kernels of requests on a device, which is a target, and say how many in how long; the next
    plans take what was found."""
    if target.backend == "interpreter":
        return "max-autotune: nothing is timed without a GPU"
    found = [k for k in costly(questions, target) if not _is_tuned(k.compute, target)]
    if not found:
        return "max-autotune: every kernel that takes much of a call is tuned"
    began = perf_counter()
    problem = _tuned([k.compute for k in found], device, seconds)
    for forget in (tuning_db.forget, compiler.forget, compiled_launch.forget):
        forget()
    kept = sum(_is_tuned(k.compute, target) for k in found)
    said = f"max-autotune: {kept} of {len(found)} kernels tuned in {perf_counter() - began:.0f} s"
    log.info(said)
    return f"{said}; {problem}" if problem else said


def costly(questions: Iterable[PlanRequest], target: Target) -> list[Costly]:
    """The kernels of requests that take ``SHARE`` of the estimated time, the longest first; without those
    whose sizes are arguments, which serve more than one problem."""
    times: Counter[Compute] = Counter()
    for question in questions:
        try:
            steps = plan_steps(question.workload, target)
        except TransconvError as error:  # torch computes it
            log.debug("not tuned: %s: %s", question, error)
            continue
        times.update(
            c
            for c, _ in steps
            if c.does == "compute" and not c.named and isinstance(question.workload.about(c), Alone)
        )
    made = [Costly(c, n, estimated(Alone(c), target)) for c, n in times.items()]
    made.sort(key=lambda k: -k.us * k.times)
    whole, before, taken = sum(k.us * k.times for k in made), 0.0, []
    for kernel in made:
        if before >= SHARE * whole:
            break
        taken.append(kernel)
        before += kernel.us * kernel.times
    return taken


def _first(compute: Compute, target: Target) -> Listed:
    return shortlist(1, compute, target, Alone(compute))[0]


def _is_tuned(compute: Compute, target: Target) -> bool:
    return _first(compute, target).tuned


def _seen(device: torch.device) -> dict[str, str]:
    """The variable with which a process sees only the GPU of a graph; empty without one."""
    if device.type != "cuda":
        return {}
    at = torch.cuda.current_device() if device.index is None else device.index
    return knobs.one_gpu(at, bool(torch.version.hip))


def _tuned(computations: Sequence[Compute], device: torch.device, seconds: float) -> str:
    """Run trials of computations on a device; why that failed, empty if it did not."""
    changes = {"TRITON_INTERPRET": None, **_seen(device)}
    variables = knobs.child_environment(changes, str(Path(__file__).parents[2]))
    with tempfile.TemporaryDirectory(prefix="transconv-autotune-") as folder:
        files = []
        for at, compute in enumerate(computations):
            files.append(f"{folder}/{at:03}.txt")
            Path(files[-1]).write_text(str(compute), encoding="utf-8")
        words = [
            "--trials",
            str(TRIALS),
            "--jobs",
            str(max(1, cores() - 2)),
            "--budget-ms",
            str(TIMING_MS),
        ]
        words += ["--time-budget", str(seconds)]
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "transconv", "tune", *files, *words],
                env=variables,
                capture_output=True,
                text=True,
                check=False,
                timeout=seconds + ENDING_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"tuning ended: {error}"
    log.debug("%s", ended.stdout)
    return "" if ended.returncode == 0 else f"tuning failed: {ended.stderr.strip()[-300:]}"


Tensor = torch.Tensor
CPU = torch.device("cpu")
PRICED = "sm_90"  # whose rates decide where there is no chip
MOST = 8  # ways to compute a graph, for different sizes
NO_CPU = (
    'no kernel of ours runs on a CPU (transconv.config.cpu = "interpret" has Triton\'s interpreter '
    "run them)"
)


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend of torch.compile, by the name ``transconv``, or handed over as a function.

    ``options``: ``{"rest": "inductor" | "eager"}``, who computes what kernels of ours do not;
    ``{"upsampling": "auto" | "always" | "never"}``, whether convolutions of upsampled images become
    ones of the small image: where they round no more often than torch, always, or never;
    ``{"cudagraphs": True}``, or the ``mode`` "reduce-overhead" or "max-autotune": launches are recorded
    as CUDA graphs (see regions/cudagraphs.py); ``{"tune": seconds}``, or the ``mode`` "max-autotune" or
    "max-autotune-no-cudagraphs": schedules are timed first (see ``autotune``); ``{"invariant": True}``: a
    sample's bits do not depend on its batch, as with ``transconv.config.invariant``. Other modes are for
    torch's own backend and ignored. Returns a function of the graph's inputs. Where no kernel runs, the
    whole graph is the rest's: with one warning, or as ``transconv.config.fallback`` says. ValueError for
    options that are unknown."""
    asked = options_of(mode, options, UPSAMPLING)
    rest, invariant = asked.rest, asked.invariant
    captures = Captures(len(example_inputs)) if asked.cudagraphs else None
    made = Made(owner())
    tensors = [t for t in example_inputs if isinstance(t, Tensor)]
    if rest == "inductor" and why_not_inductor(tensors[0].device.type if tensors else "cpu"):
        rest = "eager"
    if tensors and all(t.device.type == "cpu" for t in tensors) and settings.cpu != "interpret":
        if invariant or asked.within is not None:
            raise Unsupported("device:cpu", NO_CPU)
        stats.announce("device:cpu", NO_CPU, "whole graphs")
        made.graphs.append(graph_report.GraphReport("whole", (), (), NO_CPU))
        return _marked(whole_graph(gm, example_inputs, rest), made, invariant)

    before: list[_Planned] = []

    def compiler(phase: str) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
        def compiled(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            if phase == "backward" and captures is None:  # whose memory is used again within a graph
                aot_graphs.repeatable()
            recorded = captures.of(graph, inputs, phase) if captures else None
            found = _Planned(lambda: _Graph(graph, inputs, phase, rest, made, asked))
            if phase != "backward" or _is_planned_at_once(inputs, before, invariant):
                found.graph()
            before.append(found)

            def call(given: list[Any]) -> list[Any]:
                return (found.made or found.graph())(given)

            run = recorded(call, found.waits) if recorded else call
            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return compiled

    expect_kernels(gm, tensors)
    function_graphs.repeated(gm)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        function_graphs.interpolated(gm)
    function_graphs.normalized(gm)
    function_graphs.attended(gm, invariant)
    run = torch_internals.aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        decompositions=aot_graphs.table(),
        partition_fn=partial(aot_graphs.divided, again=asked.within is not None),
        keep_inference_input_mutations=True,
    )
    # The backward graph is planned while processes compile the forward graph's kernels, and its own are
    # compiled while the first forward call runs. Where none are compiled, its first call plans it.
    both = torch_internals.aot_settings.patch(force_non_lazy_backward_lowering=True)
    with both, without_collections():
        return _marked(run(gm, example_inputs), made, invariant)


def _is_planned_at_once(inputs: Sequence[Any], before: Sequence[_Planned], invariant: bool) -> bool:
    """Whether a backward graph is planned with its forward graph: while the kernels of that are compiled,
    where its sizes are names, which torch's trace knows, or where it may be refused. Otherwise its first
    call is early enough, and there may be none."""
    if invariant or is_collecting() or any(isinstance(x, torch.SymInt) for x in inputs):
        return True
    waits = [planned.graph().ways[0].wait for planned in before]
    return any(wait.batch is not None or wait.overs for wait in waits)


def _marked(run: Callable[..., Any], made: Made, invariant: bool) -> Callable[..., Any]:
    """The function, with what ``report`` looks for. ``invariant``: whether it is in invariant mode; where
    it is not, calls in that mode raise Unsupported."""

    def whole(*given: Any) -> Any:
        if settings.invariant and not invariant:
            raise Unsupported(
                "invariant:graph",
                "this graph was compiled before transconv.config.invariant was set: call "
                "torch.compiler.reset() and run it again",
            )
        return run(*given)

    whole.transconv = made  # type: ignore[attr-defined]
    return whole


Chosen = tuple["_Way | FirstCall | WaitingCall", dict[str, int], dict[str, "int | float"]]


class _Planned:
    """A graph that is planned when it is asked for, once."""

    def __init__(self, make: Callable[[], _Graph]) -> None:
        self.make: Callable[[], _Graph] | None = make
        self.made: _Graph | None = None
        self.lock = threading.Lock()

    def graph(self) -> _Graph:
        """The graph; threads wait for the one that plans it."""
        if self.made is None:
            with self.lock, without_collections():
                if self.make is not None:
                    with unseen():
                        self.made = self.make()
                    self.make = None  # holds the examples
        assert self.made is not None
        return self.made

    def waits(self, given: Sequence[Any]) -> bool:
        """As ``_Graph.waits``."""
        return self.graph().waits(given)


class _Graph:
    """A graph of AOTAutograd, as a function of a list of inputs, which it empties. What it runs is made
    for an example of its sizes, and is right for all that meet what was assumed; for others it is made
    anew, at most ``MOST`` times."""

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        phase: str,
        rest: str,
        made: Made,
        asked: BackendOptions,
    ) -> None:
        device = next((t.device for t in inputs if isinstance(t, Tensor) and t.device.type != "cpu"), CPU)
        place_numbers(gm, device)
        self.checks = Checks(gm, device)
        if phase == "backward":
            aot_graphs.examples(gm.graph, inputs)
        elif phase == "inference":
            concatenations.parts_cast(gm.graph)
        aot_graphs.waiting_for_nothing(gm.graph)
        aot_graphs.with_elements(gm.graph)
        if phase == "inference":
            aot_graphs.once(gm.graph)
        quantization.joined(gm.graph)
        self.mutated = aot_graphs.taken(gm.graph)
        self.gm, self.rest, self.phase, self.made = gm, rest, phase, made
        self.upsampling, self.tunes = asked.upsampling, asked.tune
        self.device = device
        self.target = TARGETS["interpreter"] if device is CPU else target_of(device)
        self.rates = Price(TARGETS[PRICED] if device is CPU else self.target)
        self.within: BoundedGraph | None = None
        if asked.within is not None:
            rates, backward = self.rates.target, phase == "backward"
            self.within = BoundedGraph.of(gm, asked.within, device, self.target, rates, backward)
        self.batch = batch_names(gm.graph, Symbols(gm.graph)) if asked.invariant else ()
        self.ways = [_Way(self, planned_symbols(gm.graph, (), self.batch))]
        if phase == "forward":
            aot_graphs.told(self.strides())
        self.known: dict[tuple[int, ...], Chosen] = {}

    def __call__(self, given: list[Any]) -> list[Any]:
        way, sizes, numbers = self.way(self.ways[0].symbols.values(given))
        if not self.mutated:
            return way.parts(sizes, given, numbers)
        inputs = [given[place] for place in self.mutated]
        made = way.parts(sizes, given, numbers)
        own = len(made) - len(inputs)
        aot_graphs.write(inputs, made[own:])
        return made[:own]

    def strides(self) -> list[tuple[int, ...] | None]:
        """How its results lie, without those that are written to inputs; None for what is no tensor."""
        outs: Any = self.gm.graph.output_node().args[0]
        lying = self.ways[0].parts.lying()
        own = outs[: len(outs) - len(self.mutated)]
        vals = [x.meta.get("val") if isinstance(x, fx.Node) else None for x in own]
        return [
            lying.get(x.name, v.stride()) if isinstance(v, Tensor) else None
            for x, v in zip(own, vals, strict=True)
        ]

    def way(self, values: tuple[int, ...]) -> Chosen:
        """What runs for the sizes of a call, these by name, and the values of nodes that are sizes."""
        found = self.known.get(values)
        if found is None:
            way = self.made_way(values)
            sizes, numbers = way.symbols.by_name(values), way.numbers(values)
            waits, chosen = way.wait.waits(sizes, values), (way, sizes, numbers)
            if self.within is not None:
                return self.enter(values, chosen)
            if self.checks.due(values) and not (waits and way.wait.seen):
                return self.compared(way, values, chosen, waits)
            if waits:
                return WaitingCall(way.wait), sizes, numbers
            found = chosen if is_collecting() else self.enter(values, chosen)
        return found

    def waits(self, given: Sequence[Any]) -> bool:
        """Whether torch answers a call of these inputs, while its kernels are compiled."""
        values = self.ways[0].symbols.values(given)
        if values in self.known:
            return False
        way = self.made_way(values)
        return way.wait.waits(way.symbols.by_name(values), values)

    def made_way(self, values: tuple[int, ...]) -> _Way:
        """The regions for the sizes of a call."""
        with unseen():
            return next((w for w in self.ways if w.takes(values)), None) or self.another(values)

    def enter(self, values: tuple[int, ...], chosen: Chosen) -> Chosen:
        """What runs for some sizes from now on."""
        if len(self.known) >= SIZES:
            self.known.clear()
        self.known[values] = chosen
        return chosen

    def compared(self, way: _Way, values: tuple[int, ...], chosen: Chosen, waits: bool) -> Chosen:
        """The same for one call, whose results are compared with torch's. ``waits``: torch answers it."""
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
            way.told()

        return FirstCall(self.checks, way, values, self.mutated, waits, entered), sizes, numbers

    def another(self, values: tuple[int, ...]) -> _Way:
        symbols = planned_symbols(self.gm.graph, values, self.batch)
        most = batch_invariance.MOST if self.batch else MOST
        why = (
            ""
            if len(self.ways) < most
            else (f"its sizes, such as {values}, are not those of {most} ways to compute it")
        )
        if why and self.batch:
            raise Unsupported("invariant:sizes", why)
        way = _Way(self, symbols, why)
        self.ways.append(way)
        return way


class _Way:
    """The regions of a graph, for all sizes that meet what was assumed of them. ``whole``: why torch
    computes all of it."""

    def __init__(self, graph: _Graph, symbols: Symbols, whole: str = "") -> None:
        self.graph, self.symbols, self.whole = graph, symbols, whole
        self.parts = Parts(
            graph.gm,
            Setting(
                graph.device,
                graph.target,
                graph.rates,
                graph.rest,
                symbols,
                self.changed,
                graph.upsampling,
                graph.batch,
                graph.within,
            ),
            whole,
            left_nodes(graph.gm) | (lookups(graph.gm.graph) if graph.batch else {}),
        )
        self.most = largest_batch(symbols, graph.batch) if graph.batch else 0
        self.sizes = [n for n in graph.gm.graph.nodes if is_size(n, symbols)]
        self.place = len(graph.made.graphs)
        self.wait = GraphWait(self.parts, graph.checks, graph.device, graph.target, self.told)
        self.tuned = self.tune() if graph.tunes else ""
        self.wait.begin(symbols.known.like)
        graph.made.graphs.append(self.report())

    def tune(self) -> str:
        """Have its kernels timed; what came of it. Those for any sizes are not."""
        try:
            questions = self.parts.questions(self.symbols.known.like)
            return autotune(questions, self.graph.target, self.graph.device, self.graph.tunes)
        except TransconvError as error:
            return f"max-autotune: {error}"

    def told(self) -> None:
        """Report what is said of it now."""
        own, checks = self.graph.made.graphs, self.graph.checks
        own[self.place] = replace(own[self.place], compared=len(checks.sizes.seen), remarks=self.remarks())

    def remarks(self) -> tuple[str, ...]:
        """What a report says of its first results."""
        tuned = (self.tuned,) if self.tuned else ()
        return *tuned, *self.wait.remarks(), *self.graph.checks.remarks()

    def takes(self, values: tuple[int, ...]) -> bool:
        """Whether sizes meet what was assumed; in invariant mode whether it is planned for them, whatever
        sizes came before."""
        if batch := self.graph.batch:
            own = tuple([self.symbols.known.like[n] for n in self.symbols.known.names])
            if own != planned_sizes(self.symbols, values, batch):
                return False
            refuse_larger(self.symbols, values, batch, self.most)
            return True
        return bool(self.whole) or not self.symbols.known.why_not(self.symbols.by_name(values))

    def numbers(self, values: tuple[int, ...]) -> dict[str, int | float]:
        """The values of nodes that are sizes."""
        return {n.name: self.symbols.numbered(n.meta["val"], values) for n in self.sizes}

    def report(self) -> graph_report.GraphReport:
        """What it runs."""
        held = [found.peak for found in self.parts.launches()]
        return graph_report.GraphReport(
            self.graph.phase,
            tuple(rows_of(self.parts)),
            self.parts.edges(),
            whole=self.whole,
            sizes=self.symbols.known.said(),
            peak=max(held, default=0),
            compared=len(self.graph.checks.sizes.seen),
            remarks=self.remarks(),
        )

    def changed(self) -> None:
        """Report anew."""
        self.graph.made.graphs[self.place] = self.report()
