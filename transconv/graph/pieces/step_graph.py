"""The kernels of a region as steps over tensors in memory, and along which axis each may run in pieces.

Pieces are cut along one digit of addresses: the rows of an image, from the first to the last,

    address = n * (H*W*C) + h * (W*C) + w * C + c         rows: a digit of H*W*C elements

whatever dims kernels see in a tensor ([1, C, H, W] or [C, H*W]). A step may run in pieces if an axis of it
goes through the digit of what it reads, and through a digit of all that it stores. Any other one is whole:
it needs its operands whole, as a step does that reads the digit along another axis (keys of an attention).

Statistics leave parts of tiles, which whole steps combine. A norm that is one kernel of long rows becomes
several: sums of blocks of the digit, what combines them, and what is computed with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, lcm, prod
from typing import Any, NamedTuple

import torch

from transconv.compute import (
    Alone,
    AxisSizes,
    AxisSpan,
    Compute,
    Workload,
    Write,
    kernels,
    pace,
    parted,
    positions,
    span_of,
    statistics,
    why_not_lowered,
)
from transconv.conv import Surrounded
from transconv.graph.backend_options import mark
from transconv.ir import Expr, FloorDiv, Tensor, Var, View, free_vars
from transconv.runtime import Plan, main_computations, ready
from transconv.schedule import Schedule, Scheduled, along, carried, finishes, part_spaces
from transconv.selection import choice
from transconv.target import Target


class TensorPart(NamedTuple):
    """A part of a tensor: elements of its digit, and where pieces are cut along two axes of the second
    one."""

    along: AxisSpan
    across: AxisSpan | None = None


def _address(behind: int, cuts: Sequence[tuple[int, AxisSpan]]) -> int:
    """An address where of each of these digits a span is there."""
    if not cuts:
        return behind
    (digit, span), *inner = cuts
    return behind // digit * _address(span.size, inner) + _address(behind % digit, inner)


BLOCKS = 512  # blocks at most whose sums a reduction in pieces has
SHARE = 8  # times at least that what is read is larger than these


@dataclass(eq=False, repr=False, slots=True)
class StepMemory:
    """A tensor in memory. ``digit``: how many elements the digit spans along which pieces are cut, 0 if it
    has none; ``unit``: elements of the largest step along it that a kernel sees; ``given``: it is there
    before the first step; ``passed``: and nobody holds it but the region; ``handed``: it is a result;
    ``makers``: the steps that store it; ``across``: the same along a second axis, where pieces may be cut
    along two; ``link_us``: microseconds of a copy of all of it to or from host memory."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    given: bool = False
    passed: bool = False
    handed: bool = False
    digit: int = 0
    unit: int = 1
    makers: list[Step] = field(default_factory=list)
    across: StepMemory | None = None
    link_us: float = 0.0
    counted: dict[TensorPart | int, int] = field(default_factory=dict)  # of parts, and by the digit of all

    @property
    def bytes(self) -> int:
        """Of all of it."""
        if self.digit not in self.counted:
            self.counted[self.digit] = self.part_bytes(self.all)
        return self.counted[self.digit]

    @property
    def all(self) -> TensorPart:
        """The part that is the whole."""
        return TensorPart(AxisSpan(0, self.digit))

    def cuts(self, part: TensorPart) -> list[tuple[int, AxisSpan]]:
        """The digits that a part cuts, each with what is there of it, the larger one first."""
        found = [(self.digit, part.along)]
        if part.across is not None and self.across is not None:
            found.append((self.across.digit, part.across))
        return sorted([f for f in found if f[0]], reverse=True)

    def part_bytes(self, part: TensorPart) -> int:
        """Bytes of memory of a part."""
        if (known := self.counted.get(part)) is None:
            cuts = self.cuts(part)
            pairs = [(n, s) for n, s in zip(self.shape, self.strides, strict=True) if n > 1]
            found = sum((n - 1) * _address(s, cuts) for n, s in pairs if not cuts or s >= cuts[0][0])
            found += _address(cuts[0][1].size, cuts[1:]) if cuts else 1
            known = self.counted[part] = self.dtype.itemsize * found
        return known

    def at(self, behind: int, part: TensorPart) -> int:
        """An address in a part, of one in the whole."""
        if self.across is None or part.across is None:
            outer, inner = divmod(behind, self.digit) if self.digit else (0, behind)
            return outer * part.along.size + inner
        return _address(behind, self.cuts(part))


@dataclass(frozen=True, eq=False, slots=True)
class Operand:
    """A tensor of a step: the memory that it is, or a slice of which it is, from ``behind`` on."""

    memory: StepMemory
    behind: int = 0

    def slot(self, tensor: Tensor) -> int | None:
        """The dim of a step's tensor that is the digit of its memory; None if none is."""
        strides, digit = tensor.layout.strides(), self.memory.digit
        if strides is None or not digit:
            return None
        inner = [d for d, n in enumerate(tensor.shape) if n > 1 and strides[d] < digit]
        if not inner:
            return None
        found = max(inner, key=lambda d: strides[d])
        step, n = strides[found], tensor.shape[found]
        rest = sum((tensor.shape[d] - 1) * strides[d] for d in inner if d != found)
        outer = [s for m, s in zip(tensor.shape, strides, strict=True) if m > 1 and s >= digit]
        if step * n != digit or rest + self.behind % digit >= step or any(s % digit for s in outer):
            return None
        return found


@dataclass(frozen=True, slots=True)
class TileParts:
    """Parts that tiles leave of a statistic: the workspace of a kernel, the dim of it along which tiles
    lie that pieces divide, the positions of the axis in one period of tiles, and how many parts these
    leave."""

    space: Tensor
    dim: int
    positions: int
    parts: int


@dataclass(frozen=True, eq=False)
class Part:
    """A computation of a step, its schedule, and the axis along which it may be cut; empty: none."""

    compute: Compute
    schedule: Schedule
    axis: str = ""

    @cached_property
    def sizes(self) -> AxisSizes:
        return tuple((x.name, x.size) for x in self.compute.axes)


Lies = tuple[tuple[int, ...], tuple[int, ...], int | None]
"""The shape and strides of a tensor of a step, and its slot."""


@dataclass(eq=False, repr=False)
class Step:
    """A launch, or the launches of stride phases. ``operands``: by the names of the tensors of its texts;
    ``left``: its statistics, by the workspaces that later steps read; ``along``: those of one position
    each, which pieces have complete; ``us``: the estimate; ``room``: bytes of its launch's workspaces;
    ``across``: the same step along a second axis, where it may be cut along both."""

    name: str
    workload: Workload
    parts: tuple[Part, ...]
    operands: dict[str, Operand]
    choose: Callable[[Compute, Target], Schedule]
    left: dict[str, TileParts] = field(default_factory=dict)
    along: frozenset[str] = frozenset()
    spaces: dict[str, StepMemory] = field(default_factory=dict)
    us: float = 0.0
    number: int = 0
    room: int = 0
    lies: dict[str, Lies] = field(default_factory=dict)  # what ``lie`` found
    found: dict[Any, AxisSpan] = field(default_factory=dict)  # what was asked before
    slots: dict[Any, list[tuple[Expr, AxisSpan]]] = field(default_factory=dict)  # what ``coords`` found
    across: Step | None = None

    @cached_property
    def joined(self) -> Step:
        """The same step, whole, with its statistics."""
        parts = tuple(Part(p.compute, p.schedule) for p in self.parts)
        made = Step(self.name, self.workload, parts, self.operands, self.choose, us=self.us)
        made.number, made.room = self.number, self.room
        return made

    def workspace(self, share: float = 1.0, left: bool = True) -> int:
        """Bytes of the workspaces of its launch, for a share of its positions; ``left``: with that of its
        statistics."""
        parts = sum(m.bytes for m in self.spaces.values())
        own = max(0, self.room - parts)
        if all(p.schedule.split_k > 1 and not p.schedule.pack for p in self.parts):  # sums of parts
            own = int(own * share)
        return own + int(parts * share * left)

    @cached_property
    def whole(self) -> bool:
        """Whether it runs whole."""
        return not self.parts[0].axis

    @cached_property
    def stored(self) -> dict[str, Operand]:
        """The operands that it stores, without statistics that leave parts."""
        names = dict.fromkeys(
            w.view.tensor.name
            for p in self.parts
            for w in p.compute.writes
            if not (w.op and self.left) or w.view.tensor.name in self.along
        )
        return {n: self.operands[n] for n in names}

    @cached_property
    def read(self) -> dict[str, Operand]:
        """The operands that it reads."""
        names = dict.fromkeys(r.view.tensor.name for p in self.parts for r in p.compute.reads)
        return {n: self.operands[n] for n in names}

    @cached_property
    def given(self) -> tuple[StepMemory, ...]:
        """The tensors that it reads."""
        return tuple(o.memory for o in self.read.values())

    @cached_property
    def made(self) -> tuple[StepMemory, ...]:
        """The tensors that it stores."""
        return tuple(o.memory for o in self.stored.values())

    @cached_property
    def grain(self) -> int:
        """Positions of the axis of which pieces that leave statistics are multiples."""
        return lcm(1, *(x.positions for x in self.left.values()))

    def views(self, name: str, part: Part, stored: bool) -> Iterator[View]:
        """How a part sees a tensor."""
        steps = part.compute.writes if stored else part.compute.reads
        plain = (s for s in steps if name in self.along or not (isinstance(s, Write) and s.op))
        return (s.view for s in plain if s.view.tensor.name == name)

    @cached_property
    def needs_whole(self) -> set[str]:
        """The operands that it reads whole, whatever it stores."""
        found = set()
        for name, operand in self.read.items():
            for part in self.parts:
                for view in self.views(name, part, False):
                    slot = operand.slot(view.tensor)
                    if slot is None or not part.axis:
                        found.add(name)
                    elif part.axis not in part.compute.roots(view.dims[slot].coord):
                        found.add(name)
        return found

    def seen(self, name: str, part: Part, at: AxisSpan, stored: bool = False) -> AxisSpan:
        """The span along the slot of a tensor that a part reads, or has ``stored``, for some positions of
        its axis."""
        key = name, part, at, stored
        if (known := self.found.get(key)) is None:
            known = AxisSpan(0, 0)
            for coord, whole in self.coords(name, part, stored):
                reach = span_of(coord, part.sizes, part.axis, at)
                known = known.around(whole if reach is None else reach.within(whole))
            self.found[key] = known
        return known

    def made_at(self, name: str, part: Part, wanted: AxisSpan) -> AxisSpan:
        """The positions of a part's axis at which it stores a span of a tensor."""
        key = name, part, wanted
        if (known := self.found.get(key)) is None:
            known = AxisSpan(0, 0)
            for coord, _ in self.coords(name, part, True):
                known = known.around(positions(coord, part.sizes, part.axis, wanted))
            self.found[key] = known
        return known

    def coords(self, name: str, part: Part, stored: bool) -> list[tuple[Expr, AxisSpan]]:
        """The coordinates of a part along the slot of a tensor, and the span of all that there is."""
        key = name, part, stored
        if (known := self.slots.get(key)) is None:
            known = self.slots[key] = []
            for view in self.views(name, part, stored):
                slot = self.operands[name].slot(view.tensor)
                assert slot is not None
                known.append((view.dims[slot].coord, AxisSpan(0, view.tensor.shape[slot])))
        return known

    def enter(self) -> None:
        """Note in tensors that it stores them, and how far apart its positions are along their digit."""
        for operand in self.stored.values():
            operand.memory.makers.append(self)
        for name, operand in (self.read | self.stored).items() if not self.whole else ():
            if name in self.stored or (operand.memory.digit and name not in self.needs_whole):
                operand.memory.unit = max(operand.memory.unit, self.stride(name))

    def stride(self, name: str) -> int:
        """Elements of memory between neighbours along the slot of a tensor."""
        _, strides, slot = self.lie(name)
        assert slot is not None
        return strides[slot]

    def lie(self, name: str) -> Lies:
        """How a tensor lies."""
        if name not in self.lies:
            tensor = next(t for p in self.parts for t in p.compute.tensors if t.name == name)
            strides = tensor.layout.strides()
            assert strides is not None
            self.lies[name] = tensor.shape, strides, self.operands[name].slot(tensor)
        return self.lies[name]


# -- the axis of a step --------------------------------------------------------------------------------


def axis_of(compute: Compute, operands: dict[str, Operand]) -> str:
    """The axis through the digits of what a computation reads and of all that it stores, statistics of
    several positions apart; empty if none is. Of several the one that is outermost in the first result.
    Notes the digits of its results."""
    if compute.names.indices or compute.added:
        return ""
    sizes = tuple((x.name, x.size) for x in compute.axes)
    found: dict[str, None] = {}
    for read in compute.reads:
        operand = operands[read.view.tensor.name]
        if (slot := operand.slot(read.view.tensor)) is not None:
            coord = read.view.dims[slot].coord
            own = [v.name for v in free_vars(coord) if dict(sizes).get(v.name, 0) > 1]
            if free := [a for a in own if compute.kind(a) != "K"]:
                found[max(free, key=lambda a: (_reach(coord, sizes, a), a))] = None
    plain = {a: [w.view for w in compute.writes if not w.op or _is_along(w, a)] for a in found}
    fits = {a: places for a in found if (places := _stored_along(a, sizes, plain[a]))}
    if not fits:
        return ""
    axis = max(fits, key=lambda a: fits[a][0][1])
    for view, (slot, step) in zip(plain[axis], fits[axis], strict=True):
        memory, digit = operands[view.tensor.name].memory, step * view.tensor.shape[slot]
        spans = any(x < digit < n * x for n, x in zip(memory.shape, memory.strides, strict=True))
        if memory.given or memory.digit not in (0, digit) or spans:  # of a dim, one of several parts
            return ""
        memory.digit = digit
        if operands[view.tensor.name].slot(view.tensor) != slot:
            memory.digit = 0
            return ""
    return axis


def _is_along(write: Write, axis: str) -> bool:
    """Whether a statistic is one of each position of an axis."""
    return write.op not in ("", "add") and any(Var(axis) == d.coord for d in write.view.dims)


def _reach(coord: Expr, sizes: AxisSizes, axis: str) -> int:
    """How far a coordinate moves with an axis."""
    ends = [span_of(coord, sizes, axis, AxisSpan(x, x + 1)) for x in (0, dict(sizes)[axis] - 1)]
    return 0 if None in ends else abs(ends[1].start - ends[0].start)  # type: ignore[union-attr]


def _stored_along(axis: str, sizes: AxisSizes, views: Iterable[View]) -> list[tuple[int, int]]:
    """Of each view the dim that an axis goes through, from its first to its last position, and its stride;
    empty if there is none."""
    found = []
    for view in views:
        strides = view.tensor.layout.strides() or ()
        along = [d for d, dim in enumerate(view.dims) if strides and Var(axis) in free_vars(dim.coord)]
        slot = max(along, key=lambda d: strides[d], default=None)
        if slot is None or not _outermost(view.dims[slot].coord, sizes, axis):
            return []
        found.append((slot, strides[slot]))
    return found


def _outermost(coord: Expr, sizes: AxisSizes, axis: str) -> bool:
    """Whether a coordinate grows with an axis, and less far with all others together than with one of its
    steps; or never falls with it, being a quotient of it."""
    if by := pace(coord, sizes, axis):
        first = span_of(coord, sizes, axis, AxisSpan(0, 1))
        return first is not None and first.size <= by
    match coord:
        case FloorDiv(Var(name), _):
            return name == axis
    return False


# -- steps ---------------------------------------------------------------------------------------------


def steps_of(
    asked: Workload, operands: dict[str, Operand], target: Target, same: bool, name: str
) -> list[Step]:
    """The steps of a kernel of a region, whose tensors are these operands."""
    plan = ready(asked, target, None, same, Plan, True, "now")
    chosen = {s.compute.name: s.schedule for s in plan.steps}
    chosen |= {_stem(n): s for n, s in chosen.items()}
    joined = next((s.schedule for s in plan.steps if s.compute.name == asked.direction), None)

    def choose(compute: Compute, target: Target) -> Schedule:
        found = chosen.get(compute.name) or (joined if compute.phase else None)
        found = found or chosen.get(_stem(compute.name))  # of a part: that of the whole
        return found or choice.default(compute, target)

    room = sum(span * dtype.itemsize for (span,), dtype in plan.spaces())
    computes, _ = main_computations(asked, target, None)
    if isinstance(asked, Surrounded) or len(computes) == 1:
        blocks = in_blocks(computes[0], operands) if len(computes) == 1 else ()
        if not (blocks and computes[0].factors):
            made = _step(name, asked, computes, operands, target, choose)
            if not (blocks and made.whole):
                made.room = room
                return made_with_finishes(made, operands, target)
        computes = [*blocks]
    found: list[Step] = []
    own = dict(operands)
    for compute in computes:
        for tensor in compute.tensors:
            if tensor.name not in own:
                own[tensor.name] = Operand(_kept(f"{name}.{tensor.name}", tensor))
        label = name if len(computes) == 1 else f"{name} ({compute.name.rpartition('_')[2]})"
        made = _step(label, Alone(compute), [compute], own, target, choose)
        made.room = _room(compute, made.parts[0].schedule)
        found += made_with_finishes(made, own, target)
    return found


def _room(compute: Compute, schedule: Schedule) -> int:
    """Bytes of the sums of parts, where a schedule splits what is summed."""
    size = compute.acc.bits // 8 if schedule.split_k > 1 else 0
    return schedule.split_k * size * prod(x.size for x in compute.axes if x.name not in compute.reduced)


def _stem(name: str) -> str:
    """The name of a kernel that combines parts, without its sizes."""
    return re.sub(r"_of_\d+(x\d+)*$", "", name)


def _kept(name: str, tensor: Tensor) -> StepMemory:
    lies = tensor.shape, tensor.layout.strides() or ()
    return StepMemory(name, *lies, getattr(torch, tensor.dtype.torch))


def _step(
    name: str,
    workload: Workload,
    computes: Sequence[Compute],
    operands: dict[str, Operand],
    target: Target,
    choose: Callable[[Compute, Target], Schedule],
    outer: str = "",
) -> Step:
    axes = [axis_of(c, operands) for c in computes]
    schedules = [choose(c, target) for c in computes]
    left: dict[str, TileParts] = {}
    along: set[str] = set()
    if all(axes):
        for c, schedule, axis in zip(computes, schedules, axes, strict=True):
            for write in c.statistics:
                plain = Scheduled(c, schedule, target).main is c and not carried(c, schedule)
                if _is_along(write, axis) and plain:
                    along.add(write.view.tensor.name)
                    continue
                found = left_of(write, c, schedule, axis, target, outer)
                if found is None or len(computes) > 1:
                    axes = [""]
                    break
                left[found.space.name] = found
    if not all(axes):
        axes, left, along = [""] * len(computes), {}, set()
    parts = tuple(Part(c, s, a) for c, s, a in zip(computes, schedules, axes, strict=True))
    own = {t.name: operands[t.name] for c in computes for t in c.tensors}
    return Step(name, workload, parts, own, choose, left, frozenset(along))


def left_of(
    write: Write, compute: Compute, schedule: Schedule, axis: str, target: Target, outer: str = ""
) -> TileParts | None:
    """What tiles leave of a statistic along an axis, or of each position of an ``outer`` one; None where
    pieces cannot have tiles of the whole."""
    main = Scheduled(compute, schedule, target).main
    divided = (statistics.kept(write) or {}).get(axis, 1) > 1
    if main is not compute or carried(compute, schedule) or divided:
        return None
    for at, dim in enumerate(along(write, compute, schedule)):
        match dim.tile:
            case FloorDiv(Var(name), by):
                extent = int(by.value)  # type: ignore[attr-defined]
            case Var(name):
                extent = 1
            case _:
                return None
        block = next((b.axes for b in schedule.blocks if "_".join(b.axes) == name), (name,))
        if axis not in block:
            continue
        wide = [a for a in block if compute.size(a) > 1]
        if [a for a in wide[: wide.index(axis)] if a != outer]:
            return None
        inner = prod(compute.size(a) for a in wide[wide.index(axis) + 1 :])
        period = extent // gcd(extent, inner)
        if wide[0] != axis and compute.size(axis) % period:
            return None
        space = part_spaces(compute, schedule)[compute.statistics.index(write)]
        return TileParts(space, at, period, period * inner // extent)
    return None


def crossed(steps: Sequence[Step], images: Sequence[StepMemory], over: str, target: Target) -> None:
    """Note in steps and tensors how pieces of a first axis are cut along a second one, too."""
    for m in dict.fromkeys((*images, *(o.memory for s in steps for o in s.operands.values()))):
        m.across = replace(m, digit=0, unit=1, makers=[], counted={})
    for m in images:
        assert m.across is not None
        mark(m.across, over)
    for step in steps:
        own = {n: Operand(o.memory.across, o.behind) for n, o in step.operands.items() if o.memory.across}
        first = step.parts[0].axis
        computes = [p.compute for p in step.parts]
        made = _step(step.name, step.workload, computes, own, target, step.choose, first)
        made.number = step.number
        made.enter()
        apart = all(p.axis != q.axis for p, q in zip(made.parts, step.parts, strict=True))
        alike = {*made.left} == {*step.left} and made.along == step.along
        if apart and alike and not (made.whole or step.whole):
            step.across = made


def made_with_finishes(step: Step, operands: dict[str, Operand], target: Target) -> list[Step]:
    """A step, and those that combine the parts that it leaves."""
    if not step.left:
        return [step]
    (part,) = step.parts
    found = [step]
    for name, left in step.left.items():
        shape, strides = left.space.shape, left.space.layout.strides() or ()
        dtype, digit = getattr(torch, left.space.dtype.torch), shape[left.dim] * strides[left.dim]
        step.spaces[name] = StepMemory(f"{step.name}.{name}", shape, strides, dtype, digit=digit)
    for finish in finishes(part.compute, part.schedule):
        if not any(t.name in step.spaces for t in finish.tensors):
            continue
        own = {
            t.name: Operand(step.spaces[t.name]) if t.name in step.spaces else operands[t.name]
            for t in finish.tensors
        }
        parts = (Part(finish, step.choose(finish, target)),)
        found.append(Step(f"{step.name} (statistics)", Alone(finish), parts, own, step.choose))
    return found


def in_blocks(compute: Compute, operands: dict[str, Operand]) -> tuple[Compute, ...]:
    """The kernels of a reduction through the digit, which sums blocks of it first: as many as have an
    eighth of the bytes that are read. None where it cannot be divided so."""
    sizes = tuple((x.name, x.size) for x in compute.axes)
    found: dict[str, None] = {}
    memories = set()
    for read in compute.reads:
        slot = operands[read.view.tensor.name].slot(read.view.tensor)
        if slot is not None:
            memories.add(operands[read.view.tensor.name].memory)
            coord = read.view.dims[slot].coord
            own = [v.name for v in free_vars(coord) if v.name in compute.reduced]
            found |= dict.fromkeys(a for a in own if _outermost(coord, sizes, a))
    if len(found) != 1:
        return ()
    (axis,) = found
    size = compute.size(axis)
    one = compute.acc.bits // 8 * prod(x.size for x in compute.axes if x.name not in compute.reduced)
    most = min(BLOCKS, sum(m.bytes for m in memories) // (SHARE * one))
    within = next((n for n in range(1, size) if size % n == 0 and size // n <= most), 0)
    if not within:
        return ()
    divided = parted(compute, axis, within)
    blocks = [x for x in divided.axes if x.name not in dict(sizes)]  # are outermost in memory
    rest = [x for x in divided.axes if x not in blocks]
    made = kernels(replace(divided, axes=(*blocks, *rest)))
    return () if any(why_not_lowered(k) for k in made) else made
