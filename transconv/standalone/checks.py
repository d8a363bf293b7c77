"""The self-check of an exported file against torch: numbers and names for its text."""

from __future__ import annotations

from math import prod
from typing import Any

from transconv.compute import Compute, TorchText
from transconv.ir import f32, free_vars
from transconv.standalone.package import PackagedTensor, PlanPackage
from transconv.standalone.reference import lines_of

MOST = 1 << 22  # points of a computation that are compared
LEAST = 2  # positions along an axis, its ends
DROPPED = {"tf32": 2.0**-10, "tf32x3": 2.0**-19}  # relative error of a product of rounded factors
ROUNDINGS = 4  # of a result: its own, and those of the steps of an operation
OWN = 2.0**-20  # relative error of functions in f32
OWN_F64 = 2.0**-50  # sums in f64 have a smaller spacing
SUMMED = 2.0**-18  # error of a sum, relative to the sum of absolute terms
STEEP = 4  # factor by which an epilogue may enlarge the error of a sum


def why_not_interpreted(package: PlanPackage) -> str:
    """Why Triton's interpreter cannot run the kernels as the chip does; empty if it can."""
    if any(x.explicit for x in package.launches):
        return ("these kernels are written in Gluon, which Triton does not interpret; "
                "run them on a GPU, or export with --target interpreter")
    short = any(a.dtype.kind == "float" and a.dtype.bits <= 16
                for x in package.launches if x.step.schedule.unit == "mma" for a in x.arguments)
    if short and not package.target.upcast16 and any("tl.dot(" in x.source for x in package.launches):
        return ("Triton's interpreter does not multiply 16-bit matrices as the chip does; "
                "run these kernels on a GPU, or export with --target interpreter")
    return ""


def of_text(package: PlanPackage, text: TorchText) -> dict[str, Any]:
    """The values for check_product.py.jinja."""
    workload = package.plan.workload
    a, b = text.factors
    rounded = text.eps > OWN_F64 and any(package.operand(n).dtype is f32 for n in text.factors)
    tf32 = DROPPED.get(workload.math, 0.0) if rounded else 0.0
    return {
        "result": workload.result, "a": a, "b": b, "eps": _power(text.eps),
        "tf32": _power(tf32) if tf32 else "", "terms": text.terms, "program": text.program,
        "behind": text.behind,
        "blocks": {t.name: _blocks(t) for t in package.tensors if t.strides is None}}


def _power(x: float) -> str:
    """A power of two as people write it."""
    mantissa, exponent = x.hex().split("p")
    return f"2.0**{int(exponent)}" if mantissa == "0x1.0000000000000" else repr(x)


def _blocks(t: PackagedTensor) -> tuple[Any, ...]:
    """Sizes and strides of the blocks, offset, their order by dimension, sizes, shape."""
    blocks = t.layout.blocks
    order = tuple(i for d in range(t.layout.ndims) for i, b in enumerate(blocks) if b.dim == d)
    return (tuple(b.size for b in blocks), tuple(b.stride for b in blocks), t.layout.offset, order,
            t.layout.extents, t.shape)


def _ranges(package: PlanPackage, indexed: dict[str, int]) -> dict[str, tuple[int, int]]:
    """The range of the random data of integer tensors: positions where elements are coordinates, else
    small numbers."""
    return {t.name: (0, indexed[t.name]) if t.name in indexed else (max(-4, t.dtype.limits[0]), 5)
            for t in package.read if t.dtype.kind in ("int", "bool")}


def of_compute(package: PlanPackage, compute: Compute) -> dict[str, Any]:
    """The values for check_compute.py.jinja."""
    reduced = prod(x.size for x in compute.axes if x.name in compute.reduced)
    free = [x.size for x in compute.axes if x.name not in compute.reduced and x.size > 1]
    points = None
    if prod(free) * reduced > MOST and free:
        points = max(LEAST, int((MOST / max(1, reduced)) ** (1 / len(free))))
    is_tf32 = compute.math in DROPPED and compute.factors is not None and any(
        t.dtype is f32 for t in compute.tensors)
    share = (DROPPED[compute.math] if is_tf32 else SUMMED) * (STEEP if compute.finishes else 1)
    indexed: dict[str, int] = {}
    for view in compute.views():
        for d, n in zip(view.dims, view.tensor.shape, strict=True):
            for read in compute.reads:
                if read.var in compute.names.indices and read.var in free_vars(d.coord):
                    name = read.view.tensor.name
                    indexed[name] = min(n, indexed.get(name, n))
    return {"ranges": _ranges(package, indexed), "rank": max(1, len(compute.axes)), "points": points,
            "steps": lines_of(compute), "stores": "".join(f'"{t.name}", ' for t in package.stored).strip(),
            "roundings": ROUNDINGS, "own": _power(OWN), "share": _power(share)}
