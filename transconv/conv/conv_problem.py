"""ConvProblem: the shapes, types and layouts of a convolution, without a direction.

One relation holds along every spatial axis: ``i = o*stride + k*dilation - pad_lo``. The high padding
follows from the sizes and is not stored; it is negative if the last input points are unused. A transposed
convolution is BWD_D of another problem.

Text form: a benchdnn descriptor (see descriptor.py), then words where they differ from the default:

    mb32ic64ih56oc128oh28kh3sh2ph1 dt=f16 tag=nhwc          one word for the three tensors
    mb1ic3ih8oc4oh6kh3 dt=f16:f16:f32 tag=nhwc:oihw:nhwc math=ieee      src:wei:dst

Counts of multiply-adds that are not on padding."""

from __future__ import annotations

import enum
import math as arithmetic
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from transconv.conv.descriptor import (
    SPATIAL,
    Descriptor,
    DTypes,
    parse_descriptor,
    print_descriptor,
    read_dtypes,
    read_tags,
    results,
    write_dtypes,
    write_tags,
)
from transconv.ir import DType, Layout, f32, f64, i32, multiplied
from transconv.support import LayoutError, ProblemError

MATHS = ("ieee", "tf32", "tf32x3")

Sizes = int | Sequence[int]
Layouts = str | Sequence[str | Layout]


class Prop(enum.Enum):
    """Which tensor is computed: dst (FWD), src (BWD_D) or wei (BWD_W) from the other two."""

    FWD = "fwd"
    BWD_D = "bwd_d"
    BWD_W = "bwd_w"

    def __str__(self) -> str:
        return self.value

    @property
    def roles(self) -> tuple[str, str, str]:
        """The names of A, B and C, where C is the sum of the products of A and B."""
        return _ROLES[self]

    @property
    def operands(self) -> tuple[str, str]:
        """The names of the two tensors that are read."""
        return _ROLES[self][:2]

    @property
    def result(self) -> str:
        """The name of the tensor that is computed."""
        return _ROLES[self][2]


_ROLES = {
    Prop.FWD: ("src", "wei", "dst"),
    Prop.BWD_D: ("dst", "wei", "src"),
    Prop.BWD_W: ("src", "dst", "wei"),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The element type of a tensor, and its layout over its torch dims."""

    dtype: DType
    layout: Layout


@dataclass(frozen=True, slots=True)
class ConvProblem:
    """One convolution. ``ic`` and ``oc`` count the channels of all groups; tuples have one entry per
    spatial axis, in the order d, h, w; dilation 1 is dense. Logical shapes: src (mb, ic, *i), wei (oc,
    ic//g, *k), dst (mb, oc, *o). ``math``: the precision of products of f32, one of ``MATHS``; the
    default where no tensor is f32. The name does not count in comparisons. Raises ProblemError for sizes,
    types or layouts that describe no convolution."""

    mb: int
    g: int
    ic: int
    oc: int
    i: tuple[int, ...]
    o: tuple[int, ...]
    k: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pad_lo: tuple[int, ...]
    src: TensorSpec
    wei: TensorSpec
    dst: TensorSpec
    math: str = "tf32"
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_sizes(self)
        check_tensors(self)
        if self.math not in MATHS:
            raise ProblemError(f"math '{self.math}' is unknown; expected one of {' '.join(MATHS)}")
        # One problem has one text, by which tuned rows and plans are found. Products of 8-bit floats are
        # added to f32 as they are made (ieee), or in the shorter accumulators of some matrix units.
        short = sum(x.is_short for x in self.dtypes)
        if f32 not in self.dtypes and not (short > 1 and self.math == "ieee"):
            object.__setattr__(self, "math", "tf32")
        if '"' in self.name or any(c.isspace() or not c.isprintable() for c in self.name):
            raise ProblemError(
                f"the name {self.name!r} has a quote or a space in it, or what cannot "
                "be printed; expected one word"
            )

    # -- construction ----------------------------------------------------------------------------

    @staticmethod
    def make(
        mb: int,
        ic: int,
        oc: int,
        i: Sizes,
        k: Sizes,
        stride: Sizes = 1,
        dilation: Sizes = 1,
        pad: Sizes = 0,
        o: Sizes | None = None,
        g: int = 1,
        dtype: DTypes = "f32",
        layout: Layouts = "nchw",
        math: str = "tf32",
        name: str = "",
    ) -> ConvProblem:
        """Build a problem from its sizes. ``i`` sets the number of axes (an int is 1D); any other int
        applies to all axes. ``pad`` is the low padding; without ``o`` the high padding is the same.
        ``dtype`` and ``layout`` are one word, or (src, wei, dst). Raises ProblemError."""
        i = (i,) if isinstance(i, int) else tuple(i)
        k, stride, dilation, pad = (_spread(v, len(i)) for v in (k, stride, dilation, pad))
        if o is None:
            if not len(i) == len(k) == len(stride) == len(dilation) == len(pad):
                raise ProblemError(
                    f"i, k, stride, dilation and pad have {len(i)}, {len(k)}, {len(stride)}, "
                    f"{len(dilation)} and {len(pad)} entries; expected as many each"
                )
            if min(stride) < 1:
                raise ProblemError(f"stride = {stride} is out of range; expected at least 1")
            o = tuple(
                (n + 2 * p - (taps - 1) * d - 1) // s + 1
                for n, taps, s, d, p in zip(i, k, stride, dilation, pad, strict=True)
            )
        shape = Descriptor(mb, g, ic, oc, i, _spread(o, len(i)), k, stride, dilation, pad, name)
        return ConvProblem.of_descriptor(shape, dtype, layout, math)

    @staticmethod
    def of_descriptor(
        d: Descriptor, dtype: DTypes = "f32", layout: Layouts = "nchw", math: str = "tf32"
    ) -> ConvProblem:
        """The problem of a descriptor, with element types and layouts as in ``make``. Raises
        ProblemError."""
        dtypes = read_dtypes(dtype)
        wei_shape = (d.oc, d.ic // max(d.g, 1), *d.k)
        shapes = ((d.mb, d.ic, *d.i), wei_shape, (d.mb, d.oc, *d.o))
        src, wei, dst = (
            TensorSpec(t, Layout.dense(t, shape)) for t, shape in zip(dtypes, shapes, strict=True)
        )
        p = ConvProblem(
            d.mb,
            d.g,
            d.ic,
            d.oc,
            d.i,
            d.o,
            d.k,
            d.stride,
            d.dilation,
            d.pad_lo,
            src,
            wei,
            dst,
            math,
            d.name,
        )
        return p if layout == "nchw" else p.with_layout(layout, grouped=d.grouped)

    @staticmethod
    def parse(text: str) -> ConvProblem:
        """Read the text form; ``parse(str(p)) == p``. Raises ProblemError, with a message of one line."""
        words: dict[str, str] = {}
        shapes: list[str] = []
        for word in text.split():
            key, is_option, value = word.partition("=")
            if not is_option or 'n"' in key:
                shapes.append(word)
            elif key not in ("dt", "tag", "math"):
                raise ProblemError(f"problem '{text}': unknown word '{word}'; expected dt=, tag= or math=")
            elif key in words:
                raise ProblemError(f"problem '{text}': '{key}=' occurs twice; expected it once")
            else:
                words[key] = value
        if len(shapes) != 1:
            raise ProblemError(
                f"problem '{text}' has {len(shapes)} descriptors; expected one, "
                "such as mb32ic64ih56oc128oh28kh3sh2ph1"
            )
        return ConvProblem.of_descriptor(
            parse_descriptor(shapes[0]),
            words.get("dt", "f32"),
            words.get("tag", "nchw"),
            words.get("math", "tf32"),
        )

    def with_layout(self, layout: Layouts, grouped: bool = False) -> ConvProblem:
        """The problem with other layouts: one tag for the three tensors (``nhwc``), a text of three
        (``nhwc:oihw:nhwc``), or a sequence (src, wei, dst) of tags and Layouts. ``grouped``: a weight tag
        may name a group axis (``goihw``). Raises ProblemError."""
        try:
            layouts = read_tags(
                layout, self.dtypes, tuple(self.shapes.values()), self.g if grouped or self.g > 1 else 0
            )
        except LayoutError as error:
            raise ProblemError(f"problem '{self.shape_text}': {error}") from error
        src, wei, dst = (TensorSpec(new.dtype, new) for new in layouts)
        return replace(self, src=src, wei=wei, dst=dst)

    def with_dtype(self, dtype: DTypes) -> ConvProblem:
        """The problem with other element types (one, or src, wei, dst) in the same layouts."""
        src, wei, dst = (
            TensorSpec(t, replace(spec.layout, dtype=t))
            for spec, t in zip(self.specs.values(), read_dtypes(dtype), strict=True)
        )
        return replace(self, src=src, wei=wei, dst=dst)

    def at(self, mb: int, i: tuple[int, ...], o: tuple[int, ...]) -> ConvProblem:
        """The same layer over other images: src and dst dense, in the order that they have here."""
        src, dst = (
            replace(
                spec, layout=Layout.dense(spec.dtype, (mb, c, *n), [b.dim for b in spec.layout.blocks])
            )
            for spec, c, n in ((self.src, self.ic, i), (self.dst, self.oc, o))
        )
        return replace(self, mb=mb, i=i, o=o, src=src, dst=dst, name="")

    # -- text ------------------------------------------------------------------------------------

    @property
    def shape_text(self) -> str:
        """The benchdnn descriptor alone."""
        return print_descriptor(self.descriptor)

    @property
    def descriptor(self) -> Descriptor:
        """The sizes, without types and layouts."""
        return Descriptor(
            self.mb,
            self.g,
            self.ic,
            self.oc,
            self.i,
            self.o,
            self.k,
            self.stride,
            self.dilation,
            self.pad_lo,
            self.name,
        )

    def __str__(self) -> str:
        words = [self.shape_text]
        if types := write_dtypes(self.dtypes):
            words.append(f"dt={types}")
        if tags := write_tags([s.layout for s in self.specs.values()], tuple(self.shapes.values())):
            words.append(f"tag={tags}")
        if self.math != "tf32":
            words.append(f"math={self.math}")
        return " ".join(words)

    # -- arithmetic ------------------------------------------------------------------------------

    @property
    def ndims(self) -> int:
        """The number of spatial axes: 1, 2 or 3."""
        return len(self.i)

    @property
    def spatial(self) -> tuple[str, ...]:
        """The letters of the spatial axes: ("w",), ("h", "w") or ("d", "h", "w")."""
        return tuple(SPATIAL[3 - len(self.i) :])

    @property
    def pad_hi(self) -> tuple[int, ...]:
        """Padding after the last input point; negative if the last points are never read."""
        axes = zip(self.i, self.o, self.k, self.stride, self.dilation, self.pad_lo, strict=True)
        return tuple((o - 1) * s + (k - 1) * d + 1 - i - p for i, o, k, s, d, p in axes)

    @property
    def icg(self) -> int:
        """Input channels of one group."""
        return self.ic // self.g

    @property
    def ocg(self) -> int:
        """Output channels of one group."""
        return self.oc // self.g

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensors by name, in the order src, wei, dst."""
        return {"src": self.src, "wei": self.wei, "dst": self.dst}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The logical shapes by name, in the order src, wei, dst."""
        return {
            "src": (self.mb, self.ic, *self.i),
            "wei": (self.oc, self.icg, *self.k),
            "dst": (self.mb, self.oc, *self.o),
        }

    @property
    def dtypes(self) -> tuple[DType, DType, DType]:
        """The element types of src, wei, dst."""
        return self.src.dtype, self.wei.dtype, self.dst.dtype

    @property
    def acc(self) -> DType:
        """The accumulator's type: f64 if a tensor is f64, i32 for products of integers, else f32. (Both
        operands of a direction are integers, or neither is.)"""
        if f64 in self.dtypes:
            return f64
        return i32 if sum(t.kind == "int" for t in self.dtypes) > 1 else f32

    @property
    def macs(self) -> int:
        """Multiply-adds without those on padding."""
        axes = zip(self.i, self.o, self.k, self.stride, self.dilation, self.pad_lo, strict=True)
        return self.mb * self.oc * self.icg * arithmetic.prod(valid_taps(*axis) for axis in axes)

    @property
    def macs_padded(self) -> int:
        """Multiply-adds including those on padding."""
        return self.mb * self.oc * self.icg * arithmetic.prod(self.o) * arithmetic.prod(self.k)

    def flops(self, valid: bool = True) -> int:
        """Floating-point operations, two per multiply-add; ``valid`` leaves padding out."""
        return 2 * (self.macs if valid else self.macs_padded)

    def bytes_moved(self) -> int:
        """Bytes of the three tensors, each once: the least memory traffic of any direction."""
        return sum(
            arithmetic.prod(shape) * self.specs[what].dtype.bytes for what, shape in self.shapes.items()
        )


def _spread(value: Sizes, n: int) -> tuple[int, ...]:
    return (value,) * n if isinstance(value, int) else tuple(value)


# -- what a problem must meet -----------------------------------------------------------------------


def check_sizes(p: ConvProblem) -> None:
    """Raises ProblemError for sizes that describe no convolution."""
    n = len(p.i)
    if not 1 <= n <= 3:
        raise ProblemError(f"{n} spatial axes; expected 1, 2 or 3")
    least = {
        "mb": 0,
        "g": 1,
        "ic": 1,
        "oc": 1,
        "i": 1,
        "o": 1,
        "k": 1,
        "stride": 1,
        "dilation": 1,
        "pad_lo": 0,
    }
    for what, low in least.items():
        sizes = getattr(p, what)
        if isinstance(sizes, tuple) and len(sizes) != n:
            raise ProblemError(
                f"{what} = {sizes} has {len(sizes)} entries; expected {n}, "
                f"one for each of {', '.join(p.spatial)}"
            )
        for size in sizes if isinstance(sizes, tuple) else (sizes,):
            if size < low:
                raise ProblemError(f"{what} = {sizes} is out of range; expected at least {low}")
    for what in ("ic", "oc"):
        if getattr(p, what) % p.g:
            raise ProblemError(
                f"{what} = {getattr(p, what)} does not divide into {p.g} groups; expected a multiple of g"
            )


def check_tensors(p: ConvProblem) -> None:
    """Raises ProblemError for element types or layouts that do not go with the sizes."""
    alone = sum(not t.operand for t in p.dtypes) > 1  # a direction has one result
    for what, shape in p.shapes.items():
        spec: TensorSpec = getattr(p, what)
        legal = multiplied() if alone and not spec.dtype.operand else results()
        if spec.dtype not in legal:
            raise ProblemError(
                f"{what} of dtype {spec.dtype}; expected one of {' '.join(map(str, legal))}"
            )
        if spec.layout.dtype != spec.dtype:
            raise ProblemError(
                f"{what} is {spec.dtype} but its layout holds {spec.layout.dtype}; expected one dtype"
            )
        if spec.layout.offset < 0 or any(b.stride < 0 for b in spec.layout.blocks):
            raise ProblemError(
                f"the layout of {what}, {spec.layout}, has a negative stride or "
                "offset, which leads out of its memory; expected 0 or more"
            )
        if spec.layout.ndims != len(shape):
            raise ProblemError(
                f"the layout of {what} has {spec.layout.ndims} dims; "
                f"expected {len(shape)}, for shape {shape}"
            )
        if spec.layout.extents != spec.layout.padded(shape):
            raise ProblemError(
                f"the layout of {what} covers {spec.layout.extents}; "
                f"expected {spec.layout.padded(shape)}, for shape {shape}"
            )


def valid_taps(i: int, o: int, k: int, stride: int, dilation: int, pad: int) -> int:
    """The number of pairs (output point, tap) along one axis that read an input point."""
    return _taps_below(i, o, k, stride, dilation, pad) - _taps_below(0, o, k, stride, dilation, pad)


def _taps_below(bound: int, o: int, k: int, stride: int, dilation: int, pad: int) -> int:
    """The number of pairs with ``at*stride + tap*dilation - pad < bound``. For each tap these are the
    first (start - tap*dilation) // stride output points, clipped to 0..o."""
    start = bound + pad + stride - 1
    whole = min(k, max(0, (start - o * stride) // dilation + 1))
    some = min(k, max(whole, (start - stride) // dilation + 1))
    least = start - dilation * (some - 1)
    return o * whole + _floor_sum(some - whole, stride, dilation, least)


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """The sum of (a*t + b) // m for t from 0 to n - 1, in as many steps as Euclid's algorithm takes."""
    total = 0
    while n > 0:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        last = a * n + b
        n, m, a, b = last // m, a, m, last % m
    return total
