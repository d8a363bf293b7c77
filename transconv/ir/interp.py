"""The meaning of a kernel: it is executed with NumPy, at any stage, and every access is checked.

Independent loops (``grid``, ``parallel``, and ``tile`` unless it carries a sum) and lanes are axes
of arrays, see ``evaluate.py``; the other loops run in order. Nothing here is fast enough for real
sizes: problems with dimensions of 5 to 8 are what it is for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from transconv.ir import stmt as st
from transconv.ir.evaluate import Evaluator, Fault, contract, convert, position
from transconv.ir.expr import Expr, Lane, Var
from transconv.ir.memory import Array, InterpError, Memory
from transconv.ir.node import Node
from transconv.ir.stmt import Alloc, For, Kernel, Stmt, Update
from transconv.ir.tensor import Tensor

# Independent loops are cut into pieces so that no array has many more elements than this.
_VOLUME = 1 << 20


def run(kernel: Kernel, memory: Memory | Mapping[str, Array],
        outputs: Collection[str] = ()) -> Memory:
    """Execute a kernel in place on flat arrays by tensor name, or on a memory that other kernels
    have run on. Returns the memory.

    Raises InterpError for an access out of bounds, an element that is stored twice (or both stored
    and added to), an unbound variable, an integer division by zero, an assumption that does not
    hold, and when an element within the logical shape of a tensor named in ``outputs`` has not been
    written by the end.
    """
    memory = memory if isinstance(memory, Memory) else Memory(memory)
    for tensor in kernel.params:
        if reason := memory.why_not(tensor):
            raise InterpError(f"kernel {kernel.name}: {reason}")
    with np.errstate(all="ignore"):
        _Run(kernel, memory).execute(kernel.body)
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
        out = _Shape()
        if isinstance(s, Update):
            out.updates.add(s.var)
        elif isinstance(s, st.FuncCall) and s.func.name == "dot":
            out.updates |= {a for a in s.args[:1] if isinstance(a, Var)}
        for child in s.children():
            if isinstance(child, Stmt):
                part = self.shape(child)
                out.depth = max(out.depth, part.depth)
                out.volume = max(out.volume, part.volume)
                out.updates |= part.updates
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
        return loop.kind in ("grid", "parallel")


@dataclass(frozen=True, slots=True)
class _Frame:
    """A loop that is being executed: its values now, along an axis of their own or only one."""

    var: Var
    values: Array
    axis: int | None


class _Run:
    """One execution of one kernel."""

    def __init__(self, kernel: Kernel, memory: Memory) -> None:
        self.kernel = kernel
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
            for i in range(s.stop):
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
                case ("barrier" | "fence"), ():
                    pass
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
        old = self.eval.env[acc]
        loops = {f.axis for f in self.frames if f.axis is not None}
        summed = [i for i in range(self.eval.rank) if old.shape[i] == 1 and i not in loops]
        self._assign(acc, old + contract(x, y, summed, old.dtype))

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
