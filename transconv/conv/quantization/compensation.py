"""What zero points of integer operands add to a product: ``sum (data - z[channel])*(wei - y)`` over the
points inside of data.

The data are src in a forward convolution, dst in the gradient of src, which is a transposed convolution.
What lies outside of them is exact: it counts as the zero point, which subtracted is 0. The product is that
of the elements as they are stored; what zero points add to it is subtracted behind the sum:

    sum (data - z)*(wei - y)  =  sum data*wei  -  sum z*wei  -  y * sum (data - z)

The second sum is that of one image of zero points, which differs only where something outside is read. So
a kernel of its own computes it once for each state of an axis (each position at a border, and one for all
between), and another the third, once for each position of the result. Both are written from the product
alone: its axes, and the mask of its first operand. What shifts of operands take from it
(quantization/u8_shift.py) is subtracted in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transconv.compute import Axis, Compute, Read, Reduction, Step, Value, Write, product
from transconv.conv.quantization.u8_shift import Shifts, less
from transconv.conv.quantization.zero_points import SUMS, TABLE, ZeroPoints
from transconv.ir import (
    ZERO,
    Cast,
    Const,
    Expr,
    Layout,
    Tensor,
    Var,
    View,
    ViewDim,
    all_of,
    free_vars,
    i32,
    maximum,
    minimum,
    select,
    substitute,
)
from transconv.simplify import Facts, range_of

if TYPE_CHECKING:
    from transconv.conv.problem.conv_problem import ConvProblem


@dataclass(frozen=True, slots=True)
class States:
    """The states of one axis of the result: ``low`` positions that read outside below, ``size`` in all, of
    ``positions``."""

    low: int
    size: int
    positions: int

    @staticmethod
    def of(main: Compute, axis: Axis) -> States:
        """Those of a position. It shifts a coordinate of the data; between the borders all that is summed
        there, in every stride phase, is inside."""
        facts = Facts()
        for other in main.axes:
            facts = facts.with_range(other.var, 0, max(0, other.size - 1))
        n = low = high = axis.size
        for dim, size in zip(main.a.dims, main.a.tensor.shape, strict=True):
            if axis.var not in free_vars(dim.coord):
                continue
            at = [range_of(substitute(dim.coord, {axis.var: Const(i)}), facts) for i in (0, 1)]
            first, last, step = int(at[0].low), int(at[0].high), int(at[1].low - at[0].low)
            low, high = max(0, -(first // step)), n - max(0, -((last - size) // step))
        low, high = min(low, n), min(max(high, 0), n)
        return States(low, low + 1 + high, n) if low + 1 + high < n else States(n, n, n)

    def position(self, state: Expr) -> Expr:
        """The position that stands for a state."""
        if self.size == self.positions:
            return state
        return state + minimum(maximum(state - self.low, 0), 1) * (self.positions - self.size)

    def of_position(self, o: Expr) -> Expr:
        """The state of a position."""
        if self.size == self.positions:
            return o
        if self.size == 1:
            return ZERO
        return minimum(o, self.low) + maximum(o - (self.positions - self.size + self.low), 0)


def _places(main: Compute) -> list[Axis]:
    """The axes of a position of the result: its coordinates, and the stride phases that are axes."""
    seen = {v for d in main.c.dims[2:] for v in free_vars(d.coord)}
    return [x for x in main.axes if x.var in seen]


def _inside(main: Compute, at: Mapping[Var, Expr]) -> Expr:
    """Whether a point of the product is inside of the data, where some axes are at other places."""
    return substitute(all_of([d.mask for d in main.a.dims]), at)


def _zero(p: ConvProblem, zeros: ZeroPoints, main: Compute, at: Mapping[Var, Expr]) -> View:
    """The zero point of a channel of the data, where these are."""
    channel = main.a.dims[1].coord if zeros.per_channel else ZERO
    return View(zeros.tensors(p)[0], (ViewDim(channel, _inside(main, at)),))


def _sums_of(name: str, label: str, first: tuple[str, int], places: Mapping[str, int]) -> Tensor:
    sizes = dict([first]) | dict(places)
    shape = tuple(sizes.values())
    return Tensor(f"{name}_{SUMS}{label}", tuple(sizes), shape, Layout.dense(i32, shape))


def _of_data(main: Compute, label: str) -> tuple[Tensor, dict[str, States]]:
    """What the zero points of the data add, and the states of its axes."""
    places = _places(main)
    states = {x.name: States.of(main, x) for x in places if x.role == "position"}
    sizes = {x.name: states[x.name].size if x.name in states else x.size for x in places}
    channels = main.c.dims[1], main.c.tensor.shape[1]
    return _sums_of(main.a.tensor.name, label, (main.c.tensor.dims[1], channels[1]), sizes), states


def _of_wei(main: Compute, label: str) -> Tensor:
    """The sums of data that the zero point of weights is multiplied by."""
    mb = main.c.tensor.dims[0], main.c.tensor.shape[0]
    return _sums_of("wei", label, mb, {x.name: x.size for x in _places(main)})


def ahead(p: ConvProblem, zeros: ZeroPoints, main: Compute, label: str, by: Shifts) -> tuple[Compute, ...]:
    """The computations before the product ``main``, which subtracts what they store. ``label``: of its
    stride phase, for names."""
    made = []
    assert main.b is not None
    if (zeros.data or by.data) and not zeros.known:
        sums, states = _of_data(main, label)
        axes = tuple(Axis(x.name, states[x.name].size, x.role) if x.name in states else x
                     for x in main.axes if x.name != main.c.tensor.dims[0])
        at = {Var(n): s.position(Var(n)) for n, s in states.items()}
        stored = View(sums, (ViewDim(main.c.dims[1].coord), *(ViewDim(x.var) for x in _places(main))))
        name = f"zero_{main.a.tensor.name}{label}"
        if any(by):
            made.append(_of_weights(name, p, zeros, main, axes, at, stored, by))
        else:
            made.append(product(name, axes, _zero(p, zeros, main, at), main.b, stored, i32))
    if zeros.wei or by.wei:
        made.append(_sums_of_data(p, zeros, main, label))
    return tuple(made)


def _of_weights(name: str, p: ConvProblem, zeros: ZeroPoints, main: Compute, axes: tuple[Axis, ...],
                at: Mapping[Var, Expr], stored: View, by: Shifts) -> Compute:
    """``sum (z - r)*(wei - s)`` with the shifts r and s; without a zero point of data z is 0."""
    assert main.b is not None
    wei = Read("b", main.b, float(by.wei))
    steps: list[Step] = [wei]
    if zeros.data:
        zero = Read("z", _zero(p, zeros, main, at), float(by.data))
        steps.append(zero)
        factor = less(zero.var, by.data)
    else:
        factor = select(_inside(main, at), Const(-by.data, i32), Const(0, i32))
    value = Value("part", factor * less(wei.var, by.wei))
    total = Reduction("sums", "sum", value.var, tuple(x.name for x in main.axes_of("K")))
    return Compute(name, axes, (*steps, value, total, Write(stored, total.var)))


def _sums_of_data(p: ConvProblem, zeros: ZeroPoints, main: Compute, label: str) -> Compute:
    """``sum (data - z)`` over the taps and channels of every position of the result."""
    feature = {v.name for v in free_vars(main.c.dims[1].coord)}
    axes = tuple(x for x in main.axes if x.name not in feature)
    read = Read("a", main.a)
    steps: list[Step] = [read]
    value: Expr = Cast(read.var, i32)
    if zeros.data:
        zero = Read("z", _zero(p, zeros, main, {}))
        steps.append(zero)
        value = value - zero.var
    total = Reduction("sums", "sum", value, tuple(x.name for x in main.axes_of("K")))
    places = [ViewDim(x.var) for x in _places(main)]
    stored = View(_of_wei(main, label), (ViewDim(main.c.dims[0].coord), *places))
    return Compute(f"zero_wei{label}", axes, (*steps, total, Write(stored, total.var)))


def subtracted(p: ConvProblem, zeros: ZeroPoints, main: Compute, label: str, acc: Expr,
               by: Shifts) -> tuple[tuple[Step, ...], Expr]:
    """The reads of what the zero points add to a sum ``acc`` of the product ``main``, and the sum without
    it, in s32."""
    reads: list[Step] = []
    places = _places(main)
    if zeros.known:
        read = Read(f"{TABLE}_value", _in_table(p, zeros, main))
        reads.append(read)
        acc = acc - read.var
    elif zeros.data or by.data:
        sums, states = _of_data(main, label)
        at = [ViewDim(states[x.name].of_position(x.var) if x.name in states else x.var) for x in places]
        read = Read(f"{sums.name}_value", View(sums, (ViewDim(main.c.dims[1].coord), *at)))
        reads.append(read)
        acc = acc - read.var
    if zeros.wei or by.wei:
        sums = _of_wei(main, label)
        at = [ViewDim(x.var) for x in places]
        read = Read(f"{sums.name}_value", View(sums, (ViewDim(main.c.dims[0].coord), *at)))
        reads.append(read)
        if zeros.wei:
            channel = main.c.dims[1].coord if zeros.along else ZERO
            of_wei = next(t for t in zeros.tensors(p) if t.name == "wei_zero")
            point = Read("wei_zero_value", View(of_wei, (ViewDim(channel),)))
            reads.append(point)
            acc = acc - read.var * less(point.var, by.wei)
        else:
            acc = acc + read.var * Const(by.wei, i32)
    return tuple(reads), acc


def _in_table(p: ConvProblem, zeros: ZeroPoints, main: Compute) -> View:
    """The place of a position of the result in the table of what is known."""
    at = [ViewDim(main.c.dims[1].coord)]
    for x, dim in enumerate(main.c.dims[2:]):
        last = (p.k[x] - 1) * p.dilation[x] - p.pad_lo[x] - (p.i[x] - 1)
        first = dim.coord * p.stride[x]
        at += [ViewDim(maximum(p.pad_lo[x] - first, 0)), ViewDim(maximum(first + last, 0))]
    ones = [n == 1 for n in zeros.known]
    return View(zeros.table(p), (at[0], *(ViewDim(ZERO) if one else d
                                          for one, d in zip(ones, at[1:], strict=True))))
