"""The text of a group: its stored values and all that they are made of, at positions of its axes.

A value is asked for at a position and writes the lines that it needs; what was asked before has a name.
Views become coordinates. Names are counted, so that groups that do the same have the same text, and one
kernel: blocks of a network repeat.

A tensor has the dims of its value until all its reads and stores are known. Then some fall out, or become
others, which count the same elements: what a schedule sees is a rectangle of axes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from transconv.compute import render
from transconv.graph.fusion.groups import FusionGroup
from transconv.graph.fusion.index_ir import (
    TYPES,
    ConstantValue,
    Counted,
    Indexed,
    Mapped,
    MovedView,
    Piece,
    PiecewiseIndex,
    PiecewisePart,
    ProductSum,
    Reduced,
)
from transconv.graph.fusion.sized_text import NAME, SizedText, braced
from transconv.graph.lowerings.table import number
from transconv.graph.lowerings.view_indexing import flattened
from transconv.graph.sizes import Index, Known, Length, SymbolicSize, dense_strides, like, packed
from transconv.ir import TRUE, ZERO, Expr, Var, all_of, conjuncts, free_vars, readable
from transconv.simplify import Facts, prove, simplify

Axes = Sequence[tuple[str, Length]]


@dataclass(slots=True)
class MemoryAccess:
    """A read or store: the tensor's name, its sizes and strides, coordinates, what else must hold."""

    tensor: str
    piece: Piece
    shape: list[Length]
    strides: list[Length]
    at: list[Expr]
    where: Expr = TRUE
    fill: float = 0.0

    def declared(self) -> str:
        """The tensor, as a text declares it."""
        sizes = ", ".join(map(braced, self.shape))
        is_dense = tuple(self.strides) == dense_strides(self.shape)
        order = "" if is_dense else f" strides({','.join(map(braced, self.strides))})"
        if order and any(isinstance(n, SymbolicSize) for n in self.shape) and (tag := self.order()):
            order = f" {tag}"
        return f"{self.tensor} {TYPES[self.piece.dtype].name} [{sizes}]{order}"

    def order(self) -> str | None:
        """The dims of a dense tensor as letters, outermost first; None for one with gaps."""
        inner = packed(self.shape, self.strides)
        if inner is None:
            return None
        alone = [d for d, n in enumerate(self.shape) if n == 1]
        order = sorted([*inner, *alone], key=lambda d: (like(self.strides[d]), like(self.shape[d])))
        if [d for d in order if d in inner] != inner:  # the order of the example is another one
            order = [*alone, *inner]
        return "".join("abcdefghijklmnopqrstuvwxyz"[d] for d in reversed(order))

    def written(self, words: str) -> str:
        """The line of a text. ``words``: ``read`` and the name that it gets, or ``store``, the name of
        what is stored, and what it is reduced by."""
        view = f"{self.tensor}[{', '.join(map(render, self.at))}]"
        view += f" where {render(self.where)}" if self.where is not TRUE else ""
        word, name, *op = words.split()
        if word == "store":
            return f"store  {view} {''.join(op)}= {name}"
        fill = f" else {self.fill!r}" if self.fill else ""
        return f"read   {name} = {view}{fill}"

    def neighbours(self, u: str, v: str, inner: Length) -> bool:
        """Whether the tensor has both axes as neighbouring dims, or neither."""
        has = [d for d, e in enumerate(self.at) if isinstance(e, Var) and e.name in (u, v)]
        if not has:
            return True
        if len(has) != 2 or has[1] != has[0] + 1:
            return False
        d = has[0]
        return (
            self.at[d] is Var(u)
            and self.at[d + 1] is Var(v)
            and self.shape[d + 1] == inner
            and self.strides[d] == self.strides[d + 1] * inner
        )

    def join(self, u: str, v: str) -> None:
        """Make one dim of two neighbours, if it has them, that counts with the first axis."""
        d = next((d for d, e in enumerate(self.at) if e is Var(u)), None)
        if d is not None:
            size = self.shape[d] * self.shape[d + 1]
            self._replace(range(d, d + 2), [size], [self.strides[d + 1]], [Var(u)])

    def _replace(
        self, dims: Sequence[int], sizes: Sequence[Length], strides: Sequence[Length], at: Sequence[Expr]
    ) -> None:
        """Other dims where the first of some stood."""
        first = min(dims)
        for d in sorted({*dims}, reverse=True):
            del self.shape[d], self.strides[d], self.at[d]
        self.shape[first:first], self.strides[first:first], self.at[first:first] = sizes, strides, at


def split(accesses: Iterable[MemoryAccess], axes: Axes, facts: Facts) -> None:
    """Dims that several axes count, of which some are names, become the dims of these axes."""
    for seen in _of_tensors(accesses):
        first = seen[0]
        for d in reversed(range(len(first.shape))):
            found = _counting(first.at[d], first.shape[d], axes, facts)
            if len(found) > 1 and all(a.at[d] is first.at[d] for a in seen):
                sizes = [n for _, n in found]
                steps = [prod(sizes[i + 1 :]) * first.strides[d] for i in range(len(sizes))]
                for a in seen:
                    a._replace([d], sizes, steps, [Var(name) for name, _ in found])


def shorten(accesses: Iterable[MemoryAccess]) -> None:
    """Leave out dims of size 1 that nothing looks for elsewhere."""
    for seen in _of_tensors(accesses):
        shape = seen[0].shape
        kept = [d for d, n in enumerate(shape) if n != 1 or any(a.at[d] is not ZERO for a in seen)]
        for a in seen:
            a.shape = [shape[d] for d in kept] or [1]
            a.strides, a.at = [a.strides[d] for d in kept] or [1], [a.at[d] for d in kept] or [ZERO]


def join(accesses: Iterable[MemoryAccess], axes: Axes, facts: Facts) -> None:
    """Dims that are the digits of one axis become its dim. They need not be neighbours: images may have
    their features in front of their rows."""
    for seen in _of_tensors(accesses):
        first = seen[0]
        for name, n in axes:
            own = [d for d, e in enumerate(first.at) if {v.name for v in free_vars(e)} == {name}]
            dims = sorted(own, key=lambda d: -like(first.strides[d]))
            if (
                len(dims) > 1
                and _count(first, dims, name, n, facts)
                and all(a.at[d] is first.at[d] for a in seen for d in dims)
            ):
                step = first.strides[dims[-1]]
                for a in seen:
                    a._replace(dims, [n], [step], [Var(name)])


def _of_tensors(accesses: Iterable[MemoryAccess]) -> list[list[MemoryAccess]]:
    """The accesses of each tensor."""
    tensors: dict[str, list[MemoryAccess]] = {}
    for a in accesses:
        tensors.setdefault(a.tensor, []).append(a)
    return [*tensors.values()]


def _counting(at: Expr, size: Length, axes: Axes, facts: Facts) -> Axes:
    """The axes that count a dim together."""
    own = {v.name for v in free_vars(at)}
    found = [(name, n) for name, n in axes if name in own]
    if not any(isinstance(n, SymbolicSize) for _, n in found) or prod(n for _, n in found) != size:
        return []
    flat = flattened([Var(name) for name, _ in found], [n for _, n in found])
    return found if simplify(flat, facts) is at else []


def _count(a: MemoryAccess, dims: Sequence[int], name: str, size: Length, facts: Facts) -> bool:
    """Whether dims of an access, outermost first, count an axis of a size in even steps of memory."""
    sizes, steps = [a.shape[d] for d in dims], [a.strides[d] for d in dims]
    even = all(s == n * t for n, s, t in zip(sizes[1:], steps, steps[1:], strict=False))
    return (
        even
        and prod(sizes) == size
        and (simplify(flattened([a.at[d] for d in dims], sizes), facts) is Var(name))
    )


@dataclass(frozen=True, slots=True)
class GroupText:
    """A text, what it reads and what it stores in the order of its tensors. ``sized``: where sizes are
    names; the text is then the named form, or if there is none, that of the example."""

    text: str
    given: tuple[Piece, ...]
    stored: tuple[Piece, ...]
    sized: SizedText | None = None


Line = str | tuple[str, MemoryAccess]  # a let, or a read or store with its words around the access


def is_number(piece: Piece) -> bool:
    """Whether a text has a piece as a number."""
    return is_number(piece.of) if isinstance(piece, MovedView) else isinstance(piece, ConstantValue)


def typed(piece: Piece, text: str) -> str:
    """A number in a piece's type, if that is of whole numbers: of numbers alone texts compute floats."""
    dtype = TYPES[piece.dtype]
    return f"{dtype.name}({text})" if dtype.kind == "int" else text


@dataclass(slots=True)
class Writer:
    """The lines so far. ``tensors``: their names, by what they hold and whether it is read after the sum
    of a product, which may see its factors through boxes. ``strides``: of a piece that is in memory for
    this group; ``elements``: the names of what is an element of a tensor, or chosen from such, as memory
    has it; ``places``: of what tells places in others."""

    group: FusionGroup
    strides: Callable[[Piece], tuple[Length, ...] | None]
    lines: list[Line] = field(default_factory=list)
    names: dict[tuple[object, ...], str] = field(default_factory=dict)
    tensors: dict[tuple[Piece, bool], str] = field(default_factory=dict)
    behind: bool = False
    elements: set[str] = field(default_factory=set)
    places: set[str] = field(default_factory=set)
    count: int = 0
    known: Known = field(default_factory=Known)  # of its sizes

    def written(self) -> GroupText:
        """The text of the group's stores."""
        if self.group.product is not None:  # what the epilogue reads stands in it
            self.value(*next(iter(self.group.at.items())))
            self.behind = True
        stores = []
        self.group.stores.sort(key=lambda p: p in self.group.statistics)  # behind the result
        for i, piece in enumerate(self.group.stores):
            at = self.group.at[piece]
            found = self.group.statistics.get(piece)
            name = self.value(piece, at) if found is None else self.value(found.of, found.at)
            words = f"store {name} {found.op if found else ''}".strip()
            stores.append((words, self.access(piece, f"Y{i}", at)))
        self.lines += stores
        split(self.accesses(), self.group.axes, self.group.facts)
        product = self.group.product
        if product is None or product.relation is None:  # a convolution's tensors keep their dims
            shorten(self.accesses())
        if product is not None and product.relation is None:
            join(self.accesses(), self.group.axes, self.group.facts)
        self.merge()
        given = [p for p, _ in self.tensors if p not in self.group.stores]
        ends = tuple(given), tuple(self.group.stores)
        text = self.text()
        if not self.known.like or not NAME.search(text):
            return GroupText(text, *ends)
        sized = self.sized(text)
        return GroupText(sized.at(sized.like) if sized.refused else sized.named, *ends, sized)

    def sized(self, text: str) -> SizedText:
        """The text with what its names need."""
        named = [a for a in self.accesses() if not all(isinstance(n, int) for n in a.strides)]
        gaps = next((a.tensor for a in named if a.order() is None), "")
        spaces = [
            [braced(n) for name, n in self.group.axes if (name in self.group.reduced) is inside]
            for inside in (False, True)
        ]
        dims = {a.tensor: [braced(n) for n in a.shape] for a in self.accesses()}
        derived = {v.name: f"({readable(e)})" for v, e in self.known.derived.items() if isinstance(v, Var)}
        return SizedText(
            text,
            list(dims.values()),
            spaces,
            self.known.like,
            derived,
            f"{gaps} has gaps in memory" if gaps else "",
        )

    # -- values ----------------------------------------------------------------------------------

    def value(self, piece: Piece, at: Index) -> str:
        """The name of a value at a position, or the number that it is."""
        return self.masked(piece, self.group.simple(at), TRUE, 0.0)

    def simple(self, e: Expr) -> Expr:
        return simplify(e, self.group.facts)

    def masked(self, piece: Piece, at: Index, where: Expr, fill: float) -> str:
        """The same where a condition holds, else a number."""
        if isinstance(piece, ConstantValue):
            value = number(piece.value)
            if where is TRUE or piece.value == fill:
                return value
            return self.chosen(where, typed(piece, value), fill)
        where = self.shorter(where)
        key = (piece, at, where, fill)
        if key not in self.names:
            self.names[key] = self.write(piece, at, where, fill)
        return self.names[key]

    def shorter(self, where: Expr) -> Expr:
        """A condition without what is known."""
        parts = [simplify(c, self.group.facts) for c in conjuncts(where)]
        return all_of([c for c in parts if not prove(c, self.group.facts)])

    def write(self, piece: Piece, at: Index, where: Expr, fill: float) -> str:
        if self.strides(piece) is not None:
            return self.read(piece, at, where, fill)
        match piece:
            case MovedView():
                return self.masked(piece.of, self.group.simple(piece.move(at)), where, fill)
            case PiecewiseIndex():
                return self.choice(piece.parts, at, where, fill)
        plain = self.value(piece, at) if where is not TRUE else ""
        if where is not TRUE:
            return self.chosen(where, plain, fill)
        match piece:
            case Indexed():
                names = [Var(self.value(p, self.group.simple(move(at)))) for p, move in piece.told]
                self.places |= {v.name for v in names}
                return self.masked(piece.of, self.group.simple(piece.move(at, names)), TRUE, 0.0)
            case Counted():
                return self.let("i", f"{TYPES[piece.dtype].name}({render(self.simple(piece.count(at)))})")
            case Mapped():
                names_ = self.operands(piece, at)
                more = [f"({render(self.simple(e))})" for e in piece.place(at)] if piece.place else []
                return self.let(piece.label, piece.write(*names_, *more))
            case Reduced():
                inner = self.group.within[piece]
                names_ = self.operands(piece, inner)
                axes = " ".join(self.group.axes_of(inner, piece.dims))
                return self.let(piece.label, f"{piece.op}({piece.write(*names_)}; {axes})")
            case ProductSum():
                own = self.group.product  # the piece, or another part of it
                assert own is not None
                a, b = (
                    self.rounded(f.of, self.masked(f.of, self.group.simple(f.at), f.where, 0.0))
                    for f in own.factors
                )
                return self.let("sum", f"sum({a}*{b}; {' '.join(own.summed)})")
        raise AssertionError(piece)

    def operands(self, piece: Mapped | Reduced, at: Index) -> list[str]:
        """The values of its inputs. Whole numbers beside none with a type have the result's."""
        names = [self.value(x, at) for x in piece.inputs]
        whole = [x for x in piece.inputs if TYPES[x.dtype].kind == "int"]
        if not all(map(is_number, whole)):
            return names
        return [typed(piece, n) if x in whole else n for x, n in zip(piece.inputs, names, strict=True)]

    def rounded(self, piece: Piece, name: str) -> str:
        """A factor in its own type: the matrix unit takes it as it would take an element in memory."""
        narrow = piece.dtype.itemsize < 4 and name not in self.elements
        return f"{TYPES[piece.dtype].name}({name})" if narrow else name

    def choice(self, parts: Sequence[PiecewisePart], at: Index, where: Expr, fill: float) -> str:
        """The first part whose condition holds."""
        first, *rest = parts
        here = self.shorter(first.where(at))
        moved = self.group.simple(first.move(at))
        if not rest or here is TRUE:
            return self.masked(first.of, moved, where, fill)
        other = rest[0].of
        beyond = other.value if isinstance(other, ConstantValue) else None
        if len(rest) == 1 and isinstance(beyond, (int, float)) and (where is TRUE or beyond == fill):
            return self.masked(first.of, moved, all_of([*conjuncts(where), *conjuncts(here)]), beyond)
        yes = self.masked(first.of, moved, where, fill)
        no = self.choice(rest, at, where, fill)
        if all(is_number(part.of) for part in parts):
            yes = typed(first.of, yes)
        name = self.let("cat", f"where({render(here)}, {yes}, {no})")
        if {yes, no} <= self.elements:
            self.elements.add(name)
        return name

    def chosen(self, where: Expr, name: str, fill: float) -> str:
        return self.let("inside", f"where({render(where)}, {name}, {fill!r})")

    def let(self, label: str, text: str) -> str:
        self.count += 1
        name = f"{re.sub('[^A-Za-z0-9]+', '_', label) or 'v'}_{self.count}"
        self.lines.append(f"let    {name} = {text}")
        return name

    # -- memory ----------------------------------------------------------------------------------

    def read(self, piece: Piece, at: Index, where: Expr, fill: float) -> str:
        """A read, masked where the coordinates leave the tensor, too."""
        name = self.tensors.setdefault((piece, self.behind), f"X{len(self.tensors)}")
        found = self.access(piece, name, at)
        # Where values tell a place, a condition that it is inside says that it may be outside, too.
        bounds = {
            self.simple(c)
            for e, n in zip(found.at, found.shape, strict=True)
            if not {v.name for v in free_vars(e)} & self.places
            for c in (e >= 0, e < n)
        }
        found.where = all_of([c for c in conjuncts(where) if c not in bounds])
        found.fill = fill
        self.count += 1
        element = f"x_{self.count}"
        self.elements.add(element)
        self.lines.append((f"read {element}", found))
        return element

    def access(self, piece: Piece, name: str, at: Index) -> MemoryAccess:
        """Every dim of the piece."""
        held = self.strides(piece)
        strides = self.group.strides[piece] if held is None else held
        return MemoryAccess(name, piece, [*piece.shape], [*strides], [*self.group.simple(at)])

    # -- axes ------------------------------------------------------------------------------------

    def accesses(self) -> list[MemoryAccess]:
        return [line[1] for line in self.lines if isinstance(line, tuple)]

    def merge(self) -> None:
        """Neighbouring axes that all tensors have as neighbours become one."""
        axes = self.group.axes
        fixed = {
            w
            for line in self.lines
            if isinstance(line, str)
            for w in re.findall(r"\w+", re.sub(r";[^)]*\)", "", line))
        }
        fixed |= {
            v.name
            for a in self.accesses()
            for e in (a.where, *(e for e in a.at if not isinstance(e, Var)))
            for v in free_vars(e)
        }
        i = 0
        while i + 1 < len(axes):
            (u, n), (v, m) = axes[i], axes[i + 1]
            same = (u in self.group.reduced) == (v in self.group.reduced) and fixed.isdisjoint(
                NAME.findall(f"{n} {m}")
            )
            if (
                self.group.product is None
                and same
                and not {u, v} & fixed
                and all(a.neighbours(u, v, m) for a in self.accesses())
            ):
                for a in self.accesses():
                    a.join(u, v)
                axes[i : i + 2] = [(u, n * m)]
                pattern = re.compile(rf"(;[^;)]*?\b{u}) {v}\b")
                self.lines = [pattern.sub(r"\1", s) if isinstance(s, str) else s for s in self.lines]
            else:
                i += 1

    # -- the text --------------------------------------------------------------------------------

    def text(self) -> str:
        """All lines, with axes and names that are counted."""
        seen = " ".join(s if isinstance(s, str) else " ".join(map(str, s[1].at)) for s in self.lines)
        used = set(re.findall(r"\w+", seen))
        axes = [(name, n) for name, n in self.group.axes if n != 1 or name in used]
        if not axes:  # a number: a store has an axis
            axes = [("one", 1)]
            for line in self.lines:
                if isinstance(line, tuple) and line[0].startswith("store"):
                    line[1].at = [Var("one")]
        free = " ".join(f"{name}={braced(n)}" for name, n in axes if name not in self.group.reduced)
        inner = " ".join(f"{name}={braced(n)}" for name, n in axes if name in self.group.reduced)
        math = f" math={self.group.math}" if self.group.math != "tf32" else ""
        lines = [f"compute {self.group.name}{math}"]
        lines += [f"tensor {a.declared()}" for a in {a.tensor: a for a in self.accesses()}.values()]
        lines.append("axes   " + " | ".join(filter(None, [free, inner])))
        lines += [line if isinstance(line, str) else line[1].written(line[0]) for line in self.lines]
        return "\n    ".join(lines)
