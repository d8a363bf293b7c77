"""Analyses a kernel before it is executed: its lanes, and which loops are independent."""

from __future__ import annotations

from dataclasses import dataclass, field

from transconv.ir import explicit as xp
from transconv.ir import stmt as st
from transconv.ir.expr import Const, Lane, Var
from transconv.ir.node import Node
from transconv.ir.stmt import Alloc, For, Kernel, Stmt, Update


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
        out = Shape(apart=isinstance(s, xp.Roles) or isinstance(s, For) and not _known_bounds(s))
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


def _known_bounds(loop: For) -> bool:
    """Whether a loop has the same iterations in every program."""
    return loop.until is None and isinstance(loop.start, Const)
