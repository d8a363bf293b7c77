"""Operands of u8 as s8: what matrix units multiply, and Triton 3.6 has a dot for.

An element less 128 is one of s8. The product is that of the shifted elements, where what lies outside of a
tensor is 128, so that it becomes 0; what the shifts take from it is subtracted with that of zero points,
which the shifts are taken from (quantization/compensation.py):

    sum (d - z)*(w - y)  =  sum (d - r)*(w - s)  -  sum (z - r)*(w - s)  -  (y - s) * sum (d - z)

with 128 for r and s of operands of u8 and 0 for those of s8. Shifts are for products of matrices; where
groups have few channels, elements are multiplied one by one as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from transconv.compute import Compute, Read, Reduction, Value
from transconv.ir import Cast, Const, Expr, Var, i8, i32, u8

if TYPE_CHECKING:
    from transconv.conv.problem.conv_problem import ConvProblem, Prop

HALF = 128
LEAST_CHANNELS = 16
"""Channels of a group that fill a tile of the matrix unit."""


class Shifts(NamedTuple):
    """What is subtracted from elements before they are multiplied."""

    data: int = 0
    wei: int = 0


def shifts(p: ConvProblem, prop: Prop) -> Shifts:
    """Those of the operands of a product with weights."""
    if prop.roles[1] != "wei" or min(p.icg, p.ocg) < LEAST_CHANNELS or p.acc is not i32:
        return Shifts()
    data, wei = (p.specs[n].dtype is u8 for n in prop.operands)
    if wei and p.g > 1:  # sums of data would be for each group
        return Shifts()
    return Shifts(HALF * data, HALF * wei)


def shifted(compute: Compute, by: Shifts) -> Compute:
    """The product of two reads, of the elements less their shifts."""
    if not any(by):
        return compute
    left, right, total, *after = compute.steps
    assert isinstance(left, Read) and isinstance(right, Read) and isinstance(total, Reduction)
    reads = Read(left.name, left.view, float(by.data)), Read(right.name, right.view, float(by.wei))
    near: list[Value] = []
    factors: list[Var] = []
    for read, shift in zip(reads, by, strict=True):
        if shift:
            near.append(Value(f"near_{read.name}", Cast(less(read.var, shift), i8)))
        factors.append(near[-1].var if shift else read.var)
    value = Cast(factors[0], compute.acc) * Cast(factors[1], compute.acc)
    made = Reduction(total.name, total.op, value, total.axes)
    return Compute(compute.name, compute.axes, (*reads, *near, made, *after), compute.math,
                   behind=compute.behind)


def less(x: Expr, shift: int) -> Expr:
    """An integer less a shift, in s32."""
    wide = Cast(x, i32) if x.dtype is not i32 else x
    return wide - Const(shift, i32) if shift else wide
