"""Sizes outside of what a plan requires never reach a kernel, by each kind of requirement."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from transconv.compute import parse
from transconv.conv import ConvProblem, Prop, any_size, marked
from transconv.errors import TensorError
from transconv.ir import (
    LARGEST_SIZE,
    Expr,
    Lane,
    Sizes,
    Var,
    as_expr,
    maximum,
    minimum,
    substitute,
    text_of,
    value_at,
)
from transconv.passes.scalar.index_width import Reach
from transconv.runtime import Plan, build_compute
from transconv.runtime.plans import Required
from transconv.schedule import Schedule
from transconv.target import Target

SM90 = Target.parse("sm_90")
MAP = """compute scale
    sizes  {sizes}
    tensor X f32 [M, K]
    tensor Y f32 [M, K]
    axes   m=M k=K
    read   x = X[m, k]
    store  Y[m, k] = 2*x + 1"""
PRODUCT = """compute product
    sizes  M=32 in 1..4096, K=64 in 8..4096, K % 8 == 0
    tensor X f16 [M, K]
    tensor W f16 [64, K]
    tensor Y f16 [M, 64]
    axes   m=M n=64 | k=K
    read   x = X[m, k]
    read   w = W[n, k]
    store  Y[m, n] = sum(x*w; k)"""
BOXES = "m:32 n:16 k:16 | mma | a=box b=box | c=box stages=2 warps=4"
FAR = "mb2?ic16384ih4096?oc16oh4096kh3ph1 dt=f32 tag=nhwc"  # the example needs 64 bits
FAR_BOXES = "oh:4 ow:8 oc:16 ic:16 | mma | a=box b=box | c=box swap=1 stages=2 warps=4"
SMALL, SQUARE = "M=8 in 2..4096, K=8 in 1..64", "M=64 in 1..65536, K=64 in 1..65536"
LONG = "M=64 in 1..1048576, K=64 in 1..1048576"
# kind -> text, schedule, the last sizes inside, the first ones outside, and the requirement
KINDS: dict[str, tuple[str, str, dict[str, int], dict[str, int], str]] = {
    "least": (MAP.format(sizes=SMALL), "m.k:64 | fma", {"M": 2, "K": 8}, {"M": 1, "K": 8}, "2..4096"),
    "most": (MAP.format(sizes=SMALL), "m.k:64 | fma", {"M": 4096, "K": 8}, {"M": 4097, "K": 8}, "2..4096"),
    "divisor": (
        MAP.format(sizes=f"{SMALL}, K % 4 == 0"),
        "m.k:64 | fma",
        {"M": 3, "K": 12},
        {"M": 3, "K": 13},
        "(K % 4) == 0",
    ),
    "32 bits": (
        MAP.format(sizes=f"{SQUARE}, M*K < 2147400000"),
        "m.k:64 | fma",
        {"M": 46339, "K": 46340},
        {"M": 46340, "K": 46341},
        "(M * K) < 2147400000",
    ),
    "box": (PRODUCT, BOXES, {"M": 33, "K": 24}, {"M": 33, "K": 20}, "(K % 8) == 0"),
    "stride": (
        FAR,
        FAR_BOXES,
        {"MB": 1, "IH": 4095, "IW": 4096},
        {"MB": 1, "IH": 4097, "IW": 4096},
        "1099511627775",
    ),
    "grid": (
        MAP.format(sizes=LONG),
        "m:1 k:16 | fma",
        {"M": 1048576, "K": 32752},
        {"M": 1048576, "K": 32768},
        f"<= {LARGEST_SIZE}",
    ),
}


@cache
def built(text: str, schedule: str) -> Plan:
    if text.startswith("compute"):
        return build_compute(parse(text), SM90, Schedule.parse(schedule))
    plain, names = marked(text)
    (compute,) = any_size(ConvProblem.parse(plain), Prop.FWD, names)
    return build_compute(compute, SM90, Schedule.parse(schedule))


def tensors(plan: Plan, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """The tensors of a call of these sizes, without memory."""
    assert plan.required is not None
    with FakeTensorMode():
        return {
            t.name: torch.empty_strided(
                t.at(sizes).shape, t.at(sizes).layout.strides() or (), dtype=getattr(torch, t.dtype.torch)
            )
            for t in plan.required.tensors
        }


def without(required: Required, said: str) -> Required:
    """Planted: what a plan requires, less one requirement."""
    each = tuple(
        replace(s, least=1, most=LARGEST_SIZE) if said in str(s) else s for s in required.sizes.each
    )
    where = tuple(c for c in required.sizes.where if said not in text_of(c))
    assert (each, where) != (required.sizes.each, required.sizes.where)
    return Required(Sizes(each, where), required.tensors, required.about)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_refuses_what_is_just_outside(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, schedule, inside, outside, said = KINDS[kind]
    plan = built(text, schedule)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    started: list[Any] = []
    for step in plan.steps:
        assert step.triton.sizes is not None
        monkeypatch.setattr(step.triton, "run", lambda given, sizes: started.append(sizes))
    assert plan.at(inside).sizes == inside
    plan.launch(**tensors(plan, inside))
    assert started == [inside]
    for call in (lambda: plan.at(outside), lambda: plan.launch(**tensors(plan, outside))):
        with pytest.raises(TensorError) as told:
            call()
        assert said in str(told.value) and "\n" not in str(told.value)
    assert started == [inside]
    # No other requirement excludes these sizes: without this one they reach the kernel.
    assert plan.required is not None
    monkeypatch.setattr(plan, "required", without(plan.required, said))
    plan.launch(**tensors(plan, outside))
    assert started == [inside, outside]


def test_the_kernel_relies_on_it() -> None:
    """Why they are required: without a requirement the kernel would be another one, or wrong."""
    narrow, _ = KINDS["32 bits"][:2]
    wide = built(narrow.replace(", M*K < 2147400000", ""), "m.k:64 | fma")
    assert "int64" in wide.source and "int64" not in built(narrow, "m.k:64 | fma").source


def test_no_index_reaches_farther_than_is_said() -> None:
    """Drawn indices of a loop, a lane and two sizes: their largest values, against what Reach says."""
    kernel = built(MAP.format(sizes=f"{SQUARE}, M*K < 2147400000"), "m.k:64 | fma").steps[0].kernel
    m, k, i, lane = Var("M"), Var("K"), Var("i"), Lane("m", 4, 1)
    reach = Reach(kernel, 2**31 - 1, lambda e: e, lambda e: e in (i, m, k, lane))
    reach.assume(i < (m * k + 3) // 4)
    rng = random.Random(3)

    def drawn(depth: int) -> Expr:
        if not depth:
            return rng.choice([i, lane, m, k, as_expr(rng.randint(0, 5))])
        a, b = drawn(depth - 1), drawn(depth - 1)
        of_sizes = rng.choice([m, k, m * k, as_expr(rng.randint(1, 6))])
        return rng.choice(
            [
                a + b,
                a - b,
                a * b,
                a // of_sizes,
                a % of_sizes,
                minimum(a, b),
                maximum(a, b),
                i % (lane + 1),
            ]
        )

    for _ in range(150):
        index = drawn(3)
        far = reach.of(index)
        assert far is not None
        for sizes in ({"M": 1, "K": 1}, {"M": 5, "K": 3}, {"M": 2, "K": 8}):
            most = value_at(far, sizes)
            for turn in range(-(-sizes["M"] * sizes["K"] // 4)):
                for place in range(4):
                    at = substitute(index, {lane: as_expr(place)})
                    assert abs(value_at(at, {**sizes, "i": turn})) <= most, (str(index), str(far))
