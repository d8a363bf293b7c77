"""The pass ``widen``: loads an operand along all lanes of its product if it lacks some.

    b = load(B + (grp + k*96))        ->      b = load(B + spread(grp + k*96, [grp m k]))

Triton chooses a register layout for each load. A narrow load (32 x 4 elements by 128 threads) gives each
thread one element, and converting that to the layout of the product takes shared memory and two barriers.
Along all lanes every thread loads what it multiplies, 16 bytes at a time. Threads that load the same
elements hit the cache.
"""

from __future__ import annotations

from dataclasses import replace

from transconv.compute import Compute
from transconv.ir import (
    Add,
    Alloc,
    Const,
    Expr,
    Kernel,
    Lane,
    Let,
    Load,
    Mutator,
    Spread,
    Stmt,
    Sub,
    Tensor,
    Var,
    lanes_of,
)
from transconv.schedule import Schedule


def widen(kernel: Kernel, schedule: Schedule, compute: Compute) -> Kernel:
    """Spread the addresses of operands, if the schedule keeps sums or operands in registers (words
    ``late`` and ``regs``)."""
    if not (schedule.late or schedule.regs):
        return kernel
    summed = {r for r in compute.operands
              if compute.factors or compute.names.rooted[r.var] & {*compute.reduced}}
    return _Widen({r.view.tensor for r in summed}).rebuilt(kernel)


class _Widen(Mutator):
    def __init__(self, operands: set[Tensor]) -> None:
        self.operands = operands
        self.scope: dict[Var, tuple[Lane, ...]] = {}
        self.values: dict[Var, Expr] = {}
        self.lanes: tuple[Lane, ...] = ()

    def mutate_Alloc(self, at: Alloc) -> Stmt:
        self.scope[at.var] = at.lanes
        self.lanes = at.lanes if len(at.lanes) > len(self.lanes) else self.lanes
        return at

    def mutate_Let(self, let: Let) -> Stmt:
        load = let.value
        if isinstance(load, Load) and load.tensor in self.operands:
            own = lanes_of(load, self.scope)
            if own != self.lanes and set(own) <= set(self.lanes) and self.neighbours(load.offset):
                let = Let(let.var, replace(load, offset=self.spread(load.offset)), let.origin)
        else:
            self.values[let.var] = let.value
        self.scope[let.var] = lanes_of(let.value, self.scope)
        return let

    def spread(self, offset: Expr) -> Expr:
        """The offset along all lanes; its constant stays behind it (see scalar/hoist.py)."""
        match offset:
            case Add(rest, Const() as constant):
                return Spread(rest, self.lanes) + constant
        return Spread(offset, self.lanes)

    def neighbours(self, offset: Expr) -> bool:
        """Whether the offset steps by 1 along a lane."""
        match offset:
            case Add(a, b):
                return self.neighbours(a) or self.neighbours(b)
            case Sub(a, _):
                return self.neighbours(a)
            case Var() if offset in self.values:
                return self.neighbours(self.values[offset])
        return isinstance(offset, Lane)
