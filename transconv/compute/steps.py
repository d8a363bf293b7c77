"""What a computation is made of: axes and the steps over them, with the text of each step.

``ComputeNames`` has what the names depend on: the axes of each, the reads that a ``where`` chooses from,
the values in coordinates. ``sweeps`` tells how often a computation loops over its reduced axes, and what
it does in each loop:

    read  x = X[n, k]                       sweep 0: x, top = max(x; k)
    let   top = max(x; k)                   sweep 1: x, e, total = sum(e; k)
    let   e = exp(x - top)                  sweep 2: x, e, store Y[n, k]
    let   total = sum(e; k)
    store Y[n, k] = e / total

A reduction is known at the end of its sweep; steps that depend on it belong to a later one. A step that
varies within a row is evaluated again in every sweep that needs it; other steps are evaluated once, before
the first sweep that needs them.

``argmax`` and ``argmin`` expand to two reductions. Elements are numbered over the axes in the order in
which they are named, the last one fastest; as in torch, the first of equal elements counts, and NaN is
greater and less than all other numbers. Sizes that are arguments stay names:

    let i = argmax(x; k)        expands to        let i_top = max(x; k)
                                                  let i = min(where(x == i_top or x != x, k, 768); k)
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from math import prod

from transconv import ir
from transconv.simplify import Facts, range_of, simplify

variable = lru_cache(maxsize=1 << 12)(ir.Var)
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
    extent: ir.Expr | None = None

    @property
    def var(self) -> ir.Var:
        """The variable of its positions."""
        return variable(self.name)


@dataclass(frozen=True, slots=True)
class Read:
    """``name = tensor[coordinates]``: an element seen through a view, ``fill`` where its mask is false."""

    name: str
    view: ir.View
    fill: float = 0.0

    @property
    def var(self) -> ir.Var:
        """The element as a variable of the tensor's type."""
        return variable(self.name, self.view.tensor.dtype)


@dataclass(frozen=True, slots=True)
class Value:
    """``name = value``; the value is an expression of axes and of names before it."""

    name: str
    value: ir.Expr

    @property
    def casts(self) -> bool:
        """Whether it is another value in another type."""
        e = self.value
        while isinstance(e, ir.Cast):
            e = e.x
        return isinstance(e, ir.Var) and e is not self.value

    @property
    def var(self) -> ir.Var:
        """The value as a variable of its type."""
        return variable(self.name, self.value.dtype)


@dataclass(frozen=True, slots=True)
class Reduction:
    """``name = op(value; axes)``; the result does not depend on these axes."""

    name: str
    op: str
    value: ir.Expr
    axes: tuple[str, ...]

    @property
    def var(self) -> ir.Var:
        """The result as a variable of the value's type."""
        return variable(self.name, self.value.dtype)

    @property
    def factors(self) -> tuple[ir.Var, ir.Var] | None:
        """The two variables of a product ``a*b``, with or without casts; None for other values."""
        if not isinstance(self.value, ir.Mul):
            return None
        a, b = uncast(self.value.a), uncast(self.value.b)
        return (a, b) if isinstance(a, ir.Var) and isinstance(b, ir.Var) and a is not b else None


@dataclass(frozen=True, slots=True)
class Write:
    """``tensor[coordinates] = value``; the value has the tensor's type. With ``op`` ``add``: ``+= value``,
    to a tensor that is zero at first; several points may add to one element. ``sum``, ``max``, ``min`` and
    ``squares`` reduce the values of all points that have one place (see analysis/statistics.py)."""

    view: ir.View
    value: ir.Expr
    op: str = ""

    @property
    def unrounded(self) -> ir.Expr:
        """The value before it is rounded to the tensor's type; what is added to others is rounded."""
        match self.value:
            case ir.Cast(x) if not self.op and x.dtype.kind == self.value.dtype.kind == "float":
                return x
        return self.value


Step = Read | Value | Reduction | Write
"""A line of a computation."""


# Names that generated kernels use.
RESERVED = {
    "pid",
    "program",
    "step",
    "part",
    "tile",
    "group",
    "in_group",
    "group_size",
    "turn",
    "share",
    "segment",
    "slot",
    "phase",
    "tl",
    "gl",
    "triton",
    "inf",
    *ir.DTYPES,
}


def is_word(name: str) -> bool:
    """Whether a name means something else in a generated kernel."""
    return name in RESERVED or keyword.iskeyword(name)


def why_not_named(name: str) -> str:
    """Why nothing in a computation can have this name; empty if it can."""
    if is_word(name):
        return f"'{name}' is a word of generated kernels; expected another name"
    return f"'{name}' is not a valid name: {reason}" if (reason := ir.why_not_name(name)) else ""


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
    def chosen(self) -> dict[ir.Var, tuple[Read, ...]]:
        """The values that are elements of tensors, and their reads: a read itself, and a value that a
        ``where`` chooses from several (a concatenation)."""
        found: dict[ir.Var, tuple[Read, ...]] = {}
        for s in self.steps:
            if isinstance(s, Read):
                found[s.var] = (s,)
            elif isinstance(s, Value) and (leaves := leaves_of(s.value)) and set(leaves) <= set(found):
                found[s.var] = tuple(dict.fromkeys(r for v in leaves for r in found[v]))
        return found

    @cached_property
    def made_of(self) -> dict[ir.Var, tuple[Read, ...]]:
        """The reads that a value is computed from elementwise. Values that depend on a reduction are left
        out."""
        found: dict[ir.Var, tuple[Read, ...]] = {}
        behind: set[ir.Var] = set()
        for s in self.steps:
            if isinstance(s, Read):
                found[s.var] = (s,)
            elif isinstance(s, Reduction) or (not isinstance(s, Write) and used(s) & behind):
                behind.add(s.var)
            elif isinstance(s, Value):
                reads = tuple(dict.fromkeys(r for v in used(s) for r in found.get(v, ())))
                found |= {s.var: tuple(sorted(reads, key=self.steps.index))} if reads else {}
        return found

    def main(self, v: ir.Var) -> Read | None:
        """The first read that varies along exactly the axes along which a value varies, or None."""
        return next((r for r in self.made_of.get(v, ()) if self.rooted[r.var] == self.rooted[v]), None)

    def fills_of(self, steps: Iterable[Read | Value]) -> set[float]:
        """The fill values of the reads that steps take elements from."""
        return {r.fill for s in steps for r in self.chosen.get(s.var, ())}

    @cached_property
    def rooted(self) -> dict[ir.Var, frozenset[str]]:
        """The axes that each name depends on."""
        found: dict[ir.Var, frozenset[str]] = {ir.Var(n): frozenset() for n in self.sizes}
        found |= {x.var: frozenset((x.name,)) for x in self.axes}
        for s in self.steps:
            if not isinstance(s, Write):
                own = frozenset(a for v in used(s) for a in found.get(v, (v.name,)))
                found[s.var] = own - frozenset(s.axes) if isinstance(s, Reduction) else own
        return found

    def roots(self, e: ir.Expr) -> frozenset[str]:
        """The axes that an expression depends on, directly or through values."""
        return frozenset(a for v in ir.free_vars(e) for a in self.rooted.get(v, (v.name,)))

    def told(self, view: ir.View) -> frozenset[ir.Var]:
        """The values that a view's coordinates mention: the indices of a gather."""
        return frozenset(v for d in view.dims for v in ir.free_vars(d.coord)) & self._values

    @cached_property
    def indices(self) -> frozenset[ir.Var]:
        """The values that the coordinates of any view mention."""
        return frozenset(v for s in self.steps if isinstance(s, (Read, Write)) for v in self.told(s.view))

    @cached_property
    def placing(self) -> tuple[Named, ...]:
        """The steps that make the values that coordinates mention."""
        return tuple(needed(self.steps, self.indices))

    @cached_property
    def chosen_from(self) -> tuple[Read, ...]:
        """The reads that values are chosen from."""
        values = [s.var for s in self.steps if isinstance(s, Value)]
        return tuple(dict.fromkeys(r for v in values for r in self.chosen.get(v, ())))

    @cached_property
    def _values(self) -> frozenset[ir.Var]:
        return frozenset(s.var for s in self.steps if not isinstance(s, Write))

    @cached_property
    def stand_ins(self) -> dict[ir.Var, ir.Expr]:
        """For every value in coordinates, the number of the point at which it is read, which estimates use
        instead: they take a gather for contiguous reads."""
        found: dict[ir.Var, ir.Expr] = {}
        for v in self.indices:
            at: ir.Expr = ir.Const(0)
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


def used(step: Step) -> set[ir.Var]:
    """The names that a step mentions, in its value and in the coordinates and conditions of its view."""
    found = set(ir.free_vars(step.value)) if not isinstance(step, Read) else set()
    if isinstance(step, (Read, Write)):
        found |= {v for d in step.view.dims for e in (d.coord, d.mask) for v in ir.free_vars(e)}
    return found


Named = Read | Value | Reduction
"""A step that makes a value."""


def needed(steps: Sequence[Step], names: Iterable[ir.Var]) -> list[Named]:
    """The steps that some names depend on, in order."""
    found, left = list[Named](), {*names}
    for step in reversed(steps):
        if not isinstance(step, Write) and step.var in left:
            left |= used(step)
            found.append(step)
    return found[::-1]


def uncast(e: ir.Expr) -> ir.Expr:
    """The expression without an outermost cast."""
    return e.x if isinstance(e, ir.Cast) else e


def leaves_of(value: ir.Expr) -> tuple[ir.Var, ...]:
    """The variables among which a value made of Selects alone chooses; else none."""
    if not isinstance(value, ir.Select):
        return ()
    found: list[ir.Var] = []
    for part in (value.yes, value.no):
        inner = (part,) if isinstance(part, ir.Var) else leaves_of(part)
        if not inner:
            return ()
        found += inner
    return tuple(found)


# -- the text ----------------------------------------------------------------------------------------


SELECTION = re.compile(r"\bselect\(")


def line(step: Step, computed: ir.DType) -> str:
    """The line of a step; ``computed``: the type of arithmetic."""
    match step:
        case Read(name, view, fill):
            return f"read   {name} = {_view(view)}{f' else {_spelled(fill)}' if fill else ''}"
        case Value(name, value):
            return f"let    {name} = {_value(value, computed)}"
        case Reduction(name, op, value, axes):
            return f"let    {name} = {op}({_value(value, computed)}; {' '.join(axes)})"
        case Write(view, value, op):  # without a store's cast to its tensor's type
            return f"store  {_view(view)} {'+' if op == 'add' else op}= {_value(uncast(value), computed)}"


def _spelled(number: float) -> str:
    """A number with as many digits as tell it from every other."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def _view(view: ir.View) -> str:
    coords = ", ".join(render(as_written(d.coord)) for d in view.dims)
    where = ir.all_of(conditions(view))
    said = "" if where is ir.TRUE else f" where {render(as_written(where))}"
    return f"{view.tensor.name}[{coords}]{said}"


def _value(e: ir.Expr, computed: ir.DType) -> str:
    """The text of an expression, without the casts that the parser adds; all others stay."""

    def is_added(cast: ir.Cast) -> bool:
        x = cast.x
        if isinstance(x, ir.Const):
            return True
        if not isinstance(x, ir.Var) or x.dtype.kind not in ("float", "int"):
            return False
        return cast.type is (
            computed if x.dtype.kind == "float" else ir.i32 if x.dtype.bits < 64 else ir.i64
        )

    return render(ir.rewrite(e, lambda at: at.x if isinstance(at, ir.Cast) and is_added(at) else at))


def render(e: ir.Expr) -> str:
    """The text of an expression, with ``where`` for the IR's ``select``."""
    return SELECTION.sub("where(", ir.readable(e))


def as_written(e: ir.Expr) -> ir.Expr:
    """A coordinate or condition without casts to index, which the text does not have."""
    return ir.rewrite(e, lambda at: at.x if isinstance(at, ir.Cast) and at.type is ir.index else at)


def conditions(view: ir.View) -> list[ir.Expr]:
    """The conditions of a view's mask other than that its coordinates are inside the tensor. One that says
    this once more is among them: it tells that indices may be outside."""
    inside = [
        c for d, n in zip(view.dims, view.tensor.bounds, strict=True) for c in (d.coord >= 0, d.coord < n)
    ]  # some twice, on a diagonal
    found: list[ir.Expr] = []
    for c in (c for d in view.dims for c in ir.conjuncts(d.mask)):
        if c in inside:
            inside.remove(c)
        else:
            found.append(c)
    return found


# -- sweeps -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep over the reduced axes. ``before``: steps of a whole row; ``steps``: steps of every element,
    in order, including the sweep's reductions and stores."""

    before: tuple[Step, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Sweeps:
    """All sweeps, and the steps of a whole row after the last one. Without a reduction there are no
    sweeps."""

    each: tuple[Sweep, ...]
    behind: tuple[Step, ...]


def sweeps(steps: tuple[Step, ...], reduced: Iterable[str]) -> Sweeps:
    """The fewest sweeps over the reduced axes that evaluate the steps; each reduction is over all of these
    axes."""
    known = _Levels(steps, reduced)
    count = 1 + max((known.level[i] for i in known.ends), default=-1)
    within = [known.needed(i for i in known.ends if known.level[i] == number) for number in range(count)]
    places = known.places(within)
    before = [
        tuple(s for i, s in enumerate(steps) if places.get(i) == number) for number in range(count + 1)
    ]
    each = [tuple(steps[i] for i in sorted(found)) for found in within]
    return Sweeps(tuple(Sweep(b, e) for b, e in zip(before, each, strict=False)), before[count])


class _Levels:
    """For each step, by its index: the steps that it uses, the number of sweeps that must end before it
    (``level``), and whether it varies within a row (``inside``). ``ends``: the reductions and stores of
    sweeps."""

    def __init__(self, steps: tuple[Step, ...], reduced: Iterable[str]) -> None:
        axes = {ir.Var(a) for a in reduced}
        self.steps = steps
        made: dict[ir.Var, int] = {}
        self.used: list[list[int]] = []
        self.level: list[int] = []
        self.inside: list[bool] = []
        for i, step in enumerate(steps):
            mentioned = used(step)
            needed = sorted(made[v] for v in mentioned if v in made)
            self.used.append(needed)
            self.level.append(max((self.level[j] + self.reduces(j) for j in needed), default=0))
            self.inside.append(
                self.reduces(i)
                or not axes.isdisjoint(mentioned)
                or any(self.inside[j] and not self.reduces(j) for j in needed)
            )
            if not isinstance(step, Write):
                made[step.var] = i
        self.ends = [
            i for i, s in enumerate(steps) if self.inside[i] and isinstance(s, (Reduction, Write))
        ]

    def reduces(self, i: int) -> bool:
        return isinstance(self.steps[i], Reduction)

    def needed(self, ends: Iterable[int]) -> set[int]:
        """The steps within a row that some ends need, including these."""
        found: set[int] = set()
        left = list(ends)
        while left:
            at = left.pop()
            if at not in found:
                found.add(at)
                left += [j for j in self.used[at] if self.inside[j] and not self.reduces(j)]
        return found

    def places(self, within: list[set[int]]) -> dict[int, int]:
        """The sweep before which each step of a whole row is evaluated: the first that needs it, for a
        store the earliest possible. A value that nothing needs is left out."""
        found: dict[int, int] = {}
        for number, sweep in reversed(list(enumerate(within))):
            found |= {j: number for i in sweep for j in self.used[i] if not self.inside[j]}
        for i in reversed(range(len(self.steps))):
            if self.inside[i]:
                continue
            if isinstance(self.steps[i], Write):
                found[i] = self.level[i]
            if i in found:
                for j in self.used[i]:
                    if not self.inside[j]:
                        found[j] = min(found[i], found.get(j, found[i]))
        return found


# -- the first of the largest or least elements ---------------------------------------------------------

EXTREMA = {"argmax": "max", "argmin": "min"}


def is_extreme(x: ir.Expr, top: ir.Expr) -> ir.Expr:
    """Whether an element equals the extreme ``top``; true for every NaN."""
    return ir.eq(x, top) | ir.ne(x, x)


def where_first(
    name: str, x: ir.Expr, top: ir.Var, axes: Sequence[str], sizes: Mapping[str, ir.Expr], facts: Facts
) -> Reduction:
    """The reduction that gives the number of the first element equal to ``top``, as i32 (i64 where the
    facts do not tell that there are fewer than 2^31 elements)."""
    count = simplify(prod((sizes[a] for a in axes), start=ir.as_expr(1)), facts)
    most = range_of(count, facts).hi
    whole = ir.i32 if most is not None and most <= ir.i32.limits[1] else ir.i64
    place: ir.Expr = ir.Var(axes[0])
    for a in axes[1:]:
        place = place * sizes[a] + ir.Var(a)
    none = ir.Const(count.value, whole) if isinstance(count, ir.Const) else ir.Cast(count, whole)
    hit = ir.Select(is_extreme(x, top), ir.Cast(place, whole), none)
    return Reduction(name, "min", hit, tuple(axes))
