"""``torch.compile(model, backend="transconv")``: graphs of AOTAutograd, their regions, how they run.

Also here: how AOTAutograd writes graphs: torch's decompositions, but for operations that rows translate
whole, and its division into forward and backward, which keeps nothing that costs nothing to have again.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from transconv.calls import stats
from transconv.calls.settings import settings
from transconv.graph import graph_report
from transconv.graph import translate as translate  # its tables have entered their rows
from transconv.graph.fusion.fusion_cost import Price
from transconv.graph.graph_report import Made, owner
from transconv.graph.lowerings import quantized_convolutions
from transconv.graph.lowerings.small_images import UPSAMPLING
from transconv.graph.lowerings.table import ROWS
from transconv.graph.regions import saved_tensors
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
from transconv.support import TransconvError
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
        made.graphs.append(graph_report.GraphReport("whole", (), (), NO_CPU))
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
    repeated(gm)
    normalized(gm)
    run = torch_internals.aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"),
                       inference_compiler=compiler("inference"), decompositions=table(),
                       partition_fn=divided, keep_inference_input_mutations=True)
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
        waiting_for_nothing(gm.graph)
        if phase == "inference":
            once(gm.graph)
        quantized_convolutions.joined(gm.graph)
        self.mutated = saved_tensors.taken(gm.graph)
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
        saved_tensors.write(inputs, made[own:])
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

    def report(self) -> graph_report.GraphReport:
        """What it runs."""
        held = [graph_report.peak_of(found) for found in self.parts.launches()]
        return graph_report.GraphReport(
            self.graph.phase, tuple(self.parts.rows()), self.parts.edges(),
            whole=self.whole, sizes=self.symbols.known.said(), peak=max(held, default=0),
            compared=len(self.graph.checks.sizes.seen), remarks=self.graph.checks.remarks())

    def changed(self) -> None:
        """Report anew."""
        self.graph.made.graphs[self.place] = self.report()


# Softmax, batch norms and the gradients of norms become moments and maps, of which kernels are made again.
ALSO = ("_softmax", "_log_softmax", "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional", "native_batch_norm",
        "_batch_norm_with_update_functional", "_batch_norm_no_update", "batch_norm_backward", "addcmul",
        "addcdiv", "linalg_vector_norm", "std", "glu", "hardsigmoid", "mish", "native_dropout_backward")


@functools.lru_cache(maxsize=1)
def table() -> dict[Any, Callable[..., Any]]:
    """The decompositions, by operation."""
    aten = torch.ops.aten
    also = [getattr(aten, name) for name in ALSO if hasattr(aten, name)]
    more = torch_internals.get_decompositions(also)
    found = {**torch_internals.core_aten_decompositions(), **more, aten.native_dropout.default: _dropout}
    return {op: how for op, how in found.items() if op not in ROWS}


def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Its mask by torch, of nothing that is computed before; what is done with it is arithmetic. In the
    type, the order and the numbers of torch's dropout on a CPU."""
    shape, device = x.shape, x.device
    if train is False or p == 0:
        return x.clone(), torch.ones(shape, dtype=torch.bool, device=device)
    mask = torch.ops.aten.bernoulli.p(torch.empty(shape, dtype=torch.bool, device=device), 1 - p)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


NORM = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
MOVED = {getattr(getattr(torch.ops.aten, packet), "default") for packet in (  # noqa: B009
    "cat", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d")}


EQUAL = {torch.ops.aten.eq.Tensor, torch.ops.aten.ne.Tensor}


def divided(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's division of a joint graph. What is made of no input, or only moves elements of what is kept,
    is not kept: the backward graph reads it through a view again. Where values are equal is kept: one that
    is evaluated again is not that of which the largest was stored, as it is not rounded alike."""
    saved_tensors.prepared(joint.graph)
    told: set[fx.Node] = set()
    for node in joint.graph.nodes:
        known = all(x in told for x in node.all_input_nodes)
        if node.op == "call_function" and known and not _random(node):
            told.add(node)
        if node in told or node.target in MOVED or _told_by_place(node, told):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif node.target in EQUAL and any(_is_float(x) for x in node.all_input_nodes):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    found: tuple[fx.GraphModule, fx.GraphModule] = torch_internals.min_cut_partition(
        joint, *args, **kwargs)
    saved_tensors.shared(*found, kwargs["num_fwd_outputs"])
    return found


def _is_float(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, Tensor) and val.is_floating_point()


def repeated(gm: fx.GraphModule) -> None:
    """Write nearest upsampling by a power of 2 as what it is, each element several times, in a graph of
    torch's functions. Of sizes that are known when a graph runs torch makes arithmetic on tensors."""
    for node in gm.graph.nodes:
        if node.target is torch.nn.functional.interpolate and (times := _times(node)):
            with gm.graph.inserting_before(node):
                made = gm.graph.call_function(_repeated, (node.args[0], times))
                made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            gm.graph.erase_node(node)
    gm.recompile()


def normalized(gm: fx.GraphModule) -> None:
    """Write instance norms without running statistics as group norms with a group for each feature, in a
    graph of torch's functions. torch computes them as batch norms of an image that has the features of all
    images, where a convolution has to look for each of its own."""
    for node in gm.graph.nodes:
        if node.target is not torch.nn.functional.instance_norm:
            continue
        given = dict(zip(NORM, node.args, strict=False)) | node.kwargs
        if given.get("running_mean") is None and given.get("use_input_stats", True):
            with gm.graph.inserting_before(node):
                made = gm.graph.call_function(_normalized, (
                    given["input"], given.get("weight"), given.get("bias"), given.get("eps", 1e-5)))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            gm.graph.erase_node(node)
    gm.recompile()


def once(graph: fx.Graph) -> None:
    """Compute equal operations of torch's once, as its partitioner does in graphs of training. Results
    that are handed out stay apart; random numbers stay, and graphs in which something is written to."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    writes = [n for n in calls if n.target is not torch.ops.aten.copy_.default and _writes(n)]
    handed = {_memory(n) for n in graph.output_node().all_input_nodes} - {None}
    known: dict[tuple[Any, str, str], fx.Node] = {}
    for node in calls if not writes else ():
        if not isinstance(node.target, torch_internals.OpOverload) or _random(node) or _writes(node) or (
                node.target.namespace not in ("aten", "prims") or _memory(node) in {None, *handed}):
            continue
        found = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if found is not node:
            node.replace_all_uses_with(found)
            graph.erase_node(node)


def _writes(node: fx.Node) -> bool:
    """Whether a call may write to what it is handed."""
    schema = getattr(node.target, "_schema", None)
    return node.target is not operator.getitem if schema is None else bool(schema.is_mutable)


def _memory(node: fx.Node) -> int | None:
    """What the memory of a tensor is known by, which its views have too; None for other values."""
    val = node.meta.get("val")
    if isinstance(val, Tensor) and val.layout is torch.strided:
        return int(val.untyped_storage()._cdata)
    return None


def waiting_for_nothing(graph: fx.Graph) -> None:
    """Write memory that is as large as another tensor without it, so that random numbers that are drawn
    into it need not wait for what computes the other one. Where sizes are symbols it stays as it is."""
    aten = torch.ops.aten
    for node in graph.nodes:
        if node.target not in (aten.empty_like.default, aten.new_empty.default,
                               aten.new_empty_strided.default):
            continue
        val = node.meta["val"]
        shape, strides = list(val.shape), list(val.stride())
        if all(isinstance(n, int) for n in (*shape, *strides)):
            with graph.inserting_before(node):
                made = graph.call_function(aten.empty_strided.default, (shape, strides),
                                           {"dtype": val.dtype, "device": val.device})
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def _times(node: fx.Node) -> tuple[int, ...]:
    """How often an upsampling takes each element along each dim; empty for one that is otherwise."""
    given = dict(zip(("input", "size", "scale_factor", "mode"), node.args, strict=False)) | node.kwargs
    like, scale = getattr(given["input"], "meta", {}).get("example_value"), given.get("scale_factor")
    if not isinstance(like, torch.Tensor) or given.get("mode", "nearest") != "nearest" or not any(
            isinstance(n, torch.SymInt) for n in like.shape[2:]):
        return ()
    scales = [*scale] if isinstance(scale, (list, tuple)) else [scale] * (like.dim() - 2)
    if given.get("size") is not None or any(s not in (1, 2, 4, 8) for s in scales):
        return ()
    return tuple(int(s) for s in scales if isinstance(s, (int, float)))


def _repeated(x: torch.Tensor, times: Sequence[int]) -> torch.Tensor:
    lead, sizes = list(x.shape[:2]), x.shape[2:]
    wide = x.reshape(lead + [e for n in sizes for e in (n, 1)])
    wide = wide.expand(lead + [e for n, k in zip(sizes, times, strict=True) for e in (n, k)])
    return wide.reshape(lead + [n * k for n, k in zip(sizes, times, strict=True)])


def _normalized(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
                eps: float) -> torch.Tensor:
    """In the type of the image, as instance norms are under autocast, too; that of the weight may be
    wider."""
    wide = x if weight is None else x.to(weight.dtype)
    return torch.nn.functional.group_norm(wide, x.shape[1], weight, bias, eps).to(x.dtype)


def _told_by_place(node: fx.Node, told: set[fx.Node]) -> bool:
    """Whether elements are taken from positions that are the same at every call: nearest upsampling."""
    places: Any = node.args[1] if len(node.args) > 1 else ()
    return node.target in (torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor) and all(
        i is None or i in told for i in places)


def _random(node: fx.Node) -> bool:
    tags: Sequence[Any] = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags
