"""The parser of a computation's text (``parse``), and the description of what was read (``describe``).

    compute max_pool
        sizes  w=56 in 1..4096, w % 8 == 0                 names for sizes; see symbolic_compute.py
        tensor x f16 [n=8, c=64, h=56, w=56] nhwc          default: f32, dense, as large as is read
        axes   n=8 c=64 oh=28 ow=28 | kh=3 kw=3            the bar has no meaning
        read   a = x[n, c, oh*2 + kh - 1, ow*2 + kw - 1] else -inf
        let    m = max(a; kh kw)
        store  y[n, c, oh, ow] = m

Reads outside of a tensor give 0, or the value after ``else``; ``where`` after a view adds a condition.
Arithmetic is in f32 (f64 if a declared tensor is f64); a store rounds to its tensor's type, or adds to the
tensor (``+=``), which is 0 at first. Expressions are Python's (expressions.py). A product may also store
reductions of its result, ``store M[n] sum= y``, and ``max=``, ``min=`` and ``squares=``
(analysis/statistics.py). Two semicolons also end a line, so that ``one_line`` can write a text without
line ends.

A description has axes with kinds, views with coordinates, masks and proofs:

    compute strided_1_1
        M  rows     n=32  qh=28  qw=28
        N  columns  f=64
        K  summed   th=2  tw=2  c=128
        A = X[n, c, oh = qh - th + 1, ow = qw - tw + 1]
            always true: (qh*2 + 2 - th*2) % 2 == 0    qh*2 - th*2 + 2 is a multiple of 2
            kept:        oh < 28                qh - th + 1 in 0..28 by qh in 0..27, th in 0..1
        ...
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from transconv import ir
from transconv.compute.analysis.axis_roles import with_prologues, with_roles
from transconv.compute.analysis.statistics import STATISTICS
from transconv.compute.compute import Compute
from transconv.compute.expressions import (
    ComputeScope,
    coordinates_of,
    expression,
    facts_of_axes,
    facts_of_scope,
    shortened,
    sized,
    viewed,
)
from transconv.compute.steps import (
    EXTREMA,
    Axis,
    Read,
    Reduction,
    Step,
    Value,
    Write,
    as_written,
    uncast,
    where_first,
    why_not_named,
)
from transconv.compute.symbolic_compute import of_sizes, sizes_of
from transconv.simplify import Facts, facts_of, prove, reason, simplify
from transconv.support import ComputeError, LayoutError, nearest

END = ";;"
"""The end of a line in a text that is written in one line."""
STEPS = ("read", "let", "store")
WORDS = ("compute", "sizes", "tensor", "axes", *STEPS)


def parse(text: str) -> Compute:
    """Parse a computation. Raises ComputeError, with a message of one line that has the line's number."""
    given = text.replace(END, "\n").splitlines()
    lines = [(n, line.partition("#")[0].strip()) for n, line in enumerate(given, 1)]
    lines = [(n, line) for n, line in lines if line]
    if not lines or lines[0][1].split()[0] != "compute":
        told = f", not with '{lines[0][1][:60]}'; of a file give its text" if lines else ""
        raise ComputeError(f"line 1: a computation begins with 'compute NAME'{told}")
    reader = Reader()
    for number, line in lines:
        word, _, rest = line.partition(" ")
        try:
            if reason := ir.why_not_text(line):
                raise ComputeError(reason)
            if word not in WORDS:
                hint = nearest(word, WORDS)
                if "[" in word and "=" in line:
                    hint = f"; write: store {line}"
                raise ComputeError(f"'{word}' is unknown; expected one of {' '.join(WORDS)}{hint}")
            if word in STEPS:
                reader.steps.append((word, rest.strip(), number))
            else:
                getattr(reader, f"line_{word}")(rest.strip())
        except ComputeError as error:
            raise ComputeError(f"line {number}: {error}") from None
    return reader.made()


@lru_cache(maxsize=1024)
def one_line(text: str) -> str:
    """The text of a computation as one line, without comments."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return f" {END} ".join(line for line in lines if line)


class Reader:
    """Collects the lines of a text; ``made`` builds the computation."""

    def __init__(self) -> None:
        self.name, self.math = "", "tf32"
        self.named: ir.Sizes | None = None
        self.axes: dict[str, int] = {}
        self.extents: dict[str, ir.Expr] = {}  # of axes whose sizes are arguments
        self.tensors: dict[str, ir.Tensor] = {}
        # Words, texts and numbers of lines that are parsed after all tensors are known.
        self.steps: list[tuple[str, str, int]] = []

    def line_compute(self, rest: str) -> None:
        if self.name:
            raise ComputeError("a second 'compute'; expected one computation")
        name, *words = rest.split() or [""]
        self.name = named(name, "a computation")
        for word in words:
            key, _, value = word.partition("=")
            if key != "math" or value not in ("ieee", "tf32", "tf32x3"):
                raise ComputeError(f"'{word}' is unknown; expected math=ieee, tf32 or tf32x3")
            self.math = value

    def line_sizes(self, rest: str) -> None:
        if self.named or self.axes or self.tensors:
            raise ComputeError("sizes stand in one line, before tensors and axes")
        self.named = sizes_of(rest)
        for name in self.named.names:
            if named(name, "a size") in ir.LAUNCH:  # sizes are parameters, and keep their names
                raise ComputeError(
                    f"'{name}' is a word of Triton's launches; expected another name for a size"
                )

    def extent(self, text: str) -> tuple[int, ir.Expr]:
        """A size as a number (the example if it has names) and as an expression of names."""
        if text.isdigit() or self.named is None:
            return int(text), ir.Const(int(text))
        made = simplify(of_sizes(text, self.named))
        if made.dtype is not ir.index or ir.find(made, ir.Div):
            raise ComputeError(f"size '{text}'; expected whole numbers and names of sizes")
        return ir.value_at(made, self.named.like), made

    def line_axes(self, rest: str) -> None:
        for word in rest.replace("|", " ").split():
            name, _, size = word.partition("=")
            if not size.isdigit() and (self.named is None or not size):
                raise ComputeError(f"axis '{word}'; expected name=size, such as n=32")
            if name in self.axes:
                raise ComputeError(f"axis '{name}' is named twice; expected it once")
            if self.named and name in self.named.names:
                raise ComputeError(f"'{name}' is a size already; expected another name for an axis")
            self.axes[named(name, "an axis")], extent = self.extent(size)
            if ir.free_vars(extent):
                self.extents[name] = extent

    def line_tensor(self, rest: str) -> None:
        found = re.fullmatch(r"(\w+)\s+(\w+)\s+\[(.*?)\]\s*(.*)", rest)
        if found is not None and found[2] not in _types():
            raise ComputeError(
                f"'{found[2]}' is no type; expected one of {' '.join(_types())}"
                f"{nearest(found[2], _types(), ir.ELSEWHERE)}"
            )
        if found is None:
            raise ComputeError(
                f"tensor '{rest}'; expected a name, a type and sizes, such as "
                "x f16 [n=8, c=64] (types: " + " ".join(_types()) + ")"
            )
        sizes = [[w.strip() for w in word.rpartition("=")] for word in found[3].split(",") if word.strip()]
        if not all(size.isdigit() or (self.named and size) for _, _, size in sizes):
            raise ComputeError(
                f"sizes [{found[3]}] of tensor '{found[1]}'; expected whole numbers with commas between"
            )
        extents = tuple(self.extent(size) for _, _, size in sizes)
        shape = tuple(n for n, _ in extents)
        dims = tuple(name or f"{found[1]}_{i}" for i, (name, _, _) in enumerate(sizes))
        dtype = ir.type_named(found[2])
        try:
            layout = ir.Layout.parse(found[4], dtype, shape) if found[4] else ir.Layout.dense(dtype, shape)
        except LayoutError as error:
            raise ComputeError(f"tensor '{found[1]}': {error}") from None
        sized = tuple(e for _, e in extents) if any(ir.free_vars(e) for _, e in extents) else ()
        steps = layout.strides() if sized and not layout.is_packed else ()
        is_slice = bool(steps) and not any(map(ir.free_vars, (sized[b.dim] for b in layout.blocks[1:])))
        if sized and (not (layout.is_packed or is_slice) or layout.strides() is None or layout.offset):
            raise ComputeError(
                f"tensor '{found[1]}' has sizes that are arguments and the layout "
                f"{found[4]}; expected a dense one, without blocks, or one of strides where only the size "
                "of the longest is an argument"
            )
        self.tensors[named(found[1], "a tensor")] = ir.Tensor(
            found[1], dims, shape, layout, extents=sized, pitches=tuple(map(ir.as_expr, steps or ()))
        )

    # -- the whole -------------------------------------------------------------------------------

    def made(self) -> Compute:
        """The computation. Raises ComputeError."""
        if not self.axes:
            raise ComputeError("there are no axes; expected a line such as: axes m=64 n=32 | k=128")
        if not any(word == "store" for word, _, _ in self.steps):
            raise ComputeError("nothing is stored; expected a line such as: store y[m, n] = s")
        given = frozenset(
            rest.partition("=")[0].strip() for word, rest, _ in self.steps if word != "store"
        )
        scope = ComputeScope(self.axes, self._type(), given=given, extents=self.extents, named=self.named)
        steps, reader = list[Step](), StepReader(scope, self.tensors)
        for word, rest, number in self.steps:
            try:
                steps += getattr(reader, word)(rest)
            except ComputeError as error:
                raise ComputeError(f"line {number}: {word} {shortened(rest)}: {error}") from None
        axes = tuple(Axis(n, size, "", self.extents.get(n)) for n, size in self.axes.items())
        return with_roles(
            with_prologues(Compute(self.name, axes, tuple(steps), self.math, named=self.named))
        )

    def _type(self) -> ir.DType:
        """The type of arithmetic: f64 if a declared tensor is f64, else f32."""
        return ir.f64 if any(t.dtype is ir.f64 for t in self.tensors.values()) else ir.f32


def _types() -> list[str]:
    known = [t for t in ir.DTYPES.values() if t.torch and not t.within]
    return [*(t.name for t in known), *(name for t in known for name in t.aliases)]


# = or +=, sum= and the like, but not the comparisons in a condition before it
STORED = re.compile(rf"(\+|\b(?:{'|'.join(STATISTICS)}))?(?<![=<>!])=(?!=)")
NUMBERS = {"inf": float("inf"), "-inf": float("-inf")}


class StepReader:
    """Makes steps of lines. ``scope``: the names that have a meaning; ``tensors``: the declared ones, and
    those that a line is the first to mention."""

    def __init__(self, scope: ComputeScope, tensors: dict[str, ir.Tensor]) -> None:
        self.scope, self.tensors = scope, tensors
        self.reductions: dict[tuple[str, ir.Expr, tuple[str, ...]], Reduction] = {}

    def read(self, rest: str) -> Iterator[Step]:
        """The step of ``x = X[m, k] else fill``."""
        scope = self.scope
        name, equals, seen = rest.partition("=")
        view, _, fill = seen.partition(" else ")
        if not equals:
            raise ComputeError("expected name = tensor[coordinates]")
        name = scope.new(named(name.strip(), "a value"))
        given, coords, condition = coordinates_of(view, scope)
        tensor = self.tensors.get(given) or sized(named(given, "a tensor"), coords, scope, ir.f32)
        self.tensors[given] = tensor
        beyond = _number(fill)
        if not ir.is_near(beyond, tensor.dtype):
            raise ComputeError(
                f"else {fill.strip()} is no number of {tensor.dtype}; expected one that "
                f"elements of '{tensor.name}' may have"
            )
        made = Read(name, viewed(tensor, coords, condition, scope), beyond)
        scope.values[name] = made.var
        scope.reads.add(made.var)
        yield made

    def let(self, rest: str) -> Iterator[Step]:
        """The steps of ``y = expression``."""
        scope = self.scope
        name, equals, value = rest.partition("=")
        if not equals:
            raise ComputeError("expected name = expression")
        name = scope.new(named(name.strip(), "a value"))
        yield from self._computed(name, value.strip())

    def store(self, rest: str) -> Iterator[Step]:
        """The steps of ``Y[m] = expression``."""
        scope = self.scope
        view, *values = STORED.split(rest, maxsplit=1)
        if not values:
            raise ComputeError("expected tensor[coordinates] = expression")
        op, value = values
        given, coords, condition = coordinates_of(view, scope)
        *before, last = self._computed("", value.strip())
        yield from before
        assert isinstance(last, Value)
        dtype = last.value.dtype if last.value.dtype.kind == "float" else scope.type
        tensor = self.tensors.get(given) or sized(named(given, "a tensor"), coords, scope, dtype)
        self.tensors[given] = tensor
        yield Write(
            viewed(tensor, coords, condition, scope),
            _stored(last.value, tensor.dtype),
            "add" if op == "+" else op or "",
        )

    def _computed(self, name: str, text: str) -> Iterator[Step]:
        """The steps of an expression: its reductions, innermost first, then the rest as a Value."""
        scope = self.scope
        while found := _innermost(text):
            begin, end, op, value, axes = found
            whole = name and text[:begin].strip() == text[end:].strip() == ""
            own = name if whole else scope.unnamed(f"{op}_{len(scope.values)}")
            if op in EXTREMA:
                yield from self._placed(own, op, value, axes)
            else:
                made = _reduced(own, op, value, axes, scope)
                self.reductions[made.op, made.value, made.axes] = made
                yield made
            if whole:
                return
            text = f"{text[:begin]}{own}{text[end:]}"
        rest = expression(text, scope)
        if name and isinstance(rest, ir.Select) and (choice := _choice(rest, scope)) is not None:
            rest = choice
            scope.reads.add(ir.Var(name, rest.dtype))
        if name and rest.dtype.kind == "index":
            scope.positions[name] = rest
        if name:
            scope.values[name] = ir.Var(name, rest.dtype)
        yield Value(name, rest)

    def _placed(self, name: str, op: str, value: str, axes: str) -> Iterator[Step]:
        """The steps of an argmax or argmin."""
        scope = self.scope
        term, over = _term(value, scope), _reduced_axes(op, axes, scope)
        top = self.reductions.get((EXTREMA[op], term, over))
        if top is None:
            if not isinstance(uncast(term), ir.Var):
                made = Value(scope.unnamed(f"{name}_of"), term)
                scope.values[made.name] = term = made.var
                yield made
            top = Reduction(scope.unnamed(f"{name}_top"), EXTREMA[op], term, over)
            scope.values[top.name] = top.var
            yield top
        found = where_first(name, term, top.var, over, scope.lengths, facts_of_scope(scope))
        scope.values[name] = found.var
        yield found


def _choice(value: ir.Expr, scope: ComputeScope) -> ir.Expr | None:
    """``where(condition, x, y)`` of reads of one type, without the casts to the type of arithmetic, so
    that elements keep their type and bits. None for other values."""
    if isinstance(value, ir.Cast) and value.x in scope.reads:
        return value.x
    if not isinstance(value, ir.Select):
        return None
    yes, no = _choice(value.yes, scope), _choice(value.no, scope)
    same = yes is not None and no is not None and yes.dtype is no.dtype
    return ir.Select(value.cond, yes, no) if same and yes is not None and no is not None else None


def _reduced(name: str, op: str, value: str, axes: str, scope: ComputeScope) -> Reduction:
    made = Reduction(name, op, _term(value, scope), _reduced_axes(op, axes, scope))
    scope.values[name] = made.var
    return made


def _reduced_axes(op: str, axes: str, scope: ComputeScope) -> tuple[str, ...]:
    names = tuple(axes.split())
    for axis in names:
        if axis not in scope.axes:
            raise ComputeError(
                f"'{axis}' in {op}(...; {axes.strip()}) is no axis; expected some of "
                f"{' '.join(scope.axes)}"
            )
    return names


def _term(value: str, scope: ComputeScope) -> ir.Expr:
    """The term of a reduction; booleans and positions are cast to the type of arithmetic."""
    term = expression(value, scope)
    return term if term.dtype.kind in ("float", "int") else ir.Cast(term, scope.type)


def _innermost(text: str) -> tuple[int, int, str, str, str] | None:
    """The last reduction of a text, as (begin, end, operation, value, axes), or None. It is an innermost
    one, because a reduction inside another begins after it."""
    for found in reversed([*re.finditer(rf"\b({'|'.join((*ir.REDUCERS, *EXTREMA))})\(", text)]):
        depth, at, cut = 1, found.end(), -1
        while at < len(text) and depth:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            cut = at if text[at] == ";" and depth == 1 else cut
            at += 1
        if depth:
            raise ComputeError(f"'{text}' has an open parenthesis; expected as many ) as (")
        if cut >= 0:
            return found.start(), at, found[1], text[found.end() : cut], text[cut + 1 : at - 1]
    return None


def _stored(value: ir.Expr, dtype: ir.DType) -> ir.Expr:
    """The value cast to the tensor's type; a read of this type is stored without casts, with its bits."""
    if isinstance(value, ir.Cast) and isinstance(value.x, ir.Var) and value.x.dtype is dtype:
        return value.x
    return ir.Cast(value, dtype)


def named(text: str, what: str) -> str:
    """A name. Raises ComputeError for text that is none, with what it was to name."""
    if reason := why_not_named(text):
        raise ComputeError(f"{reason} for {what}" if reason.endswith("name") else f"{reason} ({what})")
    return text


def _number(text: str) -> float:
    text = text.strip()
    if not text:
        return 0.0
    try:
        return NUMBERS[text] if text in NUMBERS else float(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError):
        raise ComputeError(f"else {text}; expected a number, inf or -inf") from None


KINDS = (("B", "groups"), ("M", "rows"), ("N", "columns"), ("K", "summed"))
WIDTH = 30  # characters of a condition, so that reasons are aligned


@lru_cache(maxsize=64)
def axis_facts(compute: Compute) -> Facts:
    """The ranges of the axes: 0 to size - 1, for all values of sizes that are arguments."""
    extents = {x.name: x.extent for x in compute.axes if x.extent is not None}
    return facts_of_axes({x.name: x.size for x in compute.axes}, facts_of(compute.named), extents)


def describe(compute: Compute) -> str:
    """The description of a computation as text. Masks that the ranges of the axes prove are marked, with
    the reason."""
    facts = axis_facts(compute)
    lines = [f"compute {compute.name}"]
    for kind, meaning in KINDS:
        if axes := compute.axes_of(kind):
            sizes = "  ".join(f"{x.name}={x.size}" for x in axes)
            lines.append(f"    {kind}  {meaning:<8} {sizes}")
    if any(x.size == 0 for x in compute.axes_of("K")):
        return "\n".join(
            [
                *lines,
                "    the sum is empty: acc = 0",
                *_view_lines("C", compute.c, facts),
                f"    C = {compute.behind or 'acc'}",
            ]
        )
    others = [
        (r.name, r.view)
        for r in compute.reads
        if r.view not in (compute.a, compute.b)
        and (r.var in compute.names.indices or r in compute.names.chosen_from)
    ]
    for role, view in (("A", compute.a), ("B", compute.b), *others, ("C", compute.c)):
        if view is not None:
            lines += _view_lines(role, view, facts)
    if compute.b is None and not compute.axes_of("K"):
        return "\n".join([*lines, "    C = A"])
    summed = ", ".join(x.name for x in compute.axes_of("K"))
    factors = "A" if compute.b is None else "A * B"
    lines.append(f"    acc = sum of {factors} over {summed}, in {compute.acc}")
    lines.append(f"    C = {compute.behind or 'acc'}")
    return "\n".join(lines)


def _view_lines(role: str, view: ir.View, facts: Facts) -> list[str]:
    """A line with the coordinates of a view, and a line for each of its conditions."""
    coords, conditions = [], []
    for name, dim in zip(view.tensor.dims, view.dims, strict=True):
        short = dim.coord if isinstance(dim.coord, ir.Var) else simplify(dim.coord, facts)
        coords.append(name if short is ir.Var(name) else f"{name} = {ir.readable(as_written(short))}")
        conditions += [
            _condition(part, name, dim.coord, facts)
            for part in ir.conjuncts(dim.mask)
            if not isinstance(part, ir.Const)
        ]
    return [f"    {role} = {view.tensor.name}[{', '.join(coords)}]", *conditions]


def _condition(part: ir.Expr, name: str, coord: ir.Expr, facts: Facts) -> str:
    """One condition of a mask: whether it is kept or always true, and the reason."""
    named = ir.readable(as_written(ir.substitute(part, {coord: ir.Var(name)})))
    if prove(part, facts):
        verdict, why = "always true:", reason(part, facts)
    else:
        verdict, why = "kept:", "" if ir.find(part, ir.Mod) else reason(part, facts)
        if read := [ir.readable(as_written(e)) for e in ir.find(part, ir.Cast)]:
            why = f"{' '.join(read)} may be any number"
    return f"        {verdict:<12} {named:<{WIDTH}}  {why}".rstrip()
