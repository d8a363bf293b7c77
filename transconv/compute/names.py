"""Dependencies of a computation's names: the axes of each, the reads that a ``where`` chooses from, and
the values in coordinates."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from transconv.compute.steps import Axis, Read, Reduction, Step, Value, Write
from transconv.ir import DTYPES, Const, Expr, Select, Var, View, free_vars, why_not_name

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
