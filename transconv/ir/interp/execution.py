"""The execution of loops, branches, variables and stores; ``kernel.py`` adds functions and roles.

Independent loops and lanes are axes of arrays, see ``evaluate.py``. An error names the statement and the
indices.

Analyses a kernel before it is executed: its lanes, and which loops are independent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from transconv.ir import stmt as st
from transconv.ir.expr import ZERO, Const, Expr, Lane, Var
from transconv.ir.functions.rounding import convert
from transconv.ir.interp.evaluate import Array, Evaluator, Fault, InterpError, Memory, position
from transconv.ir.node import Node
from transconv.ir.stmt import Alloc, For, Kernel, Stmt, Update
from transconv.ir.tensor import Tensor

# Independent loops run in pieces, so that arrays have at most about this many elements.
_VOLUME = 1 << 20


@dataclass(frozen=True, slots=True)
class Frame:
    """A loop that is being executed, and its current values: along ``axis``, or a single one."""

    var: Var
    values: Array
    axis: int | None


class Execution:
    """One execution of one kernel: loops, branches, variables and stores."""

    def __init__(self, kernel: Kernel, memory: Memory) -> None:
        self.kernel = kernel
        self.memory = memory
        self.scan = Scan(kernel)
        depth = self.scan.whole.depth
        self.axes = {lane: depth + i for i, lane in enumerate(self.scan.lanes)}
        self.lane_volume = math.prod(lane.extent for lane in self.axes)
        self.eval = Evaluator(memory, self.axes, max(1, depth + len(self.axes)))
        self.frames: list[Frame] = []
        self.extents = [1] * self.eval.rank  # how many values each loop around has, by axis
        self.allocated: dict[Var, tuple[int, ...]] = {}
        self.bound: list[Var] = []
        self.left: dict[str, Left] = {}  # by tensor, what its points left

    def execute(self, s: Stmt) -> None:
        method: Callable[[Stmt], None] | None = getattr(self, f"_{type(s).__name__}", None)
        if method is None:
            raise InterpError(
                f"kernel {self.kernel.name}: no meaning is known for the node class {type(s).__name__}"
            )
        method(s)

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
            raise self._error(
                s,
                Fault(
                    f"the iterations of a {s.kind} loop are not independent "
                    f"when they update {names}, allocated outside"
                ),
            )
        axis = sum(f.axis is not None for f in self.frames)
        piece = max(1, _VOLUME // (body.volume * self.lane_volume))
        first = self._numbers(s).start
        for start in range(first, s.stop, piece):
            self._iterate(s, np.arange(start, min(start + piece, s.stop)), axis)

    def _numbers(self, s: For) -> range:
        """The iterations of a loop in their order."""
        with self._blame(s):
            start = 0 if s.start is ZERO else self._one_place(s.start, "start")
            stop = s.stop if s.until is None else self._one_place(s.until, "end")
            if stop > s.stop:
                raise Fault(f"the loop should end at {s.stop} at the latest, not at {stop}")
            return range(start, stop, s.programs if s.kind == "dealt" else 1)

    def _one_place(self, bound: Expr, word: str) -> int:
        """The value of a loop's bound. Raises Fault if iterations of outer loops differ in it."""
        found = self.eval.compute(bound)
        if found.min() != found.max():
            raise Fault(f"the loop should {word} at one place, not at {found.min()}..{found.max()}")
        return int(found.max())

    def _iterate(self, s: For, values: Array, axis: int | None) -> None:
        """Execute the body of a loop for some of its iterations."""
        self.frames.append(Frame(s.var, values, axis))
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
        """Unbind variables at the end of their block."""
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
        """Store; add atomically or to what points leave when the statement is a call."""
        with self._blame(s):
            if tensor.name not in self.memory.buffers:
                raise Fault(f"{tensor.name} is not a tensor of the kernel")
            at, new, _ = self.eval.compute_all(offset, value, mask)
            where = self.eval.mask(mask)
            self.eval.check_bounds(tensor.name, at, where)
            # Every iteration of the loops around writes, also where the offset does not depend on it.
            shape = np.broadcast_shapes(at.shape, new.shape, where.shape, tuple(self.extents))
            where = np.broadcast_to(where, shape)
            offsets = np.broadcast_to(at, shape)[where]
            values = convert(np.broadcast_to(new, shape)[where], tensor.dtype)
            atomic = isinstance(s, st.FuncCall)
            if conflict := self.memory.claim(tensor, offsets, atomic):
                n, reason = conflict
                raise Fault(
                    f"element {int(offsets[n])} of {tensor.name} {reason}",
                    position(int(np.flatnonzero(where)[n]), shape),
                )
            data = self.memory.buffers[tensor.name]
            if isinstance(s, st.FuncCall) and s.func.name == "partial":
                left = self.left.setdefault(tensor.name, Left(s.func.attr("op"), len(data)))
                data[offsets] = convert(left.add(offsets, values), tensor.dtype)
            elif atomic:
                np.add.at(data, offsets, values)
                data[offsets] = convert(data[offsets], tensor.dtype)
            else:
                data[offsets] = values

    # ---- errors ----

    @contextmanager
    def _blame(self, s: Stmt) -> Iterator[None]:
        """Raise a Fault as an InterpError that names the statement and the indices."""
        try:
            yield
        except Fault as fault:
            raise self._error(s, fault) from None

    def _error(self, s: Stmt, fault: Fault) -> InterpError:
        at = fault.position or (None,) * self.eval.rank
        where = {
            f.var.name: int(f.values[(at[f.axis] or 0) if f.axis is not None else 0]) for f in self.frames
        }
        where |= {lane.name: i for lane, axis in self.axes.items() if (i := at[axis]) is not None}
        indices = ", ".join(f"{name}={i}" for name, i in where.items())
        statement = str(s).split("\n")[0].strip()
        return InterpError(
            f"kernel {self.kernel.name}: `{statement}`: {fault.reason}"
            + (f" at {indices}" if indices else "")
        )


class Left:
    """What points have left in the elements of a buffer by an operation, in f64."""

    def __init__(self, op: str, span: int) -> None:
        self.op = op
        self.count, self.sum, self.squares = (np.zeros(span) for _ in range(3))
        self.extreme = np.full(span, -np.inf if op == "max" else np.inf)

    def add(self, offsets: Array, values: Array) -> Array:
        """Add values, and return what is in their elements then."""
        np.add.at(self.count, offsets, 1.0)
        np.add.at(self.sum, offsets, values)
        np.add.at(self.squares, offsets, values.astype(np.float64) ** 2)
        if self.op in ("max", "min"):
            (np.maximum if self.op == "max" else np.minimum).at(self.extreme, offsets, values)
        found = {"sum": self.sum, "squares": self.squares - self.sum**2 / np.maximum(self.count, 1.0)}
        return np.asarray(found.get(self.op, self.extreme)[offsets])


@dataclass(slots=True)
class Shape:
    """Properties of a statement that are known before it is executed."""

    depth: int = 0  # the deepest nesting of independent loops
    volume: int = 1  # the product of their trip counts
    updates: set[Var] = field(default_factory=set)  # variables that it changes and does not allocate
    apart: bool = False  # whether the programs around must be executed one by one


class Scan:
    """Finds the lanes of a kernel and the ``Shape`` of its statements; shared nodes are visited once."""

    def __init__(self, kernel: Kernel) -> None:
        self.lanes: dict[Lane, None] = {}
        self._seen: set[Node] = set()
        self._shapes: dict[Stmt, Shape] = {}
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
                stack.extend(reversed(at.children()))

    def shape(self, s: Stmt) -> Shape:
        found = self._shapes.get(s)
        if found is None:
            found = self._shapes[s] = self._shape(s)
        return found

    def _shape(self, s: Stmt) -> Shape:
        bounded = not isinstance(s, For) or (s.until is None and isinstance(s.start, Const))
        out = Shape(apart=isinstance(s, st.Roles) or not bounded)
        if isinstance(s, Update):
            out.updates.add(s.var)
        elif isinstance(s, st.FuncCall) and s.func.multiplies:
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
        """Whether all iterations of a loop are executed together, along an axis of arrays."""
        if loop.kind == "tile":
            return not self.shape(loop.body).updates
        return loop.kind in ("grid", "parallel") and not self.shape(loop.body).apart
