"""Sums of 8-bit floats that move to f32: which problems ask for it, and the schedules chosen for them."""

from __future__ import annotations

import pytest

from transconv.conv import ConvProblem, Prop, compiler
from transconv.cost import count
from transconv.target import TARGETS

LAYER = "mb128ic256ih14oc256oh14kh3ph1"
TYPES = {
    Prop.FWD: "f8e4m3:f8e4m3:bf16",
    Prop.BWD_D: "bf16:f8e4m3:f8e5m2",
    Prop.BWD_W: "f8e4m3:bf16:f8e5m2",
}


@pytest.mark.every(2)
@pytest.mark.parametrize("prop", Prop)
def test_products_do_not_wait_for_registers(prop: Prop) -> None:
    p = ConvProblem.parse(f"{LAYER} dt={TYPES[prop]} tag=nhwc math=ieee")
    assert p.math == "ieee" and str(p).endswith("math=ieee")
    plan = compiler.plan(p, prop, TARGETS["sm_90"])
    step = next(s for s in plan.steps if s.compute.factors is not None)
    wide = step.schedule.pack == "a.b.f16"  # products of f16 are summed in f32
    moved = "max_num_imprecise_acc=" in step.source or "acc = acc + even" in step.source
    assert moved != wide
    assert not count(step.schedule, step.compute, TARGETS["sm_90"]).serial


def test_only_products_of_8_bit_floats_have_such_sums() -> None:
    for types in ("bf16:f8e4m3:bf16", "bf16", "s8:s8:s8"):
        assert ConvProblem.parse(f"{LAYER} dt={types} math=ieee").math == "tf32"
