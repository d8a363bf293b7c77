"""Which integer operands have zero points: words of an epilogue, tensors, and when they can be subtracted.

    zero:src    zero:dst:per_oc    zero:wei:per_oc    zero:src:known:2x2x2x2

The data are src in a forward convolution, dst in the gradient of src. What is computed is in
quantization/compensation.py. Where weights and zero point never change, what the zero point adds to sums
may be given, as ``src_zero_table``, s32: for each feature and each number of positions that a window
reaches before and behind an image along each axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transconv.errors import ScheduleError
from transconv.ir import Layout, Tensor, i8, i32

if TYPE_CHECKING:
    import torch

    from transconv.conv.problem.conv_problem import ConvProblem, Prop

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
            elif given[:1] == ["wei"] and not wei and (
                    given[1:] in ([], ["common"]) or given[1:] in [[w] for w in PER_CHANNEL.values()]):
                wei, along = True, "".join(given[1:]).replace("common", "")
            elif (given and not data and given[0] in PER_CHANNEL
                    and given[1:] in ([], ["common"], [PER_CHANNEL[given[0]]])):
                data, per_channel = given[0], given[1:] == [PER_CHANNEL[given[0]]]
            elif len(given) == 3 and not data and given[:2] == ["src", KNOWN] and (
                    all(map(str.isdecimal, given[2].split("x")))):
                data, sizes = "src", tuple(map(int, given[2].split("x")))
            else:
                known = [f"{WORD}:{n}, {WORD}:{n}:{along}" for n, along in PER_CHANNEL.items()]
                raise ScheduleError(f"'{word}' is no zero point, or the second of its tensor; expected "
                                    f"{', '.join(known)}, {WORD}:wei or {WORD}:wei:per_oc (that of a "
                                    "result is added by add:s32:common or add:s32:per_oc)")
        return ZeroPoints(data, per_channel, wei, along, sizes), others

    def tensors(self, p: ConvProblem) -> tuple[Tensor, ...]:
        """The tensors of zero points, s32: that of the data, and ``wei_zero``."""
        channels = {"src": p.ic, "dst": p.oc, "per_ic": p.ic, "per_oc": p.oc, "": 1}
        sizes = {f"{self.data}_zero": channels[self.data] if self.per_channel else 1} if self.data else {}
        sizes |= {"wei_zero": channels[self.along]} if self.wei else {}
        found = [Tensor(n, ("c",), (size,), Layout.dense(i32, (size,))) for n, size in sizes.items()]
        return (*found, *[self.table(p)] * bool(self.known))

    def table(self, p: ConvProblem) -> Tensor:
        """What is known."""
        shape = (p.oc, *self.known)
        dims = ("oc", *(f"{end}{n}" for n in p.spatial for end in ("before", "behind")))
        return Tensor(TABLE, dims, shape, Layout.dense(i32, shape))


def why_not_zeros(zeros: ZeroPoints, p: ConvProblem, prop: Prop, sized: bool) -> str | None:
    """None if kernels can subtract the zero points, else the reason."""
    if not zeros:
        return None
    if prop.roles[1] != "wei":
        return f"zero points are those of products with weights; {prop} has none"
    if zeros.data and zeros.data != prop.roles[0]:
        return (f"{prop} multiplies {prop.roles[0]} by weights; expected its zero point, not one of "
                f"{zeros.data}")
    if p.acc is not i32:
        types = " and ".join(f"{n} is {p.specs[n].dtype}" for n in prop.operands)
        return f"zero points are for integers; {types}"
    if zeros.known and (prop.roles[0] != "src" or p.src.dtype is not i8 or p.wei.dtype is not i8):
        return "known sums of zero points are for forward convolutions of s8"
    if zeros.known and len(zeros.known) != 2 * p.ndims or any(
            n <= max(0, pad) for n, pad in zip(zeros.known, _pads(p), strict=False)):
        return (f"known sums of zero points have the sizes {zeros.known}; expected those of windows that "
                f"reach {_pads(p)} positions before and behind each axis, with 0")
    if zeros.wei and p.g > 1:
        return f"a zero point of weights is for one group; there are {p.g}"
    if zeros.along and zeros.along == PER_CHANNEL[prop.roles[0]]:
        return (f"{prop} sums over the channels of {prop.roles[0]}; expected zero points of weights for "
                f"each of the result's, not {zeros.along}")
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
