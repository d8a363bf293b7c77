"""What an exported file needs for the check of itself against torch: numbers and names for its text."""

from __future__ import annotations

from math import prod
from typing import Any

from transconv.compute import OPS, Compute
from transconv.conv import ConvWorkload, Epilogue
from transconv.errors import Unsupported
from transconv.ir import f32, free_vars
from transconv.standalone.package import Operand, Package
from transconv.standalone.reference import lines_of

MOST = 1 << 22  # points of a computation that are looked at
LEAST = 2  # positions along an axis, its ends
DROPPED = {"tf32": 2.0**-10, "tf32x3": 2.0**-19}  # of a product of factors that are rounded
ROUNDINGS = 4  # of a result: its own, and those of what an operation is computed by
OWN = 2.0**-20  # what functions are off, in f32
SUMMED = 2.0**-18  # of the sum of absolute terms
STEEP = 4  # times what is wrong with a sum: as much as what is behind it may make of that


def why_not_interpreted(package: Package) -> str:
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


def of_convolution(package: Package, workload: ConvWorkload) -> dict[str, Any]:
    """What check_convolution.py.jinja is filled with."""
    p, prop = workload.problem, workload.prop
    a, b = prop.operands
    eps = 2.0 ** -(23 if p.acc.bits == 32 else 52)
    tf32 = DROPPED.get(p.math, 0.0) if p.acc.bits == 32 and any(
        p.specs[n].dtype is f32 for n in prop.operands) else 0.0
    pads = [n for low, high in reversed(list(zip(p.pad_lo, p.pad_hi, strict=True))) for n in (low, high)]
    return {
        "result": workload.result, "direction": workload.direction,
        "a": a, "b": b, "eps": _power(eps), "tf32": _power(tf32) if tf32 else "",
        "terms": workload.terms, "shapes": p.shapes, "pad": pads, "ndims": p.ndims,
        "stride": p.stride, "dilation": p.dilation, "groups": p.g,
        "epilogue": _epilogue(workload.epilogue, p.ndims, _power(eps)),
        "blocks": {t.name: _blocks(t) for t in package.tensors if t.strides is None}}


def _power(x: float) -> str:
    """A power of two as people write it."""
    mantissa, exponent = x.hex().split("p")
    return f"2.0**{int(exponent)}" if mantissa == "0x1.0000000000000" else repr(x)


def _epilogue(epilogue: Epilogue, ndims: int, eps: str) -> list[str]:
    """Lines that continue ``want`` and its bound."""
    lines = []
    for op in epilogue.ops:
        if op in ("bias", "res"):
            added = f"bia.double().view({(-1, *[1] * ndims)})" if op == "bias" else "res.double()"
            lines += [f"added = {added}",
                      f"bound = bound + 2 * {eps} * (want.abs() + added.abs())",
                      "want = want + added"]
            continue
        row = OPS[op]
        if not isinstance(row.torch, str):
            raise Unsupported("export:operation", f"the operation '{op}' has a function of torch without "
                              "a name, which a file could not import; register it by its dotted name")
        options = "".join(f", {k}={v!r}" for k, v in row.options)
        lines += [f"bound = {row.steepest} * bound + 32 * {eps} * (1 + want.abs())",
                  f"want = {row.torch}(want{options})"]
    return lines


def _blocks(t: Operand) -> tuple[Any, ...]:
    """Sizes and strides of the blocks, offset, their order by dimension, sizes, shape."""
    blocks = t.layout.blocks
    order = tuple(i for d in range(t.layout.ndims) for i, b in enumerate(blocks) if b.dim == d)
    return (tuple(b.size for b in blocks), tuple(b.stride for b in blocks), t.layout.offset, order,
            t.layout.extents, t.shape)


def _ranges(package: Package, indexed: dict[str, int]) -> dict[str, tuple[int, int]]:
    """The whole numbers that are drawn for a tensor of such: positions for one whose elements are
    coordinates, else small ones."""
    return {t.name: (0, indexed[t.name]) if t.name in indexed else (max(-4, t.dtype.limits[0]), 5)
            for t in package.read if t.dtype.kind in ("int", "bool")}


def of_compute(package: Package, compute: Compute) -> dict[str, Any]:
    """What check_compute.py.jinja is filled with."""
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
