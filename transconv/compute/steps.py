"""What a computation is made of: axes, and the steps over them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from transconv.ir import Cast, Expr, Mul, Var, View

variable = lru_cache(maxsize=1 << 12)(Var)
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
    extent: Expr | None = None

    @property
    def var(self) -> Var:
        """The variable of its positions."""
        return variable(self.name)


@dataclass(frozen=True, slots=True)
class Read:
    """``name = tensor[coordinates]``: an element seen through a view, ``fill`` where its mask is false."""

    name: str
    view: View
    fill: float = 0.0

    @property
    def var(self) -> Var:
        """The element as a variable of the tensor's type."""
        return variable(self.name, self.view.tensor.dtype)


@dataclass(frozen=True, slots=True)
class Value:
    """``name = value``; the value is an expression of axes and of names before it."""

    name: str
    value: Expr

    @property
    def casts(self) -> bool:
        """Whether it is another value in another type."""
        e = self.value
        while isinstance(e, Cast):
            e = e.x
        return isinstance(e, Var) and e is not self.value

    @property
    def var(self) -> Var:
        """The value as a variable of its type."""
        return variable(self.name, self.value.dtype)


@dataclass(frozen=True, slots=True)
class Reduction:
    """``name = op(value; axes)``; the result does not depend on these axes."""

    name: str
    op: str
    value: Expr
    axes: tuple[str, ...]

    @property
    def var(self) -> Var:
        """The result as a variable of the value's type."""
        return variable(self.name, self.value.dtype)

    @property
    def factors(self) -> tuple[Var, Var] | None:
        """The two variables of a product ``a*b``, with or without casts; None for other values."""
        match self.value:
            case Mul((Cast(Var() as a) | (Var() as a)), (Cast(Var() as b) | (Var() as b))) if a is not b:
                return a, b
        return None


@dataclass(frozen=True, slots=True)
class Write:
    """``tensor[coordinates] = value``; the value has the tensor's type. With ``op`` ``add``: ``+= value``,
    to a tensor that is zero at first; several points may add to one element. ``sum``, ``max``, ``min`` and
    ``squares`` reduce the values of all points that have one place (see analysis/statistics.py)."""

    view: View
    value: Expr
    op: str = ""

    @property
    def unrounded(self) -> Expr:
        """The value before it is rounded to the tensor's type; what is added to others is rounded."""
        match self.value:
            case Cast(x) if not self.op and x.dtype.kind == self.value.dtype.kind == "float":
                return x
        return self.value


Step = Read | Value | Reduction | Write
"""A line of a computation."""
