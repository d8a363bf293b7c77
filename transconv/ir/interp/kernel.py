"""The execution of a kernel in NumPy, at any stage, with a check of every access.

Independent loops (``grid``, ``parallel``, and ``tile`` unless it carries a sum) and lanes are axes
of arrays, see ``evaluate.py``; the other loops run in order. It is slow: use it on problems with sizes
of 5 to 8.

The semantics of warp-specialized kernels: shared memory with its hazards, and concurrent roles.

Each role is a coroutine (a thread of which only one runs at a time). It yields before every wait,
arrival, copy and product, and a seeded random choice says what goes on: a role, or one of the copies in
flight, which land in any order. Each has a random weight, so that some are far behind the others, and
different seeds try different interleavings. Reported as errors: roles that all wait (deadlock), memory
that is used before its copy has landed, overwritten before it was read or while it is being read, or sent
before it was fenced, copies in flight when all roles have ended, and accumulators that are read while
products are still being added to them."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from transconv.ir import stmt as st
from transconv.ir.dtype import multiplied_as, tf32
from transconv.ir.expr import Expr, Var
from transconv.ir.functions.packed_bytes import in_blocks
from transconv.ir.functions.rounding import convert
from transconv.ir.interp.evaluate import Array, Evaluator, Fault, InterpError, Memory, contract
from transconv.ir.interp.execution import Execution
from transconv.ir.stmt import Barrier, Kernel, SlotTile, SmemRing
from transconv.ir.tensor import BoxLoad, Load, Tensor, box_address
from transconv.ir.visit import find


def run(
    kernel: Kernel, memory: Memory | Mapping[str, Array], outputs: Collection[str] = (), seed: int = 0
) -> Memory:
    """Execute a kernel in place on flat arrays by tensor name, or on the memory of earlier kernels.
    Returns the memory.

    Raises InterpError for an access out of bounds, an element that is stored twice (or both stored and
    added to), an unbound variable, an integer division by zero, an assumption that does not hold, and an
    element within the logical shape of a tensor named in ``outputs`` that is never written. ``seed`` draws
    the order in which roles run; the errors of roles are listed above."""
    memory = memory if isinstance(memory, Memory) else Memory(memory)
    for tensor in kernel.params:
        reason = memory.why_not(tensor)
        if reason and not (memory.ends_elsewhere(tensor) and _as_planes(tensor, kernel)):
            raise InterpError(f"kernel {kernel.name}: {reason}")
    with np.errstate(all="ignore"):
        _KernelRun(kernel, memory, seed).execute(kernel.body)
    for tensor in kernel.params:
        if tensor.name in outputs:
            try:
                memory.check_written(tensor)
            except InterpError as e:
                raise InterpError(f"kernel {kernel.name}: {e}") from None
    return memory


def _as_planes(tensor: Tensor, kernel: Kernel) -> bool:
    """Whether a tensor is a view as interleaved planes (``schedule/tiles/boxes.py``), some of which may
    lack their last row, and is accessed in boxes alone. The interpreter checks the bounds of each element
    of a box, so the buffer may be shorter than the layout."""
    return tensor.planes and not (
        any(x.tensor is tensor for x in find(kernel, Load))
        or any(x.tensor is tensor for x in find(kernel, st.Store))
        or any(tensor is x for call in find(kernel, st.FuncCall) for x in call.args)
    )


def _cut(x: Array) -> Array:
    """f32 as a matrix unit reads it for tf32: significands are truncated to 10 fraction bits."""
    if x.dtype != np.float32:
        return x
    bits = np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)
    return np.asarray(bits.view(np.float32))


class _KernelRun(Execution):
    """An execution with the functions that kernels call, and with roles that share memory."""

    def __init__(self, kernel: Kernel, memory: Memory, seed: int) -> None:
        super().__init__(kernel, memory)
        self.seed = seed
        self.shared = SharedMemory()
        self.turns: Turns | None = None
        self.running: list[list[Cell]] = []  # what each product in flight reads, oldest first
        self.adding: list[Var] = []  # what each adds to
        self.sending: list[list[Cell]] = []  # the same of copies from shared memory
        self.unfenced: list[Cell] = []  # what the role has put since its last fence

    def _FuncCall(self, s: st.FuncCall) -> None:
        name, args = s.func.name, s.args
        with self._blame(s):
            match name, args:
                case _, (st.Barrier() as barrier, Expr() as slot, Expr() as x):
                    self._meet(name, barrier, slot, x)
                case "dot_async", (Var() as acc, st.SlotTile() as a, st.SlotTile() as b):
                    self._pause()
                    cells = [c for p in (a, b) for c in self._cells(p)]
                    if unfenced := next((c for c in cells if c.state == "put"), None):
                        raise Fault(f"{unfenced.name} is multiplied before it is fenced")
                    self._dot(acc, a, b, "tf32")
                    self._hold(self.running, cells)
                    self.adding.append(acc)
                    self.eval.busy.add(acc)
                case "dot_wait" | "part_wait", (Expr() as pending, *_):
                    self._retire(self.running, int(self.eval.compute(pending).item()))
                    self.adding = self.adding[len(self.adding) - len(self.running) :]
                    self.eval.busy = set(self.adding)
                case "send_wait", (Expr() as pending,):
                    self._retire(self.sending, int(self.eval.compute(pending).item()))
                case "fence", ():
                    for cell in self.unfenced:
                        cell.state = "ready"
                    self.unfenced.clear()
                case "atomic_add", (Tensor() as tensor, Expr() as at, Expr() as x, Expr() as mask):
                    self._write(s, tensor, at, x, mask)
                case "partial", (Tensor() as tensor, Expr() as at, Expr() as x, Expr() as mask, Expr()):
                    self._write(s, tensor, at, x, mask)
                case "assume", (Expr() as condition,):
                    holds = self.eval.compute(condition)
                    self.eval.forbid(~holds.astype(np.bool_), "the assumption does not hold")
                case "dot", (Var() as acc, Expr() as a, Expr() as b):
                    self._dot(acc, a, b, s.func.attr("precision"))
                case "dot_scaled", (Var() as acc, *operands):
                    self._dot_scaled(acc, s.func, [e for e in operands if isinstance(e, Expr)])
                case _:
                    raise Fault(f"no meaning is known for {name} with {len(args)} such arguments")

    def _dot(self, acc: Var, a: Expr, b: Expr, precision: str) -> None:
        if acc not in self.allocated:
            raise Fault(f"{acc.name} is updated but not allocated")
        x, y = self.eval.compute_all(a, b)
        if multiplied_as(a.dtype, precision) is tf32:
            x, y = _cut(x), _cut(y)
        old = self.eval.env[acc]  # also if busy: products in flight are added in order
        self._assign(acc, old + contract(x, y, self._summed(old), old.dtype))

    def _summed(self, acc: Array) -> list[int]:
        """The axes of lanes that an accumulator lacks."""
        loops = {f.axis for f in self.frames if f.axis is not None}
        return [i for i in range(self.eval.rank) if acc.shape[i] == 1 and i not in loops]

    def _dot_scaled(self, acc: Var, func: st.Func, operands: list[Expr]) -> None:
        """Elements along k lie on the first axis of those that are summed, whatever lanes they have."""
        if acc not in self.allocated:
            raise Fault(f"{acc.name} is updated but not allocated")
        old = self.eval.env[acc]
        along, *_ = summed = self._summed(old)

        def laid(x: Array) -> Array:
            own = [i for i in summed if x.shape[i] > 1]
            return np.swapaxes(x, along, own[0]) if own else x

        a, b, *scales = map(laid, self.eval.compute_all(*operands))
        held = zip((a, b), (func.attr("a"), func.attr("b")), scales, strict=True)
        x, y = (in_blocks(e, name, s, func.attr("scales"), along) for e, name, s in held)
        self._assign(acc, old + contract(x, y, summed, old.dtype))

    # ---- shared memory and roles ----

    def _Shared(self, s: st.Shared) -> None:
        self.shared.reserve(s.what)

    def _Roles(self, s: st.Roles) -> None:
        """Run the roles of one program concurrently, each with its own variables."""
        turns = Turns(self.seed)
        with self._blame(s):
            turns.run([(role.name, self._player(role, turns)) for role in s.roles])

    def _player(self, role: st.Role, turns: Turns) -> Callable[[], None]:
        run = copy.copy(self)
        run.eval = Evaluator(self.memory, self.axes, self.eval.rank)
        run.eval.env, run.eval.active = dict(self.eval.env), self.eval.active
        run.eval.piece = run._read
        run.frames, run.extents = list(self.frames), list(self.extents)
        run.allocated, run.bound, run.turns = {}, [], turns
        run.running, run.adding, run.sending, run.unfenced = [], [], [], []

        def act() -> None:
            run.execute(role.body)
            if run.sending:
                raise run._error(role, Fault("the role ends while shared memory is being sent"))

        return act

    def _pause(self, condition: Callable[[], bool] | None = None, waits_for: str = "") -> None:
        if self.turns is None:
            raise Fault("this happens inside of roles only")
        self.turns.pause(condition, waits_for)

    def _meet(self, name: str, barrier: st.Barrier, slot: Expr, x: Expr) -> None:
        """``wait`` for phase ``x``, ``expect`` ``x`` bytes, or ``arrive`` if ``x`` is true."""
        at, value = (int(v.item()) for v in self.eval.compute_all(slot, x))
        gate = self.shared.gate(barrier, at)
        where = f"{barrier.name}[{at}]"
        if name == "wait":
            self._pause(lambda: gate.passes(value), f"phase {value} of {where}")
            return
        self._pause()
        if name == "expect":
            gate.announced += value
        if name == "expect" or value:
            gate.arrived += 1
            gate.settle(where)

    def _cells(self, piece: st.SlotTile) -> list[Cell]:
        return self.shared.slot(piece, int(self.eval.compute(piece.slot).item()))

    def _read(self, piece: st.SlotTile) -> Array:
        value = self.eval.value
        cells = self.shared.slot(piece, int(value(piece.slot).item()))
        return value_of(cells, value(piece.member), tuple(value(w) for w in piece.within))

    def _hold(self, groups: list[list[Cell]], cells: list[Cell]) -> None:
        for cell in cells:
            cell.readers += 1
        groups.append(cells)

    def _retire(self, groups: list[list[Cell]], pending: int) -> None:
        self._pause()
        while len(groups) > pending:
            for cell in groups.pop(0):
                cell.readers -= 1

    def _Fetch(self, s: st.Fetch) -> None:
        with self._blame(s):
            self._pause()
            member, slot = (int(v.item()) for v in self.eval.compute_all(s.piece.member, s.slot))
            cell, gate = self._cells(s.piece)[member], self.shared.gate(s.barrier, slot)
            cell.claim()
            box = BoxLoad(s.tensor, s.corner, s.piece.within, s.piece.buffer.extents)
            values, *within = self.eval.compute_all(box, *s.piece.within)
            cell.data[...], cell.state = np.nan, "landing"
            contents = scatter(cell, tuple(within), values)

            def land() -> None:
                gate.landing.append((cell, contents))
                gate.landed += s.piece.buffer.box_bytes
                gate.settle(f"{s.barrier.name}[{slot}]")

            assert self.turns is not None  # a copy is fetched inside of roles, see _pause
            self.turns.later(cell.name, land)

    def _Put(self, s: st.Put) -> None:
        with self._blame(s):
            cell = self._cells(s.piece)[0]
            cell.claim()
            value, *within = self.eval.compute_all(s.value, *s.piece.within)
            cell.data[...] = scatter(cell, tuple(within), convert(value, s.piece.dtype))
            cell.state = "put"
            self.unfenced.append(cell)

    def _Send(self, s: st.Send) -> None:
        with self._blame(s):
            self._pause()
            cells = self._cells(s.piece)
            if cells[0].state != "ready":
                raise Fault(f"{cells[0].name} is sent before it is filled and fenced")
            offset, inside = box_address(s.tensor, s.corner, s.piece.within)
            self._write(s, s.tensor, offset, s.piece, inside)
            self._hold(self.sending, cells)


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
        self.cells[what] = [
            [
                Cell(f"{what.name}[{slot}]", np.full(what.extents, np.nan, np.float32))
                for _ in range(what.members)
            ]
            for slot in range(what.slots)
        ]

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
            raise Fault(
                f"{cell.name} is used before its copy has landed"
                if cell.state == "landing"
                else f"{cell.name} is used and nothing is in it"
            )
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
        self.turn = threading.Lock()  # held until it is this one's turn
        self.turn.acquire()
        self.condition: Callable[[], bool] | None = None
        self.waits_for = ""
        self.done = False
        self.thread = threading.Thread(target=self._run, args=(act, machine), daemon=True)

    def _run(self, act: Callable[[], None], machine: Turns) -> None:
        self.turn.acquire()
        try:
            if not machine.stopping:
                with np.errstate(all="ignore"):
                    act()
        except _Stop:
            pass
        except BaseException as error:
            machine.failed = machine.failed or error
        self.done = True
        machine.give()


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A copy in flight: its bytes count as landed after ``land``."""

    name: str
    land: Callable[[], None]
    weight: float


class Turns:
    """Runs roles in turns until all have ended. Raises the exception of a role, or Fault if all roles
    that are left wait. Whoever pauses or ends says who is next."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.back = threading.Lock()  # held until the roles have ended, or one has failed
        self.back.acquire()
        self.stopping = False
        self.failed: BaseException | None = None
        self.players: list[_Player] = []
        self.flights: list[_Flight] = []
        self.now: _Player | None = None

    def run(self, roles: list[tuple[str, Callable[[], None]]]) -> None:
        self.players = [_Player(name, act, self, self._weight()) for name, act in roles]
        for player in self.players:
            player.thread.start()
        self.give()
        self.back.acquire()
        self.stopping = True
        for player in self.players:
            if not player.done:
                player.turn.release()
                self.back.acquire()
            player.thread.join()
        if self.failed is not None:
            raise self.failed

    def _weight(self) -> float:
        return float(10 ** self.random.uniform(-2, 0))

    def later(self, name: str, land: Callable[[], None]) -> None:
        """Have a copy land at some time after this."""
        self.flights.append(_Flight(name, land, self._weight()))

    def give(self) -> None:
        """Let go on whoever is next: a role, or the caller of ``run`` at the end."""
        try:
            self.now = None if self.failed or self.stopping else self._next()
        except BaseException as error:  # ``run`` raises it
            self.now, self.failed = None, error
        (self.back if self.now is None else self.now.turn).release()

    def _next(self) -> _Player | None:
        """The role that goes on, after the copies that land before; None when all have ended."""
        while waiting := [p for p in self.players if not p.done]:
            able: list[_Player | _Flight] = [
                *(p for p in waiting if p.condition is None or p.condition()),
                *self.flights,
            ]
            if not able:
                stuck = "; ".join(f"role {p.name} waits for {p.waits_for}" for p in waiting)
                raise Fault(f"the roles wait for one another: {stuck}")
            chosen = self.random.choices(able, [x.weight for x in able])[0]
            if isinstance(chosen, _Player):
                return chosen
            self.flights.remove(chosen)
            chosen.land()
        if self.flights:
            raise Fault(f"all roles have ended, {self.flights[0].name} is still in flight")
        return None

    def pause(self, condition: Callable[[], bool] | None = None, waits_for: str = "") -> None:
        """Yield; called by the running role, which goes on after the condition holds."""
        player = self.now
        assert player is not None
        player.condition, player.waits_for = condition, waits_for
        self.give()
        player.turn.acquire()
        player.condition = None
        if self.stopping:
            raise _Stop
