"""The functions, operators and reductions of tiles: one row each, shared by the compiled way and the
simulator.

A row has NumPy's functions, their meaning in NumPy, the expression of the IR (that of the row of
``compute.OPS`` where there is one), and how the type of the result follows from those of the operands."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transconv import ir
from transconv.compute import OPS
from transconv.kernel.source import Refusal, named

Expression = Callable[..., ir.Expr]


@dataclass(frozen=True, slots=True)
class TileFunction:
    """A function of ``arity`` tiles. ``types``: ``same`` (the common type; booleans count as int32),
    ``float`` (the common type if it is a float, else float32), ``bool`` (compares values of the common
    type), ``logic`` (of booleans), ``bits`` (of booleans or integers) or ``choice`` (a condition and
    two values). ``wide``: computed in float32 where the type has 16 bits. ``often``: operands occur more
    than once in the expression."""

    name: str
    arity: int
    numpy: Callable[..., Any]
    expression: Expression
    types: str = "same"
    wide: bool = False
    often: bool = False
    others: tuple[Any, ...] = ()  # other functions of the same meaning


def _op(name: str) -> Expression:
    return lambda *values: OPS[name](*values)


def _const(value: float, like: ir.Expr) -> ir.Const:
    """A number in the type of an expression, rounded to it."""
    number = float(value) if like.dtype.kind == "float" else int(value)
    return ir.Const(ir.held_constant(number, like.dtype), like.dtype)


def _floor_divided(a: ir.Expr, b: ir.Expr) -> ir.Expr:
    if a.dtype.kind != "int":
        return ir.FloorDiv(a, b) if a.dtype.is_integer else _quotient_of_floats(a, b)
    minus = ir.Const(ir.wrapped(-int(a.value), a.dtype), a.dtype) if isinstance(a, ir.Const) else -a
    return _divided(a, b, ir.FloorDiv, _const(0, a), minus)


def _remainder(a: ir.Expr, b: ir.Expr) -> ir.Expr:
    if a.dtype.kind != "int":
        return ir.Mod(a, b) if a.dtype.is_integer else _rest_of_floats(a, b)
    return _divided(a, b, ir.Mod, _const(0, a), _const(0, a))


def _rest(a: ir.Expr, b: ir.Expr) -> tuple[ir.Expr, ir.Expr]:
    """What a division of floats towards 0 leaves, exactly, and whether one towards less leaves more."""
    left = ir.Call("rest_wide" if ir.promote(a.dtype, b.dtype) is ir.f64 else "rest", (a, b))
    zero = _const(0.0, left)
    return left, ir.ne(left, zero) & ir.ne(
        ir.select(left < zero, ir.TRUE, ir.FALSE), ir.select(b < zero, ir.TRUE, ir.FALSE)
    )


def _rest_of_floats(a: ir.Expr, b: ir.Expr) -> ir.Expr:
    left, less = _rest(a, b)
    return ir.select(less, left + b, left)


def _quotient_of_floats(a: ir.Expr, b: ir.Expr) -> ir.Expr:
    """NumPy's: the integer nearest to the quotient of what is divided without a rest, the lower of two."""
    left, less = _rest(a, b)
    one, zero = _const(1.0, left), _const(0.0, left)
    whole = a - left  # by a division that rounds once: chips' own division of f32 is off by two units
    exact = (whole / b if left.dtype is ir.f64 else ir.Call("divided", (whole, b))) - ir.select(
        less, one, zero
    )
    low = ir.Call("floor", (exact,))
    nearest = low + ir.select(exact - low > _const(0.5, left), one, zero)
    return ir.select(ir.eq(b, zero), a / b, nearest)


def _divided(
    a: ir.Expr,
    b: ir.Expr,
    divide: Callable[[ir.Expr, ir.Expr], ir.Expr],
    by_zero: ir.Expr,
    by_minus: ir.Expr,
) -> ir.Expr:
    """A quotient or remainder of integers that is NumPy's also for 0, and for -1, by which the least
    number has a quotient beyond its type: no division by either takes place."""
    others: list[tuple[int, ir.Expr]] = [(0, by_zero)]
    others += [(-1, by_minus)] if a.dtype.limits[0] else []
    if isinstance(b, ir.Const):
        return next((e for n, e in others if n == b.value), divide(a, b))
    safe = b
    for n, _ in others:
        safe = ir.select(ir.eq(b, _const(n, b)), _const(1, b), safe)
    made = divide(a, safe)
    for n, e in others:
        made = ir.select(ir.eq(b, _const(n, b)), e, made)
    return made


def _shifted_right(a: ir.Expr, b: ir.Expr) -> ir.Expr:
    """``a >> b``; copies of the sign where all bits are shifted out."""
    beyond: ir.Expr = _const(0, a)
    if a.dtype.kind == "int" and a.dtype.limits[0]:
        beyond = ir.Shr(a, _const(a.dtype.bits - 1, a))
    return _shifted(a, b, ir.Shr, beyond)


def _shifted(
    a: ir.Expr, b: ir.Expr, shift: Callable[[ir.Expr, ir.Expr], ir.Expr], beyond: ir.Expr
) -> ir.Expr:
    """``beyond`` where all bits are shifted out, as they are by less than 0, which NumPy takes for a large
    number."""
    if a.dtype.kind != "int":
        return shift(a, b)
    most = a.dtype.bits
    if isinstance(b, ir.Const):
        return shift(a, b) if 0 <= b.value < most else beyond
    inside = b < most if not b.dtype.limits[0] else (b >= 0) & (b < most)
    return ir.select(inside, shift(a, ir.select(inside, b, _const(0, b))), beyond)


def _inverted(x: ir.Expr) -> ir.Expr:
    if x.dtype is ir.boolean:
        return ir.Not(x)
    least, most = x.dtype.limits
    return x ^ ir.Const(-1 if least else most, x.dtype)


def _power(a: ir.Expr, b: ir.Expr) -> ir.Expr:
    """IEEE 754's: of finite numbers below 0 there are the whole powers; a power of 0 is 1, and so is any
    power of 1. An odd one has the sign, also that of -0."""
    zero, one, half = (_const(n, a) for n in (0.0, 1.0, 0.5))
    base = ir.Call("abs", (a,))
    size = ir.select(ir.eq(base, one), one, ir.Call("exp2", (ir.Call("log2", (base,)) * b,)))
    whole, even = (ir.eq(ir.Call("floor", (x,)), x) for x in (b, b * half))
    signed = ir.select(whole & ir.Not(even) & ((a < zero) | (one / a < zero)), -size, size)
    broken = (a < zero) & (base < _const(np.inf, a)) & ir.Not(whole)
    return ir.select(ir.eq(b, zero), one, ir.select(broken, _const(np.nan, a), signed))


def _rounded(name: str) -> Expression:
    return lambda x: x if x.dtype.is_integer else OPS[name](x)


def _sign(x: ir.Expr) -> ir.Expr:
    one, zero = _const(1, x), _const(0, x)
    return ir.select(x > zero, one, ir.select(x < zero, -one, x if x.dtype.kind == "float" else zero))


def _wide(
    name: str, function: Any, expression: Expression | None = None, *others: Any, often: bool = False
) -> TileFunction:
    return TileFunction(name, 1, function, expression or _op(name), "float", True, often, others)


ROWS = (
    TileFunction("add", 2, np.add, _op("add"), others=(operator.add,)),
    TileFunction("subtract", 2, np.subtract, _op("sub"), others=(operator.sub,)),
    TileFunction("multiply", 2, np.multiply, _op("mul"), others=(operator.mul,)),
    TileFunction("divide", 2, np.divide, _op("div"), "float", True, others=(operator.truediv,)),
    TileFunction(
        "floor_divide",
        2,
        np.floor_divide,
        _floor_divided,
        wide=True,
        often=True,
        others=(operator.floordiv,),
    ),
    TileFunction("remainder", 2, np.remainder, _remainder, wide=True, often=True, others=(operator.mod,)),
    TileFunction("power", 2, np.power, _power, "float", True, often=True, others=(operator.pow,)),
    TileFunction("maximum", 2, np.maximum, _op("max")),
    TileFunction("minimum", 2, np.minimum, _op("min")),
    TileFunction("less", 2, np.less, _op("lt"), "bool", others=(operator.lt,)),
    TileFunction("less_equal", 2, np.less_equal, _op("le"), "bool", others=(operator.le,)),
    TileFunction("greater", 2, np.greater, _op("gt"), "bool", others=(operator.gt,)),
    TileFunction("greater_equal", 2, np.greater_equal, _op("ge"), "bool", others=(operator.ge,)),
    TileFunction("equal", 2, np.equal, ir.eq, "bool", others=(operator.eq,)),
    TileFunction("not_equal", 2, np.not_equal, ir.ne, "bool", others=(operator.ne,)),
    TileFunction("logical_and", 2, np.logical_and, lambda a, b: a & b, "logic"),
    TileFunction("logical_or", 2, np.logical_or, lambda a, b: a | b, "logic"),
    TileFunction("logical_xor", 2, np.logical_xor, lambda a, b: a ^ b, "logic"),
    TileFunction("logical_not", 1, np.logical_not, ir.Not, "logic"),
    TileFunction("bitwise_and", 2, np.bitwise_and, lambda a, b: a & b, "bits", others=(operator.and_,)),
    TileFunction("bitwise_or", 2, np.bitwise_or, lambda a, b: a | b, "bits", others=(operator.or_,)),
    TileFunction("bitwise_xor", 2, np.bitwise_xor, lambda a, b: a ^ b, "bits", others=(operator.xor,)),
    TileFunction("invert", 1, np.invert, _inverted, "bits", others=(operator.invert,)),
    TileFunction(
        "left_shift",
        2,
        np.left_shift,
        lambda a, b: _shifted(a, b, ir.Shl, _const(0, a)),
        often=True,
        others=(operator.lshift,),
    ),
    TileFunction("right_shift", 2, np.right_shift, _shifted_right, often=True, others=(operator.rshift,)),
    TileFunction("negative", 1, np.negative, _op("neg"), others=(operator.neg,)),
    TileFunction("positive", 1, np.positive, lambda x: x, others=(operator.pos,)),
    TileFunction("absolute", 1, np.absolute, _op("abs"), others=(abs,)),
    TileFunction("fabs", 1, np.fabs, _op("abs"), "float"),
    TileFunction("square", 1, np.square, lambda x: x * x, often=True),
    TileFunction("sign", 1, np.sign, _sign, often=True),
    TileFunction("isnan", 1, np.isnan, lambda x: ir.ne(x, x), "bool", often=True),
    TileFunction("where", 3, np.where, ir.select, "choice"),
    _wide("exp", np.exp, None, math.exp),
    _wide("exp2", np.exp2),
    _wide("expm1", np.expm1, None, math.expm1),
    _wide("log", np.log, None, math.log),
    _wide("log2", np.log2, None, math.log2),
    _wide("sqrt", np.sqrt, None, math.sqrt),
    _wide("sin", np.sin, None, math.sin),
    _wide("cos", np.cos, None, math.cos),
    _wide("tanh", np.tanh, None, math.tanh),
    _wide("erf", np.vectorize(math.erf, otypes=[np.float64]), None, math.erf),
    _wide("reciprocal", np.reciprocal, lambda x: _const(1, x) / x),
    *(
        TileFunction(name, 1, function, _rounded(op), wide=True, others=others)
        for name, function, op, others in (
            ("floor", np.floor, "floor", ()),
            ("ceil", np.ceil, "ceil", ()),
            ("rint", np.rint, "round", (np.round,)),
        )
    ),
)
FUNCTIONS: dict[str, TileFunction] = {row.name: row for row in ROWS}
"""Every function, by NumPy's name."""
_KNOWN: list[tuple[Any, TileFunction]] = [(f, row) for row in ROWS for f in (row.numpy, *row.others)]


def function_of(callee: Any) -> TileFunction | None:
    """The row of a function of NumPy, math or operator; None if there is none."""
    return next((row for f, row in _KNOWN if f is callee), None)


def common(types: list[ir.DType], weak: list[type]) -> ir.DType:
    """The type in which operands are combined. ``weak``: the Python types of numbers among them, which
    give way to the types of tiles, as positions do; float32 for an integer tile with a Python float."""
    strong = [t for t in types if t.kind != "index"]
    if not strong:
        return ir.f32 if float in weak else ir.index
    found = strong[0]
    for t in strong[1:]:
        if t is not found and t.kind == found.kind == "int" and t.bits == found.bits:
            raise Refusal(f"{named(found)} with {named(t)}", "integers of one kind", "x.astype(np.int32)")
        found = ir.promote(found, t)
    if found.kind == "float" and found.bits == 8:
        return ir.f32
    if found is ir.boolean and (int in weak or len(strong) < len(types)):
        found = ir.i32
    return ir.f32 if float in weak and found.kind != "float" else found


def operand_type(row: TileFunction, shared: ir.DType) -> ir.DType:
    """The type in which a row computes, from the common type of its operands."""
    if row.types == "logic":
        return ir.boolean
    if row.types == "bits":
        if shared.kind == "float":
            raise Refusal(f"{row.name} of {named(shared)}", "booleans or integers", "(x > 0) & (x < 1)")
        return shared
    if row.name == "power" and shared.kind == "int":  # f32 would round it
        raise Refusal(
            f"a power of {named(shared)} whose exponent is a tile",
            "a number as exponent, or floats",
            "x.astype(np.float32) ** y",
        )
    if shared is ir.boolean and row.types not in ("bool", "choice"):
        shared = ir.i32
    if row.types == "float" and shared.kind != "float":
        shared = ir.f32
    return ir.f32 if row.wide and shared.kind == "float" and shared.bits < 32 else shared


def result_type(row: TileFunction, shared: ir.DType) -> ir.DType:
    """The type of a row's result, from the common type of its operands."""
    if row.types in ("bool", "logic"):
        return ir.boolean
    if row.types == "float" or row.wide:
        return shared if shared.kind == "float" else operand_type(row, shared)
    return operand_type(row, shared)


def beyond(row: TileFunction, work: ir.DType, numbers: Sequence[tuple[int, int] | None]) -> bool:
    """Whether operands hold numbers that the type in which a row computes does not: numbers of Python and
    positions, which give way to the types of tiles. ``numbers``: their least and largest, None for other
    operands. Comparisons are then of positions, which hold all; elsewhere it is an error in NumPy, and
    refused. ``np.where`` keeps the last bits, as NumPy does."""
    if work.kind != "int" or row.types in ("choice", "logic"):
        return False
    least, most = work.limits
    outside = [n for n in numbers if n is not None and not least <= n[0] <= n[1] <= most]
    if outside and row.types != "bool":
        raise out_of_bounds(outside[0], work)
    return bool(outside)


def out_of_bounds(found: tuple[int, int], dtype: ir.DType) -> Refusal:
    """The refusal of a number for a tile whose type does not hold it."""
    least, most = dtype.limits
    told = f"{found[0]}" if found[0] == found[1] else "a number that is known at run time only"
    return Refusal(
        f"{told} beside values of {named(dtype)}, which are {least} to {most}",
        "numbers that the type holds, a wider type",
        "x.astype(np.int32)",
    )


def held_number(value: Any, dtype: ir.DType) -> None:
    """Refuse an integer of Python for a place of a type that does not hold it, as NumPy does."""
    if (
        isinstance(value, int)
        and dtype.kind == "int"
        and not (dtype.limits[0] <= value <= dtype.limits[1])
    ):
        raise out_of_bounds((value, value), dtype)


def clipped(dtype: ir.DType, low: Any, high: Any) -> tuple[Any, Any]:
    """The limits of ``np.clip``, without a number of Python that no value of the type is beyond."""
    if dtype.kind == "int":
        least, most = dtype.limits
        low = None if type(low) is int and low <= least else low
        high = None if type(high) is int and high >= most else high
    return low, high


def cast(e: ir.Expr, dtype: ir.DType) -> ir.Expr:
    """The value in a type; a constant of it where the value is one."""
    if e.dtype is dtype:
        return e
    if isinstance(e, ir.Const) and dtype.kind != "bool":
        if dtype.kind == "float":
            return ir.Const(ir.held_constant(float(ir.held_constant(e.value, e.dtype)), dtype), dtype)
        if not isinstance(e.value, float):
            return ir.Const(ir.wrapped(int(e.value), dtype), dtype)
    if dtype is ir.boolean:
        return ir.ne(e, _const(0, e))
    if dtype.kind == "index" and e.dtype.kind == "float":
        raise Refusal(f"{named(e.dtype)} as a position", "integers", "x.astype(np.int32)")
    return ir.Cast(e, dtype)


def product_type(shared: ir.DType, a: Sequence[int], b: Sequence[int], told: str) -> ir.DType:
    """The type of the sums of a product of matrices of a type and these shapes. Refuses others; ``told``:
    in words."""
    if len(a) != 2 or len(b) != 2:
        raise Refusal(f"a product of {told}", "tiles of two dimensions", "x[None, :] @ y[:, None]")
    if a[1] != b[0]:
        raise Refusal(f"a product of shapes {tuple(a)} and {tuple(b)}", "equal inner sizes")
    if shared.kind == "float":
        return ir.f64 if shared is ir.f64 else ir.f32
    if shared.is_integer:
        return ir.i32 if shared.bits <= 32 else shared
    raise Refusal(f"a product of {told}", "floats or integers", "x.astype(np.float32) @ y")


def reduced_axes(axis: Any, rank: int, of: object) -> tuple[int, ...]:
    """The dimensions that a reduction is over, in order; all for None."""
    if axis is None:
        return tuple(range(rank))
    given = axis if isinstance(axis, tuple) else (axis,)
    for a in given:
        if not isinstance(a, int) or not -rank <= a < rank:
            raise Refusal(f"axis {a} of {of}", f"a number from {-rank} to {rank - 1}")
    found = {a % rank for a in given}
    if len(found) < len(given):
        raise Refusal(f"an axis twice in {given}", "each axis once")
    return tuple(sorted(found))


def one_axis(name: str, axis: Any, rank: int, of: object) -> int:
    """The dimension along which a function of NumPy takes elements in their order."""
    axes = reduced_axes(axis, rank, of)
    if len(axes) != 1:
        raise Refusal(f"np.{name} of {of} with axis={axis}", "one axis", f"np.{name}(x, axis=0)")
    return axes[0]


@dataclass(frozen=True, slots=True)
class TileReduction:
    """A reduction of NumPy: ``op``, its row in ``ir.REDUCERS``; ``types``: ``sum`` (small integers in
    int32), ``same``, ``bool``, ``mean`` or ``place`` (the index of the first extreme element)."""

    name: str
    op: str
    numpy: Any
    types: str = "same"
    others: tuple[Any, ...] = ()


_REDUCTIONS = (
    TileReduction("sum", "sum", np.sum, "sum", (sum,)),
    TileReduction("prod", "prod", np.prod, "sum"),
    TileReduction("max", "max", np.max, others=(np.amax, max)),
    TileReduction("min", "min", np.min, others=(np.amin, min)),
    TileReduction("any", "max", np.any, "bool", (any,)),
    TileReduction("all", "min", np.all, "bool", (all,)),
    TileReduction("mean", "sum", np.mean, "mean"),
    TileReduction("argmax", "max", np.argmax, "place"),
    TileReduction("argmin", "min", np.argmin, "place"),
)
REDUCTIONS = {row.name: row for row in _REDUCTIONS}
"""Every reduction, by NumPy's name; methods of tiles have these names."""


RUNNING = {"cumsum": REDUCTIONS["sum"], "cumprod": REDUCTIONS["prod"]}
"""The reductions of elements up to each, by NumPy's name."""


def reduction_of(callee: Any) -> TileReduction | None:
    """The row of a function of NumPy, or of Python; None if there is none."""
    return next((r for r in REDUCTIONS.values() if any(callee is f for f in (r.numpy, *r.others))), None)


def types_of(row: TileReduction, dtype: ir.DType) -> tuple[ir.DType, ir.DType]:
    """The type of the result, and that in which it is computed; of a place, in which elements are
    compared."""
    if row.types == "bool":
        return ir.boolean, ir.i32
    if row.types == "place":
        return ir.i32, ir.i32 if dtype is ir.boolean else dtype
    if dtype.kind == "float":
        gives = ir.f32 if dtype.bits == 8 else dtype
        return gives, gives if gives.bits >= 32 else ir.f32
    if dtype.kind in ("index", "bool") or (row.types == "sum" and dtype.bits < 32):
        return ir.i32, ir.i32
    return dtype, ir.i32 if dtype.bits < 32 else dtype
