"""The self-check of an exported file: the steps of a computation as torch's, and what roundings may
differ.

Every value is a tensor with one dimension for each axis, of size 1 along those that it does not depend
on, in f64 (integers in 64 bits). Axes that nothing reduces are sampled by the file where all their
points would be too many. Nothing of a schedule or a kernel is used."""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Collection
from math import prod
from typing import Any

from transconv import ir
from transconv.compute import Compute, Read, Reduction, TorchText, Value, Write
from transconv.runtime.standalone.machine_code import PackagedTensor, PlanPackage
from transconv.support import Unsupported

MOST = 1 << 22  # points of a computation that are compared
LEAST = 2  # positions along an axis, its ends
DROPPED = {"tf32": 2.0**-10, "tf32x3": 2.0**-19}  # relative error of a product of rounded factors
ROUNDINGS = 4  # of a result: its own, and those of the steps of an operation
OWN = 2.0**-20  # relative error of functions in f32
OWN_F64 = 2.0**-50  # sums in f64 have a smaller spacing
SUMMED = 2.0**-18  # error of a sum, relative to the sum of absolute terms
STEEP = 4  # factor by which an epilogue may enlarge the error of a sum


def of_text(package: PlanPackage, text: TorchText) -> dict[str, Any]:
    """The values for check_product.py.jinja."""
    workload = package.plan.workload
    a, b = text.factors
    rounded = text.eps > OWN_F64 and any(package.operand(n).dtype is ir.f32 for n in text.factors)
    tf32 = DROPPED.get(workload.math, 0.0) if rounded else 0.0
    return {
        "result": workload.result,
        "a": a,
        "b": b,
        "eps": _power(text.eps),
        "tf32": _power(tf32) if tf32 else "",
        "terms": text.terms,
        "program": text.program,
        "behind": text.behind,
        "blocks": {t.name: _blocks(t) for t in package.tensors if t.strides is None},
    }


def _power(x: float) -> str:
    """A power of two as people write it."""
    mantissa, exponent = x.hex().split("p")
    return f"2.0**{int(exponent)}" if mantissa == "0x1.0000000000000" else repr(x)


def _blocks(t: PackagedTensor) -> tuple[Any, ...]:
    """Sizes and strides of the blocks, offset, their order by dimension, sizes, shape."""
    blocks = t.layout.blocks
    order = tuple(i for d in range(t.layout.ndims) for i, b in enumerate(blocks) if b.dim == d)
    return (
        tuple(b.size for b in blocks),
        tuple(b.stride for b in blocks),
        t.layout.offset,
        order,
        t.layout.extents,
        t.shape,
    )


def _ranges(package: PlanPackage, indexed: dict[str, int]) -> dict[str, tuple[int, int]]:
    """The range of the random data of integer tensors: positions where elements are coordinates, else
    small numbers."""
    return {
        t.name: (0, indexed[t.name]) if t.name in indexed else (max(-4, t.dtype.limits[0]), 5)
        for t in package.read
        if t.dtype.kind in ("int", "bool")
    }


def of_compute(package: PlanPackage, compute: Compute) -> dict[str, Any]:
    """The values for check_compute.py.jinja."""
    reduced = prod(x.size for x in compute.axes if x.name in compute.reduced)
    free = [x.size for x in compute.axes if x.name not in compute.reduced and x.size > 1]
    points = None
    if prod(free) * reduced > MOST and free:
        points = max(LEAST, int((MOST / max(1, reduced)) ** (1 / len(free))))
    is_tf32 = (
        compute.math in DROPPED
        and compute.factors is not None
        and any(t.dtype is ir.f32 for t in compute.tensors)
    )
    share = (DROPPED[compute.math] if is_tf32 else SUMMED) * (STEEP if compute.finishes else 1)
    indexed: dict[str, int] = {}
    for view in compute.views():
        for d, n in zip(view.dims, view.tensor.shape, strict=True):
            for read in compute.reads:
                if read.var in compute.names.indices and read.var in ir.free_vars(d.coord):
                    name = read.view.tensor.name
                    indexed[name] = min(n, indexed.get(name, n))
    return {
        "ranges": _ranges(package, indexed),
        "rank": max(1, len(compute.axes)),
        "points": points,
        "steps": lines_of(compute),
        "stores": "".join(f'"{t.name}", ' for t in package.stored).strip(),
        "roundings": ROUNDINGS,
        "own": _power(OWN),
        "share": _power(share),
    }


REDUCED = {
    "sum": "{}.sum({}, keepdim=True)",
    "prod": "product({}, {})",
    "max": "{}.amax({}, keepdim=True)",
    "min": "{}.amin({}, keepdim=True)",
}
# Functions that torch has under other names.
TORCHS = {"nearest": "round", "ndtr": "special.ndtr", "ndtr_wide": "special.ndtr"}
# Names that the text of an exported file uses itself.
TAKEN = frozenset(
    "torch triton tl gl gluon sys check on device draw read stored largest least product points weight "
    "main run reference tensors bound logical box launch TensorDescriptor hopper mbarrier tma F "
    "nullcontext given got want along choose spread tensor compared blocks name dtype shape strides "
    "TENSORS POINTS RANK DEVICE RANGES BLOCKS INTERPRETED a b size added kind drawn convolved".split()
)


def safe(name: str, taken: Collection[str] = TAKEN) -> str:
    """A name that is not taken in Python or in the file."""
    while keyword.iskeyword(name) or hasattr(builtins, name) or name in taken:
        name += "_"
    return name


def lines_of(compute: Compute) -> list[str]:
    """The body of ``reference``. Raises Unsupported for an operation that torch has no name for."""
    return _ReferenceWriter(compute).lines()


class _ReferenceWriter:
    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.rank = max(1, len(compute.axes))
        taken = {*TAKEN, *(safe(t.name) for t in compute.tensors)}
        self.names: dict[str, str] = {}
        for name in (
            *(x.name for x in compute.axes),
            *(s.name for s in compute.steps if not isinstance(s, Write)),
        ):
            self.names[name] = safe(name, taken)
            taken.add(self.names[name])

    def lines(self) -> list[str]:
        made = ["weight = tensor(0.0)"]
        for at, axis in enumerate(self.compute.axes):
            most = "" if axis.name in self.compute.reduced else ", points"
            made.append(f"{self.names[axis.name]} = along({at}, {axis.size}{most})")
        for step in self.compute.steps:
            if isinstance(step, Read):
                made.append(f"{self.names[step.name]} = {self.read(step)}")
            elif isinstance(step, Value):
                made.append(f"{self.names[step.name]} = {self.text(step.value)}")
            elif isinstance(step, Reduction):
                made += self.reduction(step)
            else:
                made.append(self.write(step))
        return made

    def read(self, step: Read) -> str:
        held = ir.held_constant(step.fill, step.view.tensor.dtype)
        fill = f", {_number(held)}" if held else ""
        return f"read({safe(step.view.tensor.name)}, {self.places(step.view)}{fill})"

    def write(self, step: Write) -> str:
        name = step.view.tensor.name
        if step in self.compute.statistics:
            raise Unsupported(
                "export:reference",
                f"{self.compute.name}: {name} is a statistic of all of "
                "the result, of which the file would compute some points",
            )
        value = step.value.x if isinstance(step.value, ir.Cast) else step.value  # the file rounds it
        return f'stored["{name}"] = ({self.places(step.view)}, {self.text(value)}, weight)'

    def places(self, view: ir.View) -> str:
        coords = ", ".join(self.text(d.coord) for d in view.dims)
        mask = view.mask()
        return f"[{coords}], {'True' if mask is ir.TRUE else self.text(mask)}"

    def reduction(self, step: Reduction) -> list[str]:
        """The terms, their sum, and the sum of their absolute values, which bounds the rounding error."""
        at = [i for i, x in enumerate(self.compute.axes) if x.name in step.axes]
        dims = f"({', '.join(map(str, at))},)"
        name = self.names[step.name]
        reduced = REDUCED[step.op].format(name, dims)
        return [
            f"{name} = spread({self.text(step.value)}, "
            f"{{{', '.join(f'{i}: {self.compute.axes[i].size}' for i in at)}}})",
            f"weight = {name}.abs().nan_to_num(posinf=0.0).sum({dims}, keepdim=True)",
            f"{name} = {reduced}",
        ]

    # -- expressions -----------------------------------------------------------------------------

    def text(self, e: ir.Expr, inner: bool = False) -> str:
        """An expression; one with a sign has parentheses where it is ``inner``."""
        if isinstance(e, ir.Var):
            return self.names[e.name]
        if isinstance(e, ir.Const):
            return _number(e.value)
        if isinstance(e, ir.Cast):
            if e.type.kind == "float":
                return self.text(e.x, inner) if e.x.dtype.kind == "float" else self.cast(e, "double")
            return self.text(e.x, inner) if e.x.dtype.is_integer else self.cast(e, "long")
        if isinstance(e, ir.Neg | ir.Not):
            return f"{'-' if isinstance(e, ir.Neg) else '~'}{self.text(e.x, True)}"
        if isinstance(e, ir.Binary) and (sign := ir.INFIX.get(type(e))) is not None:
            made = f"{self.text(e.a, True)} {sign} {self.text(e.b, True)}"
            return f"({made})" if inner else made
        if isinstance(e, ir.Min | ir.Max):
            return f"{'least' if isinstance(e, ir.Min) else 'largest'}({self.text(e.a)}, {self.text(e.b)})"
        if isinstance(e, ir.Select):
            return f"choose({self.text(e.cond)}, {self.text(e.yes)}, {self.text(e.no)})"
        if isinstance(e, ir.Call):
            return self.call(e)
        raise Unsupported("export:reference", f"{self.compute.name}: `{e}` has no text in torch")

    def cast(self, e: ir.Cast, to: str) -> str:
        return f"tensor({self.text(e.x)}).{to}()"

    def call(self, e: ir.Call) -> str:
        given = [self.text(a) for a in e.args]
        if e.name == "fma":
            return f"(({given[0]}) * ({given[1]}) + ({given[2]}))"
        return f"torch.{TORCHS.get(e.name, e.name)}(tensor({', '.join(given)}))"


def _number(value: float | bool) -> str:
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "float('inf')" if value > 0 else "-float('inf')"
    return f"float('{value}')" if value != value else repr(value)
