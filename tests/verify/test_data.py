"""The data of checks: operands that say nothing about one another, over all values they are meant to have,
and guards that notice every element that is written."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.ir import DTYPES, Layout, Tensor
from transconv.verify import case, data
from transconv.verify.data import Guarded, allocate, exact_values, fill, torch_dtype


def square(dtype: str) -> ConvProblem:
    p = ConvProblem.make(1, 64, 64, (8, 8), (8, 8), dtype=dtype)
    assert math.prod(p.shapes["src"]) == 4096
    return p


def filled(p: ConvProblem, prop: Prop, mode: str, seed: int) -> list[np.ndarray]:
    tensors = allocate(p, "cpu")
    fill(tensors, p, prop, mode, seed)
    return [tensors[name].view.double().numpy().ravel() for name in prop.operands]


@pytest.mark.parametrize("mode", ["exact", "float"])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_no_operand_tells_of_another(dtype: str, mode: str) -> None:
    """Neither those of one problem, nor those of other seeds: a kernel that reads one in the place of
    another is seen. The correlation of n independent values is below 5/sqrt(n)."""
    p = square(dtype)
    drawn = [x[:4096] for seed in range(4) for x in filled(p, Prop.FWD, mode, seed)]
    for a, b in itertools.combinations(drawn, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(4096)
        assert abs(np.corrcoef(abs(a), abs(b))[0, 1]) < 5 / math.sqrt(4096)


def test_a_seed_gives_the_same_data_every_time() -> None:
    p = square("f32")
    for mode in ("exact", "float"):
        for a, b in zip(filled(p, Prop.BWD_D, mode, 7), filled(p, Prop.BWD_D, mode, 7), strict=True):
            assert (a == b).all() and abs(a).max() > 0


@pytest.mark.parametrize("most", [1, 2, 8])
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_exact_values_are_all_that_they_may_be_equally_often(most: int, share: float) -> None:
    found = exact_values((100, 200), torch.float32, most, share, torch.Generator().manual_seed(1))
    counts = {int(v): int(n) for v, n in zip(*np.unique(found.numpy(), return_counts=True), strict=True)}
    allowed = {v for v in range(-most, most + 1) if v or share < 1}
    assert counts.keys() == (allowed if share else {0})
    for value, count in counts.items():
        part = 1 - share if value == 0 else share / (2 * most)
        assert abs(count / 20000 - part) < 5 * math.sqrt(part * (1 - part) / 20000) + 1e-9


@pytest.mark.parametrize("dtype", ["f16", "f32", "f64", "f8_e4m3"])
@pytest.mark.parametrize("prop", list(Prop), ids=str)
def test_so_many_are_not_zero_that_sums_are_exact_and_no_fewer(dtype: str, prop: Prop) -> None:
    """The sum of as many of the largest products as are kept, twice as many would be too many."""
    p = ConvProblem.make(4, 128, 128, (9, 9), (5, 5), dtype=dtype)
    share = data.density(p, prop)
    a, b = (getattr(p, name).dtype for name in prop.operands)
    digits = min(max(8, getattr(p, prop.result).dtype.digits), p.acc.digits)
    largest = share * data.terms(p, prop) * data.most(a) * data.most(b)
    assert largest <= 2**digits and (share == 1 or largest > 2**digits / 2)


@pytest.mark.parametrize("types", ["s8:s8:s32", "u8:s8:f32", "u8:s8:s8", "s8:s8:u8", "s8:s8:f16"])
@pytest.mark.parametrize("prop", [Prop.FWD, Prop.BWD_D], ids=str)
def test_whole_numbers_have_the_range_of_their_type(types: str, prop: Prop) -> None:
    if prop is Prop.BWD_D:
        types = ":".join(types.split(":")[::-1])
    p = ConvProblem.parse(f"mb16ic64ih16oc64oh16kh3ph1 dt={types}")
    a, b = filled(p, prop, "exact", 2)
    low, high = getattr(p, prop.operands[0]).dtype.limits
    short = getattr(p, prop.result).dtype.bits
    assert (a.min(), a.max()) == (low, high)
    kept = float((a != 0).mean())
    share = min(1.0, 4 / data.terms(p, prop)) if short == 8 else 1.0
    assert kept == pytest.approx(share * (1 - 1 / 256), abs=0.002)
    low, high = getattr(p, prop.operands[1]).dtype.limits
    if short < 32:
        low, high = max(low, -2), 2
    assert {*np.unique(b)} == {*range(low, high + 1)}


LAYOUTS = {
    "dense": ("nchw", (2, 3, 4, 5)),
    "last": ("nhwc", (2, 3, 4, 5)),
    "blocked": ("aBcd4b", (2, 7, 3, 2)),
    "twice": ("ABcd2b2a", (3, 5, 2, 2)),
    "gaps": ("strides(80,20,5,1)", (2, 3, 3, 4)),
}


def guarded(name: str, dtype: str = "f16", shift: int = 0) -> Guarded:
    tag, shape = LAYOUTS[name]
    return Guarded.make(Layout.parse(tag, DTYPES[dtype], shape), shape, "cpu", shift)


@pytest.mark.parametrize("dtype", ["f16", "f8e4m3", "i8", "f64"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_put_is_what_is_read_and_all_else_is_poison(name: str, dtype: str) -> None:
    tensor = guarded(name, dtype, shift=3)
    values = torch.randint(1, 9, tensor.shape).to(torch.float32)
    before = tensor.memory.clone()
    tensor.put(values)
    assert (tensor.view.float() == values).all()
    bits, pattern = data.poison(tensor.memory.dtype)
    changed = (tensor.memory.view(bits) != pattern).nonzero().ravel()
    assert len(changed) == values.numel() and (before.view(bits) == pattern).all()
    assert tensor.start == data.GUARD + 3 and changed[0] >= tensor.start
    assert tensor.intact() and tensor.argument.data_ptr() == tensor.memory[tensor.start :].data_ptr()


@pytest.mark.parametrize("tag", ["nchw", "nChw16c"])
def test_an_empty_tensor_has_a_place_all_the_same(tag: str) -> None:
    """A kernel is given a pointer, which torch has for no tensor without memory."""
    empty = Guarded.make(Layout.parse(tag, DTYPES["f16"], (0, 16, 3, 3)), (0, 16, 3, 3), "cpu")
    assert empty.view.numel() == 0 and empty.span.numel() == 1 and empty.span.data_ptr()
    empty.put(torch.ones(0, 16, 3, 3))
    assert empty.intact()


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("dtype", ["i8", "u8", "i32", "f16", "f32"])
def test_exact_values_behind_a_sum_are_small_and_of_their_type(dtype: str, halves: bool) -> None:
    tensor = Tensor("bia", ("n",), (4096,), Layout.dense(DTYPES[dtype], (4096,)))
    found = case.epilogue_values(tensor, "exact", "cpu", 3, halves)
    least, whole = (0 if dtype == "u8" else -8), DTYPES[dtype].kind == "int"
    step = 0.5 if halves and not whole else 1.0
    assert set(found.tolist()) == {n * step for n in range(least, 9)}
    assert torch.equal(found.to(torch_dtype(DTYPES[dtype])).double(), found.double())
    assert torch.equal(found, case.epilogue_values(tensor, "exact", "cpu", 3, halves))


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_that_is_written_is_noticed(name: str, sealed: bool) -> None:
    """Of a result all but its own elements; of an operand, which is sealed, its own ones, too."""
    tensor = guarded(name)
    tensor.put(torch.ones(tensor.shape))
    if sealed:
        tensor.seal()
    blocks = tensor._blocks(torch.arange(tensor.memory.numel())).reshape(-1).tolist()
    end = tensor.start + tensor.layout.span
    places = {0, tensor.start - 1, *range(tensor.start, end), end, tensor.memory.numel() - 1}
    assert not {*blocks} - places
    for place in places:
        kept = tensor.memory[place].clone()
        tensor.memory[place] = 5
        assert tensor.intact() == (place in blocks and not sealed), place
        tensor.memory[place] = kept if kept == kept else float("nan")
        tensor.memory.view(torch.int16)[place] = kept.view(torch.int16)
        assert tensor.intact()


def test_padding_of_blocks_is_seen_to_be_zero_or_not() -> None:
    for name in ("blocked", "twice"):
        tensor = guarded(name)
        assert not tensor.is_padded_with_zeros  # it is poison
        tensor.memory[tensor.start : tensor.start + tensor.layout.span] = 0
        assert tensor.is_padded_with_zeros
        tensor.put(torch.ones(tensor.shape))
        assert tensor.is_padded_with_zeros
        own = tensor.view
        for place in range(tensor.start, tensor.start + tensor.layout.span):
            if tensor.memory[place] == 0:
                tensor.memory[place] = 1
                assert not tensor.is_padded_with_zeros
                tensor.memory[place] = 0
        assert (own == 1).all()
    assert guarded("dense").is_padded_with_zeros and guarded("gaps").is_padded_with_zeros


def test_what_is_expanded_is_put_once() -> None:
    layout = Layout.parse("strides(0,4,1)", DTYPES["f32"], (3, 2, 4))
    tensor = Guarded.make(layout, (3, 2, 4), "cpu")
    values = torch.arange(24.0).reshape(3, 2, 4)
    tensor.put(values)
    assert (tensor.view == values[:1]).all() and tensor.intact()


@pytest.mark.parametrize(
    "dtype", [t for t in DTYPES.values() if t.torch and t.kind in ("int", "float")], ids=lambda t: t.name
)
def test_poison_is_no_number_that_arithmetic_makes(dtype: object) -> None:
    elements = getattr(torch, dtype.torch)  # type: ignore[attr-defined]
    bits, pattern = data.poison(elements)
    assert bits.itemsize == elements.itemsize
    value = torch.full((1,), pattern, dtype=torch.int64).to(bits).view(elements)
    if elements.is_floating_point:
        assert torch.isnan(value.float()).all()
        if elements.itemsize > 1:  # not the NaN of 0/0
            made = torch.tensor([0.0]).to(elements) / torch.tensor([0.0]).to(elements)
            assert value.view(bits) != made.view(bits) and value.view(bits) != (-made).view(bits)
