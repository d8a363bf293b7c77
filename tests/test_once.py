"""The schedule word ``once``: which loads tell the L2 cache that their elements are not read again.
Results stay the same."""

from __future__ import annotations

import re

import pytest

from transconv.compute import Compute, parse, read_once
from transconv.conv import ConvProblem, Prop, computes
from transconv.ir import Kernel, Load, find
from transconv.runtime import build_compute
from transconv.schedule import Schedule, why_not
from transconv.target import Target
from transconv.verify.computation import Case

SM90 = Target.parse("sm_90")
SOFTMAX = """compute softmax
    tensor W f32 [k=64]
    axes   n=3 | k=64
    read   x = X[n, k]
    read   w = W[k]
    let    top = max(x; k)
    let    total = sum(exp(x - top); k)
    store  Y[n, k] = w * exp(x - top) / total"""
POOL = """compute pooled
    axes   n=5 o=16 | k=3
    read   x = X[n, o*2 + k]
    store  Y[n, o] = max(x; k)"""


@pytest.mark.parametrize("words, policies", [
    ("k:64", ["first"]), ("n:2 k:16 late=1", ["last", "last", "first"]), ("k:16 unroll=1", ["first"] * 4)])
def test_loads_say_what_is_read_again(words: str, policies: list[str]) -> None:
    """A row that is held is read once; one that each sweep reads again stays until the last sweep. ``W``
    is every row's."""
    compute = parse(SOFTMAX)
    plain, step = (build_compute(compute, SM90, Schedule.parse(f"{words} fma {more} stages=1")).steps[0]
                   for more in ("", "once=1"))
    assert re.findall(r'eviction_policy="evict_(\w+)"', step.source) == policies
    assert {x.tensor.name for x in find(step.kernel, Load) if x.evict} == {"X"}
    assert "evict" not in plain.source
    assert Kernel.parse(str(step.kernel)) is step.kernel
    judged = Case(compute).interpreted(step.kernel)
    assert not judged.problem, judged.problem


ROWS = """compute rows
    tensor T i64 [n=8]
    tensor X f32 [9, 16]
    axes   n=8 k=16
    read   t = T[n]
    read   x = X[t, k]
    store  Y[n, k] = x"""


@pytest.mark.parametrize("text, names", [(SOFTMAX, {"X"}), (POOL, set()), (ROWS, set())])
def test_shared_elements_stay(text: str, names: set[str]) -> None:
    """Windows overlap, indices repeat, and a weight belongs to all rows."""
    compute = parse(text)
    assert {t.name for t in read_once(compute)} == names
    kernel = build_compute(compute, SM90, Schedule.parse("fma once=1 stages=1 warps=1")).steps[0].kernel
    assert {x.tensor.name for x in find(kernel, Load) if x.evict} == names


def test_products_are_refused() -> None:
    compute: Compute
    (compute,) = computes(ConvProblem.parse("mb1ic16ih5oc16oh5kh3ph1 dt=f16"), Prop.FWD)
    reason = why_not(Schedule.parse("mb.oh.ow:16 oc:16 ic:16 | mma | once=1"), compute, SM90)
    assert reason is not None and reason.startswith("once=1 is for maps and reductions")
