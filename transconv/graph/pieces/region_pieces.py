"""A graph within a bound: its regions, each with its kernels as steps, the plan of their pieces, its
calls; and how much its calls are measured to take."""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from transconv.calls import stats
from transconv.compute import Alone, Workload
from transconv.functional.calls.compiled_launch import TensorMemory, aligned, deterministic, program
from transconv.graph.backend_options import MemoryBound, mark
from transconv.graph.fusion.groups import Slices
from transconv.graph.fusion.index_ir import Piece
from transconv.graph.pieces.bounded_model import size_text, too_small
from transconv.graph.pieces.piece_execution import HostLink, PartMemory, PieceRun
from transconv.graph.pieces.piece_passes import NO_RESULTS, PiecePass, PiecePlan, memories, undivided
from transconv.graph.pieces.piece_plan import AGAIN, planned
from transconv.graph.pieces.step_graph import Operand, Step, StepMemory, crossed, steps_of
from transconv.graph.regions.aot_graphs import is_random
from transconv.graph.regions.torch_region import (
    address,
    base_of,
    is_view,
    left_bytes,
    library_bytes,
    storage_bytes,
    sums_bytes,
)
from transconv.runtime import estimated, is_capturing
from transconv.support import Drawer, TransconvError, Unsupported, __version__
from transconv.target import Target

if TYPE_CHECKING:
    from transconv.graph.regions.region_calls import BoundRegion, RegionLaunches
    from transconv.graph.regions.region_kernel import Region

Tensor = torch.Tensor
DRAWER = Drawer("bounds", 1, longest=1 << 16, lasting=False)
LOOKS = 8  # calls of a graph at most whose memory is measured
MOST = 1 << 50  # bytes that a record may say


@dataclass(slots=True, eq=False)
class BoundedGraph:
    """A graph that runs within a bound. ``rates``: the chip that decides where there is none;
    ``backward``: it computes gradients, while what the forward graph returned is there; ``record``: the
    name of what is kept of it on disk; ``regions``: its own, in their order; ``workspace``: bytes that a
    library of torch's takes once. ``looks``: calls that are still measured; ``beyond``: those that
    exceeded the bound; ``stays``: bytes that its calls took and that are no results, such as a workspace;
    ``most``, ``worst``: of the call that is measured, the most bytes so far, and the region that ran then;
    ``needed``, ``refusal``: of the region of a call that needs most beyond the bound, how much, and what
    is said. From the first such region on none runs: each is planned with tensors without memory.

    The first call may take more than later ones: results of new kernels are looked at, and torch
    compiles. So where it exceeds the bound, the next one decides: what that takes beyond what is counted
    is kept free from then on, by later processes as well."""

    bound: MemoryBound
    device: torch.device
    target: Target
    rates: Target
    backward: bool
    record: str
    regions: list[RegionPieces | LeftRegion] = field(default_factory=list)
    workspace: int = 0
    looks: int = LOOKS
    beyond: int = 0
    stays: int = 0
    most: int = 0
    worst: RegionPieces | LeftRegion | None = None
    needed: int = 0
    refusal: Unsupported | None = None

    @classmethod
    def of(
        cls,
        gm: torch.fx.GraphModule,
        bound: MemoryBound,
        device: torch.device,
        target: Target,
        rates: Target,
        backward: bool,
    ) -> BoundedGraph:
        """Of a graph whose sizes are numbers."""
        if bound.ranks is not None and (drawn := [n.name for n in gm.graph.nodes if draws(n)]):
            why = f"{drawn[0]} draws random numbers, of which each rank would have others; call the model"
            raise Unsupported("within:ranks", f"{why} in eval(), or without ranks=")
        told = __version__, torch.__version__, str(target)
        nodes = [(n.op, str(n.target), str(n.args), str(n.meta.get("val"))) for n in gm.graph.nodes]
        key = repr((*told, bound.bytes, bound.over, bound.host, nodes))
        record = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        return cls(bound, device, target, rates, backward, record)

    def enter(self, launches: RegionLaunches) -> RegionPieces:
        """What runs a region of ours."""
        made = RegionPieces(launches, self)
        self._enter(made)
        return made

    def enter_left(self, region: Region) -> LeftRegion:
        """What counts a region of torch's."""
        self.workspace = max(self.workspace, library_bytes(region.nodes, self.target))
        made = LeftRegion(region, self)
        self._enter(made)
        return made

    def _enter(self, made: RegionPieces | LeftRegion) -> None:
        said = None if self.bound.ranks else (DRAWER.get(self.record) or {}).get(made.name)
        if type(said) is int and 0 <= said <= MOST:
            made.aside = said
        self.regions.append(made)

    def returned(self) -> dict[int, int]:
        """Bytes by address of what the forward graph returned, while gradients are computed."""
        kept = self.bound.made.values() if self.backward else ()
        there = [s for found in kept for ref in found if (s := ref()) is not None]
        return {address(s): s.nbytes() for s in there}

    def refuse(self, needed: int, beside: int, aside: int, doing: str, along: str = "") -> None:
        """Have the call refused, where this is more than the bound (``too_small``)."""
        if needed > max(self.bound.bytes, self.needed):
            self.needed = needed
            self.refusal = too_small(self.bound, needed, beside, aside, doing, along)

    def decide(self) -> None:
        """Behind all regions. Raises Unsupported for a call that is refused."""
        if self.refusal is not None:
            raise self.refusal

    def begin(self, given: Iterable[Any]) -> tuple[int, int] | None:
        """Before a call of what is ``given``: the bytes that are there, and those of them that are
        others'. None for a call that is not measured."""
        self.needed, self.refusal = 0, None
        found = None if not self.looks or is_capturing(self.device) else counters(self.device)
        if found is None:
            return None
        now, self.most = found
        self.worst = None
        return now, now - sum((storage_bytes(given) | self.returned()).values()) - self.stays

    def note(self, region: RegionPieces | LeftRegion) -> None:
        """Behind a region of a call that may be measured."""
        found = counters(self.device) if self.looks else None
        if found is not None and found[1] > self.most:
            self.most, self.worst = found[1], region

    def end(self, began: tuple[int, int], made: Iterable[Any]) -> None:
        """Behind a call. Where torch counted as many bytes before, this one may have taken fewer."""
        now, others = began
        found = counters(self.device)
        assert found is not None
        self.stays += max(0, found[0] - now - sum(storage_bytes(made).values()))
        taken, region = self.most - others, self.worst
        if self.bound.ranks is not None:  # of those that know a region, the one that took most counts
            own = -1 if region is None else self.regions.index(region)
            beyond = own >= 0 and taken > self.bound.bytes
            _, taken, own = self.bound.ranks.largest((beyond, taken, own))
            region = None if own < 0 else self.regions[own]
        self.looks = self.looks - 1 if taken > self.bound.bytes else 0
        if taken > self.bound.bytes and region is not None:
            self.beyond += 1
            if self.beyond > 1:
                self.keep(region, taken)

    def keep(self, region: RegionPieces | LeftRegion, taken: int) -> None:
        """Count what a call took beyond what is counted of a region, from now on, and say so."""
        region.aside += taken - region.peak
        if self.bound.ranks is None:
            DRAWER.put(self.record, {r.name: r.aside for r in self.regions if r.aside})
        stats.tell_once(
            f"within {self.record} {self.beyond}",
            f"a call within memory={self.bound.told!r} took {size_text(taken)}, "
            f"{size_text(taken - region.peak)} more than is counted of it, while {region.doing} ran; from "
            "the next call on as much is kept free",
        )


def draws(node: torch.fx.Node) -> bool:
    """Whether an operation draws random numbers: an attention without dropout does not."""
    if not is_random(node):
        return False
    target: Any = node.target
    names = [a.name for a in target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" not in names or bool(given.get("dropout_p"))


def counters(device: torch.device) -> tuple[int, int] | None:
    """The bytes that torch has allocated on a device now, and the most so far; None where it counts
    none."""
    if device.type != "cuda":
        return None
    try:
        found = torch.cuda.memory_stats(device)
    except RuntimeError:  # another allocator
        return None
    return found["allocated_bytes.all.current"], found["allocated_bytes.all.peak"]


@dataclass(slots=True, eq=False)
class LeftRegion:
    """A region within a bound that torch computes, whole. ``aside``: as ``RegionPieces`` has it; ``peak``:
    bytes that are there at least in the call: inputs, results, and what is known of its operations."""

    region: Region
    graph: BoundedGraph
    aside: int = 0
    peak: int = 0

    @property
    def name(self) -> str:
        """Its first node: it may have no result."""
        return self.region.nodes[0].name

    @property
    def doing(self) -> str:
        """What it computes, in words."""
        names = [n.name for n in self.region.nodes]
        return f"torch's {', '.join(names[:3])}{', ...' * (len(names) > 3)}"

    def see(self, there: dict[int, int], tensors: Sequence[Any], passed: Sequence[bool]) -> None:
        """Before a call: as of ``RegionPieces``. More than the bound is refused."""
        graph = self.graph
        own = sum((there | storage_bytes(tensors) | graph.returned()).values())
        beside, region = graph.workspace + self.aside, self.region
        self.peak = own + left_bytes(region.outputs) + sums_bytes(region.nodes, graph.target) + beside
        graph.refuse(self.peak, own + beside, beside, f"{self.doing} run, whole: kernels alone are cut")
        if self.peak <= graph.bound.bytes:
            graph.bound.left[self.doing] = self.peak

    def __call__(self, given: Sequence[Any]) -> list[Any]:
        """Tensors without memory in the place of the results, views of what is ``given`` apart."""
        made = dict(zip(self.region.inputs, given, strict=True))

        def found(node: torch.fx.Node) -> Any:
            val, base = node.meta.get("val"), base_of(node)
            if node not in made and isinstance(val, Tensor):
                lies = val.shape, val.stride()
                made[node] = torch.empty_strided(*lies, dtype=val.dtype, device="meta")
                if base is not None and is_view(node):
                    made[node] = found(base).as_strided(*lies, val.storage_offset())
            return made.get(node)

        return [found(node) for node in self.region.outputs]


@dataclass(slots=True)
class RegionPieces:
    """A region that runs within a bound. ``outside``: what else is there while it runs, bytes by address;
    ``passed``: the places of inputs that nobody else holds; ``compiled``: the compiled graph is within the
    bound, and runs; ``aside``: bytes that were measured beside what is counted."""

    launches: RegionLaunches
    graph: BoundedGraph
    aside: int = 0
    outside: dict[int, int] = field(default_factory=dict)
    passed: set[int] = field(default_factory=set)
    compiled: bool = False
    run: PieceRun | None = None
    given: list[StepMemory] = field(default_factory=list)
    results: dict[Piece, Operand] = field(default_factory=dict)

    def __call__(self, sizes: Mapping[str, int], given: list[Any]) -> Sequence[Tensor]:
        made = self.called(sizes, given)
        if not self.graph.backward:
            self.graph.bound.made[id(self)] = [weakref.ref(t.untyped_storage()) for t in made]
        return made

    def called(self, sizes: Mapping[str, int], given: list[Any]) -> Sequence[Tensor]:
        """Its results."""
        bound = self.launches.bound(sizes)
        tensors = [given[place] for place, _, _ in self.launches.inputs]
        self.launches.arrange(bound, tensors)
        beside = self.beside(given, tensors)
        if self.run is None or self.run.plan.beside < beside:
            self.plan(bound, beside)
        refused = self.graph.refusal is not None
        if self.compiled and aligned(tensors) and not refused:
            return self.launches.launched(sizes, given)
        given.clear()
        rooms = {m: PartMemory(t, m.all) for m, t in zip(self.given, tensors, strict=True)}
        tensors.clear()
        if refused:
            for m in {o.memory for o in self.results.values()} - {*rooms}:
                room = torch.empty(m.bytes // m.dtype.itemsize, dtype=m.dtype, device="meta")
                rooms[m] = PartMemory(room, m.all)
        else:
            assert self.run is not None
            with self.launches.here():
                rooms = self.run(rooms)
        made = []
        for handed, view in zip(self.launches.handed, bound.views, strict=True):
            operand = self.results[handed.piece]
            memory, room = operand.memory, rooms[operand.memory].tensor
            shape, strides, behind = view or (memory.shape, memory.strides, 0)
            made.append(room.as_strided(shape, strides, room.storage_offset() + operand.behind + behind))
        return made

    @property
    def peak(self) -> int:
        """Bytes that are there at once at most, as its plan counts them."""
        return self.run.plan.peak if self.run is not None else 0

    @property
    def name(self) -> str:
        """Its first result."""
        return self.launches.region.outputs[0].name

    @property
    def doing(self) -> str:
        """What most is there for, in words."""
        return "its pieces" if not self.compiled else "its kernels"

    def see(self, there: dict[int, int], tensors: Sequence[Any], passed: Sequence[bool]) -> None:
        """Note what else is ``there``: bytes by address of what is not handed to it; and the tensors that
        are ``passed`` to it, which nobody else holds."""
        own = [address(t.untyped_storage()) if isinstance(t, Tensor) else 0 for t in tensors]
        self.outside = there
        alone = [p and at not in there and own.count(at) == 1 for at, p in zip(own, passed, strict=True)]
        self.passed = {i for i, p in enumerate(alone) if p}

    def beside(self, given: Sequence[Any], tensors: Sequence[Tensor]) -> int:
        """Bytes that are there whatever the kernels do: what is ``given``, or a copy of it that lies as
        kernels take it, what the forward graph returned, what is outside, and what libraries take."""
        found = self.outside | storage_bytes((*given, *tensors)) | self.graph.returned()
        return sum(found.values()) + self.graph.workspace + self.aside

    def plan(self, bound: BoundRegion, beside: int) -> None:
        """Find the pieces: along the outermost axis, or another one if that exceeds the bound, or is
        shorter and too much is computed again; along two where none does. Refuses the call where no number
        of pieces stays within the bound."""
        weights = self.weights(*self.asked(bound))
        given = zip(self.launches.inputs, bound.inputs, strict=True)
        shapes = [x.shape for (_, _, piece), x in given if piece not in weights]
        lengths = self.graph.bound.lengths(shapes)
        tried, best, host = [*lengths] or [""], tuple[Any, ...](), self.host()
        while tried:
            over = tried.pop(0)
            if best and not best[0][0] and len(over) == 1 and lengths[over] <= lengths[best[1].over]:
                continue
            found = self.along(over, bound, beside, host)
            key = max(0, found.peak - self.graph.bound.bytes), found.us
            if not best or key < best[0]:
                best = key, found, self.given, self.results, self.compiled
            if self.compiled or (not key[0] and found.us <= AGAIN * found.once):
                break
            if not tried and len(over) == 1 and best[0][0]:
                first = best[1].over
                every = replace(self.graph.bound, over="").lengths(shapes)
                tried = [first + a for a in every if a != first]
        _, found, self.given, self.results, self.compiled = best
        if self.graph.bound.ranks is not None:
            self.graph.bound.ranks.compare(found.text)
        if found.peak > self.graph.bound.bytes:
            aside, along = self.graph.workspace + self.aside, f" along {found.axes}" * bool(found.over)
            self.graph.refuse(found.peak, found.beside, aside, found.doing, along)
            return
        self.graph.bound.plans[id(self)] = found
        device = self.launches.device
        link = self.graph.bound.links.setdefault(device, HostLink(device)) if found.waits else None
        ranks = self.graph.bound.ranks
        self.run = PieceRun(found, self.graph.target, device, link=link, ranks=ranks)

    def along(self, over: str, bound: BoundRegion, beside: int, host: int) -> PiecePlan:
        """The plan of pieces along an axis, or two. Where the compiled graph stays within the bound, and
        no kernel of it is divided, it runs as it is; on each of several ranks if it takes less so."""
        steps = self.steps(bound, over)
        each = undivided(steps)
        peak = beside + self.launches.peak + max((s.workspace() for s in each), default=0)
        self.compiled = len(each) == len(self.launches.kernels) and peak <= self.graph.bound.bytes
        us, ranks = sum(s.us for s in each), self.graph.bound.count
        found = PiecePlan(each, set(), [PiecePass(0, each, NO_RESULTS, peak=peak, us=us)], {}, beside)
        if not self.compiled or ranks > 1:
            dealt = planned(steps, beside, self.graph.bound.bytes, host, ranks)
            self.compiled &= dealt.whole
            found = found if self.compiled else dealt
        found.over = over
        return found

    def host(self) -> int:
        """Bytes of host memory in which tensors may wait; of ranks, which may share a host, of each."""
        if self.launches.device.type not in ("cpu", "cuda"):
            return 0
        bound, ranks = self.graph.bound, self.graph.bound.ranks
        if bound.host is not None:
            return bound.host
        free = free_host_bytes() // (2 * bound.count)
        return free if ranks is None else -ranks.largest((-free,))[0]

    def steps(self, bound: BoundRegion, over: str) -> list[Step]:
        """The kernels as steps, which pieces cut along an axis, or two. Notes what is given, and which
        results are handed out."""
        known: dict[Piece, Operand] = {}
        for (place, node, handed), memory in zip(self.launches.inputs, bound.inputs, strict=True):
            known[handed] = Operand(_memory(node.name, memory, True, place in self.passed))
        self.given = [o.memory for o in known.values()]
        asked, named = self.asked(bound)
        weights = self.weights(asked, named)
        images = [operand.memory for piece, operand in known.items() if piece not in weights]
        for image in images:
            mark(image, over[:1])
        found: list[Step] = []
        for work, names, kernel, start in zip(
            asked, named, self.launches.kernels, bound.starts, strict=True
        ):
            for piece, memory in zip(kernel.stored, start.memory, strict=True):
                known[piece] = _stored(piece, memory, bound.cut, kernel.group.name, known)
            operands = dict(zip(names, [known[p] for p in (*kernel.given, *kernel.stored)], strict=True))
            found += steps_of(work, operands, self.graph.target, deterministic(), kernel.group.name)
        found = _alike(found)
        for number, step in enumerate(found):
            step.number = number
            step.us = _microseconds(step.workload, self.graph.rates)
            step.enter()
        for m in memories(found):
            m.link_us = m.bytes / (self.graph.rates.link_gbs * 1e3)
        self.results = {h.piece: known[h.piece] for h in self.launches.handed}
        for result in self.results.values():
            result.memory.handed = True
        if over[1:]:
            crossed(found, images, over[1:], self.graph.target)
        return found

    def asked(self, bound: BoundRegion) -> tuple[list[Workload], list[list[str]]]:
        """What the kernels compute, and the names of each one's tensors, results last."""
        asked: list[Workload] = [
            Alone(program(s.asked).compute) if isinstance(s.asked, str) else s.asked for s in bound.starts
        ]
        named: list[list[str]] = []
        for work, kernel in zip(asked, self.launches.kernels, strict=True):
            stored = {*work.results}
            names = sorted([t.name for t in work.tensors], key=stored.__contains__)
            named.append(names)
            assert len(names) == len(kernel.given) + len(kernel.stored)
        return asked, named

    def weights(self, asked: Sequence[Workload], named: Sequence[Sequence[str]]) -> set[Piece]:
        """Those of the inputs that are second factors of products, or of which these are computed, and
        first factors of none."""
        first, found = set[Piece](), set[Piece]()
        for work, names, kernel in [*zip(asked, named, self.launches.kernels, strict=True)][::-1]:
            products = [c for c in work.computations if c.b is not None]
            of = dict(zip(names, (*kernel.given, *kernel.stored), strict=True))
            first |= {of[c.a.tensor.name] for c in products}
            found |= {of[c.b.tensor.name] for c in products if c.b is not None}
            found |= {*kernel.given} if not {*kernel.stored} - (found - first) else set()
        return found - first


def _stored(
    piece: Piece,
    memory: TensorMemory,
    slices: Mapping[Piece, Slices],
    name: str,
    known: dict[Piece, Operand],
) -> Operand:
    """The memory of a result: its own, or a slice of a tensor that it has with others."""
    cut = slices.get(piece)
    if cut is None:
        return Operand(_memory(name, memory))
    whole = known.get(cut.whole) or next(
        (Operand(known[p].memory) for p, _ in cut.parts if p in known), None
    )
    own = known.setdefault(cut.whole, whole or Operand(_memory(name, cut.memory)))
    behind = next((lies[2] for p, lies in cut.parts if p is piece), 0)
    return Operand(own.memory, behind)


def free_host_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that are free, as Linux and the limit of a container say; 0 elsewhere."""

    def number(file: str, before: str = "") -> int | None:
        try:
            found = re.search(rf"{before}\s*(\d+)", (root / file).read_text())
        except OSError:
            return None
        return int(found[1]) if found else None

    free = (number("proc/meminfo", "MemAvailable:") or 0) * 1024  # kB
    most, used = number("sys/fs/cgroup/memory.max"), number("sys/fs/cgroup/memory.current")
    return free if most is None or used is None else max(0, min(free, most - used))


def _memory(name: str, memory: TensorMemory, given: bool = False, passed: bool = False) -> StepMemory:
    return StepMemory(name, memory.shape, memory.strides, memory.dtype, given, passed)


def _microseconds(work: Workload, rates: Target) -> float:
    try:
        return estimated(work, rates)
    except TransconvError:
        return 0.0


def _alike(steps: Sequence[Step]) -> list[Step]:
    """The steps, where all that store one tensor run in pieces, or all whole."""
    found = [*steps]
    while True:
        whole = {o.memory for s in found if s.whole for o in s.stored.values()}
        wrong = next(
            (s for s in found if not s.whole and any(o.memory in whole for o in s.stored.values())), None
        )
        if wrong is None:
            return found
        spaces = {*wrong.spaces.values()}
        found = [
            wrong.joined if s is wrong else s
            for s in found
            if not any(o.memory in spaces for o in s.operands.values())
        ]
