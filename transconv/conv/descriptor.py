"""The parts of a problem's text, read and printed: oneDNN's benchdnn descriptor, types and layouts.

    desc := { key INT | "_" } [ "n" NAME ]
    key  := g mb ic id ih iw oc od oh ow kd kh kw sd sh sw pd ph pw dd dh dw

Keys come in any order, and the last value of a key counts. Defaults: stride 1; dilation 0, which is dense
(the code counts dilation from 1, and this module converts); output and padding follow from one another;
the first spatial axis gives the others (a square or cubic image); a problem with w alone is 1D.

Of ``dt=``, one type applies to the three tensors (``f16``); three are written ``f16:f16:f32``, for
src:wei:dst.

Of the tags of src, wei and dst, one may apply to the three tensors: ``nhwc`` gives weights ``ohwi``, and
in 1D means ``nwc``. Three are written ``src:wei:dst``. Weights are (oc, ic/g, *k); if a problem has
groups, a weight tag may also name them (``goihw``, ``hwigo``, ``abxc``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from transconv import ir
from transconv.support import LayoutError, ProblemError, nearest

SPATIAL = "dhw"
KEYS = ("g", "mb", "ic", "oc", *(role + x for role in "iokspd" for x in SPATIAL))
"""The letters of benchdnn's grammar, in the order in which they are printed."""
INT_MAX = 2**63 - 1
DEFAULT_MB = 2
MISSING = -1  # a padding that was not written

_ITEM = re.compile(r"([a-z]+)(\d*)")
_NAME = re.compile(r'n("[^"\s]*"|[^"\s]*)$')


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The sizes of a problem. Tuples have one entry per spatial axis, in the order d, h, w; dilation 1 is
    dense. ``grouped``: ``g`` was written, so that weight tags may name a group axis."""

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
    name: str = ""
    grouped: bool = False


@dataclass(slots=True)
class _Axis:
    """One spatial axis while its defaults are filled in, with dilation as in the text (0 is dense)."""

    i: int
    o: int
    k: int
    s: int
    p: int
    d: int

    @property
    def absent(self) -> bool:
        return (self.i, self.o, self.k, self.d) == (0, 0, 0, 0) and self.s == 1 and self.p < 1

    @property
    def reach(self) -> int:
        """The number of input points that a dilated filter spans."""
        return (self.k - 1) * (self.d + 1) + 1


def parse_descriptor(text: str) -> Descriptor:
    """Read one descriptor (without spaces). Raises ProblemError with the position of the mistake."""
    if not re.sub(r'n".*"', "", text).isascii():  # other alphabets have digits, too; a name is a label
        raise ProblemError(f"problem '{text}': {ir.why_not_text(text)}")
    given, name = _scan(text)
    for key in ("ic", "oc"):
        if given.get(key, 0) <= 0:
            raise ProblemError(f"problem '{text}': '{key}' is missing or 0; expected {key}N, N >= 1")
    if given.get("g", 1) == 0:
        raise ProblemError(f"problem '{text}': 'g0' has no groups; expected gN, N >= 1")
    axes = [_complete(_axis(given, x, text), x, text) for x in SPATIAL]
    axes = _drop_and_spread(axes, text)
    return Descriptor(
        mb=given.get("mb", DEFAULT_MB),
        g=given.get("g", 1),
        ic=given["ic"],
        oc=given["oc"],
        i=tuple(a.i for a in axes),
        o=tuple(a.o for a in axes),
        k=tuple(a.k for a in axes),
        stride=tuple(a.s for a in axes),
        dilation=tuple(a.d + 1 for a in axes),
        pad_lo=tuple(a.p for a in axes),
        name=name,
        grouped="g" in given,
    )


def _scan(text: str) -> tuple[dict[str, int], str]:
    given: dict[str, int] = {}
    at = 0
    while at < len(text):
        if text[at] == "_":
            at += 1
            continue
        if text[at] == "n":
            return given, _read_name(text, at)
        found = _ITEM.match(text, at)
        key = found.group(1) if found else text[at : at + 8]
        where = f"at position {at}, '{text[at : at + 12]}'"
        if found is None or key not in KEYS:
            raise ProblemError(
                f"problem '{text}': unknown key '{key}' {where}; expected one of "
                f"{' '.join(KEYS)} and a number, or n and a name"
            )
        if not found.group(2):
            raise ProblemError(
                f"problem '{text}': key '{key}' has no number {where}; "
                f"expected {key}N, N a whole number >= 0"
            )
        value = int(found.group(2))
        if value > INT_MAX:
            raise ProblemError(
                f"problem '{text}': the number is too large {where}; expected at most 2^63 - 1"
            )
        given[key] = value
        at = found.end()
    return given, ""


def _read_name(text: str, at: int) -> str:
    found = _NAME.match(text, at)
    if found is None:
        raise ProblemError(
            f"problem '{text}': bad name at position {at}, '{text[at:]}'; "
            'expected n"..." with neither quotes nor spaces inside'
        )
    return found.group(1).strip('"')


def _axis(given: dict[str, int], x: str, text: str) -> _Axis:
    axis = _Axis(
        i=given.get("i" + x, 0),
        o=given.get("o" + x, 0),
        k=given.get("k" + x, 0),
        s=given.get("s" + x, 1),
        p=given.get("p" + x, MISSING),
        d=given.get("d" + x, 0),
    )
    if axis.s == 0:
        raise ProblemError(f"problem '{text}': 's{x}0' is no stride; expected s{x}N, N >= 1")
    return axis


def _complete(axis: _Axis, x: str, text: str) -> _Axis:
    """Fill in the output or the padding if it was left out."""
    if axis.absent:
        return axis
    for role, size in (("i", axis.i), ("k", axis.k)):
        if size == 0:
            raise ProblemError(
                f"problem '{text}': axis {x} is used but '{role}{x}' is missing "
                f"or 0; expected {role}{x}N, N >= 1"
            )
    if axis.o == 0:
        axis.p = max(axis.p, 0)
        axis.o = _quotient(axis.i - axis.reach + 2 * axis.p, axis.s) + 1
        if axis.o <= 0:
            raise ProblemError(
                f"problem '{text}': the output along {x} is empty, the kernel spans {axis.reach} of "
                f"{axis.i} + 2*{axis.p} points; expected i{x} + 2*p{x} >= {axis.reach}, or o{x}N"
            )
    elif axis.p == MISSING:
        axis.p = default_pad(axis.i, axis.o, axis.k, axis.s, axis.d + 1)
        if axis.p < 0:
            raise ProblemError(
                f"problem '{text}': o{x}{axis.o} leaves input unused on both sides of axis {x} (padding "
                f"{axis.p}); expected a larger o{x}, or p{x}N"
            )
    return axis


def _quotient(a: int, b: int) -> int:
    """C's integer division: towards zero. b > 0."""
    return a // b if a >= 0 else -(-a // b)


def default_pad(i: int, o: int, k: int, stride: int, dilation: int) -> int:
    """The low padding of an axis whose text has none: half of the total padding, rounded towards zero."""
    return _quotient((o - 1) * stride - i + (k - 1) * dilation + 1, 2)


def _drop_and_spread(axes: list[_Axis], text: str) -> list[_Axis]:
    """Leave out absent outer axes; give absent inner ones the sizes of the first (square, cubic)."""
    while axes and axes[0].o == 0:
        axes = axes[1:]
    if not axes:
        raise ProblemError(f"problem '{text}' has no spatial axis; expected at least iwN owN kwN")
    absent = [a for a in axes[1:] if a.absent]
    if len(axes) == 3 and len(absent) == 1:
        raise ProblemError(
            f"problem '{text}': of the axes h and w of a 3D problem one is missing; "
            "expected both, or neither for a cube"
        )
    return [axes[0] if a.absent else a for a in axes]


def print_descriptor(d: Descriptor, each: bool = False) -> str:
    """The shortest text that ``parse_descriptor`` reads back as ``d``, except for ``grouped``; with
    ``each`` spatial axis also where they are alike."""
    axes = list(zip(d.i, d.o, d.k, d.stride, d.dilation, d.pad_lo, strict=True))
    names = SPATIAL[len(SPATIAL) - len(axes) :]
    shown = names if each or any(a != axes[0] for a in axes) else names[:1]
    default = tuple(default_pad(i, o, k, s, dilation) for i, o, k, s, dilation, _ in axes)
    text = f"g{d.g}" if d.g != 1 else ""
    text += f"mb{d.mb}" if d.mb != DEFAULT_MB else ""
    text += f"ic{d.ic}" + _keys("i", shown, d.i)
    text += f"oc{d.oc}" + _keys("o", shown, d.o) + _keys("k", shown, d.k)
    text += _keys("s", shown, d.stride) if set(d.stride) != {1} else ""
    text += _keys("p", shown, d.pad_lo) if any(d.pad_lo) or default != d.pad_lo else ""
    text += _keys("d", shown, [n - 1 for n in d.dilation]) if set(d.dilation) != {1} else ""
    return text + (f'n"{d.name}"' if d.name else "")


def _keys(role: str, names: str, sizes: tuple[int, ...] | list[int]) -> str:
    return "".join(f"{role}{x}{size}" for x, size in zip(names, sizes, strict=False))


DTypes = str | ir.DType | Sequence[str | ir.DType]


def results() -> tuple[ir.DType, ...]:
    """The types that a result may have, those of operands first."""
    return (*ir.multiplied(), *(t for t in ir.DTYPES.values() if t.result and not t.operand))


def why_not_multiplied(a: ir.DType, b: ir.DType) -> str | None:
    """None if kernels multiply elements of these types, else the reason."""
    for t in (a, b):
        if not t.operand:
            return f"{t} is the type of results; operands are {' '.join(x.name for x in ir.multiplied())}"
    if a.kind != b.kind:
        whole, real = (a, b) if a.kind == "int" else (b, a)
        if whole.digits > real.digits:
            return (
                f"{a} is multiplied by {b}, but {real} has not all numbers of {whole}; expected two "
                "types of floats or of integers, or a wider float"
            )
    return None


def _read(word: str | ir.DType) -> ir.DType | None:
    try:
        return word if isinstance(word, ir.DType) else ir.type_named(word)
    except KeyError:
        return None


def read_dtypes(dtype: DTypes) -> tuple[ir.DType, ir.DType, ir.DType]:
    """Element types of src, wei and dst; oneDNN's names are read as well. Raises ProblemError."""
    if isinstance(dtype, ir.DType):
        return dtype, dtype, dtype
    given = dtype.split(":") if isinstance(dtype, str) else list(dtype)
    found = [_read(t) for t in given]
    types = [t for t in found if t is not None and t.result]
    if len(found) not in (1, 3) or len(types) != len(found):
        legal = [*map(str, results())]
        theirs = {name: ours for name, ours in ir.ELSEWHERE.items() if ours in legal}
        raise ProblemError(
            f"dt={':'.join(map(str, given))} is unknown; expected one of {' '.join(legal)}, or three "
            f"of them as src:wei:dst{nearest(str(given[0]), legal, theirs)}"
        )
    return (types[0], types[0], types[0]) if len(types) == 1 else (types[0], types[1], types[2])


def write_dtypes(dtypes: Sequence[ir.DType]) -> str:
    """The text that reads back as these types; empty for f32, the default."""
    names = [t.name for t in dtypes]
    if set(names) == {ir.f32.name}:
        return ""
    return names[0] if len(set(names)) == 1 else ":".join(names)


Shape = tuple[int, ...]

# Plain orders for any number of axes, which have the 2D spelling.
_ANY_NDIMS = {"": "abx", "any": "abx", "nchw": "abx", "nhwc": "axb"}
_ACTIVATION_TO_WEIGHT = str.maketrans("nNcC", "oOiI")


def read_tags(
    texts: str | Sequence[str | ir.Layout],
    dtypes: Sequence[ir.DType],
    shapes: Sequence[Shape],
    groups: int = 0,
) -> list[ir.Layout]:
    """Layouts of src, wei and dst. With ``groups`` above 0 a weight tag may name the group axis. Raises
    LayoutError."""
    if isinstance(texts, str):
        texts = texts.split(":")
        if len(texts) == 1:
            tag = _ANY_NDIMS.get(texts[0], texts[0])
            texts = [tag, for_weights(tag), tag]
    if len(texts) != 3:
        raise LayoutError(
            f"tag '{':'.join(map(str, texts))}' has {len(texts)} parts; "
            "expected one tag, or three as src:wei:dst"
        )
    found = []
    for text, dtype, shape, is_wei in zip(texts, dtypes, shapes, (False, True, False), strict=True):
        if isinstance(text, ir.Layout):
            found.append(replace(text, dtype=dtype))
        else:
            found.append(_read_tag(text, dtype, shape, groups if is_wei else 0, is_wei))
    return found


def for_weights(tag: str) -> str:
    """The tag of weights for a tag of activations: o for n and i for c. Alphabetical tags stay."""
    return tag.translate(_ACTIVATION_TO_WEIGHT) if "n" in tag.lower() else tag


def _read_tag(tag: str, dtype: ir.DType, shape: Shape, groups: int, is_wei: bool) -> ir.Layout:
    tag = _ANY_NDIMS.get(tag, tag)
    spatial = SPATIAL[5 - len(shape) :]
    if groups and _names_groups(tag, len(shape)):
        grouped = (groups, shape[0] // groups, *shape[1:])
        return _merge_groups(tag, ir.Layout.parse(tag, dtype, grouped, "goi" + spatial))
    return ir.Layout.parse(tag, dtype, shape, ("oi" if is_wei else "nc") + spatial)


def _names_groups(tag: str, ndims: int) -> bool:
    if "strides" in tag or "@" in tag:
        return False
    letters = {c for c in tag.lower() if c.isalpha()}
    if "g" in letters or "x" in letters:
        return "g" in letters or "c" in letters
    return "abcdef"[ndims] in letters and "a" in letters


def _merge_groups(tag: str, grouped: ir.Layout) -> ir.Layout:
    """(g, o, i, *k) as (g*o, i, *k): the output channel over all groups is g*ocg + o."""
    dims = [b.dim for b in grouped.blocks if b.dim < 2 and b.size > 1]
    if dims != sorted(dims):
        raise LayoutError(
            f"tag '{tag}' puts output channels outside of groups; expected a tag with g before o"
        )
    kept = [b for b in grouped.blocks if b.dim > 1 or b.size != 1]
    blocks = [ir.LayoutBlock(max(0, b.dim - 1), b.size, b.stride) for b in kept]
    if all(b.dim for b in blocks):
        step = max((b.size * b.stride for b in blocks), default=1)
        blocks.insert(0, ir.LayoutBlock(0, 1, step))
    return ir.Layout(grouped.dtype, grouped.ndims - 1, tuple(_fuse(blocks)), grouped.offset)


def _fuse(blocks: list[ir.LayoutBlock]) -> list[ir.LayoutBlock]:
    """Merge adjacent blocks of dim 0 that together have one stride."""
    fused: list[ir.LayoutBlock] = []
    for b in blocks:
        last = fused[-1] if fused else None
        if last and b.dim == last.dim == 0 and last.stride == b.size * b.stride:
            fused[-1] = ir.LayoutBlock(0, last.size * b.size, b.stride)
        else:
            fused.append(b)
    return fused


def write_tags(layouts: Sequence[ir.Layout], shapes: Sequence[Shape]) -> str:
    """The shortest text that ``read_tags`` reads back; empty if all three are dense in the order of their
    dims."""
    tags = [
        _write(layout, shape, is_wei)
        for layout, shape, is_wei in zip(layouts, shapes, (False, True, False), strict=True)
    ]
    src, wei, dst = tags
    if src == dst and wei == for_weights(src) and not src[0].isdigit() and "(" not in src:
        return "" if src == "nc" + SPATIAL[5 - len(shapes[0]) :] else src
    return ":".join(tags)


@lru_cache(maxsize=1024)  # the sizes that a layer's kernels are made for have one weight
def _write(layout: ir.Layout, shape: Shape, is_wei: bool) -> str:
    letters = ("oi" if is_wei else "nc") + SPATIAL[5 - len(shape) :]
    strides = layout.strides()
    candidates = [layout.tag(letters) or ""]
    if strides is not None and 0 <= layout.offset:
        offset = f"+{layout.offset}" if layout.offset else ""
        candidates.append(f"strides({','.join(map(str, strides))}){offset}")
    for text in filter(None, candidates):
        try:
            if ir.Layout.parse(text, layout.dtype, shape, letters) is layout:
                return text
        except LayoutError:
            continue
    return layout.text(letters).replace(" ", ",")
