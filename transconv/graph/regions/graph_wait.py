"""Graphs whose kernels processes compile: torch's operators answer meanwhile.

    torch answers      until processes have compiled each kernel, and a thread has loaded and checked it
    and goes on        while the thread holds first results against torch's operators, on copies of what
                       one of these calls handed to each region
    kernels answer     all of a graph's, from one call on, which finds that done

What forward graphs leave lies as kernels have it, whoever answers, so that each graph changes over by
itself. What has no room, is wrong or cannot be told is left to the call that takes the kernels over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import fx

from transconv.compute import Workload
from transconv.graph.regions.region_kernel import RefusedKernel, Region, RegionKernel, compile_mode
from transconv.graph.regions.torch_region import by_torch
from transconv.graph.verification.eager_check import Checks, WatchedCall
from transconv.graph.verification.fx_reference import Values, origin
from transconv.runtime import (
    BatchCompile,
    Plan,
    PlanRequest,
    ahead,
    begin,
    begin_processes,
    beside,
    cores,
    is_collecting,
    rehearsal_thread,
    withdraw,
)
from transconv.support import TransconvError, Unsupported
from transconv.target import Target
from transconv.torch_ops.calls.lower_call import target_of

Tensor = torch.Tensor
Sizes = Mapping[str, int]
log = logging.getLogger("transconv.graph")
MANY = 16  # operations of a graph for which processes are started before it is traced
THERE = "never"  # the mode in which nothing is compiled: all kernels are there, or one has failed
REMARK = "torch answers while processes compile its kernels"


class WaitingRegion(Protocol):
    """The launches of a region, as far as a wait uses them."""

    region: Region
    kernels: list[RegionKernel]
    device: torch.device

    @property
    def peak(self) -> int:
        """Bytes of what its kernels store that are held at once at most."""

    def laid(self, sizes: Sizes, made: Sequence[Any], /) -> Sequence[Any]:
        """Results with the strides that its kernels' have."""

    def looked_at(self, sizes: Sizes, given: list[Any], mode: str, watch: WatchedCall | None, /) -> Any:
        """What its kernels make of operands, compared with torch's operators."""


class GraphWait:
    """What calls of one way to compute a graph wait for; ``parts``: its regions. ``batch``: what processes
    compile for calls that wait; ``overs``: by the sizes of calls that torch answers, whether each kernel
    may be there by now; ``seen``: whether one of these was looked at; ``rehearsal``: of the first sizes
    whose kernels are there, until all was ``looked`` at; ``tight``: whether torch has too little memory.
    ``changed`` is called when a report changes."""

    def __init__(
        self, parts: Any, checks: Checks, device: torch.device, target: Target, changed: Callable[[], None]
    ) -> None:
        self.parts, self.checks, self.device, self.target = parts, checks, device, target
        self.changed = changed
        self.batch: BatchCompile | None = None
        self.overs: dict[tuple[int, ...], list[Callable[[], bool]]] = {}
        self.there: set[PlanRequest] = set()
        self.on = self.seen = self.looked = self.tight = False
        self.rehearsal: GraphRehearsal | None = None

    def mode(self) -> str:
        """``compile`` as its calls obey it."""
        mode = compile_mode(bool(self.parts.batch))
        return "now" if self.tight and mode == "background" else mode

    def begin(self, sizes: Sizes) -> None:
        """Have processes compile the kernels for some sizes, as the mode has it."""
        mode = self.mode()
        if is_collecting() or mode == "never":
            return
        try:
            questions = self.parts.questions(sizes)
            if mode == "background":
                self.ask(sizes, questions)
                return
            if self.overs:
                withdraw(questions)
                self.overs.clear()
            self.batch = begin(questions)
        except TransconvError as error:  # the call that needs the kernel is refused, with the reason
            log.debug("nothing is compiled ahead: %s", error)

    def ask(self, sizes: Sizes, questions: Iterable[PlanRequest]) -> None:
        """Have processes compile what is not there, beside calls."""
        new = dict.fromkeys(q for q in questions if q not in self.there)
        overs = ahead(new, Plan, beside(), hurried=False)
        if overs or self.overs:  # whose first results are not looked at yet
            self.overs[tuple(sizes.values())] = overs
        else:
            self.there |= new.keys()

    def renew(self, sizes: Sizes, overs: list[Callable[[], bool]]) -> None:
        """A call found kernels that are not there yet, such as those in the place of one that failed."""
        self.overs[tuple(sizes.values())] = overs
        self.looked = False

    def waits(self, sizes: Sizes, values: tuple[int, ...]) -> bool:
        """Whether torch answers a call of these sizes, told by ``values``. Where it may not, this is over
        when the kernels are compiled."""
        before, mode = self.on, self.mode()
        self.on = False
        if mode == "background" and not is_collecting():
            if tuple(sizes.values()) not in self.overs:
                self.begin(sizes)
            self.on = self.goes_on(sizes, values)
        elif self.overs:  # on another stream, or with another setting
            self.begin(sizes)
        if self.batch is not None:
            self.batch.wait()
            self.batch = None
        if self.on != before:
            self.changed()
        return self.on

    def goes_on(self, sizes: Sizes, values: tuple[int, ...]) -> bool:
        """Whether torch answers, as kernels are compiled or looked at."""
        overs = self.overs.get(tuple(sizes.values()))
        if overs is None:
            return False
        while overs and overs[-1]():
            overs.pop()
        if not overs and not self.looked:
            if self.rehearsal is None or self.rehearsal.left:
                self.rehearsal = GraphRehearsal(
                    self.checks, values, sizes, self.parts.launches(), self.room()
                )
            if self.rehearsal.is_over():
                self.rehearsal.tell()
                self.rehearsal, self.looked = None, True
        if overs or not self.looked:
            return True
        self.overs.clear()  # what other sizes wait for is asked again
        self.parts.forget_torch()
        return False

    def remarks(self) -> tuple[str, ...]:
        """What a report says."""
        return (REMARK,) * bool(self.overs)

    def room(self) -> int:
        """The bytes for a rehearsal; below 0 where no thread makes kernels ready."""
        if rehearsal_thread.device_of(self.target) is None:
            return -1
        return rehearsal_thread.room(self.device)

    def answered(
        self, launches: WaitingRegion, gm: fx.GraphModule, sizes: Sizes, given: Sequence[Any]
    ) -> Sequence[Any] | None:
        """The results of a region of ours by torch; None where these operators, which hold values that
        kernels do not, have too little memory: calls then wait."""
        try:
            if self.rehearsal is not None and self.rehearsal.sizes == sizes:
                self.rehearsal.take(launches, given)
            return by_torch(launches, gm, sizes, given)
        except torch.OutOfMemoryError:
            self.tight = True
            return None


class WaitingCall:
    """What runs in the place of a graph's way while torch answers."""

    def __init__(self, wait: GraphWait) -> None:
        self.parts: Callable[..., list[Any]] = partial(wait.parts.compared, watch=None, wait=wait)


class GraphRehearsal:
    """First results of a graph's kernels, which a thread compares with torch's operators. ``room``: bytes
    for copies, below 0 where there is no such thread. Regions, by their nodes: ``left`` are those of which
    it has no operands yet; ``ended`` those that it is through with; ``right`` those without a
    difference."""

    def __init__(
        self,
        checks: Checks,
        values: tuple[int, ...],
        sizes: Sizes,
        regions: Iterable[WaitingRegion],
        room: int,
    ) -> None:
        self.checks, self.values, self.sizes, self.room = checks, values, sizes, room
        self.regions = {launches.region: launches for launches in regions}
        self.left = {*self.regions} if room >= 0 else set()
        self.ended, self.right = set[Region](), set[Region]()

    def is_over(self) -> bool:
        """Whether nothing is under way, so that the next call takes the kernels over."""
        return self.room < 0 or self.ended >= self.regions.keys()

    def tell(self) -> None:
        """Have calls compare only what was not."""
        if self.right >= self.regions.keys():
            self.checks.done(self.values)
        else:
            self.checks.agreed |= {k for r in self.right for k in (*self.regions[r].kernels, r)}

    def take(self, launches: WaitingRegion, given: Sequence[Any]) -> None:
        """Have the thread look at a region, on copies of its operands."""
        region, thread = launches.region, rehearsal_thread.thread
        if region not in self.left:
            return
        self.left.remove(region)
        needed = rehearsal_thread.bytes_of(given)
        if self.room - needed < launches.peak:
            self.ended.add(region)
            return
        self.room -= needed
        try:
            thread.hand(
                launches.device, given, partial(self.look, launches), partial(self.ended.add, region)
            )
        except torch.OutOfMemoryError:
            self.ended.add(region)

    def look(self, launches: WaitingRegion, given: list[Any]) -> None:
        """In the thread: a first call of a region's kernels, all of which are compiled."""
        region, checks, watch = launches.region, self.checks, None
        if checks.reference is not None:
            known = {origin(x): t for x, t in zip(region.inputs, given, strict=True)}
            watch = RehearsalWatch(checks, Values(checks.reference, known), None, bool(self.values))
        try:
            launches.looked_at(self.sizes, given, THERE, watch)
        except (RefusedKernel, Unsupported) as error:
            log.debug("left to the call: %s", error)
            return
        if watch is None or not watch.waiting:
            self.right.add(region)


class RehearsalWatch(WatchedCall):
    """The comparison of a region's first results in a thread. What is wrong is refused without a word, and
    ``waiting`` says that not all was compared: the call does both again."""

    def told(self, name: str, why: str, works: Sequence[Workload]) -> str:
        """In what a result is wrong."""
        return why

    def leave(self, why: str) -> None:
        """Something is not compared."""
        self.waiting = True

    def room(self, device: torch.device) -> int:
        """Bytes that may be taken."""
        return rehearsal_thread.room(device)


def expect_kernels(gm: fx.GraphModule, tensors: Sequence[Tensor]) -> None:
    """Start the processes that will compile the kernels, while autograd traces the graph."""
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    calls = sum(n.op.startswith("call") for n in gm.graph.nodes)
    if device.type != "cpu" and calls >= MANY and cores() > 1 and not is_collecting():
        with suppress(TransconvError):  # no kernel runs there, which is told later
            most = beside() if compile_mode() == "background" else cores()
            begin_processes(target_of(device), min(most, calls))
