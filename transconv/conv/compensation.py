"""Compensation of zero points of integer operands: ``sum (data - z[channel])*(wei - y)`` over the points
inside of data.

The data are src in a forward convolution, dst in the gradient of src, which is a transposed convolution.
What lies outside of them is exact: it counts as the zero point, which subtracted is 0. The product is that
of the elements as they are stored; what zero points add to it is subtracted in the epilogue:

    sum (data - z)*(wei - y)  =  sum data*wei  -  sum z*wei  -  y * sum (data - z)

The second sum is that of one image of zero points, which differs only where something outside is read. So
a kernel of its own computes it once for each state of an axis (each position at a border, and one for all
between), and another the third, once for each position of the result. Both are written from the product
alone: its axes, and the mask of its first operand. What shifts of operands take from it is subtracted in
the same way.

Operands of u8 are multiplied as s8, which matrix units multiply and Triton 3.6 has a dot for. An element
less 128 is one of s8. The product is that of the shifted elements, where what lies outside of a tensor is
128, so that it becomes 0; what the shifts take from it is subtracted with that of zero points, which the
shifts are taken from:

    sum (d - z)*(w - y)  =  sum (d - r)*(w - s)  -  sum (z - r)*(w - s)  -  (y - s) * sum (d - z)

with 128 for r and s of operands of u8 and 0 for those of s8. Shifts are for products of matrices; where
groups have few channels, elements are multiplied one by one as they are.

Zero points are words of an epilogue:

    zero:src    zero:dst:per_oc    zero:wei:per_oc    zero:src:known:2x2x2x2

Where weights and zero point never change, what the zero point adds to sums may be given, as
``src_zero_table``, s32 (``zero_sums``):

    sums[f, u0, h0, u1, h1, ..] = zero * sum of weight[f, c, k..] over c and the taps that are inside

for each feature and where a window reaches ``u`` positions before the first element of an axis, and ``h``
behind the last one. So it is the same for images of all sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from transconv import ir
from transconv.compute import Axis, Compute, Read, Reduction, Step, Value, Write, product
from transconv.simplify import Facts, range_of
from transconv.support import ScheduleError

if TYPE_CHECKING:
    import torch

    from transconv.conv.conv_problem import ConvProblem, Prop


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
            if axis.var not in ir.free_vars(dim.coord):
                continue
            at = [range_of(ir.substitute(dim.coord, {axis.var: ir.Const(i)}), facts) for i in (0, 1)]
            first, last, step = int(at[0].low), int(at[0].high), int(at[1].low - at[0].low)
            low, high = max(0, -(first // step)), n - max(0, -((last - size) // step))
        low, high = min(low, n), min(max(high, 0), n)
        return States(low, low + 1 + high, n) if low + 1 + high < n else States(n, n, n)

    def position(self, state: ir.Expr) -> ir.Expr:
        """The position that stands for a state."""
        if self.size == self.positions:
            return state
        return state + ir.minimum(ir.maximum(state - self.low, 0), 1) * (self.positions - self.size)

    def of_position(self, o: ir.Expr) -> ir.Expr:
        """The state of a position."""
        if self.size == self.positions:
            return o
        if self.size == 1:
            return ir.ZERO
        return ir.minimum(o, self.low) + ir.maximum(o - (self.positions - self.size + self.low), 0)


def _places(main: Compute) -> list[Axis]:
    """The axes of a position of the result: its coordinates, and the stride phases that are axes."""
    seen = {v for d in main.c.dims[2:] for v in ir.free_vars(d.coord)}
    return [x for x in main.axes if x.var in seen]


def _inside(main: Compute, at: Mapping[ir.Var, ir.Expr]) -> ir.Expr:
    """Whether a point of the product is inside of the data, where some axes are at other places."""
    return ir.substitute(ir.all_of([d.mask for d in main.a.dims]), at)


def _zero(p: ConvProblem, zeros: ZeroPoints, main: Compute, at: Mapping[ir.Var, ir.Expr]) -> ir.View:
    """The zero point of a channel of the data, where these are."""
    channel = main.a.dims[1].coord if zeros.per_channel else ir.ZERO
    return ir.View(zeros.tensors(p)[0], (ir.ViewDim(channel, _inside(main, at)),))


def _sums_of(name: str, label: str, first: tuple[str, int], places: Mapping[str, int]) -> ir.Tensor:
    sizes = dict([first]) | dict(places)
    shape = tuple(sizes.values())
    return ir.Tensor(f"{name}_{SUMS}{label}", tuple(sizes), shape, ir.Layout.dense(ir.i32, shape))


def _of_data(main: Compute, label: str) -> tuple[ir.Tensor, dict[str, States]]:
    """What the zero points of the data add, and the states of its axes."""
    places = _places(main)
    states = {x.name: States.of(main, x) for x in places if x.role == "position"}
    sizes = {x.name: states[x.name].size if x.name in states else x.size for x in places}
    channels = main.c.dims[1], main.c.tensor.shape[1]
    return _sums_of(main.a.tensor.name, label, (main.c.tensor.dims[1], channels[1]), sizes), states


def _of_wei(main: Compute, label: str) -> ir.Tensor:
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
        axes = tuple(
            Axis(x.name, states[x.name].size, x.role) if x.name in states else x
            for x in main.axes
            if x.name != main.c.tensor.dims[0]
        )
        at = {ir.Var(n): s.position(ir.Var(n)) for n, s in states.items()}
        stored = ir.View(
            sums, (ir.ViewDim(main.c.dims[1].coord), *(ir.ViewDim(x.var) for x in _places(main)))
        )
        name = f"zero_{main.a.tensor.name}{label}"
        if any(by):
            made.append(_of_weights(name, p, zeros, main, axes, at, stored, by))
        else:
            made.append(product(name, axes, _zero(p, zeros, main, at), main.b, stored, ir.i32))
    if zeros.wei or by.wei:
        made.append(_sums_of_data(p, zeros, main, label))
    return tuple(made)


def _of_weights(
    name: str,
    p: ConvProblem,
    zeros: ZeroPoints,
    main: Compute,
    axes: tuple[Axis, ...],
    at: Mapping[ir.Var, ir.Expr],
    stored: ir.View,
    by: Shifts,
) -> Compute:
    """``sum (z - r)*(wei - s)`` with the shifts r and s; without a zero point of data z is 0."""
    assert main.b is not None
    wei = Read("b", main.b, float(by.wei))
    steps: list[Step] = [wei]
    if zeros.data:
        zero = Read("z", _zero(p, zeros, main, at), float(by.data))
        steps.append(zero)
        factor = less(zero.var, by.data)
    else:
        factor = ir.select(_inside(main, at), ir.Const(-by.data, ir.i32), ir.Const(0, ir.i32))
    value = Value("part", factor * less(wei.var, by.wei))
    total = Reduction("sums", "sum", value.var, tuple(x.name for x in main.axes_of("K")))
    return Compute(name, axes, (*steps, value, total, Write(stored, total.var)))


def _sums_of_data(p: ConvProblem, zeros: ZeroPoints, main: Compute, label: str) -> Compute:
    """``sum (data - z)`` over the taps and channels of every position of the result."""
    feature = {v.name for v in ir.free_vars(main.c.dims[1].coord)}
    axes = tuple(x for x in main.axes if x.name not in feature)
    read = Read("a", main.a)
    steps: list[Step] = [read]
    value: ir.Expr = ir.Cast(read.var, ir.i32)
    if zeros.data:
        zero = Read("z", _zero(p, zeros, main, {}))
        steps.append(zero)
        value = value - zero.var
    total = Reduction("sums", "sum", value, tuple(x.name for x in main.axes_of("K")))
    places = [ir.ViewDim(x.var) for x in _places(main)]
    stored = ir.View(_of_wei(main, label), (ir.ViewDim(main.c.dims[0].coord), *places))
    return Compute(f"zero_wei{label}", axes, (*steps, total, Write(stored, total.var)))


def subtracted(
    p: ConvProblem, zeros: ZeroPoints, main: Compute, label: str, acc: ir.Expr, by: Shifts
) -> tuple[tuple[Step, ...], ir.Expr]:
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
        at = [ir.ViewDim(states[x.name].of_position(x.var) if x.name in states else x.var) for x in places]
        read = Read(f"{sums.name}_value", ir.View(sums, (ir.ViewDim(main.c.dims[1].coord), *at)))
        reads.append(read)
        acc = acc - read.var
    if zeros.wei or by.wei:
        sums = _of_wei(main, label)
        at = [ir.ViewDim(x.var) for x in places]
        read = Read(f"{sums.name}_value", ir.View(sums, (ir.ViewDim(main.c.dims[0].coord), *at)))
        reads.append(read)
        if zeros.wei:
            channel = main.c.dims[1].coord if zeros.along else ir.ZERO
            of_wei = next(t for t in zeros.tensors(p) if t.name == "wei_zero")
            point = Read("wei_zero_value", ir.View(of_wei, (ir.ViewDim(channel),)))
            reads.append(point)
            acc = acc - read.var * less(point.var, by.wei)
        else:
            acc = acc + read.var * ir.Const(by.wei, ir.i32)
    return tuple(reads), acc


def _in_table(p: ConvProblem, zeros: ZeroPoints, main: Compute) -> ir.View:
    """The place of a position of the result in the table of what is known."""
    at = [ir.ViewDim(main.c.dims[1].coord)]
    for x, dim in enumerate(main.c.dims[2:]):
        last = (p.k[x] - 1) * p.dilation[x] - p.pad_lo[x] - (p.i[x] - 1)
        first = dim.coord * p.stride[x]
        at += [ir.ViewDim(ir.maximum(p.pad_lo[x] - first, 0)), ir.ViewDim(ir.maximum(first + last, 0))]
    ones = [n == 1 for n in zeros.known]
    return ir.View(
        zeros.table(p),
        (at[0], *(ir.ViewDim(ir.ZERO) if one else d for one, d in zip(ones, at[1:], strict=True))),
    )


HALF = 128
LEAST_CHANNELS = 16
"""Channels of a group that fill a tile of the matrix unit."""


class Shifts(NamedTuple):
    """What is subtracted from elements before they are multiplied."""

    data: int = 0
    wei: int = 0


def shifts(p: ConvProblem, prop: Prop) -> Shifts:
    """Those of the operands of a product with weights."""
    if prop.roles[1] != "wei" or min(p.icg, p.ocg) < LEAST_CHANNELS or p.acc is not ir.i32:
        return Shifts()
    data, wei = (p.specs[n].dtype is ir.u8 for n in prop.operands)
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
    factors: list[ir.Var] = []
    for read, shift in zip(reads, by, strict=True):
        if shift:
            near.append(Value(f"near_{read.name}", ir.Cast(less(read.var, shift), ir.i8)))
        factors.append(near[-1].var if shift else read.var)
    value = ir.Cast(factors[0], compute.acc) * ir.Cast(factors[1], compute.acc)
    made = Reduction(total.name, total.op, value, total.axes)
    return Compute(
        compute.name, compute.axes, (*reads, *near, made, *after), compute.math, behind=compute.behind
    )


def less(x: ir.Expr, shift: int) -> ir.Expr:
    """An integer less a shift, in s32."""
    wide = ir.Cast(x, ir.i32) if x.dtype is not ir.i32 else x
    return wide - ir.Const(shift, ir.i32) if shift else wide


WORD = "zero"
PER_CHANNEL = {"src": "per_ic", "dst": "per_oc"}
"""The tensors of data, and the word for a zero point of each of their channels. Weights have one for each
channel of the other tensor, which is the result."""
SUMS, KNOWN = "zero_sums", "known"
TABLE = "src_zero_table"
"""The tensor of what a zero point of src adds to sums, where it is known."""


@dataclass(frozen=True, slots=True)
class ZeroPoints:
    """Which operands have zero points. ``data``: src, dst or empty; ``per_channel``: whether each of its
    channels has one; ``wei``: whether the weights have one; ``along``: per_oc or per_ic, if each of these
    channels has one of weights. ``known``: the sizes of the table of what a zero point of src adds,
    without features; empty: kernels compute it."""

    data: str = ""
    per_channel: bool = False
    wei: bool = False
    along: str = ""
    known: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.data or self.wei)

    def __str__(self) -> str:
        along = f":{PER_CHANNEL[self.data]}" if self.per_channel else ""
        along += f":{KNOWN}:{'x'.join(map(str, self.known))}" if self.known else ""
        words = [f"{WORD}:{self.data}{along}"] if self.data else []
        return "+".join([*words, *[":".join(filter(None, (WORD, "wei", self.along)))] * self.wei])

    @staticmethod
    def read(words: list[str]) -> tuple[ZeroPoints, list[str]]:
        """The zero points among the words of an epilogue, and the other words. Raises ScheduleError."""
        data, per_channel, wei, along, others = "", False, False, "", []
        sizes: tuple[int, ...] = ()
        for word in words:
            name, *given = word.split(":")
            if name != WORD:
                others.append(word)
            elif (
                given[:1] == ["wei"]
                and not wei
                and (given[1:] in ([], ["common"]) or given[1:] in [[w] for w in PER_CHANNEL.values()])
            ):
                wei, along = True, "".join(given[1:]).replace("common", "")
            elif (
                given
                and not data
                and given[0] in PER_CHANNEL
                and given[1:] in ([], ["common"], [PER_CHANNEL[given[0]]])
            ):
                data, per_channel = given[0], given[1:] == [PER_CHANNEL[given[0]]]
            elif (
                len(given) == 3
                and not data
                and given[:2] == ["src", KNOWN]
                and (all(map(str.isdecimal, given[2].split("x"))))
            ):
                data, sizes = "src", tuple(map(int, given[2].split("x")))
            else:
                known = [f"{WORD}:{n}, {WORD}:{n}:{along}" for n, along in PER_CHANNEL.items()]
                raise ScheduleError(
                    f"'{word}' is no zero point, or the second of its tensor; expected "
                    f"{', '.join(known)}, {WORD}:wei or {WORD}:wei:per_oc (that of a "
                    "result is added by add:s32:common or add:s32:per_oc)"
                )
        return ZeroPoints(data, per_channel, wei, along, sizes), others

    def tensors(self, p: ConvProblem) -> tuple[ir.Tensor, ...]:
        """The tensors of zero points, s32: that of the data, and ``wei_zero``."""
        channels = {"src": p.ic, "dst": p.oc, "per_ic": p.ic, "per_oc": p.oc, "": 1}
        sizes = {f"{self.data}_zero": channels[self.data] if self.per_channel else 1} if self.data else {}
        sizes |= {"wei_zero": channels[self.along]} if self.wei else {}
        found = [
            ir.Tensor(n, ("c",), (size,), ir.Layout.dense(ir.i32, (size,))) for n, size in sizes.items()
        ]
        return (*found, *[self.table(p)] * bool(self.known))

    def table(self, p: ConvProblem) -> ir.Tensor:
        """What is known."""
        shape = (p.oc, *self.known)
        dims = ("oc", *(f"{end}{n}" for n in p.spatial for end in ("before", "behind")))
        return ir.Tensor(TABLE, dims, shape, ir.Layout.dense(ir.i32, shape))


def why_not_zeros(zeros: ZeroPoints, p: ConvProblem, prop: Prop, sized: bool) -> str | None:
    """None if kernels can subtract the zero points, else the reason."""
    if not zeros:
        return None
    if prop.roles[1] != "wei":
        return f"zero points are those of products with weights; {prop} has none"
    if zeros.data and zeros.data != prop.roles[0]:
        return (
            f"{prop} multiplies {prop.roles[0]} by weights; expected its zero point, not one of "
            f"{zeros.data}"
        )
    if p.acc is not ir.i32:
        types = " and ".join(f"{n} is {p.specs[n].dtype}" for n in prop.operands)
        return f"zero points are for integers; {types}"
    if zeros.known and (prop.roles[0] != "src" or p.src.dtype is not ir.i8 or p.wei.dtype is not ir.i8):
        return "known sums of zero points are for forward convolutions of s8"
    if (zeros.known and len(zeros.known) != 2 * p.ndims) or any(
        n <= max(0, pad) for n, pad in zip(zeros.known, _pads(p), strict=False)
    ):
        return (
            f"known sums of zero points have the sizes {zeros.known}; expected those of windows that "
            f"reach {_pads(p)} positions before and behind each axis, with 0"
        )
    if zeros.wei and p.g > 1:
        return f"a zero point of weights is for one group; there are {p.g}"
    if zeros.along and zeros.along == PER_CHANNEL[prop.roles[0]]:
        return (
            f"{prop} sums over the channels of {prop.roles[0]}; expected zero points of weights for "
            f"each of the result's, not {zeros.along}"
        )
    return "zero points are subtracted for given sizes, not for those of each call" if sized else None


def _pads(p: ConvProblem) -> list[int]:
    """How far windows reach before and behind each axis."""
    return [n for pair in zip(p.pad_lo, p.pad_hi, strict=True) for n in pair]


def without_zeros(tensors: Mapping[str, torch.Tensor], zeros: ZeroPoints) -> dict[str, torch.Tensor]:
    """The tensors by name, with operands as s16 values from which zero points are subtracted."""
    made = dict(tensors)
    if not zeros:
        return made
    for name in (zeros.data, "wei"):
        if (zero := tensors.get(f"{name}_zero")) is not None:
            after = tensors[name].ndim - (1 if name == "wei" and zeros.along == "per_oc" else 2)
            made[name] = tensors[name].short() - zero.short().view(-1, *[1] * after)
    return made


MOST_STATES = 1024  # ways to reach beyond an image, with as many sums for each feature


def zero_sums(
    weight: torch.Tensor,
    zero: torch.Tensor,
    pad_lo: Sequence[int],
    pad_hi: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor | None:
    """The sums, s32, of a weight (oc, ic/groups, *k) of integers and one zero point; None where windows
    reach beyond images in too many ways."""
    import torch

    states = [n + 1 for pair in zip(pad_lo, pad_hi, strict=True) for n in pair]
    if prod(states) > MOST_STATES:
        return None
    found = weight.detach().double().sum(1)  # exact: (oc, *k)
    ends = zip(weight.shape[2:], pad_lo, pad_hi, dilation, strict=True)
    for k, low, high, d in ends:  # the axis in front becomes the last two
        tap = torch.arange(k, device=weight.device) * d
        before = tap >= torch.arange(low + 1, device=weight.device).view(-1, 1)
        behind = tap.flip(0) >= torch.arange(high + 1, device=weight.device).view(-1, 1)
        inside = (before[:, None] & behind[None]).double()
        found = torch.einsum("ok...,uhk->o...uh", found, inside)
    return (found * zero.double()).round().to(torch.int32).contiguous()


def zero_sums_shape(channels: int, pad_lo: Sequence[int], pad_hi: Sequence[int]) -> tuple[int, ...]:
    """The shape of the sums."""
    return (channels, *(n + 1 for pair in zip(pad_lo, pad_hi, strict=True) for n in pair))
