"""What a computation is made of: axes, and the steps over them."""

from __future__ import annotations

from dataclasses import dataclass

from transconv.ir import Expr, Var, View


@dataclass(frozen=True, slots=True)
class Axis:
    """A loop of the computation: its name, its trip count, and its role. ``position``: a place
    in an image, or an image; ``window``: an element of a sliding window; ``feature``: an element of the
    vector at a position; ``batch``: one of several independent products; ``part``: of a split sum.
    ``extent``: of an axis whose size is an argument, that as an expression; ``size`` is an example."""

    name: str
    size: int
    role: str
    extent: Expr | None = None

    @property
    def var(self) -> Var:
        """The variable of its positions."""
        return Var(self.name)


@dataclass(frozen=True, slots=True)
class Read:
    """``name = tensor[coordinates]``: an element seen through a view, ``fill`` where its mask is false."""

    name: str
    view: View
    fill: float = 0.0

    @property
    def var(self) -> Var:
        """What is read, as a variable of the tensor's type."""
        return Var(self.name, self.view.tensor.dtype)


@dataclass(frozen=True, slots=True)
class Value:
    """``name = value``, of the names before it."""

    name: str
    value: Expr

    @property
    def var(self) -> Var:
        """The value, as a variable of its type."""
        return Var(self.name, self.value.dtype)


@dataclass(frozen=True, slots=True)
class Reduction:
    """``name = op(value; axes)``: the axes that it names are gone behind it."""

    name: str
    op: str
    value: Expr
    axes: tuple[str, ...]

    @property
    def var(self) -> Var:
        """The result, as a variable."""
        return Var(self.name, self.value.dtype)


@dataclass(frozen=True, slots=True)
class Write:
    """``tensor[coordinates] = value``, which has the tensor's type. ``op`` ``add``: ``+= value``, where
    several points may share a place; the tensor begins with zeros."""

    view: View
    value: Expr
    op: str = ""


Step = Read | Value | Reduction | Write
"""A line of a computation."""
