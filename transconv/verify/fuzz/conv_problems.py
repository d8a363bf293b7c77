"""A small random convolution with layouts and options, and what happens to its sums: post-ops, scales and
zero points.

The one generator of problems: the fuzzer seeds it with numbers, tests hand it Hypothesis' random numbers,
which shrink. Sizes stay small, so that NumPy interprets a kernel in milliseconds and compilers see short
programs; what is drawn are difficult cases: sizes that blocks do not divide, filters larger than images,
negative padding, strides and dilations without a common divisor, padded pitches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from random import Random
from typing import TypeVar

from transconv.compute import table
from transconv.conv import ConvProblem, Prop
from transconv.ir import DType, Layout, LayoutBlock
from transconv.support import LayoutError, ProblemError
from transconv.verify.fuzz.trial import chance

T = TypeVar("T")

DTYPES = ("f16",) * 4 + ("bf16",) * 4 + ("f32",) * 5 + ("f64",)
F8 = ("f8e4m3", "f8e5m2")
# Operands, mixed or of one type, and the results of them.
SMALL = (
    (("i8", "u8"), ("i32", "i32", "i8", "u8", "f32", "f16", "bf16")),
    (F8, (*F8, "f16", "bf16", "f32")),
    (("f16", "bf16", "f32"), ("i8", "u8", "f8e4m3")),
)
MANY = 32  # images: enough for copies of f32 that have them innermost
MATHS = ("ieee", "ieee", "tf32", "tf32", "tf32x3")
CHANNELS = (1, 2, 3, 4, 5, 7, 8, 8, 12, 16, 16, 16, 17, 20, 24, 32, 32, 33, 40)
KINDS = (
    ("dense",) * 8
    + ("pointwise",) * 2
    + ("groups",) * 3
    + ("depthwise",) * 3
    + ("transposed", "transposed", "patches", "stem", "wide", "narrow", "narrow", "rows")
)
MOST_MACS = 1 << 20
MOST_ELEMENTS = 1 << 14  # of a tensor


def _axis(rng: Random, kind: str, most: int) -> tuple[int, int, int, int, int, int]:
    """One spatial axis: (i, o, k, stride, dilation, low padding)."""
    o = rng.randint(1, most)
    k = rng.choice((1, 1, 2, 3, 3, 3, 3, 4, 5, 7))
    stride = rng.choice((1, 1, 1, 1, 1, 2, 2, 2, 3, 4))
    dilation = rng.choice((1, 1, 1, 1, 1, 2, 3))
    if kind in ("pointwise", "patches"):
        k, dilation = (1, 1) if kind == "pointwise" else (rng.choice((2, 3, 4)), 1)
        stride = k if kind == "patches" else rng.choice((1, 1, 2))
    elif kind == "transposed":
        stride = rng.choice((2, 2, 2, 3))
        k, dilation = stride * rng.choice((1, 2, 2)) + rng.choice((0, 0, 1)), 1
    elif kind == "rows":
        stride = 1
    reach = (k - 1) * dilation
    low = rng.choice((0, reach // 2, reach // 2, rng.randint(0, reach + 1)))
    high = rng.choice((low, low, low, rng.randint(0, reach + 1), -rng.randint(1, 3)))
    i = (o - 1) * stride + reach + 1 - low - high
    return max(1, i), o, k, stride, dilation, low


def _axes(rng: Random, kind: str, n: int) -> list[tuple[int, int, int, int, int, int]]:
    """Most filters are square; the others are drawn axis by axis."""
    most = {1: 16, 2: 8, 3: 4}[n]
    if kind == "rows":
        return [*(_axis(rng, kind, 4) for _ in range(n - 1)), _row(rng)]
    if chance(rng, 2):
        return [_axis(rng, kind, most)] * n
    return [_axis(rng, kind, most) for _ in range(n)]


def _row(rng: Random) -> tuple[int, int, int, int, int, int]:
    """The innermost axis of an image whose rows begin at multiples of 16 bytes."""
    k, dilation = rng.choice((1, 2, 3, 3, 5)), rng.choice((1, 1, 2))
    i, o = (rng.choice((16, 24, 32, 40, 64)) for _ in range(2))
    o = o if chance(rng, 3) else i
    return i, o, k, 1, dilation, rng.randint(0, (k - 1) * dilation)


def _channels(rng: Random, kind: str) -> tuple[int, int, int]:
    """(g, ic, oc), channels counted over all groups."""
    if kind == "depthwise":
        g = rng.choice((2, 3, 5, 8, 16, 24, 33))
        return g, g, g * rng.choice((1, 1, 1, 2, 3))
    if kind == "groups":
        g = rng.choice((2, 2, 3, 4, 6))
        return g, g * rng.choice(CHANNELS), g * rng.choice(CHANNELS)
    if kind == "narrow":
        g = rng.choice((4, 6, 8, 8, 16, 16))
        return g, g * rng.choice((1, 2, 3, 4, 4)), g * rng.choice((1, 2, 3, 4, 4))
    if kind == "stem":
        return 1, rng.randint(1, 4), rng.choice((8, 16, 32, 33))
    if kind == "rows":
        return 1, rng.choice((16, 32, 64)), rng.choice((16, 32, 64))
    if kind == "wide":
        return 1, rng.choice((48, 64, 65, 96, 128)), rng.choice((48, 64, 65, 96, 128))
    return 1, rng.choice(CHANNELS), rng.choice(CHANNELS)


def problem(rng: Random, ndims: int = 0, dtype: str = "", prop: Prop | None = None) -> ConvProblem:
    """A small convolution; ``ndims`` and ``dtype`` are drawn where they are not given. With a
    direction, operands may repeat memory and the result may be wider than they are."""
    kind = rng.choice(KINDS)
    n = ndims or rng.choice((1, 2, 2, 2, 3))
    axes = _axes(rng, kind, n)
    g, ic, oc = _channels(rng, kind)
    mb = 0 if chance(rng, 100) else MANY if chance(rng, 16) else rng.choice((1, 1, 2, 2, 3, 4, 5))
    i, o, k, stride, dilation, pad = (list(column) for column in zip(*axes, strict=True))
    while mb * oc * ic // g * prod(o) * prod(k) > MOST_MACS or MOST_ELEMENTS < max(
        mb * ic * prod(i), mb * oc * prod(o), oc * ic // g * prod(k)
    ):
        if mb > 1:
            mb //= 2
        elif prod(o) > 1:  # the longest axis is cut, of images with long rows the others first
            x = max(range(n), key=lambda x: o[x] if kind != "rows" or x < n - 1 else 1.5)
            i[x], o[x] = max(1, i[x] - (o[x] - o[x] // 2) * stride[x]), o[x] // 2
        elif max(i) > 2 * max(k):
            i = [min(size, max(k)) for size in i]
        else:
            ic, oc = g * -(-ic // g // 2), g * -(-oc // g // 2)
            k = [min(taps, 3) for taps in k]
    even = kind == "rows" or chance(rng, 3)
    if even and kind != "depthwise":  # pitches of whole 16 bytes, as the copy engine wants them
        ic, oc = (g * max(16, c // g // 16 * 16) for c in (ic, oc))
    made = ConvProblem.make(
        mb,
        ic,
        oc,
        i,
        k,
        stride,
        dilation,
        pad,
        o=o,
        g=g,
        dtype=_dtypes(rng, dtype or rng.choice(("f16", "bf16", "f32")) * even, prop),
    )
    if made.src.dtype.name == "f32":
        made = replace(made, math="tf32" if even else rng.choice(MATHS))
    if kind == "rows" and rng.randrange(4):
        tags = zip(("abx", "axb", "abx"), made.shapes.items(), strict=True)
        return made.with_layout([_tagged(t, made.specs[n].dtype, shape) for t, (n, shape) in tags])
    return made.with_layout(_layouts(rng, made, prop, even))


def tiny(rng: Random, ndims: int = 0, dtype: str = "f32") -> ConvProblem:
    """A convolution small enough to be run many times: one image of a few points, in layouts with a
    tag."""
    kind = rng.choice(("dense", "dense", "dense", "pointwise", "transposed", "patches"))
    n = ndims or rng.choice((1, 2, 2, 2, 3))
    axes = []
    for _ in range(n):
        i, o, k, stride, dilation, pad = _axis(rng, kind, 4 if n < 3 else 3)
        high = i - ((o - 1) * stride + (k - 1) * dilation + 1 - pad)
        k, dilation, pad = min(k, 3), min(dilation, 2), min(pad, 2)
        i = max(1, (o - 1) * stride + (k - 1) * dilation + 1 - pad + max(-2, min(1, high)))
        axes.append((i, o, k, stride, dilation, pad))
    g = rng.choice((1, 1, 2, 3))
    single = g > 1 and chance(rng, 2)
    ic, oc = (g * (1 if single else rng.randint(1, 5)) for _ in range(2))
    inputs, outputs, taps, strides, dilations, pads = (list(x) for x in zip(*axes, strict=True))
    tags = ("abx", "axb", "aBx4b") if n == 2 else ("abx", "axb")
    made = ConvProblem.make(
        rng.randint(1, 3), ic, oc, inputs, taps, strides, dilations, pads, o=outputs, g=g, dtype=dtype
    )
    return made.with_layout([rng.choice(tags), rng.choice(("abx", "axb")), rng.choice(tags)])


def _dtypes(rng: Random, given: str, prop: Prop | None) -> tuple[str, str, str]:
    name = given or rng.choice(DTYPES)
    names = {"src": name, "wei": name, "dst": name}
    if prop is not None and not given and chance(rng, 6):
        operands, outcomes = rng.choice(SMALL)
        names = {n: rng.choice(operands) for n in names}
        names[prop.result] = rng.choice(outcomes)
        if not {*operands} <= {"i8", "u8", *F8}:
            names |= dict.fromkeys(prop.operands, names[prop.operands[0]])
    elif prop is not None and not given and name in ("f16", "bf16") and chance(rng, 8):
        names[prop.result] = "f32"
    return names["src"], names["wei"], names["dst"]


def _layouts(rng: Random, p: ConvProblem, prop: Prop | None, even: bool) -> tuple[Layout, Layout, Layout]:
    """Mostly one memory order for the three tensors, as in networks; else one for each."""
    style = rng.choice(("abx", "abx", "axb", "axb", "axb", "mixed", "mixed", "mixed"))
    if even and rng.randrange(3):
        style = "axb"
    made = []
    for name, shape in p.shapes.items():
        dtype = p.specs[name].dtype
        if style == "mixed":
            operand = prop is not None and name != prop.result
            made.append(layout(rng, dtype, shape, operand))
        else:
            made.append(_tagged(style, dtype, shape))
    return made[0], made[1], made[2]


def _tagged(tag: str, dtype: DType, shape: Sequence[int]) -> Layout:
    return Layout.parse(tag, dtype, shape, "abcde"[: len(shape)])


def layout(rng: Random, dtype: DType, shape: Sequence[int], operand: bool = False) -> Layout:
    """Where the elements of a tensor lie: dense in some order, blocked channels, or strides with
    gaps and an offset; operands may also repeat memory (stride 0)."""
    way = rng.choice(("abx", "axb", "blocked", "order", "gaps", "gaps", "repeat"))
    if way in ("abx", "axb"):
        return _tagged(way, dtype, shape)
    if way == "blocked":
        try:
            tag = rng.choice(("aBx4b", "aBx8b", "aBx16b", "ABx8a4b", "ABx4b4a"))
            return _tagged(tag, dtype, shape)
        except LayoutError:
            return _tagged("abx", dtype, shape)
    channels_last = [0, *range(2, len(shape)), 1]
    order = rng.choice((list(range(len(shape))), channels_last, rng.sample(range(len(shape)), len(shape))))
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
        if way == "gaps" and chance(rng, 3):
            unit = rng.choice((1, 8, 16))  # a box wants pitches of whole 16 bytes
            step = (-(-step // unit) + rng.randint(0, 2)) * unit
    if way == "repeat" and operand:
        strides[rng.randrange(len(shape))] = 0
    offset = rng.choice((0, 0, 0, 8, 5)) if way == "gaps" else 0
    return Layout(
        dtype, len(shape), tuple(LayoutBlock(dim, shape[dim], strides[dim]) for dim in order), offset
    )


def drawn(rng: Random, prop: Prop) -> ConvProblem:
    """A problem for a direction, in its canonical text form: reading the text gives it back."""
    for _ in range(100):
        made = problem(rng, prop=prop)
        try:
            return ConvProblem.parse(str(made))
        except ProblemError:  # strides that no text says, such as those of an empty tensor
            continue
    raise AssertionError("a hundred problems whose text cannot be read")


def switches(rng: Random, optional: Sequence[str]) -> dict[str, bool]:
    """Some of the optional passes switched on or off; most trials run all as they are."""
    if rng.randrange(5) < 3:
        return {}
    return {name: chance(rng, 2) for name in optional if chance(rng, 3)}


# The activations that may be drawn; of the exact ones integers stay whole.
DRAWN = table(lambda op: op if op.activation and op.drawn else None)
EXACT = table(lambda op: op if op.activation and op.drawn and op.exact else None)


def epilogue(rng: Random, prop: Prop) -> str:
    """What happens to the sums, ``bias+relu``; a gradient of weights is stored as it is. Mostly
    operations that keep integers whole, so that results are compared bit for bit."""
    if prop is Prop.BWD_W or not chance(rng, 3):
        return ""
    if chance(rng, 2):
        return chain(rng)
    words = [word for word in ("bias", "res") if chance(rng, 2)]
    if rng.randrange(3):
        words.append(rng.choice(tuple(EXACT if rng.randrange(3) else DRAWN)))
    if chance(rng, 6):
        rng.shuffle(words)
    return "+".join(words)


def zeros(rng: Random, p: ConvProblem, prop: Prop) -> list[str]:
    """Words of zero points, if integers are multiplied by integer weights."""
    if prop.roles[1] != "wei" or any(p.specs[n].dtype.kind != "int" for n in prop.operands):
        return []
    data, along, other = ("src", "per_ic", "per_oc") if prop is Prop.FWD else ("dst", "per_oc", "per_ic")
    words = [f"zero:{data}{rng.choice(('', f':{along}'))}"] if chance(rng, 2) else []
    if p.g == 1 and chance(rng, 3):
        words += [f"zero:wei{rng.choice(('', f':{other}'))}"]
    return words


def quantised(rng: Random, prop: Prop) -> str:
    """What happens to sums of products of 8 bits: mostly a scale, then a chain, then a quotient and what
    is added to it; a gradient of weights is stored as it is."""
    if prop is Prop.BWD_W or chance(rng, 6):
        return ""
    words = [rng.choice(("mul:f32:common", "mul:f32:per_oc", "mul:0.25"))] if rng.randrange(4) else []
    words += chain(rng).split("+") if chance(rng, 2) else []
    words += [rng.choice(("div:2", "div:f32:common"))] if chance(rng, 4) else []
    words += [rng.choice(("add:s32:common", "add:s32:per_oc"))] if chance(rng, 3) else []
    return "+".join(words)


EXACT_WORDS = tuple(
    "relu relu:0.5 relu:-2 clip:-4:8 linear:0.5:1.5 linear:2:-3 abs round bias res sum:0.5 sum:2:1 "
    "mul:0.25 add:3 max:-1 min:4".split()
)
ROUNDED_WORDS = tuple(
    "elu:0.3 swish:-0.5 soft_relu:-2 pow:0.5:2 tanh:0:0:2.5 mish hardsigmoid:0.3:0.4 hardswish:0.2:0.6 "
    "linear:0.3:0.1 logistic div:3 square".split()
)
READ = ("add", "add", "mul", "sub", "max", "min", "ge", "lt", "ne", "prelu", "select", "div")
READ_TYPES = ("f32", "f32", "f16", "bf16", "s8", "u8")
READ_MASKS = ("common", "per_oc", "per_oc", "per_tensor", "per_dim_0", "per_dim_01", "4", "5")
LONGEST_CHAIN = 7


def chain(rng: Random) -> str:
    """Post-ops in any order, with numbers and tensors; of most the words keep integers exact. The
    words of scales may stand around them."""
    rounded = chance(rng, 3)
    words: list[str] = []
    for _ in range(rng.randint(1, LONGEST_CHAIN)):
        way = rng.randrange(3)
        if way == 0:
            words.append(_read(rng, rounded))
        else:
            words.append(rng.choice(ROUNDED_WORDS if rounded and way == 1 else EXACT_WORDS))
    once = {w for w in ("bias",) if w in words}
    kept = [w for i, w in enumerate(words) if w not in once or words.index(w) == i]
    if chance(rng, 4):
        kept = ["mul:f32:per_oc", *kept, rng.choice(("div:2", "mul:0.5"))]
    return "+".join(kept)


def _read(rng: Random, rounded: bool) -> str:
    name, mask = rng.choice(READ if rounded else READ[:-1]), rng.choice(READ_MASKS)
    if name == "prelu":
        return f"prelu:{mask}"
    if name == "select":
        return f"select:{rng.choice(READ_TYPES)}.{mask}:{rng.choice(READ_MASKS)}"
    return f"{name}:{rng.choice(READ_TYPES)}:{mask}"
