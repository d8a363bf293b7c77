"""Factors in blocks: elements of 8 or 4 bits, neighbours of which along a summed axis share a scale.

    read   a = A[m, k]                elements of 8 bits
    read   p = W[n, k // 2]           or of 4, two in a byte, the even one lower
    read   r = R[m, k // 32]          the scale of 32 neighbours
    let    x = bf16(a*f8e8m0(r))
    let    w = bf16(f4e2m1(where(k % 2 == 0, p % 16, p // 16))*f8e8m0(s))
    store  Y[m, n] = sum(x*w; k)

That 32 neighbours share a scale is read off its view: along k, coordinates and masks depend on k // 32
alone. What a byte holds is found by computing all 256 of them. bf16 and f32 hold every such value (f4e2m1
and f8e4m3 have up to 4 digits, scales up to 4), so that elements and scales may be multiplied apart."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from transconv import ir
from transconv.compute.compute import Compute
from transconv.compute.steps import Read, Value
from transconv.ir import bf16, f32

POWERS = "f8e8m0"
"""The scales that are powers of two; others are of a type with memory."""
HALVES = "f4e2m1"
"""The elements of which a byte holds two."""


@dataclass(frozen=True, slots=True)
class BlockFactor:
    """A factor of a product. ``element``, ``scale``: what is read of each; ``held``: the elements' type;
    ``scales``: that of the scale; ``axis``: along which ``size`` neighbours share one."""

    element: Read
    held: str
    scale: Read
    scales: str
    axis: str
    size: int

    @property
    def packed(self) -> int:
        """The elements in a byte."""
        return 2 if self.held == HALVES else 1

    @property
    def neighbours(self) -> dict[ir.Var, int]:
        """How many neighbours share what is read, by its variable."""
        return {self.element.var: self.packed, self.scale.var: self.size}


@lru_cache(maxsize=256)
def block_factors(compute: Compute) -> tuple[BlockFactor, BlockFactor] | str:
    """The factors of the product that is summed, or why they are not in blocks."""
    if compute.factors is None:
        return "it sums no product of two factors"
    left, right = (_factor(f, compute) for f in compute.factors)
    if isinstance(left, str) or isinstance(right, str):
        return left if isinstance(left, str) else str(right)
    if (left.axis, left.size, left.scales) != (right.axis, right.size, right.scales):
        return (
            f"{left.size} neighbours along {left.axis} share a scale ({left.scales}) in one factor, "
            f"{right.size} along {right.axis} ({right.scales}) in the other; expected the same"
        )
    return left, right


def _factor(factor: Read | Value, compute: Compute) -> BlockFactor | str:
    """A factor in blocks, or why it is none."""
    if isinstance(factor, Read):
        return f"{factor.name} has no scales: it is multiplied as it is read"
    value = _whole(factor.value, compute)
    while isinstance(value, ir.Cast) and value.type in (bf16, f32):
        value = value.x
    if isinstance(value, ir.Cast) and value.type.kind == "float":
        return (
            f"{factor.name} is rounded to {value.type}, which does not hold what blocks do; expected bf16"
        )
    reads = {s.var: s for s in compute.steps if isinstance(s, Read)}
    if isinstance(value, ir.Mul):
        for one, other in ((value.a, value.b), (value.b, value.a)):
            scale = _scale(other, reads)
            if scale is not None and (found := _scaled(one, *scale, reads, compute)) is not None:
                return found
    return f"{factor.name} is no product of elements of 8 or 4 bits with the scales of their blocks"


def _whole(e: ir.Expr, compute: Compute) -> ir.Expr:
    """A value in terms of what is read."""
    made = {s.var: s.value for s in compute.steps if isinstance(s, Value)}
    while named := {v: made[v] for v in ir.free_vars(e) if v in made}:
        e = ir.substitute(e, named)
    return e


def _scale(e: ir.Expr, reads: dict[ir.Var, Read]) -> tuple[Read, str] | None:
    """The read of a scale, and its type."""
    match e:
        case ir.Call(name, (ir.Cast(ir.Var() as v) | (ir.Var() as v),)) if name == POWERS:
            return (reads[v], POWERS) if v in reads and v.type is ir.u8 else None
        case ir.Cast(ir.Var() as v) if v in reads and v.type.is_short:
            return reads[v], v.type.name
    return None


def _scaled(
    e: ir.Expr, scale: Read, scales: str, reads: dict[ir.Var, Read], compute: Compute
) -> BlockFactor | None:
    """The factor of elements ``e`` with a scale; None if they are none, or no neighbours share it."""
    for x in compute.axes_of("K"):
        if (size := neighbours(scale, x.var, compute)) > 1 and x.extent is None:
            element = _element(e, x.var, reads)
            if element is None or element[0].fill or scale.fill:
                continue  # beyond the end of a sum both are 0
            if neighbours(element[0], x.var, compute) == _packed(element[1]):
                return BlockFactor(*element, scale, scales, x.name, size)
    return None


def _packed(held: str) -> int:
    return 2 if held == HALVES else 1


def _element(e: ir.Expr, axis: ir.Var, reads: dict[ir.Var, Read]) -> tuple[Read, str] | None:
    """What is read of elements, and their type."""
    match e:
        case ir.Cast(ir.Var() as v) if v in reads and v.type.is_short:
            return reads[v], v.type.name
        case ir.Call(name, (code,)) if name == HALVES:
            bytes_ = [v for v in ir.free_vars(code) if v in reads and v.type is ir.u8]
            if len(bytes_) == 1 and _is_half(code, bytes_[0], axis):
                return reads[bytes_[0]], HALVES
    return None


def _is_half(code: ir.Expr, byte: ir.Var, axis: ir.Var) -> bool:
    """Whether a code is the lower half of a byte at even positions of an axis, the upper at odd ones."""
    parity = ir.Mod(axis, ir.Const(2))
    for at in (0, 1):
        fixed = ir.substitute(code, {parity: ir.Const(at)})
        if ir.free_vars(fixed) != {byte}:
            return False
        run = ir.Evaluator(ir.Memory({}), {}, 1)
        run.env[byte] = np.arange(256, dtype=np.uint8)
        if ((np.asarray(run.compute(fixed)) & 15) != (np.arange(256) >> 4 * at & 15)).any():
            return False
    return True


def neighbours(read: Read, axis: ir.Var, compute: Compute) -> int:
    """How many neighbours along an axis read one element: c where coordinates and masks depend on
    axis // c alone; 1 where each reads its own, and where it depends on the axis in no such way."""
    seen = [e for d in read.view.dims for e in (d.coord, d.mask)]
    divided = {
        e
        for x in seen
        for e in ir.walk(x)
        if isinstance(e, ir.FloorDiv) and e.a is axis and isinstance(e.b, ir.Const)
    }
    sizes = {int(e.b.value) for e in divided if isinstance(e.b, ir.Const)}
    rest = [ir.substitute(e, dict.fromkeys(divided, ir.ZERO)) for e in seen]
    alone = len(sizes) == 1 and not any(axis.name in compute.roots(e) for e in rest)
    return sizes.pop() if alone else 1
