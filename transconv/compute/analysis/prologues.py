"""Products with a prologue: a name for each operand that is computed before it is multiplied.

    let s = sum(relu(x)*w; k)      ->      let s_a = relu(x)
                                           let s_b = f32(w)          where the types are others
                                           let s = sum(s_a*s_b; k)

Only where that makes a product of matrices, which the matrix unit multiplies in the type of the factors:
``sum(bf16(relu(x))*w; k)`` of bf16 operands takes bf16, ``sum(relu(x)*w; k)`` is a product of f32.
"""

from __future__ import annotations

from dataclasses import replace

from transconv.compute.compute import Compute
from transconv.compute.steps import Reduction, Step, Value, fresh
from transconv.ir import Cast, Expr, Mul, Var


def with_prologues(compute: Compute) -> Compute:
    """The computation with named factors, if it is a sum of products with a prologue; otherwise
    unchanged."""
    total = compute.sum
    if total is None or total.op != "sum" or compute.factors or not isinstance(total.value, Mul):
        return compute
    sides = (total.value.a, total.value.b)
    if all(_name(e) is not None for e in sides) and len({_name(e) for e in sides}) < 2:
        return compute  # a square
    names = [fresh(f"{total.name}_{letter}", compute.names.all) for letter in "ab"]
    for wide in (False, True):
        made = _named(compute, total, sides, names, wide)
        if made.prologue:
            return made
    return compute


def _named(compute: Compute, total: Reduction, sides: tuple[Expr, Expr], names: list[str],
           wide: bool) -> Compute:
    """``wide``: factors that are reads are cast to the type of arithmetic as well."""
    before: list[Step] = []
    factors: list[Expr] = []
    for e, name in zip(sides, names, strict=True):
        if not wide and _name(e) is not None:
            factors.append(e)
            continue
        value = Value(name, e)
        before.append(value)
        factors.append(value.var if value.var.type is total.value.dtype else
                       Cast(value.var, total.value.dtype))
    product = replace(total, value=Mul(factors[0], factors[1]))
    at = compute.steps.index(total)
    steps = (*compute.steps[:at], *before, product, *compute.steps[at + 1:])
    return replace(compute, steps=steps)


def _name(e: Expr) -> Var | None:
    """The variable of a factor that is one, with or without a cast; else None."""
    inner = e.x if isinstance(e, Cast) else e
    return inner if isinstance(inner, Var) else None
