"""Matrix products of tiles: a call of the matrix unit where the chip has the instruction, else sums.

``a @ b`` is ``sum(a[:, :, None] * b[None], axis=1)``: inactive elements count as 0, and an element of the
result is active where a pair of active ones is, as numpy.ma.dot has it. Products of 16-bit floats give
float32, those of int8 int32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from transconv.ir import (
    Cast,
    Const,
    DType,
    Expr,
    FuncCall,
    Lane,
    Reduce,
    Renamed,
    Select,
    Spread,
    Var,
    all_of,
    dot,
    i32,
    lanes_of,
    multiplied_as,
)
from transconv.kernel.functions import common, of_product
from transconv.kernel.refusals import Refusal
from transconv.kernel.tiles.elementwise import as_type, named
from transconv.kernel.tiles.kernel_builder import Building
from transconv.kernel.tiles.lanes import ends, inner_lane, lanes_along
from transconv.kernel.tiles.masks import at_first, joined, mentions
from transconv.kernel.tiles.reductions import REDUCTIONS, reduced
from transconv.kernel.tiles.values import Mask, Tile
from transconv.target import Target

LEAST = 16  # rows and columns of a call of the matrix unit


@dataclass(frozen=True, slots=True)
class Chip:
    """The chip that a kernel is for, and the precision of products of float32 there."""

    target: Target
    asked: str = "ieee"

    @property
    def precision(self) -> str:
        """The precision asked for if the chip has it, else ieee."""
        held = not self.target.upcast16 and self.asked in self.target.precisions
        return self.asked if held else "ieee"


@dataclass(frozen=True, slots=True)
class PendingProduct:
    """``a @ b`` that is not computed yet: it may be added to a name that changes."""

    a: Tile
    b: Tile
    result: DType

    @property
    def own(self) -> tuple[int, ...]:
        """The shape of the result, that of one item."""
        return self.a.own[0], self.b.own[1]

    @property
    def items(self) -> int:
        """How many dimensions of items the result has."""
        return max(self.a.items, self.b.items)


def product(a: Tile, b: Tile) -> PendingProduct:
    """The product of two matrices. Refuses other ranks and sizes."""
    if len(a.own) != 2 or len(b.own) != 2:
        raise Refusal(f"a product of {a} and {b}", "tiles of two dimensions", "x[None, :] @ y[:, None]")
    if a.own[1] != b.own[0]:
        raise Refusal(f"a product of shapes {a.own} and {b.own}", "equal inner sizes")
    shared = common([a.dtype, b.dtype], [])
    result = of_product(shared)
    if result is None:
        raise Refusal(f"a product of {a} and {b}", "floats or integers", "x.astype(np.float32) @ y")
    return PendingProduct(a, b, result)


def computed(b: Building, p: PendingProduct, chip: Chip) -> Tile:
    """The value of a product."""
    made = _computed(b, p, chip)
    b.multiplied.add(made.expr)
    return made


def _computed(b: Building, p: PendingProduct, chip: Chip) -> Tile:
    operands = _operands(b, p, chip)
    if operands is None:
        return _summed(b, p)
    acc = b.alloc("product", p.result, p.own, Const(0.0 if p.result.kind == "float" else 0, p.result))
    b.add(FuncCall(dot(chip.precision), (acc, *operands)))
    b.changing.discard(acc)  # complete
    return Tile(p.own, acc, active(b, p))


def added(b: Building, acc: Var, p: PendingProduct, chip: Chip) -> bool:
    """Add a product to a name that changes, in one call of the matrix unit; whether that is possible."""
    operands = _operands(b, p, chip) if acc.type is p.result else None
    if operands is None:
        return False
    b.add(FuncCall(dot(chip.precision), (acc, *operands)))
    return True


def active(b: Building, p: PendingProduct) -> Mask:
    """Where the result is active: in active rows and columns, where both have an active element."""
    (_, inner), (again, _) = lanes_along(p.a.shape), lanes_along(p.b.shape)
    if inner is None or again is None:
        return joined(p.a.mask, p.b.mask)
    middle = inner_lane(p.a.shape[1])
    masks = [b.move(m, {inner: middle}) for m in p.a.mask]
    masks += [b.move(m, {again: middle}) for m in p.b.mask]
    inside = [m for m in masks if mentions(m, [middle], b.scope)]
    rest = [m for m in masks if m not in inside]
    found = at_first(inside, [middle], b.scope)
    if found is None:
        size = p.a.shape[1]
        end = [middle < size] if middle.extent != size else []
        found = (b.let("active", Reduce("max", Cast(all_of([*inside, *end]), i32), middle)) > 0,)
    return b.proved(joined(rest, found))


def _operands(b: Building, p: PendingProduct, chip: Chip) -> tuple[Expr, Expr] | None:
    """The operands of a call of the matrix unit; None where there is no instruction for them, and for
    items, each of which has a product of its own."""
    if p.items:
        return None
    kind = common([p.a.dtype, p.b.dtype], [])
    (rows, inner), (again, cols) = lanes_along(p.a.shape), lanes_along(p.b.shape)
    if rows is None or inner is None or again is None or cols is None:
        return None
    short = min(rows.extent, cols.extent) < LEAST or inner.extent < chip.target.least_steps(kind, kind)
    if short or chip.target.mma(kind, kind, p.result) is None:
        return None
    middle = inner_lane(p.a.shape[1])
    return (_operand(b, p.a, kind, inner, middle, chip), _operand(b, p.b, kind, again, middle, chip))


def _operand(b: Building, x: Tile, kind: DType, lane: Lane, middle: Lane, chip: Chip) -> Expr:
    """A name of the operand, 0 where it is inactive along ``lane``, which becomes ``middle``."""
    value = as_type(x, kind).expr
    mask = joined(*([m for m in part if mentions(m, [lane], b.scope)] for part in (x.mask, ends(x.shape))))
    if mask and not b.is_zero(value, mask):
        value = Select(all_of(mask), value, Const(0.0 if kind.kind == "float" else 0, kind))
    if (taken := multiplied_as(kind, chip.precision)) is not kind:
        value = Cast(value, taken)
    if lanes_of(value, b.scope) != x.lanes:
        value = Spread(value, x.lanes)
    if not isinstance(value, (Var, Renamed)):
        value = b.let("operand", value)
    return b.move(value, {lane: middle})


def _summed(b: Building, p: PendingProduct) -> Tile:
    """The product as a sum of products."""
    rows, inner = p.a.own
    cols = p.b.own[1]
    left = _behind(b, as_type(p.a, p.result), (rows, inner, 1), (0, 1, None))
    right = _behind(b, as_type(p.b, p.result), (1, inner, cols), (None, 0, 1))
    return reduced(b, REDUCTIONS["sum"], named(b, "multiply", left, right), 1)


def _behind(b: Building, x: Tile, shape: tuple[int, ...], of: tuple[int | None, ...]) -> Tile:
    """A tile whose own dimensions are in other places."""
    places = (None if i is None else i + x.items for i in of)
    made = b.placed(x, (*x.shape[:x.items], *shape), (*range(x.items), *places))
    return replace(made, items=x.items)
