"""Zero points of integer operands: ``sum (src - z[ic])*(wei - y)`` over the points inside of the image.

Padding is exact: a padded element counts as the zero point, which subtracted is 0. The product is that of
the elements as they are stored; what zero points add to it is subtracted behind the sum:

    sum (src - z)*(wei - y)  =  sum src*wei  -  sum z*wei  -  y * sum (src - z)

The second sum is that of one image of zero points, which differs only where padding is read. So a kernel
of its own computes it once for each state of an axis (each position at a border, and one for all between),
and another the third, once for each position of the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transconv.compute import Axis, Compute, Read, Reduction, Step, Write, product
from transconv.errors import ScheduleError
from transconv.ir import (
    ZERO,
    Cast,
    Expr,
    Layout,
    Tensor,
    Var,
    View,
    ViewDim,
    all_of,
    i32,
    maximum,
    minimum,
)

if TYPE_CHECKING:
    import torch

    from transconv.conv.problem import ConvProblem, Prop

WORD = "zero"
SRC_SUMS, WEI_SUMS = "src_zero_sums", "wei_zero_sums"


@dataclass(frozen=True, slots=True)
class ZeroPoints:
    """Which operands have zero points. ``src``: empty, ``common`` (one) or ``per_ic`` (one a channel);
    ``wei``: whether the weights have one."""

    src: str = ""
    wei: bool = False

    def __bool__(self) -> bool:
        return bool(self.src or self.wei)

    def __str__(self) -> str:
        words = [f"{WORD}:src:per_ic" if self.src == "per_ic" else f"{WORD}:src"] if self.src else []
        return "+".join([*words, *[f"{WORD}:wei"] * self.wei])

    @staticmethod
    def read(words: list[str]) -> tuple[ZeroPoints, list[str]]:
        """The zero points among the words of an epilogue, and the other words. Raises ScheduleError."""
        src, wei, others = "", False, []
        for word in words:
            name, *given = word.split(":")
            if name != WORD:
                others.append(word)
            elif given in (["src"], ["src", "common"], ["src", "per_ic"]) and not src:
                src = given[1] if len(given) > 1 else "common"
            elif given == ["wei"] and not wei:
                wei = True
            else:
                raise ScheduleError(f"'{word}' is no zero point, or the second of its tensor; expected "
                                    f"{WORD}:src, {WORD}:src:per_ic or {WORD}:wei (that of a result is "
                                    "added by add:s32:common or add:s32:per_oc)")
        return ZeroPoints(src, wei), others

    def tensors(self, p: ConvProblem) -> tuple[Tensor, ...]:
        """The tensors of zero points, s32: ``src_zero`` and ``wei_zero``."""
        sizes = {"src_zero": p.ic if self.src == "per_ic" else 1} if self.src else {}
        sizes |= {"wei_zero": 1} if self.wei else {}
        return tuple(Tensor(n, ("c",), (size,), Layout.dense(i32, (size,))) for n, size in sizes.items())


@dataclass(frozen=True, slots=True)
class States:
    """The states of one axis of the result: ``low`` positions that read padding below, ``size`` in all, of
    ``positions``."""

    low: int
    size: int
    positions: int

    @staticmethod
    def of(p: ConvProblem, x: int) -> States:
        """Those of a spatial axis."""
        o, s, reach = p.o[x], p.stride[x], (p.k[x] - 1) * p.dilation[x]
        low = min(o, -(-p.pad_lo[x] // s))
        high = min(o, max(0, o - 1 - (p.i[x] - 1 + p.pad_lo[x] - reach) // s))
        return States(low, low + 1 + high, o) if low + 1 + high < o else States(o, o, o)

    def position(self, state: Expr) -> Expr:
        """The position that stands for a state."""
        if self.size == self.positions:
            return state
        return state + minimum(maximum(state - self.low, 0), 1) * (self.positions - self.size)

    def of_position(self, o: Expr) -> Expr:
        """The state of a position."""
        if self.size == self.positions:
            return o
        return minimum(o, self.low) + maximum(o - (self.positions - self.size + self.low), 0)


def _inside(p: ConvProblem, x: int, o: Expr, tap: Expr) -> Expr:
    i = o * p.stride[x] + tap * p.dilation[x] - p.pad_lo[x]
    return (i >= 0) & (i < p.i[x])


def _zero(p: ConvProblem, zeros: ZeroPoints, channel: Expr, inside: Expr) -> View:
    """The zero point of a channel of src, where the image is."""
    tensor = zeros.tensors(p)[0]
    return View(tensor, (ViewDim(channel if zeros.src == "per_ic" else ZERO, inside),))


def _sums_of(name: str, dims: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
    return Tensor(name, dims, shape, Layout.dense(i32, shape))


def ahead(p: ConvProblem, zeros: ZeroPoints, main: Compute) -> tuple[Compute, ...]:
    """The computations before the product ``main``, which subtracts what they store."""
    made = []
    taps = [Var(f"k{n}") for n in p.spatial]
    src, wei = main.a, main.b
    assert wei is not None
    if zeros.src:
        states = [States.of(p, x) for x in range(p.ndims)]
        axes = tuple(Axis(a.name, states[p.spatial.index(a.name[1:])].size, a.role)
                     if a.role == "position" else a for a in main.axes if a.name != "mb")
        at = [Var(f"o{n}") for n in p.spatial]
        inside = all_of([_inside(p, x, states[x].position(at[x]), taps[x]) for x in range(p.ndims)])
        zero = _zero(p, zeros, src.dims[1].coord, inside)
        sums = _sums_of(SRC_SUMS, ("oc", *(f"o{n}" for n in p.spatial)), (p.oc, *(s.size for s in states)))
        stored = View(sums, (wei.dims[0], *(ViewDim(v) for v in at)))
        made.append(product("zero_src", axes, zero, wei, stored, i32))
    if zeros.wei:
        made.append(_sums_of_src(p, zeros, main))
    return tuple(made)


def _sums_of_src(p: ConvProblem, zeros: ZeroPoints, main: Compute) -> Compute:
    """``sum (src - z)`` over the taps and channels of every position of the result."""
    src, at = main.a, [Var(f"o{n}") for n in p.spatial]
    axes = tuple(x for x in main.axes if x.name != "oc")
    read = Read("a", src)
    steps: list[Step] = [read]
    value: Expr = Cast(read.var, i32)
    if zeros.src:
        inside = all_of([_inside(p, x, at[x], Var(f"k{n}")) for x, n in enumerate(p.spatial)])
        zero = Read("z", _zero(p, zeros, src.dims[1].coord, inside))
        steps.append(zero)
        value = value - zero.var
    total = Reduction("sums", "sum", value, (*(f"k{n}" for n in p.spatial), "ic"))
    sums = _sums_of(WEI_SUMS, ("mb", *(f"o{n}" for n in p.spatial)), (p.mb, *p.o))
    stored = View(sums, (src.dims[0], *(ViewDim(v) for v in at)))
    return Compute("zero_wei", axes, (*steps, total, Write(stored, total.var)))


def subtracted(p: ConvProblem, zeros: ZeroPoints, acc: Expr, c: View) -> tuple[tuple[Step, ...], Expr]:
    """The reads of what the zero points add to a sum at the point that ``c`` describes, and the sum
    without it, in s32."""
    reads: list[Step] = []
    at = [d.coord for d in c.dims[2:]]
    if zeros.src:
        states = [States.of(p, x) for x in range(p.ndims)]
        sums = _sums_of(SRC_SUMS, ("oc", *(f"o{n}" for n in p.spatial)), (p.oc, *(s.size for s in states)))
        places = [ViewDim(s.of_position(o)) for s, o in zip(states, at, strict=True)]
        read = Read(f"{SRC_SUMS}_value", View(sums, (ViewDim(c.dims[1].coord), *places)))
        reads.append(read)
        acc = acc - read.var
    if zeros.wei:
        sums = _sums_of(WEI_SUMS, ("mb", *(f"o{n}" for n in p.spatial)), (p.mb, *p.o))
        read = Read(f"{WEI_SUMS}_value", View(sums, (ViewDim(c.dims[0].coord), *map(ViewDim, at))))
        point = Read("wei_zero_value", View(zeros.tensors(p)[-1], (ViewDim(ZERO),)))
        reads += [read, point]
        acc = acc - read.var * point.var
    return tuple(reads), acc


def why_not_zeros(zeros: ZeroPoints, p: ConvProblem, prop: Prop, sized: bool) -> str | None:
    """None if kernels can subtract the zero points, else the reason."""
    if not zeros:
        return None
    if prop.value != "fwd":
        return f"zero points are those of a forward convolution; {prop} has none"
    if p.acc is not i32:
        return f"zero points are for integers; src is {p.src.dtype} and wei is {p.wei.dtype}"
    if zeros.wei and p.g > 1:
        return f"a zero point of weights is for one group; there are {p.g}"
    return "zero points are subtracted for given sizes, not for those of each call" if sized else None


def without_zeros(tensors: Mapping[str, torch.Tensor], zeros: ZeroPoints) -> dict[str, torch.Tensor]:
    """The tensors by name, with src and wei as s16 values from which zero points are subtracted."""
    made = dict(tensors)
    if not zeros:
        return made
    for name in ("src", "wei"):
        if (zero := tensors.get(f"{name}_zero")) is not None:
            along = zero.short().view(-1, *[1] * (tensors[name].ndim - 2))
            made[name] = tensors[name].short() - along
    return made
