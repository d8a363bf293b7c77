"""Products of eight bits: whole numbers are summed exactly in s32, short floats in f32. Those of wider
integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from transconv import ir
from transconv.backend_triton.offline_compilation import Resources, compile_offline
from transconv.compute import parse
from transconv.functional.calls.torch_operators import by_numpy
from transconv.runtime import build_compute, job_of
from transconv.schedule import Schedule, why_not
from transconv.target import TARGETS
from transconv.verify.computation import ComputationCase, after_every_pass
from transconv.verify.data import torch_dtype

PRODUCT = """compute product
    tensor A {a} [m=40, k=96]
    tensor B {b} [k=96, n=24]
    tensor C {c} [m=40, n=24]
    axes   m=40 n=24 k=96
    read   a = A[m, k]
    read   b = B[k, n]
    store  C[m, n] = sum(a*b; k)"""
MMA, FMA = "m:64 n:32 k:32 | mma", "m:16 n:8 | fma"
TYPES = [
    ("s8", "s8", "s32", MMA),
    ("s8", "s8", "s32", FMA),
    ("u8", "s8", "s32", FMA),
    ("u8", "u8", "f32", FMA),
    ("f8e4m3", "f8e4m3", "f32", MMA),
    ("f8e5m2", "f8e5m2", "f16", MMA),
    ("f8e4m3", "f8e4m3", "f32", FMA),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(("a", "b", "c", "schedule"), TYPES)
def test_products_after_every_pass(a: str, b: str, c: str, schedule: str) -> None:
    """Whole numbers are any that the type has, and not one bit may be off."""
    compute = parse(PRODUCT.format(a=a, b=b, c=c))
    assert compute.factors is not None and compute.acc is (ir.f32 if a.startswith("f") else ir.i32)
    assert parse(str(compute)) == compute
    plan = build_compute(compute, TARGETS["sm_90"], Schedule.parse(schedule))
    assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(compute, plan) if j.problem] == []


@pytest.mark.every(4)
@pytest.mark.parametrize(("a", "b", "c", "schedule"), TYPES)
def test_products_in_tritons_interpreter(a: str, b: str, c: str, schedule: str) -> None:
    compute = parse(PRODUCT.format(a=a, b=b, c=c))
    plan = build_compute(compute, TARGETS["interpreter"], Schedule.parse(schedule))
    assert ComputationCase(compute).launched(plan, "cpu").problem == ""


def test_products_compile() -> None:
    jobs = [
        job_of(s, TARGETS["sm_90"], words=False)
        for a, b, c, schedule in TYPES
        for s in build_compute(
            parse(PRODUCT.format(a=a, b=b, c=c)), TARGETS["sm_90"], Schedule.parse(schedule)
        ).steps
    ]
    for found in compile_offline(jobs):
        assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"


@pytest.mark.parametrize("kind", ["i32", "i64"])
def test_wider_integers_are_multiplied_element_by_element(kind: str) -> None:
    """No matrix unit has them: what is proposed compiles, and is right in Triton's interpreter."""
    compute = parse(PRODUCT.format(a=kind, b=kind, c=kind))
    made = build_compute(compute, TARGETS["sm_90"])
    assert made.steps[0].schedule.unit == "fma" and compute.acc is ir.DTYPES[kind]
    assert "(unit fma)" in (why_not(Schedule.parse(MMA), compute, TARGETS["sm_90"]) or "")
    for found in compile_offline([job_of(s, TARGETS["sm_90"], words=False) for s in made.steps]):
        assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"
    plan = build_compute(compute, TARGETS["interpreter"])
    assert ComputationCase(compute).launched(plan, "cpu").problem == ""


@pytest.mark.parametrize(
    ("chip", "known"),
    [
        ("sm_80", False),
        ("sm_89", True),
        ("sm_90", True),
        ("sm_100", True),
        ("gfx942", False),
        ("gfx950", True),
    ],
)
def test_which_chips_multiply_short_floats(chip: str, known: bool) -> None:
    target = TARGETS[chip]
    assert (target.mma(ir.f8e4m3, ir.f8e4m3, ir.f32) is not None) is known
    assert target.mma(ir.i8, ir.i8, ir.i32) is not None
    assert target.mma(ir.u8, ir.u8, ir.i32) is None  # no language has a word for it


def test_what_no_matrix_unit_takes_is_multiplied_element_by_element() -> None:
    for a, b, chip in (("u8", "s8", "sm_90"), ("f8e4m3", "f8e4m3", "gfx942")):
        compute = parse(PRODUCT.format(a=a, b=b, c="f32"))
        assert build_compute(compute, TARGETS[chip]).schedule.unit == "fma"
        assert "element by element" in str(why_not(Schedule.parse(MMA), compute, TARGETS[chip]))


@pytest.mark.parametrize("dtype", [ir.f8e4m3, ir.f8e5m2], ids=str)
def test_short_floats_are_rounded_as_torch_rounds(dtype: ir.DType) -> None:
    x = np.random.default_rng(0).standard_normal(4096) * 2.0 ** np.arange(-12, 4).repeat(256)
    x = x.astype(np.float16)
    assert np.array_equal(ir.convert(x, dtype), torch.from_numpy(x).to(torch_dtype(dtype)).half().numpy())
    assert next(iter(ir.convert(np.array([-1e4 * 6, np.nan]), dtype))) == -dtype.largest


QUOTIENTS = """compute quotients
    tensor x f32 [n=64]
    tensor s f32 [one=1]
    tensor y {} [n=64]
    axes   n=64
    read   a = x[n]
    read   b = s[0]
    let    q = a/b
    {}"""


@pytest.mark.parametrize(
    ("held", "line", "nearest"),
    [
        ("i8", "store y[n] = i8(round(q))", True),
        ("f8e4m3", "store y[n] = q", True),
        ("i32", "store y[n] = i32(q*2)", True),
        ("f32", "store y[n] = f32(i8(q))", True),
        ("f32", "store y[n] = q", False),
        ("f16", "store y[n] = q*2", False),
    ],
)
def test_quotients_that_become_few_bits_are_exact(held: str, line: str, nearest: bool) -> None:
    """The language's own division may be off in the last place, which decides where halves go."""
    compute = parse(QUOTIENTS.format(held, line))
    made = build_compute(compute, TARGETS["sm_90"]).source.rpartition("@triton.jit")[2]
    assert (" divided(" in made) is nearest and (" / " in made) is not nearest
    assert parse(str(compute)) == compute


REDUCED = """compute reduced
    tensor x f32 [n=64, k=32]
    tensor s f32 [one=1]
    tensor y {} [n=64]
    axes   n=64 | k=32
    read   a = x[n, k]
    read   b = s[0]
    let    m = {}(a/b; k)
    store  y[n] = {}"""


@pytest.mark.parametrize("op", ["max", "min", "sum"])
@pytest.mark.parametrize(("held", "value", "nearest"), [("i8", "i8(round(m))", True), ("f32", "m", False)])
def test_quotients_that_are_reduced_are_exact_too(op: str, held: str, value: str, nearest: bool) -> None:
    source = build_compute(parse(REDUCED.format(held, op, value)), TARGETS["sm_90"]).source
    assert (" divided(" in source or "(divided(" in source) is nearest


def wrapped(whole: np.ndarray, bits: int) -> np.ndarray:
    """What integers of this many bits have of Python's."""
    end = 1 << (bits - 1)
    return np.asarray((whole.astype(object) + end) % (2 * end) - end, np.int64)


@pytest.mark.parametrize(("bits", "digits"), [(32, 20), (32, 30), (64, 62)])
def test_every_digit_of_wide_integers_is_known(bits: int, digits: int) -> None:
    """Of products that f64 does not hold and that wrap, to the last digit: by the answer, by the kernel in
    both interpreters, and a result that is off by one is found."""
    kind = f"i{bits}"
    compute = parse(PRODUCT.format(a=kind, b=kind, c=kind))
    draw, most = np.random.default_rng(3), 1 << digits
    case = ComputationCase(compute)
    case.__dict__["given"] = {
        n: draw.integers(-most, most, shape) for n, shape in (("A", (40, 96)), ("B", (96, 24)))
    }
    whole = case.given["A"].astype(object) @ case.given["B"].astype(object)
    assert abs(whole).max() > 1 << bits
    want = wrapped(whole, bits)
    np.testing.assert_array_equal(case.answers["C"].value, want)
    plan = build_compute(compute, TARGETS["interpreter"])
    assert case.launched(plan, "cpu").problem == ""
    assert case.interpreted(plan.steps[0].kernel).problem == ""
    assert case.judged({"C": want}).problem == ""
    assert "expected" in case.judged({"C": want + 1}).problem
    a, b = (torch.from_numpy(case.given[n]).to(torch_dtype(compute.acc)) for n in "AB")
    assert torch.equal(by_numpy(str(compute), [a, b])[0], a @ b)


OF_WIDE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "C[m + k] += a*b": lambda a, b: np.array(
        [np.trace((a * b)[:, ::-1], 39 - i) for i in range(51)], object
    ),
    "C[m] = max(a*b; k)": lambda a, b: wrapped(a * b, 64).max(1),
    "C[m] = sum(a - b; k)": lambda a, b: (a - b).sum(1),
    "C[m] = prod(b; k)": lambda a, b: b.prod(1),
}


@pytest.mark.parametrize("store", OF_WIDE)
def test_every_digit_of_what_is_reduced_is_known(store: str) -> None:
    """Of i64 beyond what f64 holds, which element by element is reduced, or added by many points."""
    size = 51 if "+=" in store else 12
    compute = parse(
        f"compute reduced\ntensor A i64 [12, 40]\ntensor B i64 [12, 40]\ntensor C i64 [{size}]\n"
        f"axes m=12 k=40\nread a = A[m, k]\nread b = B[m, k]\nstore {store}"
    )
    case, draw = ComputationCase(compute), np.random.default_rng(4)
    case.__dict__["given"] = {n: draw.integers(-1 << 61, 1 << 61, (12, 40)) for n in "AB"}
    want = wrapped(OF_WIDE[store](*(case.given[n].astype(object) for n in "AB")), 64)
    np.testing.assert_array_equal(case.answers["C"].value, want)
    plan = build_compute(compute, TARGETS["interpreter"])
    assert case.launched(plan, "cpu").problem == ""
    assert "expected" in case.judged({"C": want - 1}).problem
