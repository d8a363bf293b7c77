"""Sizes that are arguments of a kernel: their names, and what must hold of them (the requirements).

    N=8 in 1..64, W=56 in 1..4096, C=64 in 1..1024, C % 8 == 0

A name has a range and an example. Schedules are chosen for the examples; a kernel is correct for all
sizes that meet the requirements. ``Kernel.at`` gives the kernel for given numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import lcm

from transconv.ir import expr as ex
from transconv.ir.functions.size_values import Values, value_at
from transconv.ir.node import Node, node
from transconv.ir.stmt import For, Kernel
from transconv.ir.tensor import Tensor
from transconv.ir.visit import Mutator, free_vars

LARGEST_SIZE = 2**31 - 1
"""The largest size that can be an argument: it is passed in 32 bits."""


def text_of(condition: ex.Expr) -> str:
    """A condition without its outer parentheses, as ``Sizes`` prints it."""
    text = str(condition)
    return text[1:-1] if text.startswith("(") else text


@node
class Size(Node):
    """A size that is an argument, from ``least`` to ``most``; ``like`` is the example."""

    name: str
    like: int
    least: int = 1
    most: int = LARGEST_SIZE

    @property
    def var(self) -> ex.Var:
        """The argument as a variable."""
        return ex.Var(self.name)

    def __str__(self) -> str:
        return f"{self.name}={self.like} in {self.least}..{self.most}"


@node
class Sizes(Node):
    """The sizes that are arguments of a kernel, in the order of the call, and what else must hold."""

    each: tuple[Size, ...]
    where: tuple[ex.Expr, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order of the call's arguments."""
        return tuple(s.name for s in self.each)

    @property
    def like(self) -> dict[str, int]:
        """The examples, by name."""
        return {s.name: s.like for s in self.each}

    @property
    def requirements(self) -> tuple[ex.Expr, ...]:
        """The ranges and ``where``, as conditions."""
        return tuple(c for s in self.each for c in (s.var >= s.least, s.var <= s.most)) + self.where

    @property
    def multiples(self) -> dict[str, int]:
        """What sizes are required to be multiples of, by name, where that is a number."""
        found: dict[str, int] = {}
        for condition in self.where:
            match condition:
                case ex.Eq(ex.Mod(ex.Var(name), ex.Const(int(share))), ex.Const(0)):
                    found[name] = lcm(found.get(name, 1), share)
        return found

    def why_not(self, values: Values) -> str:
        """The first requirement that sizes do not meet, as a sentence; empty if they meet all."""
        if missing := [n for n in self.names if n not in values]:
            return f"{missing[0]} has no size"
        for s in self.each:
            if not s.least <= values[s.name] <= s.most:
                return f"{s.name}={values[s.name]} is not in {s.least}..{s.most}"
        for condition in self.where:
            if not value_at(condition, values):
                given = " ".join(
                    f"{n}={values[n]}" for n in self.names if ex.Var(n) in free_vars(condition)
                )
                return f"{text_of(condition)} does not hold for {given}"
        return ""

    def __str__(self) -> str:
        return ", ".join([*map(str, self.each), *map(text_of, self.where)])


def strictest(conditions: Iterable[ex.Expr]) -> tuple[ex.Expr, ...]:
    """Conditions without those that follow from another one: of ``x + 3 <= 9`` and ``x <= 5`` the
    second."""
    found: dict[ex.Expr, tuple[int, ex.Expr]] = {}
    for condition in conditions:
        match condition:
            case ex.Le(ex.Add(x, ex.Const(more)), ex.Const(limit)):
                key, room = x, int(limit) - int(more)
            case ex.Le(ex.Sub(x, ex.Const(less)), ex.Const(limit)):
                key, room = x, int(limit) + int(less)
            case ex.Le(x, ex.Const(limit)):
                key, room = x, int(limit)
            case _:
                key, room = condition, 0
        if key not in found or room < found[key][0]:
            found[key] = room, condition
    return tuple(condition for _, condition in found.values())


def sizes_told(given: Iterable[tuple[Tensor, Sequence[int]]]) -> dict[str, int]:
    """Each size by name: that of the first dimension that tells it, of tensors and their shapes."""
    found: dict[str, int] = {}
    for tensor, shape in given:
        if tensor.extents and len(shape) == len(tensor.extents):
            for extent, size in zip(tensor.extents, shape, strict=True):
                if (told := _told(extent, int(size))) is not None:
                    found.setdefault(*told)
    return found


def _told(extent: ex.Expr, size: int) -> tuple[str, int] | None:
    """The size that a dimension tells, such as M where it is M, M*2 or M + 3 long; None for none."""
    names = free_vars(extent)
    if len(names) != 1:
        return None
    (var,) = names
    start, step = (value_at(extent, {var.name: n}) for n in (0, 1))
    if step == start:
        return None
    found = (size - start) // (step - start)
    return (var.name, found) if value_at(extent, {var.name: found}) == size else None


def kernel_at(kernel: Kernel, values: Values) -> Kernel:
    """The kernel for given sizes, with numbers instead of arguments."""
    assert isinstance(kernel.sizes, Sizes)
    made = _At(values, kernel.sizes).mutate(kernel.body)
    params = tuple(t.at(values) for t in kernel.params)
    return replace(kernel, params=params, body=made, sizes=None)


class _At(Mutator):
    def __init__(self, values: Values, sizes: Sizes) -> None:
        self.values = values
        self.consts: dict[ex.Var, ex.Expr] = {ex.Var(n): ex.Const(values[n]) for n in sizes.names}

    def mutate_Tensor(self, at: Node) -> Node:
        assert isinstance(at, Tensor)
        return at.at(self.values)

    def mutate_Var(self, at: ex.Var) -> ex.Expr:
        return self.consts.get(at, at)

    def mutate_For(self, at: For) -> For:
        """A loop ``until`` an expression of sizes gets its value as ``stop``."""
        body = self.mutate(at.body)
        start = self.mutate(at.start)
        if at.until is None or free_vars(at.until) - self.consts.keys():
            return replace(
                at, body=body, start=start, until=None if at.until is None else self.mutate(at.until)
            )
        return replace(at, body=body, start=start, until=None, stop=value_at(at.until, self.values))
