"""The pass ``once``: says to the caches which elements a kernel will not read again.

    x = load(X + n*4096 + k)      ->      x = load(X + n*4096 + k, evict=first)

With the word ``once=1`` lines of elements that no other point of the computation reads leave the L2 cache
before others: results stay there for the kernel that reads them, and what other kernels have written need
not go to memory to make room. Where a row is read in each sweep (``row=again``), the sweeps before the
last one keep its lines instead (``evict=last``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from transconv.compute import Compute, read_once
from transconv.ir import For, Kernel, Let, Load, Mutator, Node, Stmt, Tensor, find, statements
from transconv.schedule import Schedule


def once(kernel: Kernel, schedule: Schedule, compute: Compute) -> Kernel:
    """Mark the loads of tensors whose elements belong to one point each."""
    if not schedule.once:
        return kernel
    loops = [x for x in _loops(kernel.body) if find(x, Load)]
    again = loops[:-1] if compute.again else []
    return _Once(read_once(compute), frozenset(again)).mutate(kernel)  # type: ignore[no-any-return]


def _loops(at: Stmt) -> Iterator[For]:
    """The loops over the steps of sweeps, in the order of execution."""
    for s in statements(at):
        if isinstance(s, For) and s.kind != "grid":
            yield s
        elif isinstance(s, For):
            yield from _loops(s.body)


class _Once(Mutator):
    """Marks loads; inside the loops of ``again`` their elements are needed once more."""

    def __init__(self, tensors: frozenset[Tensor], again: frozenset[For]) -> None:
        self.tensors, self.again, self.evict = tensors, again, "first"

    def mutate_For(self, at: For) -> Node:
        before, self.evict = self.evict, "last" if at in self.again else self.evict
        made = self.generic(at)
        self.evict = before
        assert isinstance(made, Node)
        return made

    def mutate_Let(self, let: Let) -> Let:
        load = let.value
        if not isinstance(load, Load) or load.tensor not in self.tensors:
            return let
        return Let(let.var, replace(load, evict=self.evict), let.origin)
