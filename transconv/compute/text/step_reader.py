"""Parses the lines of a computation's text that are steps: reads, lets and stores."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from transconv.compute.analysis.statistics import STATISTICS
from transconv.compute.extrema import EXTREMA, where_first
from transconv.compute.names import why_not_named
from transconv.compute.steps import Read, Reduction, Step, Value, Write
from transconv.compute.text.expressions import ComputeScope, expression
from transconv.compute.text.views import coordinates_of, facts_of_scope, sized, viewed
from transconv.errors import ComputeError
from transconv.ir import REDUCERS, Cast, DType, Expr, Select, Tensor, Var, f32

# = or +=, sum= and the like, but not the comparisons in a condition before it
STORED = re.compile(rf"(\+|\b(?:{'|'.join(STATISTICS)}))?(?<![=<>!])=(?!=)")
NUMBERS = {"inf": float("inf"), "-inf": float("-inf")}


class StepReader:
    """Makes steps of lines. ``scope``: the names that have a meaning; ``tensors``: the declared ones, and
    those that a line is the first to mention."""

    def __init__(self, scope: ComputeScope, tensors: dict[str, Tensor]) -> None:
        self.scope, self.tensors = scope, tensors
        self.reductions: dict[tuple[str, Expr, tuple[str, ...]], Reduction] = {}

    def read(self, rest: str) -> Iterator[Step]:
        """The step of ``x = X[m, k] else fill``."""
        scope = self.scope
        name, equals, seen = rest.partition("=")
        view, _, fill = seen.partition(" else ")
        if not equals:
            raise ComputeError("expected name = tensor[coordinates]")
        name = scope.new(named(name.strip(), "a value"))
        given, coords, condition = coordinates_of(view, scope)
        tensor = self.tensors.get(given) or sized(named(given, "a tensor"), coords, scope, f32)
        self.tensors[given] = tensor
        made = Read(name, viewed(tensor, coords, condition, scope), _number(fill))
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
        yield Write(viewed(tensor, coords, condition, scope), _stored(last.value, tensor.dtype),
                    "add" if op == "+" else op or "")

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
        if name and isinstance(rest, Select) and (choice := _choice(rest, scope)) is not None:
            rest = choice
            scope.reads.add(Var(name, rest.dtype))
        if name and rest.dtype.kind == "index":
            scope.positions[name] = rest
        if name:
            scope.values[name] = Var(name, rest.dtype)
        yield Value(name, rest)

    def _placed(self, name: str, op: str, value: str, axes: str) -> Iterator[Step]:
        """The steps of an argmax or argmin."""
        scope = self.scope
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
        found = where_first(name, term, top.var, over, scope.lengths, facts_of_scope(scope))
        scope.values[name] = found.var
        yield found


def _choice(value: Expr, scope: ComputeScope) -> Expr | None:
    """``where(condition, x, y)`` of reads of one type, without the casts to the type of arithmetic, so
    that elements keep their type and bits. None for other values."""
    if isinstance(value, Cast) and value.x in scope.reads:
        return value.x
    if not isinstance(value, Select):
        return None
    yes, no = _choice(value.yes, scope), _choice(value.no, scope)
    same = yes is not None and no is not None and yes.dtype is no.dtype
    return Select(value.cond, yes, no) if same and yes is not None and no is not None else None


def _reduced(name: str, op: str, value: str, axes: str, scope: ComputeScope) -> Reduction:
    made = Reduction(name, op, _term(value, scope), _reduced_axes(op, axes, scope))
    scope.values[name] = made.var
    return made


def _reduced_axes(op: str, axes: str, scope: ComputeScope) -> tuple[str, ...]:
    names = tuple(axes.split())
    for axis in names:
        if axis not in scope.axes:
            raise ComputeError(f"'{axis}' in {op}(...; {axes.strip()}) is no axis; expected some of "
                               f"{' '.join(scope.axes)}")
    return names


def _term(value: str, scope: ComputeScope) -> Expr:
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
