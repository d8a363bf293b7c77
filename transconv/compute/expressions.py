"""Python expressions in a computation's text, read into the IR: values, and views with their masks.

Coordinates may use integer functions such as ``reflect`` and ``wrap``, one row of ``COORDINATES`` each. A
row expands to an expression, which determines its meaning in NumPy, the range of its values and its text
in a kernel:

    x[reflect(h - 1, 8)]    expands to    x[min(u, 14 - u)]  with  u = max(h - 1, 1 - h) % 14

The expressions are chosen so that the simplifier can prove their bounds, and a coordinate that is always
inside needs no mask. If a position is at most one period outside, no division is left."""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isinf
from types import MappingProxyType
from typing import Literal

from transconv import ir
from transconv.compute.elementwise import OPS
from transconv.compute.steps import as_written
from transconv.simplify import Facts, facts_of, prove, range_of, simplify
from transconv.support import ComputeError, nearest

Whole = ir.Expr | int


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A function of ``arity`` integers: a position and, unless ``arity`` is 1, the size of its dimension.
    ``says``: a description for the documentation."""

    name: str
    arity: int
    expression: Callable[..., Whole]
    says: str

    def __call__(self, *values: ir.Expr) -> ir.Expr:
        """The expression for these values; a constant if all are constants."""
        return ir.as_expr(
            self.expression(*(int(v.value) if isinstance(v, ir.Const) else v for v in values))
        )


def _abs(i: Whole) -> ir.Expr:
    return ir.maximum(i, -i)


def _reflect(i: Whole, n: Whole) -> ir.Expr:
    """Reflection at the first and last position: the period is 2n - 2."""
    period = n * 2 - 2
    there = _abs(i) % (max(period, 1) if isinstance(period, int) else ir.maximum(period, 1))
    return ir.minimum(there, period - there)


def _symmetric(i: Whole, n: Whole) -> ir.Expr:
    there = ir.maximum(i, -1 - i) % (n * 2)
    return ir.minimum(there, n * 2 - 1 - there)


COORDINATES: ir.RowTable[Coordinate] = ir.RowTable(
    Coordinate(
        "clamp",
        2,
        lambda i, n: ir.minimum(ir.maximum(i, 0), n - 1),
        "beyond an end: the element at that end (torch's padding mode replicate)",
    ),
    Coordinate(
        "reflect",
        2,
        _reflect,
        "beyond an end: as far inside, the element at the end itself left out (reflect)",
    ),
    Coordinate(
        "symmetric",
        2,
        _symmetric,
        "beyond an end: as far inside, beginning with the element at the end (NumPy's symmetric)",
    ),
    Coordinate("wrap", 2, lambda i, n: i % n, "beyond an end: on from the other one (circular)"),
    Coordinate(
        "from_end",
        2,
        lambda i, n: ir.select(i < 0, i + n, i),
        "a negative position counts from the end, as an index of torch does",
    ),
    Coordinate("abs", 1, _abs, "the distance from 0"),
)
"""Functions of a position and a size that coordinates may use."""


BINARY: dict[type, Callable[[ir.Expr, ir.Expr], ir.Expr]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARE: dict[type, Callable[[ir.Expr, ir.Expr], ir.Expr]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: ir.eq,
    ast.NotEq: ir.ne,
}
LARGEST_POWER = 8
LONGEST_SAID = 160  # characters of a text in an error
# What prints under another name: operations as the function that they call, a choice in the IR's words.
PRINTED = {"nearest": "round", "ndtr_wide": "ndtr", "select": "where"}
WHOLE = ("nearest_small", "exponent")  # functions of floats that give integers
CODES = ("f4e2m1", "f8e8m0")  # floats by their codes, which are integers
ROUNDED = ("floor", "ceil", "round")
NO_FACTS = Facts()


@dataclass
class ComputeScope:
    """The names in scope: axes with their sizes, and values. ``type``: the type of arithmetic, f32 or f64.
    ``reads``: values of a tensor's type, which are cast to ``type`` in arithmetic. ``whole``: in
    coordinates and comparisons, the type that integers are cast to instead. ``positions``: expressions of
    values that depend on axes alone, used in coordinates. ``given``: all names that the text defines.
    ``named``: the sizes that are arguments; ``extents``: those of axes, as expressions of these."""

    axes: dict[str, int]
    type: ir.DType
    values: dict[str, ir.Var] = field(default_factory=dict)
    reads: set[ir.Var] = field(default_factory=set)
    whole: ir.DType | None = None
    positions: dict[str, ir.Expr] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    extents: dict[str, ir.Expr] = field(default_factory=dict)
    named: ir.Sizes | None = None

    @property
    def lengths(self) -> dict[str, ir.Expr]:
        """The size of each axis: a number, or an expression of names."""
        return {name: self.extents.get(name, ir.Const(n)) for name, n in self.axes.items()}

    def new(self, name: str) -> str:
        """The name. Raises ComputeError if it is taken."""
        if name in self.axes or name in self.values or (self.named and name in self.named.names):
            raise ComputeError(f"'{name}' is an axis, a size or a value already; expected a new name")
        return name

    def unnamed(self, name: str) -> str:
        """A name for a value that the text does not name: this one, with underscores added until it is
        new."""
        while name in self.axes or name in self.values or name in self.given:
            name += "_"
        return name


HINTS = (  # what other languages have, and how it is written here
    (r"\b(mean|avg)\(", "a mean is sum(x; k) divided by the size of k"),
    (r"\b(cumsum|cumprod|cummax)\(", "running sums are no reduction; torch.cumsum has them"),
    (r"\b(softmax|logsumexp)\(", "write: let e = exp(x - max(x; k)), then e / sum(e; k)"),
    (r"\batomic_add\(", "a store adds by: store Y[n] += x"),
    (rf"\b({'|'.join(ir.REDUCERS)})\(", "what is reduced and its axes stand so: sum(x; k)"),
    (r"\w+\(.*;", f"reductions are {' '.join(ir.REDUCERS)}"),
    (r"\^", "a power is x**2"),
    (r"\bif\b.*\belse\b|\?", "write where(x > 0, a, b)"),
    (r"&&|\|\||!(?!=)", "write `and`, `or`, `not`"),
    (r"@", "a product of matrices is sum(a*b; k)"),
    (r"\w\.\w+\(", "operations have no dot: exp(x)"),
)


def hint(text: str) -> str:
    """How something is written here, for a text that is not understood; empty if there is none."""
    return next((f"; {said}" for pattern, said in HINTS if re.search(pattern, text)), "")


def expression(text: str, scope: ComputeScope) -> ir.Expr:
    """The expression of a text. Values of other float types are cast to ``scope.type``. Raises
    ComputeError."""
    return _read(expression_tree(text, "eval").body, scope)  # type: ignore[attr-defined]


def expression_tree(text: str, mode: Literal["eval", "exec"]) -> ast.AST:
    """The tree of a Python text, of ASCII and not too deep. Raises ComputeError."""
    if reason := ir.why_not_text(text):
        raise ComputeError(f"{shortened(text)}: {reason}")
    try:
        tree: ast.AST = ast.parse(text.strip(), mode=mode)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ComputeError(
            f"{shortened(text)} cannot be read; expected a Python expression{hint(text)}"
        ) from None
    for part in [tree] if mode == "eval" else ast.iter_child_nodes(tree):
        if reason := ir.why_not_depth(part):
            raise ComputeError(f"{shortened(text)} has {reason}")
    return tree


def shortened(text: str) -> str:
    """A text in quotes, of at most some hundred characters."""
    return f"'{text}'" if len(text) <= LONGEST_SAID else f"'{text[:LONGEST_SAID]}...'"


def _read(at: ast.expr, scope: ComputeScope) -> ir.Expr:
    match at:
        case ast.Constant(value=bool() as value):
            return ir.TRUE if value else ir.FALSE
        case ast.Constant(value=int() | float() as value):
            return _float(ir.Const(value), scope) if isinstance(value, float) else ir.Const(value)
        case ast.Name(id="inf"):
            return ir.Const(float("inf"), scope.type)
        case ast.Name(id=name):
            return _name(name, scope)
        case ast.BinOp(left, ast.Pow(), ast.Constant(value=int() as power)) if 1 <= power <= LARGEST_POWER:
            base = whole = _read(left, scope)
            for _ in range(power - 1):
                whole = whole * base
            return whole
        case ast.BinOp(left, op, right) if type(op) in BINARY:
            a, b = _alike(_number(_read(left, scope)), _number(_read(right, scope)), scope)
            if isinstance(op, ast.Div) and not scope.whole:
                a, b = _float(a, scope), _float(b, scope)
            elif isinstance(op, (ast.FloorDiv, ast.Mod)) and a.dtype.kind == "float":
                raise ComputeError(
                    f"'{ast.unparse(at)}' is of floats; expected whole numbers, or floor(a / b)"
                )
            return BINARY[type(op)](a, b)
        case ast.UnaryOp(ast.USub(), x):
            given = _number(_read(x, scope))
            return ir.Const(-given.value, given.type) if isinstance(given, ir.Const) else ir.Neg(given)
        case ast.UnaryOp(ast.Not() | ast.Invert(), x):
            return ir.Not(_condition(_read(x, scope), x))
        case ast.Compare(left, [op], [right]) if type(op) in COMPARE:
            exact = scope if scope.whole else replace(scope, whole=ir.i64)
            a, b = _read(left, exact), _read(right, exact)
            if not (a.dtype.is_integer and b.dtype.is_integer):
                a, b = _read(left, scope), _read(right, scope)
            return COMPARE[type(op)](*_alike(a, b, scope))
        case ast.Compare(left, [first, *ops], [middle, *rest]):
            tail = ast.Compare(middle, ops, rest)
            return _read(ast.Compare(left, [first], [middle]), scope) & _read(tail, scope)
        case ast.BoolOp(op, values):
            made = [_condition(_read(v, scope), v) for v in values]
            whole = made[0]
            for part in made[1:]:
                whole = whole & part if isinstance(op, ast.And) else whole | part
            return whole
        case ast.Call(ast.Name(id=name), args, []):
            return _call(name, [_read(a, scope) for a in args], scope)
    raise ComputeError(
        f"'{ast.unparse(at)}' is not understood; expected arithmetic, comparisons, "
        f"`and`, `or`, `not` between them, and calls of operations{hint(ast.unparse(at))}"
    )


def _condition(e: ir.Expr, at: ast.expr) -> ir.Expr:
    """The operand of a logical operation. Raises ComputeError unless it is a condition."""
    if e.dtype.kind != "bool":
        raise ComputeError(f"'{ast.unparse(at)}' is no condition; expected a comparison such as x > 0")
    return e


def _number(e: ir.Expr) -> ir.Expr:
    """An operand of arithmetic, where conditions are 0 and 1."""
    if e.dtype.kind != "bool":
        return e
    return ir.Const(int(e.value), ir.i32) if isinstance(e, ir.Const) else ir.Cast(e, ir.i32)


def _name(name: str, scope: ComputeScope) -> ir.Expr:
    if name in scope.axes or (scope.named and name in scope.named.names):
        return ir.Var(name)
    if name not in scope.values:
        known = " ".join([*scope.axes, *scope.values])
        raise ComputeError(
            f"'{name}' is not known; expected one of {known}{nearest(name, [*scope.axes, *scope.values])}"
        )
    var = scope.values[name]
    if scope.whole and name in scope.positions:
        return scope.positions[name]
    if scope.whole and var.dtype.kind == "int":
        return ir.Cast(var, scope.whole)
    if var.dtype.kind == "int":  # integers are computed exactly, in at least 32 bits
        return ir.Cast(var, ir.i32) if var in scope.reads and var.dtype.bits < 64 else var
    as_it_is = var.dtype.kind in ("bool", "index") or (var.dtype is scope.type and var not in scope.reads)
    return var if as_it_is else ir.Cast(var, scope.type)


def _alike(a: ir.Expr, b: ir.Expr, scope: ComputeScope) -> tuple[ir.Expr, ir.Expr]:
    """Two operands cast to one type: an integer with a float becomes a float."""
    if "float" in (a.dtype.kind, b.dtype.kind) and a.dtype is not b.dtype:
        return _float(a, scope), _float(b, scope)
    if "int" in (a.dtype.kind, b.dtype.kind):
        wide = ir.promote(a.dtype, b.dtype)
        return _whole(a, wide), _whole(b, wide)
    return a, b


def _whole(e: ir.Expr, dtype: ir.DType) -> ir.Expr:
    """An integer in another type. Raises ComputeError for a number that the type does not have."""
    if e.dtype is dtype or not isinstance(e, ir.Const):
        return e if e.dtype is dtype else ir.Cast(e, dtype)
    if dtype.kind == "int" and not dtype.limits[0] <= e.value <= dtype.limits[1]:
        raise ComputeError(f"{e.value} is no {dtype}; expected a smaller number, or i64(...) beside it")
    return ir.Const(e.value, dtype)


def _float(e: ir.Expr, scope: ComputeScope) -> ir.Expr:
    """A number as a float; one beyond the type of arithmetic is infinite there."""
    if isinstance(e, ir.Const) and not isinstance(e.value, bool):
        return ir.Const(ir.held_constant(float(e.value), scope.type), scope.type)
    return e if e.dtype.kind == "float" else ir.Cast(e, scope.type)


def _call(name: str, args: list[ir.Expr], scope: ComputeScope) -> ir.Expr:
    if name in ir.DTYPES and len(args) == 1:
        return args[0] if args[0].dtype is ir.DTYPES[name] else ir.Cast(args[0], ir.DTYPES[name])
    name = PRINTED.get(name, name)
    if name == "where" and len(args) == 3:
        if args[0].dtype.kind != "bool":
            raise ComputeError(
                "where(...) chooses by what is no condition; expected a comparison such as x > 0"
            )
        return ir.Select(args[0], *_alike(args[1], args[2], scope))
    if name in ("min", "max") and len(args) == 2:
        return (ir.minimum if name == "min" else ir.maximum)(*_alike(args[0], args[1], scope))
    if (
        name in COORDINATES
        and len(args) == COORDINATES[name].arity
        and all(a.dtype.is_integer for a in args)
    ):
        return COORDINATES[name](*args)
    if name in WHOLE and len(args) == 1:
        return ir.Call(name, (_float(args[0], scope),))
    if name in CODES and len(args) == 1 and args[0].dtype.is_integer:
        return ir.Call(name, (_whole(args[0], ir.i32),))
    if (
        name in OPS
        and OPS[name].arity <= len(args) <= OPS[name].arity + len(OPS[name].numbers)
        and all(isinstance(n, ir.Const) for n in args[OPS[name].arity :])
    ):
        if name in ROUNDED and args[0].dtype.is_integer:
            return args[0]
        if all(a.dtype.is_integer for a in args) and _is_of_integers(name, args):
            wide = functools.reduce(ir.promote, (a.dtype for a in args[: OPS[name].arity]))
            return OPS[name](*(_whole(a, wide) for a in args))
        return OPS[name](*(_float(a, scope) for a in args))
    raise ComputeError(
        f"{name}(...) of {len(args)} values is unknown; expected one of "
        f"{' '.join(sorted(OPS))}, a type, or of whole numbers {' '.join(COORDINATES)}"
        f"{hint(f'{name}({len(args)})') or nearest(name, OPS, ir.ELSEWHERE)}"
    )


def _is_of_integers(name: str, args: list[ir.Expr]) -> bool:
    """Whether an operation gives integers of integers: an exact one whose numbers that are not given are
    whole or infinite, and a power that is a product."""
    if name == "pow" and isinstance(power := args[-1], ir.Const):
        return len(args) == 2 and 1 <= power.value <= LARGEST_POWER
    rest = OPS[name].defaults[len(args) - OPS[name].arity :]
    return OPS[name].exact and all(isinf(n) or n.is_integer() for n in rest)


SEEN = re.compile(r"\s*(\w+)\s*\[(.*)\]\s*(?:where\s+(.*))?", re.DOTALL)


def coordinates_of(text: str, scope: ComputeScope) -> tuple[str, list[ir.Expr], ir.Expr]:
    """``tensor[coordinates] where condition``: name, coordinates, condition. Raises ComputeError."""
    found = SEEN.fullmatch(text)
    if found is None:
        raise ComputeError(f"'{text.strip()}'; expected tensor[coordinates]")
    whole = replace(scope, whole=ir.index)
    coords = [expression(part, whole) for part in _parts(found[2]) if found[2].strip()]
    for coord in coords:
        _checked(coord)
    return found[1], coords, expression(found[3], whole) if found[3] else ir.TRUE


def _checked(coord: ir.Expr) -> None:
    """Raise ComputeError for a coordinate that is not an integer, or that divides by other than a positive
    number."""
    if coord.dtype.kind != "index" or any(e.dtype.kind == "float" for e in ir.find(coord, ir.Expr)):
        raise ComputeError(
            f"coordinate {ir.readable(coord)} is {coord.dtype}; expected whole numbers, of "
            "axes and of elements of tensors of i32 or i64, which // divides"
        )
    for e in (*ir.find(coord, ir.FloorDiv), *ir.find(coord, ir.Mod)):
        by = simplify(e.b)
        if not isinstance(by, ir.Const) or by.value <= 0:
            raise ComputeError(
                f"{ir.readable(e)} in a coordinate divides by {ir.readable(e.b)}; "
                "expected a number above 0"
            )


def _parts(text: str) -> list[str]:
    """The texts between commas that are not inside parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def facts_of_scope(scope: ComputeScope) -> Facts:
    """The ranges of the axes of a text."""
    return _ranges(tuple(scope.axes.items()), scope.named, tuple(scope.extents.items()))


@functools.lru_cache(maxsize=256)
def _ranges(
    axes: tuple[tuple[str, int], ...], named: ir.Sizes | None, extents: tuple[tuple[str, ir.Expr], ...]
) -> Facts:
    """``facts_of_axes``, of which texts of the same axes share what is simplified by them."""
    return facts_of_axes(dict(axes), facts_of(named), dict(extents))


def facts_of_axes(
    axes: Mapping[str, int], facts: Facts = NO_FACTS, extents: Mapping[str, ir.Expr] = MappingProxyType({})
) -> Facts:
    """The ranges of axes, for all values of sizes that are arguments, beside some facts."""
    for name, size in axes.items():
        if (extent := extents.get(name)) is None:
            facts = facts.with_range(ir.Var(name), 0, max(0, size - 1))
        else:
            facts = facts.with_range(ir.Var(name), 0, None).assume(ir.Var(name) < extent)
    return facts


def sized(name: str, coords: list[ir.Expr], scope: ComputeScope, dtype: ir.DType) -> ir.Tensor:
    """A dense tensor of the smallest shape that contains all coordinates. Raises ComputeError if it is not
    bounded."""
    facts = facts_of_scope(scope)
    shape = []
    extents: list[ir.Expr] = []
    for coord in coords:
        if isinstance(coord, ir.Var) and coord.name in scope.extents:
            extents.append(scope.extents[coord.name])
            shape.append(scope.axes[coord.name])
            continue
        if ir.free_vars(coord) & {ir.Var(a) for a in scope.extents}:
            raise ComputeError(
                f"the size of {name} along {ir.readable(as_written(coord))} is not told; "
                f"expected a line such as: tensor {name} f32 [N, 64]"
            )
        most = range_of(simplify(coord, facts), facts).hi
        if most is None or most >= ir.i32.limits[1]:  # the index is an element of a tensor
            raise ComputeError(
                f"the size of {name} along {ir.readable(as_written(coord))} is not "
                f"known; expected a line such as: tensor {name} f32 [32, 64]"
            )
        shape.append(most + 1)
        extents.append(ir.Const(most + 1))
    dims = tuple(f"{name}_{i}" for i in range(len(shape)))
    sized = any(not isinstance(e, ir.Const) for e in extents)
    return ir.Tensor(
        name, dims, tuple(shape), ir.Layout.dense(dtype, shape), extents=tuple(extents) if sized else ()
    )


def viewed(tensor: ir.Tensor, coords: list[ir.Expr], condition: ir.Expr, scope: ComputeScope) -> ir.View:
    """The view, with a mask along each dimension in which it may be outside its tensor. Raises
    ComputeError for a wrong number of coordinates."""
    if len(coords) != len(tensor.shape):
        raise ComputeError(
            f"{tensor.name} has {len(tensor.shape)} dimensions, {len(coords)} "
            "coordinates are given; expected one for each"
        )
    return masked(tensor, coords, condition, facts_of_scope(scope))


def masked(tensor: ir.Tensor, coords: list[ir.Expr], condition: ir.Expr, facts: Facts) -> ir.View:
    """The view under a condition, with a mask along each dimension in which the facts do not prove that it
    is inside its tensor."""
    dims = []
    for i, (coord, size) in enumerate(zip(coords, tensor.bounds, strict=True)):
        inside = (coord >= 0) & (coord < size)
        mask = ir.TRUE if prove(inside, facts) else inside
        if i == 0 and condition is not ir.TRUE:
            mask = condition if mask is ir.TRUE else ir.And(mask, condition)  # also one like the mask
        dims.append(ir.ViewDim(coord, mask))
    return ir.View(tensor, tuple(dims))
