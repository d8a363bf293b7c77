"""One program over time and in shared memory: the roles of its warps with waits, arrivals and durations, a
row for each role and for each slot of the buffers; and what the buffers take of the memory.

The statements of each role are executed in order, with a clock; counters and conditions are evaluated,
tiles are not. A role goes on when the barrier that it waits for completes. How long copies, products and
stores take follows from their bytes and the rates that the estimate uses, so the order is the kernel's own
and the lengths are estimates."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import numpy as np
from markupsafe import Markup

from transconv import ir
from transconv.report import svg
from transconv.schedule import Scheduled, shared_bytes, tile

MEMORY_WIDTH = 640.0


@dataclass(frozen=True)
class SharedMemoryRing:
    """Boxes of shared memory under one name. ``bytes`` of all ``slots``."""

    name: str
    slots: int
    bytes: int
    shape: str


def rings(kernel: ir.Kernel) -> list[SharedMemoryRing]:
    """The buffers that an explicit kernel allocates; none where Triton does it."""
    found = [
        s.what for s in ir.walk(kernel) if isinstance(s, ir.Shared) and isinstance(s.what, ir.SmemRing)
    ]
    return [
        SharedMemoryRing(
            b.name,
            b.slots,
            b.slots * b.members * b.box_bytes,
            f"{b.slots} x {b.members} x {b.type}{list(b.extents)}"
            if b.members > 1
            else f"{b.slots} x {b.type}{list(b.extents)}",
        )
        for b in found
    ]


def implied(whole: Scheduled) -> list[SharedMemoryRing]:
    """The buffers that Triton's software pipeline needs for its operands."""
    schedule, compute = whole.schedule, whole.main
    if schedule.unit != "mma" or compute.b is None:
        return []
    return [
        SharedMemoryRing(
            "operands in flight",
            schedule.stages,
            shared_bytes(schedule, compute),
            f"{schedule.stages} stages of both operands' tiles",
        )
    ]


def draw_memory(found: list[SharedMemoryRing], limit: int) -> Markup:
    """A bar as long as the memory, with a piece for every slot of every ring."""
    height, top, x = 34.0, 18.0, 0.0
    parts: list[Markup] = [svg.rect(0, top, MEMORY_WIDTH, height, "ground", round_=3)]
    per = MEMORY_WIDTH / max(limit, sum(r.bytes for r in found), 1)
    for i, ring in enumerate(found):
        each = ring.bytes / max(1, ring.slots) * per
        for slot in range(ring.slots):
            parts.append(
                svg.rect(
                    x + slot * each,
                    top,
                    max(0.5, each - 1),
                    height,
                    f"slab hue{i % 8}",
                    f"{ring.name}[{slot}]: {ring.bytes // max(1, ring.slots)} bytes",
                )
            )
        if ring.bytes * per > 7 * len(ring.name):
            parts.append(svg.text(x + 2, 12, ring.name, "tick"))
        x += ring.bytes * per
    used = sum(r.bytes for r in found)
    words = f"{used} of {limit} bytes of shared memory, {used / limit:.0%}"
    parts.append(svg.text(MEMORY_WIDTH - 2, top + height + 14, words, "tick", "end"))
    return svg.drawing(MEMORY_WIDTH, top + height + 20, words, *parts, kind="wide")


UNIT = "matrix unit"  # shared by all roles
KINDS = {
    "multiply": "multiplies",
    "store": "writes the result to shared memory",
    "transpose": "transposes",
    "wait": "waits",
    "landing": "a copy is under way",
    "held": "in use",
}
ISSUE_NS = 15.0  # to issue a copy, an arrival, a product
MOST = 4000  # statements that are simulated

Gate = tuple[ir.Barrier, int]
Cell = tuple[ir.SmemRing, int]


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of a row. ``row``: the matrix unit, a role, or a slot of a ring; ``kind``: wait,
    multiply, store, transpose; of a slot: landing, held."""

    row: str
    kind: str
    start: float
    end: float
    said: str


@dataclass(frozen=True)
class Timeline:
    """Rows in order, their spans, and the nanoseconds until the last role ended; ``stopped``: whether only
    the beginning was simulated."""

    roles: tuple[str, ...]
    slots: tuple[str, ...]
    spans: tuple[Span, ...]
    end: float
    stopped: bool

    @property
    def legend(self) -> tuple[tuple[str, str], ...]:
        """The kinds of spans that occur, in words."""
        found = {s.kind for s in self.spans}
        return tuple((kind, said) for kind, said in KINDS.items() if kind in found)


@dataclass(slots=True)
class _Gate:
    """One barrier: completed phases, and the arrivals and bytes of the next."""

    completed: int = 0
    arrived: int = 0
    announced: int = 0
    landed: int = 0


@dataclass(slots=True)
class _Role:
    name: str
    steps: Iterator[Gate | float]
    wants: tuple[_Gate, int] | None = None
    since: float = 0.0
    products: list[float] = field(default_factory=list)  # when each in flight ends
    sends: list[float] = field(default_factory=list)


def play(kernel: ir.Kernel, whole: Scheduled) -> Timeline | None:
    """The timeline of program 0; None for a kernel without roles, or one that cannot be simulated."""
    roles = next((s for s in ir.walk(kernel) if isinstance(s, ir.Roles)), None)
    if roles is None:
        return None
    try:
        return _Play(kernel, roles, whole).run()
    except (ir.Fault, KeyError, ZeroDivisionError):
        return None


class _Play:
    def __init__(self, kernel: ir.Kernel, roles: ir.Roles, whole: Scheduled) -> None:
        target, rates = whole.target, whole.target.rates.gluon
        self.rates, self.latency = rates, rates.latency_ns
        bits = whole.main.a.tensor.dtype.bits
        rate = target.tflops * 1e3 / 2 / target.sms * 16 / bits  # multiply-adds a nanosecond
        self.product_ns = prod(tile(whole.schedule, whole.main, kind) for kind in "BMNK") / rate
        self.gates: dict[Gate, _Gate] = defaultdict(_Gate)
        self.clock, self.spans, self.played = 0.0, list[Span](), 0
        self.memory_free = self.unit_free = 0.0
        self.lands: list[tuple[float, int, Gate, int, Cell, float]] = []
        self.held: dict[Cell, float] = {}  # time at which a slot was filled
        self.used: dict[Cell, float] = {}  # time of the last read of a slot
        self.buffers = [
            s.what for s in ir.walk(kernel) if isinstance(s, ir.Shared) and isinstance(s.what, ir.SmemRing)
        ]
        self.outer = {s.var: 0 for s in ir.walk(kernel) if isinstance(s, ir.For) and s.kind == "grid"}
        self.roles = [_Role(r.name, iter(())) for r in roles.roles]
        for role, said in zip(self.roles, roles.roles, strict=True):
            run = ir.Evaluator(ir.Memory({}), {}, 1)
            run.env = {v: np.zeros(1, np.int64) for v in self.outer}
            role.steps = self.act(role, run, said.body)

    def run(self) -> Timeline:
        """Run the role that can continue earliest, until all have ended."""
        ready: list[tuple[float, int]] = [(0.0, i) for i in range(len(self.roles))]
        waiting: set[int] = set()
        ended = 0.0
        while (ready or self.lands) and self.played < MOST:
            if self.lands and (not ready or self.lands[0][0] <= ready[0][0]):
                self.land()
            else:
                self.clock, i = heapq.heappop(ready)
                role = self.roles[i]
                try:
                    found = next(role.steps)
                except StopIteration:
                    ended = max(ended, self.clock)
                    continue
                if isinstance(found, tuple):
                    waiting.add(i)
                    role.since = self.clock
                else:
                    heapq.heappush(ready, (self.clock + found, i))
            for i in sorted(waiting):
                role = self.roles[i]
                assert role.wants is not None
                gate, phase = role.wants
                if gate.completed % 2 != phase:
                    waiting.discard(i)
                    self.span(role.name, "wait", role.since, self.clock, "waits")
                    heapq.heappush(ready, (self.clock, i))
        for cell in [*self.held]:
            self.release(cell)
        slots = [f"{b.name}[{i}]" for b in self.buffers for i in range(b.slots)]
        used = {s.row for s in self.spans}
        busy = [UNIT] if UNIT in used else []
        return Timeline(
            (*busy, *(r.name for r in self.roles)),
            tuple(s for s in slots if s in used),
            tuple(self.spans),
            max(ended, self.clock),
            bool(ready or self.lands),
        )

    def span(self, row: str, kind: str, start: float, end: float, said: str) -> None:
        if end > start:
            self.spans.append(Span(row, kind, start, end, said))

    def land(self) -> None:
        at, _, gate, size, cell, since = heapq.heappop(self.lands)
        self.clock = max(self.clock, at)
        self.gates[gate].landed += size
        self.span(_name(cell), "landing", since, at, f"{size} bytes land in {_name(cell)}")
        self.held[cell] = at
        self.settle(gate)

    def release(self, cell: Cell) -> None:
        """End the span of a slot's content at its last read."""
        if (since := self.held.pop(cell, None)) is not None:
            until = max(since, self.used.get(cell, self.clock))
            self.span(_name(cell), "held", since, until, f"{_name(cell)} is in use")

    def settle(self, gate: Gate) -> None:
        """Complete a phase when all have arrived and all announced bytes have landed."""
        at = self.gates[gate]
        if at.arrived >= gate[0].arrivals and at.landed >= at.announced:
            at.completed += 1
            at.arrived = at.announced = at.landed = 0

    # -- what a role does: yields a gate to wait at, or nanoseconds to spend ------------------------

    def act(self, role: _Role, run: ir.Evaluator, s: ir.Stmt) -> Iterator[Gate | float]:
        for at in ir.statements(s):
            self.played += 1
            if isinstance(at, ir.For):
                yield from self.loop(role, run, at)
            elif isinstance(at, ir.If):
                branch = at.then if _int(run, at.cond) else at.other
                yield from self.act(role, run, branch) if branch is not None else ()
            elif isinstance(at, (ir.Let, ir.Alloc, ir.Update)):
                _bind(run, at)
            elif isinstance(at, ir.Fetch):
                yield self.fetch(run, at)
            elif isinstance(at, ir.Put):
                yield self.put(role, run, at)
            elif isinstance(at, ir.Send):
                yield self.send(role, run, at)
            elif isinstance(at, ir.FuncCall):
                yield from self.call(role, run, at)

    def loop(self, role: _Role, run: ir.Evaluator, s: ir.For) -> Iterator[Gate | float]:
        stop = s.stop if s.until is None else min(s.stop, _int(run, s.until))
        for i in range(_int(run, s.start), stop, s.programs if s.kind == "dealt" else 1):
            run.env[s.var] = np.asarray([i], np.int64)
            yield from self.act(role, run, s.body)

    def call(self, role: _Role, run: ir.Evaluator, s: ir.FuncCall) -> Iterator[Gate | float]:
        match s.func.name, s.args:
            case "wait", (ir.Barrier() as barrier, ir.Expr() as slot, ir.Expr() as phase):
                gate = (barrier, _int(run, slot))
                role.wants = (self.gates[gate], _int(run, phase))
                yield gate
            case (("expect" | "arrive"), (ir.Barrier() as barrier, ir.Expr() as slot, ir.Expr() as x)):
                gate = (barrier, _int(run, slot))
                if value := _int(run, x):
                    self.gates[gate].announced += value if s.func.name == "expect" else 0
                    self.gates[gate].arrived += 1
                    self.settle(gate)
                yield ISSUE_NS
            case "dot_async", (ir.Var(), ir.Expr() as a, ir.Expr() as b):
                yield self.multiply(role, run, a, b)
            case (("dot_wait" | "part_wait" | "send_wait"), (ir.Expr() as pending, *_)):
                under_way = role.sends if s.func.name == "send_wait" else role.products
                keep = _int(run, pending)
                gone, left = under_way[: len(under_way) - keep], under_way[len(under_way) - keep :]
                under_way[:] = left
                yield max(0.0, max(gone, default=0.0) - self.clock)

    def fetch(self, run: ir.Evaluator, s: ir.Fetch) -> float:
        size = s.piece.buffer.box_bytes
        cell = (s.piece.buffer, _int(run, s.piece.slot))
        self.release(cell)
        begin = max(self.clock + self.latency / 2, self.memory_free)
        self.memory_free = begin + size / self.rates.fetch_gbs
        gate = (s.barrier, _int(run, s.slot))
        heapq.heappush(self.lands, (self.memory_free, self.played, gate, size, cell, self.clock))
        return ISSUE_NS

    def multiply(self, role: _Role, run: ir.Evaluator, a: ir.Expr, b: ir.Expr) -> float:
        pieces = [p for p in (a, b) if isinstance(p, ir.SlotTile)]
        begin = max(self.clock, self.unit_free)
        self.unit_free = begin + self.product_ns
        role.products.append(self.unit_free)
        for p in pieces:
            self.used[(p.buffer, _int(run, p.slot))] = self.unit_free
        names = " x ".join(f"{p.buffer.name}[{_int(run, p.slot)}]" for p in pieces)
        self.span(UNIT, "multiply", begin, self.unit_free, f"{role.name}: {names}")
        return ISSUE_NS

    def put(self, role: _Role, run: ir.Evaluator, s: ir.Put) -> float:
        taken = s.piece.buffer.box_bytes / self.rates.shared_gbs
        cell = (s.piece.buffer, _int(run, s.piece.slot))
        moved = isinstance(s.value, ir.SlotTile)
        self.span(
            role.name,
            "transpose" if moved else "store",
            self.clock,
            self.clock + taken,
            f"writes {_name(cell)}",
        )
        self.release(cell)
        self.held[cell] = self.clock + taken
        if isinstance(s.value, ir.SlotTile):
            self.used[(s.value.buffer, _int(run, s.value.slot))] = self.clock + taken
        return taken

    def send(self, role: _Role, run: ir.Evaluator, s: ir.Send) -> float:
        taken = s.piece.buffer.box_bytes / self.rates.store_gbs * self.rates.box_store
        cell = (s.piece.buffer, _int(run, s.piece.slot))
        role.sends.append(max([self.clock, *role.sends]) + taken)
        self.used[cell] = role.sends[-1]
        return ISSUE_NS


def _name(cell: Cell) -> str:
    return f"{cell[0].name}[{cell[1]}]"


def _int(run: ir.Evaluator, e: ir.Expr) -> int:
    return int(np.asarray(run.compute(e)).item())


def _bind(run: ir.Evaluator, s: ir.Let | ir.Alloc | ir.Update) -> None:
    """Bind a counter; tiles and values from memory are not evaluated."""
    if isinstance(s, ir.Alloc) and s.lanes:
        return
    value = s.init if isinstance(s, ir.Alloc) else s.value
    if not value.dtype.is_integer:
        return
    try:
        run.env[s.var] = np.asarray(run.compute(value)).reshape(1)
    except (ir.Fault, KeyError, ValueError):
        run.env.pop(s.var, None)


WIDTH, LEFT, ROW, THIN = 1120.0, 128.0, 24.0, 13.0
PRODUCTS = 26  # shown in the picture


def draw(line: Timeline) -> Markup:
    """The beginning of the timeline, to scale."""
    until = _until(line)
    scale = (WIDTH - LEFT - 8) / max(until, 1.0)
    tops: dict[str, float] = {}
    y = 6.0
    parts: list[Markup] = []
    for rows, height in ((line.roles, ROW), (line.slots, THIN)):
        for row in rows:
            tops[row] = y
            parts += [
                svg.text(LEFT - 8, y + height / 2 + 3.5, row, "row", "end"),
                svg.rect(LEFT, y, WIDTH - LEFT - 8, height - 3, "ground", round_=2),
            ]
            y += height
        y += 6
    for s in line.spans:
        if s.start < until and s.row in tops:
            end, height = min(s.end, until), (ROW if s.row in line.roles else THIN) - 3
            length = max(0.8, (end - s.start) * scale - 0.4)
            parts.append(
                svg.rect(
                    LEFT + s.start * scale,
                    tops[s.row],
                    length,
                    height,
                    f"span {s.kind}",
                    f"{s.said}: {s.start / 1e3:.2f} to {s.end / 1e3:.2f} us",
                )
            )
    parts += _scale(until, scale, y)
    words = (
        f"{', '.join(line.roles)} and {len(line.slots)} slots of shared memory during the first "
        f"{until / 1e3:.1f} us of program 0"
    )
    return svg.drawing(WIDTH, y + 18, words, *parts, kind="wide")


def _until(line: Timeline) -> float:
    """The end of the picture: after ``PRODUCTS`` products, or at the end."""
    ends = sorted(s.end for s in line.spans if s.kind == "multiply")
    return min(line.end, ends[PRODUCTS] * 1.05) if len(ends) > PRODUCTS else line.end


def _scale(until: float, scale: float, y: float) -> list[Markup]:
    step = next(s for n in range(0, 9) for s in (10**n, 2 * 10**n, 5 * 10**n) if until / s <= 8)
    made = []
    for i in range(int(until // step) + 1):
        x = LEFT + i * step * scale
        made += [
            svg.tag("path", d=f"M{x:g} 2V{y:g}", class_="mesh"),
            svg.text(x, y + 12, f"{i * step / 1e3:g} us", "tick", "middle" if i else "start"),
        ]
    return made
