"""The estimate of a kernel whose sizes are arguments, for one size after another.

What a tile and a step take is counted once, for the sizes that the schedule was chosen for. How many tiles
and steps there are, and how many bytes cross the memory's pins, are expressions of the sizes:

    us(sizes) = rates(counts of the example, tiles(sizes), steps(sizes), bytes(sizes))

Given numbers, ``us`` is a number; given texts of the counts (symbolic_cost.py), it is the text of an
expression (``CostFormula``), which is all that another process needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from transconv.compute import Axis, Compute
from transconv.cost import issue, maps
from transconv.cost.copies import copied_at
from transconv.cost.epilogue_reads import read_behind
from transconv.cost.model import ModelTime, interpreted, launched
from transconv.cost.symbolic_cost import Lines, Number
from transconv.cost.work import count
from transconv.ir import Expr, View, as_expr, minimum
from transconv.schedule import Block, Schedule, Scheduled, k_steps, programs
from transconv.target import Target

HERE = "here_"  # what names in the texts of a formula begin with; they become its own where it is used
OWN = re.compile(rf"{HERE}[a-z]+\d*")
ARITHMETIC = re.compile(rf"\b(?:{OWN.pattern}|if|else|inf|\d+(?:\.\d+)?(?:e[-+]?\d+)?)\b|[-+*/%<>=() ]")


@dataclass(frozen=True, slots=True)
class CostFormula:
    """The estimate of one kernel as texts of Python: ``us``, which uses the names of ``lines``, and for
    the values of ``counts`` here_c0, here_c1 and so on."""

    counts: tuple[Expr, ...]
    lines: tuple[tuple[str, str], ...]
    us: str

    def __post_init__(self) -> None:
        """Raise ValueError for texts that are more than arithmetic of such names: they become a
        function's, and may come from a record on disk."""
        for name, text in (*self.lines, (f"{HERE}us", self.us)):
            if not OWN.fullmatch(name) or ARITHMETIC.sub("", text):
                raise ValueError(f"{name} = {text:.80}; expected arithmetic of {HERE} names")

    def among(self, others: Lines, at: int, counts: Sequence[str]) -> str:
        """The text of the estimate as the ``at``-th in the text of a function, whose lines get those that
        it needs; ``counts``: the texts of their values there."""
        names = [c if c.isidentifier() or c.isdecimal() else others.name(others.number(c))
                 for c in counts]

        def own(text: str) -> str:
            for n, name in enumerate(names):
                text = text.replace(f"{HERE}c{n}", name)
            return text.replace(HERE, f"e{at}_")

        others.named += [(own(name), own(text)) for name, text in self.lines]
        return own(self.us)


@dataclass(slots=True)
class AtSizes:
    """The estimates of one kernel with its copies. ``us``, of the values of ``counts`` for some sizes:
    microseconds on the target, or units of a step on the interpreter. ``counts``: tiles, steps of each,
    bytes, and the elements of each copy whose sizes are arguments. ``behind``: another stride phase of the
    same launch goes before it."""

    schedule: Schedule
    compute: Compute
    target: Target
    behind: bool = False
    counts: tuple[Expr, ...] = field(init=False)
    us: Callable[..., Number] = field(init=False)

    def __post_init__(self) -> None:
        compute, schedule, split = self.compute, self.schedule, self.schedule.split_k
        grouped = Scheduled(compute, schedule, self.target).grouped
        many, long = tiles(schedule, grouped), steps(schedule, grouped)
        behind = read_behind(schedule, compute).views
        self.counts = many * split, (long + (split - 1)) // split, moved(compute, behind)
        if self.target.backend == "interpreter":
            self.us = self._interpreted()
            return
        if compute.streams:
            self.us = maps.MapTime(schedule, compute, self.target)
            return
        work, rates = count(schedule, compute, self.target), self.target.rates
        if schedule.regs or schedule.late:  # sums and operands are kept in registers
            issued = issue.Issued.of(schedule, Scheduled(compute, schedule, self.target).main, self.target)
            self.us = lambda tiles, steps, traffic: launched(
                work, issued(tiles, steps), traffic, schedule, self.target, rates.triton, self.behind)
        else:
            self.us = ModelTime(work, schedule, self.target,
                            rates.gluon if schedule.via == "gluon" else rates.triton, self.behind)
        if schedule.pack:
            elements, beside = copied_at(compute, schedule, self.target)
            self.counts += elements
            main = self.us
            self.us = lambda *counts: beside(*counts[3:]) + main(*counts[:3])

    def formula(self) -> CostFormula:
        """The same as texts."""
        lines = Lines(sign=f"{HERE}v")
        us = lines.name(self.us(*[lines.number(f"{HERE}c{n}") for n in range(len(self.counts))]))
        return CostFormula(self.counts, tuple(lines.named), us)

    def _interpreted(self) -> Callable[[Number, Number, Number], Number]:
        compute, schedule = self.compute, self.schedule
        each = interpreted(schedule, compute) / programs(schedule, compute)
        unit = (each - 2) / max(1, -(-k_steps(schedule, compute) // schedule.split_k))
        return lambda tiles, steps, traffic: tiles * (steps * unit + 2)


def tiles(schedule: Schedule, compute: Compute) -> Expr:
    """Tiles of results, as an expression of sizes."""
    return _blocks(schedule.blocks, compute, "BMN")


def steps(schedule: Schedule, compute: Compute) -> Expr:
    """``k_steps``, as an expression of sizes."""
    return _blocks(schedule.blocks, compute, "K")


@lru_cache(maxsize=64)  # many schedules of a computation are compared
def moved(compute: Compute, behind: tuple[View, ...]) -> Expr:
    """The bytes that are read and written at least once, with those of the tensors ``behind`` a sum of
    products, as an expression of sizes."""
    total = as_expr(0)
    factors = filter(None, (compute.a, compute.b, compute.c, *behind))
    for view in dict.fromkeys(compute.views()) if compute.streams else factors:
        total = total + _touched(view, compute) * view.tensor.dtype.bytes
    return total


def _touched(view: View, compute: Compute) -> Expr:
    points, elements = as_expr(1), as_expr(1)
    seen = compute.seen_by(view)
    for extent in (e for name, e in {x.name: _extent(x) for x in compute.axes}.items() if name in seen):
        points = points * extent
    for size in view.tensor.bounds:
        elements = elements * size
    return minimum(points, elements)


@lru_cache(maxsize=1024)
def _blocks(blocks: tuple[Block, ...], compute: Compute, kinds: str) -> Expr:
    """How many blocks there are along axes of these kinds; axes without a block are taken one by one."""
    found = as_expr(1)
    axes = {x.name: x for x in compute.axes if compute.kind(x.name) in kinds}
    for block in blocks:
        if not {*block.axes} <= axes.keys():
            continue
        points = as_expr(1)
        for name in block.axes:
            points = points * _extent(axes.pop(name))
        found = found * ((points + (block.extent - 1)) // block.extent)
    for x in axes.values():
        found = found * _extent(x)
    return found


def _extent(x: Axis) -> Expr:
    return as_expr(x.size) if x.extent is None else x.extent
