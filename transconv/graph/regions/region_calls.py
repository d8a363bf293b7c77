"""The kernels of a compiled region, called with its sizes and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx

from transconv.calls import stats
from transconv.calls.guard import current_device
from transconv.calls.route_cache import PASSING
from transconv.calls.settings import settings
from transconv.conv import Surrounded
from transconv.errors import Unsupported
from transconv.functional.calls.compiled_launch import (
    HELD,
    TensorMemory,
    aligned,
    deterministic,
    launch,
    program,
    question,
    refused,
)
from transconv.functional.calls.torch_operators import as_wanted
from transconv.graph.fusion.concat_views import Slices
from transconv.graph.fusion.index_ir import Piece, RegionInput
from transconv.graph.fusion.plan import FusionPlan
from transconv.graph.lowerings.table import is_bug
from transconv.graph.regions.partition import Region
from transconv.graph.regions.refusals import RefusedKernel, refusal
from transconv.graph.regions.region_codegen import LaunchLine, Place, Run, alike, never, written
from transconv.graph.regions.region_kernel import RegionKernel, SizedTensor
from transconv.graph.sizes import Length, SymbolicSize
from transconv.graph.verification.eager_check import RegionWatch, WatchedCall
from transconv.ir import value_at
from transconv.runtime import SIZES, Launch, PlanRequest, Spaces, on_device, torch_internals
from transconv.torch_ops.conversion import prepacked_weights

Tensor = torch.Tensor
NOT_OVER: Mapping[int, int] = MappingProxyType({})
NOTHING = nullcontext()
When = tuple[object, object, bool, tuple[int, ...]]
"""What launches were asked for: the last change of a setting, the function that finds them, whether the
same bits are wanted, and the places of inputs that are not aligned."""
View = tuple[tuple[Length, ...], tuple[Length, ...], Length]
"""Of another tensor's memory: sizes, strides, and how many elements it begins behind it."""

@dataclass(frozen=True, slots=True)
class Handed:
    """A result of a region: a tensor, or another view of its memory."""

    piece: Piece
    view: View | None


class Start(NamedTuple):
    """A kernel for the sizes of a call: what is asked for, the values of its names, what is stored."""

    asked: str | Surrounded
    sizes: dict[str, int] | None
    memory: tuple[TensorMemory, ...]


@dataclass(slots=True)
class BoundRegion:
    """A region for the sizes of a call: its inputs, kernels, and the views that are handed out. ``ready``:
    what the kernels that made the last results were asked for, and what launches them, which threads see
    together; ``alike``: whether inputs are as those of a call before."""

    inputs: tuple[TensorMemory, ...]
    starts: list[Start]
    views: list[Place | None]
    ready: tuple[When | None, Run] = (None, list)
    alike: Callable[..., bool] = never


@dataclass(slots=True)
class RegionLaunches:
    """A region of ours: called with the sizes of a call, by name, and its inputs, it returns its outputs.
    ``inputs``: its tensors, each with its place among the inputs."""

    device: torch.device
    region: Region
    plan: FusionPlan
    kernels: list[RegionKernel]
    inputs: list[tuple[int, fx.Node, RegionInput]]
    handed: list[Handed]
    last: list[list[Piece]] = field(default_factory=list)  # what no later launch needs
    over: list[dict[int, int]] = field(default_factory=list)  # of each launch, see fusion/inplace_maps.py
    cut: dict[Piece, Slices] = field(default_factory=dict)  # tensors that hold several values, by these
    known: dict[tuple[int, ...], BoundRegion] = field(default_factory=dict)  # by sizes
    numbered: set[RegionKernel] = field(default_factory=set)  # that have no schedule for any sizes
    lying: dict[str, tuple[Length, ...]] = field(
        default_factory=dict
    )  # strides of results, see regions/saved_tensors.py

    def bound(self, sizes: Mapping[str, int]) -> BoundRegion:
        """The region for some sizes."""
        key = tuple(sizes.values())
        if (found := self.known.get(key)) is None:
            if len(self.known) >= SIZES:
                self.known.clear()

            def value(n: Length) -> int:
                return value_at(n.expr, sizes) if isinstance(n, SymbolicSize) else n

            inputs = tuple(
                [SizedTensor(p.shape, p.strides or (), p.dtype).at(value) for _, _, p in self.inputs]
            )
            views = [None if h.view is None else (
                tuple(map(value, h.view[0])), tuple(map(value, h.view[1])), value(h.view[2]))
                for h in self.handed]
            starts = [_start(k, sizes, value) for k in self.kernels]
            found = self.known[key] = BoundRegion(inputs, starts, views)
        return found

    def questions(self, sizes: Mapping[str, int]) -> list[PlanRequest]:
        """What its kernels are asked for, for aligned tensors."""
        return [question(start.asked, self.device) for start in self.bound(sizes).starts]

    def __call__(self, sizes: Mapping[str, int], given: list[Any]) -> Sequence[Tensor]:
        """``given`` is emptied before the first kernel if all of them ran before: each tensor that the
        caller does not hold is then free behind its last reader. Otherwise the inputs are there when this
        raises: Refused where a kernel cannot be had, Unsupported for tensors that no kernel takes."""
        bound = self.bound(sizes)
        tensors = [given[place] for place, _, _ in self.inputs]
        if not bound.alike(*tensors):
            self.arrange(bound, tensors)
        loose = () if aligned(tensors) else tuple([i for i, t in enumerate(tensors) if not aligned([t])])
        when = (_since[0], launch, deterministic(), loose)
        with self.here():
            known, run = bound.ready
            if known == when:
                given.clear()
                made = run(tensors)
            else:
                made = self.first(bound, sizes, tensors, when)
        stats.add(True, "graph", len(self.kernels))
        return made

    def arrange(self, bound: BoundRegion, tensors: list[Tensor]) -> None:
        """Have inputs lie as kernels take them; where they do, the next call asks for nothing else."""
        copied = False
        for i, (_, node, _) in enumerate(self.inputs):
            t = tensors[i]
            tensors[i] = as_wanted(node.name, t, bound.inputs[i])
            copied |= tensors[i] is not t
        if not copied:
            bound.alike = alike(tensors)

    def first(self, bound: BoundRegion, sizes: Mapping[str, int], tensors: list[Tensor],
              when: When, watch: WatchedCall | None = None) -> list[Tensor]:
        """A call in which results of kernels are looked at; the later ones start them without. ``watch``:
        compares them with torch's."""
        if why := refused(tensors, [True] * len(tensors), HELD) if tensors else "":
            raise Unsupported(why)
        loose = {self.inputs[i][2] for i in when[-1]}
        fresh = [self.started(start, kernel, sizes, not loose & {*kernel.given})
                 for kernel, start in zip(self.kernels, bound.starts, strict=True)]
        watched = [self.watched(kernel, start) for kernel, start in zip(self.kernels, fresh, strict=True)]
        looked = watch.kernels(self.region, self.kernels) if watch is not None else None
        begins = [self.watched(kernel, start, looked) for kernel, start in zip(
            self.kernels, fresh, strict=True)] if looked is not None else watched
        made = self.written(bound, [(by, ()) for by in begins], [NOT_OVER] * len(fresh))([*tensors])
        if looked is not None:
            looked.results(self.kernels, made)
        over = [over if over and start.is_known() else NOT_OVER
                for over, start in zip(self.over, fresh, strict=True)]
        begun = [(begin or by, spaces) for (begin, spaces), by in zip(
            [start.begun() for start in fresh], watched, strict=True)]
        bound.ready = when, self.written(bound, begun, over)
        return made

    def written(self, bound: BoundRegion, starts: Sequence[tuple[Callable[..., None], Spaces]],
                over: Sequence[Mapping[int, int]]) -> Run:
        """The function that launches the kernels in their order."""
        lines = [LaunchLine(kernel, by, start.memory, own, done, spaces)
                 for kernel, (by, spaces), start, own, done in zip(
                     self.kernels, starts, bound.starts, over, self.last, strict=True)]
        handed = [(h.piece, view) for h, view in zip(self.handed, bound.views, strict=True)]
        empty = torch_internals.quickest() if self.device.type == "cuda" else self.empty
        return written([piece for _, _, piece in self.inputs], lines, handed, empty, self.cut)

    def compared(self, sizes: Mapping[str, int], given: list[Any], watch: WatchedCall) -> Sequence[Tensor]:
        """As a call, whose results are compared. Raises Refused also where one is not torch's."""
        bound = self.bound(sizes)
        tensors = [given[place] for place, _, _ in self.inputs]
        self.arrange(bound, tensors)
        loose = tuple([i for i, t in enumerate(tensors) if not aligned([t])])
        when = (_since[0], launch, deterministic(), loose)
        state = watch.values.state()
        try:
            with self.here():
                made = self.first(bound, sizes, tensors, when, watch)
        except (RefusedKernel, Unsupported):
            watch.values.restore(state)
            raise
        stats.add(True, "graph", len(self.kernels))
        return made

    def watched(self, kernel: RegionKernel, by: Launch,
                looked: RegionWatch | None = None) -> Callable[..., None]:
        """What starts a kernel, and looks at results that are new. Raises Refused."""
        def start(*tensors: Tensor) -> None:
            try:
                by.start_prepacked(tensors, prepacked_weights)
                if looked is not None:
                    looked.look(kernel, tensors)
            except Exception as error:
                if isinstance(error, Unsupported) or is_bug(error):
                    also = looked.blamed if looked is not None else frozenset()
                    raise refusal(kernel.group, self.plan, self.region, error, also) from error
                raise
        return start

    def here(self) -> AbstractContextManager[object]:
        """The device as the current one."""
        return NOTHING if self.device.index in (None, current_device()) else on_device(self.device)

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory on the device."""
        return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)

    def started(
        self, start: Start, kernel: RegionKernel, sizes: Mapping[str, int], whole: bool
    ) -> Launch:
        """The launch of a kernel: where none has the names as arguments, one for these sizes alone.
        ``whole``: its tensors are aligned. Raises Refused, and Unsupported for a while."""
        try:
            if start.sizes is None or kernel.sized is None:
                return launch(start.asked, self.device, whole, "now")
            if kernel not in self.numbered:
                try:
                    return launch(start.asked, self.device, whole, "now").at(start.sizes)
                except Unsupported as error:
                    if error.reason != "schedule:refused":
                        raise
                    self.numbered.add(kernel)
            return launch(kernel.sized.at(sizes), self.device, whole, "now")
        except Exception as error:
            passing = isinstance(error, Unsupported) and error.reason in PASSING
            if passing or not isinstance(error, Unsupported) and not is_bug(error):
                raise
            raise refusal(kernel.group, self.plan, self.region, error) from error


_since = [object()]  # the last change of a setting


def _changed() -> None:
    _since[0] = object()


settings.on_change(_changed)


def _start(kernel: RegionKernel, sizes: Mapping[str, int], value: Callable[[Length], int]) -> Start:
    """A kernel for some sizes: with names if they meet its requirements, else with numbers."""
    memory = tuple([m.at(value) for m in kernel.memory])
    sized = kernel.sized
    if sized is None:
        return Start(kernel.asked, None, memory)
    if not sized.refused:
        own, named = sized.names(sizes), program(sized.named).compute.named
        if named is not None and not named.why_not(own):
            return Start(sized.named, own, memory)
    return Start(sized.at(sizes), None, memory)
