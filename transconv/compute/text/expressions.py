"""Python expressions in a computation's text, read into the IR.

Also here: views in a computation's text: coordinates, their masks, and sizes of tensors that no line
declares.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from transconv.compute.coordinates import COORDINATES, as_written
from transconv.compute.elementwise import OPS
from transconv.ir import (
    DTYPES,
    ELSEWHERE,
    FALSE,
    REDUCERS,
    TRUE,
    And,
    Call,
    Cast,
    Const,
    DType,
    Expr,
    FloorDiv,
    Layout,
    Mod,
    Neg,
    Not,
    Select,
    Sizes,
    Tensor,
    Var,
    View,
    ViewDim,
    conjuncts,
    eq,
    find,
    free_vars,
    i32,
    i64,
    index,
    maximum,
    minimum,
    ne,
    promote,
    readable,
    why_not_depth,
    why_not_text,
)
from transconv.simplify import Facts, facts_of, prove, range_of, simplify
from transconv.support import ComputeError, nearest

BINARY: dict[type, Callable[[Expr, Expr], Expr]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}
COMPARE: dict[type, Callable[[Expr, Expr], Expr]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: eq, ast.NotEq: ne}
LARGEST_POWER = 8
LONGEST_SAID = 160  # characters of a text in an error
PRINTED = {"nearest": "round", "ndtr_wide": "ndtr"}  # operations that print as the function that they call
WHOLE = ("nearest_small",)  # functions of floats that give integers


@dataclass
class ComputeScope:
    """The names in scope: axes with their sizes, and values. ``type``: the type of arithmetic, f32 or f64.
    ``reads``: values of a tensor's type, which are cast to ``type`` in arithmetic. ``whole``: in
    coordinates and comparisons, the type that integers are cast to instead. ``positions``: expressions of
    values that depend on axes alone, used in coordinates. ``given``: all names that the text defines.
    ``named``: the sizes that are arguments; ``extents``: those of axes, as expressions of these."""

    axes: dict[str, int]
    type: DType
    values: dict[str, Var] = field(default_factory=dict)
    reads: set[Var] = field(default_factory=set)
    whole: DType | None = None
    positions: dict[str, Expr] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    extents: dict[str, Expr] = field(default_factory=dict)
    named: Sizes | None = None

    @property
    def lengths(self) -> dict[str, Expr]:
        """The size of each axis: a number, or an expression of names."""
        return {name: self.extents.get(name, Const(n)) for name, n in self.axes.items()}

    def new(self, name: str) -> str:
        """The name. Raises ComputeError if it is taken."""
        if name in self.axes or name in self.values or self.named and name in self.named.names:
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
    (r"\batomic_add\(", "a store adds by: store Y[n] sum= x"),
    (rf"\b({'|'.join(REDUCERS)})\(", "what is reduced and its axes stand so: sum(x; k)"),
    (r"\w+\(.*;", f"reductions are {' '.join(REDUCERS)}"),
    (r"\^", "a power is x**2"),
    (r"\bif\b.*\belse\b", "write where(x > 0, a, b)"),
    (r"@", "a product of matrices is sum(a*b; k)"),
    (r"\w\.\w+\(", "operations have no dot: exp(x)"))


def hint(text: str) -> str:
    """How something is written here, for a text that is not understood; empty if there is none."""
    return next((f"; {said}" for pattern, said in HINTS if re.search(pattern, text)), "")


def expression(text: str, scope: ComputeScope) -> Expr:
    """The expression of a text. Values of other float types are cast to ``scope.type``. Raises
    ComputeError."""
    return _read(expression_tree(text, "eval").body, scope)  # type: ignore[attr-defined]


def expression_tree(text: str, mode: Literal["eval", "exec"]) -> ast.AST:
    """The tree of a Python text, of ASCII and not too deep. Raises ComputeError."""
    if reason := why_not_text(text):
        raise ComputeError(f"{shortened(text)}: {reason}")
    try:
        tree: ast.AST = ast.parse(text.strip(), mode=mode)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ComputeError(f"{shortened(text)} cannot be read; expected a Python expression"
                           f"{hint(text)}") from None
    for part in [tree] if mode == "eval" else ast.iter_child_nodes(tree):
        if reason := why_not_depth(part):
            raise ComputeError(f"{shortened(text)} has {reason}")
    return tree


def shortened(text: str) -> str:
    """A text in quotes, of at most some hundred characters."""
    return f"'{text}'" if len(text) <= LONGEST_SAID else f"'{text[:LONGEST_SAID]}...'"


def _read(at: ast.expr, scope: ComputeScope) -> Expr:
    match at:
        case ast.Constant(value=bool() as value):
            return TRUE if value else FALSE
        case ast.Constant(value=int() | float() as value):
            return Const(value, scope.type) if isinstance(value, float) else Const(value)
        case ast.Name(id="inf"):
            return Const(float("inf"), scope.type)
        case ast.Name(id=name):
            return _name(name, scope)
        case ast.BinOp(left, ast.Pow(), ast.Constant(value=int() as power)) if (
                1 <= power <= LARGEST_POWER):
            base = whole = _read(left, scope)
            for _ in range(power - 1):
                whole = whole * base
            return whole
        case ast.BinOp(left, op, right) if type(op) in BINARY:
            a, b = _alike(_number(_read(left, scope)), _number(_read(right, scope)), scope)
            if isinstance(op, ast.Div) and not scope.whole:
                a, b = _float(a, scope), _float(b, scope)
            elif isinstance(op, (ast.FloorDiv, ast.Mod)) and a.dtype.kind == "float":
                raise ComputeError(f"'{ast.unparse(at)}' is of floats; expected whole numbers, or "
                                   "floor(a / b)")
            return BINARY[type(op)](a, b)
        case ast.UnaryOp(ast.USub(), x):
            given = _number(_read(x, scope))
            return Const(-given.value, given.type) if isinstance(given, Const) else Neg(given)
        case ast.UnaryOp(ast.Not() | ast.Invert(), x):
            return Not(_condition(_read(x, scope), x))
        case ast.Compare(left, [op], [right]) if type(op) in COMPARE:
            exact = scope if scope.whole else replace(scope, whole=i64)
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
    raise ComputeError(f"'{ast.unparse(at)}' is not understood; expected arithmetic, comparisons, "
                       f"`and`, `or`, `not` between them, and calls of operations{hint(ast.unparse(at))}")


def _condition(e: Expr, at: ast.expr) -> Expr:
    """The operand of a logical operation. Raises ComputeError unless it is a condition."""
    if e.dtype.kind != "bool":
        raise ComputeError(f"'{ast.unparse(at)}' is no condition; expected a comparison such as x > 0")
    return e


def _number(e: Expr) -> Expr:
    """An operand of arithmetic, where conditions are 0 and 1."""
    if e.dtype.kind != "bool":
        return e
    return Const(int(e.value), i32) if isinstance(e, Const) else Cast(e, i32)


def _name(name: str, scope: ComputeScope) -> Expr:
    if name in scope.axes or scope.named and name in scope.named.names:
        return Var(name)
    if name not in scope.values:
        known = " ".join([*scope.axes, *scope.values])
        raise ComputeError(f"'{name}' is not known; expected one of {known}"
                           f"{nearest(name, [*scope.axes, *scope.values])}")
    var = scope.values[name]
    if scope.whole and name in scope.positions:
        return scope.positions[name]
    if scope.whole and var.dtype.kind == "int":
        return Cast(var, scope.whole)
    if var.dtype.kind == "int":  # integers are computed exactly, in at least 32 bits
        return Cast(var, i32) if var in scope.reads and var.dtype.bits < 64 else var
    as_it_is = var.dtype.kind == "bool" or var.dtype is scope.type and var not in scope.reads
    return var if as_it_is else Cast(var, scope.type)


def _alike(a: Expr, b: Expr, scope: ComputeScope) -> tuple[Expr, Expr]:
    """Two operands cast to one type: an integer with a float becomes a float."""
    if "float" in (a.dtype.kind, b.dtype.kind) and a.dtype is not b.dtype:
        return _float(a, scope), _float(b, scope)
    if "int" in (a.dtype.kind, b.dtype.kind):
        wide = promote(a.dtype, b.dtype)
        return _whole(a, wide), _whole(b, wide)
    return a, b


def _whole(e: Expr, dtype: DType) -> Expr:
    """An integer in another type. Raises ComputeError for a number that the type does not have."""
    if e.dtype is dtype or not isinstance(e, Const):
        return e if e.dtype is dtype else Cast(e, dtype)
    if dtype.kind == "int" and not dtype.limits[0] <= e.value <= dtype.limits[1]:
        raise ComputeError(f"{e.value} is no {dtype}; expected a smaller number, or i64(...) beside it")
    return Const(e.value, dtype)


def _float(e: Expr, scope: ComputeScope) -> Expr:
    if isinstance(e, Const) and not isinstance(e.value, bool):
        return Const(float(e.value), scope.type)
    return e if e.dtype.kind == "float" else Cast(e, scope.type)


def _call(name: str, args: list[Expr], scope: ComputeScope) -> Expr:
    if name in DTYPES and len(args) == 1:
        return args[0] if args[0].dtype is DTYPES[name] else Cast(args[0], DTYPES[name])
    if name == "where" and len(args) == 3:
        if args[0].dtype.kind != "bool":
            raise ComputeError("where(...) chooses by what is no condition; expected a comparison such as "
                               "x > 0")
        return Select(args[0], *_alike(args[1], args[2], scope))
    if name in ("min", "max") and len(args) == 2:
        return (minimum if name == "min" else maximum)(*_alike(args[0], args[1], scope))
    if name in COORDINATES and len(args) == COORDINATES[name].arity and all(
            a.dtype.is_integer for a in args):
        return COORDINATES[name](*args)
    name = PRINTED.get(name, name)
    if name in WHOLE and len(args) == 1:
        return Call(name, (_float(args[0], scope),))
    if name in OPS and OPS[name].arity <= len(args) <= OPS[name].arity + len(OPS[name].numbers) and all(
            isinstance(n, Const) for n in args[OPS[name].arity:]):
        return OPS[name](*(_float(a, scope) for a in args))
    raise ComputeError(f"{name}(...) of {len(args)} values is unknown; expected one of "
                       f"{' '.join(sorted(OPS))}, a type, or of whole numbers {' '.join(COORDINATES)}"
                       f"{hint(f'{name}({len(args)})') or nearest(name, OPS, ELSEWHERE)}")


SEEN = re.compile(r"\s*(\w+)\s*\[(.*)\]\s*(?:where\s+(.*))?", re.DOTALL)


def coordinates_of(text: str, scope: ComputeScope) -> tuple[str, list[Expr], Expr]:
    """``tensor[coordinates] where condition``: name, coordinates, condition. Raises ComputeError."""
    found = SEEN.fullmatch(text)
    if found is None:
        raise ComputeError(f"'{text.strip()}'; expected tensor[coordinates]")
    whole = replace(scope, whole=index)
    coords = [expression(part, whole) for part in _parts(found[2]) if found[2].strip()]
    for coord in coords:
        _checked(coord)
    return found[1], coords, expression(found[3], whole) if found[3] else TRUE


def _checked(coord: Expr) -> None:
    """Raise ComputeError for a coordinate that is not an integer, or that divides by other than a positive
    number."""
    if coord.dtype.kind != "index" or any(e.dtype.kind == "float" for e in find(coord, Expr)):
        raise ComputeError(f"coordinate {readable(coord)} is {coord.dtype}; expected whole numbers, of "
                           "axes and of elements of tensors of i32 or i64")
    for e in (*find(coord, FloorDiv), *find(coord, Mod)):
        by = simplify(e.b)
        if not isinstance(by, Const) or by.value <= 0:
            raise ComputeError(f"{readable(e)} in a coordinate divides by {readable(e.b)}; expected a "
                               "number above 0")


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
    return facts_of_axes(scope.axes, scope.extents, scope.named)


def facts_of_axes(axes: Mapping[str, int], extents: Mapping[str, Expr], named: Sizes | None) -> Facts:
    """The ranges of axes, for all values of sizes that are arguments."""
    facts = facts_of(named)
    for name, size in axes.items():
        if (extent := extents.get(name)) is None:
            facts = facts.with_range(Var(name), 0, max(0, size - 1))
        else:
            facts = facts.with_range(Var(name), 0, None).assume(Var(name) < extent)
    return facts


def sized(name: str, coords: list[Expr], scope: ComputeScope, dtype: DType) -> Tensor:
    """A dense tensor of the smallest shape that contains all coordinates. Raises ComputeError if it is not
    bounded."""
    facts = facts_of_scope(scope)
    shape = []
    extents: list[Expr] = []
    for coord in coords:
        if isinstance(coord, Var) and coord.name in scope.extents:
            extents.append(scope.extents[coord.name])
            shape.append(scope.axes[coord.name])
            continue
        if free_vars(coord) & {Var(a) for a in scope.extents}:
            raise ComputeError(f"the size of {name} along {readable(as_written(coord))} is not told; "
                               f"expected a line such as: tensor {name} f32 [N, 64]")
        most = range_of(simplify(coord, facts), facts).hi
        if most is None or most >= i32.limits[1]:  # the index is an element of a tensor
            raise ComputeError(f"the size of {name} along {readable(as_written(coord))} is not "
                               f"known; expected a line such as: tensor {name} f32 [32, 64]")
        shape.append(most + 1)
        extents.append(Const(most + 1))
    dims = tuple(f"{name}_{i}" for i in range(len(shape)))
    sized = any(not isinstance(e, Const) for e in extents)
    return Tensor(name, dims, tuple(shape), Layout.dense(dtype, shape),
                  extents=tuple(extents) if sized else ())


def conditions(view: View) -> list[Expr]:
    """The conditions of a view's mask other than that its coordinates are inside the tensor. One that says
    this once more is among them: it tells that indices may be outside."""
    inside = [c for d, n in zip(view.dims, view.tensor.bounds, strict=True)
              for c in (d.coord >= 0, d.coord < n)]  # some twice, on a diagonal
    found: list[Expr] = []
    for c in (c for d in view.dims for c in conjuncts(d.mask)):
        if c in inside:
            inside.remove(c)
        else:
            found.append(c)
    return found


def viewed(tensor: Tensor, coords: list[Expr], condition: Expr, scope: ComputeScope) -> View:
    """The view, with a mask along each dimension in which it may be outside its tensor. Raises
    ComputeError for a wrong number of coordinates."""
    if len(coords) != len(tensor.shape):
        raise ComputeError(f"{tensor.name} has {len(tensor.shape)} dimensions, {len(coords)} "
                           "coordinates are given; expected one for each")
    return masked(tensor, coords, condition, facts_of_scope(scope))


def masked(tensor: Tensor, coords: list[Expr], condition: Expr, facts: Facts) -> View:
    """The view under a condition, with a mask along each dimension in which the facts do not prove that it
    is inside its tensor."""
    dims = []
    for i, (coord, size) in enumerate(zip(coords, tensor.bounds, strict=True)):
        inside = (coord >= 0) & (coord < size)
        mask = TRUE if prove(inside, facts) else inside
        if i == 0 and condition is not TRUE:
            mask = condition if mask is TRUE else And(mask, condition)  # also one like the mask
        dims.append(ViewDim(coord, mask))
    return View(tensor, tuple(dims))
