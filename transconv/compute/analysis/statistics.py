"""Statistics: stores that reduce the result of a product, or of a row, while it is at hand.

    let   y = f16(s)                       a product's result, rounded
    store Y[n, c, h, w] = y
    store M[n, c//16] sum= y               the sum of all y that have this place
    store D[n, c//16] squares= y           the sum of their squared deviations from their mean

The result need not be read again: each tile leaves partial values, which a second kernel combines in a
fixed order (schedule/tiles/partial_results.py), so results are the same in every run. What is reduced is
the value as it is written here: ``y`` is what is stored, ``s`` the accumulator, which is more exact. A
coordinate is an axis (kept), an axis by a number (neighbours share a place), or a constant; the other axes
are reduced. Of rows, which are reduced along some axes, or of a map a statistic keeps those axes and
reduces others: so the gradient of a norm's weight leaves with that of its input. Squared deviations take
those of each tile, with its own mean (Chan, Golub, LeVeque 1979), and the sum that a store before them has
of the same value."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from transconv.compute.steps import Write
from transconv.ir import TRUE, Cast, Const, Expr, FloorDiv, Var, f32, f64, i32, i64

if TYPE_CHECKING:
    from transconv.compute.compute import Compute

STATISTICS = ("sum", "max", "min", "squares")
"""The operations of a store that reduce."""
WIDE = (f32, f64, i32, i64)  # types in which they are kept


def kept(write: Write) -> dict[str, int] | None:
    """The axes in the coordinates of a statistic, each with the number by which it is divided; None if a
    coordinate has another form."""
    found: dict[str, int] = {}
    for dim in write.view.dims:
        match dim.coord:
            case Const():
                continue
            case Var(name):
                by = 1
            case FloorDiv(Var(name), Const(by)):
                pass
            case _:
                return None
        if name in found:
            return None
        found[name] = int(by)
    return found


def points(compute: Compute) -> dict[str, int]:
    """The axes at whose points there are values to reduce, with their sizes: those of a product's result,
    all axes of rows and of maps."""
    return {x.name: x.size for x in compute.axes if compute.factors is None or compute.kind(x.name) != "K"}


def value_of(write: Write) -> Expr:
    """What is reduced, in the tensor's type, without a cast to it that changes nothing."""
    value = write.value
    return value.x if isinstance(value, Cast) and value.x.dtype is value.type else value


def sum_of(compute: Compute, write: Write) -> Write | None:
    """The sum, stored before, of the value whose squared deviations are added up."""
    for other in compute.statistics:
        if other is write:
            break
        if (
            other.op == "sum"
            and value_of(other) is value_of(write)
            and ([d.coord for d in other.view.dims] == [d.coord for d in write.view.dims])
        ):
            return other
    return None


@lru_cache(maxsize=1024)
def why_not_reduced(compute: Compute) -> str | None:
    """None if one kernel can leave partial values of all statistics, else the reason."""
    for write in compute.statistics:
        if reason := _why_not_form(compute, write) or _why_not_value(compute, write):
            return f"{write.view.tensor.name} {write.op}= {reason}"
    return None


def _why_not_form(compute: Compute, write: Write) -> str | None:
    tensor = write.view.tensor
    if compute.writes[0].op:
        return f"reduces a result, and none is stored before it; to add write store {tensor.name}[..] += x"
    if compute.part is not None and compute.does == "compute":
        return "would need all stride phases of the result, which are computed apart"
    if compute.named is not None:
        return "leaves as many values as tiles, which sizes that are arguments do not tell"
    if sum(w.view.tensor is tensor for w in compute.writes) > 1:
        return "is stored by another step, too"
    if write.view.mask() is not TRUE:
        return "has a condition; expected all points to count"
    if (found := kept(write)) is None:
        return "has a coordinate that is neither an axis, nor one divided by a number, nor a number"
    for name, by in found.items():
        if name not in points(compute):
            return f"has no value for each {name}; expected axes of the result in its coordinates"
        if compute.size(name) % by:
            return f"divides {name}={compute.size(name)} by {by}; expected a divisor"
    lost = next(
        (
            x.name
            for x in compute.axes_of("K")
            if x.size > 1 and compute.factors is None and x.name not in found
        ),
        None,
    )
    if lost:
        return f"reduces {lost}, as rows are; expected it in the coordinates, or let m = sum(...; {lost})"
    return None


def _why_not_value(compute: Compute, write: Write) -> str | None:
    tensor = write.view.tensor
    if tensor.dtype not in WIDE:
        return f"is kept in {tensor.dtype}; expected {', '.join(map(str, WIDE))}"
    free = {x.name for x in compute.axes if x.size > 1 and compute.kind(x.name) != "K"}
    if missing := free - compute.roots(write.value):
        return f"is the same along {min(missing)}; expected a value of the product's result"
    if write.op == "squares":
        if tensor.dtype.kind != "float":
            return f"has a mean, which {tensor.dtype} does not hold; expected f32 or f64"
        if sum_of(compute, write) is None:
            return "needs the sum of the same value, stored before at the same coordinates"
    return None
