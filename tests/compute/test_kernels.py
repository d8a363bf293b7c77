"""Computations through all passes: what kernels store is what the steps mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from transconv.compute import execute, parse
from transconv.conv import ConvProblem, Prop, computes
from transconv.errors import ComputeError, ScheduleError, TensorError
from transconv.passes import pipeline
from transconv.runtime import build_compute
from transconv.schedule import Schedule, why_not
from transconv.selection.proposals import heuristics
from transconv.target import TARGETS
from transconv.verify.computation import ComputationCase, after_every_pass
from transconv.verify.fuzz.compute_trial import ComputeTrial

SM90 = TARGETS["sm_90"]
PRODUCT = """compute product
    tensor A f16 [m=40, k=33]
    tensor B f16 [k=33, n=24]
    axes   m=40 n=24 k=33
    read   a = A[m, k]
    read   b = B[k, n]
    let    s = sum(a*b; k)
    read   v = V[n]
    store  C[m, n] = relu(s + v)"""
SUM = "compute rows\n axes m=21 k=37\n read x = X[m, k]\n let s = {op}(x; k)\n store Y[m] = s"
SQUARES = "compute squares\n axes m=21 k=37\n read x = X[m, k]\n store Y[m] = sum((x - 1)**2; k) / 37"
POOL = """compute pool
    tensor x f16 [n=2, c=5, h=9, w=8] nhwc
    axes   n=2 c=5 oh=5 ow=4 kh=3 kw=3
    read   a = x[n, c, oh*2 + kh - 1, ow*2 + kw - 1] else -inf
    store  y[n, c, oh, ow] = max(a; kh kw)"""
CHAIN = """compute chain
    axes   m=7 n=33
    read   x = X[m, n]
    read   s = S[n]
    let    y = where(x > 0, x*s, x + 2)
    store  Y[m, n] = y
    store  Z[n, m] = y*y"""
PAD = "compute pad\n axes m=9\n read x = X[m - 2] else 3\n tensor X f32 [5]\n store Y[m] = x"
# What drawn computations have found.
BEHIND = """compute behind
    axes   m=13 k=32
    read   x = X[m, k]
    let    s = sum(x; k)
    read   v = V[m // 2, 12 - m]
    store  C[m] = s + v
    store  D[12 - m] = s"""
LANES = "compute lanes\n axes m0=8 m1=5\n read x = X[m0, m1]\n let k0 = -x\n store C[m1, m0] = k0"
REPEATED = """compute repeated
    tensor X f32 [13, 3] strides(0,1)
    axes   m=13 n=5 k=3
    read   x = X[m, k]
    read   w = W[n, k]
    let    s = sum(x*w; k)
    store  C[m, n] where m % 2 == 0 and n <= m = s"""
APART = """compute apart
    tensor X f16 [b=8, m=9, k=4]
    tensor W f16 [b=8, n=4, k=4]
    axes   b=8 m=9 n=4 | k=4
    read   x = X[b, m, k]
    read   w = W[b, n, k]
    store  C[b, m, n] = sum(x*w; k)"""
WRITTEN = """compute written
    axes   b=33 m=8 n=5 k=8
    read   x = X[b, m, k]
    read   w = W[b*2, n, k] where b % 2 == 0
    store  C[b, m, n] = sum(x*w; k)"""
BESIDE = """compute beside
    axes   m=8 k=3
    read   y = Y[m]
    read   x = X[m, k]
    let    s = sum(x; k)
    store  C[m] = s*y"""
SHEARED = """compute sheared
    tensor F f32 [m=21, k=33]
    axes   p=92 | m=21
    read   g = F[m, m*3 - p + 32]
    store  C[p] = sum(g; m)"""
INVERSES = """compute inverses
    axes   m=5 k=21
    read   x = X[m, k]
    let    s = sum(x*(1 / (21 - k)); k)
    store  C[m] = s"""
CASES = [
    (INVERSES, "m:8 k:32 | fma"),
    (BESIDE, "m:2 k:4 | fma | a=gather late=1"),
    (SHEARED, "p:64 m:8 | fma | a=gather"),
    (WRITTEN, "b:4 m:8 n:8 k:8 | fma | regs=b stages=1"),
    (BEHIND, "m:16 k:16 | fma | late=1"),
    (LANES, "m0:4 m1:2 | fma"),
    (LANES, "m0:2 m1:8 | fma"),
    (REPEATED, "m:16 n:16 k:16 | mma"),
    (APART, "m:16 n:16 k:16 | mma"),
    (PRODUCT, "m:16 n:16 k:16 | mma"),
    (PRODUCT, "m:32 n:16 k:32 | mma | swap=1 split_k=2"),
    (PRODUCT, "m:16 n:8 | fma"),
    (PRODUCT, "m:16 n:16 k:16 | mma | programs=2"),
    *(
        (SUM.format(op=op), s)
        for op in ("sum", "max", "min", "prod")
        for s in ("m:8 k:16 | fma", "m:8 k:16 | fma | late=1", "m:16 | fma | unroll=1")
    ),
    (SQUARES, "m:8 k:16 | fma"),
    (SQUARES, "m:8 k:16 | fma | late=1"),
    (
        SUM.format(op="sum").replace(" s =", " sums =").replace("Y[m] = s", "Y[m] = sums"),
        "m:8 k:16 | fma | late=1",
    ),
    (SUM.format(op="sum"), "m:8 k:8 | fma | split_k=4"),
    (POOL, "n.c.oh.ow:32 | fma"),
    (POOL, "n.c.oh.ow:32 kh.kw:4 | fma"),
    (POOL, "n.c.oh.ow:32 | fma | unroll=1"),
    (CHAIN, "m.n:32 | fma"),
    (CHAIN, "m:4 n:16 | fma"),
    (PAD, "m:4 | fma"),
]


@pytest.mark.every(6)
@pytest.mark.parametrize(("text", "schedule"), CASES)
def test_kernels_store_what_the_steps_mean(text: str, schedule: str) -> None:
    compute = parse(text)
    plan = build_compute(compute, SM90, Schedule.parse(schedule))
    assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(compute, plan) if j.problem] == []


@pytest.mark.parametrize("text", [PRODUCT, SUM.format(op="max"), POOL, CHAIN, PAD])
def test_chosen_schedules_in_tritons_interpreter(text: str) -> None:
    compute = parse(text)
    plan = build_compute(compute, TARGETS["interpreter"])
    for data in ("exact", "float"):
        assert ComputationCase(compute, data).launched(plan, "cpu").problem == ""


COUNTED = "compute counted\n axes m=9 k=6\n read x = X[m, k]\n store Y[m] = sum(x*k + m*(k - 2); k)"


@pytest.mark.parametrize(
    "schedule",
    ["m:8 | fma", "m:1 | fma", "m:8 k:2 | fma", "m:8 | fma | unroll=1", "m:8 | fma | programs=2"],
)
def test_axes_as_values_in_tritons_interpreter(schedule: str) -> None:
    """There, the counter of a loop is a number of Python's."""
    compute = parse(COUNTED)
    plan = build_compute(compute, TARGETS["interpreter"], Schedule.parse(schedule))
    assert ComputationCase(compute).launched(plan, "cpu").problem == ""
    assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(compute, plan) if j.problem] == []


@pytest.mark.every(2)
@pytest.mark.parametrize("names", ["k m_at n_p", "K_0 mn_blk n_blk", "m k_value q_blk", "X_0 d_in x_near"])
def test_values_have_names_of_variables_that_passes_add(names: str) -> None:
    i, x, s = names.split()
    text = (
        f"compute p\n tensor J i64 [40]\n tensor K i64 [8]\n tensor X f32 [6, 30]\n"
        f" tensor W f32 [20, 30]\n axes n=4 p=10 q=20 | d=30\n read j = J[n*10 + p]\n"
        f" read {i} = K[j]\n read {x} = X[{i}, d]\n read w = W[q, d]\n"
        f" let {s} = sum({x}*w; d)\n store Y[n, p, q] = {s}*2"
    )
    for schedule in ("n.p:16 q:16 d:16 | mma", "p:16 n:2 q:8 d:32 | fma"):
        assert ComputeTrial(text, "sm_90", schedule).problem() == ""


def test_values_that_are_renamed_stay_apart() -> None:
    made = parse("compute p\n axes n=3\n read m = X[n]\n let m_ = m + 1\n store Y[n] = m*m_")
    found = pipeline._apart(made, Schedule(), frozenset({"m", "m_"}))
    assert str(found).endswith("store  Y[n] = m__*m___")


def test_names_that_kernels_need_themselves() -> None:
    with pytest.raises(ScheduleError, match="has a variable 'm_at' of its own; expected another name"):
        build_compute(
            parse("compute p\n axes m_at=4 n=3\n read x = X[n, m_at]\n store Y[m_at, n] = x"),
            SM90,
            Schedule.parse("m_at:4 n:4 | fma"),
        )
    with pytest.raises(ComputeError, match="'lambda' is a word of generated kernels; .* for a tensor"):
        parse("compute p\n axes n=3\n read x = X[n]\n store lambda[n] = x")
    plan = build_compute(
        parse("compute p\n axes n=3\n read x = self[n]\n store Y[n] = x"), TARGETS["interpreter"]
    )
    plan.launch(**{"self": torch.ones(3), "Y": (y := torch.zeros(3))})
    assert y.tolist() == [1, 1, 1]


def test_meaning_against_torch() -> None:
    draw = np.random.default_rng(3)
    x = draw.standard_normal((2, 5, 9, 8))
    pooled = execute(parse(POOL), {"x": x})["y"].value
    want = torch.nn.functional.max_pool2d(torch.from_numpy(x), 3, 2, 1)
    assert torch.equal(torch.from_numpy(pooled), want)
    a, b, v = (draw.standard_normal(s) for s in ((40, 33), (33, 24), (24,)))
    np.testing.assert_allclose(
        execute(parse(PRODUCT), {"A": a, "B": b, "V": v})["C"].value, np.maximum(a @ b + v, 0), rtol=1e-12
    )


@pytest.mark.parametrize(
    "text", ["mb2g2ic8ih9oc8oh5kh3sh2ph1", "mb2ic3ih8oc4oh6kh3dh0", "mb1g6ic6ih9oc6oh9kh3ph1"]
)
def test_meaning_of_convolutions_is_torchs(text: str) -> None:
    p = ConvProblem.parse(text)
    draw = np.random.default_rng(1)
    tensors = {n: torch.from_numpy(draw.standard_normal(s)) for n, s in p.shapes.items()}
    want = {
        Prop.FWD: torch.nn.functional.conv2d(
            tensors["src"], tensors["wei"], None, p.stride, p.pad_lo, p.dilation, p.g
        ),
        Prop.BWD_D: torch.nn.grad.conv2d_input(
            tensors["src"].shape, tensors["wei"], tensors["dst"], p.stride, p.pad_lo, p.dilation, p.g
        ),
        Prop.BWD_W: torch.nn.grad.conv2d_weight(
            tensors["src"], tensors["wei"].shape, tensors["dst"], p.stride, p.pad_lo, p.dilation, p.g
        ),
    }
    for prop in Prop:
        got = np.zeros(p.shapes[prop.result])
        for compute in computes(p, prop):
            made = execute(compute, {n: t.numpy() for n, t in tensors.items()})[prop.result].value
            got = np.where(np.isnan(made), got, made)
        np.testing.assert_allclose(got, want[prop].numpy(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("text", "schedule", "reason"),
    [
        (SUM.format(op="max"), "m:8 k:8 | fma | split_k=3", "does not divide the 5 steps of max(...)"),
        (SUM.format(op="max"), "m:8 k:8 | fma | split_k=5 reduce=atomic", "reduce=atomic adds, s is max"),
        (SUM.format(op="sum"), "m:16 k:16 | mma", "has no second operand"),
        (
            SUM.format(op="sum").replace("store Y[m]", "store Z[m] where m < 9 = s\n store Y[m]"),
            "m:8 k:8 | fma | split_k=4 late=1",
            "Z does, which has no place for some that are stored in Y",
        ),
        (APART.replace("X[b, m, k]", "X[b, m, 0]"), "m:16 n:16 k:16 | mma", "X is the same along k"),
        (APART, "m:16 n:16 k:16 | mma | merge=4", "X has no dimension of groups and features"),
        (PAD, "q:4 | fma", "there is no axis 'q' in pad; its axes are m"),
    ],
)
def test_refusals(text: str, schedule: str, reason: str) -> None:
    compute = parse(text)
    assert reason in str(why_not(Schedule.parse(schedule), compute, SM90))
    with pytest.raises(ScheduleError):
        build_compute(compute, SM90, Schedule.parse(schedule))


def test_reductions_over_other_axes_are_kernels_one_after_another() -> None:
    norm = parse(
        "compute most\n axes m=3 k=8\n read x = X[m, k]\n let s = sum(x; k)\n"
        "let q = max(s; m)\n store Y[0] = q"
    )
    x = np.random.default_rng(0).standard_normal((3, 8))
    np.testing.assert_allclose(execute(norm, {"X": x})["Y"].value, x.sum(1).max(), rtol=1e-12)
    plan = build_compute(norm, SM90)
    assert [s.compute.name for s in plan.steps] == ["most_1", "most_2"]
    assert [*plan.workspaces] == ["s_kept"]
    assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(norm, plan) if j.problem] == []
    assert "s is reduced over k, another one over m; one" in str(why_not(Schedule(), norm, SM90))


def test_what_is_added_after_sums_along_other_axes_is_added_once() -> None:
    """As the kernels do, each of which has the axes that its value and its places depend on."""
    made = parse(
        "compute adds\n tensor I i64 [4]\n tensor Y f32 [3]\n axes m=5 k=4\n read i = I[k]\n"
        "read x = X[m, k]\n let s = sum(x; m)\n let t = sum(x; m k)\n store Y[i] += s + t"
    )
    draw = np.random.default_rng(0)
    x, i = draw.standard_normal((5, 4)), draw.integers(0, 3, 4)
    want = np.zeros(3)
    np.add.at(want, i, x.sum(0) + x.sum())
    np.testing.assert_allclose(execute(made, {"X": x, "I": i})["Y"].value, want, rtol=1e-12)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (
            "let s = sum(x; k)\n store Y[m] = s + x",
            "Y has one place for all of k, which has one value for",
        ),
        (
            "let s = sum(x; k)\n store Y[m] = s + k",
            "Y has one place for all of k, which has one value for",
        ),
        ("let s = sum(x; k)\n store Y[0] = s\n store Z[m] = s", "Y has one place for all of m"),
        ("store Y[m] = x", "Y has one place for all of k, which is not reduced; expected k in its"),
    ],
)
def test_what_one_loop_nest_cannot_do(steps: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        build_compute(parse(f"compute p\n axes m=3 k=8\n read x = X[m, k]\n {steps}"), SM90)


@pytest.mark.parametrize("target", ["sm_90", "sm_80", "gfx942"])
def test_schedules_are_found_for_tensors_of_any_rank(target: str) -> None:
    """Vectors beside batches have no channels to copy, groups that lie apart none to merge."""
    vectors = parse(
        "compute p\n axes b=33 m=5 k=3\n read x = X[b*2 + k, m]\n read w = W[b*3]\n"
        "store C[b, m] = sum(x*w; k)"
    )
    for compute in (vectors, parse(APART)):
        assert build_compute(compute, TARGETS[target]).steps


def test_operands_are_checked() -> None:
    plan = build_compute(parse(PRODUCT), TARGETS["interpreter"])
    tensors = ComputationCase(parse(PRODUCT)).tensors("cpu")
    with pytest.raises(TensorError, match="V: expected a tensor, got NoneType"):
        plan.launch(**{n: t for n, t in tensors.items() if n != "V"})
    with pytest.raises(TensorError, match="A: expected torch.float16, got torch.float32"):
        plan.launch(**tensors | {"A": tensors["A"].float()})
    with pytest.raises(TensorError, match=r"A: expected shape .* strides \(33, 1\), got"):
        plan.launch(**tensors | {"A": tensors["A"].T.contiguous().T})


def test_a_product_of_two_types_is_for_multiply_adds() -> None:
    """The matrix unit takes one type, or any two of 8 bits; Triton refuses others."""
    text = """compute p
    tensor X {} [64, 64]
    tensor W {} [64, 64]
    axes m=64 n=64 | k=64
    read x = X[m, k]
    read w = W[n, k]
    let  s = sum(x*w; k)
    store Y[m, n] = s"""
    for x, w, unit in (("bf16", "f16", "fma"), ("f16", "f32", "fma"), ("f8e4m3", "f8e5m2", "mma")):
        assert heuristics.default(parse(text.format(x, w)), TARGETS["sm_90"]).unit == unit
    mixed = Schedule.parse("m:16 n:16 k:16 | mma")
    assert "two factors of one type, not bf16 by f16" in str(
        why_not(mixed, parse(text.format("bf16", "f16")), TARGETS["sm_90"])
    )
