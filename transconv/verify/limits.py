"""Bounds on the error of float results.

Sums of whole numbers are never rounded, so float data are needed to find roundings that should not be
there. A single element shows little, because one rounding too many is as large as the necessary one.
Two numbers over all elements show it: the error in the 2-norm, and the share of elements that are not
the answer rounded once.
"""

from __future__ import annotations

from math import inf, prod

from transconv.compute import SHORT
from transconv.conv import ConvProblem, Prop
from transconv.ir import EXACT_TERMS, DType, f32
from transconv.verify.data import terms

# Both operands of a product are rounded to tf32, which may take 2^-11 of each.
TF32 = 2.0**-10
# In the 2-norm rounded operands come to 0.29 of that (2.9e-4) and operands that are cut to 0.77 of it.
NEAREST_TF32 = TF32 / 2
# Numbers in a result and in each operand from which on a 2-norm is that of a distribution.
MANY = 256
# Where a sum lies close to the middle of two numbers, its own error decides: so many elements may
# be neighbours of the answer. Rounded twice are a fifth of them or more.
NEIGHBOURS = 0.1
STEP = 2.0**-10  # by which sums are moved to see how steep an epilogue is
WHOLE = 0.5  # of a result
SLACK = 1.5  # errors are not as even as that
FEW = 2  # elements that may be, in the smallest results


def is_tf32(p: ConvProblem, prop: Prop) -> bool:
    """Whether operands are rounded to tf32."""
    operands = [p.specs[name].dtype for name in prop.operands]
    return p.math == "tf32" and f32 in operands and p.acc is f32


def per_element(p: ConvProblem, prop: Prop) -> float:
    """The share of the sum of absolute products that an element may be off before it is stored."""
    if is_tf32(p, prop):
        return TF32
    if p.acc.kind == "int":
        return 0.0
    if chain := short_chain(p, prop):
        return SHORT * chain
    return (terms(p, prop) + 4) * 2.0 ** -(23 if p.acc.bits == 32 else 52)


def short_chain(p: ConvProblem, prop: Prop) -> float:
    """The steps of 32 terms of 8-bit floats in one accumulator of some 13 bits; 0 for other products."""
    if any(p.specs[n].dtype.bits > 8 or p.specs[n].dtype.kind != "float" for n in prop.operands):
        return 0.0
    count = terms(p, prop)
    return max(1.0, (min(count, EXACT_TERMS) if p.math == "ieee" else count) / 32)


def drift(p: ConvProblem, prop: Prop, chain: int) -> float:
    """How far sums in the accumulator are off, relative to them: a random walk of as many roundings as
    terms, and what the matrix unit cuts off in a ``chain`` of additions, which is between 2^-26 and 2^-25
    each (transconv/selection/proposals/accumulation_chains.py)."""
    if p.acc.bits != 32:
        return float(terms(p, prop) ** 0.5 * 2.0**-52)
    if short := short_chain(p, prop):
        return float(short**0.5 * SHORT / 2)
    return float(terms(p, prop) ** 0.5 * 2.0**-23 + chain * 2.0**-25)


def norm(p: ConvProblem, prop: Prop, result: DType, chain: int = 0) -> float:
    """The largest relative error in the 2-norm."""
    if result.kind == "int":  # its rounding is no share of a number
        return inf
    if result.digits >= p.acc.digits and min(_numbers(p, name) for name in p.specs) < MANY:
        return inf  # one sum that comes to nothing decides
    own = max(2.0**-result.digits, 2e-6 if result.digits <= 24 else 1e-14)
    return max(own, is_tf32(p, prop) * NEAREST_TF32) + drift(p, prop, chain)


def steepened(moved: float, before: float, after: float) -> float:
    """How many times as large the relative error of a result may be as that of its sums, by sums of
    squares: ``before`` of the sums, ``after`` of what the epilogue makes of them, ``moved`` of how far it
    is off if they are off by ``STEP``. What flattens sums, as tanh does, leaves the small ones, whose
    errors are as large. Infinite where the result is off by as much as it is: a few sums nearer to a pole
    than ``STEP`` are most of it then, as of 1/x, and how far they may be off is said of each element."""
    if not (after and before):
        return 1.0
    apart = (moved / after) ** 0.5
    return inf if apart > WHOLE else max(1.0, SLACK * apart / STEP)


def neighbours(p: ConvProblem, prop: Prop, result: DType, chain: int = 0) -> float:
    """The largest share of elements that are not the answer rounded once: 1 where what is rounded
    before the sum, or the sum itself, is as wide as the result."""
    if result.digits >= p.acc.digits or is_tf32(p, prop):
        return 1.0
    return NEIGHBOURS + drift(p, prop, chain) * 2.0**result.digits


def _numbers(p: ConvProblem, name: str) -> int:
    """How many numbers a tensor holds: of dimensions that are expanded one."""
    strides = p.specs[name].layout.strides() or (1,) * (p.ndims + 2)
    return prod(n for n, s in zip(p.shapes[name], strides, strict=True) if s)
