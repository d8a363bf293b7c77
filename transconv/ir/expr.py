"""Expressions: pure values, with operators. ``a + b``, ``a // b`` (rounds down), ``a < b`` build nodes.
``==`` is identity, because nodes are members of sets and dicts; ``eq(a, b)`` builds an equality.
An expression that mentions lanes is a tile. Its shape has the extents of the lanes, ordered by their
``axis``; operands are broadcast along lanes that they do not mention.

Converts Python's and NumPy's scalars to constants of expressions."""

from __future__ import annotations

from typing import Any, Protocol, Union

import numpy as np

from transconv.ir.dtype import DType, boolean, f32, index, promote
from transconv.ir.node import Node, node

Number = Union[int, float, bool, "np.integer[Any]", "np.floating[Any]", np.bool_]


def number_of(value: object) -> int | float | bool:
    """The Python number that a scalar is. TypeError for anything else."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value)
    raise TypeError(
        f"the operand {value!r} ({type(value).__name__}) is neither an IR expression nor a number"
    )


class Standing(Protocol):
    """A value that stands for an expression."""

    @property
    def expr(self) -> Expr:
        """It."""


Like = Union["Expr", Number, Standing]
"""An expression, or a number that becomes one."""


class Expr(Node):
    """Base of all expressions. The other operand of an operator may be a number, on either side."""

    __slots__ = ()
    __array_ufunc__ = None  # makes NumPy leave numpy.int64(3) + e to ``__radd__``

    @property
    def dtype(self) -> DType:
        """The type of the value."""
        raise NotImplementedError

    def __str__(self) -> str:
        from transconv.ir.printer import text

        return text(self)

    def __add__(self, other: Like) -> Expr:
        return Add(self, self._like(other))

    def __radd__(self, other: Like) -> Expr:
        return Add(self._like(other), self)

    def __sub__(self, other: Like) -> Expr:
        return Sub(self, self._like(other))

    def __rsub__(self, other: Like) -> Expr:
        return Sub(self._like(other), self)

    def __mul__(self, other: Like) -> Expr:
        return Mul(self, self._like(other))

    def __rmul__(self, other: Like) -> Expr:
        return Mul(self._like(other), self)

    def __truediv__(self, other: Like) -> Expr:
        return Div(self, self._like(other))

    def __rtruediv__(self, other: Like) -> Expr:
        return Div(as_expr(other), self)

    def __floordiv__(self, other: Like) -> Expr:
        return FloorDiv(self, self._like(other))

    def __rfloordiv__(self, other: Like) -> Expr:
        return FloorDiv(self._like(other), self)

    def __mod__(self, other: Like) -> Expr:
        return Mod(self, self._like(other))

    def __rmod__(self, other: Like) -> Expr:
        return Mod(self._like(other), self)

    def __neg__(self) -> Expr:
        return Neg(self)

    def __lt__(self, other: Like) -> Expr:
        return Lt(self, self._like(other))

    def __le__(self, other: Like) -> Expr:
        return Le(self, self._like(other))

    def __gt__(self, other: Like) -> Expr:
        return Lt(self._like(other), self)

    def __ge__(self, other: Like) -> Expr:
        return Le(self._like(other), self)

    def __and__(self, other: Like) -> Expr:
        return And(self, self._like(other))

    def __rand__(self, other: Like) -> Expr:
        return And(as_expr(other), self)

    def __or__(self, other: Like) -> Expr:
        return Or(self, self._like(other))

    def __ror__(self, other: Like) -> Expr:
        return Or(as_expr(other), self)

    def __xor__(self, other: Like) -> Expr:
        return Xor(self, self._like(other))

    def __rxor__(self, other: Like) -> Expr:
        return Xor(as_expr(other), self)

    def __lshift__(self, other: Like) -> Expr:
        return Shl(self, self._like(other))

    def __rlshift__(self, other: Like) -> Expr:
        return Shl(as_expr(other), self)

    def __rshift__(self, other: Like) -> Expr:
        return Shr(self, self._like(other))

    def _like(self, other: Like) -> Expr:
        """The other operand. A Python integer gets the type of an ``int`` operand, else it is an index."""
        made = as_expr(other)
        if made is other or not isinstance(made, Const) or made.type is not index:
            return made
        return Const(made.value, self.dtype) if self.dtype.kind == "int" else made

    def __rrshift__(self, other: Like) -> Expr:
        return Shr(as_expr(other), self)

    def __invert__(self) -> Expr:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            f"the truth of `{self}` is not known while the kernel is built; "
            "use And/Or/Not/Select, or `is` to compare nodes"
        )


@node
class Const(Expr):
    """A constant of a given type. NumPy scalars become Python numbers."""

    value: int | float | bool
    type: DType = index

    def __post_init__(self) -> None:
        if type(self.value) not in (int, float, bool):
            object.__setattr__(self, "value", number_of(self.value))

    @property
    def dtype(self) -> DType:
        return self.type


@node
class Var(Expr):
    """A variable, identified by its name and type."""

    name: str
    type: DType = index

    @property
    def dtype(self) -> DType:
        return self.type


@node
class Lane(Expr):
    """The vector 0, 1, ... extent - 1 along one block of a tile.

    ``axis`` orders the dimensions of a tile: batch lanes first, then M, K, N, so that ``a[m, k]``,
    ``b[k, n]`` and ``acc[m, n]`` have the shapes that a matrix unit takes. ``kind`` of the axes that the
    lane runs along: B, M, N or K; empty if it has none."""

    name: str
    extent: int
    axis: int
    kind: str = ""

    @property
    def dtype(self) -> DType:
        return index


@node
class Unary(Expr):
    """An operation on one operand, ``x``."""

    x: Expr


@node
class Neg(Unary):
    """``-x``"""

    @property
    def dtype(self) -> DType:
        return self.x.dtype


@node
class Not(Unary):
    """``~x`` of a boolean."""

    @property
    def dtype(self) -> DType:
        return boolean


@node
class Binary(Expr):
    """An operation on two operands, ``a`` and ``b``."""

    a: Expr
    b: Expr


class Arithmetic(Binary):
    """An operation whose result has the promoted type of its operands."""

    __slots__ = ()

    @property
    def dtype(self) -> DType:
        try:
            found: DType = self._dtype
        except AttributeError:
            found = promote(self.a.dtype, self.b.dtype)
            object.__setattr__(self, "_dtype", found)
        return found


class Compare(Binary):
    """A comparison; the result is a boolean."""

    __slots__ = ()

    @property
    def dtype(self) -> DType:
        return boolean


class Logic(Binary):
    """An operation on booleans, or on the bits of integers."""

    __slots__ = ()

    @property
    def dtype(self) -> DType:
        return promote(self.a.dtype, self.b.dtype)


@node
class Add(Arithmetic):
    """``a + b``"""


@node
class Sub(Arithmetic):
    """``a - b``"""


@node
class Mul(Arithmetic):
    """``a * b``"""


@node
class Div(Binary):
    """True division; the result is a float."""

    @property
    def dtype(self) -> DType:
        both = promote(self.a.dtype, self.b.dtype)
        return both if both.kind == "float" else f32


@node
class FloorDiv(Arithmetic):
    """Integer division rounding down, also for negatives: -1 // 2 is -1. The divisor is not 0."""


@node
class Mod(Arithmetic):
    """``a - a // b * b``: never negative for a positive divisor, -1 % 2 is 1."""


@node
class Min(Arithmetic):
    """The lesser operand; NaN if one is."""


@node
class Max(Arithmetic):
    """The greater operand; NaN if one is."""


@node
class Shl(Arithmetic):
    """``a << b``"""


@node
class Shr(Arithmetic):
    """``a >> b``, with the sign kept."""


@node
class Lt(Compare):
    """``a < b``"""


@node
class Le(Compare):
    """``a <= b``"""


@node
class Eq(Compare):
    """``a == b``, built by ``eq``."""


@node
class Ne(Compare):
    """``a != b``, built by ``ne``."""


@node
class And(Logic):
    """``a & b``"""


@node
class Or(Logic):
    """``a | b``"""


@node
class Xor(Logic):
    """``a ^ b``"""


INFIX: dict[type[Binary], str] = {
    Add: "+",
    Sub: "-",
    Mul: "*",
    Div: "/",
    FloorDiv: "//",
    Mod: "%",
    Shl: "<<",
    Shr: ">>",
    Lt: "<",
    Le: "<=",
    Eq: "==",
    Ne: "!=",
    And: "&",
    Or: "|",
    Xor: "^",
}
"""The signs of operations, as Python's operators have them."""
TRUE = Const(True, boolean)
"""True, a boolean."""
FALSE = Const(False, boolean)
"""False, a boolean."""
ZERO = Const(0)
"""0, an index."""
ONE = Const(1)
"""1, an index."""


def as_expr(value: Like) -> Expr:
    """A Python or NumPy number as a constant: a bool is ``boolean``, an integer ``index``, a float
    ``f32``. An expression is returned unchanged, as is the one that something stands for. TypeError for
    anything else."""
    if isinstance(value, Expr):
        return value
    if isinstance(held := getattr(value, "expr", None), Expr):
        return held
    if isinstance(number := number_of(value), bool):
        return TRUE if number else FALSE
    return Const(number) if isinstance(number, int) else Const(number, f32)
