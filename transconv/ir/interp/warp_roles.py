"""The semantics of warp-specialized kernels: shared memory with its hazards, and concurrent roles.

Each role is a coroutine (a thread of which only one runs at a time). It yields before every wait,
arrival, copy and product, and a seeded random choice says what goes on: a role, or one of the copies in
flight, which land in any order. Each has a random weight, so that some are far behind the others, and
different seeds try different interleavings. Reported as errors: roles that all wait (deadlock), memory
that is used before its copy has landed, overwritten before it was read or while it is being read, or sent
before it was fenced, copies in flight when all roles have ended, and accumulators that are read while
products are still being added to them.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from transconv.ir.explicit import Barrier, SlotTile, SmemRing
from transconv.ir.interp.evaluate import Fault
from transconv.ir.interp.memory import Array


@dataclass(slots=True)
class Cell:
    """One box in shared memory. ``state``: empty, landing (a copy to it is in flight), full, put (written
    and not yet fenced) or ready (fenced). ``readers``: how many products and sends in flight read it;
    ``read``: whether its contents were ever read."""

    name: str
    data: Array
    state: str = "empty"
    readers: int = 0
    read: bool = False

    def claim(self) -> None:
        """Check that the box may be overwritten; called before each write. Raises Fault."""
        if self.readers:
            raise Fault(f"{self.name} is written while it is still being read")
        if self.state == "landing":
            raise Fault(f"{self.name} is written while a copy is landing in it")
        if self.state != "empty" and not self.read:
            raise Fault(f"{self.name} is written before anybody read what is in it")
        self.read = False


@dataclass(slots=True)
class Gate:
    """One barrier: the number of completed phases, and the state of the current phase. ``announced`` and
    ``landed`` count bytes."""

    arrivals: int
    completed: int = 0
    arrived: int = 0
    announced: int = 0
    landed: int = 0
    landing: list[tuple[Cell, Array]] = field(default_factory=list)

    def passes(self, phase: int) -> bool:
        return self.completed % 2 != phase

    def settle(self, name: str) -> None:
        """Complete the phase if all have arrived and all announced bytes have been copied."""
        if self.landed > self.announced:
            raise Fault(f"{name} expects {self.announced} bytes, {self.landed} arrive")
        if self.arrived > self.arrivals:
            raise Fault(f"{name} waits for {self.arrivals} arrivals, {self.arrived} came")
        if self.arrived == self.arrivals and self.landed == self.announced:
            for cell, values in self.landing:
                cell.data[...] = values
                cell.state, cell.read = "full", False
            self.completed += 1
            self.arrived = self.announced = self.landed = 0
            self.landing = []


class SharedMemory:
    """The rings of buffers and barriers of one program."""

    def __init__(self) -> None:
        self.cells: dict[SmemRing, list[list[Cell]]] = {}
        self.gates: dict[Barrier, list[Gate]] = {}

    def reserve(self, what: SmemRing | Barrier) -> None:
        if isinstance(what, Barrier):
            self.gates[what] = [Gate(what.arrivals) for _ in range(what.slots)]
            return
        self.cells[what] = [[Cell(f"{what.name}[{slot}]", np.full(what.extents, np.nan, np.float32))
                             for _ in range(what.members)] for slot in range(what.slots)]

    def gate(self, barrier: Barrier, slot: int) -> Gate:
        if not 0 <= slot < barrier.slots:
            raise Fault(f"{barrier.name} has no slot {slot}")
        return self.gates[barrier][slot]

    def slot(self, piece: SlotTile, slot: int) -> list[Cell]:
        if not 0 <= slot < piece.buffer.slots:
            raise Fault(f"{piece.buffer.name} has no slot {slot}")
        return self.cells[piece.buffer][slot]


def value_of(cells: list[Cell], member: Array, within: tuple[Array, ...]) -> Array:
    """The elements of a slot at the positions of each lane. Raises Fault if a box is not filled."""
    for cell in cells:
        if cell.state in ("empty", "landing"):
            raise Fault(f"{cell.name} is used before its copy has landed"
                        if cell.state == "landing" else f"{cell.name} is used and nothing is in it")
        cell.read = True
    data = np.stack([cell.data for cell in cells])
    return np.asarray(data[(member, *within)])


def scatter(cell: Cell, within: tuple[Array, ...], values: Array) -> Array:
    """The contents of a box with ``values`` at the positions ``within``, and NaN elsewhere."""
    made = np.full_like(cell.data, np.nan)
    shape = np.broadcast_shapes(*(w.shape for w in within), values.shape)
    made[tuple(np.broadcast_to(w, shape) for w in within)] = np.broadcast_to(values, shape)
    return made


class _Stop(BaseException):
    """Ends the thread of a role after another role has failed."""


class _Player:
    """A role's thread, and what it waits for."""

    def __init__(self, name: str, act: Callable[[], None], machine: Turns, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.turn = threading.Semaphore(0)
        self.condition: Callable[[], bool] | None = None
        self.waits_for = ""
        self.done = False
        self.failed: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(act, machine), daemon=True)

    def _run(self, act: Callable[[], None], machine: Turns) -> None:
        self.turn.acquire()
        try:
            if not machine.stopping:
                with np.errstate(all="ignore"):
                    act()
        except _Stop:
            pass
        except BaseException as error:  # ``Turns._give`` raises it in the caller's thread
            self.failed = error
        self.done = True
        machine.back.release()


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A copy in flight: its bytes count as landed after ``land``."""

    name: str
    land: Callable[[], None]
    weight: float


class Turns:
    """Runs roles in turns until all have ended. Raises the exception of a role, or Fault if all roles
    that are left wait."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.back = threading.Semaphore(0)
        self.stopping = False
        self.players: list[_Player] = []
        self.flights: list[_Flight] = []
        self.now: _Player | None = None

    def run(self, roles: list[tuple[str, Callable[[], None]]]) -> None:
        self.players = [_Player(name, act, self, self._weight()) for name, act in roles]
        for player in self.players:
            player.thread.start()
        try:
            while waiting := [p for p in self.players if not p.done]:
                able: list[_Player | _Flight] = [
                    *(p for p in waiting if p.condition is None or p.condition()),
                    *self.flights]
                if not able:
                    stuck = "; ".join(f"role {p.name} waits for {p.waits_for}" for p in waiting)
                    raise Fault(f"the roles wait for one another: {stuck}")
                chosen = self.random.choices(able, [x.weight for x in able])[0]
                if isinstance(chosen, _Player):
                    self._give(chosen)
                else:
                    self.flights.remove(chosen)
                    chosen.land()
            if self.flights:
                raise Fault(f"all roles have ended, {self.flights[0].name} is still in flight")
        finally:
            self.stopping = True
            for player in self.players:
                if not player.done:
                    self._give(player, last=True)
                player.thread.join()

    def _weight(self) -> float:
        return float(10 ** self.random.uniform(-2, 0))

    def later(self, name: str, land: Callable[[], None]) -> None:
        """Have a copy land at some time after this."""
        self.flights.append(_Flight(name, land, self._weight()))

    def _give(self, player: _Player, last: bool = False) -> None:
        self.now = player
        player.turn.release()
        self.back.acquire()
        if player.failed is not None and not last:
            raise player.failed

    def pause(self, condition: Callable[[], bool] | None = None, waits_for: str = "") -> None:
        """Yield; called by the running role, which goes on after the condition holds."""
        player = self.now
        assert player is not None
        player.condition, player.waits_for = condition, waits_for
        self.back.release()
        player.turn.acquire()
        player.condition = None
        if self.stopping:
            raise _Stop
