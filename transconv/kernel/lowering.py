"""From a Python function and what its arguments are to a kernel of the IR, its stages and its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from transconv.backend_triton import emit
from transconv.errors import KernelError
from transconv.ir import (
    TRUE,
    ZERO,
    Alloc,
    Const,
    Expr,
    For,
    FuncCall,
    Kernel,
    Let,
    Load,
    Tensor,
    Var,
    find,
    lanes_of,
    walk,
)
from transconv.kernel.arrays import whole
from transconv.kernel.building import Building
from transconv.kernel.group import Group
from transconv.kernel.group_scope import GroupScope
from transconv.kernel.order import Access, check_order
from transconv.kernel.products import Chip
from transconv.kernel.source import Source
from transconv.kernel.tracer import Tracer
from transconv.kernel.values import Tile
from transconv.passes import EMIT, finish
from transconv.simplify import simplify
from transconv.target import Target

MOST_WARPS = 8
PER_WARP = 512  # elements of the largest tile for each warp
OF_PRODUCT = 2048  # the same for accumulators of the matrix unit


@dataclass(frozen=True, slots=True)
class Lowered:
    """A kernel for given arguments. ``stages``: it after each pass; ``source``: its text; ``arguments``:
    the names of the kernel's parameters in the order of the launch; ``numbers``: those of them that are
    floats of the call."""

    name: str
    group: Group
    stages: tuple[tuple[str, Kernel], ...]
    source: str
    numbers: tuple[str, ...]
    warps: int
    num_stages: int = 3

    @property
    def kernel(self) -> Kernel:
        """The kernel that was emitted."""
        return self.stages[-1][1]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of the launch."""
        return tuple(t.name for t in self.kernel.params)

    def stage(self, name: str) -> str:
        """The text after a stage. KernelError for an unknown name."""
        if name == EMIT.name:
            return self.source
        for stage, kernel in self.stages:
            if stage == name:
                return str(kernel)
        known = " ".join([*(s for s, _ in self.stages), EMIT.name])
        raise KernelError(f"there is no stage {name!r} of a kernel; expected one of {known}")


def lowered(source: Source, group: Group, arguments: Mapping[str, Any], target: Target,
            precision: str = "ieee", alike: Mapping[str, str] | None = None) -> Lowered:
    """The kernel of a function. ``arguments``: a Tensor, or a number, for each parameter but the group; a
    Tensor without dimensions is a number that is read at run time. ``alike``: names of arrays that share
    memory, each with the first of them. Raises KernelError with the user's line."""
    written = traced(source, group, arguments, Chip(target, precision))
    check_order(written.accesses, alike or {})
    kernel, numbers = written.kernel, written.numbers
    stages = finish(kernel, target)
    header = (f"kernel {source.name}, {source.file.rsplit('/', 1)[-1]}:{source.first + 1}",
              f"groups {' x '.join(map(str, group.groups))} of {' x '.join(map(str, group.shape))}",
              f"target {target.name}")
    text = emit(stages[-1][1], header)
    return Lowered(source.name, group, tuple(stages), text, numbers, _warps(kernel))


@dataclass(frozen=True, slots=True)
class Written:
    """A kernel as the source has it, the names of its run-time numbers, its accesses in order."""

    kernel: Kernel
    numbers: tuple[str, ...]
    accesses: tuple[Access, ...]


def traced(source: Source, group: Group, arguments: Mapping[str, Any],
           chip: Chip) -> Written:
    """The kernel as the source has it."""
    tensors = {n: t for n, t in arguments.items() if isinstance(t, Tensor)}
    b = Building((source.name, *tensors))
    program = Var(b.fresh("program"))
    b.facts = b.facts.with_range(program, 0, max(0, group.count - 1))
    tracer = Tracer(b, source, chip)
    first, *rest = source.parameters
    numbers: list[str] = []
    ids = _ids(b, program, group)
    size = group.subgroup_size_hint or chip.target.warp_size
    tracer.here = GroupScope(group.shape, group.work, tuple(Tile((), e) for e in ids), size)
    tracer.env[first] = tracer.here
    for name in rest:
        given = arguments[name]
        if isinstance(given, Tensor) and given.shape == ():
            value = b.let(f"{name}_value", Load(given, ZERO, TRUE))
            tracer.env[name] = Tile((), value)
            numbers.append(name)
        else:
            tracer.env[name] = whole(given) if isinstance(given, Tensor) else given
    tracer.run(source.tree.body)
    body = For(program, max(1, group.count), b.body(), "grid")
    kernel = Kernel(source.name, tuple(tensors.values()), body, tuple(b.notes))
    return Written(kernel, tuple(numbers), tuple(tracer.accesses))


def _ids(b: Building, program: Var, group: Group) -> tuple[Expr, ...]:
    """The place of a program among the groups, the last dimension fastest."""
    found: list[Expr] = []
    groups = group.groups
    for at, count in enumerate(groups):
        behind = prod(groups[at + 1:])
        place: Expr = program if behind == 1 else program // behind
        place = place if at == 0 else place % count
        place = simplify(place, b.facts)
        if not isinstance(place, (Var, Const)):
            place = b.let(f"id_{at}", place)
        b.facts = b.facts.with_range(place, 0, max(0, count - 1)) if isinstance(place, Var) else b.facts
        found.append(place)
    return tuple(found)


def _warps(kernel: Kernel) -> int:
    """The warps of a program, from its largest tile."""
    scope: dict[Var, tuple[Any, ...]] = {}
    largest = 1
    for at in walk(kernel):
        if isinstance(at, (Alloc, Let)):
            scope[at.var] = at.lanes if isinstance(at, Alloc) else lanes_of(at.value, scope)
            largest = max(largest, prod(x.extent for x in scope[at.var]))
    products = [s for s in find(kernel, FuncCall) if s.func.multiplies]
    per = OF_PRODUCT if products else PER_WARP
    least = 4 if products else 1
    return max(least, min(MOST_WARPS, 1 << max(0, (largest // per).bit_length() - 1)))

