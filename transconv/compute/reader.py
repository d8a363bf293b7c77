"""Parses the lines of a computation's text; text.py describes the format."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from transconv.compute.compute import Compute
from transconv.compute.expressions import Scope, expression
from transconv.compute.extrema import EXTREMA, where_first
from transconv.compute.named_sizes import of_sizes, sizes_of
from transconv.compute.names import is_word
from transconv.compute.prologues import with_prologues
from transconv.compute.roles import with_roles
from transconv.compute.shapes import coordinates_of, sized, viewed
from transconv.compute.statistics import STATISTICS
from transconv.compute.steps import Axis, Read, Reduction, Step, Value, Write
from transconv.errors import ComputeError, LayoutError
from transconv.ir import (
    DTYPES,
    REDUCERS,
    Cast,
    Const,
    Div,
    DType,
    Expr,
    Layout,
    Select,
    Sizes,
    Tensor,
    Var,
    f32,
    f64,
    find,
    free_vars,
    index,
    type_named,
    value_at,
)
from transconv.simplify import simplify

NAME = re.compile(r"[A-Za-z_]\w*")
# = or +=, sum= and the like, but not the comparisons in a condition before it
STORED = re.compile(rf"(\+|\b(?:{'|'.join(STATISTICS)}))?(?<![=<>!])=(?!=)")
NUMBERS = {"inf": float("inf"), "-inf": float("-inf")}


class Reader:
    """Collects the lines of a text; ``made`` builds the computation."""

    def __init__(self) -> None:
        self.name, self.math = "", "tf32"
        self.named: Sizes | None = None
        self.axes: dict[str, int] = {}
        self.extents: dict[str, Expr] = {}  # of axes whose sizes are arguments
        self.tensors: dict[str, Tensor] = {}
        self.steps: list[tuple[str, str]] = []  # parsed after all tensors are known
        self.reductions: dict[tuple[str, Expr, tuple[str, ...]], Reduction] = {}

    def line_compute(self, rest: str) -> None:
        if self.name:
            raise ComputeError("a second 'compute'; expected one computation")
        name, *words = rest.split() or [""]
        self.name = _named(name, "a computation")
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
            _named(name, "a size")

    def extent(self, text: str) -> tuple[int, Expr]:
        """A size as a number (the example if it has names) and as an expression of names."""
        if text.isdigit() or self.named is None:
            return int(text), Const(int(text))
        made = simplify(of_sizes(text, self.named))
        if made.dtype is not index or find(made, Div):
            raise ComputeError(f"size '{text}'; expected whole numbers and names of sizes")
        return value_at(made, self.named.like), made

    def line_axes(self, rest: str) -> None:
        for word in rest.replace("|", " ").split():
            name, _, size = word.partition("=")
            if not size.isdigit() and (self.named is None or not size):
                raise ComputeError(f"axis '{word}'; expected name=size, such as n=32")
            if name in self.axes:
                raise ComputeError(f"axis '{name}' is named twice; expected it once")
            if self.named and name in self.named.names:
                raise ComputeError(f"'{name}' is a size already; expected another name for an axis")
            self.axes[_named(name, "an axis")], extent = self.extent(size)
            if free_vars(extent):
                self.extents[name] = extent

    def line_tensor(self, rest: str) -> None:
        found = re.fullmatch(r"(\w+)\s+(\w+)\s+\[(.*?)\]\s*(.*)", rest)
        if found is None or found[2] not in _types():
            raise ComputeError(f"tensor '{rest}'; expected a name, a type and sizes, such as "
                               "x f16 [n=8, c=64] (types: " + " ".join(_types()) + ")")
        sizes = [word.rpartition("=") for word in found[3].replace(" ", "").split(",") if word]
        if not all(size.isdigit() or self.named and size for _, _, size in sizes):
            raise ComputeError(f"sizes [{found[3]}] of tensor '{found[1]}'; expected whole numbers")
        extents = tuple(self.extent(size) for _, _, size in sizes)
        shape = tuple(n for n, _ in extents)
        dims = tuple(name or f"{found[1]}_{i}" for i, (name, _, _) in enumerate(sizes))
        dtype = type_named(found[2])
        try:
            layout = Layout.parse(found[4], dtype, shape) if found[4] else Layout.dense(dtype, shape)
        except LayoutError as error:
            raise ComputeError(f"tensor '{found[1]}': {error}") from None
        sized = tuple(e for _, e in extents) if any(free_vars(e) for _, e in extents) else ()
        if sized and (not layout.is_packed or layout.strides() is None or layout.offset):
            raise ComputeError(f"tensor '{found[1]}' has sizes that are arguments and the layout "
                               f"{found[4]}; expected a dense one, without blocks")
        self.tensors[_named(found[1], "a tensor")] = Tensor(found[1], dims, shape, layout, extents=sized)

    def line_read(self, rest: str) -> None:
        self.steps.append(("read", rest))

    def line_let(self, rest: str) -> None:
        self.steps.append(("let", rest))

    def line_store(self, rest: str) -> None:
        self.steps.append(("store", rest))

    # -- the whole -------------------------------------------------------------------------------

    def made(self) -> Compute:
        """The computation. Raises ComputeError."""
        if not self.axes:
            raise ComputeError("there are no axes; expected a line such as: axes m=64 n=32 | k=128")
        if not any(word == "store" for word, _ in self.steps):
            raise ComputeError("nothing is stored; expected a line such as: store y[m, n] = s")
        given = frozenset(rest.partition("=")[0].strip() for word, rest in self.steps if word != "store")
        scope = Scope(self.axes, self._type(), given=given, extents=self.extents, named=self.named)
        steps: list[Step] = []
        for word, rest in self.steps:
            try:
                steps += getattr(self, f"_{word}")(rest, scope)
            except ComputeError as error:
                raise ComputeError(f"{word} '{rest}': {error}") from None
        axes = tuple(Axis(n, size, "", self.extents.get(n)) for n, size in self.axes.items())
        return with_roles(with_prologues(
            Compute(self.name, axes, tuple(steps), self.math, named=self.named)))

    def _type(self) -> DType:
        """The type of arithmetic: f64 if a declared tensor is f64, else f32."""
        return f64 if any(t.dtype is f64 for t in self.tensors.values()) else f32

    def _read(self, rest: str, scope: Scope) -> Iterator[Step]:
        name, equals, seen = rest.partition("=")
        view, _, fill = seen.partition(" else ")
        if not equals:
            raise ComputeError("expected name = tensor[coordinates]")
        name = scope.new(_named(name.strip(), "a value"))
        given, coords, condition = coordinates_of(view, scope)
        tensor = self.tensors.get(given) or sized(_named(given, "a tensor"), coords, scope, f32)
        self.tensors[given] = tensor
        made = Read(name, viewed(tensor, coords, condition, scope), _number(fill))
        scope.values[name] = made.var
        scope.reads.add(made.var)
        yield made

    def _let(self, rest: str, scope: Scope) -> Iterator[Step]:
        name, equals, value = rest.partition("=")
        if not equals:
            raise ComputeError("expected name = expression")
        name = scope.new(_named(name.strip(), "a value"))
        yield from self._computed(name, value.strip(), scope)

    def _store(self, rest: str, scope: Scope) -> Iterator[Step]:
        view, *values = STORED.split(rest, maxsplit=1)
        if not values:
            raise ComputeError("expected tensor[coordinates] = expression")
        op, value = values
        given, coords, condition = coordinates_of(view, scope)
        *before, last = self._computed("", value.strip(), scope)
        yield from before
        assert isinstance(last, Value)
        dtype = last.value.dtype if last.value.dtype.kind == "float" else scope.type
        tensor = self.tensors.get(given) or sized(_named(given, "a tensor"), coords, scope, dtype)
        self.tensors[given] = tensor
        yield Write(viewed(tensor, coords, condition, scope), _stored(last.value, tensor.dtype),
                    "add" if op == "+" else op or "")

    def _computed(self, name: str, text: str, scope: Scope) -> Iterator[Step]:
        """The steps of an expression: its reductions, innermost first, then the rest as a Value."""
        while found := _innermost(text):
            begin, end, op, value, axes = found
            whole = name and text[:begin].strip() == text[end:].strip() == ""
            own = name if whole else scope.unnamed(f"{op}_{len(scope.values)}")
            if op in EXTREMA:
                yield from self._placed(own, op, value, axes, scope)
            else:
                made = _reduced(own, op, value, axes, scope)
                self.reductions[made.op, made.value, made.axes] = made
                yield made
            if whole:
                return
            text = f"{text[:begin]}{own}{text[end:]}"
        rest = expression(text, scope)
        if name and isinstance(rest, Select) and (choice := _choice(rest, scope)) is not None:
            rest = choice
            scope.reads.add(Var(name, rest.dtype))
        if name and rest.dtype.kind == "index":
            scope.positions[name] = rest
        if name:
            scope.values[name] = Var(name, rest.dtype)
        yield Value(name, rest)


    def _placed(self, name: str, op: str, value: str, axes: str, scope: Scope) -> Iterator[Step]:
        """The steps of an argmax or argmin."""
        term, over = _term(value, scope), _reduced_axes(op, axes, scope)
        top = self.reductions.get((EXTREMA[op], term, over))
        if top is None:
            if not isinstance(term.x if isinstance(term, Cast) else term, Var):
                made = Value(scope.unnamed(f"{name}_of"), term)
                scope.values[made.name] = term = made.var
                yield made
            top = Reduction(scope.unnamed(f"{name}_top"), EXTREMA[op], term, over)
            scope.values[top.name] = top.var
            yield top
        found = where_first(name, term, top.var, over, scope.axes)
        scope.values[name] = found.var
        yield found


def _choice(value: Expr, scope: Scope) -> Expr | None:
    """``where(condition, x, y)`` of reads of one type, without the casts to the type of arithmetic, so
    that elements keep their type and bits. None for other values."""
    if isinstance(value, Cast) and value.x in scope.reads:
        return value.x
    if not isinstance(value, Select):
        return None
    yes, no = _choice(value.yes, scope), _choice(value.no, scope)
    same = yes is not None and no is not None and yes.dtype is no.dtype
    return Select(value.cond, yes, no) if same and yes is not None and no is not None else None


def _reduced(name: str, op: str, value: str, axes: str, scope: Scope) -> Reduction:
    made = Reduction(name, op, _term(value, scope), _reduced_axes(op, axes, scope))
    scope.values[name] = made.var
    return made


def _reduced_axes(op: str, axes: str, scope: Scope) -> tuple[str, ...]:
    names = tuple(axes.split())
    for axis in names:
        if axis not in scope.axes:
            raise ComputeError(f"'{axis}' in {op}(...; {axes.strip()}) is no axis; the axes are "
                               f"{' '.join(scope.axes)}")
    return names


def _term(value: str, scope: Scope) -> Expr:
    """The term of a reduction; booleans and positions are cast to the type of arithmetic."""
    term = expression(value, scope)
    return term if term.dtype.kind in ("float", "int") else Cast(term, scope.type)


def _innermost(text: str) -> tuple[int, int, str, str, str] | None:
    """The last reduction of a text, as (begin, end, operation, value, axes), or None. It is an innermost
    one, because a reduction inside another begins after it."""
    for found in reversed([*re.finditer(rf"\b({'|'.join((*REDUCERS, *EXTREMA))})\(", text)]):
        depth, at, cut = 1, found.end(), -1
        while at < len(text) and depth:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            cut = at if text[at] == ";" and depth == 1 else cut
            at += 1
        if depth:
            raise ComputeError(f"'{text}' has an open parenthesis; expected as many ) as (")
        if cut >= 0:
            return found.start(), at, found[1], text[found.end():cut], text[cut + 1:at - 1]
    return None


def _stored(value: Expr, dtype: DType) -> Expr:
    """The value cast to the tensor's type; a read of this type is stored without casts, with its bits."""
    if isinstance(value, Cast) and isinstance(value.x, Var) and value.x.dtype is dtype:
        return value.x
    return Cast(value, dtype)


def _named(text: str, what: str) -> str:
    if is_word(text):
        raise ComputeError(f"'{text}' is a word of generated kernels; expected another name for {what}")
    if not NAME.fullmatch(text):
        raise ComputeError(f"'{text}' is not a valid name for {what}; expected letters, digits and _")
    return text


def _number(text: str) -> float:
    text = text.strip()
    if not text:
        return 0.0
    try:
        return NUMBERS[text] if text in NUMBERS else float(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError):
        raise ComputeError(f"else {text}; expected a number, inf or -inf") from None


def _types() -> list[str]:
    known = [t for t in DTYPES.values() if t.torch and not t.within]
    return [*(t.name for t in known), *(name for t in known for name in t.aliases)]
