"""The meaning of a kernel: it is executed with NumPy, at any stage, and every access is checked.

Independent loops (``grid``, ``parallel``, and ``tile`` unless it carries a sum) and lanes are axes
of arrays, see ``evaluate.py``; the other loops run in order. Nothing here is fast enough for real
sizes: problems with dimensions of 5 to 8 are what it is for.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from transconv.ir import explicit as xp
from transconv.ir import stmt as st
from transconv.ir.evaluate import Evaluator, Fault, contract, convert, position
from transconv.ir.expr import BoxLoad, Expr, Lane, Var, box_address
from transconv.ir.memory import Array, InterpError, Memory
from transconv.ir.node import Node
from transconv.ir.roles import Cell, SharedMemory, Turns, scatter, value_of
from transconv.ir.stmt import Alloc, For, Kernel, Stmt, Update
from transconv.ir.tensor import Tensor

# Independent loops are cut into pieces so that no array has many more elements than this.
_VOLUME = 1 << 20


def run(kernel: Kernel, memory: Memory | Mapping[str, Array],
        outputs: Collection[str] = (), seed: int = 0) -> Memory:
    """Execute a kernel in place on flat arrays by tensor name, or on a memory that other kernels
    have run on. Returns the memory.

    Raises InterpError for an access out of bounds, an element that is stored twice (or both stored
    and added to), an unbound variable, an integer division by zero, an assumption that does not
    hold, and when an element within the logical shape of a tensor named in ``outputs`` has not been
    written by the end. Roles take turns as ``seed`` draws them; see ``roles.py`` for what they can
    do wrong.
    """
    memory = memory if isinstance(memory, Memory) else Memory(memory)
    for tensor in kernel.params:
        if reason := memory.why_not(tensor):
            raise InterpError(f"kernel {kernel.name}: {reason}")
    with np.errstate(all="ignore"):
        _Run(kernel, memory, seed).execute(kernel.body)
    for tensor in kernel.params:
        if tensor.name in outputs:
            try:
                memory.check_written(tensor)
            except InterpError as e:
                raise InterpError(f"kernel {kernel.name}: {e}") from None
    return memory


@dataclass(slots=True)
class _Shape:
    """What is known of a statement before it runs."""

    depth: int = 0  # independent loops on top of each other
    volume: int = 1  # their iterations, multiplied
    updates: set[Var] = field(default_factory=set)  # of variables that it does not allocate
    apart: bool = False  # whether programs must run one by one


class _Scan:
    """Finds the lanes of a kernel and the shape of its statements; shared nodes are seen once."""

    def __init__(self, kernel: Kernel) -> None:
        self.lanes: dict[Lane, None] = {}
        self._seen: set[Node] = set()
        self._shapes: dict[Stmt, _Shape] = {}
        self._collect(kernel)
        self.whole = self.shape(kernel.body)

    def _collect(self, root: Node) -> None:
        stack = [root]
        while stack:
            at = stack.pop()
            if at not in self._seen:
                self._seen.add(at)
                if isinstance(at, Lane):
                    self.lanes[at] = None
                stack.extend(reversed(list(at.children())))

    def shape(self, s: Stmt) -> _Shape:
        found = self._shapes.get(s)
        if found is None:
            found = self._shapes[s] = self._shape(s)
        return found

    def _shape(self, s: Stmt) -> _Shape:
        out = _Shape(apart=isinstance(s, xp.Roles) or isinstance(s, For) and s.until is not None)
        if isinstance(s, Update):
            out.updates.add(s.var)
        elif isinstance(s, st.FuncCall) and s.func.name in ("dot", "dot_async"):
            out.updates |= {a for a in s.args[:1] if isinstance(a, Var)}
        for child in s.children():
            if isinstance(child, Stmt):
                part = self.shape(child)
                out.depth = max(out.depth, part.depth)
                out.volume = max(out.volume, part.volume)
                out.updates |= part.updates
                out.apart = out.apart or part.apart
        if isinstance(s, st.Seq):
            out.updates -= {part.var for part in s.stmts if isinstance(part, Alloc)}
        if isinstance(s, For) and self.is_axis(s):
            out.depth += 1
            out.volume *= max(1, s.stop)
        return out

    def is_axis(self, loop: For) -> bool:
        """Whether the iterations of a loop are executed at once."""
        if loop.kind == "tile":
            return not self.shape(loop.body).updates
        return loop.kind in ("grid", "parallel") and not self.shape(loop.body).apart


@dataclass(frozen=True, slots=True)
class _Frame:
    """A loop that is being executed: its values now, along an axis of their own or only one."""

    var: Var
    values: Array
    axis: int | None


class _Run:
    """One execution of one kernel."""

    def __init__(self, kernel: Kernel, memory: Memory, seed: int) -> None:
        self.kernel = kernel
        self.seed = seed
        self.memory = memory
        self.scan = _Scan(kernel)
        depth = self.scan.whole.depth
        self.axes = {lane: depth + i for i, lane in enumerate(self.scan.lanes)}
        self.lane_volume = math.prod(lane.extent for lane in self.axes)
        self.eval = Evaluator(memory, self.axes, max(1, depth + len(self.axes)))
        self.frames: list[_Frame] = []
        self.extents = [1] * self.eval.rank  # of the loops around, by axis
        self.allocated: dict[Var, tuple[int, ...]] = {}
        self.bound: list[Var] = []
        self.shared = SharedMemory()
        self.turns: Turns | None = None
        self.running: list[list[Cell]] = []  # what products in flight read, oldest first
        self.sending: list[list[Cell]] = []
        self.unfenced: list[Cell] = []  # what the role has put; its own fence shows it to the engine

    def execute(self, s: Stmt) -> None:
        method: Callable[[Stmt], None] | None = getattr(self, f"_{type(s).__name__}", None)
        if method is None:
            raise InterpError(f"kernel {self.kernel.name}: no meaning is known for the node class "
                              f"{type(s).__name__}")
        method(s)

    # ---- structure ----

    def _Seq(self, s: st.Seq) -> None:
        for part in s.stmts:
            self.execute(part)

    def _Comment(self, s: st.Comment) -> None:
        pass

    def _For(self, s: For) -> None:
        body = self.scan.shape(s.body)
        if not self.scan.is_axis(s):
            for i in self._numbers(s):
                self._iterate(s, np.array([i]), None)
            return
        if body.updates:
            names = ", ".join(sorted(v.name for v in body.updates))
            raise self._error(s, Fault(f"the iterations of a {s.kind} loop are not independent "
                                       f"when they update {names}, allocated outside"))
        axis = sum(f.axis is not None for f in self.frames)
        piece = max(1, _VOLUME // (body.volume * self.lane_volume))
        for start in range(0, s.stop, piece):
            self._iterate(s, np.arange(start, min(start + piece, s.stop)), axis)

    def _numbers(self, s: For) -> range:
        """The iterations of a loop that runs in order."""
        if s.until is not None:
            with self._blame(s):
                until = self.eval.compute(s.until)
                if until.min() != until.max() or until.max() > s.stop:
                    raise Fault(f"the loop should end at one place of at most {s.stop}, not at "
                                f"{until.min()}..{until.max()}")
                return range(int(until.max()))
        if s.kind != "dealt":
            return range(s.stop)
        with self._blame(s):
            return range(int(self.eval.compute(s.start).item()), s.stop, s.programs)

    def _iterate(self, s: For, values: Array, axis: int | None) -> None:
        """Run the body of a loop for some of its iterations."""
        self.frames.append(_Frame(s.var, values, axis))
        if axis is not None:
            self.extents[axis] = len(values)
        with self._scope():
            self._bind(s.var, convert(self.eval.along(axis or 0, values), s.var.type))
            self.execute(s.body)
        if axis is not None:
            self.extents[axis] = 1
        self.frames.pop()

    def _If(self, s: st.If) -> None:
        with self._blame(s):
            cond = self.eval.compute(s.cond).astype(np.bool_, copy=False)
        if cond.size == 1:
            taken = s.then if cond.any() else s.other
            if taken is not None:
                with self._scope():
                    self.execute(taken)
            return
        around = self.eval.active
        for part, where in ((s.then, around & cond), (s.other, around & ~cond)):
            if part is not None and where.any():
                self.eval.active = where
                with self._scope():
                    self.execute(part)
        self.eval.active = around

    @contextmanager
    def _scope(self) -> Iterator[None]:
        """Variables that are bound within are forgotten at the end."""
        depth = len(self.bound)
        yield
        for var in self.bound[depth:]:
            self.eval.env.pop(var, None)
            self.allocated.pop(var, None)
        del self.bound[depth:]

    def _bind(self, var: Var, value: Array) -> None:
        self.bound.append(var)
        self.eval.env[var] = value

    # ---- variables ----

    def _Let(self, s: st.Let) -> None:
        with self._blame(s):
            value = self.eval.compute(s.value)
            same = self.eval.type_of(s.value) is s.var.type
            self._bind(s.var, value if same else convert(value, s.var.type))

    def _Alloc(self, s: Alloc) -> None:
        shape = list(self.extents)
        for lane in s.lanes:
            shape[self.axes[lane]] = lane.extent
        with self._blame(s):
            self.allocated[s.var] = tuple(shape)
            self._bind(s.var, self._fitted(s.var, self.eval.compute(s.init)))

    def _Update(self, s: Update) -> None:
        with self._blame(s):
            self._assign(s.var, self.eval.compute(s.value))

    def _assign(self, var: Var, value: Array) -> None:
        if var not in self.allocated:
            raise Fault(f"{var.name} is updated but not allocated")
        value = self._fitted(var, value)
        if self.eval.active.size > 1:
            value = np.where(self.eval.active, value, self.eval.env[var])
        self.eval.env[var] = value

    def _fitted(self, var: Var, value: Array) -> Array:
        """The value in the type and shape of an allocated variable."""
        shape = self.allocated[var]
        extra = [i for i, (n, m) in enumerate(zip(value.shape, shape, strict=True)) if n > m]
        if extra:
            names = ", ".join(lane.name for lane, axis in self.axes.items() if axis in extra)
            raise Fault(f"{var.name} does not have the lanes {names} of its value")
        return np.broadcast_to(convert(value, var.type), shape)

    # ---- memory ----

    def _Store(self, s: st.Store) -> None:
        self._write(s, s.tensor, s.offset, s.value, s.mask)

    def _BoxStore(self, s: st.BoxStore) -> None:
        self._Store(s.as_store())

    def _write(self, s: Stmt, tensor: Tensor, offset: Expr, value: Expr, mask: Expr) -> None:
        """Store, or add atomically when the statement is a call."""
        with self._blame(s):
            if tensor.name not in self.memory.buffers:
                raise Fault(f"{tensor.name} is not a tensor of the kernel")
            at, new, _ = self.eval.compute_all(offset, value, mask)
            where = self.eval.mask(mask)
            self.eval.check_bounds(tensor.name, at, where)
            # A program writes even if nothing that it writes depends on which program it is.
            shape = np.broadcast_shapes(at.shape, new.shape, where.shape, tuple(self.extents))
            where = np.broadcast_to(where, shape)
            offsets = np.broadcast_to(at, shape)[where]
            values = convert(np.broadcast_to(new, shape)[where], tensor.dtype)
            atomic = isinstance(s, st.FuncCall)
            if conflict := self.memory.claim(tensor, offsets, atomic):
                n, reason = conflict
                raise Fault(f"element {int(offsets[n])} of {tensor.name} {reason}",
                            position(int(np.flatnonzero(where)[n]), shape))
            data = self.memory.buffers[tensor.name]
            if atomic:
                np.add.at(data, offsets, values)
                data[offsets] = convert(data[offsets], tensor.dtype)
            else:
                data[offsets] = values

    # ---- functions ----

    def _FuncCall(self, s: st.FuncCall) -> None:
        name, args = s.func.name, s.args
        with self._blame(s):
            match name, args:
                case _, (xp.Barrier() as barrier, Expr() as slot, Expr() as x):
                    self._meet(name, barrier, slot, x)
                case "dot_async", (Var() as acc, xp.Piece() as a, xp.Piece() as b):
                    self._pause()
                    cells = [c for p in (a, b) for c in self._cells(p)]
                    if unfenced := next((c for c in cells if c.state == "put"), None):
                        raise Fault(f"{unfenced.name} is multiplied before it is fenced")
                    self._dot(acc, a, b)
                    self._hold(self.running, cells)
                    self.eval.busy.add(acc)
                case "dot_wait", (Expr() as pending,):
                    self._retire(self.running, int(self.eval.compute(pending).item()))
                    if not self.running:
                        self.eval.busy.clear()
                case "send_wait", (Expr() as pending,):
                    self._retire(self.sending, int(self.eval.compute(pending).item()))
                case "fence", ():
                    for cell in self.unfenced:
                        cell.state = "ready"
                    self.unfenced.clear()
                case "atomic_add", (Tensor() as tensor, Expr() as at, Expr() as x, Expr() as mask):
                    self._write(s, tensor, at, x, mask)
                case "assume", (Expr() as condition,):
                    holds = self.eval.compute(condition)
                    self.eval.forbid(~holds.astype(np.bool_), "the assumption does not hold")
                case "dot", (Var() as acc, Expr() as a, Expr() as b):
                    self._dot(acc, a, b)
                case _:
                    raise Fault(f"no meaning is known for {name} with {len(args)} such arguments")

    def _dot(self, acc: Var, a: Expr, b: Expr) -> None:
        if acc not in self.allocated:
            raise Fault(f"{acc.name} is updated but not allocated")
        x, y = self.eval.compute_all(a, b)
        old = self.eval.env[acc]  # products in flight are added in order
        loops = {f.axis for f in self.frames if f.axis is not None}
        summed = [i for i in range(self.eval.rank) if old.shape[i] == 1 and i not in loops]
        self._assign(acc, old + contract(x, y, summed, old.dtype))

    # ---- shared memory and roles ----

    def _Shared(self, s: xp.Shared) -> None:
        self.shared.reserve(s.what)

    def _Roles(self, s: xp.Roles) -> None:
        """Run the roles of one program side by side, each with variables of its own."""
        turns = Turns(self.seed)
        with self._blame(s):
            turns.run([(role.name, self._player(role, turns)) for role in s.roles])

    def _player(self, role: xp.Role, turns: Turns) -> Callable[[], None]:
        run = copy.copy(self)
        run.eval = Evaluator(self.memory, self.axes, self.eval.rank)
        run.eval.env, run.eval.active = dict(self.eval.env), self.eval.active
        run.eval.piece = run._read
        run.frames, run.extents = list(self.frames), list(self.extents)
        run.allocated, run.bound, run.turns = {}, [], turns
        run.running, run.sending, run.unfenced = [], [], []

        def act() -> None:
            run.execute(role.body)
            if run.sending:
                raise run._error(role, Fault("the role ends while shared memory is being sent"))

        return act

    def _pause(self, condition: Callable[[], bool] | None = None, waits_for: str = "") -> None:
        if self.turns is None:
            raise Fault("this happens inside of roles only")
        self.turns.pause(condition, waits_for)

    def _meet(self, name: str, barrier: xp.Barrier, slot: Expr, x: Expr) -> None:
        """Wait at a barrier for a phase, arrive, or announce bytes."""
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

    def _cells(self, piece: xp.Piece) -> list[Cell]:
        return self.shared.slot(piece, int(self.eval.compute(piece.slot).item()))

    def _read(self, piece: xp.Piece) -> Array:
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

    def _Fetch(self, s: xp.Fetch) -> None:
        with self._blame(s):
            self._pause()
            member, slot = (int(v.item()) for v in self.eval.compute_all(s.piece.member, s.slot))
            cell, gate = self._cells(s.piece)[member], self.shared.gate(s.barrier, slot)
            cell.claim()
            box = BoxLoad(s.tensor, s.corner, s.piece.within, s.piece.buffer.extents)
            values, *within = self.eval.compute_all(box, *s.piece.within)
            cell.data[...], cell.state = np.nan, "landing"
            gate.landing.append((cell, scatter(cell, tuple(within), values)))
            gate.landed += s.piece.buffer.box_bytes
            gate.settle(f"{s.barrier.name}[{slot}]")

    def _Put(self, s: xp.Put) -> None:
        with self._blame(s):
            cell = self._cells(s.piece)[0]
            cell.claim()
            value, *within = self.eval.compute_all(s.value, *s.piece.within)
            cell.data[...] = scatter(cell, tuple(within), convert(value, s.piece.dtype))
            cell.state = "put"
            self.unfenced.append(cell)

    def _Send(self, s: xp.Send) -> None:
        with self._blame(s):
            self._pause()
            cells = self._cells(s.piece)
            if cells[0].state != "ready":
                raise Fault(f"{cells[0].name} is sent before it is filled and fenced")
            offset, inside = box_address(s.tensor, s.corner, s.piece.within)
            self._write(s, s.tensor, offset, s.piece, inside)
            self._hold(self.sending, cells)

    # ---- errors ----

    @contextmanager
    def _blame(self, s: Stmt) -> Iterator[None]:
        """Say which statement and which indices a fault comes from."""
        try:
            yield
        except Fault as fault:
            raise self._error(s, fault) from None

    def _error(self, s: Stmt, fault: Fault) -> InterpError:
        at = fault.position or (None,) * self.eval.rank
        where = {f.var.name: int(f.values[(at[f.axis] or 0) if f.axis is not None else 0])
                 for f in self.frames}
        where |= {lane.name: i for lane, axis in self.axes.items() if (i := at[axis]) is not None}
        indices = ", ".join(f"{name}={i}" for name, i in where.items())
        statement = str(s).split("\n")[0].strip()
        return InterpError(f"kernel {self.kernel.name}: `{statement}`: {fault.reason}"
                           + (f" at {indices}" if indices else ""))
