"""Layouts: offsets against brute-force packers, text forms, density."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transconv.errors import LayoutError
from transconv.ir.dtype import DType, f16, f32, i8, i32, index
from transconv.ir.expr import Add, Const, Expr, FloorDiv, Mod, Mul, Var
from transconv.ir.interp.evaluate import Evaluator, Memory, offsets_of
from transconv.ir.layout import Layout, LayoutBlock
from transconv.ir.tensor import Tensor, View, ViewDim
from transconv.ir.visit import substitute


def offsets(layout: Layout, shape: tuple[int, ...]) -> np.ndarray:
    """The offset of every element of a shape, through ``offset_of``."""
    coords = [Var(f"x{d}", index) for d in range(len(shape))]
    grid = np.indices(shape)

    def value(e: Expr) -> Any:
        match e:
            case Const(number):
                return number
            case Var():
                return grid[coords.index(e)]
            case Add(a, b):
                return value(a) + value(b)
            case Mul(a, b):
                return value(a) * value(b)
            case FloorDiv(a, b):
                return value(a) // value(b)
            case Mod(a, b):
                return value(a) % value(b)
        raise AssertionError(f"{e} is not arithmetic of coordinates")

    return np.broadcast_to(value(layout.offset_of(coords)), shape)


def pack(logical: np.ndarray, axes_of_dim: list[list[int]], order: list[int]) -> np.ndarray:
    """Pack by reshaping: pad each dim to whole blocks, split it, permute to memory order."""
    sizes = [math.prod(inner) for inner in axes_of_dim]
    padding = [(0, -n % inner) for n, inner in zip(logical.shape, sizes, strict=True)]
    padded = np.pad(logical, padding, constant_values=-1)
    split: list[int] = []
    for n, inner in zip(padded.shape, axes_of_dim, strict=True):
        split += [n // math.prod(inner), *inner]
    return padded.reshape(split).transpose(order).ravel()


@pytest.mark.parametrize(
    ("tag", "shape", "inner", "order"),
    [
        # axes after the split of NChw32n32c: N n C c h w
        ("NChw32n32c", (33, 40, 2, 3), [[32], [32], [], []], [0, 2, 4, 5, 1, 3]),
        ("nChw16c", (2, 17, 3, 2), [[], [16], [], []], [0, 1, 3, 4, 2]),
        ("aBcd4b", (2, 7, 3, 2), [[], [4], [], []], [0, 1, 3, 4, 2]),
        ("N(C/4)HW4", (2, 8, 3, 2), [[], [4], [], []], [0, 1, 3, 4, 2]),
        ("ABx4a2b", (6, 5, 3), [[4], [2], []], [0, 2, 4, 1, 3]),
        ("OIhw4i8o2i", (9, 9, 2, 1), [[8], [4, 2], [], []], [0, 2, 5, 6, 3, 1, 4]),
        ("nhwc", (2, 3, 4, 5), [[], [], [], []], [0, 2, 3, 1]),
        ("hwio", (2, 3, 4, 5), [[], [], [], []], [2, 3, 1, 0]),
        ("xba", (2, 3, 4, 5), [[], [], [], []], [2, 3, 1, 0]),
        ("ndhwc", (2, 3, 2, 2, 2), [[], [], [], [], []], [0, 2, 3, 4, 1]),
    ],
)
def test_offsets_of_tags_agree_with_a_packer(
    tag: str, shape: tuple[int, ...], inner: list[list[int]], order: list[int]
) -> None:
    layout = Layout.parse(tag, f32, shape)
    logical = np.arange(math.prod(shape)).reshape(shape)
    packed = pack(logical, inner, order)
    assert layout.span == packed.size
    assert (packed[offsets(layout, shape)] == logical).all()
    names = tuple("abcde"[: len(shape)])
    assert (offsets_of(Tensor("t", names, shape, layout)) == offsets(layout, shape)).all()
    assert layout.is_dense and layout.is_packed
    assert layout.padded(shape) == layout.extents


def test_the_seed_example_has_six_blocks() -> None:
    layout = Layout.parse("4n2c7h7w32n32c", f32, letters="nchw")
    assert layout is Layout.parse("NChw32n32c", f32, (128, 64, 7, 7))
    assert [(b.dim, b.size, b.stride) for b in layout.blocks] == [
        (0, 4, 2 * 7 * 7 * 1024),
        (1, 2, 7 * 7 * 1024),
        (2, 7, 7 * 1024),
        (3, 7, 1024),
        (0, 32, 32),
        (1, 32, 1),
    ]
    assert layout.text("nchw") == "4n2c7h7w32n32c"
    assert layout.tag("nchw") == "NChw32n32c"
    assert str(layout) == "4a2b7c7d32a32b"


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("8n4c3h2w", "8a4b3c2d"),
        ("2n3c4d5h6w", "2a3b4c5d6e"),
        ("2d3h4w5i6o", "2c3d4e5b6a"),
        ("2g4o5i3w", "2a4b5c3d"),
        ("2n5w3c", "2a5c3b"),
        ("8a@4096 64b@64", "8a@4096,64b@64"),
        ("8a@4096 64b@64+7", "8a@4096, 64b@64 +7"),
    ],
)
def test_letters_are_deduced(text: str, same: str) -> None:
    assert Layout.parse(text, f32) is Layout.parse(same, f32)


@pytest.mark.parametrize(
    ("shape", "texts"),
    [
        ((2, 3, 4, 5), ["nchw", "abcd", "abx", "oihw", "2n3c4h5w", "strides(60,20,5,1)"]),
        ((2, 3, 4, 5), ["nhwc", "acdb", "axb", "ohwi", "2n4h5w3c", "strides(60,1,15,3)"]),
        ((2, 3, 4), ["ncw", "abc", "abx", "oiw"]),
        ((2, 3, 4), ["nwc", "acb", "axb", "owi"]),
        ((2, 3, 4, 5, 6), ["ncdhw", "abcde", "abx", "oidhw"]),
        ((2, 17, 4, 5), ["nChw16c", "aBcd16b", "aBx16b", "N(C/16)HW16", "NC/16HW16", "2n2c4h5w16c"]),
        ((2, 3, 2, 5, 6), ["goihw", "abcde"]),
    ],
)
def test_spellings_of_the_same_layout(shape: tuple[int, ...], texts: list[str]) -> None:
    assert len({Layout.parse(text, f16, shape) for text in texts}) == 1


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("nhwc", None, "has no sizes; expected a shape"),
        ("strides(1,2)", None, "has no sizes; expected a shape"),
        ("strides(1,2)", (2, 3, 4), "has 2 strides; expected 3"),
        ("nhw", (2, 3, 4, 5), "names the dims n h w; expected each of"),
        ("nhwcc", (2, 3, 4, 5), "expected each of"),
        ("nqhw", (2, 3, 4, 5), "mixes the dims"),
        ("nChw", (2, 3, 4, 5), "splits c in one place only; expected c with no block"),
        ("nchw16c", (2, 3, 4, 5), "splits c in one place only; expected C"),
        ("nChw0c", (2, 3, 4, 5), "block of size 0"),
        ("xax", (2, 3, 4), "x twice"),
        ("N(C/4)HW8", (2, 3, 4, 5), "divides C by 4 but ends in 8"),
        ("4n2c7h7w", (5, 2, 7, 7), "holds (4, 2, 7, 7) elements; expected at least the shape"),
        ("2n3c", (2, 3, 4), "has 2 dims; expected 3"),
        ("8a@4096 64b", (8, 64), "is unreadable; expected a form such as"),
        ("n-h", (8, 64), "is unreadable"),
        ("", (8, 64), "is unreadable"),
    ],
)
def test_unreadable_layouts(text: str, shape: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text, f32, shape)
    assert message in str(caught.value)
    assert f"'{text}'" in str(caught.value)
    assert "expected" in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_dim_is_named() -> None:
    with pytest.raises(LayoutError, match="has no block of c w; expected every dim of nchw"):
        Layout.parse("2n3h", f32, letters="nchw")


SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any list of blocks over 1 to 5 dims: blocked twice, gapped, overlapping, reversed, empty."""
    ndims = draw(st.integers(1, 5))
    extra = draw(st.lists(st.integers(0, ndims - 1), max_size=3))
    dims = draw(st.permutations([*range(ndims), *extra]))
    sizes = [draw(st.integers(0, 4)) for _ in dims]
    if draw(st.booleans()):
        strides, step = [], 1
        for size in reversed(sizes):
            strides.insert(0, step)
            step *= max(1, size)
    else:
        strides = [draw(st.integers(-9, 99)) for _ in dims]
    blocks = tuple(map(LayoutBlock, dims, sizes, strides))
    return Layout(f32, ndims, blocks, draw(st.sampled_from([0, 0, 5, -3])))


@given(layouts())
def test_parse_reads_what_str_prints(layout: Layout) -> None:
    assert Layout.parse(str(layout), f32) is layout
    letters = "goidhw"[: layout.ndims]
    assert Layout.parse(layout.text(letters), f32, letters=letters) is layout
    assert ("@" in str(layout)) == (not layout.is_packed)


@given(layouts())
def test_a_tag_with_the_shape_is_the_layout(layout: Layout) -> None:
    tag = layout.tag()
    if tag is not None and all(b.size for b in layout.blocks):
        assert Layout.parse(tag, f32, layout.extents) is layout


@given(layouts())
def test_is_dense_means_that_each_place_is_used_once(layout: Layout) -> None:
    used = sorted(
        sum(at * b.stride for at, b in zip(point, layout.blocks, strict=True))
        for point in itertools.product(*(range(b.size) for b in layout.blocks))
    )
    assert layout.is_dense == (used == list(range(len(used))))


@given(layouts())
@example(Layout(f32, 2, (LayoutBlock(0, 3, 2), LayoutBlock(1, 2, 3))))  # woven, each place once
@example(Layout(f32, 2, (LayoutBlock(0, 4, 2), LayoutBlock(1, 3, 3))))  # 3 * 2 and 2 * 3
def test_overlaps_means_that_a_place_is_used_twice(layout: Layout) -> None:
    used = [
        sum(at * b.stride for at, b in zip(point, layout.blocks, strict=True))
        for point in itertools.product(*(range(b.size) for b in layout.blocks))
    ]
    assert layout.overlaps == (len(set(used)) < len(used))


def test_large_layouts_are_judged_at_once() -> None:
    shape = (1 << 20, 1 << 10, 1 << 9, 1 << 9)
    for strides, overlaps in (
        ((1 << 29, 1 << 19, 1 << 10, 2), False),
        ((0, 1 << 18, 512, 1), True),
        ((1 << 28, 1 << 18, 512, 1), False),
        ((1, 1, 1, 1), True),
        ((1 << 28, 1 << 18, 511, 1), True),
    ):
        assert Layout.from_strides(f32, shape, strides).overlaps == overlaps


@given(SIZES, st.data())
def test_padded_rounds_up_to_blocks(shape: list[int], data: st.DataObject) -> None:
    split = data.draw(st.integers(0, len(shape) - 1))
    block = data.draw(st.integers(1, 4))
    letters = "abcde"[: len(shape)]
    tag = letters.replace(letters[split], letters[split].upper()) + f"{block}{letters[split]}"
    layout = Layout.parse(tag, f32, shape)
    expected = [-(-n // block) * block if d == split else n for d, n in enumerate(shape)]
    assert layout.padded(shape) == layout.extents == tuple(expected)


@given(layouts(), st.data())
def test_padding_is_what_lies_beyond_the_shape(layout: Layout, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.integers(0, n)) for n in layout.extents)
    marked = np.zeros([b.size for b in layout.blocks], bool)
    for box in layout.padding(shape):
        marked[box] = True
    for point in np.ndindex(*marked.shape):
        at = [0] * layout.ndims
        for b, digit in zip(layout.blocks, point, strict=True):
            at[b.dim] = at[b.dim] * b.size + digit
        assert marked[point] == any(x >= n for x, n in zip(at, shape, strict=True))


def test_strided_layouts_of_torch() -> None:
    layout = Layout.from_strides(f32, (2, 3, 4, 5), (1000, 100, 10, 1), offset=7)
    assert str(layout) == "2a@1000 3b@100 4c@10 5d@1+7"
    assert layout.strides() == (1000, 100, 10, 1)
    assert not layout.is_dense
    assert (offsets(layout, (2, 3, 4, 5)).ravel()[:6] == [7, 8, 9, 10, 11, 17]).all()
    assert Layout.parse("strides(1000,100,10,1)+7", f32, (2, 3, 4, 5)) is layout


@given(layouts(), st.data())
def test_a_split_keeps_every_offset(layout: Layout, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(layout.blocks) - 1))
    size = data.draw(st.integers(1, 6))
    if layout.blocks[at].size % size:
        with pytest.raises(LayoutError, match="is divided by"):
            layout.split(at, size)
        return
    made = layout.split(at, size)
    assert len(made.blocks) == len(layout.blocks) + 1 and made.blocks[at + 1].size == size
    np.testing.assert_array_equal(offsets(made, layout.extents), offsets(layout, layout.extents))


@given(layouts(), st.data())
def test_a_box_of_a_layout_has_its_offsets(layout: Layout, data: st.DataObject) -> None:
    """Or is refused because it crosses a block."""
    start = [data.draw(st.integers(0, max(0, n - 1))) for n in layout.extents]
    shape = [
        data.draw(st.integers(min(1, n), n - at)) for n, at in zip(layout.extents, start, strict=True)
    ]
    where = tuple(slice(at, at + n) for at, n in zip(start, shape, strict=True))
    try:
        made = layout.sub(start, shape)
    except LayoutError as error:
        assert "crosses a block" in str(error) and layout.strides() is None
        return
    np.testing.assert_array_equal(offsets(made, tuple(shape)), offsets(layout, layout.extents)[where])


def test_boxes_of_a_blocked_layout() -> None:
    """Whole blocks and parts of one block are boxes; what ends in the next block is none."""
    layout = Layout.parse("nChw16c", f16, (2, 48, 5, 6))
    assert str(layout.sub((1, 16, 0, 2), (1, 32, 5, 3))) == "1a@1440 2b@480 5c@96 3d@16 16b@1+1952"
    assert str(layout.sub((0, 20, 1, 0), (2, 8, 2, 6))) == "2a@1440 1b@480 2c@96 6d@16 8b@1+580"
    for start, channels in ((8, 16), (0, 24), (40, 16)):
        with pytest.raises(LayoutError, match="crosses a block of"):
            layout.sub((0, start, 0, 0), (2, channels, 5, 6))


@pytest.mark.parametrize(
    ("tag", "shape"), [("nhwc", (2, 8, 3, 4)), ("nChw16c", (2, 32, 3, 4)), ("nchw", (2, 8, 3, 4))]
)
@pytest.mark.parametrize(("narrow", "wide"), [(i8, i32), (f16, f32), (i8, f16)])
def test_another_type_of_the_same_memory(
    tag: str, shape: tuple[int, ...], narrow: DType, wide: DType
) -> None:
    """Every byte lies where it did: an element of a wide type begins where its first narrow one does."""
    few = Layout.parse(tag, narrow, shape)
    many = few.reinterpret(wide)
    n = wide.bytes // narrow.bytes
    dim = next(b.dim for b in few.blocks[::-1] if b.stride == 1)
    first = tuple(slice(None, None, n if d == dim else 1) for d in range(len(shape)))
    got = offsets(many, tuple(size // n if d == dim else size for d, size in enumerate(shape)))
    np.testing.assert_array_equal(got * n, offsets(few, shape)[first])
    assert many.dtype is wide and many.span * n == few.span
    np.testing.assert_array_equal(offsets(many.reinterpret(narrow), shape), offsets(few, shape))


def test_types_that_no_memory_has() -> None:
    with pytest.raises(LayoutError, match="is divided by 4, not a divisor"):
        Layout.parse("nhwc", i8, (1, 6, 2, 2)).reinterpret(i32)
    with pytest.raises(LayoutError, match="not all strides are multiples of 2 elements"):
        Layout.parse("4a@9 8b@1", f16).reinterpret(f32)
    with pytest.raises(LayoutError, match="not all strides are multiples of 4 elements"):
        Layout.parse("4a@8 8b@1+2", i8).reinterpret(i32)
    with pytest.raises(LayoutError, match="no two elements are neighbours"):
        Layout.parse("4a@16 8b@2", i8).reinterpret(i32)


def test_a_tensor_at_an_offset_is_a_view() -> None:
    """32x32x1x1 elements at [mb_idx, ic_idx, 0, 0] of N x C x H x W: coordinates that begin there. So is a
    part of a view: its own positions replaced."""
    src = Tensor(
        "src", ("mb", "ic", "ih", "iw"), (64, 128, 7, 7), Layout.parse("NChw32n32c", f16, (64, 128, 7, 7))
    )
    at = [Var("mb_idx"), Var("ic_idx"), Const(0), Const(0)]
    own = [Var(n) for n in src.dims]
    part = View(src, tuple(ViewDim(a + b) for a, b in zip(at, own, strict=True)))
    assert str(part) == "src[mb = (mb_idx + mb), ic = (ic_idx + ic), ih = (0 + ih), iw = (0 + iw)]"
    tile = substitute(part, {at[0]: Const(32), at[1]: Var("ic_blk") * 32})
    assert isinstance(tile, View)
    run = Evaluator(Memory({}), {}, 4)
    run.env.update(
        {v: run.along(d, np.arange(n)) for d, (v, n) in enumerate(zip(own, (32, 32, 1, 1), strict=True))}
    )
    run.env[Var("ic_blk")] = np.full((1, 1, 1, 1), 3)
    box = src.layout.sub((32, 96, 0, 0), (32, 32, 1, 1))
    np.testing.assert_array_equal(run.compute(tile.offset()), offsets(box, (32, 32, 1, 1)))
