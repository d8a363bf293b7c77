"""Products of 8-bit floats as f16, in which they and their products are exact (``pack=f16``): the elements
become f16 in registers, on their way to the matrix unit, which takes f16 in any order.

    read   a = A[n, c, h, w] (f8)             read   a = A[n, c, h, w] (f8)
    read   b = B[n, f, h, w] (f8)      ->     read   b = B[n, f, h, w] (f8)
    let    s = sum(a*b; n h w)                let    wide_a = f16(a)
                                              let    wide_b = f16(b)
                                              let    s = sum(wide_a*wide_b; n h w)

No copy is written, as ``pack=a.b.f16`` writes them. Bytes that do not lie along the sum would be
transposed one by one in registers.
"""

from __future__ import annotations

from dataclasses import replace

from transconv.compute import Compute, Read, Reduction, Value
from transconv.ir import Cast, f16


def why_not_widened(compute: Compute) -> str | None:
    """None if both factors are elements of 8-bit floats as they are read, else the reason."""
    views = [v for v in (compute.a, compute.b) if v is not None]
    other = next((v.tensor for v in views if not v.tensor.dtype.is_short), None)
    if other is not None:
        return f"{other.name} holds {other.dtype}, no floats of 8 bits"
    if compute.factors is None or not all(isinstance(f, Read) for f in compute.factors):
        return f"{compute.name} has no product of two tensors as they are"
    return None


def widened(compute: Compute) -> Compute:
    """The computation with factors of f16. Relies on ``why_not_widened``."""
    assert compute.factors is not None and compute.sum is not None
    wide = {f.var: Value(f"wide_{f.name}", Cast(f.var, f16)) for f in compute.factors}
    a, b = (Cast(wide[f.var].var, compute.acc) for f in compute.factors)
    at = compute.steps.index(compute.sum)
    made: Reduction = replace(compute.sum, value=a * b)
    return replace(compute, steps=(*compute.steps[:at], *wide.values(), made, *compute.steps[at + 1:]))
