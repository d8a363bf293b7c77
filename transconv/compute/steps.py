"""What a computation is made of: axes, and the steps over them.

Also here: dependencies of a computation's names: the axes of each, the reads that a ``where`` chooses
from, and the values in coordinates.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count

from transconv.ir import DTYPES, Cast, Const, Expr, Mul, Select, Var, View, free_vars, why_not_name

variable = lru_cache(maxsize=1 << 12)(Var)
"""The variable of a name and a type."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its name, its size, and its role. Roles: ``position``, of an image, or the number of an
    image; ``window``, an element of a sliding window; ``feature``, an element of the vector at a position;
    ``batch``, one of several independent products; ``part``, of a split sum; or empty. ``extent``: the
    size as an expression, if it is an argument; ``size`` is then the example."""

    name: str
    size: int
    role: str
    extent: Expr | None = None

    @property
    def var(self) -> Var:
        """The variable of its positions."""
        return variable(self.name)


@dataclass(frozen=True, slots=True)
class Read:
    """``name = tensor[coordinates]``: an element seen through a view, ``fill`` where its mask is false."""

    name: str
    view: View
    fill: float = 0.0

    @property
    def var(self) -> Var:
        """The element as a variable of the tensor's type."""
        return variable(self.name, self.view.tensor.dtype)


@dataclass(frozen=True, slots=True)
class Value:
    """``name = value``; the value is an expression of axes and of names before it."""

    name: str
    value: Expr

    @property
    def casts(self) -> bool:
        """Whether it is another value in another type."""
        e = self.value
        while isinstance(e, Cast):
            e = e.x
        return isinstance(e, Var) and e is not self.value

    @property
    def var(self) -> Var:
        """The value as a variable of its type."""
        return variable(self.name, self.value.dtype)


@dataclass(frozen=True, slots=True)
class Reduction:
    """``name = op(value; axes)``; the result does not depend on these axes."""

    name: str
    op: str
    value: Expr
    axes: tuple[str, ...]

    @property
    def var(self) -> Var:
        """The result as a variable of the value's type."""
        return variable(self.name, self.value.dtype)

    @property
    def factors(self) -> tuple[Var, Var] | None:
        """The two variables of a product ``a*b``, with or without casts; None for other values."""
        match self.value:
            case Mul((Cast(Var() as a) | (Var() as a)), (Cast(Var() as b) | (Var() as b))) if a is not b:
                return a, b
        return None


@dataclass(frozen=True, slots=True)
class Write:
    """``tensor[coordinates] = value``; the value has the tensor's type. With ``op`` ``add``: ``+= value``,
    to a tensor that is zero at first; several points may add to one element. ``sum``, ``max``, ``min`` and
    ``squares`` reduce the values of all points that have one place (see analysis/statistics.py)."""

    view: View
    value: Expr
    op: str = ""

    @property
    def unrounded(self) -> Expr:
        """The value before it is rounded to the tensor's type; what is added to others is rounded."""
        match self.value:
            case Cast(x) if not self.op and x.dtype.kind == self.value.dtype.kind == "float":
                return x
        return self.value


Step = Read | Value | Reduction | Write
"""A line of a computation."""


# Names that generated kernels use.
RESERVED = {"pid", "program", "step", "part", "tile", "group", "in_group", "group_size", "turn", "share",
            "segment", "slot", "phase", "tl", "gl", "triton", "inf", *DTYPES}


def is_word(name: str) -> bool:
    """Whether a name means something else in a generated kernel."""
    return name in RESERVED or keyword.iskeyword(name)


def why_not_named(name: str) -> str:
    """Why nothing in a computation can have this name; empty if it can."""
    if is_word(name):
        return f"'{name}' is a word of generated kernels; expected another name"
    return f"'{name}' is not a valid name: {reason}" if (reason := why_not_name(name)) else ""


def counted(stem: str) -> Iterator[str]:
    """stem0, stem1, ... without the words of generated kernels, such as the type i8."""
    return (name for n in count() if not is_word(name := f"{stem}{n}"))


@dataclass(frozen=True)
class ComputeNames:
    """The names of the axes and of the steps over them; ``sizes``: those that are arguments."""

    axes: tuple[Axis, ...]
    steps: tuple[Step, ...]
    sizes: tuple[str, ...] = ()

    @cached_property
    def all(self) -> frozenset[str]:
        """The names of axes and values."""
        return frozenset(x.name for x in self.axes) | {v.name for v in self._values}

    @cached_property
    def chosen(self) -> dict[Var, tuple[Read, ...]]:
        """The values that are elements of tensors, and their reads: a read itself, and a value that a
        ``where`` chooses from several (a concatenation)."""
        found: dict[Var, tuple[Read, ...]] = {}
        for s in self.steps:
            if isinstance(s, Read):
                found[s.var] = (s,)
            elif isinstance(s, Value) and (leaves := leaves_of(s.value)) and set(leaves) <= set(found):
                found[s.var] = tuple(dict.fromkeys(r for v in leaves for r in found[v]))
        return found

    @cached_property
    def made_of(self) -> dict[Var, tuple[Read, ...]]:
        """The reads that a value is computed from elementwise. Values that depend on a reduction are left
        out."""
        found: dict[Var, tuple[Read, ...]] = {}
        behind: set[Var] = set()
        for s in self.steps:
            if isinstance(s, Read):
                found[s.var] = (s,)
            elif isinstance(s, Reduction) or not isinstance(s, Write) and used(s) & behind:
                behind.add(s.var)
            elif isinstance(s, Value):
                reads = tuple(dict.fromkeys(r for v in used(s) for r in found.get(v, ())))
                found |= {s.var: tuple(sorted(reads, key=self.steps.index))} if reads else {}
        return found

    def main(self, v: Var) -> Read | None:
        """The first read that varies along exactly the axes along which a value varies, or None."""
        return next((r for r in self.made_of.get(v, ()) if self.rooted[r.var] == self.rooted[v]), None)

    def fills_of(self, steps: Iterable[Read | Value]) -> set[float]:
        """The fill values of the reads that steps take elements from."""
        return {r.fill for s in steps for r in self.chosen.get(s.var, ())}

    @cached_property
    def rooted(self) -> dict[Var, frozenset[str]]:
        """The axes that each name depends on."""
        found: dict[Var, frozenset[str]] = {Var(n): frozenset() for n in self.sizes}
        found |= {x.var: frozenset((x.name,)) for x in self.axes}
        for s in self.steps:
            if not isinstance(s, Write):
                own = frozenset(a for v in used(s) for a in found.get(v, (v.name,)))
                found[s.var] = own - frozenset(s.axes) if isinstance(s, Reduction) else own
        return found

    def roots(self, e: Expr) -> frozenset[str]:
        """The axes that an expression depends on, directly or through values."""
        return frozenset(a for v in free_vars(e) for a in self.rooted.get(v, (v.name,)))

    def told(self, view: View) -> frozenset[Var]:
        """The values that a view's coordinates mention: the indices of a gather."""
        return frozenset(v for d in view.dims for v in free_vars(d.coord)) & self._values

    @cached_property
    def indices(self) -> frozenset[Var]:
        """The values that the coordinates of any view mention."""
        return frozenset(v for s in self.steps if isinstance(s, (Read, Write)) for v in self.told(s.view))

    @cached_property
    def placing(self) -> tuple[Read | Value | Reduction, ...]:
        """The steps that make the values that coordinates mention."""
        found, wanted = list[Read | Value | Reduction](), {*self.indices}
        for s in reversed(self.steps):
            if not isinstance(s, Write) and s.var in wanted:
                found.append(s)
                wanted |= used(s)
        return tuple(reversed(found))

    @cached_property
    def chosen_from(self) -> tuple[Read, ...]:
        """The reads that values are chosen from."""
        values = [s.var for s in self.steps if isinstance(s, Value)]
        return tuple(dict.fromkeys(r for v in values for r in self.chosen.get(v, ())))

    @cached_property
    def _values(self) -> frozenset[Var]:
        return frozenset(s.var for s in self.steps if not isinstance(s, Write))

    @cached_property
    def stand_ins(self) -> dict[Var, Expr]:
        """For every value in coordinates, the number of the point at which it is read, which estimates use
        instead: they take a gather for contiguous reads."""
        found: dict[Var, Expr] = {}
        for v in self.indices:
            at: Expr = Const(0)
            for x in self.axes:
                at = at * x.size + x.var if x.name in self.rooted[v] else at
            found[v] = at
        return found


def fresh(name: str, taken: Iterable[str]) -> str:
    """The name, with underscores added until it is not taken."""
    held = set(taken)
    while name in held:
        name += "_"
    return name


def used(step: Step) -> set[Var]:
    """The names that a step mentions, in its value and in the coordinates and conditions of its view."""
    found = set(free_vars(step.value)) if not isinstance(step, Read) else set()
    if isinstance(step, (Read, Write)):
        found |= {v for d in step.view.dims for e in (d.coord, d.mask) for v in free_vars(e)}
    return found


def leaves_of(value: Expr) -> tuple[Var, ...]:
    """The variables among which a value made of Selects alone chooses; else none."""
    if not isinstance(value, Select):
        return ()
    found: list[Var] = []
    for part in (value.yes, value.no):
        inner = (part,) if isinstance(part, Var) else leaves_of(part)
        if not inner:
            return ()
        found += inner
    return tuple(found)
