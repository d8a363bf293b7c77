"""Kernels of 8-bit types about which compilers err: what is loaded outside of tensors, bytes of rounded
floats, numbers that are no tiles. On an H100 each was wrong or not compiled; interpreters are right."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from transconv import ir
from transconv.backend_triton import Resources
from transconv.backend_triton.emitters import triton
from transconv.backend_triton.miscompiles import converts
from transconv.backend_triton.offline_compilation import compile_offline
from transconv.conv import ConvProblem, Epilogue, Prop
from transconv.ir import DType, f16, i8, i32, u8
from transconv.schedule import Schedule
from transconv.target import TARGETS
from transconv.verify.matrix import jobs_of


def compiled(
    problem: str, prop: str, schedule: str, words: str = "", chip: str = "sm_90", **given: bool
) -> list[Resources]:
    """The kernels of a plan, with their PTX; ``last``: of the last one alone."""
    jobs = jobs_of(
        ConvProblem.parse(problem),
        Prop(prop),
        TARGETS[chip],
        Schedule.parse(schedule),
        Epilogue.parse(words),
        "ptx",
        words=False,
    )
    found = compile_offline(jobs[-1:] if given.get("last") else jobs)
    assert all(isinstance(x, Resources) for x in found), found
    return [x for x in found if isinstance(x, Resources)]


# -- what is loaded where a mask does not hold -----------------------------------------------------------

FILLED = "mb5ic32ih7iw1oc24oh8ow1kh1kw1sh1sw2 dt=u8:i8:u8 tag=nhwc"
BY_MASK = "mb.oh:32 oc:32 ic:32 | mma | stages=1 warps=4"
SEVERAL = re.compile(r"mov\.u32 %r\d+, 0xf+[0-9a-e][0-9a-f]*;")  # a number extended with its sign


def put_into_words(bits: int, value: int) -> int:
    """A word of 32 bits as Triton 3.6 makes it of a number of fewer bits."""
    word = value - (1 << bits) * (value >> bits - 1)
    for _ in range(0, 32, bits):
        word |= word << bits
    return word & 0xFFFFFFFF


@pytest.mark.parametrize("dtype", [i8, u8, i32], ids=str)
def test_which_numbers_are_lost(dtype: DType) -> None:
    bits = dtype.bits
    for pattern in range(256):
        every = sum(pattern << at for at in range(0, 32, bits)) & 0xFFFFFFFF
        lost = bits < 32 and put_into_words(bits, pattern) != every
        value = pattern - (1 << bits) * (dtype is i8 and pattern >> bits - 1)
        assert triton.is_lost(dtype, value) == lost, (dtype, value)
    assert not triton.is_lost(f16, float("inf"))


def test_a_load_of_other_numbers_is_chosen_from(monkeypatch: pytest.MonkeyPatch) -> None:
    (right,) = compiled(FILLED, "fwd", BY_MASK, last=True)
    assert not SEVERAL.search(right.texts["ptx"])
    monkeypatch.setattr(triton, "is_lost", lambda dtype, fill: False)
    (wrong,) = compiled(FILLED, "fwd", BY_MASK, last=True)
    assert SEVERAL.search(wrong.texts["ptx"])


# -- bytes of floats --------------------------------------------------------------------------------------

SUM = "add.f32 \t%r3, %r2, 0f4B400000;\n"


@pytest.mark.parametrize(
    ("ptx", "wrong"),
    [
        (SUM + "st.shared.b8 \t[%r50], %r3;", True),
        (SUM + "@%p4 st.global.v2.b8 \t[%rd5+8], {%r4, %r3};", True),
        (SUM + "st.shared.b16 \t[%r50], %r3;", True),
        ("selp.f32 \t%r3, 0f4B400001, 0f4B400000, %p9;\nst.shared.b8 [%r50+8], %r3;", True),
        ("cvt.rn.bf16.f32 \t%rs1, %r2;\nst.global.b8 [%rd4], %rs1;", True),
        ("add.f64 \t%rd6, %rd5, %rd5;\nst.global.b32 [%rd4], %rd6;", True),
        (SUM + "st.shared.b32 \t[%r50], %r3;", False),
        (SUM + "xor.b32 \t%r4, %r3, 128;\nst.shared.b8 \t[%r50], %r4;", False),
        (SUM + "cvt.u16.u32 \t%rs1, %r3;\nst.shared.b8 \t[%r50], %rs1;", False),
        ("cvt.rn.satfinite.e4m3x2.f32 \t%rs1, %r5, %r2;\nst.global.b8 [%rd4], %rs1;", False),
        ("cvt.rni.s32.f32 \t%r3, %r2;\nst.global.b8 [%rd4], %r3;", False),
        ("cvt.rn.f16.f32 \t%rs1, %r2;\nst.global.b16 [%rd4], %rs1;", False),
        ("setp.lt.f32 \t%p3, %r2, %r3;\nst.global.b8 [%rd4], %r2;", False),
        (SUM + "st.shared.b8 \t[%r3], %r4;", False),  # it is an address
    ],
)
def test_texts_of_stores(ptx: str, wrong: bool) -> None:
    assert converts(ptx) == wrong


ROUNDED = "g3mb3ic3ih8iw1oc3oh8ow1kh1kw2sh1sw2 dt=u8:f32:f32 tag=nChw8c:oihw:nchw"
BY_BYTES = "mb.ih:32 g:16 | fma | programs=1 stages=1 warps=8"
WORDS = "linear:2:-3+mul:bf16:per_dim_0"


@pytest.mark.parametrize(
    "chip",
    [
        "sm_90",
        pytest.param("sm_80", marks=pytest.mark.every(3)),
        pytest.param("sm_100", marks=pytest.mark.every(3)),
    ],
)
def test_bytes_of_rounded_floats(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sign finds the shorter way to round, by which the lowest byte is that of a sum of floats."""
    (right,) = compiled(ROUNDED, "bwd_d", BY_BYTES, WORDS, chip)
    assert not right.flaw and re.search(r"st\.shared\.b8", right.texts["ptx"])
    known = ir.CALLS["nearest_small"]
    shorter = known.helper.replace("12583040.0", "12582912.0").replace("1262485632", "1262485504")
    monkeypatch.setitem(ir.CALLS, "nearest_small", replace(known, helper=shorter))
    (wrong,) = compiled(ROUNDED, "bwd_d", BY_BYTES, WORDS, chip)
    assert "lowest bits are stored" in wrong.flaw


# -- numbers that are rounded at random -------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("problem", "prop", "schedule"),
    [
        ("mb1ic2iw32oc3ow16kw2sw2 dt=bf16:f8e4m3:bf16 tag=nwc", "bwd_w", "fma | stages=3 warps=2"),
        (
            "mb5ic33ih4oc8oh6kh3ph1 dt=f32:f32:f8e4m3 tag=nhwc",
            "fwd",
            "mb.oh.ow:16 oc:16 ic:16 | mma | split_k=6 stages=4 warps=2",
        ),  # the sum of partial sums
        (
            "ic24ih8oc16oh4kh3ph0 dt=i8:i8:bf16 tag=nhwc",
            "fwd",
            "mb.oh.ow:32 oc:16 ic:32 | mma | stages=2 warps=4",
        ),
    ],
)
def test_numbers_and_tiles_rounded_at_random(problem: str, prop: str, schedule: str) -> None:
    for found in compiled(problem, prop, schedule, "stochastic"):
        assert not found.flaw, str(found)
