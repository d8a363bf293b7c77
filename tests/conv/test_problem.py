"""Problems: shape arithmetic, the text form and its errors, benchdnn's grammar."""

from __future__ import annotations

import itertools
import re
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transconv.conv import compiler
from transconv.conv.conv_problem import ConvProblem, TensorSpec
from transconv.errors import ProblemError
from transconv.ir.dtype import f16, f32, f64, i32
from transconv.ir.layout import Layout, LayoutBlock


def parse(text: str) -> ConvProblem:
    return ConvProblem.parse(text)


def axes(p: ConvProblem) -> dict[str, tuple[int, ...]]:
    return {name: getattr(p, name) for name in ("i", "o", "k", "stride", "dilation", "pad_lo", "pad_hi")}


# -- the grammar: one test for each rule -----------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ic3ih8oc4kh3", "mb2ic3ih8iw8oc4oh6ow6kh3kw3sh1sw1ph0pw0dh0dw0"),  # o from p = 0
        ("ic3ih8oc4kh3ph1", "ic3ih8iw8oc4oh8ow8kh3kw3ph1pw1"),
        ("ic3ih8oc4oh8kh3", "ic3ih8iw8oc4oh8ow8kh3kw3ph1pw1"),  # p from o
        ("ic3ih8oc4oh9kh3", "ic3ih8iw8oc4oh9ow9kh3kw3ph1pw1"),  # p truncated
        ("ic3ih56oc4oh28kh1sh2", "ic3ih56iw56oc4oh28ow28kh1kw1sh2sw2ph0pw0"),  # trunc(-1/2) = 0
        ("ic3ih8iw10oc4kh3kw1", "ic3ih8iw10oc4oh6ow10kh3kw1"),  # rectangular
        ("ic3iw8oc4kw3", "ic3iw8oc4ow6kw3"),  # 1D
        ("ic3id8oc4kd3", "ic3id8ih8iw8oc4od6oh6ow6kd3kh3kw3"),  # cubic
        ("ic3id8ih4iw5oc4kd1kh3kw3", "ic3id8ih4iw5oc4od8oh2ow3kd1kh3kw3"),  # 3D
        ("kh3oc4ih8ic3mb5", "mb5ic3ih8oc4kh3"),  # any order
        ("ic7ic3ih9ih8oc4kh3", "ic3ih8oc4kh3"),  # last value wins
        ("_mb2__ic3_ih8_oc4_kh3_", "ic3ih8oc4kh3"),  # separators
        ("g1ic3ih8oc4kh3", "ic3ih8oc4kh3"),  # group of one
        ('ic3ih8oc4kh3n"net:layer*3"', "ic3ih8oc4kh3"),  # name
        ("ic3id0ih8od0oc4kd0kh3pd0", "ic3ih8oc4kh3"),  # zeros are absent
        ("ic3ih2oc4kh3sh2", "ic3ih2oc4oh1kh3sh2ph0"),  # trunc, not floor
    ],
)
def test_grammar(text: str, expected: str) -> None:
    assert parse(text) == parse(expected)


def test_dilation_is_counted_from_one_in_code_and_from_zero_in_text() -> None:
    p = parse("ic3ih9oc4kh3dh1")
    assert p.dilation == (2, 2)
    assert p.o == (5, 5)
    assert "dh1" in str(p)


def test_name_is_kept_printed_and_not_compared() -> None:
    p = parse('ic3ih8oc4kh3n"net:layer1.0*3" dt=f16')
    assert p.name == "net:layer1.0*3"
    assert str(p) == 'ic3ih8oc4oh6kh3n"net:layer1.0*3" dt=f16'
    assert p == parse("ic3ih8oc4kh3 dt=f16") and hash(p) == hash(parse("ic3ih8oc4kh3 dt=f16"))
    assert parse("ic3ih8oc4kh3nbare").name == "bare"


def test_asymmetric_and_negative_high_padding() -> None:
    assert parse("ic3ih14oc4oh7kh3sh2ph0").pad_hi == (1, 1)
    assert parse("ic3ih15oc4oh3kh3sh5ph0").pad_hi == (-2, -2)
    assert parse("ic3ih5oc16oh1kh9sh2ph4").pad_hi == (0, 0)


@pytest.mark.parametrize(
    ("text", "wrong", "expected"),
    [
        ("ic3ih8oc4kh", "'kh' has no number at position 9, 'kh'", "khN"),
        ("ic3ih8oc4kz3", "unknown key 'kz' at position 9, 'kz3'", "one of g mb ic"),
        ("ic3 ih8oc4kh3", "2 descriptors", "one"),
        ("", "0 descriptors", "one"),
        ("ic3ih8kh3", "'oc' is missing", "ocN"),
        ("oc3ih8kh3", "'ic' is missing", "icN"),
        ("ic0oc3ih8kh3", "'ic' is missing or 0", "N >= 1"),
        ("g0ic3oc4ih8kh3", "'g0' has no groups", "gN"),
        ("ic3oc4ih8kh3sh0", "'sh0' is no stride", "shN"),
        ("ic3oc4ih8", "axis h is used but 'kh' is missing", "khN"),
        ("ic3oc4kh3", "axis h is used but 'ih' is missing", "ihN"),
        ("ic3oc4", "no spatial axis", "iwN"),
        ("ic3oc4id8kd3ih8kh3", "axes h and w of a 3D problem one is missing", "cube"),
        ("ic3oc4ih3kh8", "output along h is empty", "ih + 2*ph >= 8"),
        ("ic3oc4ih9oh1kh1", "unused on both sides", "phN"),
        ("ic3oc4ih99999999999999999999kh3", "too large", "2^63"),
        ('ic3ih8oc4kh3n"a"b"', "bad name", "quotes"),
        ("g2ic3ih8oc4kh3", "ic = 3 does not divide into 2 groups", "multiple"),
        ("g2ic4ih8oc3kh3", "oc = 3 does not divide into 2 groups", "multiple"),
        ("ic3ih8oc4kh3 dt=f17", "dt=f17 is unknown", "f16"),
        ("ic3ih8oc4kh3 dt=f16:f16", "dt=f16:f16 is unknown", "three"),
        ("ic3ih8oc4kh3 math=fast", "math 'fast' is unknown", "ieee tf32 tf32x3"),
        ("ic3ih8oc4kh3 dt=f16 dt=f32", "'dt=' occurs twice", "once"),
        ("ic3ih8oc4kh3 speed=11", "unknown word 'speed=11'", "dt=, tag= or math="),
        ("ic3ih8oc4kh3 tag=nhwc:nhwc", "2 parts", "src:wei:dst"),
        ("ic3ih8oc4kh3 tag=nhwq:oihw:nhwc", "layout 'nhwq' has an unknown dim 'q'", "n c h w"),
        ("ic3ih8oc4kh3 tag=nhw:oihw:nhwc", "names the dims n h w", "once"),
        ("ic3ih8oc4kh3 tag=4n2c2h2w:oihw:nhwc", "holds (4, 2, 2, 2) elements", "(2, 3, 8, 8)"),
    ],
)
def test_errors_are_one_line_that_says_what_where_and_what_is_expected(
    text: str, wrong: str, expected: str
) -> None:
    with pytest.raises(ProblemError) as caught:
        parse(text)
    message = str(caught.value)
    assert "\n" not in message
    assert wrong in message
    assert expected in message.split("expected", 1)[1]


# -- the text form ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "mb32ic64ih56oc128oh28kh3sh2ph1 dt=f16 tag=nhwc",
        "mb0ic3ih8oc4oh6kh3",
        "g4mb1ic8iw9oc8ow9kw3pw1 dt=f16:f16:f32",
        "ic16ih8oc32oh6kh3 tag=nChw16c:OIhw16i16o:nhwc",
        "mb64ic64ih7oc64oh7kh1 tag=NChw32n32c:oihw:nchw",
        "ic3id4oc4od2kd3 tag=ndhwc math=ieee",
        "ic3iw4oc4ow2kw3 dt=bf16:bf16:f32 tag=nwc:oiw:ncw math=tf32x3",
        "ic3ih8oc4oh8kh3ph1 tag=strides(1000,100,10,1)+5:hwio:nhwc",
        "ic3ih8oc4oh8kh3ph1 tag=nchw:oihw:8h@9,2n@0,4c@1,8w@72+3",
        "ic4ih8oc4oh6kh3 dt=i8:i8:i32",
        "ic3ih8iw8oc4oh6ow8kh3kw1",
        "ic3ih8oc4oh8kh3ph0",
    ],
)
def test_canonical_text_is_a_fixed_point(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("g1ic3ih8oc4kh3 tag=nchw", "ic3ih8oc4kh3"),
        ("ic3iw8oc4kw3 tag=nhwc", "ic3iw8oc4kw3 tag=nwc:owi:nwc"),
        ("ic3iw8oc4kw3 tag=nchw", "ic3iw8oc4kw3"),
        ("ic3ih8oc4kh3 tag=axb", "ic3ih8oc4kh3 tag=nhwc"),
        ("ic3ih8oc4kh3 tag=acdb", "ic3ih8oc4kh3 tag=nhwc"),
        ("ic3ih8oc4kh3 tag=any", "ic3ih8oc4kh3"),
        ("ic3ih8oc4kh3 tag=::axb", "ic3ih8oc4kh3 tag=abcd:abx:nhwc"),
        ("ic8ih8oc8kh3 tag=N(C/4)HW4", "ic8ih8oc8kh3 tag=nChw4c:oIhw4i:nChw4c"),
        ("ic8ih8oc8kh3 tag=aBx4b", "ic8ih8oc8kh3 tag=nChw4c:oIhw4i:nChw4c"),
        ("ic8ih8oc8kh3 tag=::strides(288,1,48,8)", "ic8ih8oc8kh3 tag=:oihw:nhwc"),
        ("g2ic8ih8oc6kh3 tag=nhwc:goihw:nhwc", "g2ic8ih8oc6kh3 tag=nhwc:oihw:nhwc"),
        ("g2ic8ih8oc6kh3 tag=:abxc:", "g2ic8ih8oc6kh3 tag=:ohwi:"),
        ("g2ic8ih8oc6kh3 tag=:abdec:", "g2ic8ih8oc6kh3 tag=:ohwi:"),
        ("g2ic8ih8oc6kh3 tag=:hwigo:", "g2ic8ih8oc6kh3 tag=:hwio:"),
        ("g8ic8ih8oc8kh3 tag=:goihw:", "g8ic8ih8oc8kh3"),
        ("ic3ih8oc4kh3 dt=s8:s8:s32", "ic3ih8oc4kh3 dt=i8:i8:i32"),
        ("ic3ih8oc4kh3 math=tf32 dt=f32", "ic3ih8oc4kh3"),
    ],
)
def test_spellings_of_the_same_problem(text: str, same: str) -> None:
    assert parse(text) == parse(same)


def test_grouped_weight_tag_that_interleaves_groups_is_refused() -> None:
    with pytest.raises(ProblemError, match="output channels outside of groups"):
        parse("g2ic8ih8oc6kh3 tag=:oghwi:")


SIZE = st.integers(1, 9)


@st.composite
def any_layout(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """Dense in any order, strided with gaps, or blocked."""
    order = draw(st.permutations(range(len(shape))))
    if draw(st.booleans()):
        return Layout.dense(f32, shape, order)
    if draw(st.booleans()):
        strides = tuple(draw(st.integers(0, 500)) for _ in shape)
        return Layout.from_strides(f32, shape, strides, draw(st.integers(0, 99)))
    split = draw(st.integers(0, len(shape) - 1))
    inner = draw(st.integers(2, 4))
    blocks = [
        LayoutBlock(d, shape[d] if d != split else -(-shape[d] // inner), draw(st.integers(1, 500)))
        for d in order
    ]
    blocks.insert(
        draw(st.integers(order.index(split) + 1, len(blocks))),
        LayoutBlock(split, inner, draw(st.integers(1, 500))),
    )
    return Layout(f32, len(shape), tuple(blocks), draw(st.sampled_from([0, 0, 7])))


@st.composite
def any_problem(draw: st.DrawFn) -> ConvProblem:
    """Any problem whatsoever, with unrelated layouts and dtypes."""
    n = draw(st.integers(1, 3))
    i, o, k, s, d = (tuple(draw(SIZE) for _ in range(n)) for _ in range(5))
    pad = tuple(draw(st.integers(0, 9)) for _ in range(n))
    if draw(st.booleans()):  # a square or a cube, whose text is shorter
        i, o, k, s, d, pad = (v[:1] * n for v in (i, o, k, s, d, pad))
    g, icg, ocg = draw(SIZE), draw(SIZE), draw(SIZE)
    mb = draw(st.integers(0, 4))
    shapes = (mb, g * icg, *i), (g * ocg, icg, *k), (mb, g * ocg, *o)
    specs = [TensorSpec(f32, draw(any_layout(shape))) for shape in shapes]
    p = ConvProblem(
        mb,
        g,
        g * icg,
        g * ocg,
        i,
        o,
        k,
        s,
        d,
        pad,
        *specs,
        math=draw(st.sampled_from(["ieee", "tf32", "tf32x3"])),
        name=draw(st.sampled_from(["", "a", "net:b.0*3", "n1=2"])),
    )
    return p.with_dtype(tuple(draw(st.sampled_from(["f16", "bf16", "f32", "f64"])) for _ in range(3)))


@given(any_problem())
def test_parse_reads_what_str_prints(p: ConvProblem) -> None:
    again = parse(str(p))
    assert again == p
    assert again.name == p.name
    assert str(again) == str(p)


@given(any_problem())
def test_parse_reads_the_long_form(p: ConvProblem) -> None:
    """All keys written out, as benchdnn's canonical form does."""
    written = "".join(
        f"{role}{x}{size - (role == 'd')}"
        for role, sizes in zip("iokspd", (p.i, p.o, p.k, p.stride, p.pad_lo, p.dilation), strict=True)
        for x, size in zip(p.spatial, sizes, strict=True)
    )
    again = parse(f"g{p.g}mb{p.mb}ic{p.ic}oc{p.oc}{written}")
    assert axes(again) == axes(p)
    assert (again.mb, again.g, again.ic, again.oc) == (p.mb, p.g, p.ic, p.oc)


# -- construction and arithmetic -------------------------------------------------------------------


def test_make_computes_output_and_layouts() -> None:
    p = ConvProblem.make(
        2,
        6,
        8,
        (11, 9),
        3,
        stride=(2, 1),
        dilation=(1, 2),
        pad=1,
        g=2,
        dtype=("f16", "f16", "f32"),
        layout="nhwc",
    )
    assert p.o == (6, 7)
    assert p.shapes == {"src": (2, 6, 11, 9), "wei": (8, 3, 3, 3), "dst": (2, 8, 6, 7)}
    assert p.src.layout is Layout.dense(f16, (2, 6, 11, 9), (0, 2, 3, 1))
    assert p.wei.layout is Layout.dense(f16, (8, 3, 3, 3), (0, 2, 3, 1))
    assert p.dst.layout is Layout.dense(f32, (2, 8, 6, 7), (0, 2, 3, 1))
    assert (p.ndims, p.spatial, p.icg, p.ocg) == (2, ("h", "w"), 3, 4)


def test_with_dtype_and_with_layout_change_nothing_else() -> None:
    p = ConvProblem.make(2, 16, 8, (11, 9), 3, layout=("nChw16c", "hwio", "nhwc"))
    assert p.with_dtype("f16").with_dtype("f32") == p
    assert p.with_dtype("f16").dst.layout.dtype is f16
    assert p.with_layout("nchw") == ConvProblem.make(2, 16, 8, (11, 9), 3)
    assert p.with_layout(tuple(s.layout for s in p.specs.values())) == p


def test_accumulator_type() -> None:
    p = ConvProblem.make(1, 1, 1, 5, 3)
    assert p.acc is f32 and p.with_dtype("bf16").acc is f32
    assert p.with_dtype(("f32", "f32", "f64")).acc is f64
    assert p.with_dtype(("i8", "i8", "f32")).acc is i32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mb": -1}, "mb = -1 is out of range; expected at least 0"),
        ({"k": (0, 3)}, "k = (0, 3) is out of range; expected at least 1"),
        ({"stride": (1, 0)}, "stride = (1, 0) is out of range"),
        ({"dilation": (0, 1)}, "dilation = (0, 1) is out of range"),
        ({"pad": (-1, 0)}, "pad_lo = (-1, 0) is out of range; expected at least 0"),
        ({"i": (3, 3), "k": (5, 3)}, "o = (-1, 1) is out of range"),
        ({"g": 3}, "ic = 4 does not divide into 3 groups"),
        ({"k": (3, 3, 3), "o": (1, 1)}, "k = (3, 3, 3) has 3 entries; expected 2, one for each of h"),
        ({"i": (9, 9, 9, 9), "k": 3}, "4 spatial axes; expected 1, 2 or 3"),
        ({"name": "two words"}, "the name 'two words' has a quote or a space"),
        ({"dtype": "i32"}, "src of dtype i32"),
        ({"dtype": "f31"}, "dt=f31 is unknown"),
        ({"math": "exact"}, "math 'exact' is unknown"),
    ],
)
def test_impossible_problems_are_refused_in_words(change: dict[str, object], message: str) -> None:
    sizes: dict[str, object] = {"mb": 1, "ic": 4, "oc": 8, "i": (9, 9), "k": (3, 3)}
    with pytest.raises(ProblemError, match=re.escape(message)):
        ConvProblem.make(**{**sizes, **change})  # type: ignore[arg-type]


def test_layouts_must_fit_the_shapes() -> None:
    p = ConvProblem.make(1, 4, 8, (9, 9), 3)
    small, flat = Layout.dense(f32, (1, 4, 9, 8)), Layout.dense(f32, (1, 4, 81))
    with pytest.raises(ProblemError, match=r"layout of src covers \(1, 4, 9, 8\); expected"):
        p.with_layout((small, "oihw", "nchw"))
    with pytest.raises(ProblemError, match="layout of src has 3 dims; expected 4"):
        p.with_layout((flat, "oihw", "nchw"))
    with pytest.raises(ProblemError, match="dst is f16 but its layout holds f32"):
        ConvProblem(
            p.mb,
            p.g,
            p.ic,
            p.oc,
            p.i,
            p.o,
            p.k,
            p.stride,
            p.dilation,
            p.pad_lo,
            p.src,
            p.wei,
            TensorSpec(f16, p.dst.layout),
        )


@pytest.mark.parametrize(
    "text", ["strides(288,72,-9,1)", "strides(288,72,9,1)-1", "8n@0,8c@72,9h@9,9w@-1"]
)
def test_nothing_lies_before_its_memory(text: str) -> None:
    with pytest.raises(ProblemError, match="of dst, .* negative stride or offset.*; expected 0 or more"):
        ConvProblem.parse(f"mb8ic8ih9oc8oh9kh3ph1 tag=nchw:oihw:{text}")


@given(any_problem())
def test_macs_count_the_taps_that_fall_on_the_input(p: ConvProblem) -> None:
    def inside(x: int, o: int, k: int) -> bool:
        return 0 <= o * p.stride[x] + k * p.dilation[x] - p.pad_lo[x] < p.i[x]

    taps = 1
    for x in range(p.ndims):
        pairs = itertools.product(range(p.o[x]), range(p.k[x]))
        taps *= sum(inside(x, o, k) for o, k in pairs)
    assert p.macs == p.mb * p.oc * p.icg * taps
    assert p.macs <= p.macs_padded
    assert p.flops() == 2 * p.macs and p.flops(valid=False) == 2 * p.macs_padded


def test_bytes_moved_counts_each_tensor_once() -> None:
    p = ConvProblem.make(2, 4, 8, (5, 5), 3, dtype=("f16", "f16", "f32"))
    assert p.bytes_moved() == 2 * (2 * 4 * 25) + 2 * (8 * 4 * 9) + 4 * (2 * 8 * 9)


def test_multiplications_are_those_that_one_counts() -> None:
    """Every point and tap, of small axes with all strides, dilations and paddings."""
    for i, o, k, s, d, pad in itertools.product(
        (1, 2, 5), (1, 3, 4), (1, 2, 5), (1, 2, 3), (1, 2, 3), (0, 1, 4)
    ):
        p = ConvProblem.make(1, 1, 1, (i,), (k,), s, d, pad, o=(o,))
        counted = sum(0 <= at * s + tap * d - pad < i for at in range(o) for tap in range(k))
        assert p.macs == counted, str(p)


def test_precision_of_f32_is_no_part_of_other_types() -> None:
    """A call describes it for every type; the rows and plans of a list are found by the text without."""
    for types, kept in (("bf16", False), ("f16:f16:f16", False), ("f16:f16:f32", True), ("f64", False)):
        text = f"mb2ic8ih5oc8oh5kh3ph1 dt={types}"
        plain, told = (ConvProblem.parse(t) for t in (text, f"{text} math=ieee"))
        assert (plain != told) == kept == ("math=ieee" in str(told))


def test_a_weight_tag_of_groups_may_name_them() -> None:
    """``goihw`` where there are groups; of one group only where the caller says so."""
    several, one = (ConvProblem.parse(f"g{g}mb1ic4ih5oc4oh3kh3ph0") for g in (2, 1))
    assert several.with_layout("nhwc:goihw:nhwc") == several.with_layout("nhwc:oihw:nhwc")
    assert one.with_layout("nhwc:goihw:nhwc", grouped=True) == one.with_layout("nhwc:oihw:nhwc")
    with pytest.raises(ProblemError):
        one.with_layout("nhwc:goihw:nhwc")


@pytest.mark.parametrize(
    "text",
    [
        "mb2ic4ih5oc6oh5kh3ph1",
        "g2mb3ic4ih7iw5oc6oh3ow3kh3kw1sh2ph0pw0sw2",
        "mb1ic3ih9oc2oh5kh3dh1ph0",
        "g3mb2ic3iw6oc6ow6kw3pw1",
    ],
)
def test_multiply_adds_are_those_of_the_loops(text: str) -> None:
    """Counted one by one: those of all taps, and those of taps that are inside."""
    p = ConvProblem.parse(text)
    taps = [
        [at * s - lo + k * d for at in range(o) for k in range(n)]
        for o, n, s, d, lo in zip(p.o, p.k, p.stride, p.dilation, p.pad_lo, strict=True)
    ]
    inside = [sum(0 <= at < size for at in each) for each, size in zip(taps, p.i, strict=True)]
    each = p.mb * p.oc * (p.ic // p.g)
    assert p.macs_padded == each * prod(map(len, taps)) and p.macs == each * prod(inside)


@pytest.mark.parametrize(
    "text",
    [
        "mb1ic4ih5oc6oh5kh3ph1",
        "mb3ic4ih7iw5oc6oh3ow5kh3kw1sh2ph0pw0sw1",
        "mb1ic3ih9oc2oh5kh3dh1ph0",
        "mb2ic3iw9oc6ow4kw3pw0sw2",
    ],
)
def test_sizes_of_results_of_other_images(text: str) -> None:
    """A layer over images of any size has as many positions as windows that fit."""
    p = ConvProblem.parse(text)
    for x, (stride, lo, n, dilation) in enumerate(zip(p.stride, p.pad_lo, p.k, p.dilation, strict=True)):
        for i in range(p.i[x], p.i[x] + 9):
            hi = p.pad_hi[x] if stride == 1 else lo
            windows = [at for at in range(-lo, i + hi, stride) if at + (n - 1) * dilation < i + hi]
            assert compiler._length(p, x, i) == len(windows)
