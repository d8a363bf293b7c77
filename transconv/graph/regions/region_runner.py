"""How the regions of a graph run, one after another: each by kernels, or by torch.

Also here: the kernels of a region of a graph: planned, written as texts, and weighed until nothing
changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from transconv.calls import stats
from transconv.calls.route_cache import PASSING
from transconv.calls.settings import settings
from transconv.compute import Workload
from transconv.compute import kernels as kernels_of
from transconv.conv import ConvProblem, Prop, Surrounded, surrounded
from transconv.errors import TransconvError, Unsupported
from transconv.functional.calls.compiled_launch import deterministic, program
from transconv.graph import graph_report
from transconv.graph.fusion.concat_views import slices
from transconv.graph.fusion.epilogue_reductions import weighed, why_again
from transconv.graph.fusion.fusion_cost import Price
from transconv.graph.fusion.group_text import GroupText, Writer
from transconv.graph.fusion.groups import FusionGroup
from transconv.graph.fusion.index_ir import MovedView, Piece, RegionInput
from transconv.graph.fusion.materialize import MaterializeReason, step
from transconv.graph.fusion.memory_order import memory_of, replacing
from transconv.graph.fusion.plan import Edge, FusionPlan, planned
from transconv.graph.fusion.written_factors import held, why_apart
from transconv.graph.fusion.written_factors import weighed as apart_or_not
from transconv.graph.lowerings import small_images
from transconv.graph.regions import saved_tensors
from transconv.graph.regions.partition import Region, extracted, nothing, regions
from transconv.graph.regions.refusals import RefusedKernel, refusal
from transconv.graph.regions.region_calls import Handed, RegionLaunches
from transconv.graph.regions.region_kernel import RegionKernel, SizedTensor
from transconv.graph.sizes import Known, like, same
from transconv.graph.symbols import Symbols
from transconv.graph.translate import base_of
from transconv.graph.verification.eager_check import WatchedCall
from transconv.runtime import Batch, PlanRequest, collect, is_collecting, rank, torch_internals
from transconv.target import Target
from transconv.torch_ops.conversion.convert import aten

Tensor = torch.Tensor
Row = graph_report.KernelRow | graph_report.TorchRow
log = logging.getLogger("transconv.graph")
unseen: Any = _disable_current_modes  # by tracers and other modes


class Rest:
    """A region of torch's: compiled when it is first called, as its inputs then are."""

    def __init__(self, gm: fx.GraphModule, rest: str, sized: bool) -> None:
        self.gm, self.sized = gm, sized  # whether its sizes differ between calls
        self.compiles = rest != "eager"
        self.run: Callable[..., Any] | None = gm.forward if rest == "eager" else None

    def __call__(self, *given: Any) -> Sequence[Any]:
        if self.run is None:
            self.run = self.dynamic() if self.sized else self.compiled(given)
        found: Sequence[Any] = self.run(*given)
        return found

    def compiled(self, given: Sequence[Any]) -> Callable[..., Any]:
        """By Inductor. In a thread of its own: the call that asks for it stands in the middle of autograd,
        whose state is the thread's."""
        like = [t.detach() if isinstance(t, Tensor) else t for t in given]

        def compile_() -> Callable[..., Any]:
            found: Callable[..., Any] = torch_internals.inductor_compile(self.gm, like)
            return found
        with ThreadPoolExecutor(1) as fresh:
            return fresh.submit(compile_).result()

    def dynamic(self) -> Callable[..., Any]:
        """By Inductor, for all sizes: through torch.compile, which asks for symbols of its own."""
        made: Callable[..., Any] = torch.compile(self.gm, dynamic=True)
        return made


@dataclass(frozen=True, slots=True)
class Setting:
    """What the regions of a graph have in common. ``rest``: who computes what kernels do not; ``changed``
    is called where a region runs otherwise than it was reported."""

    device: torch.device
    target: Target
    rates: Price
    rest: str
    symbols: Symbols
    changed: Callable[[], None]
    upsampling: str = "auto"  # see lowerings/small_images.py


class Wired(NamedTuple):
    """Of one part that is a whole graph: which placeholders are its inputs, which are results, and each
    result's place among these and the part's outputs; -1 for a value that is known."""

    inputs: list[int]
    used: list[int]
    results: list[tuple[int, Any]]


class Parts:
    """The regions of a graph: called with the sizes of a call by name, the values of its placeholders in a
    list that is emptied, and those of its sizes, they return its results. ``whole``: why torch computes
    all of it; ``refused``: why some operations, by their names."""

    def __init__(self, gm: fx.GraphModule, setting: Setting, whole: str = "",
                 refused: Mapping[str, str] | None = None) -> None:
        nodes = [*gm.graph.nodes]
        self.given = [n.name for n in nodes if n.op == "placeholder"]
        self.results = [n.name if isinstance(n, fx.Node) else n for n in nodes[-1].args[0]]
        held = {n.name: getattr(gm, n.target) for n in nodes if n.op == "get_attr"}
        self.held: dict[str, Any] = held | {n.name: None for n in nodes if nothing(n)}
        found = regions(gm.graph, setting.device, setting.symbols, whole, refused or {})
        self.parts = [RunnableRegion(region, gm, setting) for region in found]
        kept = {*map(str, self.results)}
        for part in reversed(self.parts):
            part.done = {n for n in (*part.inputs, *part.outputs) if n not in kept}
            kept |= {*part.inputs, *part.outputs}
        self.alone = self.wired()

    def wired(self) -> Wired | None:
        """How values come to one part that is the whole graph, and to the results, if these are
        placeholders, outputs, or known: a dictionary of hundreds of tensors takes the host long."""
        if len(self.parts) != 1 or not {*self.parts[0].inputs} <= {*self.given}:
            return None
        part = self.parts[0]
        used = [*dict.fromkeys(r for r in self.results if r in self.given)]
        values = {name: at for at, name in enumerate((*used, *part.outputs))}
        ends = [r for r in self.results if isinstance(r, str)]
        if any(r not in values and r not in self.held for r in ends):
            return None
        return Wired([self.given.index(n) for n in part.inputs], [self.given.index(n) for n in used],
                     [(values.get(r, -1), self.held.get(r)) if isinstance(r, str) else (-1, r)
                      for r in self.results])

    def __call__(self, sizes: Mapping[str, int], given: list[Any],
                 numbers: Mapping[str, int | float]) -> list[Any]:
        if self.alone is not None:
            inputs, used, results = self.alone
            made = [given[at] for at in used]
            tensors = [given[at] for at in inputs]
            given.clear()
            made += self.parts[0](sizes, tensors)
            return [value if at < 0 else made[at] for at, value in results]
        values = dict(zip(self.given, given, strict=True)) | self.held | dict(numbers)
        given.clear()
        for part in self.parts:
            tensors = [values[name] for name in part.inputs]
            for name in part.done:
                values.pop(name, None)  # the list alone has it
            values.update(zip(part.outputs, part(sizes, tensors), strict=True))
        return [values[r] if isinstance(r, str) else r for r in self.results]

    def compared(self, sizes: Mapping[str, int], given: list[Any], numbers: Mapping[str, int | float],
                 watch: WatchedCall) -> list[Any]:
        """As a call, whose results are compared with torch's."""
        values = dict(zip(self.given, given, strict=True)) | self.held | dict(numbers)
        given.clear()
        for part in self.parts:
            tensors = [values[name] for name in part.inputs]
            for name in part.done:
                values.pop(name, None)
            made = part(sizes, tensors, watch)
            watch.enter(part.region.outputs, made)
            values.update(zip(part.outputs, made, strict=True))
        return [values[r] if isinstance(r, str) else r for r in self.results]

    def launches(self) -> Iterator[RegionLaunches]:
        """The regions of ours."""
        for part in self.parts:
            if part.instead is not None:
                yield from part.instead.launches()
            elif part.launches is not None:
                yield part.launches

    def lying(self) -> dict[str, tuple[int, ...]]:
        """The strides of results that lie as kernels like it, by the names of their nodes."""
        return {name: tuple(map(like, strides)) for found in self.launches()
                for name, strides in found.lying.items()}

    def questions(self, sizes: Mapping[str, int]) -> list[PlanRequest]:
        """What the kernels are asked for."""
        return [q for found in self.launches() for q in found.questions(sizes)]

    def rows(self) -> list[Row]:
        """Kernels and regions of torch, in their order."""
        return [row for part in self.parts for row in part.rows()]

    def edges(self) -> tuple[Edge, ...]:
        """The values that go through memory."""
        return tuple(edge for found in self.launches() for edge in found.plan.edges)


class RunnableRegion:
    """A region that runs. ``done``: the names of what nothing needs behind it; ``why``: the reasons for
    which it is torch's; ``instead``: the regions that it is divided into, without operations whose kernel
    was refused."""

    def __init__(self, region: Region, gm: fx.GraphModule, setting: Setting) -> None:
        self.region, self.setting = region, setting
        self.inputs, self.outputs = [n.name for n in region.inputs], [n.name for n in region.outputs]
        self.done: set[str] = set()
        self.gm = extracted(region, gm)
        self.torch = Rest(self.gm, setting.rest, setting.symbols.any)
        self.why = [f"{name}: {reason}" for name, reason in region.reasons.items()]
        self.launches: RegionLaunches | None = None
        self.instead: Parts | None = None
        if region.ours:
            self.translate()

    def translate(self) -> None:
        """Find the kernels. What cannot be written as texts is torch's."""
        s = self.setting
        try:
            self.launches = launches(self.region, s.device, s.target, s.rates, s.symbols,
                                     s.upsampling)
        except RefusedKernel as refused:
            self.divide(refused)
        except TransconvError as error:
            self.why = [str(error)]
        except Exception as error:  # a program must not stop for a bug of ours
            if settings.fallback == "error":
                raise
            log.warning("no kernels for a part of a graph: %s", error, exc_info=True)
            self.why = [f"{type(error).__name__}: {error}"]

    def divide(self, refused: RefusedKernel) -> None:
        """Leave the operations of a kernel to torch."""
        self.launches = None
        if refused.nodes:
            self.instead = Parts(self.gm, self.setting, refused=dict.fromkeys(refused.nodes, str(refused)))
        else:
            self.why = [str(refused)]

    def __call__(self, sizes: Mapping[str, int], given: list[Any],
                 watch: WatchedCall | None = None) -> Sequence[Any]:
        """Empties the list, where its tensors may go before the region ends. ``watch``: compares results
        with torch's."""
        if self.launches is not None and is_collecting():
            for question in self.launches.questions(sizes):
                collect(Batch((question,)))
            with aten():
                made: Sequence[Any] = self.gm.forward(*given)
                return made
        if self.launches is not None:
            try:
                return self.launches(sizes, given) if watch is None else self.launches.compared(
                    sizes, given, watch)
            except RefusedKernel as refused:
                _announce(refused.reason, refused.message, f"the kernel {refused.kernel} of a graph")
                with unseen():
                    self.divide(refused)
                self.setting.changed()
            except Unsupported as error:
                _announce(error.reason, error.message, "this part of a graph")
                if error.reason not in PASSING:
                    self.launches, self.why = None, [str(error)]
                    self.setting.changed()
                elif watch is not None:
                    watch.waiting = True
        if self.instead is not None:
            return self.instead(sizes, given, {}) if watch is None else self.instead.compared(
                sizes, given, {}, watch)
        made = self.torch(*given)
        return made if watch is None or not self.torch.compiles else self.beside_torch(made, watch)

    def beside_torch(self, made: Sequence[Any], watch: WatchedCall) -> Sequence[Any]:
        """What Inductor has made; torch's own operators from now on where it is not theirs."""
        found, why = watch.compiled(self.region, made)
        if why:
            _announce("wrong", why, "a part of a graph that Inductor compiled")
            self.torch, self.why = Rest(self.gm, "eager", self.torch.sized), [why]
            self.setting.changed()
        return found

    def rows(self) -> list[Row]:
        """What it is in a report."""
        if self.instead is not None:
            return self.instead.rows()
        if self.launches is not None:
            return graph_report.kernel_rows(self.launches, self.setting.rates,
                                            lambda gm: Rest(gm, "inductor", False))
        by = self.setting.rest if self.torch.compiles else "eager"
        return [graph_report.torch_row(self.region, by, self.why, lambda gm: Rest(gm, by, False),
                                       self.setting.device)]


def _announce(reason: str, message: str, what: str) -> None:
    stats.announce(reason, message, what)
    stats.add(False, reason, 1)


STEPS = 2  # in which factors are written first: see fusion/plan.py


def launches(region: Region, device: torch.device, target: Target, rates: Price,
             symbols: Symbols | None = None, upsampling: str = "auto") -> RegionLaunches:
    """The launches of a region on a device, which is a target, decided by rates of one. ``upsampling``:
    see lowerings/small_images.py. Raises Refused where the text of a kernel cannot be read, which is a
    bug."""
    symbols = symbols or Symbols(fx.Graph())
    handed = [_handed(node, region, symbols) for node in region.outputs]
    ends = [h.piece for h in handed if not isinstance(h.piece, RegionInput)]
    free = _free(region, handed)
    apart: dict[Piece, tuple[MaterializeReason, ...]] = {}
    again: dict[Piece, str] = {}
    ranked: set[Workload] = set()
    while True:
        plan = planned(ends, rates, apart, again, free)
        kernels: list[RegionKernel] = []
        for group in plan.groups:
            try:
                kernels += _kernels(group, plan, symbols.known) if group.stores else []
            except TransconvError as error:
                raise refusal(group, plan, region, error) from error
        for _ in range(STEPS):  # what is estimated first tells what else has to be
            work = {w: None for k in kernels if k.group.product for w in (
                *weighed(k), *apart_or_not(k, plan, rates, ranked), *small_images.weighed(k))
                    if w not in ranked}
            rank(PlanRequest(w, target, deterministic()) for w in work)
            ranked |= work.keys()
        if less := {k.group.product: why for k in kernels if k.group.product
                    and (why := small_images.why_instead(k, plan, rates, upsampling))}:
            for product, why in less.items():
                assert product.instead is not None
                product.become(product.instead.product)
                apart[product] = (MaterializeReason(why),)
            continue
        late = {k.group.product: why for k in kernels if k.group.product
                and len(apart.get(k.group.product, ())) < STEPS
                and (why := why_apart(k, plan, target, rates))}
        read: dict[Piece, str] = {k.group.product: why for k in kernels if k.group.product
                                  and (why := why_again(k, rates))}
        again |= read
        if not late and not read:
            break
        for product, why in late.items():
            apart[product] = (*apart.get(product, ()), step(product, plan.stored, why))
    inputs = [(i, x, region.pieces[x]) for i, x in enumerate(region.inputs)
              if isinstance(region.pieces[x], RegionInput)]
    found = RegionLaunches(device, region, plan, kernels, inputs, handed)
    found.last, found.cut = _last(found), slices(plan)
    found.over = replacing(found.kernels, found.last, plan.places)
    found.lying = {node.name: plan.strides(h.piece) for node, h in zip(region.outputs, handed, strict=True)
                   if h.piece in free}
    return found


def _free(region: Region, handed: Sequence[Handed]) -> set[Piece]:
    """Results that lie as kernels like it: those that only the backward graph sees, through no view."""
    ends = [(h, bool(node.meta.get(saved_tensors.FREE)) and h.view is None)
            for node, h in zip(region.outputs, handed, strict=True)]
    return {h.piece for h, own in ends if own} - {h.piece for h, own in ends if not own}


def _kernels(group: FusionGroup, plan: FusionPlan, known: Known) -> list[RegionKernel]:
    """The kernels of a group: one, or where sizes are names one for each part of its result."""
    strides = held(group, plan)
    for piece in group.stores:
        group.strides[piece] = plan.strides(piece)
    tensors: dict[tuple[Piece, bool], str] = {}
    parts = (group, *group.siblings)
    relation = group.product.relation if group.product else None
    written = [Writer(part, strides, tensors=tensors if relation else {}, known=known).written()
               for part in parts]
    texts = tuple(w.text for w in written)
    if relation and (asked := _related(*relation, texts)):
        return [_kernel(group, texts, written[-1], asked)]
    return [_kernel(part, (w.text,), w, w.text) for part, w in zip(parts, written, strict=True)]


@lru_cache(maxsize=4096)  # blocks of a network repeat, and each decision has all kernels written anew
def _related(problem: ConvProblem, prop: Prop, texts: tuple[str, ...]) -> Surrounded | None:
    """The workload of the texts of a convolution's parts; None where one takes several kernels: a sum may
    be a row of the result."""
    computes = [program(t).compute for t in texts]
    return None if any(len(kernels_of(c)) > 1 for c in computes) else surrounded(problem, prop, computes)


def _kernel(
    group: FusionGroup, texts: tuple[str, ...], written: GroupText, asked: str | Surrounded
) -> RegionKernel:
    return RegionKernel(group, texts, written.given, written.stored,
                  tuple(SizedTensor(p.shape, group.strides[p], p.dtype) for p in written.stored), asked,
                  written.sized)


def _handed(node: fx.Node, region: Region, symbols: Symbols) -> Handed:
    """How a node's tensor comes from a piece in memory: through views that are the same memory."""
    piece: Piece = region.pieces[node]
    val = node.meta["val"]
    at = node
    while isinstance(piece, MovedView) and piece.alias and (base_node := base_of(at)) is not None:
        at, piece = base_node, piece.of
    if at is node:
        return Handed(piece, None)
    if at.meta.get(saved_tensors.MOVED):  # its views were traced of other memory
        return Handed(region.pieces[node], None)
    base = at.meta["val"]
    if not isinstance(piece, RegionInput) and not same(memory_of(piece), symbols.result(base).strides):
        return Handed(region.pieces[node], None)
    behind = symbols.length(val.storage_offset()) - symbols.length(base.storage_offset())
    own = symbols.result(val)
    return Handed(piece, (own.shape, own.strides, behind))


def _last(found: RegionLaunches) -> list[list[Piece]]:
    """Of each launch, the tensors that nothing needs behind it."""
    held = {h.piece for h in found.handed}
    seen = {*held}
    done: list[list[Piece]] = []
    for kernel in reversed(found.kernels):
        own = [p for p in dict.fromkeys((*kernel.given, *kernel.stored)) if p not in seen]
        seen |= {*own}
        done.append(own)
    return done[::-1]
