"""The regions of a graph, and how values go from one to the next; each runs as kernels or as torch's
operators."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from transconv.calls.route_cache import PASSING
from transconv.calls.settings import settings
from transconv.functional import attention
from transconv.graph import graph_report
from transconv.graph.fusion.groups import Edge, Price
from transconv.graph.regions.batch_invariance import refuse_adding
from transconv.graph.regions.partition import extracted, nothing, regions
from transconv.graph.regions.region_calls import RegionLaunches
from transconv.graph.regions.region_kernel import RefusedKernel, Region
from transconv.graph.regions.region_kernels import launches
from transconv.graph.regions.torch_region import (
    TorchAnswers,
    TorchRegion,
    announce_torch,
    by_torch,
    storage_bytes,
)
from transconv.graph.sizes import like
from transconv.graph.symbols import Symbols
from transconv.graph.verification.eager_check import WatchedCall
from transconv.runtime import Batch, PlanRequest, Waiting, collect, is_collecting
from transconv.support import TransconvError, Unsupported
from transconv.target import Target
from transconv.torch_ops.conversion.aten_replacement import aten

Tensor = torch.Tensor
log = logging.getLogger("transconv.graph")
unseen: Any = _disable_current_modes  # by tracers and other modes


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
    upsampling: str = "auto"  # one of region_kernels.UPSAMPLING
    batch: tuple[str, ...] = ()  # the numbers of samples, in invariant mode
    within: Any = None  # the graph within a bound (pieces/region_pieces.py)


class Wired(NamedTuple):
    """The wiring of one part that is a whole graph: which placeholders are its inputs, which are results,
    and each result's place among these and the part's outputs; -1 for a value that is known."""

    inputs: list[int]
    used: list[int]
    results: list[tuple[int, Any]]


class Parts:
    """The regions of a graph: called with the sizes of a call by name, the values of its placeholders in a
    list that is emptied, and those of its sizes, they return its results. ``whole``: why torch computes
    all of it; ``refused``: why some operations, by their names."""

    def __init__(
        self,
        gm: fx.GraphModule,
        setting: Setting,
        whole: str = "",
        refused: Mapping[str, str] | None = None,
    ) -> None:
        nodes, self.batch, self.within = [*gm.graph.nodes], setting.batch, setting.within
        self.given = [n.name for n in nodes if n.op == "placeholder"]
        self.results = [n.name if isinstance(n, fx.Node) else n for n in nodes[-1].args[0]]
        held = {n.name: getattr(gm, n.target) for n in nodes if n.op == "get_attr"}
        self.around: dict[int, int] = {}  # bytes of what else is there, by address, within a bound
        self.held: dict[str, Any] = held | {n.name: None for n in nodes if nothing(n)}
        found = regions(gm.graph, setting.device, setting.symbols, whole, refused or {})
        self.parts = [RunnableRegion(region, gm, setting) for region in found]
        kept = {*map(str, self.results)}
        if setting.within is not None:
            kept |= {*self.given}  # the caller holds them: within a bound they count until the end
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
        return Wired(
            [self.given.index(n) for n in part.inputs],
            [self.given.index(n) for n in used],
            [
                (values.get(r, -1), self.held.get(r)) if isinstance(r, str) else (-1, r)
                for r in self.results
            ],
        )

    def __call__(
        self, sizes: Mapping[str, int], given: list[Any], numbers: Mapping[str, int | float]
    ) -> list[Any]:
        began = None if self.within is None else self.within.begin((*given, *self.held.values()))
        made = self.run(sizes, given, numbers)
        if self.within is not None:
            self.within.decide()
        if began is not None:
            self.within.end(began, made)
        return made

    def run(
        self, sizes: Mapping[str, int], given: list[Any], numbers: Mapping[str, int | float]
    ) -> list[Any]:
        """A call of its regions."""
        if self.alone is not None:
            inputs, used, results = self.alone
            made = [given[at] for at in used]
            tensors = [given[at] for at in inputs]
            given.clear()
            if self.within is None:
                made += self.parts[0](sizes, tensors)
            else:
                made += self.parts[0].bounded(sizes, tensors, self.around, (False,) * len(tensors))
            return [value if at < 0 else made[at] for at, value in results]
        values = dict(zip(self.given, given, strict=True)) | self.held | dict(numbers)
        given.clear()
        for part in self.parts:
            tensors = [values[name] for name in part.inputs]
            for name in part.done:
                values.pop(name, None)  # the list alone has it
            if self.within is None:
                values.update(zip(part.outputs, part(sizes, tensors), strict=True))
                continue
            there = self.around | storage_bytes(values.values())
            passed = [n in part.done and n not in self.given for n in part.inputs]
            found = part.bounded(sizes, tensors, there, passed)
            values.update(zip(part.outputs, found, strict=True))
            del found  # while the next one runs it would hold what that needs no more
        return [values[r] if isinstance(r, str) else r for r in self.results]

    def compared(
        self,
        sizes: Mapping[str, int],
        given: list[Any],
        numbers: Mapping[str, int | float],
        watch: WatchedCall | None,
        wait: TorchAnswers | None = None,
    ) -> list[Any]:
        """As a call, whose results a ``watch`` compares with torch's, or are torch's for a ``wait``."""
        values = dict(zip(self.given, given, strict=True)) | self.held | dict(numbers)
        given.clear()
        for part in self.parts:
            tensors = [values[name] for name in part.inputs]
            for name in part.done:
                values.pop(name, None)
            made = part(sizes, tensors, watch, wait)
            if watch is not None:
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

    def forget_torch(self) -> None:
        """Keep no graphs of regions that kernels compute: torch answers no more."""
        for part in self.parts:
            if part.launches is not None:
                part.__dict__.pop("gm", None)

    def lying(self) -> dict[str, tuple[int, ...]]:
        """The strides of results that lie as kernels like it, by the names of their nodes."""
        return {
            name: tuple(map(like, strides))
            for found in self.launches()
            for name, strides in found.lying.items()
        }

    def questions(self, sizes: Mapping[str, int]) -> list[PlanRequest]:
        """What the kernels are asked for, with those of operators in regions of torch."""
        calls = [n for part in self.parts for n in part.region.nodes if n.target is attention.attention]
        given = [[getattr(x, "meta", {"val": x})["val"] for x in n.args] for n in calls]
        own = [q for found in self.launches() for q in found.questions(sizes)]
        return own + [q for call in given for q in attention.questions(*call)]

    def edges(self) -> tuple[Edge, ...]:
        """The values that go through memory."""
        return tuple(edge for found in self.launches() for edge in found.plan.edges)


class RunnableRegion:
    """A region with what runs it. ``done``: the names of what nothing needs behind it; ``why``: the
    reasons for which it is torch's; ``instead``: the regions that it is divided into, without operations
    whose kernel was refused."""

    def __init__(self, region: Region, gm: fx.GraphModule, setting: Setting) -> None:
        self.region, self.setting = region, setting
        self.inputs, self.outputs = [n.name for n in region.inputs], [n.name for n in region.outputs]
        self.done: set[str] = set()
        self.whole = gm
        self.why = [f"{name}: {reason}" for name, reason in region.reasons.items()]
        self.launches: RegionLaunches | None = None
        self.pieces: Any = None
        self.instead: Parts | None = None
        if region.ours:
            self.translate()
        self.left()
        if setting.batch:
            self.refuse_torch()

    @cached_property
    def gm(self) -> fx.GraphModule:
        """The region as a graph of its own; most of ours need none once their kernels are there."""
        return extracted(self.region, self.whole)

    @cached_property
    def torch(self) -> TorchRegion:
        """What computes it where kernels do not: in invariant mode torch's own operators."""
        rest = "eager" if self.setting.batch else self.setting.rest
        return TorchRegion(self.gm, rest, self.setting.symbols.any)

    def refuse_torch(self) -> None:
        """Have kernels know the numbers of samples that no bits may depend on. Raises Unsupported where
        torch would compute what may depend on them."""
        if self.launches is not None:
            self.launches.batch = self.setting.batch
        elif self.instead is None:
            refuse_adding(self.region.nodes, self.region.reasons)

    def translate(self) -> None:
        """Find the kernels. What cannot be written as texts is torch's."""
        s = self.setting
        try:
            self.launches = RegionLaunches.of(
                launches(self.region, s.device, s.target, s.rates, s.symbols, s.upsampling)
            )
            if s.within is not None:
                self.pieces = self.launches.pieces = s.within.enter(self.launches)
        except RefusedKernel as refused:
            self.divide(refused)
        except TransconvError as error:
            self.why = [str(error)]
        except Exception as error:  # a program must not stop for a bug of ours
            if settings.policy == "error":
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

    def bounded(
        self, sizes: Mapping[str, int], given: list[Any], there: dict[int, int], passed: Sequence[bool]
    ) -> Sequence[Any]:
        """A call within a bound. ``there``: what is not handed to it, bytes by address; ``passed``: which
        of what is ``given`` nobody else holds. Where a region exceeds the bound, it and those behind it
        are planned alone."""
        if self.instead is not None:
            self.instead.around = there
            return self(sizes, given)
        self.pieces.see(there, given, passed)
        if self.launches is None and self.setting.within.refusal is not None:
            found: Sequence[Any] = self.pieces(given)
            return found
        made = self(sizes, given)
        self.setting.within.note(self.pieces)
        return made

    def left(self) -> None:
        """Within a bound, have what torch takes counted, where it computes the region."""
        if self.setting.within is not None and self.launches is None and self.instead is None:
            self.pieces = self.setting.within.enter_left(self.region)

    def __call__(
        self,
        sizes: Mapping[str, int],
        given: list[Any],
        watch: WatchedCall | None = None,
        wait: TorchAnswers | None = None,
    ) -> Sequence[Any]:
        """Empties the list, where its tensors may go before the region ends. ``watch``: compares results
        with torch's; ``wait``: torch answers, for kernels that are not there yet."""
        if self.launches is not None and wait is not None:
            found = wait.answered(self.launches, self.gm, sizes, given)
            if found is not None:
                return found
            with settings.waiting():
                return self(sizes, given, watch)
        if self.launches is not None and is_collecting():
            for question in self.launches.questions(sizes):
                collect(Batch((question,)))
            with aten():
                made: Sequence[Any] = self.gm.forward(*given)
                return made
        if self.launches is not None:
            try:
                return (
                    self.launches(sizes, given)
                    if watch is None
                    else self.launches.compared(sizes, given, watch)
                )
            except RefusedKernel as refused:
                if self.setting.batch:
                    raise Unsupported(refused.reason, str(refused)) from refused
                announce_torch(refused.reason, refused.message, f"the kernel {refused.kernel} of a graph")
                with unseen():
                    self.divide(refused)
                self.left()
                self.setting.changed()
            except Waiting as waits:
                if watch is not None:
                    watch.waiting = True
                    watch.overs.append(waits.over)
                return by_torch(self.launches, self.gm, sizes, given)
            except Unsupported as error:
                if self.setting.batch or self.setting.within:
                    raise
                announce_torch(error.reason, error.message, "this part of a graph")
                if error.reason not in PASSING:
                    self.launches, self.why = None, [str(error)]
                    self.setting.changed()
                elif watch is not None:
                    watch.waiting = True
        if self.instead is not None and watch is None and wait is None:
            return self.instead.run(sizes, given, {})
        if self.instead is not None:
            return self.instead.compared(sizes, given, {}, watch, wait)
        made = self.torch(*given)
        return made if watch is None or not self.torch.compiles else self.beside_torch(made, watch)

    def beside_torch(self, made: Sequence[Any], watch: WatchedCall) -> Sequence[Any]:
        """What Inductor has made; torch's own operators from now on where it is not theirs."""
        found, why = watch.compiled(self.region, made)
        if why:
            announce_torch("wrong", why, "a part of a graph that Inductor compiled")
            self.torch, self.why = TorchRegion(self.gm, "eager", self.torch.sized), [why]
            self.setting.changed()
        return found


Row = graph_report.KernelRow | graph_report.TorchRow


def rows_of(parts: Parts) -> list[Row]:
    """Kernels and regions of torch in a report, in their order."""
    return [row for part in parts.parts for row in _of_region(part)]


def _of_region(part: RunnableRegion) -> list[Row]:
    """What a region is in a report."""
    rates, device = part.setting.rates, part.setting.device
    if part.instead is not None:
        return rows_of(part.instead)
    if part.launches is not None:
        return graph_report.kernel_rows(
            part.launches, rates, lambda gm: TorchRegion(gm, "inductor", False)
        )
    by = part.setting.rest if part.torch.compiles else "eager"
    return [
        graph_report.torch_row(part.region, by, part.why, lambda gm: TorchRegion(gm, by, False), device)
    ]
